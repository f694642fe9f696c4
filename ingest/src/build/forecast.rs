//! `zdata build --dry-run`: what a build will read, write and need, before it begins.
//!
//! Parts and bytes of inputs are exact. Documents and tokens are those of a sample, read as a build reads them: the
//! first records of some files of every source. Steps that compare documents are not run, so they remove nothing here.

use contract::Result;
use serde::Serialize;

use crate::assembly;
use crate::assembly::pipeline::{Encoding, Item, Step, step};
use crate::corpus::{Corpus, PartInputs, Source, SourceFile, stops};
use crate::cuts;
use crate::dedup;
use crate::dropped::List;
use crate::prepared::Prepared;
use crate::recipe;
use crate::recipe::compare::Compare;
use crate::tokenize::Engine;
use crate::tokenize::audit::Wanted;
use crate::walk::Walk;

/// Files of a source of which a sample is read.
const FILES: usize = 8;

/// Bytes of such a file, as it is on the disk, after which the sample ends.
const FILE_BYTES: u64 = 1 << 20;

/// Memory of a worker: the ids of known words, a slab with its texts and ids, and the files of two streams that it
/// writes, each with a row group of provenance. Measured: ingest/docs/measured.md.
const WORKER_BYTES: u64 = 96 << 20;

/// A record in memory: its line, its text and its ids.
pub const RECORD_FACTOR: u64 = 3;

/// Bytes that a store keeps of a document besides its tokens: where it starts, and a row of provenance.
const DOCUMENT_BYTES: u64 = 24;

/// What a build reads and writes of one source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceForecast {
    /// Its name.
    pub source: String,
    /// Its files.
    pub files: u64,
    /// Their bytes, as they are on the disk.
    pub bytes: u64,
    /// Its parts.
    pub parts: u64,
    /// Bytes of its files that the sample read.
    pub sampled_bytes: u64,
    /// About how many documents it has.
    pub documents: u64,
    /// About how many tokens these have.
    pub tokens: u64,
    /// Records of the sample that a build drops, for any reason.
    pub sampled_dropped: u64,
    /// Whether steps compare its documents: the scan may remove some.
    pub compared: bool,
}

/// What a build reads, writes and needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Its sources.
    pub sources: Vec<SourceForecast>,
    /// The limit on the bytes of a part.
    pub part_bytes: u64,
    /// About how many bytes the store takes.
    pub store_bytes: u64,
    /// About how many bytes the dedup scan takes on the disk, at most, while it decides.
    pub scan_bytes: u64,
    /// Workers.
    pub workers: u64,
    /// Memory with these workers, besides that of long records.
    pub memory_bytes: u64,
    /// The limit on the bytes of a document. A line of JSON may have six times as many; each worker may hold one record
    /// [`RECORD_FACTOR`] times.
    pub max_document_bytes: u64,
}

