//! The content of a folder: files that can become a source, and those that are skipped.
//!
//! Folders of Hugging Face `datasets` are recognized by their metadata: of a `save_to_disk` folder only the files named
//! in `state.json` are data, and test splits are not used for training.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use store::{disk, regular};

use serde_json::Value;

use super::{CORPUS, CURRICULUM};
use crate::made;
use crate::source::{Format, kinds};

/// A file that can become part of a source.
pub(super) struct Input {
    /// The parts of its name, relative to the folder.
    pub(super) parts: Vec<String>,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// The content of a folder.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) files: Vec<Input>,
    /// The other files, each with the reason.
    pub(super) passed_over: Vec<String>,
    /// Every file that a pattern may match, including skipped ones.
    pub(super) names: Vec<Vec<String>>,
    /// Skipped folders that a pattern could enter.
    pub(super) closed: Vec<Vec<String>>,
}

/// What the metadata of a folder says.
#[derive(Clone, Default)]
struct Known {
    /// Whether it is a Hugging Face data set, or is inside one.
    is_dataset: bool,
    /// The only files of the folder that are data, if the metadata names them.
    data: Option<BTreeSet<String>>,
}

impl Seen {
    /// Everything below `folder`.
    pub(super) fn below(folder: &Path) -> Result<Self> {
        let mut seen = Seen::default();
        walk(folder, &Known::default(), &mut Vec::new(), &mut seen)?;
        seen.take_each_once()?;
        Ok(seen)
    }

    /// Keeps one name per file: the first, preferring one that is not a link.
    fn take_each_once(&mut self) -> Result<()> {
        let mut files = Vec::new();
        for file in std::mem::take(&mut self.files) {
            let about =
                fs::metadata(&file.path).map_err(|it| Fault::io("look at", &file.path, &it))?;
            files.push((file.path.is_symlink(), (about.dev(), about.ino()), file));
        }
        files.sort_by_key(|(is_link, ..)| *is_link);
        let mut taken = BTreeMap::new();
        for (is_link, which, file) in files {
            let shown = file.parts.join("/");
            let Some(first) = taken.get(&which) else {
                taken.insert(which, shown);
                self.files.push(file);
                continue;
            };
            let why = if is_link { "a link to" } else { "the same file as" };
            self.passed_over.push(format!("{shown} ({why} {first})"));
        }
        self.files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(())
    }
}

/// The number of names listed before the rest is only counted.
const TOLD: usize = 5;

/// The first names of a list, and the number of the others.
pub(super) fn shortened(names: &[String]) -> String {
    let mut told = names.iter().take(TOLD).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > TOLD {
        let _ = write!(told, " and {} more", names.len() - TOLD);
    }
    told
}

/// Files about the data, by their whole name.
const ABOUT: [&str; 22] = [
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "package-lock.json",
    "package.json",
    "preprocessor_config.json",
    "pytorch_model.bin.index.json",
    "requirements.txt",
    "sha256sums.txt",
    "special_tokens_map.json",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "vocab.json",
    "vocab.txt",
];

/// The same by the name before its first dot.
const ABOUT_STEMS: [&str; 9] = [
    "authors",
    "changelog",
    "citation",
    "code_of_conduct",
    "contributing",
    "copying",
    "licence",
    "license",
    "readme",
];

/// Names of splits that are not used for training.
const HELD_OUT: [&str; 9] =
    ["test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev", "holdout"];

fn is_about(name: &str) -> bool {
    let name = name.to_lowercase();
    let stem = name.split('.').next().unwrap_or_default();
    ABOUT.contains(&name.as_str()) || ABOUT_STEMS.contains(&stem)
}

/// The test split that a name in a data set denotes, if any: `test-00000-of-00001.parquet`, a folder `test`.
fn held_out(name: &str) -> Option<&str> {
    let end = name.find(['-', '.', '_']).unwrap_or(name.len());
    HELD_OUT.into_iter().find(|split| name[..end].eq_ignore_ascii_case(split))
}

impl Known {
    /// The metadata of a folder, whose parent has `above`.
    fn of(folder: &Path, above: &Known) -> Known {
        let json = |name: &str| -> Option<Value> {
            serde_json::from_slice(&regular::read(&folder.join(name)).ok()?).ok()
        };
        let state = json("state.json");
        let files = state.as_ref().and_then(|state| state["_data_files"].as_array());
        let name = |file: &Value| file["filename"].as_str().map(str::to_owned);
        let data = files.map(|files| files.iter().filter_map(name).collect());
        let is_described = ["dataset_dict.json", "dataset_info.json", "dataset_infos.json"]
            .iter()
            .any(|name| folder.join(name).is_file());
        let is_dataset = above.is_dataset || is_described || data.is_some() || has_card(folder);
        Known { is_dataset, data }
    }
}

