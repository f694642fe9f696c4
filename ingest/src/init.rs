//! `zdata init`: a commented corpus file and curriculum for a folder, from what lies in it.
//!
//! Every guess (which files belong together, which field is the text) is made from the first records of the first file
//! and is said in the file itself, beside the line that it decides.

mod seen;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use contract::{Fault, Result, counted};
use serde_json::Value;
use store::{disk, regular};

use self::seen::Seen;
use crate::corpus::{bracketed, check_name};
use crate::source::{self, Fields, Format, Limits, Parsed};

/// The names of the files that are written.
pub const CORPUS: &str = "corpus.toml";
/// The name of the curriculum.
pub const CURRICULUM: &str = "curriculum.toml";

/// Records looked at for a guess.
const RECORDS: usize = 100;

/// Fields that hold the text in published corpora, the likeliest first.
const TEXTS: [&str; 8] =
    ["text", "content", "raw_content", "body", "document", "markdown", "article", "passage"];
/// Fields that hold a chat.
const CHATS: [&str; 3] = ["messages", "conversations", "conversation"];
/// Fields that hold an id.
const IDS: [&str; 5] = ["id", "uid", "doc_id", "url", "uuid"];
/// Tokens that end a document, the commonest first.
const ENDS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"];

/// What was written, for people.
#[derive(Debug)]
pub struct Begun {
    /// The files.
    pub files: Vec<PathBuf>,
    /// What was guessed and what is left to do, a line each.
    pub notes: Vec<String>,
}

/// Files that become one source.
struct Group {
    name: String,
    format: Format,
    globs: Vec<String>,
    first: PathBuf,
    files: u64,
    bytes: u64,
}

/// Where the text of a source stands.
struct Guess {
    keys: Vec<(&'static str, String)>,
    why: String,
}

/// Writes both files into `folder`; none that is there is touched. What a killed run left, one of the two with this very
/// text, is gone on with.
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
        if !disk::write_whole_if(path, texts[number].as_bytes(), is_free)? {
            return Err(refused(path));
        }
    }
    Ok(Begun { files: files.into(), notes })
}

/// What the corpus file and the curriculum say, and what people are told of it.
fn texts(folder: &Path) -> Result<([String; 2], Vec<String>)> {
    let seen = Seen::below(folder)?;
    let groups = groups(seen.files, &seen.listed);
    if groups.is_empty() {
        return Err(Fault::data("nothing here can become a corpus")
            .at(folder.display().to_string())
            .wanted(
                "files that end in .jsonl, .parquet, .arrow, .txt or .md (.gz or .zst behind it)",
            )
            .hint(
                "convert CSV and TSV to Parquet; write corpus.toml with `format` for other endings",
            ));
    }
    let mut notes = Vec::new();
    if !seen.passed_over.is_empty() {
        notes.push(format!("passed over: {}", seen::shortened(&seen.passed_over)));
    }
    let mut guesses = Vec::new();
    for group in &groups {
        let guess = guess(group)?;
        notes.push(format!(
            "source {}: {}, {}",
            group.name,
            counted(group.files, "file"),
            guess.why
        ));
        guesses.push(guess);
    }
    let corpus = corpus_text(folder, &groups, &guesses, &mut notes)?;
    Ok(([corpus, curriculum_text(&groups)], notes))
}

/// Files and their sizes, by what their names end in.
type FilesByEnding = BTreeMap<String, Vec<(PathBuf, u64)>>;

/// Files by the folder at the top and by format: a source each. In those that are `listed` each is named by itself: a pattern
/// would name more.
fn groups(files: Vec<seen::Input>, listed: &BTreeSet<String>) -> Vec<Group> {
    let mut found: BTreeMap<(String, Format), FilesByEnding> = BTreeMap::new();
    for seen::Input { parts, path, bytes } in files {
        let name = parts.last().map_or("", String::as_str);
        let Some(format) = Format::guess(Path::new(name)) else { continue };
        let top = seen::top(&parts);
        let glob = match top.as_str() {
            top if listed.contains(top) => {
                parts.iter().map(|part| bracketed(part)).collect::<Vec<_>>().join("/")
            }
            "" => format!("*{}", ending(name)),
            _ if parts.len() == 2 => format!("{}/*{}", bracketed(&top), ending(name)),
            _ => format!("{}/**/*{}", bracketed(&top), ending(name)),
        };
        let globs = found.entry((top, format)).or_default();
        globs.entry(glob).or_default().push((path, bytes));
    }
    let mut groups: Vec<Group> = Vec::new();
    for ((top, format), mut globs) in found {
        // `web/**/*.jsonl` names the files of `web/*.jsonl` as well.
        let deep: Vec<String> =
            globs.keys().filter(|glob| glob.contains("/**/")).cloned().collect();
        for deep in deep {
            let flat = globs.remove(&deep.replace("/**/", "/")).unwrap_or_default();
            globs.entry(deep).or_default().extend(flat);
        }
        let mut files: Vec<&(PathBuf, u64)> = globs.values().flatten().collect();
        files.sort();
        let name = free_name(&named(&top), format, &groups);
        groups.push(Group {
            name,
            format,
            first: files.first().map(|(path, _)| path.clone()).unwrap_or_default(),
            files: files.len() as u64,
            bytes: files.iter().map(|(_, bytes)| bytes).sum(),
            globs: globs.into_keys().collect(),
        });
    }
    groups
}

