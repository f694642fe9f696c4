//! Matmuls by the library that has the better kernels for this processor.
//!
//! libtorch uses MKL for f32 matmuls on a CPU, which has no AVX-512 kernels for processors other than Intel's; oneDNN,
//! which libtorch uses for bf16 anyway, has. The choice is per process and part of the kernel table.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::c_int;
use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use crate::shim::{guarded, number};
use crate::{Error, Result};

unsafe extern "C" {
    fn shim_onednn_products(out: *mut c_int) -> c_int;
    fn shim_product(
        out: *const C_tensor,
        left: *const C_tensor,
        right: *const C_tensor,
        add: c_int,
        onednn: c_int,
    ) -> c_int;
}

/// Whether f32 matmuls on this CPU use oneDNN; they do not if oneDNN is barred from AVX-512.
pub fn by_onednn() -> Result<bool> {
    static CHOICE: OnceLock<bool> = OnceLock::new();
    if let Some(choice) = CHOICE.get() {
        return Ok(*choice);
    }
    // SAFETY: queries libtorch about the processor, tries a matmul, and writes an out-pointer that outlives the call.
    let found = number("ask for oneDNN", |out| unsafe { shim_onednn_products(out) })?;
    Ok(*CHOICE.get_or_init(|| found == 1))
}

/// `out = left right`, all of one kind, matrices or batches of them.
///
/// # Errors
/// If shapes or kinds do not fit, or memory runs out.
pub fn into(out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
    product(out, left, right, false)
}

/// `out += left right`, matrices of one kind.
///
/// # Errors
/// As [`into`].
pub fn add(out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
    product(out, left, right, true)
}

/// `left right` in new memory.
///
/// # Errors
/// As [`into`].
pub fn of(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    let mut shape = left.size();
    if let (Some(columns), Some(last)) = (right.size().last(), shape.last_mut()) {
        *last = *columns;
    }
    let out = Tensor::f_empty(shape, (left.kind(), left.device()))?;
    into(&out, left, right)?;
    Ok(out)
}

fn goes_to_onednn(out: &Tensor, left: &Tensor, right: &Tensor) -> Result<bool> {
    let plain = |tensor: &Tensor| tensor.kind() == Kind::Float && tensor.device() == Device::Cpu;
    let all = [out, left, right];
    let fits = all.into_iter().all(plain) && all.into_iter().all(|tensor| tensor.numel() > 0);
    Ok(fits && by_onednn()?)
}

fn product(out: &Tensor, left: &Tensor, right: &Tensor, add: bool) -> Result<()> {
    let (found, left_size, right_size) = (out.size(), left.size(), right.size());
    let (batch, rest) = left_size.split_at(left_size.len().saturating_sub(2));
    let fits = match (rest, right_size.strip_prefix(batch), found.strip_prefix(batch)) {
        (&[m, k], Some(&[k_too, n]), Some(&[m_too, n_too])) => (k, m, n) == (k_too, m_too, n_too),
        _ => false,
    };
    if !fits || batch.len() > 1 {
        let reason = format!("{left_size:?} times {right_size:?} is not {found:?}");
        return Err(Error::Foreign { call: MULTIPLY, reason });
    }
    let onednn = goes_to_onednn(out, left, right)?;
    let [to, left, right] = [out, left, right].map(Tensor::as_ptr);
    // SAFETY: three live tensors with fitting shapes, one of which the caller lets us write to, as `mm_out` would.
    guarded(MULTIPLY, unsafe { shim_product(to, left, right, add.into(), onednn.into()) })
}

/// The call's name in errors.
const MULTIPLY: &str = "multiply matrices";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matrix(batch: i64, rows: i64, columns: i64, turned: bool, seed: i64) -> Tensor {
        let count = batch * rows * columns;
        let flat =
            (Tensor::arange(count, (Kind::Double, Device::Cpu)) * (seed + 1) as f64 * 0.71).sin();
        let flat = flat.to_kind(Kind::Float);
        match turned {
            true => flat.view([batch, columns, rows]).transpose(1, 2),
            false => flat.view([batch, rows, columns]),
        }
    }

    proptest! {
        /// Operands of any layout and a result inside a larger matrix: equal to f64, and nothing outside the result
        /// changes.
        #[test]
        fn products_are_products(
            (batch, rows, inner, columns) in (1i64..4, 1i64..40, 1i64..40, 1i64..40),
            [turn_left, turn_right, alone] in any::<[bool; 3]>(),
            seed in 0i64..100,
        ) {
            let left = matrix(batch, rows, inner, turn_left, seed);
            let right = matrix(batch, inner, columns, turn_right, seed + 1);
            let (left, right) = if alone { (left.get(0), right.get(0)) } else { (left, right) };
            let wanted = left.to_kind(Kind::Double).matmul(&right.to_kind(Kind::Double));
            let close = |found: &Tensor| (found - &wanted).abs().max().double_value(&[]) < 1e-5;
            prop_assert!(close(&of(&left, &right).unwrap()));
            if alone {
                let frame = Tensor::zeros([rows + 2, columns + 3], (Kind::Float, Device::Cpu));
                let mut out = frame.narrow(0, 1, rows).narrow(1, 2, columns);
                into(&out, &left, &right).unwrap();
                prop_assert!(close(&out));
                add(&mut out, &left, &right).unwrap();
                prop_assert!(close(&(&out / 2.0)));
                let inside = out.abs().sum(Kind::Double).double_value(&[]);
                let all = frame.abs().sum(Kind::Double).double_value(&[]);
                prop_assert!((all - inside).abs() <= 1e-9 * all);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (left, right) = (matrix(1, 3, 5, false, 1).get(0), matrix(1, 6, 5, false, 1).get(0));
        let out = Tensor::zeros([3, 5], (Kind::Float, Device::Cpu));
        assert!(into(&out, &left, &right).is_err());
    }
}
