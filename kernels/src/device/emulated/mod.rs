//! The kernels for devices, run on the CPU: `device/` compiled by a C++ compiler, where the threads of a block are fibers.
//!
//! Each kernel is held against the CPU's table and against f64, over waves of 32 and 64 threads in three orders, whose bits are
//! the same; and over compilers and levels of optimisation. A few blocks of each run under a thread and an address sanitizer,
//! which must find faults that are planted. What needs clang is skipped where there is none, which is said. Where a GPU is at
//! hand it has to leave the emulator's bits (`on_gpu`).

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
mod router;
mod rows;
mod spans;
mod step;
mod tape;

pub(crate) use launched::queue;
use tape::{Buffer, Played, Tape};
use tch::{Kind, Tensor};

/// A few blocks of every kernel.
fn small() -> Vec<Tape> {
    let groups = [
        attention::small(),
        exact::small(),
        experts::small(),
        finish::small(),
        router::small(),
        products::small(),
        rows::small(),
        spans::small(),
        step::small(),
    ];
    groups.into_iter().flatten().collect()
}

/// Every kernel over several blocks, tiles and documents, as wide as a model is: for a GPU, whose blocks run side by side.
fn large() -> Vec<Tape> {
    let groups = [
        attention::large(),
        exact::large(),
        experts::large(),
        finish::large(),
        router::large(),
        products::large(),
        rows::large(),
        spans::large(),
        step::large(),
    ];
    groups.into_iter().flatten().collect()
}

/// Numbers between -1 and 1 without structure.
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

/// The bits of f32 as bf16, to nearest, ties to even.
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

/// The kind in which the model's large products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Values {
    Wide,
    Narrow,
}

impl Values {
    fn of(self) -> Kind {
        if self == Values::Wide { Kind::Float } else { Kind::BFloat16 }
    }

    /// As it ends a kernel's name.
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

    /// The tensor of what [`Values::with`] fills a buffer with.
    fn tensor(self, shape: &[i64], seed: u64) -> Tensor {
        let count = shape.iter().product::<i64>() as usize;
        tensor(&numbers(count, seed), shape).to_kind(self.of())
    }

    fn read(self, played: &Played, buffer: Buffer, shape: &[i64]) -> Tensor {
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
fn left_bits(played: &Played, buffer: Buffer) -> Vec<u32> {
    bits(&played.read::<f32>(buffer))
}

/// Holds numbers against exact ones: the largest difference over the largest number, where that is above 1.
fn close(found: &[f32], exact: &Tensor, within: f64) {
    let exact = Vec::<f64>::try_from(&exact.reshape([-1])).unwrap();
    assert_eq!(found.len(), exact.len());
    let size = exact.iter().fold(1f64, |size, value| size.max(value.abs()));
    for (place, (found, exact)) in found.iter().zip(&exact).enumerate() {
        let difference = (f64::from(*found) - exact).abs() / size;
        assert!(
            difference <= within,
            "{place}: {found} for {exact}: {difference:e} over {within:e}"
        );
    }
}
