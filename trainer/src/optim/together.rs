//! The update on a device: many tensors by each launch, with the bits that each has by itself.

use kernels::Result;
use kernels::ops::{Moved, Ops};
use tch::Tensor;

use super::adamw::AdamW;
use super::muon::Muon;
use super::{Item, norm};
use crate::timing::{Part, part};

/// Elements that are moved together: their old weights are kept beside them, 64 MiB.
const ELEMENTS: usize = 1 << 24;

/// The rules of one step.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) muon: Muon,
    /// Without weight decay.
    pub(super) plain: AdamW,
    /// With it.
    pub(super) decayed: AdamW,
    /// What gradients are multiplied with first.
    pub(super) scale: f64,
}

/// Items in their order, in groups of a bounded size; a larger item is a group by itself.
pub(super) fn groups(items: Vec<Item>) -> Vec<Vec<Item>> {
    let (mut groups, mut room) = (Vec::<Vec<Item>>::new(), 0);
    for item in items {
        let elements = item.weight().numel();
        match groups.last_mut().filter(|_| elements <= room) {
            Some(group) => group.push(item),
            None => {
                room = ELEMENTS.max(elements);
                groups.push(vec![item]);
            }
        }
        room -= elements;
    }
    groups
}

impl Rules {
    /// Moves them, and returns for each the sum of squares of new weights minus old ones.
    pub(super) fn apply(&self, ops: &dyn Ops, mut items: Vec<Item>) -> Result<Vec<f64>> {
        let weights: Vec<Tensor> = items.iter().map(|item| item.weight().shallow_clone()).collect();
        let watch = part(Part::Moved);
        let old = ops.all_copies(&weights)?;
        drop(watch);
        self.elementwise(ops, &mut items)?;
        self.matrices(ops, &mut items)?;
        let _watch = part(Part::Moved);
        let (mut pairs, mut ends) = (Vec::new(), Vec::new());
        for (old, new) in old.iter().zip(&weights) {
            pairs.extend(norm::cut(old).into_iter().zip(norm::cut(new)).map(<[Tensor; 2]>::from));
            ends.push(pairs.len());
        }
        let squares = ops.all_differences(&pairs)?;
        let starts = [0].into_iter().chain(ends.iter().copied());
        Ok(starts.zip(&ends).map(|(start, end)| norm::sum(&squares[start..*end])).collect())
    }

    fn elementwise(&self, ops: &dyn Ops, items: &mut [Item]) -> Result<()> {
        let _watch = part(Part::AdamW);
        let (mut plain, mut decayed) = (Vec::new(), Vec::new());
        for item in items {
            if let Item::Flat { weight, first, second, gradient, decay } = item {
                let list = if *decay { &mut decayed } else { &mut plain };
                list.push(Moved { weight, moments: [first, second], gradient });
            }
        }
        ops.all_adamw(self.plain.rounded(self.scale), &mut plain)?;
        ops.all_adamw(self.decayed.rounded(self.scale), &mut decayed)
    }

    fn matrices(&self, ops: &dyn Ops, items: &mut [Item]) -> Result<()> {
        let _watch = part(Part::Muon);
        let (mut weights, mut momenta) = (Vec::new(), Vec::new());
        for item in items {
            if let Item::Matrix { weight, momentum, gradient } = item {
                weights.push(weight);
                momenta.push((momentum, &*gradient));
            }
        }
        let by = self.muon.momentum as f32;
        let directions = ops.all_nesterov(&mut momenta, by, self.scale as f32)?;
        let turned = ops.all_newton_schulz(&directions, super::muon::QUINTIC)?;
        let turned = turned.iter().map(Tensor::f_contiguous);
        let turned = turned.collect::<std::result::Result<Vec<_>, _>>()?;
        let mut moves = Vec::with_capacity(turned.len());
        for (weight, direction) in weights.into_iter().zip(&turned) {
            let longest = weight.size().into_iter().max().unwrap_or(1);
            moves.push((weight, direction, self.muon.rate(longest) as f32));
        }
        ops.all_descend(&mut moves, self.muon.keep as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::guard::Guard;
    use crate::optim::schedule::Schedule;
    use crate::optim::{self, At, Settings};
    use crate::workers::Workers;
    use kernels::ops::CPU;

    /// Together or each by itself, in any groups: the same weights, moments and distances.
    #[test]
    fn a_group_is_its_items() {
        let at = At { step: 3, lr: 0.01, scale: 0.7 };
        let schedule = Schedule { peak: 0.01, warmup_steps: 0, decay_steps: 0, last: 0.0 };
        let (kind, betas, guard) = (optim::Kind::Muon, (0.9, 0.95), Guard::default());
        let (eps, momentum, weight_decay, clip) = (1e-8, 0.95, 0.1, 1.0);
        let settings = Settings { kind, schedule, betas, eps, momentum, weight_decay, clip, guard };
        let items = || {
            let of = |shape: &[i64], seed: u64| crate::model::random(shape, seed);
            let flat = |count: i64, seed: u64, decay| {
                let [weight, first, gradient] = [0, 1, 2].map(|index| of(&[count], seed + index));
                Item::Flat {
                    weight,
                    first,
                    second: of(&[count], seed + 3).square(),
                    gradient,
                    decay,
                }
            };
            let matrix = |shape: &[i64], seed: u64| {
                let [weight, momentum, gradient] = [0, 1, 2].map(|index| of(shape, seed + index));
                Item::Matrix { weight, momentum, gradient }
            };
            vec![
                flat(70_000, 1, true),
                matrix(&[9, 40], 5),
                flat(3, 9, false),
                matrix(&[40, 9], 13),
            ]
        };
        let numbers = |items: &[Item]| -> Vec<Tensor> {
            let of = |item: &Item| match item {
                Item::Matrix { weight, momentum, .. } => vec![weight.copy(), momentum.copy()],
                Item::Flat { weight, first, second, .. } => {
                    [weight, first, second].map(Tensor::copy).into()
                }
            };
            items.iter().flat_map(of).collect()
        };
        let alias = |items: &[Item]| -> Vec<Item> {
            let of = |item: &Item| match item {
                Item::Matrix { weight, momentum, gradient } => {
                    let [weight, momentum, gradient] =
                        [weight, momentum, gradient].map(Tensor::shallow_clone);
                    Item::Matrix { weight, momentum, gradient }
                }
                Item::Flat { weight, first, second, gradient, decay } => {
                    let [weight, first, second, gradient] =
                        [weight, first, second, gradient].map(Tensor::shallow_clone);
                    Item::Flat { weight, first, second, gradient, decay: *decay }
                }
            };
            items.iter().map(of).collect()
        };
        let (alone, listed) = (items(), items());
        let moved = optim::run(&settings, alias(&alone), at, Workers::new(2)).unwrap();
        let muon = Muon::at(at.lr, settings.weight_decay, settings.momentum);
        let adamw = |decay| AdamW::at(at.step, at.lr, decay, settings.betas, settings.eps);
        let (plain, decayed) = (adamw(0.0), adamw(settings.weight_decay));
        let rules = Rules { muon, plain, decayed, scale: at.scale };
        assert_eq!(rules.apply(CPU, alias(&listed)).unwrap(), moved);
        assert_eq!(numbers(&listed), numbers(&alone));
        let sizes: Vec<usize> = groups(items()).iter().map(Vec::len).collect();
        assert_eq!(sizes, [4], "these are small");
    }
}
