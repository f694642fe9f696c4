//! The learning rate of a step: linear warm-up, then half a cosine down to a final rate.
//!
//! ```text
//! step <= warmup                    lr * step / warmup
//! step <= warmup + decay            final + (lr - final) * (1 + cos(pi * (step - warmup) / decay)) / 2
//! later                             final
//! ```
//!
//! Never derived from phase lengths: a longer phase leaves every earlier step unchanged. Only additions,
//! multiplications and divisions are used, whose results IEEE 754 fixes. A `cos` or `powi` of the system's math library
//! would make a run's bits depend on its version.

/// A schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The rate after warm-up.
    pub peak: f64,
    /// Steps of warm-up; 0 for none.
    pub warmup_steps: u64,
    /// Steps of decay after warm-up; 0 keeps the rate at its peak.
    pub decay_steps: u64,
    /// The rate after decay.
    pub last: f64,
}

impl Schedule {
    /// The learning rate of `step` (from 1).
    pub fn rate(&self, step: u64) -> f64 {
        let Schedule { peak, warmup_steps, decay_steps, last } = *self;
        if step < warmup_steps {
            return peak * (step as f64 / warmup_steps as f64);
        }
        let decayed = step - warmup_steps;
        match decay_steps {
            0 => peak,
            _ if decayed >= decay_steps => last,
            _ => last + (peak - last) * (0.5 * (1.0 + cos_pi(decayed as f64 / decay_steps as f64))),
        }
    }
}

/// cos(pi * t) for t in 0..=1, to within 2 units in the last place of 1.
fn cos_pi(t: f64) -> f64 {
    match t {
        _ if t > 0.5 => -cos_pi(1.0 - t),
        _ if t > 0.25 => sine(std::f64::consts::PI * (0.5 - t)),
        _ => cosine(std::f64::consts::PI * t),
    }
}

/// The Taylor series of cos on 0..=pi/4, where its 10th term is below 1e-20.
fn cosine(x: f64) -> f64 {
    series(x, 1.0, 0)
}

/// The Taylor series of sin on 0..=pi/4.
fn sine(x: f64) -> f64 {
    series(x, x, 1)
}

/// `first - first x^2 / ((n+1)(n+2)) + ...`, summed from the smallest term.
fn series(x: f64, first: f64, power: u32) -> f64 {
    let mut sum = 1.0;
    for term in (1..10).rev() {
        let n = f64::from(power + 2 * term);
        sum = 1.0 - sum * (x * x) / (n * (n - 1.0));
    }
    first * sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_cosine_is_the_cosine(t in 0.0..=1.0f64) {
            prop_assert!((cos_pi(t) - (std::f64::consts::PI * t).cos()).abs() < 5e-16);
        }

        #[test]
        fn rates_stay_between_zero_and_peak(
            warmup_steps in 0u64..50, decay_steps in 0u64..200, step in 1u64..400, last in 0.0..=1.0f64,
        ) {
            let schedule = Schedule { peak: 1.0, warmup_steps, decay_steps, last };
            let (now, next) = (schedule.rate(step), schedule.rate(step + 1));
            prop_assert!((0.0..=1.0).contains(&now));
            prop_assert!(step + 1 > warmup_steps || now < next, "warm-up rises");
            prop_assert!(step < warmup_steps || next <= now, "decay falls");
            prop_assert!(decay_steps == 0 || step < warmup_steps + decay_steps || now == last);
        }
    }

    #[test]
    fn the_corners() {
        let schedule = Schedule { peak: 6e-4, warmup_steps: 4, decay_steps: 8, last: 2e-4 };
        assert_eq!(schedule.rate(1), 1.5e-4);
        assert_eq!(schedule.rate(4), 6e-4);
        assert!((schedule.rate(8) - 4e-4).abs() < 1e-18, "half way down");
        assert_eq!(schedule.rate(12), 2e-4);
        assert_eq!(schedule.rate(1_000_000), 2e-4);
    }
}
