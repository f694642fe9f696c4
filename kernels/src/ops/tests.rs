//! The tables against each other: f32 within a few roundings, bf16 within a few of its own.

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use super::*;

/// Numbers between -1 and 1 that depend on nothing but `seed`.
pub(super) fn random(shape: &[i64], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        // xorshift: enough to have no structure that an operation could hide behind.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let count: i64 = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| next()).collect();
    Tensor::from_slice(&values).reshape(shape)
}

/// The largest difference, over the largest number where that is above 1.
fn difference(found: &Tensor, wanted: &Tensor) -> f64 {
    assert_eq!((found.size(), found.kind()), (wanted.size(), wanted.kind()));
    if found.numel() == 0 {
        return 0.0;
    }
    let [found, wanted] = [found, wanted].map(|tensor| tensor.to_kind(Kind::Double));
    let size = wanted.abs().max().double_value(&[]).max(1.0);
    (found - wanted).abs().max().double_value(&[]) / size
}

/// What an operation may differ by between tables, in units of the kind's rounding.
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

/// Starts of documents: the first row, and some others.
fn starts(tokens: i64, cuts: &[prop::sample::Index]) -> Tensor {
    let mut starts: Vec<i64> = cuts.iter().map(|cut| cut.index(tokens as usize) as i64).collect();
    starts.push(0);
    starts.sort_unstable();
    starts.dedup();
    Tensor::from_slice(&starts)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn norms_and_residuals(rows in 1i64..80, width in 1i64..70, kind in float(), seed in 0u64..1000) {
        let [x, branch, grad] = [0, 1, 2].map(|index| random(&[rows, width], seed + index));
        let [a, b, c, d] = [3, 4, 5, 6].map(|index| random(&[width], seed + index));
        let (found, factors) = CPU.rms_norm(&x, &a, 1e-5).unwrap();
        let (wanted, wanted_factors) = REFERENCE.rms_norm(&x, &a, 1e-5).unwrap();
        prop_assert!(close(&found, &wanted, 16.0) && close(&factors, &wanted_factors, 16.0));
        let (found, weight) = CPU.rms_norm_backward(&x, &factors, &a, &grad).unwrap();
        let (wanted, wanted_weight) = REFERENCE.rms_norm_backward(&x, &factors, &a, &grad).unwrap();
        prop_assert!(close(&found, &wanted, 16.0) && close(&weight, &wanted_weight, 16.0));

        let branch = branch.to_kind(kind);
        let by = Scaling { scale: &a, bias: &b, residual_scale: &c, residual_bias: &d };
        let found = CPU.residual(&branch, &x, by).unwrap();
        prop_assert!(close(&found, &REFERENCE.residual(&branch, &x, by).unwrap(), 4.0));
        let found = CPU.residual_backward(&branch, &x, by, &grad).unwrap();
        let wanted = REFERENCE.residual_backward(&branch, &x, by, &grad).unwrap();
        prop_assert!(close(&found.branch, &wanted.branch, 1.0));
        prop_assert!(close(&found.residual, &wanted.residual, 1.0));
        for (found, wanted) in found.scaling.iter().zip(&wanted.scaling) {
            prop_assert!(close(found, wanted, 16.0));
        }
    }

    /// Wherever documents begin: in every row, or in none but the first.
    #[test]
    fn convolutions(
        tokens in 1i64..50,
        (heads, width) in (1i64..5, 1i64..20),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let channels = heads * width;
        let (weights, bias) = (random(&[channels, 1, 2], seed), random(&[channels], seed + 1));
        let starts = starts(tokens, &cuts);
        let by = DepthwiseConv { weights: &weights, bias: &bias, starts: &starts, heads: [heads, width] };
        let z = random(&[tokens, channels], seed + 2).to_kind(kind);
        let found = CPU.depthwise_conv(&z, by).unwrap();
        prop_assert!(close(&found, &REFERENCE.depthwise_conv(&z, by).unwrap(), 2.0));
        let grad = random(&[heads, tokens, 2 * width], seed + 3).to_kind(kind);
        let found = CPU.depthwise_conv_backward(&z, by, &grad).unwrap();
        let wanted = REFERENCE.depthwise_conv_backward(&z, by, &grad).unwrap();
        prop_assert!(close(&found.input, &wanted.input, 4.0));
        prop_assert!(close(&found.weights, &wanted.weights, 16.0));
        prop_assert!(close(&found.bias, &wanted.bias, 16.0));
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
        let z = random(&[tokens, heads * width], seed + 3).to_kind(kind);
        let raw = random(&[heads, tokens, width], seed + 4);
        let (mut fast, mut slow) = (raw.copy(), raw.copy());
        let (found, factors) = CPU.query_key(&z, &mut fast, by).unwrap();
        let (wanted, wanted_factors) = REFERENCE.query_key(&z, &mut slow, by).unwrap();
        prop_assert!(close(&fast, &slow, 8.0));
        prop_assert!(close(&factors, &wanted_factors, 32.0) && close(&found, &wanted, 64.0));
        let grad = random(&[heads, tokens, width], seed + 5);
        let found = CPU.query_key_backward(&slow, &factors, by, grad.copy()).unwrap();
        let wanted = REFERENCE.query_key_backward(&slow, &factors, by, grad).unwrap();
        prop_assert!(close(&found.raw, &wanted.raw, 64.0));
        prop_assert!(close(&found.temperature, &wanted.temperature, 64.0));
        prop_assert!(close(&found.bias, &wanted.bias, 64.0));
        let z = random(&[tokens, heads * width], seed + 6);
        let (mut fast, mut slow) = (z.copy(), z);
        CPU.means_backward(&wanted.raw, shape, &mut fast).unwrap();
        REFERENCE.means_backward(&wanted.raw, shape, &mut slow).unwrap();
        prop_assert!(close(&fast, &slow, 8.0));
    }

    /// Far below and above zero too, where the gate is shut or open; and with no rows at all.
    #[test]
    fn gates(rows in 0i64..40, width in 1i64..40, kind in float(), seed in 0u64..1000) {
        let x = (random(&[rows, 2 * width], seed) * 30.0).to_kind(kind);
        let grad = random(&[rows, width], seed + 1).to_kind(kind);
        prop_assert!(close(&CPU.swiglu(&x).unwrap(), &REFERENCE.swiglu(&x).unwrap(), 4.0));
        let found = CPU.swiglu_backward(&x, &grad).unwrap();
        // In bf16 libtorch rounds the silu and its products by themselves.
        prop_assert!(close(&found, &REFERENCE.swiglu_backward(&x, &grad).unwrap(), 8.0));
    }

    #[test]
    fn rows_on_their_way_back(
        order in Just((0..24i64).collect::<Vec<_>>()).prop_shuffle(),
        (tokens, width) in (0usize..24, 1i64..40),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let places = Tensor::from_slice(&order[..tokens]);
        let (rows, tokens) = (order.len() as i64, tokens as i64);
        let x = random(&[rows, width], seed).to_kind(kind);
        let (weight, grad) = (random(&[tokens, 1], seed + 1), random(&[tokens, width], seed + 2));
        let found = CPU.gather(&x, &places, &weight).unwrap();
        prop_assert_eq!(found, REFERENCE.gather(&x, &places, &weight).unwrap());
        let [to_x, to_weight] = CPU.gather_backward(&x, &places, &weight, &grad).unwrap();
        let [wanted, wanted_weight] = REFERENCE.gather_backward(&x, &places, &weight, &grad).unwrap();
        prop_assert_eq!(to_x, wanted);
        prop_assert!(close(&to_weight, &wanted_weight, 16.0));
    }

    #[test]
    fn steps_of_adamw(length in 0i64..300, scale in 0.1..2.0f32, seed in 0u64..1000) {
        let by = AdamW { keep: 0.99, first: 0.1, second: 0.01, root: 0.3, eps: 1e-3, rate: 0.02, scale };
        let state = |table: Table| {
            let [mut w, mut m, gradient] = [0, 1, 2].map(|index| random(&[length], seed + index));
            let mut v = random(&[length], seed + 3).square();
            table.adamw(by, &mut w, [&mut m, &mut v], &gradient).unwrap();
            [w, m, v]
        };
        for (found, wanted) in state(CPU).iter().zip(&state(REFERENCE)) {
            prop_assert!(close(found, wanted, 8.0));
        }
        let x = random(&[length], seed) * 1e9;
        let (found, wanted) = (CPU.squares(&x).unwrap(), REFERENCE.squares(&x).unwrap());
        prop_assert!((found - wanted).abs() <= 1e-14 * wanted);
    }
}

