//! Norms, residual additions and sums over rows have the bits of the CPU.

use tch::{Kind, Tensor};

use super::finish::{Unfinished, finish};
use super::tape::{Argument, Buffer, Tape};
use super::{Values, bits_of, close, left_bits, numbers, tensor};
use crate::ops::{CPU, ParamGradient, ResidualScaling};

/// Rows of a band, and columns and rows of a block.
const BAND: usize = 32;

/// Sums over the rows of a matrix, first in bands, then in f64: `launch` adds the kernel that makes the bands.
pub(super) fn banded(
    tape: &mut Tape,
    [stack, rows, width]: [usize; 3],
    launch: impl FnOnce(&mut Tape, Buffer, usize),
) -> Buffer {
    let (bands, tiles) = (rows.div_ceil(BAND), width.div_ceil(256));
    let partial = tape.room::<f32>(stack * bands * width);
    let out = tape.room::<f32>(stack * width);
    launch(tape, partial, tiles * bands);
    let sum = |at| Unfinished::sum((partial, at * bands * width), (out, at * width));
    finish(tape, [rows, width], &(0..stack).map(sum).collect::<Vec<_>>());
    out
}

/// The last two are wider than the part of a row that a block holds at once.
const SHAPES: [[usize; 2]; 7] =
    [[1, 1], [33, 16], [70, 37], [16, 256], [65, 300], [35, 1032], [3, 2051]];

/// The finished sum of the CPU's table.
pub(super) fn made(sum: ParamGradient) -> Tensor {
    CPU.finish(vec![sum]).unwrap().remove(0)
}

/// Each shape in f32, and in bf16.
fn both_kinds() -> impl Iterator<Item = ([usize; 2], Values)> {
    SHAPES.into_iter().flat_map(|shape| [(shape, Values::Wide), (shape, Values::Narrow)])
}

struct Norm {
    tape: Tape,
    out: [Buffer; 3],
    /// Gradients of x, without and with the gradient that bypassed the norm; and twice the gradient of the weight.
    back: [Buffer; 4],
}

/// Backward from a gradient in f32 or bf16.
fn norm([rows, width]: [usize; 2], values: Values) -> Norm {
    let kind = values.kind();
    let mut tape = Tape::new(&format!("rms_norm_{kind}"));
    let x = tape.with(&numbers(rows * width, 1));
    let grad = values.with(&mut tape, rows * width, 2);
    let weight = tape.with(&numbers(width, 3));
    let (out, narrow) = (tape.room::<f32>(rows * width), tape.room::<u16>(rows * width));
    let [factors, again] = [(); 2].map(|()| tape.room::<f32>(rows));
    let sizes = [rows.into(), width.into(), Argument::Float(1e-5)];
    let blocks = rows.div_ceil(16);
    let launch = |tape: &mut Tape, kernel, out: Buffer, factors: Buffer| {
        let places: [Argument; 4] = [x.into(), weight.into(), out.into(), factors.into()];
        tape.launch(kernel, blocks, &[&places[..], &sizes].concat());
    };
    launch(&mut tape, "rms_norm_f32", out, factors);
    launch(&mut tape, "rms_norm_bf16", narrow, again);
    let beside = tape.with(&numbers(rows * width, 4));
    let [input, both] = [(); 2].map(|()| tape.room::<f32>(rows * width));
    let to_weight = [(Argument::Null, input), (beside.into(), both)].map(|(beside, input)| {
        banded(&mut tape, [1, rows, width], |tape, partial, _| {
            let places = [x, factors, weight, grad].map(Argument::from);
            let rest = [beside, input.into(), partial.into()];
            let arguments = [&places[..], &rest, &sizes[..2]].concat();
            tape.launch(&format!("rms_norm_backward_{kind}"), rows.div_ceil(BAND), &arguments);
        })
    });
    Norm { tape, out: [out, narrow, factors], back: [input, both, to_weight[0], to_weight[1]] }
}

#[test]
fn norms_are_those_of_the_cpu() {
    for ([rows, width], values) in both_kinds() {
        let norm = norm([rows, width], values);
        let played = norm.tape.play();
        let shape = [rows as i64, width as i64];
        let x = tensor(&numbers(rows * width, 1), &shape);
        let grad = values.tensor(&shape, 2);
        let weight = tensor(&numbers(width, 3), &shape[1..]);
        let (wanted, factors) = CPU.rms_norm(&x, &weight, 1e-5, Kind::Float).unwrap();
        let [out, narrow, found_factors] = norm.out;
        assert_eq!(left_bits(&played, out), bits_of(&wanted));
        assert_eq!(left_bits(&played, found_factors), bits_of(&factors));
        let narrow = Values::Narrow.read(&played, narrow, &shape);
        assert_eq!(narrow, wanted.to_kind(tch::Kind::BFloat16));
        let (input, to_weight) = CPU.rms_norm_backward(&x, &factors, &weight, &grad).unwrap();
        let to_weight = made(to_weight);
        assert_eq!(left_bits(&played, norm.back[0]), bits_of(&input));
        let beside = tensor(&numbers(rows * width, 4), &shape);
        assert_eq!(left_bits(&played, norm.back[1]), bits_of(&(beside + input)));
        for found in &norm.back[2..] {
            assert_eq!(left_bits(&played, *found), bits_of(&to_weight));
        }
        let square = x.to_kind(tch::Kind::Double).square();
        let mean = square.mean_dim([1i64].as_slice(), true, tch::Kind::Double);
        let exact = x.to_kind(tch::Kind::Double) * (mean + 1e-5).rsqrt() * weight;
        close(&played.read::<f32>(out), &exact, 4e-7);
    }
}

