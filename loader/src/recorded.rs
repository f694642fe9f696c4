//! The losses of a run by source, from its ledger: what fixes the data of a mix that reacts.
//!
//! Every line is read, and its chain checked. The weights that the ledger has must be those that follow from its
//! losses.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

use contract::{Digest, Fault, Result, SourceSums, chain};
use mixer::{DataPlan, MixWindow, WindowLosses};
use serde::Deserialize;
use store::regular;

use crate::OpenedCurriculum;
use crate::open::no_run;

/// What a step's line says of losses and weights.
#[derive(Deserialize)]
struct Line {
    step: u64,
    sources: BTreeMap<String, SourceSums>,
    #[serde(default)]
    mix_weights: Option<BTreeMap<String, u64>>,
}

/// A run's losses in the windows of a plan.
pub struct RecordedLosses {
    /// The losses.
    pub losses: WindowLosses,
    /// The weights that it has, by the first steps of windows.
    weights: BTreeMap<u64, BTreeMap<String, u64>>,
    place: String,
}

impl OpenedCurriculum {
    /// Extends the plan by the losses of the run in `root`.
    pub fn follow(&mut self, root: &Path) -> Result<()> {
        let ledger = root.join("ledger.jsonl");
        if !ledger.exists() {
            return Err(no_run(root, "ledger.jsonl"));
        }
        self.plan = extended(&self.plan, &ledger, u64::MAX)?;
        Ok(())
    }
}

/// `plan` with the windows that follow from the ledger's steps up to `through`.
pub fn extended(plan: &Arc<DataPlan>, ledger: &Path, through: u64) -> Result<Arc<DataPlan>> {
    match plan.reacts() {
        false => Ok(Arc::clone(plan)),
        true => RecordedLosses::read(plan, ledger, through)?.extend(plan),
    }
}

impl RecordedLosses {
    /// Reads the ledger's steps up to `through`; an incomplete last line is ignored.
    pub fn read(plan: &DataPlan, ledger: &Path, through: u64) -> Result<Self> {
        let place = |number: u64| format!("{}:{}", ledger.display(), number + 1);
        let broken = |number: u64, what: &str| {
            Fault::mismatch(format!("this line of the ledger was changed: {what}"))
                .at(place(number))
                .hint("restore the file; nothing after a changed line can be trusted")
        };
        let fault = |error| Fault::io("read", ledger, &error);
        let mut lines = BufReader::new(regular::open(ledger).map_err(fault)?);
        let (mut losses, mut weights) = (plan.losses(), BTreeMap::new());
        let (mut line, mut link, mut number) = (Vec::new(), Digest::default(), 0);
        while number <= through {
            line.clear();
            lines.read_until(b'\n', &mut line).map_err(fault)?;
            let Some(text) = chain::whole(&line) else { break };
            let opened = std::str::from_utf8(text).ok().and_then(|text| chain::open(link, text));
            let (body, after) = opened.ok_or_else(|| broken(number, "its chain is broken"))?;
            link = after;
            if number > 0 && losses.matters(number) {
                let said: Line = serde_json::from_str(&body)
                    .map_err(|error| broken(number, &format!("it cannot be read: {error}")))?;
                if said.step != number {
                    return Err(broken(number, &format!("it should be step {number}")));
                }
                weights.extend(said.mix_weights.map(|weights| (number, weights)));
                let sums = said.sources.iter();
                losses.add(sums.map(|(name, it)| (name.as_str(), it.labels, it.loss.float())));
            } else if number > 0 {
                losses.add([]);
            }
            number += 1;
        }
        Ok(RecordedLosses { losses, weights, place: ledger.display().to_string() })
    }

    /// `plan` with the windows that follow; an error if the ledger has other weights.
    pub fn extend(&self, plan: &DataPlan) -> Result<Arc<DataPlan>> {
        let plan = plan.extended(&self.losses)?;
        let recorded = plan.windows().iter().filter(|it| it.first_step <= self.losses.through());
        for window in recorded {
            let found = self.weights.get(&window.first_step);
            compare(window, found)
                .map_err(|fault| fault.at(format!("{}:{}", self.place, window.first_step + 1)))?;
        }
        match self.weights.keys().find(|step| plan.window_at(**step).is_none()) {
            None => Ok(Arc::new(plan)),
            Some(step) => {
                let what =
                    format!("the ledger has weights of a window at step {step}, where none begins");
                Err(Fault::mismatch(what).at(format!("{}:{}", self.place, step + 1)))
            }
        }
    }
}

/// Holds the weights that a ledger has against those of the plan.
fn compare(window: &MixWindow, found: Option<&BTreeMap<String, u64>>) -> Result<()> {
    let wanted = window.by_source();
    if found == Some(&wanted) {
        return Ok(());
    }
    let text = |weights: &BTreeMap<String, u64>| {
        let pairs: Vec<_> = weights.iter().map(|(name, part)| format!("{name} = {part}")).collect();
        pairs.join(", ")
    };
    let step = window.first_step;
    Err(Fault::mismatch(format!(
        "the weights of the mix from step {step} on do not follow from the losses"
    ))
    .found(found.map_or_else(|| "no weights".to_owned(), text))
    .wanted(text(&wanted))
    .hint("the ledger was changed, or it is that of another curriculum"))
}
