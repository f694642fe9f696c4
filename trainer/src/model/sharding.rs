//! How a parameter is cut into shards.

use std::ops::Range;

/// How a parameter is cut into shards: along one dimension, which may have two sides, each cut alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    shape: Vec<i64>,
    dim: usize,
    /// Equal parts of that dimension of which a shard has the same rows.
    sides: i64,
    /// What is dealt to shards: single rows, or heads.
    units: i64,
    /// Rows in each.
    unit: i64,
    /// The first of all rows of the units that the parameter has.
    first: i64,
}

impl Sharding {
    /// Of a parameter of this shape whose dimension `dim` has `sides` times `units` equal parts.
    pub(super) fn new(shape: &[i64], dim: usize, sides: i64, units: i64) -> Sharding {
        let unit = shape[dim] / sides / units;
        Sharding { shape: shape.to_vec(), dim, sides, units, unit, first: 0 }
    }

    /// Of one that has only those rows of `units` of `unit` rows each that begin with `first`.
    pub(super) fn of_some(shape: &[i64], units: i64, unit: i64, first: i64) -> Sharding {
        Sharding { shape: shape.to_vec(), dim: 0, sides: 1, units, unit, first }
    }

    /// Into how many it is cut, of so many at most.
    pub(super) fn count(&self, shards: i64) -> i64 {
        shards.min(self.units)
    }

    /// Rows of a side.
    pub(super) fn size(&self) -> i64 {
        self.shape[self.dim] / self.sides
    }

    /// Numbers of a row.
    pub(super) fn inner(&self) -> i64 {
        self.shape[self.dim + 1..].iter().product()
    }

    /// Sides in all.
    fn outer(&self) -> i64 {
        self.shape[..self.dim].iter().product::<i64>() * self.sides
    }

    /// The rows of each side that a shard has.
    pub(super) fn rows(&self, shards: i64, shard: i64) -> Range<i64> {
        let units = share(self.units, self.count(shards), shard);
        let here = |row: i64| (row * self.unit - self.first).clamp(0, self.size());
        here(units.start)..here(units.end)
    }

    /// Its numbers.
    pub(super) fn length(&self, shards: i64, shard: i64) -> i64 {
        let Range { start, end } = self.rows(shards, shard);
        self.outer() * (end - start) * self.inner()
    }

    /// Its shape.
    pub(super) fn shape_of(&self, shards: i64, shard: i64) -> Vec<i64> {
        let (mut shape, Range { start, end }) = (self.shape.clone(), self.rows(shards, shard));
        shape[self.dim] = self.sides * (end - start);
        shape
    }
}

/// The part number `part` of `parts` of `size` things, as equal as they can be.
pub(super) fn share(size: i64, parts: i64, part: i64) -> Range<i64> {
    size * part / parts..size * (part + 1) / parts
}
