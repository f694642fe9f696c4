//! The update on a device: many tensors by each launch, with the bits that each has by itself.

use kernels::Result;
use kernels::checksum;
use kernels::ops::{Moved, NewtonSchulz, NewtonSchulzForm, Ops, newton_schulz_bytes};
use tch::Tensor;

use super::adamw::AdamW;
use super::muon::{Muon, QUINTIC};
use super::norm::CHUNK;
use super::{CHUNKS, How, Item, Rule};
use crate::timing::{Part, part};

/// Elements that are moved together: their old weights are kept beside them, 256 MiB. So many have a thousand chunks to sum up,
/// which is what a device needs to have work for each of its units.
const ELEMENTS: usize = 1 << 26;

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
    grouped(items, |item| item.weight.numel())
}

/// Bytes that moving tensors holds beside them and their gradients, by the rule and the shape of each: old weights of a group,
/// directions of its matrices, and what these are turned with.
pub(crate) fn bytes<'a>(
    moved: impl Iterator<Item = (Rule, &'a [i64])>,
    form: NewtonSchulzForm,
) -> u64 {
    let mut items = Vec::new();
    for (rule, shape) in moved {
        let matrix = |rows: i64, columns: i64| (rows * columns, Some([rows, columns]));
        match (rule, shape) {
            (Rule::Muon, &[rows, columns]) => items.push(matrix(rows, columns)),
            (Rule::MuonEach, &[count, rows, columns]) => {
                items.extend((0..count).map(|_| matrix(rows, columns)));
            }
            _ => {
                let (length, most) = (shape.iter().product::<i64>(), CHUNK * CHUNKS);
                let runs = (0..length).step_by(most as usize);
                items.extend(runs.map(|start| (most.min(length - start), None)));
            }
        }
    }
    let by = NewtonSchulz { form, ..QUINTIC };
    let of_group = |group: &Vec<(i64, Option<[i64; 2]>)>| {
        let shapes: Vec<[i64; 2]> = group.iter().filter_map(|(_, shape)| *shape).collect();
        let matrices: i64 = shapes.iter().map(|[rows, columns]| rows * columns).sum();
        let elements = group.iter().map(|(elements, _)| elements).sum::<i64>() + matrices;
        4 * elements as u64 + newton_schulz_bytes(&shapes, by)
    };
    let groups = grouped(items, |(elements, _)| *elements as usize);
    groups.iter().map(of_group).max().unwrap_or(0)
}

