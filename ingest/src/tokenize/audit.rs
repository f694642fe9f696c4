//! The oracle audit: a keyed sample of the documents is encoded again by the reference.
//!
//! There are two samples: a thousandth of all documents, up to 0.2 % of the text; and, so that small corpora are
//! checked too, the [`FLOOR_DOCUMENTS`] documents with the lowest keys, up to [`FLOOR_BYTES`] in total. Keys are random
//! numbers of the content, so the samples do not depend on workers or kills.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use contract::{Fault, Key, Purpose, Ratio, Result, draw};

use super::Tokenizer;

/// The number of documents in the sample that does not depend on the amount of text.
pub const FLOOR_DOCUMENTS: usize = 32;

/// The limit on the size of that sample.
pub const FLOOR_BYTES: u64 = 1_000_000;

/// The share of documents that are sampled.
const SHARE: Ratio = Ratio::new(1, 1000);

/// The share of the text that this sample may reach.
const TEXT_SHARE: Ratio = Ratio::new(2, 1000);

/// The size of the piece that is checked, with both encoders, of a document that is too large to be encoded twice.
const PIECE_BYTES: usize = 2_000;

/// A document that the audit may check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The name of the document in an error.
    pub place: String,
    /// The document's text, or a piece.
    pub text: String,
    /// The ids that are stored, without begin and end; `None` for a piece.
    pub ids: Option<Vec<u32>>,
}

/// The key of a document with this content.
pub fn key_of(content: u128) -> u64 {
    draw(Key::from_seed(0).child("audit"), Purpose::Audit, content as u64)
}

/// Whether a document with this key is in the sample by share.
fn in_share(key: u64) -> bool {
    u128::from(key) * u128::from(SHARE.den()) < u128::from(SHARE.num()) << 64
}

/// The piece that represents a large text, at an offset determined by the key.
pub fn piece(text: &str, key: u64) -> &str {
    let room = text.len().saturating_sub(PIECE_BYTES) as u128;
    let start = text.floor_char_boundary(((room * u128::from(key)) >> 64) as usize);
    &text[start..text.floor_char_boundary(start + PIECE_BYTES)]
}

/// Tells workers which documents' texts to keep: a superset of those that the audit checks.
#[derive(Debug)]
pub struct Wanted(AtomicU64);

impl Default for Wanted {
    fn default() -> Self {
        Wanted(AtomicU64::new(u64::MAX))
    }
}

impl Wanted {
    /// Whether a document with this key may be checked.
    pub fn may_want(&self, key: u64) -> bool {
        in_share(key) || key <= self.0.load(Ordering::Relaxed)
    }
}

/// The audit of one part, fed in input order.
#[derive(Debug, Default)]
pub struct Audit {
    /// Bytes of text seen.
    pub text_bytes: u64,
    /// The number of documents sampled by share.
    pub documents: u64,
    /// The size of their text.
    pub audited_bytes: u64,
    floor: BTreeMap<(u64, u128), Sample>,
}

impl Audit {
    /// Adds a document; returns its sample if it is sampled by share and to be checked now.
    pub fn offer(
        &mut self,
        content: u128,
        text_bytes: u64,
        sample: Option<Sample>,
        wanted: &Wanted,
    ) -> Option<Sample> {
        self.text_bytes += text_bytes;
        let key = key_of(content);
        let sample = sample?;
        self.offer_floor(key, content, &sample, wanted);
        let after = self.audited_bytes + sample.text.len() as u64;
        let fits = u128::from(after) * u128::from(TEXT_SHARE.den())
            <= u128::from(self.text_bytes) * u128::from(TEXT_SHARE.num());
        if !in_share(key) || !fits {
            return None;
        }
        self.documents += 1;
        self.audited_bytes = after;
        Some(sample)
    }

    fn offer_floor(&mut self, key: u64, content: u128, sample: &Sample, wanted: &Wanted) {
        let last = self.floor.last_key_value().map(|(last, _)| *last);
        if self.floor.len() == FLOOR_DOCUMENTS && last.is_some_and(|last| (key, content) >= last) {
            return;
        }
        // The first of equal documents represents all of them.
        if self.floor.contains_key(&(key, content)) {
            return;
        }
        self.floor.insert((key, content), sample.clone());
        if self.floor.len() > FLOOR_DOCUMENTS {
            self.floor.pop_last();
        }
        self.publish(wanted);
    }

    fn publish(&self, wanted: &Wanted) {
        if self.floor.len() == FLOOR_DOCUMENTS
            && let Some(((key, _), _)) = self.floor.last_key_value()
        {
            wanted.0.store(*key, Ordering::Relaxed);
        }
    }

