//! Weights that ranks hold for each other: folded tensor and sequence parallelism (TSP: V. Shyam, arXiv 2604.26294), in
//! which each rank stores a part of the weights and a part of the sequence.
//!
//! A rank stores its shards of a parameter in one flat buffer, each aligned as a separate tensor would be. Before a
//! layer uses a shard, the rank that holds it sends it to the others, in the order of shards and one ahead of use. All
//! arithmetic is that of one process with the same shards.
//!
//! ```text
//! rank        0          1            K = 4 shards, degree 2
//! holds       s0 s1      s2 s3
//! a layer     s0 from 0, s1 from 0, s2 from 1, s3 from 1: in the forward pass, and again in the backward pass
//! ```

use std::ops::Range;
use std::sync::Arc;

use kernels::Result;
use tch::{Device, Kind, Tensor};

use super::line::AxisComm;
use super::param::ParamSpec;
use super::sharding::Sharding;

/// Shards begin at multiples of this many numbers, so that each is aligned like a separate allocation in every dtype.
const ALIGN: i64 = 64;

/// Which weight shards a rank holds for the others of a line; by default all weights whole.
#[derive(Clone, Debug, Default)]
pub struct WeightShards {
    pub(super) degree: i64,
    pub(super) place: i64,
    pub(super) shards: i64,
    /// By parameter; empty where the weights are whole.
    cuts: Arc<[Option<Sharding>]>,
}

impl PartialEq for WeightShards {
    fn eq(&self, other: &WeightShards) -> bool {
        // The cuts follow from the model, and a run has only one.
        let WeightShards { degree, place, shards, cuts: _ } = self;
        (*degree, *place, *shards) == (other.degree, other.place, other.shards)
    }
}

/// A shard that this rank holds.
pub(super) struct HeldShard {
    pub(super) shard: i64,
    /// Its offset in the buffer.
    pub(super) first: i64,
}

/// A strided block of numbers that a run of a parameter and the rank's shards of the parameter share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The number of its rows, equally spaced in the run and in the shards.
    rows: i64,
    /// Numbers of each row that belong to the block.
    length: i64,
    /// In the run: the offset of the first row, the length of a row, and the block's offset in it.
    run: [i64; 3],
    /// The same in the shards.
    held: [i64; 3],
}

impl Overlap {
    /// How many numbers it has.
    pub fn count(&self) -> i64 {
        self.rows * self.length
    }

    /// The block in the run, `[rows, length]`, as an alias.
    pub fn of_run(&self, flat: &Tensor) -> Result<Tensor> {
        self.of(flat, self.run)
    }

    /// The block in the shards, likewise.
    pub fn of_held(&self, flat: &Tensor) -> Result<Tensor> {
        self.of(flat, self.held)
    }

    fn of(&self, flat: &Tensor, [first, row, at]: [i64; 3]) -> Result<Tensor> {
        let rows = flat.f_narrow(0, first, self.rows * row)?.f_view([self.rows, row])?;
        Ok(rows.f_narrow(1, at, self.length)?)
    }
}

impl WeightShards {
    /// For rank `place` of `degree`, with these parameters cut into `shards` shards.
    pub fn new(degree: u32, place: u32, parameters: &[ParamSpec], shards: u64) -> WeightShards {
        if degree == 1 {
            return WeightShards::default();
        }
        let cuts = parameters.iter().map(|one| one.sharding.clone()).collect();
        WeightShards { degree: degree.into(), place: place.into(), shards: shards as i64, cuts }
    }

    /// What another rank of the line holds.
    pub fn at(&self, place: u32) -> WeightShards {
        WeightShards { place: place.into(), ..self.clone() }
    }

    /// The number of ranks on the line; 1 where weights are whole.
    pub fn degree(&self) -> u32 {
        self.degree.max(1) as u32
    }

    /// Whether a parameter is sharded.
    pub fn cuts(&self, parameter: usize) -> bool {
        self.cut(parameter).is_some()
    }

