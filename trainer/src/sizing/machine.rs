//! What this machine does: products of matrices, attention, and passes over memory.
//!
//! Each is measured as training uses it, through the table of operations and with every worker at work, and beside it by
//! libtorch's own call in the same minute. A time is the median of the calls that fit into the seconds asked for: others may use
//! the machine.

use std::time::Instant;

use contract::{Fault, Result};
use kernels::ops::{Attention, AttentionGrads, Span};
use kernels::{checksum, runtime};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::shapes::Shape;
use crate::refusal::refused;
use crate::workers::Workers;

/// Where and how it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Bench {
    /// Where tensors lie.
    pub device: Device,
    /// How many threads do the same at once.
    pub workers: Workers,
    /// About how long a row takes.
    pub seconds: f64,
}

/// Whose call it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// The table of operations, as training calls it.
    Ours,
    /// libtorch's own.
    Libtorch,
}

impl By {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            By::Ours => "ours",
            By::Libtorch => "libtorch",
        }
    }
}

/// An operation on memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// `a = b`.
    Copy,
    /// `a = s b`.
    Scale,
    /// `a = b + c`.
    Add,
    /// `a = b + s c`.
    Triad,
    /// The checksum of the ledger, over one tensor.
    Checksum,
    /// An addition of the tree: `a = a + b`.
    Tree,
}

/// All of them.
pub const PASSES: [Pass; 6] =
    [Pass::Copy, Pass::Scale, Pass::Add, Pass::Triad, Pass::Checksum, Pass::Tree];

impl Pass {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Copy => "copy",
            Pass::Scale => "scale",
            Pass::Add => "add",
            Pass::Triad => "triad",
            Pass::Checksum => "checksum",
            Pass::Tree => "tree addition",
        }
    }

    /// Tensors that it reads and writes, each counted once.
    pub fn tensors(self) -> u64 {
        match self {
            Pass::Checksum => 1,
            Pass::Copy | Pass::Scale => 2,
            Pass::Add | Pass::Triad | Pass::Tree => 3,
        }
    }
}

impl Bench {
    /// Seconds of one `work` on each worker, all at once: the median over the calls, of the slowest worker. `prepare` makes what
    /// a worker needs, and is not timed.
    fn time<T>(
        self,
        prepare: impl Fn() -> kernels::Result<T> + Sync,
        work: impl Fn(&mut T) -> kernels::Result<()> + Sync,
    ) -> Result<f64> {
        let one = |_: usize| -> Result<f64> {
            runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
            let mut own = prepare().map_err(refused)?;
            let timed = |own: &mut T, calls: u32| -> Result<f64> {
                let begin = Instant::now();
                for _ in 0..calls {
                    work(own).map_err(refused)?;
                }
                self.arrive();
                Ok(begin.elapsed().as_secs_f64() / f64::from(calls))
            };
            timed(&mut own, 1)?;
            let once = timed(&mut own, 1)?.max(1e-8);
            // So many calls to a look at the clock that looking costs nothing.
            let calls = (self.seconds / 12.0 / once).clamp(1.0, 1e5) as u32;
            let looks = (self.seconds / (once * f64::from(calls))).clamp(3.0, 12.0) as usize;
            let mut times =
                (0..looks).map(|_| timed(&mut own, calls)).collect::<Result<Vec<f64>>>()?;
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        };
        let all = self.workers.map((0..self.workers.count()).collect(), one)?;
        Ok(all.into_iter().fold(0.0, f64::max))
    }

    /// Waits for the device.
    fn arrive(self) {
        if let Device::Cuda(index) = self.device {
            tch::Cuda::synchronize(index as i64);
        }
    }

    fn random(self, shape: &[i64], kind: Kind) -> kernels::Result<Tensor> {
        let count: i64 = shape.iter().product();
        let flat = Tensor::f_arange(count, (Kind::Float, self.device))?;
        Ok(flat.f_mul_scalar(0.7)?.f_sin()?.f_reshape(shape)?.f_to_kind(kind)?)
    }