/// Coefficients of the quintic iteration that Muon uses.
const QUINTIC: NewtonSchulz =
    NewtonSchulz { coefficients: [3.4445, -4.7750, 2.0315], steps: 5, eps: 1e-7 };

/// The iteration as it is written down, in f64.
fn iterated(matrix: &Tensor) -> Tensor {
    let tall = matrix.size()[0] > matrix.size()[1];
    let x = matrix.to_kind(Kind::Double);
    let mut x = if tall { x.tr() } else { x };
    x = &x / (x.norm() + 1e-7);
    for _ in 0..QUINTIC.steps {
        let [a, b, c] = QUINTIC.coefficients.map(f64::from);
        let square = x.mm(&x.tr());
        let factor = &square * b + square.mm(&square) * c;
        x = &x * a + factor.mm(&x);
    }
    if tall { x.tr() } else { x }
}

/// The distance to [`iterated`], over its length.
fn error(table: Table, matrix: &Tensor) -> f64 {
    let wanted = iterated(matrix);
    let found = table.newton_schulz(matrix, QUINTIC).unwrap().to_kind(Kind::Double);
    (found - &wanted).norm().double_value(&[]) / wanted.norm().double_value(&[])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Tiles, symmetry and the way over the square change rounding, not the result, also where half of the directions all but
    /// vanish. Stated error: 1e-3 of the result's length.
    #[test]
    fn iterations_are_those_of_f64(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..40), (90i64..300, 90i64..700)],
        turned: bool,
        flat: bool,
        seed in 0u64..1000,
    ) {
        let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
        let matrix = random(&[rows, columns], seed);
        if flat {
            let _ = matrix.narrow(0, 0, rows / 2).g_mul_scalar_(1e-5);
        }
        for table in [CPU, REFERENCE] {
            let error = error(table, &matrix);
            prop_assert!(error < 1e-3, "{}: {error}", table.name());
        }
    }

    /// Bits are a function of the matrix alone, whatever it is stacked with.
    #[test]
    fn a_matrix_has_its_bits_in_any_stack(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..40), (60i64..90, 60i64..200)],
        count in 1i64..5,
        seed in 0u64..1000,
    ) {
        let stack = random(&[count, rows, columns], seed);
        for table in [CPU, REFERENCE] {
            let together = table.newton_schulz(&stack, QUINTIC).unwrap();
            for matrix in 0..count {
                let alone = table.newton_schulz(&stack.get(matrix), QUINTIC).unwrap();
                prop_assert_eq!(alone, together.get(matrix), "{}", table.name());
            }
        }
    }
}

