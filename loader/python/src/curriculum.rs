//! A curriculum with its plan and its stores: what steps there are, and their batches.

use std::sync::{Arc, Mutex, PoisonError};

use contract::{Fault, Result};
use loader::{
    OpenedCurriculum, PrefetchOptions, PrefetchSource, Prefetcher, RankSlice, StepSummary,
};
use mixer::StepSpec;
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use store::Location;
use toml::{Table, Value};

use crate::batch::Batch;
use crate::error::Outcome;
use crate::process::{Mine, Owned, PerProcess};

/// Tokens that a digest holds in memory at a time.
const HELD_TOKENS: u64 = 1 << 22;

/// An opened curriculum.
#[pyclass(frozen, module = "zdata._zdata")]
pub(crate) struct Curriculum {
    opened: Arc<PerProcess<OpenedCurriculum>>,
}

impl Curriculum {
    fn get(&self, py: Python<'_>) -> Outcome<Mine<OpenedCurriculum>> {
        self.opened.get(py)
    }

    fn spec(&self, py: Python<'_>, step: u64) -> Outcome<(Mine<OpenedCurriculum>, StepSpec)> {
        let opened = self.get(py)?;
        let spec =
            opened.plan.step(step).map_err(|fault| fault.or_at(|| opened.file.to_string()))?;
        Ok((opened, spec))
    }
}

#[pymethods]
impl Curriculum {
    /// Opens a file; `overrides` is a JSON object of keys and values that replace the file's.
    #[new]
    fn new(py: Python<'_>, file: std::path::PathBuf, overrides: Option<String>) -> Outcome<Self> {
        let file = storage::written(&storage::locate_argument(file.as_os_str())?.absolute()?);
        let open = move || match &overrides {
            None => OpenedCurriculum::open(storage::locate_written(&file)?),
            Some(overrides) => {
                let file = storage::locate_written(&file)?;
                let text = file.read().map_err(|error| file.fault("read", &error))?;
                let text = settings_of(&file, text, overrides)?;
                let name = format!("{} with overrides", file.name());
                OpenedCurriculum::open_text(file.folder().join(&name), text)
            }
        };
        Ok(Curriculum { opened: Arc::new(PerProcess::open(py, open)?) })
    }

    #[getter]
    fn steps(&self, py: Python<'_>) -> Outcome<u64> {
        Ok(self.get(py)?.plan.steps())
    }

    #[getter]
    fn samples(&self, py: Python<'_>) -> Outcome<u64> {
        Ok(self.get(py)?.plan.samples())
    }

    /// Token ids of the tokenizer.
    #[getter]
    fn vocab(&self, py: Python<'_>) -> Outcome<u32> {
        let opened = self.get(py)?;
        let vocab = |store: &store::Store| store.manifest().tokenizer.vocab;
        Ok(opened.stores()?.stores().first().map_or(0, vocab))
    }

    /// The plan's digest up to a step.
    fn digest_through(&self, py: Python<'_>, step: u64) -> Outcome<String> {
        let (opened, spec) = self.spec(py, step)?;
        Ok(opened.plan.digest_through(spec.step).to_string())
    }

    /// The whole plan as JSON.
    fn plan(&self, py: Python<'_>) -> Outcome<String> {
        let opened = self.get(py)?;
        Ok(py.detach(|| zdata_cli::answers::plan(&opened))?)
    }

    /// Where a run sees a document, as JSON.
    fn whereabouts(&self, py: Python<'_>, doc: &str, source: Option<&str>) -> Outcome<String> {
        let opened = self.get(py)?;
        Ok(py.detach(|| zdata_cli::answers::whereabouts(&opened, doc, source))?)
    }

    /// The micro-batches that a rank has in a step.
    fn micro_batches(&self, py: Python<'_>, step: u64, rank: u32, world: u32) -> Outcome<u64> {
        let (_, spec) = self.spec(py, step)?;
        let rounds = RankSlice::new(rank, world)?.rounds(spec.batch / spec.micro_batch);
        Ok(rounds.iter().map(|round| round.end - round.start).sum())
    }

