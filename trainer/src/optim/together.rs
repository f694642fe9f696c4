//! Updates many tensors at once, with the bits of separate updates.

use kernels::Result;
use kernels::ops::{
    NewtonSchulz, NewtonSchulzIterate, Ops, Update, UpdateRule, newton_schulz_bytes,
};
use tch::Tensor;

use super::adamw::AdamWScalars;
use super::muon::{MuonScalars, QUINTIC};
use super::{OptimizerRule, OptimizerSettings, ParamScales, StepScalars, UpdateItem, UpdateKind};
use crate::timing::{StepPart, part};

/// Elements of matrices that are updated together on a device: limits the memory of their directions (256 MiB) and of
/// the Newton-Schulz iterations.
const ELEMENTS: usize = 1 << 26;

/// The rules of one step.
#[derive(Clone, Copy)]
pub(super) struct StepRules<'a> {
    pub(super) settings: &'a OptimizerSettings,
    pub(super) at: StepScalars,
}

/// Groups items in their order so that a group's matrices have a bounded size; a larger matrix is a group by itself.
pub(super) fn groups(items: Vec<UpdateItem>) -> Vec<Vec<UpdateItem>> {
    grouped(items, |item| match item.how {
        UpdateKind::Muon => item.weight.numel(),
        UpdateKind::AdamW { .. } => 0,
    })
}

