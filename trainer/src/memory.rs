//! What a process holds while it trains, by formula and as measured, in bytes.
//!
//! The formula adds up what can be alive at a time. Not all of it is at once (activations are gone when the last blocks
//! arrive), and it leaves out the program with its libraries, batches, and what kernels need inside: the first is measured
//! before anything is trained, the others are small except for what oneDNN keeps under bf16.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

use contract::{Fault, Result};
use kernels::tree::blocks;
use serde::Serialize;

use crate::exec::ExecOptions;
use crate::mesh::axes::Axis;
use crate::mesh::slices::Slices;
use crate::mesh::team::{self, Line, Nodes};
use crate::mesh::{Mesh, Schedule};
use crate::model::{Cut, ParamSpec};
use crate::spec::{PhaseModel, RunSpec};
use crate::state::ownership::{self, Piece};
use crate::workers::Workers;

/// Bytes by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holds {
    /// All weights, as the model reads them.
    pub weights: u64,
    /// The weights of this rank's pieces in f32, where the model reads them rounded.
    pub masters: u64,
    /// Moments of the pieces of this rank.
    pub moments: u64,
    /// What the leaves at work keep between their passes, and their chunk of logits.
    pub activations: u64,
    /// Gradients of leaves: one for each level of a block that waits for a partner, or for each worker where every leaf is a
    /// block; and what each worker has in flight.
    pub gradients: u64,
    /// Blocks, in memory that is sent or waits for the rank itself.
    pub sent: u64,
    /// This rank's pieces of the blocks of others, as a gate also those of owners elsewhere.
    pub received: u64,
    /// Partial sums of the pieces of this rank.
    pub sums: u64,
}

impl Holds {
    /// All of them.
    pub fn sum(self) -> u64 {
        let Holds { weights, masters, moments, activations, gradients, sent, received, sums } =
            self;
        weights + masters + moments + activations + gradients + sent + received + sums
    }
}

/// Who holds it: a rank among those of its line of gradients, by how they work together. Unless ranks share micro-batches
/// these are all ranks.
pub struct Holder<'a> {
    /// Its place on the line.
    pub rank: u32,
    /// Who of the line owns what of the gradients that travel along it.
    pub pieces: &'a [Piece],
    /// Which places share a machine, as seen from this one.
    pub nodes: &'a Nodes,
    /// How leaves are dealt.
    pub schedule: Schedule,
    /// Leaves computed at once.
    pub workers: Workers,
    /// How many ranks share each of them.
    pub context: u32,
}

/// All ranks, as they stand in a phase.
pub(crate) struct Ranks<'a> {
    names: &'a [String],
    mesh: Mesh,
    flat: bool,
    schedule: Schedule,
    workers: Workers,
    /// Of each line of gradients, by the place that its ranks have in the sharing of micro-batches.
    pieces: Vec<Cow<'a, [Piece]>>,
}

/// How ranks work together, whatever the phase.
#[derive(Clone, Copy)]
pub(crate) struct Ways<'a> {
    /// The machine of each rank.
    pub(crate) names: &'a [String],
    /// Who owns what.
    pub(crate) pieces: &'a [Piece],
    /// How many may share a micro-batch.
    pub(crate) context: u32,
    /// Whether machines are passed over.
    pub(crate) flat: bool,
    /// How leaves are dealt.
    pub(crate) schedule: Schedule,
    /// Leaves that each computes at once.
    pub(crate) workers: Workers,
}

impl<'a> Ways<'a> {
    /// The ranks as they stand in `step`.
    pub(crate) fn at(self, spec: &RunSpec, step: u64) -> Result<Ranks<'a>> {
        let Ways { names, pieces, context, flat, schedule, workers } = self;
        let mesh = Mesh::of(names.len() as u32, context, spec.model_at(step)?.cut.chunks);
        let slices = Slices::new(mesh, pieces, spec.parameters.len());
        let (pieces, workers) = match mesh.cp {
            1 => (vec![Cow::Borrowed(pieces)], workers),
            cp => {
                let of = |place| Cow::Owned(slices.pieces(pieces, place));
                ((0..cp).map(of).collect(), workers.one())
            }
        };
        Ok(Ranks { names, mesh, flat, schedule, workers, pieces })
    }
}

