//! Measures what a step costs: its parts, the model's FLOPs, and how close they come to the matmul rate of this
//! machine, which is measured in the same run.

use std::path::Path;
use std::time::{Duration, Instant};

use contract::{Fault, Result};
use curriculum::Dtype;
use curriculum::stats::median;
use kernels::{profile, runtime};
use loader::RankSlice;
use serde::Serialize;
use tch::{Device, Kind};

use crate::sizing::numbers::numbers;
use crate::trace::Trace;
use trainer::memory::{self, MachineDemand, MemoryUse, Parallelism};
use trainer::mesh::ProcessMesh;
use trainer::mesh::share::{self, WeightSharing};
use trainer::mesh::words::{WordReader, WordWriter};
use trainer::model::Assignment;
use trainer::refusal::refused;
use trainer::spec::RunSpec;
use trainer::state::State;
use trainer::state::ownership::{Ownership, ParamShard};
use trainer::step::{self, StepContext, StepResult, micro_batch};
use trainer::timing::{EXACTNESS, PARTS, StepPart, measured, part};
use trainer::workers::Workers;

/// Rows of the square matmuls that measure the peak rate: large enough to reach it, small enough for a cache.
const SQUARE: i64 = 768;

/// The most rows on a device, where the size grows as long as a matmul takes less than this many seconds.
const LARGEST: (i64, f64) = (12_288, 2e-3);

/// The rate is not measured again after this time: bf16 matmuls take seconds on a CPU without instructions for them.
const LOOK: Duration = Duration::from_secs(1);

/// The result of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct StepTable {
    /// Micro-batches computed at once by a rank.
    pub workers: usize,
    /// Processes.
    pub ranks: u32,
    /// Steps measured.
    pub steps: u64,
    /// Tokens in all of them.
    pub tokens: u64,
    /// Their wall time, without reading batches, which a run prefetches during the step before.
    pub seconds: f64,
    /// Name and seconds of each part, summed over all workers.
    pub parts: Vec<(String, f64)>,
    /// Each step: another process may use the machine for a while, which affects medians less than means.
    pub by_step: Vec<OneStep>,
    /// Seconds in which a worker was idle, or did something that belongs to no part.
    pub idle: f64,
    /// Seconds of the parts that only compute checksums.
    pub exactness: f64,
    /// FLOPs of the model, forward and backward.
    pub model_flops: f64,
    /// Where ranks share micro-batches: how much more attention the busiest rank of each computes than their mean, for
    /// the documents of these batches; 0 is balanced.
    pub uneven: f64,
    /// The number format of the matmuls.
    pub dtype: &'static str,
    /// Operations per second that all workers together reach in large matmuls of that format.
    pub limit: f64,
    /// What the ranks exchanged in all steps, if there is more than one.
    pub exchanged: Option<ExchangedBytes>,
    /// Memory of each rank.
    pub memory: Vec<RankMemory>,
    /// Where rank 0 spent the time of one more step by libtorch's profiler, if requested.
    pub trace: Option<Trace>,
}

/// A measured step.
#[derive(Clone, Debug, Serialize)]
pub struct OneStep {
    /// Wall time, without reading the batch.
    pub seconds: f64,
    /// Seconds of each part, summed over all workers, in the order of [`StepTable::parts`].
    pub parts: Vec<f64>,
}

/// What all ranks exchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ExchangedBytes {
    /// Bytes sent from any rank to any other.
    pub bytes: u64,
    /// Those of them that were sent between machines.
    pub bytes_between_nodes: u64,
    /// Seconds for which the slowest rank waited for blocks after all micro-batches had been computed.
    pub waited_for_blocks: f64,
}

/// The memory of a rank, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// The rank.
    pub rank: u32,
    /// Its memory by formula.
    pub formula: MemoryUse,
    /// Its resident size before it had any weights.
    pub before: u64,
    /// Its peak resident size.
    pub most: u64,
    /// Peak bytes of live tensors in main memory during the measured steps; 0 where they were not counted
    /// ([`kernels::memory`]).
    pub tensors: u64,
    /// Peak bytes of live tensors on its device during the measured steps; 0 on a CPU.
    pub on_device: u64,
}