struct Residual {
    tape: Tape,
    out: [Buffer; 3],
    alone: Buffer,
    back: [Buffer; 3],
    /// With the backward pass of the norm: gradients of both sides, and bands for the norm's weight and for the
    /// residual.
    both: [Buffer; 4],
}

/// With a branch in f32 or bf16.
fn residual([rows, width]: [usize; 2], values: Values) -> Residual {
    let kind = values.kind();
    let mut tape = Tape::new(&format!("residual_{kind}"));
    let branch = values.with(&mut tape, rows * width, 8);
    let [stream, grad] = [1, 2].map(|seed| tape.with(&numbers(rows * width, seed)));
    let vectors = [3, 4, 5, 6].map(|seed| tape.with(&numbers(width, seed)));
    let [scale, bias, stream_scale, stream_bias] = vectors;
    let weight = tape.with(&numbers(width, 7));
    let sum = tape.room::<f32>(rows * width);
    let out = values.room(&mut tape, rows * width);
    let factors = tape.room::<f32>(rows);
    let sizes = [rows.into(), width.into(), Argument::Float(1e-5)];
    let places =
        [branch, stream, scale, bias, stream_scale, stream_bias, weight, sum, out, factors];
    let arguments = [&places.map(Argument::from)[..], &sizes].concat();
    tape.launch(&format!("residual_norm_{kind}"), rows.div_ceil(16), &arguments);
    let alone = tape.room::<f32>(rows * width);
    let places = [branch, stream, scale, bias, stream_scale, stream_bias, alone];
    let arguments = [&places.map(Argument::from)[..], &sizes[..2]].concat();
    tape.launch(&format!("residual_sum_{kind}"), rows.div_ceil(16), &arguments);
    let to_branch = values.room(&mut tape, rows * width);
    let to_stream = tape.room::<f32>(rows * width);
    // Three matrices of bands in one buffer, like a stack.
    let bands = rows.div_ceil(BAND);
    let partial = tape.room::<f32>(3 * bands * width);
    let places = [branch, stream, grad, scale, stream_scale, to_branch, to_stream, partial];
    let arguments = [&places.map(Argument::from)[..], &sizes[..2]].concat();
    tape.launch(&format!("residual_backward_{kind}"), bands, &arguments);
    let found = tape.room::<f32>(4 * width);
    let all = |which| (partial, which * bands * width);
    let scaled = |which, other: Option<usize>, factor, at: usize| {
        let (other, out) = (other.map(all), (found, at * width));
        Unfinished { partial: all(which), other, factor: Some(factor), out, stride: 1 }
    };
    let sums = [
        scaled(1, Some(0), bias, 0),
        scaled(0, None, scale, 1),
        scaled(2, Some(0), stream_bias, 2),
        scaled(0, None, stream_scale, 3),
    ];
    finish(&mut tape, [rows, width], &sums);
    let beside = tape.with(&numbers(rows * width, 9));
    let normed = values.with(&mut tape, rows * width, 2);
    let [to_sum, bands_of_norm, all_bands] =
        [rows * width, bands * width, 3 * bands * width].map(|count| tape.room::<f32>(count));
    let both = [values.room(&mut tape, rows * width), to_sum, bands_of_norm, all_bands];
    let scaling = [branch, stream, scale, bias, stream_scale, stream_bias];
    let places = [&scaling[..], &[factors, weight, normed, beside], &both].concat();
    let places: Vec<_> = places.into_iter().map(Argument::from).collect();
    let arguments = [&places[..], &sizes[..2]];
    tape.launch(&format!("residual_norm_backward_{kind}"), bands, &arguments.concat());
    Residual { tape, out: [sum, out, factors], alone, back: [to_branch, to_stream, found], both }
}

