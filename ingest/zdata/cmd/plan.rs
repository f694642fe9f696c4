//! `zdata plan`: what a curriculum would train on, and whether it can run at all. Reads manifests, and text only where
//! bans leave it open whether a step has labels.

mod buckets;

use std::collections::BTreeMap;
use std::ops::Range;

use contract::Result;
use ingest::inspect::{grouped as count, many};
use loader::{OpenedCurriculum, hidden_by, steps_without_labels, without_labels};
use mixer::{
    Ban, Composition, Curriculum, DataPlan, Mix, MixWeights, PackedLength, PhasePlan, SourceFacts,
};
use serde::Serialize;
use store::Location;

use self::buckets::BucketRow;
use super::output;
use super::reaction::{FollowedRun, ReactionRow};

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata plan curricula/phase1.toml\n\n\
    A store in the curriculum may be a folder, or a store stub: \
    a TOML file of [[source]] name, tokens, documents.\n\n\
    A micro-batch is the sequences of one forward and backward pass. A unit is the run of tokens in which a source is \
    shuffled; every seq_len divides it. [model] is not checked here: `ztrain` knows its keys and checks them at start.")]
pub(crate) struct Args {
    /// The curriculum: a path or a URL.
    #[arg(value_parser = super::place())]
    curriculum: Location,
    #[command(flatten)]
    follow: FollowedRun,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let opened = args.follow.opened(&args.curriculum)?;
    opened.plan.check_lasting()?;
    let report = Report::new(&opened)?;
    output::answer(args.json, &report, || report.text())
}

/// The answer; `--json` prints it as it is.
#[derive(Serialize)]
pub(crate) struct Report {
    steps: u64,
    samples: u64,
    /// Tokens of text, padding left out.
    tokens: u64,
    padding: u64,
    /// The plan digest up to the last step.
    digest: String,
    /// Always false: only `ztrain` knows what `[model]` may say.
    model_checked: bool,
    /// The last step whose data is fixed, where a mix reacts to losses that are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    fixed_until: Option<u64>,
    phases: Vec<PhaseRow>,
    sources: Vec<SourceRow>,
    /// Documents that amendments hide; unknown where stores are stubs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    banned: Vec<BanRow>,
    /// Steps all of whose text is hidden: they move nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    without_labels: Vec<u64>,
}

/// A document that is hidden from a step on.
#[derive(Serialize)]
struct BanRow {
    step: u64,
    source: String,
    document: u64,
    /// Of those taken from the source: what no step sees.
    tokens: u64,
    labels: u64,
}

#[derive(Serialize)]
struct PhaseRow {
    name: String,
    first_step: u64,
    last_step: u64,
    steps: u64,
    seq_len: u32,
    batch: u64,
    /// The batch from each step on at which it changes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    batches: Vec<[u64; 2]>,
    micro_batch: u64,
    context_chunks: u64,
    weight_shards: u64,
    samples: u64,
    tokens: u64,
    padding: u64,
    #[serde(flatten)]
    composition: Composition,
    /// The plan digest up to the phase's last step.
    digest: String,
    /// The curve of a ramp: `linear`, `cosine` or `table`.
    #[serde(skip_serializing_if = "Option::is_none")]
    curve: Option<&'static str>,
    /// How it reacts to the loss, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    reaction: Option<ReactionRow>,
    sources: Vec<UseRow>,
}

#[derive(Serialize)]
struct UseRow {
    name: String,
    /// The weight at the phase's first sample.
    #[serde(flatten)]
    weight: WeightRow,
    /// Behind its last one, where the mix is a ramp.
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<WeightRow>,
    samples: u64,
    tokens: u64,
    padding: u64,
    #[serde(flatten)]
    composition: Composition,
    epochs_before: f64,
    epochs_after: f64,
}

#[derive(Serialize)]
struct WeightRow {
    /// The weight as an integer, without a divisor that all weights of the phase share.
    weight: u64,
    /// The same as the curriculum says it; 0 where a mix lacks the source.
    typed: String,
    share: f64,
}

#[derive(Serialize)]
struct SourceRow {
    name: String,
    tokens: u64,
    documents: u64,
    unit: u64,
    taken: u64,
    epochs: f64,
    /// The least `max_epochs` that would do.
    epochs_needed: u64,
    max_epochs: u64,
    /// Of a bucket: what it is cut from.
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<BucketRow>,
    /// Of each length at which its documents are packed, where they are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    packed: Vec<PackedRow>,
    /// What it asks the model to predict, where that is not each next token.
    #[serde(skip_serializing_if = "Option::is_none")]
    objective: Option<String>,
}

