//! `zdata inspect --sample`: random documents, and what each step did to them.
//!
//! The documents are sampled by key over all records of a store, so the same command shows the same documents. Each is
//! read again from its file and run through its recipe again; the scan's decisions are looked up.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use contract::{Digest, Fault, Key, Purpose, Result, counted, draw, terminal};
use serde::Serialize;
use store::{Location, Manifest, open};

use crate::assembly::pipeline::held_out;
use crate::assembly::request;
use crate::corpus::{Corpus, Source, drops};
use crate::dedup::{Tools, contaminated, exact, minhash, repeats};
use crate::dropped::{Firsts, Kept, List};
use crate::filters::{self, Dropped};
use crate::recipe::compare::Compare;
use crate::recipe::run::{NoText, Outcome, Passage};
use crate::source::{self, Document, Limits, Parsed, Row, SourceFile};
use crate::tokenize::{Engine, Tokenizer};

/// One record of the sample.
#[derive(Clone, Debug, Serialize)]
pub struct Sampled {
    /// Its source.
    pub source: String,
    /// Its file.
    pub file: String,
    /// Its row group or record batch.
    pub group: Option<u32>,
    /// Its line, or its row in the group.
    pub row: u64,
    /// Its id.
    pub id: Option<String>,
    /// Its text before the first step.
    pub text: String,
    /// What each step did, up to the one that removed it.
    pub steps: Vec<Effect>,
    /// `train`, `validation` or why it is dropped.
    pub outcome: String,
    /// Its tokens, including those put around it; none if it is dropped.
    pub tokens: Option<usize>,
}

/// What one step did to one document.
#[derive(Clone, Debug, Serialize)]
pub struct Effect {
    /// The step.
    pub step: String,
    /// `kept`, `changed` or `removed`.
    pub did: &'static str,
    /// Why it was removed.
    pub reason: Option<String>,
    /// What was found, if it was removed.
    pub found: Option<String>,
    /// The text after a step that changed it.
    pub text: Option<String>,
}

/// `count` records of a store, sampled with `seed`, and what the steps of `corpus` do to them.
pub fn sample(
    corpus: &Corpus,
    store: &Location,
    manifest: &Manifest,
    count: u64,
    seed: u64,
) -> Result<Vec<Sampled>> {
    same_request(corpus, manifest)?;
    let chats = corpus.sources.iter().any(|source| source.recipe.means_controls());
    let tokenizer = Tokenizer::read(store.join(open::TOKENIZER), Engine::Fastest)?;
    let tokenizer = tokenizer.with_controls(chats, Engine::Fastest)?;
    let around = [manifest.tokenizer.begin, manifest.tokenizer.end].iter().flatten().count();
    let tokens = |controls, text: &str| Ok(tokenizer.of(controls)?.encode(text)?.len() + around);
    let tools = Tools::new(corpus, Some(Box::new(tokens)))?;
    let chosen = choose(manifest, count, seed);
    let mut found = Vec::new();
    for (number, source) in corpus.sources.iter().enumerate() {
        let mut wanted: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for (_, file, row) in chosen.iter().filter(|(chosen, _, _)| *chosen == number) {
            wanted.entry(*file).or_default().push(*row);
        }
        let scanned = source.recipe.scanned() > 0 && !wanted.is_empty();
        let (list, kept) = match scanned {
            true => List::of(store, &manifest.sources[number])?,
            false => (List::default(), Firsts::new()),
        };
        let tokenizer = tokenizer.of(source.recipe.means_controls())?;
        let teller = Teller { corpus, source, tools: &tools, tokenizer, around, list, kept };
        for (file, rows) in wanted {
            let was = manifest.sources[number].inputs.get(file);
            if was.map(|was| (was.bytes, was.sha256)) != Some(source.files[file].content()?) {
                return Err(changed(&source.files[file]));
            }
            teller.file(file, &rows, &mut found)?;
        }
    }
    Ok(found)
}

/// Refuses a corpus file that differs from the one the store was built from.
fn same_request(corpus: &Corpus, manifest: &Manifest) -> Result<()> {
    let old = manifest
        .sources
        .iter()
        .map(|source| (source.name.clone(), source.preparation.clone(), source.inputs.len()));
    let new = corpus.sources.iter().map(|source| {
        (source.name.clone(), request::preparation(corpus, source), source.files.len())
    });
    if old.eq(new) {
        return Ok(());
    }
    Err(Fault::usage("this store was built from another corpus")
        .at(corpus.file.to_string())
        .hint("name the corpus file that it was built from, as it was"))
}

