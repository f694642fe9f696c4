//! Fear: that a layer without a router breaks code that expects one: a step, its record, a checkpoint, a plan, an
//! explanation.

use contract::Class;
use loader::OpenedCurriculum;
use serde_json::{Value, json};
use tch::Device;
use tools::bench;
use tools::explain::{ExplainRequest, explain};
use tools::export::export;
use tools::plan::{Fleet, needs};
use tools::report::{RunView, page, payload};
use trainer::mesh::{Degrees, GradReduce};
use trainer::model::ActivationCheckpointing;
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::validate::Validation;
use trainer::workers::Workers;
use trainer::{ExecOptions, RunSpec, step};

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after, table};

/// A Llama, which has no router at all.
const LLAMA: &str = "[\"mlp\"]\nlayers = [\"gqa\"]\nresidual = \"plain\"\n\
    partial_rotary_factor = 1.0\ntie_word_embeddings = false";

/// Two of three experts for each token, and one that all tokens have; biases balance the router.
const EXPERTS: &str = "[\"moe\"]\nlayers = [\"gqa\"]\nresidual = \"plain\"\n\
    partial_rotary_factor = 1.0\nrouter = \"linear\"\nskip = \"none\"\n\
    num_experts_per_tok = 2\nnorm_topk_prob = true\nnum_shared_experts = 1";

/// Kinds of feed-forward (the list is repeated over the two layers), and how many counts each layer's router has.
const PLAIN: [(&str, [usize; 2]); 4] = [
    ("[\"mlp\", \"moe\"]", [0, 4]),
    ("[\"moe\", \"mlp\"]\nrouter = \"linear\"", [4, 0]),
    (LLAMA, [0, 0]),
    (EXPERTS, [4, 4]),
];

/// A scratch folder whose `run.toml` has these feed-forwards.
fn scratch_of(kinds: &str) -> Scratch {
    let scratch = Scratch::new();
    let model = format!("[model]\nfeed_forward = {kinds}\n");
    scratch.edited("run.toml", &[("[model]\n", &model)]);
    scratch
}

fn spec(scratch: &Scratch) -> RunSpec {
    RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap()
}

