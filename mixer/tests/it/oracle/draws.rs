//! Random phases over three sources.

use mixer::SourceFacts;
use proptest::prelude::*;

#[derive(Clone, Debug)]
pub(super) struct PhaseDraw {
    pub(super) seq_len: u32,
    pub(super) batch: BatchDraw,
    pub(super) steps: u64,
    pub(super) weights: Vec<u32>,
    /// The weights at the end of a ramp, and its curve.
    pub(super) ramp: Option<(Vec<u32>, &'static str)>,
    pub(super) defer: bool,
}

/// The sizes of a batch.
#[derive(Clone, Debug)]
pub(super) enum BatchDraw {
    Constant(u64),
    Ramp { from: u64, more: u64, every: u64, by: u64 },
    Table(Vec<(u64, u64)>),
}

impl BatchDraw {
    /// One more in its first step.
    pub(super) fn grown(&self) -> BatchDraw {
        match self.clone() {
            BatchDraw::Constant(batch) => BatchDraw::Constant(batch + 1),
            BatchDraw::Ramp { from, more, every, by } => {
                BatchDraw::Ramp { from: from + 1, more, every, by }
            }
            BatchDraw::Table(mut sizes) => {
                sizes[0].1 += 1;
                BatchDraw::Table(sizes)
            }
        }
    }

    fn text(&self) -> String {
        match self {
            BatchDraw::Constant(batch) => batch.to_string(),
            BatchDraw::Ramp { from, more, every, by } => {
                format!("{{ from = {from}, to = {}, every = {every}, by = {by} }}", from + more)
            }
            BatchDraw::Table(sizes) => {
                let mut step = 1;
                let pair = |(steps, size): &(u64, u64)| {
                    let pair = format!("{step} = {size}");
                    step += steps;
                    pair
                };
                format!("{{ {} }}", sizes.iter().map(pair).collect::<Vec<_>>().join(", "))
            }
        }
    }
}

fn batch_draw() -> impl Strategy<Value = BatchDraw> {
    prop_oneof![
        4 => (1u64..8).prop_map(BatchDraw::Constant),
        1 => (1u64..6, 1u64..6, 1u64..30, 1u64..4)
            .prop_map(|(from, more, every, by)| BatchDraw::Ramp { from, more, every, by }),
        1 => prop::collection::vec((1u64..40, 1u64..8), 1..5).prop_map(BatchDraw::Table),
    ]
}

impl PhaseDraw {
    pub(super) fn mix(&self) -> String {
        mix_text(&self.weights, self.ramp.as_ref())
    }

    pub(super) fn is_ramp(&self) -> bool {
        self.mix().contains("from")
    }
}

pub(super) fn named(weights: &[u32]) -> String {
    let named = ["a", "b", "c"].iter().zip(weights).filter(|(_, weight)| **weight > 0);
    let mix: Vec<String> = named.map(|(name, weight)| format!("{name} = {weight}")).collect();
    format!("{{ {} }}", mix.join(", "))
}

/// A mix, or a ramp where its ends differ.
pub(super) fn mix_text(weights: &[u32], ramp: Option<&(Vec<u32>, &'static str)>) -> String {
    let same = |to: &[u32]| {
        let cross = |(i, j): (usize, usize)| weights[i] * to[j] == weights[j] * to[i];
        [(0, 1), (1, 2), (0, 2)].into_iter().all(cross)
    };
    match ramp {
        Some((to, curve)) if !same(to) => {
            format!("{{ from = {}, to = {}, {curve} }}", named(weights), named(to))
        }
        _ => named(weights),
    }
}

pub(super) fn weights_draw(largest: u32) -> impl Strategy<Value = Vec<u32>> {
    let weight = prop_oneof![2 => Just(0u32), 3 => 1u32..50, 1 => Just(largest)];
    prop::collection::vec(weight, 3).prop_map(|mut weights| {
        if weights.iter().all(|&weight| weight == 0) {
            weights[0] = 1;
        }
        weights
    })
}

pub(super) fn ramp_draw() -> impl Strategy<Value = Option<(Vec<u32>, &'static str)>> {
    let curves = [
        "curve = \"linear\"",
        "curve = \"cosine\"",
        "curve = \"table\", table = [0.25, 0, 1, \"2/3\"]",
    ];
    prop::option::of((weights_draw(1000), prop::sample::select(curves.to_vec())))
}

pub(super) fn phase_draw() -> impl Strategy<Value = PhaseDraw> {
    let seq_len = prop::sample::select(vec![1u32, 2, 3, 4, 6, 12]);
    let sizes = (batch_draw(), prop_oneof![2 => 1u64..20, 1 => 20u64..250]);
    let mix = prop_oneof![
        3 => (weights_draw(100_000), Just(None)), 1 => (weights_draw(1000), ramp_draw()),
    ];
    (seq_len, sizes, mix, any::<bool>()).prop_map(
        |(seq_len, (batch, steps), (weights, ramp), defer)| PhaseDraw {
            seq_len,
            batch,
            steps,
            weights,
            ramp,
            defer,
        },
    )
}

pub(super) fn tokens_draw() -> impl Strategy<Value = u64> {
    prop_oneof![1u64..40, 1u64..3000, 12_000u64..26_000, Just(12_288u64), Just(12_289u64)]
}

/// A curriculum over sources `a`, `b`, `c` without a limit on epochs.
pub(super) fn curriculum_text(seed: u64, phases: &[PhaseDraw]) -> String {
    limited_text(seed, phases, [1_000_000; 3])
}

pub(super) fn limited_text(seed: u64, phases: &[PhaseDraw], max_epochs: [u64; 3]) -> String {
    let mut text = format!("store = \"s\"\nseed = {seed}\n");
    for (name, max_epochs) in ["a", "b", "c"].iter().zip(max_epochs) {
        text += &format!("[source.{name}]\nmax_epochs = {max_epochs}\n");
    }
    for (index, phase) in phases.iter().enumerate() {
        let PhaseDraw { seq_len, batch, steps, weights: _, ramp: _, defer } = phase;
        let batch = batch.text();
        text += &format!(
            "[[phase]]\nname = \"p{index}\"\nsteps = {steps}\nseq_len = {seq_len}\nbatch = {batch}\nmix = {}\n",
            phase.mix()
        );
        text += if *defer { "remainder = \"defer\"\n" } else { "" };
    }
    text
}

pub(super) fn facts(tokens: &[u64]) -> Vec<SourceFacts> {
    // Not in name order: the order of stores must not matter.
    [("c", 2), ("a", 0), ("b", 1)]
        .iter()
        .map(|&(name, i)| SourceFacts {
            name: name.to_owned(),
            tokens: tokens[i],
            documents: 1,
            unit: 12,
            selection: None,
        })
        .collect()
}