impl StepTable {
    fn exchanged(&mut self, StepResult { sent, waited, ranks, .. }: &StepResult) {
        if *ranks == 1 {
            return;
        }
        let all = self.exchanged.get_or_insert_default();
        all.bytes += sent.all;
        all.bytes_between_nodes += sent.between_nodes;
        all.waited_for_blocks += waited.as_secs_f64();
    }

    /// Fills in the seconds of each of [`PARTS`].
    fn split(&mut self) {
        let of_part = |index: usize| self.by_step.iter().map(move |step| step.parts[index]);
        let spent: Vec<f64> = (0..PARTS.len()).map(|index| of_part(index).sum()).collect();
        let named = PARTS.iter().zip(&spent);
        let inside = named.clone().filter(|((part, _), _)| *part != StepPart::Batch);
        let inside: f64 = inside.map(|(_, spent)| spent).sum();
        self.idle = self.seconds * self.workers as f64 - inside;
        let exact = named.clone().filter(|((part, _), _)| EXACTNESS.contains(part));
        self.exactness = exact.map(|(_, spent)| spent).sum();
        self.parts = named.map(|((_, name), spent)| ((*name).to_owned(), *spent)).collect();
    }

    /// Median wall time of a step.
    pub fn median_seconds(&self) -> f64 {
        median(self.by_step.iter().map(|step| step.seconds)).unwrap_or_default()
    }

    /// Median seconds of the part at `index` of [`StepTable::parts`].
    pub fn median_of(&self, index: usize) -> f64 {
        let parts = self.by_step.iter().filter_map(|step| step.parts.get(index).copied());
        median(parts).unwrap_or_default()
    }

    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// The model's operations divided by those that the limit allows in the same time.
    pub fn utilisation(&self) -> f64 {
        self.model_flops / (self.seconds * self.limit)
    }
}

/// Computes step `number`: returns its outcome and the seconds that it took.
fn timed(
    cx: StepContext<'_>,
    state: &mut State,
    sharing: &WeightSharing<'_>,
    number: u64,
) -> Result<(StepResult, f64)> {
    let batch = {
        let _watch = part(StepPart::Batch);
        let slice = cx.team.lines(cx.spec.model_at(number)?.cut)?.slice()?;
        loader::batch(&cx.spec.plan, &cx.spec.data, number, slice)?
    };
    let micro_batches = micro_batch::stage(cx.spec, &batch, state.weights[0].device())?;
    let begin = Instant::now();
    let asked = step::Requests::default;
    let stepped = step::advance(cx, state, &batch, &micro_batches, sharing, asked)?;
    Ok((stepped, begin.elapsed().as_secs_f64()))
}

/// Refuses to measure more steps than the curriculum has.
fn enough(spec: &RunSpec, warm_up: u64, steps: u64, traced: bool) -> Result<()> {
    let (all, beside) = (spec.plan.steps(), warm_up.saturating_add(u64::from(traced)));
    if steps > 0 && beside.saturating_add(steps) <= all {
        return Ok(());
    }
    let most = all.saturating_sub(beside);
    let traced = if traced { ", one is traced" } else { "" };
    Err(Fault::usage("there are not that many steps to measure").at("--steps").found(steps).wanted(
        format!("1 to {most}: of the {all} steps of the curriculum {warm_up} warm up{traced}"),
    ))
}

/// Computes step `number` under libtorch's profiler on rank 0, and writes the whole trace into `file`.
fn traced(
    cx: StepContext<'_>,
    state: &mut State,
    sharing: &WeightSharing<'_>,
    number: u64,
    file: &Path,
) -> Result<Option<Trace>> {
    if cx.team.group.rank() > 0 {
        timed(cx, state, sharing, number)?;
        return Ok(None);
    }
    let profile = profile::begin(state.weights[0].device()).map_err(refused)?;
    let outcome = timed(cx, state, sharing, number);
    let events = profile.end(file).map_err(refused)?;
    Ok(Some(Trace::of(&events, outcome?.1)))
}

