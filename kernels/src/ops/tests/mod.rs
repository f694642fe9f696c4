//! Compares the tables: f32 within a few roundings of f32, bf16 within a few of bf16.

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use super::*;

mod model;
mod newton_schulz;
mod products;
mod routed;

/// Numbers between -1 and 1 that depend only on `seed`.
pub(in crate::ops) fn random(shape: &[i64], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        // xorshift: pseudorandom enough that no structure can hide an error.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let count: i64 = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| next()).collect();
    Tensor::from_slice(&values).reshape(shape)
}

/// Largest difference, divided by the largest number if that is above 1.
fn difference(found: &Tensor, wanted: &Tensor) -> f64 {
    assert_eq!((found.size(), found.kind()), (wanted.size(), wanted.kind()));
    if found.numel() == 0 {
        return 0.0;
    }
    let [found, wanted] = [found, wanted].map(|tensor| tensor.to_kind(Kind::Double));
    let size = wanted.abs().max().double_value(&[]).max(1.0);
    (found - wanted).abs().max().double_value(&[]) / size
}

/// Tolerance between tables, in units of the kind's rounding.
fn close(found: &Tensor, wanted: &Tensor, roundings: f64) -> bool {
    let unit = if found.kind() == Kind::BFloat16 { 2f64.powi(-8) } else { 2f64.powi(-23) };
    let difference = difference(found, wanted);
    if difference > roundings * unit {
        eprintln!("{} roundings of {:?}", difference / unit, found.kind());
    }
    difference <= roundings * unit
}

fn float() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Float), Just(Kind::BFloat16)]
}

/// First rows of documents: row 0 and some others.
fn starts(tokens: i64, cuts: &[prop::sample::Index]) -> Tensor {
    let mut starts: Vec<i64> = cuts.iter().map(|cut| cut.index(tokens as usize) as i64).collect();
    starts.push(0);
    starts.sort_unstable();
    starts.dedup();
    Tensor::from_slice(&starts)
}

/// Our own kernels for devices, on the emulator.
const EMULATED: OpsTable = &super::device::DeviceTable::on(crate::device::emulated::queue, None);

/// A finished gradient of a table.
fn made(table: OpsTable, begun: ParamGradient) -> Tensor {
    table.finish(vec![begun]).unwrap().remove(0)
}

