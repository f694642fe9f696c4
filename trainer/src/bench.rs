//! What a step costs: its parts, the model's operations, and how near they come to the matrix products that this machine
//! can do, measured in the same run.

use std::time::Instant;

use contract::{Fault, Result};
use curriculum::Dtype;
use kernels::runtime;
use loader::RankSlice;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::memory::{self, Holder, Holds};
use crate::mesh::team::{Nodes, Schedule, Team};
use crate::mesh::words;
use crate::model;
use crate::parallel;
use crate::parallel::shard::Shard;
use crate::parallel::step::Stepped;
use crate::refusal::refused;
use crate::spec::RunSpec;
use crate::state::State;
use crate::state::ownership::{self, Piece};
use crate::step;
use crate::timing::{EXACTNESS, PARTS, Part, measured, part};
use crate::workers::Workers;

/// Rows of the square products whose rate is the limit: large enough to be at it, small enough for a cache.
const SQUARE: i64 = 768;

/// The outcome of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct StepTable {
    /// Leaves computed at once by a rank.
    pub workers: usize,
    /// Processes.
    pub ranks: u32,
    /// Steps measured.
    pub steps: u64,
    /// Tokens in all of them.
    pub tokens: u64,
    /// Wall time of all of them, the batches left out: a run reads them beside the step before.
    pub seconds: f64,
    /// Name and seconds on all workers together.
    pub parts: Vec<(String, f64)>,
    /// Seconds in which a worker had nothing to do, or something that is in no part.
    pub idle: f64,
    /// Seconds of the parts that only check bits.
    pub exactness: f64,
    /// Operations that the model defines, forward and backward.
    pub model_flops: f64,
    /// What the products compute in.
    pub dtype: &'static str,
    /// Operations in a second that all workers together reach in large products of that kind.
    pub limit: f64,
    /// What ranks exchanged in all steps, if there are several.
    pub exchanged: Option<Exchanged>,
    /// What each rank holds.
    pub memory: Vec<RankMemory>,
}

/// What all ranks of a step exchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Exchanged {
    /// Bytes from any rank to any other.
    pub bytes: u64,
    /// Those of them that went from one machine to another.
    pub bytes_between_nodes: u64,
    /// Seconds for which the slowest rank waited for blocks when all leaves had been computed.
    pub waited_for_blocks: f64,
}

/// The memory of a rank, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// The rank.
    pub rank: u32,
    /// What it holds by formula.
    pub formula: Holds,
    /// Its resident size before it had any weights.
    pub before: u64,
    /// Its largest resident size.
    pub most: u64,
}

impl StepTable {
    fn exchanged(&mut self, Stepped { sent, waited, .. }: &Stepped) {
        let all = self.exchanged.get_or_insert_default();
        all.bytes += sent.all;
        all.bytes_between_nodes += sent.between_nodes;
        all.waited_for_blocks += waited.as_secs_f64();
    }

    /// Fills in the seconds of each of [`PARTS`].
    fn split(&mut self, spent: &[f64]) {
        let named = PARTS.iter().zip(spent);
        let inside = named.clone().filter(|((part, _), _)| *part != Part::Batch);
        let inside: f64 = inside.map(|(_, spent)| spent).sum();
        self.idle = self.seconds * self.workers as f64 - inside;
        let exact = named.clone().filter(|((part, _), _)| EXACTNESS.contains(part));
        self.exactness = exact.map(|(_, spent)| spent).sum();
        self.parts = named.map(|((_, name), spent)| ((*name).to_owned(), *spent)).collect();
    }

    /// Tokens in a second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// The model's operations over what the limit would have allowed in the same time.
    pub fn utilisation(&self) -> f64 {
        self.model_flops / (self.seconds * self.limit)
    }
}

/// Who computes the steps: this process, or all ranks together.
enum Trainee<'a> {
    Alone(State),
    Rank(Shard, &'a Team<'a>),
}

impl Trainee<'_> {
    /// Computes step `number`: the router's counts, and the seconds that it took.
    fn step(
        &mut self,
        spec: &RunSpec,
        number: u64,
        workers: Workers,
    ) -> Result<(Vec<Vec<u64>>, f64, Option<Stepped>)> {
        let slice = match self {
            Trainee::Alone(_) => RankSlice::WHOLE,
            Trainee::Rank(_, team) => team.slice(team.group.rank())?,
        };
        let batch = {
            let _watch = part(Part::Batch);
            loader::batch(&spec.plan, &spec.data, number, slice)?
        };
        let leaves = step::stage(spec, &batch, self.weight().device())?;
        let begin = Instant::now();
        let taken = || begin.elapsed().as_secs_f64();
        match self {
            Trainee::Alone(state) => {
                let record = step::advance(spec, state, &batch, &leaves, workers)?;
                Ok((record.router, taken(), None))
            }
            Trainee::Rank(shard, team) => {
                let (work, ways) = ((&batch, &leaves), (*team, workers));
                let stepped = parallel::step::advance(spec, shard, work, ways, || false)?;
                Ok((stepped.record.router.clone(), taken(), Some(stepped)))
            }
        }
    }

    fn weight(&self) -> &Tensor {
        match self {
            Trainee::Alone(state) => &state.weights[0],
            Trainee::Rank(shard, _) => &shard.weights[0],
        }
    }
}

