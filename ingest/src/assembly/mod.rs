//! The stages that every build shares: the request, the pipeline that prepares and encodes documents, parts and the
//! sources that they add up to.

pub(crate) mod part;
pub(crate) mod pipeline;
pub(crate) mod request;
pub(crate) mod source;

use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use storage::staging::Staging;
use store::{FORMAT, Location, Manifest, TokenizerRecord, disk, open, whole};

use self::request::Head;
use crate::corpus::Corpus;
use crate::dedup::{self, Tools};
use crate::dropped;
use crate::progress::{Measure, Progress, meanwhile};
use crate::tokenize::{Engine, Tokenizer};
use crate::versions;

/// Options that affect only speed, and where parts are stored.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that parse and encode.
    pub workers: usize,
    /// The library that encodes, if the user named one.
    pub engine: Option<Engine>,
    /// Whether progress is not shown.
    pub quiet: bool,
    /// The folder of parts. A named one is kept; the default, next to the store, is removed once the store is complete.
    pub work: Option<PathBuf>,
}

/// What steps need, including the tokens that are put around documents.
pub(crate) fn tools<'a>(
    corpus: &Corpus,
    tokenizer: &'a Tokenizer,
    head: &Head,
) -> Result<Tools<'a>> {
    let around = [head.tokenizer.begin, head.tokenizer.end].iter().flatten().count();
    let count =
        move |controls, text: &str| Ok(tokenizer.of(controls)?.encode(text)?.len() + around);
    Tools::new(corpus, Some(Box::new(count)))
}

/// The store at `store`, if it was built from exactly this request, and by `engine` if the user named one.
pub fn built(
    corpus: &Corpus,
    store: impl Into<Location>,
    engine: Option<Engine>,
) -> Result<Manifest> {
    let (store, asked) = (store.into(), engine.unwrap_or_default());
    let head = head(corpus, &tokenizer(corpus, asked)?, asked)?;
    let manifest = done(corpus, &store, &head)?;
    if engine.is_some() {
        request::compare_encoders(&store, &manifest, &head)?;
    }
    Ok(manifest)
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
    let chats = corpus.sources.iter().any(|source| source.recipe.means_controls());
    Tokenizer::read(path, engine)?.with_controls(chats, engine)
}

/// The request of a build of `corpus` with this tokenizer.
pub(crate) fn head(corpus: &Corpus, tokenizer: &Tokenizer, engine: Engine) -> Result<Head> {
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
        engine,
        unit: corpus.unit,
        validation: corpus.validation.to_string(),
        sources: corpus
            .sources
            .iter()
            .map(|source| (source.name.clone(), request::preparation(corpus, source)))
            .collect(),
    })
}

/// The existing store, if it matches the request.
fn done(corpus: &Corpus, store: &Location, head: &Head) -> Result<Manifest> {
    let manifest = open::manifest(store)?;
    request::compare_heads(store, &request::head_of(&manifest, head), head)?;
    let mut sources = corpus.sources.iter().zip(&manifest.sources);
    meanwhile("build", "reading the inputs to compare them with those of the store", || {
        sources.try_for_each(|(source, old)| request::compare_inputs(store, source, &old.inputs))
    })?;
    request::compare_dropped(corpus, &manifest, store)?;
    whole::refuse_incomplete(store, &manifest)?;
    store.local().map_or(Ok(()), open::finish)?;
    Ok(manifest)
}

/// Whether a store of these sources, not built yet, may get a file of this name.
pub fn is_of_a_store<'a>(mut sources: impl Iterator<Item = &'a str>, name: &str) -> bool {
    let lists = [dropped::REMOVED, dedup::MATCHES];
    let is_number = |part: &str| part.parse::<u32>().is_ok();
    match name.split('/').collect::<Vec<_>>()[..] {
        [name] => [open::MANIFEST, open::MANIFEST_SUM, open::TOKENIZER].contains(&name),
        [source, list] => lists.contains(&list) && sources.any(|it| it == source),
        [source, part, _] => is_number(part) && sources.any(|it| it == source),
        _ => false,
    }
}

/// Completes a store from the finished streams that `manifest` names.
pub(crate) fn finish(
    store: &Path,
    tokenizer: &Tokenizer,
    mut manifest: Manifest,
) -> Result<Manifest> {
    debug_assert_eq!(manifest.format, FORMAT);
    disk::write_atomic(&store.join(open::TOKENIZER), tokenizer.bytes())?;
    manifest.request = request::identity(&manifest);
    manifest.digest = manifest.identity();
    open::commit(store, &manifest)?;
    Ok(manifest)
}

/// Moves the finished store into place, with progress: a store of many folders takes long to sync.
pub(crate) fn place(staging: &mut Staging, progress: &mut Progress) -> Result<()> {
    let mut syncing = None;
    staging.commit_telling(|_, all| {
        syncing.get_or_insert_with(|| progress.then(Measure::Count("folder"), all)).add(1);
    })
}
