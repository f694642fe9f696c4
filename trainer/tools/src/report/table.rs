//! The ledger as a table: a line for each step, with notes where a phase begins or the curriculum changes.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;

use contract::terminal::name;
use contract::{Fault, Result};
use curriculum::Curriculum;
use serde_json::{Value, json};

use super::grouped;
use trainer::folder::RunFolder;
use trainer::ledger::{Ledger, SourceSums, StepSummaryFields};

/// The steps of a run, one at a time.
pub struct StepRows {
    ledger: Ledger,
    steps: Range<u64>,
    /// The curriculum of the previous step.
    in_force: Curriculum,
    phase: Option<String>,
    widths: Widths,
}

/// Widths of columns that depend on the run.
struct Widths {
    step: usize,
    phase: usize,
}

impl StepRows {
    /// The steps of the run at `root` in the ledger: `steps`, or the last `last` without these.
    pub fn open(root: &Path, steps: Option<Range<u64>>, last: u64) -> Result<StepRows> {
        let folder = RunFolder::new(root);
        let (ledger, path) = (folder.read_ledger()?, folder.ledger());
        let recorded = ledger.last_step();
        let steps =
            steps.unwrap_or_else(|| (recorded + 1).saturating_sub(last).max(1)..recorded + 1);
        if steps.start > recorded && recorded > 0 {
            return Err(Fault::usage("the ledger has no such step")
                .at("--steps")
                .found(steps.start)
                .wanted(format!("1 to {recorded}")));
        }
        let place = format!("the curriculum in {}", path.display());
        let curriculum = Curriculum::parse(&ledger.head().curriculum, &place)?;
        let phases = curriculum.phases.iter().map(|phase| name(&phase.name).chars().count());
        let widths = Widths {
            step: grouped(recorded).len().max("step".len()),
            phase: phases.max().unwrap_or(0).max("phase".len()),
        };
        let steps = steps.start..steps.end.min(recorded + 1);
        let before = ledger.curriculum_at(steps.start.saturating_sub(1).min(recorded))?;
        let in_force = Curriculum::parse(&before, &place)?;
        Ok(StepRows { ledger, steps, in_force, phase: None, widths })
    }

    /// The column headings.
    pub fn heads(&self) -> String {
        let Widths { step, phase } = self.widths;
        format!(
            "{:>step$}  {:phase$}  {:>10}  {:>9}  {:>9}  {:>9}  sources: loss (labels)",
            "step", "phase", "loss", "lr", "norm", "labels"
        )
    }

    /// The next step; `None` after the last.
    pub fn next_step(&mut self) -> Result<Option<StepRow>> {
        let Some(step) = self.steps.next() else { return Ok(None) };
        let seen: StepSummaryFields = self.ledger.step_as(step)?;
        let mut notes = Vec::new();
        let begins = self.phase.as_ref().is_some_and(|phase| *phase != seen.phase);
        if begins {
            notes.push(format!("phase {} begins", name(&seen.phase)));
        }
        self.phase = Some(seen.phase.clone());
        if let Some(text) = &seen.curriculum {
            notes.extend(self.changes(step, text)?);
        }
        Ok(Some(StepRow { seen, notes }))
    }

    /// What the curriculum `text` changes from `step` on.
    fn changes(&mut self, step: u64, text: &str) -> Result<Vec<String>> {
        let now = Curriculum::parse(text, &format!("the curriculum of step {step}"))?;
        let mut changes = self.in_force.difference(&now);
        self.in_force = now;
        changes.retain(|change| change.first_step >= step);
        let words = changes
            .iter()
            .map(|change| format!("the curriculum changes: {}", name(&change.to_string())));
        Ok(words.collect())
    }

    /// A row for people: its notes first.
    pub fn text(&self, row: &StepRow) -> String {
        let Widths { step, phase } = self.widths;
        let mut text = String::new();
        for note in &row.notes {
            let _ = writeln!(text, "{:>step$}  -- {note}", "");
        }
        let seen = &row.seen;
        let sources: Vec<String> =
            seen.sources.iter().map(|(source, sum)| source_text(source, sum)).collect();
        let skipped = seen.skipped().map(|skipped| skipped.words().to_owned());
        let last = skipped.into_iter().chain((!sources.is_empty()).then(|| sources.join(", ")));
        let _ = write!(
            text,
            "{:>step$}  {:phase$}  {:>10.6}  {:>9.2e}  {:>9.4}  {:>9}  {}",
            grouped(seen.step),
            name(&seen.phase),
            seen.loss,
            seen.lr(),
            seen.norm(),
            grouped(seen.label_count),
            last.collect::<Vec<_>>().join(" | "),
        );
        text.truncate(text.trim_end().len());
        text
    }
}

/// A step of a table.
pub struct StepRow {
    seen: StepSummaryFields,
    notes: Vec<String>,
}

impl StepRow {
    /// For programs.
    pub fn to_json(&self) -> Value {
        let StepRow { seen, notes } = self;
        let sources = seen.sources.iter().map(|(source, sum)| {
            (source.clone(), json!({"labels": sum.labels, "loss": sum.mean()}))
        });
        json!({
            "step": seen.step, "phase": seen.phase, "loss": seen.loss, "z_loss": seen.z_loss(), "lr": seen.lr(),
            "norm": seen.norm(), "skipped": seen.skipped(), "labels": seen.label_count,
            "sources": sources.collect::<serde_json::Map<_, _>>(), "tokens_per_expert": seen.tokens_per_expert,
            "batch_digest": seen.batch_digest, "state_digest": seen.state_digest, "notes": notes,
        })
    }
}

fn source_text(source: &str, sum: &SourceSums) -> String {
    let mean = sum.mean().map_or("-".to_owned(), |mean| format!("{mean:.4}"));
    format!("{} {mean} ({})", name(source), grouped(sum.labels))
}
