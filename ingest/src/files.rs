//! Which files a list of globs names: sorted, none twice, none in vain.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use contract::{Fault, Result};
use globset::{GlobBuilder, GlobMatcher};
use store::far;

/// A file that a pattern named.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Where it lies.
    pub(crate) path: PathBuf,
    /// Its path from the folder, with `/` between parts.
    pub(crate) shown: String,
}

/// The files that `patterns` (each with its place in the corpus file) name from `folder`, sorted by their path from
/// there. A pattern that names nothing and a file that is named twice are errors.
pub(crate) fn find(folder: &Path, patterns: &[(String, String)]) -> Result<Vec<Found>> {
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    let mut seen: BTreeMap<PathBuf, String> = BTreeMap::new();
    for (pattern, place) in patterns {
        let far = far::is_far(Path::new(pattern));
        let mut names = Vec::new();
        if far {
            names = storage::find(pattern, place)?;
        } else {
            Walk::new(pattern, place)?.run(folder, &mut names)?;
        }
        if names.is_empty() {
            return Err(Fault::data(format!("no file is named by {pattern:?}"))
                .at(place.clone())
                .found(format!("nothing in {}", shown_folder(folder)))
                .hint("globs start at the folder of the corpus file"));
        }
        for shown in names {
            let path = if far { PathBuf::from(&shown) } else { folder.join(&shown) };
            let real = if far { Ok(path.clone()) } else { fs::canonicalize(&path) };
            let real = real.map_err(|error| Fault::io("find", &path, &error))?;
            if let Some(before) = seen.insert(real, shown.clone()) {
                return Err(Fault::usage(format!("the file {shown:?} is named twice"))
                    .at(place.clone())
                    .found(format!("also as {before:?}"))
                    .hint("a document that should count twice needs max_epochs, not two names"));
            }
            found.insert(shown.clone(), Found { path, shown });
        }
    }
    Ok(found.into_values().collect())
}

fn shown_folder(folder: &Path) -> String {
    if folder.as_os_str().is_empty() { ".".to_owned() } else { folder.display().to_string() }
}

struct Walk {
    /// The parts before the first that holds a wildcard.
    fixed: PathBuf,
    /// How many parts may follow: without `**`, no folder below that depth can match.
    depth: usize,
    matcher: GlobMatcher,
}

impl Walk {
    fn new(pattern: &str, place: &str) -> Result<Self> {
        let wild = |part: &str| part.contains(['*', '?', '[', '{', '\\']);
        let parts: Vec<&str> = pattern
            .split('/')
            .enumerate()
            .filter(|(i, p)| *i == 0 || !matches!(*p, "" | "."))
            .map(|(_, p)| p)
            .collect();
        let parts: Vec<&str> =
            if parts.first() == Some(&".") { parts[1..].to_vec() } else { parts };
        let fixed = parts.iter().position(|part| wild(part)).unwrap_or(parts.len());
        // Braces may hold a slash: then the depth is unknown, as it is with `**`.
        let open = parts.iter().any(|part| part.contains("**") || part.contains(['{', '[']));
        let matcher = GlobBuilder::new(&parts.join("/"))
            .literal_separator(true)
            .build()
            .map_err(|error| {
                Fault::usage(format!("{pattern:?} is no pattern: {}", error.kind()))
                    .at(place.to_owned())
            })?
            .compile_matcher();
        let depth = if open { usize::MAX } else { parts.len() - fixed };
        Ok(Walk { fixed: rooted(&parts[..fixed]), depth, matcher })
    }

    fn run(&self, folder: &Path, names: &mut Vec<String>) -> Result<()> {
        let start = folder.join(&self.fixed);
        if start.is_file() {
            // A pattern without wildcards names itself, whatever its characters.
            if self.depth == 0 {
                names.push(shown(&self.fixed));
            }
            return Ok(());
        }
        if start.is_dir() {
            self.descend(folder, &self.fixed, self.depth, &mut Vec::new(), names)
        } else {
            Ok(())
        }
    }

    fn descend(
        &self,
        folder: &Path,
        below: &Path,
        depth: usize,
        above: &mut Vec<PathBuf>,
        names: &mut Vec<String>,
    ) -> Result<()> {
        if depth == 0 {
            return Ok(());
        }
        let here = folder.join(below);
        let here = if here.as_os_str().is_empty() { PathBuf::from(".") } else { here };
        let fault = |error: &std::io::Error| Fault::io("list", &here, error);
        // A link back to a folder above would never end.
        let real = fs::canonicalize(&here).map_err(|error| fault(&error))?;
        if above.contains(&real) {
            return Ok(());
        }
        above.push(real);
        for entry in fs::read_dir(&here).map_err(|error| fault(&error))? {
            let entry = entry.map_err(|error| fault(&error))?;
            let name = below.join(entry.file_name());
            // Follows links; one that leads nowhere names no file.
            let Ok(kind) = fs::metadata(entry.path()) else { continue };
            if kind.is_dir() {
                self.descend(folder, &name, depth - 1, above, names)?;
            } else if self.matcher.is_match(shown(&name)) {
                names.push(readable(&name)?);
            }
        }
        above.pop();
        Ok(())
    }
}

fn rooted(parts: &[&str]) -> PathBuf {
    let mut path = PathBuf::new();
    for (index, part) in parts.iter().enumerate() {
        // "/data/x" splits into "", "data", "x".
        path.push(if index == 0 && part.is_empty() { "/" } else { part });
    }
    path
}

fn shown(path: &Path) -> String {
    let mut text = String::new();
    for part in path.components() {
        if !text.is_empty() && !text.ends_with('/') {
            text.push('/');
        }
        match part {
            Component::RootDir => text.push('/'),
            part => text.push_str(&part.as_os_str().to_string_lossy()),
        }
    }
    text
}

fn readable(path: &Path) -> Result<String> {
    match path.to_str() {
        Some(_) => Ok(shown(path)),
        None => Err(Fault::usage("a file's name is no UTF-8")
            .at(path.display().to_string())
            .hint("rename the file, or write a pattern that leaves it out")),
    }
}
