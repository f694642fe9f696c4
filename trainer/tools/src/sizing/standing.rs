//! A run on a cluster: the arrangement of its ranks, and how long ranks that share micro-batches wait for each other.

use super::cluster::{Cluster, NetworkLink};
use crate::plan::{Fleet, PhaseNeeds};
use trainer::spec::RunSpec;

/// Exchanges of a CCA layer along a line, forward and backward: adjacent rows, keys, values, their gradients.
const EXCHANGES: f64 = 8.0;

/// A run on a cluster.
#[derive(Clone, Copy)]
pub struct PlannedRun<'a> {
    /// The run.
    pub spec: &'a RunSpec,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The number of its ranks and how they work together.
    pub fleet: &'a Fleet,
}

/// The arrangement of the ranks in a phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankArrangement {
    /// Ranks that share a micro-batch.
    pub(super) together: u64,
    /// Ranks, or groups of these, that compute different micro-batches.
    pub(super) lines: u64,
    /// Micro-batches that each computes at once.
    pub(super) workers: u64,
}

impl RankArrangement {
    pub(super) fn new(fleet: &Fleet, needs: &PhaseNeeds) -> RankArrangement {
        let together = u64::from(needs.context.max(1));
        let workers = if together > 1 { 1 } else { fleet.workers.count() as u64 };
        RankArrangement { together, lines: u64::from(fleet.ranks) / together, workers }
    }
}

/// Seconds of a step in which a rank waits for the ranks that share its `own` micro-batches; computing their layers
/// takes it `layers` seconds.
pub(super) fn waits(
    PlannedRun { spec, cluster, fleet }: PlannedRun<'_>,
    needs: &PhaseNeeds,
    own: u64,
    layers: f64,
) -> f64 {
    let ranks = f64::from(fleet.ranks);
    let link = |degree: u32| match degree > fleet.ranks_per_node {
        true => cluster.between.or(cluster.within),
        false => cluster.within.or(cluster.between),
    };
    let travel = |degree: u32, bytes: u64, exchanges: f64| match link(degree) {
        Some(NetworkLink { latency_s, bytes_per_s }) if degree > 1 => {
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
