//! A source is either one text cut into windows, or packed documents: one interface to both.

use std::sync::Arc;

use contract::{Fault, Result};
use curriculum::Phase;

use crate::composition::Composition;
use crate::order::{Cursor, SourceOrder};
use crate::packs::{PackOrder, PackSegment, PackTable};
use crate::sample::{SourceFacts, Span};
use crate::segment::SourceSegment;

/// The order in which a source is read.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    Windows(SourceOrder),
    Packs(PackOrder),
}

/// A source during one segment of a phase.
#[derive(Clone, Debug)]
pub(crate) enum Segment {
    Windows(SourceOrder, SourceSegment),
    Packs(PackSegment),
}

impl Order {
    /// The order of a source under `seed`; by `packs`, if given.
    pub(crate) fn new(seed: u64, facts: &SourceFacts, packs: Option<&Arc<dyn PackTable>>) -> Self {
        let SourceFacts { name, tokens, unit, .. } = facts;
        match packs {
            Some(table) => Order::Packs(PackOrder::new(seed, name, Arc::clone(table))),
            None => Order::Windows(SourceOrder::new(seed, name, *tokens, *unit)),
        }
    }

    /// The segment that begins at `start`. A source not packed at the phase's length has been refused before.
    pub(crate) fn segment(&self, start: Cursor, phase: &Phase) -> Result<Segment> {
        Ok(match self {
            Order::Windows(order) => {
                let segment = SourceSegment::new(order, start, phase.seq_len, phase.remainder);
                Segment::Windows(order.clone(), segment)
            }
            Order::Packs(order) => {
                let missing =
                    || Fault::bug("a phase has a length at which its source is not packed");
                let length = order.length(phase.seq_len).ok_or_else(missing)?;
                Segment::Packs(order.segment(start, length))
            }
        })
    }

    /// Tokens served from the start of the run to `cursor`.
    pub(crate) fn tokens_before(&self, cursor: &Cursor) -> u64 {
        match self {
            Order::Windows(order) => order.tokens_before(cursor),
            Order::Packs(order) => order.tokens_before(cursor),
        }
    }

    /// Epochs begun up to `cursor`.
    pub(crate) fn epochs_begun(&self, cursor: &Cursor) -> u64 {
        match self {
            Order::Windows(_) => cursor.epoch + u64::from(cursor.next > 0),
            Order::Packs(order) => order.epochs_begun(cursor),
        }
    }
}

impl Segment {
    /// The source's position when the segment began.
    pub(crate) fn start(&self) -> &Cursor {
        match self {
            Segment::Windows(_, segment) => &segment.start,
            Segment::Packs(segment) => &segment.start,
        }
    }

    /// The epoch and the text of sample `ordinal`.
    pub(crate) fn text(&self, ordinal: u64) -> Result<(u64, Vec<Span>)> {
        match self {
            Segment::Windows(order, segment) => Ok(segment.text(order, ordinal)),
            Segment::Packs(segment) => segment.text(ordinal),
        }
    }

    /// The source's position after `samples` samples.
    pub(crate) fn after(&self, samples: u64) -> Cursor {
        match self {
            Segment::Windows(order, segment) => segment.after(order, samples),
            Segment::Packs(segment) => segment.after(samples),
        }
    }

    /// How many samples the phase can take before epoch number `epochs` (from 0) of the source would begin.
    pub(crate) fn samples_within(&self, epochs: u64) -> u64 {
        match self {
            Segment::Windows(_, segment) => segment.samples_within(epochs),
            Segment::Packs(segment) => segment.samples_within(epochs),
        }
    }

    /// The composition of the first `samples` samples.
    pub(crate) fn composition(&self, samples: u64) -> Composition {
        match self {
            Segment::Windows(order, segment) => segment.composition(order, samples),
            Segment::Packs(segment) => segment.composition(samples),
        }
    }
}
