//! Fear: that the programs are inconvenient for the person or script that calls them.

use std::fs;

#[cfg(feature = "train")]
use crate::support::tree;
use crate::support::{Ran, Scratch, arg, build, corpus, curriculum, unread, zdata, zdata_command};

#[test]
fn wrong_use_is_exit_two_with_the_nearest_word() {
    zdata(&["bulid"]).fails(2, &["build"]);
    zdata(&["build", "corpus.toml"]).fails(2, &["--out"]);
    zdata(&["plan", "x.toml", "--jsn"]).fails(2, &["--json"]);
}

#[test]
fn the_help_of_every_command_ends_with_examples() {
    let told = zdata(&["--help"]).ok();
    let commands = told.split_once("Commands:").unwrap().1.split_once("Options:").unwrap().0;
    let named = |line: &&str| line.starts_with("  ") && !line.starts_with("   ");
    let mut seen = 0;
    for line in commands.lines().filter(named) {
        let command = line.split_whitespace().next().unwrap();
        let args: &[&str] = match command {
            "help" => continue,
            "tokenizer" => &["tokenizer", "train", "--help"],
            _ => &[command, "--help"],
        };
        let help = zdata(args).ok();
        let example = format!(
            "{}: zdata {command}",
            if help.contains("Examples:") { "Examples" } else { "Example" }
        );
        assert!(help.contains("Usage: zdata") && help.contains(&example), "{help}");
        seen += 1;
    }
    assert!(seen > 13, "{told}");
}

/// With `--quiet`, standard error is empty unless something is wrong.
#[test]
fn quiet_tells_only_answers_and_errors() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 60, "on_error = \"skip\"");
    scratch.write("raw/web-2.jsonl", "no document\n");
    let [store, again, out, work] =
        ["store", "again", "out", "work"].map(|name| scratch.path(name));
    let (trained, exported) = (scratch.path("trained.json"), scratch.path("exported"));
    let tokenizer = scratch.path("tokenizer.json");
    let source = format!("web={}", arg(&exported.join("web/train")));
    let head = ["import", arg(&out), "--format", "megatron", "--tokenizer", arg(&tokenizer)];
    let import = [&head[..], &["--source", &source]].concat();
    let parts = ["--cache-dir", arg(&work)];
    let build = ["build", arg(&corpus), "--out", arg(&store)];
    let commands: [&[&str]; 10] = [
        &["build", arg(&corpus), "--check"],
        &["tokenizer", "train", arg(&corpus), "--vocab", "5000", "--out", arg(&trained)],
        &build,
        &build,
        &[&["build", arg(&corpus), "--out", arg(&again)], &parts[..]].concat(),
        &["inspect", arg(&store)],
        &["verify", arg(&store)],
        &["export", arg(&store), "--format", "megatron", "--out", arg(&exported)],
        &import,
        &import,
    ];
    for args in commands {
        let told = zdata(&[args, &["--quiet"]].concat());
        assert_eq!(told.err, "", "{args:?}");
        told.ok();
    }
    zdata(&["inspect", "nowhere", "--quiet"]).fails(3, &["nowhere"]);
    assert!(!zdata(&build).err.is_empty(), "without --quiet something is said");
}