/// A name that no group has yet, in any case: `plain` itself, with its format, or with a number.
fn free_name(plain: &str, format: Format, groups: &[Group]) -> String {
    let formatted = format!("{plain}-{}", format.name());
    let numbered = (2..=groups.len() + 2).map(|number| format!("{plain}-{number}"));
    let names = [plain.to_owned(), formatted].into_iter().chain(numbered);
    let mut free =
        names.filter(|name| !groups.iter().any(|group| group.name.eq_ignore_ascii_case(name)));
    // More names than groups: one of them is free.
    free.next().unwrap_or_default()
}

/// The ending of a name, with that of a compression.
fn ending(name: &str) -> String {
    let packed = [".gz", ".zst"].into_iter().find(|packed| name.to_lowercase().ends_with(packed));
    let plain = packed.map_or(name, |packed| &name[..name.len() - packed.len()]);
    let dot = plain.rfind('.').unwrap_or(plain.len());
    name[dot..].to_owned()
}

/// The name of a source whose files lie in `top`.
fn named(top: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = top.chars().map(fits).collect();
    // Commands would take a name that begins so for an option.
    let name = name.trim_start_matches('-');
    if check_name(name, "").is_ok() { name.to_owned() } else { "text".to_owned() }
}

/// Where the text of a group's documents stands, by its first records.
fn guess(group: &Group) -> Result<Guess> {
    if group.format == Format::Text {
        let why = "each file is one document".to_owned();
        return Ok(Guess { keys: Vec::new(), why });
    }
    let records = records(&group.first, group.format)?;
    let mut strings = strings(&records);
    // A row as JSON shows a time as a string, which no column of text is.
    strings.retain(|path, _| holds_text(group, path));
    let id = IDS.iter().find(|id| records.iter().any(|record| has_id(record, id)));
    let id = id.map(|id| ("id", (*id).to_owned()));
    let chat = CHATS.iter().find(|chat| records.iter().any(|record| is_chat(record, chat)));
    let known = TEXTS.iter().find(|text| strings.contains_key(**text));
    let longest = || strings.iter().max_by_key(|(_, bytes)| **bytes).map(|(path, _)| path.clone());
    let (key, path, why) = match (known, chat) {
        (Some(text), _) => {
            ("text", (*text).to_owned(), format!("the text is `{text}`, by its name"))
        }
        (None, Some(chat)) => ("chat", (*chat).to_owned(), format!("`{chat}` holds chats")),
        (None, None) => match longest() {
            Some(path) => {
                let why = format!("the text is `{path}`, which holds the most: check this");
                ("text", path, why)
            }
            None => {
                return Err(Fault::data("no field of the first records holds text")
                    .at(group.first.display().to_string())
                    .wanted("JSON objects, or columns, with a string under a name without dots")
                    .hint("move this file away, or write corpus.toml without it"));
            }
        },
    };
    Ok(Guess { keys: [Some((key, path)), id].into_iter().flatten().collect(), why })
}

/// Whether a build would take the text from this field: a columnar file says of what type its columns are.
fn holds_text(group: &Group, path: &str) -> bool {
    let fields = Fields::at(path, None);
    group.format.is_stream()
        || source::open(&group.first, group.format, &fields, &Limits::default()).is_ok()
}

/// The first records of a file, as JSON.
fn records(path: &Path, format: Format) -> Result<Vec<Value>> {
    let every = Fields::record([], None);
    let mut input = source::open(path, format, &every, &Limits::default())?;
    let mut records = Vec::new();
    while records.len() < RECORDS {
        let Some(slab) = input.next_slab()? else { break };
        for parsed in slab.parse(&every)? {
            if let Parsed::Document(document) = parsed
                && let Ok(record @ Value::Object(_)) = serde_json::from_str(&document.text)
            {
                records.push(record);
            }
        }
    }
    records.truncate(RECORDS);
    Ok(records)
}