/// Each step of the ledger.
fn steps(scratch: &Scratch, out: &str) -> Vec<Value> {
    scratch.ledger(out).lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Complete steps: forward, backward and update, through a checkpoint and on several ranks; then replays of each.
#[test]
fn a_run_of_plain_layers_is_recorded_kept_and_replayed() {
    for (kinds, classes) in PLAIN {
        let scratch = scratch_of(kinds);
        let whole = scratch.train("whole");
        let steps = steps(&scratch, "whole");
        assert_eq!(steps.len(), 10);
        for line in &steps {
            let router: Vec<Vec<u64>> =
                serde_json::from_value(line["tokens_per_expert"].clone()).unwrap();
            assert_eq!(router.iter().map(Vec::len).collect::<Vec<_>>(), classes, "{kinds}");
            let tokens = if line["step"].as_u64() < Some(7) { 6 * 32 } else { 5 * 64 };
            let each = if kinds == EXPERTS { 2 } else { 1 };
            for counts in router.iter().filter(|counts| !counts.is_empty()) {
                assert_eq!(counts.iter().sum::<u64>(), each * tokens);
                assert!(kinds != EXPERTS || counts[3] == 0, "no token is without experts");
            }
        }
        let [first, last] = [&steps[0], &steps[9]].map(|line| line["loss"].as_f64().unwrap());
        assert!(last < first, "{kinds}: it learns nothing, {first} to {last}");
        let balance =
            scratch.tree("whole").keys().any(|name| name.ends_with("balance.safetensors"));
        assert_eq!(balance, classes != [0, 0], "{kinds}");
        let validation = Validation { every: 4, windows: 3 };
        let part = |exec: &mut ExecOptions| {
            stop_after(4)(exec);
            exec.validation = validation;
            exec.workers = Workers::new(2).keeping(ActivationCheckpointing::LayerInputs);
            exec.workers = exec.workers.auditing(Some("1/1".parse().unwrap()));
        };
        scratch.run(&scratch.path("run.toml"), "parts", part).unwrap();
        let ended = scratch.run(&scratch.path("run.toml"), "parts", |exec| {
            exec.validation = validation;
        });
        assert_eq!(ended.unwrap(), whole);
        assert!(scratch.ledger("whole") == scratch.ledger("parts"), "{kinds}");
        for outcome in train_with(&scratch, "ranks", 3, |_, _| ()) {
            assert_eq!(outcome.unwrap(), whole);
        }
        assert_same(&scratch, "whole", "ranks");
        let (root, workers) = (scratch.path("whole"), Workers::new(2));
        let mut replayer = Replayer::open(&root, &table(), Device::Cpu, workers).unwrap();
        let mut state = replayer.state_after(3).unwrap();
        for _ in 4..=10 {
            let replayed =
                tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap().replayed;
            assert_eq!(replayed.verdict, Verdict::SameBits, "{kinds}: {:?}", replayed.difference);
        }
        let exported = export(replayer.spec(), &state, &scratch.path("hf"));
        if kinds == LLAMA {
            exported.unwrap();
            continue;
        }
        let (fault, [key, value]) = (
            exported.unwrap_err(),
            match kinds {
                EXPERTS => ["balance", "\"bias\""],
                _ => ["feed_forward", "\"mlp\""],
            },
        );
        assert!(fault.to_string().contains(&format!("[model] {key}")), "{fault}");
        assert!(fault.to_string().contains(value) && !scratch.path("hf").exists(), "{fault}");
    }
}

/// Commands that show expert counts handle layers without them.
#[test]
fn a_run_of_plain_layers_is_planned_measured_shown_and_explained() {
    for (kinds, classes) in PLAIN {
        let scratch = scratch_of(kinds);
        scratch.train("run");
        let (spec, routers) = (spec(&scratch), classes.iter().filter(|count| **count > 0).count());
        let fleet = Fleet {
            ranks: 1,
            ranks_per_node: 1,
            workers: Workers::new(1),
            grad_reduce: GradReduce::Whole,
            flat: false,
            degrees: Degrees::ALONE,
            device: "cpu".to_owned(),
        };
        let needs = needs(&spec, &fleet).unwrap();
        let tree = scratch.tree("run");
        let kept = tree.keys().filter(|name| name.contains("checkpoints/step-10/")).count() as u64;
        assert_eq!((needs.checkpoint.files, needs.checkpoint.most_files), (kept, kept), "{kinds}");
        let ledger = scratch.ledger("run");
        let lines: u64 = ledger.lines().skip(1).map(|line| line.len() as u64 + 1).sum();
        let off = needs.ledger_bytes.abs_diff(lines) as f64 / lines as f64;
        assert!(off < 0.05, "{kinds}: {lines} bytes, planned {}", needs.ledger_bytes);
        let measured = |cx: step::StepContext<'_>| bench::step(cx, Device::Cpu, 1, 1, None);
        let by_bench = step::alone(&spec, Workers::new(1), measured).unwrap();
        // Documents end within sequences, and tokens may skip experts: less than planned, since the plan counts
        // neither.
        let (found, most) = (by_bench.model_flops, needs.phases[0].model_flops);
        assert!(found > most / 2.0 && found <= most, "{kinds}: {found} of {most}");
        let view = RunView::open(&scratch.path("run")).unwrap();
        let told: Value = serde_json::from_str(&payload(&view, 0).unwrap()).unwrap();
        match routers {
            0 => assert_eq!(told["router"], Value::Null),
            _ => assert_eq!(told["router"]["classes"], json!(classes)),
        }
        assert!(page(&[view], false).unwrap().contains("</html>"));
        let (root, workers) = (scratch.path("run"), Workers::new(2));
        let mut replayer = Replayer::open(&root, &table(), Device::Cpu, workers).unwrap();
        let request = ExplainRequest { step: 5, window: 4, top: 1, tokens: 1 };
        let told = explain(&mut replayer, request).unwrap();
        assert_eq!((told.verdict, told.routers.len()), (Verdict::SameBits, routers), "{told}");
        assert!(told.routers.iter().all(|one| classes[one.layer] > 0), "{told}");
    }
}

#[test]
fn a_kind_that_nobody_knows_is_refused_with_its_key() {
    let scratch = Scratch::new();
    let cases = [
        ("feed_forward", "[\"moe\", \"mpl\"]", "wanted: `moe` or `mlp`"),
        ("feed_forward", "\"mlp\"", "wanted: a list"),
        ("max_position_embeddings", "\"2\"", "wanted: a whole number"),
        ("rope_theta", "\"2\"", "wanted: a number"),
        ("feed_forward", "[\"moe\", \"mlp\", \"moe\"]", "one to num_hidden_layers (2) kinds"),
        ("layers", "[\"mlp\"]", "one of `cca`, `linear`, `gqa`"),
    ];
    for (key, kinds, words) in cases {
        let model = format!("[model]\n{key} = {kinds}\n");
        let path = scratch.edited("bad.toml", &[("[model]\n", &model)]);
        let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        let text = fault.to_string();
        assert!(text.contains(words) && text.contains(key), "no {words:?} in: {text}");
        assert!(text.contains("bad.toml:"), "{text}");
        assert!(!scratch.path("run").exists(), "{words}: nothing was begun");
    }
}

/// Refused in a later phase and in the first, even if all tensors keep their sizes.
#[test]
fn no_phase_changes_the_shape_of_the_model() {
    let scratch = Scratch::new();
    for (phase, key, value) in [
        ("micro_batch = 1", "feed_forward", "[\"mlp\"]"),
        ("micro_batch = 2", "hidden_size", "32"),
        ("micro_batch = 2", "num_experts", "4"),
        ("micro_batch = 2", "num_shared_experts", "1"),
        ("micro_batch = 1", "num_key_value_heads", "1"),
        ("micro_batch = 1", "sliding_window", "8"),
    ] {
        let change = format!("{phase}\nmodel = {{ rope_theta = 5e3, {key} = {value} }}");
        let path = scratch.edited("bad.toml", &[(phase, &change)]);
        let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        assert!(fault.to_string().contains("cannot change the structure of the model"), "{fault}");
        assert!(fault.place().is_some_and(|place| place.contains("bad.toml:")), "{fault}");
        assert!(!scratch.path("run").exists());
    }
    let numbers = "micro_batch = 2\nmodel = { rope_theta = 5e3, rms_norm_eps = 1e-6 }";
    let path = scratch.edited("good.toml", &[("micro_batch = 2", numbers)]);
    scratch.run(&path, "good", |exec| exec.stop_after = Some(1)).unwrap();
}
