//! Mixes that react to the loss: what of them is fixed, by the ledger of a run if one is named, and what is bounded.

use std::path::PathBuf;

use contract::Result;
use curriculum::{MIX_PARTS, Reaction};
use ingest::inspect::{grouped as count, many};
use loader::OpenedCurriculum;
use mixer::{DataPlan, PhasePlan};
use serde::Serialize;
use store::Location;

use super::output;

/// The run whose losses fix data.
#[derive(clap::Args)]
pub(crate) struct FollowedRun {
    /// The folder of a run of this curriculum: its losses fix what a mix that reacts to the loss reads.
    #[arg(long, value_name = "RUN", value_parser = super::local("copy the run here"))]
    run: Option<PathBuf>,
}

impl FollowedRun {
    /// Opens a curriculum, its plan as far as the run has trained.
    pub(crate) fn opened(&self, curriculum: &Location) -> Result<OpenedCurriculum> {
        let mut opened = super::opened(curriculum)?;
        if let Some(run) = &self.run {
            opened.follow(run)?;
        }
        Ok(opened)
    }
}

/// How a mix reacts.
#[derive(Serialize)]
pub(crate) struct ReactionRow {
    rule: &'static str,
    window: u64,
    /// The last step of the mix whose weights are fixed.
    fixed_until: u64,
    /// Sequences of the steps after it.
    open: u64,
    windows: Vec<WindowRow>,
    bounds: Vec<BoundRow>,
}

/// A window whose weights are known.
#[derive(Serialize)]
struct WindowRow {
    first_step: u64,
    last_step: u64,
    /// In parts of 65,536.
    weights: Vec<(String, u64)>,
}

/// What a source gets in the steps that are not fixed.
#[derive(Serialize)]
struct BoundRow {
    name: String,
    /// The least and the greatest share, unless a source runs out.
    shares: [f64; 2],
    /// The share above which too little text is left for later phases; `None` if each share leaves enough.
    share_for_later: Option<f64>,
}

impl ReactionRow {
    pub(crate) fn new(
        plan: &DataPlan,
        first: &PhasePlan,
        last: &PhasePlan,
        reaction: &Reaction,
    ) -> Self {
        let steps = first.first_step..last.last_step() + 1;
        let of_mix = plan.windows().iter().filter(|window| steps.contains(&window.first_step));
        let window = |window: &mixer::MixWindow| WindowRow {
            first_step: window.first_step,
            last_step: window.last_step,
            weights: window.weights.clone(),
        };
        let fixed = plan.fixed_until().clamp(first.first_step - 1, last.last_step());
        let samples = |step: u64| plan.step(step).map_or(plan.samples(), |step| step.first_sample);
        let floors = reaction.floor_parts();
        let all: u64 = floors.iter().sum();
        let share = |parts: u64| parts as f64 / MIX_PARTS as f64;
        let mut for_later = plan.weights_for_later(&first.mix_key).into_iter();
        let bound = |(name, floor): (&String, &u64)| {
            let most = MIX_PARTS - (all - floor);
            let for_later = for_later.next().flatten().filter(|parts| *parts < most);
            BoundRow {
                name: name.clone(),
                shares: [share(*floor), share(most)],
                share_for_later: for_later.map(share),
            }
        };
        ReactionRow {
            rule: reaction.rule.name(),
            window: reaction.window,
            fixed_until: fixed,
            open: samples(last.last_step() + 1) - samples(fixed + 1),
            windows: of_mix.map(window).collect(),
            bounds: reaction.start.keys().zip(&floors).map(bound).collect(),
        }
    }

    pub(crate) fn text(&self) -> String {
        let ReactionRow { rule, window, fixed_until, open, windows, bounds } = self;
        let mut out = format!(
            "  reacts to the loss by {rule}, in windows of {}; {} fixed, up to step {}\n",
            many(*window, "step"),
            many(windows.len() as u64, "window"),
            count(*fixed_until)
        );
        if *open == 0 {
            return out;
        }
        out += &format!(
            "  the other {} have the last weights here; with losses, of them\n",
            many(*open, "sequence")
        );
        for BoundRow { name, shares: [least, most], share_for_later } in bounds {
            let sequences = |share: f64| count((share * *open as f64) as u64);
            let later = share_for_later.map_or(String::new(), |share| {
                format!("; above {:.2} % too little is left for later phases", share * 100.0)
            });
            out += &format!(
                "    {}: {:.2} to {:.2} %, {} to {}{later}\n",
                output::plain(name),
                least * 100.0,
                most * 100.0,
                sequences(*least),
                sequences(*most)
            );
        }
        out
    }
}
