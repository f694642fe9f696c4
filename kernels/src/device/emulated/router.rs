//! The router's own functions, and the embedding.

use tch::{Kind, Tensor};

use super::rows::{banded, made};
use super::tape::{Argument, Buffer, Tape, TapeBuffers};
use super::{Values, bits, bits_of, close, left_bits, numbers, tensor};
use crate::ops::{CPU, exp};

struct Embedding {
    tape: Tape,
    out: [Buffer; 2],
    table: Buffer,
}

fn tokens(count: usize, vocabulary: usize) -> Vec<i64> {
    // Many equal tokens, near and far apart.
    (0..count).map(|place| (place * place / 3 % vocabulary) as i64).collect()
}

fn embedding([count, vocabulary, width]: [usize; 3], narrow: bool) -> Embedding {
    let kind = if narrow { "bf16" } else { "f32" };
    let mut tape = Tape::new(&format!("embedding_{kind}"));
    let values = numbers(vocabulary * width, 1);
    let table = if narrow { tape.with(&super::bf16(&values)) } else { tape.with(&values) };
    let tokens = tape.with(&tokens(count, vocabulary));
    let [bias, scale] = [2, 3].map(|seed| tape.with(&numbers(width, seed)));
    let out = [(); 2].map(|()| tape.room::<f32>(count * width));
    let places = [table, tokens, bias, scale, out[0], out[1]].map(Argument::from);
    let arguments = [&places[..], &[width.into()]].concat();
    tape.launch(&format!("embedding_{kind}"), count, &arguments);
    let grad = tape.with(&numbers(count * width, 4));
    let to_table = tape.with(&numbers(vocabulary * width, 5));
    let places = [tokens, scale, grad, to_table].map(Argument::from);
    let blocks = count.min(3);
    let arguments = [&places[..], &[count.into(), width.into(), blocks.into()]].concat();
    tape.launch("embedding_backward", blocks, &arguments);
    Embedding { tape, out, table: to_table }
}

#[test]
fn embeddings_are_those_of_the_cpu() {
    for (shape, narrow) in
        [([1, 1, 1], false), ([600, 7, 5], false), ([300, 40, 260], true), ([2500, 40, 4], false)]
    {
        let [count, vocabulary, width] = shape;
        let embedding = embedding(shape, narrow);
        let played = embedding.tape.play();
        let tokens = Tensor::from_slice(&tokens(count, vocabulary));
        let [rows, columns, tall] = [count, width, vocabulary].map(|size| size as i64);
        let kind = if narrow { Kind::BFloat16 } else { Kind::Float };
        let table = tensor(&numbers(vocabulary * width, 1), &[tall, columns]).to_kind(kind);
        let [bias, scale] = [2, 3].map(|seed| tensor(&numbers(width, seed), &[columns]));
        let wanted = CPU.embedding(&table, &tokens, &bias, &scale).unwrap();
        for (found, wanted) in embedding.out.into_iter().zip(&wanted) {
            assert_eq!(left_bits(&played, found), bits_of(wanted));
        }
        let grad = tensor(&numbers(count * width, 4), &[rows, columns]);
        let mut to_table = tensor(&numbers(vocabulary * width, 5), &[tall, columns]);
        let _ = CPU.embedding_backward(&tokens, &wanted[0], &scale, &grad, &mut to_table).unwrap();
        assert_eq!(left_bits(&played, embedding.table), bits_of(&to_table));
    }
}

/// Sizes of a router: rows, its own width, classes.
type Sizes = [usize; 3];

/// Widths above this have kernels of their own.
const USUAL: usize = 128;

/// The numbers of a router's operands, by seed.
struct Weights {
    bias: Vec<f32>,
    decay: Vec<f32>,
    norm: Vec<f32>,
    layers: [(Vec<f32>, Vec<f32>); 2],
    out: Vec<f32>,
    balance: Vec<f32>,
}

