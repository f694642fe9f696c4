//! A cache of encoded texts' ids, with bounded memory.
//!
//! Most lookups in the table read a single slot: a slot holds a short text itself, and its id if it has exactly one.

use contract::Result;
use xxhash_rust::xxh3::xxh3_64;

/// Initial and maximum number of slots; powers of two. At most half of them are used.
const PLACES: (usize, usize) = (1 << 12, 1 << 19);

/// The number of slots from its hash on in which a text may be.
const PROBES: usize = 64;

/// A text of up to this many bytes is stored in its slot.
const SHORT: usize = 16;

/// Longer texts are not cached: they hardly recur.
const TEXT_MAX: usize = 64;

/// The limit on bytes of longer texts, and on ids of texts with several, after which the cache is cleared: it fills
/// again soon.
const ROOM: usize = 1 << 22;

/// The lookup key of a text.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Key {
    /// For a short text, its first bytes; otherwise, its offset in `Memo::texts`.
    head: u64,
    /// For a short text, its last bytes, which with `head` and `length` determine the text; otherwise, its hash.
    tail: u64,
    /// Its length in bytes; 0 marks a free slot.
    length: u8,
}

impl Key {
    /// The key of a text of 1 to [`TEXT_MAX`] bytes.
    fn of(text: &[u8]) -> Key {
        let length = text.len() as u8;
        if text.len() > SHORT {
            return Key { head: 0, tail: xxh3_64(text), length };
        }
        let (head, tail) = if let (Some(a), Some(b)) = (text.first_chunk(), text.last_chunk()) {
            (u64::from_le_bytes(*a), u64::from_le_bytes(*b))
        } else if let (Some(a), Some(b)) = (text.first_chunk(), text.last_chunk()) {
            (u32::from_le_bytes(*a).into(), u32::from_le_bytes(*b).into())
        } else {
            let at = |index: usize| u64::from(text[index]);
            (at(0), at(text.len() / 2) << 8 | at(text.len() - 1))
        };
        Key { head, tail, length }
    }

    fn is_short(self) -> bool {
        usize::from(self.length) <= SHORT
    }

    fn hash(self) -> usize {
        if !self.is_short() {
            return self.tail as usize;
        }
        // A folded 128-bit product: each bit depends on all bits of both factors.
        let (left, right) = (self.head ^ 0x9e37_79b9_7f4a_7c15, self.tail ^ 0xd1b5_4a32_d192_ed03);
        let product =
            u128::from(left) * u128::from(right.wrapping_add(u64::from(self.length) << 56));
        (product >> 64) as usize ^ product as usize
    }
}

/// One entry.
#[derive(Clone, Copy, Default)]
struct Place {
    key: Key,
    /// The number of ids.
    count: u8,
    /// The id, or the offset of the ids in `Memo::ids`.
    ids: u32,
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
    /// Appends the ids of `text`; calls `encode` if it is not cached.
    pub(super) fn extend(
        &mut self,
        out: &mut Vec<u32>,
        text: &str,
        encode: impl Fn(&str) -> Result<Vec<u32>>,
    ) -> Result<()> {
        if text.is_empty() || text.len() > TEXT_MAX {
            out.extend_from_slice(&encode(text)?);
            return Ok(());
        }
        let key = Key::of(text.as_bytes());
        match self.find(key, text) {
            Some(Place { count: 1, ids, .. }) => out.push(*ids),
            Some(Place { count, ids, .. }) => {
                let from = *ids as usize;
                out.extend_from_slice(&self.ids[from..from + usize::from(*count)]);
            }
            None => {
                let ids = encode(text)?;
                out.extend_from_slice(&ids);
                self.keep(key, text, &ids);
            }
        }
        Ok(())
    }

    fn find(&self, key: Key, text: &str) -> Option<&Place> {
        let (mut at, mask) = (key.hash(), self.places.len().checked_sub(1)?);
        for _ in 0..PROBES {
            let place = &self.places[at & mask];
            if place.key.length == 0 {
                return None;
            }
            let same = match key.is_short() {
                true => place.key == key,
                false => {
                    let Key { head, tail, length } = place.key;
                    let text_at = head as usize..head as usize + text.len();
                    (tail, length) == (key.tail, key.length)
                        && self.texts.get(text_at) == Some(text.as_bytes())
                }
            };
            if same {
                return Some(place);
            }
            at = at.wrapping_add(1);
        }
        None
    }

