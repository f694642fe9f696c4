//! The files that a list of globs names: sorted and unique. A pattern without a match is an error, and so is a file or
//! folder that cannot be read.
//!
//! Names that begin with a dot are skipped, as in shells, unless a part of the pattern begins with one too. Our own
//! outputs are skipped, unless the pattern names their folder in full.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use contract::{Fault, Result, note, terminal};
use globset::{GlobBuilder, GlobMatcher};
use settings::Spanned;
use store::location::Object;
use store::{Location, regular};

use super::braces::{ALTERNATIVES_MAX, alternatives};
use crate::made;

/// A glob, and its place in the corpus file.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    pub(super) glob: String,
    pub(super) place: String,
}

impl Pattern {
    /// A glob of this file.
    pub(super) fn new(file: &settings::File, glob: &Spanned<String>) -> Self {
        Pattern { glob: glob.get_ref().clone(), place: file.place(glob.span()) }
    }
}

/// A file that a pattern named.
#[derive(Clone, Debug)]
pub(super) struct FoundFile {
    /// Its location.
    pub(super) path: Location,
    /// Its location with all links resolved.
    pub(super) real: Location,
    /// Its path from the folder, with `/` between parts.
    pub(super) shown: String,
    /// The place of the pattern.
    pub(super) named_at: String,
}

/// The files that `patterns` name from `folder`, sorted by their path from there. A pattern without a match and a file
/// that is named twice are errors; `twice` is the hint for the latter.
pub(super) fn find(folder: &Location, patterns: &[Pattern], twice: &str) -> Result<Vec<FoundFile>> {
    let mut found: BTreeMap<String, FoundFile> = BTreeMap::new();
    let mut seen: BTreeMap<Location, String> = BTreeMap::new();
    for pattern in patterns {
        let place = &pattern.place;
        for (shown, path) in named(folder, pattern)? {
            let real = match &path {
                Location::Local(path) => Location::Local(
                    fs::canonicalize(path).map_err(|error| Fault::io("find", path, &error))?,
                ),
                Location::Object(_) => path.clone(),
            };
            if let Some(before) = seen.insert(real.clone(), shown.clone()) {
                return Err(Fault::usage(format!("the file {shown:?} is named twice"))
                    .at(place.clone())
                    .found(format!("also as {before:?}"))
                    .hint(twice));
            }
            found.insert(shown.clone(), FoundFile { path, real, shown, named_at: place.clone() });
        }
    }
    Ok(found.into_values().collect())
}

/// The files that a pattern names: for each, the path shown to users and its location.
fn named(folder: &Location, pattern: &Pattern) -> Result<Vec<(String, Location)>> {
    let Pattern { glob, place } = pattern;
    let (names, hint): (Vec<_>, _) =
        match storage::locate(glob).map_err(|it| it.at(place.clone()))? {
            Location::Object(object) => {
                let bucket = pinned(&object.root(), place)?;
                let names = each(object.address().key(), place, |walk| walk.remote(&bucket))?;
                let whole = |name: String| (bucket.join(&name).to_string(), bucket.join(&name));
                (names.into_iter().map(whole).collect(), object.address().scheme().hint())
            }
            Location::Local(path) => match folder {
                Location::Object(object) if !path.has_root() => {
                    let folder = &pinned(object, place)?;
                    let beside = |name: String| Ok((name.clone(), folder.resolve(&name)?));
                    let names = each(glob, place, |walk| walk.remote(folder))?.into_iter();
                    let hint = object.address().scheme().hint();
                    (names.map(beside).collect::<Result<_>>()?, hint)
                }
                _ => {
                    let folder = folder.local().unwrap_or(Path::new(""));
                    let names = each(glob, place, |walk| walk.local(folder))?.into_iter();
                    let beside = |name: String| (name.clone(), Location::Local(folder.join(name)));
                    (names.map(beside).collect(), "globs start at the folder of the corpus file")
                }
            },
        };
    if names.is_empty() {
        return Err(nothing_named(folder, pattern, hint));
    }
    Ok(names)
}

/// A folder of objects at an address that names it for ever: a revision may move while a build reads.
fn pinned(folder: &Object, place: &str) -> Result<Location> {
    let pinned = folder.pinned().map_err(|error| {
        let folder = Location::Object(folder.clone());
        folder.fault("look for", &error).at(format!("{place}: {folder}"))
    })?;
    Ok(Location::Object(pinned))
}

