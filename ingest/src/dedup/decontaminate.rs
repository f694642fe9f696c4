//! Decontamination: no document that shares a run of words with an evaluation set is trained on.
//!
//! The sets are JSON Lines; a template makes the text of an item. Words are compared in normal form (`normal`); a run
//! is 13 words unless the corpus says otherwise. A match is found by hash and confirmed word by word; every pair of
//! document and item that shares a run is reported, with the longest text they share.

use std::collections::BTreeMap;

use contract::{Fault, Result};

use super::normal::{self, Word};
use crate::recipe::compare::{Decontaminate, Rules};
use crate::recipe::mapping::{Mapping, Template};
use crate::source::{self, Fields, Format, Limits, Parsed};

/// Why a document is removed.
pub(crate) const REASON: &str = "decontaminate: shared with an evaluation set";

impl Rules {
    /// The words of a text as these rules compare them.
    fn words_of(&self, text: &str) -> Vec<Word> {
        let mut words = normal::words(text);
        if !self.numbers {
            for word in &mut words {
                if text[word.start..word.end].bytes().all(|byte| byte.is_ascii_digit()) {
                    word.hash = 0;
                }
            }
        }
        words
    }
}

/// One run of words of one item.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Posting {
    hash: u64,
    item: u32,
    word: u32,
}

/// An item of a set.
struct Item {
    set: usize,
    line: u64,
    words: Vec<u64>,
}

/// The runs of all items.
pub(crate) struct Index {
    rules: Rules,
    n: usize,
    sets: Vec<String>,
    items: Vec<Item>,
    postings: Vec<Posting>,
    /// A bit filter over the hashes, with false positives: it rejects most runs of most documents.
    filter: Vec<u64>,
    /// The number of items with fewer words than a run, which cannot be found, and of all items.
    pub(crate) short: (usize, usize),
}

/// What a document shares with an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Match<'a> {
    /// The set's path.
    pub(crate) set: &'a str,
    /// The item's line.
    pub(crate) line: u64,
    /// Runs shared.
    pub(crate) runs: usize,
    /// The longest text shared, as the document has it.
    pub(crate) text: &'a str,
}

impl Index {
    /// Reads the sets.
    pub(crate) fn read(step: &Decontaminate) -> Result<Self> {
        let template = Template::parse(&step.rules.template).map_err(Fault::bug)?;
        let mapping = Mapping::Template(template);
        let fields = Fields::record(std::iter::empty::<String>(), None);
        let mut items = Vec::new();
        for (set, (file, identity)) in step.files.iter().enumerate() {
            let mut input =
                source::open(&file.path, Format::JsonLines, &fields, &Limits::default())?;
            while let Some(slab) = input.next_slab()? {
                for parsed in slab.parse(&fields)? {
                    let document = match parsed {
                        Parsed::Document(document) => document,
                        Parsed::Dropped { fault, .. } => {
                            let hint = "correct or remove this evaluation item: on_error does not apply to evaluation items";
                            return Err(fault.hint(hint));
                        }
                    };
                    let place = || format!("{}:{}", file.shown, document.row);
                    let text = mapping.text(&document.text).map_err(|fault| {
                        fault.or_at(place).hint("`template` names the fields of an item")
                    })?;
                    if text.trim().is_empty() {
                        return Err(Fault::data("this evaluation item has no text")
                            .at(place())
                            .hint(
                                "correct or remove this evaluation item: on_error does not apply to evaluation items",
                            ));
                    }
                    let words = step.rules.words_of(&text).iter().map(|word| word.hash).collect();
                    items.push(Item { set, line: document.row, words });
                }
            }
            if input.content().sha256 != *identity {
                return Err(Fault::mismatch("this evaluation set changed while the build began")
                    .at(file.shown.clone())
                    .hint("run the same command again"));
            }
        }
        let sets: Vec<String> = step.files.iter().map(|(file, _)| file.shown.clone()).collect();
        if items.is_empty() {
            return Err(Fault::data(
                "the evaluation sets of a step hold no item: it would find nothing",
            )
            .at(sets.join(", "))
            .wanted("at least one line with an item")
            .hint("fetch these files again, or take the step out of the corpus"));
        }
        Ok(Index::new(&step.rules, sets, items))
    }

    fn new(rules: &Rules, sets: Vec<String>, items: Vec<Item>) -> Self {
        let n = rules.words as usize;
        let mut postings = Vec::new();
        for (number, item) in items.iter().enumerate() {
            let words: Vec<Word> =
                item.words.iter().map(|hash| Word { hash: *hash, start: 0, end: 0 }).collect();
            let runs = normal::grams(&words, n).enumerate();
            postings.extend(runs.map(|(word, hash)| Posting {
                hash,
                item: number as u32,
                word: word as u32,
            }));
        }
        postings.sort_unstable();
        // One posting is enough where an item repeats itself.
        postings.dedup_by_key(|posting| (posting.hash, posting.item));
        let mut filter = vec![0u64; (postings.len() / 2 + 1).next_power_of_two()];
        for posting in &postings {
            let (slot, bit) = slot(&filter, posting.hash);
            filter[slot] |= bit;
        }
        let short = items.iter().filter(|item| item.words.len() < n).count();
        let short = (short, items.len());
        Index { rules: rules.clone(), n, sets, items, postings, filter, short }
    }

