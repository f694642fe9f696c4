//! Fear: that a run over packed documents differs from one over concatenated text in its digests, its resume or its
//! replay.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Scratch, arg, build, corpus, curriculum, tree, zdata, zdata_command};

const PACKING: &str = "packing = \"best-fit\"\nlengths = { 64 = 2, 128 = 1 }\n";

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&zdata(&[args, &["--json"]].concat()).ok()).unwrap()
}

/// The small curriculum, with the documents of `web` packed.
fn packed(scratch: &Scratch, store: &Path, name: &str) -> PathBuf {
    let table = format!("[source.web]\n{PACKING}\n[source.math]");
    curriculum(scratch, store, name, &[("[source.math]", &table)])
}

#[test]
fn a_length_that_no_phase_has_is_the_plans_to_say() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 400, ""), "store");
    let run = packed(&scratch, &store, "run.toml");
    let text = zdata(&["plan", arg(&run)]).ok();
    assert!(!text.contains("never trained on"), "{text}");
    let unread = fs::read_to_string(&run).unwrap().replace("64 = 2", "64 = 2, 96 = 1");
    let text = zdata(&["plan", arg(&scratch.write("unread.toml", unread))]).ok();
    assert!(text.contains("no phase reads sequences of 96 tokens"), "{text}");
}

#[test]
fn packs_lie_beside_the_store_and_every_command_reads_them() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 400, ""), "store");
    let run = packed(&scratch, &store, "run.toml");
    let before = tree(&store);
    let plan = json(&["plan", arg(&run)]);
    let web = plan["sources"].as_array().unwrap().iter().find(|it| it["name"] == "web").unwrap();
    let rows = web["packed"].as_array().unwrap();
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap();
    let sum = |key: &str| rows.iter().map(|row| number(row, key)).sum::<u64>();
    assert_eq!(
        (sum("documents"), sum("tokens")),
        (number(web, "documents"), number(web, "tokens"))
    );
    for row in rows {
        let (room, text) =
            (number(row, "sequences") * number(row, "seq_len"), number(row, "tokens"));
        assert!(
            room == text + number(row, "padding") && number(row, "padding") * 20 < room,
            "{row}"
        );
        assert!(number(row, "taken") > 0 && number(row, "taken") <= number(row, "sequences"));
    }
    let text = zdata(&["plan", arg(&run)]).ok();
    assert!(text.contains("web, packed by best fit"), "{text}");
    // Next to the store, not in it: the store is unchanged.
    assert_eq!(tree(&store), before);
    assert_eq!(tree(&scratch.path("store.packs")).len(), 1);
    zdata(&["verify", arg(&store)]).ok();

    // Everything that a step shows is found by `where`, and vice versa.
    let batch = json(&["batch", arg(&run), "--step", "3"]);
    let mut several = false;
    for row in batch["sequences"].as_array().unwrap().iter().filter(|row| row["source"] == "web") {
        let documents = row["documents"].as_array().unwrap();
        several |= documents.len() > 1;
        for document in documents {
            let found = json(&["where", arg(&run), "--doc", document["id"].as_str().unwrap()]);
            let steps: BTreeSet<u64> =
                found[0]["seen"].as_array().unwrap().iter().map(|at| number(at, "step")).collect();
            assert!(steps.contains(&3), "{found}");
        }
    }
    assert!(several, "a sequence of several documents");

    // Another seed is another order of the same packs; other lengths give other packs.
    let digests = |run: &Path| zdata(&["digest", arg(run), "--steps", "1..21"]).ok();
    let made = digests(&run);
    fs::remove_dir_all(scratch.path("store.packs")).unwrap();
    assert_eq!(made, digests(&run), "packs that were made again");
    let other =
        scratch.write("other.toml", fs::read_to_string(&run).unwrap().replace("64 = 2", "64 = 1"));
    assert_ne!(digests(&run), digests(&other));
    assert_eq!(tree(&scratch.path("store.packs")).len(), 2);

    // If no file can be written next to the store, the cache is used, with the same text.
    let wanted = digests(&run);
    fs::remove_dir_all(scratch.path("store.packs")).unwrap();
    scratch.write("store.packs", "mine");
    let cache = scratch.path("cache");
    let mut command = zdata_command(&["digest", arg(&run), "--steps", "1..21"]);
    let ran = command.env("ZDATA_CACHE", &cache).output().unwrap();
    assert_eq!(String::from_utf8(ran.stdout).unwrap(), wanted);
    assert_eq!(tree(&cache.join("packs")).len(), 1);
    assert_eq!(fs::read(scratch.path("store.packs")).unwrap(), b"mine");
}

