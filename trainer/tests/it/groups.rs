//! Fear: that a group of parameters takes other numbers than its own, or that ranks group them differently.

use contract::Class;
use loader::OpenedCurriculum;
use serde_json::Value;
use trainer::RunSpec;

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::Scratch;

/// A run of the curriculum with these groups and replacements; checksums of the weights after its steps, by name.
fn weights(
    scratch: &Scratch,
    out: &str,
    groups: &str,
    changes: &[(&str, &str)],
) -> Vec<Vec<Value>> {
    let tables = format!("{groups}\n[schedule]");
    scratch.edited("run.toml", &[changes, &[("[schedule]", tables.as_str())]].concat());
    scratch.train(out);
    let lines = scratch.ledger(out);
    let lines = lines.lines().skip(1).map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|mut line| vec![line["weight_checksums"].take(), line["losses"].take()]).collect()
}

fn group(params: &str, keys: &str) -> String {
    format!("[[optimizer.group]]\nparams = \"{params}\"\n{keys}\n")
}

/// Half of the rate for all is half of the rate, and no decay for all is no decay, for both optimizers.
#[test]
fn a_group_of_all_parameters_is_the_optimizer() {
    let scratch = Scratch::new();
    for kind in ["muon", "adamw"] {
        let kind = ("kind = \"muon\"", format!("kind = \"{kind}\""));
        let of = |changes: &[(&'static str, &'static str)]| {
            [&[(kind.0, kind.1.as_str())], changes].concat()
        };
        let rates = [("\nlr = 1e-2", "\nlr = 0.5e-2"), ("final_lr = 1e-3", "final_lr = 0.5e-3")];
        let half = weights(&scratch, "half", "", &of(&rates));
        let groups = group("model.embed*", "lr_scale = 0.5") + &group("*", "lr_scale = 0.5");
        assert_eq!(weights(&scratch, "scaled", &groups, &of(&[])), half);
        // Vectors have no decay of their own.
        let none =
            weights(&scratch, "none", "", &of(&[("weight_decay = 0.1", "weight_decay = 0")]));
        let groups = group("*", "weight_decay = 0");
        assert_eq!(weights(&scratch, "all", &groups, &of(&[])), none);
        assert_ne!(half, none);
        for out in ["half", "scaled", "none", "all"] {
            std::fs::remove_dir_all(scratch.path(out)).unwrap();
        }
    }
}

/// Parameters at rate 0 stay; the others, and any number of ranks, do as without groups.
#[test]
fn frozen_parameters_stay_on_any_ranks() {
    let scratch = Scratch::new();
    let groups = group("*.experts.*", "lr_scale = 0");
    weights(&scratch, "run", &groups, &[]);
    for outcome in train_with(&scratch, "ranks", 3, |_, _| ()) {
        outcome.unwrap();
    }
    assert_same(&scratch, "run", "ranks");
    let ledger = scratch.ledger("run");
    let lines: Vec<Value> =
        ledger.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names = lines[0]["parameters"].as_array().unwrap();
    let sums = |line: &Value| -> Vec<String> {
        let packed = line["weight_checksums"].as_str().unwrap();
        packed.as_bytes().chunks(16).map(|sum| String::from_utf8_lossy(sum).into_owned()).collect()
    };
    let (first, last) = (sums(&lines[1]), sums(&lines[10]));
    assert_eq!(first.len(), names.len());
    let mut frozen = 0;
    for (name, (first, last)) in names.iter().zip(first.iter().zip(&last)) {
        let experts = name.as_str().unwrap().contains(".experts.");
        assert_eq!(first == last, experts, "{name}");
        frozen += usize::from(experts);
    }
    assert!(frozen > 0);
}

#[test]
fn a_group_without_parameters_is_refused() {
    let scratch = Scratch::new();
    let cases = [
        (group("model.layers.7.*", "lr_scale = 2"), "no parameter of the model has such a name"),
        (group("[", "lr_scale = 2"), "no pattern of names"),
        (
            group("*", "lr_scale = 2") + &group("model.embed*", "lr_scale = 3"),
            "groups before this one have all of its parameters",
        ),
    ];
    for (groups, said) in cases {
        let path = scratch.edited("run.toml", &[("[schedule]", &format!("{groups}\n[schedule]"))]);
        let fault = RunSpec::new(&OpenedCurriculum::open(path).unwrap()).err().unwrap();
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains(said), "{fault}");
        assert!(fault.place().unwrap().contains("run.toml:"), "{fault}");
    }
}
