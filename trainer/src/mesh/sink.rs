//! Where gradients go: each into its parameter's tree, the moment a layer hands it over.
//!
//! So no micro-batch has its whole gradient anywhere: on its way through the layers it leaves behind what no partner has
//! come for yet. Workers compute several micro-batches at once, and whichever comes second to a node adds both.
//!
//! Invariant: which gradients are added to which, in which order, is decided by the numbers of the micro-batches alone.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use contract::{Fault, Result};
use kernels::checksum;
use kernels::tree::{self, Node, Nodes, Pair};
use tch::{Device, Tensor};

use super::sum::Sum;
use crate::model::{ParamId, Sink};
use crate::refusal::refused;
use crate::state::{Part, salt};
use crate::timing;

/// The gradients of this rank's micro-batches of a step, added up parameter by parameter.
pub(crate) struct Gradients {
    parameters: Vec<Mutex<Nodes<Tensor>>>,
}

/// The checksum over the whole gradient of a micro-batch: the sum of those of its tensors, in whatever order they come.
#[derive(Default)]
pub(crate) struct Checksum(checksum::Total);

/// Gradients of a device whose checksums are made by one launch, and added by one: they wait for each other that long, which is
/// about as many as a layer has.
const TOGETHER: usize = 32;

/// The sink of one micro-batch.
pub(crate) struct LeafSink<'s, 'a> {
    sum: &'s Sum<'a>,
    leaf: u64,
    checksum: Checksum,
    /// What has not been handed on.
    waiting: Vec<(ParamId, Tensor)>,
}

impl Gradients {
    /// For the runs `parts` of micro-batches, as the step counts them, of a model with so many parameters.
    pub(crate) fn new(parts: &[Range<u64>], parameters: usize) -> Gradients {
        let nodes = |_| Mutex::new(Nodes::new(parts));
        Gradients { parameters: (0..parameters).map(nodes).collect() }
    }

    /// Adds what micro-batch `leaf` has for some parameters: what two micro-batches or blocks of them have of each is added
    /// together, level by level of the tree.
    pub(super) fn add(&self, leaf: u64, gradients: Vec<(usize, Tensor)>) -> Result<()> {
        let _watch = timing::part(timing::Part::Tree);
        let leaf = |(parameter, value)| (parameter, Node { level: 0, first: leaf, value });
        let mut nodes: Vec<(usize, Node<Tensor>)> = gradients.into_iter().map(leaf).collect();
        while !nodes.is_empty() {
            let (mut places, mut pairs) = (Vec::new(), Vec::new());
            for (parameter, node) in nodes.drain(..) {
                let tree = self.parameters.get(parameter);
                let tree = tree.ok_or_else(|| Fault::bug("a gradient of an unknown parameter"))?;
                let met = tree.lock().unwrap_or_else(PoisonError::into_inner).meet(node);
                if let Some(Pair { level, first, left, right }) = met {
                    places.push((parameter, level, first));
                    pairs.push((left, right));
                }
            }
            tree::add_all(&mut pairs).map_err(refused)?;
            let sums = places.into_iter().zip(pairs);
            nodes.extend(sums.map(|((parameter, level, first), (value, _))| {
                (parameter, Node { level, first, value })
            }));
        }
        Ok(())
    }

    /// A parameter's sum over the block of micro-batches that begins with `first`, once all of them have been computed.
    pub(crate) fn take(&self, parameter: usize, first: u64) -> Result<Tensor> {
        let nodes = self.parameters.get(parameter).ok_or_else(missing)?;
        let mut nodes = nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.take(first).ok_or_else(missing)
    }

    /// The sum of all micro-batches of the step, by parameter.
    pub(crate) fn finish(self) -> Result<Vec<Tensor>> {
        let _watch = timing::part(timing::Part::Tree);
        let finish = |nodes: Mutex<Nodes<Tensor>>| {
            let nodes = nodes.into_inner().unwrap_or_else(PoisonError::into_inner);
            nodes.finish().map_err(refused)?.ok_or_else(missing)
        };
        self.parameters.into_iter().map(finish).collect()
    }
}

fn missing() -> Fault {
    Fault::bug("a parameter lacks the gradient of a micro-batch")
}

impl<'s, 'a> LeafSink<'s, 'a> {
    /// That of micro-batch `leaf`, which hands its gradients to `sum`.
    pub(super) fn new(sum: &'s Sum<'a>, leaf: u64) -> Self {
        LeafSink { sum, leaf, checksum: Checksum::default(), waiting: Vec::new() }
    }

    /// Over all that was handed over, which is then handed on.
    pub(crate) fn checksum(mut self) -> Result<checksum::Total> {
        self.pass()?;
        Ok(self.checksum.0)
    }

    /// Hands on what waits: an addition may change a gradient in place, so its checksum comes first.
    fn pass(&mut self) -> Result<()> {
        self.checksum.take(&self.waiting)?;
        let waiting = self.waiting.drain(..).map(|(id, gradient)| (id.index(), gradient));
        self.sum.add(self.leaf, waiting.collect())
    }
}

impl Checksum {
    fn take(&mut self, gradients: &[(ParamId, Tensor)]) -> Result<()> {
        let _watch = timing::part(timing::Part::LeafSums);
        let mut slices = Vec::with_capacity(gradients.len());
        for (id, gradient) in gradients {
            slices.push((gradient, 0, salt(Part::LeafGradient, id.index())));
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

impl Sink for LeafSink<'_, '_> {
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        let (mut gradient, mut together) = (gradient, 1);
        if gradient.device() != Device::Cpu {
            (gradient, together) = (gradient.contiguous(), TOGETHER);
        }
        self.waiting.push((id, gradient));
        if self.waiting.len() < together { Ok(()) } else { self.pass() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Degrees, Schedule, Team};
    use crate::model::{self, LeafInput, LeafOptions, ZayaConfig};
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
        let input = |leaf: u64| LeafInput {
            tokens: &tokens[leaf as usize * 24..][..24],
            labels: &tokens[96 - leaf as usize * 24..][..24],
            positions: &positions,
            mask: &[1; 24],
            boundaries: &boundaries,
            rows: 1,
            seq_len: 24,
        };
        let (mut whole, mut wanted) = (Counter::new(), Vec::new());
        for leaf in 0..5 {
            let grads = model::leaf(&config, &params, &balance, &input(leaf), 120).unwrap().grads;
            let sums = grads.iter().enumerate();
            let sums = sums.map(|(at, one)| checksum::tensor(one, salt(Part::LeafGradient, at)));
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
            for leaves in [vec![4, 1, 2], vec![3, 0]] {
                let (config, input, sum, wanted) = (&config, &input, &sum, &wanted);
                scope.spawn(move || {
                    let (params, balance) = (params.aliases(), balance.aliases());
                    for leaf in leaves {
                        let stager = Stager::new(Device::Cpu).unwrap();
                        let staged = input(leaf).stage(config, &stager).unwrap();
                        let (mut sink, how) = (sum.sink(leaf), LeafOptions::default());
                        model::micro_batch(config, &params, &balance, staged, 120, how, &mut sink)
                            .unwrap();
                        assert_eq!(sink.checksum().unwrap().read().unwrap(), wanted[leaf as usize]);
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
