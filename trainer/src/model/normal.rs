//! A normal number from 64 uniform bits, with the same bits on every machine.
//!
//! The inverse normal distribution by Wichura's AS 241 (accurate to about 16 digits). The standard library's `ln`
//! depends on the platform, so this file has its own, made only of operations that IEEE 754 defines exactly.

#![expect(clippy::excessive_precision, reason = "coefficients stand as they were published")]

// Coefficients of AS 241, routine PPND16, lowest power first.
const A: [f64; 8] = [
    3.387_132_872_796_366_608_0,
    133.141_667_891_784_377_45,
    1_971.590_950_306_551_442_7,
    13_731.693_765_509_461_125,
    45_921.953_931_549_871_457,
    67_265.770_927_008_700_853,
    33_430.575_583_588_128_105,
    2_509.080_928_730_122_672_7,
];
const B: [f64; 8] = [
    1.0,
    42.313_330_701_600_911_252,
    687.187_007_492_057_908_30,
    5_394.196_021_424_751_107_7,
    21_213.794_301_586_595_867,
    39_307.895_800_092_710_610,
    28_729.085_735_721_942_674,
    5_226.495_278_852_854_561_0,
];
const C: [f64; 8] = [
    1.423_437_110_749_683_577_34,
    4.630_337_846_156_545_295_90,
    5.769_497_221_460_691_405_50,
    3.647_848_324_763_204_605_04,
    1.270_458_252_452_368_382_58,
    2.417_807_251_774_506_117_70e-1,
    2.272_384_498_926_918_458_33e-2,
    7.745_450_142_783_414_076_40e-4,
];
const D: [f64; 8] = [
    1.0,
    2.053_191_626_637_758_821_87,
    1.676_384_830_183_803_849_40,
    6.897_673_349_851_000_045_50e-1,
    1.481_039_764_274_800_745_90e-1,
    1.519_866_656_361_645_719_66e-2,
    5.475_938_084_995_344_946_00e-4,
    1.050_750_071_644_416_843_24e-9,
];
const E: [f64; 8] = [
    6.657_904_643_501_103_777_20,
    5.463_784_911_164_114_369_90,
    1.784_826_539_917_291_335_80,
    2.965_605_718_285_048_912_30e-1,
    2.653_218_952_657_612_309_30e-2,
    1.242_660_947_388_078_438_60e-3,
    2.711_555_568_743_487_578_15e-5,
    2.010_334_399_292_288_132_65e-7,
];
const F: [f64; 8] = [
    1.0,
    5.998_322_065_558_879_376_90e-1,
    1.369_298_809_227_358_053_10e-1,
    1.487_536_129_085_061_485_25e-2,
    7.868_691_311_456_132_591_00e-4,
    1.846_318_317_510_054_681_80e-5,
    1.421_511_758_316_445_888_70e-7,
    2.044_263_103_389_939_785_64e-15,
];

/// The standard normal number at the quantile given by `bits`: the middle of one of 2^52 equal intervals. Both the
/// quantile and its distance from 1 are exact.
pub(super) fn standard_normal(bits: u64) -> f64 {
    let intervals = (1u64 << 52) as f64;
    let middle = (bits >> 12) as f64 + 0.5;
    quantile(middle / intervals, (intervals - middle) / intervals)
}

/// The inverse of the normal distribution function at `p`, where `q = 1 - p`.
fn quantile(p: f64, q: f64) -> f64 {
    let centred = p - 0.5;
    if centred.abs() <= 0.425 {
        let r = 0.180_625 - centred * centred;
        return centred * ratio(&A, &B, r);
    }
    let r = (-ln(p.min(q))).sqrt();
    let tail = if r <= 5.0 { ratio(&C, &D, r - 1.6) } else { ratio(&E, &F, r - 5.0) };
    if centred < 0.0 { -tail } else { tail }
}

fn ratio(above: &[f64; 8], below: &[f64; 8], x: f64) -> f64 {
    let horner = |terms: &[f64; 8]| terms.iter().rev().fold(0.0, |sum, term| sum * x + term);
    horner(above) / horner(below)
}

/// The natural logarithm of a positive normal number.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    // ln(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172: 12 terms are accurate to the last bit or two.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, k| sum * square + 1.0 / f64::from(2 * k + 1));
    2.0 * s * series + exponent as f64 * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn logarithm_is_that_of_the_library(x in 1e-17f64..2.0) {
            prop_assert!((ln(x) - x.ln()).abs() <= 4e-16 * x.ln().abs().max(1.0));
        }

        #[test]
        fn both_halves_mirror_each_other(bits: u64) {
            prop_assert_eq!(standard_normal(bits), -standard_normal(!bits));
        }

        #[test]
        fn larger_bits_give_larger_numbers(bits in 0u64..u64::MAX - (1 << 40)) {
            prop_assert!(standard_normal(bits) < standard_normal(bits + (1 << 40)));
        }
    }

    /// The normal distribution function by numerical integration: independent of the coefficients above.
    fn below(x: f64) -> f64 {
        let steps = 20_000;
        let width = x / f64::from(steps);
        let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let middle: f64 = (0..steps).map(|i| density((f64::from(i) + 0.5) * width)).sum();
        0.5 + middle * width
    }

    #[test]
    fn quantiles_invert_the_distribution() {
        for thousandths in 1..1000u32 {
            let p = f64::from(thousandths) / 1000.0;
            assert!((below(quantile(p, 1.0 - p)) - p).abs() < 1e-8, "p = {p}");
        }
        // Far tails, from tables of the normal distribution.
        assert!((quantile(1e-9, 1.0 - 1e-9) + 5.997_807_015_007_687).abs() < 1e-11);
        assert!((quantile(1e-15, 1.0 - 1e-15) + 7.941_345_326_170_998).abs() < 1e-11);
    }
}