#[test]
fn what_cannot_be_packed_is_refused_before_anything_starts() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 100, ""), "store");
    let run = packed(&scratch, &store, "run.toml");
    let text = fs::read_to_string(&run).unwrap();
    for (from, to, says) in [
        ("128 = 1", "256 = 1", "not packed at this length"),
        ("lengths = { 64 = 2, 128 = 1 }\n", "", "`lengths`"),
        ("steps = 12", "steps = 12000", "packs of this length"),
        ("\"best-fit\"", "\"first-fit\"", "run.toml:6"),
    ] {
        assert!(text.contains(from), "{from}");
        let file = scratch
            .write("changed.toml", text.replace(from, to).replace("run.toml", "changed.toml"));
        zdata(&["plan", arg(&file)]).fails(2, &[&says.replace("run.toml", "changed.toml")]);
    }
    let stub = scratch.write(
        "stub.toml",
        "[[source]]\nname = \"web\"\ntokens = 100000\ndocuments = 900\nunit = 1024\n[[source]]\nname = \"math\"\n\
         tokens = 100000\ndocuments = 900\nunit = 1024\n",
    );
    let file = scratch.write("changed.toml", text.replace(arg(&store), arg(&stub)));
    zdata(&["plan", arg(&file)]).fails(2, &["changed.toml:", "web", "a store stub"]);
    zdata(&["plan", arg(&run)]).ok();
    let kept = fs::read_dir(scratch.path("store.packs")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&kept).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&kept, bytes).unwrap();
    zdata(&["plan", arg(&run)]).fails(3, &[arg(&kept), "do not match their sums", "remove it"]);
    // A link to another file is not followed: the packs replace it.
    let other = scratch.write("other", "of nobody's business, and long enough");
    fs::remove_file(&kept).unwrap();
    std::os::unix::fs::symlink(&other, &kept).unwrap();
    zdata(&["plan", arg(&run)]).ok();
    assert!(!kept.is_symlink() && fs::read(&other).unwrap().starts_with(b"of nobody"));
}

/// The folder of a run of ten steps, and `explain` of its eighth. A run that stopped continues on two ranks with the
/// same ledger, also without the files that were `made` of the store.
#[cfg(feature = "train")]
pub(crate) fn resumed_and_explained(scratch: &Scratch, run: &Path, made: &str) -> (PathBuf, Value) {
    use crate::support::ztrain;

    let train = |out: &Path, more: &[&str]| {
        let args =
            ["--curriculum", arg(run), "--out", arg(out), "--checkpoint-every", "3", "--quiet"];
        ztrain(&[&args, more].concat()).ok()
    };
    let (whole, stopped) = (scratch.path("whole"), scratch.path("stopped"));
    train(&whole, &[]);
    train(&stopped, &["--stop-after", "7"]);
    fs::remove_dir_all(scratch.path(made)).unwrap();
    train(&stopped, &["--nproc", "2"]);
    let steps = |folder: &Path| {
        fs::read_to_string(folder.join("ledger.jsonl"))
            .unwrap()
            .lines()
            .filter(|line| line.contains("\"kind\":\"step\""))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(steps(&whole).len(), 10);
    assert_eq!(steps(&whole), steps(&stopped));
    let said = ztrain(&["replay", "--run", arg(&whole), "--step", "8"]).ok();
    assert!(said.contains("step 8: same bits"), "{said}");
    zdata(&["verify-run", arg(&whole)]).ok();
    let explained =
        ztrain(&["explain", "--run", arg(&whole), "--step", "8", "--top", "2", "--json"]).ok();
    let explained: Value = serde_json::from_str(&explained).unwrap();
    assert!(!explained["documents"].as_array().unwrap().is_empty());
    (whole, explained)
}

#[cfg(feature = "train")]
#[test]
fn a_run_over_packs_is_resumed_replayed_and_explained() {
    use crate::support::{SHORT, ztrain};

    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 400, ""), "store");
    let table = format!("[source.web]\n{PACKING}\n[source.math]");
    let change = [("[source.math]", table.as_str()), SHORT[0], SHORT[1]];
    let run = curriculum(&scratch, &store, "run.toml", &change);
    let (whole, _) = resumed_and_explained(&scratch, &run, "store.packs");
    // Packing affects bits, so it is fixed once a run has begun.
    let edited =
        scratch.write("edited.toml", fs::read_to_string(&run).unwrap().replace(PACKING, ""));
    ztrain(&["--curriculum", arg(&edited), "--out", arg(&whole), "--quiet"])
        .fails(2, &["source.web.packing", "step 1"]);
}
