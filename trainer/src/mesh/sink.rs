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
use kernels::tree::Nodes;
use tch::Tensor;

use crate::model::{ParamId, Sink};
use crate::state::{Part, salt};
use crate::timing;

/// The gradients of this rank's micro-batches of a step, added up parameter by parameter.
pub(crate) struct Gradients {
    parameters: Vec<Mutex<Nodes<Tensor>>>,
}

/// The checksum over the whole gradient of a micro-batch: the sum of those of its tensors, in whatever order they come.
#[derive(Default)]
pub(crate) struct Checksum(pub(crate) u64);

/// The sink of one micro-batch.
pub(crate) struct LeafSink<'a> {
    gradients: &'a Gradients,
    leaf: u64,
    checksum: Checksum,
}

impl Gradients {
    /// For the runs `parts` of micro-batches, as the step counts them, of a model with so many parameters.
    pub(crate) fn new(parts: &[Range<u64>], parameters: usize) -> Gradients {
        let nodes = |_| Mutex::new(Nodes::new(parts));
        Gradients { parameters: (0..parameters).map(nodes).collect() }
    }

    /// Where micro-batch `leaf` hands its gradients to.
    pub(crate) fn sink(&self, leaf: u64) -> LeafSink<'_> {
        LeafSink { gradients: self, leaf, checksum: Checksum::default() }
    }

    /// Adds what micro-batch `leaf` has for a parameter.
    pub(super) fn add(&self, parameter: usize, leaf: u64, gradient: Tensor) -> Result<()> {
        let _watch = timing::part(timing::Part::Tree);
        let nodes = self.parameters.get(parameter);
        let nodes = nodes.ok_or_else(|| Fault::bug("a gradient of an unknown parameter"))?;
        nodes.lock().unwrap_or_else(PoisonError::into_inner).push(leaf, gradient);
        Ok(())
    }

    /// How many parameters there are.
    pub(crate) fn parameters(&self) -> usize {
        self.parameters.len()
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
            nodes.finish().ok_or_else(missing)
        };
        self.parameters.into_iter().map(finish).collect()
    }
}

fn missing() -> Fault {
    Fault::bug("a parameter lacks the gradient of a micro-batch")
}

impl LeafSink<'_> {
    /// Over what was handed over so far.
    pub(crate) fn checksum(&self) -> u64 {
        self.checksum.0
    }
}

impl Checksum {
    fn take(&mut self, id: ParamId, gradient: &Tensor) {
        let _watch = timing::part(timing::Part::LeafSums);
        let own = checksum::tensor(gradient, salt(Part::LeafGradient, id.index()));
        self.0 = self.0.wrapping_add(own);
    }
}

impl Sink for Checksum {
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        self.take(id, &gradient);
        Ok(())
    }
}

impl Sink for LeafSink<'_> {
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        self.checksum.take(id, &gradient);
        self.gradients.add(id.index(), self.leaf, gradient)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{self, LeafInput, LeafOptions, ZayaConfig};
    use kernels::device::Stager;
    use kernels::share::Frozen;
    use kernels::tree::Counter;
    use tch::Device;

    /// Micro-batches that workers compute in any order come to the sum of whole gradients in order, and to their checksums.
    #[test]
    fn what_leaves_early_is_what_would_have_come_late() {
        let preset = ZayaConfig::preset("zaya1-nano").unwrap();
        let config = ZayaConfig { vocab_size: 97, num_hidden_layers: 2, ..preset };
        let (params, balance) = (model::init(&config, 1), model::init_balance(&config));
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
            whole.push(grads);
        }
        let gradients = Gradients::new(std::slice::from_ref(&(0..5)), params.len());
        let (params, balance) = (Frozen::new(&params), Frozen::new(&balance));
        std::thread::scope(|scope| {
            for leaves in [vec![4, 1, 2], vec![3, 0]] {
                let (config, input, gradients, wanted) = (&config, &input, &gradients, &wanted);
                scope.spawn(move || {
                    let (params, balance) = (params.aliases(), balance.aliases());
                    for leaf in leaves {
                        let stager = Stager::new(Device::Cpu).unwrap();
                        let staged = input(leaf).stage(config, &stager).unwrap();
                        let (mut sink, how) = (gradients.sink(leaf), LeafOptions::default());
                        model::micro_batch(config, &params, &balance, staged, 120, how, &mut sink)
                            .unwrap();
                        assert_eq!(sink.checksum(), wanted[leaf as usize]);
                    }
                });
            }
        });
        assert_eq!(gradients.finish().unwrap(), whole.finish().unwrap());
    }
}
