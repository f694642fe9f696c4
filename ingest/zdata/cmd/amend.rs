//! `zdata amend`: appends an amendment to a curriculum, after showing what it leaves and what it changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use contract::{Fault, Ratio, Result, counted, note, shell};
use curriculum::{AddedStore, Amendment, ChangedHyperparameter, NumbersChange};
use ingest::progress::meanwhile;
use loader::{OpenedCurriculum, Stores, hidden_by, steps_without_labels, without_labels};
use mixer::{DataPlan, Mix};
use serde::Serialize;
use settings::File;
use store::{Location, Split, Store, disk, regular};

use super::beside::{held, ledger_beside, refuse_recorded};
use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Examples: zdata amend run.toml --step 500 --ban web-1234\n          \
    zdata amend run.toml --step 500 --mix web=1,math=3\n          \
    zdata amend run.toml --step 500 --store ../more --mix web=2,extra=1\n          \
    zdata amend run.toml --step 500 --set optimizer.lr=3e-4 --set optimizer.clip=0.5\n          \
    zdata amend run.toml --skip 500\n\n\
    Every step before stays as it is. The amendment is appended to the file, comments and all; \
    `ztrain` takes it as long as the run has not come to the step.")]
pub(crate) struct Args {
    /// The curriculum.
    #[arg(value_parser = super::local("copy it here and amend the copy: an object is never replaced"))]
    curriculum: PathBuf,
    /// The first step that changes.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..), required_unless_present = "skip")]
    step: Option<u64>,
    /// Hide the document with this id from then on, SOURCE:ID where several sources have one; may be given several
    /// times.
    #[arg(long, value_name = "ID")]
    ban: Vec<String>,
    /// Look for these documents in this source only.
    #[arg(long, value_name = "NAME", requires = "ban")]
    source: Option<String>,
    /// The whole mix from then to the end of the phase: web=7,math=3 (integers, decimals or 3/10).
    #[arg(long, value_name = "MIX", value_parser = mix)]
    mix: Option<BTreeMap<String, Ratio>>,
    /// A further store, whose sources mixes may name from then on.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    store: Option<Location>,
    /// Train by another number from then on: optimizer.lr, optimizer.clip, schedule.kind, schedule.warmup_steps,
    /// schedule.stable_steps, schedule.decay_steps, schedule.decay_shape, schedule.final_lr, skip_step.window,
    /// skip_step.sigma, skip_step.non_finite, auto_clip.window, auto_clip.percentile or dtype; may be given several
    /// times. Rates are those of a schedule that had it from its beginning; windows that come new begin empty.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Let this one step move nothing, whatever its loss and gradient are; instead of --step.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "step")]
    skip: Option<u64>,
    /// Show the proof and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The answer; `--json` prints it as it is.
#[derive(Serialize)]
struct Proof {
    step: u64,
    amendment: usize,
    /// The plan digest up to the step before: the same with the amendment and without.
    digest_before: String,
    /// The plan digest of the whole run, without and with it.
    digest_of_run: [String; 2],
    sources: Vec<SourceRow>,
    /// Tokens that steps read once more than without the amendment, because a source begins anew.
    repeated: u64,
    /// Tokens that some step read, and none does any more.
    left_out: u64,
    banned: Vec<BanRow>,
    /// Numbers that change with the step.
    numbers: Vec<ChangedHyperparameter>,
    /// Whether the step moves nothing.
    skip: bool,
    /// Steps of the whole run that have no labels then, and so move nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    without_labels: Vec<u64>,
    written: bool,
}

#[derive(Serialize)]
struct SourceRow {
    name: String,
    /// Taken before the step.
    before: u64,
    /// Taken from the step on, without the amendment and with it.
    after: [u64; 2],
    /// Epochs at the end of the run, without the amendment and with it.
    epochs: [f64; 2],
}

#[derive(Serialize)]
struct BanRow {
    id: String,
    source: String,
    document: u64,
    origin: String,
    /// Its tokens that later steps would have seen.
    tokens: u64,
    labels: u64,
}

/// A document that is to be banned.
struct FoundDocument {
    id: String,
    source: String,
    document: u64,
    origin: String,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    // The file itself is replaced, not a link to it.
    let path = args.curriculum.canonicalize();
    let path = path.map_err(|error| Fault::io("read", &args.curriculum, &error))?;
    let mut before = super::opened(&Location::from(args.curriculum.as_path()))?;
    // Clap has one of the two.
    let step = args.step.or(args.skip).unwrap_or_default();
    refuse_recorded(&path, step, before.plan.steps())?;
    let found = match args.ban.is_empty() {
        true => Vec::new(),
        false => {
            let stores = before.stores()?;
            meanwhile("amend", "searching for documents", || documents(stores, &args))?
        }
    };
    let mut ban: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for banned in &found {
        ban.entry(banned.source.clone()).or_default().insert(banned.document);
    }
    let store = args.store.as_ref().map(|store| added(store, &path)).transpose()?;
    let mix = args.mix.clone().map(Mix::Constant);
    let numbers = numbers(&args.set)?;
    let skip = args.skip.is_some();
    let amendment = Amendment { step, mix, ban, store, numbers, skip };
    if amendment.is_empty() {
        return Err(Fault::usage("an amendment changes something")
            .wanted("--ban, --mix or --store, --set or --skip"));
    }
    let text = appended(&before.source, &amendment.text()?, &found);
    // What stands in the file is what is planned: an amendment that cannot run is refused here, with its line.
    let lines = before.source.lines().count();
    let place = |fault| of_no_line(fault, &args.curriculum, lines);
    let mut after = OpenedCurriculum::open_text(&args.curriculum, text).map_err(place)?;
    // A mix that reacts has read what follows from the losses of the run.
    if let Some(ledger) = ledger_beside(&path) {
        let run = disk::folder_of(&ledger);
        before.follow(run)?;
        after.follow(run)?;
        after.plan.check_lasting().map_err(place)?;
    }
    let mut proof = Proof::new(&before, &after, step, found)?;
    proof.skip = skip;
    if !args.dry_run {
        let held = held(&path)?;
        replace(&path, &before.source, &after.source)?;
        if let Some(held) = held {
            held.let_go();
        }
        proof.written = true;
    }
    let file = args.curriculum.display().to_string();
    output::answer(args.json, &proof, || proof.text(&file)).map_err(|fault| {
        match proof.written {
            true => fault.after(format_args!("the amendment is written to {file}")),
            false => fault,
        }
    })?;
    if let (true, Some(ledger)) = (proof.written, ledger_beside(&path)) {
        // The file that the run was begun with does not have the amendment.
        let (curriculum, run) =
            (shell::path(&args.curriculum), shell::path(disk::folder_of(&ledger)));
        note!("to go on: ztrain --curriculum {curriculum} --out {run}");
    }
    Ok(())
}

/// The place of a fault in a line that only the amendment would add, so that no file has it yet.
fn of_no_line(fault: Fault, path: &Path, lines: usize) -> Fault {
    let within =
        fault.place().and_then(|place| place.strip_prefix(&format!("{}:", path.display())));
    let line = within.and_then(|within| within.split(':').next()?.parse::<usize>().ok());
    match line.is_some_and(|line| line > lines) {
        true => fault.at(format!("the amendment that {} would get", path.display())),
        false => fault,
    }
}

/// What `--set` changes, each number once: `optimizer.lr=3e-4` as a curriculum would say it.
fn numbers(set: &[String]) -> Result<NumbersChange> {
    let (mut text, mut named) = (String::new(), BTreeMap::new());
    for setting in set {
        let Some((key, value)) = setting.split_once('=') else {
            let fault = Fault::usage("this names no value").at("--set").found(setting);
            return Err(fault.wanted("KEY=VALUE"));
        };
        if let Some(before) = named.insert(key, setting) {
            return Err(Fault::usage("--set names one number twice")
                .at("--set")
                .found(format!("{before} and {setting}"))
                .hint("name each number once; an amendment of another step is another command"));
        }
        // A shell takes quotes away.
        let value = match (value.parse::<u64>(), value.parse::<f64>()) {
            (Ok(count), _) => count.to_string(),
            (_, Ok(number)) => format!("{number:?}"),
            _ => format!("{value:?}"),
        };
        let _ = writeln!(text, "{key} = {value}");
    }
    File::new("--set", text).parse()
}

/// `web=7,math=3/10`.
fn mix(text: &str) -> std::result::Result<BTreeMap<String, Ratio>, String> {
    let mut mix = BTreeMap::new();
    for pair in text.split(',') {
        let (source, weight) = pair
            .rsplit_once('=')
            .ok_or_else(|| format!("expected SOURCE=WEIGHT, found {pair:?}"))?;
        let weight: Ratio = weight.trim().parse()?;
        if weight.is_zero() {
            return Err(format!("the weight of {source} is zero: leave it out"));
        }
        if mix.insert(source.trim().to_owned(), weight).is_some() {
            return Err(format!("{source} stands there twice"));
        }
    }
    Ok(mix)
}

/// The documents with the ids, each of one source.
fn documents(stores: &Stores, args: &Args) -> Result<Vec<FoundDocument>> {
    if let Some(name) = &args.source {
        stores.stream(name, Split::Train)?; // A fault that knows the names, if this is none.
    }
    let mut all: Vec<FoundDocument> = Vec::new();
    for id in &args.ban {
        let Some((source, documents)) = stores.named("--ban", id, args.source.as_deref())? else {
            let what = match &args.source {
                Some(source) => format!("no document of {source} that is trained on has this id"),
                None => "no document that is trained on has this id".to_owned(),
            };
            return Err(Fault::usage(what)
                .at("--ban")
                .found(format!("{id:?}"))
                .hint(
                    "`ztrain replay` and `zdata batch` show ids (without one of its own a document is FILE#ROW, \
                     FILE counting the inputs of its source from 0: 0#2); no step sees held-out text",
                ));
        };
        let stream = stores.stream(source, Split::Train)?;
        for document in documents {
            // One may be named twice.
            if all.iter().any(|known| (known.source.as_str(), known.document) == (source, document))
            {
                continue;
            }
            let record = stream.document(document)?;
            let origin = output::origin(stream.source(), &record);
            let (id, source) = (record.shown_id().into_owned(), source.to_owned());
            all.push(FoundDocument { id, source, document, origin });
        }
    }
    Ok(all)
}

/// A store as the curriculum at `path` names it: by a relative path in its own folder, else by an absolute one.
fn added(store: &Location, path: &Path) -> Result<AddedStore> {
    let digest = Store::open(store)?.manifest().digest.to_string();
    let Location::Local(store) = store else {
        return Ok(AddedStore { path: store.to_string(), digest });
    };
    let whole = store.canonicalize().map_err(|error| Fault::io("resolve", store, &error))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let named = whole.strip_prefix(folder).unwrap_or(&whole);
    Ok(AddedStore { path: named.to_string_lossy().into_owned(), digest })
}

/// The text with the amendment at its end. A comment names the documents, whose numbers tell people nothing.
fn appended(text: &str, amendment: &str, found: &[FoundDocument]) -> String {
    let mut out = text.to_owned();
    if !out.is_empty() && !out.ends_with('\n') {
        out.push('\n');
    }
    out += amendment;
    for FoundDocument { id, source, document, origin } in found {
        let _ = writeln!(out, "# {document} of {source} is {id:?}, {origin:?}");
    }
    out
}

/// Puts `after` in the place of a file that still says `before`; whole at any moment.
fn replace(path: &Path, before: &str, after: &str) -> Result<()> {
    let is_as_before = || {
        let now = regular::read(path).map_err(|error| Fault::io("read", path, &error))?;
        Ok(now == before.as_bytes())
    };
    // A new file would take its place, whatever may be written into this one.
    if fs::metadata(path).is_ok_and(|about| about.permissions().readonly()) {
        return Err(Fault::usage("this file is not to be written")
            .at(path.display().to_string())
            .hint("give it the permission (chmod u+w), or amend a copy"));
    }
    if disk::write_atomic_if(path, after.as_bytes(), is_as_before)? {
        return Ok(());
    }
    Err(Fault::usage("the file was edited meanwhile: nothing was written")
        .at(path.display().to_string())
        .hint("amend it again"))
}

impl Proof {
    /// Holds the plan with the amendment against the one without.
    fn new(
        was: &OpenedCurriculum,
        becomes: &OpenedCurriculum,
        step: u64,
        found: Vec<FoundDocument>,
    ) -> Result<Self> {
        let (before, after): (&DataPlan, &DataPlan) = (&was.plan, &becomes.plan);
        let [old, new] = [before, after].map(|plan| plan.digest_through(step - 1).to_string());
        if old != new {
            return Err(Fault::bug(format!(
                "the amendment of step {step} reaches a step before it"
            ))
            .found(new)
            .wanted(old));
        }
        let (mut repeated, mut left_out) = (0, 0);
        let mut sources = Vec::new();
        for (number, facts) in after.sources().iter().enumerate() {
            let old = before.sources().iter().position(|source| source.name == facts.name);
            let stood = old.map(|old| before.standing(old, step));
            let stands = after.standing(number, step);
            if stood.is_some_and(|stood| stood != stands) {
                return Err(Fault::bug(format!(
                    "{} does not continue at step {step} from its position",
                    facts.name
                )));
            }
            let taken =
                [old.map_or(0, |old| before.tokens_needed(old)), after.tokens_needed(number)];
            let [was, is] = taken.map(|taken| taken.saturating_sub(facts.tokens));
            repeated += is.saturating_sub(was);
            let [was, is] = taken.map(|taken| taken.min(facts.tokens));
            left_out += was.saturating_sub(is);
            sources.push(SourceRow {
                name: facts.name.clone(),
                before: stands.tokens,
                after: taken.map(|taken| taken - stands.tokens),
                epochs: taken.map(|taken| taken as f64 / facts.tokens.max(1) as f64),
            });
        }
        let count = becomes.curriculum.amendments.len();
        let [numbers, then] = [was, becomes].map(|of| of.curriculum.numbers_at(step));
        let numbers = numbers.changed(&then);
        let banned = found
            .into_iter()
            .map(|document| BanRow::new(becomes, document))
            .collect::<Result<_>>()?;
        let digest_of_run =
            [before, after].map(|plan| plan.digest_through(plan.steps()).to_string());
        let (digest_before, written) = (new, false);
        let amendment = count;
        let proof = Proof {
            step,
            amendment,
            digest_before,
            digest_of_run,
            sources,
            repeated,
            left_out,
            banned,
            numbers,
            skip: false,
            without_labels: steps_without_labels(becomes)?,
            written,
        };
        Ok(proof)
    }