/// The fault for an input that has changed since the build: the store holds another text.
fn changed(file: &SourceFile) -> Fault {
    Fault::mismatch("this input changed since the store was built")
        .at(file.shown.clone())
        .hint("restore the input")
}

/// Source, file and record of each document of the sample, in the order of the store.
fn choose(manifest: &Manifest, count: u64, seed: u64) -> Vec<(usize, usize, u64)> {
    let mut files = Vec::new();
    let mut all = 0;
    for (source, record) in manifest.sources.iter().enumerate() {
        for (file, input) in record.inputs.iter().enumerate() {
            files.push((all, source, file));
            all += input.documents;
        }
    }
    let key = Key::from_seed(seed).child("sample");
    let mut chosen = std::collections::BTreeSet::new();
    let mut index = 0;
    while (chosen.len() as u64) < count.min(all) {
        // Multiply and shift: as uniform as 64 bits can be.
        let drawn = (u128::from(draw(key, Purpose::Prepare, index)) * u128::from(all)) >> 64;
        chosen.insert(drawn as u64);
        index += 1;
    }
    let place = |record: u64| {
        let (first, source, file) = files[files.partition_point(|file| file.0 <= record) - 1];
        (source, file, record - first)
    };
    chosen.into_iter().map(place).collect()
}

/// Shows the documents of one source.
struct Teller<'a> {
    corpus: &'a Corpus,
    source: &'a Source,
    tools: &'a Tools<'a>,
    tokenizer: &'a Tokenizer,
    around: usize,
    list: List,
    kept: Firsts,
}

impl Teller<'_> {
    /// The records `rows` (counted from 0, sorted) of a file.
    fn file(&self, number: usize, rows: &[u64], found: &mut Vec<Sampled>) -> Result<()> {
        let file = &self.source.files[number];
        let limits =
            Limits { max_document_bytes: self.corpus.max_document_bytes, ..Limits::default() };
        let mut input = source::open(&file.path, file.format, &self.source.fields, &limits)?;
        let (mut passed, mut wanted) = (0, rows.iter().copied().peekable());
        while wanted.peek().is_some() {
            let Some(slab) = input.next_slab()? else {
                return Err(changed(file));
            };
            for parsed in slab.parse(&self.source.fields)? {
                if wanted.next_if_eq(&passed).is_some() {
                    found.push(match parsed {
                        Parsed::Document(document) => self.document(number, document)?,
                        Parsed::Dropped { reason, row, fault, .. } => {
                            self.dropped(number, row, reason, &fault)
                        }
                    });
                }
                passed += 1;
            }
        }
        Ok(())
    }

    /// A record of which only the position is known.
    fn at(&self, number: usize, Row { group, row }: Row) -> Sampled {
        Sampled {
            source: self.source.name.clone(),
            file: self.source.files[number].shown.clone(),
            group,
            row,
            id: None,
            text: String::new(),
            steps: Vec::new(),
            outcome: String::new(),
            tokens: None,
        }
    }

    fn dropped(&self, number: usize, row: Row, reason: &str, fault: &Fault) -> Sampled {
        let outcome = format!("dropped: {reason}: {}", fault.what());
        Sampled { outcome, ..self.at(number, row) }
    }

    fn document(&self, number: usize, mut document: Document) -> Result<Sampled> {
        let row = Row { group: document.group, row: document.row };
        if let Err(NoText { reason, fault }) = self.source.recipe.text(&mut document) {
            return Ok(self.dropped(number, row, reason, &fault));
        }
        let (id, text) = (document.id.clone(), document.text.clone());
        let mut sampled = Sampled { id, text, ..self.at(number, row) };
        let recipe = &self.source.recipe;
        let mut telling = Telling { teller: self, file: number, effects: Vec::new() };
        let steps = 0..recipe.steps.len();
        let outcome = recipe.run(steps, &mut document, self.tools.count(), &mut telling)?;
        sampled.steps = telling.effects;
        match outcome {
            Outcome::Through => {}
            Outcome::Dropped { dropped, .. } => {
                sampled.outcome = format!("dropped: {}", dropped.reason);
                return Ok(sampled);
            }
            Outcome::Refused(fault) => {
                let fault = drops(fault)?;
                sampled.outcome = format!("dropped: refused by the tokenizer: {fault}");
                return Ok(sampled);
            }
        }
        let validation =
            held_out(Digest::of_bytes(document.text.as_bytes()), self.corpus.validation);
        sampled.outcome = if validation { "validation" } else { "train" }.to_owned();
        let tokens = self.tokenizer.encode(&document.text)?.len();
        sampled.tokens = (tokens > 0).then_some(tokens + self.around);
        if tokens == 0 {
            sampled.outcome = "dropped: no tokens".to_owned();
        }
        Ok(sampled)
    }

    fn shown(&self, kept: &Kept) -> String {
        let source = self.corpus.sources.iter().find(|source| source.name == kept.source);
        let file = source.and_then(|source| source.files.get(kept.file));
        let file = file.map_or("unknown file", |file| file.shown.as_str());
        let group = kept.group.map_or(String::new(), |group| format!(" group {group}"));
        format!("{} {file}{group} row {}", kept.source, kept.row)
    }
}