    pub(super) fn cut(&self, parameter: usize) -> Option<&Sharding> {
        self.cuts.get(parameter)?.as_ref()
    }

    /// The rank that holds a shard.
    pub(super) fn holder(&self, cut: &Sharding, shard: i64) -> i64 {
        shard * self.degree / cut.count(self.shards)
    }

    pub(super) fn held(&self, cut: &Sharding) -> Vec<HeldShard> {
        let (mut found, mut end) = (Vec::new(), 0);
        for shard in 0..cut.count(self.shards) {
            if self.holder(cut, shard) == self.place {
                found.push(HeldShard { shard, first: end });
                end += up(cut.length(self.shards, shard), ALIGN);
            }
        }
        found
    }

    /// The length of this rank's buffer of shards of a parameter; `None` where it holds the whole parameter.
    pub fn length(&self, parameter: usize) -> Option<i64> {
        let cut = self.cut(parameter)?;
        let last = self.held(cut).pop();
        Some(last.map_or(0, |held| held.first + cut.length(self.shards, held.shard)))
    }

    /// Allocates the buffer for this rank's part of a parameter.
    pub fn room(
        &self,
        spec: &ParamSpec,
        parameter: usize,
        kind: Kind,
        device: Device,
    ) -> Result<Tensor> {
        Ok(match self.length(parameter) {
            None => Tensor::f_empty(spec.shape.as_slice(), (kind, device))?,
            // The padding between shards is never read, but it is copied.
            Some(length) => Tensor::f_zeros([length], (kind, device))?,
        })
    }

    /// The blocks that this rank holds of the run `run` of a sharded parameter, in the same order on all ranks.
    pub fn common(&self, parameter: usize, run: Range<i64>) -> Vec<Overlap> {
        let Some(cut) = self.cut(parameter) else { return Vec::new() };
        let row = cut.size() * cut.inner();
        let mut found = Vec::new();
        for HeldShard { shard, first } in self.held(cut) {
            let Range { start, end } = cut.rows(self.shards, shard);
            let (start, end) = (start * cut.inner(), end * cut.inner());
            let own = end - start;
            // The run splits into a partial row, whole rows, and another partial row.
            let whole = up(run.start, row)..run.end / row * row;
            let parts = match whole.start < whole.end {
                true => [run.start..whole.start, whole.clone(), whole.end..run.end].to_vec(),
                false => split(&run, row),
            };
            for part in parts.into_iter().filter(|part| part.start < part.end && own > 0) {
                let (of, rows) = (part.start / row, up(part.end - part.start, row) / row);
                if part == whole {
                    let held = [first + of * own, own, 0];
                    let run = [part.start - run.start, row, start];
                    found.push(Overlap { rows, length: own, run, held });
                    continue;
                }
                let (from, to) = (part.start.max(of * row + start), part.end.min(of * row + end));
                if from < to {
                    let length = to - from;
                    let held = [first + of * own + from - of * row - start, length, 0];
                    found.push(Overlap {
                        rows: 1,
                        length,
                        run: [from - run.start, length, 0],
                        held,
                    });
                }
            }
        }
        found
    }
}

/// The next multiple of `step`.
fn up(number: i64, step: i64) -> i64 {
    (number + step - 1) / step * step
}

/// Splits a run into the parts that lie in one row each.
fn split(run: &Range<i64>, row: i64) -> Vec<Range<i64>> {
    let (mut parts, mut first) = (Vec::new(), run.start);
    while first < run.end {
        let end = run.end.min((first / row + 1) * row);
        parts.push(first..end);
        first = end;
    }
    parts
}

/// A process among those that shard the weights.
#[derive(Clone, Copy)]
pub struct ShardedWeights<'a> {
    /// Which shards it holds.
    pub fold: &'a WeightShards,
    /// The other processes.
    pub line: &'a dyn AxisComm,
}
