//! `zdata init`: a commented corpus file and curriculum for a folder, from what lies in it.
//!
//! Every guess (which files belong together, which field is the text) is made from the first records of the first file
//! and is said in the file itself, beside the line that it decides.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use contract::{Fault, Result, counted};
use serde_json::Value;
use store::regular;

use crate::corpus::check_name;
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

/// Writes both files into `folder`; none that is there is touched.
pub fn init(folder: &Path) -> Result<Begun> {
    for name in [CORPUS, CURRICULUM] {
        let path = folder.join(name);
        if path.symlink_metadata().is_ok() {
            return Err(Fault::usage("this file is there already, and is never overwritten")
                .at(path.display().to_string())
                .hint("edit it, or remove it and run the same command again"));
        }
    }
    let groups = groups(folder)?;
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
    let curriculum = curriculum_text(&groups);
    let mut files = Vec::new();
    for (name, text) in [(CORPUS, corpus), (CURRICULUM, curriculum)] {
        let path = folder.join(name);
        write_new(&path, &text).map_err(|error| Fault::io("write", &path, &error))?;
        files.push(path);
    }
    Ok(Begun { files, notes })
}

fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::File::options().write(true).create_new(true).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

/// Files and their sizes, by what their names end in.
type FilesByEnding = BTreeMap<String, Vec<(PathBuf, u64)>>;

/// Files by the folder at the top and by format: a source each.
fn groups(folder: &Path) -> Result<Vec<Group>> {
    let mut found: BTreeMap<(String, Format), FilesByEnding> = BTreeMap::new();
    walk(folder, &mut Vec::new(), &mut |parts, path, bytes| {
        let name = parts.last().map_or("", String::as_str);
        let ours = parts.len() == 1 && [CORPUS, CURRICULUM, "tokenizer.json"].contains(&name);
        let Some(format) = Format::guess(Path::new(name)).filter(|_| !ours) else { return };
        let top = if parts.len() > 1 { parts[0].clone() } else { String::new() };
        let glob = match top.as_str() {
            "" => format!("*{}", ending(name)),
            _ if parts.len() == 2 => format!("{}/*{}", escaped(&top), ending(name)),
            _ => format!("{}/**/*{}", escaped(&top), ending(name)),
        };
        let globs = found.entry((top, format)).or_default();
        globs.entry(glob).or_default().push((path, bytes));
    })?;
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
        let taken = groups.iter().any(|group| group.name == named(&top));
        let name = if taken { format!("{}-{}", named(&top), format.name()) } else { named(&top) };
        groups.push(Group {
            name,
            format,
            first: files.first().map(|(path, _)| path.clone()).unwrap_or_default(),
            files: files.len() as u64,
            bytes: files.iter().map(|(_, bytes)| bytes).sum(),
            globs: globs.into_keys().collect(),
        });
    }
    Ok(groups)
}

/// Every regular file below, by its parts; hidden names and stores are passed over.
fn walk(
    folder: &Path,
    parts: &mut Vec<String>,
    see: &mut dyn FnMut(&[String], PathBuf, u64),
) -> Result<()> {
    let fault = |error: io::Error| Fault::io("list", folder, &error);
    for entry in fs::read_dir(folder).map_err(fault)? {
        let path = entry.map_err(fault)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if name.starts_with('.') {
            continue;
        }
        let about = fs::metadata(&path).map_err(|error| Fault::io("look at", &path, &error))?;
        parts.push(name.to_owned());
        // A link to a folder may lead back to one above.
        if about.is_dir() && !path.is_symlink() && !path.join(store::open::MANIFEST).exists() {
            walk(&path, parts, see)?;
        } else if about.is_file() && about.len() > 0 {
            see(parts, path, about.len());
        }
        parts.pop();
    }
    Ok(())
}

/// The ending of a name, with that of a compression.
fn ending(name: &str) -> String {
    let packed = [".gz", ".zst"].into_iter().find(|packed| name.to_lowercase().ends_with(packed));
    let plain = packed.map_or(name, |packed| &name[..name.len() - packed.len()]);
    let dot = plain.rfind('.').unwrap_or(plain.len());
    name[dot..].to_owned()
}

/// A part of a path as a pattern that names itself.
fn escaped(part: &str) -> String {
    let mut text = String::new();
    for c in part.chars() {
        if "*?[]{}\\".contains(c) {
            text.push('\\');
        }
        text.push(c);
    }
    text
}

/// The name of a source whose files lie in `top`.
fn named(top: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = top.chars().map(fits).collect();
    if check_name(&name, "").is_ok() { name } else { "text".to_owned() }
}

/// Where the text of a group's documents stands, by its first records.
fn guess(group: &Group) -> Result<Guess> {
    if group.format == Format::Text {
        let why = "each file is one document".to_owned();
        return Ok(Guess { keys: Vec::new(), why });
    }
    let records = records(&group.first, group.format)?;
    let strings = strings(&records);
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
                    .wanted("JSON objects, or columns, with a string"));
            }
        },
    };
    Ok(Guess { keys: [Some((key, path)), id].into_iter().flatten().collect(), why })
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
    for (key, value) in records.iter().filter_map(Value::as_object).flatten() {
        match value {
            Value::String(text) => *bytes.entry(key.clone()).or_default() += text.len(),
            Value::Object(inner) => {
                for (part, value) in inner {
                    if let Value::String(text) = value {
                        *bytes.entry(format!("{key}.{part}")).or_default() += text.len();
                    }
                }
            }
            _ => {}
        }
    }
    // A path cannot say a name that holds a dot itself, or none.
    bytes.retain(|path: &String, _| path.split('.').all(|part| !part.is_empty()));
    bytes
}

