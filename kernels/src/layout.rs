//! What operations ask of their tensors before each launch, by one call of the shim each. tch asks for a message after
//! every call, allocates the sizes that it returns, and calls operators through libtorch's layers for gradients.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::{c_int, c_void};
use std::ptr;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use crate::shim::{DONE, guarded, said};
use crate::{Error, Result};

unsafe extern "C" {
    fn shim_contiguous_kind(tensor: *const C_tensor, shape: *const i64, dimensions: i64) -> c_int;
    fn shim_sizes(tensor: *const C_tensor, out: *mut i64, dimensions: i64) -> c_int;
    fn shim_address(
        tensor: *const C_tensor,
        kind: c_int,
        device: c_int,
        out: *mut *mut c_void,
    ) -> c_int;
    fn shim_room(
        shape: *const i64,
        dimensions: i64,
        kind: c_int,
        device: c_int,
        out: *mut *mut C_tensor,
    ) -> c_int;
    fn shim_extent(tensor: *const C_tensor, dimension: i64) -> i64;
    fn shim_part(
        tensor: *const C_tensor,
        dimension: i64,
        first: i64,
        length: i64,
        out: *mut *mut C_tensor,
    ) -> c_int;
    fn shim_swapped(tensor: *const C_tensor, a: i64, b: i64, out: *mut *mut C_tensor) -> c_int;
    fn shim_matmul(left: *const C_tensor, right: *const C_tensor, out: *mut *mut C_tensor)
    -> c_int;
    fn shim_plain(out: *mut *mut c_void) -> c_int;
    fn shim_plain_end(plain: *mut c_void);
}

/// libtorch's number of a dtype, of which tch has the first 16 in the same order.
fn code(kind: Kind) -> c_int {
    kind as c_int
}

/// The number of a device, as tch and the shim count them.
fn number(device: Device) -> c_int {
    match device {
        Device::Cuda(index) => index as c_int,
        Device::Cpu => -1,
        _ => -2,
    }
}

/// Whether a tensor is contiguous, and has this shape and one of these dtypes.
pub(crate) fn fits(tensor: &Tensor, shape: &[i64], kinds: &[Kind]) -> bool {
    // SAFETY: a live tensor; the shape has as many sizes as it says.
    let found =
        unsafe { shim_contiguous_kind(tensor.as_ptr(), shape.as_ptr(), shape.len() as i64) };
    kinds.iter().any(|kind| code(*kind) == found)
}

/// The sizes of a tensor of `D` dimensions.
pub(crate) fn sizes<const D: usize>(tensor: &Tensor) -> Option<[i64; D]> {
    let mut sizes = [0; D];
    // SAFETY: a live tensor, and memory for `D` sizes.
    let fits = unsafe { shim_sizes(tensor.as_ptr(), sizes.as_mut_ptr(), D as i64) };
    (fits != 0).then_some(sizes)
}

/// The address of a tensor that is contiguous, of this dtype and on this device.
pub(crate) fn address(tensor: &Tensor, kind: Kind, device: Device) -> Option<*mut c_void> {
    let mut address = ptr::null_mut();
    // SAFETY: a live tensor; the out-pointer outlives the call.
    let fits =
        unsafe { shim_address(tensor.as_ptr(), code(kind), number(device), &raw mut address) };
    (fits != 0).then_some(address)
}

/// Uninitialized memory.
pub(crate) fn room(shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    let (count, kind, device) = (shape.len() as i64, code(kind), number(device));
    // SAFETY: the shape has as many sizes as it says; the out-pointer outlives the call.
    made(|out| unsafe { shim_room(shape.as_ptr(), count, kind, device, out) })
}

/// What operations ask of tensors most often.
pub trait Parts {
    /// The size of a dimension.
    ///
    /// # Panics
    /// If there is no such dimension.
    fn extent(&self, dimension: usize) -> i64;

    /// Elements `first..first + length` of a dimension, as an alias.
    ///
    /// # Errors
    /// If the tensor has no such elements.
    fn part(&self, dimension: i64, first: i64, length: i64) -> Result<Tensor>;

    /// Two dimensions exchanged, as an alias.
    ///
    /// # Errors
    /// If the tensor has no such dimensions.
    fn swapped(&self, a: i64, b: i64) -> Result<Tensor>;
}

impl Parts for Tensor {
    fn extent(&self, dimension: usize) -> i64 {
        // SAFETY: a live tensor.
        let found = unsafe { shim_extent(self.as_ptr(), dimension as i64) };
        assert!(found >= 0, "a tensor of {} dimensions has no dimension {dimension}", self.dim());
        found
    }

    fn part(&self, dimension: i64, first: i64, length: i64) -> Result<Tensor> {
        // SAFETY: a live tensor; the out-pointer outlives the call.
        made(|out| unsafe { shim_part(self.as_ptr(), dimension, first, length, out) })
    }

    fn swapped(&self, a: i64, b: i64) -> Result<Tensor> {
        // SAFETY: a live tensor; the out-pointer outlives the call.
        made(|out| unsafe { shim_swapped(self.as_ptr(), a, b, out) })
    }
}

/// `left right` by libtorch.
pub(crate) fn matmul(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    // SAFETY: two live tensors; the out-pointer outlives the call.
    made(|out| unsafe { shim_matmul(left.as_ptr(), right.as_ptr(), out) })
}

