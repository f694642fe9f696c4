//! The axes of a mesh of ranks, and the ranks that lie on a line along each.
//!
//! `dp` ranks compute different micro-batches; `cp` ranks share the sequences of one, `tsp` ranks its weights too. Ranks are
//! numbered along `tsp` first, then `cp`, then `dp`, so that those who exchange most are neighbours, on one machine where they
//! can be. The state is sharded over all ranks of the mesh, whatever the axes (`state::ownership`).
//!
//! Degrees are upper limits of a process: each phase uses the largest that its cut allows ([`Mesh::of`]), and the other ranks
//! compute other micro-batches.
//!
//! Each axis has an order of exchanges of its own: `kernels::group::Axis` says why those of a layer and those of gradients never
//! wait for each other. A rank that lies on a line of several computes one micro-batch at a time, so that the exchanges of its
//! line have one order.

use contract::{Fault, Result};

/// The degrees of the axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Ranks, or groups of them, that compute different micro-batches.
    pub dp: u32,
    /// Ranks that share the sequences of a micro-batch.
    pub cp: u32,
    /// Ranks that share its weights besides.
    pub tsp: u32,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Data.
    Dp,
    /// Context.
    Cp,
    /// Tensor and sequence, folded.
    Tsp,
}

impl Mesh {
    /// A mesh of `world` ranks of which `cp` times `tsp` share each micro-batch.
    pub fn new(world: u32, cp: u32, tsp: u32) -> Result<Mesh> {
        let together = u64::from(cp) * u64::from(tsp);
        if together == 0 || world == 0 || !u64::from(world).is_multiple_of(together) {
            return Err(Fault::usage("the axes of the mesh do not make up its ranks")
                .found(format!("{cp} x {tsp} of {world}"))
                .wanted("cp times tsp divides the number of ranks"));
        }
        Ok(Mesh { dp: world / (cp * tsp), cp, tsp })
    }

    /// A mesh of `world` ranks of which up to `limit` share the `chunks` of each micro-batch: the most that divide both the
    /// chunks and the ranks. Where twice as many divide the chunks, all have equally many pairs of a query and a key.
    pub fn of(world: u32, limit: u32, chunks: u64) -> Mesh {
        let fits = |cp: &u32| world.is_multiple_of(*cp) && chunks.is_multiple_of(u64::from(*cp));
        let cp = (1..=limit.min(world)).rev().find(fits).unwrap_or(1);
        Mesh { dp: world / cp, cp, tsp: 1 }
    }

    /// Every rank computes micro-batches of its own.
    pub const fn data(world: u32) -> Mesh {
        Mesh { dp: world, cp: 1, tsp: 1 }
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
        }
    }

    /// Ranks from one place to the next along `axis`.
    fn stride(self, axis: Axis) -> u32 {
        match axis {
            Axis::Dp => self.cp * self.tsp,
            Axis::Cp => self.tsp,
            Axis::Tsp => 1,
        }
    }

    /// The place of `rank` along `axis`, from 0.
    pub fn place(self, axis: Axis, rank: u32) -> u32 {
        rank / self.stride(axis) % self.degree(axis)
    }

    /// The ranks of the line along `axis` on which `rank` lies, in their order there.
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
            let mesh = Mesh::new(dp * cp * tsp, cp, tsp).unwrap();
            prop_assert_eq!(mesh, Mesh { dp, cp, tsp });
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
        fn the_largest_degree_that_divides_is_taken(world in 1u32..40, limit in 1u32..9, chunks in 1u64..40) {
            let Mesh { dp, cp, tsp } = Mesh::of(world, limit, chunks);
            prop_assert_eq!((dp * cp, tsp), (world, 1));
            prop_assert!(cp <= limit && chunks % u64::from(cp) == 0);
            let more = cp + 1..=limit;
            prop_assert!(more.into_iter().all(|cp| world % cp > 0 || chunks % u64::from(cp) > 0));
        }

        #[test]
        fn ranks_that_do_not_divide_are_refused(world in 0u32..40, cp in 0u32..9, tsp in 0u32..9) {
            let divides = cp * tsp > 0 && world > 0 && world % (cp * tsp) == 0;
            prop_assert_eq!(Mesh::new(world, cp, tsp).is_ok(), divides);
        }
    }
}
