//! The order of a source with packed documents: the packs of each declared length, permuted anew in each epoch.
//!
//! The content of packs is in a table next to the store, made once ([`crate::fit`]) and read through [`PackTable`].
//! Here a pack is only a number. No document is packed at two lengths, so each length has epochs of its own, and a
//! change of `seq_len` leaves no remainder.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use contract::{Digest, Key, Permutation, Result};

use crate::composition::Composition;
use crate::order::Cursor;
use crate::sample::Span;

/// The packs of a source, wherever they are stored.
pub trait PackTable: Debug + Send + Sync {
    /// The digest of the whole table.
    fn digest(&self) -> Digest;
    /// The packs of each declared length, in ascending order of length.
    fn lengths(&self) -> &[PackedLength];
    /// The text of pack `pack` of length number `length`.
    fn spans(&self, length: usize, pack: u64) -> Result<Vec<Span>>;
    /// The places of tokens of the stream, each token once.
    fn places(&self, tokens: Range<u64>) -> Result<Vec<PackPlace>>;
}

/// The packs of one length: first the full ones of contiguous text, then the full ones of several pieces, then those
/// with free space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedLength {
    /// Tokens in a sequence.
    pub seq_len: u32,
    /// Full packs of contiguous text.
    pub contiguous: u64,
    /// Full packs of several pieces.
    pub joined: u64,
    /// Padding in each pack that is not full.
    pub padding: Vec<u32>,
    /// Documents packed at this length.
    pub documents: u64,
    /// How many of them are longer than a sequence, and so are cut.
    pub cut: u64,
}

/// A run of contiguous tokens in a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackPlace {
    /// Index of the length.
    pub length: usize,
    /// The pack.
    pub pack: u64,
    /// The offset in the pack of the first of the tokens.
    pub offset: u32,
    /// The tokens, counted in the stream.
    pub tokens: Range<u64>,
}

/// The order of a source with packed documents.
#[derive(Clone, Debug)]
pub(crate) struct PackOrder {
    key: Key,
    table: Arc<dyn PackTable>,
}

/// A source with packed documents during one segment of a phase.
#[derive(Clone, Debug)]
pub(crate) struct PackSegment {
    order: PackOrder,
    /// Index of the phase's length.
    length: usize,
    /// The source's position when the segment began.
    pub(crate) start: Cursor,
}

impl PackedLength {
    /// Packs of this length.
    pub fn packs(&self) -> u64 {
        self.contiguous + self.joined + self.padding.len() as u64
    }

    /// Tokens in them, without padding.
    pub fn tokens(&self) -> u64 {
        let padding: u64 = self.padding.iter().map(|tokens| u64::from(*tokens)).sum();
        self.packs() * u64::from(self.seq_len) - padding
    }

    /// The padding of a pack.
    fn padding(&self, pack: u64) -> u64 {
        match pack.checked_sub(self.contiguous + self.joined) {
            Some(padded) => u64::from(self.padding[padded as usize]),
            None => 0,
        }
    }
}

impl PackOrder {
    /// The order of the source `name` under `seed`.
    pub(crate) fn new(seed: u64, name: &str, table: Arc<dyn PackTable>) -> Self {
        PackOrder { key: Key::from_seed(seed).child("packs").child(name), table }
    }

    /// The index of length `seq_len`.
    pub(crate) fn length(&self, seq_len: u32) -> Option<usize> {
        self.table.lengths().iter().position(|length| length.seq_len == seq_len)
    }

    fn permutation(&self, length: usize, epoch: u64) -> Permutation {
        let PackedLength { seq_len, .. } = self.table.lengths()[length];
        let key = self.key.nth(u64::from(seq_len)).nth(epoch);
        Permutation::new(key, self.table.lengths()[length].packs())
    }

    /// Tokens in the first `packs` packs served of a length.
    fn tokens(&self, length: usize, packs: u64) -> u64 {
        let of = &self.table.lengths()[length];
        let (epoch, rest) = (packs / of.packs(), packs % of.packs());
        let permutation = self.permutation(length, epoch);
        // Iterates over the shorter list: the packs served, or the packs with padding.
        let padding: u64 = if rest <= of.padding.len() as u64 {
            (0..rest).map(|place| of.padding(permutation.forward(place))).sum()
        } else {
            let first = of.contiguous + of.joined;
            let served = (first..of.packs()).filter(|pack| permutation.inverse(*pack) < rest);
            served.map(|pack| of.padding(pack)).sum()
        };
        epoch * of.tokens() + rest * u64::from(of.seq_len) - padding
    }

