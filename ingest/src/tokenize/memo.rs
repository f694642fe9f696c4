//! The ids of what was encoded before, within a bound of memory.

use contract::Result;
use xxhash_rust::xxh3::xxh3_64;

/// Places of the table, a power of two.
const PLACES: usize = 1 << 17;

/// Entries after which all is forgotten: what recurs is soon known again.
const ENTRIES_MAX: usize = PLACES / 2;

/// A longer text is not kept: it hardly recurs.
const TEXT_MAX: usize = 64;

/// Bytes of all texts, and ids of all of them, after which all is forgotten.
const BYTES_MAX: usize = 1 << 22;

/// One entry: where its text and its ids lie. Without a text: a free place.
#[derive(Clone, Copy, Default)]
struct Place {
    check: u32,
    text: u32,
    ids: u32,
    text_length: u16,
    ids_length: u16,
}

/// Texts with their ids.
#[derive(Default)]
pub(super) struct Memo {
    places: Vec<Place>,
    entries: usize,
    texts: Vec<u8>,
    ids: Vec<u32>,
}

impl Memo {
    /// Appends the ids of `text`, which is not empty; `encode` is asked where it is new.
    pub(super) fn extend(
        &mut self,
        out: &mut Vec<u32>,
        text: &str,
        encode: impl Fn(&str) -> Result<Vec<u32>>,
    ) -> Result<()> {
        if text.len() > TEXT_MAX {
            out.extend_from_slice(&encode(text)?);
            return Ok(());
        }
        let hash = xxh3_64(text.as_bytes());
        let check = (hash >> 32) as u32;
        let mut at = hash as usize % PLACES;
        while let Some(place) = self.places.get(at).filter(|place| place.text_length > 0) {
            if place.check == check && self.text(place) == text.as_bytes() {
                let from = place.ids as usize;
                out.extend_from_slice(&self.ids[from..from + usize::from(place.ids_length)]);
                return Ok(());
            }
            at = (at + 1) % PLACES;
        }
        let ids = encode(text)?;
        out.extend_from_slice(&ids);
        self.keep(hash, text, &ids);
        Ok(())
    }

    fn text(&self, place: &Place) -> &[u8] {
        let from = place.text as usize;
        &self.texts[from..from + usize::from(place.text_length)]
    }

    fn keep(&mut self, hash: u64, text: &str, ids: &[u32]) {
        let full = self.entries >= ENTRIES_MAX || self.texts.len().max(self.ids.len()) >= BYTES_MAX;
        if full || self.places.is_empty() {
            self.places.clear();
            self.places.resize(PLACES, Place::default());
            self.texts.clear();
            self.ids.clear();
            self.entries = 0;
        }
        let Ok(ids_length) = u16::try_from(ids.len()) else { return };
        let mut at = hash as usize % PLACES;
        while self.places[at].text_length > 0 {
            at = (at + 1) % PLACES;
        }
        self.places[at] = Place {
            check: (hash >> 32) as u32,
            text: self.texts.len() as u32,
            ids: self.ids.len() as u32,
            text_length: text.len() as u16,
            ids_length,
        };
        self.texts.extend_from_slice(text.as_bytes());
        self.ids.extend_from_slice(ids);
        self.entries += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn what_is_forgotten_is_asked_again_and_memory_is_bounded() {
        let asked = Cell::new(0);
        let encode = |text: &str| {
            asked.set(asked.get() + 1);
            Ok(text.bytes().map(u32::from).collect())
        };
        let mut memo = Memo::default();
        let look = |memo: &mut Memo, text: &str| {
            let mut ids = vec![7];
            memo.extend(&mut ids, text, encode).unwrap();
            let wanted = text.bytes().map(u32::from);
            assert!(ids.into_iter().eq([7].into_iter().chain(wanted)), "{text}");
        };
        for round in 1..=3 {
            look(&mut memo, "word");
            assert_eq!(asked.get(), 1, "round {round}");
        }
        for number in 0..3 * ENTRIES_MAX {
            look(&mut memo, &format!("number {number}"));
            look(&mut memo, &format!("number {number}"));
            assert!(memo.entries <= ENTRIES_MAX && memo.texts.len() < BYTES_MAX + TEXT_MAX);
        }
        assert_eq!(asked.get(), 1 + 3 * ENTRIES_MAX);
        look(&mut memo, "word");
        assert_eq!(asked.get(), 2 + 3 * ENTRIES_MAX);
        let long = "x".repeat(TEXT_MAX + 1);
        look(&mut memo, &long);
        look(&mut memo, &long);
        assert_eq!(asked.get(), 4 + 3 * ENTRIES_MAX);
    }

    #[test]
    fn a_refusal_is_passed_on_and_not_remembered() {
        let mut memo = Memo::default();
        let refuse = |_: &str| Err(contract::Fault::data("no"));
        assert!(memo.extend(&mut Vec::new(), "word", refuse).is_err());
        let mut ids = Vec::new();
        memo.extend(&mut ids, "word", |_| Ok(vec![3, 4])).unwrap();
        assert_eq!(ids, [3, 4]);
    }
}
