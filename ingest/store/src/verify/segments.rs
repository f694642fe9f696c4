//! The segments of a stream's documents, whose chains the digest of the stream is made from.

use std::cmp::Ordering;

use contract::Digest;

use crate::manifest::StreamDigest;
use crate::{DocumentRecord, InputRecord};

/// A segment with documents.
pub(super) struct Segment {
    /// Its file, and its number there.
    pub(super) place: (usize, u64),
    chain: Digest,
}

/// The segments of documents that name their file.
pub(super) struct Segments {
    pub(super) all: Vec<Segment>,
    /// The place of the first document, even if its segment was removed since.
    pub(super) first: Option<(usize, u64)>,
}

impl Segments {
    /// The chain of the segment that this document belongs to, or why none does.
    pub(super) fn of(
        &mut self,
        record: &DocumentRecord,
        inputs: &[InputRecord],
    ) -> std::result::Result<&mut Digest, String> {
        let place = (record.file as usize, record.segment());
        let (file, segment) = place;
        self.first.get_or_insert(place);
        let shown = || format!("{} comes from segment {segment} of file {file}", record.shown_id());
        match inputs.get(file) {
            None => return Err(format!("{}, but the source has {}", shown(), inputs.len())),
            Some(input) if segment >= input.segments => {
                return Err(format!("{}, which has {}", shown(), input.segments));
            }
            Some(_) => {}
        }
        match self.all.last().map(|last| last.place.cmp(&place)) {
            Some(Ordering::Greater) => return Err(format!("{}, which has ended", shown())),
            Some(Ordering::Equal) => {}
            _ => self.all.push(Segment { place, chain: Digest::default() }),
        }
        let last = self.all.last_mut().map(|last| &mut last.chain);
        last.ok_or_else(shown)
    }
}

/// The digest of a stream with these segments.
pub(super) fn digest(segments: Vec<Segment>, inputs: &[InputRecord]) -> Digest {
    let (mut digest, mut segments) = (StreamDigest::default(), segments.into_iter().peekable());
    for (file, input) in inputs.iter().enumerate() {
        while let Some(segment) = segments.next_if(|segment| segment.place.0 == file) {
            digest.skip_to(segment.place.1);
            digest.segment(segment.chain);
        }
        digest.end_file(input.segments);
    }
    digest.finish()
}
