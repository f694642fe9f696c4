//! A curriculum with its plan and its stores: what steps there are, and their batches.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use contract::{Fault, Result};
use loader::{
    OpenedCurriculum, PrefetchOptions, PrefetchSource, Prefetcher, RankSlice, StepSummary,
};
use mixer::StepSpec;
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use store::Location;
use toml_edit::{DocumentMut, InlineTable, Item, TableLike, TomlError, Value};

use crate::batch::Batch;
use crate::error::Outcome;
use crate::process::{Mine, Owned, PerProcess};

/// Tokens that a digest holds in memory at a time.
const HELD_TOKENS: u64 = 1 << 22;

/// The most threads that read ahead, and the most batches that wait.
pub(crate) const THREADS_MAX: usize = 1024;
const DEPTH_MAX: usize = 1 << 16;

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
    /// Opens a file; `overrides` is a JSON object of keys and values that replace the file's. The losses of the run in
    /// the folder `run` fix what mixes read that react to them.
    #[new]
    fn new(
        py: Python<'_>,
        file: PathBuf,
        overrides: Option<String>,
        run: Option<PathBuf>,
    ) -> Outcome<Self> {
        let run =
            run.map(|run| std::path::absolute(&run).map_err(|it| Fault::io("find", &run, &it)));
        let run = run.transpose()?;
        let file = storage::written(&storage::locate_argument(file.as_os_str())?.absolute()?);
        let open = move || {
            let file = storage::locate_written(&file)?;
            let mut opened = match &overrides {
                None => OpenedCurriculum::open(file)?,
                Some(overrides) => {
                    let text = file.read().map_err(|error| file.fault("read", &error))?;
                    let text = settings_of(&file, text, overrides)?;
                    let name = format!("{} with overrides", file.name());
                    OpenedCurriculum::open_text(file.folder().join(&name), text)?
                }
            };
            run.as_ref().map_or(Ok(()), |run| opened.follow(run))?;
            Ok(opened)
        };
        Ok(Curriculum { opened: Arc::new(PerProcess::open(py, open)?) })
    }

    #[getter]
    fn steps(&self, py: Python<'_>) -> Outcome<u64> {
        Ok(self.get(py)?.plan.steps())
    }

    #[getter]
    fn fixed_until(&self, py: Python<'_>) -> Outcome<u64> {
        Ok(self.get(py)?.plan.fixed_until())
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
        Batch::new(batch, &self.opened, &opened, spec)
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
        Batch::new(batch, &self.opened, &opened, spec)
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
            let depth = threads.saturating_mul(2);
            let source = source(&opened, start, stop, PrefetchOptions { threads, depth })?;
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
    let PrefetchOptions { threads, depth } = options;
    if !(1..=THREADS_MAX).contains(&threads) || !(1..=DEPTH_MAX).contains(&depth) {
        return Err(Fault::usage("so many batches are not read ahead")
            .found(format!("threads={threads}, depth={depth}"))
            .wanted(format!("threads from 1 to {THREADS_MAX}, depth from 1 to {DEPTH_MAX}")));
    }
    let end = opened.plan.steps() + 1;
    if start == 0 || stop > end || start > stop {
        return Err(Fault::usage("the plan does not have these steps")
            .at(opened.file.to_string())
            .found(format!("{start}..{stop}"))
            .wanted(format!("steps within 1..{end}")));
    }
    let (plan, stores) = (Arc::clone(&opened.plan), Arc::clone(opened.stores()?));
    Ok(PrefetchSource { plan: plan.into(), stores, steps: start..stop, options })
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
        Batch::new(batch, &self.opened, &self.mine, spec)
    }
}

