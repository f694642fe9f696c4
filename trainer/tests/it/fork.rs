//! Fear: that a fork differs from the run whose steps it shares, or from what it says it becomes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use contract::{Class, Result};
use serde_json::Value;
use storage::crash::Recording;
use tch::Device;
use tools::change::WhatIfChange;
use tools::compare::compare;
use tools::fork::{ForkRequest, Forked, fork};
use tools::replay::whatif::imagine;
use trainer::ExecOptions;
use trainer::checkpoint::Retention;
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::explain::dropping;
use crate::ranks::train_with;
use crate::support::{CURRICULUM, Scratch, stop_after, table};

/// Forks `run` into the folder `out`.
fn forked(scratch: &Scratch, step: u64, out: &str, change: &WhatIfChange) -> Result<Forked> {
    let (run, out) = (scratch.path("run"), scratch.path(out));
    fork(&ForkRequest { run: &run, step, out: &out, stores: &[], change, amend: None }, &table())
}

/// Continues a fork.
fn go_on(scratch: &Scratch, out: &str) {
    let curriculum = scratch.path(out).join("run.toml");
    assert_eq!(scratch.run(&curriculum, out, keep_all).unwrap().step, 10);
}

fn keep_all(exec: &mut ExecOptions) {
    exec.retention = Retention { newest: 9, every: 0, aged: false, pinned: 8 };
}

fn lines(scratch: &Scratch, out: &str) -> Vec<String> {
    scratch.ledger(out).lines().map(str::to_owned).collect()
}

/// The results of a step: its line without the chain and a curriculum.
fn computed(line: &str) -> BTreeMap<String, Value> {
    let mut line: BTreeMap<String, Value> = serde_json::from_str(line).unwrap();
    line.remove("chain");
    line.remove("curriculum");
    line
}

/// The documents of a step by mean loss, worst first.
fn documents(scratch: &Scratch, step: u64) -> Vec<String> {
    let mut replayer =
        Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(step - 1).unwrap();
    let documents = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap().documents;
    documents.into_iter().filter(|one| one.labels > 4).map(|one| one.id).collect()
}

#[test]
fn a_fork_shares_its_past_and_does_what_was_imagined() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", keep_all).unwrap();
    let before = scratch.tree("run");
    let worst = documents(&scratch, 6)[0].clone();
    let change = dropping(&[&worst]);
    // Between two checkpoints: steps 4 and 5 are recomputed.
    let made = forked(&scratch, 5, "fork", &change).unwrap();
    assert_eq!((made.step, made.steps, made.checkpoints), (5, 10, vec![3]));
    assert!(made.changes[0].contains("amendment.1") && made.changes[0].contains("step 6"));
    assert_eq!(lines(&scratch, "fork"), lines(&scratch, "run")[..6]);
    assert!(!scratch.path("fork.partial").exists());
    go_on(&scratch, "fork");
    assert!(before == scratch.tree("run"), "the run that was forked is as it was");
    let (run, new) = (lines(&scratch, "run"), lines(&scratch, "fork"));
    assert_eq!(run[..6], new[..6], "line by line, byte for byte");
    let at: Value = serde_json::from_str(&new[6]).unwrap();
    assert!(at["curriculum"].as_str().unwrap().contains("[[amendment]]\nstep = 6"));
    assert!(new[7..].iter().all(|line| !line.contains("\"curriculum\"")));
    // An uninterrupted run with the same text, on other ranks, is the same from the first step to the last.
    let own = fs::read_to_string(scratch.path("fork/run.toml")).unwrap();
    scratch.write("run.toml", &own);
    train_with(&scratch, "straight", 3, |_, _| ());
    let straight = lines(&scratch, "straight");
    for step in 1..=10 {
        assert_eq!(computed(&new[step]), computed(&straight[step]), "step {step}");
        assert_eq!(computed(&new[step]) == computed(&run[step]), step < 6, "step {step}");
    }
    // The counterfactual of the old run equals what the new run recorded.
    let open = |run: &str| {
        Replayer::open(&scratch.path(run), &table(), Device::Cpu, Workers::new(2)).unwrap()
    };
    for (line, would) in
        new[6..].iter().zip(imagine(&mut open("run"), 6..11, &change).unwrap().steps)
    {
        let norm = format!("{:016x}", would.would_be.1.to_bits());
        assert_eq!(computed(line)["norm"], norm, "step {}", would.step);
    }
    for step in [2, 5, 6, 10] {
        let mut replayer = open("fork");
        let mut state = replayer.state_after(step - 1).unwrap();
        let replayed = tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
        assert_eq!(replayed.verdict, Verdict::SameBits, "step {step}: {:?}", replayed.difference);
    }
    let answer = compare(&scratch.path("run"), &scratch.path("fork")).unwrap();
    assert_eq!(answer.difference.unwrap().0, 6);
    assert_eq!(answer.notes, ["b was forked from a after step 5"]);
    // A fork of the fork, from its first state.
    let request = ForkRequest {
        run: &scratch.path("fork"),
        step: 7,
        out: &scratch.path("second"),
        stores: &[],
        change: &WhatIfChange { lr: Some(1e-3), ..WhatIfChange::default() },
        amend: None,
    };
    assert_eq!(fork(&request, &table()).unwrap().checkpoints, [3, 6]);
    go_on(&scratch, "second");
    assert_eq!(lines(&scratch, "second")[..8], new[..8]);
    let notes = compare(&scratch.path("run"), &scratch.path("second")).unwrap().notes;
    assert!(notes[0].ends_with("fork after step 7"), "{notes:?}");
}

