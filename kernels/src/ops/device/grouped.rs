//! Matmuls of experts, all of a layer in one launch: offsets stay on the device.
//!
//! In f32 we use our own kernels. In bf16 we use libtorch's grouped matmul where it is a single kernel with hardware
//! support and its layout fits: widths that are multiples of 8. libtorch has this kernel for NVIDIA compute
//! capabilities 9 and 10. Elsewhere, including AMD, its grouped matmul reads the offsets on the host and calls a matmul
//! for each expert (`aten/src/ATen/native/cuda/GroupedBlas.cpp`): six host waits for each layer of a micro-batch. There
//! we use our own kernels. [`GROUPED`] overrides this if measurements differ.

use tch::{Kind, Tensor};

use super::choice::{GROUPED, capability};
use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::ops::call::Call;
use crate::ops::{Dispatch, ExpertGradient, ParamGradient, check};

/// Rows and columns of a block (`SIDE` in `products.h`).
const SIDE: i64 = 64;

/// Widths must be multiples of this for libtorch's grouped matmul, in bf16: 16 bytes.
const ALIGNED: i64 = 8;

fn tiles(size: i64) -> i64 {
    (size + SIDE - 1) / SIDE
}

/// Whether libtorch has a single-kernel grouped matmul for this architecture: `sm_90` to `sm_109`.
fn has_grouped(architecture: &str) -> bool {
    capability(architecture).is_some_and(|number| [9, 10].contains(&(number / 10)))
}

fn by_library(queue: &Queue, wanted: Option<bool>, x: &Tensor, widths: [i64; 2]) -> bool {
    // libtorch may read the offsets, and without numbers there are none.
    queue.launches()
        && x.kind() == Kind::BFloat16
        && widths.iter().all(|width| width % ALIGNED == 0)
        && wanted.or_else(|| GROUPED.known()).unwrap_or_else(|| has_grouped(queue.architecture()))
}

/// `rows weights` of each expert by libtorch, which leaves results of experts without rows undefined.
fn library(rows: &Tensor, weights: &Tensor, ends: &Tensor, experts: i64) -> Result<Tensor> {
    let ends = ends.f_narrow(0, 0, experts)?;
    Ok(Tensor::f_internal_grouped_mm(rows, weights, Some(&ends), None::<&Tensor>, None)?)
}

pub(super) fn matmul(
    queue: &Queue,
    asked: Option<bool>,
    [rows, weights]: [&Tensor; 2],
    by: &Dispatch,
) -> Result<Tensor> {
    let call = Call("grouped_matmul");
    let [width, inner] = check::grouped(&call, by, rows, weights, [1, 2])?;
    let ends = by.ends(call.0)?;
    if by_library(queue, asked, rows, [width, inner]) {
        return library(rows, &weights.f_transpose(1, 2)?, ends, by.experts);
    }
    let out = queue.room(&[by.rows, width], rows.kind())?;
    let kernel = by_kind(rows, [c"grouped_f32", c"grouped_bf16"]);
    launch(queue, kernel, [rows, weights, ends, &out], by, [inner, width])?;
    Ok(out)
}

pub(super) fn input(
    queue: &Queue,
    asked: Option<bool>,
    [grad, weights]: [&Tensor; 2],
    by: &Dispatch,
) -> Result<Tensor> {
    let call = Call("grouped_matmul_input");
    let [width, inner] = check::grouped(&call, by, grad, weights, [2, 1])?;
    let ends = by.ends(call.0)?;
    if by_library(queue, asked, grad, [width, inner]) {
        return library(grad, weights, ends, by.experts);
    }
    let out = queue.room(&[by.rows, width], grad.kind())?;
    let kernel = by_kind(grad, [c"grouped_input_f32", c"grouped_input_bf16"]);
    launch(queue, kernel, [grad, weights, ends, &out], by, [inner, width])?;
    Ok(out)
}

/// With the maximum number of row tiles: each expert may have one that is partially filled.
fn launch(
    queue: &Queue,
    kernel: &std::ffi::CStr,
    memory: [&Tensor; 4],
    by: &Dispatch,
    [inner, width]: [i64; 2],
) -> Result<()> {
    let blocks = (by.rows / SIDE + by.experts) * tiles(width);
    let sizes = [by.experts, inner, width].map(Argument::from);
    queue.launch(kernel, blocks, &[&memory.map(Argument::from)[..], &sizes].concat())
}

pub(super) fn weights(
    queue: &Queue,
    asked: Option<bool>,
    [grad, rows]: [&Tensor; 2],
    by: &Dispatch,
) -> Result<ParamGradient> {
    let call = Call("grouped_matmul_weights");
    let [height, width] = check::grouped_weights(&call, by, grad, rows)?;
    let ends = by.ends(call.0)?;
    if by_library(queue, asked, rows, [height, width]) {
        let made = library(&grad.f_tr()?, rows, ends, by.experts)?.f_contiguous()?;
        return Ok(ParamGradient::Experts(ExpertGradient { made, ends: ends.shallow_clone() }));
    }
    let out = queue.room(&[by.experts, height, width], rows.kind())?;
    let kernel = by_kind(rows, [c"grouped_weights_f32", c"grouped_weights_bf16"]);
    let memory = [grad, rows, ends, &out].map(Argument::from);
    let sizes = [height, width].map(Argument::from);
    let blocks = by.experts * tiles(height) * tiles(width);
    queue.launch(kernel, blocks, &[&memory[..], &sizes].concat())?;
    Ok(out.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_asked_where_it_has_one_kernel() {
        let has = ["sm_90", "sm_90a", "sm_100", "sm_103"];
        assert!(has.into_iter().all(has_grouped));
        let loops = ["sm_80", "sm_89", "sm_120", "sm_9", "gfx942", "AMD Instinct MI300X", ""];
        assert!(!loops.into_iter().any(has_grouped));
    }
}
