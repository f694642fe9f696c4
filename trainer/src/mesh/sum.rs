//! The sum of a step's gradients, in the order of the tree: here, where one rank has all leaves, or gathered from many.

use contract::{Fault, Result};
use kernels::tree::Counter;
use tch::Tensor;

use super::Team;
use super::gather::Gather;
use crate::state::ownership::Ownership;
use crate::timing;

/// The gradients of one step, under way.
pub(crate) enum Sum<'a> {
    /// All leaves are this rank's, and so are all pieces: nothing travels, nothing is copied.
    Here(Counter<Vec<Tensor>>),
    /// Leaves and pieces are dealt among ranks.
    Gathered(Box<Gather<'a>>),
}

impl<'a> Sum<'a> {
    /// Begins a step of `leaves` leaves.
    pub(crate) fn begin(team: &'a Team<'a>, owners: &'a Ownership, leaves: u64) -> Result<Self> {
        Ok(match team.group.world() {
            1 => Sum::Here(Counter::new()),
            _ => Sum::Gathered(Box::new(Gather::begin(team, owners.pieces(), leaves)?)),
        })
    }

    /// Takes the gradient of this rank's next leaf.
    pub(crate) fn leaf(&mut self, gradient: Vec<Tensor>) -> Result<()> {
        match self {
            Sum::Here(tree) => {
                let _watch = timing::part(timing::Part::Tree);
                tree.push(gradient);
                Ok(())
            }
            Sum::Gathered(gather) => gather.leaf(gradient),
        }
    }

    /// The sum of this rank's pieces, in their order, once every rank has computed its leaves.
    pub(crate) fn finish(self, owners: &Ownership) -> Result<Vec<Tensor>> {
        match self {
            Sum::Here(tree) => {
                let sum = tree.finish().ok_or_else(|| Fault::bug("a step had no leaves"))?;
                // Pieces are aliases of what is contiguous.
                let sum: Vec<Tensor> = sum.iter().map(Tensor::contiguous).collect();
                Ok(owners.own().map(|piece| piece.of(&sum[piece.tensor])).collect())
            }
            Sum::Gathered(gather) => Ok(owners.unpack(owners.rank(), &gather.finish()?)),
        }
    }
}