    fn text(&self, file: &str) -> String {
        let Proof { step, amendment, digest_before, digest_of_run, sources, banned, .. } = self;
        let mut out = format!("amendment {amendment}, from step {step}\n");
        let _ = writeln!(
            out,
            "  steps 1 to {} stay: plan digest {digest_before} before and after",
            step - 1
        );
        let _ = writeln!(
            out,
            "  the run as a whole: {} becomes {}",
            digest_of_run[0], digest_of_run[1]
        );
        let _ = writeln!(
            out,
            "  {:<20} {:>16} {:>16} {:>16} {:>16}",
            "source", "taken before", "from then: was", "becomes", "epochs in all"
        );
        for SourceRow { name, before, after, epochs } in sources {
            let _ = writeln!(
                out,
                "  {name:<20} {before:>16} {:>16} {:>16} {:>7.4} {:>8.4}",
                after[0], after[1], epochs[0], epochs[1]
            );
        }
        let _ = writeln!(
            out,
            "  tokens that come again: {}; that no step reads any more: {}; every source continues at its position",
            self.repeated, self.left_out
        );
        for BanRow { id, source, document, origin, tokens, labels } in banned {
            let (id, origin) = (output::plain(id), output::plain(origin));
            let _ = writeln!(
                out,
                "  banned: {id}, document {document} of {source}, {origin}: {}, {} not seen",
                counted(*tokens, "token"),
                counted(*labels, "label")
            );
        }
        for ChangedHyperparameter { key, was, becomes } in &self.numbers {
            let _ = writeln!(out, "  {key}: was {was}, becomes {becomes}");
        }
        if self.skip {
            let _ = writeln!(out, "  step {step} moves nothing");
        }
        let without_labels = without_labels(&self.without_labels);
        if !without_labels.is_empty() {
            let _ = write!(out, "  {without_labels}");
        }
        out + &match self.written {
            true => format!("written to {file}\n"),
            false => "nothing was written (--dry-run)\n".to_owned(),
        }
    }
}

impl BanRow {
    fn new(
        opened: &OpenedCurriculum,
        FoundDocument { id, source, document, origin }: FoundDocument,
    ) -> Result<Self> {
        let plan = &opened.plan;
        let ban = plan
            .bans()
            .iter()
            .find(|ban| ban.document == document && plan.sources()[ban.source].name == source);
        let (tokens, labels) = ban.map_or(Ok((0, 0)), |ban| hidden_by(opened, ban))?;
        Ok(BanRow { id, source, document, origin, tokens, labels })
    }
}

#[cfg(test)]
mod tests {
    use storage::crash::Recording;

