//! The router's own functions, and the embedding.

use tch::{Kind, Tensor};

use super::rows::{banded, made};
use super::tape::{Argument, Buffer, Tape};
use super::{bits, bits_of, close, left_bits, numbers, tensor, tensor_bf16};
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

struct Router {
    tape: Tape,
    /// After averaging, without and with a previous state; its norm; gradients of both states.
    states: [Buffer; 5],
    /// The first of these rounded to bf16; and averaging of a bf16 projection.
    narrow: [Buffer; 2],
    /// Gradients of the norm's weight, its bias and the decay.
    vectors: Buffer,
    gelu: Gelu,
    choice: [Buffer; 3],
    logits: Buffer,
}

/// What a GELU leaves: its result, and the gradients of its input and of its bias.
struct Gelu {
    out: Buffer,
    to_x: Buffer,
    to_bias: Buffer,
}

impl Gelu {
    fn new(
        tape: &mut Tape,
        shape @ [rows, width]: [usize; 2],
        x: &[f32],
        [bias, grad]: [Buffer; 2],
    ) -> Gelu {
        let blocks = rows.div_ceil(32) * width.div_ceil(32);
        let x = tape.with(x);
        let [out, to_x] = [(); 2].map(|()| tape.room::<f32>(rows * width));
        let sizes = shape.map(Argument::from);
        let places = [x, bias, out].map(Argument::from);
        tape.launch("bias_gelu", blocks, &[&places[..], &sizes].concat());
        let to_bias = banded(tape, [1, rows, width], |tape, partial, _| {
            let places = [x, bias, grad, to_x, partial].map(Argument::from);
            tape.launch("gelu_backward", blocks, &[&places[..], &sizes].concat());
        });
        Gelu { out, to_x, to_bias }
    }
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

/// Every exponent, both signs, both sides of where the series ends, infinities and what is not a number.
#[test]
fn gelus_have_the_bits_of_the_whole_series() {
    let (rows, width) = (700, 70);
    let special = [0.0, -0.0, 5.656_854, 5.656_855, -5.656_854, -5.656_855, f32::INFINITY];
    let special = special.into_iter().chain([f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE]);
    let sized = |(place, value): (usize, f32)| value * [0.1, 1.0, 3.0, 6.0][place % 4];
    let usual = numbers(40_000, 31).into_iter().enumerate().map(sized);
    let any = numbers(9000, 32)
        .into_iter()
        .map(|value| f32::from_bits((value.to_bits() << 9).wrapping_mul(2_654_435_761)));
    let x: Vec<f32> = special.chain(usual).chain(any).take(rows * width).collect();
    let grad: Vec<f32> = numbers(x.len(), 33);
    let mut tape = Tape::new("gelu");
    let sides = [tape.with(&vec![0f32; width]), tape.with(&grad)];
    let gelu = Gelu::new(&mut tape, [x.len() / width, width], &x, sides);
    let played = tape.play();
    let (out, to_x) = (left_bits(&played, gelu.out), left_bits(&played, gelu.to_x));
    for (place, (x, grad)) in x.iter().zip(&grad).enumerate() {
        let [value, slope] = gelu_of(x + 0.0);
        let wanted = [value as f32, (f64::from(*grad) * slope) as f32];
        for (found, wanted) in [out[place], to_x[place]].into_iter().zip(wanted) {
            let found = f32::from_bits(found);
            let both_not = found.is_nan() && wanted.is_nan();
            assert!(both_not || found.to_bits() == wanted.to_bits(), "{x:e}: {found} {wanted}");
        }
    }
}

const WIDTH: usize = 21;

fn router([rows, width, classes]: [usize; 3]) -> Router {
    let mut tape = Tape::new("router");
    let elements = |count: usize| count.div_ceil(1024);
    let sizes: [Argument; 2] = [rows.into(), width.into()];
    let [bias, decay] = [1, 2].map(|seed| tape.with(&numbers(width, seed)));
    let state = |tape: &mut Tape| tape.with(&numbers(rows * width, 3));
    let [first, later] = [state(&mut tape), state(&mut tape)];
    let before = tape.with(&numbers(rows * width, 4));
    let weight = tape.with(&numbers(width, 9));
    let [normed, again, own, to_before] = [(); 4].map(|()| tape.room::<f32>(rows * width));
    let [factors, other] = [(); 2].map(|()| tape.room::<f32>(rows));
    let (blocks, eps) = (rows.div_ceil(16), [Argument::Float(1e-5)]);
    let mut norm = |state: Buffer, beside: [Argument; 2], out: [Buffer; 2]| {
        let places = [&[state.into(), state.into(), bias.into()][..], &beside, &[weight.into()]];
        let out = out.map(Argument::from);
        let arguments = [&places.concat()[..], &out, &sizes, &eps].concat();
        tape.launch("router_norm_f32", blocks, &arguments);
    };
    norm(first, [Argument::Null; 2], [again, other]);
    norm(later, [before, decay].map(Argument::from), [normed, factors]);
    let [grad, beyond] = [10, 11].map(|seed| tape.with(&numbers(rows * width, seed)));
    let rounded = tape.room::<u16>(rows * width);
    let vectors = banded(&mut tape, [3, rows, width], |tape, partial, bands| {
        let given = [later, factors, weight, grad, beyond, decay, before];
        let made = [own, rounded, to_before, partial].map(Argument::from);
        let arguments = [&given.map(Argument::from)[..], &made, &sizes].concat();
        tape.launch("router_norm_backward", bands, &arguments);
    });
    // From a bf16 projection.
    let projected = tape.with(&super::bf16(&numbers(rows * width, 3)));
    let [wide, narrow_normed] = [(); 2].map(|()| tape.room::<f32>(rows * width));
    let narrow_factors = tape.room::<f32>(rows);
    let places = [projected, wide, bias, before, decay, weight, narrow_normed, narrow_factors];
    let arguments = [&places.map(Argument::from)[..], &sizes, &eps].concat();
    tape.launch("router_norm_bf16", blocks, &arguments);
    let values: Vec<f32> = numbers(rows * width, 5).iter().map(|value| value * 7.0).collect();
    let gelu = Gelu::new(&mut tape, [rows, width], &values, [bias, before]);

    let logits = tape.with(&numbers(rows * classes, 6));
    let balance = tape.with(&balance(classes));
    let probabilities = tape.room::<f32>(rows * classes);
    let (choice, weight) = (tape.room::<i64>(rows), tape.room::<f32>(rows));
    let sizes: [Argument; 2] = [rows.into(), classes.into()];
    let places = [logits, balance, probabilities, choice, weight].map(Argument::from);
    tape.launch("router_choice", rows.div_ceil(16), &[&places[..], &sizes].concat());
    let (grad, to_logits) = (tape.with(&numbers(rows, 7)), tape.room::<f32>(rows * classes));
    let places = [probabilities, choice, grad, to_logits].map(Argument::from);
    tape.launch("router_backward", elements(rows * classes), &[&places[..], &sizes].concat());
    Router {
        tape,
        states: [first, later, normed, own, to_before],
        narrow: [rounded, wide],
        vectors,
        gelu,
        choice: [probabilities, choice, weight],
        logits: to_logits,
    }
}

fn balance(classes: usize) -> Vec<f32> {
    numbers(classes, 8).iter().map(|value| value * 0.01).collect()
}

#[test]
fn routers_agree_with_libtorch() {
    for (rows, classes) in [(1, 1), (40, 9), (77, 65)] {
        let router = router([rows, WIDTH, classes]);
        let played = router.tape.play();
        let shape = [rows as i64, WIDTH as i64];
        let of = |seed| tensor(&numbers(rows * WIDTH, seed), &shape);
        let [bias, decay] = [1, 2].map(|seed| tensor(&numbers(WIDTH, seed), &shape[1..]));
        let first = of(3) + &bias;
        let later = &first + of(4) * &decay;
        assert_eq!(left_bits(&played, router.states[0]), bits_of(&first));
        assert_eq!(left_bits(&played, router.states[1]), bits_of(&later));
        let weight = tensor(&numbers(WIDTH, 9), &shape[1..]);
        let (normed, factors) = CPU.rms_norm(&later, &weight, 1e-5).unwrap();
        assert_eq!(left_bits(&played, router.states[2]), bits_of(&normed));
        let (own, of_weight) = CPU.rms_norm_backward(&later, &factors, &weight, &of(10)).unwrap();
        let own = own + of(11);
        assert_eq!(left_bits(&played, router.states[3]), bits_of(&own));
        assert_eq!(left_bits(&played, router.states[4]), bits_of(&(&own * &decay)));
        let rounded = tensor_bf16(&played.read(router.narrow[0]), &shape);
        assert_eq!(rounded, own.to_kind(Kind::BFloat16));
        let projected = of(3).to_kind(Kind::BFloat16).to_kind(Kind::Float);
        let state = projected + &bias + of(4) * decay;
        assert_eq!(left_bits(&played, router.narrow[1]), bits_of(&state));
        let values = |x: &Tensor| Vec::<f32>::try_from(&x.reshape([-1])).unwrap();
        let sums = |x: &Tensor| column_sums(&values(x), WIDTH);
        let all = [bits_of(&made(of_weight)), sums(&own), sums(&(&own * of(4)))].concat();
        assert_eq!(left_bits(&played, router.vectors), all);

        let x = of(5) * 7.0 + bias;
        let exact = x.to_kind(Kind::Double);
        close(&played.read::<f32>(router.gelu.out), &exact.gelu("none"), 1e-7);
        let back = exact.gelu_backward(&of(4).to_kind(Kind::Double), "none");
        let to_x = played.read::<f32>(router.gelu.to_x);
        close(&to_x, &back, 3e-7);
        assert_eq!(left_bits(&played, router.gelu.to_bias), column_sums(&to_x, WIDTH));

        let logits = tensor(&numbers(rows * classes, 6), &[rows as i64, classes as i64]);
        let probabilities = tensor(&played.read(router.choice[0]), &logits.size());
        let exact = logits.to_kind(Kind::Double).softmax(-1, Kind::Double);
        close(&played.read::<f32>(router.choice[0]), &exact, 3e-7);
        let balanced = &probabilities + tensor(&balance(classes), &[classes as i64]);
        let choice = balanced.argmax(-1, false);
        assert_eq!(Tensor::from_slice(&played.read::<i64>(router.choice[1])), choice);
        let choice = choice.unsqueeze(1);
        let weight = probabilities.gather(1, &choice, false);
        assert_eq!(left_bits(&played, router.choice[2]), bits_of(&weight));
        let grad = tensor(&numbers(rows, 7), &[rows as i64, 1]);
        let scaled = grad * weight;
        let mut wanted = &probabilities * -&scaled;
        let _ = wanted.scatter_add_(1, &choice, &scaled);
        assert_eq!(left_bits(&played, router.logits), bits_of(&wanted));
    }
}

/// Ties choose the first class; a NaN wins over all numbers.
#[test]
fn ties_go_to_the_first() {
    let (rows, classes) = (3, 40);
    let mut logits = vec![0.5f32; rows * classes];
    logits[classes + 33] = 2.0;
    logits[classes + 18] = 2.0;
    logits[2 * classes + 35] = f32::NAN;
    let mut tape = Tape::new("ties");
    let (logits, balance) = (tape.with(&logits), tape.with(&vec![0f32; classes]));
    let probabilities = tape.room::<f32>(rows * classes);
    let (choice, weight) = (tape.room::<i64>(rows), tape.room::<f32>(rows));
    let places = [logits, balance, probabilities, choice, weight].map(Argument::from);
    tape.launch("router_choice", 1, &[&places[..], &[rows.into(), classes.into()]].concat());
    let played = tape.play();
    // With one NaN all probabilities are NaN.
    assert_eq!(played.read::<i64>(choice), [0, 18, 0]);
    assert!(bits(&played.read(weight))[2] > 0x7F80_0000);
}

/// Rows of the width of a model.
pub(super) fn wide(shape: [usize; 3]) -> Tape {
    router(shape).tape
}

pub(super) fn small() -> Vec<Tape> {
    vec![
        embedding([40, 9, 33], false).tape,
        embedding([20, 5, 3], true).tape,
        router([20, WIDTH, 18]).tape,
    ]
}

/// Equal tokens far apart, and the maximum number of routed classes.
pub(super) fn large() -> Vec<Tape> {
    vec![
        embedding([600, 40, 260], false).tape,
        embedding([600, 400, 260], true).tape,
        router([130, WIDTH, 65]).tape,
    ]
}
