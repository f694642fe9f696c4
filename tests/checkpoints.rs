//! Fear: that a checkpoint that cannot be written ends more than the present run.
//!
//! Uses real processes. The bytes of checkpoints are tested in `trainer/src/checkpoint`.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{
    Ran, Scratch, arg, assert_same_tree, build, corpus, curriculum, tree, ztrain,
};

/// A short run with its checkpoints in `place`.
fn kept_in(path: &Path, out: &Path, place: &Path, more: &[&str]) -> Ran {
    let mut args = vec!["--curriculum", arg(path), "--out", arg(out), "--checkpoints", arg(place)];
    args.extend(["--checkpoint-every", "3", "--quiet"]);
    args.extend(more);
    ztrain(&args)
}

#[test]
fn a_place_that_moved_is_known_again_and_one_that_is_gone_is_missed() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let [run, place, moved, other] =
        ["run", "place", "moved", "other"].map(|name| scratch.path(name));
    kept_in(&path, &run, &place, &["--stop-after", "6"]).ok();
    fs::rename(&place, &moved).unwrap();
    for ranks in ["1", "2"] {
        kept_in(&path, &run, &place, &["--nproc", ranks]).fails(3, &["place", "--checkpoints"]);
    }
    assert!(!place.exists(), "nothing is begun in its stead");
    kept_in(&path, &run, &other, &[]).fails(2, &["other", "place"]);
    let said = kept_in(&path, &run, &moved, &["--stop-after", "9"]);
    assert!(said.err.contains("after step 6 of 20"), "{}", said.err);
    said.ok();
    // The run remembers the new place, even if its `owner` file names another run.
    let word = fs::read(moved.join("owner")).unwrap();
    fs::write(moved.join("owner"), "another run").unwrap();
    let again = ["--curriculum", arg(&path), "--out", arg(&run), "--quiet"];
    for _ in 0..2 {
        ztrain(&again).fails(2, &["moved", "another run"]);
    }
    fs::write(moved.join("owner"), word).unwrap();
    let said = ztrain(&again);
    assert!(said.err.contains("after step 9 of 20"), "{}", said.err);
    said.ok();
}

#[test]
fn of_a_run_and_its_copy_the_first_to_go_on_has_the_checkpoints() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let [run, copy, place] = ["run", "copy", "place"].map(|name| scratch.path(name));
    kept_in(&path, &run, &place, &["--stop-after", "6"]).ok();
    assert!(Command::new("cp").args(["-r", arg(&run), arg(&copy)]).status().unwrap().success());
    let lock = fs::File::open(place.join("owner.lock")).unwrap();
    lock.lock().unwrap();
    kept_in(&path, &copy, &place, &[]).fails(6, &["place", "another run is using"]);
    lock.unlock().unwrap();
    kept_in(&path, &copy, &place, &["--stop-after", "9"]).ok();
    for _ in 0..2 {
        kept_in(&path, &run, &place, &[]).fails(2, &["place", "another run", "copy"]);
    }
    let kept = |step: u64| place.join(format!("step-{step}/manifest.json")).exists();
    assert!(kept(6) && kept(9));
    let said = kept_in(&path, &copy, &place, &[]);
    assert!(said.err.contains("after step 9 of 20"), "{}", said.err);
    said.ok();
}

/// The default place has no `owner` file, and its run may be training meanwhile.
#[test]
fn no_run_takes_the_checkpoints_in_the_folder_of_another() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let other = curriculum(&scratch, &store, "other.toml", &[("seed = 11", "seed = 12")]);
    let [run, second, third, moved] =
        ["run", "second", "third", "moved"].map(|name| scratch.path(name));
    let usual = run.join("checkpoints");
    let plain = |path: &Path, out: &Path, more: &[&str]| {
        let args = ["--curriculum", arg(path), "--out", arg(out), "--quiet"];
        ztrain(&[&args[..], &["--checkpoint-every", "3"], more].concat())
    };
    plain(&path, &run, &["--stop-after", "6"]).ok();
    let before = tree(&run);
    for more in [&[][..], &["--restart"]] {
        let said = kept_in(&other, &second, &usual, more);
        said.fails(2, &["run/checkpoints", "another run keeps its checkpoints here"]);
    }
    let said = kept_in(&other, &second, &run.join("more"), &[]);
    said.fails(2, &["run/more", "lies in the folder of another run", "a place outside"]);
    assert!(before == tree(&run), "nothing is written there");
    // Even if moved, they still belong to their run: another is refused, and it can use them itself.
    fs::rename(&usual, &moved).unwrap();
    kept_in(&other, &second, &moved, &["--restart"]).fails(2, &["moved", "another run"]);
    let said = kept_in(&path, &run, &moved, &["--stop-after", "9"]);
    assert!(said.err.contains("after step 6 of 20"), "{}", said.err);
    said.ok();
    // A run does not start in a folder whose default place another run uses.
    kept_in(&other, &second, &third.join("checkpoints"), &["--stop-after", "3"]).ok();
    plain(&path, &third, &[]).fails(2, &["third/checkpoints", "another run"]);
}

