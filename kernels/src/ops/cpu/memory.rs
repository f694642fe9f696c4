//! Elements of tensors in main memory, as slices.

use tch::{Device, Kind, Tensor};

use crate::ops::call::Call;
use crate::{Error, Result};

/// The elements of contiguous f32.
pub(super) fn read(tensor: &Tensor) -> Result<&[f32]> {
    here(tensor, Kind::Float)?;
    if tensor.numel() == 0 {
        return Ok(&[]);
    }
    // SAFETY: as many f32 as the tensor has elements, alive while it is borrowed, and not written meanwhile.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), tensor.numel()) })
}

/// The elements of contiguous f32 for writing. Memory that is not fresh must be checked with [`apart`] first.
pub(super) fn write(tensor: &mut Tensor) -> Result<&mut [f32]> {
    here(tensor, Kind::Float)?;
    if tensor.numel() == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as above; memory that is not fresh was checked by `apart` against everything else that the pass uses.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<f32>(), tensor.numel()) })
}

/// The elements of contiguous i64.
pub(super) fn integers(tensor: &Tensor) -> Result<&[i64]> {
    here(tensor, Kind::Int64)?;
    if tensor.numel() == 0 {
        return Ok(&[]);
    }
    // SAFETY: as many i64 as the tensor has elements, alive while it is borrowed, and not written meanwhile.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<i64>(), tensor.numel()) })
}

fn here(tensor: &Tensor, kind: Kind) -> Result<()> {
    if tensor.device() == Device::Cpu && tensor.kind() == kind && tensor.is_contiguous() {
        return Ok(());
    }
    let layout = if tensor.is_contiguous() { "contiguous" } else { "not contiguous" };
    Err(Error::Operand {
        operation: "a kernel for the CPU",
        operand: "a tensor",
        found: format!("{:?} on {:?}, {layout}", tensor.kind(), tensor.device()),
        wanted: format!("{kind:?} in main memory, contiguous"),
    })
}

/// Refuses output tensors that share memory with another tensor in use: a mutable slice must not overlap any other
/// slice.
pub(super) fn apart(call: Call, written: &[&Tensor], read: &[&Tensor]) -> Result<()> {
    let place = |tensor: &Tensor| {
        let first = tensor.data_ptr() as usize;
        first..first + tensor.numel() * tensor.kind().elt_size_in_bytes()
    };
    for (number, one) in written.iter().enumerate() {
        let one = place(one);
        for other in written[number + 1..].iter().chain(read).map(|other| place(other)) {
            if one.start < other.end && other.start < one.end {
                let found = "memory that another operand uses too".to_owned();
                return Err(call.refuse("what is written", found, "memory of its own".to_owned()));
            }
        }
    }
    Ok(())
}

/// Fresh f32.
pub(super) fn empty(shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?)
}

/// The same numbers in f32; the same tensor if it is.
pub(super) fn to_f32(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_to_kind(Kind::Float)?)
}
