//! From a curriculum file to its plan and its stores: what every command begins with.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::settings::File;
use contract::{Fault, Result};
use curriculum::AddedStore;
use mixer::{Curriculum, Plan, SourceFacts, described_store};
use store::far;
use store::open::MANIFEST;
use store::read::ReadCache;
use store::{DocumentRecord, Split};

use crate::Stores;

/// A curriculum with its plan and, unless it only describes them, its stores.
pub struct Opened {
    /// The file.
    pub path: PathBuf,
    /// Its text, as read.
    pub source: String,
    /// What it says.
    pub curriculum: Curriculum,
    /// What it reads.
    pub plan: Arc<Plan>,
    stores: Option<Arc<Stores>>,
}

impl Opened {
    /// Reads the curriculum at `path`, opens what it names as `store` (relative to its folder), and plans.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() {
            let what = if path.join(MANIFEST).exists() { "a store" } else { "a folder" };
            return Err(Fault::usage(format!("this is {what}, and a curriculum is a file"))
                .at(path.display().to_string())
                .hint("name a TOML file of phases whose `store` is the store's folder"));
        }
        Opened::open_text(path, text(path)?)
    }

    /// The same of a text that would stand at `path`.
    pub fn open_text(path: &Path, text: String) -> Result<Self> {
        let curriculum = Curriculum::parse(&text, &path.display().to_string())?;
        let folder = path.parent().unwrap_or(Path::new(""));
        // Those of the beginning first: theirs are the numbers that a run knows.
        let added = || curriculum.amendments.iter().filter_map(|one| one.store.as_ref());
        let named = curriculum.stores.iter().chain(added().map(|store| &store.path));
        let places: Vec<PathBuf> = named.map(|store| far::placed(folder, store)).collect();
        let place = || curriculum.place("store");
        let (mut facts, mut folders) = (Vec::new(), Vec::new());
        for store in &places {
            match description(store)? {
                Some(described) => facts.extend(described),
                None => folders.push(store),
            }
        }
        // A description stands in for a store where only planning is asked for: with one of them there is no text.
        let described = !facts.is_empty();
        let stores = if folders.is_empty() {
            None
        } else {
            let cache = ReadCache::sized_by_the_process();
            Some(Stores::open_with(&folders, cache).map_err(|fault| fault.or_at(place))?)
        };
        facts.extend(stores.iter().flat_map(Stores::facts));
        let mut plan = Plan::new(&curriculum, &facts)?;
        if let Some(stores) = stores.as_ref().filter(|_| !described) {
            plan.place_bans(|source, documents| {
                let ranges: Vec<_> = documents.iter().map(|number| *number..number + 1).collect();
                let records = stores.stream(source, Split::Train)?.documents(&ranges)?;
                let tokens = |it: &DocumentRecord| it.first_token..it.first_token + it.tokens;
                Ok(records.iter().map(tokens).collect())
            })?;
        }
        let plan = Arc::new(plan);
        let stores = stores.filter(|_| !described).map(Arc::new);
        if let Some(stores) = &stores {
            check_added(&curriculum, &plan, stores)?;
        }
        Ok(Opened { path: path.to_path_buf(), source: text, curriculum, plan, stores })
    }

    /// The stores; `None` where the curriculum describes one instead of naming it.
    pub fn text(&self) -> Option<&Arc<Stores>> {
        self.stores.as_ref()
    }

    /// The stores, for whoever needs text.
    pub fn stores(&self) -> Result<&Arc<Stores>> {
        self.stores.as_ref().ok_or_else(|| {
            Fault::usage("this needs a store, and the curriculum only describes one")
                .at(self.curriculum.place("store"))
                .wanted("the folder of a store")
                .hint("build one with `zdata build CORPUS.toml --out STORE`")
        })
    }
}

/// Holds the stores that amendments add against their digests, and keeps their sources out of the steps before.
fn check_added(curriculum: &Curriculum, plan: &Plan, stores: &Stores) -> Result<()> {
    let added = curriculum.amendments.iter().enumerate();
    let added = added.filter_map(|(number, one)| Some((number + 1, one.step, one.store.as_ref()?)));
    let opened = stores.stores().get(curriculum.stores.len()..).unwrap_or_default();
    for ((number, step, AddedStore { path: _, digest }), store) in added.zip(opened) {
        let place = || curriculum.place(&format!("amendment.{number}.store"));
        let manifest = store.manifest();
        if manifest.digest.to_string() != *digest {
            return Err(Fault::mismatch("this is not the store that the amendment added")
                .at(place())
                .found(manifest.digest)
                .wanted(digest));
        }
        for phase in plan.phases().iter().take_while(|phase| phase.first_step < step) {
            let early = phase.uses.iter().map(|part| &plan.sources()[part.source].name);
            let mut early =
                early.filter(|name| manifest.sources.iter().any(|it| it.name == **name));
            if let Some(name) = early.next() {
                let (phase, first) = (&phase.name, phase.first_step);
                let what = format!("source {name:?} is there from step {step} on");
                return Err(Fault::usage(what)
                    .at(place())
                    .found(format!("it is in the mix of phase {phase:?}, from step {first}")));
            }
        }
    }
    Ok(())
}

/// The text of a file that a person wrote. Bytes that are not text are the file's mistake, not the machine's.
fn text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(|error| Fault::io("read", path, &error))?;
    Ok(File::from_bytes(path.display().to_string(), bytes)?.text().to_owned())
}

/// The facts of a described store, if `path` is a file and not a store's folder.
fn description(path: &Path) -> Result<Option<Vec<SourceFacts>>> {
    if !path.is_file() {
        return Ok(None);
    }
    let place = path.display().to_string();
    match described_store(&text(path)?, &place)? {
        Some(facts) => Ok(Some(facts)),
        None => Err(Fault::usage("this file does not describe a store")
            .at(place)
            .wanted("[[source]] with name, tokens and documents, or the folder of a store")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::Class;

    #[test]
    fn a_curriculum_that_is_not_text_is_wrong_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        fs::write(&path, b"seed = 1\nstore = \"\xff\"").unwrap();
        let fault = Opened::open(&path).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains("run.toml:2"), "{fault}");
    }
}
