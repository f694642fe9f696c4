//! Expert matmuls: f32 by one chain of fused multiply-adds, bf16 by matrix units.

use proptest::prelude::*;
use tch::{Kind, Tensor};

use super::build::{Build, played};
use super::tape::{Argument, Buffer, Tape};
use super::{Values, bf16, bits_of, left_bits, tensor};

/// As on a GPU without matrix units for bf16.
pub(super) const SHUFFLED: Build =
    Build { compiler: None, flags: &["-O1", "-DWITHOUT_MATRIX_UNITS"] };

struct Grouped {
    tape: Tape,
    /// Forward, gradient of the rows, gradient of the weights.
    out: [Buffer; 3],
}

/// Experts with so many rows of `inner` numbers, times weights of `width` rows.
fn grouped(counts: &[usize], [inner, width]: [usize; 2], values: Values) -> Grouped {
    let mut tape = Tape::new(&format!("grouped_{}", values.kind()));
    let (all, experts) = (counts.iter().sum::<usize>() + LOST, counts.len());
    let sizes = [all * inner, experts * inner * width, all * width];
    let operands = [1, 2, 3].map(|seed| values.with(&mut tape, sizes[seed - 1], seed as u64));
    launched(tape, operands, counts, [inner, width], values)
}

/// Rows without an expert, which follow the others.
const LOST: usize = 3;

/// The three products of rows, weights and gradients of results.
fn launched(
    mut tape: Tape,
    [x, weights, grad]: [Buffer; 3],
    counts: &[usize],
    [inner, width]: [usize; 2],
    values: Values,
) -> Grouped {
    let kind = values.kind();
    let (all, experts) = (counts.iter().sum::<usize>() + LOST, counts.len());
    let ends = counts.iter().scan(0, |end, count| {
        *end += *count as u32;
        Some(*end)
    });
    let ends = ends.collect::<Vec<_>>();
    let ends = tape.with(&ends);
    let out = [all * width, all * inner, experts * inner * width]
        .map(|count| values.room(&mut tape, count));
    let blocks = |width: usize| (all / 128 + experts) * width.div_ceil(128);
    let sizes = |a: usize, b: usize| [experts, a, b].map(Argument::from);
    let memory = [x, weights, ends, out[0]].map(Argument::from);
    let arguments = [&memory[..], &sizes(inner, width)].concat();
    tape.launch(&format!("grouped_{kind}"), blocks(width), &arguments);
    let memory = [grad, weights, ends, out[1]].map(Argument::from);
    let arguments = [&memory[..], &sizes(width, inner)].concat();
    tape.launch(&format!("grouped_input_{kind}"), blocks(inner), &arguments);
    let order: &[Argument] = if values == Values::Wide { &[] } else { &[Argument::Null] };
    let ([operands, memory], sizes) = (
        [[grad, x], [ends, out[2]]].map(|two| two.map(Argument::from)),
        [width, inner].map(Argument::from),
    );
    let arguments = [&operands[..], order, &memory, &sizes].concat();
    let tiles = experts * inner.div_ceil(128) * width.div_ceil(128);
    tape.launch(&format!("grouped_weights_{kind}"), tiles, &arguments);
    if values == Values::Narrow {
        let terms = [inner, width, counts.iter().copied().max().unwrap_or(0)];
        out.iter().zip(terms).for_each(|(out, terms)| tape.by_matrix_units(*out, terms, 1.0));
    }
    Grouped { tape, out }
}

/// Rows of tokens in an order with padding, and SwiGLU: of `inner` numbers, times weights of gate and up of `width`
/// rows each; and back. In one launch each, and by those of the matmul and of the rest. Operands are multiples of an
/// eighth, whose sums are exact: no order of additions in a matrix unit changes a bit.
struct Fused {
    tape: Tape,
    /// Gate and up, their product, the gradients of both, and a gradient of weights: as one launch makes them, and as
    /// several do.
    pairs: [[Buffer; 2]; 4],
}

