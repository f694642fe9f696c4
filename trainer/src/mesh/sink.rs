//! Where gradients go: each is added to its parameter's tree as soon as a layer has computed it.
//!
//! So no micro-batch ever holds its whole gradient: only the gradients that wait for a partner in the tree are kept
//! (`gradients`).

use contract::Result;
use kernels::addend::{self, Addend};
use kernels::checksum;
use tch::Device;

use super::gradients::TOGETHER;
use super::sum::GradientSum;
use crate::model::{GradientSink, ParamId};
use crate::refusal::refused;
use crate::state::{Part, salt};
use crate::timing;

/// The checksum over the whole gradient of a micro-batch: the sum of those of its tensors, in whatever order they come.
#[derive(Default)]
pub(crate) struct GradientChecksum(checksum::RunningChecksum);

/// The sink of one micro-batch.
pub(crate) struct MicroBatchSink<'s, 'a> {
    sum: &'s GradientSum<'a>,
    micro_batch: u64,
    checksum: GradientChecksum,
    /// Whether to compute the checksum before the gradient is added to others.
    at_once: bool,
    /// Gradients not yet passed on.
    waiting: Vec<(usize, Addend)>,
}

impl<'a> GradientSum<'a> {
    /// The sink of micro-batch `micro_batch`. With `at_once` its checksum is computed by a separate pass; otherwise, on
    /// a device, by the pass that adds its gradients to others, so it is known only with the sum.
    pub(crate) fn sink(&self, micro_batch: u64, at_once: bool) -> MicroBatchSink<'_, 'a> {
        let (checksum, waiting) = (GradientChecksum::default(), Vec::new());
        MicroBatchSink { sum: self, micro_batch, checksum, at_once, waiting }
    }
}

impl MicroBatchSink<'_, '_> {
    /// Passes on what remains; returns the checksum of all gradients.
    pub(crate) fn checksum(mut self) -> Result<checksum::RunningChecksum> {
        self.pass()?;
        Ok(self.checksum.0)
    }

    /// Passes on the waiting gradients.
    fn pass(&mut self) -> Result<()> {
        let mut waiting = std::mem::take(&mut self.waiting);
        if self.at_once {
            let (parameters, gradients): (Vec<_>, Vec<_>) = waiting.into_iter().unzip();
            let gradients = addend::checked(gradients).map_err(refused)?;
            waiting = parameters.into_iter().zip(gradients).collect();
        }
        self.sum.add(self.micro_batch, waiting)
    }
}

impl GradientChecksum {
    /// Counts the gradient in the checksum; in main memory that is computed at once.
    fn take(&self, id: ParamId, gradient: Addend) -> Result<Addend> {
        let _watch = timing::part(timing::StepPart::MicroBatchSums);
        gradient.counted(&self.0, salt(Part::MicroBatchGradient, id.index())).map_err(refused)
    }

    /// The checksum of all gradients that were passed.
    pub(crate) fn total(self) -> checksum::RunningChecksum {
        self.0
    }
}

impl GradientSink for GradientChecksum {
    fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()> {
        addend::checked(vec![self.take(id, gradient)?]).map(drop).map_err(refused)
    }
}

impl GradientSink for MicroBatchSink<'_, '_> {
    fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()> {
        let together = if gradient.device() == Device::Cpu { 1 } else { TOGETHER };
        self.waiting.push((id.index(), self.checksum.take(id, gradient)?));
        if self.waiting.len() < together { Ok(()) } else { self.pass() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Degrees, GradReduce, ProcessMesh};
    use crate::model::{self, MicroBatchInput, MicroBatchOptions, ZayaConfig};
    use crate::optim::{self, OptimizerRule};
    use crate::state::ownership::{self, Ownership};
    use kernels::device::Stager;
    use kernels::group::Group;
    use kernels::share::SharedTensors;
    use kernels::tree::Counter;

    /// Workers that compute micro-batches in any order get the sums and checksums of whole gradients in order.
    #[test]
    fn what_leaves_early_is_what_would_have_come_late() {
        let preset = ZayaConfig::preset("zaya1-nano").unwrap();
        let config = ZayaConfig { vocab_size: 97, num_hidden_layers: 2, ..preset };
        let (params, balance) = (model::init(&config, 1).unwrap(), model::init_balance(&config));
        let tokens: Vec<i32> = (0..5 * 24).map(|place| place * 37 % 97).collect();
        let (positions, boundaries): (Vec<i32>, _) = ((0..24).collect(), [vec![0]]);
        let input = |micro_batch: u64| MicroBatchInput {
            tokens: &tokens[micro_batch as usize * 24..][..24],
            labels: &tokens[96 - micro_batch as usize * 24..][..24],
            positions: &positions,
            mask: &[1; 24],
            boundaries: &boundaries,
            weights: &[],
            rows: 1,
            seq_len: 24,
        };
        let (mut whole, mut wanted) = (Counter::new(), Vec::new());
        for micro_batch in 0..5 {
            let grads =
                model::forward_backward(&config, &params, &balance, &input(micro_batch), 120)
                    .unwrap()
                    .grads;
            let sums = grads.iter().enumerate();
            let sums = sums.map(|(at, one)| {
                checksum::tensor(one, salt(Part::MicroBatchGradient, at)).unwrap()
            });
            wanted.push(sums.fold(0, u64::wrapping_add));
            whole.push(grads).unwrap();
        }
        let group = Group::alone();
        let team = ProcessMesh::new(&group, Degrees::ALONE, GradReduce::default(), false).unwrap();
        let lines = team.lines(model::Cut::WHOLE).unwrap();
        let specs = model::parameters(&config);
        let rules: Vec<_> =
            specs.iter().map(|one| OptimizerRule::of(optim::MatrixOptimizer::AdamW, one)).collect();
        let owners = Ownership::cut(ownership::pieces(&specs, &rules, 1), 0);
        let sum = GradientSum::begin(&lines, owners.pieces(), params.len(), &[], 5).unwrap();
        let (params, balance) = (SharedTensors::new(&params), SharedTensors::new(&balance));
        std::thread::scope(|scope| {
            for micro_batches in [vec![4, 1, 2], vec![3, 0]] {
                let (config, input, sum, wanted) = (&config, &input, &sum, &wanted);
                let (params, balance) = (&params, &balance);
                scope.spawn(move || {
                    let (params, balance) = (params.aliases(), balance.aliases());
                    for micro_batch in micro_batches {
                        let stager = Stager::new(Device::Cpu).unwrap();
                        let staged = input(micro_batch).stage(config, &stager).unwrap();
                        let (mut sink, how) =
                            (sum.sink(micro_batch, false), MicroBatchOptions::default());
                        model::micro_batch(config, &params, &balance, staged, 120, how, &mut sink)
                            .unwrap();
                        assert_eq!(
                            sink.checksum().unwrap().read().unwrap(),
                            wanted[micro_batch as usize]
                        );
                    }
                });
            }
        });
        let whole = whole.finish().unwrap().unwrap();
        let found = sum.finish(&owners).unwrap();
        for (piece, found) in owners.own().zip(found) {
            assert_eq!(found, piece.of(&whole[piece.tensor].contiguous()));
        }
    }
}
