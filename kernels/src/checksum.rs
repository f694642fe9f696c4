//! Order-free, position-dependent sums over the bits of a tensor, computable in any layout and on any device.
//!
//! `sum over i of bits(x_i) * weight(i, salt)`, wrapping in 64 bits. Addition of integers commutes, so shards, devices
//! and threads may add in any order. Every weight is odd: a change of a single element always changes the sum.
//!
//! ```text
//! h  = (i + (i >> 32) * 0xC2B2AE3D + salt_low + salt_high * 0x27D4EB2F)   mod 2^32
//! h  = h * 0x9E3779B1 mod 2^32;   h ^= h >> 15
//! h  = h * 0x85EBCA77 mod 2^32;   h ^= h >> 13
//! weight(i, salt) = h | 1
//! ```
//! All arithmetic is 32-bit, so that a CPU can process eight elements at once; products are 64 bits wide.

#![expect(unsafe_code, reason = "reads the elements of a contiguous CPU tensor in place")]

use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::device::pieces::{TensorRange, checksums};
use crate::device::queue::Queue;
use crate::sums::{FIRST, HIGH_INDEX, SECOND, salted, sum};

const LOW: i64 = 0xFFFF_FFFF;

/// The checksum of a whole tensor.
///
/// # Errors
/// As [`slice()`].
pub fn tensor(tensor: &Tensor, salt: u64) -> Result<u64> {
    slice(tensor, 0, salt)
}

/// The contribution of a slice to the checksum of its tensor, where its first element has number `first`.
///
/// # Errors
/// If its device refuses, or memory runs out.
pub fn slice(tensor: &Tensor, first: u64, salt: u64) -> Result<u64> {
    let here = tensor.detach().f_to_device(Device::Cpu)?.f_contiguous()?;
    Ok(on_cpu(&here, first, salt))
}

/// The same for many slices on one device, as a tensor of bits, i64, on that device: on a GPU the host does not wait.
/// It takes two launches there, or, if our kernels cannot be compiled, some twenty operators for each slice.
///
/// # Errors
/// If the device refuses, or memory runs out.
pub fn slices(slices: &[(&Tensor, u64, u64)]) -> Result<Tensor> {
    let whole = slices.iter().map(|(tensor, ..)| Ok(tensor.detach().f_contiguous()?));
    let whole = whole.collect::<Result<Vec<Tensor>>>()?;
    let with = || whole.iter().zip(slices);
    let device = whole.first().map_or(Device::Cpu, Tensor::device);
    if device == Device::Cpu {
        let one = |(tensor, (_, first, salt)): (_, &(_, u64, u64))| on_cpu(tensor, *first, *salt);
        let found: Vec<_> = with().map(one).map(u64::cast_signed).collect();
        return Ok(Tensor::f_from_slice(&found)?);
    }
    if let Ok(queue) = Queue::of(device) {
        let piece = |(tensor, (_, first, salt)): (_, &(_, u64, u64))| TensorRange {
            tensor,
            other: None,
            first: *first,
            salt: *salt,
        };
        return checksums(&queue, &with().map(piece).collect::<Vec<_>>());
    }
    let one = |(tensor, (_, first, salt)): (_, &(_, u64, u64))| by_operators(tensor, *first, *salt);
    Ok(Tensor::f_stack(&with().map(one).collect::<Result<Vec<_>>>()?, 0)?)
}

/// A running sum of checksums, whose terms may stay on a device until it is read. Clones are the same sum.
#[derive(Clone, Debug, Default)]
pub struct RunningChecksum(Arc<Mutex<(u64, Vec<Tensor>)>>);

impl RunningChecksum {
    /// Adds the checksums of some slices of one device.
    ///
    /// # Errors
    /// As [`slices`].
    pub fn add(&self, parts: &[(&Tensor, u64, u64)]) -> Result<()> {
        match parts.first() {
            Some((tensor, ..)) if tensor.device() != Device::Cpu => self.push(slices(parts)?),
            _ => {
                for (tensor, first, salt) in parts {
                    let sum = slice(tensor, *first, *salt)?;
                    let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                    own.0 = own.0.wrapping_add(sum);
                }
            }
        }
        Ok(())
    }

