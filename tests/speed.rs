//! Fear: that the table of where the time is spent does not add up.
//!
//! Uses separate processes: timers are per process, and other tests would count too.

use crate::support::{Scratch, arg, build, corpus, curriculum, ztrain};

#[test]
fn the_parts_of_a_step_are_the_step() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    for (kind, optimizer, other) in [("muon", "Muon", ""), ("adamw", "AdamW", "Muon")] {
        let change = ("kind = \"muon\"", &*format!("kind = \"{kind}\""));
        let path = curriculum(&scratch, &store, "run.toml", &[change]);
        let command =
            ["bench", "step", "--curriculum", arg(&path), "--workers", "2", "--steps", "14"];
        let told = ztrain(&[&command[..], &["--json"]].concat()).ok();
        let told: serde_json::Value = serde_json::from_str(&told).unwrap();
        let table = &told["table"];
        let number = |key: &str| table[key].as_f64().unwrap();
        assert_eq!(number("tokens"), (11 * 8 * 64 + 3 * 6 * 128) as f64, "steps 2 to 15");
        let parts = table["parts"].as_array().unwrap();
        let spent = |name: &str| {
            let part = parts.iter().find(|part| part[0] == name);
            part.map_or(0.0, |part| part[1].as_f64().unwrap())
        };
        let inside: f64 = parts[1..].iter().map(|part| part[1].as_f64().unwrap()).sum();
        let idle = number("idle");
        assert!((inside + idle - 2.0 * number("seconds")).abs() < 1e-9, "{table}");
        assert!(idle >= 0.0 && inside > 0.0, "no part is counted twice: {table}");
        for part in
            [optimizer, "attention, forward", "experts, backward", "head and loss, both ways"]
        {
            assert!(spent(part) > 0.0, "{part}: {table}");
        }
        assert_eq!(spent(other), 0.0, "{table}");
        let rate = number("tokens") / number("seconds");
        assert!((told["tokens_per_second"].as_f64().unwrap() / rate - 1.0).abs() < 1e-9);
        let used = number("model_flops") / number("seconds") / number("limit");
        assert!((told["utilisation"].as_f64().unwrap() / used - 1.0).abs() < 1e-9 && used < 1.0);
        let shown = ztrain(&command).ok();
        for word in ["tokens/s", "attention, backward", "exactness", "utilisation"] {
            assert!(shown.contains(word), "no {word:?} in: {shown}");
        }
    }
    let path = scratch.path("run.toml");
    let command = ["bench", "step", "--curriculum", arg(&path), "--steps", "20"];
    ztrain(&command).fails(2, &["--steps", "19"]);
}

#[test]
fn a_traced_step_tells_where_its_time_went() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let file = scratch.path("step.json");
    let command =
        ["bench", "step", "--curriculum", arg(&path), "--steps", "2", "--trace", arg(&file)];
    let told = ztrain(&[&command[..], &["--json", "--workers", "2"]].concat()).ok();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["table"]["steps"], 2, "the traced one is beside those measured");
    let trace = &told["table"]["trace"];
    assert_eq!(trace["on_device"], false);
    let top = trace["top"].as_array().unwrap();
    let seconds = |share: &serde_json::Value| share["seconds"].as_f64().unwrap();
    assert!(top.len() == 10 && top.windows(2).all(|two| seconds(&two[0]) >= seconds(&two[1])));
    let named = |all: &serde_json::Value, name: &str| {
        all.as_array().unwrap().iter().any(|share| share["name"] == name && seconds(share) > 0.0)
    };
    assert!(named(&trace["parts"], "products by a library"), "{trace}");
    let all: f64 = trace["parts"].as_array().unwrap().iter().map(seconds).sum();
    assert!((all - trace["busy"].as_f64().unwrap()).abs() < 1e-9, "{trace}");
    // Two workers spend at most twice the step's time.
    assert!(all > 0.0 && all < 2.0 * trace["seconds"].as_f64().unwrap(), "{trace}");
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(!kept["traceEvents"].as_array().unwrap().is_empty());

    // A trace may be overwritten, other files not; and the traced step has to be in the curriculum.
    let shown = ztrain(&command).ok();
    for word in ["a traced step", "products by a library", "calls"] {
        assert!(shown.contains(word), "no {word:?} in: {shown}");
    }
    let over = ["bench", "step", "--curriculum", arg(&path), "--trace", arg(&path)];
    ztrain(&over).fails(2, &["--trace", "lose"]);
    ztrain(&[&command[..4], &["--steps", "19", "--trace", arg(&file)]].concat())
        .fails(2, &["--steps", "1 to 18", "one is traced"]);
}
