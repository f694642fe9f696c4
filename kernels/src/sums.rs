//! The arithmetic of checksums on slices of elements; `checksum` defines the formula.

#![expect(unsafe_code, reason = "calls functions that were compiled for what a processor has")]

#[cfg(target_arch = "x86_64")]
mod lanes;

pub(crate) const HIGH_INDEX: u32 = 0xC2B2_AE3D;
pub(crate) const HIGH_SALT: u32 = 0x27D4_EB2F;
pub(crate) const FIRST: u32 = 0x9E37_79B1;
pub(crate) const SECOND: u32 = 0x85EB_CA77;

/// The checksum of bytes, element by element.
pub(crate) fn bytes(data: &[u8], salt: u64) -> u64 {
    sum(data, 0, salt)
}

/// An element of a tensor, by its bits.
pub(crate) trait Element: Copy + Into<u64> {
    /// The sum over a run; `place` is the low half of the first element's index plus salt and high half. Integer
    /// arithmetic: the bits do not depend on the width of the instructions.
    fn run(run: &[Self], place: u32) -> u64 {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") && has!("avx512dq") && has!("avx512vl") {
                // SAFETY: the processor has what the function was compiled for.
                return unsafe { by_avx512(run, place) };
            }
            if has!("avx2") {
                // SAFETY: as above.
                return unsafe { by_avx2(run, place) };
            }
        }
        plain(run, place)
    }
}

impl Element for u8 {}
impl Element for u16 {}
impl Element for u64 {}

/// The type of nearly all data that is summed.
impl Element for u32 {
    fn run(run: &[Self], place: u32) -> u64 {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") {
                // SAFETY: the processor has what the function was compiled for.
                return unsafe { lanes::avx512(run, place) };
            }
            if has!("avx2") {
                // SAFETY: as above.
                return unsafe { lanes::avx2(run, place) };
            }
        }
        plain(run, place)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn by_avx512<T: Element>(run: &[T], place: u32) -> u64 {
    plain(run, place)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn by_avx2<T: Element>(run: &[T], place: u32) -> u64 {
    plain(run, place)
}

#[inline(always)]
fn plain<T: Element>(run: &[T], mut place: u32) -> u64 {
    let mut total = 0u64;
    // Wrapping by hand: a range or `enumerate` checks for overflow in a debug build, which prevents vectorization.
    for &element in run {
        let product = element.into().wrapping_mul(u64::from(mixed(place)));
        total = total.wrapping_add(product);
        place = place.wrapping_add(1);
    }
    total
}

pub(crate) fn sum<T: Element>(elements: &[T], first: u64, salt: u64) -> u64 {
    let (mut total, mut at, mut rest) = (0u64, first, elements);
    while !rest.is_empty() {
        // The high half of the index is constant up to the next multiple of 2^32.
        let until = ((at >> 32) + 1) << 32;
        let (now, later) = rest.split_at(rest.len().min((until - at) as usize));
        let place = salted(salt)
            .wrapping_add(((at >> 32) as u32).wrapping_mul(HIGH_INDEX))
            .wrapping_add(at as u32);
        total = total.wrapping_add(T::run(now, place));
        (at, rest) = (until, later);
    }
    total
}

pub(crate) fn salted(salt: u64) -> u32 {
    (salt as u32).wrapping_add(((salt >> 32) as u32).wrapping_mul(HIGH_SALT))
}

#[inline(always)]
fn mixed(mut h: u32) -> u32 {
    h = h.wrapping_mul(FIRST);
    h ^= h >> 15;
    h = h.wrapping_mul(SECOND);
    h ^= h >> 13;
    h | 1
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Tests only the instruction sets that this processor has.
        #[test]
        fn all_registers_agree(run in prop::collection::vec(any::<u32>(), 0..300), place: u32) {
            use std::arch::is_x86_feature_detected as has;
            let wanted = plain(&run, place);
            if has!("avx2") {
                // SAFETY: the processor has what the functions were compiled for.
                let found = unsafe { [lanes::avx2(&run, place), by_avx2(&run, place)] };
                prop_assert_eq!(found, [wanted; 2]);
            }
            if has!("avx512f") && has!("avx512dq") && has!("avx512vl") {
                // SAFETY: as above.
                let found = unsafe { [lanes::avx512(&run, place), by_avx512(&run, place)] };
                prop_assert_eq!(found, [wanted; 2]);
            }
        }
    }
}
