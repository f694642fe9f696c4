//! One task of a stage: from some files of one source to their part.

use std::path::Path;

use contract::{Digest, Fault, Result};
use rayon::prelude::*;
use store::disk;

use super::key::Content;
use super::part::{PartWriter, digest_at_end};
use super::plan::{Plan, Stage};
use super::prune;
use super::result::{self, Input, TaskResult};
use crate::build;
use crate::build::journal::Position;
use crate::build::pipeline::{self, Auditor, Encoding, Item, Step};
use crate::build::request::always_counted;
use crate::corpus::{Corpus, OnError, SourceFile};
use crate::dedup::{List, Observed, Seen, Tools, read_through};
use crate::prepared::Prepared;
use crate::tokenize::audit::{self, Audit, Wanted};

/// What became of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// Its part is new.
    New(Digest),
    /// It had been run, and gave the very same part.
    Again(Digest),
    /// Its part was there: an earlier plan needed the same.
    Reused(Digest),
}

/// Runs tasks of a plan.
pub struct Runner<'a> {
    plan: &'a Plan,
    tools: Tools<'a>,
    workers: usize,
}

impl<'a> Runner<'a> {
    /// Gets what the steps of the corpus need.
    pub fn new(plan: &'a Plan, workers: usize) -> Result<Self> {
        let tools = build::tools(&plan.corpus, &plan.tokenizer, &plan.text.head)?;
        Ok(Runner { plan, tools, workers: workers.max(1) })
    }

    /// Runs a task. A part that this plan did not make is taken as it is; one that it made is made again and compared.
    pub fn run(&self, stage: Stage, task: usize) -> Result<Ran> {
        let plan = self.plan;
        let only = plan.cut(task)?;
        if stage == Stage::Scan && !plan.is_scanned(task) {
            return Err(Fault::usage("this task has nothing to scan")
                .at(format!("source {:?}", only.sources[0].name))
                .found(task)
                .hint(
                    "no step of this source compares documents: `zdata task run` is all it needs",
                ));
        }
        let before = plan.result(stage, task)?;
        if before.is_none() {
            TaskResult::remove(plan, stage, task)?;
        }
        let inputs = self.inputs(stage, task, &only.sources[0].files)?;
        let contents: Vec<Content> = inputs.iter().map(|i| (i.bytes, i.sha256)).collect();
        let key = plan.cache_key(stage, task, &only, &contents)?;
        let path = plan.part(key);
        let reused = before.is_none() && path.exists();
        let digest = if reused {
            prune::used(&path);
            digest_at_end(&path, key)?
        } else {
            let scratch = result::scratch(&plan.parts(), &key.to_string())?;
            let part = PartWriter::create(&scratch, key)?;
            let digest = match stage {
                Stage::Scan => self.scan(&only, &contents, part)?,
                Stage::Encode => self.encode((&only, task), &contents, part)?,
            };
            commit(&path, key, &scratch, digest)?;
            digest
        };
        TaskResult { inputs, part: key, digest, reused }.commit(plan, stage, task)?;
        Ok(match (before, reused) {
            (Some(_), _) => Ran::Again(digest),
            (None, true) => Ran::Reused(digest),
            (None, false) => Ran::New(digest),
        })
    }

    /// The content of a task's files: as the scan found it, if they were not touched since.
    fn inputs(&self, stage: Stage, task: usize, files: &[SourceFile]) -> Result<Vec<Input>> {
        if stage == Stage::Encode
            && let Some(result) = self.plan.result(Stage::Scan, task)?
            && result.is_of(files)
        {
            return Ok(result.inputs);
        }
        result::inputs(files)
    }

    /// Looks at every document, for those who will compare them.
    fn scan(&self, only: &Corpus, inputs: &[Content], mut part: PartWriter) -> Result<Digest> {
        let source = &only.sources[0];
        let mut files = source.files.iter().zip(inputs);
        read_through(&self.tools, only, self.workers, |seen| match seen {
            Seen::Documents { observed, .. } => observed
                .into_iter()
                .try_for_each(|observed| part.observed(&by_place(only, observed)?)),
            Seen::End { bytes, identity, .. } => {
                let (file, planned) = files.next().ok_or_else(|| Fault::bug("a file too many"))?;
                same(*planned, (bytes, identity), &file.shown)?;
                part.file_end(*planned)
            }
        })?;
        part.finish()
    }

