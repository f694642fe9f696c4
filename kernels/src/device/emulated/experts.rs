//! Dispatch of tokens to experts and back, and the gated linear unit.

use tch::{Kind, Tensor};

use super::tape::{Argument, Buffer, Tape};
use super::{Values, bits_of, close, left_bits, numbers, tensor};
use crate::ops::{CPU, ExpertRows};

/// Classes of tokens; some are frequent, some never occur.
fn choice(tokens: usize, classes: usize) -> Vec<i64> {
    let class = |value: f32| (value.abs() * value.abs() * classes as f32) as i64;
    numbers(tokens, 9).into_iter().map(class).map(|class| class.min(classes as i64 - 1)).collect()
}

struct Dispatched {
    tape: Tape,
    /// Places, tokens of rows, counts, ends of classes; and by a router's counts of bands.
    lists: [[Buffer; 4]; 2],
    /// Permuted, unpermuted, gathered; back.
    rows: [Buffer; 3],
    back: [Buffer; 2],
}

/// The maximum number of rows.
fn places(tokens: usize, classes: usize) -> usize {
    tokens + 7 * (classes - 1)
}

fn dispatched([tokens, classes, width]: [usize; 3], values: Values) -> Dispatched {
    let kind = values.kind();
    let mut tape = Tape::new(&format!("dispatch_{kind}"));
    let chosen = tape.with(&choice(tokens, classes));
    // With many tokens a block has several rounds.
    let rounds = if tokens < 600 { 1 } else { 3 };
    let (blocks, rows) = (tokens.div_ceil(256 * rounds), places(tokens, classes));
    let counts = tape.room::<u32>(blocks * classes);
    let sizes: [Argument; 3] = [tokens.into(), classes.into(), rounds.into()];
    tape.launch("dispatch_counts", blocks, &[&[chosen.into(), counts.into()][..], &sizes].concat());
    let all = choice(tokens, classes);
    let by_router = all.chunks(32).flat_map(|band| {
        let of = |class| band.iter().filter(|own| **own == class as i64).count() as u32;
        (0..classes).map(of).collect::<Vec<_>>()
    });
    let by_router = tape.with(&by_router.collect::<Vec<_>>());
    let both = [(counts, 256 * rounds), (by_router, 32)].map(|(counts, part)| {
        let (totals, ends) = (tape.room::<i64>(classes), tape.room::<u32>(classes));
        let (order, to) = (tape.room::<u32>(rows), tape.room::<i64>(tokens));
        let lists = [chosen, counts, totals, ends, to, order].map(Argument::from);
        let sizes = [tokens, classes, rows, rounds, part].map(Argument::from);
        tape.launch("dispatch_places", blocks, &[&lists[..], &sizes].concat());
        [to, order, totals, ends]
    });
    let [to, order, _, ends] = both[0];

    let (columns, width) = (width, Argument::from(width));
    let count = |rows: usize| rows * columns;
    let x = values.with(&mut tape, count(tokens), 1);
    let there = values.room(&mut tape, count(rows));
    let (beside, back) =
        (values.with(&mut tape, count(tokens), 5), values.room(&mut tape, count(tokens)));
    tape.launch(
        &format!("permute_{kind}"),
        rows.div_ceil(16),
        &[x.into(), order.into(), there.into(), rows.into(), width],
    );
    let passed = values.with(&mut tape, count(rows), 6);
    let lists = [to, there, passed, ends, beside, back].map(Argument::from);
    let sizes: [Argument; 3] = [tokens.into(), (classes - 1).into(), width];
    tape.launch(&format!("unpermute_{kind}"), tokens.div_ceil(16), &[&lists[..], &sizes].concat());
    let answer = values.with(&mut tape, count(rows), 2);
    let weight = tape.with(&numbers(tokens, 3));
    let gathered = values.room(&mut tape, count(tokens));
    let lists: [Argument; 6] =
        [to.into(), answer.into(), Argument::Null, ends.into(), weight.into(), gathered.into()];
    tape.launch(&format!("gather_{kind}"), tokens.div_ceil(16), &[&lists[..], &sizes].concat());
    let grad = values.with(&mut tape, count(tokens), 4);
    let (to_x, to_weight) = (values.room(&mut tape, count(rows)), tape.room::<f32>(tokens));
    let lists = [order, answer, passed, ends, weight, grad, to_x, to_weight].map(Argument::from);
    let arguments = [&lists[..], &[rows.into()], &sizes[1..]].concat();
    tape.launch(&format!("gather_backward_{kind}"), rows.div_ceil(16), &arguments);
    Dispatched { tape, lists: both, rows: [there, back, gathered], back: [to_x, to_weight] }
}