impl Ranks<'_> {
    /// What `rank` holds in `step`.
    pub(crate) fn holds(&self, spec: &RunSpec, step: u64, rank: u32) -> Result<Holds> {
        let Ranks { names, mesh, flat, schedule, workers, ref pieces } = *self;
        let Line { place, nodes, .. } = Line::data(mesh, names, rank, flat)?;
        let pieces = &pieces[mesh.place(Axis::Cp, rank) as usize];
        let (nodes, context) = (&nodes, mesh.cp);
        holds(spec, step, &Holder { rank: place, pieces, nodes, schedule, workers, context })
    }
}

/// What `holder` holds in `step`.
pub fn holds(spec: &RunSpec, step: u64, holder: &Holder<'_>) -> Result<Holds> {
    let PhaseModel { config, cut, .. } = spec.model_at(step)?;
    let dtype = spec.dtype_at(step);
    let step = spec.plan.step(step)?;
    // Of a gradient that ranks share each has its slice.
    let all = holder.pieces.iter().map(|piece| piece.length() as u64).sum::<u64>();
    let width = |parameter: &ParamSpec| parameter.kind(dtype).elt_size_in_bytes() as u64;
    let weights = spec.parameters.iter().map(|one| width(one) * one.elements());
    let mine = || holder.pieces.iter().filter(|piece| piece.owner == holder.rank);
    let masters = mine().filter(|piece| width(&spec.parameters[piece.tensor]) < 4);
    let leaves = step.batch / step.micro_batch;
    let world: u32 = holder.nodes.sizes().iter().sum();
    let parts = team::parts(holder.schedule, world, leaves)?;
    let own = parts[holder.rank as usize].iter().map(|part| part.end - part.start).sum::<u64>();
    let workers = own.min(holder.workers.count() as u64);
    let moments = mine().map(|piece| {
        let sets = 1 + u64::from(piece.rule.has_second_moment());
        4 * sets * piece.length() as u64
    });
    let (tokens, ranks) = (step.micro_batch * u64::from(step.seq_len), u64::from(holder.context));
    let here = Cut { chunks: cut.chunks / ranks, ..*cut };
    let options = holder.workers.options().cut(here);
    let activations = crate::model::activation_bytes(config, tokens / ranks, options, dtype)
        + if ranks > 1 { crate::model::gathered_bytes(config, tokens, dtype) } else { 0 };
    let pending = parts[holder.rank as usize].iter().flat_map(levels).max().unwrap_or(0);
    // Workers in one block add to the same nodes. Each of several has one leaf at work, and one more may wait for its turn.
    let whole = match u64::from(pending) {
        0 => workers + u64::from(workers > 1 && own > workers),
        pending => pending + workers.saturating_sub(1) / 2,
    };
    // A worker's layer, and the head's gradient, which waits for the embedding's at the end of the pass.
    let embedding = spec.parameters.first().map_or(0, ParamSpec::elements);
    let whole_model: u64 = spec.parameters.iter().map(ParamSpec::elements).sum();
    let layer = (whole_model - embedding) / config.num_hidden_layers as u64;
    // Of several chunks, one at work and a sum that waits at each level of their tree; and the head's beside the embedding's. Of
    // what is shared, what others get and what comes from them.
    let in_flight = match u64::from(u64::BITS - (here.chunks - 1).leading_zeros()) {
        0 => embedding + layer,
        levels => embedding * (levels + 2) + layer * (levels + 1),
    };
    let in_flight = in_flight + if ranks > 1 { 2 * embedding } else { 0 };
    let (sent, received, sums) = travelling(&parts, holder, all, leaves);
    Ok(Holds {
        weights: weights.sum(),
        masters: masters.map(|piece| 4 * piece.length() as u64).sum(),
        moments: moments.sum(),
        activations: workers * activations,
        gradients: 4 * (all * whole + workers * in_flight),
        sent,
        received,
        sums,
    })
}