    /// A rank's batch of a step.
    fn batch(&self, py: Python<'_>, step: u64, rank: u32, world: u32) -> Outcome<Batch> {
        let slice = RankSlice::new(rank, world)?;
        let (opened, spec) = self.spec(py, step)?;
        let read = || loader::batch(&opened.plan, opened.stores()?, step, slice);
        let batch = py.detach(read)?;
        Ok(Batch::new(batch, &self.opened, &opened, spec))
    }

    /// One of a rank's micro-batches of a step.
    fn micro_batch(
        &self,
        py: Python<'_>,
        step: u64,
        rank: u32,
        world: u32,
        index: usize,
    ) -> Outcome<Batch> {
        let slice = RankSlice::new(rank, world)?;
        let (_, spec) = self.spec(py, step)?;
        let size = usize::try_from(spec.micro_batch).unwrap_or(usize::MAX);
        let first = index.saturating_mul(size);
        let rows: Vec<u64> = slice.rows(&spec).skip(first).take(size).collect();
        if rows.is_empty() {
            let fault = Fault::usage("the rank does not have this micro-batch of the step");
            return Err(fault.found(format!("micro-batch {index} of step {step}")).into());
        }
        self.rows(py, step, rows)
    }

    /// Some rows of a step, counted in the step.
    fn rows(&self, py: Python<'_>, step: u64, rows: Vec<u64>) -> Outcome<Batch> {
        let (opened, spec) = self.spec(py, step)?;
        if let Some(row) = rows.iter().find(|row| **row >= spec.batch) {
            let fault = Fault::usage("the step does not have this sequence").found(row);
            let wanted = format!("0 to {}: step {step} has {}", spec.batch - 1, spec.batch);
            return Err(fault.wanted(wanted).into());
        }
        let read = || loader::rows(&opened.plan, opened.stores()?, step, rows);
        let batch = py.detach(read)?;
        Ok(Batch::new(batch, &self.opened, &opened, spec))
    }

    /// The step of a global sample number, and its row there.
    fn step_of(&self, py: Python<'_>, sample: u64) -> Outcome<(u64, u64)> {
        let opened = self.get(py)?;
        let step = opened.plan.step_of(sample)?;
        Ok((step, sample - opened.plan.step(step)?.first_sample))
    }

    /// The digests of steps `start` to `stop - 1`, whatever memory a step takes.
    fn digests(
        &self,
        py: Python<'_>,
        start: u64,
        stop: u64,
        threads: usize,
    ) -> Outcome<Vec<String>> {
        let opened = self.get(py)?;
        Ok(py.detach(|| {
            let source =
                source(&opened, start, stop, PrefetchOptions { threads, depth: 2 * threads })?;
            let summaries = Prefetcher::summaries(source, HELD_TOKENS)?;
            let digest = |summary: Result<StepSummary>| Ok(summary?.digest.to_string());
            summaries.map(digest).collect::<Result<Vec<_>>>()
        })?)
    }

    /// The same batches as `batch` for steps `start` to `stop - 1`, read ahead by threads.
    fn ahead(
        &self,
        py: Python<'_>,
        steps: (u64, u64),
        part: (u32, u32),
        threads: usize,
        depth: usize,
    ) -> Outcome<BatchesAhead> {
        let slice = RankSlice::new(part.0, part.1)?;
        let opened = self.get(py)?;
        let started = py.detach(|| {
            let PrefetchSource { plan, stores, steps, options } =
                source(&opened, steps.0, steps.1, PrefetchOptions { threads, depth })?;
            Prefetcher::start(plan, stores, steps, slice, options, Ok)
        });
        let batches = Owned::new(Mutex::new(started?));
        Ok(BatchesAhead { batches, opened: Arc::clone(&self.opened), mine: opened })
    }
}