/// A fork's events say the same as the run's about the machines of the shared steps, and the edits.
#[test]
fn a_fork_knows_who_computed_what_it_shares() {
    let scratch = Scratch::new();
    assert!(
        train_with(&scratch, "run", 2, |_, exec| stop_after(4)(exec)).iter().all(Result::is_ok)
    );
    let later = "\n[[amendment]]\nstep = 9\nmix = { web = 5, math = 2 }\n";
    scratch.write("run.toml", &(CURRICULUM.to_owned() + later));
    scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap();
    forked(&scratch, 6, "fork", &WhatIfChange::default()).unwrap();
    let told = |run: &str, event: &str| -> Vec<String> {
        let text = fs::read_to_string(scratch.path(run).join("events.jsonl")).unwrap();
        let is_it = |line: &&str| line.contains(&format!("\"event\":\"{event}\""));
        text.lines().filter(is_it).map(str::to_owned).collect()
    };
    for event in ["ranks", "edit", "start"] {
        assert!(!told("run", event).is_empty(), "{event}");
        assert_eq!(told("run", event), told("fork", event));
    }
}

/// Every check runs before a command is suggested that could not run.
#[test]
fn a_fork_shares_no_checkpoint_that_is_not_whole_or_another_runs() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", keep_all).unwrap();
    let other = scratch.edited("other.toml", &[("seed = 11", "seed = 12")]);
    scratch.run(&other, "other", keep_all).unwrap();
    let at = |run: &str, step: u64| scratch.path(&format!("{run}/checkpoints/step-{step}"));
    let blob = fs::read_dir(at("run", 6)).unwrap().map(|entry| entry.unwrap().path());
    let blob = blob.into_iter().find(|path| path.ends_with("balance.safetensors")).unwrap();
    fs::OpenOptions::new().write(true).open(blob).unwrap().set_len(9).unwrap();
    fs::remove_dir_all(at("run", 9)).unwrap();
    fs::rename(at("other", 9), at("run", 9)).unwrap();
    let none = WhatIfChange::default();
    assert_eq!(forked(&scratch, 9, "fork", &none).unwrap().checkpoints, [3]);
    go_on(&scratch, "fork");
    assert!(scratch.ledger("fork") == scratch.ledger("run"));
    let events = fs::read_to_string(scratch.path("fork/events.jsonl")).unwrap();
    assert!(events.contains("\"event\":\"forked\""), "{events}");
}

