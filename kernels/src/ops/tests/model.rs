//! Operations of a model: attention, values, experts, losses, routes.

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use super::super::*;
use super::{EMULATED, OWN, close, difference, float, made, random, starts};

/// Documents that cover `tokens` tokens.
fn spans(tokens: i64, cuts: &[prop::sample::Index]) -> Vec<AttentionSpan> {
    let starts = Vec::<i64>::try_from(starts(tokens, cuts)).unwrap();
    let ends = starts.iter().skip(1).copied().chain([tokens]);
    starts.iter().zip(ends).map(|(&start, end)| AttentionSpan::whole(start, end - start)).collect()
}

/// Windows of one key, of a few, of more than a block of queries, and of more than any document; or none.
fn windows() -> impl Strategy<Value = Option<i64>> {
    prop_oneof![Just(None), Just(Some(1)), (2i64..130).prop_map(Some), Just(Some(i64::MAX))]
}

/// The gradients of queries, keys and values, in f32.
fn back(
    table: OpsTable,
    by: Attention,
    saved: Vec<[Tensor; 2]>,
    grad: &Tensor,
) -> Result<[Tensor; 3]> {
    let out = [by.query, by.key, by.value].map(|x| x.to_kind(Kind::Float).zeros_like());
    let into = AttentionGrads { query: &out[0], key: &out[1], value: &out[2] };
    table.attention_backward(by, saved, grad, into).map(|()| out)
}

