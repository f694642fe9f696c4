//! The exponential function for our own memory passes.

/// e^x to about two units in the last place, in plain additions and multiplications, so that it is the same function on
/// every processor: 2^n times a polynomial on half an octave around zero (coefficients of Cephes' expf).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Added to a number below 2^22, leaves its nearest integer in the last bits of the sum.
    const INTEGER: f32 = 12_582_912.0;
    /// log(2) in two parts; the first has few bits, so that its products are exact.
    const LOG_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const POLYNOMIAL: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let x = x.clamp(-87.0, 88.0);
    let sum = x * std::f32::consts::LOG2_E + INTEGER;
    let octave = sum - INTEGER;
    let rest = x - octave * LOG_2[0] - octave * LOG_2[1];
    let value = POLYNOMIAL.into_iter().fold(0.0, |value, coefficient| value * rest + coefficient);
    let exponent = sum.to_bits().wrapping_sub(INTEGER.to_bits()).wrapping_add(127) << 23;
    (value * rest * rest + rest + 1.0) * f32::from_bits(exponent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn exp_is_exp(x in -86.0..86.0f32) {
            let wanted = f64::from(x).exp();
            prop_assert!((f64::from(exp(x)) - wanted).abs() <= 2.5e-7 * wanted, "{} {wanted}", exp(x));
        }
    }

    #[test]
    fn ends_are_finite() {
        for x in [f32::NEG_INFINITY, -1e30, -87.5, 0.0, 88.5, 1e30, f32::INFINITY] {
            assert!(exp(x).is_finite(), "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }
}
