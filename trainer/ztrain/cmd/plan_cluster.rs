//! `ztrain plan --cluster`: how fast a run will be, what it will lose to failures, and what to change.

use std::path::PathBuf;

use contract::{Fault, Result, terminal};
use serde::Serialize;
use tools::chart::Chart;
use tools::plan::RunNeeds;
use tools::sizing::degrees::{self, Degree};
use tools::sizing::estimate::{self, CheckpointCost, PlannedRun, StepTime};
use tools::sizing::faults::{FailureModel, Simulation, between, simulate};
use tools::sizing::hints::{self, seconds};

use super::drawing::Drawing;

/// What is asked of the plan besides.
#[derive(clap::Args)]
pub(super) struct ClusterArgs {
    /// Say how fast it will be: a description of the machines (`ztrain bench gemm --out FILE` begins one), or
    /// mi300x-pollara or h100, published figures. Ranks, ranks a machine and memory are then the description's where
    /// they are not given.
    #[arg(long, value_name = "FILE|NAME")]
    pub(super) cluster: Option<String>,
    /// Compare how many ranks may share a micro-batch (`--cp`, `--tsp`): seconds and memory of each degree that a phase
    /// allows.
    #[arg(long, requires = "cluster")]
    compare_degrees: bool,
    /// Simulate so many days of the first phase, with the failures that the cluster has.
    #[arg(long, value_name = "DAYS", requires = "cluster", value_parser = clap::value_parser!(u32).range(1..=3650))]
    simulate: Option<u32>,
    /// Which failures the simulation draws.
    #[arg(long, value_name = "SEED", requires = "simulate", default_value_t = 1)]
    seed: u64,
    /// Steps between checkpoints in the simulation [default: the best by Daly's formula].
    #[arg(long, value_name = "N", requires = "simulate", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: Option<u64>,
    /// Simulate with the failures of so many ranks, at the same seconds a step [default: --ranks].
    #[arg(long, value_name = "N", requires = "simulate", value_parser = clap::value_parser!(u32).range(1..))]
    simulate_ranks: Option<u32>,
    /// Draw the simulated days as SVG.
    #[arg(long, value_name = "FILE", requires = "simulate", value_parser = super::local("draw into a file here"))]
    plot: Option<PathBuf>,
}

/// What a cluster makes of a run.
#[derive(Serialize)]
pub(super) struct ClusterEstimate {
    cluster: String,
    assumed: Vec<String>,
    phases: Vec<PhaseEstimate>,
    degrees: Vec<Degree>,
    simulated: Option<SimulatedRun>,
}

#[derive(Serialize)]
struct PhaseEstimate {
    time: StepTime,
    keeping: Option<CheckpointCost>,
    hints: Vec<String>,
}

#[derive(Serialize)]
struct SimulatedRun {
    run: FailureModel,
    expected_goodput: f64,
    found: Simulation,
}

/// Works it out.
pub(super) fn estimate(
    args: &ClusterArgs,
    setting: PlannedRun<'_>,
    needs: &RunNeeds,
) -> Result<ClusterEstimate> {
    let plot = args.plot.as_deref().map(|path| Drawing::at("--plot", path)).transpose()?;
    let mut phases = Vec::new();
    for phase in &needs.phases {
        let time = estimate::step(setting, phase)?;
        let keeping = estimate::keeping(setting, &needs.checkpoint, time.seconds);
        let mut hints = hints::of_phase(setting, phase, &time, keeping.as_ref())?;
        if phases.is_empty() {
            hints.extend(hints::of_shapes(setting.spec.config()));
        }
        phases.push(PhaseEstimate { time, keeping, hints });
    }
    let simulated =
        args.simulate.map(|days| simulated(args, setting, &phases, days)).transpose()?;
    if let (Some(plot), Some(SimulatedRun { found, run, .. })) = (&plot, &simulated) {
        plot.put(&month(found, *run).svg())?;
    }
    let degrees = if args.compare_degrees { degrees::compared(setting)? } else { Vec::new() };
    if args.compare_degrees && degrees.is_empty() {
        return Err(Fault::usage("no phase of this curriculum allows ranks to share a micro-batch")
            .at("--compare-degrees")
            .wanted("context_chunks (and weight_shards) in a phase, which degrees divide, as they do the ranks"));
    }
    let cluster = setting.cluster.name.clone();
    Ok(ClusterEstimate {
        cluster,
        assumed: setting.cluster.assumed.clone(),
        phases,
        degrees,
        simulated,
    })
}

fn simulated(
    args: &ClusterArgs,
    setting: PlannedRun<'_>,
    phases: &[PhaseEstimate],
    days: u32,
) -> Result<SimulatedRun> {
    let nothing = || {
        Fault::usage("the cluster does not say how often ranks fail")
            .at("--simulate")
            .wanted("[checkpoint] and [faults] in its description")
            .hint("[checkpoint] has copy_bytes_per_s and write_bytes_per_s, [faults] per_rank_hour and restart_s")
    };
    let first = phases.first().ok_or_else(nothing)?;
    let keeping = first.keeping.ok_or_else(nothing)?;
    let faults = setting.cluster.faults.ok_or_else(nothing)?;
    let ranks = args.simulate_ranks.unwrap_or(setting.fleet.ranks);
    let between = between(ranks, faults.per_rank_hour);
    let CheckpointCost { stall, write, .. } = keeping;
    let best = estimate::best_steps(stall, write, between, first.time.seconds);
    let every = args.checkpoint_every.unwrap_or(best);
    let run =
        FailureModel { step: first.time.seconds, every, stall, between, restart: faults.restart_s };
    let found = simulate(run, days, args.seed);
    Ok(SimulatedRun { run, expected_goodput: run.goodput(), found })
}