#[cfg(feature = "train")]
#[test]
fn ztrain_refuses_wrong_use_once_and_before_it_starts_anything() {
    use crate::support::ztrain;
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    let (run, file) = (scratch.path("run"), scratch.write("file", ""));
    let train = |out: &std::path::Path, more: &[&str]| {
        ztrain(&[&["--curriculum", arg(&path), "--out", arg(out), "--quiet"], more].concat())
    };
    for wrong in [
        ["--rank-timeout", "0", "--nproc", "2"],
        ["--rank-timeout", "1e300", "--nproc", "2"],
        ["--snapshot-on-spike", "nan", "--snapshots", "2"],
        ["--workers", "0", "--nproc", "2"],
        ["--device", "abacus", "--nproc", "2"],
        ["--loader-threads", "30000", "--nproc", "2"],
        ["--prefetch", "18446744073709551615", "--nproc", "2"],
        ["--ranks-per-node", "1", "--nproc", "3"],
    ] {
        let said = train(&run, &wrong).fails(2, &wrong[..2]);
        assert_eq!(said.matches("error:").count(), 1, "{said}");
    }
    assert!(!run.exists(), "nothing was begun");
    train(&file, &[]).fails(2, &["file", "name another path"]);
    ztrain(&["--curriculum", arg(&store)]).fails(2, &["store", "a curriculum is a file"]);
    // Workers beyond the available work start no threads.
    train(&run, &["--workers", "1000000", "--stop-after", "2"]).ok();
    let replay = |more: &[&str]| ztrain(&[&["replay", "--run", arg(&run)], more].concat());
    replay(&["--step", "0"]).fails(2, &["--step", "0"]);
    let late = replay(&["--steps", "2..99"]);
    assert_eq!(late.out, "", "no step is computed before the last one is known to exist");
    late.fails(2, &["--steps", "98", "1 to 13"]);
    replay(&["--step", "2", "--lr", "nan"]).fails(2, &["--lr", "nan"]);
    let out = arg(&run);
    for wrong in [
        vec!["replay", "--run", out, "--step", "2", "--lr", "-1"],
        vec!["replay", "--run", out, "--step", "2", "--clip", "-1e-3"],
        vec!["replay", "--run", out, "--step", "-1"],
        vec!["explain", "--run", out, "--step", "-1"],
        vec!["fork", out, "--out", "x", "--step", "-1"],
        vec!["fork", out, "--out", "x", "--step", "1", "--lr", "-1"],
        vec!["export", "--run", out, "--out", "x", "--step", "-1"],
        vec!["--curriculum", arg(&path), "--out", out, "--audit", "-1/2"],
        vec!["--curriculum", arg(&path), "--out", out, "--nproc", "-1"],
    ] {
        let flag = wrong[wrong.len() - 2];
        let said = ztrain(&wrong).fails(2, &[flag, wrong[wrong.len() - 1], "wanted "]);
        assert_eq!((said.matches("error:").count(), said.contains("Usage")), (1, false), "{said}");
    }
    for command in ["compare", "export", "replay"] {
        let (store, out) = (arg(&store), scratch.path("out"));
        let args = match command {
            "compare" => vec![command, arg(&run), store],
            "export" => vec![command, "--run", store, "--out", arg(&out)],
            _ => vec![command, "--run", store, "--step", "1"],
        };
        ztrain(&args).fails(2, &["store", "this is not a run"]);
    }
}

#[cfg(feature = "train")]
#[test]
fn a_run_is_named_in_either_form_and_a_curriculum_by_its_flag() {
    use crate::support::ztrain;
    let scratch = Scratch::new();
    let (empty, out) = (scratch.path("empty"), scratch.path("out"));
    std::fs::create_dir(&empty).unwrap();
    let (empty, out) = (arg(&empty), arg(&out));
    for args in [
        vec!["explain", empty, "--step", "1"],
        vec!["spikes", empty],
        vec!["report", empty],
        vec!["fork", "--run", empty, "--step", "1", "--out", out],
        vec!["compare", "--run", empty, "--run", empty],
    ] {
        ztrain(&args).fails(2, &["empty", "this is not a run"]);
    }
    ztrain(&["compare", "--run", empty]).fails(2, &["--run", "2 of them"]);
    ztrain(&["run.toml"]).fails(2, &["ztrain --curriculum run.toml"]);
    let told = ztrain(&["--curriculum", "run.toml", "--steps", "9"]).fails(2, &["--stop-after"]);
    assert!(!told.contains("--tsp"), "{told}");
}

/// A step whose documents are all banned changes no weight. `plan` of both programs lists such steps.
#[cfg(feature = "train")]
#[test]
fn plans_count_steps_without_labels() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let short = [("steps = 12", "steps = 3"), ("steps = 8", "steps = 1")];
    let path = curriculum(&scratch, &store, "run.toml", &short);
    type Program = fn(&[&str]) -> Ran;
    let programs: [Program; 2] = [zdata, crate::support::ztrain];
    let json = |program: Program| -> serde_json::Value {
        serde_json::from_str(&program(&["plan", arg(&path), "--json"]).ok()).unwrap()
    };
    for program in programs {
        assert!(!program(&["plan", arg(&path)]).ok().contains("labels"));
        assert!(json(program)["without_labels"].is_null());
    }
    let planned = json(zdata);
    let all = planned["sources"].as_array().unwrap().iter().map(|source| {
        let documents = 0..source["documents"].as_u64().unwrap();
        format!("{} = {:?}", source["name"].as_str().unwrap(), documents.collect::<Vec<_>>())
    });
    let ban = all.collect::<Vec<_>>().join(", ");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{text}[[amendment]]\nstep = 3\nban = {{ {ban} }}\n")).unwrap();
    for program in programs {
        let said = program(&["plan", arg(&path)]).ok();
        assert!(said.contains("2 steps have no labels (3, 4): they move nothing\n"), "{said}");
        assert_eq!(json(program)["without_labels"], serde_json::json!([3, 4]));
    }
}