/// Looks at the inputs of a build with so many workers. Nothing is written.
pub fn forecast(corpus: &Corpus, engine: Option<Engine>, workers: usize) -> Result<Forecast> {
    let engine = engine.unwrap_or_default();
    let tokenizer = assembly::tokenizer(corpus, engine)?;
    let head = assembly::head(corpus, &tokenizer, engine)?;
    let (parts, part_bytes) = cuts::parts(corpus)?;
    let tools = assembly::tools(corpus, &tokenizer, &head)?;
    let wanted = Wanted::default();
    let (mut sources, mut scan_bytes) = (Vec::new(), 0u64);
    for (number, source) in corpus.sources.iter().enumerate() {
        let sizes = source.files.iter().map(SourceFile::size).collect::<Result<Vec<_>>>()?;
        let mut sample = Sample::default();
        for file in spread(sizes.len()) {
            let only = corpus.cut(&PartInputs::files(number, file..file + 1));
            let prepared = Prepared::new(&only, &tools, vec![List::default()]);
            let encoding = Encoding {
                tokenizer: tokenizer.of(source.recipe.means_controls())?,
                begin: head.tokenizer.begin,
                end: head.tokenizer.end,
                validation: corpus.validation,
                wanted: &wanted,
                prepared: &prepared,
            };
            sample.file(&only, &encoding, sizes[file])?;
        }
        let bytes: u64 = sizes.iter().sum();
        let documents = sample.of_all(sample.documents, bytes);
        let text_bytes = sample.of_all(sample.text_bytes, bytes);
        let scan = compared(source).map(|step| dedup::disk_bytes(step, documents, text_bytes));
        scan_bytes = scan.fold(scan_bytes, u64::saturating_add);
        sources.push(SourceForecast {
            source: source.name.clone(),
            files: sizes.len() as u64,
            bytes,
            parts: parts.iter().filter(|part| part.source == number).count() as u64,
            sampled_bytes: sample.bytes,
            documents,
            tokens: sample.of_all(sample.tokens, bytes),
            sampled_dropped: sample.dropped,
            compared: source.recipe.scanned() > 0,
        });
    }
    let workers = workers.clamp(1, crate::WORKERS_MAX) as u64;
    let each = |source: &SourceForecast| {
        source.tokens * u64::from(tokenizer.token_bytes()) + source.documents * DOCUMENT_BYTES
    };
    let scan_memory = corpus.sources.iter().flat_map(compared).map(dedup::memory_bytes).max();
    let memory = workers * WORKER_BYTES + scan_memory.unwrap_or(0);
    Ok(Forecast {
        part_bytes,
        store_bytes: sources.iter().map(each).sum(),
        scan_bytes,
        sources,
        workers,
        memory_bytes: storage::process::resident().0.saturating_add(memory),
        max_document_bytes: corpus.max_document_bytes,
    })
}

/// The steps that compare documents of a source.
fn compared(source: &Source) -> impl Iterator<Item = &Compare> {
    source.recipe.steps.iter().filter_map(|(_, step)| match step {
        recipe::Step::Compare(step) => Some(step),
        _ => None,
    })
}

/// At most [`FILES`] of so many files, evenly spread.
fn spread(files: usize) -> impl Iterator<Item = usize> {
    let taken = files.min(FILES);
    (0..taken).map(move |nth| nth * files / taken)
}

/// What was read of a source.
#[derive(Clone, Copy, Default)]
struct Sample {
    bytes: u64,
    documents: u64,
    tokens: u64,
    text_bytes: u64,
    dropped: u64,
}

impl Sample {
    /// Reads the first records of a file of `size` bytes.
    fn file(&mut self, only: &Corpus, encoding: &Encoding<'_>, size: u64) -> Result<()> {
        let (mut walk, mut file) = (Walk::new(only), Sample::default());
        // Readers are ahead of the records that they return: the sample begins where the first ones were returned.
        let mut first = None;
        while let Some(part) = walk.next()? {
            let Some(Step::Slab { items, raw_bytes }) = step(part, only, encoding)? else {
                (first, file.bytes) = (None, size);
                break;
            };
            for item in items {
                match item {
                    Item::Document(document) => {
                        file.documents += 1;
                        file.tokens += document.tokens.len() as u64;
                        file.text_bytes += document.text_bytes;
                    }
                    // A build would stop here.
                    Item::Dropped(dropped) if stops(only, &dropped.reason) => {
                        let place = || only.sources[0].files[0].shown.clone();
                        return Err(dropped.fault.or_at(place));
                    }
                    Item::Dropped(_) => self.dropped += 1,
                }
            }
            file.bytes = raw_bytes;
            let first = first.get_or_insert(if raw_bytes > 0 { file } else { Sample::default() });
            if raw_bytes - first.bytes >= FILE_BYTES {
                break;
            }
        }
        let first = first.unwrap_or_default();
        self.bytes += file.bytes - first.bytes;
        self.documents += file.documents - first.documents;
        self.tokens += file.tokens - first.tokens;
        self.text_bytes += file.text_bytes - first.text_bytes;
        Ok(())
    }

