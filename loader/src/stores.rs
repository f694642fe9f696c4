//! All stores of a curriculum, as one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::{Fault, Result};
use curriculum::Buckets;
use mixer::SourceFacts;
use store::{Location, Split, Store, StreamReader, TokenizerRecord, read::ReadCache};

use crate::memory::{BatchMemory, Pool};
use crate::selection::Selection;
use crate::stream::SourceStream;

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
    /// Of a bucket: the source that it is cut from.
    whole: Option<String>,
    train: SourceStream,
    validation: SourceStream,
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
                        .hint("name it once: `max_epochs` is how often a source may be read"));
                }
                return Err(Fault::usage(format!("two stores have a source called {name:?}"))
                    .at(place())
                    .found(format!("also in {}", other.root()))
                    .hint("rename one in its corpus.toml and build it again"));
            }
            let (tokens, documents) = (record.train.tokens, record.train.documents);
            let facts = SourceFacts {
                name,
                tokens,
                documents,
                unit: store.manifest().unit,
                selection: None,
            };
            self.sources.push(Source {
                store: number,
                facts,
                whole: None,
                train: SourceStream::whole(store.stream(index, Split::Train)),
                validation: SourceStream::whole(store.stream(index, Split::Validation)),
            });
        }
        self.stores.push(store);
        Ok(())
    }

    /// Replaces a source by its buckets, whose documents `selections` are by split.
    pub(crate) fn cut(
        &mut self,
        source: &str,
        buckets: &Buckets,
        selections: Vec<Vec<Selection>>,
    ) -> Result<()> {
        let number = self.number(source).ok_or_else(|| Fault::bug("a source to cut is lost"))?;
        let Source { store, facts, whole: _, train, validation } = self.sources.remove(number);
        let mut selections = selections.into_iter().map(Vec::into_iter);
        let (Some(trained), Some(held_out)) = (selections.next(), selections.next()) else {
            return Err(Fault::bug("a source has two splits"));
        };
        let cut = buckets.all().zip(trained.zip(held_out)).map(|(bucket, (trained, held_out))| {
            let facts = SourceFacts {
                name: format!("{source}/{bucket}"),
                tokens: trained.tokens,
                documents: trained.documents,
                unit: facts.unit,
                selection: Some(trained.digest()),
            };
            let (train, validation) = (train.selected(trained), validation.selected(held_out));
            Source { store, facts, whole: Some(source.to_owned()), train, validation }
        });
        let cut: Vec<Source> = cut.collect();
        self.sources.splice(number..number, cut);
        self.by_name.clear();
        for (number, source) in self.sources.iter().enumerate() {
            let name = source.facts.name.clone();
            if self.by_name.insert(name.clone(), number).is_some() {
                return Err(Fault::usage(format!("two sources are called {name:?}"))
                    .hint("give the bucket another name under `names`"));
            }
        }
        Ok(())
    }

    /// The names of the sources.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().map(|source| source.facts.name.as_str())
    }

    /// The source that `name` is a bucket of, or `name` itself.
    pub fn whole<'a>(&'a self, name: &'a str) -> &'a str {
        let source = self.number(name).map(|number| &self.sources[number]);
        source.and_then(|source| source.whole.as_deref()).unwrap_or(name)
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
    pub fn stream(&self, name: &str, split: Split) -> Result<&SourceStream> {
        let Some(number) = self.number(name) else {
            return Err(mixer::unknown(name, self.names()));
        };
        let source = &self.sources[number];
        Ok(match split {
            Split::Train => &source.train,
            Split::Validation => &source.validation,
        })
    }

    /// The documents with an id in the sources that `within` takes: the source's number, and theirs. The ids of a
    /// stream are read once, however many buckets it has.
    pub fn find(
        &self,
        id: &str,
        split: Split,
        within: impl Fn(&str) -> bool,
    ) -> Result<Vec<(usize, Vec<u64>)>> {
        let (mut found, mut searched) = (Vec::new(), None::<(&StreamReader, Vec<u64>)>);
        for (number, name) in self.names().enumerate().filter(|(_, name)| within(name)) {
            let stream = self.stream(name, split)?;
            // The buckets of a source are neighbours.
            let all = match searched.take() {
                Some((reader, all)) if std::ptr::eq(reader, stream.reader()) => all,
                _ => stream.reader().find(id)?,
            };
            let own = stream.own(&all)?;
            found.extend((!own.is_empty()).then_some((number, own)));
            searched = Some((stream.reader(), all));
        }
        Ok(found)
    }

    /// Whether `asked` is a source's name, or that of the source that has it as a bucket.
    pub fn is_called(&self, name: &str, asked: &str) -> bool {
        [name, self.whole(name)].contains(&asked)
    }

    /// The training documents that `asked`, the value of `flag`, names as `ID`, or as `SOURCE:ID` if several sources
    /// have that id: their source and numbers, if any. `only` restricts the search to one source.
    pub fn named(
        &self,
        flag: &str,
        asked: &str,
        only: Option<&str>,
    ) -> Result<Option<(&str, Vec<u64>)>> {
        let within = |name: &str| only.is_none_or(|only| self.is_called(name, only));
        let found = self.find(asked, Split::Train, within)?;
        let mut found: BTreeMap<usize, Vec<u64>> = found.into_iter().collect();
        let called: BTreeSet<&str> =
            self.names().flat_map(|name| [name, self.whole(name)]).collect();
        for source in called {
            let own = asked.strip_prefix(source).and_then(|rest| rest.strip_prefix(':'));
            let of_source = |name: &str| within(name) && self.is_called(name, source);
            let more = own.map(|id| self.find(id, Split::Train, of_source)).transpose()?;
            for (number, documents) in more.into_iter().flatten() {
                found.entry(number).or_default().extend(documents);
            }
        }
        let name = |number: usize| self.sources[number].facts.name.as_str();
        if found.len() > 1 {
            let sources: Vec<_> = found.keys().map(|number| name(*number)).collect();
            return Err(Fault::of_several_sources(flag, asked, &sources));
        }
        Ok(found.pop_first().map(|(number, documents)| (name(number), documents)))
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

    /// Whether documents have a begin token, and an end token.
    pub(crate) fn held_tokens(&self) -> [bool; 2] {
        let tokenizer = self.stores.first().map(|store| &store.manifest().tokenizer);
        let ends = tokenizer.map(|tokenizer| [tokenizer.begin, tokenizer.end]);
        ends.unwrap_or_default().map(|token| token.is_some())
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