/// Bytes of temporary memory of an update, from the rule and shape of each tensor: the directions of a group's
/// matrices, and what Newton-Schulz needs for them.
pub(crate) fn bytes<'a>(
    moved: impl Iterator<Item = (OptimizerRule, &'a [i64])>,
    form: NewtonSchulzIterate,
) -> u64 {
    let matrices = moved.flat_map(|(rule, shape)| match (rule, shape) {
        (OptimizerRule::Muon, &[rows, columns]) => vec![[rows, columns]],
        (OptimizerRule::MuonEach, &[count, rows, columns]) => vec![[rows, columns]; count as usize],
        _ => Vec::new(),
    });
    let elements = |[rows, columns]: &[i64; 2]| (rows * columns) as usize;
    let of_group = |group: &Vec<[i64; 2]>| {
        let directions: usize = group.iter().map(elements).sum();
        4 * directions as u64 + newton_schulz_bytes(group, NewtonSchulz { form, ..QUINTIC })
    };
    grouped(matrices.collect(), elements).iter().map(of_group).max().unwrap_or(0)
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

impl StepRules<'_> {
    fn muon(&self, by: ParamScales) -> MuonScalars {
        let OptimizerSettings { momentum, newton_schulz, .. } = *self.settings;
        MuonScalars::at(self.at.lr * by.lr, by.weight_decay, momentum).by_form(newton_schulz)
    }

    fn adamw(&self, by: ParamScales) -> AdamWScalars {
        let (StepScalars { step, lr, .. }, settings) = (self.at, self.settings);
        AdamWScalars::at(step, lr * by.lr, by.weight_decay, settings.betas, settings.eps)
    }

    /// Updates the items and returns the results of [`Ops::update`]: the host does not wait.
    pub(super) fn apply(&self, ops: &dyn Ops, mut items: Vec<UpdateItem>) -> Result<Tensor> {
        self.turn(ops, &mut items)?;
        let matrices = items.iter().all(|item| matches!(item.how, UpdateKind::Muon));
        let _watch = part(if matrices { StepPart::Muon } else { StepPart::AdamW });
        let mut moved = Vec::with_capacity(items.len());
        for UpdateItem { weight, rounded, first, gradient, how, scales, sums } in &mut items {
            let rule = match how {
                UpdateKind::AdamW { second } => {
                    let by = self.adamw(*scales).rounded(self.at.scale);
                    UpdateRule::AdamW { by, moments: [first, second] }
                }
                UpdateKind::Muon => {
                    let longest = weight.size().into_iter().max().unwrap_or(1);
                    let by = self.muon(*scales);
                    let (keep, rate) = (by.keep as f32, by.rate(longest) as f32);
                    UpdateRule::Muon { keep, rate, momentum: first }
                }
            };
            let rounded = rounded.as_mut().map(|(tensor, first)| (tensor, *first));
            let (number, salts) = (sums.first, sums.salts);
            moved.push(Update { weight, rounded, gradient, rule, number, salts });
        }
        ops.update(&mut moved)
    }

    /// Updates the momenta of the matrices, and replaces each one's gradient by its update direction.
    fn turn(&self, ops: &dyn Ops, items: &mut [UpdateItem]) -> Result<()> {
        let matrices = items.iter_mut().filter(|item| matches!(item.how, UpdateKind::Muon));
        let mut matrices: Vec<&mut UpdateItem> = matrices.collect();
        if matrices.is_empty() {
            return Ok(());
        }
        let _watch = part(StepPart::Muon);
        let MuonScalars { momentum, newton_schulz, .. } = self.muon(matrices[0].scales);
        let (by, scale) = (momentum as f32, self.at.scale as f32);
        let pairs = matrices.iter_mut().map(|item| (&mut item.first, &item.gradient));
        let directions = ops.all_nesterov(&mut pairs.collect::<Vec<_>>(), by, scale)?;
        let turned = ops.all_newton_schulz(&directions, newton_schulz)?;
        for (matrix, direction) in matrices.into_iter().zip(turned) {
            matrix.gradient = direction.f_contiguous()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::guard::SpikePolicy;
    use crate::optim::{self, ChecksumInputs, MatrixOptimizer, UpdateResults};
    use crate::workers::Workers;
    use curriculum::rate::Schedule;
    use kernels::checksum;
    use kernels::ops::CPU;
    use kernels::record::Record;

    /// Weights and moments, as they are.
    fn parts_of(item: &UpdateItem) -> Vec<Tensor> {
        let second = match &item.how {
            UpdateKind::Muon => None,
            UpdateKind::AdamW { second, .. } => Some(second),
        };
        let parts = [Some(&item.weight), Some(&item.first), second];
        parts.into_iter().flatten().map(Tensor::copy).collect()
    }

    /// Together or each by itself, in any groups: the same weights, moments, update norms and checksums.
    #[test]
    fn a_group_is_its_items() {
        let at = StepScalars { step: 3, lr: 0.01, scale: 0.7 };
        let schedule =
            Schedule { peak: 0.01, spec: Default::default(), origin: Default::default() };
        let (kind, betas, guard) = (MatrixOptimizer::Muon, (0.9, 0.95), SpikePolicy::default());
        let (eps, momentum, clip) = (1e-8, 0.95, 1.0);
        let settings = OptimizerSettings {
            kind,
            schedule,
            betas,
            eps,
            momentum,
            newton_schulz: NewtonSchulzIterate::Gram,
            clip,
            guard,
        };
        let items = || {
            let of = |shape: &[i64], seed: u64| crate::model::random(shape, seed);
            let sums = |first| ChecksumInputs { first, salts: [first + 1, first + 2, first + 3] };
            let flat = |count: i64, seed: u64, scales: ParamScales| {
                let [weight, first, gradient] = [0, 1, 2].map(|index| of(&[count], seed + index));
                let how = UpdateKind::AdamW { second: of(&[count], seed + 3).square() };
                // In the middle of the tensor that the model reads.
                let read = Tensor::zeros([count + 9], (tch::Kind::BFloat16, tch::Device::Cpu));
                let rounded = (scales.lr == 1.0).then_some((read, 5));
                let sums = sums(seed << 32);
                UpdateItem { weight, rounded, first, gradient, how, scales, sums }
            };
            let matrix = |shape: &[i64], seed: u64, scales: ParamScales| {
                let [weight, first, gradient] = [0, 1, 2].map(|index| of(shape, seed + index));
                let (how, sums) = (UpdateKind::Muon, sums(seed));
                UpdateItem { weight, rounded: None, first, gradient, how, scales, sums }
            };
            let [usual, other] =
                [(1.0, 0.1), (0.5, 0.0)].map(|(lr, weight_decay)| ParamScales { lr, weight_decay });
            vec![
                flat(70_000, 1, usual),
                matrix(&[9, 40], 5, usual),
                flat(3, 9, other),
                matrix(&[40, 9], 13, other),
            ]
        };
        let alias = |item: &UpdateItem| item.part(0, Tensor::shallow_clone);
        let aliases = |items: &[UpdateItem]| items.iter().map(alias).collect();
        let (alone, listed) = (items(), items());
        let by_itself =
            optim::run(&settings, aliases(&alone), at, Workers::new(2), |_| Ok(())).unwrap();
        let rules = StepRules { settings: &settings, at };
        let chunks = listed.iter().map(UpdateItem::chunks).collect();
        let mut together = UpdateResults { record: Record::default(), chunks };
        together.record.put(&rules.apply(CPU, aliases(&listed)).unwrap()).unwrap();
        let together = together.read().unwrap();
        assert_eq!(together, by_itself.read().unwrap());
        for ((item, alone), (_, sums)) in listed.iter().zip(&alone).zip(together) {
            let parts = parts_of(item);
            for ((part, salt), sum) in parts.iter().zip(item.sums.salts).zip(sums) {
                let wanted = checksum::slice(part, item.sums.first, salt).unwrap();
                assert_eq!(sum, wanted, "of what it became");
            }
            assert_eq!(parts, parts_of(alone));
            if let Some((read, first)) = &item.rounded {
                let length = parts[0].numel() as i64;
                let wanted = Tensor::zeros_like(read);
                wanted.narrow(0, *first, length).copy_(&parts[0]);
                assert_eq!(read, &wanted, "rounded, and nothing beside it");
            }
        }
        let sizes: Vec<usize> = super::groups(items()).iter().map(Vec::len).collect();
        assert_eq!(sizes, [4], "these are small");
    }
}
