//! The end of gradients: sums over bands; conversion to f32, addition and checksum in one pass.

use tch::{Kind, Tensor};

use super::tape::{Buffer, Tape};
use super::{Values, bits, bits_of, left_bits, numbers};
use crate::checksum;

/// Rows of a band.
const BAND: usize = 32;

/// Elements per block of an addition.
const ELEMENTS: usize = 4096;

/// A buffer, and an offset in it in numbers of 4 bytes.
type BufferOffset = (Buffer, usize);

/// A gradient to be finished from sums over bands.
#[derive(Clone, Copy)]
pub(super) struct Unfinished {
    pub(super) partial: BufferOffset,
    /// The second sum.
    pub(super) other: Option<BufferOffset>,
    pub(super) factor: Option<Buffer>,
    pub(super) out: BufferOffset,
    /// Distance between columns of the result.
    pub(super) stride: usize,
}

impl Unfinished {
    pub(super) fn sum(partial: BufferOffset, out: BufferOffset) -> Unfinished {
        Unfinished { partial, other: None, factor: None, out, stride: 1 }
    }
}

fn pair(low: usize, high: usize) -> u64 {
    low as u64 | (high as u64) << 32
}

/// Finishes all of them in one launch: bands of so many rows with so many columns.
pub(super) fn finish(tape: &mut Tape, [rows, width]: [usize; 2], all: &[Unfinished]) {
    let (mut words, mut blocks) = (Vec::new(), 0);
    for one in all {
        words.extend([0, 0, 0, 0, pair(rows.div_ceil(BAND), width), pair(one.stride, blocks)]);
        blocks += width.div_ceil(32);
    }
    let table = tape.with(&words);
    for (at, Unfinished { partial, other, factor, out, .. }) in all.iter().enumerate() {
        let places = [Some(*partial), *other, factor.map(|of| (of, 0)), Some(*out)];
        for (place, address) in places.into_iter().enumerate() {
            if let Some((buffer, first)) = address {
                tape.address(table, 48 * at + 8 * place, buffer, 4 * first);
            }
        }
    }
    tape.launch("finish", blocks, &[table.into(), all.len().into()]);
}

/// A side of a sum.
#[derive(Clone, Copy)]
struct SumOperand {
    values: Values,
    seed: u64,
    /// Rows of each expert, if the side has experts.
    counts: Option<&'static [i32]>,
    /// Number of elements before it in its buffer.
    before: usize,
    asked: bool,
}

/// A row of the table.
#[derive(Clone, Copy)]
struct Row {
    sides: [Option<SumOperand>; 2],
    elements: usize,
    /// Elements of one expert.
    each: usize,
    /// Number of its first element in its tensor.
    first: u64,
    /// Where the sum is written: to its own buffer after so many elements, over the left side, or nowhere.
    out: Out,
}

#[derive(Clone, Copy, PartialEq)]
enum Out {
    Own(usize),
    Left,
    Nowhere,
}

const LEAF: SumOperand =
    SumOperand { values: Values::Narrow, seed: 1, counts: None, before: 0, asked: true };

impl SumOperand {
    /// Numbers of which every third is -0.0.
    fn numbers(self, elements: usize) -> Vec<f32> {
        let all = numbers(elements, self.seed).into_iter().enumerate();
        let all: Vec<f32> = all.map(|(at, it)| if at % 3 == 0 { -0.0 } else { it }).collect();
        match self.values {
            Values::Wide => all,
            Values::Narrow => {
                let wide = |bits: u16| f32::from_bits(u32::from(bits) << 16);
                super::bf16(&all).into_iter().map(wide).collect()
            }
        }
    }

    /// The CPU's operand: f32, with zeros for experts without rows.
    fn tensor(self, Row { elements, each, first, .. }: Row) -> Tensor {
        let mut values = self.numbers(elements);
        for (at, value) in values.iter_mut().enumerate() {
            let expert = (first as usize + at) / each;
            if self.counts.is_some_and(|counts| counts[expert] == 0) {
                *value = 0.0;
            }
        }
        Tensor::from_slice(&values)
    }
}

