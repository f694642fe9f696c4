//! How a parameter is cut into shards.

use std::ops::Range;

/// How a parameter is cut into shards: along one dimension, which may have two sides (gate and up) that are cut alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    shape: Vec<i64>,
    dim: usize,
    /// Equal parts of that dimension; a shard has the same rows of each.
    sides: i64,
    /// How many units are assigned to shards: single rows, or heads.
    units: i64,
    /// Rows in a unit.
    unit: i64,
    /// The index, among the rows of all units, of the parameter's first row.
    first: i64,
}

impl Sharding {
    /// For a parameter of this shape whose dimension `dim` has `sides` times `units` equal parts.
    pub(super) fn new(shape: &[i64], dim: usize, sides: i64, units: i64) -> Sharding {
        let unit = shape[dim] / sides / units;
        Sharding { shape: shape.to_vec(), dim, sides, units, unit, first: 0 }
    }

    /// For a parameter that has only the rows from `first` on of `units` units of `unit` rows each.
    pub(super) fn of_some(shape: &[i64], units: i64, unit: i64, first: i64) -> Sharding {
        Sharding { shape: shape.to_vec(), dim: 0, sides: 1, units, unit, first }
    }

    /// The number of its shards, `shards` at most.
    pub(super) fn count(&self, shards: i64) -> i64 {
        shards.min(self.units)
    }

    /// Rows of a side.
    pub(super) fn size(&self) -> i64 {
        self.shape[self.dim] / self.sides
    }

    /// Numbers in a row.
    pub(super) fn inner(&self) -> i64 {
        self.shape[self.dim + 1..].iter().product()
    }

    /// The number of sides in all outer indices.
    fn outer(&self) -> i64 {
        self.shape[..self.dim].iter().product::<i64>() * self.sides
    }

    /// The rows of each side that belong to a shard.
    pub(super) fn rows(&self, shards: i64, shard: i64) -> Range<i64> {
        let units = share(self.units, self.count(shards), shard);
        let here = |row: i64| (row * self.unit - self.first).clamp(0, self.size());
        here(units.start)..here(units.end)
    }

    /// The number of elements in a shard.
    pub(super) fn length(&self, shards: i64, shard: i64) -> i64 {
        let Range { start, end } = self.rows(shards, shard);
        self.outer() * (end - start) * self.inner()
    }

    /// The shape of a shard.
    pub(super) fn shape_of(&self, shards: i64, shard: i64) -> Vec<i64> {
        let (mut shape, Range { start, end }) = (self.shape.clone(), self.rows(shards, shard));
        shape[self.dim] = self.sides * (end - start);
        shape
    }
}

/// Part `part` of `size` items in `parts` parts, as equal as possible.
pub(super) fn share(size: i64, parts: i64, part: i64) -> Range<i64> {
    size * part / parts..size * (part + 1) / parts
}