fn fused(counts: &[usize], [inner, width]: [usize; 2]) -> Fused {
    let mut tape = Tape::new("grouped_swiglu_bf16");
    let (tokens, experts) = (counts.iter().sum::<usize>(), counts.len());
    // An expert's rows are padded to a multiple of 8, where tokens come in an order of their own.
    let (mut order, mut ends, mut next) = (Vec::new(), Vec::new(), 0);
    for count in counts {
        order.extend((0..*count).map(|row| ((next + row) * 7 + 3) as u32 % tokens as u32));
        order.resize(order.len().next_multiple_of(8), u32::MAX);
        next += count;
        ends.push(order.len() as u32);
    }
    order.extend([u32::MAX; LOST]);
    let (used, all) = (order.len() - LOST, order.len());
    let [order, ends] = [order, ends].map(|list| tape.with(&list));
    let eighths = |tape: &mut Tape, count: usize, seed: u64| {
        let eighth = |value: f32| (value * 4.0).round() / 8.0;
        tape.with(&bf16(&super::numbers(count, seed).into_iter().map(eighth).collect::<Vec<_>>()))
    };
    let x = eighths(&mut tape, tokens * inner, 1);
    let gate_up = eighths(&mut tape, experts * 2 * width * inner, 2);
    let down = eighths(&mut tape, experts * inner * width, 3);
    let grad = eighths(&mut tape, all * inner, 4);
    let gate_up_grad = eighths(&mut tape, all * 2 * width, 5);
    let values = Values::Narrow;
    let mut two = |count: usize| [0, 1].map(|_| values.room(&mut tape, count));
    let (both, product, back) = (two(all * 2 * width), two(all * width), two(all * 2 * width));
    let weights = two(experts * 2 * width * inner);
    let [sorted, inner_grad] =
        [all * inner, all * width].map(|count| values.room(&mut tape, count));
    let blocks = |columns: usize| (all / 128 + experts) * columns.div_ceil(128);
    let sizes =
        |sizes: &[usize]| sizes.iter().map(|size| Argument::from(*size)).collect::<Vec<_>>();
    let mut launch = |name: &str, blocks: usize, memory: &[Argument], own: &[usize]| {
        tape.launch(name, blocks, &[memory, &sizes(own)].concat());
    };
    let of =
        |buffers: &[Buffer]| buffers.iter().map(|one| Argument::from(*one)).collect::<Vec<_>>();
    let name = "grouped_swiglu_bf16";
    let memory = of(&[x, order, gate_up, ends, both[0], product[0]]);
    launch(name, blocks(2 * width), &memory, &[experts, inner, width]);
    let name = "grouped_swiglu_backward_bf16";
    let memory = of(&[grad, down, ends, both[0], back[0]]);
    launch(name, blocks(width), &memory, &[experts, inner, width]);
    let tiles = experts * inner.div_ceil(128) * (2 * width).div_ceil(128);
    let memory = of(&[gate_up_grad, x, order, ends, weights[0]]);
    launch("grouped_weights_bf16", tiles, &memory, &[2 * width, inner]);

    launch("permute_bf16", all.div_ceil(16), &of(&[x, order, sorted]), &[all, inner]);
    let memory = of(&[sorted, gate_up, ends, both[1]]);
    launch("grouped_bf16", blocks(2 * width), &memory, &[experts, inner, 2 * width]);
    // Not of rows without an expert, which are not numbers: bits of those differ between compilers.
    let gates = (used * width.div_ceil(4)).div_ceil(256);
    launch("swiglu_bf16", gates, &of(&[both[1], product[1]]), &[used, width]);
    let memory = of(&[grad, down, ends, inner_grad]);
    launch("grouped_input_bf16", blocks(width), &memory, &[experts, inner, width]);
    launch("swiglu_backward_bf16", gates, &of(&[both[1], inner_grad, back[1]]), &[used, width]);
    let order = [Argument::Null];
    let memory = [&of(&[gate_up_grad, sorted])[..], &order, &of(&[ends, weights[1]])].concat();
    launch("grouped_weights_bf16", tiles, &memory, &[2 * width, inner]);
    Fused { tape, pairs: [both, product, back, weights] }
}

/// The bits of one launch are those of several: rows without an expert are not written.
fn check_fused(counts: &[usize], [inner, width]: [usize; 2]) {
    let Fused { tape, pairs } = fused(counts, [inner, width]);
    let played = tape.play();
    let rows = counts.iter().map(|count| count.next_multiple_of(8)).sum::<usize>();
    let sizes = [2 * width, width, 2 * width].map(|width| rows * width);
    for (index, [one, several]) in pairs.into_iter().enumerate() {
        let [one, several] = [one, several].map(|buffer| played.read::<u16>(buffer));
        let used = sizes.get(index).copied().unwrap_or(one.len());
        assert_eq!(one[..used], several[..used], "{counts:?} {inner} x {width}: {index}");
        let unwritten =
            one[used..].iter().all(|bits| f32::from_bits(u32::from(*bits) << 16).is_nan());
        assert!(unwritten, "{counts:?} {inner} x {width}: {index}");
    }
}