/// The fault for a pattern without a match, with what exists there instead.
fn nothing_named(folder: &Location, Pattern { glob, place }: &Pattern, hint: &str) -> Fault {
    let fault = Fault::data(format!("no file is named by {glob:?}")).at(place.clone());
    let start = match storage::locate(glob) {
        Ok(Location::Object(object)) => Location::Object(object.root()),
        _ => folder.clone(),
    };
    let here = start.local().map(|folder| folder.join(glob));
    if here.as_ref().is_some_and(|here| here.is_dir()) {
        let within = format!("{}/**/*", glob.trim_end_matches('/'));
        return fault.found("a folder").hint(format!("name the files in it, as {within:?} does"));
    }
    if here.as_ref().is_some_and(|here| here.exists()) {
        let plain = bracketed(glob);
        let hint = format!(
            "a bracket, brace, `*` or `?` of a name is put in brackets, a backslash is doubled: {plain:?}"
        );
        return fault.found("a file of this very name").hint(hint);
    }
    // As far as the pattern's path exists.
    let there = here.as_ref().and_then(|here| here.ancestors().skip(1).find(|at| at.is_dir()));
    let start = there.map_or_else(|| start.to_string(), |there| there.display().to_string());
    fault.found(format!("nothing in {}", if start.is_empty() { "." } else { &start })).hint(hint)
}

/// A pattern that matches exactly this name.
pub(crate) fn bracketed(name: &str) -> String {
    let letter = |letter| match letter {
        '[' | '{' | '}' | '*' | '?' => format!("[{letter}]"),
        '\\' => "\\\\".to_owned(),
        _ => letter.to_string(),
    };
    name.chars().map(letter).collect()
}

/// The names that all alternatives of a pattern find.
fn each(
    pattern: &str,
    place: &str,
    names: impl Fn(&Walk) -> Result<Vec<String>>,
) -> Result<BTreeSet<String>> {
    // The whole pattern first, so that an error quotes what was written.
    glob(pattern).map_err(|why| refused(pattern, place, &why))?;
    let alternatives = alternatives(pattern).ok_or_else(|| {
        let why = format!("its braces stand for more than {ALTERNATIVES_MAX} patterns");
        refused(pattern, place, &why)
    })?;
    let (mut found, mut passed_over) = (BTreeSet::new(), BTreeMap::new());
    for alternative in alternatives {
        let walk = Walk::new(&alternative, place)?;
        found.extend(names(&walk)?);
        passed_over.append(&mut walk.made.into_inner());
    }
    for (folder, what) in passed_over {
        let folder = terminal::name(&folder);
        note!("note: {place}: {pattern:?} passes over {folder} ({what})");
    }
    Ok(found)
}

fn glob(pattern: &str) -> std::result::Result<GlobMatcher, String> {
    let glob = GlobBuilder::new(pattern).literal_separator(true).build();
    Ok(glob.map_err(|error| error.kind().to_string())?.compile_matcher())
}

fn refused(pattern: &str, place: &str, why: &str) -> Fault {
    Fault::usage(format!("{pattern:?} is not a valid pattern: {why}")).at(place.to_owned())
}

/// A pattern without braces.
struct Walk {
    /// The parts before the first one with a wildcard.
    fixed: PathBuf,
    /// The number of parts that may follow: without `**`, no deeper folder can match.
    depth: usize,
    /// Matchers for the first of these parts, including the fixed ones: a folder that does not match leads to no file.
    /// They end at the first `**`.
    levels: Vec<GlobMatcher>,
    /// Whether names that begin with a dot are included.
    hidden: bool,
    matcher: GlobMatcher,
    place: String,
    /// Skipped folders, and what they are.
    made: RefCell<BTreeMap<String, &'static str>>,
}

impl Walk {
    fn new(pattern: &str, place: &str) -> Result<Self> {
        let wild = |part: &str| part.contains(['*', '?', '[', '\\']);
        let parts: Vec<&str> = pattern
            .split('/')
            .enumerate()
            .filter(|(i, p)| *i == 0 || !matches!(*p, "" | "."))
            .map(|(_, p)| p)
            .collect();
        let parts: Vec<&str> =
            if parts.first() == Some(&".") { parts[1..].to_vec() } else { parts };
        let fixed = parts.iter().position(|part| wild(part)).unwrap_or(parts.len());
        // The depth is unknown from here on: after a `**`, or after a class with a slash in it, which this split cuts
        // in two.
        let opens = |part: &&str| part.contains("**") || part.rfind('[') > part.rfind(']');
        let open = parts.iter().position(opens);
        let first = |count: usize| glob(&parts[..count].join("/"));
        let levels = fixed + 1..=open.unwrap_or(parts.len());
        Ok(Walk {
            fixed: rooted(&parts[..fixed]),
            depth: open.map_or(parts.len() - fixed, |_| usize::MAX),
            levels: levels.map_while(|count| first(count).ok()).collect(),
            hidden: parts[fixed..].iter().any(|part| part.starts_with('.')),
            matcher: first(parts.len()).map_err(|why| refused(pattern, place, &why))?,
            place: place.to_owned(),
            made: RefCell::default(),
        })
    }

