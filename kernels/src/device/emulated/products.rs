//! Expert matmuls: each element is one chain of fused multiply-adds, so its bits are known.

use tch::{Kind, Tensor};

use super::tape::{Argument, Buffer, Tape};
use super::{Values, close};

struct Grouped {
    tape: Tape,
    /// Forward, gradient of the rows, gradient of the weights.
    out: [Buffer; 3],
}

/// Experts with so many rows of `inner` numbers, times weights of `width` rows.
fn grouped(counts: &[usize], [inner, width]: [usize; 2], values: Values) -> Grouped {
    let kind = values.kind();
    let mut tape = Tape::new(&format!("grouped_{kind}"));
    let (rows, experts) = (counts.iter().sum::<usize>(), counts.len());
    // Rows without an expert follow.
    let all = rows + 3;
    let x = values.with(&mut tape, all * inner, 1);
    let weights = values.with(&mut tape, experts * inner * width, 2);
    let grad = values.with(&mut tape, all * width, 3);
    let ends = counts.iter().scan(0, |end, count| {
        *end += *count as u32;
        Some(*end)
    });
    let ends = ends.collect::<Vec<_>>();
    let ends = tape.with(&ends);
    let out = [all * width, all * inner, experts * inner * width]
        .map(|count| values.room(&mut tape, count));
    let blocks = |width: usize| (all / 64 + experts) * width.div_ceil(64);
    let sizes = |a: usize, b: usize| [experts, a, b].map(Argument::from);
    let memory = [x, weights, ends, out[0]].map(Argument::from);
    let arguments = [&memory[..], &sizes(inner, width)].concat();
    tape.launch(&format!("grouped_{kind}"), blocks(width), &arguments);
    let memory = [grad, weights, ends, out[1]].map(Argument::from);
    let arguments = [&memory[..], &sizes(width, inner)].concat();
    tape.launch(&format!("grouped_input_{kind}"), blocks(inner), &arguments);
    let memory = [grad, x, ends, out[2]].map(Argument::from);
    let arguments = [&memory[..], &[width.into(), inner.into()]].concat();
    let tiles = experts * inner.div_ceil(64) * width.div_ceil(64);
    tape.launch(&format!("grouped_weights_{kind}"), tiles, &arguments);
    Grouped { tape, out }
}

/// Partially filled tiles, experts without rows, and an inner index in several parts.
#[test]
fn products_of_experts_are_those_of_f64() {
    let cases: [(&[usize], [usize; 2], Values); 4] = [
        (&[1], [1, 1], Values::Wide),
        (&[0, 70, 8, 0, 130], [40, 65], Values::Wide),
        (&[16, 0, 64], [67, 3], Values::Narrow),
        (&[0, 0], [3, 4], Values::Wide),
    ];
    for (counts, [inner, width], values) in cases {
        let Grouped { tape, out } = grouped(counts, [inner, width], values);
        let played = tape.play();
        let [inner, width] = [inner, width].map(|size| size as i64);
        let (rows, experts) = (counts.iter().sum::<usize>() as i64, counts.len() as i64);
        let of = |shape: &[i64], seed| values.tensor(shape, seed).to_kind(Kind::Double);
        let (x, grad) = (of(&[rows + 3, inner], 1), of(&[rows + 3, width], 3));
        let weights = of(&[experts, width, inner], 2);
        let (mut wanted, mut first) = ([vec![], vec![], vec![]], 0);
        for (expert, count) in (0i64..).zip(counts) {
            let own = |x: &Tensor| x.narrow(0, first, *count as i64);
            let weights = weights.get(expert);
            wanted[0].push(own(&x).matmul(&weights.tr()));
            wanted[1].push(own(&grad).matmul(&weights));
            wanted[2].push(own(&grad).tr().matmul(&own(&x)));
            first += *count as i64;
        }
        let within = if values == Values::Narrow { 2f64.powi(-7) } else { 4e-6 };
        let shapes = [vec![rows + 3, width], vec![rows + 3, inner], vec![experts * width, inner]];
        for ((out, wanted), shape) in out.into_iter().zip(&wanted).zip(shapes) {
            let wanted = Tensor::cat(wanted, 0);
            let found = values.read(&played, out, &shape).to_kind(Kind::Float);
            let own = found.narrow(0, 0, wanted.size()[0]).contiguous();
            close(&Vec::<f32>::try_from(&own.reshape([-1])).unwrap(), &wanted, within);
            // Rows without an expert were not written.
            let left = found.narrow(0, own.size()[0], shape[0] - own.size()[0]);
            assert_eq!(left.isnan().all().int64_value(&[]), 1);
        }
    }
}

pub(super) fn small() -> Vec<Tape> {
    [Values::Wide, Values::Narrow].map(|values| grouped(&[0, 3, 1], [5, 3], values).tape).into()
}

/// Several tiles in both directions, some partially filled, and an inner index in several parts.
pub(super) fn large() -> Vec<Tape> {
    let counts = [0, 70, 8, 0, 130];
    [Values::Wide, Values::Narrow].map(|values| grouped(&counts, [136, 72], values).tape).into()
}
