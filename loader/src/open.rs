//! From a curriculum file to its plan and its stores: what every command begins with.

use std::sync::Arc;

use contract::settings::File;
use contract::{Fault, Result};
use curriculum::AddedStore;
use mixer::{Curriculum, PackTables, Plan, SourceFacts, described_store};
use store::open::MANIFEST;
use store::read::ReadCache;
use store::{DocumentRecord, Location, Split};

use crate::{Stores, packs};

/// A curriculum with its plan and, unless it only describes them, its stores.
pub struct Opened {
    /// Where it stands.
    pub file: Location,
    /// Its text, as read.
    pub source: String,
    /// What it says.
    pub curriculum: Curriculum,
    /// What it reads.
    pub plan: Arc<Plan>,
    stores: Option<Arc<Stores>>,
}

impl Opened {
    /// Reads the curriculum `file`, opens what it names as `store` (relative to its folder), and plans.
    pub fn open(file: impl Into<Location>) -> Result<Self> {
        let file = file.into();
        let is_folder = match &file {
            Location::Local(path) => path.is_dir(),
            Location::Object(_) => !file.is_file()?,
        };
        let is_store = is_folder && file.join(MANIFEST).is_file()?;
        if is_store || is_folder && !file.is_remote() {
            let what = if is_store { "a store" } else { "a folder" };
            return Err(Fault::usage(format!("this is {what}, and a curriculum is a file"))
                .at(file.to_string())
                .hint("name a TOML file of phases whose `store` is the store's folder"));
        }
        let text = text(&file)?;
        Opened::open_text(file, text)
    }

    /// The same of a text that would stand in `file`.
    pub fn open_text(file: impl Into<Location>, text: String) -> Result<Self> {
        let file = file.into();
        let curriculum = Curriculum::parse(&text, &file.to_string())?;
        let folder = file.folder();
        // Those of the beginning first: theirs are the numbers that a run knows.
        let added = || curriculum.amendments.iter().filter_map(|one| one.store.as_ref());
        let named = curriculum.stores.iter().chain(added().map(|store| &store.path));
        let place = || curriculum.place("store");
        let places = named.map(|store| storage::resolve(&folder, store));
        let places: Vec<Location> =
            places.collect::<Result<_>>().map_err(|fault| fault.or_at(place))?;
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
        let packs = match stores.as_ref().filter(|_| !described) {
            Some(stores) => packs::tables(&curriculum, stores)?,
            None => PackTables::new(),
        };
        let mut plan = Plan::with_packs(&curriculum, &facts, packs)?;
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
        Ok(Opened { file, source: text, curriculum, plan, stores })
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
fn text(file: &Location) -> Result<String> {
    let bytes = file.read().map_err(|error| file.fault("read", &error))?;
    Ok(File::from_bytes(file.to_string(), bytes)?.text().to_owned())
}

/// The facts of a described store, if `store` is a file and not a store's folder.
fn description(store: &Location) -> Result<Option<Vec<SourceFacts>>> {
    if !store.is_file()? {
        return Ok(None);
    }
    let place = store.to_string();
    match described_store(&text(store)?, &place)? {
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
        std::fs::write(&path, b"seed = 1\nstore = \"\xff\"").unwrap();
        let fault = Opened::open(&path).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains("run.toml:2"), "{fault}");
    }
}
