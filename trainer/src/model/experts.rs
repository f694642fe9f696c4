//! Top-1 experts without capacity: tokens sorted by expert, one matrix product per expert, gathered back.
//!
//! Un-sorting is a gather, never an addition. The skip class comes last in the order and has no expert. An expert
//! without a token is not computed, and its gradient is exactly zero.

use tch::{Device, Kind, Tensor};

use super::router::Routes;
use super::{Skip, product};

/// Parameters of one layer's experts.
pub(super) struct Experts<'a> {
    /// `[E, 2 I, D]`: the gate's rows, then the other side's.
    pub(super) gate_up: &'a Tensor,
    /// `[E, D, I]`.
    pub(super) down: &'a Tensor,
    pub(super) skip: Skip,
}

/// Who computes which rows of the sorted tokens.
#[derive(Debug)]
struct Order {
    /// Token at each sorted place.
    order: Tensor,
    /// Sorted place of each token.
    inverse: Tensor,
    /// Tokens by class, the skip last.
    counts: Vec<i64>,
    /// Tokens that have an expert.
    routed: i64,
}

/// What the backward pass needs; all but the weight in sorted order, tokens of experts only.
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
        let order = choice.argsort_stable(true, 0, false);
        let inverse = order.argsort_stable(true, 0, false);
        let counts = choice.bincount(None::<&Tensor>, classes).to_device(Device::Cpu);
        let counts: Vec<i64> = Vec::try_from(counts).expect("bincount answers with one row of i64");
        let routed = counts[..counts.len() - 1].iter().sum();
        Order { order, inverse, counts, routed }
    }

    /// Experts that have tokens, each with its place among the sorted ones.
    fn experts(&self) -> impl Iterator<Item = (i64, i64, i64)> {
        let mut start = 0;
        let counts = &self.counts[..self.counts.len() - 1];
        (0i64..).zip(counts).filter_map(move |(expert, &count)| {
            start += count;
            (count > 0).then_some((expert, start - count, count))
        })
    }
}

impl Experts<'_> {
    /// From the normed stream and its routes; also how many tokens each class got, the skip last.
    pub(super) fn forward(&self, v: &Tensor, routes: &Routes) -> (Tensor, Vec<u64>, Saved) {
        let [experts, width, hidden] = sizes(self.gate_up);
        let order = Order::new(&routes.choice, experts + 1);
        let (inner_size, options) = (width / 2, (v.kind(), v.device()));
        let sorted = v.index_select(0, &order.order);
        let rows = sorted.narrow(0, 0, order.routed);
        let gate_up = Tensor::empty([order.routed, width], options);
        for (expert, start, count) in order.experts() {
            let weight = self.gate_up.get(expert);
            let _ =
                rows.narrow(0, start, count).mm_out(&gate_up.narrow(0, start, count), &weight.tr());
        }
        let inner =
            gate_up.narrow(1, 0, inner_size).silu() * gate_up.narrow(1, inner_size, inner_size);
        let out = Tensor::empty([v.size()[0], hidden], options);
        for (expert, start, count) in order.experts() {
            let weight = self.down.get(expert);
            let _ =
                inner.narrow(0, start, count).mm_out(&out.narrow(0, start, count), &weight.tr());
        }
        let skipped = v.size()[0] - order.routed;
        let mut rest = out.narrow(0, order.routed, skipped);
        match self.skip {
            Skip::Zero => drop(rest.zero_()),
            Skip::Identity => rest.copy_(&sorted.narrow(0, order.routed, skipped)),
        }
        let counts = order.counts.iter().map(|&count| count as u64).collect();
        let mixed = (out.index_select(0, &order.inverse) * &routes.weight).to_kind(v.kind());
        let weight = routes.weight.shallow_clone();
        (mixed, counts, Saved { order, weight, rows, gate_up, inner, out })
    }

    pub(super) fn backward(&self, saved: Saved, grad: &Tensor) -> Grads {
        let Saved { order, weight, rows, gate_up, inner, out } = saved;
        let inner_size = inner.size()[1];
        let grad = grad.index_select(0, &order.order);
        let weight_grad = (&grad * out).sum_dim_intlist(1, true, Kind::Float);
        let out = (grad * weight.index_select(0, &order.order)).to_kind(rows.kind());
        let (up_weight, down_weight) = (self.gate_up.empty_like(), self.down.empty_like());
        let inner_grad = inner.empty_like();
        for (expert, start, count) in order.experts() {
            let part = out.narrow(0, start, count);
            let _ = part.mm_out(&inner_grad.narrow(0, start, count), &self.down.get(expert));
            let _ = part.tr().mm_out(&down_weight.get(expert), &inner.narrow(0, start, count));
        }
        let halves = |x: &Tensor| (x.narrow(1, 0, inner_size), x.narrow(1, inner_size, inner_size));
        let (gate, up) = halves(&gate_up);
        let both = gate_up.empty_like();
        let (gate_grad, up_grad) = halves(&both);
        let _ = gate.silu_backward_grad_input(&gate_grad, &(&inner_grad * up));
        let _ = inner_grad.mul_out(&up_grad, &gate.silu());
        let input = out.empty_like();
        for (expert, start, count) in order.experts() {
            let part = both.narrow(0, start, count);
            let _ = part.mm_out(&input.narrow(0, start, count), &self.gate_up.get(expert));
            let _ = part.tr().mm_out(&up_weight.get(expert), &rows.narrow(0, start, count));
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
        let skipped = input.size()[0] - order.routed;
        let mut rest = input.narrow(0, order.routed, skipped);
        match self.skip {
            Skip::Zero => drop(rest.zero_()),
            Skip::Identity => rest.copy_(&out.narrow(0, order.routed, skipped)),
        }
        let back = |x: Tensor| x.index_select(0, &order.inverse);
        Grads { input: back(input), weight: back(weight), params: params.map(product::wide) }
    }
}

fn sizes(gate_up: &Tensor) -> [i64; 3] {
    let size = gate_up.size();
    [size[0], size[1], size[2]]
}
