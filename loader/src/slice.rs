//! Which part of a step is a rank's.

use std::ops::Range;

use contract::{Fault, Result};
use mixer::StepSpec;

/// Rank `rank` of `world`: a contiguous run of whole gradient leaves.
///
/// Of `leaves` leaves, rank `r` has those from `r * leaves / world` to `(r + 1) * leaves / world`, rounded down. So the
/// ranks' parts, joined in rank order, are the step, sizes differ by at most one leaf, the world need not divide
/// anything, and a world larger than the number of leaves leaves some ranks idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankSlice {
    rank: u32,
    world: u32,
}

impl RankSlice {
    /// The whole step.
    pub const WHOLE: RankSlice = RankSlice { rank: 0, world: 1 };

    /// The slice of `rank`, counted from 0, among `world`.
    pub fn new(rank: u32, world: u32) -> Result<Self> {
        if rank < world {
            return Ok(RankSlice { rank, world });
        }
        Err(Fault::usage("no such rank")
            .found(format!("rank {rank} of {world}"))
            .wanted("a rank below the world's size, counted from 0"))
    }

    /// The rank, from 0.
    pub fn rank(self) -> u32 {
        self.rank
    }

    /// The number of ranks.
    pub fn world(self) -> u32 {
        self.world
    }

    /// This rank's leaves of a step that has `leaves`.
    pub fn leaves(self, leaves: u64) -> Range<u64> {
        let cut = |rank: u32| {
            let leaf = u128::from(leaves) * u128::from(rank) / u128::from(self.world);
            leaf as u64 // At most `leaves`, since the rank is at most the world.
        };
        cut(self.rank)..cut(self.rank + 1)
    }

    /// This rank's rows of a step.
    pub fn rows(self, step: &StepSpec) -> Range<u64> {
        let leaves = self.leaves(step.batch / step.leaf);
        leaves.start * step.leaf..leaves.end * step.leaf
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_tile_the_step(leaves in 0u64..1000, world in 1u32..100) {
            let mut next = 0;
            for rank in 0..world {
                let part = RankSlice::new(rank, world).unwrap().leaves(leaves);
                prop_assert_eq!(part.start, next);
                let size = part.end - part.start;
                prop_assert!(size >= leaves / u64::from(world));
                prop_assert!(size <= leaves.div_ceil(u64::from(world)));
                next = part.end;
            }
            prop_assert_eq!(next, leaves);
            prop_assert!(RankSlice::new(world, world).is_err());
        }

        #[test]
        fn large_numbers_do_not_wrap(leaves: u64, rank in 0u32..u32::MAX) {
            let last = RankSlice::new(u32::MAX - 1, u32::MAX).unwrap().leaves(leaves);
            prop_assert_eq!(last.end, leaves);
            let part = RankSlice::new(rank, u32::MAX).unwrap().leaves(leaves);
            prop_assert!(part.start <= part.end && part.end <= leaves);
        }
    }
}