    use super::*;

    #[test]
    fn the_help_names_every_number_that_may_be_amended() {
        let help = <Args as clap::Args>::augment_args(clap::Command::new("amend"));
        let help = help.clone().render_long_help().to_string();
        for (key, _) in NumbersChange::default().values() {
            assert!(
                help.split(|c: char| ", ;\n".contains(c)).any(|word| word == key),
                "{key}: {help}"
            );
        }
    }

    #[test]
    fn an_amended_file_survives_crashes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("curriculum.toml");
        let before = "seed = 1\n".repeat(90);
        let after = before.clone() + "[[amendment]]\nstep = 7\n";
        fs::write(&path, &before).unwrap();
        let run = || replace(&path, &before, &after);
        let (recording, ran) = Recording::of(folder.path(), run);
        ran.unwrap();
        let mut seen = [0, 0];
        recording.each(60, |_| {
            // One file or the other, whole: the same command then continues or reports that it is done.
            let found = fs::read_to_string(&path).unwrap();
            assert!(found == before || found == after, "{found}");
            seen[usize::from(found == after)] += 1;
            match run() {
                Ok(()) => assert_eq!(found, before),
                Err(fault) => assert!(fault.to_string().contains("edited meanwhile"), "{fault}"),
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), after);
        });
        assert!(seen[0] > 1 && seen[1] > 0, "{seen:?}");
    }

    /// Of several that amend one file at once, one does, and its text is what stands there.
    #[test]
    fn a_file_is_amended_by_one_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("curriculum.toml");
        for round in 0..40 {
            fs::write(&path, "before").unwrap();
            let start = std::sync::Barrier::new(4);
            let amended: Vec<String> = std::thread::scope(|scope| {
                let one = |number| {
                    let (path, start) = (&path, &start);
                    let text = format!("before, {round}").repeat(1 + number * 1000);
                    scope.spawn(move || {
                        start.wait();
                        replace(path, "before", &text).is_ok().then_some(text)
                    })
                };
                let all = [0usize, 1, 2, 3].map(one);
                all.into_iter().filter_map(|one| one.join().unwrap()).collect()
            });
            assert_eq!(amended, [fs::read_to_string(&path).unwrap()]);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