impl Weights {
    fn new([_, width, classes]: Sizes) -> Weights {
        let scaled = |count, seed, by: f32| -> Vec<f32> {
            numbers(count, seed).iter().map(|value| value * by).collect()
        };
        let layer = |seed| (scaled(width * width, seed, 0.5), numbers(width, seed + 1));
        Weights {
            bias: numbers(width, 1),
            decay: numbers(width, 2),
            norm: numbers(width, 9),
            layers: [layer(20), layer(22)],
            out: numbers(classes * width, 24),
            balance: scaled(classes, 8, 0.01),
        }
    }
}

struct Router {
    tape: Tape,
    state: Buffer,
    hidden: Buffer,
    /// Probabilities, choice, weight.
    chosen: [Buffer; 3],
    /// Tokens of each class, by band.
    counts: Buffer,
    back: RouterBack,
}

/// What the backward pass leaves.
struct RouterBack {
    logits: Buffer,
    last: Buffer,
    layers: Buffer,
    own: Buffer,
    to_before: Buffer,
    /// Of the norm's weight, its bias, the decay, and the biases of both layers.
    vectors: Buffer,
}

/// Buffers that a backward pass reads.
struct RouterRead {
    probabilities: Buffer,
    choice: Buffer,
    grad: Buffer,
    hidden: Buffer,
    state: Buffer,
    factors: Buffer,
    /// The gradient of the state from the router after this one; the decay, and the state before.
    chained: [Argument; 3],
}

fn back(
    tape: &mut Tape,
    sizes @ [rows, width, classes]: Sizes,
    kind: Values,
    by: &Weights,
    read: &RouterRead,
) -> RouterBack {
    let [(fc1, fc1_bias), (fc2, fc2_bias)] = &by.layers;
    let weights = [fc2_bias, fc2, fc1_bias, fc1].map(|values| tape.with(values));
    let (out, norm) = (tape.with(&by.out), tape.with(&by.norm));
    let logits = tape.room::<f32>(rows * classes);
    let [last, to_before] = [(); 2].map(|()| tape.room::<f32>(rows * width));
    let layers = tape.room::<f32>(4 * rows * width);
    let own = kind.room(tape, rows * width);
    let vectors = banded(tape, [5, rows, width], |tape, partial, bands| {
        let RouterRead { probabilities, choice, grad, hidden, state, factors, chained } = read;
        let memory = [*probabilities, *choice, *grad, out, logits, last, *hidden];
        let memory = [&memory[..], &weights, &[layers, *state, *factors, norm]].concat();
        let memory: Vec<Argument> = memory.into_iter().map(Argument::from).collect();
        let own = match kind {
            Values::Wide => [own.into(), Argument::Null],
            Values::Narrow => [Argument::Null, own.into()],
        };
        let left = match chained[1] {
            Argument::Null => [Argument::Null, partial.into()],
            _ => [to_before, partial].map(Argument::from),
        };
        let sizes = sizes.map(Argument::from);
        let arguments = [&memory[..], chained, &own, &left, &sizes].concat();
        let names = ["router_backward", "router_wide_backward"];
        tape.launch(names[usize::from(width > USUAL)], bands, &arguments);
    });
    RouterBack { logits, last, layers, own, to_before, vectors }
}

/// With a router before it and one after it, or alone.
fn router(sizes: Sizes, kind: Values, chained: bool) -> Router {
    router_by(sizes, kind, chained, &Weights::new(sizes))
}

