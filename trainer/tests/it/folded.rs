//! Fear: that ranks that hold weight shards for each other leave a trace in the bits, or hold and send more than they
//! should.

use contract::Class;
use loader::OpenedCurriculum;
use proptest::prelude::*;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tools::plan::{Fleet, PhaseNeeds, needs};
use trainer::mesh::{Degrees, GradReduce};
use trainer::model::{
    ActivationCheckpointing, Attention, FeedForward, WeightShards, ZayaConfig, parameters,
};
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::validate::Validation;
use trainer::workers::Workers;
use trainer::{ExecOptions, RunOutcome, RunSpec};

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, is_full, stop_after, table};

/// A scratch folder whose `run.toml` shards the weights of its phases into two and four, with further changes.
pub(crate) fn folded(changes: &[(&str, &str)]) -> Scratch {
    let scratch = Scratch::new();
    let cuts = [
        ("micro_batch = 2", "micro_batch = 2\ncontext_chunks = 4\nweight_shards = 2"),
        ("micro_batch = 1", "micro_batch = 1\ncontext_chunks = 8\nweight_shards = 4"),
    ];
    scratch.edited("run.toml", &[&cuts, changes].concat());
    scratch
}

/// A replacement in the curriculum.
type Change = (&'static str, &'static str);

/// The number of ranks, and the degrees `cp` and `tsp`.
type Ranks = (u32, u32, u32);

const BF16: Change = ("dtype = \"f32\"", "dtype = \"bf16\"");
const ADAMW: Change = ("kind = \"muon\"", "kind = \"adamw\"");
const PLAIN: Change = ("[model]\n", "[model]\nfeed_forward = [\"mlp\", \"moe\"]\n");
const BASELINE: Change = (
    "[model]\n",
    "[model]\nlayers = [\"gqa\"]\nfeed_forward = [\"moe\", \"mlp\"]\nresidual = \"plain\"\nrouter = \"linear\"\n\
     tie_word_embeddings = false\nskip = \"none\"\nnum_experts_per_tok = 2\nnorm_topk_prob = true\n\
     num_shared_experts = 2\nlogits_dtype = \"f32\"\n",
);
const HYBRID: Change = ("[model]\n", "[model]\nlayers = [\"linear\", \"gqa\"]\nqk_norm = true\n");

/// Trains `run.toml` with `world` ranks of these degrees, and expects the ledger of `alone`.
fn assert_folded(scratch: &Scratch, wanted: RunOutcome, ranks: Ranks) {
    let (world, cp, tsp) = ranks;
    let out = format!("{world}-ranks-cp-{cp}-tsp-{tsp}");
    for outcome in train_with(scratch, &out, world, |_, exec| exec.degrees = Degrees { cp, tsp }) {
        assert_eq!(outcome.unwrap(), wanted, "{out}");
    }
    assert_same(scratch, "alone", &out);
}

/// The second phase shards every rank's weights differently; some groups have nothing to compute; documents cross
/// chunks.
#[test]
fn ranks_that_hold_weights_for_each_other_write_the_ledger_of_one() {
    let cases: [(&[Change], &[Ranks]); 9] = [
        (&[], &[(2, 1, 2), (4, 2, 2), (6, 1, 2)]),
        (&[BF16], &[(2, 1, 2), (8, 2, 4)]),
        (&[ADAMW], &[(4, 1, 4)]),
        (&[BF16, HYBRID], &[(8, 2, 2)]),
        (&[BF16, BASELINE], &[(4, 2, 2)]),
        (&[PLAIN], &[(4, 1, 4)]),
        (&[BF16, PLAIN], &[(8, 2, 2)]),
        // With `FULL=1` alone.
        (&[], &[(4, 1, 4)]),
        (&[PLAIN], &[(2, 1, 2)]),
    ];
    for (changes, degrees) in cases.into_iter().take(if is_full() { 9 } else { 7 }) {
        let scratch = folded(changes);
        scratch.five_steps();
        let alone = scratch.train("alone");
        degrees.iter().for_each(|degrees| assert_folded(&scratch, alone, *degrees));
    }
}

/// Ranks that a phase cannot use for weight shards share its sequences, or compute micro-batches of their own.
#[test]
fn phases_may_be_folded_or_not() {
    let scratch = Scratch::new();
    let cut = "micro_batch = 1\ncontext_chunks = 8\nweight_shards = 2";
    scratch.edited("run.toml", &[("micro_batch = 1", cut)]);
    let alone = scratch.train("alone");
    assert_folded(&scratch, alone, (4, 2, 2));
    let cut = "micro_batch = 2\ncontext_chunks = 4\nweight_shards = 2";
    scratch.edited("run.toml", &[("micro_batch = 2", cut)]);
    let alone = scratch.train("other");
    for outcome in
        train_with(&scratch, "back", 2, |_, exec| exec.degrees = Degrees { cp: 1, tsp: 2 })
    {
        assert_eq!(outcome.unwrap(), alone);
    }
    assert_same(&scratch, "other", "back");
}

