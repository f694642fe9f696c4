//! What a step costs: its parts, the model's operations, and how near they come to the matrix products that this machine
//! can do, measured in the same run.

use std::time::Instant;

use contract::{Fault, Result};
use kernels::runtime;
use loader::{Batch, RankSlice};
use mixer::curriculum::Dtype;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::lanes::Lanes;
use crate::model::flops;
use crate::spec::RunSpec;
use crate::step::{self, Detail};
use crate::timing::{EXACTNESS, PARTS, Part, measured, part};

/// Rows of the square products whose rate is the limit: large enough to be at it, small enough for a cache.
const SQUARE: i64 = 768;

/// The outcome of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct StepTable {
    /// Leaves computed at once.
    pub lanes: usize,
    /// Steps measured.
    pub steps: u64,
    /// Tokens in all of them.
    pub tokens: u64,
    /// Wall time of all of them, the batches left out: a run reads them beside the step before.
    pub seconds: f64,
    /// Name and seconds on all lanes together.
    pub parts: Vec<(String, f64)>,
    /// Seconds in which a lane had nothing to do, or something that is in no part.
    pub idle: f64,
    /// Seconds of the parts that only check bits.
    pub exactness: f64,
    /// Operations that the model defines, forward and backward.
    pub model_flops: f64,
    /// What the products compute in.
    pub dtype: &'static str,
    /// Operations in a second that all lanes together reach in large products of that kind.
    pub limit: f64,
}

impl StepTable {
    /// Tokens in a second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// The model's operations over what the limit would have allowed in the same time.
    pub fn utilisation(&self) -> f64 {
        self.model_flops / (self.seconds * self.limit)
    }
}

/// Computes `steps` steps of a run from its beginning, after one that warms up. Nothing is written.
pub fn step(spec: &RunSpec, device: Device, lanes: Lanes, steps: u64) -> Result<StepTable> {
    if steps == 0 || steps + 1 > spec.plan.steps() {
        return Err(Fault::usage("there are not that many steps to measure")
            .at("--steps")
            .found(steps)
            .wanted(format!("1 to {}, one less than the curriculum has", spec.plan.steps() - 1)));
    }
    let mut state = step::initial(spec, device)?;
    let mut one = |number: u64, table: &mut StepTable| -> Result<()> {
        let batch = {
            let _watch = part(Part::Batch);
            loader::batch(&spec.plan, &spec.data, number, RankSlice::WHOLE)?
        };
        let begin = Instant::now();
        let gradient = step::gradient(spec, &state, &batch, lanes, Detail::Sums)?;
        step::apply(spec, &mut state, &batch, &gradient, lanes)?;
        table.seconds += begin.elapsed().as_secs_f64();
        table.tokens += batch.rows * u64::from(batch.seq_len);
        table.model_flops += model_flops(spec, &batch, &gradient.router)?;
        Ok(())
    };
    let dtype = spec.curriculum.dtype;
    let empty = StepTable {
        lanes: lanes.count(),
        steps,
        tokens: 0,
        seconds: 0.0,
        parts: Vec::new(),
        idle: 0.0,
        exactness: 0.0,
        model_flops: 0.0,
        dtype: dtype.name(),
        limit: limit(device, lanes, dtype)?,
    };
    one(1, &mut empty.clone())?;
    let mut table = empty;
    let (outcome, spent) =
        measured(|| (2..steps + 2).try_for_each(|number| one(number, &mut table)));
    outcome?;
    // The machine may be shared: the better of two looks is nearer to what it can do.
    table.limit = table.limit.max(limit(device, lanes, dtype)?);
    let named = PARTS.iter().zip(&spent);
    let inside = named.clone().filter(|((part, _), _)| *part != Part::Batch);
    table.idle = table.seconds * lanes.count() as f64 - inside.map(|(_, spent)| spent).sum::<f64>();
    let exact = named.clone().filter(|((part, _), _)| EXACTNESS.contains(part));
    table.exactness = exact.map(|(_, spent)| spent).sum();
    table.parts = named.map(|((_, name), spent)| ((*name).to_owned(), *spent)).collect();
    Ok(table)
}

fn model_flops(spec: &RunSpec, batch: &Batch, router: &[Vec<u64>]) -> Result<f64> {
    let config = &spec.model_at(batch.step)?.config;
    let experts = |counts: &Vec<u64>| counts[..counts.len() - 1].iter().sum::<u64>();
    let routed = router.iter().map(experts).sum();
    let pairs = batch.boundaries.iter().map(|starts| match config.document_mask {
        true => flops::causal_pairs(starts, batch.seq_len),
        false => flops::causal_pairs(&[0], batch.seq_len),
    });
    let tokens = batch.rows * u64::from(batch.seq_len);
    Ok(flops::training(config, tokens, routed, pairs.sum()))
}

/// The rate of large products with every lane at work, each with one math thread: the best of several.
fn limit(device: Device, lanes: Lanes, dtype: Dtype) -> Result<f64> {
    let kind = if dtype == Dtype::Bf16 { Kind::BFloat16 } else { Kind::Float };
    let count = lanes.count() as u64;
    let mut best = 0f64;
    for _ in 0..6 {
        let begin = Instant::now();
        let work = |_| {
            runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
            let square = Tensor::ones([SQUARE, SQUARE], (kind, device));
            let out = square.empty_like();
            let begin = Instant::now();
            for _ in 0..4 {
                let _ = square.mm_out(&out, &square);
            }
            // Reading a number waits for the device.
            let _ = out.get(0).get(0).double_value(&[]);
            Ok(begin.elapsed().as_secs_f64())
        };
        let times = lanes.map((0..count).collect(), work)?;
        let slowest = times.into_iter().fold(0.0, f64::max).min(begin.elapsed().as_secs_f64());
        best = best.max(4.0 * count as f64 * 2.0 * (SQUARE as f64).powi(3) / slowest);
    }
    Ok(best)
}