    /// The count in the sample, scaled to all `bytes` of the source.
    fn of_all(&self, count: u64, bytes: u64) -> u64 {
        let scaled = u128::from(count) * u128::from(bytes) / u128::from(self.bytes.max(1));
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::build;
    use crate::testing::{IN_PARTS, Workbench, json_lines, options};

    /// Of inputs that the sample reads to their end, documents, tokens and parts are those that the build makes.
    #[test]
    fn a_forecast_of_small_inputs_is_what_the_build_makes() {
        let bench = Workbench::new(200);
        bench.write("web-2.jsonl", "");
        let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
        let told = forecast(&corpus, None, 2).unwrap();
        assert!(!bench.path("store").exists() && !bench.path("store.work").exists());
        let crate::Outcome::Built { manifest, .. } =
            build(&corpus, &bench.path("store"), options(2)).unwrap()
        else {
            panic!("built before");
        };
        for (told, made) in told.sources.iter().zip(&manifest.sources) {
            assert_eq!(told.source, made.name);
            assert_eq!(told.tokens, made.train.tokens + made.validation.tokens);
            assert_eq!(told.documents, made.train.documents + made.validation.documents);
            assert_eq!(told.parts, made.parts.len() as u64);
            assert_eq!(told.bytes, made.inputs.iter().map(|input| input.bytes).sum::<u64>());
            assert_eq!(told.sampled_bytes, told.bytes);
        }
        assert_eq!(told.sources.len(), manifest.sources.len());
    }

    /// Steps that compare take memory that does not depend on the documents, and disk that does.
    #[test]
    fn a_forecast_has_the_memory_and_the_disk_of_the_scan() {
        let of = |documents, steps: &str| {
            let bench = Workbench::new(documents);
            let text = std::fs::read_to_string(bench.corpus("")).unwrap() + steps;
            let corpus = Corpus::read(bench.write("corpus.toml", text)).unwrap();
            let Forecast { scan_bytes, memory_bytes, .. } = forecast(&corpus, None, 1).unwrap();
            (scan_bytes, memory_bytes >> 20)
        };
        let near = "[[prepare]]\nstep = \"near-duplicates\"\n";
        let (none, few, more) = (of(60, ""), of(60, near), of(600, near));
        assert!(none.0 == 0 && few.0 > 0 && more.0 == 10 * few.0, "{none:?} {few:?} {more:?}");
        // The rest of the process differs by less.
        for with in [few, more] {
            assert!((none.1 + 200..none.1 + 400).contains(&with.1), "{none:?} {with:?}");
        }
    }

    /// A record at which a build would stop stops this too; where it would be dropped, it is counted.
    #[test]
    fn a_forecast_stops_where_a_build_does() {
        let bench = Workbench::new(30);
        bench.write("web-1.jsonl", json_lines(0, 3) + "{\"text\": \"x\"\n");
        let told = forecast(&Corpus::read(bench.corpus("")).unwrap(), None, 1).unwrap_err();
        assert!(told.to_string().contains("web-1.jsonl:4"), "{told}");
        let skips = Corpus::read(bench.corpus("on_error = \"skip\"")).unwrap();
        let told = &forecast(&skips, None, 1).unwrap().sources[0];
        assert_eq!((told.documents, told.sampled_dropped), (33, 1));
    }

    /// Of large inputs a part is read, and what is scaled from it is near.
    #[test]
    fn a_forecast_of_large_files_reads_little_of_them() {
        let bench = Workbench::new(30);
        bench.write("web-0.jsonl", json_lines(0, 20_000));
        let corpus = Corpus::read(bench.corpus("")).unwrap();
        let told = &forecast(&corpus, None, 1).unwrap().sources[0];
        assert!(told.sampled_bytes < told.bytes / 2, "{told:?}");
        let wanted = 20_000.0 + 15.0;
        assert!((told.documents as f64 / wanted - 1.0).abs() < 0.1, "{told:?}");
    }
}