#[test]
fn residuals_are_those_of_the_cpu() {
    for ([rows, width], values) in both_kinds() {
        let residual = residual([rows, width], values);
        let played = residual.tape.play();
        let shape = [rows as i64, width as i64];
        let [stream, grad] = [1, 2].map(|seed| tensor(&numbers(rows * width, seed), &shape));
        let branch = values.tensor(&shape, 8);
        let [a, b, c, d, weight] =
            [3, 4, 5, 6, 7].map(|seed| tensor(&numbers(width, seed), &shape[1..]));
        let by = ResidualScaling { scale: &a, bias: &b, residual_scale: &c, residual_bias: &d };
        let sum = CPU.residual(&branch, &stream, by).unwrap();
        assert_eq!(left_bits(&played, residual.out[0]), bits_of(&sum));
        assert_eq!(left_bits(&played, residual.alone), bits_of(&sum));
        let (normed, factors) = CPU.rms_norm(&sum, &weight, 1e-5, Kind::Float).unwrap();
        let found = |buffer| values.read(&played, buffer, &shape);
        assert_eq!(found(residual.out[1]), normed.to_kind(values.of()));
        assert_eq!(left_bits(&played, residual.out[2]), bits_of(&factors));
        let grads = CPU.residual_backward(&branch, &stream, by, &grad).unwrap();
        assert_eq!(found(residual.back[0]), grads.branch);
        assert_eq!(left_bits(&played, residual.back[1]), bits_of(&grads.residual));
        let normed = values.tensor(&shape, 2);
        let back = CPU.rms_norm_backward(&sum, &factors, &weight, &normed).unwrap();
        let to_sum = tensor(&numbers(rows * width, 9), &shape) + back.0;
        let through = CPU.residual_backward(&branch, &stream, by, &to_sum).unwrap();
        assert_eq!(found(residual.both[0]), through.branch);
        assert_eq!(left_bits(&played, residual.both[1]), bits_of(&through.residual));
        let bands = |which: usize, first: usize| {
            let all = tensor(&played.read::<f32>(residual.both[which]), &[-1, width as i64]);
            let count = rows.div_ceil(BAND) as i64;
            let own = all.narrow(0, first as i64 * count, count).to_kind(tch::Kind::Double);
            own.sum_dim_intlist(0, false, tch::Kind::Double).to_kind(tch::Kind::Float)
        };
        assert_eq!(bands(2, 0), made(back.1));
        let [_, of_bias, ..] = through.scaling;
        assert_eq!(bands(3, 0) * &a, made(of_bias));
        // libtorch may fuse `a + b c`, rounding once.
        let wanted = Tensor::cat(&grads.scaling.map(made), 0).to_kind(tch::Kind::Double);
        close(&played.read::<f32>(residual.back[2]), &wanted, 1e-6 * rows as f64);
    }
}

struct Columns {
    tape: Tape,
    sums: Buffer,
    products: Buffer,
}

fn columns([stack, rows, width]: [usize; 3]) -> Columns {
    let mut tape = Tape::new("columns");
    let [x, y] = [1, 2].map(|seed| tape.with(&numbers(stack * rows * width, seed)));
    let sizes: [Argument; 2] = [rows.into(), width.into()];
    let sums = banded(&mut tape, [stack, rows, width], |tape, partial, blocks| {
        let arguments = [&[x.into(), partial.into()][..], &sizes].concat();
        tape.launch("column_sums", stack * blocks, &arguments);
    });
    let products = banded(&mut tape, [stack, rows, width], |tape, partial, blocks| {
        let arguments = [&[x.into(), y.into(), partial.into()][..], &sizes].concat();
        tape.launch("column_products", stack * blocks, &arguments);
    });
    Columns { tape, sums, products }
}

#[test]
fn columns_of_a_stack_add_up() {
    for [stack, rows, width] in [[1, 1, 1], [3, 70, 5], [2, 32, 257], [1, 100, 300]] {
        let columns = columns([stack, rows, width]);
        let played = columns.tape.play();
        let shape = [stack, rows, width].map(|size| size as i64);
        let [x, y] = [1, 2].map(|seed| {
            tensor(&numbers(stack * rows * width, seed), &shape).to_kind(tch::Kind::Double)
        });
        let total = |x: &Tensor| x.sum_dim_intlist(1, false, tch::Kind::Double);
        close(&played.read::<f32>(columns.sums), &total(&x), 1e-6 * (rows as f64).sqrt());
        close(&played.read::<f32>(columns.products), &total(&(x * y)), 1e-6 * (rows as f64).sqrt());
    }
}

/// Norms and additions in bf16 that read rows four elements at a time.
pub(super) fn wide(shape: [usize; 2]) -> [Tape; 2] {
    [norm(shape, Values::Narrow).tape, residual(shape, Values::Narrow).tape]
}

pub(super) fn small() -> Vec<Tape> {
    let columns = columns([2, 33, 5]).tape;
    vec![
        norm([33, 37], Values::Wide).tape,
        norm([17, 20], Values::Narrow).tape,
        residual([33, 20], Values::Wide).tape,
        residual([17, 20], Values::Narrow).tape,
        // Wider than the part of a row that a block holds at once.
        residual([3, 1028], Values::Wide).tape,
        columns,
    ]
}

/// Several bands of rows that are wider than a block.
pub(super) fn large() -> Vec<Tape> {
    let of = |values| [norm([130, 1032], values).tape, residual([130, 520], values).tape];
    let mut tapes: Vec<_> = [Values::Wide, Values::Narrow].into_iter().flat_map(of).collect();
    tapes.push(columns([3, 300, 520]).tape);
    tapes
}
