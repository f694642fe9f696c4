//! Compares the lists with those of a naive program in memory, whatever fits in memory here.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};

use contract::{Class, Digest, Key, Purpose, draw};
use proptest::prelude::*;
use store::disk::watch;

use super::*;
use crate::dedup::observe::{Mark, Observed};
use crate::dedup::scan::table::Table;
use crate::recipe::Step;
use crate::testing::Workbench;

const BANDS: u64 = 3;

/// The steps by number: two that drop a document on its own, and those that compare.
const SHORT: usize = 0;
const EXACT: usize = 1;
const LONG: usize = 2;
const NEAR: usize = 3;
const REPEATS: usize = 4;

fn corpus(bench: &Workbench, across: [bool; 2]) -> Corpus {
    let [exact, near] = across;
    let steps = format!(
        "[[prepare]]\nstep = \"length\"\nmin_words = 1\n\
         [[prepare]]\nstep = \"exact-duplicates\"\nacross = {exact}\n\
         [[prepare]]\nstep = \"length\"\nmax_words = 9\n\
         [[prepare]]\nstep = \"near-duplicates\"\nbands = {BANDS}\nacross = {near}\n\
         [[prepare]]\nstep = \"repeated-substrings\"\nmin_bytes = 3\npartition_bytes = 40\n"
    );
    let text = fs::read_to_string(bench.corpus("")).unwrap();
    let corpus = Corpus::read(bench.write("corpus.toml", text + &steps)).unwrap();
    let numbers = corpus.sources.iter().map(|source| &source.recipe.steps);
    for steps in numbers {
        assert!(steps.iter().map(|(number, _)| *number).eq([SHORT, EXACT, LONG, NEAR, REPEATS]));
    }
    corpus
}

/// Documents of two files of the first source and one of the second, of which many are equal or alike.
fn documents(seed: u64, count: u64) -> Vec<(usize, usize, Observed)> {
    let key = Key::from_seed(seed);
    let document = |n: u64| {
        let pick = |what: u64, of: u64| draw(key.nth(n), Purpose::Generate, what) % of;
        let dropped = match pick(0, 12) {
            0 => Some((SHORT as u8, "length: few words")),
            1 | 2 => Some((LONG as u8, "length: many words")),
            _ => None,
        };
        let reaches = |number| dropped.is_none_or(|(step, _)| usize::from(step) > number);
        let mut marks = Vec::new();
        if reaches(EXACT) {
            let content = u128::from(pick(1, count / 2 + 1));
            marks.push((EXACT, Mark::Content(Digest((content << 64) | (content % 3)))));
        }
        if reaches(NEAR) {
            if pick(2, 6) > 0 {
                let keys = (0..BANDS).map(|band| pick(3 + band, count + 1)).collect();
                marks.push((NEAR, Mark::Bands(keys)));
            }
            let text = ["one two", "three", "and one", "", "three two"][pick(9, 5) as usize];
            marks.push((REPEATS, Mark::Text(text.to_owned())));
        }
        let (source, file) = [(0, 0), (0, 1), (1, 0)][(n * 3 / count) as usize];
        let at = (n / 5) << 40 | n;
        (source, file, Observed { at, bytes: 0, dropped, marks, matches: Vec::new() })
    };
    (0..count).map(document).collect()
}

/// Writes the lists of these documents below `folder`.
fn decide(
    corpus: &Corpus,
    folder: &Path,
    budget: usize,
    documents: impl IntoIterator<Item = (usize, usize, Observed)>,
) -> Result<()> {
    let scratch = folder.join("scratch");
    disk::remove(&scratch)?;
    disk::create_folder(&scratch)?;
    let mut table = Table::new(corpus, Scratch::new(&scratch, budget))?;
    for (source, file, observed) in documents {
        table.push(source, file, observed)?;
    }
    table.decide(corpus)?.write(corpus, &folder.join("store")).map(drop)
}

/// The lines of the written lists.
fn lines<'a>(corpus: &'a Corpus, folder: &'a Path) -> impl Iterator<Item = Line> {
    corpus.sources.iter().flat_map(|source| {
        let list = File::open(folder.join("store").join(&source.name).join(REMOVED)).unwrap();
        let list = BufReader::new(zstd::Decoder::new(list).unwrap());
        list.lines().map(|line| serde_json::from_str::<Line>(&line.unwrap()).unwrap())
    })
}