/// Computes `steps` steps of a run from its beginning, after `warm_up` others, as one rank of a team, and returns what
/// this rank measured. If `trace` names a file, one more step runs under libtorch's profiler. Nothing else is written.
pub fn step(
    cx: StepContext<'_>,
    device: Device,
    warm_up: u64,
    steps: u64,
    trace: Option<&Path>,
) -> Result<StepTable> {
    let StepContext { spec, team, workers } = cx;
    enough(spec, warm_up, steps, trace.is_some())?;
    let (rank, world) = (team.group.rank(), team.group.world());
    let ProcessMesh { degrees, flat, grad_reduce, .. } = *team;
    let (replicate, copies, limit_here) = (false, 0, store::memory::limit());
    let demand =
        MachineDemand { degrees, flat, grad_reduce, workers, replicate, copies, limit: limit_here };
    memory::refuse(spec, demand, team.group.nodes(), rank, device)?;
    let dtype = spec.curriculum.dtype;
    let first_limit = limit(device, workers, dtype)?;
    let (before, _) = storage::process::resident();
    let mut state = State::begin(spec, device, Ownership::new(spec, rank, world), workers)?;
    share::weights(team, &state)?;
    let sharing = WeightSharing::new(team);
    for number in 1..=warm_up {
        timed(cx, &mut state, &sharing, number)?;
    }
    kernels::memory::anew();
    kernels::memory::anew_on(device).map_err(refused)?;
    let mut table = StepTable {
        workers: workers.count(),
        ranks: world,
        steps,
        tokens: 0,
        seconds: 0.0,
        parts: Vec::new(),
        by_step: Vec::new(),
        idle: 0.0,
        exactness: 0.0,
        model_flops: 0.0,
        uneven: 0.0,
        dtype: dtype.name(),
        limit: first_limit,
        exchanged: None,
        memory: Vec::new(),
        trace: None,
    };
    let mut dealt = [0.0; 2];
    for number in warm_up + 1..=warm_up + steps {
        let (outcome, parts) = measured(|| timed(cx, &mut state, &sharing, number));
        let (stepped, seconds) = outcome?;
        table.seconds += seconds;
        table.by_step.push(OneStep { seconds, parts });
        table.exchanged(&stepped);
        let step = spec.plan.step(number)?;
        table.tokens += step.batch * u64::from(step.seq_len);
        table.model_flops += stepped.model_flops;
        uneven(cx, number, &mut dealt)?;
    }
    table.uneven = if dealt[1] > 0.0 { dealt[0] / dealt[1] - 1.0 } else { 0.0 };
    let (tensors, (_, most)) = (kernels::memory::most(), storage::process::resident());
    let on_device = kernels::memory::most_on(device).map_err(refused)?;
    let sizes = [before, most, tensors, on_device];
    table.memory = memory_of_all(cx, state.owners.pieces(), warm_up + 1, sizes)?;
    // The machine may be shared: the better of two measurements is closer to its peak.
    table.limit = f64::from(world) * table.limit.max(limit(device, workers, dtype)?);
    table.split();
    if let Some(file) = trace {
        table.trace = traced(cx, &mut state, &sharing, warm_up + steps + 1, file)?;
    }
    sharing.finish()?;
    Ok(table)
}

