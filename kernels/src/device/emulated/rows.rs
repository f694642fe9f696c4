//! Norms, residual additions and sums over rows have the bits of the CPU's.

use tch::Tensor;

use super::tape::{Argument, Buffer, Tape};
use super::{bits_of, close, left_bits, numbers, tensor, tensor_bf16};
use crate::ops::{CPU, Scaling, Summed};

/// Rows of a band, and columns and rows of a block.
const BAND: usize = 32;

/// A sum that is added from those over bands: buffers, and in numbers of 4 bytes how far in them it begins.
pub(super) struct Sum {
    pub(super) partial: (Buffer, usize),
    /// The other sum.
    pub(super) other: Option<(Buffer, usize)>,
    pub(super) factor: Option<Buffer>,
    pub(super) out: (Buffer, usize),
    /// From one column of the outcome to the next.
    pub(super) stride: usize,
}

impl Sum {
    pub(super) fn plain(partial: (Buffer, usize), out: (Buffer, usize)) -> Sum {
        Sum { partial, other: None, factor: None, out, stride: 1 }
    }
}

/// Adds bands of so many rows, each of so many columns.
pub(super) fn add_bands(tape: &mut Tape, [rows, width]: [usize; 2], sums: &[Sum]) {
    let (bands, tiles) = (rows.div_ceil(BAND) as u64, width.div_ceil(256));
    let words: Vec<u64> = (0..sums.len())
        .flat_map(|at| {
            let sizes = bands | (width as u64) << 32;
            [0, 0, 0, 0, sizes, sums[at].stride as u64 | ((at * tiles) as u64) << 32]
        })
        .collect();
    let table = tape.with(&words);
    for (at, sum) in sums.iter().enumerate() {
        let places = [Some(sum.partial), sum.other, sum.factor.map(|of| (of, 0)), Some(sum.out)];
        for (place, address) in places.into_iter().enumerate() {
            if let Some((buffer, first)) = address {
                tape.address(table, 48 * at + 8 * place, buffer, 4 * first);
            }
        }
    }
    tape.launch("add_bands", sums.len() * tiles, &[table.into(), sums.len().into()]);
}

/// Sums over the rows of a matrix, in bands and then in f64: `launch` adds what makes the bands.
pub(super) fn banded(
    tape: &mut Tape,
    [stack, rows, width]: [usize; 3],
    launch: impl FnOnce(&mut Tape, Buffer, usize),
) -> Buffer {
    let (bands, tiles) = (rows.div_ceil(BAND), width.div_ceil(256));
    let partial = tape.room::<f32>(stack * bands * width);
    let out = tape.room::<f32>(stack * width);
    launch(tape, partial, tiles * bands);
    let sum = |at| Sum::plain((partial, at * bands * width), (out, at * width));
    add_bands(tape, [rows, width], &(0..stack).map(sum).collect::<Vec<_>>());
    out
}

const SHAPES: [[usize; 2]; 5] = [[1, 1], [33, 16], [70, 37], [16, 256], [65, 300]];

/// What the table for main memory has made at once.
pub(super) fn made(sum: Summed) -> Tensor {
    CPU.sums(vec![sum]).unwrap().remove(0)
}

struct Norm {
    tape: Tape,
    out: [Buffer; 3],
    /// Gradients of x, without and with what came beside the norm; and twice that of the weight.
    back: [Buffer; 4],
}

fn norm([rows, width]: [usize; 2]) -> Norm {
    let mut tape = Tape::new("rms_norm");
    let [x, grad] = [1, 2].map(|seed| tape.with(&numbers(rows * width, seed)));
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
            tape.launch("rms_norm_backward", rows.div_ceil(BAND), &arguments);
        })
    });
    Norm { tape, out: [out, narrow, factors], back: [input, both, to_weight[0], to_weight[1]] }
}