    /// Tokens served from the start of the run to `cursor`.
    pub(crate) fn tokens_before(&self, cursor: &Cursor) -> u64 {
        let served = cursor.packs.iter().enumerate().filter(|(_, packs)| **packs > 0);
        served.map(|(length, packs)| self.tokens(length, *packs)).sum()
    }

    /// Epochs begun: the maximum over the lengths.
    pub(crate) fn epochs_begun(&self, cursor: &Cursor) -> u64 {
        let begun = |(packs, of): (&u64, &PackedLength)| packs.div_ceil(of.packs().max(1));
        cursor.packs.iter().zip(self.table.lengths()).map(begun).max().unwrap_or(0)
    }

    /// The segment that begins at `start` with sequences of length number `length`, which must have packs.
    pub(crate) fn segment(&self, mut start: Cursor, length: usize) -> PackSegment {
        start.packs.resize(self.table.lengths().len(), 0);
        PackSegment { order: self.clone(), length, start }
    }
}

impl PackSegment {
    /// The packs of the phase's length.
    pub(crate) fn size(&self) -> &PackedLength {
        &self.order.table.lengths()[self.length]
    }

    /// Packs of the phase's length served before the segment.
    pub(crate) fn served(&self) -> u64 {
        self.start.packs[self.length]
    }

    /// The epoch and the text of sample `ordinal`.
    pub(crate) fn text(&self, ordinal: u64) -> Result<(u64, Vec<Span>)> {
        let (at, packs) = (self.served() + ordinal, self.size().packs());
        let epoch = at / packs;
        let pack = self.order.permutation(self.length, epoch).forward(at % packs);
        Ok((epoch, self.order.table.spans(self.length, pack)?))
    }

    /// The source's position after `samples` samples.
    pub(crate) fn after(&self, samples: u64) -> Cursor {
        let mut cursor = self.start.clone();
        cursor.packs[self.length] += samples;
        cursor
    }

    /// How many samples the phase can take before epoch number `epochs` (from 0) of its length would begin.
    pub(crate) fn samples_within(&self, epochs: u64) -> u64 {
        epochs.saturating_mul(self.size().packs()).saturating_sub(self.served())
    }

    /// The composition of the first `samples` samples.
    pub(crate) fn composition(&self, samples: u64) -> Composition {
        let count = |packs: Range<u64>| {
            self.count(&packs, self.served() + samples) - self.count(&packs, self.served())
        };
        let of = self.size();
        let (joined, padded) = (of.contiguous, of.contiguous + of.joined);
        Composition::of(samples, count(joined..padded), count(padded..of.packs()))
    }

    /// How many of the first `served` packs served, over all epochs, are among `packs`.
    fn count(&self, packs: &Range<u64>, served: u64) -> u64 {
        let all = self.size().packs();
        let (epoch, rest) = (served / all, served % all);
        let permutation = self.order.permutation(self.length, epoch);
        let inside = if rest <= packs.end - packs.start {
            (0..rest).filter(|place| packs.contains(&permutation.forward(*place))).count()
        } else {
            packs.clone().filter(|pack| permutation.inverse(*pack) < rest).count()
        };
        epoch * (packs.end - packs.start) + inside as u64
    }

    /// All places of these tokens among the first `samples` samples: the inverse of [`Self::text`].
    pub(crate) fn visits(&self, tokens: Range<u64>, samples: u64) -> Result<Vec<(u64, PackPlace)>> {
        let mut found = Vec::new();
        let (first, packs) = (self.served(), self.size().packs());
        for place in self.order.table.places(tokens)? {
            if place.length != self.length {
                continue;
            }
            for epoch in first / packs..=(first + samples - 1) / packs {
                let at =
                    epoch * packs + self.order.permutation(self.length, epoch).inverse(place.pack);
                let ordinal = at.checked_sub(first).filter(|ordinal| *ordinal < samples);
                found.extend(ordinal.map(|ordinal| (ordinal, place.clone())));
            }
        }
        Ok(found)
    }
}