/// What is removed by definition: the first of its kind stays.
fn by_definition(
    corpus: &Corpus,
    documents: &[(usize, usize, Observed)],
    across: [bool; 2],
) -> Vec<Line> {
    let mut removed = BTreeMap::new();
    let mut first = BTreeMap::new();
    let group = |n: usize, across: bool| if across { 0 } else { documents[n].0 };
    for (n, (.., observed)) in documents.iter().enumerate() {
        if let Some((_, reason)) = observed.dropped {
            removed.insert(n, (reason, None));
        }
        for (_, mark) in &observed.marks {
            let Mark::Content(content) = mark else { continue };
            let first = *first.entry((group(n, across[0]), *content)).or_insert(n);
            if first != n {
                removed.insert(n, (exact::REASON, Some(first)));
            }
        }
    }
    // The least member of each one's component, joined by renaming.
    let mut least: Vec<usize> = (0..documents.len()).collect();
    let mut first = BTreeMap::new();
    for (n, (.., observed)) in documents.iter().enumerate() {
        for (_, mark) in observed.marks.iter().filter(|_| !removed.contains_key(&n)) {
            let Mark::Bands(keys) = mark else { continue };
            for (band, key) in keys.iter().enumerate() {
                let other = *first.entry((group(n, across[1]), band, key)).or_insert(n);
                let (a, b) = (least[n].min(least[other]), least[n].max(least[other]));
                least.iter_mut().filter(|least| **least == b).for_each(|least| *least = a);
            }
        }
    }
    for (n, least) in least.into_iter().enumerate().filter(|(n, least)| n != least) {
        removed.insert(n, (minhash::REASON, Some(least)));
    }
    let line = |(n, (reason, kept)): (usize, (&str, Option<usize>))| {
        let (_, file, observed) = &documents[n];
        let kept = kept.map(|kept| {
            let (source, file, observed) = &documents[kept];
            Kept::at(&corpus.sources[*source].name, *file, observed.at)
        });
        Line::of_scan(*file, observed.at, reason, kept, &[])
    };
    removed.into_iter().map(line).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_budget_removes_what_the_definition_says(
        seed: u64,
        count in 1u64..150,
        across: [bool; 2],
        budget in 0usize..4000,
    ) {
        let bench = Workbench::new(1);
        let corpus = corpus(&bench, across);
        let documents = documents(seed, count);
        let found = [budget, 1 << 20].map(|budget| {
            let folder = bench.path(&budget.to_string());
            decide(&corpus, &folder, budget, documents.clone()).unwrap();
            lines(&corpus, &folder).collect::<Vec<_>>()
        });
        prop_assert_eq!(&found[0], &found[1]);
        let [found, _] = found;
        let whole: Vec<_> = found.iter().filter(|line| line.spans.is_empty()).cloned().collect();
        prop_assert_eq!(whole, by_definition(&corpus, &documents, across));
        let cut = found.iter().filter(|line| line.reason == repeats::REASON);
        prop_assert_eq!(cut.count(), found.iter().filter(|line| !line.spans.is_empty()).count());
    }
}

/// Documents of one file: of ten in a row, the second equals the first and the sixth is alike.
fn regular(n: u64) -> (usize, usize, Observed) {
    let content = if n % 10 == 1 { n - 1 } else { n };
    let alike = if n % 10 == 5 { n - 5 } else { n };
    let mark = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let content = Mark::Content(Digest(u128::from(mark(content)) << 64));
    let marks = vec![(EXACT, content), (NEAR, Mark::Bands(vec![mark(alike), n, n]))];
    (0, 0, Observed { at: n, bytes: 0, dropped: None, marks, matches: Vec::new() })
}

/// More documents than fit: 10 MB of memory hold a third of the records of a step. `sh tests/full.sh scan` has 10^7
/// in 64 MiB, and looks at the memory of the process.
#[test]
fn memory_is_bounded_whatever_the_number_of_documents() {
    let full = std::env::var_os("FULL").is_some();
    let (count, budget) = if full { (10_000_000u64, 64 << 20) } else { (100_000, 1 << 20) };
    let bench = Workbench::new(1);
    let corpus = corpus(&bench, [true; 2]);
    let (before, _) = storage::process::resident();
    decide(&corpus, &bench.path("x"), budget, (0..count).map(regular)).unwrap();
    let ((_, peak), most) = (storage::process::resident(), before + budget as u64 + (16 << 20));
    assert!(!full || peak < most, "{} MiB of {}", peak >> 20, most >> 20);
    let (folder, wanted) = (bench.path("x"), (0..count).filter(|n| [1, 5].contains(&(n % 10))));
    let mut found = lines(&corpus, &folder);
    for n in wanted {
        let first = Kept::at("web", 0, n - n % 10);
        let reason = if n % 10 == 1 { exact::REASON } else { minhash::REASON };
        assert_eq!(found.next(), Some(Line::of_scan(0, n, reason, Some(first), &[])));
    }
    assert_eq!(found.next(), None);
}

#[test]
fn a_full_disk_is_a_fault_and_a_forecast_says_what_is_needed() {
    let bench = Workbench::new(1);
    let corpus = corpus(&bench, [true; 2]);
    let folder = bench.path("x");
    let run = || decide(&corpus, &folder, 8000, documents(3, 2000));
    let whole = watch(&folder, u64::MAX);
    run().unwrap();
    let (mut sizes, mut peak, mut written) = (BTreeMap::new(), 0, 0);
    for act in whole.acts() {
        match act {
            disk::Act::Write(path, _, bytes) if path.starts_with(folder.join("scratch")) => {
                *sizes.entry(path).or_default() += bytes.len() as u64;
                written += bytes.len() as u64;
            }
            disk::Act::Remove(path) => drop(sizes.remove(&path)),
            _ => {}
        }
        peak = peak.max(sizes.values().sum::<u64>());
    }
    drop(whole);
    let steps = corpus.sources[0].recipe.steps.iter();
    let forecast = steps.map(|(_, step)| match step {
        Step::Compare(step) => disk_bytes(step, 2000, 2000 * 10),
        _ => 0,
    });
    let forecast: u64 = forecast.sum();
    assert!(peak > forecast / 4 && peak <= forecast, "{peak} bytes of {forecast}");
    for share in 0..40 {
        let full = watch(&folder, written * share / 40);
        let fault = run().unwrap_err();
        drop(full);
        assert_eq!(fault.class(), Class::Machine, "{fault}");
        assert!(fault.to_string().contains(&folder.display().to_string()), "{fault}");
    }
}

#[test]
fn documents_out_of_order_are_refused() {
    let bench = Workbench::new(1);
    let corpus = corpus(&bench, [true; 2]);
    let mut documents = documents(3, 20);
    documents.swap(4, 5);
    let fault = decide(&corpus, &bench.path("x"), 0, documents).unwrap_err();
    assert_eq!(fault.class(), Class::Data, "{fault}");
}
