//! Residual additions and norms that read and write rows of experts have the bits of moving them first.

use tch::Tensor;

use super::tape::{Argument, Buffer, Tape};
use super::{Values, numbers};
use crate::ops::CPU;

/// Rows of a band.
const BAND: usize = 32;

/// Tokens, experts and width.
type Shape = [usize; 3];

/// Where the tokens of a tape are: places, tokens of places, ends of classes, and how many places there are.
struct Places {
    lists: [Buffer; 3],
    count: usize,
}

fn places(tape: &mut Tape, [tokens, experts, _]: Shape) -> Places {
    let class = |value: f32| (value.abs() * (experts + 1) as f32) as i64;
    let choice: Vec<i64> = numbers(tokens, 9).into_iter().map(class).collect();
    let by = CPU.dispatch(&Tensor::from_slice(&choice), experts as i64 + 1).unwrap();
    let [to, counts] = [&by.places, &by.counts].map(|list| Vec::<i64>::try_from(list).unwrap());
    let mut ends = vec![0u32; experts + 1];
    let mut end = 0;
    for (class, count) in counts.iter().enumerate() {
        end += if class < experts { (count + 7) / 8 * 8 } else { *count } as u32;
        ends[class] = end;
    }
    let count = tokens + 7 * experts;
    let mut order = vec![u32::MAX; count];
    (0..).zip(&to).for_each(|(token, place)| order[*place as usize] = token);
    Places { lists: [tape.with(&to), tape.with(&order), tape.with(&ends)], count }
}

