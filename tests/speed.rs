//! Fear: that the table of where the time goes does not add up.
//!
//! As processes of their own: the watches are the process's, and other tests would be on them.

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