fn router_by(
    sizes @ [rows, width, classes]: Sizes,
    kind: Values,
    chained: bool,
    by: &Weights,
) -> Router {
    let name = match width > USUAL {
        true => format!("router_wide_{}", kind.kind()),
        false => format!("router_{}", kind.kind()),
    };
    let mut tape = Tape::new(&name);
    let projected = kind.with(&mut tape, rows * width, 3);
    let [state, factors] = [rows * width, rows].map(|count| tape.room::<f32>(count));
    let [before, later] = [4, 11].map(|seed| tape.with(&numbers(rows * width, seed)));
    let decay = tape.with(&by.decay);
    let of_chain = |buffer: Buffer| if chained { buffer.into() } else { Argument::Null };
    let [bias, norm] = [&by.bias, &by.norm].map(|values| tape.with(values));
    let [(fc1, fc1_bias), (fc2, fc2_bias)] = &by.layers;
    let layers = [fc1, fc1_bias, fc2, fc2_bias, &by.out, &by.balance];
    let layers = layers.map(|values| tape.with(values)).map(Argument::from);
    let hidden = tape.room::<f32>(2 * rows * width);
    let (probabilities, weight) = (tape.room::<f32>(rows * classes), tape.room::<f32>(rows));
    let choice = tape.room::<i64>(rows);
    let memory = [projected, state, bias].map(Argument::from);
    let entered = [before, decay].map(of_chain);
    let normed = [norm, factors].map(Argument::from);
    let counts = tape.room::<u32>(rows.div_ceil(32) * classes);
    let left = [hidden, probabilities, choice, weight, counts].map(Argument::from);
    let last = [sizes.map(Argument::from).as_slice(), &[1e-5.into()]].concat();
    let arguments = [&memory[..], &entered, &normed, &layers, &left, &last].concat();
    tape.launch(&name, rows.div_ceil(32), &arguments);
    let grad = tape.with(&numbers(rows, 7));
    let chained = [later, decay, before].map(of_chain);
    let read = RouterRead { probabilities, choice, grad, hidden, state, factors, chained };
    let back = back(&mut tape, sizes, kind, by, &read);
    Router { tape, state, hidden, chosen: [probabilities, choice, weight], counts, back }
}

/// The sum over rows: of 32 in f32, and of these in f64.
fn column_sums(x: &[f32], width: usize) -> Vec<u32> {
    let mut sums = vec![0f64; width];
    for band in x.chunks(32 * width) {
        let mut own = vec![0f32; width];
        let rows = band.chunks(width);
        rows.for_each(|row| own.iter_mut().zip(row).for_each(|(sum, value)| *sum += value));
        sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += f64::from(own));
    }
    sums.into_iter().map(|sum| (sum as f32).to_bits()).collect()
}

/// A GELU and its slope, from all 64 terms of the power series, which kernels may end early.
fn gelu_of(x: f32) -> [f64; 2] {
    let x = f64::from(x);
    let scaled = x * std::f64::consts::FRAC_1_SQRT_2;
    let series = || {
        let (square, mut power, mut sum) = (scaled * scaled, 1.0, 0.0);
        for term in 0..64 {
            sum += power * (1.0 / f64::from(2 * term + 1));
            power *= square * (-1.0 / f64::from(term + 1));
        }
        std::f64::consts::FRAC_2_SQRT_PI * scaled * sum
    };
    let error = if scaled.abs() >= 4.0 { scaled.signum() } else { series() };
    let integral = 0.5 + 0.5 * error;
    let density = 0.398_942_280_401_432_7 * f64::from(exp((-0.5 * x * x) as f32));
    [x * integral, integral + x * density]
}

/// `[rows, inner]` times `[inner, width]`, an element as one chain; `right(inner, column)`.
fn chains(
    left: &[f32],
    inner: usize,
    width: usize,
    right: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let element = |row: &[f32], column| {
        row.iter().enumerate().fold(0f32, |sum, (k, value)| value.mul_add(right(k, column), sum))
    };
    left.chunks(inner)
        .flat_map(|row| (0..width).map(move |column| (row, column)))
        .map(|(row, column)| element(row, column))
        .collect()
}

/// The value of a GELU and its slope, of each element with its column's bias.
fn gelus(before: &[f32], bias: &[f32]) -> (Vec<f32>, Vec<f64>) {
    let of = |(place, value): (usize, &f32)| gelu_of(value + bias[place % bias.len()]);
    let both = before.iter().enumerate().map(of);
    both.map(|[value, slope]| (value as f32, slope)).unzip()
}

