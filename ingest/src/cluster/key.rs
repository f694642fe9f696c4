//! What a part is called: the hash of everything that its content depends on, and of nothing else.
//!
//! Names and places of files, other sources, the cut into shards and whatever else an edit may change are not in it. So
//! a part is found again after an edit, by whoever needs the same one.

use std::path::Path;

use contract::{Framed, Identity};
use store::{FORMAT, TokenizerRecord};

use super::stage::Stage;
use crate::assembly::request::Head;
use crate::corpus::{Corpus, SourceFile};
use crate::tokenize::Engine;

/// Version of the bytes of parts. What stages and steps do has versions of its own (`versions`).
const PARTS: u32 = 6;

/// Bytes and identity of a file.
pub(super) type Content = (u64, Identity);

/// The key of the part that `stage` makes of `only`, the corpus cut to the files of one task, whose content is
/// `inputs`; `removed` is the list of what a scan removed of them.
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
    framed.field(&source.fields.text).field(&source.fields.id).field(&only.max_document_bytes);
    let encodes = match stage {
        Stage::Scan => {
            framed.field(&recipe.describe_scan());
            recipe.scan_counts_tokens()
        }
        Stage::Encode => {
            framed.field(&recipe.describe_encoding()).field(&head.validation).field(&removed);
            true
        }
    };
    let TokenizerRecord { sha256, vocab: _, begin, end, encoder } = &head.tokenizer;
    framed.field(&encodes.then_some(*sha256));
    if encodes {
        framed.field(begin).field(end);
        // No encoder's parts are taken for another one's, though all should give the same ids: whoever doubts one asks for
        // another. The reference that somebody asked for encodes every text whole.
        framed.field(encoder).field(&(head.engine == Engine::Reference));
    }
    framed.count(inputs.len());
    for (file, (bytes, sha256)) in source.files.iter().zip(inputs) {
        framed.field(file.format.name()).field(packed(file)).field(bytes).field(sha256);
    }
    framed.finish()
}

/// How a file is compressed, as its ending says.
fn packed(file: &SourceFile) -> &'static str {
    let ending = Path::new(&file.path.name()).extension().map(|ending| ending.to_ascii_lowercase());
    match ending.as_deref().and_then(|ending| ending.to_str()) {
        Some("gz") => "gz",
        Some("zst") => "zst",
        _ => "plain",
    }
}
