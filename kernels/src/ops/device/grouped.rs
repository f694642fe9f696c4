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
use crate::layout::Parts as _;
use crate::ops::call::Call;
use crate::ops::{Dispatch, ExpertGradient, ExpertInput, ParamGradient, check};

/// Rows and columns of a block: `LARGE` in `products.h`, `BROAD` in `grouped.h`.
const SIDE: i64 = 128;

fn tiles(size: i64) -> i64 {
    (size + SIDE - 1) / SIDE
}

/// Widths must be multiples of this for libtorch's grouped matmul, in bf16: 16 bytes.
const ALIGNED: i64 = 8;

/// Whether libtorch has a single-kernel grouped matmul for this architecture: `sm_90` to `sm_109`.
fn has_grouped(architecture: &str) -> bool {
    capability(architecture).is_some_and(|number| [9, 10].contains(&(number / 10)))
}

/// Whether libtorch's is chosen for these widths. Tensors without numbers stand for a GPU where it is, as its results
/// need more memory.
fn library_is_chosen(queue: &Queue, wanted: Option<bool>, kind: Kind, widths: &[i64]) -> bool {
    let usual = || !queue.launches() || has_grouped(queue.architecture());
    kind == Kind::BFloat16
        && widths.iter().all(|width| width % ALIGNED == 0)
        && wanted.or_else(|| GROUPED.known()).unwrap_or_else(usual)
}

/// Whether libtorch multiplies: it may read the offsets, and without numbers there are none.
fn by_library(queue: &Queue, wanted: Option<bool>, x: &Tensor, widths: [i64; 2]) -> bool {
    queue.launches() && library_is_chosen(queue, wanted, x.kind(), &widths)
}

/// Whether our matmuls read rows of tokens and compute SwiGLU: in bf16, where libtorch's are not chosen for matrices as
/// wide as `x`.
pub(super) fn fuses(queue: &Queue, wanted: Option<bool>, x: &Tensor) -> bool {
    let widths = &x.size()[1..];
    x.kind() == Kind::BFloat16 && !library_is_chosen(queue, wanted, x.kind(), widths)
}

/// `rows weights` of each expert by libtorch, which leaves results of experts without rows undefined.
fn library(rows: &Tensor, weights: &Tensor, ends: &Tensor, experts: i64) -> Result<Tensor> {
    let ends = ends.part(0, 0, experts)?;
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
        return library(rows, &weights.swapped(1, 2)?, ends, by.experts);
    }
    let out = queue.room(&[by.rows, width], rows.kind())?;
    let kernel = by_kind(rows, [c"grouped_f32", c"grouped_bf16"]);
    let memory = [rows, weights, ends, &out].map(Argument::from);
    launch(queue, kernel, &memory, by, [inner, width], blocks(by, width))?;
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
    let memory = [grad, weights, ends, &out].map(Argument::from);
    launch(queue, kernel, &memory, by, [inner, width], blocks(by, width))?;
    Ok(out)
}

/// Tiles for so many columns, with the maximum number of row tiles: each expert may have one that is partially filled.
fn blocks(by: &Dispatch, columns: i64) -> i64 {
    (by.rows / SIDE + by.experts) * tiles(columns)
}

fn launch(
    queue: &Queue,
    kernel: &std::ffi::CStr,
    memory: &[Argument],
    by: &Dispatch,
    [inner, width]: [i64; 2],
    blocks: i64,
) -> Result<()> {
    let sizes = [by.experts, inner, width].map(Argument::from);
    queue.launch(kernel, blocks, &[memory, &sizes].concat())
}

/// Rows as a kernel reads them, and their order: `None` if they are in the order of experts.
fn read<'a>(
    call: &Call,
    rows: &'a ExpertInput,
    by: &'a Dispatch,
) -> Result<(&'a Tensor, Option<&'a Tensor>)> {
    match rows {
        ExpertInput::Sorted(rows) => Ok((rows, None)),
        ExpertInput::Tokens(x) => {
            let width = call.matrix("rows", x)?[1];
            call.float("rows", x, &[by.places.extent(0), width])?;
            Ok((x, Some(by.marked(call.0)?)))
        }
    }
}

