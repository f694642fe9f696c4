//! Top-1 experts without capacity: tokens sorted by expert, one matrix product per expert, gathered back.
//!
//! Un-sorting is a gather, never an addition. The skip class comes last in the order and has no expert. An expert
//! without a token is not computed, and its gradient is exactly zero.

use kernels::fused;
use tch::{Device, Kind, Tensor};

use super::param::{Declare, ParamId, Weights};
use super::router::Routes;
use super::{Skip, ZayaConfig, product};

/// Parameters of one layer's experts: `P` is a parameter's name, or its weight.
pub(super) struct Experts<P> {
    /// `[E, 2 I, D]`: the gate's rows, then the other side's.
    pub(super) gate_up: P,
    /// `[E, D, I]`.
    pub(super) down: P,
    pub(super) skip: Skip,
}

impl Experts<ParamId> {
    pub(super) fn declare(params: &mut Declare<'_>, config: &ZayaConfig) -> Self {
        let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
        let count = config.num_experts;
        let mut own = params.inside("mlp.experts", "zaya_block.experts.local_experts.*");
        Experts {
            gate_up: own.experts("gate_up_proj", "linear_fc1.weight", [count, 2 * inner, hidden]),
            down: own.experts("down_proj", "linear_fc2.weight", [count, hidden, inner]),
            skip: config.skip,
        }
    }

    pub(super) fn bind<'a>(&self, weights: Weights<'a>) -> Experts<&'a Tensor> {
        let (gate_up, down) = (weights.of(self.gate_up), weights.of(self.down));
        Experts { gate_up, down, skip: self.skip }
    }
}

/// Rows of an expert are filled up with zeros to a multiple of this on a CPU: each number of rows is a product that oneDNN
/// has to prepare, so few of them are worth some zeros. Zeros change no gradient.
const ROWS: usize = 8;

/// Who computes which rows: tokens by expert, each expert's filled up, then those that are skipped.
#[derive(Debug)]
struct Order {
    /// Token at each place; any at a place that is filled up.
    tokens: Tensor,
    /// The places that are filled up.
    filled: Tensor,
    /// Place of each token.
    places: Tensor,
    /// Tokens by class, the skip last.
    counts: Vec<u64>,
    /// The expert of each run of places, where it begins, and how long it is.
    runs: Vec<(i64, i64, i64)>,
    /// Places of experts.
    routed: i64,
}

/// What the backward pass needs; all but the weight by place, tokens of experts only.
#[derive(Debug)]
pub(super) struct Saved {
    order: Order,
    weight: Tensor,
    rows: Tensor,
    gate_up: Tensor,
    inner: Tensor,
    out: Tensor,
}

/// Gradients of the experts.
pub(super) struct Grads {
    /// Of their input.
    pub(super) input: Tensor,
    /// Of the routing weights, `[N, 1]`.
    pub(super) weight: Tensor,
    /// Of gate-up and down.
    pub(super) params: [Tensor; 2],
}

impl Order {
    fn new(choice: &Tensor, classes: i64) -> Order {
        let device = choice.device();
        let multiple = if device == Device::Cpu { ROWS } else { 1 };
        let choice = Vec::<i64>::try_from(choice).expect("a choice is one row of i64");
        let mut counts = vec![0u64; classes as usize];
        choice.iter().for_each(|&class| counts[class as usize] += 1);
        let (mut next, mut runs, mut end) = (Vec::new(), Vec::new(), 0);
        for (expert, &count) in counts[..counts.len() - 1].iter().enumerate() {
            let length = (count as usize).next_multiple_of(multiple);
            next.push(end);
            if count > 0 {
                runs.push((expert as i64, end as i64, length as i64));
            }
            end += length;
        }
        next.push(end);
        let mut tokens = vec![-1i64; end + counts[counts.len() - 1] as usize];
        let places: Vec<i64> = (0i64..)
            .zip(&choice)
            .map(|(token, &class)| {
                let place = next[class as usize];
                next[class as usize] += 1;
                tokens[place] = token;
                place as i64
            })
            .collect();
        let filled: Vec<i64> = (0i64..)
            .zip(&tokens)
            .filter(|(_, token)| **token < 0)
            .map(|(place, _)| place)
            .collect();
        tokens.iter_mut().for_each(|token| *token = 0.max(*token));
        let there = |numbers: Vec<i64>| Tensor::from_slice(&numbers).to_device(device);
        let (tokens, filled, places) = (there(tokens), there(filled), there(places));
        Order { tokens, filled, places, counts, runs, routed: end as i64 }
    }

    /// Tokens without an expert.
    fn skipped(&self) -> i64 {
        self.counts.last().map_or(0, |&count| count as i64)
    }

