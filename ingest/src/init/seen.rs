//! What lies in a folder: files that can become a source, and those that are passed over.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use store::{disk, regular};

use super::{CORPUS, CURRICULUM};
use crate::made;
use crate::source::Format;

/// A file that can become part of a source.
pub(super) struct Input {
    /// The parts of its name, from the folder on.
    pub(super) parts: Vec<String>,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// What lies in a folder.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) files: Vec<Input>,
    /// The other files, each with the reason.
    pub(super) passed_over: Vec<String>,
    /// The folders at the top in which a pattern would name what is passed over because it lies elsewhere too; of the files at
    /// the top itself this is the empty name.
    pub(super) listed: BTreeSet<String>,
}

impl Seen {
    /// All that lies below `folder`.
    pub(super) fn below(folder: &Path) -> Result<Self> {
        let mut seen = Seen::default();
        walk(folder, &mut Vec::new(), &mut seen)?;
        seen.take_each_once()?;
        Ok(seen)
    }

    /// Leaves of the names of one file the first, and rather one that is no link.
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
            self.listed.insert(top(&file.parts));
        }
        self.files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(())
    }
}

/// The folder at the top in which a file lies; empty for one that lies in none.
pub(super) fn top(parts: &[String]) -> String {
    if parts.len() > 1 { parts[0].clone() } else { String::new() }
}

/// Names that are told before the rest is counted.
const TOLD: usize = 5;

/// The first names of a list, and how many more there are.
pub(super) fn shortened(names: &[String]) -> String {
    let mut told = names.iter().take(TOLD).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > TOLD {
        let _ = write!(told, " and {} more", names.len() - TOLD);
    }
    told
}

/// Every file below, by its parts; hidden names and stores are passed over.
fn walk(folder: &Path, parts: &mut Vec<String>, seen: &mut Seen) -> Result<()> {
    for path in disk::entries(folder)? {
        let name = path.file_name().unwrap_or_default();
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Some(name) = name.to_str() else {
            // The globs that are written would name it, and a build would stop there.
            if path.is_dir() || Format::guess(Path::new(&*name.to_string_lossy())).is_some() {
                return Err(Fault::usage("this name is not UTF-8")
                    .at(path.display().to_string())
                    .hint("rename it, and run the same command again"));
            }
            continue;
        };
        parts.push(name.to_owned());
        one(&path, parts, seen)?;
        parts.pop();
    }
    Ok(())
}

/// What one name stands for.
fn one(path: &Path, parts: &mut Vec<String>, seen: &mut Seen) -> Result<()> {
    let (shown, name) = (parts.join("/"), parts.last().map_or("", String::as_str));
    let ours = [CORPUS, CURRICULUM, "tokenizer.json"].contains(&name);
    let guess = Format::guess(Path::new(name));
    let is_input = guess.is_some();
    let mut passed_over = |why: &str| seen.passed_over.push(format!("{shown} ({why})"));
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
            // The globs that are written would name it, and a build would stop there.
            if is_input {
                return Err(Fault::machine("this link leads nowhere")
                    .at(path.display().to_string())
                    .hint("mend or remove it, and run the same command again"));
            }
            passed_over("leads nowhere");
        }
        Err(error) => return Err(Fault::io("look at", path, &error)),
        Ok(_) if parts.len() == 1 && ours => {}
        // A link to a folder may lead back to one above.
        Ok(found) if found.is_dir() && path.is_symlink() => {
            passed_over("a link to a folder");
            if parts.len() > 1 {
                seen.listed.insert(top(parts));
            }
        }
        Ok(found) if found.is_dir() => match made::kind(path) {
            Some(what) => passed_over(what),
            None => walk(path, parts, seen)?,
        },
        Ok(found) if !found.is_file() => passed_over(regular::kind(found.file_type())),
        Ok(_) if !is_input => passed_over("no known ending"),
        Ok(_) if guess.is_some_and(|format| !format.is_stream()) && Format::is_compressed(name) => {
            passed_over("compressed as a whole: decompress it");
        }
        Ok(found) if found.len() == 0 => passed_over("empty"),
        Ok(found) => {
            let (parts, bytes) = (parts.clone(), found.len());
            seen.files.push(Input { parts, path: path.to_owned(), bytes });
        }
    }
    Ok(())
}
