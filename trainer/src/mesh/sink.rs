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

/// The sink of one micro-batch.
pub(crate) struct MicroBatchSink<'s, 'a> {
    /// Where gradients are added, and the micro-batch's number; `None` if only the checksum is needed.
    into: Option<(&'s GradientSum<'a>, u64)>,
    /// The checksum over the whole gradient: the sum of those of its tensors, in whatever order they come.
    checksum: checksum::RunningChecksum,
    /// Whether to compute the checksum before the gradient is added to others.
    at_once: bool,
    /// Gradients not yet passed on.
    waiting: Vec<(usize, Addend)>,
}

impl<'s, 'a> MicroBatchSink<'s, 'a> {
    /// The sink of a micro-batch whose gradients are added to `into`. With `at_once` its checksum is computed by a
    /// separate pass; otherwise, on a device, by the pass that adds its gradients to others, so it is known only with
    /// the sum.
    pub(crate) fn new(into: Option<(&'s GradientSum<'a>, u64)>, at_once: bool) -> Self {
        let at_once = at_once || into.is_none();
        MicroBatchSink { into, checksum: Default::default(), at_once, waiting: Vec::new() }
    }

    /// Passes on what remains; returns the checksum of all gradients.
    pub(crate) fn finish(mut self) -> Result<checksum::RunningChecksum> {
        self.pass()?;
        Ok(self.checksum)
    }

    /// Passes on the waiting gradients.
    fn pass(&mut self) -> Result<()> {
        let mut waiting = std::mem::take(&mut self.waiting);
        if self.at_once {
            let (parameters, gradients): (Vec<_>, Vec<_>) = waiting.into_iter().unzip();
            let gradients = addend::checked(gradients).map_err(refused)?;
            waiting = parameters.into_iter().zip(gradients).collect();
        }
        self.into.map_or(Ok(()), |(sum, micro_batch)| sum.add(micro_batch, waiting))
    }
}

impl GradientSink for MicroBatchSink<'_, '_> {
    fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()> {
        // What nothing is added to need not wait for others.
        let alone = gradient.device() == Device::Cpu || self.into.is_none();
        let counted = {
            let _watch = timing::part(timing::StepPart::MicroBatchSums);
            let salt = salt(Part::MicroBatchGradient, id.index());
            gradient.counted(&self.checksum, salt).map_err(refused)?
        };
        self.waiting.push((id.index(), counted));
        if alone || self.waiting.len() >= TOGETHER { self.pass() } else { Ok(()) }
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
                        let (mut sink, how) = (
                            MicroBatchSink::new(Some((sum, micro_batch)), false),
                            MicroBatchOptions::default(),
                        );
                        model::micro_batch(config, &params, &balance, staged, 120, how, &mut sink)
                            .unwrap();
                        assert_eq!(
                            sink.finish().unwrap().read().unwrap(),
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