#[cfg(feature = "train")]
#[test]
fn what_would_mislead_is_refused_and_what_is_missing_is_said() {
    use crate::support::{ztrain, ztrain_command};
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let short = [("steps = 12", "steps = 3"), ("steps = 8", "steps = 1")];
    let path = curriculum(&scratch, &store, "run.toml", &short);
    let (run, before) = (scratch.path("run"), tree(&store));
    ztrain(&["--curriculum", arg(&path), "--out", arg(&store)])
        .fails(2, &["this folder holds a store", "--out"]);
    assert!(tree(&store) == before, "a store is never altered");
    ztrain(&["plan", arg(&path), "--cp", "2", "--ranks", "2"])
        .fails(2, &["--cp", "context_chunks"]);
    ztrain(&["bench", "step", "--curriculum", arg(&path), "--cp", "2"])
        .fails(2, &["--cp", "context_chunks"]);
    ztrain(&["plan", arg(&path), "--tsp", "2", "--ranks", "2"])
        .fails(2, &["--tsp", "weight_shards"]);
    // The curriculum allows sharing, but not for this number of ranks.
    let chunks = ("micro_batch = 2", "micro_batch = 2\ncontext_chunks = 2");
    let cut = curriculum(&scratch, &store, "cut.toml", &[short[0], short[1], chunks]);
    ztrain(&["plan", arg(&cut), "--cp", "2", "--ranks", "3"]).fails(2, &["--cp", "--nproc 2"]);
    // A change of number format splits a phase.
    let wider = [short[0], short[1], ("dtype = \"f32\"", "dtype = \"bf16\"")];
    let wider = curriculum(&scratch, &store, "wider.toml", &wider);
    let text =
        std::fs::read_to_string(&wider).unwrap() + "[[amendment]]\nstep = 2\ndtype = \"f32\"\n";
    std::fs::write(&wider, text).unwrap();
    let said = ztrain(&["plan", arg(&wider), "--json"]).ok();
    let planned: serde_json::Value = serde_json::from_str(&said).unwrap();
    let weights = |at: usize| planned["phases"][at]["memory"]["weights"].as_u64().unwrap();
    assert_eq!(planned["phases"].as_array().unwrap().len(), 3);
    assert!(weights(0) < weights(1) && weights(1) == weights(2), "{planned}");
    let idle = ztrain(&["plan", arg(&path), "--ranks", "9"]).ok();
    assert!(idle.contains("of 9 ranks compute none of them"), "{idle}");
    let train = ["--curriculum", arg(&path), "--out", arg(&run), "--validate-every", "0"];
    for ranks in ["1", "3"] {
        let mut command = ztrain_command(&[&train[..], &["--nproc", ranks]].concat());
        let said = Ran::from(command.env("ZTRAIN_OPS", "foo").output().unwrap());
        let said = said.fails(2, &["ZTRAIN_OPS", "foo", "reference"]);
        assert!(!said.contains("--device"), "{said}");
        assert_eq!(said.matches("error:").count(), 1, "{said}");
    }
    if !tch::Cuda::is_available() {
        let device = ["--device", "cuda", "--nproc", "3"];
        let said = ztrain(&[&train[..], &device].concat()).fails(6, &["--device cuda"]);
        assert_eq!(said.matches("error:").count(), 1, "{said}");
    }

    // A file size limit acts like a full disk: it is reported, and nothing recorded is lost.
    let limited = format!("ulimit -f 100; exec {} \"$@\"", env!("CARGO_BIN_EXE_ztrain"));
    let mut shell = std::process::Command::new("bash");
    let ran = Ran::from(shell.args(["-c", &limited, "sh"]).args(train).output().unwrap());
    ran.fails(6, &["checkpoint"]);
    ztrain(&train).ok();

    let events = run.join("events.jsonl");
    let text = std::fs::read_to_string(&events).unwrap();
    std::fs::write(&events, text.replacen("\"event\":", "\"event:", 2)).unwrap();
    let said = ztrain(&["report", "--run", arg(&run)]);
    assert!(said.err.contains("2 lines of") && said.err.contains("events.jsonl"), "{}", said.err);
    said.ok();

    let (moved, out) = (scratch.path("moved"), scratch.path("out"));
    std::fs::rename(&store, &moved).unwrap();
    let export = ["export", "--run", arg(&run), "--out", arg(&out)];
    ztrain(&export).fails(3, &["--store"]);
    ztrain(&[&export[..], &["--store", arg(&moved)]].concat()).ok();
}