/// The steps to read, if the plan has them.
fn source(
    opened: &OpenedCurriculum,
    start: u64,
    stop: u64,
    options: PrefetchOptions,
) -> Result<PrefetchSource> {
    let end = opened.plan.steps() + 1;
    if start == 0 || stop > end || start > stop {
        return Err(Fault::usage("the plan does not have these steps")
            .at(opened.file.to_string())
            .found(format!("{start}..{stop}"))
            .wanted(format!("steps within 1..{end}")));
    }
    let (plan, stores) = (Arc::clone(&opened.plan), Arc::clone(opened.stores()?));
    Ok(PrefetchSource { plan, stores, steps: start..stop, options })
}

/// Batches of consecutive steps, which threads read ahead. Of one process: a forked child has none of the threads.
#[pyclass(frozen, module = "zdata._zdata")]
pub(crate) struct BatchesAhead {
    batches: Owned<Mutex<Prefetcher<loader::Batch>>>,
    opened: Arc<PerProcess<OpenedCurriculum>>,
    mine: Mine<OpenedCurriculum>,
}

#[pymethods]
impl BatchesAhead {
    fn __next__(&self, py: Python<'_>) -> Outcome<Batch> {
        let Some(batches) = self.batches.get() else {
            return Err(Fault::bug("a forked child reads its parent's batches").into());
        };
        let next = py.detach(|| batches.lock().unwrap_or_else(PoisonError::into_inner).next());
        let batch = next.ok_or_else(|| PyStopIteration::new_err(()))??;
        let spec = self.mine.plan.step(batch.step)?;
        Ok(Batch::new(batch, &self.opened, &self.mine, spec))
    }
}

/// The text of a curriculum with some keys replaced: `{"phase.first.steps": 10}`. An element of a list of tables is
/// named by its `name`, or by its number from 0.
fn settings_of(file: &Location, text: Vec<u8>, overrides: &str) -> Result<String> {
    let place = || file.to_string();
    let wrong = |why: String| Fault::usage(format!("this is not valid TOML: {why}")).at(place());
    let text = String::from_utf8(text).map_err(|error| wrong(error.to_string()))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    let mut whole = Value::Table(table);
    let not_toml =
        |why: String| Fault::usage(format!("overrides cannot be written as TOML: {why}"));
    let changes: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(overrides).map_err(|error| not_toml(error.to_string()))?;
    for (key, value) in changes {
        let value = Value::try_from(value).map_err(|error| not_toml(error.to_string()).at(&key))?;
        set(&mut whole, &key, value)?;
    }
    toml::to_string(&whole).map_err(|error| not_toml(error.to_string()))
}

/// Sets a dotted key. Tables that are not there are made: the curriculum's reader knows which keys exist.
fn set(whole: &mut Value, key: &str, value: Value) -> Result<()> {
    let mut at = whole;
    for part in key.split('.') {
        at = match at {
            Value::Table(table) => table.entry(part).or_insert_with(|| Value::Table(Table::new())),
            Value::Array(items) => {
                let names: Vec<String> = items.iter().map(name_of).collect();
                let index = names.iter().position(|name| name == part);
                match index.or_else(|| part.parse().ok()).and_then(|index| items.get_mut(index)) {
                    Some(item) => item,
                    None => {
                        let fault = Fault::usage("the list has no such element").at(key);
                        return Err(fault.found(part).wanted(names.join(", ")));
                    }
                }
            }
            other => {
                let fault = Fault::usage("this key is not a table").at(key);
                return Err(fault.found(other.to_string()).wanted(format!("a table with {part}")));
            }
        };
    }
    *at = value;
    Ok(())
}

/// The name of a table in a list.
fn name_of(item: &Value) -> String {
    item.get("name").and_then(Value::as_str).unwrap_or_default().to_owned()
}
