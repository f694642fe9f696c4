//! `zdata verify-run`: recomputes every data digest of a run from its curriculum and stores, and checks every line of its
//! ledger. Needs no GPU, no libtorch.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, chain, note};
use ingest::progress::{Measure, Progress};
use loader::Opened;
use mixer::{Curriculum, Difference};
use serde::Deserialize;

use super::{digest, output};

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata verify-run runs/demo")]
pub(crate) struct Args {
    /// The run's folder.
    #[arg(value_parser = super::local("copy the run here: its checkpoints may stay where they are"))]
    run: PathBuf,
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
    tokenizer: Identity,
}

fn first_plan() -> u32 {
    1
}

/// What is read of every other line.
#[derive(Deserialize)]
struct Step {
    step: u64,
    data: Digest,
    divisor: u64,
    loss: f64,
    leaf_labels: Vec<u64>,
    leaf_losses: String,
    sources: BTreeMap<String, OfSource>,
    router: Vec<Vec<u64>>,
    norm: String,
    layer_gradient_norms: String,
    /// The curriculum in force from this step on, where it is another than before.
    #[serde(default)]
    curriculum: Option<String>,
}

/// What a step has of one source.
#[derive(Deserialize)]
struct OfSource {
    labels: u64,
    loss: String,
}

/// How far sums in another order may lie from each other, as a part of them.
const ROUNDING: f64 = 1e-9;

/// A ledger whose chain holds.
struct Ledger {
    path: PathBuf,
    head: Head,
    /// The data digest of step 1, 2, ...
    data: Vec<Digest>,
    /// The curricula that came into force later, with their first steps.
    edits: Vec<(u64, String)>,
    chain: Digest,
    torn: bool,
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let ledger = Ledger::read(&args.run.join("ledger.jsonl"))?;
    if ledger.torn {
        note!(
            "note: the last line of the ledger is torn, as a kill leaves it; the run cuts it when it goes on"
        );
    }
    mixer::check_version(ledger.head.plan).map_err(|fault| fault.at(ledger.place(0)))?;
    let run = args.run.join("run.toml");
    let opened = Opened::open(&run)?;
    let steps = ledger.data.len() as u64;
    if steps > 0 {
        compare(&ledger, &opened, args.workers, quiet)?;
    }
    same_content(&ledger, &opened)?;
    same_curriculum(&ledger, &opened)?;
    let Ledger { chain, torn, .. } = &ledger;
    let answer = serde_json::json!({ "steps": steps, "chain": chain, "torn_last_line": torn });
    output::answer(args.json, &answer, || {
        format!(
            "{steps} steps: every data digest computed again and equal; the ledger's chain holds ({chain})\n"
        )
    })
}

/// Recomputes each step's digest, in order, up to the first that differs.
fn compare(ledger: &Ledger, opened: &Opened, workers: usize, quiet: bool) -> Result<()> {
    let steps = ledger.data.len() as u64;
    let mut progress = Progress::new("verify-run", Measure::Count("steps"), steps, quiet);
    let mut all = ledger.data.iter();
    for found in digest::digests(opened, 1..steps + 1, workers)? {
        let (step, found) = found?;
        let wanted = all.next().copied().unwrap_or_default();
        if found != wanted {
            let fault = Fault::mismatch(format!(
                "the data of step {step} is not what the run was trained on"
            ));
            let cause = cause(ledger, opened, step);
            return Err(fault.at(ledger.place(step)).found(found).wanted(wanted).hint(cause));
        }
        progress.add(1);
    }
    Ok(())
}

