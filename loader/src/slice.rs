//! Which part of a step belongs to a rank.

use std::ops::Range;

use contract::{Fault, Result};
use mixer::StepSpec;

/// Rank `rank` of `world`: its micro-batches of a step.
///
/// Of `count` micro-batches, rank `r` has those from `r * count / world` to `(r + 1) * count / world`, rounded down: a
/// contiguous run. So the ranks' parts, in rank order, make up the step; sizes differ by at most one micro-batch;
/// `world` does not have to divide `count`; and if it is larger, some ranks are idle. Round-robin
/// ([`RankSlice::in_turn`]), rank `r` has `r`, `r + world`, `r + 2 world`, ...: as many as in a run, the larger parts
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankSlice {
    rank: u32,
    world: u32,
    in_turn: bool,
}

impl RankSlice {
    /// The whole step.
    pub const WHOLE: RankSlice = RankSlice { rank: 0, world: 1, in_turn: false };

    /// The run of `rank`, numbered from 0, among `world`.
    pub fn new(rank: u32, world: u32) -> Result<Self> {
        if rank < world {
            return Ok(RankSlice { rank, world, in_turn: false });
        }
        Err(Fault::usage("the rank is not below the world's size")
            .found(format!("rank {rank} of {world}"))
            .wanted("ranks are counted from 0"))
    }

    /// The same rank with round-robin assignment.
    pub fn in_turn(self) -> Self {
        RankSlice { in_turn: true, ..self }
    }

    /// This rank's micro-batches of a step with `count`, in rounds. In each round, the parts of all ranks, in rank
    /// order, are a run that follows the previous round's. A run is one round; round-robin has a round per turn.
    pub fn rounds(self, count: u64) -> Vec<Range<u64>> {
        let (rank, world) = (u64::from(self.rank), u64::from(self.world));
        if !self.in_turn {
            let cut = |rank: u64| {
                let first = u128::from(count) * u128::from(rank) / u128::from(world);
                first as u64 // At most `count`, since the rank is at most the world.
            };
            return std::iter::once(cut(rank)..cut(rank + 1)).collect();
        }
        let turn = |turn: u64| {
            let first = count.min(turn * world + rank);
            first..count.min(first + 1)
        };
        (0..count.div_ceil(world)).map(turn).collect()
    }

    /// This rank's rows of a step.
    pub fn rows(self, step: &StepSpec) -> impl Iterator<Item = u64> + use<> {
        let size = step.micro_batch;
        self.rounds(step.batch / size)
            .into_iter()
            .flat_map(move |round| round.start * size..round.end * size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_tile_the_step(count in 0u64..1000, world in 1u32..100) {
            let mut next = 0;
            for rank in 0..world {
                let part = &RankSlice::new(rank, world).unwrap().rounds(count)[0];
                prop_assert_eq!(part.start, next);
                let size = part.end - part.start;
                prop_assert!(size >= count / u64::from(world));
                prop_assert!(size <= count.div_ceil(u64::from(world)));
                next = part.end;
            }
            prop_assert_eq!(next, count);
            prop_assert!(RankSlice::new(world, world).is_err());
        }

        #[test]
        fn turns_tile_the_step_in_rounds(count in 0u64..300, world in 1u32..20) {
            let slice = |rank| RankSlice::new(rank, world).unwrap().in_turn();
            let parts: Vec<_> = (0..world).map(|rank| slice(rank).rounds(count)).collect();
            let mut next = 0;
            for round in 0..parts[0].len() {
                for (rank, part) in (0u64..).zip(&parts) {
                    prop_assert_eq!(part.len(), parts[0].len());
                    prop_assert_eq!(part[round].start, next);
                    prop_assert!(part[round].clone().all(|index| index % u64::from(world) == rank));
                    next = part[round].end;
                }
            }
            prop_assert_eq!(next, count);
        }

        #[test]
        fn large_numbers_do_not_wrap(count: u64, rank in 0u32..u32::MAX) {
            let last = &RankSlice::new(u32::MAX - 1, u32::MAX).unwrap().rounds(count)[0];
            prop_assert_eq!(last.end, count);
            let part = &RankSlice::new(rank, u32::MAX).unwrap().rounds(count)[0];
            prop_assert!(part.start <= part.end && part.end <= count);
        }
    }
}
