//! The sum over 32-bit elements, with vector registers.
//!
//! Three optimizations that a compiler does not find. The first product of a weight grows by a constant from element to
//! element, so it is an addition. A 32 x 32-bit multiplication reads the low halves of 64-bit lanes, so odd elements
//! are shifted down and nothing is widened. And memory is prefetched.

#![expect(unsafe_code, reason = "reads whole registers")]

use std::arch::x86_64::*;

use super::{FIRST, SECOND, plain};
use crate::ahead;

/// 16 elements at a time.
#[target_feature(enable = "avx512f")]
pub(super) fn avx512(run: &[u32], place: u32) -> u64 {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let all = |value: u32| _mm512_set1_epi32(value.cast_signed());
    let mut first = _mm512_mullo_epi32(_mm512_add_epi32(all(place), lanes), all(FIRST));
    let (second, step) = (all(SECOND), all(FIRST.wrapping_mul(16)));
    let (mut even, mut odd) = (_mm512_setzero_si512(), _mm512_setzero_si512());
    let (blocks, rest) = run.as_chunks::<16>();
    for block in blocks {
        ahead::ask(block);
        // SAFETY: the block has 64 bytes.
        let elements = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
        let h = _mm512_xor_si512(first, _mm512_srli_epi32::<15>(first));
        let h = _mm512_mullo_epi32(h, second);
        let h = _mm512_xor_si512(h, _mm512_srli_epi32::<13>(h));
        let h = _mm512_or_si512(h, all(1));
        let (elements_up, h_up) = (_mm512_srli_epi64::<32>(elements), _mm512_srli_epi64::<32>(h));
        even = _mm512_add_epi64(even, _mm512_mul_epu32(elements, h));
        odd = _mm512_add_epi64(odd, _mm512_mul_epu32(elements_up, h_up));
        first = _mm512_add_epi32(first, step);
    }
    let total = _mm512_reduce_add_epi64(_mm512_add_epi64(even, odd)).cast_unsigned();
    total.wrapping_add(plain(rest, place.wrapping_add((run.len() - rest.len()) as u32)))
}

/// 8 elements at a time, two blocks per cache line.
#[target_feature(enable = "avx2")]
pub(super) fn avx2(run: &[u32], place: u32) -> u64 {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let all = |value: u32| _mm256_set1_epi32(value.cast_signed());
    let mut first = _mm256_mullo_epi32(_mm256_add_epi32(all(place), lanes), all(FIRST));
    let (second, step) = (all(SECOND), all(FIRST.wrapping_mul(8)));
    let (mut even, mut odd) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    let (blocks, rest) = run.as_chunks::<8>();
    for block in blocks {
        ahead::ask(block);
        // SAFETY: the block has 32 bytes.
        let elements = unsafe { _mm256_loadu_si256(block.as_ptr().cast()) };
        let h = _mm256_xor_si256(first, _mm256_srli_epi32::<15>(first));
        let h = _mm256_mullo_epi32(h, second);
        let h = _mm256_xor_si256(h, _mm256_srli_epi32::<13>(h));
        let h = _mm256_or_si256(h, all(1));
        let (elements_up, h_up) = (_mm256_srli_epi64::<32>(elements), _mm256_srli_epi64::<32>(h));
        even = _mm256_add_epi64(even, _mm256_mul_epu32(elements, h));
        odd = _mm256_add_epi64(odd, _mm256_mul_epu32(elements_up, h_up));
        first = _mm256_add_epi32(first, step);
    }
    let mut sums = [0u64; 4];
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_storeu_si256(sums.as_mut_ptr().cast(), _mm256_add_epi64(even, odd)) };
    let total = sums.into_iter().fold(0, u64::wrapping_add);
    total.wrapping_add(plain(rest, place.wrapping_add((run.len() - rest.len()) as u32)))
}