/// The exit code is correct even if the output is not read.
#[test]
fn a_reader_that_leaves_early_changes_no_exit_code() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 120, "");
    let (store, spoiled) = (build(&scratch, &corpus, "store"), build(&scratch, &corpus, "spoiled"));
    fs::write(spoiled.join("web/00000/tokens-train-00000.arrow"), "no tokens").unwrap();
    scratch.write("raw/web-2.jsonl", "no document\n");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    for (args, code) in [
        (vec!["plan", arg(&path)], 0),
        (vec!["inspect", arg(&store)], 0),
        (vec!["digest", arg(&path), "--steps", "1..13"], 0),
        (vec!["--help"], 0),
        (vec!["verify", arg(&store), "--json"], 0),
        (vec!["verify", arg(&spoiled), "--json"], 3),
        (vec!["build", arg(&corpus), "--check"], 3),
        (vec!["build", arg(&corpus), "--check", "--json"], 3),
    ] {
        let ran = unread(zdata_command(&args));
        assert_eq!(ran.code, Some(code), "{args:?}: {}", ran.err);
        assert_eq!(ran.err.matches("error:").count(), usize::from(code > 0), "{}", ran.err);
        assert_eq!(zdata(&args).code, Some(code), "{args:?}");
    }
}

#[test]
fn a_full_output_is_the_machines_and_said_once() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 120, "");
    let store = build(&scratch, &corpus, "store");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    let (out, tokenizer) = (scratch.path("out"), scratch.path("trained.json"));
    for args in [
        vec!["--help"],
        vec!["build", arg(&corpus), "--out", arg(&store)],
        vec!["tokenizer", "train", arg(&corpus), "--vocab", "300", "--out", arg(&tokenizer)],
        vec!["inspect", arg(&store)],
        vec!["inspect", arg(&store), "--json"],
        vec!["verify", arg(&store)],
        vec!["verify", arg(&store), "--json"],
        vec!["export", arg(&store), "--format", "mds", "--out", arg(&out)],
        vec!["plan", arg(&path)],
        vec!["batch", arg(&path), "--step", "1"],
        vec!["digest", arg(&path), "--steps", "1..2"],
        vec!["where", arg(&path), "--doc", "doc-1-7"],
        vec!["amend", arg(&path), "--step", "2", "--mix", "web=1", "--dry-run"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let ran: Ran = zdata_command(&args).stdout(full).output().unwrap().into();
        let told = ran.fails(6, &["standard output"]);
        assert_eq!(told.matches("error:").count(), 1, "{args:?}: {told}");
    }
    // Work that succeeded is not reported as failed.
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let amend = ["amend", arg(&path), "--skip", "2"];
    let ran: Ran = zdata_command(&amend).stdout(full).output().unwrap().into();
    let told = ran.fails(6, &["the amendment is written", "only these words are lost"]);
    assert!(!told.contains("run the same command again"), "{told}");
    zdata(&amend).fails(2, &["skipped already"]);
}

