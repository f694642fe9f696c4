//! `zdata build`: a corpus to a store, resumable, the same bytes every time.
//!
//! Reads top to bottom: lock the folder, ask whether it is done, take up or begin the journal, run the pipeline, check
//! the last samples, make it a store.

pub(crate) mod commit;
pub(crate) mod journal;
pub(crate) mod pipeline;
pub(crate) mod request;
pub(crate) mod stream;

use std::path::Path;

use contract::{Fault, Result, note};
use rayon::prelude::*;
use store::Location;
use store::{FORMAT, Manifest, TokenizerRecord, disk, open};

use self::commit::Committer;
use self::journal::{Checkpoint, Head, Journal};
use self::pipeline::Encoding;
use self::request::Sides;
use crate::corpus::Corpus;
use crate::dedup::{Scan, Tools};
use crate::prepared::Prepared;
use crate::progress::{Measure, Progress};
use crate::takeover;
use crate::tokenize::audit::{self, Wanted};
use crate::tokenize::{Engine, Tokenizer};
use crate::versions;

/// What only decides speed.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that parse and encode.
    pub workers: usize,
    /// Which library encodes.
    pub engine: Engine,
    /// Whether to keep silent about progress.
    pub quiet: bool,
}

/// How a build ended.
#[derive(Debug)]
pub enum Outcome {
    /// The store was there already, built from the same request.
    UpToDate(Manifest),
    /// Built now.
    Built {
        /// The store.
        manifest: Manifest,
        /// What passed and how fast.
        summary: String,
        /// Documents that the reference encoded again, and their bytes.
        audited: (u64, u64),
    },
}

/// Builds `corpus` into the folder `store`, or goes on with a build that was killed there.
pub fn build(corpus: &Corpus, store: &Path, options: Options) -> Result<Outcome> {
    build_from(corpus, store, None, options, || Ok(()))
}

/// Builds as long as `go_on`, asked before each document, does not fail.
#[cfg(test)]
pub(crate) fn build_while(
    corpus: &Corpus,
    store: &Path,
    options: Options,
    go_on: impl FnMut() -> Result<()>,
) -> Result<Outcome> {
    build_from(corpus, store, None, options, go_on)
}

/// Builds, taking over from the store `from` what did not change since, as long as `go_on`, asked before each document,
/// does not fail.
pub fn build_from(
    corpus: &Corpus,
    store: &Path,
    from: Option<&Location>,
    options: Options,
    mut go_on: impl FnMut() -> Result<()>,
) -> Result<Outcome> {
    let tokenizer = tokenizer(corpus, options.engine)?;
    let head = head(corpus, &tokenizer)?;
    disk::create_folder(store)?;
    let _lock = disk::lock(store)?;
    if store.join(open::MANIFEST).exists() {
        let manifest = done(corpus, &store.into(), &head)?;
        return Ok(Outcome::UpToDate(manifest));
    }
    if let (Some(why), Engine::Fastest, false) =
        (tokenizer.why_slow(), options.engine, options.quiet)
    {
        note!("note: fastokens does not cover this tokenizer ({why}): encoding with tokenizers");
    }
    let empty = request::empty_manifest(&head, tokenizer.token_bytes());
    let (journal, checkpoints) = take_up(corpus, store, &head)?;
    let tools = tools(corpus, &tokenizer, &head)?;
    let scan = scan(corpus, store, (&tools, options), &mut go_on)?;
    let planned = take_over(corpus, from, (&head, &checkpoints), scan.as_ref(), options)?;
    let corpus = planned.as_ref().unwrap_or(corpus);
    let prepared = Prepared::new(corpus, &tools, store)?;
    let mut progress = progress(corpus, &checkpoints, options.quiet)?;
    let wanted = Wanted::default();
    let mut committer =
        Committer::new(corpus, store, &empty, (journal, checkpoints), &wanted, &mut progress)?;
    let encoding = Encoding {
        tokenizer: &tokenizer,
        begin: head.tokenizer.begin,
        end: head.tokenizer.end,
        validation: corpus.validation,
        wanted: &wanted,
        prepared: &prepared,
    };
    let position = committer.position();
    pipeline::run(corpus, &encoding, options.workers.max(1), position, |step, auditor| {
        committer.step(step, auditor, &mut go_on)
    })?;
    let mut audit = std::mem::take(&mut committer.audit);
    let mut sources = std::mem::take(&mut committer.sources);
    let failure = audit.finish().par_iter().find_map_first(|s| audit::check(&tokenizer, s).err());
    failure.map_or(Ok(()), Err)?;
    if let Some(scan) = scan {
        scan.close(corpus, &mut sources)?;
    }
    request::check_kept(&sources)?;
    let manifest = finish(store, &tokenizer, Manifest { sources, ..empty })?;
    open::finish(store)?;
    let rescued = tokenizer.rescued();
    if rescued > 0 && !options.quiet {
        note!("note: fastokens gave up on {rescued} documents: tokenizers encoded them");
    }
    let audited = (audit.documents, audit.audited_bytes);
    Ok(Outcome::Built { manifest, summary: progress.finish(), audited })
}

