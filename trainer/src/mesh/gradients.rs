//! The gradients of a rank's micro-batches, each parameter's in its tree.
//!
//! Workers compute several micro-batches at once, and whichever comes second to a node adds both. Invariant: which gradients
//! are added to which, in which order, is decided by the numbers of the micro-batches alone.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use contract::{Fault, Result};
use kernels::tree::{self, Node, Nodes, Pair};
use tch::Tensor;

use crate::refusal::refused;
use crate::timing;

/// The gradients of this rank's micro-batches of a step, added up parameter by parameter.
pub(crate) struct Gradients {
    parameters: Vec<Mutex<Nodes<Tensor>>>,
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