/// Documents that cover `tokens` tokens.
fn spans(tokens: i64, cuts: &[prop::sample::Index]) -> Vec<Span> {
    let starts = Vec::<i64>::try_from(starts(tokens, cuts)).unwrap();
    let ends = starts.iter().skip(1).copied().chain([tokens]);
    starts.iter().zip(ends).map(|(&start, end)| Span { start, len: end - start }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Documents of one token, and of all.
    #[test]
    fn attention_over_documents(
        tokens in 1i64..70,
        (keys, group, width) in (1i64..4, 1i64..4, 1i64..20),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let shape = [keys * group, keys, width];
        let qk = random(&[keys * (group + 1), tokens, width], seed).to_kind(kind);
        let value = random(&[tokens, keys * width], seed + 1).to_kind(kind);
        let grad = random(&[tokens, keys * group * width], seed + 2).to_kind(kind);
        let by = Attention { qk: &qk, value: &value, spans: &spans(tokens, &cuts), shape };
        let (found, wanted) = (CPU.attention(by).unwrap(), REFERENCE.attention(by).unwrap());
        prop_assert!(close(&found.heads, &wanted.heads, 16.0));
        let found = CPU.attention_backward(by, found.saved, &grad).unwrap();
        let wanted = REFERENCE.attention_backward(by, wanted.saved, &grad).unwrap();
        // libtorch's kernel rounds the gradients of a bf16 query to bf16 before we widen them.
        let of_qk = if kind == Kind::BFloat16 { 8.0 * 32768.0 } else { 64.0 };
        prop_assert!(close(&found[0], &wanted[0], of_qk));
        let of_value = if kind == Kind::BFloat16 { 8.0 } else { 64.0 };
        prop_assert!(close(&found[1], &wanted[1], of_value));
        prop_assert!(REFERENCE.attention_backward(by, vec![[qk.copy(), qk.copy()]], &grad).is_err());
    }

    /// The value of a token and of the one before it, and the transpose of that.
    #[test]
    fn values_are_shifted(
        tokens in 1i64..40,
        half in 1i64..9,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        seed in 0u64..1000,
    ) {
        let [current, delayed, grad] =
            [(0, half), (1, half), (2, 2 * half)].map(|(index, width)| random(&[tokens, width], seed + index));
        let starts = starts(tokens, &cuts);
        let found = CPU.value_shift(&current, &delayed, &starts).unwrap();
        let begins = Vec::<i64>::try_from(&starts).unwrap();
        for token in 0..tokens {
            prop_assert_eq!(found.get(token).narrow(0, 0, half), current.get(token));
            let before = match begins.contains(&token) {
                true => current.get(token).zeros_like(),
                false => delayed.get(token - 1),
            };
            prop_assert_eq!(found.get(token).narrow(0, half, half), before);
        }
        let back = CPU.value_shift_backward(grad.copy(), &starts).unwrap();
        let inner = |a: &Tensor, b: &Tensor| (a * b).sum(Kind::Double).double_value(&[]);
        let both = Tensor::cat(&[&current, &delayed], 1);
        prop_assert!((inner(&found, &grad) - inner(&both, &back)).abs() < 1e-4);
    }

    /// A token's row goes through its own expert and comes back, also where experts, or all of them, have no token.
    #[test]
    fn tokens_go_through_their_experts(
        choice in prop::collection::vec(0i64..5, 1..60),
        (wide, narrow) in (1i64..20, 1i64..20),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (tokens, experts) = (choice.len() as i64, 4);
        let x = random(&[tokens, wide], seed).to_kind(kind);
        let weights = random(&[experts, narrow, wide], seed + 1).to_kind(kind);
        let grad = random(&[tokens, narrow], seed + 2).to_kind(kind);
        for table in [CPU, REFERENCE] {
            let by = table.dispatch(&Tensor::from_slice(&choice), experts + 1).unwrap();
            let counts = Vec::<i64>::try_from(&by.counts).unwrap();
            let wanted: Vec<i64> = (0..=experts)
                .map(|class| choice.iter().filter(|choice| **choice == class).count() as i64)
                .collect();
            prop_assert_eq!(&counts, &wanted);
            let rows = table.permute(&x, &by).unwrap();
            prop_assert_eq!(rows.size()[0], by.routed + by.skipped);
            prop_assert_eq!(&rows.index_select(0, &by.places), &x);
            let whole = rows.to_kind(Kind::Double).abs().sum(Kind::Double).double_value(&[]);
            let once = x.to_kind(Kind::Double).abs().sum(Kind::Double).double_value(&[]);
            prop_assert!((whole - once).abs() < 1e-9, "places that are filled up hold zeros");

            let out = Tensor::zeros([rows.size()[0], narrow], (kind, Device::Cpu));
            table.grouped_matmul(&rows, &weights, &by, &out).unwrap();
            let out = out.index_select(0, &by.places);
            let grads = table.permute(&grad, &by).unwrap();
            let back = Tensor::zeros([rows.size()[0], wide], (kind, Device::Cpu));
            table.grouped_matmul_input(&grads, &weights, &by, &back).unwrap();
            let back = back.index_select(0, &by.places);
            let of_weights = Tensor::zeros(weights.size(), (Kind::Double, Device::Cpu));
            for (token, &class) in (0i64..).zip(&choice) {
                let double = |x: &Tensor| x.get(token).to_kind(Kind::Double);
                if class == experts {
                    prop_assert_eq!(double(&out).abs().sum(Kind::Double).double_value(&[]), 0.0);
                    continue;
                }
                let weight = weights.get(class).to_kind(Kind::Double);
                let wanted = weight.mv(&double(&x)).to_kind(kind);
                prop_assert!(close(&out.get(token), &wanted, 8.0));
                let wanted = weight.tr().mv(&double(&grad)).to_kind(kind);
                prop_assert!(close(&back.get(token), &wanted, 8.0));
                let mut of_weight = of_weights.get(class);
                of_weight += double(&grad).outer(&double(&x));
            }
            let found = table.grouped_matmul_weights(&grads, &rows, &by).unwrap();
            prop_assert!(close(&found, &of_weights.to_kind(kind), 16.0));
            for (expert, _) in (0i64..).zip(&counts[..4]).filter(|(_, count)| **count == 0) {
                prop_assert_eq!(found.get(expert).abs().max().double_value(&[]), 0.0);
            }
        }
    }

    /// As in f64, whatever the chunk; and a token without a label costs nothing and moves nothing.
    #[test]
    fn losses_and_their_gradients(
        labels in prop::collection::vec(0i64..30, 1..40),
        masked in prop::collection::vec(any::<bool>(), 40),
        (width, chunk) in (1i64..16, 1i64..50),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let tokens = labels.len() as i64;
        let hidden = random(&[tokens, width], seed).to_kind(kind);
        let weights = random(&[30, width], seed + 1).to_kind(kind);
        let labels = Tensor::from_slice(&labels);
        let mask: Vec<f32> = masked.iter().take(tokens as usize).map(|mask| f32::from(*mask)).collect();
        let mask = Tensor::from_slice(&mask);
        let by = CrossEntropy { hidden: &hidden, weights: &weights, labels: &labels, mask: &mask, chunk };
        let [x, w] = [&hidden, &weights].map(|x| x.to_kind(Kind::Double).set_requires_grad(true));
        let log = x.mm(&w.tr()).log_softmax(-1, Kind::Double);
        let wanted = log.gather(1, &labels.unsqueeze(1), false).squeeze_dim(1) * -&mask;
        (wanted.sum(Kind::Double) / 7.0).backward();
        let limit = if kind == Kind::BFloat16 { 0.05 } else { 1e-5 };
        for table in [CPU, REFERENCE] {
            let found = table.cross_entropy_backward(by, 7.0).unwrap();
            prop_assert_eq!(&found.losses, &table.cross_entropy(by).unwrap());
            let away = |found: &Tensor, wanted: &Tensor| difference(&found.to_kind(Kind::Double), wanted);
            prop_assert!(away(&found.losses, &wanted.detach()) < limit);
            prop_assert!(away(&found.hidden, &x.grad()) < limit);
            prop_assert!(away(&found.weights, &w.grad()) < limit);
        }
    }

    /// Before and after an orthogonalisation.
    #[test]
    fn momenta_and_steps(length in 0i64..300, scale in 0.1..2.0f32, seed in 0u64..1000) {
        let state = |table: Table| {
            let [mut weight, mut momentum, gradient] = [0, 1, 2].map(|index| random(&[length], seed + index));
            let direction = table.nesterov(&mut momentum, &gradient, 0.95, scale).unwrap();
            table.descend(&mut weight, &direction, 0.99, 0.02).unwrap();
            [weight, momentum, direction]
        };
        for (found, wanted) in state(CPU).iter().zip(&state(REFERENCE)) {
            prop_assert!(close(found, wanted, 4.0));
        }
    }
}

/// A route goes to the lowest of equals; balance moves the choice and not its weight.
#[test]
fn routes_go_to_the_lowest_of_equals() {
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let (square, vector, out) = (zeros(&[3, 3]), zeros(&[3]), zeros(&[4, 3]));
    let by = RouterWeights {
        down: &zeros(&[3, 5]),
        down_bias: &vector,
        decay: None,
        norm: &vector,
        fc1: &square,
        fc1_bias: &vector,
        fc2: &square,
        fc2_bias: &vector,
        out: &out,
        eps: 1e-5,
    };
    let x = random(&[2, 5], 1);
    for (balance, wanted) in [([0.0f32; 4], 0), ([0.0, 0.0, 0.5, 0.5], 2)] {
        let (routes, _) = CPU.router(by, &x, None, &Tensor::from_slice(&balance)).unwrap();
        assert_eq!(Vec::<i64>::try_from(routes.choice).unwrap(), [wanted; 2]);
        assert_eq!(Vec::<f32>::try_from(routes.weight.reshape([-1])).unwrap(), [0.25; 2]);
    }
}

#[test]
fn both_tables_refuse_what_does_not_fit() {
    let (x, weight) = (random(&[4, 6], 1), random(&[6], 2));
    let wrong = [x.tr(), x.to_kind(Kind::BFloat16), x.to_kind(Kind::Double), x.narrow(1, 0, 5)];
    for table in [CPU, REFERENCE] {
        for wrong in &wrong {
            let refused = table.rms_norm(wrong, &weight, 1e-5).unwrap_err();
            assert!(matches!(refused, Error::Operand { operation: "rms_norm", .. }), "{refused}");
        }
        assert!(table.rms_norm(&x, &weight, 1e-5).is_ok());
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
    let by =
        AdamW { keep: 1.0, first: 0.1, second: 0.1, root: 1.0, eps: 1.0, rate: 0.1, scale: 1.0 };
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
    for table in [CPU, REFERENCE] {
        assert!(named(table.name()).is_some_and(|found| found == table));
    }
    assert!(named("cpu 0").is_none() && CPU != REFERENCE);
}