/// The memory of each rank by formula from step `first` on, with the `sizes` that the ranks exchange: resident size
/// before and at most, bytes of tensors in main memory and on the device.
fn memory_of_all(
    cx: StepContext<'_>,
    pieces: &[ParamShard],
    first: u64,
    sizes: [u64; 4],
) -> Result<Vec<RankMemory>> {
    let StepContext { spec, team, workers } = cx;
    let mut message = WordWriter::default();
    sizes.iter().for_each(|size| {
        message.word(*size);
    });
    let gathered = team.all_gather("the sizes of ranks", &message)?;
    let ProcessMesh { degrees, flat, grad_reduce, .. } = *team;
    let names = team.group.nodes();
    // A CPU counts none.
    let on_device = sizes[3] > 0;
    let ways = Parallelism { names, pieces, degrees, flat, grad_reduce, workers, on_device };
    let ranks = ways.at(spec, first)?;
    let of = |(rank, mut gathered): (u32, WordReader<'_>)| {
        let (before, most) = (gathered.word()?, gathered.word()?);
        let (tensors, on_device) = (gathered.word()?, gathered.word()?);
        let formula = ranks.holds(spec, first, rank);
        Ok(RankMemory { rank, formula, before, most, tensors, on_device })
    };
    (0..).zip(gathered.readers()).map(of).collect()
}

/// Adds the query-key pairs of a step's micro-batches: those of the busiest rank of each, and the mean over ranks.
fn uneven(cx: StepContext<'_>, number: u64, [most, mean]: &mut [f64; 2]) -> Result<()> {
    let StepContext { spec, team, .. } = cx;
    let model = spec.model_at(number)?;
    let together = u64::from(team.lines(model.cut)?.mesh.together());
    let dealt = Assignment { chunks: model.cut.chunks, degree: together, place: 0 };
    let batch = loader::batch(&spec.plan, &spec.data, number, RankSlice::WHOLE)?;
    for rows in batch.boundaries.chunks(batch.micro_batch as usize) {
        let mut places = vec![0; together as usize];
        for starts in rows {
            let starts = if model.config.document_mask { &starts[..] } else { &[0] };
            let row = dealt.pairs(&model.config, starts, batch.seq_len);
            places.iter_mut().zip(row).for_each(|(sum, pairs)| *sum += pairs);
        }
        *most += places.iter().copied().max().unwrap_or(0) as f64;
        *mean += places.iter().sum::<u64>() as f64 / together as f64;
    }
    Ok(())
}

/// The rate of large matmuls with every worker busy, each with one math thread: the best of several measurements. The
/// values are distributed as in a model: on constant ones a device clocks higher, since fewer of its wires switch.
fn limit(device: Device, workers: Workers, dtype: Dtype) -> Result<f64> {
    let kind = if dtype == Dtype::Bf16 { Kind::BFloat16 } else { Kind::Float };
    let count = workers.count() as u64;
    let (mut best, mut size, start) = (0f64, SQUARE, Instant::now());
    for _ in 0..if device == Device::Cpu { 6 } else { 10 } {
        let work = |_| {
            runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
            let operand = |by| numbers(&[size, size], by, kind, device).map_err(refused);
            let (left, right) = (operand(0.7)?, operand(0.9)?);
            let out = left.f_empty_like().map_err(refused)?;
            // Waits for earlier work, which must not be timed.
            let _ = right.f_double_value(&[0, 0]).map_err(refused)?;
            let (begin, mut products) = (Instant::now(), 0);
            while products < 4 && (device != Device::Cpu || begin.elapsed() < LOOK / 4) {
                kernels::product::into(&out, &left, &right).map_err(refused)?;
                products += 1;
            }
            // Reading a value waits for the device.
            let _ = out.f_double_value(&[0, 0]).map_err(refused)?;
            Ok(begin.elapsed().as_secs_f64() / f64::from(products))
        };
        let times = workers.map((0..count).collect(), work)?;
        let slowest = times.into_iter().fold(0.0, f64::max);
        best = best.max(count as f64 * 2.0 * (size as f64).powi(3) / slowest);
        if device != Device::Cpu && slowest < LARGEST.1 {
            size = (2 * size).min(LARGEST.0);
        }
        if start.elapsed() > LOOK {
            break;
        }
    }
    Ok(best)
}