/// A run continues under another degree, with recomputation, either gradient reduction, and an audit; one device
/// replays it.
#[test]
fn a_folded_run_goes_on_under_another_degree() {
    let scratch = folded(&[BF16]);
    let alone = scratch.train("alone");
    let parts = [
        (2, 1, 2, 2, ActivationCheckpointing::LayerInputs, GradReduce::Bucketed),
        (3, 1, 1, 4, ActivationCheckpointing::Everything, GradReduce::Whole),
        (4, 2, 2, 7, ActivationCheckpointing::LayerInputs, GradReduce::Whole),
        (4, 1, 4, 10, ActivationCheckpointing::Everything, GradReduce::Bucketed),
    ];
    for (world, cp, tsp, last, keep, grad_reduce) in parts {
        let change = |_, exec: &mut ExecOptions| {
            (exec.degrees, exec.grad_reduce) = (Degrees { cp, tsp }, grad_reduce);
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
    let root = scratch.path("parts");
    let mut replayer = Replayer::open(&root, &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(6).unwrap();
    let replayed = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap().replayed;
    assert_eq!(replayed.verdict, Verdict::SameBits, "{:?}", replayed.difference);
}

/// The ranks that hold weights for rank 0 compute the validation loss with it.
#[test]
fn the_validation_loss_of_folded_weights_is_that_of_whole_ones() {
    let scratch = folded(&[]);
    let validation = Validation { every: 4, windows: 5 };
    let path = scratch.path("run.toml");
    scratch.run(&path, "alone", |exec| exec.validation = validation).unwrap();
    let outcomes = train_with(&scratch, "folded", 8, |_, exec| {
        (exec.degrees, exec.validation) = (Degrees { cp: 2, tsp: 2 }, validation);
    });
    outcomes.into_iter().for_each(|outcome| assert_eq!(outcome.unwrap().step, 10));
    let [alone, folded] = ["alone", "folded"].map(|out| {
        let taken = events(&scratch, out, "validation").into_iter();
        taken.map(|event| event["sources"].clone()).collect::<Vec<_>>()
    });
    assert_eq!(alone.len(), 3);
    assert_eq!(alone, folded);
}

#[test]
fn a_degree_that_no_phase_can_fold_is_refused() {
    let scratch = Scratch::new();
    // Five micro-batches of one chunk, or shards that do not match the chunks.
    for cut in ["weight_shards = 2", "context_chunks = 2\nweight_shards = 3"] {
        scratch.edited("run.toml", &[("micro_batch = 1", &format!("micro_batch = 1\n{cut}"))]);
        let tsp = |_, exec: &mut ExecOptions| exec.degrees = Degrees { cp: 1, tsp: 2 };
        for outcome in train_with(&scratch, "none", 2, tsp) {
            let fault = outcome.unwrap_err();
            assert_eq!(fault.class(), Class::Usage);
            let text = fault.to_string();
            assert!(
                text.contains("no phase has weights that ranks can hold for each other"),
                "{text}"
            );
            assert!(text.contains("--tsp") && text.contains("weight_shards"), "{text}");
        }
    }
}

/// Bytes sent for shards equal the plan, recomputation included, and so do all others.
#[test]
fn shards_that_are_sent_are_those_that_are_planned() {
    let unmasked = ("preset = \"zaya1-nano\"", "preset = \"zaya1-nano\"\ndocument_mask = false");
    let scratch = folded(&[unmasked, PLAIN]);
    scratch.five_steps();
    for (keep, cp, tsp) in [
        (ActivationCheckpointing::Everything, 1, 2),
        (ActivationCheckpointing::LayerInputs, 1, 4),
        (ActivationCheckpointing::Everything, 2, 2),
    ] {
        let (out, workers) = (format!("{keep:?}-{cp}-{tsp}"), Workers::new(1).keeping(keep));
        let degrees = Degrees { cp, tsp };
        let outcomes = train_with(&scratch, &out, cp * tsp, |_, exec| {
            (exec.degrees, exec.workers) = (degrees, workers);
        });
        outcomes.into_iter().for_each(|outcome| assert_eq!(outcome.unwrap().step, 5));
        let planned = planned(&scratch, degrees, workers);
        let sent = events(&scratch, &out, "exchange");
        for (step, phase) in [(2, &planned[0]), (5, &planned[1])] {
            let event = sent.iter().find(|event| event["step"] == step).unwrap();
            let bytes = |name: &str| event[name].as_u64().unwrap();
            println!(
                "{out}, step {step}: shards {}, shared {}",
                bytes("bytes_folded"),
                bytes("bytes_shared")
            );
            assert!(phase.folded > 0);
            assert_eq!(bytes("bytes_folded"), phase.folded, "{out}, step {step}");
            assert_eq!(bytes("bytes_shared"), phase.shared, "{out}, step {step}");
            // Besides these, ranks exchange only a few kilobytes.
            let known = phase.folded + phase.shared + phase.sent.sum();
            let small = bytes("bytes").checked_sub(known);
            assert!(small.is_some_and(|small| small < 1 << 16), "{out}, step {step}: {small:?}");
        }
    }
}

/// A rank holds its shard of the weights that are sharded; the others, such as the embedding, stay whole.
#[test]
fn weights_fall_with_the_degree() {
    let scratch = folded(&[]);
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    let bytes = |name: &str| {
        let cut = spec.parameters.iter().filter(|one| one.sharding.is_some());
        cut.filter(|one| one.name.contains(name)).map(|one| 4 * one.elements()).sum::<u64>()
    };
    let (experts, attention) = (bytes(".experts."), bytes(".self_attn."));
    assert_eq!(experts + attention, bytes(""));
    let held = [1, 2, 4].map(|tsp| {
        let planned = planned_for(&scratch, 4, Degrees { cp: 4 / tsp, tsp }, Workers::new(1));
        planned[1].memory
    });
    let [whole, two, four] = held.map(|holds| holds.weights);
    println!("experts {experts}, attention {attention}: {whole}, {two}, {four}");
    assert_eq!(whole - two, (experts + attention) / 2);
    // Two key heads are two shards: of four ranks, two hold one each.
    let others = whole - experts - attention + experts / 4;
    assert!([others, others + attention / 2].contains(&four), "{four}");
    assert_eq!(held.map(|holds| holds.masters > 0), [false, true, true]);
}

fn planned(scratch: &Scratch, degrees: Degrees, workers: Workers) -> Vec<PhaseNeeds> {
    planned_for(scratch, degrees.cp * degrees.tsp, degrees, workers)
}

fn planned_for(
    scratch: &Scratch,
    ranks: u32,
    degrees: Degrees,
    workers: Workers,
) -> Vec<PhaseNeeds> {
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    let (grad_reduce, device) = (GradReduce::Whole, "cpu".to_owned());
    let ranks_per_node = ranks;
    let fleet = Fleet { ranks, ranks_per_node, workers, grad_reduce, flat: false, degrees, device };
    needs(&spec, &fleet).unwrap().phases
}

/// The events of one kind of a run.
pub(crate) fn events(scratch: &Scratch, out: &str, kind: &str) -> Vec<Value> {
    let events = std::fs::read_to_string(scratch.path(out).join("events.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == kind).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However the numbers of a parameter are split into runs, the places contain each number once, where its shard is.
    #[test]
    fn places_hold_every_number_once(
        (degree, each) in (2u32..5, 1u64..3), ends in prop::collection::vec(0.0f64..1.0, 0..6),
    ) {
        let shape = ZayaConfig {
            hidden_size: 6, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4,
            moe_intermediate_size: 10, num_experts: 3, vocab_size: 16,
            layers: vec![Attention::Cca, Attention::Gqa],
            feed_forward: vec![FeedForward::Moe, FeedForward::Mlp],
            ..ZayaConfig::preset("zaya1-nano").unwrap()
        };
        let specs = parameters(&shape);
        for (tensor, spec) in specs.iter().enumerate().filter(|(_, spec)| spec.sharding.is_some()) {
            let all = spec.elements() as i64;
            let whole = Tensor::arange(all, (Kind::Float, Device::Cpu));
            let mut ends: Vec<i64> = ends.iter().map(|end| (end * all as f64) as i64).collect();
            ends.extend([0, all]);
            ends.sort_unstable();
            let mut seen = Vec::new();
            for place in 0..degree {
                let fold = WeightShards::new(degree, place, &specs, each * u64::from(degree));
                let held = |ends: &[i64]| {
                    let row = Tensor::full([fold.length(tensor).unwrap()], -1, (Kind::Float, Device::Cpu));
                    for run in ends.windows(2) {
                        let flat = whole.narrow(0, run[0], run[1] - run[0]);
                        for common in fold.common(tensor, run[0]..run[1]) {
                            common.of_held(&row).unwrap().copy_(&common.of_run(&flat).unwrap());
                        }
                    }
                    Vec::<f32>::try_from(row).unwrap()
                };
                let row = held(&ends);
                prop_assert_eq!(&row, &held(&[0, all]), "{} in other runs", spec.name);
                seen.extend(row.into_iter().filter(|number| *number >= 0.0).map(|number| number as i64));
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..all).collect::<Vec<_>>(), "{}", spec.name);
        }
    }
}
