//! `zdata verify-run`: recomputes every data digest of a run from its curriculum and stores, and checks every line of its
//! ledger. Needs no GPU, no libtorch.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, chain, note};
use ingest::progress::{Measure, Progress};
use loader::Opened;
use mixer::Curriculum;
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
    curriculum: String,
    stores: Vec<Identity>,
    tokenizer: Identity,
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
    /// The curriculum in force from this step on, where it is another than before.
    #[serde(default)]
    curriculum: Option<String>,
}

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
    let edits = begun.map(|begun| begun.difference(&opened.curriculum)).unwrap_or_default();
    let trains = ["model", "optimizer", "schedule", "dtype", "skip_step", "auto_clip"];
    let edit = edits.iter().filter(|edit| edit.first_step <= step).find(|edit| {
        let section = edit.key.split('.').next().unwrap_or_default();
        !trains.contains(&section)
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
    /// Says what does not follow from the sums of the micro-batches: the label count, or the loss.
    fn check(&self) -> std::result::Result<(), String> {
        let labels = self.leaf_labels.iter().sum::<u64>().max(1);
        if labels != self.divisor {
            return Err(format!("its divisor is {}, its labels add up to {labels}", self.divisor));
        }
        let words = self.leaf_losses.as_bytes().chunks(16);
        let bits = words.map(|word| u64::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok());
        let losses: Option<Vec<f64>> = bits.map(|bits| bits.map(f64::from_bits)).collect();
        let losses = losses.ok_or("its losses are not words of sixteen hexadecimal digits")?;
        let mean = tree_sum(&losses) / self.divisor as f64;
        // As text and back: decimal digits are read to the same number each time, but not always to the one written.
        let text = serde_json::to_string(&mean).unwrap_or_default();
        let wanted: Option<f64> = serde_json::from_str(&text).ok();
        match wanted.is_some_and(|wanted| wanted.to_bits() == self.loss.to_bits()) {
            true => Ok(()),
            false => Err(format!("its loss is {}, those of its leaves make {text}", self.loss)),
        }
    }
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
                 \"leaf_labels\":[1,3],\"leaf_losses\":\"{:016x}{:016x}\"}}",
                Digest(step.into()),
                (step as f64 + 3.0) / 4.0,
                (step as f64).to_bits(),
                3f64.to_bits()
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

    #[test]
    fn a_loss_follows_from_those_of_the_leaves() {
        let line = |divisor: u64, loss: f64| Step {
            step: 1,
            data: Digest(1),
            divisor,
            loss,
            leaf_labels: vec![2, 5],
            leaf_losses: format!("{:016x}{:016x}", 1.25f64.to_bits(), 4.5f64.to_bits()),
            curriculum: None,
        };
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
