//! Fear: that an options file says something else than the flags it stands for.

use std::fs;

use serde_json::json;

use crate::losses::events;
use crate::ranks::Fixture;
use crate::support::{Ran, arg, assert_same_tree};

/// The file's flags hold unless they are typed, on every rank; paths start at its folder, and it is recorded.
#[test]
fn an_options_file_has_the_flags_that_are_not_typed() {
    let fixture = Fixture::new(&crate::support::SHORT);
    let text = "checkpoint-every = 7\nkeep-latest = true\nquiet = true\njson = false\nprefetch = 1\n\
                validate-every = 5\neval = [\"task.jsonl\"]\ncheckpoints = \"kept\"\nout = \"named\"\n";
    let options = fixture.scratch.write("team/options.toml", text);
    let task = json!({"context": "a", "choices": [" b", " c"], "answer": 1});
    fixture.scratch.write("team/task.jsonl", format!("{task}\n"));
    for (name, ranks) in [("alone", &[][..]), ("two", &["--nproc", "2"])] {
        // Checkpoints have one owner: the second run names its place.
        let kept = fixture.scratch.path(&format!("{name}-kept"));
        let typed = ["--options", arg(&options), "--checkpoints", arg(&kept)];
        let ran = Ran::from(fixture.run(name, &[&typed[..], ranks].concat()).output().unwrap());
        assert!(!ran.err.contains("step 1 "), "quiet: {}", ran.err);
        assert!(ran.ok().starts_with("done after step 10 of 10"));
        // The fixture types --out and --checkpoint-every 3.
        assert!(
            !fixture.scratch.path("team/named").exists()
                && !fixture.scratch.path("team/kept").exists()
        );
        assert!(kept.join("step-9").exists() && !kept.join("step-7").exists());
        let steps = |kind: &str| {
            let found = events(&fixture, name, kind).into_iter();
            found.map(|event| event["step"].as_u64()).collect::<Vec<_>>()
        };
        assert_eq!(steps("evaluation"), [Some(5), Some(10)]);
        assert_eq!(events(&fixture, name, "start")[0]["options"], text);
    }
    let [alone, two] = ["alone", "two"].map(|name| format!("{name}-kept/step-10"));
    assert_same_tree(&fixture.scratch.path(&alone), &fixture.scratch.path(&two));
    // A supervisor's ranks read it too, and it may name the number of ranks.
    fixture.scratch.write("team/rules.toml", "hang_seconds = 600\n");
    let text =
        "rules = \"rules.toml\"\nnproc = 2\nmin-ranks = 1\nrank-timeout = 60.5\nquiet = true\n";
    fs::write(&options, text).unwrap();
    let supervised = fixture.run_by(&["supervise"], "watched", &["--options", arg(&options)]);
    let ran = Ran::from({ supervised }.output().unwrap());
    assert!(ran.ok().starts_with("done after step 10 of 10"));
    assert_eq!(events(&fixture, "watched", "start")[0]["options"], text);
    assert!(!events(&fixture, "watched", "ranks").is_empty(), "two ranks");
    let ledger = |name: &str| fs::read(fixture.scratch.path(name).join("ledger.jsonl")).unwrap();
    assert!(["two", "watched"].into_iter().all(|name| ledger(name) == ledger("alone")));
}

#[test]
fn what_an_options_file_cannot_say_is_refused_at_its_line() {
    let fixture = Fixture::new(&[]);
    for (line, words) in [
        ("checkpoint-evry = 3", &["options.toml:2:1", "did you mean `checkpoint-every`?"][..]),
        ("curriculum = \"a.toml\"", &["options.toml:2:1", "--curriculum on the command line"]),
        ("options = \"b.toml\"", &["options.toml:2:1", "--options on the command line"]),
        ("group = \"x\"", &["options.toml:2:1", "unknown key `group`"]),
        ("checkpoints = \"\"", &["no place is named"]),
        ("keep = 0", &["options.toml:2:8", "--keep"]),
        ("keep = \"many\"", &["options.toml:2:8", "many"]),
        ("keep = true", &["options.toml:2:8", "what --keep takes: COUNT"]),
        ("keep = [1, 2]", &["options.toml:2:8", "what --keep takes: COUNT"]),
        ("quiet = 1", &["options.toml:2:9", "true or false"]),
        ("quiet = 1 1", &["options.toml:2", "not valid TOML"]),
        ("[keep]", &["options.toml:2", "what --keep takes: COUNT"]),
    ] {
        let options = fixture.scratch.write("options.toml", format!("prefetch = 2\n{line}\n"));
        let ran = fixture.run("run", &["--options", arg(&options)]).output().unwrap();
        Ran::from(ran).fails(2, words);
        assert!(!fixture.scratch.path("run").exists(), "{line}");
    }
    let nowhere = fixture.scratch.path("nowhere.toml");
    let ran = fixture.run("run", &["--options", arg(&nowhere)]).output().unwrap();
    Ran::from(ran).fails(3, &["nowhere.toml", "No such file"]);
}