/// Whether the folder's README begins with the metadata of a data set on the hub.
fn has_card(folder: &Path) -> bool {
    let card = regular::read(&folder.join("README.md")).unwrap_or_default();
    let card = String::from_utf8_lossy(&card);
    let head = card.strip_prefix("---\n").and_then(|card| card.split("\n---").next());
    let is_key = |line: &str| ["configs:", "dataset_info:"].contains(&line.trim_end());
    head.is_some_and(|head| head.lines().any(is_key))
}

/// Every file below, by the parts of its name; hidden names and stores are skipped.
fn walk(folder: &Path, above: &Known, parts: &mut Vec<String>, seen: &mut Seen) -> Result<()> {
    let known = Known::of(folder, above);
    for path in disk::entries(folder)? {
        let name = path.file_name().unwrap_or_default();
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Some(name) = name.to_str() else {
            // The written globs would match it, and a build would fail on it.
            if path.is_dir() || Format::guess(Path::new(&*name.to_string_lossy())).is_some() {
                return Err(Fault::usage("this name is not UTF-8")
                    .at(path.display().to_string())
                    .hint("rename it, and run the same command again"));
            }
            continue;
        };
        parts.push(name.to_owned());
        one(&path, &known, parts, seen)?;
        parts.pop();
    }
    Ok(())
}

/// Classifies one directory entry.
fn one(path: &Path, known: &Known, parts: &mut Vec<String>, seen: &mut Seen) -> Result<()> {
    let name = parts.last().map_or("", String::as_str);
    // Incomplete files of a killed run are replaced by the next one, so they do not matter.
    let whole = name.strip_suffix(disk::PART).unwrap_or(name);
    let ours = [CORPUS, CURRICULUM, "tokenizer.json"].contains(&whole);
    let guess = Format::guess(Path::new(name));
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
            // The written globs would match it, and a build would fail on it.
            if guess.is_some() {
                return Err(Fault::machine("this link leads nowhere")
                    .at(path.display().to_string())
                    .hint("correct or remove it, and run the same command again"));
            }
            seen.passed_over.push(format!("{} (leads nowhere)", parts.join("/")));
            return Ok(());
        }
        found => found.map_err(|error| Fault::io("look at", path, &error))?,
    };
    if parts.len() == 1 && ours {
        return Ok(());
    }
    let split = held_out(name).filter(|_| known.is_dataset && (found.is_dir() || guess.is_some()));
    let why = if let Some(split) = split {
        if found.is_dir() {
            seen.closed.push(parts.clone());
        } else {
            seen.names.push(parts.clone());
        }
        format!("the split {split} of a data set")
    } else if found.is_dir() && path.is_symlink() {
        // It may lead back to a parent folder.
        seen.closed.push(parts.clone());
        "a link to a folder".to_owned()
    } else if found.is_dir() {
        match made::kind(path) {
            Some(what) => what.to_owned(),
            None => return walk(path, known, parts, seen),
        }
    } else {
        // An empty stream has no records, so a pattern may match it.
        if found.len() > 0 || !guess.is_some_and(Format::is_stream) {
            seen.names.push(parts.clone());
        }
        match no_input(name, guess, &found, known) {
            Some(why) => why,
            None => {
                let (parts, path) = (parts.clone(), path.to_owned());
                seen.files.push(Input { parts, path, bytes: found.len() });
                return Ok(());
            }
        }
    };
    seen.passed_over.push(format!("{} ({why})", parts.join("/")));
    Ok(())
}

/// Why a file cannot become part of a source; none if it can.
fn no_input(
    name: &str,
    guess: Option<Format>,
    found: &fs::Metadata,
    known: &Known,
) -> Option<String> {
    let compressed = guess.is_some_and(|format| !format.is_stream()) && Format::is_compressed(name);
    let is_data = known.data.as_ref().is_none_or(|data| data.contains(name));
    Some(match (guess, kinds::unread(name)) {
        _ if !found.is_file() => regular::kind(found.file_type()).to_owned(),
        (None, Some(kind)) => format!("packed by {kind}: unpack it"),
        (None, None) => "no known ending".to_owned(),
        _ if compressed => "compressed as a whole: decompress it".to_owned(),
        _ if found.len() == 0 => "empty".to_owned(),
        _ if is_about(name) => "describes data, by its name".to_owned(),
        (Some(Format::Arrow), _) if !is_data => "not named by state.json".to_owned(),
        _ => return None,
    })
}
