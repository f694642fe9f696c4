//! `zdata init`: a commented corpus file and curriculum for the data in a folder.
//!
//! Every guess (which files belong together, which fields are the text) is made from the first records of each file and
//! noted in the corpus file, next to the line that it determines; skipped files are listed there with the reason.

mod layout;
mod model;
mod sampled;
mod seen;
mod sources;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use contract::{Fault, Result, counted};
use serde_json::Value;
use store::{disk, regular};

use self::layout::Layout;
use self::seen::Seen;
use self::sources::Group;

/// The name of the corpus file.
pub const CORPUS: &str = "corpus.toml";
/// The name of the curriculum.
pub const CURRICULUM: &str = "curriculum.toml";

/// The number of skipped files that the corpus file lists.
const LISTED: usize = 100;

/// Tokens that end a document, most common first.
const ENDS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"];

/// What was written, for users.
#[derive(Debug)]
pub struct Begun {
    /// The files.
    pub files: Vec<PathBuf>,
    /// Guesses and remaining work, a line each.
    pub notes: Vec<String>,
}

/// Writes both files into `folder`, never replacing one. If a killed run left one of the two with exactly this text,
/// only the other one is written.
pub fn init(folder: &Path) -> Result<Begun> {
    let files = [CORPUS, CURRICULUM].map(|name| folder.join(name));
    let there = files.each_ref().map(|path| path.symlink_metadata().is_ok());
    let refused = |path: &Path| {
        Fault::usage("this file is there already, and is never overwritten")
            .at(path.display().to_string())
            .hint("edit it, or remove it and run the same command again")
    };
    if there == [true; 2] {
        return Err(refused(&files[0]));
    }
    let texts = texts(folder);
    for (number, path) in files.iter().enumerate().filter(|(number, _)| there[*number]) {
        let is_ours = |texts: &([String; 2], _)| {
            regular::read(path).is_ok_and(|bytes| bytes == texts.0[number].as_bytes())
        };
        if !texts.as_ref().is_ok_and(is_ours) {
            return Err(refused(path));
        }
    }
    let (texts, notes) = texts?;
    for (number, path) in files.iter().enumerate().filter(|(number, _)| !there[*number]) {
        let is_free = || Ok(path.symlink_metadata().is_err());
        if !disk::write_atomic_if(path, texts[number].as_bytes(), is_free)? {
            return Err(refused(path));
        }
    }
    Ok(Begun { files: files.into(), notes })
}

