//! `zdata build`: a corpus to a store, resumable, the same bytes every time.
//!
//! Reads top to bottom: ask whether it is done, lock the folder of parts, cut the corpus into tasks, make the store of
//! their parts. A part that is there, from a build that was killed or from an earlier one, is not made again.

pub(crate) mod commit;
pub(crate) mod pipeline;
pub(crate) mod request;
pub(crate) mod stream;

use std::path::{Path, PathBuf};

use contract::{Fault, Result, counted, note};
use store::{FORMAT, Location, Manifest, Split, TokenizerRecord, disk, open};

use self::request::{Head, Sides};
use crate::cluster;
use crate::corpus::Corpus;
use crate::dedup::{self, Tools};
use crate::dropped;
use crate::progress::meanwhile;
use crate::tokenize::{Engine, Tokenizer};
use crate::{verify, versions};

/// What only decides speed, and where parts lie.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that parse and encode.
    pub workers: usize,
    /// Which library encodes.
    pub engine: Engine,
    /// Whether to keep silent about progress.
    pub quiet: bool,
    /// The folder of parts; one that is named is kept, the one beside the store goes when that is whole.
    pub work: Option<PathBuf>,
    /// Bytes of input that a part is made of; a larger file is a part by itself.
    pub task_bytes: u64,
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
        /// For each stage, how much was made and how much was there.
        tallies: Vec<String>,
        /// Documents that the reference encoded again, and their bytes.
        audited: (u64, u64),
    },
}

/// Builds `corpus` into the folder `store`, or goes on with a build that was killed there.
pub fn build(corpus: &Corpus, store: &Path, options: Options) -> Result<Outcome> {
    build_while(corpus, store, options, || Ok(()))
}

/// Builds as long as `go_on`, asked before each document that is worked on, does not fail.
pub(crate) fn build_while(
    corpus: &Corpus,
    store: &Path,
    options: Options,
    mut go_on: impl FnMut() -> Result<()>,
) -> Result<Outcome> {
    if store.join(open::MANIFEST).exists() {
        let manifest = built(corpus, store, options.engine)?;
        clear_work(store)?;
        return Ok(Outcome::UpToDate(manifest));
    }
    refuse_foreign(store)?;
    let work = options.work.clone().unwrap_or_else(|| work_of(store));
    if options.work.is_none() {
        cluster::refuse_foreign(&work)?;
    }
    let _lock = cluster::lock(&work)?;
    let built = build_in(corpus, store, &work, &options, &mut go_on);
    // What is kept of a build that failed are its parts: a folder without them is of no use.
    if options.work.is_none() && (built.is_ok() || !cluster::holds_parts(&work)?) {
        cluster::clear(&work)?;
    }
    built
}

fn build_in(
    corpus: &Corpus,
    store: &Path,
    work: &Path,
    options: &Options,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    let plan = cluster::plan_with(corpus, work, options.task_bytes, options.engine)?;
    if let (Some(why), Engine::Fastest, false) =
        (plan.tokenizer.why_slow(), options.engine, options.quiet)
    {
        note!("note: fastokens does not cover this tokenizer ({why}): encoding with tokenizers");
    }
    let cluster::Made { manifest, summary, audited } = cluster::make(&plan, store, options, go_on)?;
    let rescued = plan.tokenizer.rescued();
    if rescued > 0 && !options.quiet {
        let documents = counted(rescued, "document");
        note!("note: fastokens gave up on {documents}: tokenizers encoded what it did not");
    }
    let tallies = cluster::tallies(&plan)?;
    plan.close()?;
    Ok(Outcome::Built { manifest, summary, tallies, audited })
}

/// Where the parts of a build lie that names no folder for them: beside the store, until that is whole.
pub fn work_of(store: &Path) -> PathBuf {
    disk::beside(store, ".work")
}

/// Removes the parts that a build left beside its store when it was killed at its very end.
fn clear_work(store: &Path) -> Result<()> {
    let work = work_of(store);
    if !work.is_dir() {
        return Ok(());
    }
    // Who holds it is at its end, and removes it.
    let Ok(_lock) = disk::lock(&work) else { return Ok(()) };
    cluster::clear(&work)
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
    let found = path.size().map_err(|error| error.kind());
    if found == Err(std::io::ErrorKind::IsADirectory) {
        return Err(Fault::usage("this is a folder, and a tokenizer is a file")
            .at(path.to_string())
            .hint(format!("name the file: tokenizer = \"{path}/tokenizer.json\"")));
    }
    if found == Err(std::io::ErrorKind::NotFound) {
        return Err(Fault::data("this path has no tokenizer")
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
        id.map_err(|fault| fault.or_at(|| corpus.place_of(key)))
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
    let sides = Sides { store };
    sides.compare_heads(&request::head_of(&manifest, head), head)?;
    let mut sources = corpus.sources.iter().zip(&manifest.sources);
    meanwhile("build", "reading the inputs to compare them with those of the store", || {
        sources.try_for_each(|(source, old)| sides.compare_inputs(source, &old.inputs))
    })?;
    request::compare_dropped(corpus, &manifest, store)?;
    verify::refuse_incomplete(store, &manifest)?;
    store.local().map_or(Ok(()), open::finish)?;
    Ok(manifest)
}

/// Whether a store of these sources may have a file that is called so.
pub fn is_of_a_store<'a>(mut sources: impl Iterator<Item = &'a str>, name: &str) -> bool {
    let lists = [dropped::FILE, dropped::REMOVED, dedup::MATCHES];
    match name.split('/').collect::<Vec<_>>()[..] {
        [name] => [open::MANIFEST, open::MANIFEST_SUM, open::TOKENIZER].contains(&name),
        [source, list] => lists.contains(&list) && sources.any(|it| it == source),
        [source, split, _] => {
            Split::ALL.iter().any(|it| it.name() == split) && sources.any(|it| it == source)
        }
        _ => false,
    }
}

/// A store gets a folder of its own; what an older version left unfinished there is nothing that this one can go on with.
pub fn refuse_foreign(store: &Path) -> Result<()> {
    storage::staging::refuse_link(store)?;
    if !store.is_dir() {
        return Ok(());
    }
    let entries = disk::entries(store)?;
    let Some(entry) = entries.first() else { return Ok(()) };
    if store.join(open::BUILD_FOLDER).join(OLD_JOURNAL).exists() {
        return Err(Fault::usage("another version of zdata began a build in this folder")
            .at(store.display().to_string())
            .hint("delete the folder and run the same command again, or let that version end it"));
    }
    Err(Fault::usage("this folder holds something else")
        .at(store.display().to_string())
        .found(entry.file_name().unwrap_or_default().to_string_lossy())
        .wanted("a new or empty folder, or a store")
        .hint("name another --out"))
}

/// What builds kept until they kept parts.
const OLD_JOURNAL: &str = "journal.jsonl";

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