#[test]
fn what_somebody_wrote_into_a_run_by_hand_is_told_as_that() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let run = scratch.path("run");
    let args = ["--curriculum", arg(&path), "--out", arg(&run), "--quiet"];
    ztrain(&[&args[..], &["--stop-after", "6"]].concat()).ok();
    let [own, events] = ["run.toml", "events.jsonl"].map(|name| run.join(name));
    let text = fs::read_to_string(&own).unwrap();
    let seed = text.lines().find(|line| line.starts_with("seed = ")).unwrap();
    fs::write(&own, text.replace(seed, "seed = 4711")).unwrap();
    // A crash left half a line.
    let torn = fs::read_to_string(&events).unwrap() + "{\"event\":\"ste";
    fs::write(&events, &torn).unwrap();
    let said = ztrain(&args);
    assert!(said.err.contains("seed = 4711 is not what the recorded steps were trained by"));
    assert!(!said.err.contains("accepted edit"), "{}", said.err);
    said.ok();
    assert_eq!(fs::read_to_string(&own).unwrap(), text);
    let after = fs::read_to_string(&events).unwrap();
    let after: Vec<serde_json::Value> = after[torn.len()..]
        .lines()
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(after.iter().any(|one| one["event"] == "start"), "{after:?}");
    assert!(after.iter().all(|one| one["event"] != "edit"), "{after:?}");
}

#[test]
fn a_place_that_cannot_be_taken_is_not_remembered() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let (run, file, place) =
        (scratch.path("run"), scratch.write("file", ""), scratch.path("place"));
    kept_in(&path, &run, &file, &[]).fails(2, &["file"]);
    kept_in(&path, &run, &place, &["--stop-after", "3"]).ok();
    assert!(place.join("step-3/manifest.json").exists());
}

/// A folder for a run or its checkpoints that contains the user's files.
#[test]
fn nothing_of_others_is_written_over() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "c.toml", &[]);
    let before = tree(&store);
    kept_in(&path, &scratch.path("run"), &store, &[]).fails(2, &["--checkpoints", "holds a store"]);
    assert!(before == tree(&store), "a store is never altered");
    // A user's curriculum with the name of a run's own copy.
    let own = fs::read_to_string(&path).unwrap() + "# mine\n";
    let mine = scratch.write("mine/run.toml", own.as_bytes());
    let begin = |out: &str, curriculum: &Path| {
        let out = scratch.path(out);
        ztrain(&[
            "--curriculum",
            arg(curriculum),
            "--out",
            arg(&out),
            "--quiet",
            "--stop-after",
            "3",
        ])
    };
    begin("mine", &mine).fails(2, &["mine/run.toml", "in the way", "--out"]);
    assert_eq!(fs::read_to_string(&mine).unwrap(), own);
    // A run killed before its ledger existed continues; a run that lost its ledger does not get a new one.
    begin("killed", &path).ok();
    let ledger = scratch.path("killed/ledger.jsonl");
    fs::remove_file(&ledger).unwrap();
    begin("killed", &path)
        .fails(3, &["ledger is missing", "killed/ledger.jsonl", "step-3", "--restart"]);
    assert!(!ledger.exists());
    fs::write(&ledger, "").unwrap();
    for args in [
        &["show", arg(&scratch.path("killed"))][..],
        &["replay", "--run", arg(&scratch.path("killed")), "--step", "1"],
    ] {
        let said = ztrain(args).fails(3, &["ledger is empty", "--restart"]);
        assert!(!said.contains("had not begun"), "{said}");
    }
    fs::remove_file(&ledger).unwrap();
    fs::remove_dir_all(scratch.path("killed/checkpoints")).unwrap();
    fs::remove_file(scratch.path("killed/events.jsonl")).unwrap();
    begin("killed", &path).ok();
    fs::remove_file(scratch.path("killed/run.toml")).unwrap();
    ztrain(&["replay", "--run", arg(&scratch.path("killed")), "--step", "1"])
        .fails(3, &["lost its run.toml", "writes it anew"]);
}

