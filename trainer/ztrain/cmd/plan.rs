//! `ztrain plan`: the needs of a run, before anything is allocated.

use clap::builder::RangedU64ValueParser;
use contract::words::{bytes as size, flops};
use contract::{Result, terminal};
use loader::{OpenedCurriculum, steps_without_labels, without_labels};
use store::Location;
use tools::plan::{Fleet, PhaseNeeds, ReplicaNeeds, RunNeeds, SentInStep, needs};
use tools::sizing::estimate::PlannedRun;
use tools::sizing::{Cluster, ClusterDescription};
use trainer::RunSpec;
use trainer::memory::MemoryUse;
use trainer::mesh::Degrees;
use trainer::model::ActivationCheckpointing;
use trainer::workers::Workers;

use super::plan_cluster::{self, ClusterArgs};
use super::ranks::GradReduceName;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to train; a store stub is enough. Nothing is written.
    #[arg(value_name = "CURRICULUM", value_parser = super::place())]
    curriculum: Location,
    /// How many ranks train it [default: the cluster's, or 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,
    /// How many of them share a machine [default: the cluster's, or all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ranks_per_node: Option<u32>,
    /// What each rank computes on: cpu (the ranks of a machine share its memory, as large as this one's), mi300x,
    /// mi325x, h100, h200 or b200 (each rank has one).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: String,
    /// Micro-batches that a rank computes at once [default: 1].
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    workers: Option<usize>,
    /// Activation checkpointing, as `ztrain --recompute`.
    #[arg(long)]
    recompute: bool,
    /// As `ztrain --grad-reduce`.
    #[arg(long, value_name = "HOW", value_enum, default_value = "whole")]
    grad_reduce: GradReduceName,
    /// As `ztrain --cp`: how many ranks may share a micro-batch.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    cp: u32,
    /// As `ztrain --tsp`: how many ranks may hold weights for each other.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    tsp: u32,
    /// As `ztrain --no-hierarchical`.
    #[arg(long)]
    no_hierarchical: bool,
    /// Print one JSON object; sizes in bytes.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    on: ClusterArgs,
}

/// Tells.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let keep = if args.recompute {
        ActivationCheckpointing::LayerInputs
    } else {
        ActivationCheckpointing::Everything
    };
    let cluster = args.on.cluster.as_deref();
    let cluster =
        cluster.map(|place| ClusterDescription::read(place)?.resolve(place)).transpose()?;
    let of_cluster = |of: fn(&Cluster) -> u32| cluster.as_ref().map(of);
    let ranks = args.ranks.or(of_cluster(|it| it.ranks)).unwrap_or(1);
    let per_node = args.ranks_per_node.or(of_cluster(|it| it.ranks_per_node)).unwrap_or(ranks);
    let workers = args.workers.or(cluster.as_ref().map(|it| it.workers)).unwrap_or(1);
    let fleet = Fleet {
        ranks,
        ranks_per_node: per_node.min(ranks),
        workers: Workers::new(workers).keeping(keep),
        grad_reduce: args.grad_reduce.grad_reduce(),
        flat: args.no_hierarchical,
        degrees: Degrees { cp: args.cp, tsp: args.tsp },
        device: args.device,
    };
    let opened = OpenedCurriculum::open(&args.curriculum)?;
    let spec = RunSpec::for_planning(&opened)?;
    trainer::refuse_unshared(&spec, fleet.ranks, fleet.degrees)?;
    let mut needs = needs(&spec, &fleet)?;
    needs.without_labels = steps_without_labels(&opened)?;
    let estimate = match &cluster {
        Some(cluster) => {
            needs.place_on(&cluster.name, cluster.memory_bytes);
            let setting = PlannedRun { spec: &spec, cluster, fleet: &fleet };
            Some(plan_cluster::estimate(&args.on, setting, &needs)?)
        }
        None => None,
    };
    match (args.json, estimate) {
        (true, None) => terminal::print_raw(&format!("{}\n", serde_json::json!(needs)))?,
        (true, Some(estimate)) => {
            let both = serde_json::json!({ "needs": needs, "sizing": estimate });
            terminal::print_raw(&format!("{both}\n"))?;
        }
        (false, estimate) => {
            // With a cluster this is among what to change.
            let notes = || trainer::idle_ranks(&spec, fleet.ranks, fleet.degrees).join("\n") + "\n";
            let estimate = estimate.map_or_else(notes, |estimate| estimate.text());
            terminal::print(&(text(&needs, &fleet) + estimate.trim_start_matches('\n')))?;
        }
    }
    Ok(0)
}

