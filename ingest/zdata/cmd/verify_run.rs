//! `zdata verify-run`: recomputes of a run what needs no tensors: every data digest and label count from its curriculum
//! and stores, learning rates and skipped steps from the lines of its ledger; and holds the ledger against every
//! checkpoint there is. Needs no GPU, no libtorch.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, chain, counted, note, shell, words};
use curriculum::Phase;
use ingest::progress::{Measure, Progress, meanwhile};
use loader::open::no_run;
use loader::{OpenedCurriculum, StepSummary};
use mixer::{Curriculum, CurriculumDifference, DataPlan};
use serde::Deserialize;
use store::{Location, regular};

use super::recorded::{Rules, Step, Witnesses, labels_digest};
use super::{digest, output};

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Examples: zdata verify-run runs/demo\n          \
    zdata verify-run runs/demo --store /mnt/moved/store")]
pub(crate) struct Args {
    /// The run's folder.
    #[arg(value_parser = super::local("copy the run here: its checkpoints may stay where they are"))]
    run: PathBuf,
    /// Where a store is now, if it was moved; once for each store of the run, in the order of its run.toml.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    store: Vec<Location>,
    /// Threads; they change the speed, never a digest.
    #[arg(long, value_name = "N", value_parser = super::workers, default_value_t = digest::default_workers())]
    workers: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What is read of the ledger's first line.
#[derive(Deserialize)]
struct Head {
    kind: String,
    /// The version of the plan; a head that does not say has the first.
    #[serde(default = "first_plan")]
    plan: u32,
    curriculum: String,
    stores: Vec<Identity>,
}

fn first_plan() -> u32 {
    1
}

/// A ledger whose chain holds.
struct Ledger {
    path: PathBuf,
    head: Head,
    /// The data digest of step 1, 2, ..., and that of its labels.
    data: Vec<(Digest, Digest)>,
    /// The curricula that came into force later, with their first steps.
    edits: Vec<(u64, String)>,
    chain: Digest,
    torn: bool,
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let path = args.run.join("ledger.jsonl");
    if !path.exists() {
        return Err(no_run(&args.run, "ledger.jsonl"));
    }
    // Before the ledger is read: a run that continues meanwhile writes its next checkpoint only after its lines.
    let kept = Witnesses::find(&args.run)?;
    let ledger = meanwhile("verify-run", "reading the ledger", || Ledger::read(&path, &kept))?;
    if ledger.torn {
        note!(
            "note: the last line of the ledger is torn, as a kill leaves it; the run removes it when it continues"
        );
    }
    ends_behind(&ledger, kept.newest())?;
    let mut opened = OpenedCurriculum::of_run(&args.run, &args.store, &ledger.head.stores)?;
    // Weights that react to the loss are held against those of the ledger here.
    opened.follow(&args.run)?;
    let steps = ledger.data.len() as u64;
    if steps > 0 {
        compare(&ledger, &opened, args.workers, quiet)?;
    }
    same_curriculum(&ledger, &opened)?;
    let (Ledger { chain, torn, .. }, unseen) = (&ledger, kept.first_unseen(steps));
    let kept = kept.count(steps);
    let answer = serde_json::json!({
        "steps": steps, "chain": chain, "torn_last_line": torn, "checkpoints": kept,
        "first_step_of_no_checkpoint": unseen,
    });
    output::answer(args.json, &answer, || {
        let unseen = unseen.map(|first| of_no_checkpoint(&args.run, first, steps));
        format!(
            "{}: every data digest, label count, learning rate and skipped step computed again and equal; the ledger's chain \
             holds ({chain}), also against {}\n{}",
            counted(steps, "step"),
            counted(kept, "checkpoint"),
            unseen.unwrap_or_default()
        )
    })
}

/// A line on steps of which nothing but the ledger itself says what they came to: that takes tensors.
fn of_no_checkpoint(run: &Path, first: u64, last: u64) -> String {
    format!(
        "{}: no checkpoint holds their state digests, so that losses, norms and weights there stand in the ledger alone; to \
         compute them again: ztrain replay --run {} --steps {first}..{}\n",
        words::steps(first, last),
        shell::path(run),
        last + 1
    )
}

/// A checkpoint is kept only when the lines up to its step are on the disk: where they are not in the ledger, they were
/// there.
fn ends_behind(ledger: &Ledger, newest: Option<u64>) -> Result<()> {
    let last = ledger.data.len() as u64;
    match newest.filter(|newest| *newest > last) {
        None => Ok(()),
        Some(newest) => Err(Fault::data("lines are missing at the end of the ledger")
            .at(ledger.path.display().to_string())
            .found(format!("steps up to {last}, next to the checkpoint step-{newest}"))
            .wanted(format!("steps up to {newest} at least"))
            .hint("restore the ledger from a copy")),
    }
}

/// Recomputes each step's digest, in order, up to the first that differs.
fn compare(ledger: &Ledger, opened: &OpenedCurriculum, workers: usize, quiet: bool) -> Result<()> {
    let steps = ledger.data.len() as u64;
    let mut progress = Progress::new("verify-run", Measure::Count("step"), steps, quiet);
    let mut all = ledger.data.iter();
    for summary in digest::summaries(opened, 1..steps + 1, workers)? {
        let summary = summary?;
        let (step, found, labels) = (summary.step, summary.digest, labels(&opened.plan, &summary)?);
        let (wanted, recorded) = all.next().copied().unwrap_or_default();
        if found != wanted {
            let fault = Fault::mismatch(format!(
                "the data of step {step} is not what the run was trained on"
            ));
            let cause = cause(ledger, opened, step);
            return Err(fault.at(ledger.place(step)).found(found).wanted(wanted).hint(cause));
        }
        if labels != recorded {
            return Err(changed(&ledger.path, step, "its labels are not those of its data"));
        }
        progress.add(1);
    }
    Ok(())
}

/// The labels of a step, as [`Step::labels`] has those of the ledger.
fn labels(plan: &DataPlan, summary: &StepSummary) -> Result<Digest> {
    let mut sources: BTreeMap<&str, u64> = BTreeMap::new();
    for row in &summary.rows {
        *sources.entry(&plan.sources()[row.source].name).or_default() += row.labels;
    }
    let micro_batches = summary.rows.chunks(plan.step(summary.step)?.micro_batch as usize);
    let labels = micro_batches.map(|rows| rows.iter().map(|row| row.labels).sum());
    Ok(labels_digest(&labels.collect::<Vec<u64>>(), sources.into_iter()))
}

/// What differs that data follows from: the stores are those of the run.
fn cause(ledger: &Ledger, opened: &OpenedCurriculum, step: u64) -> String {
    let begun = Curriculum::parse(&ledger.head.curriculum, "the ledger's curriculum");
    let edit = begun.ok().and_then(|begun| {
        let edits = begun.difference(&opened.curriculum).into_iter();
        let mut early = edits.filter(|edit| edit.first_step <= step);
        early.find(|edit| reaches_data(edit, &begun, &opened.curriculum))
    });
    match edit {
        Some(edit) => format!("the first difference is in {}: {edit}", opened.file),
        None => {
            "curriculum and stores are those of the run: this release assembles other batches; \
                 verify with the one that trained, and please report it"
                .to_owned()
        }
    }
}

/// Whether a difference of two curricula reaches what a step reads: one of the model, the optimizer or the schedule
/// does not, wherever it stands.
fn reaches_data(edit: &CurriculumDifference, begun: &Curriculum, now: &Curriculum) -> bool {
    let keys: Vec<&str> = edit.key.split('.').collect();
    // Of an amendment, what decides data; nothing where there is none, or where it leaves the data alone.
    let read = |of: &Curriculum, number: usize| {
        let one = of.amendments.get(number)?;
        let store = one.store.as_ref().map(|store| store.digest.clone());
        let idle = one.mix.is_none() && one.ban.is_empty() && store.is_none();
        (!idle).then(|| (one.step, one.mix.clone(), one.ban.clone(), store))
    };
    match keys.as_slice() {
        ["amendment", number, ..] => {
            let number = number.parse().unwrap_or(1usize).saturating_sub(1);
            read(begun, number) != read(now, number)
        }
        ["phase", ..] => {
            // Phases and sources may be called anything: what stands behind the name of a phase is its field.
            let field = |phase: &Phase| {
                edit.key.strip_prefix("phase.")?.strip_prefix(&*phase.name)?.strip_prefix('.')
            };
            let idle = |field: &str| {
                let own = ["context_chunks", "weight_shards", "schedule"];
                own.contains(&field) || field.starts_with("model.")
            };
            let mut fields = begun.phases.iter().filter_map(field).peekable();
            fields.peek().is_none() || fields.any(|field| !idle(field))
        }
        [section, ..] => {
            !["model", "optimizer", "schedule", "dtype", "skip_step", "auto_clip"].contains(section)
        }
        [] => true,
    }
}

/// Holds every curriculum that was in force against the steps that were trained before it, and the run's own against
/// the last.
fn same_curriculum(ledger: &Ledger, opened: &OpenedCurriculum) -> Result<()> {
    let parse = |text: &str, step: u64| {
        let place = ledger.place(step);
        Curriculum::parse(text, &place).map_err(|fault| fault.or_at(|| place.clone()))
    };
    let reaches = |one: &Curriculum, other: &Curriculum, recorded: u64| {
        let edits = one.difference(other);
        edits.into_iter().find(|edit| edit.first_step <= recorded)
    };
    let mut in_force = parse(&ledger.head.curriculum, 0)?;
    for (step, text) in &ledger.edits {
        let next = parse(text, *step)?;
        if let Some(edit) = reaches(&in_force, &next, step - 1) {
            let what = format!("the ledger changes a step that was trained before: {edit}");
            return Err(Fault::mismatch(what).at(ledger.place(*step)));
        }
        in_force = next;
    }
    match reaches(&in_force, &opened.curriculum, ledger.data.len() as u64) {
        None => Ok(()),
        Some(edit) => Err(Fault::mismatch(format!(
            "{} is not what the run was trained by from step {} on",
            edit.key, edit.first_step
        ))
        .at(opened.curriculum.place(&edit.key))
        .found(edit.found)
        .wanted(format!("{}, as in {}", edit.wanted, ledger.path.display()))
        .hint(
            "run.toml was edited since: `ztrain --curriculum FILE --out RUN`, with the file that the run \
             continues with, writes it again",
        )),
    }
}

impl Ledger {
    /// Reads the ledger and checks its chain; what a kill or a loss of power left at its end is passed over.
    fn read(path: &Path, kept: &Witnesses) -> Result<Self> {
        let file = regular::open(path).map_err(|error| Fault::io("read", path, &error))?;
        let mut lines = BufReader::new(file);
        let (mut head, mut data, mut link) = (None, Vec::new(), Digest::default());
        let (mut line, mut torn, mut number) = (Vec::new(), false, 0u64);
        let (mut edits, mut rules) = (Vec::new(), None::<Rules>);
        let place = |number: u64| format!("{}:{}", path.display(), number + 1);
        let in_force = |text: &str, number: u64| {
            let place = place(number);
            Curriculum::parse(text, &place).map_err(|fault| fault.or_at(|| place.clone()))
        };
        loop {
            line.clear();
            let read = lines.read_until(b'\n', &mut line);
            if read.map_err(|error| Fault::io("read", path, &error))? == 0 {
                break;
            }
            let Some(line) = chain::whole(&line) else {
                torn = true;
                break;
            };
            let changed = |what: &str| changed(path, number, what);
            let text = std::str::from_utf8(line).ok();
            let opened = text.and_then(|text| chain::open(link, text));
            let (body, after) = opened.ok_or_else(|| changed("its chain is broken"))?;
            link = after;
            if number == 0 {
                let first: Head = parse(&body).ok_or_else(|| changed("it is not a head"))?;
                if first.kind != "head" {
                    return Err(changed("it is not a head"));
                }
                mixer::check_version(first.plan).map_err(|fault| fault.at(place(0)))?;
                rules = Some(Rules::new(in_force(&first.curriculum, 0)?));
                head = Some(first);
            } else if let Some(rules) = &mut rules {
                let step: Step = parse(&body).ok_or_else(|| changed("it is not a step"))?;
                if step.step != number {
                    return Err(changed(&format!("it should be step {number}")));
                }
                step.check().map_err(|what| changed(&what))?;
                if let Some(text) = &step.curriculum {
                    rules.edit(in_force(text, number)?);
                }
                rules.check(&step).map_err(|what| changed(&what))?;
                kept.check(number, step.state_digest, link, || place(number))?;
                data.push((step.batch_digest, step.labels()));
                edits.extend(step.curriculum.map(|text| (number, text)));
            }
            number += 1;
        }
        let path = path.to_owned();
        match head {
            Some(head) => Ok(Ledger { path, head, data, edits, chain: link, torn }),
            None => {
                let begun = path.with_file_name("checkpoints").exists();
                Err(Fault::data("the ledger has no head").at(path.display().to_string()).hint(
                    match begun {
                        true => {
                            "restore it from a copy: the run has checkpoints, so that it had begun"
                        }
                        false => "the run had not begun, so that it read nothing",
                    },
                ))
            }
        }
    }