/// The first component that differs, in the order in which data follows from them.
fn cause(ledger: &Ledger, opened: &Opened, step: u64) -> String {
    if let Err(fault) = same_content(ledger, opened) {
        return format!("the first difference: {fault}").replace('\n', "\n  ");
    }
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

/// Whether a difference of two curricula reaches what a step reads: one of the model, the optimizer or the schedule does not,
/// wherever it stands.
fn reaches_data(edit: &Difference, begun: &Curriculum, now: &Curriculum) -> bool {
    let keys: Vec<&str> = edit.key.split('.').collect();
    // Of an amendment, what decides data; nothing where there is none, or where it leaves the data alone.
    let read = |of: &Curriculum, number: usize| {
        let one = of.amendments.get(number)?;
        let store = one.store.as_ref().map(|store| store.digest.clone());
        let idle = one.mix.is_empty() && one.ban.is_empty() && store.is_none();
        (!idle).then(|| (one.step, one.mix.clone(), one.ban.clone(), store))
    };
    match keys.as_slice() {
        ["amendment", number, ..] => {
            let number = number.parse().unwrap_or(1usize).saturating_sub(1);
            read(begun, number) != read(now, number)
        }
        // A phase may be called anything: the key of its field is the last, or stands before that of the model.
        ["phase", .., "context_chunks" | "weight_shards"] | ["phase", .., "model", _] => false,
        [section, ..] => {
            !["model", "optimizer", "schedule", "dtype", "skip_step", "auto_clip"].contains(section)
        }
        [] => true,
    }
}

/// Holds every curriculum that was in force against the steps that were trained before it, and the run's own against the last.
fn same_curriculum(ledger: &Ledger, opened: &Opened) -> Result<()> {
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
        .hint("the run's curriculum was edited by hand: put back what the ledger says")),
    }
}

/// Holds the stores and the tokenizer against those that the run began with.
fn same_content(ledger: &Ledger, opened: &Opened) -> Result<()> {
    // Those that an amendment added are known by the digests that stand beside their names, and were held against them.
    let stores = opened.stores()?.stores().iter().take(opened.curriculum.stores.len());
    let place = |store: &store::Store| store.root().to_string();
    if opened.curriculum.stores.len() != ledger.head.stores.len() {
        return Err(Fault::mismatch("the run began with another number of stores")
            .at(opened.curriculum.place("store"))
            .found(opened.curriculum.stores.len())
            .wanted(ledger.head.stores.len()));
    }
    for (store, wanted) in stores.zip(&ledger.head.stores) {
        let manifest = store.manifest();
        let pairs = [
            ("tokenizer", manifest.tokenizer.sha256, ledger.head.tokenizer),
            ("store", manifest.digest, *wanted),
        ];
        if let Some((what, found, wanted)) = pairs.into_iter().find(|(_, a, b)| a != b) {
            return Err(Fault::mismatch(format!(
                "the {what} is not the one that the run began with"
            ))
            .at(place(store))
            .found(found)
            .wanted(wanted)
            .hint("put the store that the run was trained from at this path"));
        }
    }
    Ok(())
}

impl Ledger {
    /// Reads the ledger and checks its chain; a last line without its end is passed over.
    fn read(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| {
            Fault::io("read", path, &error).hint("name the folder that was given to `ztrain --out`")
        })?;
        let mut lines = BufReader::new(file);
        let (mut head, mut data, mut link) = (None, Vec::new(), Digest::default());
        let (mut line, mut torn, mut number) = (Vec::new(), false, 0u64);
        let mut edits = Vec::new();
        loop {
            line.clear();
            let read = lines.read_until(b'\n', &mut line);
            if read.map_err(|error| Fault::io("read", path, &error))? == 0 {
                break;
            }
            if line.pop() != Some(b'\n') {
                torn = true;
                break;
            }
            let changed = |what: &str| changed(path, number, what);
            let text = std::str::from_utf8(&line).ok();
            let opened = text.and_then(|text| chain::open(link, text));
            let (body, after) = opened.ok_or_else(|| changed("its chain is broken"))?;
            link = after;
            if number == 0 {
                let first: Head = parse(&body).ok_or_else(|| changed("it is not a head"))?;
                head = Some(first).filter(|head| head.kind == "head");
            } else {
                let step: Step = parse(&body).ok_or_else(|| changed("it is not a step"))?;
                if step.step != number {
                    return Err(changed(&format!("it should be step {number}")));
                }
                step.check().map_err(|what| changed(&what))?;
                data.push(step.data);
                edits.extend(step.curriculum.map(|text| (number, text)));
            }
            number += 1;
        }
        let path = path.to_owned();
        match head {
            Some(head) => Ok(Ledger { path, head, data, edits, chain: link, torn }),
            None => Err(Fault::data("the ledger has no head")
                .at(path.display().to_string())
                .hint("the run had not begun: there is nothing to verify")),
        }
    }

    /// The line of a step.
    fn place(&self, step: u64) -> String {
        format!("{}:{}", self.path.display(), step + 1)
    }
}