    /// Whether a name that matches is skipped as hidden.
    fn passes_over(&self, name: &str) -> bool {
        let fixed = self.fixed.components().count();
        !self.hidden && name.split('/').filter(|part| !part.is_empty()).skip(fixed).any(is_hidden)
    }

    /// The files below a folder in object storage, by relative name.
    fn remote(&self, folder: &Location) -> Result<Vec<String>> {
        let fixed = shown(&self.fixed);
        let at = |fault: Fault| fault.hint(format!("write another pattern at {}", self.place));
        let base =
            if fixed.is_empty() { folder.clone() } else { folder.resolve(&fixed).map_err(at)? };
        if self.depth == 0 && base.is_file()? {
            return Ok(vec![fixed]);
        }
        let Location::Object(object) = &base else { return Ok(Vec::new()) };
        let scheme = object.address().scheme();
        if self.depth == 0 && !scheme.lists() {
            return Ok(Vec::new());
        }
        // Also for a missing object: otherwise a missing bucket would not be reported.
        let below = object.list().map_err(|error| {
            let hint = if scheme.lists() { scheme.hint() } else { "name each file" };
            base.fault("list", &error).at(format!("{}: {base}", self.place)).hint(hint)
        })?;
        if self.depth == 0 {
            return Ok(Vec::new());
        }
        let made = made::among(&below);
        let here = |(folder, what): &(String, _)| (format!("{base}/{folder}"), *what);
        self.made.borrow_mut().extend(made.iter().map(here));
        let below =
            below.into_iter().filter(|it| !made.iter().any(|(made, _)| it.starts_with(made)));
        let whole = |name| if fixed.is_empty() { name } else { format!("{fixed}/{name}") };
        let mut names: Vec<String> = below.map(whole).collect();
        names.retain(|name| self.matcher.is_match(name) && !self.passes_over(name));
        Ok(names)
    }

    /// The files below a local folder, by relative name.
    fn local(&self, folder: &Path) -> Result<Vec<String>> {
        let mut names = Vec::new();
        self.run(folder, &mut names)?;
        Ok(names)
    }

