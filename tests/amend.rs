//! Fear: that an amendment changes an earlier step, repeats or loses text, or damages the file that it is added to.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{Scratch, arg, build, corpus, curriculum, zdata};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&zdata(&[args, &["--json"]].concat()).ok()).unwrap()
}

fn digests(curriculum: &Path, steps: &str) -> String {
    zdata(&["digest", arg(curriculum), "--steps", steps]).ok()
}

/// The token ranges of a source that these steps read.
fn text(curriculum: &Path, source: &str, steps: std::ops::Range<u64>) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for step in steps {
        let batch = json(&["batch", arg(curriculum), "--step", &step.to_string()]);
        let rows = batch["sequences"].as_array().unwrap().iter();
        for row in rows.filter(|row| row["source"] == source) {
            let spans: Vec<(u64, u64)> = serde_json::from_value(row["spans"].clone()).unwrap();
            all.extend(spans);
        }
    }
    all
}

/// Tokens that the second curriculum reads once more than the first, and tokens that only the first reads.
fn again_and_left_out(plain: &Path, run: &Path) -> (usize, usize) {
    let read = |curriculum: &Path, source: &str| {
        let spans = text(curriculum, source, 1..21);
        let tokens: Vec<u64> = spans.into_iter().flat_map(|(from, to)| from..to).collect();
        (tokens.iter().copied().collect::<BTreeSet<_>>(), tokens.len())
    };
    let (mut again, mut left_out) = (0, 0);
    for source in ["web", "math"] {
        let ((plain, was), (run, is)) = (read(plain, source), read(run, source));
        left_out += plain.difference(&run).count();
        again += (is - run.len()).saturating_sub(was - plain.len());
    }
    (again, left_out)
}

#[test]
fn steps_before_stay_and_sources_go_on_where_they_were() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let run = curriculum(&scratch, &store, "run.toml", &[]);
    let plain = curriculum(&scratch, &store, "plain.toml", &[]);
    let head = "# Mine, and it stays.\n".to_owned() + &fs::read_to_string(&run).unwrap();
    fs::write(&run, head.trim_end()).unwrap();
    let before = digests(&run, "1..21");

    let proof = json(&["amend", arg(&run), "--step", "5", "--mix", "web=1,math=3/2", "--dry-run"]);
    assert_eq!(proof["written"], false);
    assert_eq!(fs::read_to_string(&run).unwrap(), head.trim_end(), "a dry run writes nothing");
    zdata(&["amend", arg(&run), "--step", "5", "--mix", "web=1,math=3/2"]).ok();
    let amended = fs::read_to_string(&run).unwrap();
    assert!(
        amended.starts_with(&head) && amended.contains("mix = { math = 3, web = 2 }"),
        "{amended}"
    );
    let after = digests(&run, "1..21");
    let same = before.lines().zip(after.lines()).take_while(|(one, other)| one == other).count();
    assert_eq!(same, 4, "{after}");
    for source in ["web", "math"] {
        // A source has one order; each run reads as many of its samples as the mix asks for.
        let (one, other) = (text(&plain, source, 1..13), text(&run, source, 1..13));
        let common = one.len().min(other.len());
        assert!(one[..common] == other[..common] && one.len() != other.len(), "{source}");
        assert_eq!(other.iter().collect::<BTreeSet<_>>().len(), other.len());
    }

    let (again, left_out) = again_and_left_out(&plain, &run);
    assert_eq!((&proof["repeated"], &proof["left_out"]), (&again.into(), &left_out.into()));
    assert!(left_out > 0, "{proof}");

    // The worst document is banned from step 7 on, and all its appearances are reported.
    let seen = json(&["batch", arg(&run), "--step", "7"])["sequences"][0]["documents"][0].clone();
    let id = seen["id"].as_str().unwrap();
    let proof = json(&["amend", arg(&run), "--step", "7", "--ban", id]);
    assert!(proof["banned"][0]["tokens"].as_u64().unwrap() > 0, "{proof}");
    let banned = json(&["batch", arg(&run), "--step", "7"]);
    assert_eq!(banned["sequences"][0]["documents"][0]["banned"], true);
    let places = json(&["where", arg(&run), "--doc", id]);
    let places = places[0]["seen"].as_array().unwrap();
    assert!(
        places.iter().all(|it| it["banned"] == (it["step"].as_u64().unwrap() >= 7)),
        "{places:?}"
    );
    let hidden: u64 = places
        .iter()
        .filter(|it| it["banned"] == true)
        .map(|it| it["tokens"][1].as_u64().unwrap() - it["tokens"][0].as_u64().unwrap())
        .sum();
    assert_eq!(json(&["plan", arg(&run)])["banned"][0]["tokens"], hidden);
    numbers(&run);
    let last = digests(&run, "1..21");
    assert!(
        after.lines().take(6).eq(last.lines().take(6))
            && after.lines().nth(6) != last.lines().nth(6)
    );
    refused(&run, id);
}