/// What there is of a packed source at one length.
#[derive(Serialize)]
struct PackedRow {
    seq_len: u32,
    documents: u64,
    /// Documents longer than a sequence.
    cut: u64,
    sequences: u64,
    tokens: u64,
    padding: u64,
    /// Sequences that the run takes, repeats included.
    taken: u64,
}

impl Report {
    pub(crate) fn new(opened: &OpenedCurriculum) -> Result<Self> {
        let (plan, curriculum): (&DataPlan, &Curriculum) = (&opened.plan, &opened.curriculum);
        let mixes: BTreeMap<String, Mix> =
            curriculum.segments().into_iter().map(|it| (it.mix_key, it.spec.mix)).collect();
        // One row for all batches and windows of a mix.
        let mut first = 0;
        let rows = plan.phases().chunk_by(|one, next| one.mix_key == next.mix_key);
        let rows = rows.map(|parts| {
            first += parts.len();
            PhaseRow::new(plan, curriculum, first - parts.len()..first, &mixes[&parts[0].mix_key])
        });
        let phases: Vec<PhaseRow> = rows.collect();
        let source = |(index, facts): (usize, &SourceFacts)| {
            let SourceFacts { name, tokens, documents, unit, .. } = facts.clone();
            let taken = plan.tokens_needed(index);
            Ok(SourceRow {
                max_epochs: curriculum.max_epochs(&name),
                epochs_needed: plan.epochs_needed(index),
                epochs: epochs(taken, tokens),
                packed: PackedRow::all(plan, index),
                bucket: BucketRow::new(opened, &name)?,
                objective: plan.objective(index).map(ToString::to_string),
                name,
                tokens,
                documents,
                unit,
                taken,
            })
        };
        let banned = plan.bans().iter().map(|ban| BanRow::new(opened, ban));
        let sources = plan.sources().iter().enumerate().map(source);
        Ok(Report {
            steps: plan.steps(),
            samples: plan.samples(),
            tokens: phases.iter().map(|phase| phase.tokens).sum(),
            padding: phases.iter().map(|phase| phase.padding).sum(),
            digest: plan.digest_through(plan.steps()).to_string(),
            model_checked: false,
            sources: sources.collect::<Result<_>>()?,
            banned: banned.collect::<Result<_>>()?,
            without_labels: steps_without_labels(opened)?,
            fixed_until: Some(plan.fixed_until()).filter(|last| *last < plan.steps()),
            phases,
        })
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for phase in &self.phases {
            out += &phase.text();
        }
        let head = ["source", "tokens", "documents", "taken", "epochs", "at most"];
        let rows = self.sources.iter().map(|source| {
            let SourceRow { name, tokens, documents, taken, epochs, max_epochs, .. } = source;
            [
                output::plain(name),
                count(*tokens),
                count(*documents),
                count(*taken),
                decimals(*epochs),
                count(*max_epochs),
            ]
        });
        out += "sources, over the whole run\n";
        out += &table(head, rows.collect());
        out += &buckets::text(&self.sources);
        for SourceRow { name, packed, .. } in &self.sources {
            if !packed.is_empty() {
                out += &format!("{name}, packed by best fit\n");
                let head =
                    ["seq_len", "documents", "cut", "sequences", "tokens", "padding", "taken"];
                out += &table(head, packed.iter().map(PackedRow::cells).collect());
                for row in packed.iter().filter(|row| row.documents > 0 && row.taken == 0) {
                    out += &format!(
                        "no phase reads sequences of {}: {} packed into them, never trained on\n",
                        many(u64::from(row.seq_len), "token"),
                        many(row.documents, "document")
                    );
                }
            }
        }
        for SourceRow { name, objective, .. } in &self.sources {
            if let Some(objective) = objective {
                out += &format!("{}: {objective}\n", output::plain(name));
            }
        }
        let Report { steps, samples, tokens, padding, digest, .. } = self;
        out += &format!(
            "\n{}, {}, {} of text, {} of padding\nplan digest {digest}\n",
            many(*steps, "step"),
            many(*samples, "sequence"),
            many(*tokens, "token"),
            count(*padding)
        );
        out += "[model] is not checked here: `ztrain` checks it at start\n";
        for BanRow { step, source, document, tokens, labels } in &self.banned {
            out += &format!(
                "from step {} document {document} of {source} is banned: {}, {} not seen\n",
                count(*step),
                many(*tokens, "token"),
                many(*labels, "label")
            );
        }
        out + &without_labels(&self.without_labels)
    }
}

