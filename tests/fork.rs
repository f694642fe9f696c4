//! Fear: that the commands printed by a counterfactual do something else than was computed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{
    Ran, Scratch, arg, build, corpus, curriculum, json_lines, unread, zdata, ztrain,
    ztrain_command, ztrain_on_a_full_disk,
};

/// The text that a replay prints of the worst documents is what `zdata batch` finds in the same rows.
fn the_text_is_what_the_batch_holds(run: &Path) {
    let json = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    let replayed = ["replay", "--run", arg(run), "--step", "7", "--texts", "3"];
    let found = json(ztrain(&[&replayed[..], &["--json"]].concat()).ok());
    let batch = json(zdata(&["batch", arg(&run.join("run.toml")), "--step", "7", "--json"]).ok());
    let told = ztrain(&replayed).ok();
    assert_eq!(found["texts"].as_array().unwrap().len(), 3);
    for (document, parts) in
        found["documents"].as_array().unwrap().iter().zip(found["texts"].as_array().unwrap())
    {
        let parts = parts.as_array().unwrap();
        let tokens: u64 = parts.iter().map(|part| part["tokens"].as_u64().unwrap()).sum();
        assert_eq!(tokens, document["tokens"].as_u64().unwrap());
        for part in parts {
            let row = &batch["sequences"][part["row"].as_u64().unwrap() as usize]["documents"];
            let same = |piece: &&Value| {
                piece["id"] == document["id"] && piece["of_document"][0] == part["first_token"]
            };
            let piece = row.as_array().unwrap().iter().find(same).unwrap();
            assert_eq!(piece["text"], part["text"], "{document}");
            let line = part["text"].as_str().unwrap().lines().next().unwrap();
            assert!(told.contains(&format!("  | {line}")), "{told}");
        }
    }
}

/// An id in two sources is ambiguous: it is asked for, and the text is never dropped from both.
#[test]
fn an_id_that_two_sources_have_is_not_guessed() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 120, "");
    fs::remove_dir_all(scratch.path("raw")).unwrap();
    for source in ["web-0", "math"] {
        scratch.write(&format!("raw/{source}.jsonl"), json_lines(1, 30));
    }
    let store = build(&scratch, &corpus, "store");
    let phases = [
        ("steps = 12", "steps = 4"),
        ("steps = 8", "steps = 1"),
        ("web = 0.7", "web = 0.5"),
        ("\"3/10\"", "0.5"),
    ];
    let file = curriculum(&scratch, &store, "run.toml", &phases);
    let (run, out) = (scratch.path("run"), scratch.path("fork"));
    ztrain(&["--curriculum", arg(&file), "--out", arg(&run), "--validate-every", "0"]).ok();
    let mut sources = BTreeMap::<String, BTreeSet<String>>::new();
    for step in ["1", "2", "3", "4", "5"] {
        let told = ztrain(&["replay", "--run", arg(&run), "--step", step, "--json"]).ok();
        let found: Value = serde_json::from_str(&told).unwrap();
        for document in found["documents"].as_array().unwrap().iter().filter(|it| it["labels"] != 0)
        {
            let word = |key: &str| document[key].as_str().unwrap().to_owned();
            sources.entry(word("id")).or_default().insert(word("source"));
        }
    }
    let (id, _) = sources.iter().find(|(_, sources)| sources.len() == 2).unwrap();
    let (web, math) = (format!("web:{id}"), format!("math:{id}"));
    let replay = |asked: &str| {
        ztrain(&[
            "replay",
            "--run",
            arg(&run),
            "--step",
            "1",
            "--continue",
            "5",
            "--drop-doc",
            asked,
        ])
    };
    let fork = |asked: &str| {
        ztrain(&["fork", arg(&run), "--step", "0", "--out", arg(&out), "--drop-doc", asked])
    };
    let ban = |asked: &[&str]| {
        let step = ["amend", arg(&file), "--step", "2", "--dry-run", "--ban"];
        zdata(&[&step[..], asked].concat())
    };
    ban(&[id]).fails(2, &["--ban", &web, &math]);
    for asked in [&[math.as_str()][..], &[id, "--source", "math"]] {
        let told = ban(asked).ok();
        assert!(told.contains("of math") && !told.contains("of web"), "{told}");
    }
    replay(id).fails(2, &["--drop-doc", &web, &math]);
    fork(id).fails(2, &["--drop-doc", &web, &math]);
    assert!(replay(&web).ok().starts_with("WHAT IF"));
    fork(&web).ok();
    let forked = fs::read_to_string(out.join("run.toml")).unwrap();
    let bans: Vec<_> = forked.lines().filter(|line| line.contains("ban")).collect();
    assert!(forked.contains("web = [") && !bans.concat().contains("math"), "{forked}");
}