/// The corpus with its unchanged sources marked, if there is a store to take them from.
fn take_over(
    corpus: &Corpus,
    from: Option<&Location>,
    (head, checkpoints): (&Head, &[Checkpoint]),
    scan: Option<&Scan>,
    options: Options,
) -> Result<Option<Corpus>> {
    let Some(from) = from else { return Ok(None) };
    let lists = scan.map_or(&[][..], |scan| &scan.files);
    let begun = |source: usize| {
        checkpoints.last().is_some_and(|last| source < last.position.source)
            || checkpoints.iter().any(|checkpoint| checkpoint.source == source)
    };
    let (planned, notes) = takeover::plan(corpus, from, head, lists, begun)?;
    if !options.quiet {
        notes.iter().for_each(|note| note!("note: {note}"));
    }
    Ok(Some(planned))
}

/// What steps need, with the tokens that are put around documents.
pub(crate) fn tools<'a>(
    corpus: &Corpus,
    tokenizer: &'a Tokenizer,
    head: &Head,
) -> Result<Tools<'a>> {
    let around = [head.tokenizer.begin, head.tokenizer.end].iter().flatten().count();
    let count = move |text: &str| Ok(tokenizer.encode(text)?.len() + around);
    Tools::new(corpus, Some(Box::new(count)))
}

