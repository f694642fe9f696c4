//! Fear: that a task's file is misread, or that its scores are shown nowhere.

use serde_json::json;

use crate::ranks::Fixture;
use crate::support::{Ran, Scratch, arg, document, ztrain};

/// Twelve examples whose right choice is the word that follows in a generated document, and as many to be written.
fn write_tasks(scratch: &Scratch) -> [String; 2] {
    let (mut chosen, mut written) = (String::new(), String::new());
    for index in 0..12 {
        let text = document(1, index);
        let (context, last) = text.rsplit_once(' ').unwrap();
        let choices = ["deterministic", last, "zebra zebra"];
        let line = json!({"context": context, "choices": choices.map(|it| format!(" {it}")), "answer": 1, "id": index});
        chosen += &format!("{line}\n\n");
        written += &format!("{}\n", json!({"context": format!("{context} "), "answer": last}));
    }
    let chosen = scratch.write("next-word.jsonl", chosen);
    let written = scratch.write("written.jsonl", written);
    [chosen, written].map(|path| arg(&path).to_owned())
}

/// Scores are in events, curves and the page, the same on two ranks and after a resume.
#[test]
fn scores_of_tasks_are_shown_and_do_not_depend_on_ranks() {
    let fixture = Fixture::new(&[]);
    let [chosen, written] = write_tasks(&fixture.scratch);
    let flags = ["--validate-every", "10", "--eval", &chosen, "--eval", &written];
    let said = Ran::from(fixture.run("alone", &flags).output().unwrap());
    assert!(said.err.contains("evaluation after step 10 | next-word "), "{}", said.err);
    said.ok();
    for (out, ranks) in [("parts", &["--stop-after", "10"][..]), ("parts", &["--nproc", "2"])] {
        let ran = fixture.run(out, &[&flags[..], ranks].concat()).output().unwrap();
        Ran::from(ran).ok();
    }
    fixture.assert_same("alone", "parts");
    let scores = |out: &str| {
        let found = crate::losses::events(&fixture, out, "evaluation").into_iter();
        found.map(|event| json!([event["step"], event["tasks"]])).collect::<Vec<_>>()
    };
    let alone = scores("alone");
    assert_eq!(alone.iter().map(|one| one[0].as_u64()).collect::<Vec<_>>(), [Some(10), Some(20)]);
    assert_eq!(scores("parts"), alone);
    for (task, norm) in [("next-word", true), ("written", false)] {
        let score = &alone[1][1][task];
        assert_eq!(
            (score["examples"].as_u64(), score["accuracy_norm"].is_number()),
            (Some(12), norm)
        );
        assert!(score["log_likelihood"].as_f64().unwrap() < 0.0);
    }
    let (run, page) = (fixture.scratch.path("alone"), fixture.scratch.path("page.html"));
    ztrain(&["report", "--run", arg(&run), "--out", arg(&page)]).ok();
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains(r#""evaluation":{"#) && page.contains("next-word"));
}

/// What a file or flag has wrong is said with its line, and nothing is trained.
#[test]
fn files_that_are_no_tasks_are_refused_before_training() {
    let fixture = Fixture::new(&[]);
    let right = r#"{"context": "a b", "choices": [" c", " d"], "answer": 1}"#;
    let long = format!(r#"{{"context": "a", "answer": "{}"}}"#, " deterministic".repeat(200));
    let cases = [
        (r#"{"context": "a", "choices": [" c", " d"], "answer": 2}"#, "answer 2 of 2 choices"),
        (r#"{"context": "a", "choices": [" c"], "answer": 0}"#, "answer 0 of 1 choice"),
        (r#"{"context": "a", "choices": [" c", " d"], "answer": " c"}"#, "`answer` is a text"),
        (r#"{"context": "a", "choices": [" c", " d"], "answer": -1}"#, "answer -1 of 2 choices"),
        (r#"{"context": "a", "answer": [1]}"#, "neither the number of a choice nor a text"),
        ("[]", "an object with `context` and `answer`"),
        (r#"{"context": "a", "answer": 0}"#, "a number without `choices`"),
        (r#"{"context": "a", "answer": ""}"#, "no token of its own"),
        (r#"{"answer": " c"}"#, "missing field `context`"),
        ("{\"context\": \"\u{fffd}", "EOF"),
        (&long, "the shortest seq_len of the run"),
    ];
    for ranks in [&[][..], &["--nproc", "2"]] {
        for (line, said) in cases.iter().take(if ranks.is_empty() { 8 } else { 1 }) {
            let task = fixture.scratch.write("task.jsonl", format!("{right}\n{line}\n"));
            let ran = fixture.run("none", &[&["--eval", arg(&task)], ranks].concat()).output();
            Ran::from(ran.unwrap()).fails(2, &["task.jsonl:2", said]);
        }
    }
    let [task, empty] = [("task.jsonl", right), ("empty.jsonl", "\n\n")]
        .map(|(name, text)| fixture.scratch.write(name, text));
    let twice = fixture.scratch.write("other/task.jsonl", right);
    for (flags, code, said) in [
        (["--eval", arg(&empty), "--validate-every", "5"], 2, "needs a name and an example"),
        (["--eval", arg(&task), "--validate-every", "0"], 2, "there is none"),
        (["--eval", arg(&task), "--eval", arg(&twice)], 2, "two tasks have one name"),
        (["--eval", "nowhere.jsonl", "--validate-every", "5"], 3, "nowhere.jsonl"),
    ] {
        Ran::from(fixture.run("none", &flags).output().unwrap()).fails(code, &[said]);
    }
    assert!(!fixture.scratch.path("none").exists(), "nothing was trained");
}
