//! Fear: that data which follows from losses is shown before it is fixed, or that a ledger is believed whose weights do
//! not follow.

use std::fs;

use contract::{Digest, chain};
use serde_json::Value;

use crate::support::{Scratch, arg, build, corpus, curriculum, zdata, ztrain};

#[test]
fn a_run_fixes_what_its_mix_reads() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let mix = "mix = { rule = \"learnability\", start = { web = 0.7, math = 0.3 }, window = 3, rate = 0.5 }";
    let change =
        [("mix = { web = 0.7, math = \"3/10\" }", mix), ("max_epochs = 3", "max_epochs = 30")];
    let path = curriculum(&scratch, &store, "run.toml", &change);
    let path = arg(&path);
    let run = scratch.path("run");
    // Steps 1 to 6 have the weights of the start; nothing after them is fixed.
    zdata(&["batch", path, "--step", "6"]).ok();
    let missing =
        ["step 7 is not fixed", "weights up to step 6", "losses of the steps up to 3", "--run RUN"];
    zdata(&["batch", path, "--step", "7"]).fails(2, &missing);
    zdata(&["digest", path, "--steps", "5..8"]).fails(2, &missing);
    zdata(&["batch", path, "--step", "7", "--run", arg(&run)]).fails(2, &["not a run"]);
    let plan = zdata(&["plan", path]).ok();
    let bounds = [
        "reacts to the loss by learnability, in windows of 3 steps; 2 windows fixed, up to step 6",
    ];
    assert!(
        bounds.iter().all(|text| plan.contains(text)) && plan.contains("math: 1.00 to 99.00 %"),
        "{plan}"
    );

    ztrain(&["--curriculum", path, "--out", arg(&run), "--workers", "1", "--quiet"]).ok();
    let ledger = fs::read_to_string(run.join("ledger.jsonl")).unwrap();
    let lines: Vec<Value> =
        ledger.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let digests = zdata(&["digest", path, "--steps", "1..21", "--run", arg(&run)]).ok();
    let recorded: String = lines
        .iter()
        .map(|line| format!("{} {}\n", line["step"], line["batch_digest"].as_str().unwrap()))
        .collect();
    assert_eq!(digests, recorded);
    let batch = zdata(&["batch", path, "--step", "11", "--run", arg(&run), "--json"]).ok();
    let batch: Value = serde_json::from_str(&batch).unwrap();
    assert_eq!(batch["digest"], lines[10]["batch_digest"]);
    let id = batch["sequences"][2]["documents"][0]["id"].as_str().unwrap().to_owned();
    let places = zdata(&["where", path, "--doc", &id, "--run", arg(&run), "--json"]).ok();
    let places: Value = serde_json::from_str(&places).unwrap();
    let seen =
        places.as_array().unwrap().iter().flat_map(|place| place["seen"].as_array().unwrap());
    assert!(seen.clone().any(|place| place["step"] == 11 && place["sequence"] == 2), "{places}");
    zdata(&["verify-run", arg(&run)]).ok();

    // A weight under a chain that holds, in a folder without checkpoints that know better.
    let (mut old, mut link, mut forged) = (Digest::default(), Digest::default(), String::new());
    for line in ledger.lines() {
        let (body, after) = chain::open(old, line).unwrap();
        old = after;
        let body =
            match serde_json::from_str::<Value>(line).unwrap()["mix_weights"]["math"].as_u64() {
                Some(part) if body.contains("\"step\":10,") => {
                    body.replace(&format!("\"math\":{part}"), &format!("\"math\":{}", part + 1))
                }
                _ => body,
            };
        let (line, after) = chain::seal(link, &body);
        link = after;
        forged += &(line + "\n");
    }
    fs::write(run.join("ledger.jsonl"), forged).unwrap();
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    zdata(&["verify-run", arg(&run)])
        .fails(4, &["from step 10 on do not follow from the losses", "ledger.jsonl:11"]);
    zdata(&["batch", path, "--step", "11", "--run", arg(&run)]).fails(4, &["do not follow"]);
}

/// Where a run's losses decide what was read, its ledger decides whether an amendment can run.
#[test]
fn an_amendment_with_which_a_source_runs_out_is_refused_before_the_run_goes_on() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let mix = "mix = { rule = \"learnability\", start = { web = 0.7, math = 0.3 }, window = 3, rate = 0.5 }";
    let change = [
        ("mix = { web = 0.7, math = \"3/10\" }", mix),
        ("mix = { web = 1, math = 3 }", "mix = { web = 1 }"),
        ("steps = 12", "steps = 60"),
        ("max_epochs = 3", "max_epochs = 1"),
        ("[model]", "[source.web]\nmax_epochs = 30\n\n[model]"),
    ];
    let path = curriculum(&scratch, &store, "begun.toml", &change);
    let (run, begun) = (scratch.path("run"), arg(&path).to_owned());
    let train = |file: &str, extra: &[&str]| {
        let words = ["--curriculum", file, "--out", arg(&run), "--workers", "1", "--quiet"];
        ztrain(&[&words[..], extra].concat())
    };
    train(&begun, &["--stop-after", "9"]).ok();
    let own = run.join("run.toml");
    let before = fs::read(&own).unwrap();
    let why = ["source \"math\" runs out at step", "the amendment that", "max_epochs"];
    zdata(&["amend", arg(&own), "--step", "10", "--mix", "math=1"]).fails(2, &why);
    assert_eq!(fs::read(&own).unwrap(), before);
    let proof = zdata(&["amend", arg(&own), "--step", "10", "--mix", "web=1", "--json"]).ok();
    let proof: Value = serde_json::from_str(&proof).unwrap();
    assert_ne!(proof["digest_of_run"][0], proof["digest_of_run"][1], "{proof}");

    // The same in a file that says nothing of the run: what knows the ledger refuses it.
    let text =
        fs::read_to_string(&path).unwrap() + "\n[[amendment]]\nstep = 10\nmix = { math = 1 }\n";
    let amended = scratch.write("amended.toml", text);
    let why = ["source \"math\" runs out at step", "amended.toml:"];
    zdata(&["plan", arg(&amended), "--run", arg(&run)]).fails(2, &why);
    let ledger = fs::read(run.join("ledger.jsonl")).unwrap();
    fs::write(&own, &before).unwrap();
    train(arg(&amended), &[]).fails(2, &why);
    assert_eq!(fs::read(run.join("ledger.jsonl")).unwrap(), ledger);
    train(&begun, &["--stop-after", "12"]).ok();
}