#[cfg(feature = "train")]
#[test]
fn an_answer_of_the_trainer_that_nobody_gets_is_an_error() {
    use crate::support::ztrain_command;
    for args in [&["--help"][..], &["--version"], &["replay", "--help"], &["devices"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let ran: Ran = ztrain_command(args).stdout(full).output().unwrap().into();
        ran.fails(6, &["standard output"]);
    }
}

/// The output has no terminal control characters, and no line that starts with text after a line break in a name.
#[track_caller]
fn assert_harmless(args: &[&str], told: &str) {
    let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t') || c == '\u{202e}';
    assert!(!told.contains(obeyed), "{args:?}: {told:?}");
    let forged = told.lines().find(|line| line.starts_with("forged"));
    assert_eq!(forged, None, "{args:?}: {told}");
}

/// The same for output about a run: its phases and the documents of its steps.
#[cfg(feature = "train")]
#[test]
fn nothing_that_a_run_read_is_obeyed_by_a_terminal() {
    use crate::support::ztrain;
    let scratch = Scratch::new();
    let line = |n: u32| {
        let id = format!("{n}\u{1b}[31m\r\nforged: id {n}");
        serde_json::json!({"id": id, "text": format!("text {n} \u{1b}c of some more words")})
    };
    let lines: String = (0..1200).map(|n| format!("{}\n", line(n))).collect();
    let corpus = corpus(&scratch, 120, "");
    std::fs::remove_dir_all(scratch.path("raw")).unwrap();
    scratch.write("raw/web-\u{1b}]0;title\u{7}.jsonl", &lines);
    scratch.write("raw/math.jsonl", &lines);
    let store = build(&scratch, &corpus, "store");
    let changes = [
        ("\"short\"", "\"\\nforged: phase \\u001b[7m\""),
        ("\"long\"", "\"two\\nforged: phase\""),
        ("steps = 12", "steps = 3"),
        ("steps = 8", "steps = 2"),
    ];
    let path = curriculum(&scratch, &store, "run.toml", &changes);
    let (run, fork) = (scratch.path("run"), scratch.path("fork"));
    let (run, fork) = (arg(&run), arg(&fork));
    let asked: [&[&str]; 10] = [
        &["--curriculum", arg(&path), "--out", run, "--validate-every", "0"],
        &["show", run],
        &["show", "--run", run],
        &["spikes", "--run", run],
        &["replay", "--run", run, "--step", "4", "--texts"],
        &["replay", "--run", run, "--steps", "3..5", "--attribute", "2", "--subsets", "1"],
        &["replay", "--run", run, "--step", "4", "--drop-source", "math"],
        &["explain", "--run", run, "--step", "4", "--top", "1"],
        &["fork", run, "--step", "2", "--out", fork, "--drop-source", "math"],
        &["plan", arg(&path), "--ranks", "2"],
    ];
    for args in asked {
        let Ran { code, out, err } = ztrain(args);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        assert_harmless(args, &format!("{out}{err}"));
    }
    // Zero documents is not a valid request.
    ztrain(&["replay", "--run", run, "--steps", "3..5", "--attribute", "0"])
        .fails(2, &["--attribute", "'0'"]);
}

#[test]
fn nothing_that_a_corpus_says_is_obeyed_by_a_terminal() {
    let scratch = Scratch::new();
    let id = "a\u{1b}[31m\u{9b}2J\u{202e}\r\nforged: id";
    let line = |id: &str, n| serde_json::json!({"id": id, "text": format!("text {n} \u{1b}c")});
    let lines: String = (0..1200).map(|n| format!("{}\n", line(id, n))).collect();
    let corpus = corpus(&scratch, 120, "");
    std::fs::remove_dir_all(scratch.path("raw")).unwrap();
    scratch.write("raw/web-\u{1b}]0;title\u{7}.jsonl", &lines);
    scratch.write("raw/math.jsonl", &lines);
    let store = build(&scratch, &corpus, "store");
    let rude = "\"short \\u001b[7m\\nforged: phase\"";
    let changes = [("\"short\"", rude), ("steps = 8", "steps = 1")];
    let path = curriculum(&scratch, &store, "run.toml", &changes);
    // The user's input is quoted as typed.
    let nowhere = format!("nowhere {}", id.trim_end_matches("\nforged: id"));
    for args in [
        vec!["inspect", arg(&store)],
        vec!["plan", arg(&path)],
        vec!["batch", arg(&path), "--step", "1"],
        vec!["batch", arg(&path), "--step", "1", "--text"],
        vec!["where", arg(&path), "--doc", id],
        vec!["where", arg(&path), "--doc", &nowhere],
        vec!["amend", arg(&path), "--step", "2", "--ban", id, "--source", "math", "--dry-run"],
        vec!["verify", &nowhere],
        vec!["inspect", arg(&store), &nowhere],
    ] {
        let Ran { out, err, .. } = zdata(&args);
        assert!(!out.is_empty() || !err.is_empty(), "{args:?}");
        assert_harmless(&args, &format!("{out}{err}"));
    }
    let told = zdata(&["batch", arg(&path), "--step", "1", "--json"]).ok();
    let batch: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(batch["sequences"][0]["documents"][0]["id"], id, "JSON stays JSON");
}

#[test]
fn a_batch_in_json_holds_what_the_model_reads() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    let told = zdata(&["batch", arg(&path), "--step", "2", "--json"]).ok();
    let batch: serde_json::Value = serde_json::from_str(&told).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<u64> {
        value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
    };
    for sequence in batch["sequences"].as_array().unwrap() {
        let [ids, labels, mask] =
            ["token_ids", "labels", "loss_mask"].map(|key| numbers(&sequence[key]));
        assert_eq!((ids.len(), labels.len(), mask.len()), (64, 64, 64));
        assert_eq!(mask.iter().sum::<u64>(), sequence["label_count"].as_u64().unwrap());
        // Within a sequence the label is the next token; only the last position's label is beyond the end.
        for place in (0..63).filter(|place| mask[*place] == 1) {
            assert_eq!(labels[place], ids[place + 1], "place {place}");
        }
    }
    // A file instead of a store, or a store instead of a curriculum: the error says what the command expects.
    zdata(&["inspect", arg(&path)]).fails(2, &["a store is a folder", "zdata plan"]);
    zdata(&["plan", arg(&store)]).fails(2, &["this is a store", "curriculum"]);
}