    /// The line of a step.
    fn place(&self, step: u64) -> String {
        format!("{}:{}", self.path.display(), step + 1)
    }
}

fn parse<T: serde::de::DeserializeOwned>(body: &str) -> Option<T> {
    serde_json::from_str(body).ok()
}

fn changed(path: &Path, number: u64, what: &str) -> Fault {
    Fault::mismatch(format!("this line of the ledger was changed: {what}"))
        .at(format!("{}:{}", path.display(), number + 1))
        .hint("restore the file; nothing after a changed line can be trusted")
}

#[cfg(test)]
mod tests {
    use contract::Class;

    use super::*;

    /// A ledger of a head and these steps, chained as its definition says.
    fn ledger(steps: &[u64]) -> String {
        let zeros = "0".repeat(64);
        let head = serde_json::json!({
            "kind": "head", "plan": mixer::PLAN_VERSION, "curriculum": CURRICULUM, "stores": [], "tokenizer": zeros,
        });
        let step = |step: u64| {
            format!(
                "{{\"kind\":\"step\",\"step\":{step},\"batch_digest\":\"{}\",\"label_count\":4,\"loss\":{},\
                 \"micro_batch_labels\":[1,3],\"micro_batch_losses\":\"{:016x}{:016x}\",\
                 \"sources\":{{\"web\":{{\"labels\":4,\"loss\":\"{:016x}\"}}}},\"tokens_per_expert\":[[6,2],[4,4]],\
                 \"norm\":\"{:016x}\",\"layer_gradient_norms\":\"{:016x}{:016x}\",\"lr\":\"{:016x}\",\
                 \"layer_update_norms\":\"{:016x}\",\"weight_checksums\":\"{step:016x}\",\"state_digest\":\"{}\"}}",
                Digest(step.into()),
                (step as f64 + 3.0) / 4.0,
                (step as f64).to_bits(),
                3f64.to_bits(),
                (step as f64 + 3.0).to_bits(),
                5f64.to_bits(),
                3f64.to_bits(),
                4f64.to_bits(),
                1e-3f64.to_bits(),
                1f64.to_bits(),
                Digest(step.into()),
            )
        };
        let mut before = "0".repeat(32);
        let mut text = String::new();
        for body in [head.to_string()].into_iter().chain(steps.iter().copied().map(step)) {
            before = Digest::of_bytes(format!("{before}{body}").as_bytes()).to_string();
            text += &format!("{},\"chain\":\"{before}\"}}\n", body.strip_suffix('}').unwrap());
        }
        text
    }

