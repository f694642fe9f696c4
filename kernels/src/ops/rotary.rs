//! Rotary embedding in libtorch's operators, the same in every table.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::Result;

/// Device, length, dimensions, and the bits of theta.
type Key = (usize, i64, i64, u64);

/// Cosines and sines on GPUs.
static TABLES: Mutex<BTreeMap<Key, [Tensor; 2]>> = Mutex::new(BTreeMap::new());

/// Cosines and sines of `dim` rotated dimensions, `[N, dim / 2]`, f32, as Hugging Face computes them: at `positions`,
/// `[N]`, i64, below `length`. `theta` is the base of their frequencies.
///
/// A GPU takes them from a table of all positions, which a process keeps: 4 `dim` bytes a position.
///
/// # Errors
/// If memory runs out.
pub fn angles(positions: &Tensor, length: i64, dim: i64, theta: f64) -> Result<[Tensor; 2]> {
    let device = positions.device();
    let Device::Cuda(index) = device else { return computed(positions, dim, theta) };
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let [cosines, sines] = match tables.entry((index, length, dim, theta.to_bits())) {
        Entry::Occupied(made) => made.into_mut(),
        Entry::Vacant(place) => {
            let made = computed(&Tensor::f_arange(length, (Kind::Int64, device))?, dim, theta)?;
            // Any stream may read it from here on: the host waits once.
            let _ = made[1].f_sum(Kind::Float)?.f_double_value(&[])?;
            place.insert(made)
        }
    };
    Ok([cosines.f_index_select(0, positions)?, sines.f_index_select(0, positions)?])
}

fn computed(positions: &Tensor, dim: i64, theta: f64) -> Result<[Tensor; 2]> {
    let options = (Kind::Float, positions.device());
    let exponent = Tensor::f_arange_start_step(0, dim, 2, options)?.f_div_scalar(dim as f64)?;
    let frequency = Tensor::f_pow_scalar(theta, &exponent)?.f_reciprocal()?;
    let angle = positions.f_to_kind(Kind::Float)?.f_unsqueeze(1)?.f_mul(&frequency)?;
    Ok([angle.f_cos()?, angle.f_sin()?])
}

/// The first dimensions of each head of `x`, `[G, N, d]`, paired by halves and rotated by each token's angles: cosines
/// and sines, `[N, half]`.
///
/// # Errors
/// If the shapes do not fit.
pub fn rotated(x: &Tensor, [cos, sin]: [&Tensor; 2]) -> Result<Tensor> {
    let (half, width) = (cos.size()[1], x.size()[2]);
    let (a, b) = (x.f_narrow(2, 0, half)?, x.f_narrow(2, half, half)?);
    let turned_a = a.f_mul(cos)?.f_sub(&b.f_mul(sin)?)?;
    let turned_b = b.f_mul(cos)?.f_add(&a.f_mul(sin)?)?;
    let rest = x.f_narrow(2, 2 * half, width - 2 * half)?;
    Ok(Tensor::f_cat(&[turned_a, turned_b, rest], 2)?)
}

/// Backward of [`rotated`]: the inverse rotation.
///
/// # Errors
/// If the shapes do not fit.
pub fn rotated_back(grad: &Tensor, [cos, sin]: [&Tensor; 2]) -> Result<Tensor> {
    rotated(grad, [cos, &sin.f_neg()?])
}
