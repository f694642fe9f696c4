//! The name of a part: the hash of everything that its content depends on, and of nothing else.
//!
//! Names and paths of files, other sources and so on are not included. So a part is found again after an edit that does
//! not affect it.

use std::path::Path;

use contract::{Framed, Identity};
use store::{FORMAT, TokenizerRecord};

use super::stage::Stage;
use crate::assembly::request::Head;
use crate::corpus::{Corpus, SourceFile};
use crate::tokenize::Engine;

/// Version of the format of parts. Stages and steps have versions of their own (`versions`).
const PARTS: u32 = 9;

/// Bytes and identity of a file, or of the groups of one.
pub(super) type Content = (u64, Identity);

/// The key of the part that `stage` makes from `only`, the corpus cut to the files of one task, with the content
/// `inputs`; `removed` is the list of what a scan removed from them.
pub(super) fn cache_key(
    stage: Stage,
    only: &Corpus,
    head: &Head,
    inputs: &[Content],
    removed: Option<Identity>,
) -> Identity {
    let source = &only.sources[0];
    let recipe = &source.recipe;
    let mut framed = Framed::new("zdata part", PARTS);
    framed.field(&FORMAT).field(&head.versions).field(stage.name());
    framed.field(&source.fields.text).field(&source.fields.id);
    framed.field(&source.fields.keep).field(&only.max_document_bytes);
    let encodes = match stage {
        Stage::Scan => {
            framed.field(&recipe.describe_scan());
            recipe.scan_counts_tokens()
        }
        Stage::Encode => {
            framed.field(&recipe.describe_encoding()).field(&head.validation).field(&removed);
            // Its files name the source.
            framed.field(&source.name);
            true
        }
    };
    let TokenizerRecord { sha256, vocab: _, begin, end, encoder } = &head.tokenizer;
    framed.field(&encodes.then_some(*sha256));
    if encodes {
        framed.field(begin).field(end);
        // Parts are not shared between encoders, though all should give the same ids: a user who doubts one names
        // another. A reference named by the user encodes every text whole.
        framed.field(encoder).field(&(head.engine == Engine::Reference));
    }
    framed.count(inputs.len());
    for (file, (bytes, sha256)) in source.files.iter().zip(inputs) {
        framed.field(file.format.name()).field(packed(file)).field(bytes).field(sha256);
    }
    framed.finish()
}

/// The compression of a file, by its extension.
fn packed(file: &SourceFile) -> &'static str {
    let ending = Path::new(&file.path.name()).extension().map(|ending| ending.to_ascii_lowercase());
    match ending.as_deref().and_then(|ending| ending.to_str()) {
        Some("gz") => "gz",
        Some("zst") => "zst",
        _ => "plain",
    }
}
