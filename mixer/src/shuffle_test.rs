//! Does an order look like chance where training would notice?
//!
//! Each measure is a standard score against a uniformly random order: near 0 for a good shuffle. The floats here judge
//! an order; none of them chooses what is read.

use std::collections::BTreeMap;

/// Beyond this a score is not chance: about one in two million for one measure.
pub const SCORE_LIMIT: f64 = 5.0;

/// Positions looked at, at most.
const POSITIONS_MAX: u64 = 65_536;

/// The least pairs of positions for which a correlation has a meaningful score.
const PAIRS_MIN: usize = 256;

/// How many positions of an order of `n` values are looked at. All of a small domain would leave nothing to chance:
/// every bit would be balanced, every window a remainder.
pub fn positions(n: u64) -> u64 {
    (n / 8).min(POSITIONS_MAX)
}

/// Every measure of the first `count` positions of an order of `0..n`, by name. `order` gives the value at a position,
/// or none where it is not known; `next_epoch` is the order of the next epoch, where there is one.
pub fn scores(
    n: u64,
    count: u64,
    order: &dyn Fn(u64) -> Option<u64>,
    next_epoch: Option<&dyn Fn(u64) -> Option<u64>>,
) -> BTreeMap<String, f64> {
    let values: Vec<u64> = (0..count).map_while(order).collect();
    let mut scores = BTreeMap::new();
    if n < 2 || values.len() < 2 {
        return scores;
    }
    let mut put = |name: &str, score: f64| {
        scores.insert(name.to_owned(), score);
    };
    put("parity of neighbours", parity(n, &values));
    put("longest run of one parity", longest_run(&values));
    if values.len() >= WINDOW {
        put("chi2 of windows", windows(n, &values));
        put("neighbours in a window, 16 apart", clustering(n, &values, 16));
        put("neighbours in a window, n/2^16 apart", clustering(n, &values, (n >> 16).max(1)));
    }
    put("repeated differences", differences(n, &values, |a, b| (b + (n - a)) % n));
    // Two values of a set whose size is not a power of two differ by some patterns less often: only an excess counts.
    put("repeated xor differences", differences(n, &values, |a, b| a ^ b).max(0.0));
    for (bit, score) in bits(n, &values).into_iter().enumerate() {
        put(&format!("bit {bit}"), score);
    }
    // Neighbours, powers of two, and the sides of the rectangle that a Feistel network works on.
    let side = n.isqrt();
    for lag in [1, 2, 3, 256, 1024, side, side + 1, 1 << (64 - side.leading_zeros())] {
        let later: Vec<Option<u64>> =
            (0..values.len() as u64).map(|index| order((index + lag) % n)).collect();
        if let Some(score) = correlation(n, &values, &later) {
            put(&format!("serial correlation, lag {lag}"), score);
        }
    }
    if let Some(next) = next_epoch {
        let next: Vec<Option<u64>> = (0..values.len() as u64).map(next).collect();
        if let Some(score) = correlation(n, &values, &next) {
            put("rank correlation with the next epoch", score);
        }
    }
    scores
}

/// Positions of a window: about what one batch reads.
const WINDOW: usize = 256;

/// How often neighbours are both even or both odd.
fn parity(n: u64, values: &[u64]) -> f64 {
    let pairs = (values.len() - 1) as f64;
    let (even, odd) = (n.div_ceil(2) as f64, (n / 2) as f64);
    let chance = (even * (even - 1.0) + odd * (odd - 1.0)) / (n as f64 * (n as f64 - 1.0));
    let same = values.windows(2).filter(|pair| (pair[0] ^ pair[1]) & 1 == 0).count() as f64;
    (same - pairs * chance) / (pairs * chance * (1.0 - chance)).sqrt()
}

/// Runs are geometric: one of `length` or more has a chance of `values x 2^-length`.
fn longest_run(values: &[u64]) -> f64 {
    let (mut longest, mut run) = (1u32, 1u32);
    for pair in values.windows(2) {
        run = if (pair[0] ^ pair[1]) & 1 == 0 { run + 1 } else { 1 };
        longest = longest.max(run);
    }
    // The score that a normal variable exceeds with that chance, roughly.
    let surprise = f64::from(longest) - (values.len() as f64).log2();
    if surprise <= 0.0 { 0.0 } else { (2.0 * std::f64::consts::LN_2 * surprise).sqrt() }
}

