//! `zdata batch`: what one step trains on, down to file, row and text.

use std::fmt::Write as _;
use std::ops::Range;

use contract::{Fault, Result, counted};
use ingest::tokenize::Decoder;
use loader::explain::{SequencePart, pieces};
use loader::{Infill, RankSlice, Stores};
use mixer::{DataPlan, SampleSpec, StepSpec};
use serde::Serialize;
use store::{Location, Split};

use super::output;
use super::reaction::FollowedRun;

/// Characters of a document's text in the table.
const SHOWN: usize = 96;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Examples: zdata batch curricula/demo.toml --step 12\n          \
    zdata batch curricula/demo.toml --step 12 --sequence 3 --text")]
pub(crate) struct Args {
    /// The curriculum: a path or a URL.
    #[arg(value_parser = super::place())]
    curriculum: Location,
    /// The step, from 1.
    #[arg(long, value_name = "N")]
    step: u64,
    /// Show the part of this rank, from 0.
    #[arg(long, value_name = "R", default_value_t = 0)]
    rank: u32,
    /// How many ranks there are.
    #[arg(long, value_name = "W", default_value_t = 1)]
    world: u32,
    /// Show one sequence only, counted in the step from 0.
    #[arg(long, value_name = "I", conflicts_with_all = ["rank", "world"])]
    sequence: Option<u64>,
    #[command(flatten)]
    follow: FollowedRun,
    /// Print JSON, with token ids, labels, loss mask and the whole text.
    #[arg(long)]
    json: bool,
    /// Print the whole text of each document.
    #[arg(long)]
    text: bool,
}

/// The answer; `--json` prints it as it is.
#[derive(Serialize)]
struct Report {
    step: u64,
    phase: String,
    /// Sequences of the whole step.
    batch: u64,
    micro_batch: u64,
    seq_len: u32,
    first_sample: u64,
    /// The step's digest, if the whole step is shown and there is text.
    digest: Option<String>,
    sequences: Vec<Sequence>,
}

#[derive(Serialize)]
struct Sequence {
    /// Counted in the step.
    sequence: u64,
    sample: u64,
    source: String,
    epoch: u64,
    digest: Option<String>,
    /// Labels that count: what the mean loss is divided by.
    label_count: Option<u64>,
    /// What the losses of its labels are multiplied by, unless that is 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_weight: Option<String>,
    padding: u32,
    /// What the model reads: an id for each place, 0 in padding.
    token_ids: Vec<i32>,
    /// The id that follows each place in its document, 0 where none does.
    labels: Vec<i32>,
    /// 1 where the label counts for the loss.
    loss_mask: Vec<u8>,
    /// Runs of tokens of the source's training stream: first, and one past the last.
    spans: Vec<[u64; 2]>,
    documents: Vec<Document>,
}

