//! The router's own functions, and the embedding.

use tch::{Kind, Tensor};

use super::rows::{banded, made};
use super::tape::{Argument, Buffer, Tape};
use super::{bits, bits_of, close, left_bits, numbers, tensor, tensor_bf16};
use crate::ops::CPU;

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
    /// Gradients of the norm's weight, its bias, the decay, and two sums.
    vectors: Buffer,
    gelu: [Buffer; 3],
    choice: [Buffer; 3],
    logits: Buffer,
}

const WIDTH: usize = 21;

fn router(rows: usize, classes: usize) -> Router {
    let mut tape = Tape::new("router");
    let elements = |count: usize| count.div_ceil(1024);
    let sizes: [Argument; 2] = [rows.into(), WIDTH.into()];
    let [bias, decay] = [1, 2].map(|seed| tape.with(&numbers(WIDTH, seed)));
    let state = |tape: &mut Tape| tape.with(&numbers(rows * WIDTH, 3));
    let [first, later] = [state(&mut tape), state(&mut tape)];
    let before = tape.with(&numbers(rows * WIDTH, 4));
    let weight = tape.with(&numbers(WIDTH, 9));
    let [normed, again, own, to_before] = [(); 4].map(|()| tape.room::<f32>(rows * WIDTH));
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
    let [grad, beyond] = [10, 11].map(|seed| tape.with(&numbers(rows * WIDTH, seed)));
    let rounded = tape.room::<u16>(rows * WIDTH);
    let places = [later, factors, weight, grad, beyond, decay, own, rounded, to_before];
    let arguments = [&places.map(Argument::from)[..], &sizes].concat();
    tape.launch("router_norm_backward", blocks, &arguments);
    // From a bf16 projection.
    let projected = tape.with(&super::bf16(&numbers(rows * WIDTH, 3)));
    let [wide, narrow_normed] = [(); 2].map(|()| tape.room::<f32>(rows * WIDTH));
    let narrow_factors = tape.room::<f32>(rows);
    let places = [projected, wide, bias, before, decay, weight, narrow_normed, narrow_factors];
    let arguments = [&places.map(Argument::from)[..], &sizes, &eps].concat();
    tape.launch("router_norm_bf16", blocks, &arguments);
    let [one, two] = [12, 13].map(|seed| tape.with(&numbers(rows * WIDTH, seed)));
    let vectors = banded(&mut tape, [5, rows, WIDTH], |tape, partial, blocks| {
        let places = [later, factors, grad, own, before, one, two, partial].map(Argument::from);
        tape.launch("router_vectors", blocks, &[&places[..], &sizes].concat());
    });

    let values: Vec<f32> = numbers(rows * WIDTH, 5).iter().map(|value| value * 7.0).collect();
    let x = tape.with(&values);
    let [out, to_x] = [(); 2].map(|()| tape.room::<f32>(rows * WIDTH));
    let places = [x, bias, out].map(Argument::from);
    let blocks = (rows * WIDTH).div_ceil(256);
    tape.launch("bias_gelu", blocks, &[&places[..], &sizes].concat());
    let places = [x, before, to_x].map(Argument::from);
    tape.launch("gelu_backward", blocks, &[&places[..], &sizes].concat());

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
        gelu: [x, out, to_x],
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
        let router = router(rows, classes);
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
        let wide = |x: Tensor| x.to_kind(Kind::Double);
        let (own, before) = (wide(own), wide(of(4)));
        let all = [&own * before, wide(of(12)), wide(of(13))];
        let all = all.iter().map(|x| x.sum_dim_intlist(0, false, Kind::Double));
        let own = own.sum_dim_intlist(0, false, Kind::Double);
        let wanted: Vec<_> = [wide(made(of_weight)), own].into_iter().chain(all).collect();
        let within = 1e-6 * (rows as f64).sqrt();
        close(&played.read::<f32>(router.vectors), &Tensor::cat(&wanted, 0), within);

        let x = of(5) * 7.0 + bias;
        assert_eq!(left_bits(&played, router.gelu[0]), bits_of(&x));
        let exact = x.to_kind(Kind::Double);
        close(&played.read::<f32>(router.gelu[1]), &exact.gelu("none"), 1e-7);
        let back = exact.gelu_backward(&of(4).to_kind(Kind::Double), "none");
        close(&played.read::<f32>(router.gelu[2]), &back, 3e-7);

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

pub(super) fn small() -> Vec<Tape> {
    vec![embedding([40, 9, 33], false).tape, embedding([20, 5, 3], true).tape, router(20, 18).tape]
}

/// Equal tokens far apart, and the maximum number of routed classes.
pub(super) fn large() -> Vec<Tape> {
    vec![
        embedding([600, 40, 260], false).tape,
        embedding([600, 400, 260], true).tape,
        router(130, 65).tape,
    ]
}