/// The tables that are compared to the reference.
const OWN: [OpsTable; 2] = [CPU, EMULATED];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn norms_and_residuals(rows in 1i64..80, width in 1i64..70, kind in float(), seed in 0u64..1000) {
        let [x, branch, grad] = [0, 1, 2].map(|index| random(&[rows, width], seed + index));
        let normed_grad = grad.to_kind(kind);
        let [a, b, c, d] = [3, 4, 5, 6].map(|index| random(&[width], seed + index));
        for table in OWN {
            let (found, factors) = table.rms_norm(&x, &a, 1e-5, Kind::Float).unwrap();
            let (wanted, wanted_factors) = REFERENCE.rms_norm(&x, &a, 1e-5, Kind::Float).unwrap();
            prop_assert!(close(&found, &wanted, 16.0) && close(&factors, &wanted_factors, 16.0));
            let (found, weight) = table.rms_norm_backward(&x, &factors, &a, &normed_grad).unwrap();
            let (wanted, wanted_weight) = REFERENCE.rms_norm_backward(&x, &factors, &a, &normed_grad).unwrap();
            let (weight, wanted_weight) = (made(table, weight), made(REFERENCE, wanted_weight));
            prop_assert!(close(&found, &wanted, 16.0) && close(&weight, &wanted_weight, 16.0));

            let (beside, again) = table.rms_norm_backward_beside(&x, &factors, &a, &normed_grad, &branch).unwrap();
            prop_assert_eq!(&beside, &(&branch + &found));
            prop_assert_eq!(&made(table, again), &weight);

            let branch = &branch.to_kind(kind);
            let by = ResidualScaling { scale: &a, bias: &b, residual_scale: &c, residual_bias: &d };
            let found = table.residual(branch, &x, by).unwrap();
            prop_assert!(close(&found, &REFERENCE.residual(branch, &x, by).unwrap(), 4.0));
            let [sum, normed, factors] = table.residual_norm(branch, &x, by, &a, 1e-5).unwrap();
            let (wanted, wanted_factors) = table.rms_norm(&found, &a, 1e-5, Kind::Float).unwrap();
            prop_assert_eq!((&sum, &normed, &factors), (&found, &wanted.to_kind(kind), &wanted_factors));
            prop_assert_eq!(&table.rms_norm(&found, &a, 1e-5, kind).unwrap().0, &normed);
            let found = table.residual_backward(branch, &x, by, &grad).unwrap();
            let wanted = REFERENCE.residual_backward(branch, &x, by, &grad).unwrap();
            prop_assert_eq!(found.branch.kind(), kind);
            prop_assert!(close(&found.branch, &wanted.branch, 1.0));
            prop_assert!(close(&found.residual, &wanted.residual, 1.0));
            // All at once, as for a layer.
            let found = table.finish(found.scaling.into()).unwrap();
            for (found, wanted) in found.iter().zip(&REFERENCE.finish(wanted.scaling.into()).unwrap()) {
                prop_assert!(close(found, wanted, 16.0));
            }
            for beside in [None, Some(&beside)] {
                let (to_sum, to_weight) = match beside {
                    None => table.rms_norm_backward(&sum, &factors, &a, &normed_grad).unwrap(),
                    Some(beside) => table.rms_norm_backward_beside(&sum, &factors, &a, &normed_grad, beside).unwrap(),
                };
                let wanted = table.residual_backward(branch, &x, by, &to_sum).unwrap();
                let norm = NormBack { x: &sum, factors: &factors, weight: &a, beside };
                let (found, weight) = table.residual_norm_backward(branch, &x, by, norm, &normed_grad).unwrap();
                prop_assert_eq!((&found.branch, &found.residual), (&wanted.branch, &wanted.residual));
                prop_assert_eq!(made(table, weight), made(table, to_weight));
                let [found, wanted] = [found, wanted].map(|grads| table.finish(grads.scaling.into()).unwrap());
                prop_assert_eq!(found, wanted);
            }
        }
    }

    /// For any document starts: every row, or only the first. Values are those of a token and of the previous one.
    #[test]
    fn convolutions_and_shifts(
        tokens in 1i64..50,
        (heads, width) in (1i64..5, 1i64..20),
        (stay, go) in (0i64..9, 0i64..9),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (channels, values) = (heads * width, [stay, go]);
        let (weights, bias) = (random(&[channels, 1, 2], seed), random(&[channels], seed + 1));
        let starts = starts(tokens, &cuts);
        let by = ConvShift { weights: &weights, bias: &bias, starts: &starts, counted: None, heads: [heads, width], values };
        let z = random(&[tokens, channels + stay + go], seed + 2).to_kind(kind);
        let begins = Vec::<i64>::try_from(&starts).unwrap();
        for table in OWN {
            let [taps, value] = table.conv_shift(&z, by).unwrap();
            let [wanted, _] = REFERENCE.conv_shift(&z, by).unwrap();
            prop_assert!(close(&taps, &wanted, 2.0));
            let own = z.narrow(1, channels, stay + go);
            for token in 0..tokens {
                prop_assert_eq!(value.get(token).narrow(0, 0, stay), own.get(token).narrow(0, 0, stay));
                let before = match begins.contains(&token) {
                    true => own.get(token).narrow(0, stay, go).zeros_like(),
                    false => own.get(token - 1).narrow(0, stay, go),
                };
                prop_assert_eq!(value.get(token).narrow(0, stay, go), before);
            }
            let grads = [random(taps.size().as_slice(), seed + 3), random(value.size().as_slice(), seed + 4)];
            let grads = grads.map(|grad| grad.to_kind(kind));
            let means = random(&[tokens, channels], seed + 5);
            let found = table.conv_shift_backward(&z, by, grads.each_ref(), &means).unwrap();
            let wanted = REFERENCE.conv_shift_backward(&z, by, grads.each_ref(), &means).unwrap();
            prop_assert!(close(&found.input, &wanted.input, 4.0));
            prop_assert!(close(&made(table, found.weights), &made(REFERENCE, wanted.weights), 16.0));
            prop_assert!(close(&made(table, found.bias), &made(REFERENCE, wanted.bias), 16.0));
            let shifted = found.input.narrow(1, channels, stay + go).to_kind(Kind::Double);
            let inner = |a: &Tensor, b: &Tensor| (a * b).sum(Kind::Double).double_value(&[]);
            let [value, grad, own] = [&value, &grads[1], &own].map(|x| x.to_kind(Kind::Double));
            prop_assert!((inner(&value, &grad) - inner(&own, &shifted)).abs() < 1e-4);
        }
    }

    /// Sums over some rows and over the others add up to the sums over all.
    #[test]
    fn rows_that_are_not_counted_are_someone_elses(
        // Also a list without rows, whose memory has no address.
        counted in prop_oneof![
            4 => prop::collection::vec(any::<bool>(), 1..50),
            1 => (1usize..50, any::<bool>()).prop_map(|(rows, all)| vec![all; rows]),
        ],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
        seed in 0u64..1000,
    ) {
        let (tokens, heads, width) = (counted.len() as i64, 2, 7);
        let (weights, bias) = (random(&[14, 1, 2], seed), random(&[14], seed + 1));
        let (z, grad) = (random(&[tokens, 17], seed + 2), random(&[heads, tokens, 2 * width], seed + 3));
        let (values, all_means) = (random(&[tokens, 3], seed + 4), random(&[tokens, 14], seed + 5));
        let starts = starts(tokens, &cuts);
        let rows = |side: bool| {
            let rows = (0i64..).zip(&counted).filter(|(_, counted)| **counted == side);
            Tensor::from_slice(&rows.map(|(row, _)| row).collect::<Vec<_>>())
        };
        let (left, right) = (rows(true), rows(false));
        for table in [CPU, REFERENCE, EMULATED] {
            let of = |counted: Option<&Tensor>| {
                let heads = [heads, width];
                let by = ConvShift { weights: &weights, bias: &bias, starts: &starts, counted, heads, values: [1, 2] };
                let means = counted.map_or(all_means.shallow_clone(), |rows| all_means.index_select(0, rows));
                table.conv_shift_backward(&z, by, [&grad, &values], &means).unwrap()
            };
            let (all, left_side, right_side) = (of(None), of(Some(&left)), of(Some(&right)));
            // Each has the means of its own rows.
            prop_assert_eq!(&all.input.index_select(0, &left), &left_side.input.index_select(0, &left));
            prop_assert_eq!(&all.input.index_select(0, &right), &right_side.input.index_select(0, &right));
            let sums = |of: ConvShiftGrads| [made(table, of.weights), made(table, of.bias)];
            let ([all_weights, all_bias], [a, b], [c, d]) = (sums(all), sums(left_side), sums(right_side));
            prop_assert!(difference(&(a + c), &all_weights) < 1e-5);
            prop_assert!(difference(&(b + d), &all_bias) < 1e-5);
        }
    }

    #[test]
    fn queries_and_keys(
        tokens in 1i64..40,
        (keys, group) in (1i64..4, 1i64..4),
        (half, rest) in (1i64..6, 0i64..9),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let width = 2 * half + rest;
        let heads = keys * (group + 1);
        let angle = random(&[tokens, half], seed) * 3.0;
        let (cos, sin) = (angle.cos(), angle.sin());
        let (bias, temperature) = (random(&[heads * width], seed + 1), random(&[keys], seed + 2));
        let shape = [keys * group, keys, width];
        let by = QueryKey { bias: &bias, temperature: &temperature, angles: [&cos, &sin], shape };
        // Values follow the queries and keys.
        let z = random(&[tokens, heads * width + 2], seed + 3).to_kind(kind);
        let raw = random(&[heads, tokens, width], seed + 4).to_kind(kind);
        for table in OWN {
            let found = table.query_key(&z, raw.copy(), by).unwrap();
            let wanted = REFERENCE.query_key(&z, raw.copy(), by).unwrap();
            prop_assert!(close(&found.raw, &wanted.raw, 8.0));
            prop_assert!(close(&found.factors, &wanted.factors, 32.0) && close(&found.out, &wanted.out, 64.0));
            prop_assert_eq!(found.out.kind(), kind);
            let (raw, factors) = (wanted.raw, found.factors);
            let back = |table: OpsTable, kind| {
                let grad = HeadGrads::Stacked(random(&[heads, tokens, width], seed + 5));
                table.query_key_backward(&raw, &factors, by, grad, kind).unwrap()
            };
            let (found, wanted) = (back(table, Kind::Float), back(REFERENCE, Kind::Float));
            prop_assert!(close(&found.raw, &wanted.raw, 64.0));
            prop_assert_eq!(back(table, kind).raw, found.raw.to_kind(kind));
            prop_assert!(close(&found.means, &wanted.means, 64.0));
            let sums = |table: OpsTable, of: [ParamGradient; 2]| table.finish(of.into()).unwrap();
            let found = sums(table, [found.temperature, found.bias]);
            for (found, wanted) in found.iter().zip(&sums(REFERENCE, [wanted.temperature, wanted.bias])) {
                prop_assert!(close(found, wanted, 64.0));
            }
        }
    }

    /// Also far below and above zero, where the gate is closed or open; and without rows.
    #[test]
    fn gates(rows in 0i64..40, width in 1i64..40, kind in float(), seed in 0u64..1000) {
        let x = (random(&[rows, 2 * width], seed) * 30.0).to_kind(kind);
        let grad = random(&[rows, width], seed + 1).to_kind(kind);
        for table in OWN {
            prop_assert!(close(&table.swiglu(&x).unwrap(), &REFERENCE.swiglu(&x).unwrap(), 4.0));
            let found = table.swiglu_backward(&x, &grad).unwrap();
            // In bf16 libtorch rounds the silu and its products separately.
            prop_assert!(close(&found, &REFERENCE.swiglu_backward(&x, &grad).unwrap(), 8.0));
        }
    }

    /// Some tokens have no expert; undefined rows are not read.
    #[test]
    fn rows_on_their_way_back(
        choice in prop::collection::vec(0i64..4, 1..40),
        width in 1i64..40,
        identity in any::<bool>(),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (tokens, experts) = (choice.len() as i64, 3);
        let choice = Tensor::from_slice(&choice);
        let passes = choice.eq(experts);
        let [answers, entered, beside] = [0, 1, 2].map(|index| random(&[tokens, width], seed + index).to_kind(kind));
        let (weight, grad) = (random(&[tokens, 1], seed + 3), random(&[tokens, width], seed + 4).to_kind(kind));
        let wide = grad.to_kind(Kind::Float);
        let stand_ins = if identity { entered.copy() } else { entered.zeros_like() };
        let rows = stand_ins.where_self(&passes.unsqueeze(1), &answers).to_kind(Kind::Float);
        for table in [CPU, REFERENCE, EMULATED] {
            let by = table.dispatch(&choice, experts + 1).unwrap();
            let there = |own: &Tensor, which: &Tensor| {
                let out = Tensor::full([by.rows, width], f64::NAN, (kind, Device::Cpu));
                let which = which.nonzero().squeeze_dim(1);
                out.index_copy(0, &by.places.index_select(0, &which), &own.index_select(0, &which))
            };
            let x = there(&answers, &passes.logical_not());
            let passed = identity.then(|| there(&entered, &passes));
            let own = ExpertRows { x: &x, by: &by, passed: passed.as_ref(), by_token: &weight };
            let found = table.gather(own).unwrap();
            prop_assert_eq!(found, (&rows * &weight).to_kind(kind));
            let found = table.unpermute(ExpertRows { by_token: &beside, ..own }).unwrap();
            prop_assert_eq!(found, (&rows + &beside).to_kind(kind));
            let [to_x, to_weight] = table.gather_backward(own, &grad).unwrap();
            let zeros = Tensor::zeros([by.rows, width], (Kind::Float, Device::Cpu));
            prop_assert_eq!(to_x, zeros.index_copy(0, &by.places, &(&wide * &weight)).to_kind(kind));
            let wanted = (&rows * &wide).sum_dim_intlist(1, true, Kind::Float);
            prop_assert!(close(&to_weight, &wanted, 16.0));
        }
    }

    #[test]
    fn weights_are_rounded(length in 0i64..300, seed in 0u64..1000) {
        for table in [CPU, REFERENCE, EMULATED] {
            let mut pairs = [length, 3].map(|length| {
                let wide = random(&[length], seed);
                [wide.zeros_like().to_kind(Kind::BFloat16), wide]
            });
            table.all_rounded(&mut pairs).unwrap();
            for [narrow, wide] in &pairs {
                prop_assert_eq!(narrow, &wide.to_kind(Kind::BFloat16));
            }
        }
    }

    #[test]
    fn steps_of_adamw(length in 0i64..300, scale in 0.1..2.0f32, seed in 0u64..1000, chunk in 1i64..400) {
        let by = AdamWStep { keep: 0.99, first: 0.1, second: 0.01, root: 0.3, eps: 1e-3, rate: 0.02, scale };
        let state = |table: OpsTable| {
            let [mut w, mut m, gradient] = [0, 1, 2].map(|index| random(&[length], seed + index));
            let mut v = random(&[length], seed + 3).square();
            table.adamw(by, &mut w, [&mut m, &mut v], &gradient).unwrap();
            [w, m, v]
        };
        for table in [CPU, REFERENCE, EMULATED] {
            let of = |seed: u64| [0, 1, 2, 3u64].map(|index| random(&[length + seed as i64], seed + index).square());
            let (mut alone, mut listed) = ([of(1), of(2)], [of(1), of(2)]);
            let mut narrow = [5, 6].map(|more| Tensor::zeros([length + more], (Kind::BFloat16, Device::Cpu)));
            let mut directions = Vec::new();
            for [weight, first, second, gradient] in &mut alone {
                table.adamw(by, weight, [&mut *first, second], gradient).unwrap();
                directions.push(table.nesterov(&mut first.copy(), gradient, 0.9, scale).unwrap());
            }
            let mut momenta = alone.each_ref().map(|[_, first, ..]| first.copy());
            let pairs = momenta.iter_mut().zip(&alone).map(|(first, [.., gradient])| (first, gradient));
            let found = table.all_nesterov(&mut pairs.collect::<Vec<_>>(), 0.9, scale).unwrap();
            prop_assert_eq!(&found, &directions);
            for step in [0, 1] {
                let before = listed.each_ref().map(|[weight, ..]| weight.copy());
                if step == 1 {
                    for ([weight, ..], direction) in alone.iter_mut().zip(&directions) {
                        table.descend(weight, direction, 0.9, 0.1).unwrap();
                    }
                }
                let given = listed.iter_mut().zip(&mut narrow).zip(&directions).enumerate();
                let mut all: Vec<_> = given.map(|(index, (([weight, first, second, gradient], narrow), direction))| {
                    let (gradient, rule) = match step {
                        0 => (&*gradient, UpdateRule::AdamW { by, moments: [first, second] }),
                        _ => (direction, UpdateRule::Muon { keep: 0.9, rate: 0.1, momentum: first }),
                    };
                    let rounded = (index == 0).then_some((narrow, 4));
                    Update { weight, rounded, gradient, rule, number: seed << 30, salts: [seed, 8, 9] }
                }).collect();
                let words = Vec::<i64>::try_from(table.update(&mut all).unwrap().reshape([-1])).unwrap();
                prop_assert_eq!(&alone, &listed);
                prop_assert_eq!(narrow[0].narrow(0, 4, length + 1), listed[0][0].to_kind(Kind::BFloat16));
                let beside = [narrow[0].narrow(0, 0, 4), narrow[1].shallow_clone()];
                prop_assert!(beside.iter().all(|beside| beside.abs().max().double_value(&[]) == 0.0));
                prop_assert_eq!(words.len(), 8);
                for ((words, [weight, first, second, _]), before) in words.chunks(4).zip(&listed).zip(before) {
                    let squares = table.squares(&(before - weight)).unwrap();
                    prop_assert_eq!(f64::from_bits(words[0].cast_unsigned()), squares);
                    let sum = |part, salt| crate::checksum::slice(part, seed << 30, salt).unwrap().cast_signed();
                    let second = if step == 0 { sum(second, 9) } else { 0 };
                    prop_assert_eq!(&words[1..], [sum(weight, seed), sum(first, 8), second]);
                }
            }
        }
        let x = random(&[length], seed) * 1e9;
        let wanted = REFERENCE.squares(&x).unwrap();
        for table in OWN {
            for (found, wanted) in state(table).iter().zip(&state(REFERENCE)) {
                prop_assert!(close(found, wanted, 8.0));
            }
            prop_assert!((table.squares(&x).unwrap() - wanted).abs() <= 1e-14 * wanted);
            let of_each = |x: &Tensor| x.split(chunk, 0).iter().filter(|part| part.numel() > 0)
                .map(|part| table.squares(part).unwrap()).collect::<Vec<_>>();
            let three = random(&[3], seed);
            let wanted = [&x, &three, &x].map(of_each).concat();
            let all = table.chunk_squares(&[x.copy(), three, x.copy()], chunk).unwrap();
            prop_assert_eq!(&all, &Tensor::from_slice(&wanted));
        }
    }

    /// Squares of chunks with checksums, for parts that begin anywhere in their tensors.
    #[test]
    fn chunks_are_squared_and_summed_up(length in 0i64..300, seed in 0u64..1000, chunk in 1i64..400) {
        let x = random(&[length], seed) * 1e9;
        let three = random(&[3], seed);
        let parts = [(&x, seed, 7), (&three, 1 << 40, 8), (&x, 0, 9)];
        let wanted = parts.map(|(x, first, salt)| checksum::slice(x, first, salt).unwrap());
        let count = |x: &Tensor| (x.numel() as i64 + chunk - 1) / chunk;
        let counts = parts.map(|(x, ..)| count(x));
        for table in [CPU, REFERENCE, EMULATED] {
            let [squares, sums] = table.chunk_sums(&parts, chunk).unwrap();
            let tensors = parts.map(|(x, ..)| x.shallow_clone());
            prop_assert_eq!(squares, table.chunk_squares(&tensors, chunk).unwrap());
            let found = sums.split_with_sizes(counts, 0).into_iter().map(|sums| {
                let sums = Vec::<i64>::try_from(sums).unwrap().into_iter();
                sums.fold(0u64, |sum, one| sum.wrapping_add(one.cast_unsigned()))
            });
            prop_assert_eq!(found.collect::<Vec<_>>(), wanted);
        }
    }
}