    /// The same with one word in the place of another, chained anew.
    fn reforged(text: &str, from: &str, to: &str) -> String {
        let (mut before, mut forged) = (Digest::default(), String::new());
        for line in text.lines() {
            let (body, _) = line.rsplit_once(",\"chain\"").unwrap();
            let (line, after) = chain::seal(before, &format!("{body}}}").replace(from, to));
            (forged, before) = (forged + &line + "\n", after);
        }
        forged
    }

    /// A step that moves nothing leaves its weights, and one that says so has to; a checkpoint knows the chain of its
    /// step.
    #[test]
    fn what_moves_nothing_and_what_a_checkpoint_saw_are_checked() {
        let skip = "[[amendment]]\\nstep = 2\\nskip = true\\n";
        let skipped = reforged(
            &ledger(&[1, 2]),
            "mix = { web = 1 }\\n",
            &format!("mix = {{ web = 1 }}\\n{skip}"),
        );
        let said = |text: &str| read(text.as_bytes()).err().unwrap().to_string();
        assert!(said(&skipped).contains("of skipping"), "{}", said(&skipped));
        let second = |text: &str, from: &str, to: &str| {
            let at = text.rfind("{\"").unwrap();
            let text = text[..at].to_owned() + &text[at..].replace(from, to);
            reforged(&text, "", "")
        };
        let told = second(&skipped, "\"lr\"", "\"skipped\":\"amended\",\"lr\"");
        assert!(said(&told).contains("moved nothing"), "{}", said(&told));
        let one = format!("{:016x}", 1f64.to_bits());
        let still =
            second(&told, &format!("norms\":\"{one}\""), &format!("norms\":\"{:016x}\"", 0));
        assert!(said(&still).contains("moved nothing"), "its weights moved: {}", said(&still));
        let whole = second(
            &still,
            &format!("\"weight_checksums\":\"{:016x}\"", 2),
            &format!("\"weight_checksums\":\"{:016x}\"", 1),
        );
        assert_eq!(read(whole.as_bytes()).unwrap().data.len(), 2);

        let dir = tempfile::tempdir().unwrap();
        let (path, kept) = (dir.path().join("ledger.jsonl"), dir.path().join("checkpoints/step-1"));
        let text = ledger(&[1, 2]);
        let chain = text.lines().nth(1).unwrap().rsplit_once("chain\":\"").unwrap().1;
        std::fs::create_dir_all(&kept).unwrap();
        let state = Digest(1);
        let manifest = format!("{{\"step\":1,\"state\":\"{state}\",\"chain\":\"{chain}");
        std::fs::write(kept.join("manifest.json"), manifest).unwrap();
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Ledger::read(&path, &Witnesses::find(dir.path())?)
        };
        assert_eq!(read(&text).unwrap().data.len(), 2);
        // Steps after the newest checkpoint cannot be verified, so they are listed.
        assert!(
            read(&second(
                &text,
                "\"weight_checksums\":\"",
                "\"weight_checksums\":\"0000000000000000"
            ))
            .is_ok()
        );
        let seen = |last| Witnesses::find(dir.path()).unwrap().first_unseen(last);
        assert_eq!([seen(0), seen(1), seen(2), seen(9)], [None, None, Some(2), Some(2)]);
        let said = of_no_checkpoint(Path::new("runs/a"), 41, 47);
        for word in ["steps 41 to 47: no checkpoint holds", "--run runs/a --steps 41..48\n"] {
            assert!(said.contains(word), "{said}");
        }
        let forged =
            reforged(&text, "\"weight_checksums\":\"", "\"weight_checksums\":\"0000000000000000");
        let fault = read(&forged).err().unwrap();
        assert_eq!(fault.class(), Class::Mismatch);
        assert!(fault.to_string().contains("step-1"), "{fault}");
    }

