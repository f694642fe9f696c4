//! Ledgers on disk: records are read back, damage is found, and opening stays cheap.

use super::super::record::tests::record;
use std::path::PathBuf;

use super::*;
use contract::{Class, Identity};

fn head() -> LedgerHead {
    LedgerHead {
        kind: "head".into(),
        format: super::super::FORMAT,
        kernel_table: serde_json::json!({"libtorch": "2.11.0"}),
        plan: 2,
        curriculum: "seed = 1\n".into(),
        stores: vec![Identity([7; 32])],
        tokenizer: Identity([8; 32]),
        levels: vec!["D".into()],
        parameters: vec!["a".into()],
    }
}

fn written(folder: &Path, steps: u64) -> PathBuf {
    let path = folder.join("ledger.jsonl");
    let mut ledger = Ledger::create(&path, head()).unwrap();
    (1..=steps).for_each(|step| ledger.append(&record(step, 1), None).unwrap());
    path
}

#[test]
fn records_come_back_and_appending_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), 3);
    let mut ledger = Ledger::open(&path).unwrap().unwrap();
    assert_eq!((ledger.head(), ledger.last_step()), (&head(), 3));
    assert_eq!(ledger.record(2).unwrap().difference(&record(2, 1), &[]), None);
    assert_eq!(ledger.record(4).unwrap_err().class(), Class::Usage);
    ledger.append(&record(4, 1), None).unwrap();
    assert_eq!(ledger.record(4).unwrap().difference(&record(4, 1), &[]), None);
    let whole = std::fs::read(&path).unwrap();
    let again = tempfile::tempdir().unwrap();
    assert_eq!(
        whole,
        std::fs::read(written(again.path(), 4)).unwrap(),
        "nothing but the records enters"
    );
}

/// Another format is refused by its number, before any other field is read, since its lines may lack fields.
#[test]
fn a_ledger_of_another_format_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    let mut older = serde_json::to_value(head()).unwrap();
    older["format"] = 2.into();
    older.as_object_mut().unwrap().remove("levels");
    let (line, _) = chain::seal(Digest::default(), &older.to_string());
    std::fs::write(&path, format!("{line}\n")).unwrap();
    let appending = Ledger::open(&path).map(|_| ());
    for opened in [appending, Ledger::read(&path).map(|_| ())] {
        let fault = opened.unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch);
        for word in ["format 2", "format 7", "the version that began it"] {
            assert!(fault.to_string().contains(word), "{fault}");
        }
    }
}

#[test]
fn a_torn_last_line_is_cut_at_any_byte() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), 2);
    let whole = std::fs::read(&path).unwrap();
    let ends: Vec<usize> =
        (0..whole.len()).filter(|at| whole[*at] == b'\n').map(|at| at + 1).collect();
    for cut in (0..whole.len()).step_by(7).chain(ends.iter().copied()) {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let complete = ends.iter().filter(|end| **end <= cut).count();
        match Ledger::open(&path).unwrap() {
            None => assert_eq!(complete, 0),
            Some(mut ledger) => {
                assert_eq!(ledger.last_step() + 1, complete as u64);
                (complete as u64..3)
                    .for_each(|step| ledger.append(&record(step, 1), None).unwrap());
                assert_eq!(std::fs::read(&path).unwrap(), whole);
            }
        }
    }
}

/// After a power loss, parts of what was appended since the last sync are missing (zeros), though later parts may be
/// there. Below a checkpoint no line can look so: that is damage, and is kept for inspection.
#[test]
fn zeros_where_power_was_lost_are_cut_unless_a_checkpoint_relies_on_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), 4);
    let whole = std::fs::read(&path).unwrap();
    let ends: Vec<usize> =
        (0..whole.len()).filter(|at| whole[*at] == b'\n').map(|at| at + 1).collect();
    let events = folder.path().join("events.jsonl");
    for step in 1..=4 {
        let (begin, end) = (ends[step - 1], ends[step]);
        for (from, to) in [(begin, end), (begin, begin + 1), (begin + 40, end), (end - 1, end)] {
            let mut torn = whole.clone();
            torn[from..to].fill(0);
            std::fs::write(&path, &torn).unwrap();
            assert_eq!(Ledger::read(&path).unwrap().last_step(), step as u64 - 1);
            std::fs::write(&events, format!("{{\"event\":\"checkpoint\",\"step\":{step}}}\n"))
                .unwrap();
            let refused = Ledger::open(&path).map(|_| ()).unwrap_err().to_string();
            assert!(
                refused.contains("zeros") && refused.contains(&format!("step {step}")),
                "{refused}"
            );
            assert_eq!(std::fs::read(&path).unwrap(), torn, "what is refused is left as it is");
            std::fs::write(
                &events,
                format!("{{\"event\":\"checkpoint\",\"step\":{}}}\n", step - 1),
            )
            .unwrap();
            let mut ledger = Ledger::open(&path).unwrap().unwrap();
            (step as u64..=4).for_each(|step| ledger.append(&record(step, 1), None).unwrap());
            assert_eq!(std::fs::read(&path).unwrap(), whole, "{from}..{to}");
        }
    }
}