    /// Rows of tokens, where they are computed; zeros where places are filled up.
    fn rows(&self, x: &Tensor) -> Tensor {
        let mut rows = x.index_select(0, &self.tokens);
        if self.filled.size()[0] > 0 {
            let _ = rows.index_fill_(0, &self.filled, 0.0);
        }
        rows
    }

    /// The way back, each token times its weight, `[N, 1]`: f32.
    fn gather(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        let x = &product::wide(x.shallow_clone());
        match fused::fits(x) {
            true => fused::gather(x, &self.places, weight),
            false => x.index_select(0, &self.places) * weight,
        }
    }

    /// From the gradient of what [`Order::gather`] made of `x`: those of `x` and of the weight.
    fn gather_backward(&self, x: Tensor, weight: &Tensor, grad: &Tensor) -> [Tensor; 2] {
        let x = product::wide(x);
        if fused::fits(&x) && fused::fits(grad) {
            return fused::gather_backward(&x, &self.places, weight, grad);
        }
        let grad = self.rows(grad);
        let weight_grad = (&grad * x).sum_dim_intlist(1, true, Kind::Float);
        let weight_grad = weight_grad.index_select(0, &self.places);
        [grad * weight.index_select(0, &self.tokens), weight_grad]
    }
}

impl Experts<&Tensor> {
    /// From the normed stream and its routes; also how many tokens each class got, the skip last.
    pub(super) fn forward(&self, v: &Tensor, routes: &Routes) -> (Tensor, Vec<u64>, Saved) {
        let [experts, width, hidden] = sizes(self.gate_up);
        let order = Order::new(&routes.choice, experts + 1);
        let options = (v.kind(), v.device());
        let sorted = order.rows(v);
        let (rows, skipped) = (sorted.narrow(0, 0, order.routed), order.skipped());
        let gate_up = Tensor::empty([order.routed, width], options);
        for &(expert, start, count) in &order.runs {
            let weight = self.gate_up.get(expert);
            let part = |x: &Tensor| x.narrow(0, start, count);
            product::into(&part(&gate_up), &part(&rows), &weight.tr());
        }
        let inner = gated(&gate_up);
        let out = Tensor::empty([order.routed + skipped, hidden], options);
        for &(expert, start, count) in &order.runs {
            let weight = self.down.get(expert);
            let part = |x: &Tensor| x.narrow(0, start, count);
            product::into(&part(&out), &part(&inner), &weight.tr());
        }
        let mut rest = out.narrow(0, order.routed, skipped);
        match self.skip {
            Skip::Zero => drop(rest.zero_()),
            Skip::Identity => rest.copy_(&sorted.narrow(0, order.routed, skipped)),
        }
        let counts = order.counts.clone();
        let mixed = order.gather(&out, &routes.weight).to_kind(v.kind());
        let weight = routes.weight.shallow_clone();
        (mixed, counts, Saved { order, weight, rows, gate_up, inner, out })
    }

    pub(super) fn backward(&self, saved: Saved, grad: &Tensor) -> Grads {
        let Saved { order, weight, rows, gate_up, inner, out } = saved;
        let [out, weight_grad] = order.gather_backward(out, &weight, grad);
        let out = out.to_kind(rows.kind());
        let (up_weight, down_weight) = (self.gate_up.empty_like(), self.down.empty_like());
        let inner_grad = inner.empty_like();
        for &(expert, start, count) in &order.runs {
            let part = |x: &Tensor| x.narrow(0, start, count);
            product::into(&part(&inner_grad), &part(&out), &self.down.get(expert));
            product::into(&down_weight.get(expert), &part(&out).tr(), &part(&inner));
        }
        let both = gated_backward(&gate_up, &inner_grad);
        let input = out.empty_like();
        for &(expert, start, count) in &order.runs {
            let part = |x: &Tensor| x.narrow(0, start, count);
            product::into(&part(&input), &part(&both), &self.gate_up.get(expert));
            product::into(&up_weight.get(expert), &part(&both).tr(), &part(&rows));
        }
        self.finish(&order, [up_weight, down_weight], input, &out, weight_grad)
    }

    /// Idle experts, the skip class, and the way back to token order.
    fn finish(
        &self,
        order: &Order,
        params: [Tensor; 2],
        input: Tensor,
        out: &Tensor,
        weight: Tensor,
    ) -> Grads {
        for (expert, &count) in (0i64..).zip(&order.counts[..order.counts.len() - 1]) {
            if count == 0 {
                params.iter().for_each(|param| drop(param.get(expert).zero_()));
            }
        }
        let skipped = order.skipped();
        let mut rest = input.narrow(0, order.routed, skipped);
        match self.skip {
            Skip::Zero => drop(rest.zero_()),
            Skip::Identity => rest.copy_(&out.narrow(0, order.routed, skipped)),
        }
        let input = input.index_select(0, &order.places);
        Grads { input, weight, params: params.map(product::wide) }
    }
}

