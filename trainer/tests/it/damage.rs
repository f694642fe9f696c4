//! Fear: that damaged data is trained on, or that damage costs more than necessary.

use std::fs;
use std::path::Path;

use contract::{Class, Digest, chain};

use crate::support::{Scratch, stop_after};

/// Flips one bit in the middle of a file.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(path, bytes).unwrap();
}

/// Changes one ledger line and recomputes the chain after it: a wrong number with a valid chain.
pub(crate) fn forge(path: &Path, step: usize, change: impl Fn(&mut serde_json::Value)) {
    let text = fs::read_to_string(path).unwrap();
    let (mut before, mut forged, mut out) = (Digest::default(), Digest::default(), String::new());
    for (number, line) in text.lines().enumerate() {
        let (mut body, after) = chain::open(before, line).unwrap();
        if number == step {
            let mut value: serde_json::Value = serde_json::from_str(&body).unwrap();
            let loss = value["loss"].clone();
            change(&mut value);
            let mut forged = value.to_string();
            if !loss.is_null() && value["loss"] == loss {
                // Parsing and printing a number may change its last digit.
                forged.replace_range(loss_in(&forged), &body[loss_in(&body)]);
            }
            body = forged;
        }
        let (sealed, next) = chain::seal(forged, &body);
        (before, forged) = (after, next);
        out += &(sealed + "\n");
    }
    fs::write(path, out).unwrap();
}

/// The range of a line that holds its loss.
fn loss_in(line: &str) -> std::ops::Range<usize> {
    let first = line.find("\"loss\":").unwrap() + "\"loss\":".len();
    first..first + line[first..].find([',', '}']).unwrap()
}

/// A ledger head without a plan version has version 1: its steps read other text than the present plan.
#[test]
fn a_run_whose_text_was_put_in_order_by_other_rules_is_refused() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
    forge(&scratch.path("run/ledger.jsonl"), 0, |head| {
        head.as_object_mut().unwrap().remove("plan").unwrap();
    });
    let fault = scratch.run(&scratch.path("run.toml"), "run", stop_after(4)).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    for word in ["ledger.jsonl", "version 1 of the plan", "--out"] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
}

/// The files of a checkpoint.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn a_damaged_checkpoint_falls_back_to_the_one_before() {
    let scratch = Scratch::new();
    scratch.train("whole");
    scratch.run(&scratch.path("run.toml"), "run", stop_after(8)).unwrap();
    let names = files(&scratch.path("run/checkpoints/step-8"));
    let name = |kind: &str| {
        let named = |path: &&std::path::PathBuf| {
            path.file_name().unwrap().to_str().unwrap().starts_with(kind)
        };
        names.iter().rfind(named).unwrap().file_name().unwrap().to_owned()
    };
    for file in ["weights", "moments", "balance", "manifest"].map(name) {
        let scratch = Scratch::new();
        scratch.run(&scratch.path("run.toml"), "run", stop_after(8)).unwrap();
        flip(&scratch.path("run/checkpoints/step-8").join(&file));
        scratch.train("run");
        let events = fs::read_to_string(scratch.path("run/events.jsonl")).unwrap();
        assert!(
            events.contains("damaged checkpoint") && events.contains("\"from_step\":6"),
            "{file:?}: {events}"
        );
        assert!(scratch.path("run/checkpoints/damaged-step-8").join(&file).exists());
        assert!(scratch.path("run/checkpoints/step-10/manifest.json").exists());
    }
}

#[test]
fn ranks_pass_over_damage_together() {
    let scratch = Scratch::new();
    scratch.train("whole");
    scratch.run(&scratch.path("run.toml"), "run", stop_after(8)).unwrap();
    // The last blob of the moments belongs to one rank of five: the others do not read it.
    let files = files(&scratch.path("run/checkpoints/step-8"));
    let is_moments = |path: &&std::path::PathBuf| path.to_str().unwrap().contains("/moments-");
    flip(files.iter().rfind(is_moments).unwrap());
    let outcomes = crate::ranks::train_with(&scratch, "run", 5, |_, _| ());
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().is_ok_and(|ended| ended.step == 10)));
    crate::same_bits::assert_same(&scratch, "whole", "run");
    let events = fs::read_to_string(scratch.path("run/events.jsonl")).unwrap();
    assert!(
        events.contains("damaged checkpoint") && events.contains("\"from_step\":6"),
        "{events}"
    );
}

