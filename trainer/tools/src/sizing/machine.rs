//! Measures this machine: matmuls, attention, and passes over memory.
//!
//! Each is measured as training uses it, through the table of operations and with every worker busy, and in the same
//! minute with libtorch's own call for comparison. A time is the median of the calls that fit into the given seconds,
//! because others may use the machine. Calls rotate through operands of [`COLD`] bytes in total, as a step passes over
//! the state of a model: a step does not reach the rates of operands that are already cached.

use std::time::Instant;

use contract::{Fault, Result};
use kernels::{checksum, runtime};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::shapes::{MatmulShape, of_newton_schulz};
use trainer::optim::muon::QUINTIC;
use trainer::refusal::refused;
use trainer::workers::Workers;

/// Bytes of the operands that calls rotate through, for each worker.
pub const COLD: u64 = 64 << 20;

/// Width of the matmul before each pass over memory: about 0.2 ms.
const WIDTH: i64 = 256;

/// The number of operand sets, if one has `bytes`.
fn sets(bytes: u64) -> usize {
    COLD.div_ceil(bytes.max(1)).clamp(1, 1 << 12) as usize
}

/// Operands that calls rotate through.
struct RotatingOperands<T> {
    all: Vec<T>,
    next: usize,
}

impl<T> RotatingOperands<T> {
    /// `count` operand sets, each already written.
    fn of(
        count: usize,
        make: impl Fn() -> kernels::Result<T>,
    ) -> kernels::Result<RotatingOperands<T>> {
        let all = (0..count).map(|_| make()).collect::<kernels::Result<Vec<T>>>()?;
        Ok(RotatingOperands { all, next: 0 })
    }

    /// The least recently used set.
    fn next(&mut self) -> &mut T {
        self.next = (self.next + 1) % self.all.len();
        &mut self.all[self.next]
    }
}

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct BenchOptions {
    /// The device of the tensors.
    pub device: Device,
    /// How many threads run the same work at once.
    pub workers: Workers,
    /// About how many seconds a row takes.
    pub seconds: f64,
}

/// The implementation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Implementation {
    /// The table of operations, as training calls it.
    Ours,
    /// libtorch's own call.
    Libtorch,
}

impl Implementation {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Implementation::Ours => "ours",
            Implementation::Libtorch => "libtorch",
        }
    }
}

/// A pass over memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryPass {
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
    /// The head's softmax and its gradient: `a = log_softmax(b)` over rows of [`VOCABULARY`], `a = exp(a)`.
    Softmax,
}

/// The longest row over which a softmax is measured.
pub const VOCABULARY: i64 = 2048;

/// All passes.
pub const PASSES: [MemoryPass; 7] = [
    MemoryPass::Copy,
    MemoryPass::Scale,
    MemoryPass::Add,
    MemoryPass::Triad,
    MemoryPass::Checksum,
    MemoryPass::Tree,
    MemoryPass::Softmax,
];

impl MemoryPass {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            MemoryPass::Copy => "copy",
            MemoryPass::Scale => "scale",
            MemoryPass::Add => "add",
            MemoryPass::Triad => "triad",
            MemoryPass::Checksum => "checksum",
            MemoryPass::Tree => "tree addition",
            MemoryPass::Softmax => "softmax",
        }
    }

    /// How many tensors it reads or writes.
    pub fn tensors(self) -> u64 {
        match self {
            MemoryPass::Checksum => 1,
            MemoryPass::Copy | MemoryPass::Scale => 2,
            MemoryPass::Add | MemoryPass::Triad | MemoryPass::Tree => 3,
            MemoryPass::Softmax => 4,
        }
    }
}

impl BenchOptions {
    /// Seconds of one `work` on each worker, all at once: the median over the calls, of the slowest worker. `prepare`
    /// makes a worker's operands, and is not timed.
    pub(super) fn time<T>(
        self,
        prepare: impl Fn() -> kernels::Result<T> + Sync,
        work: impl Fn(&mut T) -> kernels::Result<()> + Sync,
    ) -> Result<f64> {
        let timed = |operands: &mut T, calls: u32| -> kernels::Result<f64> {
            let begin = Instant::now();
            (0..calls).try_for_each(|_| work(operands))?;
            self.arrive();
            Ok(begin.elapsed().as_secs_f64() / f64::from(calls))
        };
        self.looks(prepare, timed)
    }

    /// The same, each call after an untimed matmul: a processor lowers its clock for a while after many matmuls, and a
    /// step runs its other operations in that state.
    fn time_between_products<T>(
        self,
        prepare: impl Fn() -> kernels::Result<T> + Sync,
        work: impl Fn(&mut T) -> kernels::Result<()> + Sync,
    ) -> Result<f64> {
        if self.device != Device::Cpu {
            return self.time(prepare, work);
        }
        let with_product = || -> kernels::Result<_> {
            let matrix = || self.random(&[WIDTH, WIDTH], Kind::Float);
            Ok((prepare()?, matrix()?, matrix()?))
        };
        let timed = |(operands, matrix, out): &mut (T, Tensor, Tensor), calls: u32| {
            let mut spent = 0.0;
            for _ in 0..calls {
                self.workers.ops().matmul_into(out, matrix, matrix)?;
                let begin = Instant::now();
                work(operands)?;
                spent += begin.elapsed().as_secs_f64();
            }
            Ok(spent / f64::from(calls))
        };
        self.looks(with_product, timed)
    }

    /// The same for operands of `bytes` bytes that are not cached.
    pub(super) fn time_cold<T>(
        self,
        bytes: u64,
        make: impl Fn() -> kernels::Result<T> + Sync,
        work: impl Fn(&mut T) -> kernels::Result<()> + Sync,
    ) -> Result<f64> {
        let prepare = || RotatingOperands::of(sets(bytes), &make);
        self.time_between_products(prepare, |round: &mut RotatingOperands<T>| work(round.next()))
    }

