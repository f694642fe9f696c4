//! `zdata build`: a corpus to a store, resumable, the same bytes every time.
//!
//! Reads top to bottom: check whether the store is done, lock the folder of parts, cut the corpus into tasks, make the
//! store from their parts. Parts of a killed or an earlier build are reused.

mod forecast;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use contract::{Fault, Result, counted, note};
use store::disk::{self, Lock};
use store::{Manifest, PartRecord, open};

pub use self::forecast::{Forecast, RECORD_FACTOR, SourceForecast, forecast};
pub use crate::assembly::{Options, built, is_of_a_store};
use crate::cache_dir::{CacheDir, apart_from};
use crate::cluster;
use crate::corpus::{Corpus, Source};
use crate::cuts;
use crate::tokenize::Engine;

/// How a build ended.
#[derive(Debug)]
pub enum Outcome {
    /// The store existed, built from the same request.
    UpToDate(Manifest),
    /// Built now.
    Built {
        /// The store.
        manifest: Manifest,
        /// Counts and rates.
        summary: String,
        /// For each stage, how many parts were made and how many were reused.
        tallies: Vec<String>,
        /// Documents that the reference encoded again, and their bytes.
        audited: (u64, u64),
    },
}

/// Builds `corpus` into the folder `store`, or resumes a build that was killed there.
pub fn build(corpus: &Corpus, store: &Path, options: Options) -> Result<Outcome> {
    build_while(corpus, store, options, || Ok(()))
}

/// The same, and calls `made` with every file of a part once the part is made, and the file's name in the store.
pub fn build_telling(
    corpus: &Corpus,
    store: &Path,
    options: Options,
    made: &mut dyn FnMut(&Path, &str) -> Result<()>,
) -> Result<Outcome> {
    begin(corpus, store, options, &|| Ok(()), made)
}

/// The same, while `go_on`, called before each document, succeeds.
pub(crate) fn build_while(
    corpus: &Corpus,
    store: &Path,
    options: Options,
    go_on: impl FnMut() -> Result<()> + Send,
) -> Result<Outcome> {
    let go_on = Mutex::new(go_on);
    let stopped = || Fault::bug("a build went on after a panic");
    let go_on = || {
        let mut go_on = go_on.lock().map_err(|_| stopped())?;
        (*go_on)()
    };
    begin(corpus, store, options, &go_on, &mut |_, _| Ok(()))
}

fn begin(
    corpus: &Corpus,
    store: &Path,
    options: Options,
    go_on: cluster::GoOn<'_>,
    made: cluster::MadeFile<'_>,
) -> Result<Outcome> {
    if let Some(manifest) = up_to_date(corpus, store, &options)? {
        return Ok(Outcome::UpToDate(manifest));
    }
    let work = work_folder(store, &options)?;
    let above = disk::missing_above(&work);
    let built = build_in(corpus, store, &work, &options, go_on, made);
    if built.is_err() {
        above.iter().for_each(|folder| disk::remove_if_empty(folder));
    }
    built
}

fn build_in(
    corpus: &Corpus,
    store: &Path,
    work: &Path,
    options: &Options,
    go_on: cluster::GoOn<'_>,
    made: cluster::MadeFile<'_>,
) -> Result<Outcome> {
    let (cache, _lock) = hold(store, work, options)?;
    let built = build_by(corpus, store, work, options, go_on, made);
    // A failed build keeps its parts: a folder without parts is of no use.
    if options.work.is_none() && (built.is_ok() || cache.parts()?.is_empty()) {
        cache.clear(options.quiet)?;
    }
    built
}

fn build_by(
    corpus: &Corpus,
    store: &Path,
    work: &Path,
    options: &Options,
    go_on: cluster::GoOn<'_>,
    made: cluster::MadeFile<'_>,
) -> Result<Outcome> {
    let engine = options.engine.unwrap_or_default();
    let plan = cluster::plan_build(corpus, work, engine)?;
    if let (Some(why), Engine::Fastest, false) = (plan.tokenizer.why_slow(), engine, options.quiet)
    {
        note!("note: fastokens does not cover this tokenizer ({why}): encoding with tokenizers");
    }
    if !options.quiet {
        spelled(corpus, &plan.tokenizer.control_tokens())
            .iter()
            .for_each(|told| note!("note: {told}"));
    }
    let cluster::Made { manifest, summary, tallies, audited } =
        cluster::make(&plan, store, options, go_on, made)?;
    let rescued = plan.tokenizer.rescued();
    if rescued > 0 && !options.quiet {
        let documents = counted(rescued, "document");
        note!("note: fastokens gave up on {documents}: tokenizers encoded what it did not");
    }
    plan.close()?;
    Ok(Outcome::Built { manifest, summary, tallies, audited })
}