#[test]
fn without_any_good_checkpoint_a_run_stops_until_it_is_told_to_begin_again() {
    let scratch = Scratch::new();
    scratch.train("whole");
    scratch.run(&scratch.path("run.toml"), "run", stop_after(4)).unwrap();
    for step in [3, 4] {
        let folder = scratch.path(&format!("run/checkpoints/step-{step}"));
        fs::remove_file(folder.join("moments-00000.safetensors")).unwrap();
    }
    let before = scratch.tree("run");
    let fault = scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Data, "{fault}");
    for word in ["step-4, step-3", "--restart", "moments-00000"] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
    assert!(
        before == scratch.tree("run"),
        "nothing was renamed: the next command must not take it for a new run"
    );
    scratch.run(&scratch.path("run.toml"), "run", |exec| exec.restart = true).unwrap();
    assert!(scratch.ledger("whole") == scratch.ledger("run"));
    assert!(scratch.path("run/checkpoints/damaged-step-4").exists());
}

/// A folder without checkpoints looks like that of a run that had none yet, but events.jsonl lists them.
#[test]
fn a_run_whose_checkpoints_are_gone_does_not_begin_again_by_itself() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(4)).unwrap();
    fs::remove_dir_all(scratch.path("run/checkpoints")).unwrap();
    // A line that cannot be parsed does not hide later ones.
    let events = scratch.path("run/events.jsonl");
    let spoilt = [b"\xff\xfe\n", fs::read(&events).unwrap().as_slice()].concat();
    fs::write(&events, spoilt).unwrap();
    for _ in 0..2 {
        let fault = scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        for word in ["checkpoints are missing", "step-4", "events.jsonl", "--restart"] {
            assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
        }
    }
    scratch.run(&scratch.path("run.toml"), "run", |exec| exec.restart = true).unwrap();
}

/// The manifest is written last, so a checkpoint without one looks like the leftover of a kill, but events.jsonl lists
/// it.
#[test]
fn a_checkpoint_whose_manifest_is_gone_is_set_aside_and_never_removed_by_a_refusal() {
    let scratch = Scratch::new();
    let every = |steps| {
        move |exec: &mut trainer::ExecOptions| {
            stop_after(steps)(exec);
            (exec.checkpoint_every, exec.retention.newest) = (2, 10);
        }
    };
    scratch.run(&scratch.path("run.toml"), "run", every(6)).unwrap();
    let place = |step: u64, name: &str| scratch.path(&format!("run/checkpoints/{name}step-{step}"));
    let aside = |step: u64| scratch.path(&format!("manifest-{step}"));
    for step in [2, 4, 6] {
        fs::rename(place(step, "").join("manifest.json"), aside(step)).unwrap();
    }
    let before = scratch.tree("run/checkpoints");
    let fault = scratch.run(&scratch.path("run.toml"), "run", every(8)).unwrap_err();
    assert_eq!(fault.class(), Class::Data, "{fault}");
    assert!(
        fault.to_string().contains("without their manifest: step-2, step-4, step-6"),
        "{fault}"
    );
    assert!(scratch.tree("run/checkpoints") == before, "something was removed");
    for step in [2, 6] {
        fs::rename(aside(step), place(step, "").join("manifest.json")).unwrap();
    }
    // A half-written leftover of a kill may be removed.
    fs::create_dir_all(place(7, "")).unwrap();
    let weights = |folder: &Path| files(folder).into_iter().next().unwrap();
    fs::copy(
        weights(&place(4, "")),
        place(7, "").join(weights(&place(4, "")).file_name().unwrap()),
    )
    .unwrap();
    scratch.run(&scratch.path("run.toml"), "run", every(8)).unwrap();
    assert!(place(4, "damaged-").exists() && !place(4, "").exists());
    assert_eq!(files(&place(4, "damaged-")).len() + 1, files(&place(6, "")).len());
    assert!(!place(7, "").join("manifest.json").exists() && !place(7, "damaged-").exists());
    let events = fs::read_to_string(scratch.path("run/events.jsonl")).unwrap();
    assert!(events.contains("its manifest is missing"), "{events}");
}

/// The ledger defines what was trained: the readable copy of the curriculum is rewritten whatever it contains.
#[test]
fn a_run_goes_on_whatever_its_curriculum_for_people_has_become() {
    let scratch = Scratch::new();
    scratch.train("whole");
    scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
    let copy = scratch.path("run/run.toml");
    let whole = fs::read(&copy).unwrap();
    for (after, spoilt) in [(3, &b""[..]), (4, b"\xff\xfe"), (5, &whole[..whole.len() / 2])] {
        fs::write(&copy, spoilt).unwrap();
        scratch.run(&scratch.path("run.toml"), "run", stop_after(after)).unwrap();
        assert_eq!(fs::read(&copy).unwrap(), whole);
    }
    scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap();
    assert!(scratch.ledger("whole") == scratch.ledger("run"));
}

