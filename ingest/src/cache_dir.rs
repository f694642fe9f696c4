//! The folder in which builds keep parts: the one of `--cache-dir`, or one next to the store until that is complete.
//!
//! ```text
//! zdata-cache                 the marker: what this folder is, and its version
//! parts/KEY.bin               what a task of the scan saw, by the hash of all that it depends on
//! parts/KEY/ and KEY.json     what an encoding task made: files of a store, and their record
//! parts/KEY.DIGEST.conflict   a differing result of a second run of a task
//! plan-DIGEST/                a plan for `zdata task`: plan.json, results, lists, logs, scratch files
//! build-DIGEST/               the same for a plan of `zdata build`, removed with the build
//! ```
//!
//! Invariant: a cache is created only in a new or empty folder, and only files with one of these names are removed from
//! it.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use contract::{Digest, Fault, Identity, Result};
use storage::apart;
use store::disk::{self, Lock};
use store::regular;

use crate::progress::{Measure, Progress};

/// The file that marks the folder.
const MARKER: &str = "zdata-cache";

/// The content of the marker, before the version.
const KIND: &str = "zdata cache ";

/// Version of the names in the folder. The content of a part has a version in its key.
const VERSION: u32 = 2;

/// The folder of the parts of all plans.
const PARTS: &str = "parts";

/// The suffix of an incomplete store.
const PARTIAL: &str = ".partial";

/// In the folder of a plan: the plan.
pub(crate) const PLAN: &str = "plan.json";

/// In the folder of a plan: its store is complete.
const MERGED: &str = "merged";

/// A cache folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheDir {
    path: PathBuf,
}

/// Who runs the tasks of a plan and removes it at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Users or schedulers run them, by `zdata task`: the plan stays until its store is merged.
    Tasks,
    /// `zdata build`, which locks the folder meanwhile: once the lock is free, the plan of an ended build is useless.
    Build,
}

/// The name of a plan, and of its folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanName {
    owner: Owner,
    digest: Digest,
}

impl PlanName {
    /// The plan of these bytes.
    pub(crate) fn of(owner: Owner, bytes: &[u8]) -> Self {
        PlanName { owner, digest: Digest::of_bytes(bytes) }
    }

    /// Whether these are the bytes of the plan.
    pub(crate) fn is_of(self, bytes: &[u8]) -> bool {
        self == PlanName::of(self.owner, bytes)
    }
}

impl fmt::Display for PlanName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = match self.owner {
            Owner::Tasks => "plan",
            Owner::Build => "build",
        };
        write!(f, "{owner}-{}", self.digest)
    }
}

impl FromStr for PlanName {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || "wanted the name that `zdata task plan` printed, plan-DIGEST".to_owned();
        let (owner, digest) = text.split_once('-').ok_or_else(wrong)?;
        let owner = match owner {
            "plan" => Owner::Tasks,
            "build" => Owner::Build,
            _ => return Err(wrong()),
        };
        let name = PlanName { owner, digest: digest.parse().map_err(|_| wrong())? };
        // Only the canonical spelling, which is that of its folder.
        if name.to_string() == text { Ok(name) } else { Err(wrong()) }
    }
}

impl CacheDir {
    /// Refuses, before any work, a folder with other content than a build's, or one inside a store.
    pub fn check(path: &Path) -> Result<()> {
        apart::refuse_inside(&path.into())?;
        is_marked(path).map(drop)
    }

    /// Creates a cache in a new or empty folder, or opens an existing one, and locks it against other builds until the
    /// lock is dropped or the process ends.
    pub fn hold(path: &Path) -> Result<(Self, Lock)> {
        CacheDir::check(path)?;
        disk::create_folder(path)?;
        let lock = disk::lock(path)?;
        Ok((CacheDir::make(path)?, lock))
    }

    /// The same if the caller holds the lock.
    pub(crate) fn make(path: &Path) -> Result<Self> {
        if !is_marked(path)? {
            disk::create_folder(path)?;
            let made = disk::write_atomic(&path.join(MARKER), marker().as_bytes());
            made.inspect_err(|_| disk::remove_if_empty(path))?;
        }
        Ok(CacheDir { path: path.to_owned() })
    }