/// Requests beyond the run's end are reported as asked, and a step without predecessors is compared with nothing.
#[test]
fn questions_beyond_a_run_are_told_as_they_were_asked() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 100, ""), "store");
    let phases = [("steps = 12", "steps = 4"), ("steps = 8", "steps = 1")];
    let file = curriculum(&scratch, &store, "run.toml", &phases);
    let run = scratch.path("run");
    ztrain(&["--curriculum", arg(&file), "--out", arg(&run), "--validate-every", "0"]).ok();
    let asked = |words: &[&str]| ztrain(&[&["replay", "--run", arg(&run)], words].concat());
    let last = u64::MAX.to_string();
    asked(&["--step", &last]).fails(2, &["--step", &last, "1 to 5"]);
    let endless = ["--step", "2", "--lr", "1e308", "--continue", "2"];
    asked(&endless).fails(2, &["--lr", "1e308", "infinite"]);
    let alone = ztrain(&["explain", "--run", arg(&run), "--step", "3", "--window", "0"]).ok();
    let sentence = alone.lines().next().unwrap();
    assert!(sentence.ends_with("no step before was looked at"), "{alone}");
    assert!(!sentence.contains("as before") && !sentence.contains("mixture"), "{alone}");
}

#[test]
fn what_was_imagined_is_done_by_the_commands_that_are_printed() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 100, ""), "store");
    let phases = [("steps = 12", "steps = 9"), ("steps = 8", "steps = 3")];
    let file = curriculum(&scratch, &store, "run.toml", &phases);
    let run = scratch.path("it's a run");
    let quick = ["--validate-every", "0", "--checkpoint-every", "3"];
    ztrain(&[&["--curriculum", arg(&file), "--out", arg(&run)], &quick[..]].concat()).ok();
    let replay = |more: &[&str]| ztrain(&[&["replay", "--run", arg(&run)], more].concat());

    let plain: Value = serde_json::from_str(&replay(&["--step", "7", "--json"]).ok()).unwrap();
    let worst = plain["documents"].as_array().unwrap().iter().find(|it| it["labels"] != 0).unwrap();
    let id = worst["id"].as_str().unwrap();
    the_text_is_what_the_batch_holds(&run);
    let plot = scratch.path("curves.svg");
    let asked = ["--step", "7", "--drop-doc", id, "--continue", "4"];
    let told = replay(&[&asked[..], &["--plot", arg(&plot)]].concat()).ok();
    assert!(told.starts_with("WHAT IF, not a replay"), "{told}");
    assert_eq!(fs::read_to_string(&plot).unwrap().matches("<polyline").count(), 2);
    let imagined: Value =
        serde_json::from_str(&replay(&[&asked[..], &["--json"]].concat()).ok()).unwrap();
    assert_eq!(imagined["steps"].as_array().unwrap().len(), 4);

    // Runs the printed commands in a shell with the programs on its PATH.
    let bin = std::path::Path::new(env!("CARGO_BIN_EXE_ztrain")).parent().unwrap().to_owned();
    for (number, command) in imagined["next"].as_array().unwrap().iter().enumerate() {
        let command = command.as_str().unwrap().to_owned();
        assert!(told.contains(&command), "{told}");
        let quick = if number == 1 { " --validate-every 0 --quiet" } else { "" };
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("{command}{quick}")]);
        let path = std::env::var("PATH").unwrap_or_default();
        shell.env("PATH", format!("{}:{path}", bin.display()));
        crate::support::Ran::from(shell.output().unwrap()).ok();
    }
    let new = scratch.path("it's a run-from-7");
    let [old, fork] =
        [&run, &new].map(|root| fs::read_to_string(root.join("ledger.jsonl")).unwrap());
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (old, fork) = (lines(&old), lines(&fork));
    assert_eq!(old[..7], fork[..7], "steps 1 to 6 and line 0");
    for (line, would) in fork[7..].iter().zip(imagined["steps"].as_array().unwrap()) {
        let line: Value = serde_json::from_str(line).unwrap();
        let [found, wanted] = [&line["loss"], &would["would_be"][0]].map(|it| it.as_f64().unwrap());
        assert!((found - wanted).abs() < 1e-12, "step {}", line["step"]);
    }
    zdata(&["verify-run", arg(&new)]).ok();
    ztrain(&["replay", "--run", arg(&new), "--step", "8"]).ok();
    let curves = scratch.path("compared.svg");
    let compared = ztrain(&["compare", arg(&run), arg(&new), "--plot", arg(&curves)]);
    assert_eq!(compared.code, Some(4), "{}", compared.err);
    for words in ["b was forked from a after step 6", "step 7 is the first to differ"] {
        assert!(compared.out.contains(words), "{}", compared.out);
    }
    // Steps 7 to 12 differ: as many earlier steps are plotted, for both runs.
    let drawn = fs::read_to_string(&curves).unwrap();
    let points = drawn.split("points=\"").skip(1).map(|curve| curve.split('"').next().unwrap());
    let points: Vec<Vec<&str>> = points.map(|curve| curve.split(' ').collect()).collect();
    assert_eq!(points.iter().map(Vec::len).collect::<Vec<_>>(), [12, 12], "{drawn}");
    ztrain_on_a_full_disk(&["compare", arg(&run), arg(&new), "--plot", arg(&curves)])
        .fails(6, &["--plot", arg(&curves)]);
    assert_eq!(fs::read_to_string(&curves).unwrap(), drawn, "the old plot stays");
    assert_eq!(points[0][..6], points[1][..6], "steps 1 to 6 are shared");
    assert_ne!(points[0][6..], points[1][6..]);

    refusals(&run, &new, &scratch.path("x"));
}

