//! What is left to do for gradients: sums over bands, and tensors that are widened.

use super::tape::{Buffer, Tape};
use super::{Values, bits, left_bits, numbers};

/// Rows of a band.
const BAND: usize = 32;

/// Elements of a block that widens.
const ELEMENTS: usize = 4096;

/// A buffer, and in numbers of 4 bytes how far in it something begins.
type Place = (Buffer, usize);

/// A gradient to be finished.
#[derive(Clone, Copy)]
pub(super) enum Unfinished {
    /// From sums over bands.
    Sum {
        partial: Place,
        /// The other sum.
        other: Option<Place>,
        factor: Option<Buffer>,
        out: Place,
        /// From one column of the outcome to the next.
        stride: usize,
    },
    /// A tensor of bf16, of so many elements, of which an expert has some.
    Wide { from: Buffer, ends: Option<Buffer>, out: Buffer, elements: usize, each: usize },
}

impl Unfinished {
    pub(super) fn sum(partial: Place, out: Place) -> Unfinished {
        Unfinished::Sum { partial, other: None, factor: None, out, stride: 1 }
    }

    /// What the table says of it beside addresses, if bands are of so many rows and columns; and its blocks.
    fn numbers(self, [rows, width]: [usize; 2]) -> ([usize; 4], usize) {
        match self {
            Unfinished::Sum { stride, .. } => {
                ([0, rows.div_ceil(BAND), width, stride], width.div_ceil(256))
            }
            Unfinished::Wide { elements, each, .. } => {
                ([elements, 0, each, 2], elements.div_ceil(ELEMENTS))
            }
        }
    }

    fn places(self) -> [Option<Place>; 4] {
        match self {
            Unfinished::Sum { partial, other, factor, out, .. } => {
                [Some(partial), other, factor.map(|of| (of, 0)), Some(out)]
            }
            Unfinished::Wide { from, ends, out, .. } => {
                [Some((from, 0)), ends.map(|of| (of, 0)), None, Some((out, 0))]
            }
        }
    }
}

/// All of them by one launch: bands are of so many rows, each of so many columns.
pub(super) fn finish(tape: &mut Tape, size: [usize; 2], all: &[Unfinished]) {
    let (mut words, mut blocks) = (Vec::new(), 0);
    for one in all {
        let ([elements, bands, width, stride], own) = one.numbers(size);
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        words.extend([0, 0, elements as u64, 0, pair(bands, width), pair(stride, blocks)]);
        blocks += own;
    }
    let table = tape.with(&words);
    for (at, one) in all.iter().enumerate() {
        for (place, address) in one.places().into_iter().enumerate() {
            if let Some((buffer, first)) = address {
                tape.address(table, 48 * at + 8 * place, buffer, 4 * first);
            }
        }
    }
    tape.launch("finish", blocks, &[table.into(), all.len().into()]);
}

/// Two tensors, one of them of experts with so many rows and elements each, on both sides of a sum over the rows of a matrix.
fn mixed(counts: &[u32], each: usize, plain: usize) -> (Tape, [Buffer; 3]) {
    let mut tape = Tape::new("finish");
    let ends = counts.iter().scan(0, |end, count| {
        *end += count;
        Some(*end)
    });
    let ends = tape.with(&ends.collect::<Vec<_>>());
    let elements = counts.len() * each;
    let stack = Values::Narrow.with(&mut tape, elements, 7);
    let matrix = Values::Narrow.with(&mut tape, plain, 8);
    let partial = tape.with(&numbers(2 * 300, 9));
    let out = [elements, plain, 300].map(|count| tape.room::<f32>(count));
    let all = [
        Unfinished::Wide { from: stack, ends: Some(ends), out: out[0], elements, each },
        Unfinished::sum((partial, 0), (out[2], 0)),
        Unfinished::Wide { from: matrix, ends: None, out: out[1], elements: plain, each: plain },
    ];
    finish(&mut tape, [BAND + 1, 300], &all);
    (tape, out)
}

/// What a library may have left where an expert has no rows goes, and nothing else.
#[test]
fn experts_without_rows_have_zeros() {
    for (counts, each) in [([0, 8, 0, 0, 16], 1300), ([8, 0, 8, 0, 0], 9000), ([0, 0, 0, 8, 0], 1)]
    {
        let (tape, [stack, matrix, sums]) = mixed(&counts, each, 5000);
        let played = tape.play();
        let wide = |count, seed| {
            let narrow = super::bf16(&numbers(count, seed)).into_iter();
            narrow.map(|value| u32::from(value) << 16).collect::<Vec<_>>()
        };
        let wanted = wide(counts.len() * each, 7).into_iter().enumerate();
        let wanted = wanted.map(|(at, value)| if counts[at / each] == 0 { 0 } else { value });
        assert_eq!(left_bits(&played, stack), wanted.collect::<Vec<_>>());
        assert_eq!(left_bits(&played, matrix), wide(5000, 8));
        let partial = numbers(2 * 300, 9);
        let wanted = partial[..300].iter().zip(&partial[300..]);
        let wanted = wanted.map(|(a, b)| (f64::from(*a) + f64::from(*b)) as f32);
        assert_eq!(left_bits(&played, sums), bits(&wanted.collect::<Vec<_>>()));
    }
}

pub(super) fn small() -> Vec<Tape> {
    vec![mixed(&[0, 3], 9, 20).0]
}

/// Experts of several blocks each.
pub(super) fn large() -> Vec<Tape> {
    vec![mixed(&[0, 8, 0, 16, 40], 9000, 50_000).0]
}
