//! Fear: that a ramp reads other text than its integral says, or that it reaches back to the steps before it.

use std::path::Path;

use serde_json::Value;

use crate::support::{Scratch, arg, build, corpus, curriculum, zdata};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&zdata(&[args, &["--json"]].concat()).ok()).unwrap()
}

const LONGER: (&str, &str) = ("max_epochs = 3", "max_epochs = 30");

#[test]
fn a_ramp_reads_what_its_integral_says() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let ramp = "mix = { from = { web = 9, math = 1 }, to = { web = 0.25, math = 0.75 } }";
    let change = [("mix = { web = 0.7, math = \"3/10\" }", ramp), LONGER];
    let run = curriculum(&scratch, &store, "run.toml", &change);
    // Over 96 sequences `math` moves from 2 to 15 twentieths along a straight line: brute force over its integral.
    let due = |m: u64| 2 * m * (192 - m) + 15 * m * m;
    let given = |m: u64| (2 * due(m) + 3840) / 7680;
    let mut seen = 0;
    for step in 1..13 {
        let batch = json(&["batch", arg(&run), "--step", &step.to_string()]);
        let sources: Vec<&str> = batch["sequences"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["source"].as_str().unwrap())
            .collect();
        let wanted: Vec<&str> = (seen..seen + 8)
            .map(|j| if given(j + 1) > given(j) { "math" } else { "web" })
            .collect();
        assert_eq!(sources, wanted, "step {step}");
        seen += 8;
        let id = batch["sequences"][0]["documents"][0]["id"].as_str().unwrap().to_owned();
        let places = json(&["where", arg(&run), "--doc", &id]);
        let mut places = places[0]["seen"].as_array().unwrap().iter();
        assert!(places.any(|place| place["step"] == step && place["sequence"] == 0), "{id}");
    }
    let plan = json(&["plan", arg(&run)]);
    let phase = &plan["phases"][0];
    assert_eq!(phase["curve"], "linear");
    let math = &phase["sources"][0];
    assert_eq!((&math["name"], &math["samples"]), (&"math".into(), &given(96).into()));
    assert!(math["share"] == 0.1 && math["end"]["share"] == 0.75, "{math}");
    let text = zdata(&["plan", arg(&run)]).ok();
    assert!(text.contains("; a linear ramp\n") && text.contains("10.00 to 75.00 %"), "{text}");
}

#[test]
fn a_later_ramp_leaves_the_steps_before_it() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let plain = curriculum(&scratch, &store, "plain.toml", &[LONGER]);
    let mix = "mix = { from = { web = 1 }, to = { math = 1 }, curve = \"cosine\" }";
    let ramp = ("mix = { web = 1, math = 3 }", mix);
    let run = curriculum(&scratch, &store, "run.toml", &[LONGER, ramp]);
    let longer = curriculum(
        &scratch,
        &store,
        "longer.toml",
        &[LONGER, ramp, ("\nsteps = 8", "\nsteps = 9")],
    );
    let digests = |path: &Path| zdata(&["digest", arg(path), "--steps", "1..21"]).ok();
    let same = |one: &str, other: &str| {
        one.lines().zip(other.lines()).take_while(|(one, other)| one == other).count()
    };
    let (plain, run, longer) = (digests(&plain), digests(&run), digests(&longer));
    assert_eq!((same(&plain, &run), run.lines().count()), (12, 20), "{run}");
    assert!((12..20).contains(&same(&run, &longer)), "a longer phase stretches its ramp");
    assert_eq!(run, digests(&scratch.path("run.toml")));
}

/// A batch that grows reads the same sequences in the same order, and `zdata` has one row for it.
#[test]
fn a_batch_that_grows_moves_no_sequence() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    // 12 steps of 8 are 96 sequences; 4 x 4 + 4 x 8 + 4 x 12 are as many.
    let plain = curriculum(&scratch, &store, "plain.toml", &[]);
    let growing = ("batch = 8", "batch = { from = 4, to = 12, every = 4, by = 4 }");
    let run = curriculum(&scratch, &store, "run.toml", &[growing]);
    let read = |path: &Path| {
        let rows = |step: u64| {
            let batch = json(&["batch", arg(path), "--step", &step.to_string()]);
            batch["sequences"].as_array().unwrap().clone()
        };
        (1..13)
            .map(rows)
            .map(|rows| rows.iter().map(|row| row["spans"].to_string()).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    let (plain_rows, rows) = (read(&plain), read(&run));
    let sizes: Vec<usize> = rows.iter().map(Vec::len).collect();
    assert_eq!(sizes, [4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]);
    assert_eq!(plain_rows.concat(), rows.concat());
    let plan = json(&["plan", arg(&run)]);
    assert_eq!(plan["phases"].as_array().unwrap().len(), 2);
    assert_eq!(plan["phases"][0]["batches"].to_string(), "[[1,4],[5,8],[9,12]]");
    assert_eq!(plan["phases"][0]["samples"], 96);
    let text = zdata(&["plan", arg(&run)]).ok();
    assert!(text.contains("; 4, 8, 12 sequences of 64 tokens in a step"), "{text}");
}
