//! Checksums and squares equal those of the CPU bit for bit.

use tch::Tensor;

use super::numbers;
use super::tape::{Argument, Buffer, Tape};
use crate::{checksum, ops};

const ELEMENTS: usize = 4096;

/// A row of the table of pieces; addresses are filled in by relocation.
pub(super) struct Piece {
    pub(super) left: Buffer,
    pub(super) right: Option<Buffer>,
    pub(super) elements: usize,
    pub(super) first: u64,
    pub(super) salt: u64,
    pub(super) width: u32,
}

/// Writes the table and returns its number of blocks. Each piece comes with its byte offsets on the left and right.
pub(super) fn table(tape: &mut Tape, pieces: &[([usize; 2], Piece)]) -> (Buffer, usize) {
    let (mut rows, mut block) = (Vec::new(), 0);
    for (_, piece) in pieces {
        let tail = u64::from(piece.width) | (block as u64) << 32;
        rows.extend([0, 0, piece.elements as u64, piece.first, piece.salt, tail]);
        block += piece.elements.div_ceil(ELEMENTS);
    }
    let buffer = tape.with(&rows);
    for (row, ([left, right], piece)) in pieces.iter().enumerate() {
        tape.address(buffer, row * 48, piece.left, *left);
        if let Some(to) = piece.right {
            tape.address(buffer, row * 48 + 8, to, *right);
        }
    }
    (buffer, block)
}

/// Pseudorandom bytes.
fn noise(count: usize, seed: u64) -> Vec<u8> {
    (0..count as u64)
        .map(|i| ((i + 1).wrapping_mul(seed | 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect()
}

/// Checksums of some tensors in one launch: elements of each, their width, the number of the first.
fn checksums(tensors: &[(usize, u32, u64)]) -> (Tape, Buffer) {
    let mut tape = Tape::new("checksums");
    let piece = |(seed, &(elements, width, first)): (u64, &(usize, u32, u64))| {
        let left = tape.with(&noise(elements * width as usize, seed));
        ([0, 0], Piece { left, right: None, elements, first, salt: seed << 33 | 77, width })
    };
    let pieces: Vec<_> = (1..).zip(tensors).map(piece).collect();
    let (rows, blocks) = table(&mut tape, &pieces);
    let (partial, out) = (tape.room::<u64>(blocks), tape.room::<u64>(pieces.len()));
    tape.launch("checksum_blocks", blocks, &[rows.into(), pieces.len().into(), partial.into()]);
    tape.launch("checksum_pieces", pieces.len(), &[rows.into(), partial.into(), out.into()]);
    (tape, out)
}

#[test]
fn checksums_are_those_of_the_cpu() {
    let over = (1u64 << 32) - 100;
    let tensors = [
        (1, 4, 0),
        (4096, 4, 5),
        (4097, 2, over),
        (0, 4, 0),
        (9000, 1, 1 << 40),
        (300, 8, over),
        (12_289, 4, over),
        (0, 2, 9),
    ];
    let (tape, out) = checksums(&tensors);
    let found = tape.play().read::<u64>(out);
    for ((seed, (elements, width, first)), found) in (1u64..).zip(tensors).zip(found) {
        let bytes = Tensor::from_slice(&noise(elements * width as usize, seed));
        let kind = match width {
            1 => tch::Kind::Uint8,
            2 => tch::Kind::BFloat16,
            4 => tch::Kind::Float,
            _ => tch::Kind::Int64,
        };
        let tensor = match elements {
            0 => Tensor::zeros([0], (kind, tch::Device::Cpu)),
            _ => bytes.view_dtype(kind),
        };
        assert_eq!(
            found,
            checksum::slice(&tensor, first, seed << 33 | 77).unwrap(),
            "{elements} x {width}"
        );
    }
}

/// Squares of pieces with so many elements, and, if `checked`, their parts of checksums.
fn squares(pieces: &[usize], checked: bool) -> (Tape, [Buffer; 2]) {
    let mut tape = Tape::new(if checked { "squares, checked" } else { "squares" });
    let piece = |(seed, &elements): (u64, &usize)| {
        let left = tape.with(&numbers(elements, seed));
        let [first, salt] = if checked { [seed << 31, seed] } else { [0, 0] };
        ([0, 0], Piece { left, right: None, elements, first, salt, width: 4 })
    };
    let pieces: Vec<_> = (1..).zip(pieces).map(piece).collect();
    let (rows, _) = table(&mut tape, &pieces);
    let out = tape.room::<f64>(pieces.len());
    let sums = if checked { tape.room::<u64>(pieces.len()) } else { out };
    let asked = if checked { sums.into() } else { Argument::Null };
    tape.launch("squares", pieces.len(), &[rows.into(), pieces.len().into(), out.into(), asked]);
    (tape, [out, sums])
}

#[test]
fn squares_and_their_checksums_are_those_of_the_cpu() {
    let pieces: Vec<usize> = (0..19).map(|i| i * i * 7 + i % 3).collect();
    let (tape, [out, sums]) = squares(&pieces, true);
    let played = tape.play();
    let found = played.read::<f64>(out).into_iter().zip(played.read::<u64>(sums));
    for ((seed, &elements), (found, sum)) in (1..).zip(&pieces).zip(found) {
        let x = Tensor::from_slice(&numbers(elements, seed));
        let wanted = ops::CPU.squares(&x).unwrap();
        assert_eq!(found.to_bits(), wanted.to_bits(), "{elements}");
        assert_eq!(sum, checksum::slice(&x, seed << 31, seed).unwrap(), "{elements}");
    }
}

/// The squares of a gradient, and its checksum.
pub(super) fn wide(elements: usize) -> Tape {
    squares(&[elements], true).0
}

pub(super) fn small() -> Vec<Tape> {
    vec![
        checksums(&[(4100, 4, 7), (3, 2, 1), (10, 8, 0), (33, 1, 0)]).0,
        squares(&[300, 17, 1], false).0,
        squares(&[300, 17, 1], true).0,
    ]
}

/// Tensors of many blocks.
pub(super) fn large() -> Vec<Tape> {
    vec![
        checksums(&[(300_001, 4, 7), (70_003, 2, 1), (9000, 8, 0)]).0,
        squares(&[200_003, 17], true).0,
    ]
}