fn has_id(record: &Value, id: &str) -> bool {
    record.get(id).is_some_and(|id| id.is_string() || id.is_i64() || id.is_u64())
}

fn is_chat(record: &Value, chat: &str) -> bool {
    let turn = record.get(chat).and_then(Value::as_array).and_then(|turns| turns.first());
    turn.is_some_and(|turn| turn.get("role").is_some() && turn.get("content").is_some())
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
                "there is no {}: train one, or download that of a model (see {CORPUS})",
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
    let (seq_len, batch) = (256, 16);
    let tokens: u64 = groups.iter().map(|group| group.bytes / 4).sum();
    let steps = (tokens / 2 / (seq_len * batch)).clamp(1, 1000);
    let smallest = groups.iter().map(|group| group.bytes).min().unwrap_or(1).max(1);
    let weight = |group: &Group| format!("{} = {}", quoted(&group.name), group.bytes / smallest);
    let mix: Vec<String> = groups.iter().map(weight).collect();
    format!(
        "# What is trained: `zdata plan {CURRICULUM}` shows it once the store is built, and says where text would run out.\n\
         # curricula/README.md lists every key.\n\
         store = \"store\"\nseed = 0\n\n\
         [model]\npreset = \"zaya1-nano\"\n\n\
         [optimizer]\nkind = \"adamw\"\nlr = 1e-3\n\n\
         [[phase]]\nname = \"first\"\nsteps = {steps}\nseq_len = {seq_len}\nbatch = {batch}\n\
         # Weights, here as the files' sizes: only their proportions count.\nmix = {{ {} }}\n\n\
         # How often a source may be gone through in the whole run; more is refused before it starts.\n\
         # [source.NAME]\n# max_epochs = 2\n",
        mix.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch, StringArray};
    use contract::Class;
    use parquet::arrow::ArrowWriter;

    use super::*;
    use crate::build::{Outcome, build};
    use crate::corpus::Corpus;
    use crate::testing::{Workbench, json_lines, options};

    fn parquet(names: [&str; 2], rows: &[[&str; 2]]) -> Vec<u8> {
        let column = |at: usize| rows.iter().map(|row| row[at]).collect::<Vec<_>>();
        let arrays = [0, 1].map(|at| Arc::new(StringArray::from(column(at))) as ArrayRef);
        let batch = RecordBatch::try_from_iter(names.into_iter().zip(arrays)).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.into_inner().unwrap()
    }

    /// A folder of everything that a newcomer may have.
    fn folder() -> Workbench {
        let bench = Workbench::new(0);
        for name in ["web-0.jsonl", "web-1.jsonl", "math.jsonl"] {
            fs::remove_file(bench.path(name)).unwrap();
        }
        let rows = [["a", "long enough to be the text"], ["b", "and one more of these"]];
        bench.write("wiki/en/0.parquet", parquet(["title", "page"], &rows));
        bench.write("web/a.jsonl", json_lines(0, 9));
        bench.write("web/more/b.jsonl", json_lines(20, 9));
        let turn = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n";
        bench.write("chat [1]/c.jsonl", turn.repeat(3));
        bench.write("notes.md", "one note");
        bench.write("table.csv", "a,b\n");
        bench.write(".hidden/x.jsonl", "nonsense");
        bench
    }

    #[test]
    fn what_is_found_builds_as_it_is_written() {
        let bench = folder();
        let begun = init(&bench.path("")).unwrap();
        assert_eq!(begun.files.len(), 2);
        let corpus = Corpus::read(bench.path(CORPUS)).unwrap();
        let named = |source: &crate::corpus::Source| (source.name.clone(), source.files.len());
        let sources: Vec<_> = corpus.sources.iter().map(named).collect();
        let wanted = [("text", 1), ("chat--1-", 1), ("web", 2), ("wiki", 1)];
        assert_eq!(sources, wanted.map(|(name, files)| (name.to_owned(), files)));
        assert_eq!(corpus.sources[3].fields, Fields::at("page", None));
        assert_eq!(corpus.sources[2].fields, Fields::at("text", Some("id")));
        assert!(begun.notes.iter().any(|note| note.contains("`page`")), "{:?}", begun.notes);
        let outcome = build(&corpus, &bench.path("store"), options(1)).unwrap();
        let Outcome::Built { manifest, .. } = outcome else { panic!("nothing was there") };
        let read: u64 = manifest.sources.iter().flat_map(|s| &s.inputs).map(|i| i.documents).sum();
        assert_eq!(read, 1 + 3 + 18 + 2);
        // The store itself is no text.
        let before = fs::read(bench.path(CORPUS)).unwrap();
        fs::remove_file(bench.path(CORPUS)).unwrap();
        fs::remove_file(bench.path(CURRICULUM)).unwrap();
        init(&bench.path("")).unwrap();
        assert_eq!(fs::read(bench.path(CORPUS)).unwrap(), before);
    }

    #[test]
    fn nothing_is_overwritten_and_an_empty_folder_says_what_it_lacks() {
        for name in [CORPUS, CURRICULUM] {
            let bench = folder();
            bench.write(name, "mine");
            let fault = init(&bench.path("")).unwrap_err();
            assert!(fault.class() == Class::Usage && fault.to_string().contains(name), "{fault}");
            assert_eq!(fs::read(bench.path(name)).unwrap(), b"mine");
        }
        let empty = tempfile::tempdir().unwrap();
        let fault = init(empty.path()).unwrap_err();
        assert!(fault.class() == Class::Data && fault.to_string().contains(".jsonl"), "{fault}");
        assert!(fs::read_dir(empty.path()).unwrap().next().is_none());
    }
}