/// Impossible requests are refused, naming the flag.
fn refusals(run: &Path, new: &Path, other: &Path) {
    // The exit code is correct even if the output is not read.
    for more in [&[][..], &["--json"], &["--plot", "/dev/stdout"]] {
        let ran = unread(ztrain_command(&[&["compare", arg(run), arg(new)], more].concat()));
        assert_eq!(ran.code, Some(4), "{more:?}: {}", ran.err);
    }
    let replay = |more: &[&str]| ztrain(&[&["replay", "--run", arg(run)], more].concat());
    // A change that diverges is reported up to that step, and by the exit code.
    let wild = replay(&["--step", "7", "--lr", "1e30", "--continue", "4"]);
    assert!(wild.out.contains("diverges with the change"), "{}", wild.out);
    assert!(!wild.out.contains("ztrain fork"), "{}", wild.out);
    wild.fails(5, &[]);

    let fork = |more: &[&str]| ztrain(&[&["fork", arg(run)], more].concat());
    fork(&["--step", "3", "--out", arg(new)]).fails(2, &["--out", "already"]);
    fork(&["--step", "3", "--out", arg(&run.join("checkpoints/inside"))])
        .fails(2, &["--out", "outside its run"]);
    let whole = other.with_extension("whole");
    let mut command = ztrain_command(&["fork", arg(run), "--step", "3", "--out", arg(&whole)]);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let told: Ran = command.stdout(full).output().unwrap().into();
    told.fails(6, &["is made, and whole"]);
    assert!(whole.join("run.toml").exists());
    ztrain(&["show", arg(run), "--last", "0"]).fails(2, &["--last"]);
    fork(&["--step", "12", "--out", arg(other)]).fails(2, &["--step", "0 to 11"]);
    replay(&["--step", "7", "--continue", "3"]).fails(2, &["--continue", "--drop-doc"]);
    replay(&["--step", "7", "--micro-batch", "0", "--lr", "1"]).fails(2, &["--micro-batch"]);
    replay(&["--step", "7", "--drop-source", "web", "--drop-source", "math"])
        .fails(2, &["only source"]);
}