#[test]
fn norms_are_those_of_the_cpu() {
    for [rows, width] in SHAPES {
        let norm = norm([rows, width]);
        let played = norm.tape.play();
        let shape = [rows as i64, width as i64];
        let [x, grad] = [1, 2].map(|seed| tensor(&numbers(rows * width, seed), &shape));
        let weight = tensor(&numbers(width, 3), &shape[1..]);
        let (wanted, factors) = CPU.rms_norm(&x, &weight, 1e-5).unwrap();
        let [out, narrow, found_factors] = norm.out;
        assert_eq!(left_bits(&played, out), bits_of(&wanted));
        assert_eq!(left_bits(&played, found_factors), bits_of(&factors));
        let narrow = tensor_bf16(&played.read(narrow), &shape);
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
    /// Back through the norm as well: of both sides, and of the norm's weight and of the residual in bands.
    both: [Buffer; 4],
}

/// A branch in f32, or in bf16.
fn residual([rows, width]: [usize; 2], narrow: bool) -> Residual {
    let kind = if narrow { "bf16" } else { "f32" };
    let mut tape = Tape::new(&format!("residual_{kind}"));
    let branch = branch(rows * width, narrow, &mut tape);
    let [stream, grad] = [1, 2].map(|seed| tape.with(&numbers(rows * width, seed)));
    let vectors = [3, 4, 5, 6].map(|seed| tape.with(&numbers(width, seed)));
    let [scale, bias, stream_scale, stream_bias] = vectors;
    let weight = tape.with(&numbers(width, 7));
    let sum = tape.room::<f32>(rows * width);
    let out = if narrow { tape.room::<u16>(rows * width) } else { tape.room::<f32>(rows * width) };
    let factors = tape.room::<f32>(rows);
    let sizes = [rows.into(), width.into(), Argument::Float(1e-5)];
    let places =
        [branch, stream, scale, bias, stream_scale, stream_bias, weight, sum, out, factors];
    let arguments = [&places.map(Argument::from)[..], &sizes].concat();
    tape.launch(&format!("residual_norm_{kind}"), rows.div_ceil(16), &arguments);
    let alone = tape.room::<f32>(rows * width);
    let places = [branch, stream, scale, bias, stream_scale, stream_bias, alone];
    let arguments = [&places.map(Argument::from)[..], &sizes[..2]].concat();
    tape.launch(&format!("residual_sum_{kind}"), (rows * width).div_ceil(1024), &arguments);
    let [to_branch, to_stream] = [(); 2].map(|()| tape.room::<f32>(rows * width));
    // Three matrices of bands one behind the other, as a stack.
    let (bands, tiles) = (rows.div_ceil(BAND), width.div_ceil(256));
    let partial = tape.room::<f32>(3 * bands * width);
    let places = [branch, stream, grad, scale, stream_scale, to_branch, to_stream, partial];
    let arguments = [&places.map(Argument::from)[..], &sizes[..2]].concat();
    tape.launch(&format!("residual_backward_{kind}"), tiles * bands, &arguments);
    let found = tape.room::<f32>(4 * width);
    let all = |which| (partial, which * bands * width);
    let scaled = |which, other: Option<usize>, factor, at: usize| {
        let (other, out) = (other.map(all), (found, at * width));
        Sum { partial: all(which), other, factor: Some(factor), out, stride: 1 }
    };
    let sums = [
        scaled(1, Some(0), bias, 0),
        scaled(0, None, scale, 1),
        scaled(2, Some(0), stream_bias, 2),
        scaled(0, None, stream_scale, 3),
    ];
    add_bands(&mut tape, [rows, width], &sums);
    let beside = tape.with(&numbers(rows * width, 9));
    let both = [rows * width, rows * width, bands * width, 3 * bands * width];
    let both = both.map(|count| tape.room::<f32>(count));
    let places = [sum, factors, weight, grad, beside, branch, stream, scale, stream_scale];
    let arguments = [&places.map(Argument::from)[..], &both.map(Argument::from), &sizes[..2]];
    tape.launch(&format!("residual_norm_backward_{kind}"), bands, &arguments.concat());
    Residual { tape, out: [sum, out, factors], alone, back: [to_branch, to_stream, found], both }
}

fn branch(count: usize, narrow: bool, tape: &mut Tape) -> Buffer {
    match narrow {
        false => tape.with(&numbers(count, 8)),
        true => tape.with(&super::bf16(&numbers(count, 8))),
    }
}

#[test]
fn residuals_are_those_of_the_cpu() {
    for ([rows, width], narrow) in
        SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)])
    {
        let residual = residual([rows, width], narrow);
        let played = residual.tape.play();
        let shape = [rows as i64, width as i64];
        let kind = if narrow { tch::Kind::BFloat16 } else { tch::Kind::Float };
        let [stream, grad] = [1, 2].map(|seed| tensor(&numbers(rows * width, seed), &shape));
        let branch = tensor(&numbers(rows * width, 8), &shape).to_kind(kind);
        let [a, b, c, d, weight] =
            [3, 4, 5, 6, 7].map(|seed| tensor(&numbers(width, seed), &shape[1..]));
        let by = Scaling { scale: &a, bias: &b, residual_scale: &c, residual_bias: &d };
        let sum = CPU.residual(&branch, &stream, by).unwrap();
        assert_eq!(left_bits(&played, residual.out[0]), bits_of(&sum));
        assert_eq!(left_bits(&played, residual.alone), bits_of(&sum));
        let (normed, factors) = CPU.rms_norm(&sum, &weight, 1e-5).unwrap();
        let found = match narrow {
            false => tensor(&played.read::<f32>(residual.out[1]), &shape),
            true => tensor_bf16(&played.read(residual.out[1]), &shape),
        };
        assert_eq!(found, normed.to_kind(kind));
        assert_eq!(left_bits(&played, residual.out[2]), bits_of(&factors));
        let grads = CPU.residual_backward(&branch, &stream, by, &grad).unwrap();
        assert_eq!(left_bits(&played, residual.back[0]), bits_of(&grads.branch));
        assert_eq!(left_bits(&played, residual.back[1]), bits_of(&grads.residual));
        let back = CPU.rms_norm_backward(&sum, &factors, &weight, &grad).unwrap();
        let to_sum = tensor(&numbers(rows * width, 9), &shape) + back.0;
        let through = CPU.residual_backward(&branch, &stream, by, &to_sum).unwrap();
        assert_eq!(left_bits(&played, residual.both[0]), bits_of(&through.branch));
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
        // libtorch may round `a + b c` once.
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

pub(super) fn small() -> Vec<Tape> {
    let columns = columns([2, 33, 5]).tape;
    vec![
        norm([33, 37]).tape,
        residual([33, 20], false).tape,
        residual([17, 20], true).tape,
        columns,
    ]
}