impl Step {
    /// Says what does not follow from the rest of the line.
    fn check(&self) -> std::result::Result<(), String> {
        self.check_leaves()?;
        self.check_sources()?;
        self.check_norm()?;
        let counted = self.router.iter().map(|counts| counts.iter().sum::<u64>());
        let counted: Vec<u64> = counted.filter(|tokens| *tokens > 0).collect();
        match counted.windows(2).find(|pair| pair[0] != pair[1]) {
            None => Ok(()),
            Some(pair) => {
                Err(format!("one router counted {} tokens, the next {}", pair[0], pair[1]))
            }
        }
    }

    /// The labels and losses of sources add up to those of the step, up to rounding: they are added in another order.
    fn check_sources(&self) -> std::result::Result<(), String> {
        let labels = self.sources.values().map(|source| source.labels).sum::<u64>().max(1);
        if labels != self.divisor {
            return Err(format!(
                "its divisor is {}, the labels of its sources add up to {labels}",
                self.divisor
            ));
        }
        let (mut losses, leaves) = (0.0, tree_sum(&floats(&self.leaf_losses)?));
        for source in self.sources.values() {
            losses += floats(&source.loss)?.iter().sum::<f64>();
        }
        match (losses - leaves).abs() <= ROUNDING * leaves.abs() {
            true => Ok(()),
            false => {
                Err(format!("its losses add up to {leaves}, those of its sources to {losses}"))
            }
        }
    }

    /// So do the squares of the layers' gradients.
    fn check_norm(&self) -> std::result::Result<(), String> {
        let norm = floats(&self.norm)?.iter().sum::<f64>();
        let layers = floats(&self.layer_gradient_norms)?;
        let found = layers.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
        match (found - norm).abs() <= ROUNDING * norm {
            true => Ok(()),
            false => Err(format!("its norm is {norm}, those of its layers make {found}")),
        }
    }

    /// The label count and the loss follow from the micro-batches.
    fn check_leaves(&self) -> std::result::Result<(), String> {
        let labels = self.leaf_labels.iter().sum::<u64>().max(1);
        if labels != self.divisor {
            return Err(format!("its divisor is {}, its labels add up to {labels}", self.divisor));
        }
        let mean = tree_sum(&floats(&self.leaf_losses)?) / self.divisor as f64;
        // As text and back: decimal digits are read to the same number each time, but not always to the one written.
        let text = serde_json::to_string(&mean).unwrap_or_default();
        let wanted: Option<f64> = serde_json::from_str(&text).ok();
        match wanted.is_some_and(|wanted| wanted.to_bits() == self.loss.to_bits()) {
            true => Ok(()),
            false => Err(format!("its loss is {}, those of its leaves make {text}", self.loss)),
        }
    }
}

/// The floats whose bits are packed, sixteen hexadecimal digits each.
fn floats(packed: &str) -> std::result::Result<Vec<f64>, String> {
    let words = packed.as_bytes().chunks(16).map(|word| {
        let digits = std::str::from_utf8(word).ok().filter(|digits| digits.len() == 16)?;
        u64::from_str_radix(digits, 16).ok().map(f64::from_bits)
    });
    let floats: Option<Vec<f64>> = words.collect();
    floats.ok_or_else(|| {
        "it holds something else than words of sixteen hexadecimal digits".to_owned()
    })
}

