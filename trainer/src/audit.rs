//! Computes some micro-batches twice during training, so that a machine that computes wrongly is found.
//!
//! They are sampled by their numbers, so the same ones are checked on any ranks. The results do not change: an audited
//! run writes the same ledger as one without audit.

use std::str::FromStr;

use contract::{Fault, Key, Purpose, Result, Symptom, draw};

/// The fraction of micro-batches that are computed twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditFraction {
    part: u32,
    of: u32,
}

impl FromStr for AuditFraction {
    type Err = String;

    /// Parses "1/1000".
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong =
            || format!("wanted a part of all micro-batches, such as 1/1000 or 1/1, found {text:?}");
        let (part, of) = text.split_once('/').ok_or_else(wrong)?;
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        let (part, of) = (number(part)?, number(of)?);
        if part == 0 || part > of { Err(wrong()) } else { Ok(AuditFraction { part, of }) }
    }
}

impl AuditFraction {
    /// Whether micro-batch `micro_batch` of `step` is computed twice.
    pub(crate) fn picks(self, seed: u64, step: u64, micro_batch: u64) -> bool {
        let key = Key::from_seed(seed).child("micro-batches computed twice").nth(step);
        let drawn = u128::from(draw(key, Purpose::Audit, micro_batch));
        drawn * u128::from(self.of) < u128::from(self.part) << 64
    }
}

/// The result of a micro-batch: its loss and the checksum of its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AuditedResult {
    /// Sum of its token losses.
    pub(crate) loss: f64,
    /// Checksum of its gradient.
    pub(crate) gradient: u64,
}

/// Stops the run if the second computation of a micro-batch of `rank` differs from the first.
///
/// Ranks that share a micro-batch compute from each other's values: an error of one may show on all of them, or on a
/// different one. So the error does not say which machine is at fault.
pub(crate) fn compare(
    first: AuditedResult,
    second: AuditedResult,
    rank: u32,
    shared: bool,
) -> Result<()> {
    let losses = [first.loss, second.loss].map(f64::to_bits);
    let ([one, other], what) = match losses[0] == losses[1] {
        true => ([first.gradient, second.gradient], "gradient"),
        false => (losses, "loss"),
    };
    if one == other {
        return Ok(());
    }
    let twice = format!("computed a micro-batch twice, and its {what} came out otherwise");
    let fault =
        |text| Fault::machine(text).found(format!("{other:016x}")).wanted(format!("{one:016x}"));
    Err(match shared {
        false => fault(format!("rank {rank} {twice}: this machine cannot be trusted"))
            .hint("nothing of this step was kept: go on with the same command on another machine")
            .sign_of(Symptom::Untrusted),
        true => fault(format!(
            "rank {rank} and those with whom it shares micro-batches {twice}: one of their machines cannot be trusted"
        ))
        .hint(
            "nothing of this step was kept: the same command without --cp and --tsp, which decide no bit, tells which",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_part_that_is_picked_is_the_part_that_was_asked_for(seed: u64, of in 1u32..40, part in 1u32..40) {
            let text = format!("{part}/{of}");
            let read = text.parse::<AuditFraction>();
            prop_assert_eq!(read.is_ok(), part <= of);
            if let Ok(audit) = read {
                let picked = (0..4000).filter(|at| audit.picks(seed, at / 16, at % 16)).count() as f64;
                let wanted = 4000.0 * f64::from(part) / f64::from(of);
                // Six standard deviations of a binomial count.
                prop_assert!((picked - wanted).abs() <= 6.0 * (wanted.min(4000.0 - wanted) + 1.0).sqrt());
            }
        }

        #[test]
        fn one_bit_of_loss_or_gradient_is_found(loss in 0.0..9.0f64, gradient: u64, bit in 0u32..64) {
            let first = AuditedResult { loss, gradient };
            prop_assert!(compare(first, first, 2, false).is_ok());
            let flipped = f64::from_bits(loss.to_bits() ^ (1 << bit));
            let cases = [
                (AuditedResult { loss: flipped, ..first }, "loss"),
                (AuditedResult { gradient: gradient ^ (1 << bit), ..first }, "gradient"),
            ];
            for (second, what) in cases {
                let fault = compare(first, second, 2, false).unwrap_err();
                prop_assert_eq!(fault.class(), contract::Class::Machine);
                prop_assert!(fault.to_string().contains("rank 2") && fault.to_string().contains(what));
            }
        }
    }

    #[test]
    fn what_is_no_part_is_refused() {
        for text in ["", "1", "0/5", "6/5", "a/b", "1/0", "-1/3"] {
            assert!(text.parse::<AuditFraction>().is_err(), "{text}");
        }
    }
}