#[test]
fn a_changed_line_is_refused_with_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), 3);
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let swapped = [lines[0], lines[2], lines[1], lines[3], ""].join("\n");
    let removed = [lines[0], lines[2], lines[3], ""].join("\n");
    let changed = text.replacen("\"step\":2", "\"step\":3", 1);
    for (damaged, line) in [(swapped, 2), (removed, 2), (changed, 3)] {
        std::fs::write(&path, damaged).unwrap();
        for fault in [
            Ledger::open(&path).map(|_| ()).unwrap_err(),
            Ledger::read(&path).map(|_| ()).unwrap_err(),
        ] {
            assert_eq!(fault.class(), Class::Mismatch);
            assert!(fault.to_string().contains(&format!("ledger.jsonl:{line}:")), "{fault}");
        }
    }
}

/// A ledger of `steps` short lines, written without [`Ledger::append`] for speed; its index is real.
fn long(folder: &Path, steps: u64) -> PathBuf {
    let path = folder.join("ledger.jsonl");
    let (head, mut out) = (to_json(&head()).unwrap(), Vec::new());
    let (line, mut before) = chain::seal(Digest::default(), &head);
    out.extend_from_slice((line + "\n").as_bytes());
    for step in 1..=steps {
        let (line, after) = chain::seal(before, &format!("{{\"kind\":\"step\",\"step\":{step}}}"));
        out.extend_from_slice((line + "\n").as_bytes());
        before = after;
    }
    std::fs::write(&path, out).unwrap();
    drop(Ledger::open(&path).unwrap().unwrap());
    path
}

fn bytes_read(ledger: &Ledger) -> u64 {
    ledger.source.read.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn a_long_ledger_is_opened_as_fast_as_a_short_one() {
    let read = |steps: u64| {
        let folder = tempfile::tempdir().unwrap();
        let path = long(folder.path(), steps);
        let all = Ledger::read_whole(&path).unwrap();
        let ledger = Ledger::open(&path).unwrap().unwrap();
        assert_eq!(ledger.last_step(), steps);
        for step in [0, 1, 999, 1000, 1001, steps / 2, steps - 1, steps] {
            assert_eq!(ledger.chain_at(step), all.chain_at(step), "step {step}");
        }
        assert!(bytes_read(&all) >= std::fs::metadata(&path).unwrap().len());
        bytes_read(&ledger)
    };
    let (short, long) = (read(1_500), read(200_500));
    assert!(
        long < 4 * short.max(BUFFER as u64),
        "{long} bytes of a long one, {short} of a short one"
    );
}

#[test]
fn an_index_is_never_believed_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = long(folder.path(), 3_200);
    let (index, whole) = (path.with_extension("index"), std::fs::read(&path).unwrap());
    let (good, right) =
        (std::fs::read(&index).unwrap(), Ledger::read_whole(&path).unwrap().chain_at(3_150));
    let same = || {
        let ledger = Ledger::open(&path).unwrap().unwrap();
        assert_eq!((ledger.last_step(), ledger.chain_at(3_150)), (3_200, right));
        assert_eq!(std::fs::read(&index).unwrap(), good, "it is made good again");
    };
    let mut damaged = good.clone();
    for at in [good.len() - 150, good.len() - 30] {
        damaged[at] ^= 1;
        std::fs::write(&index, &damaged).unwrap();
        same();
    }
    // Reading checks earlier marks only when they are used; opening for appending repairs them.
    damaged.copy_from_slice(&good);
    damaged[50] ^= 1;
    std::fs::write(&index, &damaged).unwrap();
    let (ledger, all) = (Ledger::read(&path).unwrap(), Ledger::read_whole(&path).unwrap());
    for step in [500, 1_000, 1_500, 2_500] {
        assert_eq!(ledger.chain_at(step), all.chain_at(step), "step {step}");
    }
    same();
    for at in [3, 150, 190] {
        damaged.copy_from_slice(&good);
        damaged[at] ^= 1;
        std::fs::write(&index, &damaged).unwrap();
        same();
    }
    std::fs::write(&index, &good[..good.len() - 7]).unwrap();
    same();
    std::fs::remove_file(&index).unwrap();
    same();
    // A ledger that was cut before its last marks, as by restoring a backup, and another ledger in its place.
    let cut = whole.len() / 2;
    std::fs::write(&path, &whole[..cut]).unwrap();
    let ledger = Ledger::open(&path).unwrap().unwrap();
    assert!((1_000..3_000).contains(&ledger.last_step()));
    let text =
        String::from_utf8(whole).unwrap().replacen("\"step\":7,\"chain", "\"step\":8,\"chain", 1);
    std::fs::write(&path, &text).unwrap();
    std::fs::remove_file(&index).unwrap();
    assert_eq!(Ledger::open(&path).map(|_| ()).unwrap_err().class(), Class::Mismatch);
}