/// A change of one element of a gradient shows in the row of its chunk, wherever it is, and in no other.
#[test]
fn an_element_shows_in_its_chunk() {
    let length = 2 * CHUNK + 7;
    let by = AdamWStep {
        keep: 1.0,
        first: 0.1,
        second: 0.1,
        root: 1.0,
        eps: 1.0,
        rate: 0.1,
        scale: 1.0,
    };
    let rows = |table: OpsTable, place: Option<i64>| {
        // Aligned only to an element.
        let [mut weight, mut first, gradient] =
            [0, 1, 2].map(|seed| random(&[length + 1], seed).narrow(0, 1, length));
        let mut second = random(&[length], 3).square();
        if let Some(place) = place {
            let _ = gradient.narrow(0, place, 1).neg_();
        }
        let rule = UpdateRule::AdamW { by, moments: [&mut first, &mut second] };
        let (gradient, salts) = (&gradient, [1, 2, 3]);
        let one = Update { weight: &mut weight, rounded: None, gradient, rule, number: 0, salts };
        let words = table.update(&mut [one]).unwrap();
        assert_eq!(words.size(), [3, 4]);
        Vec::<i64>::try_from(words.view([-1])).unwrap()
    };
    let wanted = rows(CPU, None);
    assert_eq!(rows(EMULATED, None), wanted);
    for place in [0, CHUNK - 1, CHUNK, 2 * CHUNK - 1024, 2 * CHUNK, length - 1] {
        let found = rows(EMULATED, Some(place));
        for (chunk, (found, wanted)) in found.chunks(4).zip(wanted.chunks(4)).enumerate() {
            let differ = found.iter().zip(wanted).filter(|(found, wanted)| found != wanted).count();
            // Second moments use the square of a gradient.
            let changed = if place / CHUNK == chunk as i64 { 3 } else { 0 };
            assert_eq!(differ, changed, "element {place}, chunk {chunk}");
        }
    }
}

