//! Fear: that ranks that share the chunks of a micro-batch leave a trace in the bits.

use contract::Class;
use loader::OpenedCurriculum;
use serde_json::Value;
use tch::Device;
use tools::export::export;
use tools::plan::{Fleet, needs};
use trainer::mesh::{Degrees, GradReduce};
use trainer::model::ActivationCheckpointing;
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;
use trainer::{ExecOptions, RunOutcome, RunSpec};

use crate::cuts::cut;
use crate::damage::forge;
use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after, table};

/// Trains `run.toml` in `out` with `world` ranks, up to `cp` of them per micro-batch, and expects the ledger of
/// `alone`.
fn assert_shared(scratch: &Scratch, wanted: RunOutcome, world: u32, cp: u32) {
    let out = format!("{world}-ranks-{cp}-share");
    for outcome in train_with(scratch, &out, world, |_, exec| exec.degrees.cp = cp) {
        assert_eq!(outcome.unwrap(), wanted, "{out}");
    }
    assert_same(scratch, "alone", &out);
}

/// Documents cross chunks of 8 and of 4 tokens, and weights are sharded as well; with 3 and 5 micro-batches some groups
/// are idle.
#[test]
fn ranks_that_share_micro_batches_write_the_ledger_of_one() {
    for (dtype, degrees) in [("f32", [(6, 2), (4, 4)]), ("bf16", [(2, 2), (8, 4)])] {
        let scratch = cut(dtype);
        scratch.five_steps();
        let alone = scratch.train("alone");
        degrees.into_iter().for_each(|(world, cp)| assert_shared(&scratch, alone, world, cp));
    }
}

/// In a phase without chunks, ranks that shared micro-batches compute their own instead.
#[test]
fn phases_may_be_cut_otherwise() {
    let scratch = Scratch::new();
    let changes = [
        ("micro_batch = 1", "micro_batch = 1\ncontext_chunks = 8"),
        ("kind = \"muon\"", "kind = \"adamw\""),
    ];
    scratch.edited("run.toml", &changes);
    let alone = scratch.train("alone");
    assert_shared(&scratch, alone, 4, 4);
}