/// Amended numbers are reported, and change no text.
fn numbers(run: &Path) {
    let set = ["--set", "optimizer.lr=5e-3", "--set", "dtype=bf16"];
    let proof = json(&[&["amend", arg(run), "--skip", "7"], &set[..]].concat());
    let keys: Vec<_> =
        proof["numbers"].as_array().unwrap().iter().map(|row| row["key"].clone()).collect();
    assert_eq!(
        (keys, &proof["skip"]),
        (vec!["optimizer.lr".into(), "dtype".into()], &Value::Bool(true))
    );
    assert_eq!(proof["digest_of_run"][0], proof["digest_of_run"][1]);
    assert!(
        fs::read_to_string(run).unwrap().contains("optimizer = { lr = 5e-3 }\ndtype = \"bf16\"")
    );
}

/// Refused amendments leave the file untouched.
fn refused(run: &Path, id: &str) {
    let before = fs::read_to_string(run).unwrap();
    let cases: [(&[&str], &str); 22] = [
        (&["--step", "8", "--mix", "web=1/9223372036854775807,math=1"], "too fine"),
        (&["--step", "6", "--mix", "web=1"], "order of their steps"),
        (&["--step", "21", "--mix", "web=1"], "does not have this step"),
        (&["--step", "8", "--mix", "web=4,math=6"], "has already"),
        (&["--step", "8", "--mix", "web=1,meth=1"], "did you mean `math`?"),
        (&["--step", "8", "--ban", id], "banned already"),
        (&["--step", "8", "--ban", "nobody"], "nobody"),
        (&["--step", "8"], "--ban, --mix or --store"),
        (&["--step", "8", "--set", "optimizer.lr=5e-3"], "has already"),
        (&["--step", "8", "--set", "optimizer.betas=0.9"], "`betas` of optimizer"),
        (&["--step", "8", "--set", "momentum=0.9"], "optimizer, schedule, skip_step, auto_clip"),
        (&["--step", "8", "--set", "auto_clip.window=9"], "brings no `percentile`"),
        (&["--step", "8", "--set", "skip_step.window=3"], "out of range"),
        (&["--step", "8", "--set", "skip_step.non_finite=pass"], "`non_finite`"),
        (&["--step", "8", "--skip", "9"], "cannot be used with"),
        (&["--step", "8", "--set", "dtype=f8"], "`dtype` cannot have this value"),
        (&["--step", "8", "--set", "optimizer.lr"], "KEY=VALUE"),
        (&["--step", "8", "--set", "optimizer.lr=1", "--set", "optimizer.lr=2"], "twice"),
        (&["--skip", "0"], "1.."),
        (&["--step", "8", "--ban", "raw/math.jsonl#2"], "0#2"),
        (&["--step", "8", "--set", "schedule.final_lr=-1"], "out of range"),
        (
            &["--step", "13", "--mix", "math=1", "--ban", "nobody", "--source", "wep"],
            "did you mean",
        ),
    ];
    for (args, word) in cases {
        let told = zdata(&[&["amend", arg(run)], args].concat()).fails(2, &[word]);
        // The reported line exists in the file.
        let lines = before.lines().count();
        let line = told.split("run.toml:").nth(1).and_then(|it| it.split(':').next()?.parse().ok());
        assert!(line.is_none_or(|line: usize| line <= lines), "{told}");
        assert_eq!(fs::read_to_string(run).unwrap(), before);
    }
}