struct Routed {
    tape: Tape,
    /// What the kernels under test leave, and what moving the rows first leaves.
    found: Vec<(&'static str, Buffer, Option<Buffer>)>,
}

/// What kernels leave: forward, the way back of a branch of experts, and that of their gradient.
const NAMES: [&str; 12] = [
    "sum", "norm", "factors", "rows", "residual", "weight", "scaling", "gates", "branch",
    "residual", "weight", "scaling",
];

fn all(buffers: &[Buffer]) -> Vec<Argument> {
    buffers.iter().copied().map(Argument::from).collect()
}

fn words(sizes: &[usize]) -> Vec<Argument> {
    sizes.iter().copied().map(Argument::from).collect()
}

/// The sum, its norm and its factors.
fn sums(tape: &mut Tape, [tokens, _, width]: Shape, values: Values) -> [Buffer; 3] {
    let out = [tape.room::<f32>(tokens * width), values.room(tape, tokens * width)];
    [out[0], out[1], tape.room::<f32>(tokens)]
}

/// Gradients of a branch of so many rows and of the residual, and bands.
fn gradients(
    tape: &mut Tape,
    [tokens, _, width]: Shape,
    values: Values,
    rows: usize,
) -> [Buffer; 4] {
    let bands = tokens.div_ceil(BAND) * width;
    let [to_stream, of_norm, partial] =
        [tokens * width, bands, 3 * bands].map(|count| tape.room::<f32>(count));
    [values.room(tape, rows * width), to_stream, of_norm, partial]
}

/// `passes`: tokens without an expert have rows. `compared`: moves the rows first, too.
fn routed(shape: Shape, values: Values, passes: bool, compared: bool) -> Routed {
    let ([tokens, experts, width], kind) = (shape, values.kind());
    let mut tape = Tape::new(&format!("aligned_routed_{kind}"));
    let Places { lists: [to, order, ends], count } = places(&mut tape, shape);
    let [elements, bands] = [tokens * width, tokens.div_ceil(BAND)];
    let x = values.with(&mut tape, count * width, 1);
    let passed = passes.then(|| values.with(&mut tape, count * width, 2));
    let passed = passed.map_or(Argument::Null, Argument::from);
    let [branch, grad, more] = [3, 4, 5].map(|seed| values.with(&mut tape, elements, seed));
    let [stream, beside] = [6, 7].map(|seed| tape.with(&numbers(elements, seed)));
    let gates = tape.with(&numbers(tokens, 8));
    let vectors = [10, 11, 12, 13, 14].map(|seed| tape.with(&numbers(width, seed)));
    let (scaling, weight) = (vectors[..4].to_vec(), vectors[4]);
    let from = [to.into(), x.into(), passed, ends.into()];
    let eps = [Argument::Float(1e-5)];
    let backward = |tape: &mut Tape, rows: usize| gradients(tape, shape, values, rows);
    let name = |stem: &str| format!("{stem}_{kind}");

    let made = sums(&mut tape, shape, values);
    let operands = [&[gates, stream][..], &scaling, &[weight], &made].concat();
    let sizes = words(&[tokens, experts, width]);
    let arguments = [&from[..], &all(&operands), &sizes, &eps].concat();
    tape.launch(&name("residual_norm_gathered"), tokens.div_ceil(16), &arguments);
    let read = [&[stream][..], &scaling, &[made[2], weight]].concat();
    let (back, to_gates) = (backward(&mut tape, count), tape.room::<f32>(tokens));
    let rest = [&[grad, beside][..], &back, &[to_gates]].concat();
    let head = [&[order.into()][..], &from, &[gates.into()]].concat();
    let counts = words(&[count, tokens, experts, width]);
    let arguments = [&head[..], &all(&read), &all(&rest), &counts].concat();
    tape.launch(&name("residual_norm_gathered_backward"), bands, &arguments);
    let plain = backward(&mut tape, tokens);
    let rest = [&[more, beside][..], &plain].concat();
    let head = all(&[&[branch][..], &read].concat());
    let arguments = [&head[..], &from, &all(&rest), &sizes].concat();
    tape.launch(&name("residual_norm_unpermuted_backward"), bands, &arguments);

    let found = [&made[..], &back, &[to_gates], &plain].concat();
    let wanted = compared.then(|| {
        let gathered = values.room(&mut tape, elements);
        let arguments = [&from[..], &all(&[gates, gathered]), &sizes].concat();
        tape.launch(&name("gather"), tokens.div_ceil(16), &arguments);
        let made = sums(&mut tape, shape, values);
        let sides = [&[gathered, stream][..], &scaling].concat();
        let operands = all(&[&sides[..], &[weight], &made].concat());
        let arguments = [&operands[..], &words(&[tokens, width]), &eps].concat();
        tape.launch(&name("residual_norm"), tokens.div_ceil(16), &arguments);
        let through = |tape: &mut Tape, branch: Buffer, grad: Buffer| {
            let back = backward(tape, tokens);
            let operands = [&[branch][..], &read, &[grad, beside], &back].concat();
            let arguments = [&all(&operands)[..], &words(&[tokens, width])].concat();
            tape.launch(&name("residual_norm_backward"), bands, &arguments);
            back
        };
        let [to_gathered, rest @ ..] = through(&mut tape, gathered, grad);
        let (to_x, to_gates) = (values.room(&mut tape, count * width), tape.room::<f32>(tokens));
        let lists = [&[order.into()][..], &from[1..]].concat();
        let operands = all(&[gates, to_gathered, to_x, to_gates]);
        let arguments = [&lists[..], &operands, &words(&[count, experts, width])].concat();
        tape.launch(&name("gather_backward"), count.div_ceil(16), &arguments);
        let summed = values.room(&mut tape, elements);
        let arguments = [&from[..], &all(&[more, summed]), &sizes].concat();
        tape.launch(&name("unpermute"), tokens.div_ceil(16), &arguments);
        let plain = through(&mut tape, branch, summed);
        [&made[..], &[to_x], &rest, &[to_gates], &plain].concat()
    });
    let wanted = (0..found.len()).map(|at| wanted.as_ref().map(|wanted| wanted[at]));
    let found = NAMES.into_iter().zip(found).zip(wanted);
    Routed { found: found.map(|((name, found), wanted)| (name, found, wanted)).collect(), tape }
}

/// The last two are as wide as the part of a row that a block holds at once, and wider.
const SHAPES: [Shape; 5] = [[1, 1, 4], [33, 2, 16], [70, 5, 36], [35, 3, 1024], [40, 2, 1032]];

#[test]
fn rows_need_not_be_moved_first() {
    for (number, shape) in SHAPES.into_iter().enumerate() {
        for values in [Values::Wide, Values::Narrow] {
            let routed = routed(shape, values, number % 2 > 0, true);
            let played = routed.tape.play();
            for (name, found, wanted) in routed.found {
                let [found, wanted] =
                    [Some(found), wanted].map(|buffer| played.read::<u8>(buffer.unwrap()));
                assert!(found == wanted, "{name} of {shape:?} {values:?}");
            }
        }
    }
}

/// Rows in bf16.
pub(super) fn wide(shape: Shape) -> Tape {
    routed(shape, Values::Narrow, true, false).tape
}

pub(super) fn small() -> Vec<Tape> {
    let of = |values, shape| routed(shape, values, true, false).tape;
    vec![
        of(Values::Wide, [17, 2, 12]),
        of(Values::Narrow, [33, 3, 8]),
        // Wider than the part of a row that a block holds at once.
        of(Values::Wide, [3, 2, 1028]),
    ]
}

/// Several bands of rows that are wider than a block.
pub(super) fn large() -> Vec<Tape> {
    let of = |values| {
        [[130, 9, 1032], [130, 9, 520]].map(|shape| routed(shape, values, true, false).tape)
    };
    [Values::Wide, Values::Narrow].into_iter().flat_map(of).collect()
}