/// Refuses a run that by the formula needs more memory than the machine has: the operating system would end it without a
/// word. `names` are the machines of all ranks, `me` is this one; of its machine all ranks count.
pub(crate) fn refuse(spec: &RunSpec, exec: &ExecOptions, names: &[String], me: u32) -> Result<()> {
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, names.len() as u32);
    let here = (0u32..).zip(names).filter(|(_, name)| **name == names[me as usize]);
    let here: Vec<u32> = here.map(|(rank, _)| rank).collect();
    // A number format may change in the middle of a phase, which is then cut there.
    let amended = spec.curriculum.amendments.iter().filter(|one| one.numbers.dtype.is_some());
    let firsts = spec.plan.phases().iter().map(|phase| phase.first_step);
    let firsts: BTreeSet<u64> = firsts.chain(amended.map(|one| one.step)).collect();
    for first in firsts {
        let phase = &spec.plan.phases()[spec.plan.step(first)?.phase];
        let (mut all, mut mine) = (0, Holds::default());
        let ways = Ways {
            names,
            pieces: &pieces,
            context: exec.context,
            flat: exec.flat,
            schedule: exec.schedule,
            workers: exec.workers,
        };
        let ranks = ways.at(spec, first)?;
        for rank in here.iter().copied() {
            let found = ranks.holds(spec, first, rank)?;
            all += found.sum();
            mine = if rank == me { found } else { mine };
        }
        if all > exec.memory {
            return Err(too_large(&phase.name, (all, exec.memory), mine, here.len()));
        }
    }
    Ok(())
}

fn too_large(phase: &str, (needed, there): (u64, u64), mine: Holds, ranks: usize) -> Fault {
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
    let Holds { weights, masters, moments, activations, gradients, sent, received, sums } = mine;
    Fault::machine("this run needs more memory than the machine has")
        .at(format!("phase {phase:?}"))
        .found(format!(
            "{} for {ranks} ranks on this machine; of it for this one: weights {}, moments {}, activations {}, gradients {}, \
             exchanged {}",
            gib(needed),
            gib(weights + masters),
            gib(moments),
            gib(activations),
            gib(gradients),
            gib(sent + received + sums)
        ))
        .wanted(format!("at most {}", gib(there)))
        .hint("give --recompute, fewer --workers, smaller micro-batches, or more machines with --schedule streaming")
}

/// The memory that this process may use: the machine's, or what its control group leaves it. More than there can be where the
/// system does not say.
pub(crate) fn of_machine() -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let machine = read("/proc/meminfo");
    let machine = machine.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let machine = machine.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let groups = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let groups = groups.iter().filter_map(|path| read(path).trim().parse::<u64>().ok());
    groups.chain(machine.map(|kilobytes| kilobytes << 10)).min().unwrap_or(u64::MAX)
}

fn levels(part: &Range<u64>) -> Vec<u32> {
    blocks(part.start, part.end).into_iter().map(|(level, _)| level).collect()
}

/// Bytes of blocks sent and received at a time, and of the owner's partial sums.
fn travelling(
    parts: &[Vec<Range<u64>>],
    Holder { rank, pieces, nodes, context, .. }: &Holder<'_>,
    all: u64,
    leaves: u64,
) -> (u64, u64, u64) {
    let own = ownership::length(pieces, *rank) as u64;
    if parts.len() == 1 && *context == 1 {
        // Alone it is the counter of the step: its pending levels are gradients already.
        return (0, 0, 0);
    }
    let bag =
        nodes.behind(*rank).map(|owner| ownership::length(pieces, owner) as u64).sum::<u64>() + own;
    let rounds = parts[0].len();
    let count = |part: &Range<u64>| levels(part).len() as u64;
    // A round is sent and received while the next one is computed; on several machines one more is under way to owners.
    let most = |by_round: &dyn Fn(usize) -> u64, together: usize| {
        let sums =
            (0..rounds).map(|first| (first..rounds.min(first + together)).map(by_round).sum());
        sums.max().unwrap_or(0)
    };
    let together = 1 + usize::from(nodes.count() > 1);
    let mine = |round: usize| 4 * all * count(&parts[*rank as usize][round]);
    let near = |round: usize| {
        let ranks = nodes.ranks(nodes.here()).filter(|other| other != rank);
        ranks.map(|other| 4 * bag * count(&parts[other as usize][round])).sum::<u64>()
    };
    let far = |round: usize| {
        let part = |node: usize| {
            let Range { start, end } = nodes.ranks(node);
            parts[start as usize][round].start..parts[end as usize - 1][round].end
        };
        nodes.others().map(|node| 4 * own * count(&part(node))).sum::<u64>()
    };
    // Where there is one round, blocks that arrived are added into each other.
    let pending = u64::from(u64::BITS - (leaves - 1).leading_zeros());
    let sums = if rounds > 1 { 4 * own * pending } else { 0 };
    (most(&mine, 1), most(&|round| near(round) + far(round), together), sums)
}

/// The resident size of this process: now, and at its largest. 0 where the system does not say.
pub fn resident() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kilobytes.unwrap_or(0) << 10
    };
    (field("VmRSS:"), field("VmHWM:"))
}
