//! The axes of a mesh of ranks, and the ranks on each line along them.
//!
//! `dp` ranks compute different micro-batches; `cp` ranks share the sequences of one micro-batch; `tsp` ranks share its
//! sequences and its weights. Ranks are numbered along `tsp` first, then `cp`, then `dp`, so that the ranks that
//! exchange most are neighbours, on one machine where possible. The state is sharded over all ranks, whatever the axes
//! (`state::ownership`).
//!
//! Degrees are upper limits of a process ([`Degrees`]): each phase uses the largest that its cut allows ([`Mesh::of`]),
//! and the other ranks compute other micro-batches.
//!
//! Chunks of a micro-batch are assigned over `cp` and `tsp` as one line ([`Axis::Sharing`]). Along `tsp` the weights
//! are also sharded.
//!
//! Each axis orders its exchanges by itself: `kernels::group::AxisRanks` says why the exchanges of a layer and those of
//! gradients never wait for each other. A rank on a line of several computes one micro-batch at a time, so that the
//! exchanges of its line have one order.

use serde::{Deserialize, Serialize};

use crate::model::Cut;

/// How many ranks may share a micro-batch: upper limits, whatever the phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Degrees {
    /// Ranks, or groups of them, that share the sequences of a micro-batch.
    pub cp: u32,
    /// Ranks that share the sequences of a micro-batch and shard its weights.
    pub tsp: u32,
}

impl Degrees {
    /// Every rank computes micro-batches of its own.
    pub const ALONE: Degrees = Degrees { cp: 1, tsp: 1 };
}

impl Default for Degrees {
    fn default() -> Self {
        Degrees::ALONE
    }
}

/// The degrees of the axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Ranks, or groups of them, that compute different micro-batches.
    pub dp: u32,
    /// Ranks that share the sequences of a micro-batch.
    pub cp: u32,
    /// Ranks that also share its weights.
    pub tsp: u32,
}

/// One axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Data.
    Dp,
    /// Context.
    Cp,
    /// Tensor and sequence, folded.
    Tsp,
    /// Context and folded as one axis: all ranks that share a micro-batch.
    Sharing,
}

impl Mesh {
    /// The mesh of `world` ranks for micro-batches cut by `cut`, within `limits`. `tsp` is the largest degree that
    /// divides the shards, the chunks and the ranks; `cp` is the largest that divides the chunks and ranks that remain.
    /// Where twice as many ranks divide the chunks, all ranks have the same number of pairs of a query and a key.
    pub fn of(world: u32, limits: Degrees, cut: Cut) -> Mesh {
        let fits = |together: u32| {
            world.is_multiple_of(together) && cut.chunks.is_multiple_of(u64::from(together))
        };
        let folds = |tsp: &u32| fits(*tsp) && cut.shards.is_multiple_of(u64::from(*tsp));
        let tsp = (1..=limits.tsp.min(world)).rev().find(folds).unwrap_or(1);
        let cp = (1..=limits.cp.min(world / tsp)).rev().find(|cp| fits(cp * tsp)).unwrap_or(1);
        Mesh { dp: world / (cp * tsp), cp, tsp }
    }

    /// Ranks that share a micro-batch.
    pub fn together(self) -> u32 {
        self.cp * self.tsp
    }

    /// All ranks.
    pub fn world(self) -> u32 {
        self.dp * self.cp * self.tsp
    }

    fn degree(self, axis: Axis) -> u32 {
        match axis {
            Axis::Dp => self.dp,
            Axis::Cp => self.cp,
            Axis::Tsp => self.tsp,
            Axis::Sharing => self.together(),
        }
    }

    /// The distance in ranks between neighbours along `axis`.
    fn stride(self, axis: Axis) -> u32 {
        match axis {
            Axis::Dp => self.cp * self.tsp,
            Axis::Cp => self.tsp,
            Axis::Tsp | Axis::Sharing => 1,
        }
    }

    /// The position of `rank` along `axis`, from 0.
    pub fn place(self, axis: Axis, rank: u32) -> u32 {
        rank / self.stride(axis) % self.degree(axis)
    }

    /// The ranks of `rank`'s line along `axis`, in order.
    pub fn line(self, axis: Axis, rank: u32) -> Vec<u32> {
        let first = rank - self.place(axis, rank) * self.stride(axis);
        (0..self.degree(axis)).map(|place| first + place * self.stride(axis)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lines_cover_the_mesh_and_cross_in_one_rank(dp in 1u32..6, cp in 1u32..5, tsp in 1u32..5) {
            let mesh = Mesh { dp, cp, tsp };
            for rank in 0..mesh.world() {
                let lines = [Axis::Dp, Axis::Cp, Axis::Tsp].map(|axis| mesh.line(axis, rank));
                prop_assert_eq!(lines.each_ref().map(Vec::len), [dp, cp, tsp].map(|d| d as usize));
                for (axis, line) in [Axis::Dp, Axis::Cp, Axis::Tsp].into_iter().zip(&lines) {
                    prop_assert_eq!(line[mesh.place(axis, rank) as usize], rank);
                    // All ranks of a line see the same one.
                    prop_assert!(line.iter().all(|other| mesh.line(axis, *other) == *line));
                }
                let shared = |other: &u32| lines.iter().filter(|line| line.contains(other)).count();
                prop_assert!((0..mesh.world()).all(|other| shared(&other) < 2 || other == rank));
            }
        }

        #[test]
        fn the_largest_degrees_that_divide_are_taken(
            world in 1u32..40, (most, folded) in (1u32..9, 1u32..9), (chunks, shards) in (1u64..40, 1u64..9),
        ) {
            let mesh = Mesh::of(world, Degrees { cp: most, tsp: folded }, Cut { chunks, shards });
            let Mesh { dp, cp, tsp } = mesh;
            prop_assert_eq!(dp * cp * tsp, world);
            prop_assert!(cp <= most && tsp <= folded && shards % u64::from(tsp) == 0);
            let shares = |together: u32| world % together == 0 && chunks % u64::from(together) == 0;
            prop_assert!(shares(mesh.together()));
            let (more, wider) = (cp + 1..=most, tsp + 1..=folded);
            prop_assert!(more.into_iter().all(|cp| !shares(cp * tsp)));
            prop_assert!(wider.into_iter().all(|tsp| !shares(tsp) || shards % u64::from(tsp) > 0));
        }

        #[test]
        fn those_who_share_a_micro_batch_are_neighbours(dp in 1u32..5, cp in 1u32..5, tsp in 1u32..5) {
            let mesh = Mesh { dp, cp, tsp };
            for rank in 0..mesh.world() {
                let line = mesh.line(Axis::Sharing, rank);
                let first = mesh.place(Axis::Dp, rank) * mesh.together();
                prop_assert_eq!(&line, &(first..first + mesh.together()).collect::<Vec<_>>());
                let places = [Axis::Cp, Axis::Tsp].map(|axis| mesh.place(axis, rank));
                prop_assert_eq!(mesh.place(Axis::Sharing, rank), places[0] * tsp + places[1]);
            }
        }
    }
}