/// The dedup scan, if a step compares documents.
fn scan(
    corpus: &Corpus,
    store: &Path,
    (tools, options): (&Tools<'_>, Options),
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<Scan>> {
    if !options.quiet {
        tools.notes().for_each(|note| note!("note: {note}"));
    }
    if corpus.sources.iter().all(|source| source.recipe.scanned() == 0) {
        return Ok(None);
    }
    let how = (options.workers.max(1), options.quiet);
    Scan::take_up(tools, corpus, store, how, go_on).map(Some)
}

/// The store that lies at `store`, if it was built from this very request.
pub fn built(corpus: &Corpus, store: impl Into<Location>, engine: Engine) -> Result<Manifest> {
    let tokenizer = tokenizer(corpus, engine)?;
    done(corpus, &store.into(), &head(corpus, &tokenizer)?)
}

/// The tokenizer that a corpus names.
pub(crate) fn tokenizer(corpus: &Corpus, engine: Engine) -> Result<Tokenizer> {
    let path = corpus.tokenizer.as_ref().ok_or_else(|| {
        Fault::usage("the corpus names no tokenizer")
            .at(corpus.file.to_string())
            .wanted("tokenizer = \"tokenizer.json\"")
    })?;
    if let Err(error) = path.size()
        && error.kind() == std::io::ErrorKind::NotFound
    {
        return Err(Fault::data("there is no tokenizer at this path")
            .at(path.to_string())
            .wanted(
                "the path of a Hugging Face `tokenizer.json`; the name of a model is not enough",
            )
            .hint(
                "download it from the model's \"Files\" on huggingface.co, or make one: \
                 zdata tokenizer train CORPUS.toml --vocab 8192 --out tokenizer.json",
            ));
    }
    Tokenizer::read(path, engine)
}

pub(crate) fn head(corpus: &Corpus, tokenizer: &Tokenizer) -> Result<Head> {
    let marker = |key: &str, token: &Option<String>| {
        let id = token.as_ref().map(|token| tokenizer.id_of(key, token)).transpose();
        id.map_err(|fault| fault.or_at(|| corpus.file.to_string()))
    };
    Ok(Head {
        versions: versions::identity(),
        tokenizer: TokenizerRecord {
            sha256: tokenizer.identity(),
            vocab: tokenizer.vocab(),
            begin: marker("begin", &corpus.begin)?,
            end: marker("end", &corpus.end)?,
            encoder: tokenizer.encoder().to_owned(),
        },
        unit: corpus.unit,
        validation: corpus.validation.to_string(),
        shard_tokens: corpus.shard_tokens,
        sources: corpus
            .sources
            .iter()
            .map(|source| (source.name.clone(), request::preparation(corpus, source)))
            .collect(),
    })
}

/// The store that is there, if it is what was asked for.
fn done(corpus: &Corpus, store: &Location, head: &Head) -> Result<Manifest> {
    let manifest = open::manifest(store)?;
    let sides = Sides { store, since: "this store was built" };
    sides.compare_heads(&request::head_of(&manifest, head), head)?;
    for (source, old) in corpus.sources.iter().zip(&manifest.sources) {
        sides.compare_inputs(source, &old.inputs, true)?;
    }
    request::compare_dropped(corpus, &manifest, store)?;
    store.local().map_or(Ok(()), open::finish)?;
    Ok(manifest)
}

/// The journal of this build: the one that is there, if it is of the same request, or a new one.
fn take_up(corpus: &Corpus, store: &Path, head: &Head) -> Result<(Journal, Vec<Checkpoint>)> {
    if !Journal::exists(store) {
        refuse_foreign(store)?;
        return Ok((Journal::begin(store, head)?, Vec::new()));
    }
    let (journal, old, checkpoints) = Journal::resume(store)?;
    let sides = Sides { store: &store.into(), since: "this build was begun" };
    sides.compare_heads(&old, head)?;
    let pairs = [
        ("shard_tokens", old.shard_tokens.to_string(), head.shard_tokens.to_string()),
        ("zdata", old.versions.to_string(), head.versions.to_string()),
    ];
    for (what, old, new) in pairs {
        if old != new {
            return Err(Fault::usage(format!("{what} changed since this build was begun"))
                .at(store.display().to_string())
                .found(new)
                .wanted(old)
                .hint("undo the change, or delete the store's folder and build it again"));
        }
    }
    for (index, source) in corpus.sources.iter().enumerate() {
        let inputs = checkpoints.iter().filter(|checkpoint| checkpoint.source == index);
        let inputs: Vec<_> = inputs.flat_map(|checkpoint| checkpoint.inputs.clone()).collect();
        let finished = checkpoints.last().is_some_and(|last| last.position.source > index);
        sides.compare_inputs(source, &inputs, finished)?;
    }
    Ok((journal, checkpoints))
}

/// A build clears its folder, so it must be its own.
fn refuse_foreign(store: &Path) -> Result<()> {
    let mut names = disk::entries(store)?.into_iter();
    match names.find(|entry| !entry.ends_with(open::BUILD_FOLDER)) {
        None => Ok(()),
        Some(entry) => Err(Fault::usage("this folder holds something else")
            .at(store.display().to_string())
            .found(entry.file_name().unwrap_or_default().to_string_lossy())
            .wanted("a new or empty folder, a store, or an unfinished build")
            .hint("name another --out")),
    }
}

fn progress(corpus: &Corpus, checkpoints: &[Checkpoint], quiet: bool) -> Result<Progress> {
    let mut bytes = 0;
    for file in corpus.sources.iter().flat_map(|source| &source.files) {
        bytes += file.size()?;
    }
    let inputs = checkpoints.iter().flat_map(|checkpoint| &checkpoint.inputs);
    let before = inputs.map(|input| input.bytes).sum();
    Ok(Progress::new("build", Measure::Bytes, bytes, quiet).after(before))
}

/// Makes a folder a store, whoever wrote the streams that `manifest` names.
pub(crate) fn finish(
    store: &Path,
    tokenizer: &Tokenizer,
    mut manifest: Manifest,
) -> Result<Manifest> {
    debug_assert_eq!(manifest.format, FORMAT);
    disk::write_whole(&store.join(open::TOKENIZER), tokenizer.bytes())?;
    manifest.request = request::identity(&manifest);
    manifest.digest = manifest.identity();
    open::commit(store, &manifest)?;
    Ok(manifest)
}