/// Adds all rows in one launch: returns where each sum is, and the checksums in the order of rows and sides.
fn additions(rows: &[Row]) -> (Tape, Vec<Option<(Buffer, usize)>>, Buffer) {
    let mut tape = Tape::new("finish_add");
    let (mut words, mut addresses, mut outs, mut blocks) = (vec![], vec![], vec![], 0);
    let total: usize = rows.iter().map(|row| row.elements.div_ceil(ELEMENTS)).sum();
    let (mut sums, mut asked) = (Vec::new(), 0);
    for (at, row) in rows.iter().enumerate() {
        let (mut asks, mut left) = (0, None);
        for (place, side) in row.sides.iter().enumerate() {
            let Some(side) = side else { continue };
            // The memory before it must be neither read nor modified.
            let values = [vec![7.0; side.before], side.numbers(row.elements)].concat();
            let (buffer, width) = match side.values {
                Values::Wide => (tape.with(&values), 4),
                Values::Narrow => (tape.with(&super::bf16(&values)), 2),
            };
            left = left.or(Some((buffer, side.before)));
            addresses.push((80 * at + 8 * place, buffer, width * side.before));
            if let Some(counts) = side.counts {
                let ends = counts.iter().scan(0u32, |end, count| {
                    *end += count.cast_unsigned();
                    Some(*end)
                });
                let ends = tape.with(&ends.collect::<Vec<_>>());
                addresses.push((80 * at + 24 + 8 * place, ends, 0));
            }
            asks |= usize::from(side.values == Values::Narrow) << place;
            if side.asked {
                asks |= 4 << place;
                asked += 1;
                sums.extend([0, 0, row.elements as u64, 0, 0, pair(4, place * total + blocks)]);
            }
        }
        let out = match row.out {
            Out::Own(before) => Some((tape.room::<f32>(before + row.elements), before)),
            Out::Left => left,
            Out::Nowhere => None,
        };
        addresses.extend(out.map(|(buffer, before)| (80 * at + 16, buffer, 4 * before)));
        words.extend([0, 0, 0, 0, 0, row.elements as u64, row.first, 9 << 33 | 5, row.each as u64]);
        words.push(pair(asks, blocks));
        blocks += row.elements.div_ceil(ELEMENTS);
        outs.push(out);
    }
    let table = tape.with(&words);
    for (at, buffer, offset) in addresses {
        tape.address(table, at, buffer, offset);
    }
    let (partial, out) = (tape.room::<u64>(2 * total), tape.room::<u64>(asked));
    let sums = tape.with(&sums);
    let arguments = [table.into(), rows.len().into(), blocks.into(), partial.into()];
    tape.launch("finish_add", blocks, &arguments);
    tape.launch("checksum_pieces", asked, &[sums.into(), partial.into(), out.into()]);
    (tape, outs, out)
}

/// bf16 and f32 leaves: added to each other, to nodes, and alone; with experts without rows on either side.
fn rows(elements: usize) -> Vec<Row> {
    const SOME: [&[i32]; 2] = [&[0, 8, 0, 0, 16], &[8, 0, 8, 0, 0]];
    let each = elements.div_ceil(5).max(1);
    let side = |values, seed| SumOperand { values, seed, ..LEAF };
    let (narrow, wide) = (side(Values::Narrow, 2), side(Values::Wide, 3));
    let sum = SumOperand { asked: false, ..side(Values::Wide, 4) };
    let experts = |side: SumOperand, of: usize| SumOperand { counts: Some(SOME[of]), ..side };
    let row = |sides, out| Row { sides, elements, each, first: 0, out };
    vec![
        row([Some(LEAF), Some(narrow)], Out::Own(0)),
        row([Some(experts(LEAF, 0)), Some(experts(narrow, 1))], Out::Own(0)),
        row([Some(experts(wide, 0)), Some(experts(SumOperand { seed: 8, ..wide }, 1))], Out::Left),
        row([Some(sum), Some(experts(narrow, 1))], Out::Left),
        row([Some(sum), Some(SumOperand { seed: 5, ..sum })], Out::Left),
        row([Some(LEAF), Some(sum)], Out::Own(3)),
        row([Some(experts(narrow, 1)), None], Out::Own(0)),
        row([Some(experts(wide, 0)), None], Out::Nowhere),
        // Addresses that are not aligned for accesses of 8 or 16 bytes.
        row([Some(SumOperand { before: 1, ..LEAF }), Some(narrow)], Out::Own(0)),
        row([Some(LEAF), Some(SumOperand { before: 3, ..wide })], Out::Own(4)),
        row(
            [Some(SumOperand { before: 2, ..sum }), Some(SumOperand { before: 4, ..narrow })],
            Out::Left,
        ),
        row([Some(experts(LEAF, 1)), Some(narrow)], Out::Own(1)),
    ]
}

fn check_rows(rows: &[Row]) {
    let (tape, outs, sums) = additions(rows);
    let played = tape.play();
    let mut checksums = played.read::<u64>(sums).into_iter();
    for (row, out) in rows.iter().zip(outs) {
        let sides = row.sides.map(|side| side.map(|side| (side.tensor(*row), side.asked)));
        for (tensor, _) in sides.iter().flatten().filter(|(_, asked)| *asked) {
            let wanted = checksum::slice(tensor, row.first, 9 << 33 | 5).unwrap();
            assert_eq!(checksums.next(), Some(wanted));
        }
        let Some((out, before)) = out else { continue };
        let wanted = match &sides {
            [Some((left, _)), Some((right, _))] => left + right,
            [Some((left, _)), None] => left.shallow_clone(),
            _ => panic!("nothing is added"),
        };
        assert_eq!(left_bits(&played, out)[before..], bits_of(&wanted), "{}", row.elements);
    }
    assert_eq!(checksums.next(), None);
}

#[test]
fn nodes_are_added_and_checked_as_the_cpu_does() {
    for elements in [1, 5, 4096, 4099, 9001] {
        check_rows(&rows(elements));
    }
}