#[test]
fn machine_readable_answers_are_json() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    let commands = [
        vec!["inspect", arg(&store), "--json"],
        vec!["plan", arg(&path), "--json"],
        vec!["batch", arg(&path), "--step", "3", "--json"],
        vec!["where", arg(&path), "--doc", "doc-1-7", "--source", "web", "--json"],
    ];
    for args in commands {
        let told = zdata(&args).ok();
        let values = serde_json::Deserializer::from_str(&told).into_iter::<serde_json::Value>();
        assert!(values.map(Result::unwrap).count() > 0, "{args:?}: {told}");
    }
}

#[test]
fn weights_are_shown_as_they_are_typed() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let amend = "\n[[amendment]]\nstep = 4\nmix = { web = 0.25, math = 0.750 }\n";
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    fs::write(&path, fs::read_to_string(&path).unwrap() + amend).unwrap();
    let told: serde_json::Value =
        serde_json::from_str(&zdata(&["plan", arg(&path), "--json"]).ok()).unwrap();
    let all = told["phases"].as_array().unwrap().iter().flat_map(|it| it["sources"].as_array());
    let weights = all.flatten().map(|it| (it["typed"].as_str(), it["weight"].as_u64()));
    let wanted = [("3/10", 3), ("0.7", 7), ("0.750", 3), ("0.25", 1), ("3", 3), ("1", 1)];
    assert!(weights.eq(wanted.map(|(typed, weight)| (Some(typed), Some(weight)))), "{told}");
    let told = zdata(&["plan", arg(&path)]).ok();
    for word in ["  3/10  ", "  0.7  ", "  0.750  "] {
        assert!(told.contains(word), "{told}");
    }
}

/// 128 units in groups of 8: a first phase takes 409,600 tokens of a group of 1,048,576 in pieces of 512. What is left
/// is joined into 312 sequences of 2,048, or deferred to the end of an epoch that is never reached.
#[test]
fn the_mixers_plan_says_what_share_of_a_phase_is_one_run_of_text() {
    let scratch = Scratch::new();
    scratch.write("s.toml", "[[source]]\nname = \"a\"\ntokens = 16_777_216\ndocuments = 1000\n");
    let phase = |name: &str, steps: u32, seq_len: u32, more: &str| {
        format!(
            "[[phase]]\nname = {name:?}\nsteps = {steps}\nseq_len = {seq_len}\nbatch = 8\n\
             mix = {{ a = 1 }}\n{more}\n"
        )
    };
    let plan = |more: &str, args: &[&str]| {
        let [short, long] = [phase("short", 100, 512, ""), phase("long", 250, 2048, more)];
        let path = scratch.write("c.toml", format!("store = \"s.toml\"\n{short}{long}"));
        zdata(&[&["plan", arg(&path)], args].concat()).ok()
    };
    for (more, joined) in [("", 312), ("remainder = \"join\"", 312), ("remainder = \"defer\"", 0)] {
        let told: serde_json::Value = serde_json::from_str(&plan(more, &["--json"])).unwrap();
        for (phase, [contiguous, joined]) in [(0, [800, 0]), (1, [2000 - joined, joined])] {
            for row in [&told["phases"][phase], &told["phases"][phase]["sources"][0]] {
                let found =
                    ["contiguous", "joined", "padded"].map(|key| row[key].as_u64().unwrap());
                assert_eq!(found, [contiguous, joined, 0], "{more}");
            }
        }
    }
    let told = plan("", &[]);
    let line =
        "sequences: 84.40 % contiguous text, 15.60 % joined from several pieces, 0.00 % padded";
    assert!(told.contains(line), "{told}");
}