    fn keep(&mut self, mut key: Key, text: &str, ids: &[u32]) {
        let Ok(count) = u8::try_from(ids.len()) else { return };
        if self.texts.len().max(self.ids.len()) >= ROOM {
            *self = Memo::default();
        }
        if 2 * self.entries >= self.places.len() {
            self.grow();
        }
        if !key.is_short() {
            key.head = self.texts.len() as u64;
            self.texts.extend_from_slice(text.as_bytes());
        }
        let place = match ids {
            [id] => Place { key, count, ids: *id },
            _ => Place { key, count, ids: self.ids.len() as u32 },
        };
        if count != 1 {
            self.ids.extend_from_slice(ids);
        }
        self.put(place);
    }

    /// Doubles the slots, or clears them all at the maximum.
    fn grow(&mut self) {
        let (first, most) = PLACES;
        let now = self.places.len();
        if now == most {
            *self = Memo::default();
        }
        let larger = vec![Place::default(); (2 * self.places.len()).clamp(first, most)];
        self.entries = 0;
        for place in std::mem::replace(&mut self.places, larger) {
            if place.key.length > 0 {
                self.put(place);
            }
        }
    }

    /// Stores an entry in a free slot near its hash, or else replaces the entry at its hash.
    fn put(&mut self, place: Place) {
        let (hash, mask) = (place.key.hash(), self.places.len() - 1);
        let near = (0..PROBES).map(|step| hash.wrapping_add(step) & mask);
        let free = near.into_iter().find(|at| self.places[*at].key.length == 0);
        self.entries += usize::from(free.is_some());
        self.places[free.unwrap_or(hash & mask)] = place;
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
        let new = 2 * PLACES.1;
        let mut most = 0;
        for number in 0..new {
            let text = format!("number {number:width$}", width = number % 13);
            look(&mut memo, &text);
            look(&mut memo, &text);
            most = most.max(memo.places.len());
            assert!(2 * memo.entries <= memo.places.len().max(PLACES.0) + 1);
            assert!(memo.texts.len().max(memo.ids.len()) < ROOM + TEXT_MAX);
        }
        assert_eq!(most, PLACES.1);
        assert_eq!(asked.get(), 1 + new);
        look(&mut memo, "word");
        assert_eq!(asked.get(), 2 + new);
        let long = "x".repeat(TEXT_MAX + 1);
        look(&mut memo, &long);
        look(&mut memo, &long);
        assert_eq!(asked.get(), 4 + new);
    }

    #[test]
    fn texts_of_every_length_that_differ_in_one_byte_are_told_apart() {
        let mut memo = Memo::default();
        let mut texts = Vec::new();
        for length in 1..=TEXT_MAX {
            let text = "a".repeat(length);
            texts.extend((0..length).map(|at| format!("{}b{}", &text[..at], &text[at + 1..])));
            texts.push(text);
        }
        for round in 0..2 {
            for (number, text) in texts.iter().enumerate() {
                // Every third text has one id, every third two, every third none.
                let ids = vec![number as u32; number % 3];
                let mut out = Vec::new();
                let encode = |_: &str| match round {
                    0 => Ok(ids.clone()),
                    _ => Err(contract::Fault::bug("it is known")),
                };
                memo.extend(&mut out, text, encode).unwrap();
                assert_eq!(out, ids, "{text}");
            }
        }
    }

    #[test]
    fn entries_of_one_hash_give_way_and_stay_right() {
        let mut memo = Memo::default();
        memo.extend(&mut Vec::new(), "begin", |_| Ok(vec![1])).unwrap();
        let key = Key::of(b"one");
        for number in 0..3 * PROBES as u32 {
            memo.put(Place { key: Key { length: 3, ..key }, count: 1, ids: number });
        }
        assert!(memo.entries <= PROBES + 1);
        let mut ids = Vec::new();
        memo.extend(&mut ids, "two", |_| Ok(vec![7])).unwrap();
        memo.extend(&mut ids, "two", |_| Ok(vec![8])).unwrap();
        assert_eq!(ids, [7, 7]);
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