impl PackedRow {
    /// A row for each length at which the documents of a source are packed: none where they are not.
    fn all(plan: &DataPlan, source: usize) -> Vec<PackedRow> {
        let Some(packs) = plan.packs(source) else { return Vec::new() };
        let taken = plan.standing(source, plan.steps() + 1).cursor.packs;
        let row = |(number, length): (usize, &PackedLength)| {
            let (sequences, tokens) = (length.packs(), length.tokens());
            PackedRow {
                seq_len: length.seq_len,
                documents: length.documents,
                cut: length.cut,
                sequences,
                tokens,
                padding: sequences * u64::from(length.seq_len) - tokens,
                taken: taken.get(number).copied().unwrap_or_default(),
            }
        };
        packs.lengths().iter().enumerate().map(row).collect()
    }

    fn cells(&self) -> [String; 7] {
        let PackedRow { seq_len, documents, cut, sequences, tokens, padding, taken } = *self;
        [u64::from(seq_len), documents, cut, sequences, tokens, padding, taken].map(count)
    }
}

impl BanRow {
    fn new(opened: &OpenedCurriculum, ban: &Ban) -> Result<Self> {
        let (tokens, labels) = hidden_by(opened, ban)?;
        let source = opened.plan.sources()[ban.source].name.clone();
        Ok(BanRow { step: ban.step, source, document: ban.document, tokens, labels })
    }
}

impl PhaseRow {
    /// The row of consecutive segments of one mix.
    fn new(plan: &DataPlan, curriculum: &Curriculum, segments: Range<usize>, mix: &Mix) -> Self {
        let (parts, curve) = (&plan.phases()[segments.clone()], mix.curve());
        let (phase, last) = (&parts[0], &parts[parts.len() - 1]);
        let mut composition = Composition::default();
        let sources: Vec<UseRow> = (0..phase.uses.len())
            .map(|entry| {
                let (mut of_source, mut samples, mut tokens) = (Composition::default(), 0, 0);
                let source = phase.uses[entry].source;
                for (index, part) in segments.clone().zip(parts) {
                    // A source that ran out is in no later window.
                    let used = part.uses.iter().position(|one| one.source == source);
                    let Some(entry) = used else { continue };
                    of_source += plan.composition(index, entry);
                    samples += part.uses[entry].samples;
                    tokens += part.uses[entry].tokens;
                }
                composition += of_source;
                let facts = &plan.sources()[source];
                let [weight, end] = weights(phase, last, curriculum, entry, &facts.name);
                let before = phase.uses[entry].tokens_before;
                UseRow {
                    name: facts.name.clone(),
                    weight,
                    end: curve.is_some().then_some(end),
                    samples,
                    tokens,
                    padding: samples * u64::from(phase.seq_len) - tokens,
                    composition: of_source,
                    epochs_before: epochs(before, facts.tokens),
                    epochs_after: epochs(before + tokens, facts.tokens),
                }
            })
            .collect();
        let sizes = parts.chunk_by(|one, next| one.batch == next.batch);
        let batches: Vec<_> = sizes.map(|parts| [parts[0].first_step, parts[0].batch]).collect();
        PhaseRow {
            name: phase.name.clone(),
            first_step: phase.first_step,
            last_step: last.last_step(),
            steps: parts.iter().map(|part| part.steps).sum(),
            seq_len: phase.seq_len,
            batch: phase.batch,
            batches: if batches.len() > 1 { batches } else { Vec::new() },
            micro_batch: phase.micro_batch,
            context_chunks: phase.context_chunks,
            weight_shards: phase.weight_shards,
            samples: parts.iter().map(PhasePlan::samples).sum(),
            tokens: sources.iter().map(|source| source.tokens).sum(),
            padding: sources.iter().map(|source| source.padding).sum(),
            composition,
            digest: plan.digest_through(last.last_step()).to_string(),
            curve,
            reaction: mix.reaction().map(|reaction| ReactionRow::new(plan, phase, last, reaction)),
            sources,
        }
    }

    fn text(&self) -> String {
        let PhaseRow { name, first_step, last_step, steps, seq_len, micro_batch, .. } = self;
        let name = output::plain(name);
        let mut out = format!(
            "phase {name}: {}, {} to {}; {} of {} in a step, {} in a micro-batch{}{}\n",
            many(*steps, "step"),
            count(*first_step),
            count(*last_step),
            self.batch_text(),
            many(u64::from(*seq_len), "token"),
            count(*micro_batch),
            self.cut(),
            self.curve.map_or_else(String::new, |curve| format!("; a {curve} ramp"))
        );
        let head =
            ["source", "weight", "share", "sequences", "tokens", "padding", "epochs from", "to"];
        let mut rows: Vec<[String; 8]> = self.sources.iter().map(UseRow::cells).collect();
        let mut total = ["", "", "100.00 %"].map(str::to_owned).to_vec();
        total.extend([self.samples, self.tokens, self.padding].map(count));
        total.extend([String::new(), String::new()]);
        rows.extend(<[String; 8]>::try_from(total));
        out += &table(head, rows);
        out += &self.made_of();
        out += &self.reaction.as_ref().map_or_else(String::new, ReactionRow::text);
        out + "\n"
    }

