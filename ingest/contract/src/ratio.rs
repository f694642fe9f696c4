//! Exact ratios. No float decides data.

use std::fmt;
use std::str::FromStr;

/// The message for a number with more digits than 64 bits hold exactly.
pub const TOO_LONG: &str =
    "it has more than the 19 digits that 64 bits hold exactly, zeros of its exponent included";

/// A non-negative rational in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio {
    num: u64,
    den: u64,
}

impl Ratio {
    /// `num / den` in lowest terms.
    ///
    /// # Panics
    /// If `den` is zero.
    pub const fn new(num: u64, den: u64) -> Self {
        assert!(den > 0, "a ratio needs a denominator above zero");
        let divisor = gcd(num, den);
        Ratio { num: num / divisor, den: den / divisor }
    }

    /// The numerator.
    pub const fn num(self) -> u64 {
        self.num
    }

    /// The denominator, above zero.
    pub const fn den(self) -> u64 {
        self.den
    }

    /// Whether this is zero.
    pub const fn is_zero(self) -> bool {
        self.num == 0
    }
}

/// The greatest common divisor; `gcd(0, n)` is `n`.
pub const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl FromStr for Ratio {
    type Err = String;

    /// Reads `3`, `0.3`, `1e-6`, `2.5E3` or `3/10`, exactly.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("expected an integer, a decimal or a ratio like \"3/10\", found {text:?}");
        let digits = |text: &str| match digits(text) {
            Some(number) => Ok(number),
            None if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
                Err(TOO_LONG.to_owned())
            }
            None => Err(wrong()),
        };
        let text_clean = text.trim().replace('_', "");
        if let Some((num, den)) = text_clean.split_once('/') {
            let (num, den) = (digits(num.trim())?, digits(den.trim())?);
            return if den == 0 { Err(wrong()) } else { Ok(Ratio::new(num, den)) };
        }
        let (mantissa, exponent) = match text_clean.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().map_err(|_| wrong())?),
            None => (text_clean.as_str(), 0),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let fraction = fraction.trim_end_matches('0');
        let value = digits(&format!("{whole}{fraction}"))?;
        let scale = exponent.checked_sub(fraction.len() as i32).ok_or_else(wrong)?;
        let power = 10u64.checked_pow(scale.unsigned_abs()).ok_or(TOO_LONG)?;
        if scale < 0 {
            Ok(Ratio::new(value, power))
        } else {
            Ok(Ratio::new(value.checked_mul(power).ok_or(TOO_LONG)?, 1))
        }
    }
}

fn digits(text: &str) -> Option<u64> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| text.parse().ok())?
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.den == 1 {
            write!(f, "{}", self.num)
        } else {
            write!(f, "{}/{}", self.num, self.den)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_value_in_every_spelling() {
        for text in ["0.3", "3/10", "30e-2", "0.30", "6/20", ".3", "3E-1"] {
            assert_eq!(text.parse(), Ok(Ratio::new(3, 10)), "{text}");
        }
        for text in ["", "-1", "1/0", "nan", "inf", "0x10", "1/2/3", "1e99", "+1", "1.5/2"] {
            assert!(text.parse::<Ratio>().is_err(), "{text}");
        }
        let digits = "1234567890".repeat(4);
        for text in
            [&digits, &format!("0.{digits}"), &format!("1/{digits}"), "1e99", "1e-20", "19e18"]
        {
            assert_eq!(text.parse::<Ratio>(), Err(TOO_LONG.to_owned()), "{text}");
        }
    }

    proptest! {
        #[test]
        fn ratios_survive_text(num: u64, den in 1..u64::MAX) {
            let ratio = Ratio::new(num, den);
            prop_assert_eq!(ratio.to_string().parse(), Ok(ratio));
            prop_assert_eq!(u128::from(ratio.num()) * u128::from(den), u128::from(num) * u128::from(ratio.den()));
            prop_assert_eq!(gcd(ratio.num(), ratio.den()), 1);
        }
    }
}