/// If no checkpoint of the shared steps is left, they are recomputed; files that the fork never had are not missed.
#[test]
fn a_fork_from_before_the_oldest_checkpoint_goes_on() {
    let scratch = Scratch::new();
    let newest = |exec: &mut ExecOptions| {
        exec.retention = Retention { newest: 1, every: 0, aged: false, pinned: 8 };
    };
    scratch.run(&scratch.path("run.toml"), "run", newest).unwrap();
    // Events prove nothing, so one of their lines may be damaged.
    let events = scratch.path("run/events.jsonl");
    let spoilt = [b"\xff\xfe\n", fs::read(&events).unwrap().as_slice()].concat();
    fs::write(&events, spoilt).unwrap();
    let worst = documents(&scratch, 5).swap_remove(0);
    let made = forked(&scratch, 3, "early", &dropping(&[&worst])).unwrap();
    assert!(made.checkpoints.is_empty());
    go_on(&scratch, "early");
    let (run, early) = (lines(&scratch, "run"), lines(&scratch, "early"));
    assert_eq!(run[..4], early[..4]);
}

#[test]
fn forks_from_any_step_and_with_every_change_are_straight_runs() {
    let scratch = Scratch::new();
    scratch.train("run");
    let amend = scratch.write(
        "more.toml",
        "[[amendment]]\nstep = 9\nmix = { web = 3, math = 1 }\noptimizer = { clip = 1e-2 }\n",
    );
    let sources = WhatIfChange { drop_sources: vec!["web".to_owned()], ..WhatIfChange::default() };
    let cases = [
        (0, WhatIfChange { clip: Some(1e-3), ..WhatIfChange::default() }, None),
        (6, WhatIfChange { skip: true, lr: Some(5e-3), ..WhatIfChange::default() }, None),
        (7, sources, None),
        (8, WhatIfChange::default(), Some(amend.as_path())),
    ];
    for (number, (step, change, amend)) in cases.into_iter().enumerate() {
        let out = format!("fork-{number}");
        let (run, path) = (scratch.path("run"), scratch.path(&out));
        let request =
            ForkRequest { run: &run, step, out: &path, stores: &[], change: &change, amend };
        let made = fork(&request, &table()).unwrap();
        assert!(!made.changes.is_empty());
        go_on(&scratch, &out);
        let own = fs::read_to_string(path.join("run.toml")).unwrap();
        scratch.write("run.toml", &own);
        let straight = format!("straight-{number}");
        scratch.train(&straight);
        let (fork, straight, run) =
            (lines(&scratch, &out), lines(&scratch, &straight), lines(&scratch, "run"));
        for at in 1..=10 {
            assert_eq!(computed(&fork[at]), computed(&straight[at]), "{change:?}, step {at}");
        }
        assert!(computed(&fork[step as usize + 1]) != computed(&run[step as usize + 1]));
    }
}

/// Whatever a kill or a power loss leaves while a fork is made, the fork does not exist or is complete. The forked run
/// is unchanged, and the same command makes a missing fork.
#[test]
fn a_crash_leaves_no_fork_or_a_whole_one() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(8)).unwrap();
    let old = scratch.tree("run");
    let change = WhatIfChange { clip: Some(1e-3), ..WhatIfChange::default() };
    let root = scratch.path("run").parent().unwrap().to_owned();
    let (recording, made) = Recording::of(&root, || forked(&scratch, 7, "fork", &change));
    assert_eq!(made.unwrap().checkpoints, [3, 6]);
    let whole = scratch.tree("fork");
    assert!(recording.acts() > 20 && whole.contains_key("forked.json"), "{:?}", whole.keys());
    let (mut none, mut some) = (0, 0);
    recording.each(60, |state| {
        assert!(old == scratch.tree("run"), "{}", state.told);
        if scratch.path("fork").exists() {
            some += 1;
        } else {
            none += 1;
            forked(&scratch, 7, "fork", &change).unwrap();
        }
        assert!(whole == scratch.tree("fork"), "{}", state.told);
    });
    assert!(none > 10 && some > 0, "{none} {some}");
}