/// All tables have equal outputs and gradients, except for rounding.
fn agrees(
    own: &[OpsTable],
    by: Attention,
    grad: &Tensor,
) -> std::result::Result<(), TestCaseError> {
    let wanted = REFERENCE.attention(by).unwrap();
    let wanted_back = back(REFERENCE, by, wanted.saved, grad).unwrap();
    // The backward pass with bf16 operands reads outputs that were rounded to bf16.
    let limit = if by.value.kind() == Kind::BFloat16 { 8.0 * 32768.0 } else { 64.0 };
    for table in own.iter().copied() {
        let found = table.attention(by).unwrap();
        prop_assert!(close(&found.heads, &wanted.heads, 16.0));
        let found = back(table, by, found.saved, grad).unwrap();
        for (found, wanted) in found.iter().zip(&wanted_back) {
            prop_assert!(close(found, wanted, limit));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Documents of one token, and a document of all tokens.
    #[test]
    fn attention_over_documents(
        tokens in 1i64..70,
        (keys, group, width) in (1i64..4, 1i64..4, 1i64..20),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        before in prop::collection::vec(prop_oneof![Just(0), 1i64..40], 9),
        window in windows(),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let shape = [keys * group, keys, width];
        let mut spans = spans(tokens, &cuts);
        // Keys of earlier tokens precede those of the span itself; their content does not matter for the comparison.
        spans.iter_mut().zip(&before).for_each(|(span, before)| span.before = *before);
        let others = spans.iter().map(|span| span.keys()).sum();
        let query = random(&[keys * group, tokens, width], seed).to_kind(kind);
        let key = random(&[keys, others, width], seed + 3).to_kind(kind);
        let value = random(&[others, keys * width], seed + 1).to_kind(kind);
        let grad = random(&[tokens, keys * group * width], seed + 2).to_kind(kind);
        let by = Attention { query: &query, key: &key, value: &value, spans: &spans, shape, window, kept: None };
        agrees(&OWN, by, &grad)?;
        prop_assert!(back(REFERENCE, by, vec![[query.copy(), query.copy()]], &grad).is_err());
    }

    /// A document's bits do not depend on the other documents of its launch.
    #[test]
    fn a_document_knows_nothing_of_its_neighbours(
        (first, len, rest) in (0i64..150, 1i64..150, 0i64..50),
        (keys, group, width) in (1i64..3, 1i64..3, prop_oneof![1i64..20, Just(72), Just(136)]),
        window in windows(),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (shape, tokens) = ([keys * group, keys, width], first + len + rest);
        let query = random(&[keys * group, tokens, width], seed).to_kind(kind);
        let key = random(&[keys, tokens, width], seed + 1).to_kind(kind);
        let [value, grad] = [(keys, 2), (keys * group, 3)]
            .map(|(heads, index)| random(&[tokens, heads * width], seed + index).to_kind(kind));
        let of = |table: OpsTable, tensors: [&Tensor; 4], spans: &[AttentionSpan]| {
            let [query, key, value, grad] = tensors;
            let by = Attention { query, key, value, spans, shape, window, kept: None };
            let attended = table.attention(by).unwrap();
            let [to_query, to_key, to_value] = back(table, by, attended.saved, grad).unwrap();
            [attended.heads, to_value, to_query.transpose(0, 1), to_key.transpose(0, 1)]
        };
        let spans = [AttentionSpan::whole(0, first), AttentionSpan::whole(first, len), AttentionSpan::whole(first + len, rest)];
        let spans: Vec<AttentionSpan> = spans.into_iter().filter(|span| span.len > 0).collect();
        let [own_query, own_key] = [&query, &key].map(|x| x.narrow(1, first, len).contiguous());
        let [own_value, own_grad] = [&value, &grad].map(|x| x.narrow(0, first, len).contiguous());
        let own = [&own_query, &own_key, &own_value, &own_grad];
        for table in [CPU, EMULATED] {
            let all = of(table, [&query, &key, &value, &grad], &spans);
            let alone = of(table, own, &[AttentionSpan::whole(0, len)]);
            for (all, alone) in all.iter().zip(&alone) {
                prop_assert_eq!(&all.narrow(0, first, len), alone);
            }
        }
    }

    /// Neither do an expert's on other experts.
    #[test]
    fn an_expert_knows_nothing_of_the_others(
        choice in prop::collection::vec(0i64..4, 1..90),
        (wide, narrow) in (1i64..70, 1i64..70),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (tokens, experts) = (choice.len() as i64, 3);
        let x = random(&[tokens, wide], seed).to_kind(kind);
        let weights = random(&[experts, narrow, wide], seed + 1).to_kind(kind);
        let grad = random(&[tokens, narrow], seed + 2).to_kind(kind);
        let of = |choice: &[i64]| {
            let by = EMULATED.dispatch(&Tensor::from_slice(choice), experts + 1).unwrap();
            let [rows, grads] = [&x, &grad].map(|x| EMULATED.permute(x, &by).unwrap());
            let out = EMULATED.grouped_matmul(&rows, &weights, &by).unwrap();
            let back = EMULATED.grouped_matmul_input(&grads, &weights, &by).unwrap();
            let zeros = [&grad, &x].map(|x| x.zeros_like());
            let [out, back] = [0, 1].map(|side| {
                let rows = ExpertRows { x: [&out, &back][side], by: &by, passed: None, by_token: &zeros[side] };
                EMULATED.unpermute(rows).unwrap()
            });
            [out, back, made(EMULATED, EMULATED.grouped_matmul_weights(&grads, &ExpertInput::Sorted(rows), &by).unwrap())]
        };
        let all = of(&choice);
        for expert in 0..experts {
            let only: Vec<i64> = choice.iter().map(|own| if *own == expert { expert } else { experts }).collect();
            let alone = of(&only);
            prop_assert_eq!(all[2].get(expert), alone[2].get(expert));
            for (token, _) in (0i64..).zip(&choice).filter(|(_, own)| **own == expert) {
                prop_assert_eq!(all[0].get(token), alone[0].get(token));
                prop_assert_eq!(all[1].get(token), alone[1].get(token));
            }
        }
    }

    /// Parts of long documents: many blocks of queries, and earlier keys.
    #[test]
    fn attention_over_parts_of_long_documents(
        (before, len) in (1i64..500, 300i64..800),
        (keys, group) in (1i64..3, 1i64..3),
        window in windows(),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let (width, shape) = (8, [keys * group, keys, 8]);
        // A whole document in addition to the part.
        let spans = [AttentionSpan { start: 0, len, before }, AttentionSpan::whole(len, 9)];
        let (tokens, others) = (len + 9, before + len + 9);
        let query = random(&[keys * group, tokens, width], seed).to_kind(kind);
        let key = random(&[keys, others, width], seed + 3).to_kind(kind);
        let value = random(&[others, keys * width], seed + 1).to_kind(kind);
        let grad = random(&[tokens, keys * group * width], seed + 2).to_kind(kind);
        let by = Attention { query: &query, key: &key, value: &value, spans: &spans, shape, window, kept: None };
        // The emulator, for which blocks do not matter, is slow: it computes one in eight.
        agrees(if seed % 8 == 0 { &OWN } else { &[CPU] }, by, &grad)?;
    }

    /// A part of a document, with the earlier keys and values, has the same output as in the whole document.
    #[test]
    fn a_part_of_a_document_sees_what_came_before(
        (before, len) in (0i64..600, 1i64..40),
        (keys, group, width) in (1i64..3, 1i64..3, 1i64..20),
        window in windows(),
        seed in 0u64..1000,
    ) {
        let (shape, tokens) = ([keys * group, keys, width], before + len);
        let query = random(&[keys * group, tokens, width], seed);
        let (key, value) = (random(&[keys, tokens, width], seed + 1), random(&[tokens, keys * width], seed + 2));
        for table in [CPU, REFERENCE, EMULATED] {
            let (whole, part) = ([AttentionSpan::whole(0, tokens)], [AttentionSpan { start: 0, len, before }]);
            let of = |query: &Tensor, spans: &[AttentionSpan]| {
                let by = Attention { query, key: &key, value: &value, spans, shape, window, kept: None };
                table.attention(by).unwrap().heads
            };
            let own = query.narrow(1, before, len).contiguous();
            let wanted = of(&query, &whole).narrow(0, before, len);
            let found = of(&own, &part);
            // In main memory a token's bits do not depend on where its document is split.
            prop_assert!(table.name() != CPU.name() || found == wanted);
            prop_assert!(difference(&found, &wanted) < 1e-5);
        }
    }

    /// Whole blocks of keys before the window may be left out, and the other keys before it may be any: in our own
    /// tables no bit of any result changes.
    #[test]
    fn keys_before_the_window_do_not_matter(
        (before, len) in (0i64..1000, 1i64..40),
        (keys, group, width) in (1i64..3, 1i64..3, 1i64..20),
        window in 1i64..300,
        kind in float(),
        seed in 0u64..1000,
    ) {
        let shape = [keys * group, keys, width];
        let unseen = (before + 1 - window).max(0);
        let left_out = unseen / KEY_BLOCK * KEY_BLOCK;
        let query = random(&[keys * group, len, width], seed).to_kind(kind);
        let key = random(&[keys, before + len, width], seed + 1).to_kind(kind);
        let value = random(&[before + len, keys * width], seed + 2).to_kind(kind);
        let grad = random(&[len, keys * group * width], seed + 3).to_kind(kind);
        let of = |table: OpsTable, key: &Tensor, value: &Tensor, before: i64| {
            let spans = &[AttentionSpan { start: 0, len, before }];
            let by = Attention { query: &query, key, value, spans, shape, window: Some(window), kept: None };
            let attended = table.attention(by).unwrap();
            let [to_query, to_key, to_value] = back(table, by, attended.saved, &grad).unwrap();
            let seen = (before + 1 - window).max(0);
            let rest = before + len - seen;
            let zeros = [to_key.narrow(1, 0, seen), to_value.narrow(0, 0, seen)];
            assert!(zeros.iter().all(|unseen| unseen.abs().sum(Kind::Double).double_value(&[]) == 0.0));
            [attended.heads, to_query, to_key.narrow(1, seen, rest), to_value.narrow(0, seen, rest)]
        };
        let part = |x: &Tensor, dim| x.narrow(dim, left_out, before + len - left_out).copy();
        let (fewer_keys, fewer_values) = (part(&key, 1), part(&value, 0));
        let _ = fewer_keys.narrow(1, 0, unseen - left_out).fill_(3.0);
        let _ = fewer_values.narrow(0, 0, unseen - left_out).fill_(-5.0);
        let tables = [CPU, EMULATED];
        for table in &tables[..if seed % 8 == 0 { 2 } else { 1 }] {
            let wanted = of(*table, &key, &value, before);
            prop_assert_eq!(of(*table, &fewer_keys, &fewer_values, before - left_out), wanted);
        }
    }

    /// Each token's row is computed by its own expert and returned, even if some or all experts have no token.
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
        for table in [CPU, REFERENCE, EMULATED] {
            let by = table.dispatch(&Tensor::from_slice(&choice), experts + 1).unwrap();
            let counts = Vec::<i64>::try_from(&by.counts).unwrap();
            let wanted: Vec<i64> = (0..=experts)
                .map(|class| choice.iter().filter(|choice| **choice == class).count() as i64)
                .collect();
            prop_assert_eq!(&counts, &wanted);
            let rows = table.permute(&x, &by).unwrap();
            prop_assert_eq!(rows.size()[0], by.rows);
            prop_assert_eq!(&rows.index_select(0, &by.places), &x);
            let returned = |x, passed, by_token: &Tensor| table.unpermute(ExpertRows { x, by: &by, passed, by_token }).unwrap();
            let back = returned(&rows, Some(&rows), &x);
            prop_assert_eq!(back, &x * 2.0);
            let whole = rows.to_kind(Kind::Double).abs().sum(Kind::Double).double_value(&[]);
            let once = x.to_kind(Kind::Double).abs().sum(Kind::Double).double_value(&[]);
            prop_assert!((whole - once).abs() < 1e-9, "places that are filled up hold zeros");

            let out = table.grouped_matmul(&rows, &weights, &by).unwrap();
            let out = returned(&out, None, &grad.zeros_like());
            let grads = table.permute(&grad, &by).unwrap();
            let back = table.grouped_matmul_input(&grads, &weights, &by).unwrap();
            let back = returned(&back, Some(&rows), &x.zeros_like());
            let of_weights = Tensor::zeros(weights.size(), (Kind::Double, Device::Cpu));
            for (token, &class) in (0i64..).zip(&choice) {
                let double = |x: &Tensor| x.get(token).to_kind(Kind::Double);
                if class == experts {
                    prop_assert_eq!(double(&out).abs().sum(Kind::Double).double_value(&[]), 0.0);
                    prop_assert_eq!(back.get(token), x.get(token));
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
            let sorted = ExpertInput::Sorted(rows);
            let found = made(table, table.grouped_matmul_weights(&grads, &sorted, &by).unwrap());
            let input = table.expert_input(&x, &by).unwrap();
            let read = made(table, table.grouped_matmul_weights(&grads, &input, &by).unwrap());
            prop_assert_eq!(&read, &found);
            prop_assert!(close(&found.to_kind(kind), &of_weights.to_kind(kind), 16.0));
            for (expert, _) in (0i64..).zip(&counts[..4]).filter(|(_, count)| **count == 0) {
                prop_assert_eq!(found.get(expert).abs().max().double_value(&[]), 0.0);
            }
        }
    }

    /// Equal to f64 for any chunk and number of shards; a token without a label has no loss and no gradient. Weights of
    /// labels multiply the gradient, not the loss; z-loss is in the gradient and apart from the loss.
    #[test]
    fn losses_and_their_gradients(
        labels in prop::collection::vec(0i64..30, 1..40),
        weighed in prop::collection::vec(prop_oneof![Just(0.0f32), Just(1.0), 0.01..9.0f32], 40),
        (width, chunk, shards, part) in (1i64..16, 1i64..50, 1i64..8, any::<bool>()),
        z_loss in prop_oneof![Just(0.0), Just(1e-4), 0.0..1.0],
        kind in float(),
        seed in 0u64..1000,
    ) {
        let tokens = labels.len() as i64;
        let hidden = random(&[tokens, width], seed).to_kind(kind);
        let weights = random(&[30, width], seed + 1).to_kind(kind);
        let labels = Tensor::from_slice(&labels);
        let mask = Tensor::from_slice(&weighed[..labels.numel()]);
        let (hidden, labels, mask) = (&hidden, &labels, &mask);
        let weights = &weights;
        let by = CrossEntropy { hidden, weights, labels, mask, chunk, shards, part, z_loss };
        let [x, w] = [hidden, weights].map(|x| x.to_kind(Kind::Double).set_requires_grad(true));
        let logits = x.mm(&w.tr());
        let log = logits.log_softmax(-1, Kind::Double);
        let wanted = log.gather(1, &labels.unsqueeze(1), false).squeeze_dim(1).neg();
        let z_wanted = logits.logsumexp([1i64].as_slice(), false).square() * z_loss;
        (((&wanted + &z_wanted) * mask).sum(Kind::Double) / 7.0).backward();
        let [wanted, z_wanted] = [wanted, z_wanted].map(|all| (all * mask.gt(0.0)).detach());
        let limit = if kind == Kind::BFloat16 { 0.05 } else { 1e-5 };
        for table in [CPU, REFERENCE, EMULATED] {
            let found = table.cross_entropy_backward(by, 7.0).unwrap();
            prop_assert_eq!(&found.losses, &table.cross_entropy(by).unwrap());
            let away = |found: &Tensor, wanted: &Tensor| difference(&found.to_kind(Kind::Double), wanted);
            prop_assert!(away(&found.losses, &wanted) < limit);
            prop_assert_eq!(found.z_losses.is_some(), z_loss > 0.0);
            if let Some(found) = &found.z_losses {
                prop_assert!(away(found, &z_wanted) < limit);
            }
            prop_assert!(away(&found.hidden, &x.grad()) < limit);
            prop_assert!(away(&found.weights, &w.grad()) < limit);
        }
    }

    /// The steps before and after an orthogonalization.
    #[test]
    fn momenta_and_steps(length in 0i64..300, scale in 0.1..2.0f32, seed in 0u64..1000) {
        let state = |table: OpsTable| {
            let [mut weight, mut momentum, gradient] = [0, 1, 2].map(|index| random(&[length], seed + index));
            let direction = table.nesterov(&mut momentum, &gradient, 0.95, scale).unwrap();
            table.descend(&mut weight, &direction, 0.99, 0.02).unwrap();
            [weight, momentum, direction]
        };
        for table in OWN {
            for (found, wanted) in state(table).iter().zip(&state(REFERENCE)) {
                prop_assert!(close(found, wanted, 4.0));
            }
        }
    }
}

/// Ties choose the lowest class; balance affects the choice but not its weight.
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
        part: false,
    };
    let x = random(&[2, 5], 1);
    for (balance, wanted) in [([0.0f32; 4], 0), ([0.0, 0.0, 0.5, 0.5], 2)] {
        for table in OWN {
            let (routes, _) = table.router(by, &x, None, &Tensor::from_slice(&balance)).unwrap();
            assert_eq!(Vec::<i64>::try_from(routes.choice).unwrap(), [wanted; 2]);
            assert_eq!(Vec::<f32>::try_from(routes.weight.reshape([-1])).unwrap(), [0.25; 2]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Including equal tokens.
    #[test]
    fn rows_of_the_embedding(
        tokens in prop::collection::vec(0i64..9, 1..40),
        width in 1i64..40,
        kind in float(),
        seed in 0u64..1000,
    ) {
        let count = tokens.len() as i64;
        let tokens = Tensor::from_slice(&tokens);
        let (table, grad) = (random(&[9, width], seed).to_kind(kind), random(&[count, width], seed + 1));
        let [bias, scale] = [2, 3].map(|index| random(&[width], seed + index));
        let run = |ops: OpsTable| {
            let [embedded, scaled] = ops.embedding(&table, &tokens, &bias, &scale).unwrap();
            let mut of_table = random(&[9, width], seed + 4);
            let [to_bias, to_scale] =
                ops.embedding_backward(&tokens, &embedded, &scale, &grad, &mut of_table).unwrap();
            [embedded, scaled, made(ops, to_bias), made(ops, to_scale), of_table]
        };
        for (found, wanted) in run(EMULATED).iter().zip(&run(REFERENCE)) {
            prop_assert!(close(found, wanted, 32.0));
        }
    }

    /// Forward and backward, with and without a previous state, if both tables choose alike, which they do except for
    /// near ties.
    #[test]
    fn routers(
        (tokens, width, classes) in (1i64..40, 1i64..20, 2i64..9),
        // Kernels have two sizes, and libtorch's operators compute what is wider.
        size in prop_oneof![3 => 1i64..20, 1 => 126i64..131, 1 => 255i64..257, 1 => Just(257)],
        averaged in any::<bool>(),
        kind in float(),
        seed in 0u64..1000,
    ) {
        let of = |shape: &[i64], index| random(shape, seed + index);
        let (down, vectors) = (of(&[size, width], 1).to_kind(kind), of(&[5, size], 2));
        let vector = |index| vectors.get(index);
        let [down_bias, norm, fc1_bias, fc2_bias, decay] = [0, 1, 2, 3, 4].map(vector);
        // As small as layers of this width are, or roundings of one would grow in the next.
        let layer = |rows, index| of(&[rows, size], index) / (size as f64).sqrt();
        let [fc1, fc2, out] = [(size, 3), (size, 4), (classes, 5)].map(|(rows, index)| layer(rows, index));
        let before = of(&[tokens, size], 6);
        let by = RouterWeights {
            down: &down,
            down_bias: &down_bias,
            decay: averaged.then_some(&decay),
            norm: &norm,
            fc1: &fc1,
            fc1_bias: &fc1_bias,
            fc2: &fc2,
            fc2_bias: &fc2_bias,
            out: &out,
            eps: 1e-5,
            part: false,
        };
        let x = of(&[tokens, width], 7).to_kind(kind);
        let (balance, grad, state) = (of(&[classes], 8), of(&[tokens, 1], 9), of(&[tokens, size], 10));
        let before = averaged.then_some(&before);
        let run = |ops: OpsTable| {
            let (routes, saved) = ops.router(by, &x, before, &balance).unwrap();
            (routes, ops.router_backward(by, &x, saved, &grad, Some(&state)).unwrap())
        };
        let ((found, back), (wanted, wanted_back)) = (run(EMULATED), run(REFERENCE));
        // By the router's own counts of each class, or without them.
        let by_routes = EMULATED.dispatch_routes(&found, classes).unwrap();
        let by_choice = EMULATED.dispatch(&found.choice, classes).unwrap();
        prop_assert_eq!((&by_routes.counts, &by_routes.places), (&by_choice.counts, &by_choice.places));
        prop_assume!(found.choice == wanted.choice);
        let limit = if kind == Kind::BFloat16 { 0.05 } else { 1e-4 };
        let all = |ops: OpsTable, back: RouterGrads| {
            let RouterGrads { input, before, down, down_bias, decay, norm, fc1, fc1_bias, fc2, fc2_bias, out } = back;
            let some = [Some(input), before].into_iter().flatten();
            let sums = [Some(down_bias), decay, Some(norm), Some(fc1_bias), Some(fc2_bias)];
            let sums = sums.into_iter().chain([down, fc1, fc2, out].map(Some));
            let sums = ops.finish(sums.flatten().collect()).unwrap();
            some.chain(sums).collect::<Vec<_>>()
        };
        let pairs = all(EMULATED, back).into_iter().zip(all(REFERENCE, wanted_back));
        for (found, wanted) in pairs.chain([(found.weight, wanted.weight), (found.state.unwrap(), wanted.state.unwrap())]) {
            prop_assert!(difference(&found, &wanted) < limit, "{}", difference(&found, &wanted));
        }
    }
}

proptest! {
    /// The k largest, the first of equal ones, in ascending order; their probabilities, or their shares of the sum.
    #[test]
    fn a_token_has_its_most_probable_classes(
        levels in prop::collection::vec(prop::collection::vec(0i8..4, 9), 1..6),
        biases in prop::collection::vec(0i8..3, 9),
        count in 1i64..9,
        (normalized, balanced) in any::<(bool, bool)>(),
    ) {
        // Few levels, so that many logits and biases are equal.
        let logits: Vec<f32> = levels.iter().flatten().map(|level| f32::from(*level)).collect();
        let logits = Tensor::from_slice(&logits).reshape([-1, 9]);
        let biases: Vec<f32> = biases.iter().map(|level| 0.25 * f32::from(*level)).collect();
        let balance = Tensor::from_slice(&biases);
        let by = linear_router::TopK { count, normalized };
        let balance = balanced.then_some(&balance);
        let [probabilities, choice, weight] = linear_router::chosen(&logits, balance, by).unwrap();
        let choice: Vec<i64> = choice.try_into().unwrap();
        let weight: Vec<f32> = weight.flatten(0, 1).try_into().unwrap();
        for token in 0..levels.len() {
            let own: Vec<f32> = probabilities.get(token as i64).try_into().unwrap();
            let score = |class: &usize| own[*class] + if balanced { biases[*class] } else { 0.0 };
            let mut classes: Vec<usize> = (0..9).collect();
            classes.sort_by(|left, right| score(right).total_cmp(&score(left)).then(left.cmp(right)));
            classes.truncate(count as usize);
            classes.sort_unstable();
            let rows = token * count as usize..(token + 1) * count as usize;
            let found: Vec<usize> = choice[rows.clone()].iter().map(|class| *class as usize).collect();
            prop_assert_eq!(&found, &classes);
            let sum = if normalized { classes.iter().map(|class| own[*class]).sum() } else { 1.0f32 };
            let wanted: Vec<f32> = classes.iter().map(|class| own[*class] / sum).collect();
            prop_assert_eq!(&weight[rows], &wanted[..]);
        }
    }

    /// The rows of a token are copies, and their sum is in order.
    #[test]
    fn rows_of_a_token_are_repeated_and_added_in_order(
        (tokens, width, count) in (1i64..5, 1i64..9, 1i64..9), kind in float(), seed in 0u64..1000,
    ) {
        let by = linear_router::TopK { count, normalized: false };
        let x = random(&[tokens, width], seed).to_kind(kind);
        let rows = linear_router::repeated(&x, by).unwrap();
        prop_assert_eq!(&rows, &x.repeat_interleave_self_int(count, 0, None));
        let rows = random(&[tokens * count, width], seed + 1).to_kind(kind);
        let found = linear_router::summed(&rows, by).unwrap();
        let rows: Vec<f32> = rows.to_kind(Kind::Float).reshape([-1]).try_into().unwrap();
        let row = (count * width) as usize;
        let sum = |token: usize, column: usize| {
            let own = rows[token * row..][..row].iter().skip(column).step_by(width as usize);
            own.copied().reduce(|sum, next| sum + next).unwrap()
        };
        let wanted: Vec<f32> = (0..(tokens * width) as usize).map(|at| sum(at / width as usize, at % width as usize)).collect();
        prop_assert_eq!(found, Tensor::from_slice(&wanted).reshape([tokens, width]).to_kind(kind));
    }
}
