//! Fear: that an amendment reaches a step that was trained before it, or is lost on the way of a run.

use contract::Class;
use tch::Device;
use trainer::replay::whatif::{Change, imagine};
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{CURRICULUM, Scratch, stop_after, table};

/// Another mix in the middle of the second phase, and some documents that are gone from then on.
const AMENDMENTS: &str = "\n[[amendment]]\nstep = 8\nmix = { web = 5, math = 2 }\n\n\
    [[amendment]]\nstep = 9\nban = { web = [3, 40, 41, 77, 90, 101, 111], math = [5, 9, 60, 61, 100] }\n";

fn lines(scratch: &Scratch, out: &str) -> Vec<String> {
    scratch.ledger(out).lines().map(str::to_owned).collect()
}

#[test]
fn an_amended_run_goes_on_and_one_that_came_too_far_is_refused() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.train("plain");
    for (recorded, refused) in [(7, false), (8, true)] {
        let out = format!("run-{recorded}");
        scratch.write("run.toml", CURRICULUM);
        scratch.run(&path, &out, stop_after(recorded)).unwrap();
        scratch.write("run.toml", &(CURRICULUM.to_owned() + AMENDMENTS));
        let outcome = scratch.run(&path, &out, |_| ());
        if refused {
            let fault = outcome.unwrap_err();
            assert_eq!(fault.class(), Class::Usage);
            let text = fault.to_string();
            assert!(text.contains("amendment.1") && text.contains("step 8 on"), "{text}");
            continue;
        }
        assert_eq!(outcome.unwrap().step, 10);
        let events = std::fs::read_to_string(scratch.path(&out).join("events.jsonl")).unwrap();
        assert!(events.contains("amendment.1") && events.contains("amendment.2"), "{events}");
    }
    let (plain, run) = (lines(&scratch, "plain"), lines(&scratch, "run-7"));
    assert!(plain[..8] == run[..8], "what was trained before the amendment is as it was");
    assert!(plain[8] != run[8]);
}

#[test]
fn an_amended_run_has_the_same_bits_in_parts_on_ranks_and_in_a_replay() {
    let scratch = Scratch::new();
    let path = scratch.write("run.toml", &(CURRICULUM.to_owned() + AMENDMENTS));
    scratch.train("whole");
    scratch.run(&path, "parts", stop_after(8)).unwrap();
    scratch.train("parts");
    assert_same(&scratch, "whole", "parts");
    for (world, last) in [(3, 9), (2, 10)] {
        let part = train_with(&scratch, "ranks", world, |_, exec| exec.stop_after = Some(last));
        assert!(part.iter().all(|outcome| outcome.as_ref().unwrap().step == last));
    }
    assert_same(&scratch, "whole", "ranks");
    let mut replayer =
        Replayer::open(&scratch.path("whole"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(7).unwrap();
    let mut silent = 0;
    for step in 8..=10 {
        let replayed = replayer.step(&mut state, Detail::Tokens).unwrap();
        assert_eq!(replayed.verdict, Verdict::SameBits, "step {step}: {:?}", replayed.difference);
        silent += replayed.documents.iter().filter(|it| it.tokens > 1 && it.labels == 0).count();
    }
    assert!(silent > 0, "none of the banned documents was met: the test looks at nothing");
}

/// What a replay says would have been without a document is what an amendment makes of it.
#[test]
fn a_ban_is_the_counterfactual_come_true() {
    let scratch = Scratch::new();
    scratch.train("plain");
    let open =
        || Replayer::open(&scratch.path("plain"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = open().state_after(7).unwrap();
    let documents = open().step(&mut state, Detail::Tokens).unwrap().documents;
    let worst = documents.iter().find(|document| document.labels > 4).unwrap();
    let change = Change { drop: vec![worst.id.clone()], lr: None };
    let imagined = imagine(&mut open(), 8..10, &change).unwrap();
    let (source, number) = worst.id.split_once('-').unwrap();
    let ban = format!("\n[[amendment]]\nstep = 8\nban = {{ {source} = [{number}] }}\n");
    scratch.write("run.toml", &(CURRICULUM.to_owned() + &ban));
    scratch.train("banned");
    for (line, would) in lines(&scratch, "banned")[8..].iter().zip(&imagined) {
        let step: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            step["norm"],
            format!("{:016x}", would.would_be.1.to_bits()),
            "step {}",
            would.step
        );
    }
    assert!(imagined[0].dropped_labels == worst.labels);
}

#[test]
fn a_store_is_added_and_known_by_its_content() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.run(&path, "run", stop_after(7)).unwrap();
    scratch.write_other_store("more", ["news", "code"], 5);
    let digest = scratch.store_digest("more");
    let amended = |mix: &str, digest: &str| {
        let text = format!(
            "{CURRICULUM}\n[[amendment]]\nstep = 9\nstore = \"more\"\ndigest = \"{digest}\"\nmix = {{ {mix} }}\n"
        );
        scratch.write("run.toml", &text);
    };
    amended("web = 1, news = 2", &digest);
    assert_eq!(scratch.run(&path, "run", |_| ()).unwrap().step, 10);
    assert_eq!(scratch.run(&path, "whole", |_| ()).unwrap().step, 10);
    // Line 0 holds the curriculum that each began with, and step 9 of one of them what is in force since.
    let body = |line: String| line.split(",\"chain\"").next().unwrap().to_owned();
    let steps = |out: &str| -> Vec<String> {
        let steps = lines(&scratch, out).into_iter().skip(1);
        steps
            .map(|line| line.split(",\"curriculum\"").next().unwrap().to_owned())
            .map(body)
            .collect()
    };
    assert_eq!(steps("run").len(), 10);
    assert_eq!(steps("run"), steps("whole"));
    amended("web = 1, news = 2", &"0".repeat(64));
    let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch, "{fault}");
    amended("web = 1, news = 2", &digest);
    let early = std::fs::read_to_string(&path).unwrap();
    scratch.write(
        "run.toml",
        &early.replace("mix = { web = 1, math = 3 }", "mix = { web = 1, code = 3 }"),
    );
    let fault = scratch.run(&path, "other", |_| ()).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("\"code\""), "{fault}");
}
