//! Near duplicates: MinHash signatures, locality-sensitive hashing, connected components.
//!
//! A text is the set of its runs of `words` words in normal form. Each of `bands * rows` random functions gives its
//! minimum over that set; two texts agree in one such value with a probability equal to the Jaccard similarity s of
//! their sets. Texts that agree in all `rows` values of one of the `bands` are neighbours. This has the probability 1 -
//! (1 - s^rows)^bands, which for 14 bands of 8 rows is one half at s = 0.69 and 0.92 at s = 0.8. The first document of
//! each connected component is kept.
//!
//! The functions are `a * x + b` modulo 2^64 with odd a, over hashes x of 64 bits. Each is a bijection, so that two
//! runs agree in a value only if their hashes are equal. a and b are sampled by address from the seed.

use contract::{Key, Purpose, draw};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::normal::{self, Word};
use crate::recipe::compare::Near;

/// Why a document is removed.
pub(crate) const REASON: &str = "near-duplicates: of an earlier document";

/// The functions of a step, sampled once.
pub(crate) struct Functions {
    words: usize,
    rows: usize,
    factors: Vec<u64>,
    addends: Vec<u64>,
}

impl Functions {
    /// The functions for these settings.
    pub(crate) fn new(near: &Near) -> Self {
        let key = Key::from_seed(near.seed).child("minhash");
        let drawn = |name: &str| {
            let key = key.child(name);
            (0..near.bands * near.rows).map(|at| draw(key, Purpose::Prepare, at)).collect()
        };
        let factors: Vec<u64> = drawn("factor");
        Functions {
            words: near.words as usize,
            rows: near.rows as usize,
            factors: factors.into_iter().map(|factor| factor | 1).collect(),
            addends: drawn("addend"),
        }
    }

    /// One key per band; nothing for a text without words. A text with fewer words than a run is one run.
    pub(crate) fn bands(&self, words: &[Word]) -> Option<Vec<u64>> {
        let least = self.least(words)?;
        let band = |values: &[u64]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            xxh3_64_with_seed(&bytes, self.rows as u64)
        };
        Some(least.chunks(self.rows).map(band).collect())
    }

    /// The minimum of each function.
    fn least(&self, words: &[Word]) -> Option<Vec<u64>> {
        if words.is_empty() {
            return None;
        }
        let mut least = vec![u64::MAX; self.factors.len()];
        for run in normal::grams(words, self.words.min(words.len())) {
            let functions = self.factors.iter().zip(&self.addends);
            for (least, (factor, addend)) in least.iter_mut().zip(functions) {
                *least = factor.wrapping_mul(run).wrapping_add(*addend).min(*least);
            }
        }
        Some(least)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn runs(text: &str, n: usize) -> BTreeSet<u64> {
        let words = normal::words(text);
        normal::grams(&words, n.min(words.len())).collect()
    }

    /// The similarity by definition.
    fn jaccard(a: &str, b: &str, n: usize) -> f64 {
        let (a, b) = (runs(a, n), runs(b, n));
        a.intersection(&b).count() as f64 / a.union(&b).count() as f64
    }

    fn text(seed: u64, length: u64, changed: u64) -> String {
        let key = Key::from_seed(seed);
        let word = |at: u64| {
            let other = u64::from(at % 50 < changed);
            format!("w{}", draw(key.nth(other), Purpose::Generate, at) % 5000)
        };
        (0..length).map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn values_agree_as_often_as_texts_are_similar() {
        let near = Near { bands: 500, rows: 8, words: 3, ..Near::default() };
        let functions = Functions::new(&near);
        for changed in [0, 1, 3, 6, 12, 50] {
            let (a, b) = (text(7, 400, 0), text(7, 400, changed));
            let least = |text: &str| functions.least(&normal::words(text)).unwrap();
            let (x, y) = (least(&a), least(&b));
            let agree = x.iter().zip(&y).filter(|(x, y)| x == y).count() as f64 / x.len() as f64;
            let wanted = jaccard(&a, &b, 3);
            // 4,000 independent values: five standard deviations are at most 0.04.
            assert!((agree - wanted).abs() < 0.04, "{changed}: {agree} for {wanted}");
        }
    }

    #[test]
    fn neighbours_are_found_as_often_as_the_curve_says() {
        let near = Near { words: 2, ..Near::default() };
        let (mut found, mut wanted, mut variance) = (0, 0.0, 0.0);
        for seed in 0..400 {
            let functions = Functions::new(&Near { seed, ..near.clone() });
            let (a, b) = (text(seed, 300, 0), text(seed, 300, 3 + seed % 8));
            let bands = |text: &str| functions.bands(&normal::words(text)).unwrap();
            found += usize::from(bands(&a).iter().zip(bands(&b)).any(|(a, b)| *a == b));
            let chance = 1.0 - (1.0 - jaccard(&a, &b, 2).powi(8)).powi(14);
            wanted += chance;
            variance += chance * (1.0 - chance);
        }
        let off = (found as f64 - wanted) / f64::sqrt(variance);
        assert!(off.abs() < 4.0, "{found} pairs found, {wanted:.1} expected");
        assert!(
            found > 40 && found < 360,
            "{found}: the test is to stand where the curve is steep"
        );
    }

    #[test]
    fn few_words_are_one_run_and_none_are_no_text() {
        let functions = Functions::new(&Near::default());
        let bands = |text: &str| functions.bands(&normal::words(text));
        assert_eq!(bands("One, two."), bands("one TWO"));
        assert_ne!(bands("one two"), bands("two one"));
        // The upper halves of their hashes are equal.
        assert_ne!(bands("line 60611"), bands("line 38377"));
        assert_eq!(bands(" ... "), None);
        assert!(Near { rows: 0, ..Near::default() }.check().is_err());
        assert!(Near { bands: 4097, rows: 1, ..Near::default() }.check().is_err());
    }
}
