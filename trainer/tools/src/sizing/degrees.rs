//! The cost of sharing micro-batches between ranks, and the best degree.
//!
//! ```text
//! context   operands and gradients of chunks, over the slowest link of a line; they do not overlap with computation
//! folded    shards of weights, one ahead of use: what the computation of layers does not hide
//! ```
//!
//! A rank then computes only its chunks, one micro-batch at a time, and there are fewer lines of gradients.

use contract::Result;
use serde::Serialize;

use super::estimate::{self, StepTime};
use super::standing::PlannedRun;
use crate::plan::{self, Fleet};
use trainer::mesh::{Degrees, Mesh};

/// The largest number of ranks that share a micro-batch in the comparison.
const MOST: u32 = 64;

/// A phase under one degree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Degree {
    /// The phase.
    pub phase: String,
    /// The step, from which on its batch or dtype holds.
    pub first_step: u64,
    /// The degrees, as for `ztrain --cp` and `--tsp`.
    pub cp: u32,
    /// See above.
    pub tsp: u32,
    /// Seconds of a step.
    pub seconds: f64,
    /// Bytes of the rank that needs most memory.
    pub memory: u64,
    /// Whether its device has that much.
    pub fits: bool,
}

/// Every phase with each degree that its cut allows; empty if no phase allows any.
pub fn compared(setting: PlannedRun<'_>) -> Result<Vec<Degree>> {
    let PlannedRun { spec, cluster, fleet } = setting;
    let firsts: Vec<u64> = spec.segments().into_iter().map(|(_, first, _)| first).collect();
    let powers = || (0..).map(|power| 1 << power).take_while(|degree| *degree <= MOST);
    let pairs = powers().flat_map(|tsp| powers().map(move |cp| Degrees { cp, tsp }));
    let mut found = Vec::new();
    for degrees in pairs.filter(|it| it.cp * it.tsp <= MOST) {
        let exact = |first: &u64| {
            let mesh = Mesh::of(fleet.ranks, degrees, spec.model_at(*first)?.cut);
            Ok((mesh.cp, mesh.tsp) == (degrees.cp, degrees.tsp))
        };
        let exact = firsts.iter().map(exact).collect::<Result<Vec<bool>>>()?;
        if !exact.contains(&true) {
            continue;
        }
        let fleet = Fleet { degrees, ..fleet.clone() };
        let needs = plan::needs(spec, &fleet)?;
        for (needs, _) in needs.phases.iter().zip(exact).filter(|(_, exact)| *exact) {
            let time = estimate::step(PlannedRun { fleet: &fleet, ..setting }, needs)?;
            let (memory, Degrees { cp, tsp }) = (needs.memory.sum(), degrees);
            let StepTime { phase, first_step, seconds, .. } = time;
            let fits = memory <= cluster.memory_bytes;
            found.push(Degree { phase, first_step, cp, tsp, seconds, memory, fits });
        }
    }
    let shared = found.iter().any(|one| one.cp * one.tsp > 1);
    Ok(if shared { found } else { Vec::new() })
}