    /// Everything a text shares with items, by item.
    pub(crate) fn matches<'a>(&'a self, text: &'a str) -> Vec<Match<'a>> {
        let words = self.rules.words_of(text);
        let mut shared: BTreeMap<u32, Shared> = BTreeMap::new();
        for (at, hash) in normal::grams(&words, self.n).enumerate() {
            let (slot, bit) = slot(&self.filter, hash);
            if self.filter[slot] & bit == 0 {
                continue;
            }
            let first = self.postings.partition_point(|posting| posting.hash < hash);
            let same = self.postings[first..].iter().take_while(|posting| posting.hash == hash);
            for posting in same.filter(|posting| self.confirmed(posting, &words[at..])) {
                shared.entry(posting.item).or_default().run(at);
            }
        }
        let enough =
            shared.into_iter().filter(|(_, shared)| shared.runs as u64 >= self.rules.min_runs);
        let shared_with = |(item, shared): (u32, Shared)| {
            let item = &self.items[item as usize];
            let (first, last) = shared.longest;
            let text = &text[words[first].start..words[last + self.n - 1].end];
            Match { set: &self.sets[item.set], line: item.line, runs: shared.runs, text }
        };
        enough.map(shared_with).collect()
    }

    fn confirmed(&self, posting: &Posting, words: &[Word]) -> bool {
        let item = &self.items[posting.item as usize].words[posting.word as usize..];
        item.iter().zip(words).take(self.n).all(|(a, b)| *a == b.hash)
    }
}

fn slot(filter: &[u64], hash: u64) -> (usize, u64) {
    ((hash >> 6) as usize & (filter.len() - 1), 1 << (hash & 63))
}

/// Where one item's runs are in a document.
#[derive(Default)]
struct Shared {
    runs: usize,
    /// The current chain of consecutive runs: first and last.
    open: (usize, usize),
    longest: (usize, usize),
}

impl Shared {
    fn run(&mut self, at: usize) {
        if self.runs > 0 && at == self.open.1 {
            // The same words occur twice in the item.
            return;
        }
        self.open =
            if self.runs > 0 && at == self.open.1 + 1 { (self.open.0, at) } else { (at, at) };
        let length = |(first, last): (usize, usize)| last - first;
        if self.runs == 0 || length(self.open) > length(self.longest) {
            self.longest = self.open;
        }
        self.runs += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn index(n: u64, items: &[&str]) -> Index {
        let rules = Rules { words: n, ..Rules::default() };
        let item = |(at, text): (usize, &&str)| {
            let words = normal::words(text).iter().map(|word| word.hash).collect();
            Item { set: 0, line: at as u64 + 1, words }
        };
        Index::new(&rules, vec!["set".to_owned()], items.iter().enumerate().map(item).collect())
    }

    #[test]
    fn a_shared_run_is_found_whatever_its_spelling() {
        let index = index(4, &["What is the sum of two and three?", "too short"]);
        assert_eq!(index.short, (1, 2));
        let text = "Q: what IS -- the\nsum of 2 and 3; the sum of two and three? No.";
        let [found] = &index.matches(text)[..] else { panic!() };
        assert_eq!((found.set, found.line, found.runs), ("set", 1, 2 + 3));
        assert_eq!(found.text, "the sum of two and three");
        assert_eq!(index.matches("the sum of 2 and three"), []);
    }

    #[test]
    fn numbers_may_be_left_out_of_account() {
        for (numbers, count) in [(true, 0), (false, 1)] {
            let rules = Rules { words: 6, numbers, ..Rules::default() };
            let words =
                rules.words_of("She has 12 apples and 30 pears").iter().map(|w| w.hash).collect();
            let item = Item { set: 0, line: 1, words };
            let index = Index::new(&rules, vec!["set".to_owned()], vec![item]);
            assert_eq!(index.matches("she has 7 apples and 9 pears").len(), count);
            assert_eq!(index.matches("she has 7 apples or 9 pears").len(), 0);
        }
    }

    proptest! {
        #[test]
        fn matches_are_those_of_a_search(document in "[ab]( [abc]){0,40}",
                                      items in prop::collection::vec("[ab]( [abc]){0,12}", 0..6), n in 2u64..6) {
            let items: Vec<&str> = items.iter().map(String::as_str).collect();
            let index = index(n, &items);
            let split = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
            let words = split(&document);
            let mut wanted = Vec::new();
            for (at, item) in items.iter().enumerate() {
                let item = split(item);
                let shared = |run: &&[String]| item.windows(n as usize).any(|other| other == *run);
                let runs = words.windows(n as usize).filter(shared).count();
                if runs > 0 {
                    wanted.push((at as u64 + 1, runs));
                }
            }
            let matches = index.matches(&document);
            let pairs: Vec<_> = matches.iter().map(|found| (found.line, found.runs)).collect();
            prop_assert_eq!(pairs, wanted);
            for found in &matches {
                let item = split(items[found.line as usize - 1]);
                let text = split(found.text);
                // Every run of a shared text is one of the item's.
                prop_assert!(text.windows(n as usize).all(|run| item.windows(n as usize).any(|other| other == run)));
            }
        }
    }
}