    /// Adds checksums, i64, which stay on their device.
    pub(crate) fn push(&self, there: Tensor) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.push(there);
    }

    /// Whether both are the same sum.
    pub(crate) fn is(&self, other: &RunningChecksum) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The part of the sum on the host, and the i64 tensors on devices that have to be added to it.
    pub fn parts(&self) -> (u64, Vec<Tensor>) {
        let own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (own.0, own.1.iter().map(Tensor::shallow_clone).collect())
    }

    /// The sum; the host waits for devices.
    ///
    /// # Errors
    /// If a device reports a failure.
    pub fn read(&self) -> Result<u64> {
        let add = |sum: u64, there: &Tensor| -> Result<u64> {
            let all = Vec::<i64>::try_from(there)?.into_iter().map(i64::cast_unsigned);
            Ok(all.fold(sum, u64::wrapping_add))
        };
        let (known, there) = self.parts();
        there.iter().try_fold(known, add)
    }
}

fn on_cpu(tensor: &Tensor, first: u64, salt: u64) -> u64 {
    let count = tensor.numel();
    if count == 0 {
        return 0;
    }
    let data = tensor.data_ptr();
    match width(tensor.kind()) {
        // SAFETY: a contiguous CPU tensor of `count` elements of this width, kept alive by `tensor`, aligned by the
        // allocator (or by its element type), and not written: the caller holds it by shared reference.
        1 => sum(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), count) }, first, salt),
        // SAFETY: as above.
        2 => sum(unsafe { std::slice::from_raw_parts(data.cast::<u16>(), count) }, first, salt),
        // SAFETY: as above.
        4 => sum(unsafe { std::slice::from_raw_parts(data.cast::<u32>(), count) }, first, salt),
        // SAFETY: as above.
        _ => sum(unsafe { std::slice::from_raw_parts(data.cast::<u64>(), count) }, first, salt),
    }
}

/// The same sum in tensor operators, for devices whose memory we cannot read, and as the reference for the fast path.
fn by_operators(tensor: &Tensor, first: u64, salt: u64) -> Result<Tensor> {
    let flat = tensor.f_reshape([-1])?;
    let mut total = Tensor::f_zeros([1], (Kind::Int64, flat.device()))?;
    let (count, mut done) = (flat.size()[0], 0i64);
    while done < count {
        let piece = (count - done).min(1 << 22);
        let bits = integers(&flat.f_narrow(0, done, piece)?)?;
        let _ = total.f_add_(&piece_by_operators(&bits, first + done as u64, salt)?)?;
        done += piece;
    }
    Ok(total.f_squeeze_dim(0)?)
}

fn piece_by_operators(bits: &Tensor, first: u64, salt: u64) -> Result<Tensor> {
    let index = Tensor::f_arange(bits.size()[0], (Kind::Int64, bits.device()))?;
    let index = index.f_add_scalar(first as i64)?;
    let high = index.f_bitwise_right_shift_tensor_scalar(32)?;
    let high = high.f_mul_scalar(i64::from(HIGH_INDEX))?;
    let h = index.f_add(&high)?.f_add_scalar(i64::from(salted(salt)))?.f_bitwise_and(LOW)?;
    let h = h.f_mul_scalar(i64::from(FIRST))?.f_bitwise_and(LOW)?;
    let h = h.f_bitwise_xor_tensor(&h.f_bitwise_right_shift_tensor_scalar(15)?)?;
    let h = h.f_mul_scalar(i64::from(SECOND))?.f_bitwise_and(LOW)?;
    let h = h.f_bitwise_xor_tensor(&h.f_bitwise_right_shift_tensor_scalar(13)?)?;
    Ok(bits.f_mul(&h.f_bitwise_or(1)?)?.f_sum(Kind::Int64)?)
}

/// The bits of each element as an unsigned number in 64 bits.
fn integers(flat: &Tensor) -> Result<Tensor> {
    let (same_width, mask) = match width(flat.kind()) {
        1 => (Kind::Uint8, None),
        2 => (Kind::Int16, Some(0xFFFF)),
        4 => (Kind::Int, Some(LOW)),
        _ => (Kind::Int64, None),
    };
    let wide = flat.f_view_dtype(same_width)?.f_to_kind(Kind::Int64)?;
    match mask {
        Some(mask) => Ok(wide.f_bitwise_and(mask)?),
        None => Ok(wide),
    }
}