    /// The median of `timed` over batches of calls, of the slowest worker.
    fn looks<T>(
        self,
        prepare: impl Fn() -> kernels::Result<T> + Sync,
        timed: impl Fn(&mut T, u32) -> kernels::Result<f64> + Sync,
    ) -> Result<f64> {
        let measure = |_: usize| -> Result<f64> {
            runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
            let mut operands = prepare().map_err(refused)?;
            let mut look = |calls: u32| timed(&mut operands, calls).map_err(refused);
            look(1)?;
            let begin = Instant::now();
            look(1)?;
            let once = begin.elapsed().as_secs_f64().max(1e-8);
            // Enough calls between two clock readings that reading the clock costs nothing.
            let calls = (self.seconds / 12.0 / once).clamp(1.0, 1e5) as u32;
            let looks = (self.seconds / (once * f64::from(calls))).clamp(3.0, 12.0) as usize;
            let mut times = (0..looks).map(|_| look(calls)).collect::<Result<Vec<f64>>>()?;
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        };
        let all = self.workers.map((0..self.workers.count()).collect(), measure)?;
        Ok(all.into_iter().fold(0.0, f64::max))
    }

    /// Waits for the device.
    fn arrive(self) {
        if let Device::Cuda(index) = self.device {
            tch::Cuda::synchronize(index as i64);
        }
    }

    /// A tensor of this shape and dtype.
    pub(super) fn random(self, shape: &[i64], kind: Kind) -> kernels::Result<Tensor> {
        let count: i64 = shape.iter().product();
        let flat = Tensor::f_arange(count, (Kind::Float, self.device))?;
        Ok(flat.f_mul_scalar(0.7)?.f_sin()?.f_reshape(shape)?.f_to_kind(kind)?)
    }

    /// Operations per second of matmuls of this shape, on one worker while all are busy. The right operand is a
    /// transposed weight, as in a forward pass.
    pub fn product(self, shape: MatmulShape, kind: Kind, by: Implementation) -> Result<f64> {
        let MatmulShape { rows, inner, columns } = shape;
        let ops = self.workers.ops();
        let numbers = (rows * inner + inner * columns + rows * columns) as u64;
        let count = sets(numbers * kind.elt_size_in_bytes() as u64);
        let one = || -> kernels::Result<[Tensor; 3]> {
            let random = |shape: &[i64]| self.random(shape, kind);
            Ok([random(&[rows, columns])?, random(&[rows, inner])?, random(&[columns, inner])?])
        };
        let work = |all: &mut RotatingOperands<[Tensor; 3]>| -> kernels::Result<()> {
            let [out, left, weight] = all.next();
            match by {
                Implementation::Ours => ops.matmul_into(out, left, &weight.f_tr()?)?,
                Implementation::Libtorch => drop(left.f_mm_out(out, &weight.f_tr()?)?),
            }
            Ok(())
        };
        Ok(shape.operations() / self.time(|| RotatingOperands::of(count, one), work)?)
    }

    /// Operations of the optimizer's Newton-Schulz iterations on a matrix, and operations per second.
    pub fn newton_schulz(self, [rows, columns]: [i64; 2]) -> Result<[f64; 2]> {
        let ops = self.workers.ops();
        let bytes = 4 * (rows * columns) as u64;
        let prepare =
            || RotatingOperands::of(sets(bytes), || self.random(&[rows, columns], Kind::Float));
        let work =
            |all: &mut RotatingOperands<Tensor>| ops.newton_schulz(all.next(), QUINTIC).map(drop);
        let operations = of_newton_schulz(rows, columns);
        Ok([operations, operations / self.time(prepare, work)?])
    }

    /// Bytes per second, counted as in STREAM, of a pass over `bytes` bytes; on one worker while all are busy.
    pub fn memory(self, pass: MemoryPass, bytes: u64) -> Result<f64> {
        let mut shape = vec![(bytes / pass.tensors() / 4).max(1) as i64];
        if pass == MemoryPass::Softmax {
            let width = shape[0].min(VOCABULARY);
            shape = vec![shape[0] / width, width];
        }
        let own = 4 * shape.iter().product::<i64>() as u64;
        let needed = pass.tensors().min(3);
        let prepare = || -> kernels::Result<_> {
            let random =
                |index| self.random(if index < needed { &shape } else { &[1] }, Kind::Float);
            let round = RotatingOperands::of(sets(needed * own), || {
                Ok([random(0)?, random(1)?, random(2)?])
            })?;
            Ok((round, Tensor::f_full([1], 0.5, (Kind::Float, self.device))?))
        };
        let work =
            |(round, half): &mut (RotatingOperands<[Tensor; 3]>, Tensor)| -> kernels::Result<()> {
                let [a, b, c] = round.next();
                match pass {
                    MemoryPass::Copy => a.f_copy_(b)?,
                    MemoryPass::Scale => drop(b.f_mul_scalar_out(a, 0.5)?),
                    MemoryPass::Add => drop(b.f_add_out(a, c)?),
                    MemoryPass::Triad => drop(b.f_addcmul_out(a, c, half)?),
                    MemoryPass::Checksum => {
                        // A device's checksum stays there: reading it would copy its elements to the host.
                        drop(std::hint::black_box(checksum::slices(&[(a, 0, 1)])?));
                    }
                    MemoryPass::Tree => *a += &*b,
                    MemoryPass::Softmax => drop(b.f_log_softmax(-1, Kind::Float)?.f_exp_()?),
                }
                Ok(())
            };
        let seconds = self.time_between_products(prepare, work)?;
        Ok((pass.tensors() * own) as f64 / seconds)
    }
}