fn values(x: &Tensor) -> Vec<f32> {
    Vec::try_from(&x.reshape([-1])).unwrap()
}

/// Every element by the chain that a matmul is, by all terms of a GELU's series, and by the CPU's norm.
#[test]
fn routers_have_the_bits_of_their_sums() {
    for (sizes, kind, chained) in [
        ([1, 1, 1], Values::Wide, true),
        ([40, 21, 9], Values::Wide, true),
        ([40, 21, 9], Values::Narrow, false),
        ([77, 24, 65], Values::Narrow, true),
        ([33, 20, 140], Values::Wide, false),
        ([35, 128, 17], Values::Narrow, true),
        ([3, 130, 5], Values::Wide, true),
        ([34, 256, 17], Values::Narrow, true),
    ] {
        let router = router(sizes, kind, chained);
        let played = router.tape.play();
        let by = Weights::new(sizes);
        let [rows, width, classes] = sizes;
        let shape = [rows as i64, width as i64];
        let vector = |values: &[f32]| tensor(values, &shape[1..]);
        let mut state = kind.tensor(&shape, 3).to_kind(Kind::Float) + vector(&by.bias);
        if chained {
            state += tensor(&numbers(rows * width, 4), &shape) * vector(&by.decay);
        }
        assert_eq!(left_bits(&played, router.state), bits_of(&state), "{sizes:?}");
        let (normed, factors) = CPU.rms_norm(&state, &vector(&by.norm), 1e-5, Kind::Float).unwrap();
        let [(fc1, fc1_bias), (fc2, fc2_bias)] = &by.layers;
        let first = chains(&values(&normed), width, width, |k, column| fc1[column * width + k]);
        let (first_out, first_slope) = gelus(&first, fc1_bias);
        let second = chains(&first_out, width, width, |k, column| fc2[column * width + k]);
        let (second_out, second_slope) = gelus(&second, fc2_bias);
        assert_eq!(left_bits(&played, router.hidden), bits(&[first, second].concat()));
        let logits = chains(&second_out, width, classes, |k, column| by.out[column * width + k]);
        let logits = tensor(&logits, &[shape[0], -1]);
        let choice = chosen(&played, &router.chosen, &logits, &by.balance);
        let counts = played.read::<i64>(router.chosen[1]);
        let counts = counts.chunks(32).flat_map(|band| {
            (0..classes as i64).map(|class| band.iter().filter(|own| **own == class).count() as u32)
        });
        assert_eq!(played.read::<u32>(router.counts), counts.collect::<Vec<_>>(), "{sizes:?}");
        let forward = RouterForward {
            kind,
            chained,
            state,
            normed,
            factors,
            outs: [first_out, second_out],
            slopes: [first_slope, second_slope],
            choice,
        };
        check_back(&played, &router, sizes, &forward);
    }
}

/// What a router's backward pass follows from.
struct RouterForward {
    kind: Values,
    chained: bool,
    state: Tensor,
    normed: Tensor,
    factors: Tensor,
    /// What the GELUs make, and their slopes.
    outs: [Vec<f32>; 2],
    slopes: [Vec<f64>; 2],
    /// `[N, 1]`.
    choice: Tensor,
}