#[cfg(feature = "train")]
#[test]
fn a_run_takes_an_amendment_that_it_has_not_come_to() {
    use crate::support::ztrain;
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 100, "");
    let store = build(&scratch, &corpus, "store");
    let run = curriculum(
        &scratch,
        &store,
        "run.toml",
        &[("steps = 12", "steps = 4"), ("steps = 8", "steps = 2")],
    );
    let out = scratch.path("out");
    let train = |extra: &[&str]| {
        ztrain(
            &[&["--curriculum", arg(&run), "--out", arg(&out), "--validate-every", "0"], extra]
                .concat(),
        )
    };
    train(&["--stop-after", "3"]).ok();
    // Amending the run's own file is possible: the output says to continue with that file.
    let (own, begun) = (out.join("run.toml"), fs::read(out.join("run.toml")).unwrap());
    let said = zdata(&["amend", arg(&own), "--skip", "6"]);
    let next = format!("to go on: ztrain --curriculum {} --out {}", arg(&own), arg(&out));
    assert!(said.err.contains(&next), "{}", said.err);
    said.ok();
    // The original curriculum lacks the amendment: it is not dropped silently.
    let (amended, ledger) = (fs::read(&own).unwrap(), out.join("ledger.jsonl"));
    let before = fs::read(&ledger).unwrap();
    train(&[]).fails(2, &["run.toml", "amends step 6", "continue with `ztrain --curriculum"]);
    assert!(fs::read(&own).unwrap() == amended && fs::read(&ledger).unwrap() == before);
    fs::write(&own, begun).unwrap();
    // An active run has read its curriculum and would miss the amendment.
    let lock = fs::File::open(out.join("lock")).unwrap();
    lock.lock().unwrap();
    let amend = ["amend", arg(&own), "--skip", "6"];
    zdata(&amend).fails(2, &["run.toml", "under way"]);
    zdata(&[&amend[..], &["--dry-run"]].concat()).ok();
    drop(lock);
    // Another corpus with the same tokenizer and other source names.
    let text = fs::read_to_string(&corpus).unwrap();
    let more = scratch
        .write("more.toml", text.replace("\"web\"", "\"news\"").replace("\"math\"", "\"code\""));
    let more = build(&scratch, &more, "more");
    zdata(&["amend", arg(&run), "--step", "4", "--mix", "web=1,news=1", "--store", arg(&more)])
        .ok();
    assert!(
        fs::read_to_string(&run).unwrap().contains("store = \"more\""),
        "beside the curriculum"
    );
    train(&[]).ok();
    zdata(&["verify-run", arg(&out)]).ok();
    ztrain(&["replay", "--run", arg(&out), "--step", "4"]).ok();
    // The run's own curriculum: amended at a step already in the ledger, then edited by hand.
    let whole = fs::read_to_string(&own).unwrap();
    zdata(&["amend", arg(&own), "--step", "6", "--mix", "web=1"])
        .fails(2, &["trained already", "6 steps", "no step: every one"]);
    fs::write(&own, whole.replacen("seed = ", "seed = 1", 1)).unwrap();
    zdata(&["verify-run", arg(&out)]).fails(4, &["seed"]);
    fs::write(&own, whole.replacen("weight_decay = ", "weight_decay = 1", 1)).unwrap();
    zdata(&["verify-run", arg(&out)]).fails(4, &["weight_decay", "ledger.jsonl"]);
    fs::write(&own, whole).unwrap();
    zdata(&["amend", arg(&run), "--step", "5", "--mix", "web=1"]).ok();
    train(&[]).fails(2, &["amendment.2", "step 5 on"]);
}

/// Numbers are reported as typed; a document given twice is listed once.
#[test]
fn what_is_set_is_told_as_it_was_typed() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let run = curriculum(&scratch, &store, "run.toml", &[]);
    let amend = |more: &[&str]| zdata(&[&["amend", arg(&run), "--step", "5"], more].concat());
    amend(&["--set", "optimizer.lr=1e-4", "--set", "optimizer.lr=1e-5"])
        .fails(2, &["optimizer.lr=1e-4 and optimizer.lr=1e-5"]);
    let ran = amend(&["--set", "optimizer.lr=-1"]);
    ran.fails(2, &["`lr` is out of range", "-1"]);
    amend(&["--ban", "doc-1-3", "--ban", "doc-1-3"]).ok();
    let text = fs::read_to_string(&run).unwrap();
    assert_eq!(text.matches("is \"doc-1-3\"").count(), 1, "{text}");
}
