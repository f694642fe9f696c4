//! Opens a curriculum file with its plan and stores, as every command does first.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use contract::{Class, Fault, Identity, Result};
use curriculum::AddedStore;
use mixer::{Curriculum, DataPlan, PackTables, SourceFacts, store_stub};
use settings::File;
use store::open::MANIFEST;
use store::read::ReadCache;
use store::{DocumentRecord, Location, Split};

use crate::{Stores, buckets, objective, packs};

/// The name of a run's own copy of the curriculum, in its folder.
const RUN_CURRICULUM: &str = "run.toml";

/// A curriculum with its plan and its stores (none if it names store stubs).
pub struct OpenedCurriculum {
    /// Its location.
    pub file: Location,
    /// Its text, as read.
    pub source: String,
    /// The parsed curriculum.
    pub curriculum: Curriculum,
    /// The plan.
    pub plan: Arc<DataPlan>,
    stores: Option<Arc<Stores>>,
}

impl OpenedCurriculum {
    /// Reads the curriculum `file`, opens its stores (paths relative to its folder), and plans.
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
        OpenedCurriculum::open_text(file, text)
    }

    /// The same for text that would be in `file`.
    pub fn open_text(file: impl Into<Location>, text: String) -> Result<Self> {
        let file = file.into();
        let curriculum = Curriculum::parse(&text, &file.to_string())?;
        let folder = file.folder();
        // The run's first stores come first: a run knows sources by their numbers.
        let added = || curriculum.amendments.iter().filter_map(|one| one.store.as_ref());
        let named = curriculum.stores.iter().chain(added().map(|store| &store.path));
        let place = || curriculum.place("store");
        let places = named.map(|store| storage::resolve(&folder, store));
        let places: Vec<Location> =
            places.collect::<Result<_>>().map_err(|fault| fault.or_at(place))?;
        let (mut facts, mut folders) = (Vec::new(), Vec::new());
        for store in &places {
            match description(store)? {
                Some(stub) => facts.extend(stub),
                None => folders.push(store),
            }
        }
        // A store stub is for planning only: with one of them, no text can be read.
        let stub = !facts.is_empty();
        let stores = if folders.is_empty() {
            None
        } else {
            let cache = ReadCache::sized_by_the_process();
            let mut stores =
                Stores::open_with(&folders, cache).map_err(|fault| fault.or_at(place))?;
            if !stub {
                buckets::cut(&curriculum, &mut stores)?;
            }
            Some(stores)
        };
        facts.extend(stores.iter().flat_map(Stores::facts));
        let packs = match stores.as_ref().filter(|_| !stub) {
            Some(stores) => packs::tables(&curriculum, stores)?,
            None => PackTables::new(),
        };
        let planned = match stores.as_ref().filter(|_| !stub) {
            Some(stores) => objective::resolved(&curriculum, stores)?,
            None => Cow::Borrowed(&curriculum),
        };
        let mut plan = DataPlan::with_packs(&planned, &facts, packs)?;
        drop(planned);
        if let Some(stores) = stores.as_ref().filter(|_| !stub) {
            plan.place_bans(|source, documents| {
                let ranges: Vec<_> = documents.iter().map(|number| *number..number + 1).collect();
                let records = stores.stream(source, Split::Train)?.documents(&ranges)?;
                let tokens = |it: &DocumentRecord| it.first_token..it.first_token + it.tokens;
                Ok(records.iter().map(tokens).collect())
            })?;
        }
        let plan = Arc::new(plan);
        let stores = stores.filter(|_| !stub).map(Arc::new);
        if let Some(stores) = &stores {
            check_added(&curriculum, &plan, stores)?;
        }
        Ok(OpenedCurriculum { file, source: text, curriculum, plan, stores })
    }

    /// Opens the curriculum of the run in `root`. `moved` are the present locations of its stores, those of amendments
    /// last; if empty, the curriculum's own paths are used. `begun` are the digests of the stores that the run began
    /// with. Any other store is refused first: it is not what the run was trained on, whatever its sources are called.
    pub fn of_run(root: &Path, moved: &[Location], begun: &[Identity]) -> Result<Self> {
        let path = root.join(RUN_CURRICULUM);
        if !path.exists() {
            return Err(no_run(root, RUN_CURRICULUM));
        }
        let file = Location::from(&path);
        let source = text(&file).map_err(damaged)?;
        let mut curriculum = Curriculum::parse(&source, &file.to_string()).map_err(damaged)?;
        if curriculum.stores.len() != begun.len() {
            return Err(Fault::mismatch("the run began with another number of stores")
                .at(curriculum.place("store"))
                .found(curriculum.stores.len())
                .wanted(begun.len()));
        }
        let begun = begun.iter().map(Identity::to_string);
        let mut named: Vec<_> = curriculum.stores.iter_mut().zip(begun).collect();
        let added = curriculum.amendments.iter_mut().filter_map(|one| one.store.as_mut());
        named.extend(added.map(|store| (&mut store.path, store.digest.clone())));
        if ![0, named.len()].contains(&moved.len()) {
            let places: Vec<&str> = named.iter().map(|(place, _)| place.as_str()).collect();
            return Err(Fault::usage(
                "a store that moved is named for each store of the curriculum, or none is",
            )
            .at("--store")
            .found(moved.len())
            .wanted(format!("{}: {}", places.len(), places.join(", "))));
        }
        for (number, (place, digest)) in named.into_iter().enumerate() {
            let now = moved.get(number);
            *place = match now {
                Some(now) => now.absolute()?,
                None => storage::resolve(&file.folder(), place)?,
            }
            .to_string();
            check_store_of_run(place, &digest, now.is_some())?;
        }
        // If nothing moved, errors refer to lines of the file.
        let source = if moved.is_empty() { source } else { curriculum.canonical() };
        OpenedCurriculum::open_text(file, source)
    }

    /// The stores; `None` if the curriculum names a store stub.
    pub fn text(&self) -> Option<&Arc<Stores>> {
        self.stores.as_ref()
    }

    /// The stores, for commands that need text; an error for a store stub.
    pub fn stores(&self) -> Result<&Arc<Stores>> {
        self.stores.as_ref().ok_or_else(|| {
            Fault::usage("this needs a store, and the curriculum names a store stub")
                .at(self.curriculum.place("store"))
                .wanted("the folder of a store")
                .hint("build one with `zdata build CORPUS.toml --out STORE`")
        })
    }
}