#[test]
fn a_shell_completes_commands_and_man_shows_them() {
    let script = zdata(&["completions", "bash"]).ok()
        + "COMP_WORDS=(zdata ver); COMP_CWORD=1; _zdata zdata ver zdata; echo ${COMPREPLY[@]}";
    let found = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8(found.stdout).unwrap(), "verify verify-run\n");
    for shell in ["zsh", "fish"] {
        assert!(zdata(&["completions", shell]).ok().contains("verify-run"), "{shell}");
    }
    assert!(zdata(&["manual", "task", "plan"]).ok().contains("zdata task plan"));
    zdata(&["manual", "bulid"]).fails(2, &["bulid", "zdata --help"]);
    #[cfg(feature = "train")]
    assert!(crate::support::ztrain(&["manual", "bench"]).ok().contains("ztrain bench"));
}

/// An order shuffled by an algorithm that is not ours passes; a sorted, an affine or a partly sorted one, one with a
/// number twice and one that is not numbers fail, each with its line.
#[test]
fn an_order_of_anybody_is_compared_with_chance() {
    let scratch = Scratch::new();
    let n = 30_011u64;
    let mut state = 5u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    };
    let mut fisher_yates = || {
        let mut order: Vec<u64> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i as usize, (next() % (i + 1)) as usize);
        }
        order
    };
    let (good, epoch) = (fisher_yates(), fisher_yates());
    let write = |name: &str, order: &[u64]| {
        let lines: String = order.iter().map(|value| format!("{value}\n")).collect();
        scratch.write(name, lines)
    };
    let (good_file, epoch_file) = (write("good", &good), write("epoch", &epoch));
    let test = |args: &[&str]| zdata(&[&["shuffle-test"][..], args].concat());
    let passed = test(&[arg(&good_file), "--next-epoch", arg(&epoch_file)]).ok();
    assert!(passed.contains("passes") && passed.contains("next epoch"), "{passed}");
    test(&[arg(&write("begun", &good[..9000])), "--of", "30011"]).ok();
    let told: serde_json::Value =
        serde_json::from_str(&test(&["--length", "65537", "--seeds", "3", "--json"]).ok()).unwrap();
    assert_eq!((&told["passes"], &told["positions"]), (&true.into(), &8192.into()));
    let sorted: Vec<u64> = (0..n).collect();
    let affine: Vec<u64> = (0..n).map(|i| i * 9973 % n).collect();
    let mut buffer = good.clone();
    buffer.chunks_mut(64).for_each(<[u64]>::sort_unstable);
    for (name, order, measure) in [
        ("sorted", &sorted, "lag 1"),
        ("affine", &affine, "differences"),
        ("buffer", &buffer, "lag 1"),
    ] {
        test(&[arg(&write(name, order))]).fails(3, &["does not look like chance", measure]);
    }
    // The next epoch in the same order is not shuffled.
    let same = [arg(&good_file), "--next-epoch", arg(&good_file)];
    test(&same).fails(3, &["rank correlation with the next epoch"]);
    let mut twice = good.clone();
    twice[7000] = twice[8];
    test(&[arg(&write("twice", &twice))]).fails(3, &["twice:7001", "line 9 has too"]);
    let words = scratch.write("words", "1\ntwo\n");
    test(&[arg(&words)]).fails(3, &["words:2", "two", "numpy.savetxt"]);
    test(&[arg(&write("short", &[0, 1, 2]))]).fails(3, &["too short", "3 numbers"]);
    test(&[arg(&good_file), "--of", "9000"]).fails(2, &["30011", "at most 9000"]);
    test(&[arg(&good_file), "--of", "18446744073709551615"]).fails(2, &["4611686018427387904"]);
    test(&["-", "--next-epoch", "-"]).fails(2, &["standard input has one order"]);
    test(&[]).fails(2, &["ORDER"]);
}