    /// Opens an existing cache.
    pub fn open(path: &Path) -> Result<Self> {
        if is_marked(path)? {
            return Ok(CacheDir { path: path.to_owned() });
        }
        Err(Fault::usage("this folder holds no parts of builds")
            .at(path.display().to_string())
            .wanted("the --cache-dir folder of a build or plan"))
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the parts of all plans.
    pub(crate) fn parts_folder(&self) -> PathBuf {
        self.path.join(PARTS)
    }

    /// The path of the scan's part with this key.
    pub(crate) fn part(&self, key: Identity) -> PathBuf {
        self.parts_folder().join(format!("{key}.bin"))
    }

    /// The folder of the encoded part with this key.
    pub(crate) fn part_folder(&self, key: Identity) -> PathBuf {
        self.parts_folder().join(key.to_string())
    }

    /// The path of that part's record.
    pub(crate) fn part_record(&self, key: Identity) -> PathBuf {
        self.parts_folder().join(format!("{key}.json"))
    }

    /// The existing parts: the files by which they are known.
    pub(crate) fn parts(&self) -> Result<Vec<PathBuf>> {
        let mut found = self.named(&self.parts_folder(), is_key_or_conflict)?;
        let known = |ending: &OsStr| ending == "bin" || ending == "json";
        found.retain(|path| path.extension().is_some_and(known));
        Ok(found)
    }

    /// The folder of a plan.
    pub(crate) fn plan(&self, name: PlanName) -> PathBuf {
        self.path.join(name.to_string())
    }

    /// The existing plans.
    pub(crate) fn plans(&self) -> Result<Vec<PlanName>> {
        let found = self.named(&self.path, |name| name.parse::<PlanName>().is_ok())?;
        let folders = found.iter().filter(|path| path.is_dir() && !path.is_symlink());
        Ok(folders.filter_map(|path| name_of(path).parse().ok()).collect())
    }

    /// Marks a task of this plan as running, until the result is dropped, so that the plan's folder stays. Where locks
    /// do not work, a process that removes plans notices that too, and removes none.
    pub(crate) fn at_work(&self, name: PlanName) -> Option<File> {
        let folder = File::open(self.plan(name)).ok()?;
        folder.try_lock_shared().ok().map(|()| folder)
    }

    /// Records that the store of a plan is complete, so its results are no longer needed.
    pub(crate) fn merged(&self, name: PlanName) -> Result<()> {
        disk::write_atomic(&self.plan(name).join(MERGED), &[]).map(drop)
    }

    /// Whether the store of a plan is complete, or the plan is partly removed already.
    pub(crate) fn is_done(&self, name: PlanName) -> bool {
        let folder = self.plan(name);
        folder.join(MERGED).is_file() || !folder.join(PLAN).exists()
    }

    /// Records that the store of a plan is to be made (again).
    pub(crate) fn not_merged(&self, name: PlanName) -> Result<()> {
        disk::remove(&self.plan(name).join(MERGED))
    }

    /// Removes the plans that are no longer needed, except `kept`: those whose stores are complete, and those of
    /// builds, which have ended if the caller holds the lock. A plan with running tasks stays.
    pub(crate) fn remove_plans(&self, kept: Option<PlanName>) -> Result<()> {
        for name in self.plans()?.into_iter().filter(|name| Some(*name) != kept) {
            let folder = self.plan(name);
            let needed = name.owner == Owner::Tasks && !self.is_done(name);
            let open = File::open(&folder).map_err(|error| Fault::io("open", &folder, &error))?;
            if !needed && disk::hold(&open).unwrap_or(false) {
                self.remove_plan(name)?;
            }
        }
        Ok(())
    }

    /// Removes a plan: its description before its results, so that nothing resumes from half of them.
    pub(crate) fn remove_plan(&self, name: PlanName) -> Result<()> {
        let folder = self.plan(name);
        if !folder.is_dir() {
            return Ok(());
        }
        disk::remove(&folder.join(PLAN))?;
        disk::sync_folder(&folder)?;
        disk::remove(&folder)
    }

    /// Removes what builds have put here, and the folder if nothing else is in it; does nothing if a plan is still
    /// needed.
    pub fn clear(&self, quiet: bool) -> Result<()> {
        self.remove_plans(None)?;
        if !self.plans()?.is_empty() {
            return Ok(());
        }
        let files = self.named(&self.parts_folder(), is_key_or_conflict)?;
        let mut progress =
            Progress::new("clear", Measure::Count("file"), files.len() as u64, quiet);
        for file in &files {
            disk::remove(file)?;
            progress.add(1);
        }
        disk::remove_if_empty(&self.parts_folder());
        let marker = self.path.join(MARKER);
        if disk::entries(&self.path)? == [marker.as_path()] {
            // The content is removed, durably, before its marker.
            disk::sync_folder(&self.path)?;
            disk::remove(&marker)?;
            disk::remove_if_empty(&self.path);
        }
        Ok(())
    }

    /// The entries of a folder of the cache with a matching name.
    fn named(&self, folder: &Path, is_ours: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
        let mut found = if folder.is_dir() { disk::entries(folder)? } else { Vec::new() };
        found.retain(|path| is_ours(name_of(path)));
        Ok(found)
    }
}

/// Refuses a store whose path, final or partial, is the folder `work`, lies inside it, or contains it.
pub(crate) fn apart_from(work: &Path, store: &Path) -> Result<()> {
    let cache = real(work)?;
    for place in [store.to_owned(), disk::beside(store, PARTIAL)] {
        let there = real(&place)?;
        if there.starts_with(&cache) || cache.starts_with(&there) {
            return Err(Fault::usage(
                "a store and the parts that it is made of need a folder each",
            )
            .at(work.display().to_string())
            .found(format!("parts in {}, and the store in {}", work.display(), place.display()))
            .hint("name another folder for parts: --cache-dir FOLDER"));
        }
    }
    Ok(())
}

/// The path with all links resolved, whether it exists or not.
fn real(path: &Path) -> Result<PathBuf> {
    let fault = |error: &std::io::Error| Fault::io("find", path, error);
    let whole = std::path::absolute(path).map_err(|error| fault(&error))?;
    let there = whole.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, mut real)) = there else { return Ok(whole) };
    for part in whole.strip_prefix(above).unwrap_or(&whole).components() {
        match part {
            Component::ParentDir => drop(real.pop()),
            part => real.push(part),
        }
    }
    Ok(real)
}

