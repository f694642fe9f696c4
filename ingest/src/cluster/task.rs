//! One task of a stage: from some files of one source to their part.

use std::path::Path;

use contract::{Digest, Fault, Result};
use rayon::prelude::*;
use store::disk;

use super::key::{Content, cache_key};
use super::part::{PartWriter, digest_at_end};
use super::plan::Plan;
use super::prune;
use super::result::{self, TaskResult};
use super::stage::Stage;
use crate::assembly;
use crate::assembly::pipeline::{self, Auditor, Encoding, Item, Step};
use crate::corpus::{Corpus, SourceFile, stops};
use crate::dedup::{Observed, Seen, Tools, read_through};
use crate::dropped::List;
use crate::prepared::Prepared;
use crate::progress::{Measure, Progress, meanwhile};
use crate::tokenize::audit::{self, Audit, Wanted};

/// The outcome of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// Its part is new.
    New(Digest),
    /// It was run before, with the same result.
    Again(Digest),
    /// Its part was reused: an earlier plan had made it.
    Reused(Digest),
}

/// Runs tasks of a plan.
pub struct Runner<'a> {
    plan: &'a Plan,
    tools: Tools<'a>,
    workers: usize,
    /// Whether there are parts that no task of this plan made: a task may be able to reuse one.
    others: bool,
}

/// Documents that the reference encoded again, and their bytes.
pub(super) type Audited = (u64, u64);

impl<'a> Runner<'a> {
    /// Loads what the steps of the corpus need.
    pub fn new(plan: &'a Plan, workers: usize) -> Result<Self> {
        let tools = assembly::tools(&plan.corpus, &plan.tokenizer, &plan.text.head)?;
        let held = || plan.holds_others();
        let others = meanwhile("build", "looking at the parts that are there", held)?;
        Ok(Runner { plan, tools, workers: workers.max(1), others })
    }

