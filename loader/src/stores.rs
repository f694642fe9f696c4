//! All stores of a curriculum, as one.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::{Fault, Result};
use mixer::SourceFacts;
use store::{Location, Split, Store, StreamReader, TokenizerRecord, read::ReadCache};

use crate::memory::{BatchMemory, Pool};

/// Several stores with one tokenizer and unique source names.
pub struct Stores {
    stores: Vec<Store>,
    by_name: BTreeMap<String, usize>,
    sources: Vec<Source>,
    pool: Arc<Pool>,
}

/// One source, in whichever store.
struct Source {
    store: usize,
    facts: SourceFacts,
    train: StreamReader,
    validation: StreamReader,
}

/// The properties of a tokenizer that must be equal in all stores of a curriculum, as text.
fn in_words(tokenizer: &TokenizerRecord) -> String {
    let token = |id: Option<u32>| id.map_or("none".to_owned(), |id| format!("token {id}"));
    let (begin, end) = (token(tokenizer.begin), token(tokenizer.end));
    format!("tokenizer.json with SHA-256 {}, begin {begin}, end {end}", tokenizer.sha256)
}

impl Stores {
    /// Opens the stores in these folders, with a shared bounded cache of open files.
    pub fn open<P: Clone + Into<Location>>(places: &[P]) -> Result<Self> {
        Stores::open_with(places, ReadCache::sized_by_the_process())
    }

    /// Opens the stores in these folders with this cache.
    pub fn open_with<P: Clone + Into<Location>>(
        places: &[P],
        cache: Arc<ReadCache>,
    ) -> Result<Self> {
        let mut all = Stores::none();
        for place in places {
            all.add(Store::open_with(place.clone(), Arc::clone(&cache))?)?;
        }
        if all.stores.is_empty() {
            return Err(Fault::usage("no store is named").hint("give `store` a path or a list"));
        }
        Ok(all)
    }

    /// No stores, for a plan over store stubs: there is no source, so nothing can be read.
    pub fn none() -> Self {
        let (stores, by_name, sources) = (Vec::new(), BTreeMap::new(), Vec::new());
        Stores { stores, by_name, sources, pool: Arc::default() }
    }

    fn add(&mut self, store: Store) -> Result<()> {
        let place = || store.root().to_string();
        if let Some(first) = self.stores.first() {
            let (expected, other) = (&first.manifest().tokenizer, &store.manifest().tokenizer);
            if (expected.sha256, expected.begin, expected.end)
                != (other.sha256, other.begin, other.end)
            {
                return Err(Fault::usage("two stores of one curriculum have different tokenizers")
                    .at(place())
                    .found(in_words(other))
                    .wanted(format!("{}, as in {}", in_words(expected), first.root()))
                    .hint("make both with the same tokenizer.json, `begin` and `end`"));
            }
        }
        let number = self.stores.len();
        for (index, record) in store.manifest().sources.iter().enumerate() {
            let name = record.name.clone();
            if let Some(other) = self.by_name.insert(name.clone(), self.sources.len()) {
                let other = self.stores.get(self.sources[other].store).unwrap_or(&store);
                if other.manifest().digest == store.manifest().digest {
                    return Err(Fault::usage("one store is named twice")
                        .at(place())
                        .found(format!("also as {}", other.root()))
                        .hint(
                            "name it once: `max_epochs` is how often a source may be gone through",
                        ));
                }
                return Err(Fault::usage(format!("two stores have a source called {name:?}"))
                    .at(place())
                    .found(format!("also in {}", other.root()))
                    .hint("rename one in its corpus.toml and build it again"));
            }
            let (tokens, documents) = (record.train.tokens, record.train.documents);
            let facts = SourceFacts { name, tokens, documents, unit: store.manifest().unit };
            self.sources.push(Source {
                store: number,
                facts,
                train: store.stream(index, Split::Train),
                validation: store.stream(index, Split::Validation),
            });
        }
        self.stores.push(store);
        Ok(())
    }

    /// The facts of each source, for planning.
    pub fn facts(&self) -> Vec<SourceFacts> {
        self.sources.iter().map(|source| source.facts.clone()).collect()
    }

    /// The source's number in [`Self::facts`].
    pub fn number(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// A stream of the source called `name`.
    pub fn stream(&self, name: &str, split: Split) -> Result<&StreamReader> {
        let Some(number) = self.number(name) else {
            return Err(mixer::unknown(name, self.by_name.keys().map(String::as_str)));
        };
        let source = &self.sources[number];
        Ok(match split {
            Split::Train => &source.train,
            Split::Validation => &source.validation,
        })
    }

    /// The training documents that `asked`, the value of `flag`, names as `ID`, or as `SOURCE:ID` if several sources
    /// have that id: their source and numbers, if any. `only` restricts the search to one source.
    pub fn named(
        &self,
        flag: &str,
        asked: &str,
        only: Option<&str>,
    ) -> Result<Option<(&str, Vec<u64>)>> {
        let mut found = Vec::new();
        let names = self.sources.iter().map(|source| source.facts.name.as_str());
        for name in names.filter(|name| only.is_none_or(|only| only == *name)) {
            let stream = self.stream(name, Split::Train)?;
            let mut numbers = stream.find(asked)?;
            if let Some(own) = asked.strip_prefix(name).and_then(|rest| rest.strip_prefix(':')) {
                numbers.extend(stream.find(own)?);
            }
            found.extend((!numbers.is_empty()).then_some((name, numbers)));
        }
        if found.len() > 1 {
            let sources: Vec<_> = found.iter().map(|(name, _)| *name).collect();
            return Err(Fault::of_several_sources(flag, asked, &sources));
        }
        Ok(found.pop())
    }

    /// The location of the store that has a source.
    pub(crate) fn root_of(&self, source: &str) -> Result<&Location> {
        self.stream(source, Split::Train)?; // Which says what is wrong with the name, if anything is.
        let number = self.number(source).unwrap_or_default();
        Ok(self.stores[self.sources[number].store].root())
    }

    /// Plain memory for a batch of `tokens` tokens, reused after it is dropped.
    pub(crate) fn memory(&self, tokens: usize) -> Box<dyn BatchMemory> {
        self.pool.take(tokens)
    }

    /// The stores, in the order given.
    pub fn stores(&self) -> &[Store] {
        &self.stores
    }

    /// The bytes of the `tokenizer.json` that all stores share.
    pub fn tokenizer(&self) -> Result<Vec<u8>> {
        self.stores[0].tokenizer()
    }
}
