//! A run on a cluster: how its ranks stand to each other, and what those wait that share micro-batches.

use super::cluster::{Cluster, Link};
use crate::plan::{Fleet, PhaseNeeds};
use crate::spec::RunSpec;

/// Exchanges of a layer of compressed attention along a line, both ways: rows beside a chunk, keys, values, their gradients.
const EXCHANGES: f64 = 8.0;

/// A run on a cluster.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// What is trained.
    pub spec: &'a RunSpec,
    /// On what.
    pub cluster: &'a Cluster,
    /// How its ranks work together.
    pub fleet: &'a Fleet,
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