    /// What users should know about the steps.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        self.tools.notes()
    }

    /// Runs a task. A part of another plan is reused as it is; one that this plan made is made again and compared.
    pub fn run(&self, stage: Stage, task: usize, quiet: bool) -> Result<Ran> {
        // A task number outside the plan is refused later, where the task is cut.
        let bytes = if task < self.plan.tasks() { self.plan.bytes_of(task)? } else { 0 };
        let mut progress = Progress::new(stage.name(), Measure::Bytes, bytes, quiet);
        match stage {
            Stage::Scan => self.scan(task, &mut |seen| {
                tell(seen, &mut progress);
                Ok(())
            }),
            Stage::Encode => {
                let ran = self.encode(task, &mut |step| {
                    match step {
                        Step::Slab { raw_bytes, .. } => progress.within(raw_bytes),
                        Step::FileEnd(input) => progress.file(input.bytes),
                        Step::SourceEnd => {}
                    }
                    progress.tick();
                    Ok(())
                });
                ran.map(|(ran, _)| ran)
            }
        }
    }

    /// Analyzes every document for the comparing steps; `hear` is called for each.
    pub(super) fn scan(
        &self,
        task: usize,
        hear: &mut dyn FnMut(&Seen) -> Result<()>,
    ) -> Result<Ran> {
        if !self.plan.is_scanned(task) {
            let only = self.plan.cut(task)?;
            return Err(Fault::usage("this task has nothing to scan")
                .at(format!("source {:?}", only.sources[0].name))
                .found(task)
                .hint(
                    "no step of this source compares documents: `zdata task run` is all it needs",
                ));
        }
        let (tools, workers) = (&self.tools, self.workers);
        let ran = self.make(Stage::Scan, task, |only, part, found| {
            read_through(tools, only, workers, |seen| {
                hear(&seen)?;
                match seen {
                    Seen::Documents { observed, .. } => observed
                        .into_iter()
                        .try_for_each(|observed| part.observed(&by_place(only, observed)?)),
                    Seen::End { bytes, identity, .. } => {
                        found.file_end((bytes, identity))?;
                        part.file_end((bytes, identity))
                    }
                }
            })
        });
        ran.map(|(ran, ())| ran)
    }

    /// Prepares and encodes every document, and audits a sample of them; `hear` is called for each step except the
    /// source's end.
    pub(super) fn encode(
        &self,
        task: usize,
        hear: &mut dyn FnMut(Step) -> Result<()>,
    ) -> Result<(Ran, Audited)> {
        let plan = self.plan;
        self.make(Stage::Encode, task, |only, part, found| {
            let list = match plan.is_scanned(task) {
                true => List::read(&plan.list(task))?,
                false => List::default(),
            };
            let (wanted, audit) = (Wanted::default(), Audit::default());
            let prepared = Prepared::new(only, &self.tools, vec![list]);
            let tokenizer = plan.tokenizer.of(only.sources[0].recipe.means_controls())?;
            let encoding = Encoding {
                tokenizer,
                begin: plan.text.head.tokenizer.begin,
                end: plan.text.head.tokenizer.end,
                validation: only.validation,
                wanted: &wanted,
                prepared: &prepared,
            };
            let places = only.sources[0].recipe.encoding_places();
            let mut taking = Taking { part, found, only, places, wanted: &wanted, audit };
            pipeline::run(only, &encoding, self.workers, |mut step, auditor| {
                taking.step(&mut step, auditor)?;
                if matches!(step, Step::SourceEnd) { Ok(()) } else { hear(step) }
            })?;
            let mut audit = taking.audit;
            let failure =
                audit.finish().par_iter().find_map_first(|s| audit::check(tokenizer, s).err());
            failure.map_or(Ok((audit.documents, audit.audited_bytes)), Err)
        })
    }

    /// Makes a task's part by `write`, unless it exists, and records the result. Returns what `write` returns, or its
    /// default if there was nothing to write.
    fn make<T: Default>(
        &self,
        stage: Stage,
        task: usize,
        write: impl FnOnce(&Corpus, &mut PartWriter, &mut FilesRead<'_>) -> Result<T>,
    ) -> Result<(Ran, T)> {
        let plan = self.plan;
        let only = plan.cut(task)?;
        let removed = plan.removed(stage, task)?;
        let before = plan.result(stage, task)?;
        if before.is_none() {
            TaskResult::remove(plan, stage, task)?;
        }
        let files = &only.sources[0].files;
        let stamps = result::stamps(files)?;
        let known = self.known(stage, task, files, before.is_some())?;
        let head = &plan.text.head;
        let key = |contents: &[Content]| cache_key(stage, &only, head, contents, removed);
        if let (Some(known), None) = (&known, &before) {
            let part = key(known);
            let path = plan.part(part);
            if path.exists() {
                prune::used(&path);
                let digest = digest_at_end(&path, part)?;
                let (of, inputs) = (TaskResult::name(stage, task), result::stamped(known, stamps));
                TaskResult { of, inputs, part, digest, reused: true }.commit(plan, stage, task)?;
                return Ok((Ran::Reused(digest), T::default()));
            }
        }
        let name = TaskResult::name(stage, task);
        let scratch = result::scratch(&plan.folder(), &format!("{name}.part"))?;
        let mut writer = PartWriter::create(&scratch)?;
        let mut found = FilesRead { files, known: known.as_deref(), contents: Vec::new() };
        let written = write(&only, &mut writer, &mut found)?;
        let contents = found.contents;
        let part = key(&contents);
        let digest = writer.finish(part)?;
        commit(&plan.part(part), part, &scratch, digest)?;
        let inputs = result::stamped(&contents, stamps);
        TaskResult { of: name, inputs, part, digest, reused: false }.commit(plan, stage, task)?;
        Ok((if before.is_some() { Ran::Again(digest) } else { Ran::New(digest) }, written))
    }

    /// The content of a task's files, where it is needed before they are read: to look for an existing part. Taken from
    /// the scan if the files are unchanged since then.
    fn known(
        &self,
        stage: Stage,
        task: usize,
        files: &[SourceFile],
        again: bool,
    ) -> Result<Option<Vec<Content>>> {
        if stage == Stage::Encode
            && let Some(result) = self.plan.result(Stage::Scan, task)?
            && result.is_of(files)
        {
            return Ok(Some(result.contents()));
        }
        if again || !self.others {
            return Ok(None);
        }
        let what = "reading inputs to find parts that are there";
        meanwhile(stage.name(), what, || result::contents(files)).map(Some)
    }
}

