//! One task of a stage: from some files of one source to their part.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use contract::{Digest, Fault, Identity, Result};
use store::{DocumentRecord, Manifest, disk};

use super::key::{Content, cache_key};
use super::output;
use super::part::{PartWriter, digest_at_end};
use super::plan::Plan;
use super::prune;
use super::result::{self, TaskResult};
use super::stage::Stage;
use crate::assembly;
use crate::assembly::part::{PartBuilder, PartOutput, Stop};
use crate::assembly::pipeline::{self, Auditor, Encoded, Encoding, Item, Step};
use crate::assembly::request;
use crate::corpus::{Corpus, SourceFile, always_counted, stops};
use crate::dedup::{Observed, Seen, Tools, read_through};
use crate::dropped::{Line, List};
use crate::prepared::Prepared;
use crate::progress::{Measure, PartProgress, Progress, meanwhile};
use crate::run_parts::{Drive, run_parts};
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
    /// The manifest of the store before it has sources.
    empty: Manifest,
    /// Whether there are parts that no task of this plan made: a task may be able to reuse one.
    others: bool,
    /// Held while a part gets its name: parts of equal content have one name, and may end at the same time.
    naming: [Mutex<()>; NAMING],
}

/// Locks for the names of parts: enough for the syncs of other parts to go on.
const NAMING: usize = 64;

/// Documents that the reference encoded again, and their bytes.
pub(super) type Audited = (u64, u64);

/// Called before each document; ends the work by a fault.
pub(crate) type GoOn<'a> = &'a (dyn Fn() -> Result<()> + Sync);

impl<'a> Runner<'a> {
    /// Loads what the steps of the corpus need.
    pub fn new(plan: &'a Plan, workers: usize) -> Result<Self> {
        let tools = assembly::tools(&plan.corpus, &plan.tokenizer, &plan.text.head)?;
        let empty = request::empty_manifest(&plan.text.head, plan.tokenizer.token_bytes());
        let naming = [const { Mutex::new(()) }; NAMING];
        let held = || plan.holds_others();
        let others = meanwhile("build", "looking at the parts that are there", held)?;
        Ok(Runner { plan, tools, workers: workers.max(1), empty, others, naming })
    }