    /// Prepares and encodes every document, and audits a sample of them.
    fn encode(
        &self,
        (only, task): (&Corpus, usize),
        inputs: &[Content],
        part: PartWriter,
    ) -> Result<Digest> {
        let plan = self.plan;
        let wanted = Wanted::default();
        let list = match plan.is_scanned(task) {
            true => List::read_file(plan.list(task))?,
            false => List::default(),
        };
        let prepared = Prepared::with(only, &self.tools, vec![list]);
        let encoding = Encoding {
            tokenizer: &plan.tokenizer,
            begin: plan.text.head.tokenizer.begin,
            end: plan.text.head.tokenizer.end,
            validation: only.validation,
            wanted: &wanted,
            prepared: &prepared,
        };
        let places = only.sources[0].recipe.encoding_places();
        let audit = Audit::default();
        let mut taking = Taking { part, only, inputs, places, wanted: &wanted, audit, file: 0 };
        let start = Position::start(0, 0);
        pipeline::run(only, &encoding, self.workers, start, |step, auditor| {
            taking.step(step, auditor)
        })?;
        let Taking { part, mut audit, .. } = taking;
        let failure =
            audit.finish().par_iter().find_map_first(|s| audit::check(&plan.tokenizer, s).err());
        failure.map_or(Ok(()), Err)?;
        part.finish()
    }
}

/// Names steps by their places in the recipe: an edit of other sources' steps moves their numbers.
fn by_place(only: &Corpus, mut observed: Observed) -> Result<Observed> {
    let steps = &only.sources[0].recipe.steps;
    let place = |number: usize| {
        let place = steps.iter().position(|(own, _)| *own == number);
        place.ok_or_else(|| Fault::bug("a step that the source has not"))
    };
    if let Some((step, _)) = &mut observed.dropped {
        *step = place(usize::from(*step))? as u8;
    }
    for (step, _) in &mut observed.marks {
        *step = place(*step)?;
    }
    Ok(observed)
}

/// Refuses a file that is not what it was a moment ago.
fn same(planned: Content, found: Content, shown: &str) -> Result<()> {
    if planned == found {
        return Ok(());
    }
    Err(Fault::mismatch("this input changed while its task ran")
        .at(shown.to_owned())
        .found(format!("{} bytes, {}", found.0, found.1))
        .wanted(format!("{} bytes, {}", planned.0, planned.1))
        .hint("run the same command again"))
}

/// Gives a part its name, unless there is one: then the two must be the same. The second of two that differ is kept.
fn commit(path: &Path, key: contract::Identity, scratch: &Path, digest: Digest) -> Result<()> {
    if result::create(scratch, path)? {
        return Ok(());
    }
    let before = digest_at_end(path, key)?;
    if before == digest {
        return disk::remove(scratch);
    }
    let kept = path.with_extension(format!("{digest}.conflict"));
    disk::rename(scratch, &kept).map_err(|error| Fault::io("keep", &kept, &error))?;
    Err(result::conflict("the task of this part")
        .at(path.display().to_string())
        .found(format!("{digest}, kept as {}", kept.display()))
        .wanted(before))
}

/// What takes the steps of a task.
struct Taking<'a> {
    part: PartWriter,
    only: &'a Corpus,
    inputs: &'a [Content],
    /// The places of the steps that run here.
    places: Vec<usize>,
    wanted: &'a Wanted,
    audit: Audit,
    file: usize,
}

impl Taking<'_> {
    fn step(&mut self, step: Step, auditor: &Auditor) -> Result<()> {
        match step {
            Step::Slab { items, .. } => {
                items.into_iter().try_for_each(|item| self.item(item, auditor))
            }
            Step::FileEnd(input) => {
                same(self.inputs[self.file], (input.bytes, input.sha256), &input.path)?;
                self.file += 1;
                self.part.file_end((input.bytes, input.sha256))
            }
            Step::SourceEnd => Ok(()),
        }
    }

    fn item(&mut self, item: Item, auditor: &Auditor) -> Result<()> {
        match item {
            Item::Document(mut document) => {
                let (content, bytes, sample) =
                    (document.content.0, document.text_bytes, document.sample.take());
                if let Some(sample) = self.audit.offer(content, bytes, sample, self.wanted) {
                    auditor.check(sample);
                }
                for (place, _, _) in document.trace.iter_mut().flat_map(|t| &mut t.changes) {
                    let number = self.places.iter().position(|own| own == place);
                    *place = number.ok_or_else(|| Fault::bug("a step that does not run here"))?;
                }
                self.part.document(&document)
            }
            Item::Dropped { reason, fault, .. }
                if self.only.on_error == OnError::Stop && !always_counted(&reason) =>
            {
                let file = &self.only.sources[0].files[self.file];
                Err(fault.or_at(|| file.shown.clone()))
            }
            Item::Dropped { reason, bytes, content, fault } => {
                let file = &self.only.sources[0].files[self.file];
                // The part may be found again by a corpus that calls the file otherwise.
                let path = file.path.to_string();
                let place = fault.place().and_then(|place| {
                    place.strip_prefix(&path).or_else(|| place.strip_prefix(&file.shown))
                });
                self.part.dropped(&reason, bytes, content, place)
            }
        }
    }
}