    /// The remaining documents to check, once all were seen: in the order of their keys, as many as fit.
    pub fn finish(&mut self) -> Vec<Sample> {
        let mut room = FLOOR_BYTES;
        let mut chosen = Vec::new();
        for (_, sample) in std::mem::take(&mut self.floor) {
            let bytes = sample.text.len() as u64;
            if bytes < room {
                room -= bytes;
                self.documents += 1;
                self.audited_bytes += bytes;
                chosen.push(sample);
            }
        }
        chosen
    }
}

/// Encodes `sample` with the reference and refuses the first difference.
pub fn check(tokenizer: &Tokenizer, sample: &Sample) -> Result<()> {
    let found = match &sample.ids {
        Some(ids) => ids.clone(),
        None => tokenizer.encode(&sample.text)?,
    };
    let wanted = tokenizer.encode_by_reference(&sample.text)?;
    if found == wanted {
        return Ok(());
    }
    let at = found.iter().zip(&wanted).take_while(|(a, b)| a == b).count();
    let near = |ids: &[u32]| format!("{:?}", &ids[at.min(ids.len())..ids.len().min(at + 4)]);
    Err(Fault::mismatch(format!("two tokenizer libraries disagree at token {at} of this document"))
        .at(sample.place.clone())
        .found(format!("{} ({})", near(&found), tokenizer.encoder()))
        .wanted(format!("{} ({})", near(&wanted), super::encoder::REFERENCE))
        .hint("build with --encoder reference, and report the tokenizer and the document"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(sizes: &[u64]) -> (Audit, Vec<Sample>, Vec<Sample>) {
        let (mut audit, wanted) = (Audit::default(), Wanted::default());
        let mut drawn = Vec::new();
        for (index, size) in sizes.iter().enumerate() {
            let content = u128::from(contract::digest::block_sum(&(index as u64).to_le_bytes()));
            let sample =
                Sample { place: index.to_string(), text: "x".repeat(*size as usize), ids: None };
            let sample = wanted.may_want(key_of(content)).then_some(sample);
            drawn.extend(audit.offer(content, *size, sample, &wanted));
        }
        let floor = audit.finish();
        (audit, drawn, floor)
    }

    proptest! {
        #[test]
        fn a_small_corpus_is_audited_whole_and_a_large_one_within_bounds(
            sizes in prop::collection::vec(1u64..60_000, 0..200),
        ) {
            let (_, drawn, floor) = run(&sizes);
            let text: u64 = sizes.iter().sum();
            let bytes: u64 = drawn.iter().map(|s| s.text.len() as u64).sum();
            prop_assert!(bytes * 1000 <= text * 2);
            prop_assert!(floor.iter().map(|s| s.text.len() as u64).sum::<u64>() < FLOOR_BYTES);
            // The 32 documents with the lowest keys, found by sorting all of them.
            let mut keys: Vec<(u64, usize)> = (0..sizes.len())
                .map(|i| (key_of(u128::from(contract::digest::block_sum(&(i as u64).to_le_bytes()))), i)).collect();
            keys.sort_unstable();
            keys.truncate(FLOOR_DOCUMENTS);
            if keys.iter().map(|(_, i)| sizes[*i]).sum::<u64>() < FLOOR_BYTES {
                let wanted: Vec<String> = keys.iter().map(|(_, i)| i.to_string()).collect();
                prop_assert_eq!(floor.into_iter().map(|s| s.place).collect::<Vec<_>>(), wanted);
            }
        }

        #[test]
        fn a_piece_is_text_of_the_document(text in "\\PC{0,3000}", key: u64) {
            let piece = piece(&text, key);
            prop_assert!(text.contains(piece) && piece.len() <= PIECE_BYTES);
            prop_assert!(text.len() < PIECE_BYTES || piece.len() > PIECE_BYTES - 8);
        }
    }

    #[test]
    fn a_large_corpus_is_drawn_from_in_every_part() {
        let sizes = vec![100; 200_000];
        let (audit, drawn, floor) = run(&sizes);
        assert_eq!(floor.len(), FLOOR_DOCUMENTS);
        assert_eq!(audit.documents as usize, drawn.len() + floor.len());
        // 200 are expected; five standard deviations are 71.
        assert!(drawn.len().abs_diff(200) < 71, "{}", drawn.len());
        let late = drawn.iter().filter(|s| s.place.parse::<u32>().unwrap() >= 100_000).count();
        assert!(late > 50, "{late}");
    }
}