/// The bf16 copy must fit into what the model reads, and all tensors of an update have one shape.
#[test]
fn an_update_is_refused_where_it_does_not_fit() {
    for table in [CPU, REFERENCE, EMULATED] {
        let refused = |length: i64, first: i64| {
            let [mut weight, direction, momentum] = [0, 1, 2].map(|seed| random(&[6], seed));
            let mut read = Tensor::zeros([9], (Kind::BFloat16, Device::Cpu));
            let (direction, momentum) = (&direction.narrow(0, 0, length), &momentum);
            let rule = UpdateRule::Muon { keep: 1.0, rate: 1.0, momentum };
            let (weight, rounded) = (&mut weight, Some((&mut read, first)));
            let one =
                Update { weight, rounded, gradient: direction, rule, number: 0, salts: [0; 3] };
            table.update(&mut [one]).map(drop).map_err(|error| error.to_string())
        };
        assert!(refused(6, 0).is_ok() && refused(6, 3).is_ok());
        assert!(refused(5, 0).unwrap_err().contains("update: gradient"));
        for first in [-1, 4] {
            let told = refused(6, first).unwrap_err();
            assert!(told.contains(&format!("wanted 6 elements from element {first} on")), "{told}");
        }
    }
}

#[test]
fn all_tables_refuse_what_does_not_fit() {
    let (x, weight) = (random(&[4, 6], 1), random(&[6], 2));
    let wrong = [x.tr(), x.to_kind(Kind::BFloat16), x.to_kind(Kind::Double), x.narrow(1, 0, 5)];
    for table in [CPU, REFERENCE, EMULATED] {
        for wrong in &wrong {
            let refused = table.rms_norm(wrong, &weight, 1e-5, Kind::Float).unwrap_err();
            assert!(matches!(refused, Error::Operand { operation: "rms_norm", .. }), "{refused}");
        }
        assert!(table.rms_norm(&x, &weight, 1e-5, Kind::Float).is_ok());
        let refused = table.swiglu(&random(&[3, 5], 1)).unwrap_err().to_string();
        assert_eq!(
            refused,
            "swiglu: x is Float [3, 5], contiguous, wanted Float or BFloat16 [3, 4], contiguous"
        );
    }
}