fn check_back(
    played: &TapeBuffers,
    router: &Router,
    sizes @ [rows, width, classes]: Sizes,
    RouterForward { kind, chained, state, normed, factors, outs, slopes, choice }: &RouterForward,
) {
    let (by, back, shape) = (Weights::new(sizes), &router.back, [rows as i64, width as i64]);
    let [(fc1, _), (fc2, _)] = &by.layers;
    let vector = |values: &[f32]| tensor(values, &shape[1..]);
    let probabilities = tensor(&played.read(router.chosen[0]), &[shape[0], -1]);
    let grad = tensor(&numbers(rows, 7), &[shape[0], 1]);
    let scaled = grad * probabilities.gather(1, choice, false);
    let mut to_logits = &probabilities * -&scaled;
    let _ = to_logits.scatter_add_(1, choice, &scaled);
    assert_eq!(left_bits(played, back.logits), bits_of(&to_logits));
    assert_eq!(left_bits(played, back.last), bits(&outs[1]));
    let through = |grad: Vec<f32>, slope: &[f64]| -> Vec<f32> {
        grad.iter().zip(slope).map(|(grad, slope)| (f64::from(*grad) * slope) as f32).collect()
    };
    let grad = chains(&values(&to_logits), classes, width, |k, column| by.out[k * width + column]);
    let to_second = through(grad, &slopes[1]);
    let grad = chains(&to_second, width, width, |k, column| fc2[k * width + column]);
    let to_first = through(grad, &slopes[0]);
    let layers = [&values(normed)[..], &outs[0], &to_first, &to_second].concat();
    assert_eq!(left_bits(played, back.layers), bits(&layers));
    let inner = chains(&to_first, width, width, |k, column| fc1[k * width + column]);
    let (inner, norm) = (tensor(&inner, &shape), vector(&by.norm));
    let (mut own, of_norm) = CPU.rms_norm_backward(state, factors, &norm, &inner).unwrap();
    if *chained {
        own += tensor(&numbers(rows * width, 11), &shape);
        assert_eq!(left_bits(played, back.to_before), bits_of(&(&own * vector(&by.decay))));
    }
    assert_eq!(kind.read(played, back.own, &shape), own.to_kind(kind.of()));
    let sums = |x: &[f32]| column_sums(x, width);
    let of_decay = sums(&values(&(&own * tensor(&numbers(rows * width, 4), &shape))));
    let biases = [to_first, to_second].map(|grad| sums(&grad));
    let vectors = [&[bits_of(&made(of_norm)), sums(&values(&own)), of_decay][..], &biases].concat();
    let found = left_bits(played, back.vectors);
    // Without a router before there is no gradient of a decay.
    for which in (0..5).filter(|which| *chained || *which != 2) {
        assert_eq!(found[which * width..][..width], vectors[which], "{sizes:?}: vector {which}");
    }
}

/// Checks probabilities against f64, and choice and weight against them; returns the choice, `[N, 1]`.
fn chosen(
    played: &TapeBuffers,
    [probabilities, choice, weight]: &[Buffer; 3],
    logits: &Tensor,
    balance: &[f32],
) -> Tensor {
    let exact = logits.to_kind(Kind::Double).softmax(-1, Kind::Double);
    close(&played.read::<f32>(*probabilities), &exact, 3e-7);
    let probabilities = tensor(&played.read(*probabilities), &logits.size());
    let best = (&probabilities + Tensor::from_slice(balance)).argmax(-1, false);
    assert_eq!(Tensor::from_slice(&played.read::<i64>(*choice)), best);
    let best = best.unsqueeze(1);
    assert_eq!(left_bits(played, *weight), bits_of(&probabilities.gather(1, &best, false)));
    best
}