/// `silu(gate) * up` of `[P, 2 I]`, the gate first.
fn gated(x: &Tensor) -> Tensor {
    if fused::fits(x) {
        return fused::gated(x);
    }
    let (gate, up) = halves(x);
    gate.silu() * up
}

/// From the gradient of [`gated`], in its kind: that of what went in.
fn gated_backward(x: &Tensor, grad: &Tensor) -> Tensor {
    if fused::fits(x) && fused::fits(grad) {
        return fused::gated_backward(x, grad);
    }
    let both = x.empty_like();
    let ((gate, up), (gate_grad, up_grad)) = (halves(x), halves(&both));
    let _ = gate.silu_backward_grad_input(&gate_grad, &(grad * up));
    let _ = grad.mul_out(&up_grad, &gate.silu());
    both
}

fn halves(x: &Tensor) -> (Tensor, Tensor) {
    let size = x.size()[1] / 2;
    (x.narrow(1, 0, size), x.narrow(1, size, size))
}

fn sizes(gate_up: &Tensor) -> [i64; 3] {
    let size = gate_up.size();
    [size[0], size[1], size[2]]
}

#[cfg(test)]
mod tests {
    use super::super::random;
    use super::*;
    use proptest::prelude::*;

    fn difference(found: &Tensor, wanted: &Tensor) -> f64 {
        assert_eq!(found.size(), wanted.size());
        (found - wanted).abs().max().double_value(&[])
            / wanted.abs().max().double_value(&[]).max(1.0)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Every token has a place among those of its class, classes follow each other, and all other places hold zeros.
        #[test]
        fn places_are_a_filled_up_sort(choice in prop::collection::vec(0i64..5, 1..60)) {
            let order = Order::new(&Tensor::from_slice(&choice), 5);
            let x = random(&[choice.len() as i64, 3], 1);
            let rows = order.rows(&x);
            let places = Vec::<i64>::try_from(&order.places).unwrap();
            let all = order.routed + order.skipped();
            prop_assert_eq!(rows.size()[0], all);
            for ((token, place), class) in (0i64..).zip(&places).zip(&choice) {
                prop_assert_eq!(rows.get(*place), x.get(token));
                let run = order.runs.iter().find(|run| run.0 == *class);
                let (begin, end) = run.map_or((order.routed, all), |run| (run.1, run.1 + run.2));
                prop_assert!((begin..end).contains(place));
            }
            for place in (0..all).filter(|place| !places.contains(place)) {
                prop_assert_eq!(rows.get(place).abs().sum(Kind::Float).double_value(&[]), 0.0);
            }
            prop_assert_eq!(order.counts.iter().sum::<u64>(), choice.len() as u64);
            prop_assert!(order.runs.iter().all(|run| run.2 % ROWS as i64 == 0 && run.1 % ROWS as i64 == 0));
        }

        /// One pass over memory computes what the operators compute.
        #[test]
        fn passes_are_the_operators(choice in prop::collection::vec(0i64..4, 1..40), width in 1i64..40, seed in 0u64..1000) {
            let order = Order::new(&Tensor::from_slice(&choice), 4);
            let (n, all) = (choice.len() as i64, order.routed + order.skipped());
            let (x, weight, grad) =
                (random(&[all, width], seed), random(&[n, 1], seed + 1), random(&[n, width], seed + 2));
            prop_assert_eq!(order.gather(&x, &weight), x.index_select(0, &order.places) * &weight);
            let [to_x, to_weight] = order.gather_backward(x.copy(), &weight, &grad);
            let rows = order.rows(&grad);
            prop_assert_eq!(to_x, &rows * weight.index_select(0, &order.tokens));
            let wanted = (rows * x).sum_dim_intlist(1, true, Kind::Float).index_select(0, &order.places);
            prop_assert!(difference(&to_weight, &wanted) < 1e-6);

            // Far below and above zero too, where the gate is shut or open.
            let (both, grad) = (random(&[n, 2 * width], seed + 3) * 30.0, random(&[n, width], seed + 4));
            let (gate, up) = halves(&both.to_kind(Kind::Double));
            prop_assert!(difference(&gated(&both), &(gate.silu() * &up)) < 1e-6);
            let wide = grad.to_kind(Kind::Double);
            let wanted = Tensor::cat(&[gate.silu_backward(&(&wide * up)), wide * gate.silu()], 1);
            prop_assert!(difference(&gated_backward(&both, &grad), &wanted) < 1e-6);
        }
    }
}