/// Part of a tensor that is sent: expert ranges and checksum weights are those of the whole tensor.
#[test]
fn a_part_is_counted_where_it_stands() {
    let experts = SumOperand { counts: Some(&[3, 0, 2, 0]), ..LEAF };
    let part = |first, elements, before| {
        let left = Some(SumOperand { before, ..experts });
        Row { sides: [left, None], elements, each: 2000, first, out: Out::Own(before) }
    };
    check_rows(&[part(0, 7999, 0), part(1999, 2, 1), part(3000, 4100, 4), part(7999, 1, 0)]);
    let over = (1 << 32) - 100;
    let far = Row { first: over, each: 1 << 40, ..part(0, 5000, 0) };
    check_rows(&[Row {
        sides: [Some(LEAF), Some(SumOperand { values: Values::Wide, ..LEAF })],
        ..far
    }]);
}

/// NaNs and infinities on either side, and denormal numbers.
#[test]
fn what_is_no_number_stays_so() {
    let values = [f32::NAN, f32::INFINITY, -f32::INFINITY, 1e-40, -0.0, 0.0, 3.5, f32::MAX];
    let all: Vec<f32> = (0..64).map(|at| values[at % 8]).collect();
    let others: Vec<f32> = (0..64).map(|at| values[at / 8]).collect();
    let mut tape = Tape::new("what is no number");
    let (left, right, out) =
        (tape.with(&super::bf16(&all)), tape.with(&others), tape.room::<f32>(64));
    let table = tape.with(&[0u64, 0, 0, 0, 0, 64, 0, 0, 64, 1]);
    for (at, buffer) in [left, right, out].into_iter().enumerate() {
        tape.address(table, 8 * at, buffer, 0);
    }
    let arguments = [table.into(), 1.into(), 1.into(), super::tape::Argument::Null];
    tape.launch("finish_add", 1, &arguments);
    let wanted = Tensor::from_slice(&all).to_kind(Kind::BFloat16).to_kind(Kind::Float);
    let wanted = Vec::<f32>::try_from(wanted + Tensor::from_slice(&others)).unwrap();
    for (found, wanted) in tape.play().read::<f32>(out).into_iter().zip(wanted) {
        let alike = found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan();
        assert!(alike, "{found} {wanted}");
    }
}

/// Faults planted in a table: data of an expert without rows, a side of the wrong kind, a part at the wrong position,
/// an additional element.
#[test]
fn planted_faults_of_a_table_are_found() {
    let experts = SumOperand { counts: Some(&[8, 0, 8, 8, 8]), ..LEAF };
    let row = Row {
        sides: [Some(experts), None],
        elements: 5000,
        each: 1000,
        first: 0,
        out: Out::Own(0),
    };
    let left = |row: Row| {
        let (tape, outs, sums) = additions(&[row]);
        let played = tape.play();
        let mut found = left_bits(&played, outs[0].unwrap().0);
        found.truncate(4990);
        (found, played.read::<u64>(sums))
    };
    let (values, checksum) = left(row);
    let plants = [
        Row { sides: [Some(LEAF), None], ..row },
        Row { sides: [Some(SumOperand { values: Values::Wide, ..experts }), None], ..row },
        Row { each: 999, ..row },
    ];
    for plant in plants {
        let (found, sum) = left(plant);
        assert!(found != values && sum != checksum);
    }
    for plant in [Row { first: 1, each: 1001, ..row }, Row { elements: 4999, ..row }] {
        assert_ne!(left(plant).1, checksum);
    }
}

/// Sums over bands side by side.
fn bands(columns: usize) -> (Tape, Buffer) {
    let mut tape = Tape::new("finish");
    let partial = tape.with(&numbers(2 * columns, 9));
    let out = tape.room::<f32>(columns);
    finish(&mut tape, [BAND + 1, columns], &[Unfinished::sum((partial, 0), (out, 0))]);
    (tape, out)
}

#[test]
fn bands_are_added_in_f64() {
    let (tape, out) = bands(300);
    let partial = numbers(2 * 300, 9);
    let wanted = partial[..300].iter().zip(&partial[300..]);
    let wanted = wanted.map(|(a, b)| (f64::from(*a) + f64::from(*b)) as f32);
    assert_eq!(left_bits(&tape.play(), out), bits(&wanted.collect::<Vec<_>>()));
}

/// Two bf16 gradients that become a node of the tree, and the addition of a third one to a node.
pub(super) fn wide(elements: usize) -> [Tape; 2] {
    let narrow = SumOperand { values: Values::Narrow, seed: 2, ..LEAF };
    let sum = SumOperand { asked: false, values: Values::Wide, seed: 4, ..LEAF };
    [[LEAF, narrow], [sum, narrow]].map(|sides| {
        let row =
            Row { sides: sides.map(Some), elements, each: elements, first: 0, out: Out::Own(0) };
        additions(&[row]).0
    })
}

pub(super) fn small() -> Vec<Tape> {
    vec![bands(300).0, additions(&rows(43)).0]
}

/// Experts of several blocks each.
pub(super) fn large() -> Vec<Tape> {
    vec![bands(5000).0, additions(&rows(45_001)).0]
}