/// Bytes of an element.
fn width(kind: Kind) -> usize {
    kind.elt_size_in_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::HIGH_SALT;
    use proptest::prelude::*;

    fn tensor(tensor: &Tensor, salt: u64) -> u64 {
        super::tensor(tensor, salt).unwrap()
    }

    fn slice(tensor: &Tensor, first: u64, salt: u64) -> u64 {
        super::slice(tensor, first, salt).unwrap()
    }

    /// The formula at the top of this file, one element at a time.
    fn weight(index: u64, salt: u64) -> u64 {
        let modulus = 1u64 << 32;
        let product = |a: u64, b: u32| (a % modulus) * u64::from(b) % modulus;
        let mut h = (index % modulus + product(index >> 32, HIGH_INDEX)) % modulus;
        h = (h + salt % modulus + product(salt >> 32, HIGH_SALT)) % modulus;
        h = product(h, FIRST);
        h ^= h >> 15;
        h = product(h, SECOND);
        h ^= h >> 13;
        h | 1
    }

    fn by_formula(values: &[f32], first: u64, salt: u64) -> u64 {
        (first..).zip(values).fold(0, |sum: u64, (index, value)| {
            sum.wrapping_add(u64::from(value.to_bits()).wrapping_mul(weight(index, salt)))
        })
    }

    proptest! {
        #[test]
        fn all_three_ways_agree(
            values in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..300),
            first in prop_oneof![0..1000u64, (1u64 << 32) - 200..(1 << 32) + 200, 0..1u64 << 40],
            salt: u64,
        ) {
            let tensor = Tensor::from_slice(&values);
            let wanted = by_formula(&values, first, salt);
            prop_assert_eq!(slice(&tensor, first, salt), wanted);
            prop_assert_eq!(by_operators(&tensor, first, salt).unwrap().int64_value(&[]).cast_unsigned(), wanted);
            let total = RunningChecksum::default();
            total.add(&[(&tensor, first, salt), (&tensor, first, salt)]).unwrap();
            prop_assert_eq!(total.read().unwrap(), wanted.wrapping_mul(2));
        }

        #[test]
        fn slices_add_up_in_any_order(
            values in prop::collection::vec(any::<f32>(), 1..300),
            cut in any::<prop::sample::Index>(),
            salt: u64,
        ) {
            let cut = cut.index(values.len());
            let whole = tensor(&Tensor::from_slice(&values), salt);
            let left = slice(&Tensor::from_slice(&values[..cut]), 0, salt);
            let right = slice(&Tensor::from_slice(&values[cut..]), cut as u64, salt);
            prop_assert_eq!(right.wrapping_add(left), whole);
        }

        #[test]
        fn one_changed_element_or_a_swap_shows(
            values in prop::collection::vec(any::<u32>(), 2..300),
            place in any::<prop::sample::Index>(),
            flip in 1u32..,
            salt: u64,
        ) {
            let floats = |bits: &[u32]| {
                Tensor::from_slice(&bits.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>())
            };
            let before = tensor(&floats(&values), salt);
            let place = place.index(values.len());
            let mut changed = values.clone();
            changed[place] ^= flip;
            prop_assert_ne!(tensor(&floats(&changed), salt), before);
            let mut swapped = values.clone();
            swapped.swap(0, place);
            prop_assert_eq!(tensor(&floats(&swapped), salt) == before, swapped == values);
        }
    }

    #[test]
    fn layout_and_kind_are_read_as_they_are() {
        let square = Tensor::arange(12, (Kind::Float, Device::Cpu)).reshape([3, 4]);
        let turned = square.transpose(0, 1);
        assert_eq!(tensor(&turned, 5), tensor(&turned.contiguous(), 5));
        assert_ne!(tensor(&turned, 5), tensor(&square, 5));
        assert_ne!(tensor(&square, 5), tensor(&square, 6));
        for kind in [Kind::BFloat16, Kind::Half, Kind::Int64, Kind::Double, Kind::Uint8, Kind::Int]
        {
            let cast = square.to_kind(kind);
            let found = by_operators(&cast, 0, 9).unwrap().int64_value(&[]).cast_unsigned();
            assert_eq!(tensor(&cast, 9), found, "{kind:?}");
        }
    }

    #[test]
    fn zeros_of_both_signs_differ() {
        let minus = Tensor::from_slice(&[1.0f32, -0.0]);
        assert_ne!(tensor(&minus, 1), tensor(&Tensor::from_slice(&[1.0f32, 0.0]), 1));
    }
}
