//! The gradients of a rank's micro-batches, added in a tree for each parameter.
//!
//! Workers compute several micro-batches at once; the second to reach a node of the tree adds both. Invariant: which
//! gradients are added, and in which order, depends on the numbers of the micro-batches alone.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use contract::{Fault, Result};
use kernels::addend::{self, Addend, Addends};
use kernels::tree::{Counter, Node, Pair, TreeNodes, blocks};
use tch::Tensor;

use crate::refusal::refused;
use crate::timing;

/// How many gradients on a device are added by one launch, which also computes their checksums: about as many as a
/// layer has.
pub(super) const TOGETHER: usize = 32;

/// The gradients of this rank's micro-batches of a step, added up parameter by parameter.
pub(crate) struct MicroBatchGradients {
    parameters: Vec<Mutex<TreeNodes<Addend>>>,
    /// The blocks of these micro-batches, in their order.
    blocks: Vec<(u32, u64)>,
}

impl MicroBatchGradients {
    /// For the runs `parts` of micro-batches, numbered within the step, of a model with `parameters` parameters.
    pub(crate) fn new(parts: &[Range<u64>], parameters: usize) -> MicroBatchGradients {
        let nodes = |_| Mutex::new(TreeNodes::new(parts));
        let blocks = parts.iter().flat_map(|part| blocks(part.start, part.end)).collect();
        MicroBatchGradients { parameters: (0..parameters).map(nodes).collect(), blocks }
    }

    /// Adds micro-batch `leaf`'s gradients of some parameters: gradients of two micro-batches or blocks are added level
    /// by level of the tree.
    pub(super) fn add(&self, leaf: u64, gradients: Vec<(usize, Addend)>) -> Result<()> {
        let _watch = timing::part(timing::StepPart::Tree);
        let leaf = |(parameter, value)| (parameter, Node { level: 0, first: leaf, value });
        let mut nodes: Vec<(usize, Node<Addend>)> = gradients.into_iter().map(leaf).collect();
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
            let sums = places.into_iter().zip(addend::add(pairs).map_err(refused)?);
            nodes.extend(sums.map(|((parameter, level, first), value)| {
                (parameter, Node { level, first, value })
            }));
        }
        Ok(())
    }

    /// A parameter's sum over the block of micro-batches that begins with `first`, once all of them have been computed.
    pub(crate) fn take(&self, parameter: usize, first: u64) -> Result<Addend> {
        let nodes = self.parameters.get(parameter).ok_or_else(missing)?;
        let mut nodes = nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.take(first).ok_or_else(missing)
    }

    /// The sum of all micro-batches of the step, by parameter, in f32.
    pub(crate) fn finish(self) -> Result<Vec<Tensor>> {
        let _watch = timing::part(timing::StepPart::Tree);
        let mut found = Vec::with_capacity(self.parameters.len());
        while found.len() < self.parameters.len() {
            let some = found.len()..self.parameters.len().min(found.len() + TOGETHER);
            let mut sum = Counter::new();
            for (level, first) in &self.blocks {
                let block = some.clone().map(|parameter| self.take(parameter, *first));
                let block = Addends(block.collect::<Result<_>>()?);
                sum.push_block(*level, block).map_err(refused)?;
            }
            let sum = sum.finish().map_err(refused)?.ok_or_else(missing)?;
            found.extend(addend::wide(sum.0).map_err(refused)?);
        }
        Ok(found)
    }
}

fn missing() -> Fault {
    Fault::bug("a parameter lacks the gradient of a micro-batch")
}