/// The texts of the corpus file and the curriculum, and the notes for users.
fn texts(folder: &Path) -> Result<([String; 2], Vec<String>)> {
    let (groups, passed_over) = sources::groups(folder, Seen::below(folder)?)?;
    if groups.is_empty() {
        let fault = Fault::data("nothing here can become a corpus")
            .at(folder.display().to_string())
            .wanted(
                "files that end in .jsonl, .json, .parquet, .arrow, .txt or .md (.gz or .zst behind it)",
            )
            .hint(
                "convert CSV and TSV to Parquet; write corpus.toml with `format` for other endings",
            );
        return Err(match passed_over.is_empty() {
            true => fault,
            false => fault.found(seen::shortened(&passed_over)),
        });
    }
    let mut notes = Vec::new();
    if !passed_over.is_empty() {
        notes.push(format!("passed over: {}", seen::shortened(&passed_over)));
    }
    for Group { name, files, layout, .. } in &groups {
        notes.push(format!("source {name}: {}, {}", counted(*files, "file"), layout.why));
    }
    let corpus = corpus_text(folder, &groups, &passed_over, &mut notes)?;
    Ok(([corpus, curriculum_text(&groups)], notes))
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn corpus_text(
    folder: &Path,
    groups: &[Group],
    passed_over: &[String],
    notes: &mut Vec<String>,
) -> Result<String> {
    let tokenizer = folder.join("tokenizer.json");
    let end = match tokenizer.symlink_metadata() {
        Ok(_) => end_of(&tokenizer)?,
        Err(_) => {
            notes.push(format!(
                "{} is missing: train one, or download that of a model (see {CORPUS})",
                tokenizer.display()
            ));
            Some(ENDS[0].to_owned())
        }
    };
    let mut text = String::from(
        "# What becomes a store: `zdata build corpus.toml --out store`, checked first by `zdata build corpus.toml --check`.\n\
         # Paths start at this file's folder; ingest/docs/corpus.md lists every key.\n\n\
         # A Hugging Face tokenizer.json: that of a model on huggingface.co (\"Files\", tokenizer.json), or one of your own by\n\
         # zdata tokenizer train corpus.toml --vocab 8192 --out tokenizer.json\n\
         tokenizer = \"tokenizer.json\"\n",
    );
    match end {
        Some(end) => {
            let _ = writeln!(text, "# The token put after each document.\nend = {}", quoted(&end));
        }
        None => {
            text += "# The token put after each document: none of the common ones is in the tokenizer.\nend = \"none\"\n"
        }
    }
    text += "# The share of documents held out, chosen by their text.\nvalidation = \"1/1000\"\n\
             # \"skip\" drops a record that is not a document and lists it; \"stop\" refuses the build at the first one.\n\
             on_error = \"stop\"\n";
    for Group { name, format, globs, layout, files, bytes } in groups {
        let Layout { text: of, id, why } = layout;
        let globs: Vec<String> = globs.iter().map(|glob| quoted(glob)).collect();
        let _ = write!(
            text,
            "\n# {}, about {} of text, read as {}: {why}.\n[[source]]\nname = {}\nfiles = [{}]\n",
            counted(*files, "file"),
            indicatif::HumanBytes(*bytes),
            format.name(),
            quoted(name),
            globs.join(", "),
        );
        let id = id.clone().map(|id| ("id", id));
        for (key, value) in of.keys().into_iter().chain(id) {
            let _ = writeln!(text, "{key} = {}", quoted(&value));
        }
    }
    if !passed_over.is_empty() {
        text += "\n# Passed over:\n";
    }
    for line in passed_over.iter().take(LISTED) {
        let _ = writeln!(text, "#   {}", line.escape_debug());
    }
    if let Some(more) = passed_over.len().checked_sub(LISTED + 1) {
        let _ = writeln!(text, "#   and {} more", more + 1);
    }
    text += "\n# Steps between reading and encoding, in the order written; without them nothing is changed.\n\
             # [[prepare]]\n# step = \"exact-duplicates\"\n";
    Ok(text)
}

/// The tokenizer's end-of-document token, if it has one of the common ones.
fn end_of(tokenizer: &Path) -> Result<Option<String>> {
    let bytes = regular::read(tokenizer).map_err(|error| Fault::io("read", tokenizer, &error))?;
    let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let added = value["added_tokens"].as_array().cloned().unwrap_or_default();
    let has = |end: &&str| added.iter().any(|token| token["content"] == **end);
    Ok(ENDS.iter().copied().find(has).map(str::to_owned))
}

/// A curriculum of about half an epoch; four bytes are estimated as one token.
fn curriculum_text(groups: &[Group]) -> String {
    let (seq_len, batch) = (256, 4);
    let tokens: u64 = groups.iter().map(|group| group.bytes / 4).sum();
    let steps = (tokens / 2 / (seq_len * batch)).clamp(1, 1000);
    let smallest = groups.iter().map(|group| group.bytes).min().unwrap_or(1).max(1);
    let weight = |group: &Group| (group.bytes.saturating_add(smallest / 2) / smallest).max(1);
    let weights: Vec<u64> = groups.iter().map(weight).collect();
    let mix = groups.iter().zip(&weights);
    let mix: Vec<String> =
        mix.map(|(group, weight)| format!("{} = {weight}", quoted(&group.name))).collect();
    let mut text = format!(
        "# What is trained: `zdata plan {CURRICULUM}` shows it once the store is built, and says where text would run out.\n\
         # curricula/KEYS.md lists every key.\n\
         store = \"store\"\nseed = 0\n\n\
         [model]\npreset = \"zaya1-nano\"\n\n\
         [optimizer]\nlr = 4e-3\n\n\
         [[phase]]\nname = \"first\"\nsteps = {steps}\n\
         # Tokens in a sequence, sequences in a step, and in one forward and backward pass.\n\
         seq_len = {seq_len}\nbatch = {batch}\nmicro_batch = 2\n\
         # Weights, here as there is text: only their proportions count.\nmix = {{ {} }}\n\n\
         # How often a source may be read in the whole run; more is refused before it starts.\n\
         # [source.NAME]\n# max_epochs = 2\n",
        mix.join(", ")
    );
    let all = weights.iter().sum::<u64>().max(1);
    for (group, weight) in groups.iter().zip(weights) {
        // A low estimate of tokens: a text shorter than a sequence counts as one sequence.
        let each = (group.bytes / 16 / seq_len).max(1);
        let sequences = (steps * batch * weight).div_ceil(all) + 1;
        let epochs = sequences.div_ceil(each);
        if epochs > 1 && group.bytes < SMALL_BYTES {
            let name = quoted(&group.name);
            let _ = write!(text, "\n# Little text.\n[source.{name}]\nmax_epochs = {epochs}\n");
        }
    }
    text
}

/// Smaller sources are repeated several times even in few steps.
const SMALL_BYTES: u64 = 64 << 10;

#[cfg(test)]
mod tests;