#[test]
fn tokens_go_where_the_cpu_sends_them() {
    let cases = [
        ([1, 2, 1], Values::Wide),
        ([300, 9, 7], Values::Narrow),
        ([700, 65, 40], Values::Wide),
        ([1700, 5, 4], Values::Narrow),
        ([257, 300, 3], Values::Wide),
    ];
    for (shape, values) in cases {
        let dispatched = dispatched(shape, values);
        let played = dispatched.tape.play();
        let [tokens, classes, width] = shape.map(|size| size as i64);
        let choice = Tensor::from_slice(&choice(shape[0], shape[1]));
        let by = CPU.dispatch(&choice, classes).unwrap();
        let used = by.rows as usize;
        let [lists, by_router] = dispatched.lists;
        for (one, other) in lists.into_iter().zip(by_router) {
            assert_eq!(played.read::<u8>(other), played.read::<u8>(one));
        }
        let [to, order_there, totals, ends] = lists;
        assert_eq!(Tensor::from_slice(&played.read::<i64>(to)), by.places);
        let counts = Vec::<i64>::try_from(&by.counts).unwrap();
        assert_eq!(played.read::<i64>(totals), counts);
        let ends = played.read::<u32>(ends).into_iter().map(i64::from);
        let mut end = 0;
        let wanted = counts.iter().enumerate().map(|(class, count)| {
            end += if class + 1 < shape[1] { (count + 7) / 8 * 8 } else { *count };
            end
        });
        let ends = ends.collect::<Vec<_>>();
        assert_eq!(ends, wanted.collect::<Vec<_>>());
        assert_eq!(end as usize, used);
        let mut order = vec![-1; places(shape[0], shape[1])];
        for (token, place) in (0i32..).zip(Vec::<i64>::try_from(&by.places).unwrap()) {
            order[place as usize] = token;
        }
        let found = played.read::<u32>(order_there).into_iter().map(u32::cast_signed);
        assert_eq!(found.collect::<Vec<_>>(), order);

        let x = values.tensor(&[tokens, width], 1);
        let rows = places(shape[0], shape[1]) as i64;
        let there = values.read(&played, dispatched.rows[0], &[rows, width]);
        assert_eq!(there.narrow(0, 0, used as i64), CPU.permute(&x, &by).unwrap());
        let beside = values.tensor(&[tokens, width], 5);
        let [passed, answer] =
            [6, 2].map(|seed| values.tensor(&[rows, width], seed).narrow(0, 0, by.rows));
        let there = there.narrow(0, 0, by.rows);
        let own = |x, passed, by_token| ExpertRows { x, by: &by, passed, by_token };
        let wanted = CPU.unpermute(own(&there, Some(&passed), &beside)).unwrap();
        assert_eq!(values.read(&played, dispatched.rows[1], &[tokens, width]), wanted);
        let weight = tensor(&numbers(shape[0], 3), &[tokens, 1]);
        let gathered = CPU.gather(own(&answer, None, &weight)).unwrap();
        assert_eq!(values.read(&played, dispatched.rows[2], &[tokens, width]), gathered);
        let grad = values.tensor(&[tokens, width], 4);
        let back = CPU.gather_backward(own(&answer, Some(&passed), &weight), &grad).unwrap();
        let [wanted, to_weight] = back;
        let found = values.read(&played, dispatched.back[0], &[rows, width]);
        assert_eq!(found.narrow(0, 0, by.rows), wanted);
        assert_eq!(found.abs().sum(Kind::Double), wanted.abs().sum(Kind::Double), "zeros behind");
        assert_eq!(left_bits(&played, dispatched.back[1]), bits_of(&to_weight));
    }
}