/// Every exponent, both signs, both sides of where the series ends, infinities and what is not a number.
#[test]
fn gelus_have_the_bits_of_the_whole_series() {
    let sizes @ [rows, width, classes] = [390, 126, 2];
    let special = [0.0, -0.0, 5.656_854, 5.656_855, -5.656_854, -5.656_855, f32::INFINITY];
    let special = special.into_iter().chain([f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE]);
    let sized = |(place, value): (usize, f32)| value * [0.1, 1.0, 3.0, 6.0][place % 4];
    let usual = numbers(40_000, 31).into_iter().enumerate().map(sized);
    let any = numbers(9200, 32)
        .into_iter()
        .map(|value| f32::from_bits((value.to_bits() << 9).wrapping_mul(2_654_435_761)));
    let x: Vec<f32> = special.chain(usual).chain(any).take(rows * width).collect();
    assert_eq!(x.len(), rows * width);
    let mut tape = Tape::new("gelu");
    // The gradient of the first class is zero, that of the second one minus that of the weight.
    let grad = numbers(rows, 33);
    let mut by = Weights::new(sizes);
    by.layers.iter_mut().for_each(|(_, bias)| bias.fill(0.0));
    let read = RouterRead {
        probabilities: tape.with(&vec![1f32; rows * classes]),
        choice: tape.with(&vec![0i64; rows]),
        grad: tape.with(&grad),
        hidden: tape.with(&[&x[..], &x].concat()),
        state: tape.with(&numbers(rows * width, 34)),
        factors: tape.with(&numbers(rows, 35)),
        chained: [Argument::Null; 3],
    };
    let back = back(&mut tape, sizes, Values::Wide, &by, &read);
    let played = tape.play();
    let (last, layers) = (played.read::<f32>(back.last), played.read::<f32>(back.layers));
    let [first_out, to_second] = [1, 3].map(|part| &layers[part * x.len()..][..x.len()]);
    for (place, x) in x.iter().enumerate() {
        let [value, slope] = gelu_of(x + 0.0);
        let grad = -grad[place / width] * by.out[width + place % width];
        let wanted = [value as f32, value as f32, (f64::from(grad) * slope) as f32];
        for (found, wanted) in
            [last[place], first_out[place], to_second[place]].into_iter().zip(wanted)
        {
            let both_not = found.is_nan() && wanted.is_nan();
            assert!(both_not || found.to_bits() == wanted.to_bits(), "{x:e}: {found} {wanted}");
        }
    }
}

/// Ties choose the first class; a NaN wins over all numbers.
#[test]
fn ties_go_to_the_first() {
    // With one NaN all probabilities are NaN.
    for (larger, wanted) in
        [(vec![], 0), (vec![(33, 2.0), (18, 2.0)], 18), (vec![(35, f32::NAN)], 0)]
    {
        let sizes @ [rows, width, classes] = [3, 8, 40];
        let mut by = Weights::new(sizes);
        by.layers.iter_mut().for_each(|(weights, bias)| (weights.fill(0.0), bias.fill(1.0)).1);
        by.out = vec![0.5; classes * width];
        larger.iter().for_each(|(class, value)| by.out[class * width..][..width].fill(*value));
        by.balance.fill(0.0);
        let router = router_by(sizes, Values::Wide, false, &by);
        let played = router.tape.play();
        assert_eq!(played.read::<i64>(router.chosen[1]), [wanted; 3]);
        let weights = played.read::<f32>(router.chosen[2]);
        assert!(
            weights.iter().all(|weight| weight.is_nan() == (larger.len() == 1)),
            "{rows}: {weights:?}"
        );
    }
}

/// Rows of the width of a model.
pub(super) fn wide(sizes: Sizes) -> Tape {
    router(sizes, Values::Narrow, true).tape
}

pub(super) fn small() -> Vec<Tape> {
    vec![
        embedding([40, 9, 33], false).tape,
        embedding([20, 5, 3], true).tape,
        router([35, 21, 18], Values::Wide, true).tape,
        router([20, 24, 4], Values::Narrow, false).tape,
        router([3, 130, 5], Values::Wide, true).tape,
        router([2, 132, 3], Values::Narrow, true).tape,
    ]
}

/// Equal tokens far apart, and the maximum number of routed classes.
pub(super) fn large() -> Vec<Tape> {
    vec![
        embedding([600, 40, 260], false).tape,
        embedding([600, 400, 260], true).tape,
        router([130, 21, 65], Values::Wide, true).tape,
        router([130, 128, 17], Values::Narrow, true).tape,
        router([70, 256, 17], Values::Wide, true).tape,
        router([40, 256, 9], Values::Narrow, false).tape,
    ]
}