/// Adds these lines to `[model]` of `run.toml`.
fn add_to_model(scratch: &Scratch, lines: &str) {
    let path = scratch.path("run.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let changed = text.replace("[model]\n", &format!("[model]\n{lines}\n"));
    assert_ne!(changed, text);
    std::fs::write(&path, changed).unwrap();
}

/// Windows begin in earlier chunks, of the same rank and of others.
#[test]
fn windows_have_one_ledger_for_every_degree() {
    let window = "sliding_window = 5\nlayer_types = [\"sliding_attention\", \"full_attention\"]\n\
                  sliding_rope_theta = 300.0\n";
    for (dtype, world, cp, layers) in [("f32", 4, 4, ""), ("bf16", 4, 2, "layers = [\"gqa\"]")] {
        let scratch = cut(dtype);
        scratch.five_steps();
        scratch.train("full");
        add_to_model(&scratch, &format!("{window}{layers}"));
        let alone = scratch.train("alone");
        assert_shared(&scratch, alone, world, cp);
        assert_ne!(scratch.ledger("full").lines().nth(1), scratch.ledger("alone").lines().nth(1));
    }
}

/// States of linear attention, and keys and values of grouped-query attention, are passed from chunk to chunk: one
/// ledger for every degree, with or without recomputation.
#[test]
fn other_attentions_have_one_ledger_for_every_degree() {
    let kinds = ["[\"linear\", \"cca\"]", "[\"gqa\", \"linear\"]\nqk_norm = true"];
    for ((dtype, world, cp), kinds) in [("f32", 4, 4), ("bf16", 4, 2)].into_iter().zip(kinds) {
        let scratch = cut(dtype);
        add_to_model(&scratch, &format!("layers = {kinds}"));
        scratch.five_steps();
        let alone = scratch.train("alone");
        assert_shared(&scratch, alone, world, cp);
        let again = |_, exec: &mut ExecOptions| {
            exec.degrees.cp = 2;
            exec.workers = Workers::new(1).keeping(ActivationCheckpointing::LayerInputs);
        };
        for outcome in train_with(&scratch, "again", 2, again) {
            assert_eq!(outcome.unwrap(), alone);
        }
        assert_same(&scratch, "alone", "again");
        let root = scratch.path("again");
        let mut replayer = Replayer::open(&root, &table(), Device::Cpu, Workers::new(2)).unwrap();
        let mut state = replayer.state_after(3).unwrap();
        let replayed = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap().replayed;
        assert_eq!(replayed.verdict, Verdict::SameBits, "{:?}", replayed.difference);
        let fault = export(replayer.spec(), &state, &scratch.path("hf")).unwrap_err();
        assert!(fault.to_string().contains("[model] layers"), "{fault}");
    }
}

/// A run continues under another degree, with recomputation, either gradient reduction, and an audit.
#[test]
fn a_run_goes_on_under_another_degree() {
    let scratch = cut("bf16");
    let alone = scratch.train("alone");
    let parts = [
        (2, 2, 2, ActivationCheckpointing::LayerInputs, GradReduce::Bucketed),
        (3, 1, 4, ActivationCheckpointing::Everything, GradReduce::Whole),
        (4, 2, 7, ActivationCheckpointing::LayerInputs, GradReduce::Whole),
        (4, 4, 10, ActivationCheckpointing::Everything, GradReduce::Bucketed),
    ];
    for (world, cp, last, keep, grad_reduce) in parts {
        let change = |_, exec: &mut ExecOptions| {
            (exec.degrees.cp, exec.grad_reduce) = (cp, grad_reduce);
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

/// Step 8 has five micro-batches of 16 chunks, for two pairs of ranks: the second pair computes the last three.
#[test]
fn what_shared_ranks_have_otherwise_is_laid_to_all_of_them() {
    let scratch = cut("f32");
    let outcomes = train_with(&scratch, "run", 4, |_, exec| exec.degrees.cp = 2);
    outcomes.into_iter().for_each(|outcome| assert_eq!(outcome.unwrap().step, 10));
    forge(&scratch.path("run/ledger.jsonl"), 8, |line| {
        let words = line["micro_batch_grad_checksums"].as_str().unwrap();
        let (before, last) = words.split_at(4 * 16);
        assert_eq!(last.len(), 16, "{words}");
        line["micro_batch_grad_checksums"] = format!("{before}{}", "0123456789abcdef").into();
    });
    let root = scratch.path("run");
    let mut replayer = Replayer::open(&root, &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(7).unwrap();
    let again = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
    assert_eq!(again.replayed.verdict, Verdict::RunHit, "{:?}", again.replayed.difference);
    let found = again.narrowed.unwrap();
    assert_eq!((found.gradients, found.ranks, found.rank), (vec![4], Some(4), None));
    let whose = "ranks 2 and 3 of 4 shared it, as micro-batches 2, 3 and 4 in all";
    assert!(found.words.contains(whose), "{}", found.words);
}

/// Each rank holds its own chunks and its slice of gradients; transfers along a layer do not shrink.
#[test]
fn ranks_that_share_a_micro_batch_hold_less_of_it() {
    let scratch = Scratch::new();
    let change = ("micro_batch = 1", "micro_batch = 1\ncontext_chunks = 16");
    scratch.edited("run.toml", &[change]);
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    let of = |context| {
        let (workers, grad_reduce, device) =
            (Workers::new(2), GradReduce::Whole, "h100".to_owned());
        let (ranks, ranks_per_node, degrees) = (4, 4, Degrees { cp: context, tsp: 1 });
        let fleet =
            Fleet { ranks, ranks_per_node, workers, grad_reduce, flat: false, degrees, device };
        needs(&spec, &fleet).unwrap().phases[1].clone()
    };
    let [one, two, four] = [of(1), of(2), of(4)];
    assert_eq!([one.context, two.context, four.context], [1, 2, 4]);
    assert_eq!([one.uneven, two.uneven, four.uneven], [0.0; 3]);
    assert_eq!((one.shared, one.memory.weights), (0, four.memory.weights));
    // Two workers if no ranks share, one if they do.
    assert!(two.memory.activations < one.memory.activations / 2 && one.shared < two.shared);
    assert!(four.memory.activations < two.memory.activations && two.shared < four.shared);
    assert!(four.memory.received + four.memory.sent < one.memory.received + one.memory.sent);
}

#[test]
fn a_degree_that_no_phase_allows_is_refused() {
    let scratch = Scratch::new();
    for outcome in train_with(&scratch, "none", 2, |_, exec| exec.degrees.cp = 2) {
        let fault = outcome.unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        assert!(
            fault.to_string().contains("no phase has micro-batches that ranks can share"),
            "{fault}"
        );
    }
}

/// Bytes sent between ranks that share micro-batches equal `ztrain plan` with one document per sequence, and are at
/// most that with shorter documents.
#[test]
fn what_is_sent_is_what_is_planned() {
    let scratch = Scratch::new();
    let half = "sliding_window = 6\nlayer_types = [\"sliding_attention\", \"full_attention\"]";
    for (mask, keep, layers, degrees) in [
        (true, ActivationCheckpointing::Everything, "[\"cca\"]", 4..=4),
        (false, ActivationCheckpointing::Everything, "[\"cca\"]", 2..=4),
        (false, ActivationCheckpointing::LayerInputs, "[\"gqa\", \"linear\"]", 2..=2),
        (true, ActivationCheckpointing::Everything, "[\"gqa\"]\nsliding_window = 6", 4..=4),
        (false, ActivationCheckpointing::LayerInputs, &format!("[\"cca\"]\n{half}"), 4..=4),
    ] {
        let masked = format!("preset = \"zaya1-nano\"\ndocument_mask = {mask}\nlayers = {layers}");
        let changes = [
            ("preset = \"zaya1-nano\"", masked),
            (
                "micro_batch = 2",
                "micro_batch = 2\ncontext_chunks = 4\nweight_shards = 2".to_owned(),
            ),
            ("micro_batch = 1", "micro_batch = 1\ncontext_chunks = 16".to_owned()),
        ];
        let changes: Vec<_> = changes.iter().map(|(from, to)| (*from, to.as_str())).collect();
        scratch.edited("run.toml", &changes);
        scratch.five_steps();
        let spec =
            RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
        for cp in degrees.step_by(2) {
            let world = cp;
            let out = format!("{mask}-{keep:?}-{}-{cp}", layers.len());
            let workers = Workers::new(1).keeping(keep);
            let outcomes = train_with(&scratch, &out, world, |_, exec| {
                (exec.degrees.cp, exec.workers) = (cp, workers);
                stop_after(4)(exec);
            });
            outcomes.into_iter().for_each(|outcome| assert_eq!(outcome.unwrap().step, 4));
            let (grad_reduce, device) = (GradReduce::Whole, "cpu".to_owned());
            let (ranks, ranks_per_node, degrees) = (world, world, Degrees { cp, tsp: 1 });
            let fleet =
                Fleet { ranks, ranks_per_node, workers, grad_reduce, flat: false, degrees, device };
            let needs = needs(&spec, &fleet).unwrap();
            for (step, phase) in [(1, &needs.phases[0]), (4, &needs.phases[1])] {
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

/// Bytes that ranks sharing micro-batches sent each other in a step of `out`.
fn shared(scratch: &Scratch, out: &str, step: u64) -> u64 {
    let events = std::fs::read_to_string(scratch.path(out).join("events.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut exchanges =
        events.filter(|event| event["event"] == "exchange" && event["step"] == step);
    exchanges.next().unwrap()["bytes_shared"].as_u64().unwrap()
}
