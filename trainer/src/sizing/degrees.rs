//! What it costs that ranks share micro-batches, and which degree of it pays.
//!
//! ```text
//! context   operands and gradients of chunks, by the link that the ranks of a line have; nobody computes meanwhile
//! folded    shards of weights, one ahead of use: what the computation of layers does not hide
//! ```
//!
//! A rank then computes its chunks alone, one micro-batch at a time, and there are as many lines of gradients less.

use contract::Result;
use serde::Serialize;

use super::cluster::Link;
use super::estimate::{self, Setting};
use crate::mesh::{Degrees, Mesh};
use crate::plan::{self, Fleet, PhaseNeeds};

/// Ranks that share a micro-batch at most where degrees are compared.
const MOST: u32 = 64;

/// Exchanges of a layer of compressed attention along a line, both ways: rows beside a chunk, keys, values, their gradients.
const EXCHANGES: f64 = 8.0;

/// A phase under one degree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Degree {
    /// The phase.
    pub phase: String,
    /// As `ztrain --cp` and `--tsp` have it.
    pub cp: u32,
    /// See above.
    pub tsp: u32,
    /// Seconds of a step.
    pub seconds: f64,
    /// Bytes of the rank that holds most.
    pub memory: u64,
    /// Whether it has them.
    pub fits: bool,
}

/// How the ranks stand in a phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    /// Ranks that share a micro-batch.
    pub(super) together: u64,
    /// Ranks, or groups of these, that compute different ones.
    pub(super) lines: u64,
    /// Micro-batches that each computes at once.
    pub(super) workers: u64,
}

impl Standing {
    pub(super) fn new(fleet: &Fleet, needs: &PhaseNeeds) -> Standing {
        let together = u64::from(needs.context.max(1));
        let workers = if together > 1 { 1 } else { fleet.workers.count() as u64 };
        Standing { together, lines: u64::from(fleet.ranks) / together, workers }
    }
}

/// Seconds in a step for which a rank waits for those with whom it shares `own` micro-batches, of whose layers it computes
/// `layers` seconds.
pub(super) fn waits(
    Setting { spec, cluster, fleet }: Setting<'_>,
    needs: &PhaseNeeds,
    (own, layers): (u64, f64),
) -> f64 {
    let ranks = f64::from(fleet.ranks);
    let link = |degree: u32| match degree > fleet.ranks_per_node {
        true => cluster.between.or(cluster.within),
        false => cluster.within.or(cluster.between),
    };
    let travel = |degree: u32, bytes: u64, exchanges: f64| match link(degree) {
        Some(Link { latency_s, bytes_per_s }) if degree > 1 => {
            exchanges * latency_s + bytes as f64 / ranks / bytes_per_s
        }
        _ => 0.0,
    };
    let (own, parameters) = (own as f64, spec.parameters.len() as f64);
    let exchanges = own * (parameters + EXCHANGES * spec.config().num_hidden_layers as f64);
    let context = travel(needs.context, needs.shared, exchanges);
    let folded = travel(needs.folded_ranks, needs.folded, 0.0);
    context + (folded - layers).max(0.0)
}

/// Every phase under each degree that its cut allows; nothing where no phase allows one.
pub fn compared(setting: Setting<'_>) -> Result<Vec<Degree>> {
    let Setting { spec, cluster, fleet } = setting;
    let firsts: Vec<u64> = spec.plan.phases().iter().map(|phase| phase.first_step).collect();
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
        let phases = firsts.iter().zip(&needs.phases).zip(exact);
        for ((first, needs), _) in phases.filter(|(_, exact)| *exact) {
            let time = estimate::step(Setting { fleet: &fleet, ..setting }, *first, needs)?;
            let (memory, Degrees { cp, tsp }) = (needs.memory.sum(), degrees);
            let (phase, fits) = (needs.name.clone(), memory <= cluster.memory_bytes);
            found.push(Degree { phase, cp, tsp, seconds: time.seconds, memory, fits });
        }
    }
    let shared = found.iter().any(|one| one.cp * one.tsp > 1);
    Ok(if shared { found } else { Vec::new() })
}