pub(super) fn swiglu(
    queue: &Queue,
    rows: &ExpertInput,
    weights: &Tensor,
    by: &Dispatch,
) -> Result<[Tensor; 2]> {
    let call = Call("grouped_swiglu");
    let (x, order) = read(&call, rows, by)?;
    let [both, inner] = match order {
        Some(_) => check::expert_weights(&call, by, x, weights, [1, 2])?,
        None => check::grouped(&call, by, x, weights, [1, 2])?,
    };
    let width = both / 2;
    call.float("weights", weights, &[by.experts, 2 * width, inner])?;
    let [both, product] = [2 * width, width].map(|width| queue.room(&[by.rows, width], x.kind()));
    let (both, product) = (both?, product?);
    let order = order.map_or(Argument::Nothing, Argument::from);
    let rest = [weights, by.ends(call.0)?, &both, &product].map(Argument::from);
    let memory = [&[x.into(), order][..], &rest].concat();
    let blocks = blocks(by, 2 * width);
    launch(queue, c"grouped_swiglu_bf16", &memory, by, [inner, width], blocks)?;
    Ok([both, product])
}

pub(super) fn swiglu_backward(
    queue: &Queue,
    [grad, weights, x]: [&Tensor; 3],
    by: &Dispatch,
) -> Result<Tensor> {
    let call = Call("grouped_swiglu_backward");
    let [width, inner] = check::grouped(&call, by, grad, weights, [2, 1])?;
    call.is("x", x, &[by.rows, 2 * width], &[grad.kind()])?;
    let out = queue.room(&[by.rows, 2 * width], grad.kind())?;
    let memory = [grad, weights, by.ends(call.0)?, x, &out].map(Argument::from);
    let blocks = blocks(by, width);
    launch(queue, c"grouped_swiglu_backward_bf16", &memory, by, [inner, width], blocks)?;
    Ok(out)
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
        let made = library(&grad.swapped(0, 1)?, rows, ends, by.experts)?.f_contiguous()?;
        return Ok(ParamGradient::Experts(ExpertGradient { made, ends: ends.shallow_clone() }));
    }
    let order = [Argument::Nothing];
    launch_weights(queue, [grad, rows], if rows.kind() == Kind::Float { &[] } else { &order }, by)
}

/// The same for rows of tokens, `[N, D]` in bf16.
pub(super) fn weights_of_tokens(
    queue: &Queue,
    [grad, rows]: [&Tensor; 2],
    by: &Dispatch,
) -> Result<ParamGradient> {
    let call = Call("grouped_matmul_weights");
    let [count, height] = call.matrix("grad", grad)?;
    call.float("grad", grad, &[count.max(by.computed), height])?;
    let width = call.matrix("rows", rows)?[1];
    call.is("rows", rows, &[by.places.extent(0), width], &[grad.kind()])?;
    let order = [by.marked(call.0)?.into()];
    launch_weights(queue, [grad, rows], &order, by)
}

/// The kernel in bf16 has an order of rows.
fn launch_weights(
    queue: &Queue,
    [grad, rows]: [&Tensor; 2],
    order: &[Argument],
    by: &Dispatch,
) -> Result<ParamGradient> {
    let [height, width] = [grad.extent(1), rows.extent(1)];
    let out = queue.room(&[by.experts, height, width], rows.kind())?;
    let kernel = by_kind(rows, [c"grouped_weights_f32", c"grouped_weights_bf16"]);
    let rest = [by.ends("grouped_matmul_weights")?, &out].map(Argument::from);
    let sizes = [height, width].map(Argument::from);
    let blocks = by.experts * tiles(height) * tiles(width);
    let operands = [grad, rows].map(Argument::from);
    queue.launch(kernel, blocks, &[&operands[..], order, &rest, &sizes].concat())?;
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
