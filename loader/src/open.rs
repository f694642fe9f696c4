//! From a curriculum file to its plan and its stores: what every command begins with.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::store::read::ReadCache;
use contract::{Fault, Result, far};
use mixer::{Curriculum, Plan, SourceFacts, described_store};

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
        let text = fs::read_to_string(path).map_err(|error| Fault::io("read", path, &error))?;
        let curriculum = Curriculum::parse(&text, &path.display().to_string())?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let places: Vec<PathBuf> =
            curriculum.stores.iter().map(|store| placed(folder, store)).collect();
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
        let plan = Arc::new(Plan::new(&curriculum, &facts)?);
        let stores = stores.filter(|_| !described).map(Arc::new);
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

/// Where a store lies: in the curriculum's folder, unless it is far.
fn placed(folder: &Path, store: &str) -> PathBuf {
    if far::is_far(Path::new(store)) { PathBuf::from(store) } else { folder.join(store) }
}

/// The facts of a described store, if `path` is a file and not a store's folder.
fn description(path: &Path) -> Result<Option<Vec<SourceFacts>>> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = fs::read_to_string(path).map_err(|error| Fault::io("read", path, &error))?;
    let place = path.display().to_string();
    match described_store(&text, &place)? {
        Some(facts) => Ok(Some(facts)),
        None => Err(Fault::usage("this file describes no store")
            .at(place)
            .wanted("[[source]] with name, tokens and documents, or the folder of a store")),
    }
}