/// Computes `steps` steps of a run from its beginning, after one that warms up, alone or as one of a team, and tells what
/// this rank saw. Nothing is written.
pub fn step(
    spec: &RunSpec,
    device: Device,
    workers: Workers,
    steps: u64,
    team: Option<&Team<'_>>,
) -> Result<StepTable> {
    if steps == 0 || steps + 1 > spec.plan.steps() {
        return Err(Fault::usage("there are not that many steps to measure")
            .at("--steps")
            .found(steps)
            .wanted(format!("1 to {}, one less than the curriculum has", spec.plan.steps() - 1)));
    }
    let world = team.map_or(1, |team| team.group.world());
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, world);
    let dtype = spec.curriculum.dtype;
    let first_limit = limit(device, workers, dtype)?;
    let (before, _) = memory::resident();
    let mut trainee = match team {
        None => Trainee::Alone(step::initial(spec, device)?),
        Some(team) => {
            let rank = team.group.rank();
            Trainee::Rank(Shard::begin(spec, device, pieces.clone(), rank)?, team)
        }
    };
    trainee.step(spec, 1, workers)?;
    let mut table = StepTable {
        workers: workers.count(),
        ranks: world,
        steps,
        tokens: 0,
        seconds: 0.0,
        parts: Vec::new(),
        idle: 0.0,
        exactness: 0.0,
        model_flops: 0.0,
        dtype: dtype.name(),
        limit: first_limit,
        exchanged: None,
        memory: Vec::new(),
    };
    let (outcome, spent) = measured(|| {
        (2..steps + 2).try_for_each(|number| {
            let (router, seconds, stepped) = trainee.step(spec, number, workers)?;
            table.seconds += seconds;
            stepped.iter().for_each(|stepped| table.exchanged(stepped));
            let step = spec.plan.step(number)?;
            table.tokens += step.batch * u64::from(step.seq_len);
            table.model_flops += model_flops(spec, number, &router)?;
            Ok(())
        })
    });
    outcome?;
    let (_, most) = memory::resident();
    table.memory = memory_of_all(spec, (workers, team), &pieces, (before, most))?;
    // The machine may be shared: the better of two looks is nearer to what it can do.
    table.limit = f64::from(world) * table.limit.max(limit(device, workers, dtype)?);
    table.split(&spent);
    Ok(table)
}

/// What each rank holds by formula, and what it was before and at most, which each tells the others.
fn memory_of_all(
    spec: &RunSpec,
    (workers, team): (Workers, Option<&Team<'_>>),
    pieces: &[Piece],
    (before, most): (u64, u64),
) -> Result<Vec<RankMemory>> {
    let said = match team {
        None => vec![(before, most)],
        Some(team) => words::pairs(team.group, "the sizes of ranks", (before, most))?,
    };
    let names = team.map_or_else(|| vec![String::new()], |team| team.group.nodes().to_vec());
    let (schedule, flat) =
        team.map_or((Schedule::Subtree, false), |team| (team.schedule, team.flat));
    let of = |(rank, (before, most))| {
        let nodes = Nodes::new(&names, rank, flat)?;
        let holder = Holder { rank, pieces, nodes: &nodes, schedule, workers };
        // The second step is the first that is measured.
        Ok(RankMemory { rank, formula: memory::holds(spec, 2, &holder)?, before, most })
    };
    (0..).zip(said).map(of).collect()
}

fn model_flops(spec: &RunSpec, number: u64, router: &[Vec<u64>]) -> Result<f64> {
    let config = &spec.model_at(number)?.config;
    let batch = loader::batch(&spec.plan, &spec.data, number, RankSlice::WHOLE)?;
    let experts = |counts: &Vec<u64>| counts[..counts.len() - 1].iter().sum::<u64>();
    let routed: Vec<u64> = router.iter().map(experts).collect();
    let pairs = batch.boundaries.iter().map(|starts| match config.document_mask {
        true => model::causal_pairs(starts, batch.seq_len),
        false => model::causal_pairs(&[0], batch.seq_len),
    });
    let tokens = batch.rows * u64::from(batch.seq_len);
    Ok(model::flops(config, tokens, &routed, pairs.sum()))
}

/// The rate of large products with every worker at work, each with one math thread: the best of several.
fn limit(device: Device, workers: Workers, dtype: Dtype) -> Result<f64> {
    let kind = if dtype == Dtype::Bf16 { Kind::BFloat16 } else { Kind::Float };
    let count = workers.count() as u64;
    let mut best = 0f64;
    for _ in 0..6 {
        let begin = Instant::now();
        let work = |_| {
            runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
            let square = Tensor::ones([SQUARE, SQUARE], (kind, device));
            let out = square.empty_like();
            let begin = Instant::now();
            for _ in 0..4 {
                kernels::product::into(&out, &square, &square).map_err(refused)?;
            }
            // Reading a number waits for the device.
            let _ = out.get(0).get(0).double_value(&[]);
            Ok(begin.elapsed().as_secs_f64())
        };
        let times = workers.map((0..count).collect(), work)?;
        let slowest = times.into_iter().fold(0.0, f64::max).min(begin.elapsed().as_secs_f64());
        best = best.max(4.0 * count as f64 * 2.0 * (SQUARE as f64).powi(3) / slowest);
    }
    Ok(best)
}