fn text(needs: &RunNeeds, fleet: &Fleet) -> String {
    let RunNeeds { parameters, active_parameters, ranks, machines, device, checkpoint, .. } = needs;
    let mut lines = vec![format!(
        "{:.1}M parameters, {:.1}M active | ranks {ranks}, machines {machines} | {} | {device}",
        *parameters as f64 / 1e6,
        *active_parameters as f64 / 1e6,
        fleet.grad_reduce.name(),
    )];
    // A batch that changes often has a segment for each size: the first and the last stand for all.
    for segments in needs.phases.chunk_by(|one, next| one.name == next.name) {
        lines.extend(phase_lines(&segments[0], needs));
        if let [_, between @ .., last] = segments {
            if !between.is_empty() {
                let all: u64 = between.iter().map(|segment| segment.steps).sum();
                lines.push(format!(
                    "phase {} | {all} steps of {} other segments",
                    terminal::name(&last.name),
                    between.len()
                ));
            }
            lines.extend(phase_lines(last, needs));
        }
    }
    lines.push(format!(
        "checkpoint: {} of tensors and a manifest of {} in {} files, whose headers add some kilobytes; at most {} in {} \
         files from one rank",
        size(checkpoint.bytes),
        size(checkpoint.manifest),
        checkpoint.files,
        size(checkpoint.largest_part),
        checkpoint.most_files
    ));
    let pinned = if device == "cpu" { "" } else { ", pinned" };
    lines.push(format!(
        "  while it is written the ranks of a machine hold copies of their parts: at most {} of the host's memory{pinned}",
        size(checkpoint.copies)
    ));
    if *ranks > 1 {
        let ReplicaNeeds { largest_rank, sent } = needs.replicas;
        lines.push(format!(
            "with --replicate besides: {} in the rank that holds most, {} sent in each step",
            size(largest_rank),
            size(sent)
        ));
    }
    lines.push(format!("ledger at the end: {}", size(needs.ledger_bytes)));
    if let Some(last) = needs.fixed_until {
        lines.push(format!(
            "data: fixed up to step {last}; what later steps read follows from losses, within the bounds of `zdata plan`"
        ));
    }
    if !needs.fits {
        lines.push(
            "this does not fit: give --recompute, more ranks, smaller micro-batches, or --grad-reduce bucketed".to_owned(),
        );
    }
    lines.join("\n") + "\n" + &without_labels(&needs.without_labels)
}

fn phase_lines(phase: &PhaseNeeds, needs: &RunNeeds) -> Vec<String> {
    let PhaseNeeds { steps, batch, micro_batch, seq_len, largest_rank, memory, sent, .. } = phase;
    let MemoryUse { weights, masters, moments, activations, gradients, sent: out, received, sums } =
        *memory;
    let SentInStep {
        gradients_within_machines,
        gradients_between_machines,
        weights_within_machines,
        weights_between_machines,
    } = *sent;
    let room = match needs.device.as_str() {
        "cpu" => format!(
            "the ranks of a machine hold {} of {}",
            size(phase.machine_bytes),
            size(needs.device_bytes)
        ),
        device => format!("{device} has {}", size(needs.device_bytes)),
    };
    let parts = [
        ("weights", weights),
        ("f32 weights of its own pieces", masters),
        ("moments", moments),
        ("activations", activations),
        ("gradients", gradients),
        ("exchange", out + received + sums),
    ];
    let there = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> = there.map(|(name, bytes)| format!("{name} {}", size(bytes))).collect();
    let gone = match activations {
        0 => " (while weights are sent: activations are freed by then)",
        _ => "",
    };
    let mut lines = vec![
        format!(
            "phase {} | {steps} steps of {batch} x {seq_len} tokens in {} micro-batches of {micro_batch} | at most {} \
             a step",
            terminal::name(&phase.name),
            batch / micro_batch,
            flops(phase.model_flops)
        ),
        format!("  memory: rank {largest_rank} holds most, {}; {room}", size(memory.sum())),
        format!("    {}{gone}", parts.join(", ")),
        format!(
            "  sent in a step (data-parallel axis, all ranks): {} within machines, {} between them",
            size(gradients_within_machines + weights_within_machines),
            size(gradients_between_machines + weights_between_machines)
        ),
        format!(
            "    gradients {} and {}, new weights {} and {}",
            size(gradients_within_machines),
            size(gradients_between_machines),
            size(weights_within_machines),
            size(weights_between_machines)
        ),
        format!("  ledger: {} a step", size(phase.ledger_bytes)),
    ];
    lines.splice(5..5, shared_lines(phase));
    lines
}

/// Of ranks that share micro-batches.
fn shared_lines(phase: &PhaseNeeds) -> Vec<String> {
    let tier = |within| if within { "within machines" } else { "within machines and between them" };
    let mut lines = Vec::new();
    if phase.context > 1 {
        let shared = format!(
            "  sent in a step (context axis, {} ranks share a micro-batch): at most {} {}; attention uneven by {:.1} %",
            phase.context,
            size(phase.shared),
            tier(phase.shared_within_machines),
            100.0 * phase.uneven
        );
        lines.push(shared);
    }
    if phase.folded_ranks > 1 {
        let folded = format!(
            "  sent in a step (folded axis, {} of these hold weights for each other): {} {}",
            phase.folded_ranks,
            size(phase.folded),
            tier(phase.folded_within_machines)
        );
        lines.push(folded);
    }
    lines
}
