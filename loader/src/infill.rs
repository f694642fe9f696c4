//! Fill-in-the-middle: which pieces of a sample are rearranged, and how (Bavarian et al. 2022, arXiv 2207.14255).
//!
//! A piece is the text of one document in one span of a sample. It is rearranged inside its own length, so positions,
//! boundaries and packing stay what they are:
//!
//! ```text
//! text   [begin] prefix | middle | suffix | 3 tokens left out [end]
//! PSM    [begin] <PRE> prefix <SUF> suffix <MID> middle [end]
//! SPM    [begin] <PRE> <SUF> suffix <MID> prefix middle [end]         the paper's second variant
//! ```
//!
//! The last three tokens of the text make place for the three sentinels. The store's begin and end tokens stay at the
//! ends. A piece with fewer than six tokens between them stays as it is.
//!
//! Every decision is a draw at the piece's address: the source, the epoch, and the piece's first token in the source.

use std::ops::Range;

use contract::draw::happens;
use contract::{Fault, Purpose, Result, draw};
use curriculum::{Fim, Sentinel};
use mixer::{Objective, SampleSpec};

/// The sentinels of a rearranged piece.
const SENTINELS: u32 = 3;

/// A piece is rearranged if it has a token for each sentinel and for each part.
const SHORTEST: u32 = 2 * SENTINELS;

/// How a piece is rearranged. Parts are counted in tokens of the piece, from its first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Infill {
    /// Which order.
    pub mode: InfillMode,
    /// The prefix.
    pub prefix: Range<u32>,
    /// The middle, which follows the prefix.
    pub middle: Range<u32>,
    /// The suffix, which follows the middle.
    pub suffix: Range<u32>,
    /// The tokens that make place for the sentinels.
    pub left_out: Range<u32>,
    /// The length of the piece.
    pub tokens: u32,
}

/// The order of a rearranged piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InfillMode {
    /// Prefix, suffix, middle.
    Psm,
    /// Suffix, prefix, middle.
    Spm,
}

/// What is at a place of a rearranged piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InfillToken {
    /// A token of the piece, counted from its first.
    Text(u32),
    /// The sentinel of this number in [`Fim::sentinels`].
    Sentinel(usize),
}

/// A piece of a sample.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// Its tokens, as numbered in the source's training stream.
    pub(crate) tokens: Range<u64>,
    /// Whether it has the first token of its document, and the last.
    pub(crate) ends: [bool; 2],
}

impl InfillMode {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            InfillMode::Psm => "psm",
            InfillMode::Spm => "spm",
        }
    }
}

impl Infill {
    /// How a piece of a sample is rearranged; `None` if it stays as it is. `held`: whether documents of the store have
    /// a begin token, and an end token.
    pub(crate) fn of(sample: &SampleSpec, held: [bool; 2], piece: &Piece) -> Option<Infill> {
        let Objective { key, fim, .. } = sample.objective.as_deref()?;
        let Fim { rate, spm, sentinels: _ } = fim.as_ref()?;
        let Piece { tokens, ends } = piece;
        let length = u32::try_from(tokens.end - tokens.start).ok()?;
        let begin = u32::from(held[0] && ends[0]);
        let end = length.saturating_sub(u32::from(held[1] && ends[1]));
        let text = end.checked_sub(begin).filter(|text| *text >= SHORTEST)? - SENTINELS;
        let key = key.nth(sample.epoch).nth(tokens.start);
        if !happens(key, Purpose::FillInMiddle, 0, *rate) {
            return None;
        }
        // Each cut is uniform over the places before, between and after the tokens, as in the paper.
        let cut = |index| {
            let wide = u128::from(draw(key, Purpose::FillInMiddle, index)) * u128::from(text + 1);
            begin + (wide >> 64) as u32
        };
        let (one, other) = (cut(2), cut(3));
        let (first, second) = (one.min(other), one.max(other));
        let spm = happens(key, Purpose::FillInMiddle, 1, *spm);
        Some(Infill {
            mode: if spm { InfillMode::Spm } else { InfillMode::Psm },
            prefix: begin..first,
            middle: first..second,
            suffix: second..begin + text,
            left_out: begin + text..end,
            tokens: length,
        })
    }

    /// What is at each place of the piece.
    pub fn places(&self) -> Vec<InfillToken> {
        use InfillToken::{Sentinel, Text};
        let Infill { mode, prefix, middle, suffix, left_out, tokens } = self;
        let part = |part: &Range<u32>| part.clone().map(Text).collect::<Vec<_>>();
        let [pre, mid, suf] = [0, 1, 2].map(|number| vec![Sentinel(number)]);
        let (prefix, middle, suffix, begin) =
            (part(prefix), part(middle), part(suffix), part(&(0..prefix.start)));
        let end = part(&(left_out.end..*tokens));
        match mode {
            InfillMode::Psm => [begin, pre, prefix, suf, suffix, mid, middle, end].concat(),
            InfillMode::Spm => [begin, pre, suf, suffix, mid, prefix, middle, end].concat(),
        }
    }
}

/// The ids of the sentinels, which opening a curriculum has resolved.
pub(crate) fn sentinel_ids(fim: &Fim) -> Result<[i32; 3]> {
    let mut ids = [0; 3];
    for (id, sentinel) in ids.iter_mut().zip(&fim.sentinels) {
        let found = match sentinel {
            Sentinel::Id(id) => i32::try_from(*id).ok(),
            Sentinel::Name(_) => None,
        };
        *id = found.ok_or_else(|| Fault::bug("a sentinel has no id"))?;
    }
    Ok(ids)
}