/// Checks a shape against f64: partially filled tiles, experts without rows, and an inner index in several parts.
fn check_against_f64(counts: &[usize], shape: [usize; 2], values: Values) {
    let Grouped { tape, out } = grouped(counts, shape, values);
    let played = tape.play();
    let [inner, width] = shape.map(|size| size as i64);
    let (rows, experts) = (counts.iter().sum::<usize>() as i64, counts.len() as i64);
    let all = rows + LOST as i64;
    let of = |shape: &[i64], seed| values.tensor(shape, seed).to_kind(Kind::Double);
    let operands = [of(&[all, inner], 1), of(&[experts, width, inner], 2), of(&[all, width], 3)];
    let sizes = operands.each_ref().map(Tensor::abs);
    let exact = products(&operands, counts);
    let sizes = products(&sizes, counts);
    let terms = [inner, width, counts.iter().copied().max().unwrap_or(0) as i64];
    let shapes = [vec![all, width], vec![all, inner], vec![experts * width, inner]];
    for (index, (out, shape)) in out.into_iter().zip(shapes).enumerate() {
        let found = values.read(&played, out, &shape).to_kind(Kind::Double);
        let own = found.narrow(0, 0, exact[index].size()[0]);
        // Each addition in f32 errs by 2^-24 of the terms so far, and the rounding to bf16 by 2^-8 of the sum.
        let sums = &sizes[index] * (terms[index] as f64 * 2f64.powi(-24));
        let rounding = if values == Values::Narrow { 2f64.powi(-8) } else { 2f64.powi(-24) };
        let within = (exact[index].abs() + &sums) * rounding + sums;
        let beyond = (own - &exact[index]).abs().gt_tensor(&within).any().int64_value(&[]);
        assert_eq!(beyond, 0, "{values:?} {counts:?} {shape:?}: product {index}");
        // Rows without an expert were not written.
        let left = found.narrow(0, exact[index].size()[0], shape[0] - exact[index].size()[0]);
        assert_eq!(left.isnan().all().int64_value(&[]), 1);
    }
}

/// The three products in f64, of the rows that have an expert.
fn products([x, weights, grad]: &[Tensor; 3], counts: &[usize]) -> [Tensor; 3] {
    let (mut made, mut first) = ([vec![], vec![], vec![]], 0);
    for (expert, count) in (0i64..).zip(counts) {
        let own = |x: &Tensor| x.narrow(0, first, *count as i64);
        let weights = weights.get(expert);
        made[0].push(own(x).matmul(&weights.tr()));
        made[1].push(own(grad).matmul(&weights));
        made[2].push(own(grad).tr().matmul(&own(x)));
        first += *count as i64;
    }
    made.map(|one| Tensor::cat(&one, 0))
}