    /// What users should know about the steps.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        self.tools.notes()
    }

    /// Runs a task. A part of another plan is reused as it is; one that this plan made is made again and compared.
    pub fn run(&self, stage: Stage, task: usize, quiet: bool) -> Result<Ran> {
        // A task number outside the plan is refused later, where the task is cut.
        let bytes = if task < self.plan.tasks() { self.plan.bytes_of(task)? } else { 0 };
        let progress = Mutex::new(Progress::new(stage.name(), Measure::Bytes, bytes, quiet));
        let mut ran = None;
        let take = |(made, _)| {
            ran = Some(made);
            Ok(())
        };
        self.run_all(stage, &[task], &progress, &|| Ok(()), take)?;
        ran.ok_or_else(|| Fault::bug("a task without a result"))
    }

    /// Runs tasks of a stage, and calls `take` with what became of each, in order.
    pub(super) fn run_all(
        &self,
        stage: Stage,
        tasks: &[usize],
        progress: &Mutex<Progress>,
        go_on: GoOn<'_>,
        take: impl FnMut((Ran, Audited)) -> Result<()>,
    ) -> Result<()> {
        let do_part = |number: usize, drive: &Drive<'_>| {
            let (task, mut passed) = (tasks[number], PartProgress::new(progress));
            let ran = match stage {
                Stage::Scan => (self.scan(task, drive, &mut passed, go_on)?, (0, 0)),
                Stage::Encode => self.encode(task, drive, &mut passed, go_on)?,
            };
            if let (Ran::Reused(_), _) = ran {
                passed.file(self.plan.bytes_of(task)?);
            }
            Ok(ran)
        };
        run_parts(tasks.len(), self.workers, do_part, take)
    }

    /// Analyzes every document for the comparing steps.
    fn scan(
        &self,
        task: usize,
        drive: &Drive<'_>,
        passed: &mut PartProgress<'_>,
        go_on: GoOn<'_>,
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
        let write = |only: &Corpus, scratch: &Path, found: &mut InputRecorder<'_>| {
            let mut part = PartWriter::create(scratch)?;
            read_through(&self.tools, only, drive, |seen| match seen {
                Seen::Documents { observed, raw } => {
                    observed.iter().try_for_each(|_| go_on())?;
                    passed.within(raw, observed.iter().map(|observed| (observed.bytes, 0)));
                    let mut placed = observed.into_iter().map(|observed| by_place(only, observed));
                    placed.try_for_each(|observed| part.observed(&observed?))
                }
                Seen::End { bytes, identity } => {
                    passed.file(bytes);
                    found.file_end((bytes, identity))?;
                    part.file_end((bytes, identity))
                }
            })?;
            Ok((part, ()))
        };
        let commit = |part: PartWriter, key: Identity, scratch: &Path| {
            let digest = part.finish(key)?;
            commit_scanned(&self.plan.cache.part(key), key, scratch, digest)?;
            Ok(digest)
        };
        self.make(Stage::Scan, task, write, commit).map(|(ran, ())| ran)
    }

    /// Prepares and encodes every document, and audits a sample of them.
    fn encode(
        &self,
        task: usize,
        drive: &Drive<'_>,
        passed: &mut PartProgress<'_>,
        go_on: GoOn<'_>,
    ) -> Result<(Ran, Audited)> {
        let (plan, is_scanned) = (self.plan, self.plan.is_scanned(task));
        let write = |only: &Corpus, scratch: &Path, found: &mut InputRecorder<'_>| {
            let decided = is_scanned.then(|| plan.list(task));
            let list = decided.as_deref().map_or(Ok(List::default()), List::read)?;
            let (source, wanted) = (&only.sources[0], Wanted::default());
            let prepared = Prepared::new(only, &self.tools, vec![list]);
            let tokenizer = plan.tokenizer.of(source.recipe.means_controls())?;
            let encoding = Encoding {
                tokenizer,
                begin: plan.text.head.tokenizer.begin,
                end: plan.text.head.tokenizer.end,
                validation: only.validation,
                wanted: &wanted,
                prepared: &prepared,
            };
            disk::create_folder(scratch)?;
            let mut sink = PartSink {
                part: PartBuilder::new(
                    scratch,
                    &source.name,
                    &source.fields.keep,
                    &self.empty,
                    decided.as_deref(),
                    plan.text.tasks[task].first_group(),
                )?,
                only,
                places: source.recipe.encoding_places(),
                wanted: &wanted,
                audit: Audit::default(),
            };
            pipeline::run(only, &encoding, drive, |step, auditor| match step {
                Step::Slab { items, raw_bytes } => {
                    items.iter().try_for_each(|_| go_on())?;
                    passed.within(raw_bytes, items.iter().filter_map(encoded));
                    items.into_iter().try_for_each(|item| sink.item(item, auditor))
                }
                Step::FileEnd(content) => {
                    passed.file(content.bytes);
                    found.file_end((content.bytes, content.sha256))?;
                    sink.part.file_end(content);
                    Ok(())
                }
            })?;
            let PartSink { part, mut audit, .. } = sink;
            drive.each(&audit.finish(), |sample| audit::check(tokenizer, sample))?;
            let awaited = part.awaited().and_then(|file| source.files.get(file));
            let place = || awaited.map(|file| file.shown.clone()).unwrap_or_default();
            let output = part.finish().map_err(|fault| fault.or_at(place))?;
            Ok((output, (audit.documents, audit.audited_bytes)))
        };
        let commit = |part: PartOutput, key: Identity, scratch: &Path| {
            output::commit(plan, key, scratch, &part)
        };
        self.make(Stage::Encode, task, write, commit)
    }

    /// Makes a task's part by `write` and `commit`, unless it exists, and records the result. Returns also what `write`
    /// reports, or its default if there was nothing to write.
    fn make<P, T: Default>(
        &self,
        stage: Stage,
        task: usize,
        write: impl FnOnce(&Corpus, &Path, &mut InputRecorder<'_>) -> Result<(P, T)>,
        commit: impl FnOnce(P, Identity, &Path) -> Result<Digest>,
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
        let name = TaskResult::name(stage, task);
        if let (Some(known), None) = (&known, &before) {
            let part = key(known);
            if let Some(digest) = plan.whole_part(stage, part)? {
                prune::used(&plan.known_by(stage, part));
                let (of, inputs) = (name, result::stamped(known, stamps));
                TaskResult { of, inputs, part, digest, reused: true }.commit(plan, stage, task)?;
                return Ok((Ran::Reused(digest), T::default()));
            }
        }
        let scratch = result::scratch(&plan.folder(), &format!("{name}.part"))?;
        let mut found = InputRecorder { files, known: known.as_deref(), contents: Vec::new() };
        let written = write(&only, &scratch, &mut found);
        // The fault is more useful than one about this folder.
        let (written, told) = written.inspect_err(|_| drop(disk::remove(&scratch)))?;
        let contents = found.contents;
        let part = key(&contents);
        let digest = {
            let naming = &self.naming[usize::from(part.0[0]) % NAMING];
            let _one_at_a_time = naming.lock().unwrap_or_else(PoisonError::into_inner);
            commit(written, part, &scratch)?
        };
        let inputs = result::stamped(&contents, stamps);
        TaskResult { of: name, inputs, part, digest, reused: false }.commit(plan, stage, task)?;
        Ok((if before.is_some() { Ran::Again(digest) } else { Ran::New(digest) }, told))
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
        files.iter().map(SourceFile::content).collect::<Result<_>>().map(Some)
    }
}