/// All answers are machine-readable. `--every` replays every K-th step of a long run, each from the nearest state.
#[test]
fn answers_are_json_where_a_program_asks() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "c.toml", &[("steps = 12", "steps = 7")]);
    let json = |args: &[&str]| -> Vec<serde_json::Value> {
        let told = ztrain(&[args, &["--json"]].concat()).ok();
        told.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let (run, hf, start) = (scratch.path("run"), scratch.path("hf"), scratch.path("start"));
    let train = ["--curriculum", arg(&path), "--out", arg(&run), "--checkpoint-every", "3"];
    let stopped = &json(&[&train[..], &["--stop-after", "4"]].concat())[0];
    assert_eq!((&stopped["step"], &stopped["done"]), (&4.into(), &false.into()));
    let ended = &json(&[&train[..], &["--nproc", "2"]].concat())[0];
    assert_eq!(
        (&ended["step"], &ended["steps"], &ended["done"]),
        (&15.into(), &15.into(), &true.into())
    );
    let ledger = fs::read_to_string(run.join("ledger.jsonl")).unwrap();
    assert!(ledger.contains(ended["state"].as_str().unwrap()), "{ended}");
    let exported = &json(&["export", "--run", arg(&run), "--out", arg(&hf)])[0];
    let imported = &json(&["import", arg(&hf), "--out", arg(&start)])[0];
    let mean = scratch.path("mean");
    let average = |count| ["export", arg(&run), "--average", count, "--out", arg(&mean)];
    ztrain(&average("90")).fails(2, &["--average", "up to step 15", "wanted: 90"]);
    let averaged = &json(&average("2"))[0];
    assert_eq!(
        (&averaged["step"], &averaged["averaged"]),
        (&15.into(), &serde_json::json!([12, 15]))
    );
    assert_eq!((&exported["step"], &exported["tensors"]), (&15.into(), &imported["tensors"]));

    let replayed = json(&["replay", "--run", arg(&run), "--steps", "1..15", "--every", "4"]);
    let steps: Vec<_> = replayed.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 5, 9, 13]);
    assert!(replayed.iter().all(|line| line["verdict"] == "same_bits"), "{replayed:?}");
    let every = ["replay", "--run", arg(&run), "--step", "3", "--every", "2"];
    ztrain(&every).fails(2, &["--every"]);

    // Lines missing at the ledger's end do not break its chain; the checkpoints reveal them.
    let verified = || crate::support::zdata(&["verify-run", arg(&run)]).ok();
    assert!(!verified().contains("no checkpoint"));
    // Steps after the newest checkpoint are listed: a forged state digest there would not be detected.
    let (last, aside) = (run.join("checkpoints/step-15"), scratch.path("step-15"));
    fs::rename(&last, &aside).unwrap();
    let said = verified();
    assert!(said.contains("steps 13 to 15: no checkpoint holds their state digests"), "{said}");
    fs::rename(&aside, &last).unwrap();
    let cut: Vec<&str> = ledger.lines().take(4).collect();
    fs::write(run.join("ledger.jsonl"), cut.join("\n") + "\n").unwrap();
    crate::support::zdata(&["verify-run", arg(&run)])
        .fails(3, &["lines are missing", "steps up to 3", "step-15"]);
}