/// Whether `folder` has the marker of a cache, of any version.
pub(crate) fn is_cache(folder: &Path) -> bool {
    regular::read(&folder.join(MARKER)).is_ok_and(|text| text.starts_with(KIND.as_bytes()))
}

fn marker() -> String {
    format!("{KIND}{VERSION}\n")
}

/// Whether a folder is a cache of this version; refuses a non-empty folder that is not a cache.
fn is_marked(path: &Path) -> Result<bool> {
    let file = path.join(MARKER);
    let text = match regular::read(&file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        text => text.map_err(|error| Fault::io("read", &file, &error))?,
    };
    if text == marker().as_bytes() {
        return Ok(true);
    }
    let refused = |what: &str| Fault::usage(what).at(path.display().to_string());
    let hint = "move it, or name another folder for parts: --cache-dir FOLDER";
    if text.starts_with(KIND.as_bytes()) {
        return Err(refused("another version of zdata keeps parts in this folder")
            .found(String::from_utf8_lossy(&text).trim_end())
            .wanted(marker().trim_end())
            .hint(hint));
    }
    // A partial marker that a kill left does not count as content.
    let begun = disk::beside(&file, disk::PART);
    let found = if path.is_dir() { disk::entries(path)? } else { Vec::new() };
    match found.iter().find(|entry| **entry != begun) {
        None => Ok(false),
        Some(entry) => {
            Err(refused("this folder is in the way: parts of builds need one of their own")
                .found(entry.file_name().unwrap_or_default().to_string_lossy())
                .wanted("a new or empty folder, or one that a build made for its parts")
                .hint(hint))
        }
    }
}