    fn run(&self, folder: &Path, names: &mut Vec<String>) -> Result<()> {
        let start = folder.join(&self.fixed);
        let start = if start.as_os_str().is_empty() { PathBuf::from(".") } else { start };
        match fs::metadata(&start) {
            Ok(found) if found.is_dir() => {
                self.descend(folder, &self.fixed, 0, &mut Vec::new(), names)
            }
            // A pattern without wildcards names itself, whatever its characters.
            Ok(found) if self.depth == 0 => {
                self.regular(&found, &start)?;
                names.push(shown(&self.fixed));
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound && !start.is_symlink() => Ok(()),
            Err(error) => Err(self.unseen(&start, &error)),
        }
    }

    /// Refuses anything but a regular file: reading it might never end.
    fn regular(&self, found: &fs::Metadata, path: &Path) -> Result<()> {
        if found.is_file() {
            return Ok(());
        }
        Err(Fault::usage("an input must be a regular file")
            .at(path.display().to_string())
            .found(regular::kind(found.file_type()))
            .hint(format!("remove it, or write a pattern that leaves it out at {}", self.place)))
    }

    /// The fault for something that may match but cannot be read: it is never skipped silently.
    fn unseen(&self, path: &Path, error: &Error) -> Fault {
        let what = match error.kind() {
            ErrorKind::NotFound => "this link leads nowhere".to_owned(),
            _ => format!("cannot look at it: {error}"),
        };
        Fault::machine(what)
            .at(path.display().to_string())
            .hint(format!("repair it, or write a pattern that leaves it out at {}", self.place))
    }

    fn descend(
        &self,
        folder: &Path,
        below: &Path,
        level: usize,
        above: &mut Vec<PathBuf>,
        names: &mut Vec<String>,
    ) -> Result<()> {
        if level == self.depth {
            return Ok(());
        }
        let here = folder.join(below);
        let here = if here.as_os_str().is_empty() { PathBuf::from(".") } else { here };
        let fault = |error: &std::io::Error| Fault::io("list", &here, error);
        // A link to a parent folder would never end.
        let real = fs::canonicalize(&here).map_err(|error| fault(&error))?;
        if above.contains(&real) {
            return Ok(());
        }
        above.push(real);
        for entry in fs::read_dir(&here).map_err(|error| fault(&error))? {
            let entry = entry.map_err(|error| fault(&error))?;
            if !self.hidden && is_hidden(&entry.file_name().to_string_lossy()) {
                continue;
            }
            let name = below.join(entry.file_name());
            let matches = self.matcher.is_match(shown(&name));
            // Whether a matching file may be below.
            let leads = level + 1 < self.depth
                && self.levels.get(level).is_none_or(|level| level.is_match(shown(&name)));
            // Follows links.
            match fs::metadata(entry.path()) {
                Ok(found) if found.is_dir() => {
                    if !leads {
                        continue;
                    }
                    match made::kind(&entry.path()) {
                        Some(what) => drop(self.made.borrow_mut().insert(shown(&name), what)),
                        None => self.descend(folder, &name, level + 1, above, names)?,
                    }
                }
                Ok(found) if matches => {
                    self.regular(&found, &entry.path())?;
                    names.push(readable(&name)?);
                }
                Ok(_) => {}
                // It might be a folder with matching files.
                Err(error) if matches || leads => {
                    return Err(self.unseen(&entry.path(), &error));
                }
                Err(_) => {}
            }
        }
        above.pop();
        Ok(())
    }
}

fn is_hidden(name: &str) -> bool {
    name.starts_with('.') && !matches!(name, "." | "..")
}

fn rooted(parts: &[&str]) -> PathBuf {
    let mut path = PathBuf::new();
    for (index, part) in parts.iter().enumerate() {
        // "/data/x" splits into "", "data", "x".
        path.push(if index == 0 && part.is_empty() { "/" } else { part });
    }
    path
}

/// A path without redundant dots and slashes.
fn shown(path: &Path) -> String {
    path.components().collect::<PathBuf>().to_string_lossy().into_owned()
}

fn readable(path: &Path) -> Result<String> {
    match path.to_str() {
        Some(_) => Ok(shown(path)),
        None => Err(Fault::usage("a file's name is not UTF-8")
            .at(path.display().to_string())
            .hint("rename the file, or write a pattern that leaves it out")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::process::Command;

    use contract::Class;

    use super::*;

    fn found(folder: &Path, pattern: &str) -> Result<Vec<String>> {
        let patterns = [Pattern { glob: pattern.into(), place: "corpus.toml:3:1".into() }];
        Ok(find(&folder.into(), &patterns, "once")?.into_iter().map(|found| found.shown).collect())
    }

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in ["raw/a.jsonl", "raw/b.md", "raw/sub/c.jsonl", "raw/.d.jsonl", ".e/f.jsonl"] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        folder
    }

    #[test]
    fn hidden_names_are_passed_over_unless_the_pattern_says_so() {
        let folder = folder();
        let cases = [
            ("raw/*.jsonl", &["raw/a.jsonl"][..]),
            ("**/*.jsonl", &["raw/a.jsonl", "raw/sub/c.jsonl"]),
            ("raw/.*.jsonl", &["raw/.d.jsonl"]),
            (".e/*.jsonl", &[".e/f.jsonl"]),
            ("raw/.d.jsonl", &["raw/.d.jsonl"]),
            ("./raw/*.jsonl", &["raw/a.jsonl"]),
            ("{.e,raw}/*.jsonl", &[".e/f.jsonl", "raw/a.jsonl"]),
            ("raw/{.d,a}.jsonl", &["raw/.d.jsonl", "raw/a.jsonl"]),
            ("raw/{a,sub/c}.jsonl", &["raw/a.jsonl", "raw/sub/c.jsonl"]),
            ("{raw/{a,b},raw}*{.md,/*.jsonl}", &["raw/a.jsonl", "raw/b.md"]),
            ("{raw,raw/sub,none}/[a-c].jsonl", &["raw/a.jsonl", "raw/sub/c.jsonl"]),
        ];
        for (pattern, wanted) in cases {
            assert_eq!(found(folder.path(), pattern).unwrap(), wanted, "{pattern}");
        }
    }

    #[test]
    fn a_pattern_that_names_no_file_is_told_what_stands_there() {
        let folder = folder();
        fs::write(folder.path().join("raw/[q].jsonl"), "x").unwrap();
        let told = |pattern: &str| found(folder.path(), pattern).unwrap_err().to_string();
        let folders = told("raw");
        assert!(
            folders.contains("found:  a folder") && folders.contains("\"raw/**/*\""),
            "{folders}"
        );
        let bracket = told("raw/[q].jsonl2");
        let raw = folder.path().join("raw");
        let wanted = format!("nothing in {}\n", raw.display());
        assert!(bracket.contains(&wanted), "{bracket}");
        let rooted = told(&format!("{}/none/*.txt", raw.display()));
        assert!(rooted.contains(&wanted), "{rooted}");
        assert_eq!(found(folder.path(), "raw/[[]q].jsonl").unwrap(), ["raw/[q].jsonl"]);
        let name = told("raw/[q].jsonl");
        assert!(name.contains("\"raw/[[]q].jsonl\""), "{name}");
        for odd in ["q\\.jsonl", "{q}\\*?.jsonl", "q[.jsonl]"] {
            fs::write(folder.path().join("raw").join(odd), "x").unwrap();
            let odd = format!("raw/{odd}");
            // The hint is a string as it is written in a corpus file.
            let told = told(&odd);
            let hint = told.rsplit_once(": \"").unwrap().1.strip_suffix('"').unwrap();
            let hint = hint.replace("\\\\", "\\");
            assert_eq!(found(folder.path(), &hint).unwrap(), [odd], "{told}");
        }
    }

    #[test]
    fn a_link_that_leads_nowhere_is_never_left_out_in_silence() {
        let folder = folder();
        symlink("nothing", folder.path().join("raw/z.jsonl")).unwrap();
        for pattern in ["raw/*.jsonl", "**/*.jsonl", "raw/z.jsonl", "raw/*/c.jsonl"] {
            let fault = found(folder.path(), pattern).unwrap_err();
            assert_eq!(fault.class(), Class::Machine, "{pattern}: {fault}");
            let told = fault.to_string();
            assert!(told.contains("raw/z.jsonl: ") && told.contains("corpus.toml:3"), "{told}");
        }
        assert_eq!(found(folder.path(), "raw/*.md").unwrap(), ["raw/b.md"]);
        // No alternative and no part of a pattern leads there.
        symlink("nothing", folder.path().join("raw/sub/z.txt")).unwrap();
        symlink("nothing", folder.path().join("z")).unwrap();
        for pattern in ["{raw,other}/*.md", "[qr]aw/*.md", "r*/b.md", "{raw/b,x/y}.md"] {
            assert_eq!(found(folder.path(), pattern).unwrap(), ["raw/b.md"], "{pattern}");
        }
    }

    #[test]
    fn a_pattern_that_cannot_be_is_refused_as_it_was_written() {
        let fault = found(Path::new("."), &"{a,b}".repeat(12)).unwrap_err();
        assert!(fault.to_string().contains("more than 1000 patterns"), "{fault}");
        let fault = found(Path::new("."), "{a,b").unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains("\"{a,b\""), "{fault}");
    }

    #[test]
    fn a_folder_that_cannot_be_read_is_never_left_out_in_silence() {
        let folder = folder();
        let closed = folder.path().join("raw/sub");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        // Root cannot be denied access.
        if fs::read_dir(&closed).is_err() {
            for pattern in ["**/*.jsonl", "raw/*/*.jsonl", "raw/sub/c.jsonl", "raw/sub/*.jsonl"] {
                let fault = found(folder.path(), pattern).unwrap_err();
                assert_eq!(fault.class(), Class::Machine, "{pattern}: {fault}");
                assert!(fault.to_string().contains("raw/sub"), "{fault}");
            }
        }
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    }

    #[test]
    fn only_regular_files_are_inputs() {
        let folder = folder();
        let fifo = folder.path().join("raw/p.jsonl");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        symlink("/dev/zero", folder.path().join("raw/q.jsonl")).unwrap();
        for (pattern, kind) in
            [("raw/p*", "a FIFO"), ("raw/q*", "a device"), ("raw/p.jsonl", "a FIFO")]
        {
            let fault = found(folder.path(), pattern).unwrap_err();
            assert_eq!(fault.class(), Class::Usage);
            assert!(fault.to_string().contains(kind), "{fault}");
        }
    }
}