/// Reading them would block forever.
#[test]
fn pipes_in_a_run_are_refused() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "c.toml", &[]);
    let run = scratch.path("run");
    let args = ["--curriculum", arg(&path), "--out", arg(&run), "--quiet"];
    ztrain(&[&args[..], &["--stop-after", "3"]].concat()).ok();
    for name in ["events.jsonl", "ledger.jsonl"] {
        let (file, kept) = (run.join(name), scratch.path("kept"));
        fs::rename(&file, &kept).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let words = [name, "a FIFO, not a regular file"];
        ztrain(&args).fails(2, &words);
        ztrain(&["report", "--run", arg(&run)]).fails(2, &words);
        fs::remove_file(&file).unwrap();
        fs::rename(&kept, &file).unwrap();
    }
    let fifo = |name: &str| {
        let (file, kept) = (run.join(name), scratch.path("kept"));
        let there = fs::rename(&file, &kept).is_ok();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        move || {
            fs::remove_file(&file).unwrap();
            assert!(!there || fs::rename(&kept, &file).is_ok());
        }
    };
    let sending = [&args[..], &["--metrics-exec", "cat > /dev/null"]].concat();
    for name in ["run.toml", "checkpoints.at", "metrics-exec.json"] {
        let restore = fifo(name);
        let refused = ztrain(&sending);
        assert!([Some(2), Some(3)].contains(&refused.code), "{name}: {refused:?}");
        assert!(refused.err.contains(name) && refused.err.contains("a FIFO, not a"), "{refused:?}");
        restore();
    }
    fs::create_dir(run.join("explained")).unwrap();
    let restore = fifo("explained/step-2.json");
    let reported = ztrain(&["report", "--run", arg(&run)]);
    assert!(reported.err.contains("step-2.json"), "{reported:?}");
    reported.ok();
    restore();
    ztrain(&args).ok();
}

#[test]
fn what_is_newer_than_the_ledger_does_not_push_out_what_is_new() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let run = scratch.path("run");
    let args =
        ["--curriculum", arg(&path), "--out", arg(&run), "--checkpoint-every", "2", "--quiet"];
    ztrain(&[&args[..], &["--keep", "9"]].concat()).ok();
    let text = fs::read_to_string(run.join("ledger.jsonl")).unwrap();
    let cut: String = text.lines().take(6).map(|line| line.to_owned() + "\n").collect();
    fs::write(run.join("ledger.jsonl"), cut).unwrap();
    let said = ztrain(&[&args[..], &["--keep", "2", "--stop-after", "8"]].concat());
    assert!(said.err.contains("step-20 is passed over"), "{}", said.err);
    assert!(said.err.contains("after step 4 of 20"), "{}", said.err);
    assert!(said.err.contains("step 5 is in the ledger: it is computed again"), "{}", said.err);
    said.ok();
    assert!(run.join("checkpoints/step-8/manifest.json").exists());
    let said = ztrain(&args);
    assert!(said.err.contains("after step 8 of 20"), "{}", said.err);
    said.ok();
    assert!(text == fs::read_to_string(run.join("ledger.jsonl")).unwrap());
}

/// Files larger than some 0.5 to 1 MB cannot be written: this affects only a blob of the embedding.
#[test]
fn a_full_disk_ends_the_run_and_keeps_the_checkpoint_before() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let wide = [("router_hidden_size = 16", "router_hidden_size = 16\nvocab_size = 16000")];
    let short = [("steps = 12", "steps = 7"), ("steps = 8", "steps = 2")];
    let change = [&wide[..], &short].concat();
    let path = curriculum(&scratch, &store, "run.toml", &change);
    let args = |out: &Path| {
        ["--curriculum", arg(&path), "--out", arg(out), "--checkpoint-every", "3"]
            .map(str::to_owned)
            .to_vec()
    };
    let run = |args: Vec<String>, more: &[&str]| {
        let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        ztrain(&args)
    };
    let (whole, full) = (scratch.path("whole"), scratch.path("full"));
    run(args(&whole), &[]).ok();
    run(args(&full), &["--stop-after", "3"]).ok();
    for ranks in ["1", "2"] {
        // With the signal ignored, a write past the limit fails as on a full disk.
        let output = Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$@\"", "sh"])
            .arg(env!("CARGO_BIN_EXE_ztrain"))
            .args(args(&full))
            .args(["--nproc", ranks])
            .env_remove("RUST_BACKTRACE")
            .output();
        let told = Ran::from(output.unwrap()).fails(6, &["checkpoints/step-6/", "cannot write it"]);
        assert!(told.contains("run the same command again"), "{told}");
        assert!(full.join("checkpoints/step-3/manifest.json").exists());
        assert!(!full.join("checkpoints/step-6/manifest.json").exists());
    }
    run(args(&full), &[]).ok();
    let ledger = |run: &Path| fs::read_to_string(run.join("ledger.jsonl")).unwrap();
    assert!(ledger(&whole) == ledger(&full), "a full disk left a trace");
    assert_same_tree(&whole.join("checkpoints"), &full.join("checkpoints"));
    let events = fs::read_to_string(full.join("events.jsonl")).unwrap();
    assert_eq!(events.matches("\"from_step\":3").count(), 3, "{events}");
}