/// The bytes that each field of strings holds, those of objects inside too.
fn strings(records: &[Value]) -> BTreeMap<String, usize> {
    let mut bytes = BTreeMap::new();
    // A path cannot say a name that holds a dot itself, or none.
    let fits = |(name, _): &(&String, &Value)| !name.is_empty() && !name.contains('.');
    for (key, value) in records.iter().filter_map(Value::as_object).flatten().filter(fits) {
        match value {
            Value::String(text) => *bytes.entry(key.clone()).or_default() += text.len(),
            Value::Object(inner) => {
                for (part, value) in inner.iter().filter(fits) {
                    if let Value::String(text) = value {
                        *bytes.entry(format!("{key}.{part}")).or_default() += text.len();
                    }
                }
            }
            _ => {}
        }
    }
    bytes
}

fn has_id(record: &Value, id: &str) -> bool {
    record.get(id).is_some_and(|id| id.is_string() || id.is_i64() || id.is_u64())
}

fn is_chat(record: &Value, chat: &str) -> bool {
    let turn = record.get(chat).and_then(Value::as_array).and_then(|turns| turns.first());
    let is_text = |value: Option<&Value>| value.is_some_and(Value::is_string);
    turn.is_some_and(|turn| turn.get("role").is_some() && is_text(turn.get("content")))
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn corpus_text(
    folder: &Path,
    groups: &[Group],
    guesses: &[Guess],
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
         # Paths start at this file's folder; ingest/README.md lists every key.\n\n\
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
    for (group, guess) in groups.iter().zip(guesses) {
        let Group { name, format, globs, files, bytes, .. } = group;
        let globs: Vec<String> = globs.iter().map(|glob| quoted(glob)).collect();
        let _ = write!(
            text,
            "\n# {}, {}, read as {}: {}.\n[[source]]\nname = {}\nfiles = [{}]\n",
            counted(*files, "file"),
            indicatif::HumanBytes(*bytes),
            format.name(),
            guess.why,
            quoted(name),
            globs.join(", "),
        );
        for (key, value) in &guess.keys {
            let _ = writeln!(text, "{key} = {}", quoted(value));
        }
    }
    text += "\n# Steps between reading and encoding, in the order written; without them nothing is changed.\n\
             # [[prepare]]\n# step = \"exact-duplicates\"\n";
    Ok(text)
}

/// The token of a tokenizer that ends a document, if it has one of the common ones.
fn end_of(tokenizer: &Path) -> Result<Option<String>> {
    let bytes = regular::read(tokenizer).map_err(|error| Fault::io("read", tokenizer, &error))?;
    let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let added = value["added_tokens"].as_array().cloned().unwrap_or_default();
    let has = |end: &&str| added.iter().any(|token| token["content"] == **end);
    Ok(ENDS.iter().copied().find(has).map(str::to_owned))
}

/// A curriculum that goes through about half of the text once: bytes stand for tokens, four to one.
fn curriculum_text(groups: &[Group]) -> String {
    let (seq_len, batch) = (256, 4);
    let tokens: u64 = groups.iter().map(|group| group.bytes / 4).sum();
    let steps = (tokens / 2 / (seq_len * batch)).clamp(1, 1000);
    let smallest = groups.iter().map(|group| group.bytes).min().unwrap_or(1).max(1);
    let weights: Vec<u64> = groups.iter().map(|group| group.bytes / smallest).collect();
    let mix = groups.iter().zip(&weights);
    let mix: Vec<String> =
        mix.map(|(group, weight)| format!("{} = {weight}", quoted(&group.name))).collect();
    let mut text = format!(
        "# What is trained: `zdata plan {CURRICULUM}` shows it once the store is built, and says where text would run out.\n\
         # curricula/README.md lists every key.\n\
         store = \"store\"\nseed = 0\n\n\
         [model]\npreset = \"zaya1-nano\"\n\n\
         [optimizer]\nlr = 4e-3\n\n\
         [[phase]]\nname = \"first\"\nsteps = {steps}\n\
         # Tokens in a sequence, sequences in a step, and in one forward and backward pass.\n\
         seq_len = {seq_len}\nbatch = {batch}\nmicro_batch = 2\n\
         # Weights, here as the files' sizes: only their proportions count.\nmix = {{ {} }}\n\n\
         # How often a source may be gone through in the whole run; more is refused before it starts.\n\
         # [source.NAME]\n# max_epochs = 2\n",
        mix.join(", ")
    );
    let all = weights.iter().sum::<u64>().max(1);
    for (group, weight) in groups.iter().zip(weights) {
        // By few tokens for the bytes: a text that is shorter than a sequence is gone through for each one.
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

/// Sources of fewer bytes are gone through several times by few steps.
const SMALL_BYTES: u64 = 64 << 10;

#[cfg(test)]
mod tests;
