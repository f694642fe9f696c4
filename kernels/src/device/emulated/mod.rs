//! Runs the device kernels on the CPU: `device/` compiled by a C++ compiler, with fibers as the threads of a block.
//!
//! Each kernel is compared to the CPU's table and to f64, with waves of 32 and 64 threads in three orders, which must
//! give equal bits, and with several compilers and optimization levels. A few blocks of each kernel run under a thread
//! and an address sanitizer, which must find planted faults. Checks that need clang are skipped, with a message, if it
//! is missing. A GPU, if available, must reproduce the emulator's bits (`on_gpu`).

mod attention;
mod build;
mod bytes;
mod exact;
mod experts;
mod finish;
mod launched;
mod on_gpu;
mod products;
mod proof;
mod routed;
mod router;
mod rows;
mod spans;
mod step;
mod tape;

pub(crate) use launched::queue;
use tape::{Buffer, Tape, TapeBuffers};
use tch::{Kind, Tensor};

/// A few blocks of every kernel.
fn small() -> Vec<Tape> {
    let groups = [
        attention::small(),
        exact::small(),
        experts::small(),
        finish::small(),
        routed::small(),
        router::small(),
        products::small(),
        rows::small(),
        spans::small(),
        step::small(),
    ];
    groups.into_iter().flatten().collect()
}

/// Every kernel over several blocks, tiles and documents, at the width of a model: for a GPU, which runs blocks in
/// parallel.
fn large() -> Vec<Tape> {
    let groups = [
        attention::large(),
        exact::large(),
        experts::large(),
        finish::large(),
        routed::large(),
        router::large(),
        products::large(),
        rows::large(),
        spans::large(),
        step::large(),
    ];
    groups.into_iter().flatten().collect()
}

/// Pseudorandom numbers between -1 and 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// f32 rounded to bf16, to nearest, ties to even.
fn bf16(values: &[f32]) -> Vec<u16> {
    let narrow = |value: &f32| {
        let bits = value.to_bits();
        ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
    };
    values.iter().map(narrow).collect()
}

fn tensor(values: &[f32], shape: &[i64]) -> Tensor {
    Tensor::from_slice(values).reshape(shape)
}

/// From bits.
fn tensor_bf16(values: &[u16], shape: &[i64]) -> Tensor {
    let wide: Vec<f32> = values.iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect();
    tensor(&wide, shape).to_kind(Kind::BFloat16)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The kind of the operands of the model's large matmuls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Values {
    Wide,
    Narrow,
}

impl Values {
    fn of(self) -> Kind {
        if self == Values::Wide { Kind::Float } else { Kind::BFloat16 }
    }

    /// The suffix of a kernel's name.
    fn kind(self) -> &'static str {
        if self == Values::Wide { "f32" } else { "bf16" }
    }

    fn with(self, tape: &mut Tape, count: usize, seed: u64) -> Buffer {
        self.scaled(tape, count, seed, 1.0)
    }

    fn scaled(self, tape: &mut Tape, count: usize, seed: u64, by: f32) -> Buffer {
        let values: Vec<f32> = numbers(count, seed).iter().map(|value| value * by).collect();
        match self {
            Values::Wide => tape.with(&values),
            Values::Narrow => tape.with(&bf16(&values)),
        }
    }

    fn room(self, tape: &mut Tape, count: usize) -> Buffer {
        if self == Values::Wide { tape.room::<f32>(count) } else { tape.room::<u16>(count) }
    }

    /// The same numbers as [`Values::with`] writes to a buffer, as a tensor.
    fn tensor(self, shape: &[i64], seed: u64) -> Tensor {
        let count = shape.iter().product::<i64>() as usize;
        tensor(&numbers(count, seed), shape).to_kind(self.of())
    }

    fn read(self, played: &TapeBuffers, buffer: Buffer, shape: &[i64]) -> Tensor {
        match self {
            Values::Wide => tensor(&played.read(buffer), shape),
            Values::Narrow => tensor_bf16(&played.read(buffer), shape),
        }
    }
}

/// The bits of a tensor of f32.
fn bits_of(tensor: &Tensor) -> Vec<u32> {
    bits(&Vec::<f32>::try_from(&tensor.reshape([-1])).unwrap())
}

/// The bits of f32 that a tape left in a buffer.
fn left_bits(played: &TapeBuffers, buffer: Buffer) -> Vec<u32> {
    bits(&played.read::<f32>(buffer))
}

/// Checks numbers against exact ones, as [`far`] measures.
fn close(found: &[f32], exact: &Tensor, within: f64) {
    let difference = far(found, exact);
    assert!(difference <= within, "{difference:e} over {within:e}");
}

/// The largest difference from exact numbers, divided by the largest number if that is above 1.
fn far(found: &[f32], exact: &Tensor) -> f64 {
    let exact = Vec::<f64>::try_from(&exact.reshape([-1])).unwrap();
    assert_eq!(found.len(), exact.len());
    let size = exact.iter().fold(1f64, |size, value| size.max(value.abs()));
    let differences = found.iter().zip(&exact).map(|(found, exact)| {
        let difference = (f64::from(*found) - exact).abs();
        if difference.is_nan() { f64::INFINITY } else { difference }
    });
    differences.fold(0.0, f64::max) / size
}