/// The text of a curriculum with some keys replaced: `{"phase.first.steps": 10}`. An element of a list of tables is
/// named by its `name`, or by its number from 0. All other text stays as it was typed, so weights stay exact.
fn settings_of(file: &Location, text: Vec<u8>, overrides: &str) -> Result<String> {
    let place = || file.to_string();
    let wrong = |why: String| Fault::usage(format!("this is not valid TOML: {why}")).at(place());
    let text = String::from_utf8(text).map_err(|error| wrong(error.to_string()))?;
    let mut whole: DocumentMut =
        text.parse().map_err(|error: TomlError| wrong(error.to_string()))?;
    let not_toml =
        |why: String| Fault::usage(format!("overrides cannot be written as TOML: {why}"));
    let changes: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(overrides).map_err(|error| not_toml(error.to_string()))?;
    for (key, value) in changes {
        let text = toml::to_string(&BTreeMap::from([(KEY, value)]));
        let text = text.map_err(|error| not_toml(error.to_string()).at(&key))?;
        let alone: DocumentMut =
            text.parse().map_err(|error: TomlError| not_toml(error.to_string()))?;
        let value = alone.as_table().get(KEY).cloned().unwrap_or_default().into_value();
        let value = value.map_err(|_| not_toml("it has no value".to_owned()).at(&key))?;
        let parts: Vec<&str> = key.split('.').collect();
        set(whole.as_table_mut(), &key, &parts, value)?;
    }
    Ok(whole.to_string())
}

/// The key of a value that is written alone.
const KEY: &str = "value";

/// Sets a dotted key. Tables that are not there are made: the curriculum's reader knows which keys exist.
fn set(table: &mut dyn TableLike, key: &str, parts: &[&str], value: Value) -> Result<()> {
    let [first, rest @ ..] = parts else { return Ok(()) };
    if rest.is_empty() {
        table.insert(first, Item::Value(value));
        return Ok(());
    }
    let item = table.entry(first).or_insert(Item::Value(InlineTable::new().into()));
    if let Some(list) = item.as_array_of_tables_mut() {
        let number = element(key, rest[0], list.iter().map(|table| name_of(table)))?;
        let within = list.get_mut(number).filter(|_| rest.len() > 1);
        let within = within.ok_or_else(|| no_element(key, rest[0], &[]))?;
        return set(within, key, &rest[1..], value);
    }
    if let Some(list) = item.as_array_mut() {
        let name = |value: &Value| value.as_inline_table().map(|table| name_of(table));
        let number =
            element(key, rest[0], list.iter().map(|value| name(value).unwrap_or_default()))?;
        let Some(within) = list.get_mut(number) else { return Err(no_element(key, rest[0], &[])) };
        return match (rest.len(), within.as_inline_table_mut()) {
            (1, _) => {
                list.replace(number, value);
                Ok(())
            }
            (_, Some(within)) => set(within, key, &rest[1..], value),
            (_, None) => Err(not_a_table(key, &within.to_string(), rest[1])),
        };
    }
    match item.as_table_like_mut() {
        Some(within) => set(within, key, rest, value),
        None => Err(not_a_table(key, &item.to_string(), rest[0])),
    }
}

/// The number of the element of a list that has this name, or this number.
fn element(key: &str, wanted: &str, names: impl Iterator<Item = String>) -> Result<usize> {
    let names: Vec<String> = names.collect();
    let named = names.iter().position(|name| name == wanted);
    let number = named.or_else(|| wanted.parse().ok()).filter(|number| *number < names.len());
    number.ok_or_else(|| no_element(key, wanted, &names))
}

fn no_element(key: &str, found: &str, names: &[String]) -> Fault {
    let fault =
        Fault::usage("the list has no such element, or the path names no key of the element");
    fault.at(key).found(found).wanted(names.join(", "))
}

fn not_a_table(key: &str, found: &str, part: &str) -> Fault {
    let fault = Fault::usage("this key is not a table").at(key);
    fault.found(found.trim()).wanted(format!("a table with {part}"))
}

/// The name of a table in a list.
fn name_of(table: &dyn TableLike) -> String {
    table.get("name").and_then(Item::as_str).unwrap_or_default().to_owned()
}