/// A run of a document's tokens.
#[derive(Serialize)]
pub(crate) struct Document {
    id: String,
    document: u64,
    file: String,
    row: u64,
    group: Option<u32>,
    bytes: Option<(u64, u64)>,
    origin: String,
    /// Where the run stands in the sequence.
    tokens: [u32; 2],
    /// Where the run stands in the document, and how long that is.
    of_document: [u64; 2],
    document_tokens: u64,
    /// Whether an amendment hides it here: then the model sees padding in its place.
    banned: bool,
    /// How it is rearranged for fill-in-the-middle, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    infill: Option<InfillRow>,
    /// Unless only places are wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// A rearranged run: its parts, in tokens of the document.
#[derive(Serialize)]
pub(crate) struct InfillRow {
    /// `psm` (prefix, suffix, middle) or `spm`.
    mode: &'static str,
    prefix: [u64; 2],
    middle: [u64; 2],
    suffix: [u64; 2],
    /// The tokens that make place for the three sentinels.
    left_out: [u64; 2],
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let opened = args.follow.opened(&args.curriculum)?;
    let plan = &opened.plan;
    let spec = plan.step(args.step).map_err(|fault| fault.or_at(|| opened.file.to_string()))?;
    plan.check_fixed(args.step)?;
    let rows = rows(&args, &spec)?;
    let whole = rows.len() as u64 == spec.batch;
    let (sequences, digest) = match opened.text() {
        None => (positions(plan, &spec, rows)?, None),
        Some(stores) => {
            let (sequences, digest) = explained(plan, stores, &spec, rows)?;
            (sequences, whole.then_some(digest))
        }
    };
    let phase = plan.phases()[spec.phase].name.clone();
    let StepSpec { step, phase: _, first_sample, batch, micro_batch, seq_len } = spec;
    let report =
        Report { step, phase, batch, micro_batch, seq_len, first_sample, digest, sequences };
    output::answer(args.json, &report, || report.text(args.text))
}

/// The rows asked for.
fn rows(args: &Args, spec: &StepSpec) -> Result<Vec<u64>> {
    match args.sequence {
        None => Ok(RankSlice::new(args.rank, args.world)?.rows(spec).collect()),
        Some(sequence) if sequence < spec.batch => Ok(vec![sequence]),
        Some(sequence) => Err(Fault::usage("the step does not have this sequence")
            .found(format!("--sequence {sequence}"))
            .wanted(format!("0 to {}: step {} has {}", spec.batch - 1, spec.step, spec.batch))),
    }
}

/// Sequences of which only the place is known.
fn positions(plan: &DataPlan, spec: &StepSpec, rows: Vec<u64>) -> Result<Vec<Sequence>> {
    let sequence = |row| Ok(Sequence::new(plan, row, &plan.sample(spec.first_sample + row)?));
    rows.into_iter().map(sequence).collect()
}

/// Sequences with documents and text, and the digest of all of them.
fn explained(
    plan: &DataPlan,
    stores: &Stores,
    spec: &StepSpec,
    rows: Vec<u64>,
) -> Result<(Vec<Sequence>, String)> {
    let batch = loader::rows(plan, stores, spec.step, rows.iter().copied())?;
    let all = documents(plan, stores, &batch.samples, true)?;
    let mut sequences = Vec::with_capacity(batch.samples.len());
    for (number, (sample, documents)) in batch.samples.iter().zip(all).enumerate() {
        let mut sequence = Sequence::new(plan, rows[number], sample);
        let mask = batch.row(batch.columns().mask, number as u64);
        sequence.label_count = Some(mask.iter().map(|label| u64::from(*label)).sum());
        sequence.token_ids = batch.row(batch.columns().tokens, number as u64).to_vec();
        sequence.labels = batch.row(batch.columns().labels, number as u64).to_vec();
        sequence.loss_mask = mask.to_vec();
        sequence.digest = Some(batch.sequences[number].to_string());
        sequence.documents = documents;
        sequences.push(sequence);
    }
    Ok((sequences, batch.digest().to_string()))
}

/// The documents of each sample in reading order, with their text if it is wanted.
pub(crate) fn documents(
    plan: &DataPlan,
    stores: &Stores,
    samples: &[SampleSpec],
    text: bool,
) -> Result<Vec<Vec<Document>>> {
    let decoder = if text { Some(Decoder::new(&stores.tokenizer()?)?) } else { None };
    let all = samples.iter().zip(pieces(plan, stores, samples)?);
    let documents = all.map(|(sample, pieces)| {
        let source = &plan.sources()[sample.source].name;
        let pieces = pieces.into_iter();
        pieces.map(|piece| Document::new(decoder.as_ref(), stores, source, piece)).collect()
    });
    documents.collect()
}

impl Sequence {
    /// The sequence without its documents.
    fn new(plan: &DataPlan, sequence: u64, sample: &SampleSpec) -> Self {
        let filled: u32 = sample.spans.iter().map(|span| span.tokens).sum();
        let span = |s: &mixer::Span| [s.start, s.start + u64::from(s.tokens)];
        Sequence {
            sequence,
            sample: sample.sample,
            source: plan.sources()[sample.source].name.clone(),
            epoch: sample.epoch,
            digest: None,
            label_count: None,
            loss_weight: sample
                .objective
                .as_ref()
                .map(|objective| objective.loss_weight.to_string())
                .filter(|weight| weight != "1"),
            padding: sample.seq_len - filled,
            token_ids: Vec::new(),
            labels: Vec::new(),
            loss_mask: Vec::new(),
            spans: sample.spans.iter().map(span).collect(),
            documents: Vec::new(),
        }
    }