/// The tensor that a call of the shim makes, or libtorch's error as tch reports it.
fn made(make: impl FnOnce(*mut *mut C_tensor) -> c_int) -> Result<Tensor> {
    let mut out = ptr::null_mut();
    match make(&raw mut out) {
        // SAFETY: a new tensor with no other owner, which the call makes exactly if it succeeds.
        DONE => Ok(unsafe { Tensor::from_ptr(out) }),
        _ => Err(Error::from(tch::TchError::Torch(said()))),
    }
}

/// While it lives, libtorch's operators on this thread record nothing for gradients.
#[must_use]
#[derive(Debug)]
pub struct WithoutGradients(*mut c_void);

impl WithoutGradients {
    /// From now on.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn begin() -> Result<WithoutGradients> {
        let mut plain = ptr::null_mut();
        // SAFETY: the out-pointer outlives the call, which fills it exactly if it succeeds.
        guarded("compute without gradients", unsafe { shim_plain(&raw mut plain) })?;
        Ok(WithoutGradients(plain))
    }
}

impl Drop for WithoutGradients {
    fn drop(&mut self) {
        // SAFETY: made by `shim_plain` on this thread, as a raw pointer is not Send, and freed once.
        unsafe { shim_plain_end(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [Kind; 8] = [
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Float,
        Kind::Double,
        Kind::BFloat16,
    ];

    proptest! {
        /// tch answers the same for tensors and for views of them.
        #[test]
        fn the_shim_sees_what_tch_sees(
            shape in prop::collection::vec(0i64..4, 0..5),
            asked in prop::collection::vec(0i64..4, 0..5),
            kinds in prop::array::uniform2(0usize..KINDS.len()),
            turned: bool,
        ) {
            let [kind, other] = kinds.map(|at| KINDS[at]);
            let made = room(&shape, kind, Device::Cpu).unwrap();
            let shown = (made.size(), made.kind(), made.is_contiguous(), made.device());
            prop_assert_eq!(shown, (shape.clone(), kind, true, Device::Cpu));
            let view = if turned && shape.len() > 1 { made.transpose(0, 1) } else { made };
            let contiguous = view.is_contiguous();
            for shape in [view.size(), asked] {
                let wanted = contiguous && view.size() == shape;
                prop_assert_eq!(fits(&view, &shape, &[other, kind]), wanted);
                prop_assert_eq!(fits(&view, &shape, &[other]), wanted && kind == other);
            }
            prop_assert!((0..).zip(view.size()).all(|(at, size)| view.extent(at) == size));
            prop_assert_eq!(sizes::<2>(&view).map(Vec::from), Some(view.size()).filter(|size| size.len() == 2));
            let found = address(&view, other, Device::Cpu);
            prop_assert_eq!(found, (contiguous && kind == other).then(|| view.data_ptr()));
            prop_assert_eq!(address(&view, kind, Device::Cuda(0)), None);
        }
    }

    proptest! {
        /// As libtorch's `narrow` and `transpose`, which also refuse what there is not.
        #[test]
        fn parts_are_those_of_libtorch(
            shape in prop::collection::vec(0i64..5, 0..4),
            [dimension, first, length] in prop::array::uniform3(-1i64..5),
            turned: bool,
        ) {
            let count = shape.iter().product::<i64>();
            let made = Tensor::arange(count, (Kind::Float, Device::Cpu)).view(shape.as_slice());
            let x = if turned && shape.len() > 1 { made.transpose(0, 1) } else { made };
            let there = (0..x.dim() as i64).contains(&dimension)
                && first >= 0 && length >= 0 && first + length <= x.size()[dimension as usize];
            let part = x.part(dimension, first, length);
            prop_assert!(part.is_ok() || !there);
            let pairs = [
                (part, x.f_narrow(dimension, first, length)),
                (x.swapped(dimension, first), x.f_transpose(dimension, first)),
            ];
            for (found, wanted) in pairs {
                match wanted {
                    Ok(wanted) => {
                        let found = found.unwrap();
                        let layout =
                            |x: &Tensor| (x.size(), x.stride(), x.data_ptr(), x.is_contiguous());
                        prop_assert_eq!(layout(&found), layout(&wanted));
                        prop_assert_eq!(found, wanted);
                    }
                    Err(_) => prop_assert!(found.is_err()),
                }
            }
        }
    }

    #[test]
    fn without_gradients_nothing_is_recorded_and_afterwards_it_is() {
        let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let plain = WithoutGradients::begin().unwrap();
        assert!(!(&x * 2.0).requires_grad() && !x.narrow(0, 0, 1).requires_grad());
        drop(plain);
        assert!((&x * 2.0).requires_grad() && x.part(0, 0, 1).unwrap().requires_grad());
    }

    #[test]
    fn matrices_and_stacks_are_multiplied_as_by_libtorch() {
        let waves = |shape: &[i64]| {
            let count = shape.iter().product::<i64>();
            Tensor::arange(count, (Kind::Float, Device::Cpu)).sin().view(shape)
        };
        let pairs: [[&[i64]; 2]; 4] =
            [[&[3, 4], &[4, 5]], [&[2, 3, 4], &[2, 4, 5]], [&[2, 3, 4], &[4, 5]], [&[4], &[4, 5]]];
        for [left, right] in pairs.map(|pair| pair.map(waves)) {
            assert!(
                matmul(&left, &right).unwrap().equal(&left.matmul(&right)),
                "{left:?} {right:?}"
            );
        }
        assert!(matmul(&waves(&[3, 4]), &waves(&[3, 4])).is_err());
    }
}