fn grouped<T>(items: Vec<T>, elements: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let (mut groups, mut room) = (Vec::<Vec<T>>::new(), 0);
    for item in items {
        let elements = elements(&item);
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
    /// Moves them, and says what they came to: squares of new weights minus old ones of all chunks, f64, and checksums, i64, of
    /// each its own. The host waits for neither.
    pub(super) fn apply(&self, ops: &dyn Ops, mut items: Vec<Item>) -> Result<[Tensor; 2]> {
        let weights: Vec<Tensor> = items.iter().map(|item| item.weight.shallow_clone()).collect();
        let watch = part(Part::Moved);
        let old = ops.all_copies(&weights)?;
        drop(watch);
        self.elementwise(ops, &mut items)?;
        self.matrices(ops, &mut items)?;
        let _watch = part(Part::Moved);
        let pairs: Vec<_> = old.into_iter().zip(weights).map(Into::into).collect();
        let squares = ops.chunk_differences(&pairs, CHUNK)?;
        let _watch = part(Part::StateSums);
        let parts: Vec<_> = items.iter().map(|item| (item.sums.first, item.parts())).collect();
        let mut slices = Vec::with_capacity(3 * parts.len());
        for (first, parts) in &parts {
            slices.extend(parts.iter().map(|(part, salt)| (part, *first, *salt)));
        }
        Ok([squares, checksum::slices(&slices)?])
    }

    fn elementwise(&self, ops: &dyn Ops, items: &mut [Item]) -> Result<()> {
        let _watch = part(Part::AdamW);
        let (mut plain, mut decayed) = (Vec::new(), Vec::new());
        for Item { weight, first, gradient, how, .. } in items {
            if let How::AdamW { second, decay } = how {
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
        for Item { weight, first, gradient, how, .. } in items {
            if let How::Muon = how {
                weights.push(weight);
                momenta.push((first, &*gradient));
            }
        }
        let by = self.muon.momentum as f32;
        let directions = ops.all_nesterov(&mut momenta, by, self.scale as f32)?;
        let turned = ops.all_newton_schulz(&directions, self.muon.newton_schulz)?;
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
    use crate::optim::{self, At, Outcome, Settings, Sums};
    use crate::workers::Workers;
    use curriculum::rate::Schedule;
    use kernels::ops::CPU;
    use kernels::record::Record;

    fn alias(item: &Item) -> Item {
        let [weight, first, gradient] =
            [&item.weight, &item.first, &item.gradient].map(Tensor::shallow_clone);
        let how = match &item.how {
            How::Muon => How::Muon,
            How::AdamW { second, decay } => {
                How::AdamW { second: second.shallow_clone(), decay: *decay }
            }
        };
        Item { weight, first, gradient, how, sums: item.sums }
    }

    /// Together or each by itself, in any groups: the same weights, moments, distances and checksums.
    #[test]
    fn a_group_is_its_items() {
        let at = At { step: 3, lr: 0.01, scale: 0.7 };
        let schedule = Schedule { peak: 0.01, warmup_steps: 0, decay_steps: 0, last: 0.0 };
        let (kind, betas, guard) = (optim::Kind::Muon, (0.9, 0.95), Guard::default());
        let (eps, momentum, weight_decay, clip) = (1e-8, 0.95, 0.1, 1.0);
        let newton_schulz = NewtonSchulzForm::Gram;
        let settings = Settings {
            kind,
            schedule,
            betas,
            eps,
            momentum,
            newton_schulz,
            weight_decay,
            clip,
            guard,
        };
        let items = || {
            let of = |shape: &[i64], seed: u64| crate::model::random(shape, seed);
            let sums = |first| Sums { first, salts: [first + 1, first + 2, first + 3] };
            let flat = |count: i64, seed: u64, decay| {
                let [weight, first, gradient] = [0, 1, 2].map(|index| of(&[count], seed + index));
                let how = How::AdamW { second: of(&[count], seed + 3).square(), decay };
                Item { weight, first, gradient, how, sums: sums(seed << 32) }
            };
            let matrix = |shape: &[i64], seed: u64| {
                let [weight, first, gradient] = [0, 1, 2].map(|index| of(shape, seed + index));
                Item { weight, first, gradient, how: How::Muon, sums: sums(seed) }
            };
            vec![
                flat(70_000, 1, true),
                matrix(&[9, 40], 5),
                flat(3, 9, false),
                matrix(&[40, 9], 13),
            ]
        };
        let numbers = |items: &[Item]| -> Vec<Tensor> {
            items.iter().flat_map(Item::parts).map(|(part, _)| part.copy()).collect()
        };
        let aliases = |items: &[Item]| items.iter().map(alias).collect::<Vec<_>>();
        let (alone, listed) = (items(), items());
        let by_itself = optim::run(&settings, aliases(&alone), at, Workers::new(2)).unwrap();
        let muon = Muon::at(at.lr, settings.weight_decay, settings.momentum);
        let adamw = |decay| AdamW::at(at.step, at.lr, decay, settings.betas, settings.eps);
        let (plain, decayed) = (adamw(0.0), adamw(settings.weight_decay));
        let rules = Rules { muon, plain, decayed, scale: at.scale };
        let groups = vec![listed.iter().map(|item| [item.chunks(), item.parts().len()]).collect()];
        let mut together = Outcome { record: Record::default(), groups };
        let words = rules.apply(CPU, aliases(&listed)).unwrap();
        words.iter().for_each(|words| together.record.put(words).unwrap());
        let together = together.read().unwrap();
        assert_eq!(together, by_itself.read().unwrap());
        for (item, (_, sums)) in listed.iter().zip(together) {
            let parts = item.parts().into_iter();
            let wanted =
                parts.map(|(part, salt)| checksum::slice(&part, item.sums.first, salt).unwrap());
            assert!(wanted.eq(sums.into_iter().filter(|sum| *sum != 0)), "those of what it became");
        }
        assert_eq!(numbers(&listed), numbers(&alone));
        let sizes: Vec<usize> = super::groups(items()).iter().map(Vec::len).collect();
        assert_eq!(sizes, [4], "these are small");
    }
}