    /// The sequences in a step: all sizes in their order, or the least and the greatest of many.
    fn batch_text(&self) -> String {
        let sizes: Vec<u64> = self.batches.iter().map(|[_, size]| *size).collect();
        let (least, most) = (sizes.iter().min(), sizes.iter().max());
        match (least, most) {
            (Some(least), Some(most)) if sizes.len() > 4 => {
                let each = format!("{} to {}", count(*least), many(*most, "sequence"));
                format!("{each} ({})", many(sizes.len() as u64, "size"))
            }
            (Some(_), Some(_)) => {
                sizes.iter().map(|size| count(*size)).collect::<Vec<_>>().join(", ") + " sequences"
            }
            _ => many(self.batch, "sequence"),
        }
    }

    /// What its sequences are made of, in shares of them all.
    fn made_of(&self) -> String {
        let share = |count: u64| format!("{:.2} %", count as f64 / self.samples as f64 * 100.0);
        let Composition { contiguous, joined, padded } = self.composition;
        format!(
            "  sequences: {} contiguous text, {} joined from several pieces, {} padded at the end\n",
            share(contiguous),
            share(joined),
            share(padded)
        )
    }

    /// How a micro-batch is cut inside, if it is.
    fn cut(&self) -> String {
        match (self.context_chunks, self.weight_shards) {
            (1, 1) => String::new(),
            (chunks, shards) => {
                format!(
                    ", cut into {} and {}",
                    many(chunks, "context chunk"),
                    many(shards, "weight shard")
                )
            }
        }
    }
}

impl UseRow {
    fn cells(&self) -> [String; 8] {
        let UseRow { name, weight, end, samples, tokens, padding, .. } = self;
        let at = |of: &dyn Fn(&WeightRow) -> String| {
            let all: Vec<String> = std::iter::once(weight).chain(end).map(of).collect();
            all.join(" to ")
        };
        [
            output::plain(name),
            at(&|weight| output::plain(&weight.typed)),
            at(&|weight| format!("{:.2}", weight.share * 100.0)) + " %",
            count(*samples),
            count(*tokens),
            count(*padding),
            decimals(self.epochs_before),
            decimals(self.epochs_after),
        ]
    }
}

/// The weights of a source, which has the number `entry` in the phase, at the two ends of a mix: its first and last
/// segment.
fn weights(
    phase: &PhasePlan,
    last: &PhasePlan,
    curriculum: &Curriculum,
    entry: usize,
    name: &str,
) -> [WeightRow; 2] {
    let row = |weights: &[u64], side: &str, segment: &PhasePlan, sample: u64| {
        let typed = |name: &str| {
            let typed = |side| curriculum.typed(&format!("{}{side}.{name}", phase.mix_key));
            typed(side).or_else(|| typed(".start")).map(unquoted)
        };
        // A bucket that the mix does not name has a part of the weight of its source.
        let part = || Some(format!("of {}", typed(curriculum.bucket(name)?.0)?));
        WeightRow {
            weight: weights[entry],
            typed: typed(name).or_else(part).unwrap_or_else(|| weights[entry].to_string()),
            share: segment.mixing.share(entry, sample),
        }
    };
    let end = last.samples();
    match phase.mixing.weights() {
        MixWeights::Constant(weights) => [row(weights, "", phase, 0), row(weights, "", phase, 0)],
        MixWeights::Ramp { from, to, knots: _ } => {
            [row(from, ".from", phase, 0), row(to, ".to", last, end)]
        }
    }
}

/// A value as typed, without the quotes of a string.
fn unquoted(typed: &str) -> String {
    typed.trim_matches(['"', '\'']).to_owned()
}

fn epochs(taken: u64, tokens: u64) -> f64 {
    if tokens == 0 { 0.0 } else { taken as f64 / tokens as f64 }
}

fn decimals(value: f64) -> String {
    format!("{value:.4}")
}

/// Columns as wide as they need to be: the first to the left, numbers to the right.
fn table<const N: usize>(head: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(rows);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    let mut out = String::new();
    for line in &lines {
        let mut text = format!("  {:<1$}", line[0], widths[0]);
        for (cell, width) in line.iter().zip(&widths).skip(1) {
            text += &format!("  {cell:>width$}");
        }
        out += text.trim_end();
        out.push('\n');
    }
    out
}