#[test]
fn a_checkpoint_of_another_version_is_not_called_damaged() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(3)).unwrap();
    let manifest = scratch.path("run/checkpoints/step-3/manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    assert!(text.contains("\"format\":2"), "{text}");
    fs::write(&manifest, text.replacen("\"format\":2", "\"format\":1", 1)).unwrap();
    let fault = scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Data, "{fault}");
    for word in ["written by another version", "format 1", "format 2", "go on with"] {
        assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
    }
    assert!(!fault.to_string().contains("damaged"), "{fault}");
    assert!(!fault.to_string().contains("--restart"), "{fault}");
}

#[test]
fn a_ledger_that_was_changed_and_chained_anew_stops_the_run() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(5)).unwrap();
    forge(&scratch.path("run/ledger.jsonl"), 1, |line| line["norm"] = "3ff0000000000000".into());
    let run = |restart: bool| {
        scratch.run(&scratch.path("run.toml"), "run", |exec| exec.restart = restart).unwrap_err()
    };
    let fault = run(false);
    assert_eq!(fault.class(), Class::Data, "{fault}");
    assert!(fault.to_string().contains("does not belong to the ledger"), "{fault}");
    assert_eq!(run(true).class(), Class::Mismatch);
}

#[test]
fn a_checkpoint_of_another_run_is_not_taken() {
    let scratch = Scratch::new();
    let other = scratch.edited("other.toml", &[("seed = 11", "seed = 12")]);
    scratch.run(&other, "other", stop_after(6)).unwrap();
    scratch.train("whole");
    scratch.run(&scratch.path("run.toml"), "run", stop_after(6)).unwrap();
    let place = |run: &str| scratch.path(run).join("checkpoints/step-6");
    fs::remove_dir_all(place("run")).unwrap();
    fs::rename(place("other"), place("run")).unwrap();
    scratch.train("run");
    assert!(scratch.ledger("whole") == scratch.ledger("run"));
}

#[test]
fn a_recorded_step_that_comes_out_differently_stops_the_run() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(5)).unwrap();
    let whole = scratch.tree("run");
    let ledger = scratch.path("run/ledger.jsonl");
    type Edit<'a> = &'a dyn Fn(&mut serde_json::Value);
    let cases: [(&str, Edit<'_>); 5] = [
        ("step 4 was computed again and its learning rate", &|line| {
            line["lr"] = "3ff0000000000000".into()
        }),
        ("those of its layers make", &|line| line["norm"] = "3ff0000000000000".into()),
        // As many tokens as the other routers counted, but one of them in another class.
        ("step 4 was computed again and its router counts of layer 1", &|line| {
            let counts = line["tokens_per_expert"][1].as_array_mut().unwrap();
            let mut numbers: Vec<u64> = counts.iter().map(|it| it.as_u64().unwrap()).collect();
            let from = (0..numbers.len()).max_by_key(|class| numbers[*class]).unwrap();
            let to = (from + 1) % numbers.len();
            (numbers[from], numbers[to]) = (numbers[from] - 1, numbers[to] + 1);
            *counts = numbers.into_iter().map(Into::into).collect();
        }),
        ("one router counted", &|line| line["tokens_per_expert"][1][0] = 1.into()),
        ("those of its micro-batches make", &|line| {
            let text = line["micro_batch_losses"].as_str().unwrap().to_owned();
            line["micro_batch_losses"] = format!("{}{}", &text[..32], "0123456789abcdef").into();
        }),
    ];
    for (words, change) in cases {
        fs::write(&ledger, &whole["ledger.jsonl"]).unwrap();
        // Checkpoints record the true chain, so only those before the forged step are accepted: step 3.
        forge(&ledger, 4, change);
        fs::create_dir_all(scratch.path("run/checkpoints/step-5")).unwrap();
        let fault = scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch);
        assert!(fault.to_string().contains(words), "{fault}");
    }
}

#[test]
fn a_changed_ledger_is_refused() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(5)).unwrap();
    let text = scratch.ledger("run").replacen("\"step\":4", "\"step\":5", 1);
    fs::write(scratch.path("run/ledger.jsonl"), text).unwrap();
    let fault = scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    assert!(fault.to_string().contains("ledger.jsonl:5"), "{fault}");
}
