//! What the model is asked to predict of a source's text, where that is not each next token with the same weight.

use std::fmt;
use std::sync::Arc;

use contract::{Hasher, Key, Ratio};
use curriculum::{Curriculum, Fim, LabelMask, Sentinel};

/// The loss weight of a source that states none.
const ONE: Ratio = Ratio::new(1, 1);

/// The objective of a source.
///
/// Whatever is random about it is sampled by the address of the text, never by the sample before: a sample can be
/// computed alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Objective {
    /// The key of all draws of this source: of the curriculum's seed and the source's name.
    pub key: Key,
    /// Which pieces are rearranged for fill-in-the-middle, if any.
    pub fim: Option<Fim>,
    /// Which labels are left out, if any.
    pub mask: Option<LabelMask>,
    /// What the loss of each label is multiplied by in the gradient.
    pub loss_weight: Ratio,
}

impl Objective {
    /// Whether tokens or labels are others than the text's own; a weight alone changes neither.
    pub fn changes_text(&self) -> bool {
        self.fim.is_some() || self.mask.is_some()
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Objective { key: _, fim, mask, loss_weight } = self;
        let mut parts = Vec::new();
        if let Some(Fim { rate, spm, sentinels: _ }) = fim {
            parts.push(format!("fill-in-the-middle in {rate} of the pieces, {spm} of them SPM"));
        }
        if let Some(LabelMask { every, context }) = mask {
            parts.push(format!("1 in {every} tokens is no label, by the {context} before it"));
        }
        if *loss_weight != ONE {
            parts.push(format!("loss weight {loss_weight}"));
        }
        f.write_str(&parts.join("; "))
    }
}

impl Objective {
    /// The objective of `source`; `None` if it is each next token.
    pub(crate) fn of(curriculum: &Curriculum, source: &str) -> Option<Arc<Objective>> {
        let (fim, mask) = (curriculum.fim(source).cloned(), curriculum.mask(source).copied());
        let key = Key::from_seed(curriculum.seed).child("objective").child(source);
        let loss_weight = curriculum.loss_weight(source);
        let is_plain = fim.is_none() && mask.is_none() && loss_weight == ONE;
        (!is_plain).then(|| Arc::new(Objective { key, fim, mask, loss_weight }))
    }

    /// The loss weight as the trainer multiplies by it.
    pub fn factor(&self) -> f32 {
        (self.loss_weight.num() as f64 / self.loss_weight.den() as f64) as f32
    }

    /// Hashes what decides tokens, labels and their weight.
    pub(crate) fn feed(&self, hasher: &mut Hasher) {
        let Objective { key: _, fim, mask, loss_weight } = self; // The key follows from the seed and the name.
        if let Some(Fim { rate, spm, sentinels }) = fim {
            hasher.tag("fim.v1").u64(rate.num()).u64(rate.den()).u64(spm.num()).u64(spm.den());
            for sentinel in sentinels {
                match sentinel {
                    Sentinel::Id(id) => hasher.u64(u64::from(*id)),
                    Sentinel::Name(name) => hasher.str(name),
                };
            }
        }
        if let Some(LabelMask { every, context }) = mask {
            hasher.tag("mask.v1").u64(*every).u64(u64::from(*context));
        }
        if *loss_weight != ONE {
            hasher.tag("loss_weight.v1").u64(loss_weight.num()).u64(loss_weight.den());
        }
    }
}