/// The error for a folder that is not a run because it has no `file`, or for a run that lost it.
pub fn no_run(root: &Path, file: &str) -> Fault {
    if [RUN_CURRICULUM, "ledger.jsonl"].iter().all(|it| *it == file || root.join(it).is_file()) {
        return Fault::data(format!("this run has lost its {file}"))
            .at(root.display().to_string())
            .hint(match file {
                RUN_CURRICULUM => "the command that began the run writes it anew",
                _ => "restore it from a backup: without it nothing says what was trained",
            });
    }
    Fault::usage(format!("this is not a run: it has no {file}"))
        .at(root.display().to_string())
        .hint("name the folder that `ztrain --curriculum` wrote, its --out")
}

/// Refuses a store at `place` whose digest is not `digest`; `said`: whether the user named this place.
fn check_store_of_run(place: &str, digest: &str, said: bool) -> Result<()> {
    let store = storage::locate(place)?;
    let gone = |path: &Path| !path.exists();
    if !said && store.local().is_some_and(gone) {
        return Err(Fault::data("the store that this run was trained from is not here any more")
            .at(place)
            .hint("say where it is now: --store FOLDER, once for each store in the order of its run.toml"));
    }
    let found = store::open::manifest(&store)?.digest.to_string();
    if found == digest {
        return Ok(());
    }
    let (flag, hint) = match said {
        true => ("--store ", "name the store that the run was trained from"),
        false => (
            "",
            "put the store that the run was trained from here, or say where it is: --store FOLDER",
        ),
    };
    Err(Fault::mismatch(
        "this is another store than the run was trained from: its digest is not the run's",
    )
    .at(format!("{flag}{place}"))
    .found(found)
    .wanted(digest)
    .hint(hint))
}

/// Checks the digests of stores that amendments add, and refuses their sources in earlier steps.
fn check_added(curriculum: &Curriculum, plan: &DataPlan, stores: &Stores) -> Result<()> {
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
            let mut early = early
                .filter(|name| manifest.sources.iter().any(|it| it.name == stores.whole(name)));
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

/// Reads a file written by a person. Invalid UTF-8 is an error in the file, not in the environment.
fn text(file: &Location) -> Result<String> {
    let bytes = file.read().map_err(|error| file.fault("read", &error))?;
    Ok(File::from_bytes(file.to_string(), bytes)?.text().to_owned())
}

/// The facts of a store stub, if `store` is a file and not a store's folder.
fn description(store: &Location) -> Result<Option<Vec<SourceFacts>>> {
    if !store.is_file()? {
        return Ok(None);
    }
    let place = store.to_string();
    if store.name() == store::open::MANIFEST {
        return Err(Fault::usage("this is a file of a store, and the store's folder is wanted")
            .at(place)
            .wanted(store.folder().to_string()));
    }
    match store_stub(&text(store)?, &place)? {
        Some(facts) => Ok(Some(facts)),
        None => Err(Fault::usage("this file does not describe a store")
            .at(place)
            .wanted("[[source]] with name, tokens and documents, or the folder of a store")),
    }
}

/// Turns an error in a run's own copy of the curriculum into an error of data: the user did not write that file.
pub fn damaged(fault: Fault) -> Fault {
    let is_there = fault.place().is_none_or(|place| place.contains(RUN_CURRICULUM));
    match fault.class() {
        Class::Usage if is_there => fault.of(Class::Data).hint(
            "a run keeps its curriculum there: the command that began the run writes it anew, or restore the file",
        ),
        _ => fault,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curriculum_that_is_not_text_is_wrong_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, b"seed = 1\nstore = \"\xff\"").unwrap();
        let fault = OpenedCurriculum::open(&path).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains("run.toml:2"), "{fault}");
        let fault = OpenedCurriculum::of_run(folder.path(), &[], &[]).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "nobody wrote what a run keeps");
        assert!(fault.to_string().contains("run.toml:2"), "{fault}");
        std::fs::write(&path, "seed = 1\nstoer = 3\n").unwrap();
        let fault = OpenedCurriculum::of_run(folder.path(), &[], &[]).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Data);
        assert!(fault.to_string().contains("writes it anew"), "{fault}");
    }
}
