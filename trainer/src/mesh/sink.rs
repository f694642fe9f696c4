//! Where gradients go: each into its parameter's tree, the moment a layer hands it over.
//!
//! So no micro-batch has its whole gradient anywhere: on its way through the layers it leaves behind what no partner has
//! come for yet (`gradients`).

use contract::Result;
use kernels::checksum;
use tch::{Device, Tensor};

use super::sum::Sum;
use crate::model::{ParamId, Sink};
use crate::refusal::refused;
use crate::state::{Part, salt};
use crate::timing;

/// The checksum over the whole gradient of a micro-batch: the sum of those of its tensors, in whatever order they come.
#[derive(Default)]
pub(crate) struct Checksum(checksum::Total);

/// Gradients of a device whose checksums are made by one launch, and added by one: they wait for each other that long, which is
/// about as many as a layer has.
const TOGETHER: usize = 32;

/// The sink of one micro-batch.
pub(crate) struct MicroBatchSink<'s, 'a> {
    sum: &'s Sum<'a>,
    micro_batch: u64,
    checksum: Checksum,
    /// What has not been handed on.
    waiting: Vec<(ParamId, Tensor)>,
}

impl<'a> Sum<'a> {
    /// Where micro-batch `micro_batch` hands its gradients to.
    pub(crate) fn sink(&self, micro_batch: u64) -> MicroBatchSink<'_, 'a> {
        MicroBatchSink {
            sum: self,
            micro_batch,
            checksum: Checksum::default(),
            waiting: Vec::new(),
        }
    }
}

impl MicroBatchSink<'_, '_> {
    /// Over all that was handed over, which is then handed on.
    pub(crate) fn checksum(mut self) -> Result<checksum::Total> {
        self.pass()?;
        Ok(self.checksum.0)
    }

    /// Hands on what waits: an addition may change a gradient in place, so its checksum comes first.
    fn pass(&mut self) -> Result<()> {
        self.checksum.take(&self.waiting)?;
        let waiting = self.waiting.drain(..).map(|(id, gradient)| (id.index(), gradient));
        self.sum.add(self.micro_batch, waiting.collect())
    }
}

impl Checksum {
    fn take(&mut self, gradients: &[(ParamId, Tensor)]) -> Result<()> {
        let _watch = timing::part(timing::Part::MicroBatchSums);
        let mut slices = Vec::with_capacity(gradients.len());
        for (id, gradient) in gradients {
            slices.push((gradient, 0, salt(Part::MicroBatchGradient, id.index())));
        }
        self.0.add(&slices).map_err(refused)
    }

    /// Over all that was handed over.
    pub(crate) fn total(self) -> checksum::Total {
        self.0
    }
}

impl Sink for Checksum {
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        self.take(&[(id, gradient)])
    }
}

impl Sink for MicroBatchSink<'_, '_> {
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        let (mut gradient, mut together) = (gradient, 1);
        if gradient.device() != Device::Cpu {
            (gradient, together) = (gradient.f_contiguous().map_err(refused)?, TOGETHER);
        }
        self.waiting.push((id, gradient));
        if self.waiting.len() < together { Ok(()) } else { self.pass() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Degrees, Schedule, Team};
    use crate::model::{self, MicroBatchInput, MicroBatchOptions, ZayaConfig};
    use crate::optim::{self, Rule};
    use crate::state::ownership::{self, Ownership};
    use kernels::device::Stager;
    use kernels::group::Group;
    use kernels::share::Frozen;
    use kernels::tree::Counter;

    /// Micro-batches that workers compute in any order come to the sum of whole gradients in order, and to their checksums.
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
        let team = Team::new(&group, Degrees::ALONE, Schedule::default(), false).unwrap();
        let lines = team.lines(model::Cut::WHOLE).unwrap();
        let specs = model::parameters(&config);
        let rules: Vec<_> = specs.iter().map(|one| Rule::of(optim::Kind::AdamW, one)).collect();
        let owners = Ownership::cut(ownership::pieces(&specs, &rules, 1), 0);
        let sum = Sum::begin(&lines, owners.pieces(), params.len(), &[], 5).unwrap();
        let (params, balance) = (Frozen::new(&params), Frozen::new(&balance));
        std::thread::scope(|scope| {
            for micro_batches in [vec![4, 1, 2], vec![3, 0]] {
                let (config, input, sum, wanted) = (&config, &input, &sum, &wanted);
                let (params, balance) = (&params, &balance);
                scope.spawn(move || {
                    let (params, balance) = (params.aliases(), balance.aliases());
                    for micro_batch in micro_batches {
                        let stager = Stager::new(Device::Cpu).unwrap();
                        let staged = input(micro_batch).stage(config, &stager).unwrap();
                        let (mut sink, how) = (sum.sink(micro_batch), MicroBatchOptions::default());
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
