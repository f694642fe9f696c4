//! What a part is called: the hash of everything that its content depends on, and of nothing else.
//!
//! Names and places of files, other sources, the cut into shards and whatever else an edit may change are not in it. So
//! a part is found again after an edit, by whoever needs the same one.

use std::path::Path;

use contract::Identity;
use store::FORMAT;

use super::plan::Stage;
use crate::corpus::{Corpus, SourceFile};
use crate::journal::Head;

/// Version of the bytes of parts, and of what the stages do.
const PARTS: u32 = 3;

/// Bytes and identity of a file.
pub(super) type Content = (u64, Identity);

/// The address of the part that `stage` makes of `only`, the corpus cut to the files of one task, whose content is
/// `inputs`; `removed` is the list of what a scan removed of them.
pub(super) fn address(
    stage: Stage,
    only: &Corpus,
    head: &Head,
    inputs: &[Content],
    removed: Option<Identity>,
) -> Identity {
    let source = &only.sources[0];
    let recipe = &source.recipe;
    let tokenizer = &head.tokenizer;
    let tokens =
        format!("tokenizer {} {:?} {:?}\n", tokenizer.sha256, tokenizer.begin, tokenizer.end);
    let mut text = format!("zdata part v{PARTS} store v{FORMAT} release {}\n", head.zdata);
    text += &format!("text={:?} id={:?}", source.fields.text.to_string(), source.fields.id);
    text += &format!(" max={}\n", only.max_document_bytes);
    match stage {
        Stage::Scan => {
            text += &format!("scan{}\n", recipe.describe_scan());
            if recipe.scan_counts_tokens() {
                text += &tokens;
            }
        }
        Stage::Encode => {
            text += &format!("encode{}\n", recipe.describe_encoding());
            text += &tokens;
            text += &format!("validation {}\n", head.validation);
            text += &format!("removed {}\n", removed.map_or("none".to_owned(), |r| r.to_string()));
        }
    }
    for (file, (bytes, sha256)) in source.files.iter().zip(inputs) {
        text += &format!("input {} {bytes} {sha256}\n", how(file));
    }
    Identity::of_bytes(text.as_bytes())
}

/// How a file's bytes become records: its format, and the ending that says how it is compressed.
fn how(file: &SourceFile) -> String {
    let ending = Path::new(&file.shown).extension().map(|ending| ending.to_ascii_lowercase());
    let packed = ending.filter(|ending| ending == "gz" || ending == "zst");
    let packed = packed.as_deref().and_then(|ending| ending.to_str()).unwrap_or("plain");
    format!("{} {packed}", file.format.name())
}