#[test]
fn what_is_written_is_used_under_one_name() {
    let all = Tensor::zeros([8], (Kind::Float, Device::Cpu));
    let part = |first, count| all.narrow(0, first, count);
    let by = AdamWStep {
        keep: 1.0,
        first: 0.1,
        second: 0.1,
        root: 1.0,
        eps: 1.0,
        rate: 0.1,
        scale: 1.0,
    };
    let moved = |mut second: Tensor| {
        let [mut weight, mut first] = [part(0, 2), part(2, 2)];
        CPU.adamw(by, &mut weight, [&mut first, &mut second], &part(6, 2))
    };
    moved(part(4, 2)).unwrap();
    assert!(matches!(moved(part(3, 2)).unwrap_err(), Error::Operand { operation: "adamw", .. }));
    assert!(moved(part(5, 2)).is_err(), "a gradient is read while it changes");
}

#[test]
fn a_table_is_found_by_its_name() {
    for table in [CPU, REFERENCE, DEVICE] {
        assert!(named(table.name()).is_some_and(|found| found == table));
    }
    assert!(named("cpu 0").is_none() && CPU != REFERENCE);
    let refused = EMULATED.dispatch(&Tensor::zeros([3], (Kind::Int64, Device::Cpu)), 2000);
    assert!(matches!(refused, Err(Error::Operand { operation: "dispatch", .. })));
}

#[test]
fn no_tokens_are_sorted_too() {
    for table in [CPU, REFERENCE, EMULATED] {
        let by = table.dispatch(&Tensor::zeros([0], (Kind::Int64, Device::Cpu)), 4).unwrap();
        assert_eq!(Vec::<i64>::try_from(&by.counts).unwrap(), [0; 4]);
        let rows = table.permute(&random(&[0, 3], 1), &by).unwrap();
        assert_eq!(rows, Tensor::zeros([by.rows, 3], (Kind::Float, Device::Cpu)));
        let rows = ExpertRows { x: &rows, by: &by, passed: None, by_token: &random(&[0, 3], 2) };
        let found = table.unpermute(rows).unwrap();
        assert_eq!(found.size(), [0, 3]);
    }
}
