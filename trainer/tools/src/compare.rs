//! Finds where two runs diverge: the first step, and in it the first quantity in the order of computation.

use std::fmt;
use std::path::Path;

use contract::terminal::name;
use contract::{Fault, Result, counted, words};
use curriculum::Curriculum;
use loader::open::no_run;
use serde_json::{Value, json};

use crate::chart::Chart;
use crate::fork::Origin;
use trainer::folder::{RunFolder, table_difference};
use trainer::ledger::{Follower, Ledger, LedgerHead, StepDifference, StepSummaryFields};

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Steps recorded by each run.
    pub steps: [u64; 2],
    /// Differences between the heads, for people: they may explain a difference, but are none themselves.
    pub notes: Vec<String>,
    /// The first step that differs, and its first quantity.
    pub difference: Option<(u64, StepDifference)>,
}

/// Compares the runs in two folders over the steps that both have.
pub fn compare(a: &Path, b: &Path) -> Result<Comparison> {
    let open = |root: &Path| {
        let path = RunFolder::new(root).ledger();
        if path.exists() { Ledger::read_whole(&path) } else { Err(no_run(root, "ledger.jsonl")) }
    };
    let (left, right) = (open(a)?, open(b)?);
    let steps = [left.last_step(), right.last_step()];
    let mut notes = notes(left.head(), right.head());
    let a = Side { name: "a", root: a, ledger: &left };
    let b = Side { name: "b", root: b, ledger: &right };
    notes.extend(a.origin(&b)?);
    notes.extend(b.origin(&a)?);
    let common = steps[0].min(steps[1]);
    if common == 0 {
        let bare = if steps[0] == 0 { a.root } else { b.root };
        return Err(Fault::usage("this run has recorded no step, and nothing can be compared")
            .at(bare.display().to_string()));
    }
    if steps[0] != steps[1] {
        let [a, b] = steps;
        notes.push(format!("the runs have {a} and {b} steps; the first {common} are compared"));
    }
    for step in 1..=common {
        if let Some(difference) =
            left.record(step)?.difference(&right.record(step)?, &left.head().parameters)
        {
            return Ok(Comparison { steps, notes, difference: Some((step, difference)) });
        }
    }
    Ok(Comparison { steps, notes, difference: None })
}

/// A chart of the losses of two runs. If they differ, from the first different step on, and as many steps before it.
pub fn chart(a: &Path, b: &Path, answer: &Comparison) -> Result<Chart> {
    let last = answer.steps[0].max(answer.steps[1]);
    let from = answer.difference.as_ref().map_or(1, |(parted, _)| {
        let apart = last + 1 - parted;
        parted.saturating_sub(apart).max(1)
    });
    let curve = |root: &Path| Ok((root.display().to_string(), losses(root, from)?));
    Ok(Chart {
        title: format!("loss over {}", words::steps(from, last)),
        log: false,
        curves: vec![curve(a)?, curve(b)?],
    })
}

/// Steps from `from` on, and their losses.
fn losses(root: &Path, from: u64) -> Result<Vec<(f64, f64)>> {
    let (_, mut follower) = Follower::open(&RunFolder::new(root).ledger())?;
    let mut points = Vec::new();
    while let Some(StepSummaryFields { step, loss, .. }) = follower.next_step()? {
        if step >= from {
            points.push((step as f64, loss));
        }
    }
    Ok(points)
}

/// One of the two runs.
struct Side<'a> {
    name: &'static str,
    root: &'a Path,
    ledger: &'a Ledger,
}

impl Side<'_> {
    /// The run that this one was forked from, if any, and how that relates to the other one.
    fn origin(&self, other: &Side<'_>) -> Result<Option<String>> {
        let (name, other_name) = (self.name, other.name);
        let Some(Origin { of, step, chain }) = Origin::read(self.root)? else { return Ok(None) };
        let shares = other.ledger.chain_at(step) == Some(chain);
        let is_it = other.root.canonicalize().is_ok_and(|root| root.to_string_lossy() == of);
        Ok(Some(match (shares, is_it) {
            (true, true) => format!("{name} was forked from {other_name} after step {step}"),
            (true, false) => format!(
                "{name} was forked from {of} after step {step}, up to which {other_name} is the same"
            ),
            (false, _) => format!("{name} was forked from {of} after step {step}"),
        }))
    }
}

fn notes(left: &LedgerHead, right: &LedgerHead) -> Vec<String> {
    // No `..`: every new field of the head must be considered.
    let LedgerHead {
        kind: _,
        // The ledger is refused when it is opened if this differs.
        format: _,
        kernel_table,
        plan,
        curriculum,
        stores,
        tokenizer,
        levels: _,
        parameters,
    } = left;
    let mut notes = Vec::new();
    let mut note = |differs: bool, what: &str| {
        if differs {
            notes.push(format!("the runs have different {what}"));
        }
    };
    note(*stores != right.stores, "stores");
    note(*tokenizer != right.tokenizer, "tokenizers");
    note(*plan != right.plan, "versions of the plan");
    note(*parameters != right.parameters, "parameters");
    if *curriculum != right.curriculum {
        notes.push(curricula(curriculum, &right.curriculum));
    }
    if let Some((key, a, b)) = table_difference(kernel_table, &right.kernel_table) {
        notes.push(format!("the runs have different kernel tables: {key} is {a} and {b}"));
    }
    notes
}

/// The keys in which two curricula differ and which affect a step.
fn curricula(a: &str, b: &str) -> String {
    const TOLD: usize = 3;
    let parsed = [("a", a), ("b", b)].map(|(place, text)| Curriculum::parse(text, place).ok());
    let [Some(a), Some(b)] = parsed else {
        return "the runs have different curricula".to_owned();
    };
    let all = a.difference(&b);
    let of = |difference: &curriculum::CurriculumDifference| {
        format!(
            "{} is {} and {}",
            difference.key,
            name(&difference.wanted),
            name(&difference.found)
        )
    };
    let mut shown: Vec<String> = all.iter().take(TOLD).map(of).collect();
    if all.len() > TOLD {
        shown.push(format!("{} more", all.len() - TOLD));
    }
    match shown.is_empty() {
        true => "the runs have different texts of one curriculum, none of which changes a step"
            .to_owned(),
        false => format!("the runs have different curricula: {}", shown.join("; ")),
    }
}

impl Comparison {
    /// The answer for programs.
    pub fn to_json(&self) -> Value {
        let Comparison { steps, notes, difference } = self;
        let difference = difference.as_ref().map(|(step, found)| {
            json!({"step": step, "quantity": found.quantity, "a": found.left, "b": found.right})
        });
        json!({"equal": difference.is_none(), "steps": steps, "notes": notes, "difference": difference})
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Comparison { steps: [a, b], notes, difference } = self;
        for note in notes {
            writeln!(f, "note: {note}")?;
        }
        match difference {
            None => write!(f, "equal: {}, every quantity", counted(*a.min(b), "step")),
            Some((step, found)) => {
                writeln!(f, "step {step} is the first to differ, in its {}", found.quantity)?;
                write!(f, "  a: {}\n  b: {}", found.left, found.right)
            }
        }
    }
}
