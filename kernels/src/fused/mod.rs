//! Work on tensors in main memory that libtorch does one operator at a time, done in one pass over them.
//!
//! f32 and f64 arithmetic in the order of the text, nothing contracted, sums in a fixed number of parts: so the bits are a
//! function of the numbers, whatever instructions the compiler chose and wherever a tensor is cut. Each function says what
//! it is in operators; that is what other devices compute, and what its test compares it with.

#![expect(unsafe_code, reason = "reads and writes contiguous CPU tensors in place")]

mod adamw;
mod gate;
mod heads;
mod rows;
mod taps;

use std::ops::Add;

use tch::{Device, Kind, Tensor};

pub use adamw::{Rates, adamw};
pub use gate::{gated, gated_backward, gather, gather_backward};
pub use heads::{Heads, means_backward, mix, mix_backward};
pub use rows::{Scaled, residual, residual_backward, rms_norm, rms_norm_backward};
pub use taps::{Depthwise, taps, taps_backward};

/// Compiles a body for the widest instructions at hand, too. Only speed depends on which is taken.
macro_rules! wide {
    ($(#[$note:meta])* $public:vis fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $answer:ty)? $body:block) => {
        $(#[$note])*
        $public fn $name($($argument: $kind),*) $(-> $answer)? {
            #[inline(always)]
            fn plain($($argument: $kind),*) $(-> $answer)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($argument: $kind),*) $(-> $answer)? {
                    plain($($argument),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($argument: $kind),*) $(-> $answer)? {
                    plain($($argument),*)
                }
                use std::arch::is_x86_feature_detected as has;
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    // SAFETY: the processor has what the function was compiled for.
                    return unsafe { avx512($($argument),*) };
                }
                if has!("avx2") {
                    // SAFETY: as above.
                    return unsafe { avx2($($argument),*) };
                }
            }
            plain($($argument),*)
        }
    };
}
pub(crate) use wide;

/// Whether the functions of this module can work on a tensor: f32 in main memory, one element behind the other.
pub fn fits(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu && tensor.kind() == Kind::Float && tensor.is_contiguous()
}

fn read(tensor: &Tensor) -> &[f32] {
    assert!(fits(tensor), "a fused pass reads contiguous f32 in main memory");
    if tensor.numel() == 0 {
        return &[];
    }
    // SAFETY: as many f32 as the tensor has elements, alive while it is borrowed, written by nobody meanwhile.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), tensor.numel()) }
}

fn write(tensor: &mut Tensor) -> &mut [f32] {
    assert!(fits(tensor), "a fused pass writes contiguous f32 in main memory");
    if tensor.numel() == 0 {
        return &mut [];
    }
    // SAFETY: as above; what is not fresh has been held `apart` from everything else that the pass uses.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<f32>(), tensor.numel()) }
}

/// Refuses tensors to write to that share memory with another one in use: they would be one memory under two names, of which
/// one may change.
fn apart(written: &[&Tensor], read: &[&Tensor]) {
    let place = |tensor: &Tensor| {
        let first = tensor.data_ptr() as usize;
        first..first + tensor.numel() * tensor.kind().elt_size_in_bytes()
    };
    for (number, one) in written.iter().enumerate() {
        let one = place(one);
        for other in written[number + 1..].iter().chain(read).map(|other| place(other)) {
            let meet = one.start < other.end && other.start < one.end;
            assert!(!meet, "a fused pass writes to memory that it uses under another name too");
        }
    }
}

/// Integers of a list in main memory.
fn integers(tensor: &Tensor) -> &[i64] {
    let plain = tensor.device() == Device::Cpu && tensor.kind() == Kind::Int64;
    assert!(plain && tensor.is_contiguous(), "a list of i64 in main memory");
    if tensor.numel() == 0 {
        return &[];
    }
    // SAFETY: as many i64 as the tensor has elements, alive while it is borrowed, written by nobody meanwhile.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<i64>(), tensor.numel()) }
}

fn empty(shape: &[i64]) -> Tensor {
    Tensor::empty(shape, (Kind::Float, Device::Cpu))
}

/// Parts in which a sum is kept until its end: as many as the widest registers hold, twice.
const PARTS: usize = 16;

/// Adds up the parts of a sum, neighbours first.
#[inline(always)]
fn together<T: Copy + Add<Output = T>>(mut parts: [T; PARTS]) -> T {
    let mut width = PARTS;
    while width > 1 {
        width /= 2;
        for index in 0..width {
            parts[index] = parts[2 * index] + parts[2 * index + 1];
        }
    }
    parts[0]
}

/// The sum of squares of the elements, in f64.
///
/// In operators: `x.to_kind(Double).square().sum(Double)`.
pub fn squares(tensor: &Tensor) -> f64 {
    sum_of_squares(read(tensor))
}

wide! {
    fn sum_of_squares(values: &[f32]) -> f64 {
        let mut parts = [0f64; PARTS];
        let (whole, rest) = values.as_chunks::<PARTS>();
        for values in whole {
            for (part, value) in parts.iter_mut().zip(values) {
                *part += f64::from(*value) * f64::from(*value);
            }
        }
        for (part, value) in parts.iter_mut().zip(rest) {
            *part += f64::from(*value) * f64::from(*value);
        }
        together(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Of one memory: two tensors that meet in an element, and two that only touch.
    #[test]
    fn what_is_written_is_used_under_one_name() {
        let all = Tensor::zeros([8], (Kind::Float, Device::Cpu));
        let part = |first, count| all.narrow(0, first, count);
        let refused = |written: &[&Tensor], read: &[&Tensor]| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| apart(written, read))).is_err()
        };
        assert!(refused(&[&part(0, 4), &part(3, 4)], &[]));
        assert!(refused(&[&part(0, 4)], &[&part(4, 2), &part(2, 1)]));
        assert!(!refused(&[&part(0, 4), &part(4, 2)], &[&part(6, 2)]));
        assert!(!refused(&[&part(0, 0)], &[&all]), "nothing is shared with nothing");
        let rates = Rates {
            keep: 1.0,
            first: 0.1,
            second: 0.1,
            root: 1.0,
            eps: 1.0,
            rate: 0.1,
            scale: 1.0,
        };
        let moved = |mut second: Tensor| {
            let [mut weight, mut first] = [part(0, 2), part(2, 2)];
            adamw(rates, &mut weight, &mut first, &mut second, &part(6, 2));
        };
        moved(part(4, 2));
        let twice = std::panic::AssertUnwindSafe(|| moved(part(3, 2)));
        assert!(std::panic::catch_unwind(twice).is_err());
    }

    proptest! {
        #[test]
        fn squares_are_those_of_the_operators(values in prop::collection::vec(-1e9..1e9f32, 0..300)) {
            let tensor = Tensor::from_slice(&values);
            let wanted = tensor.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
            prop_assert!((squares(&tensor) - wanted).abs() <= 1e-14 * wanted);
        }
    }
}
