//! Fear: that ranks which share the chunks of a micro-batch leave a trace in the bits.

use contract::Class;
use loader::Opened;
use serde_json::Value;
use trainer::mesh::Schedule;
use trainer::model::Keep;
use trainer::plan::{Fleet, needs};
use trainer::workers::Workers;
use trainer::{ExecOptions, Outcome, RunSpec};

use crate::cuts::cut;
use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after};

/// Trains `run.toml` in `out` with `world` ranks of which up to `cp` share a micro-batch; the same ledger as in `alone`.
fn assert_shared(scratch: &Scratch, wanted: Outcome, (world, cp): (u32, u32)) {
    let out = format!("{world}-ranks-{cp}-share");
    for outcome in train_with(scratch, &out, world, |_, exec| exec.context = cp) {
        assert_eq!(outcome.unwrap(), wanted, "{out}");
    }
    assert_same(scratch, "alone", &out);
}

/// Documents cross chunks of 8 and of 4 tokens, weights are cut into shards besides; 3 and 5 micro-batches leave some lines idle.
#[test]
fn ranks_that_share_micro_batches_write_the_ledger_of_one() {
    for (dtype, degrees) in [("f32", [(2, 2), (6, 2), (4, 4)]), ("bf16", [(2, 2), (4, 2), (8, 4)])]
    {
        let scratch = cut(dtype);
        let alone = scratch.train("alone");
        degrees.into_iter().for_each(|degrees| assert_shared(&scratch, alone, degrees));
    }
}

/// The ranks that a phase without chunks cannot use in sharing take micro-batches of their own there.
#[test]
fn phases_may_be_cut_otherwise() {
    let scratch = Scratch::new();
    let changes = [
        ("micro_batch = 1", "micro_batch = 1\ncontext_chunks = 8"),
        ("kind = \"muon\"", "kind = \"adamw\""),
    ];
    scratch.edited("run.toml", &changes);
    let alone = scratch.train("alone");
    assert_shared(&scratch, alone, (4, 4));
}

/// What one degree began another goes on with; recomputation, both schedules, machines, an audit on the way.
#[test]
fn a_run_goes_on_under_another_degree() {
    let scratch = cut("bf16");
    let alone = scratch.train("alone");
    let parts = [
        (2, 2, 2, Keep::LayerInputs, Schedule::Streaming),
        (3, 1, 4, Keep::Everything, Schedule::Subtree),
        (4, 2, 7, Keep::LayerInputs, Schedule::Subtree),
        (4, 4, 10, Keep::Everything, Schedule::Streaming),
    ];
    for (world, cp, last, keep, schedule) in parts {
        let change = |_, exec: &mut ExecOptions| {
            (exec.context, exec.schedule) = (cp, schedule);
            stop_after(last)(exec);
            let audit = Some("1/3".parse().unwrap());
            exec.workers = Workers::new(2).keeping(keep).auditing(audit);
        };
        for outcome in train_with(&scratch, "parts", world, change) {
            assert_eq!(outcome.unwrap().step, last);
        }
    }
    assert_eq!(scratch.train("parts"), alone);
    assert_same(&scratch, "alone", "parts");
}

#[test]
fn a_degree_that_no_phase_allows_is_refused() {
    let scratch = Scratch::new();
    for outcome in train_with(&scratch, "none", 2, |_, exec| exec.context = 2) {
        let fault = outcome.unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        assert!(
            fault.to_string().contains("no phase has micro-batches that ranks can share"),
            "{fault}"
        );
    }
}

/// What was sent between ranks that share micro-batches is what `ztrain plan` says, one document a sequence; no more where
/// documents are short.
#[test]
fn what_is_sent_is_what_is_planned() {
    let scratch = Scratch::new();
    for (mask, keep) in
        [(true, Keep::Everything), (false, Keep::Everything), (false, Keep::LayerInputs)]
    {
        let changes = [
            ("preset = \"zaya1-nano\"", format!("preset = \"zaya1-nano\"\ndocument_mask = {mask}")),
            (
                "micro_batch = 2",
                "micro_batch = 2\ncontext_chunks = 4\nweight_shards = 2".to_owned(),
            ),
            ("micro_batch = 1", "micro_batch = 1\ncontext_chunks = 16".to_owned()),
        ];
        let changes: Vec<_> = changes.iter().map(|(from, to)| (*from, to.as_str())).collect();
        scratch.edited("run.toml", &changes);
        let spec = RunSpec::new(&Opened::open(scratch.path("run.toml")).unwrap()).unwrap();
        for (world, cp) in [(2, 2), (4, 4)] {
            let out = format!("{mask}-{keep:?}-{cp}");
            let workers = Workers::new(1).keeping(keep);
            let outcomes = train_with(&scratch, &out, world, |_, exec| {
                (exec.context, exec.workers) = (cp, workers);
            });
            outcomes.into_iter().for_each(|outcome| assert_eq!(outcome.unwrap().step, 10));
            let (schedule, device) = (Schedule::Subtree, "cpu".to_owned());
            let (ranks, ranks_per_node, context) = (world, world, cp);
            let fleet =
                Fleet { ranks, ranks_per_node, workers, schedule, flat: false, context, device };
            let needs = needs(&spec, &fleet).unwrap();
            for (step, phase) in [(1, &needs.phases[0]), (7, &needs.phases[1])] {
                let sent = shared(&scratch, &out, step);
                println!("{out}, step {step}: {sent} bytes, planned {}", phase.shared);
                match mask {
                    true => assert!(sent < phase.shared),
                    false => assert_eq!(sent, phase.shared, "{out}, step {step}"),
                }
            }
        }
    }
}

/// What the ranks of `out` that share micro-batches sent each other in a step.
fn shared(scratch: &Scratch, out: &str, step: u64) -> u64 {
    let events = std::fs::read_to_string(scratch.path(out).join("events.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut exchanges =
        events.filter(|event| event["event"] == "exchange" && event["step"] == step);
    exchanges.next().unwrap()["bytes_shared"].as_u64().unwrap()
}