    fn text(&self, full: bool) -> String {
        let Sequence { sequence, sample, source, epoch, digest, label_count, .. } = self;
        let Sequence { padding, spans, documents, .. } = self;
        let mut out = format!("sequence {sequence}: sample {sample}, {source}, epoch {epoch}");
        let parts: Vec<String> = spans.iter().map(|[from, to]| format!("{from}..{to}")).collect();
        let _ = write!(out, ", tokens {} of the source", parts.join(" + "));
        if let Some(labels) = label_count {
            let _ = write!(out, ", {}", counted(*labels, "label"));
        }
        if let Some(weight) = &self.loss_weight {
            let _ = write!(out, ", loss weight {weight}");
        }
        if *padding > 0 {
            let _ = write!(out, ", {padding} padding");
        }
        if let Some(digest) = digest {
            let _ = write!(out, ", digest {digest}");
        }
        out.push('\n');
        documents.iter().for_each(|document| out += &document.text(full));
        out
    }
}

impl Document {
    fn new(
        decoder: Option<&Decoder>,
        stores: &Stores,
        source: &str,
        piece: SequencePart,
    ) -> Result<Self> {
        let stream = stores.stream(source, Split::Train)?;
        let text = |decoder: &Decoder| {
            let mut ids = Vec::new();
            stream.read_tokens(piece.tokens.clone(), &mut ids)?;
            decoder.text(&ids)
        };
        let (inner, record) = (piece.in_document(), &piece.record);
        Ok(Document {
            id: record.shown_id().into_owned(),
            document: piece.document,
            file: output::file(stream.source(), record).to_owned(),
            row: record.row,
            group: record.group,
            bytes: record.bytes,
            origin: output::origin(stream.source(), record),
            tokens: [piece.place.start, piece.place.end],
            of_document: [inner.start, inner.end],
            document_tokens: record.tokens,
            banned: piece.banned,
            infill: InfillRow::of(&piece),
            text: decoder.map(text).transpose()?,
        })
    }

    fn text(&self, full: bool) -> String {
        let Document { id, origin, tokens: [from, to], of_document, document_tokens, text, .. } =
            self;
        let banned = if self.banned { " (banned)" } else { "" };
        let infill = self.infill.as_ref().map(|infill| format!(" ({})", infill.text()));
        let infill = infill.unwrap_or_default();
        let part = match of_document {
            [0, end] if end == document_tokens => String::new(),
            [start, end] => format!(" (its {start}..{end} of {document_tokens})"),
        };
        let (id, origin) = (output::plain(id), output::plain(origin));
        let mut out = format!("  {from}..{to}  {id}{part}{banned}{infill}  {origin}\n");
        let text = text.as_deref().unwrap_or_default();
        if full {
            text.lines().for_each(|line| out += &format!("    | {line}\n"));
        } else {
            out += &format!("    {}\n", shortened(text));
        }
        out
    }
}

impl InfillRow {
    /// That of a piece, if it is rearranged.
    pub(crate) fn of(piece: &SequencePart) -> Option<Self> {
        let Infill { mode, prefix, middle, suffix, left_out, tokens: _ } = piece.infill.as_ref()?;
        let first = piece.in_document().start;
        let part = |part: &Range<u32>| [part.start, part.end].map(|token| first + u64::from(token));
        let [prefix, middle, suffix, left_out] = [prefix, middle, suffix, left_out].map(part);
        Some(InfillRow { mode: mode.name(), prefix, middle, suffix, left_out })
    }

    /// On one line.
    pub(crate) fn text(&self) -> String {
        let InfillRow { mode, prefix, middle, suffix, left_out } = self;
        let part = |name: &str, [from, to]: &[u64; 2]| format!("{name} {from}..{to}");
        let parts = [part("prefix", prefix), part("middle", middle), part("suffix", suffix)];
        format!("{mode}: {}, {}", parts.join(", "), part("without", left_out))
    }
}

/// Begin and end of a text, on one line.
fn shortened(text: &str) -> String {
    let line = |part: String| format!("{part:?}");
    let count = text.chars().count();
    if count <= SHOWN {
        return line(text.to_owned());
    }
    let (head, tail) = (SHOWN * 2 / 3, SHOWN / 3);
    let head = line(text.chars().take(head).collect());
    let tail = line(text.chars().skip(count - tail).collect());
    format!("{head} ... {tail}")
}

impl Report {
    fn text(&self, full: bool) -> String {
        let Report { step, phase, batch, micro_batch, seq_len, first_sample, digest, sequences } =
            self;
        let phase = output::plain(phase);
        let (sequences_of, tokens) = (counted(*batch, "sequence"), counted(*seq_len, "token"));
        let samples = match batch {
            1 => format!("sample {first_sample}"),
            _ => format!("samples {first_sample} to {}", first_sample + batch - 1),
        };
        let mut out = format!(
            "step {step}, phase {phase}: {sequences_of} of {tokens}, {micro_batch} in a micro-batch, {samples}\n",
        );
        if let Some(digest) = digest {
            let _ = writeln!(out, "digest {digest}");
        }
        sequences.iter().for_each(|sequence| out += &sequence.text(full));
        out
    }
}