/// How evenly windows of 256 positions draw from 256 parts of the whole.
fn windows(n: u64, values: &[u64]) -> f64 {
    let start_of = |part: u64| (u128::from(part) * u128::from(n)).div_ceil(256);
    let (mut chi2, mut degrees) = (0.0, 0.0);
    for window in values.chunks_exact(WINDOW) {
        let mut counts = [0u32; 256];
        window
            .iter()
            .for_each(|&value| counts[(u128::from(value) * 256 / u128::from(n)) as usize] += 1);
        for (part, &count) in counts.iter().enumerate() {
            let size = (start_of(part as u64 + 1) - start_of(part as u64)) as f64;
            let due = 256.0 * size / n as f64;
            chi2 += (f64::from(count) - due).powi(2) / due;
        }
        degrees += 255.0;
    }
    // Sampling without replacement is slightly more even.
    let without = (n as f64 - 1.0) / (n as f64 - 256.0);
    (chi2 * without - degrees) / (2.0f64 * degrees).sqrt()
}

/// Pairs inside windows of 256 positions whose values are at most `distance` apart in the source.
fn clustering(n: u64, values: &[u64], distance: u64) -> f64 {
    let (mut near, mut pairs) = (0u64, 0.0);
    for window in values.chunks_exact(WINDOW) {
        let mut sorted = window.to_vec();
        sorted.sort_unstable();
        for (index, value) in sorted.iter().enumerate() {
            near +=
                sorted[index + 1..].iter().take_while(|&other| other - value <= distance).count()
                    as u64;
        }
        pairs += 256.0 * 255.0 / 2.0;
    }
    let (n, distance) = (n as f64, distance as f64);
    let chance = 2.0 * (n - (distance + 1.0) / 2.0) * distance / (n * (n - 1.0));
    poisson(near, pairs * chance)
}

/// Pairs of neighbouring positions that differ by the same amount.
fn differences(n: u64, values: &[u64], between: impl Fn(u64, u64) -> u64) -> f64 {
    let mut all: Vec<u64> = values.windows(2).map(|pair| between(pair[0], pair[1])).collect();
    all.sort_unstable();
    let repeats: u64 =
        all.chunk_by(|a, b| a == b).map(|same| (same.len() * (same.len() - 1) / 2) as u64).sum();
    let pairs = all.len() as f64 * (all.len() as f64 - 1.0) / 2.0;
    poisson(repeats, pairs / (n as f64 - 1.0))
}

/// How often each bit of the value is set.
fn bits(n: u64, values: &[u64]) -> Vec<f64> {
    let (count, top) = (values.len() as f64, 63 - (n - 1).leading_zeros());
    let score = |bit: u32| {
        let cycle = 1u64 << (bit + 1);
        let ones = n / cycle * (cycle / 2) + (n % cycle).saturating_sub(cycle / 2);
        let chance = ones as f64 / n as f64;
        let found = values.iter().filter(|&value| value >> bit & 1 == 1).count() as f64;
        let spread =
            (count * chance * (1.0 - chance) * (1.0 - (count - 1.0) / (n as f64 - 1.0))).sqrt();
        // A bit that is expected to be set only a few times has no meaningful score.
        if spread < 3.0 { 0.0 } else { (found - count * chance) / spread }
    };
    (0..=top).map(score).collect()
}

/// Of the pairs of which both values are known; none where these are few.
fn correlation(n: u64, a: &[u64], b: &[Option<u64>]) -> Option<f64> {
    let (mean, n) = ((n as f64 - 1.0) / 2.0, n as f64);
    let pairs = a.iter().zip(b).filter_map(|(a, b)| Some((*a as f64 - mean, (*b)? as f64 - mean)));
    let (count, sum) = pairs.fold((0, 0.0), |(count, sum), (a, b)| (count + 1, sum + a * b));
    let variance = (n * n - 1.0) / 12.0;
    (count >= PAIRS_MIN).then(|| sum / variance / f64::from(count as u32).sqrt())
}

/// The score of a count of rare events, by a transform that makes its spread 1 (Anscombe).
fn poisson(found: u64, due: f64) -> f64 {
    2.0 * ((found as f64 + 0.375).sqrt() - (due + 0.375).sqrt())
}
