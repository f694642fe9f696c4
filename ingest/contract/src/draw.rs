//! Random numbers by address: `draw(key, purpose, index)`.
//!
//! There is no random-generator object that could be advanced out of order. A draw is a keyed hash of its address: the
//! same address gives the same number on every rank, thread and day.

use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

use crate::Ratio;

/// What a draw is for. Two purposes never share a number, and a purpose, once released, keeps its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    /// Round keys of a permutation.
    Permute = 1,
    /// Which split a document belongs to.
    Split = 2,
    /// Which documents the reference tokenizer encodes again.
    Audit = 3,
    /// Initial weights.
    Init = 4,
    /// Generated test and benchmark data.
    Generate = 5,
    /// Preparation: the random functions of MinHash, the documents of a sample.
    Prepare = 6,
    /// At which of its source's lengths a document is packed.
    Length = 7,
    /// Which pieces of text are rearranged for fill-in-the-middle, and where they are cut.
    FillInMiddle = 8,
}

/// A key for draws: 128 bits derived from a seed and a path of names and numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    low: u64,
    high: u64,
}

impl Key {
    /// The root key of `seed`.
    pub fn from_seed(seed: u64) -> Self {
        Key { low: seed, high: 0x5a64_6174_615f_6b31 }.child("root")
    }

    /// The key of a named part ("web", "validation").
    pub fn child(self, name: &str) -> Self {
        self.mixed(name.len() as u64, name.as_bytes())
    }

    /// The key of a numbered part (an epoch, a group).
    pub fn nth(self, index: u64) -> Self {
        self.mixed(u64::MAX, &index.to_le_bytes())
    }

    fn mixed(self, kind: u64, bytes: &[u8]) -> Self {
        let mut address = Vec::with_capacity(24 + bytes.len());
        for word in [self.low, self.high, kind] {
            address.extend_from_slice(&word.to_le_bytes());
        }
        address.extend_from_slice(bytes);
        let hash = xxh3_128(&address);
        Key { low: hash as u64, high: (hash >> 64) as u64 }
    }
}

/// The 64 uniform bits at (`key`, `purpose`, `index`).
pub fn draw(key: Key, purpose: Purpose, index: u64) -> u64 {
    let mut address = [0u8; 24];
    address[..8].copy_from_slice(&key.high.to_le_bytes());
    address[8..16].copy_from_slice(&(purpose as u64).to_le_bytes());
    address[16..].copy_from_slice(&index.to_le_bytes());
    xxh3_64_with_seed(&address, key.low)
}

/// Whether the event of probability `chance` (at most 1) happens at (`key`, `purpose`, `index`).
pub fn happens(key: Key, purpose: Purpose, index: u64, chance: Ratio) -> bool {
    // A draw is below chance * 2^64 with exactly that probability, up to 2^-64.
    u128::from(draw(key, purpose, index)) * u128::from(chance.den())
        < u128::from(chance.num()) << 64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_do_not_collide() {
        let key = Key::from_seed(7);
        let mut seen = std::collections::BTreeSet::new();
        for child in [
            key,
            key.child("a"),
            key.child("b"),
            key.child("a").nth(0),
            key.child("a").nth(1),
            key.nth(0),
        ] {
            for purpose in [Purpose::Permute, Purpose::Split, Purpose::Audit, Purpose::Init] {
                for index in 0..1000 {
                    assert!(seen.insert(draw(child, purpose, index)), "two addresses share a draw");
                }
            }
        }
    }

    #[test]
    fn every_bit_is_balanced() {
        // 65,536 draws: a fair bit stays within 5 standard deviations (128 each) of one half.
        for bit in 0..64 {
            let ones = (0..65_536)
                .filter(|&i| draw(Key::from_seed(1), Purpose::Init, i) >> bit & 1 == 1)
                .count();
            assert!(ones.abs_diff(32_768) < 640, "bit {bit}: {ones}");
        }
    }

    #[test]
    fn events_happen_as_often_as_they_should() {
        let key = Key::from_seed(3);
        let count =
            |chance| (0..100_000).filter(|&i| happens(key, Purpose::Split, i, chance)).count();
        assert_eq!(count(Ratio::new(0, 1)), 0);
        assert_eq!(count(Ratio::new(1, 1)), 100_000);
        assert!(count(Ratio::new(1, 100)).abs_diff(1000) < 160);
    }
}