    const CURRICULUM: &str = "store = \"s\"\nseed = 1\n[model]\npreset = \"zaya1-nano\"\n[optimizer]\nkind = \"adamw\"\n\
        lr = 1e-3\n[[phase]]\nname = \"a\"\nsteps = 9\nseq_len = 8\nbatch = 2\nmicro_batch = 1\nmix = { web = 1 }\n";

    fn read(bytes: &[u8]) -> Result<Ledger> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.jsonl");
        std::fs::write(&path, bytes).unwrap();
        Ledger::read(&path, &Witnesses::find(dir.path()).unwrap())
    }

    /// Heads that do not say by which rules the text was put in order are from before there was a second version.
    #[test]
    fn a_run_of_an_older_plan_is_refused_with_what_to_do() {
        let text = reforged(&ledger(&[1]), "\"plan\":", "\"was\":");
        let fault = read(text.as_bytes()).err().unwrap();
        assert_eq!(fault.class(), Class::Mismatch);
        for word in ["version 1", "--out"] {
            assert!(fault.to_string().contains(word), "{fault}");
        }
        mixer::check_version(mixer::PLAN_VERSION).unwrap();
    }

    #[test]
    fn a_ledger_cut_anywhere_gives_its_whole_lines() {
        let text = ledger(&[1, 2, 3]);
        let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        for cut in 0..=text.len() {
            let whole = ends.iter().filter(|end| **end <= cut).count();
            let read = read(&text.as_bytes()[..cut]);
            if whole == 0 {
                assert_eq!(read.err().unwrap().class(), Class::Data);
                continue;
            }
            let read = read.unwrap();
            let wanted: Vec<Digest> = (1..whole).map(|step| Digest(step as u128)).collect();
            let data: Vec<Digest> = read.data.iter().map(|(data, _)| *data).collect();
            assert_eq!((data, read.torn), (wanted, !ends.contains(&cut)), "cut at {cut}");
            // A part that had not come to the disk when power was lost, and what stands behind it had.
            let mut torn = text.clone().into_bytes();
            torn[cut..(cut + 20).min(text.len())].fill(0);
            let read = self::read(&torn).unwrap();
            assert_eq!(
                (read.data.len() + 1, read.torn),
                (whole, cut < text.len()),
                "zeros at {cut}"
            );
        }
    }

    /// Two curricula that differ in an amendment of numbers, in one of data, or in both.
    #[test]
    fn only_what_reaches_the_data_is_blamed_for_it() {
        let curriculum = |amendments: &str| {
            let text = format!(
                "store = \"s\"\nseed = 1\ndtype = \"f32\"\n[model]\npreset = \"zaya1-nano\"\n[optimizer]\n\
                 kind = \"adamw\"\nlr = 1e-3\n[schedule]\nwarmup_steps = 1\n[[phase]]\nname = \"a.model\"\nsteps = 9\n\
                 seq_len = 8\nbatch = 2\nmicro_batch = 1\nmix = {{ web = 1, math = 1 }}\n{amendments}"
            );
            Curriculum::parse(&text, "a test").unwrap()
        };
        let rate = "[[amendment]]\nstep = 2\noptimizer = { lr = 2e-3 }\n";
        let other = "[[amendment]]\nstep = 3\noptimizer = { lr = 3e-3 }\n";
        let ban = "[[amendment]]\nstep = 4\nban = { web = [3] }\n";
        let blamed = |one: &str, two: &str| -> Vec<u64> {
            let (one, two) = (curriculum(one), curriculum(two));
            let edits = one.difference(&two);
            assert!(!edits.is_empty());
            let edits = edits.into_iter().filter(|edit| reaches_data(edit, &one, &two));
            edits.map(|edit| edit.first_step).collect()
        };
        assert_eq!(blamed("", rate), Vec::<u64>::new());
        assert_eq!(blamed(rate, other), Vec::<u64>::new());
        assert_eq!(blamed(rate, &format!("{rate}{ban}")), [4]);
        let skips = "[[amendment]]\nstep = 4\nskip = true\nban = { web = [3] }\n";
        assert_eq!(blamed(ban, skips), Vec::<u64>::new());
        assert_eq!(blamed(&skips.replace("[3]", "[2]"), ban), [4]);
    }

    /// Sources and phases may be called as fields are.
    #[test]
    fn a_mix_is_blamed_whatever_its_source_is_called() {
        let curriculum = |name: &str, mix: &str, chunks: u64| {
            let text = format!(
                "store = \"s\"\nseed = 1\n[model]\npreset = \"zaya1-nano\"\n[optimizer]\nkind = \"adamw\"\nlr = 1e-3\n\
                 [[phase]]\nname = \"{name}\"\nsteps = 9\nseq_len = 8\nbatch = 2\nmicro_batch = 1\n\
                 context_chunks = {chunks}\nmix = {{ web = 1, {mix} = 1 }}\n"
            );
            Curriculum::parse(&text, "a test").unwrap()
        };
        for (name, from, to, blamed) in [
            ("a", ("weight_shards", 1), ("math", 1), 2),
            ("a.model", ("context_chunks", 1), ("math", 1), 2),
            ("model", ("weight_shards", 1), ("math", 1), 2),
            ("a.mix", ("math", 1), ("math", 2), 0),
        ] {
            let [one, two] = [from, to].map(|(mix, chunks)| curriculum(name, mix, chunks));
            let edits = one.difference(&two);
            assert!(!edits.is_empty());
            let found = edits.iter().filter(|edit| reaches_data(edit, &one, &two)).count();
            assert_eq!(found, blamed, "{name}: {edits:?}");
        }
    }

    /// A line that is chained anew after it was changed, so that only its numbers say so.
    #[test]
    fn numbers_that_do_not_add_up_are_found_behind_a_whole_chain() {
        for (from, to, words) in [
            ("\"label_count\":4", "\"label_count\":5", "its labels add up to 4"),
            ("[4,4]", "[4,5]", "one router counted 8 tokens, another 9"),
            ("\"norm\":\"4", "\"norm\":\"3", "its norm is"),
            ("\"norm\":\"4", "\"norm\":\"", "it is not a step"),
            ("\"lr\":\"3f5", "\"lr\":\"3f6", "its learning rate is"),
            ("\"lr\"", "\"skipped\":\"loss\",\"lr\"", "of skipping"),
            ("\"lr\"", "\"clip_threshold\":\"3ff0000000000000\",\"lr\"", "its clip"),
        ] {
            let forged = reforged(&ledger(&[1, 2]), from, to);
            let fault = read(forged.as_bytes()).err().unwrap().to_string();
            assert!(fault.contains(words) && fault.contains("ledger.jsonl:2"), "{fault}");
        }
    }

    #[test]
    fn any_change_breaks_the_chain_at_its_line() {
        let text = ledger(&[1, 2, 3]);
        for (at, _) in text.match_indices(|c: char| c.is_ascii_alphanumeric()) {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let line = text[..at].matches('\n').count() + 1;
            let fault = read(&bytes).err().unwrap();
            assert_eq!(fault.class(), Class::Mismatch, "byte {at}: {fault}");
            assert!(
                fault.to_string().contains(&format!("ledger.jsonl:{line}:")),
                "byte {at}: {fault}"
            );
        }
        let fault = read(ledger(&[1, 3]).as_bytes()).err().unwrap();
        assert!(fault.to_string().contains("it should be step 2"), "{fault}");
    }
}