/// Steps day by day: those kept so far in per cent of what no failure would have let pass, those lost, and failures.
fn month(found: &Simulation, run: FailureModel) -> Chart {
    let a_day = 86_400.0 / run.step;
    let (mut kept, mut goodput) = (0, Vec::new());
    let (mut lost, mut failures) = (Vec::new(), Vec::new());
    for (number, day) in (1u32..).zip(&found.days) {
        kept += day.kept;
        let at = f64::from(number);
        goodput.push((at, 100.0 * kept as f64 / (at * a_day)));
        lost.push((at, 100.0 * day.lost as f64 / a_day));
        failures.push((at, day.failures as f64));
    }
    Chart {
        title: format!("simulated days of training: goodput {:.1} %", 100.0 * found.goodput),
        log: false,
        curves: vec![
            ("kept so far, %".to_owned(), goodput),
            ("lost that day, %".to_owned(), lost),
            ("failures that day".to_owned(), failures),
        ],
    }
}

impl ClusterEstimate {
    /// For people.
    pub(super) fn text(&self) -> String {
        let mut lines = vec![format!("\non {}:", terminal::name(&self.cluster))];
        lines
            .extend(self.assumed.iter().map(|what| format!("  assumed: {}", terminal::name(what))));
        self.phases.iter().for_each(|phase| phase.lines(self, &mut lines));
        lines.extend(self.degree_lines());
        if let Some(SimulatedRun { run, expected_goodput, found }) = &self.simulated {
            lines.push(format!(
                "simulated {} days: {} steps kept, {} lost, {} failures, {} restarts, {} of stalls, {} of restarts",
                found.days.len(),
                found.kept,
                found.lost,
                found.failures,
                found.restarts,
                seconds(found.stalled),
                seconds(found.restarting)
            ));
            lines.push(format!(
                "  goodput {:.2} %; {:.2} % by the closed form with a checkpoint every {} steps",
                100.0 * found.goodput,
                100.0 * expected_goodput,
                run.every
            ));
        }
        lines.join("\n") + "\n"
    }

    /// A phase for people, with its first step where the batch or the dtype changes within the phase of that name.
    fn named(&self, phase: &str, first_step: u64) -> String {
        let name = terminal::name(phase);
        match self.phases.iter().filter(|one| one.time.phase == phase).count() {
            0 | 1 => name.to_string(),
            _ => format!("{name} from step {first_step}"),
        }
    }

    /// A line for each degree, the fastest that fits marked.
    fn degree_lines(&self) -> Vec<String> {
        let line = |one: &Degree| {
            let of_phase = |other: &&Degree| other.first_step == one.first_step && other.fits;
            let best = self
                .degrees
                .iter()
                .filter(of_phase)
                .map(|other| other.seconds)
                .fold(f64::INFINITY, f64::min);
            let word = match (one.fits, one.seconds <= best) {
                (false, _) => "  does not fit",
                (true, true) => "  the fastest that fits",
                (true, false) => "",
            };
            format!(
                "phase {} with --cp {} --tsp {}: {} a step, {} in the rank that holds most{word}",
                self.named(&one.phase, one.first_step),
                one.cp,
                one.tsp,
                seconds(one.seconds),
                contract::words::bytes(one.memory)
            )
        };
        self.degrees.iter().map(line).collect()
    }
}

impl PhaseEstimate {
    fn lines(&self, all: &ClusterEstimate, lines: &mut Vec<String>) {
        let time = &self.time;
        lines.push(format!(
            "phase {}: {} a step, {:.0} tokens/s, utilisation {:.1} %, {} in all",
            all.named(&time.phase, time.first_step),
            seconds(time.seconds),
            time.tokens_per_s,
            100.0 * time.utilisation,
            seconds(time.days * 86_400.0)
        ));
        lines.push(format!(
            "  {} micro-batches on the busiest rank, in {} rounds",
            time.micro_batches, time.rounds
        ));
        for (name, spent) in time.parts.iter().filter(|(_, spent)| *spent > 0.0) {
            lines.push(format!(
                "  {:>10} {:>5.1}%  {name}",
                seconds(*spent),
                100.0 * spent / time.seconds
            ));
        }
        lines
            .push(format!("  exactness: {:.1} % of a step", 100.0 * time.exactness / time.seconds));
        if time.gradients > 0.0 {
            lines.push(format!(
                "  exchange: gradients travel {}, of which {} are hidden; new weights {}",
                seconds(time.gradients),
                seconds(time.hidden),
                seconds(time.weights)
            ));
        }
        if let Some(CheckpointCost { stall, write, between, every, goodput }) = self.keeping {
            lines.push(format!(
                "  checkpoint: stalls {}, writes {} while steps run; best every {every} steps ({})",
                seconds(stall),
                seconds(write),
                seconds(every as f64 * time.seconds)
            ));
            lines.push(format!(
                "  failures: one in {}; {:.2} % of the time is lost to them and to checkpoints",
                seconds(between),
                100.0 * (1.0 - goodput)
            ));
        }
        lines.extend(self.hints.iter().map(|hint| format!("  hint: {hint}")));
    }
}