/// The sum over the fixed tree: the largest power of two below the number of values goes to the left.
fn tree_sum(values: &[f64]) -> f64 {
    match values {
        [] => 0.0,
        [value] => *value,
        _ => {
            let left = values.len().next_power_of_two() / 2;
            tree_sum(&values[..left]) + tree_sum(&values[left..])
        }
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
        let head = format!(
            "{{\"kind\":\"head\",\"curriculum\":\"\",\"stores\":[],\"tokenizer\":\"{zeros}\"}}"
        );
        let step = |step: u64| {
            format!(
                "{{\"kind\":\"step\",\"step\":{step},\"data\":\"{}\",\"divisor\":4,\"loss\":{},\
                 \"leaf_labels\":[1,3],\"leaf_losses\":\"{:016x}{:016x}\",\
                 \"sources\":{{\"web\":{{\"labels\":4,\"loss\":\"{:016x}\"}}}},\"router\":[[6,2],[4,4]],\
                 \"norm\":\"{:016x}\",\"layer_gradient_norms\":\"{:016x}{:016x}\"}}",
                Digest(step.into()),
                (step as f64 + 3.0) / 4.0,
                (step as f64).to_bits(),
                3f64.to_bits(),
                (step as f64 + 3.0).to_bits(),
                5f64.to_bits(),
                3f64.to_bits(),
                4f64.to_bits()
            )
        };
        let mut before = "0".repeat(32);
        let mut text = String::new();
        for body in [head].into_iter().chain(steps.iter().copied().map(step)) {
            before = Digest::of_bytes(format!("{before}{body}").as_bytes()).to_string();
            text += &format!("{},\"chain\":\"{before}\"}}\n", body.strip_suffix('}').unwrap());
        }
        text
    }

    fn read(bytes: &[u8]) -> Result<Ledger> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.jsonl");
        std::fs::write(&path, bytes).unwrap();
        Ledger::read(&path)
    }

    /// Heads that do not say by which rules the text was put in order are from before there was a second version.
    #[test]
    fn a_run_of_an_older_plan_is_refused_with_what_to_do() {
        let ledger = read(ledger(&[1]).as_bytes()).unwrap();
        let fault = mixer::check_version(ledger.head.plan).unwrap_err();
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
            assert_eq!((read.data, read.torn), (wanted, !ends.contains(&cut)), "cut at {cut}");
        }
    }

    fn packed(values: &[f64]) -> String {
        values.iter().map(|value| format!("{:016x}", value.to_bits())).collect()
    }

    /// A line of 7 labels that holds together.
    fn line() -> Step {
        let source = |labels: u64, loss: f64| OfSource { labels, loss: packed(&[loss]) };
        Step {
            step: 1,
            data: Digest(1),
            divisor: 7,
            loss: 5.75 / 7.0,
            leaf_labels: vec![2, 5],
            leaf_losses: packed(&[1.25, 4.5]),
            sources: BTreeMap::from([
                ("web".into(), source(3, 2.0)),
                ("math".into(), source(4, 3.75)),
            ]),
            router: vec![vec![3, 5], vec![], vec![8, 0]],
            norm: packed(&[5.0]),
            layer_gradient_norms: packed(&[3.0, 4.0]),
            curriculum: None,
        }
    }

    #[test]
    fn sources_layers_and_routers_have_to_add_up() {
        type Edit = fn(&mut Step);
        let forged: [(Edit, &str); 6] = [
            (|step| step.sources.get_mut("web").unwrap().labels += 1, "labels of its sources"),
            (
                |step| step.sources.get_mut("web").unwrap().loss = packed(&[2.5]),
                "those of its sources to",
            ),
            (|step| drop(step.sources.remove("math")), "labels of its sources"),
            (|step| step.norm = packed(&[5.001]), "its norm is 5.001"),
            (|step| step.layer_gradient_norms = packed(&[3.0, 4.0, 0.1]), "those of its layers"),
            (|step| step.router[2][1] += 1, "one router counted 8 tokens, the next 9"),
        ];
        assert_eq!(line().check(), Ok(()));
        for (forge, words) in forged {
            let mut step = line();
            forge(&mut step);
            let said = step.check().unwrap_err();
            assert!(said.contains(words), "{said}");
        }
        let torn = Step { norm: "3ff".to_owned(), ..line() };
        assert!(torn.check().unwrap_err().contains("sixteen"));
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

    #[test]
    fn a_loss_follows_from_those_of_the_leaves() {
        let line = |divisor: u64, loss: f64| Step { divisor, loss, ..line() };
        assert_eq!(line(7, 5.75 / 7.0).check(), Ok(()));
        assert!(line(7, 5.75 / 7.0 + 1e-9).check().unwrap_err().contains("its loss is"));
        assert!(line(8, 5.75 / 8.0).check().unwrap_err().contains("add up to 7"));
        // The tree of five: ((a + b) + (c + d)) + e.
        let values = [1e16, 1.0, -1e16, 1.0, 1.0];
        assert_eq!(tree_sum(&values), ((1e16 + 1.0) + (-1e16 + 1.0)) + 1.0);
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