fn gate(rows: usize, width: usize, values: Values) -> (Tape, Buffer, Buffer) {
    let kind = values.kind();
    let mut tape = Tape::new(&format!("swiglu_{kind}"));
    let x = values.scaled(&mut tape, 2 * rows * width, 1, 30.0);
    let grad = values.with(&mut tape, rows * width, 2);
    let (out, back) =
        (values.room(&mut tape, rows * width), values.room(&mut tape, 2 * rows * width));
    let (sizes, blocks) =
        ([rows, width].map(Argument::from), (rows * width.div_ceil(4)).div_ceil(256));
    let arguments = [&[x.into(), out.into()][..], &sizes].concat();
    tape.launch(&format!("swiglu_{kind}"), blocks, &arguments);
    let arguments = [&[x.into(), grad.into(), back.into()][..], &sizes].concat();
    tape.launch(&format!("swiglu_backward_{kind}"), blocks, &arguments);
    (tape, out, back)
}

/// Gates in bf16, of as many rows and columns.
pub(super) fn gates([rows, width]: [usize; 2]) -> Tape {
    gate(rows, width, Values::Narrow).0
}

#[test]
fn gates_are_those_of_the_cpu() {
    let cases = [
        (1, 1, Values::Wide),
        (40, 33, Values::Wide),
        (40, 33, Values::Narrow),
        (70, 36, Values::Wide),
        (70, 36, Values::Narrow),
    ];
    for (rows, width, values) in cases {
        let (tape, out, back) = gate(rows, width, values);
        let played = tape.play();
        let shape = [rows as i64, 2 * width as i64];
        let narrow = [rows as i64, width as i64];
        let x = (tensor(&numbers(2 * rows * width, 1), &shape) * 30.0).to_kind(values.of());
        let grad = values.tensor(&narrow, 2);
        let (found, found_back) =
            (values.read(&played, out, &narrow), values.read(&played, back, &shape));
        if values == Values::Wide {
            assert_eq!(found, CPU.swiglu(&x).unwrap());
            assert_eq!(found_back, CPU.swiglu_backward(&x, &grad).unwrap());
        }
        let exact = x.to_kind(Kind::Double);
        let (left, up) = (exact.narrow(1, 0, narrow[1]), exact.narrow(1, narrow[1], narrow[1]));
        let within = if values == Values::Wide { 8e-7 } else { 2f64.powi(-8) };
        let wide =
            |x: &Tensor| Vec::<f32>::try_from(&x.to_kind(Kind::Float).reshape([-1])).unwrap();
        close(&wide(&found), &(left.silu() * &up), within);
        let open = left.sigmoid();
        let grad = grad.to_kind(Kind::Double);
        let to_left = &grad * &up * &open * (&left * (1.0 - &open) + 1.0);
        close(&wide(&found_back), &Tensor::cat(&[to_left, grad * left.silu()], 1), within);
    }
}

/// Moves of bf16 rows that are read four elements at a time.
pub(super) fn wide(shape: [usize; 3]) -> Tape {
    dispatched(shape, Values::Narrow).tape
}

pub(super) fn small() -> Vec<Tape> {
    [Values::Wide, Values::Narrow]
        .into_iter()
        .flat_map(|values| {
            // Two blocks of tokens are sorted; moving rows takes a block each, so it runs over few tokens: sanitizers
            // are slow.
            let dealt = dispatched([300, 5, 3], values).tape.first(2);
            [dealt, dispatched([9, 5, 3], values).tape, gate(9, 7, values).0]
        })
        .collect()
}

/// Several blocks of tokens, with more experts than a wave has threads.
pub(super) fn large() -> Vec<Tape> {
    let of = |values| [dispatched([700, 65, 136], values).tape, gate(300, 264, values).0];
    [Values::Wide, Values::Narrow].into_iter().flat_map(of).collect()
}
