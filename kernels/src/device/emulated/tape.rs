//! A recording for the emulator: buffers, addresses to relocate into them, and kernel launches with arguments.

use std::ffi::CString;

use tch::{Device, Kind, Tensor};

use super::build::{Build, played};
use crate::device::queue::Queue;

/// A buffer of a tape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer(usize);

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument {
    /// The address of a buffer.
    Address(Buffer),
    /// An address that is not used.
    Null,
    /// 32 bits.
    Word(u32),
    /// An f32.
    Float(f32),
}

impl From<Buffer> for Argument {
    fn from(buffer: Buffer) -> Self {
        Argument::Address(buffer)
    }
}

impl From<usize> for Argument {
    fn from(count: usize) -> Self {
        Argument::Word(u32::try_from(count).unwrap())
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Argument::Float(value)
    }
}

/// What a buffer can be filled with.
pub(super) trait Element: Copy {
    fn bytes(self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! element {
    ($($kind:ty),*) => {$(
        impl Element for $kind {
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn read(bytes: &[u8]) -> Self {
                <$kind>::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}
element!(u8, u16, u32, u64, i64, f32, f64);

/// A sequence of launches and the memory that they use.
#[derive(Debug)]
pub(super) struct Tape {
    pub(super) name: String,
    buffers: Vec<Vec<u8>>,
    addresses: Vec<[u64; 4]>,
    launches: Vec<(String, usize, Vec<Argument>)>,
    /// Buffers whose bits on a device depend on its matrix units, the bytes of an element, bf16 or f32, and how far a
    /// device's may be from the emulator's.
    near: Vec<(Buffer, usize, f64)>,
}

impl Tape {
    pub(super) fn new(name: &str) -> Tape {
        let name = name.to_owned();
        Tape { name, buffers: vec![], addresses: vec![], launches: vec![], near: vec![] }
    }

    /// Keeps the first `launches` launches only.
    pub(super) fn first(mut self, launches: usize) -> Tape {
        self.launches.truncate(launches);
        self
    }

    /// A buffer with these elements.
    pub(super) fn with<T: Element>(&mut self, values: &[T]) -> Buffer {
        self.buffers.push(values.iter().flat_map(|value| value.bytes()).collect());
        Buffer(self.buffers.len() - 1)
    }

    /// An output buffer. Elements that no launch writes stay NaN, as f32, bf16 and f64.
    pub(super) fn room<T: Element>(&mut self, count: usize) -> Buffer {
        self.buffers.push(vec![0xFF; count * size_of::<T>()]);
        Buffer(self.buffers.len() - 1)
    }

    /// A device's matrix units add in an undocumented order: each of these sums, rounded to bf16 at their end, has
    /// `terms` products of numbers up to `size`.
    pub(super) fn by_matrix_units(&mut self, sums: Buffer, terms: usize, size: f64) {
        // Each addition errs by less than 2^-23 of the terms so far, here and on the device.
        let within = (terms * terms) as f64 * size * size * 2f64.powi(-22);
        self.near::<u16>(sums, within);
    }

    /// The same for what follows from such sums: bf16 (as `u16`) or f32, within a bound of the emulator's and a
    /// rounding.
    pub(super) fn near<T: Element>(&mut self, numbers: Buffer, within: f64) {
        self.near.push((numbers, size_of::<T>(), within));
    }

    /// Whether it has such sums.
    pub(super) fn has_matrix_units(&self) -> bool {
        !self.near.is_empty()
    }

    /// Stores the address of byte `offset` of `target` at byte `at` of `buffer`.
    pub(super) fn address(&mut self, buffer: Buffer, at: usize, target: Buffer, offset: usize) {
        self.addresses.push([buffer.0 as u64, at as u64, target.0 as u64, offset as u64]);
    }

    pub(super) fn launch(&mut self, kernel: &str, blocks: usize, arguments: &[Argument]) {
        self.launches.push((kernel.to_owned(), blocks, arguments.to_vec()));
    }

    /// The kernels that it launches.
    pub(super) fn kernels(&self) -> impl Iterator<Item = &str> {
        self.launches.iter().map(|(kernel, ..)| kernel.as_str())
    }

    /// The format that `run.cpp` reads.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let text = |out: &mut Vec<u8>, bytes: &[u8]| {
            out.extend((bytes.len() as u64).to_le_bytes());
            out.extend(bytes);
        };
        let number = |out: &mut Vec<u8>, value: u64| out.extend(value.to_le_bytes());
        text(&mut out, self.name.as_bytes());
        number(&mut out, self.buffers.len() as u64);
        self.buffers.iter().for_each(|buffer| text(&mut out, buffer));
        number(&mut out, self.addresses.len() as u64);
        self.addresses.iter().flatten().for_each(|value| number(&mut out, *value));
        number(&mut out, self.launches.len() as u64);
        for (kernel, blocks, arguments) in &self.launches {
            text(&mut out, kernel.as_bytes());
            number(&mut out, *blocks as u64);
            number(&mut out, arguments.len() as u64);
            for argument in arguments {
                let (kind, value) = match *argument {
                    Argument::Address(buffer) => (0, buffer.0 as u64),
                    Argument::Null => (1, 0),
                    Argument::Word(value) => (1, u64::from(value)),
                    Argument::Float(value) => (1, u64::from(value.to_bits())),
                };
                number(&mut out, kind);
                number(&mut out, value);
            }
        }
        out
    }

    /// The memory after playing it, equal for waves of 32 and 64 threads in three orders.
    pub(super) fn play(&self) -> TapeBuffers {
        let (told, left) = played(&Build::PLAIN, "all", &[self]);
        let left = left.unwrap_or_else(|| panic!("{}: {told}", self.name));
        self.left(&left)
    }

    /// The same from the bytes of all its buffers.
    pub(super) fn left(&self, mut rest: &[u8]) -> TapeBuffers {
        let buffers = self.buffers.iter().map(|buffer| {
            let (own, others) = rest.split_at(buffer.len());
            rest = others;
            own.to_vec()
        });
        TapeBuffers { buffers: buffers.collect() }
    }

    /// The memory after playing it on a device.
    pub(super) fn play_on(&self, device: Device, queue: &Queue) -> TapeBuffers {
        let room = |bytes: &Vec<u8>| Tensor::empty([bytes.len() as i64], (Kind::Uint8, device));
        let mut places: Vec<Tensor> = self.buffers.iter().map(room).collect();
        let mut bytes = self.buffers.clone();
        for [buffer, at, target, offset] in
            self.addresses.iter().map(|one| one.map(|it| it as usize))
        {
            let address = places[target].data_ptr() as u64 + offset as u64;
            bytes[buffer][at..at + 8].copy_from_slice(&address.to_le_bytes());
        }
        for (place, bytes) in places.iter_mut().zip(&bytes) {
            place.copy_(&Tensor::from_slice(bytes));
        }
        for (kernel, blocks, arguments) in &self.launches {
            let word = |argument: &Argument| match *argument {
                Argument::Address(buffer) => places[buffer.0].data_ptr() as u64,
                Argument::Null => 0,
                Argument::Word(value) => u64::from(value),
                Argument::Float(value) => u64::from(value.to_bits()),
            };
            let mut words: Vec<u64> = arguments.iter().map(word).collect();
            let name = CString::new(kernel.as_str()).unwrap();
            queue.launch_words(&name, *blocks as u32, &mut words).unwrap();
        }
        let read = |place: &Tensor| Vec::<u8>::try_from(place.to_device(Device::Cpu)).unwrap();
        TapeBuffers { buffers: places.iter().map(read).collect() }
    }
}

impl Tape {
    /// Of the numbers that depend on matrix units on two machines, how many differ by more than their bound and their
    /// rounding to bf16.
    pub(super) fn far(&self, found: &[u8], wanted: &[u8]) -> usize {
        assert_eq!(found.len(), wanted.len(), "{}", self.name);
        let number = |bytes: &[u8]| match *bytes {
            [low, high] => f64::from(f32::from_le_bytes([0, 0, low, high])),
            _ => f64::from(f32::read(bytes)),
        };
        let (mut differ, mut rest) = (0, (found, wanted));
        for (numbers, size, within) in &self.near {
            let length = self.buffers[numbers.0].len();
            let ((found, founds), (wanted, wanteds)) =
                (rest.0.split_at(length), rest.1.split_at(length));
            rest = (founds, wanteds);
            let pairs = found.chunks_exact(*size).zip(wanted.chunks_exact(*size));
            let far = pairs.filter(|(found, wanted)| {
                let (left, right) = (number(found), number(wanted));
                // Elements that no launch writes stay the same NaN.
                let near = (left - right).abs() <= within + left.abs().max(right.abs()) / 128.0;
                found != wanted && !near
            });
            differ += far.count();
        }
        differ
    }
}

/// What a tape left in its buffers.
#[derive(Debug)]
pub(super) struct TapeBuffers {
    buffers: Vec<Vec<u8>>,
}

impl TapeBuffers {
    /// What every device must leave: all bytes except addresses, which differ between memories, and sums of matrix
    /// units, which follow separately.
    pub(super) fn comparable(mut self, tape: &Tape) -> [Vec<u8>; 2] {
        for [buffer, at, ..] in tape.addresses.iter().map(|one| one.map(|it| it as usize)) {
            self.buffers[buffer][at..at + 8].fill(0);
        }
        let near = tape.near.iter().map(|(sums, ..)| std::mem::take(&mut self.buffers[sums.0]));
        let near = near.collect::<Vec<_>>().concat();
        [self.buffers.concat(), near]
    }

    pub(super) fn read<T: Element>(&self, buffer: Buffer) -> Vec<T> {
        self.buffers[buffer.0].chunks_exact(size_of::<T>()).map(T::read).collect()
    }
}
