//! A keyed permutation of `0..n` for any `n`, O(1) both ways, no table.
//!
//! A Feistel network over a rectangle (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, the
//! Generalized-Feistel construction): write `x = l * width + r` with `l < height`, `r < width`, where the sides are
//! about the square root of `n` and `height * width - n < height`; rounds alternately add a keyed non-linear hash of
//! one half to the other, modulo that half's side. The few values at or past `n` are mapped again until they fall below
//! it: about `1 / sqrt(n)` extra evaluations, where a power-of-two network would need up to three (below 64 elements
//! `64 / n`).
//!
//! Published loaders fail here: an affine round function leaves runs of equal parity, four rounds cluster, a block one
//! bit too short is not a bijection. `tests/shuffle.rs` measures ours and theirs with the same tests.

use crate::draw::{Key, Purpose, draw};

/// Rounds. Four are the least for which such a network is pseudo-random; the rest is margin at 2 ns each.
const ROUNDS: usize = 10;

/// The least side of the rectangle: on 3 by 3 the rounds reach only even permutations, on 3 by 2 not all equally often.
const SIDE_MIN: u64 = 8;

/// A keyed bijection on `0..n`.
///
/// ```
/// use contract::{Key, Permutation};
/// let order = Permutation::new(Key::from_seed(1).child("web").nth(0), 1_000_003);
/// assert_eq!(order.inverse(order.forward(42)), 42);
/// ```
#[derive(Clone, Debug)]
pub struct Permutation {
    n: u64,
    height: u64,
    width: u64,
    round_keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` under `key`.
    ///
    /// # Panics
    /// If `n` is zero or above 2^63.
    pub fn new(key: Key, n: u64) -> Self {
        assert!(0 < n && n <= 1 << 63, "a permutation needs 1 to 2^63 elements, not {n}");
        let root = n.isqrt();
        let height = if root * root == n { root } else { root + 1 }.max(SIDE_MIN);
        let width = n.div_ceil(height).max(SIDE_MIN);
        let round_keys = std::array::from_fn(|round| draw(key, Purpose::Permute, round as u64));
        Permutation { n, height, width, round_keys }
    }

    /// How many elements are permuted.
    pub fn len(&self) -> u64 {
        self.n
    }

    /// Always false: a permutation has at least one element.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The position to which element `index` is moved.
    ///
    /// # Panics
    /// If `index >= n`.
    pub fn forward(&self, index: u64) -> u64 {
        assert!(index < self.n, "{index} is not below {}", self.n);
        if self.n == 1 {
            return 0;
        }
        let mut value = self.encrypt(index);
        while value >= self.n {
            value = self.encrypt(value);
        }
        value
    }

    /// The element that is moved to position `value`: the inverse of [`Self::forward`].
    ///
    /// # Panics
    /// If `value >= n`.
    pub fn inverse(&self, value: u64) -> u64 {
        assert!(value < self.n, "{value} is not below {}", self.n);
        if self.n == 1 {
            return 0;
        }
        let mut index = self.decrypt(value);
        while index >= self.n {
            index = self.decrypt(index);
        }
        index
    }

    fn encrypt(&self, value: u64) -> u64 {
        let (mut left, mut right) = (value / self.width, value % self.width);
        for keys in self.round_keys.chunks_exact(2) {
            left = add(left, hash(right, keys[0]), self.height);
            right = add(right, hash(left, keys[1]), self.width);
        }
        left * self.width + right
    }

    fn decrypt(&self, value: u64) -> u64 {
        let (mut left, mut right) = (value / self.width, value % self.width);
        for keys in self.round_keys.rchunks_exact(2) {
            right = subtract(right, hash(left, keys[1]), self.width);
            left = subtract(left, hash(right, keys[0]), self.height);
        }
        left * self.width + right
    }
}

/// A 64-bit finalizer (Stafford's variant 13): every output bit depends on every input bit, none of them affinely.
fn hash(half: u64, key: u64) -> u64 {
    let mut x = half ^ key;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `hash` scaled to `0..side` (its high bits decide).
fn scaled(hash: u64, side: u64) -> u64 {
    ((u128::from(hash) * u128::from(side)) >> 64) as u64
}

fn add(half: u64, hash: u64, side: u64) -> u64 {
    let sum = half + scaled(hash, side);
    if sum >= side { sum - side } else { sum }
}

fn subtract(half: u64, hash: u64, side: u64) -> u64 {
    let term = scaled(hash, side);
    if half >= term { half - term } else { half + side - term }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_small_domain_is_a_bijection() {
        for n in (1..=300).chain([1023, 1024, 1025, 4095, 4097, 65_535, 65_536, 65_537]) {
            let order = Permutation::new(Key::from_seed(n), n);
            let mut seen = vec![false; n as usize];
            for index in 0..n {
                let value = order.forward(index);
                assert!(
                    !std::mem::replace(&mut seen[value as usize], true),
                    "n {n}: {value} twice"
                );
                assert_eq!(order.inverse(value), index, "n {n}");
            }
        }
    }

    proptest! {
        #[test]
        fn large_domains_invert(seed: u64, n in 1u64..=1 << 63, index: u64) {
            let (order, index) = (Permutation::new(Key::from_seed(seed), n), index % n);
            let value = order.forward(index);
            prop_assert!(value < n);
            prop_assert_eq!(order.inverse(value), index);
            prop_assert_eq!(order.forward(order.inverse(index)), index);
        }
    }
}