#[test]
fn products_of_experts_are_those_of_f64() {
    let cases: [(&[usize], [usize; 2]); 7] = [
        (&[1], [1, 1]),
        (&[0, 70, 8, 0, 130], [40, 65]),
        (&[16, 0, 64], [67, 3]),
        (&[0, 0], [3, 4]),
        (&[129, 0, 31], [136, 72]),
        (&[33], [64, 200]),
        (&[300], [24, 160]),
    ];
    for (counts, shape) in cases {
        for values in [Values::Wide, Values::Narrow] {
            check_against_f64(counts, shape, values);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn products_by_matrix_units_are_those_of_f64(
        counts in proptest::collection::vec(0usize..150, 1..4),
        inner in 1usize..100,
        width in 1usize..150,
    ) {
        check_against_f64(&counts, [inner, width], Values::Narrow);
        if counts.iter().any(|count| *count > 0) {
            check_fused(&counts, [inner, width]);
        }
    }

    /// Among others, in whatever place, an expert has the bits that it has alone.
    #[test]
    fn bits_of_an_expert_depend_on_itself_only(
        before in proptest::collection::vec(0usize..140, 0..3),
        after in proptest::collection::vec(0usize..140, 0..3),
        rows in 0usize..150,
        inner in 1usize..70,
        width in 1usize..140,
        seed in 0u64..1000,
    ) {
        let own = (rows, seed);
        let others = |counts: &[usize]| -> Vec<(usize, u64)> {
            counts.iter().map(|count| (*count, 7 * seed + *count as u64 + 1000)).collect()
        };
        let among = [others(&before), vec![own], others(&after)].concat();
        let alone = bits_of_expert(&[own], 0, [inner, width]);
        prop_assert_eq!(bits_of_expert(&among, before.len(), [inner, width]), alone);
    }
}

#[test]
fn fused_matmuls_of_experts_have_the_bits_of_several_launches() {
    let cases: [(&[usize], [usize; 2]); 6] = [
        (&[1], [1, 1]),
        (&[0, 70, 8, 0, 130], [40, 65]),
        (&[16, 0, 63], [67, 3]),
        (&[129, 0, 31], [136, 72]),
        (&[33], [64, 200]),
        (&[300], [24, 128]),
    ];
    cases.into_iter().for_each(|(counts, shape)| check_fused(counts, shape));
}

/// The bits of one expert's products; each has rows and seeds of its own.
fn bits_of_expert(experts: &[(usize, u64)], which: usize, [inner, width]: [usize; 2]) -> Vec<u16> {
    let mut tape = Tape::new("grouped_bf16");
    let numbers = |size: fn([usize; 3]) -> usize, salt: u64, tape: &mut Tape| {
        let lost = [(LOST, 1)];
        let all = experts
            .iter()
            .chain(&lost)
            .flat_map(|(rows, seed)| super::numbers(size([*rows, inner, width]), 3 * seed + salt));
        tape.with(&bf16(&all.collect::<Vec<_>>()))
    };
    let x = numbers(|[rows, inner, _]| rows * inner, 0, &mut tape);
    let weights = numbers(|[_, inner, width]| inner * width, 1, &mut tape);
    let grad = numbers(|[rows, _, width]| rows * width, 2, &mut tape);
    let counts: Vec<usize> = experts.iter().map(|(rows, _)| *rows).collect();
    let Grouped { tape, out } =
        launched(tape, [x, weights, grad], &counts, [inner, width], Values::Narrow);
    let played = tape.play();
    let (first, rows) = (counts[..which].iter().sum::<usize>(), counts[which]);
    let part = |out, first: usize, count: usize| played.read::<u16>(out)[first..][..count].to_vec();
    [
        part(out[0], first * width, rows * width),
        part(out[1], first * inner, rows * inner),
        part(out[2], which * inner * width, inner * width),
    ]
    .concat()
}

pub(super) fn small() -> Vec<Tape> {
    let apart =
        [Values::Wide, Values::Narrow].map(|values| grouped(&[0, 3, 1], [5, 3], values).tape);
    apart.into_iter().chain([fused(&[0, 3, 1], [5, 3]).tape]).collect()
}

/// Several tiles in both directions, some partially filled, and an inner index in several parts.
pub(super) fn large() -> Vec<Tape> {
    let counts = [0, 70, 8, 0, 130];
    let apart =
        [Values::Wide, Values::Narrow].map(|values| grouped(&counts, [136, 72], values).tape);
    apart.into_iter().chain([fused(&counts, [136, 72]).tape]).collect()
}

/// A wave multiplies whole numbers, without rounding: operands that lie along and across their inner index, by a matrix
/// unit in the layouts of 32 and of 64 lanes, and by shuffles as where there is no such unit.
#[test]
fn a_wave_multiplies_sixteen_by_sixteen() {
    let whole = |by: usize, most: usize| -> Vec<f32> {
        (0..256).map(|at| (at * by % most) as f32 - 9.0).collect()
    };
    let (left, right) = (whole(37, 23), whole(53, 19));
    let mut tape = Tape::new("sixteen");
    let operands = [&left, &right].map(|values| tape.with(&bf16(values)));
    let out = tape.room::<f32>(4 * 256);
    tape.launch("products_of_sixteen", 1, &[operands[0], operands[1], out].map(Argument::from));
    let [left, right] = [left, right].map(|values| tensor(&values, &[16, 16]));
    let products = [left.shallow_clone(), left.tr()]
        .iter()
        .flat_map(|left| [left.matmul(&right.tr()), left.matmul(&right)])
        .collect::<Vec<_>>();
    let wanted = bits_of(&(Tensor::stack(&products, 0) * 2));
    assert_eq!(left_bits(&tape.play(), out), wanted);
    let (told, left) = played(&SHUFFLED, "all", &[&tape]);
    assert_eq!(left_bits(&tape.left(&left.expect(&told)), out), wanted);
}
