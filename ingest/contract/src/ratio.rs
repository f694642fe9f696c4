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

    /// The product; `None` if 64 bits do not hold it.
    pub fn checked_mul(self, other: Ratio) -> Option<Ratio> {
        Ratio::narrow(wide(self.num, other.num), wide(self.den, other.den))
    }

    /// The sum; `None` if 64 bits do not hold it.
    pub fn checked_add(self, other: Ratio) -> Option<Ratio> {
        let num = wide(self.num, other.den).checked_add(wide(other.num, self.den))?;
        Ratio::narrow(num, wide(self.den, other.den))
    }

    /// `num / den` in lowest terms.
    fn narrow(num: u128, den: u128) -> Option<Ratio> {
        let (mut divisor, mut rest) = (den, num);
        while rest != 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        let [num, den] = [num / divisor, den / divisor].map(u64::try_from);
        Some(Ratio { num: num.ok()?, den: den.ok()? })
    }
}

/// The product of two numbers, which 128 bits hold.
fn wide(one: u64, other: u64) -> u128 {
    u128::from(one) * u128::from(other)
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

    proptest! {
        /// By cross-multiplication, and refused only where the lowest terms need more bits.
        #[test]
        fn sums_and_products_are_exact(a: [u32; 2], b: [u32; 2], shift in 0u32..32) {
            let ratio = |[num, den]: [u32; 2]| Ratio::new(u64::from(num) << shift, u64::from(den) + 1);
            let (a, b) = (ratio(a), ratio(b));
            let [an, ad, bn, bd] = [a.num, a.den, b.num, b.den].map(u128::from);
            for (found, num) in [(a.checked_mul(b), an * bn), (a.checked_add(b), an * bd + bn * ad)] {
                match found {
                    Some(found) => {
                        prop_assert_eq!(u128::from(found.num) * (ad * bd), num * u128::from(found.den));
                        prop_assert_eq!(gcd(found.num, found.den), 1);
                    }
                    None => {
                        let (mut divisor, mut rest) = (num, ad * bd);
                        while rest > 0 {
                            (divisor, rest) = (rest, divisor % rest);
                        }
                        prop_assert!(num.max(ad * bd) / divisor > u128::from(u64::MAX));
                    }
                }
            }
        }
    }

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