/// Records what every step did; the scan's decisions are looked up in its list.
struct Telling<'a> {
    teller: &'a Teller<'a>,
    file: usize,
    effects: Vec<Effect>,
}

impl Passage for Telling<'_> {
    fn compare(
        &mut self,
        number: usize,
        step: &Compare,
        document: &Document,
    ) -> Result<filters::Effect> {
        if matches!(step, Compare::Decontaminate(_)) {
            return contaminated(self.teller.tools, number, &document.text);
        }
        if matches!(step, Compare::Repeats(_)) {
            let rest = self.teller.list.rest(self.file, document)?;
            return Ok(filters::changed(rest, repeats::EMPTIED));
        }
        let (group, row) = (document.group, document.row);
        // The list has the reasons of all steps; only that of this step belongs here.
        let reason = match step {
            Compare::Exact(_) => exact::REASON,
            _ => minhash::REASON,
        };
        if self.teller.list.reason(self.file, group, row) != Some(reason) {
            return Ok(filters::Effect::Kept);
        }
        let kept = self.teller.kept.get(&(self.file, group, row));
        let kept = kept.map_or(String::new(), |kept| self.teller.shown(kept));
        Ok(filters::Effect::Dropped(Dropped::new(reason, kept)))
    }

    fn hear(&mut self, place: usize, _: &Document, effect: &filters::Effect) {
        let step = self.teller.source.recipe.step_name(place);
        let kept = Effect { step, did: "kept", reason: None, found: None, text: None };
        self.effects.push(match effect {
            filters::Effect::Kept => kept,
            filters::Effect::Changed(text) => {
                Effect { did: "changed", text: Some(text.clone()), ..kept }
            }
            filters::Effect::Dropped(Dropped { reason, found }) => Effect {
                did: "removed",
                reason: Some((*reason).to_owned()),
                found: Some(found.clone()).filter(|found| !found.is_empty()),
                ..kept
            },
        });
    }
}

/// The sample for users.
pub fn text(sample: &[Sampled]) -> String {
    let mut out = String::new();
    for sampled in sample {
        let Sampled { source, file, group, row, id, text, steps, outcome, tokens } = sampled;
        let group = group.map_or(String::new(), |group| format!(" group {group}"));
        let id = id.as_ref().map_or(String::new(), |id| format!(" id {id:?}"));
        let _ = writeln!(out, "{source} {}{group} row {row}{id}", terminal::name(file));
        let _ = writeln!(out, "  read     {}  {}", counted(text.len(), "byte"), shortened(text));
        let mut before = text.as_str();
        for effect in steps {
            let _ = write!(out, "  {:<24} {}", effect.step, effect.did);
            if let Some(reason) = &effect.reason {
                let found = effect.found.as_deref().unwrap_or("");
                let _ = write!(out, "  {reason} ({})", shortened(found));
            }
            if let Some(after) = &effect.text {
                let (old, new) = difference(before, after);
                let _ = write!(out, "  {} to {}", before.len(), counted(after.len(), "byte"));
                let _ = write!(out, "\n    - {}\n    + {}", shortened(old), shortened(new));
                before = after;
            }
            out.push('\n');
        }
        let tokens = tokens.map_or(String::new(), |n| format!(", {}", counted(n, "token")));
        let _ = writeln!(out, "  = {outcome}{tokens}\n");
    }
    out
}

/// The first characters of a text, on one line.
fn shortened(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars().take(90) {
        if c.is_control() { shown.extend(c.escape_debug()) } else { shown.push(c) }
    }
    if text.chars().nth(90).is_some() {
        shown += " ...";
    }
    shown
}

/// Both texts, starting a little before their first difference.
fn difference<'a>(before: &'a str, after: &'a str) -> (&'a str, &'a str) {
    let same = before.bytes().zip(after.bytes()).take_while(|(a, b)| a == b).count();
    let from = before.floor_char_boundary(same.saturating_sub(30)).min(after.len());
    (&before[from..], &after[after.floor_char_boundary(from)..])
}