#[test]
fn the_curriculum_in_force_is_known_wherever_it_stands() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    let mut ledger = Ledger::create(&path, head()).unwrap();
    for step in 1..=2_100 {
        let changed = [7, 1_500].contains(&step).then(|| format!("from step {step}"));
        ledger.append(&record(step, 1), changed).unwrap();
    }
    let id = ledger.id();
    assert_eq!(ledger.curriculum(), "from step 1500");
    let ledger = Ledger::open(&path).unwrap().unwrap();
    assert_eq!((ledger.curriculum(), ledger.id()), ("from step 1500", id));
    assert_eq!(ledger.record(7).unwrap().curriculum.as_deref(), Some("from step 7"));
    // Reading does not trust any mark of the index either, wherever it is damaged.
    let index = path.with_extension("index");
    let good = std::fs::read(&index).unwrap();
    for at in 0..good.len() {
        let mut damaged = good.clone();
        damaged[at] ^= 1;
        std::fs::write(&index, &damaged).unwrap();
        let ledger = Ledger::read(&path).unwrap();
        assert_eq!(
            (ledger.curriculum(), ledger.last_step()),
            ("from step 1500", 2_100),
            "byte {at}"
        );
    }
    std::fs::write(&index, &good).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("from step 1500", "from step 1501")).unwrap();
    assert_eq!(Ledger::open(&path).map(|_| ()).unwrap_err().class(), Class::Mismatch);
}

#[test]
fn a_loss_that_does_not_follow_from_its_parts_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let loss: fn(&mut StepRecord) = |record| record.loss *= 1.5;
    let label_count: fn(&mut StepRecord) = |record| record.label_count += 1;
    for change in [loss, label_count] {
        let path = folder.path().join("ledger.jsonl");
        let mut ledger = Ledger::create(&path, head()).unwrap();
        let mut forged = record(1, 1);
        change(&mut forged);
        ledger.append(&forged, None).unwrap();
        let (_, mut follower) = super::super::Follower::open(&path).unwrap();
        let shown = follower.next_step::<crate::ledger::StepSummaryFields>().map(|_| ());
        for answer in [ledger.record(1).map(|_| ()), shown] {
            let fault = answer.unwrap_err();
            assert_eq!(fault.class(), Class::Mismatch, "{fault}");
            assert!(fault.to_string().contains("ledger.jsonl:2"), "{fault}");
        }
    }
}

#[test]
fn a_follower_reads_each_step_once_while_the_ledger_grows() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), 5);
    let whole = std::fs::read(&path).unwrap();
    let mut steps = Vec::new();
    let mut follower: Option<super::super::Follower> = None;
    for length in 0..=whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        if follower.is_none() {
            follower = super::super::Follower::open(&path).ok().map(|(found, follower)| {
                assert_eq!(found, head());
                follower
            });
        }
        let Some(follower) = &mut follower else { continue };
        while let Some(said) = follower.next_step::<StepRecord>().unwrap() {
            steps.push(said.step);
        }
        let complete = whole[..length].iter().filter(|byte| **byte == b'\n').count() as u64;
        assert_eq!(follower.step() + 1, complete, "at byte {length}");
    }
    assert_eq!(steps, [1, 2, 3, 4, 5]);
}

#[test]
fn a_follower_finds_a_changed_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), 3);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"step\":2,", "\"step\":7,")).unwrap();
    let (_, mut follower) = super::super::Follower::open(&path).unwrap();
    assert!(follower.next_step::<StepRecord>().unwrap().is_some());
    let fault = follower.next_step::<StepRecord>().map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
}

/// Continuing would split the run between two folders: its ledger in one, its checkpoints in the other.
#[test]
fn a_ledger_that_was_moved_takes_no_step() {
    let scratch = tempfile::tempdir().unwrap();
    let (path, moved) = (scratch.path().join("ledger.jsonl"), scratch.path().join("moved.jsonl"));
    let mut ledger = Ledger::create(&path, head()).unwrap();
    ledger.append(&record(1, 1), None).unwrap();
    std::fs::rename(&path, &moved).unwrap();
    for replaced in [false, true] {
        if replaced {
            std::fs::copy(&moved, &path).unwrap();
        }
        let before = std::fs::read(&moved).unwrap();
        let fault = ledger.append(&record(2, 1), None).unwrap_err();
        assert_eq!(fault.class(), Class::Machine);
        assert!(fault.to_string().contains("--out"), "{fault}");
        assert_eq!(std::fs::read(&moved).unwrap(), before);
    }
}