/// Reports the progress of a scan.
pub(super) fn tell(seen: &Seen, progress: &mut Progress) {
    match seen {
        Seen::End { bytes, .. } => progress.file(*bytes),
        Seen::Documents { observed, raw, .. } => {
            progress.within(*raw);
            observed.iter().for_each(|observed| progress.document(observed.bytes, 0));
        }
    }
    progress.tick();
}

/// The files of a task, recorded while they are read.
struct FilesRead<'a> {
    files: &'a [SourceFile],
    /// Their content, if it was read before.
    known: Option<&'a [Content]>,
    contents: Vec<Content>,
}

impl FilesRead<'_> {
    /// The open file.
    fn file(&self) -> Result<&SourceFile> {
        self.files.get(self.contents.len()).ok_or_else(|| Fault::bug("a file too many"))
    }

    /// Ends the open file, which had this content. Refuses other content than was found before.
    fn file_end(&mut self, content: Content) -> Result<()> {
        if let Some(known) = self.known {
            same(known[self.contents.len()], content, &self.file()?.shown)?;
        }
        self.contents.push(content);
        Ok(())
    }
}

/// Names steps by their places in the recipe: an edit of other sources' steps changes their numbers.
fn by_place(only: &Corpus, mut observed: Observed) -> Result<Observed> {
    let steps = &only.sources[0].recipe.steps;
    let placed = observed.renamed(|number| steps.iter().position(|(own, _)| *own == number));
    placed.map_or_else(|| Err(Fault::bug("a step that the source has not")), |()| Ok(observed))
}

/// Refuses a file whose content has changed.
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

/// Renames a part, unless the name exists: then the two must be equal. A second one that differs is kept too.
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

/// Writes the steps of a task to its part.
struct Taking<'a, 'b> {
    part: &'a mut PartWriter,
    found: &'a mut FilesRead<'b>,
    only: &'a Corpus,
    /// The places of the steps that run here.
    places: Vec<usize>,
    wanted: &'a Wanted,
    audit: Audit,
}

impl Taking<'_, '_> {
    /// Writes a step to the part, and queues its samples for the audit.
    fn step(&mut self, step: &mut Step, auditor: &Auditor) -> Result<()> {
        match step {
            Step::Slab { items, .. } => {
                items.iter_mut().try_for_each(|item| self.item(item, auditor))
            }
            Step::FileEnd(input) => {
                self.found.file_end((input.bytes, input.sha256))?;
                self.part.file_end((input.bytes, input.sha256))
            }
            Step::SourceEnd => Ok(()),
        }
    }

    fn item(&mut self, item: &mut Item, auditor: &Auditor) -> Result<()> {
        match item {
            Item::Document(document) => {
                let (content, bytes, sample) =
                    (document.content.0, document.text_bytes, document.sample.take());
                if let Some(sample) = self.audit.offer(content, bytes, sample, self.wanted) {
                    auditor.check(sample);
                }
                self.part.document(document, &self.places)
            }
            Item::Dropped(dropped) => {
                let file = self.found.file()?;
                if stops(self.only, &dropped.reason) {
                    let fault = dropped.fault.clone();
                    return Err(fault.or_at(|| file.shown.clone()));
                }
                // The part may be reused by a corpus in which the file has another name.
                let path = file.path.to_string();
                let place = dropped.fault.place().and_then(|place| {
                    place.strip_prefix(&path).or_else(|| place.strip_prefix(&file.shown))
                });
                self.part.dropped(dropped, place)
            }
        }
    }
}