/// Warnings about templates that write control tokens as text, which may be unintended.
pub(crate) fn spelled(corpus: &Corpus, controls: &[String]) -> Vec<String> {
    let line = |source: &Source| {
        let found = source.recipe.mapping.as_ref()?.spells(controls);
        let shown: Vec<String> = found.iter().take(3).map(|token| format!("{token:?}")).collect();
        let more = if found.len() > 3 { ", ..." } else { "" };
        (!found.is_empty()).then(|| {
            format!(
                "source {:?}: control tokens that its template may write ({}{more}) are spelled out as text; for tokens, name \
                 a `chat_template`",
                source.name,
                shown.join(", ")
            )
        })
    };
    corpus.sources.iter().filter_map(line).collect()
}

/// The store, if it exists and was built from exactly this request. First refuses an invalid folder for parts.
pub fn up_to_date(corpus: &Corpus, store: &Path, options: &Options) -> Result<Option<Manifest>> {
    if let Some(named) = &options.work {
        apart_from(named, store)?;
        CacheDir::check(named)?;
    }
    if !store.join(open::MANIFEST).exists() {
        return Ok(None);
    }
    let manifest = built(corpus, store, options.engine)?;
    if !options.quiet && !is_cut_alike(corpus, &manifest)? {
        note!(
            "note: part_bytes = {} would cut this store into other parts: it stays as it is",
            corpus.part_bytes
        );
    }
    clear_work(store, options.quiet)?;
    Ok(Some(manifest))
}

/// Whether the corpus would be cut into the parts that the store has.
fn is_cut_alike(corpus: &Corpus, manifest: &Manifest) -> Result<bool> {
    let (parts, _) = cuts::parts(corpus)?;
    let cut = parts.iter().map(|part| (part.source, part.files.start, part.first_group()));
    let sources = manifest.sources.iter().enumerate();
    let there = sources.flat_map(|(source, record)| {
        let begin = move |part: &PartRecord| (source, part.first_file as usize, part.first_group);
        record.parts.iter().map(begin)
    });
    Ok(cut.eq(there))
}

/// Holds the folder of parts `work` of a build, and moves back the parts that a killed build had moved into its store.
pub fn hold(store: &Path, work: &Path, options: &Options) -> Result<(CacheDir, Lock)> {
    let (cache, lock) = CacheDir::hold(work)?;
    if options.work.is_none() {
        cluster::reclaim(&cache, store)?;
    }
    Ok((cache, lock))
}

/// The folder of parts of a build that begins or resumes. Refuses places, of the store and of parts, that hold
/// something else.
pub fn work_folder(store: &Path, options: &Options) -> Result<PathBuf> {
    refuse_foreign(store)?;
    let work = options.work.clone().unwrap_or_else(|| work_of(store));
    CacheDir::check(&work)?;
    Ok(work)
}

/// The default folder of parts, used until the store is complete: next to the store.
pub(crate) fn work_of(store: &Path) -> PathBuf {
    disk::beside(store, ".work")
}

/// Removes the parts that a build killed at its very end left next to its store.
fn clear_work(store: &Path, quiet: bool) -> Result<()> {
    // Other people's files there no longer matter.
    let Ok(cache) = CacheDir::open(&work_of(store)) else { return Ok(()) };
    // The process that holds it is about to remove it.
    let Ok(_lock) = disk::lock(cache.path()) else { return Ok(()) };
    cache.clear(quiet)
}

/// A store needs its own folder.
fn refuse_foreign(store: &Path) -> Result<()> {
    storage::staging::refuse_link(store)?;
    storage::staging::refuse_long(store)?;
    storage::apart::refuse_inside(&store.into())?;
    if !store.is_dir() {
        return Ok(());
    }
    let entries = disk::entries(store)?;
    let Some(entry) = entries.first() else { return Ok(()) };
    Err(Fault::usage("this folder holds something else")
        .at(store.display().to_string())
        .found(entry.file_name().unwrap_or_default().to_string_lossy())
        .wanted("a new or empty folder, or a store")
        .hint("name another --out"))
}

#[cfg(test)]
mod tests;