/// A fork is built in `fork.partial`. Content there that no fork left belongs to the user: notes, a run, a trained
/// fork.
#[test]
fn a_folder_in_the_way_that_no_fork_left_stays_as_it_is() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(4)).unwrap();
    let none = WhatIfChange::default();
    let refused = |what: &str| {
        let before = scratch.tree("fork.partial");
        assert!(!before.is_empty());
        let fault = forked(&scratch, 3, "fork", &none).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{what}: {fault}");
        assert!(fault.to_string().contains("fork.partial"), "{what}: {fault}");
        assert!(before == scratch.tree("fork.partial"), "{what}");
        assert!(!scratch.path("fork").exists(), "{what}");
        fs::remove_dir_all(scratch.path("fork.partial")).unwrap();
    };
    fs::create_dir_all(scratch.path("fork.partial/notes")).unwrap();
    scratch.write("fork.partial/notes/thesis.txt", "three years");
    refused("a user's files");
    scratch.run(&scratch.path("run.toml"), "fork.partial", stop_after(1)).unwrap();
    refused("a run");
    forked(&scratch, 3, "fork.partial", &none).unwrap();
    scratch.run(&scratch.path("fork.partial/run.toml"), "fork.partial", stop_after(4)).unwrap();
    refused("a fork that was trained");
    fs::create_dir(scratch.path("fork.partial")).unwrap();
    assert_eq!(forked(&scratch, 3, "fork", &none).unwrap().step, 3, "an empty folder is no loss");
}

#[test]
fn what_cannot_be_forked_is_refused_and_a_kill_leaves_nothing_in_the_way() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(8)).unwrap();
    let none = WhatIfChange::default();
    let refused = |step: u64, out: &str, change: &WhatIfChange, words: &[&str]| {
        let fault = forked(&scratch, step, out, change).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        assert!(words.iter().all(|word| fault.to_string().contains(word)), "{fault}");
        assert!(!scratch.path("fork").exists());
    };
    refused(9, "fork", &none, &["8 of them recorded", "0 to 8"]);
    refused(6, "run", &none, &["already"]);
    refused(6, "fork", &dropping(&["nobody"]), &["nobody"]);
    let without = |sources: &[&str]| {
        let drop_sources = sources.iter().map(|name| (*name).to_owned()).collect();
        WhatIfChange { drop_sources, ..none.clone() }
    };
    refused(6, "fork", &without(&["news"]), &["news", "math, web"]);
    refused(6, "fork", &without(&["web", "math"]), &["--drop-source math: ", "only source"]);
    refused(6, "fork", &WhatIfChange { fp32: true, ..none.clone() }, &["already"]);
    let early = scratch.write("early.toml", "[[amendment]]\nstep = 6\nskip = true\n");
    let (run, out) = (scratch.path("run"), scratch.path("fork"));
    let request = ForkRequest {
        run: &run,
        step: 6,
        out: &out,
        stores: &[],
        change: &none,
        amend: Some(&early),
    };
    let fault = fork(&request, &table()).unwrap_err();
    assert!(fault.to_string().contains("step 6, which is shared"), "{fault}");
    let fault = fork(&ForkRequest { run: Path::new("nowhere"), amend: None, ..request }, &table());
    assert!(fault.unwrap_err().to_string().contains("not a run"));

    // Leftovers of a kill at any point: the origin, another ledger, half a checkpoint, an unrelated file.
    fs::create_dir_all(scratch.path("fork.partial/checkpoints/step-3")).unwrap();
    for (name, text) in [
        ("forked.json", ""),
        ("ledger.jsonl", "half"),
        ("checkpoints/step-3/manifest.json", "{"),
        ("x", ""),
    ] {
        fs::write(scratch.path("fork.partial").join(name), text).unwrap();
    }
    let change = dropping(&[&documents(&scratch, 7)[0]]);
    assert_eq!(forked(&scratch, 6, "fork", &change).unwrap().checkpoints, [3, 6]);
    assert!(!scratch.path("fork.partial").exists() && !scratch.path("fork/x").exists());
    go_on(&scratch, "fork");
    let events = fs::read_to_string(scratch.path("fork/events.jsonl")).unwrap();
    let steps = events.lines().filter(|line| line.contains("\"event\":\"step\"")).count();
    assert_eq!(steps, 10, "each step was timed once, here or there");
    let made = fs::read_to_string(scratch.path("fork/forked.json")).unwrap();
    assert!(made.contains("\"step\":6"), "{made}");
    scratch.write("run.toml", CURRICULUM);
    assert!(scratch.train("run").step == 10, "the old run goes on by itself");
}