/// The bytes and tokens of a document.
fn encoded(item: &Item) -> Option<(u64, u64)> {
    match item {
        Item::Document(document) => Some((document.text_bytes, document.tokens.len() as u64)),
        Item::Dropped(_) => None,
    }
}

/// The files of a task, recorded while they are read.
struct InputRecorder<'a> {
    files: &'a [SourceFile],
    /// Their content, if it was read before.
    known: Option<&'a [Content]>,
    contents: Vec<Content>,
}

impl InputRecorder<'_> {
    /// Ends the open file, which had this content. Refuses other content than was found before.
    fn file_end(&mut self, content: Content) -> Result<()> {
        let number = self.contents.len();
        let file = self.files.get(number).ok_or_else(|| Fault::bug("a file too many"))?;
        if let Some(known) = self.known {
            same(known[number], content, &file.shown)?;
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

/// Renames a part of the scan, unless the name exists: then the two must be equal. A second one that differs is kept
/// too.
fn commit_scanned(path: &Path, key: Identity, scratch: &Path, digest: Digest) -> Result<()> {
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

/// Writes the documents of a task to its part, and queues samples of them for the audit.
struct PartSink<'a> {
    part: PartBuilder,
    only: &'a Corpus,
    /// The places of the steps that run here.
    places: Vec<usize>,
    wanted: &'a Wanted,
    audit: Audit,
}

impl PartSink<'_> {
    fn item(&mut self, item: Item, auditor: &Auditor) -> Result<()> {
        match item {
            Item::Document(document) => self.document(*document, auditor),
            Item::Dropped(dropped) => self.dropped(*dropped),
        }
    }

    fn document(&mut self, document: Encoded, auditor: &Auditor) -> Result<()> {
        let Encoded {
            id,
            row,
            group,
            bytes,
            kept,
            text_bytes,
            content,
            trace,
            split,
            tokens,
            sample,
        } = document;
        if let Some(sample) = self.audit.offer(content.0, text_bytes, sample, self.wanted) {
            auditor.check(sample);
        }
        for (place, before, after) in trace.iter().flat_map(|trace| &trace.changes) {
            let step = self.places.iter().position(|own| own == place);
            let step = step.ok_or_else(|| Fault::bug("a step that does not run here"))?;
            self.part.output.changes.count(step, *before, *after);
        }
        self.part.output.changes.read_bytes += trace.map_or(0, |trace| trace.read);
        let count = tokens.len() as u64;
        let record =
            DocumentRecord { id, file: 0, row, group, bytes, first_token: 0, tokens: count, kept };
        self.part.document(split, &tokens, record, text_bytes).map_err(|fault| self.in_file(fault))
    }

    fn dropped(&mut self, dropped: pipeline::Dropped) -> Result<()> {
        let pipeline::Dropped { reason, row, id, bytes, fault } = dropped;
        if stops(self.only, &reason) {
            return Err(self.in_file(fault));
        }
        let (number, reason) = (self.part.file(), reason.into_owned());
        if !self.only.sources[0].recipe.is_empty() {
            self.part.output.changes.read_bytes += bytes;
        }
        if self.part.output.stop.is_none() && !always_counted(&reason) {
            let place = self.place_in_file(&fault).unwrap_or_default();
            self.part.output.stop = Some(Stop { file: number, place, reason: reason.clone() });
        }
        let (group, row, bytes) = (row.group, row.row, Some(bytes));
        let (kept, spans) = (None, Vec::new());
        self.part.dropped(Line { file: number, group, row, id, reason, bytes, kept, spans })
    }

    /// The position of a fault in the open file: a corpus in which the file has another name may reuse the part.
    fn place_in_file(&self, fault: &Fault) -> Option<String> {
        let (file, place) = (self.open_file()?, fault.place()?);
        let path = file.path.to_string();
        let within = place.strip_prefix(&path).or_else(|| place.strip_prefix(&file.shown));
        within.map(str::to_owned)
    }

    fn open_file(&self) -> Option<&SourceFile> {
        self.only.sources[0].files.get(self.part.file())
    }

    /// The fault with the open file, if it names no place.
    fn in_file(&self, fault: Fault) -> Fault {
        fault.or_at(|| self.open_file().map(|file| file.shown.clone()).unwrap_or_default())
    }
}