/// The name of an entry; empty if it is not UTF-8.
fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Whether a file in the folder of parts has one of our names.
fn is_key_or_conflict(name: &str) -> bool {
    let is_key = |text: &str| {
        let key = Identity::try_from(text.to_owned());
        key.is_ok_and(|key| key.to_string() == text)
    };
    let is_digest = |text: &str| text.parse().is_ok_and(|it: Digest| it.to_string() == text);
    match name.split('.').collect::<Vec<_>>()[..] {
        [key] | [key, "bin" | "json"] => is_key(key),
        [key, digest, "conflict"] => is_key(key) && is_digest(digest),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use contract::Class;

    use super::*;
    use crate::testing::tree;

    /// A cache with every kind of file that builds create.
    fn filled(path: &Path) -> (CacheDir, Vec<PathBuf>) {
        let (cache, _lock) = CacheDir::hold(path).unwrap();
        let key = Identity([7; 32]);
        let build = PlanName::of(Owner::Build, b"a plan");
        let conflict = cache.part(key).with_extension(format!("{}.conflict", Digest(1)));
        let (folder, record) =
            (cache.part_folder(key).join("tokens.arrow"), cache.part_record(key));
        let files = [cache.part(key), folder, record, conflict, cache.plan(build).join(PLAN)];
        for file in &files {
            disk::create_folder(disk::folder_of(file)).unwrap();
            fs::write(file, "x").unwrap();
        }
        (cache, files.to_vec())
    }

    #[test]
    fn a_cache_goes_as_a_whole_and_what_is_not_its_own_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/work");
        filled(&path).0.clear(true).unwrap();
        assert!(!path.exists());
        let (cache, own) = filled(&path);
        let key = format!("{}", Identity([171; 32]));
        let foreign = [
            "plan.json".to_owned(),
            "plan-b.txt".to_owned(),
            format!("plan-{}", "A".repeat(32)),
            "parts/.git".to_owned(),
            "parts/.env".to_owned(),
            "parts/x.bin".to_owned(),
            format!("parts/{}.bin", key.to_uppercase()),
            format!("parts/{key}.x.conflict"),
            format!("parts/{key}.bin.bin"),
        ];
        let foreign: Vec<PathBuf> = foreign.iter().map(|name| path.join(name)).collect();
        foreign.iter().for_each(|file| fs::write(file, "years of work").unwrap());
        assert_eq!((cache.parts().unwrap().len(), cache.plans().unwrap().len()), (2, 1));
        cache.clear(true).unwrap();
        assert!(own.iter().all(|file| !file.exists()));
        assert!(foreign.iter().all(|file| fs::read(file).unwrap() == b"years of work"));
        CacheDir::open(&path).unwrap();
    }

    #[test]
    fn only_a_new_or_an_empty_folder_becomes_a_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("work");
        let refused = |word: &str| {
            let before = tree(folder.path());
            for fault in [
                CacheDir::check(&path).unwrap_err(),
                CacheDir::hold(&path).map(drop).unwrap_err(),
                CacheDir::make(&path).map(drop).unwrap_err(),
                CacheDir::open(&path).map(drop).unwrap_err(),
            ] {
                assert_eq!(fault.class(), Class::Usage, "{fault}");
                assert!(fault.to_string().contains(word), "{word}: {fault}");
            }
            assert!(tree(folder.path()) == before);
        };
        fs::create_dir(&path).unwrap();
        assert_eq!(CacheDir::open(&path).unwrap_err().class(), Class::Usage);
        // Killed while the marker was written.
        fs::write(path.join("zdata-cache.zdata.tmp"), "zdata").unwrap();
        CacheDir::hold(&path).unwrap();
        CacheDir::open(&path).unwrap().clear(true).unwrap();
        for name in ["plan.json", "parts", "manifest.json", ".env", "zdata-cache"] {
            fs::create_dir(&path).unwrap();
            fs::write(path.join(name), "mine").unwrap();
            refused(name);
            fs::remove_dir_all(&path).unwrap();
        }
        fs::create_dir(&path).unwrap();
        fs::write(path.join(MARKER), "zdata cache 9\n").unwrap();
        refused("another version");
        assert!(is_cache(&path));
        // A file in place of the folder, and a folder inside a store.
        fs::remove_dir_all(&path).unwrap();
        fs::write(&path, "").unwrap();
        refused("work");
        for name in [store::open::MANIFEST, store::open::MANIFEST_SUM] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        fs::remove_file(&path).unwrap();
        let fault = CacheDir::check(&path).unwrap_err();
        assert!(fault.to_string().contains("lies in a store"), "{fault}");
    }

    #[test]
    fn a_plan_stays_as_long_as_somebody_needs_it() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, _lock) = CacheDir::hold(&folder.path().join("work")).unwrap();
        let names = [Owner::Tasks, Owner::Tasks, Owner::Build, Owner::Build].iter().zip(0u8..);
        let names: Vec<_> = names.map(|(owner, n)| PlanName::of(*owner, &[n])).collect();
        for name in &names {
            assert_eq!(name.to_string().parse(), Ok(*name));
            disk::create_folder(&cache.plan(*name)).unwrap();
            fs::write(cache.plan(*name).join(PLAN), "x").unwrap();
        }
        let left = |kept| {
            cache.remove_plans(kept).unwrap();
            names.iter().map(|name| cache.plan(*name).join(PLAN).exists()).collect::<Vec<_>>()
        };
        let busy = cache.at_work(names[2]);
        assert_eq!(left(Some(names[3])), [true, true, true, true]);
        assert_eq!(left(None), [true, true, true, false]);
        drop(busy);
        cache.merged(names[0]).unwrap();
        assert_eq!(left(Some(names[0])), [true, true, false, false]);
        cache.clear(true).unwrap();
        assert_eq!(left(None), [false, true, false, false]);
    }
}