    /// Operations in a second of products of this shape, of a worker while all are at work. The right operand is a weight's
    /// transpose, as in a forward pass.
    pub fn product(self, shape: Shape, kind: Kind, by: By) -> Result<f64> {
        let Shape { rows, inner, columns } = shape;
        let ops = self.workers.ops();
        let prepare = || -> kernels::Result<_> {
            let left = self.random(&[rows, inner], kind)?;
            let weight = self.random(&[columns, inner], kind)?;
            Ok((Tensor::f_empty([rows, columns], (kind, self.device))?, left, weight))
        };
        let work = |(out, left, weight): &mut (Tensor, Tensor, Tensor)| -> kernels::Result<()> {
            match by {
                By::Ours => ops.matmul_into(out, left, &weight.f_tr()?)?,
                By::Libtorch => drop(left.f_mm_out(out, &weight.f_tr()?)?),
            }
            Ok(())
        };
        Ok(shape.operations() / self.time(prepare, work)?)
    }

    /// Operations of a causal call over `tokens` of one document that its mask leaves, forward; and in a second, forward, and
    /// backward over twice as many. `heads` are `[H, K, d]`.
    pub fn attention(self, tokens: i64, heads: [i64; 3], kind: Kind) -> Result<(f64, [f64; 2])> {
        let [queries, keys, width] = heads;
        let (ops, span) = (self.workers.ops(), [Span::whole(0, tokens)]);
        let prepare = || -> kernels::Result<_> {
            let query = self.random(&[queries, tokens, width], kind)?;
            let key = self.random(&[keys, tokens, width], kind)?;
            let value = self.random(&[tokens, keys * width], kind)?;
            let grad = self.random(&[tokens, queries * width], kind)?;
            let float = (Kind::Float, self.device);
            let out = [
                Tensor::f_empty([queries, tokens, width], float)?,
                Tensor::f_empty([keys, tokens, width], float)?,
            ];
            Ok(([query, key, value, grad], out))
        };
        let by = |[query, key, value, _]: &[Tensor; 4]| {
            let (query, key, value) =
                (query.shallow_clone(), key.shallow_clone(), value.shallow_clone());
            (query, key, value)
        };
        let forward = |all: &[Tensor; 4]| {
            let (query, key, value) = by(all);
            let operands = Attention {
                query: &query,
                key: &key,
                value: &value,
                spans: &span,
                shape: heads,
                kept: None,
            };
            ops.attention(operands)
        };
        let there = self.time(prepare, |(all, _)| forward(all).map(drop))?;
        let both = self.time(prepare, |(all, out)| {
            let saved = forward(all)?.saved;
            let (query, key, value) = by(all);
            let operands = Attention {
                query: &query,
                key: &key,
                value: &value,
                spans: &span,
                shape: heads,
                kept: None,
            };
            let to_value = value.f_empty_like()?;
            let into = AttentionGrads { query: &out[0], key: &out[1], value: &to_value };
            ops.attention_backward(operands, saved, &all[3], into)
        })?;
        let pairs = crate::model::causal_pairs(&[0], tokens as u32) as f64;
        let operations = 4.0 * (queries * width) as f64 * pairs;
        let back = (both - there).max(0.05 * both);
        Ok((operations, [operations / there, 2.0 * operations / back]))
    }

    /// Bytes in a second, read and written as STREAM counts them, of an operation on tensors that have `bytes` together; of a
    /// worker while all are at work.
    pub fn memory(self, pass: Pass, bytes: u64) -> Result<f64> {
        let count = (bytes / pass.tensors() / 4).max(1) as i64;
        let prepare = || -> kernels::Result<_> {
            let all = [
                self.random(&[count], Kind::Float)?,
                self.random(&[count], Kind::Float)?,
                self.random(&[count], Kind::Float)?,
            ];
            Ok((all, Tensor::f_full([1], 0.5, (Kind::Float, self.device))?))
        };
        let work = |([a, b, c], half): &mut ([Tensor; 3], Tensor)| -> kernels::Result<()> {
            match pass {
                Pass::Copy => a.f_copy_(b)?,
                Pass::Scale => drop(b.f_mul_scalar_out(a, 0.5)?),
                Pass::Add => drop(b.f_add_out(a, c)?),
                Pass::Triad => drop(b.f_addcmul_out(a, c, half)?),
                Pass::Checksum => {
                    std::hint::black_box(checksum::tensor(a, 1));
                }
                Pass::Tree => *a += &*b,
            }
            Ok(())
        };
        let seconds = self.time(prepare, work)?;
        Ok(pass.tensors() as f64 * 4.0 * count as f64 / seconds)
    }
}
