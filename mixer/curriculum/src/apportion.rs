//! Whole numbers in proportion to masses, within bounds.

/// Divides `total` in proportion to `masses`, each part within its bounds `[least, most]`; `None` if no division is.
///
/// Exactly, the parts are `clamp(t x mass, least, most)` for the one `t` with which they sum to `total`. It is found as
/// flexible boxes are laid out: divide what is left over the free parts, and fix those beyond the bound that more of
/// the total lies beyond, until none is. Rounding is by largest remainder, the first of equal ones first; bounds are
/// whole numbers, so it crosses none.
///
/// A part whose mass is zero is at its least, unless the others cannot take the rest.
pub fn apportion(masses: &[u128], bounds: &[[u64; 2]], total: u64) -> Option<Vec<u64>> {
    let mut fixed: Vec<Option<u64>> = vec![None; masses.len()];
    loop {
        let free: Vec<usize> = (0..masses.len()).filter(|at| fixed[*at].is_none()).collect();
        let taken = fixed.iter().flatten().try_fold(0u64, |sum, part| sum.checked_add(*part))?;
        let left = total.checked_sub(taken)?;
        if free.is_empty() {
            return (left == 0).then(|| fixed.into_iter().flatten().collect());
        }
        // Without any mass all are equal.
        let sum: u128 = free.iter().map(|at| masses[*at]).sum();
        let mass = |at: usize| if sum == 0 { 1 } else { masses[at] };
        let sum = if sum == 0 { free.len() as u128 } else { sum };
        let share = |at: usize| u128::from(left) * mass(at);
        // In units of one `sum`-th of a part.
        let below = |at: usize| (u128::from(bounds[at][0]) * sum).saturating_sub(share(at));
        let above = |at: usize| share(at).saturating_sub(u128::from(bounds[at][1]) * sum);
        let lacking: u128 = free.iter().map(|at| below(*at)).sum();
        let beyond: u128 = free.iter().map(|at| above(*at)).sum();
        if (lacking, beyond) == (0, 0) {
            let mut order = free.clone();
            order.sort_by_key(|at| (std::cmp::Reverse(share(*at) % sum), *at));
            let whole = |at: usize| (share(at) / sum) as u64;
            let rest = left - free.iter().map(|at| whole(*at)).sum::<u64>();
            for (number, at) in order.into_iter().enumerate() {
                fixed[at] = Some(whole(at) + u64::from((number as u64) < rest));
            }
            return Some(fixed.into_iter().flatten().collect());
        }
        for at in free {
            let [least, most] = bounds[at];
            if lacking >= beyond && below(at) > 0 {
                fixed[at] = Some(least);
            } else if beyond >= lacking && above(at) > 0 {
                fixed[at] = Some(most);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::apportion;

    /// The exact parts by bisection in floats.
    fn naive(masses: &[u128], bounds: &[[u64; 2]], total: u64) -> Vec<f64> {
        let parts = |t: f64| -> Vec<f64> {
            let all = masses.iter().zip(bounds);
            all.map(|(mass, [least, most])| (t * *mass as f64).clamp(*least as f64, *most as f64))
                .collect()
        };
        let (mut low, mut high) = (0.0f64, 1e6f64);
        for _ in 0..200 {
            let middle = (low + high) / 2.0;
            if parts(middle).iter().sum::<f64>() < total as f64 {
                low = middle
            } else {
                high = middle
            }
        }
        parts(high)
    }

    proptest! {
        #[test]
        fn parts_are_those_of_a_naive_program(
            all in prop::collection::vec((1u128..1 << 40, 0u64..4000, 0u64..80_000), 1..12),
        ) {
            let masses: Vec<u128> = all.iter().map(|(mass, ..)| *mass).collect();
            let bounds: Vec<[u64; 2]> = all.iter().map(|(_, least, more)| [*least, least + more]).collect();
            let possible = bounds.iter().map(|[_, most]| most).sum::<u64>() >= 65_536;
            let parts = apportion(&masses, &bounds, 65_536);
            prop_assert_eq!(parts.is_some(), possible);
            let Some(parts) = parts else { return Ok(()) };
            prop_assert_eq!(parts.iter().sum::<u64>(), 65_536);
            for ((part, [least, most]), exact) in parts.iter().zip(&bounds).zip(naive(&masses, &bounds, 65_536)) {
                prop_assert!((least..=most).contains(&part));
                prop_assert!((*part as f64 - exact).abs() < 1.001, "{} is not {}", part, exact);
            }
        }
    }

    #[test]
    fn the_first_of_equal_remainders_is_rounded_up() {
        assert_eq!(apportion(&[1, 1, 1], &[[0, 9]; 3], 8), Some(vec![3, 3, 2]));
        assert_eq!(apportion(&[0, 5], &[[1, 9], [1, 4]], 8), Some(vec![4, 4]));
        assert_eq!(apportion(&[1, 5], &[[1, 2], [1, 4]], 8), None);
    }
}
