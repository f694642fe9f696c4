//! Fear: that a model changes when exported to or imported from Hugging Face, or that a run forgets the origin of its
//! weights.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use contract::Class;
use loader::{OpenedCurriculum, RankSlice};
use tch::{Device, Tensor};
use tools::export::{WeightMean, export};
use trainer::RunSpec;
use trainer::hf::import::import;
use trainer::ledger::Ledger;
use trainer::model::{MicroBatchInput, logits};
use trainer::replay::{Executor as _, Replayer, ThisMachine, Verdict};
use trainer::state::State;
use trainer::step::{self, Detail};
use trainer::workers::Workers;

use crate::support::{CURRICULUM, Scratch, stop_after, table};

/// Exports the state of `run` after `step` to `hf-STEP` and imports it as `start-STEP`.
fn through(scratch: &Scratch, step: u64) -> State {
    let path = scratch.path("run");
    let mut replayer = Replayer::open(&path, &table(), Device::Cpu, Workers::new(2)).unwrap();
    let state = replayer.state_at(step).unwrap();
    let (hf, start) = (format!("hf-{step}"), format!("start-{step}"));
    let exported = export(replayer.spec(), &state, &scratch.path(&hf)).unwrap();
    let imported = import(&scratch.path(&hf), &scratch.path(&start)).unwrap();
    assert_eq!(exported.tensors, imported.tensors);
    state
}

/// The curriculum with initial weights; its model comes from that folder alone.
fn started(scratch: &Scratch, name: &str, start: &str) -> std::path::PathBuf {
    let (head, rest) = CURRICULUM.split_once("[model]").unwrap();
    let (_, rest) = rest.split_once("[optimizer]").unwrap();
    scratch.write(name, &format!("init_from = {start:?}\n{head}[optimizer]{rest}"))
}

fn spec(path: &Path) -> RunSpec {
    RunSpec::new(&OpenedCurriculum::open(path).unwrap()).unwrap()
}

/// The mean of three states, against their own exports.
#[test]
fn an_exported_mean_is_that_of_the_exports() {
    let scratch = Scratch::new();
    scratch.train("run");
    let states = [4, 7, 10].map(|step| through(&scratch, step));
    let path = scratch.path("run");
    let replayer = Replayer::open(&path, &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut mean = WeightMean::default();
    states.iter().for_each(|state| mean.add(state).unwrap());
    mean.export(replayer.spec(), &scratch.path("mean")).unwrap();
    let read = |folder: &str| {
        let file = scratch.path(folder).join("model.safetensors");
        Tensor::read_safetensors(file).unwrap().into_iter().collect::<BTreeMap<_, _>>()
    };
    let (found, [first, second, third]) = (read("mean"), ["hf-4", "hf-7", "hf-10"].map(read));
    assert!(found.keys().any(|name| name.contains("balancing_biases")));
    for (name, mean) in &found {
        let of = |all: &BTreeMap<String, Tensor>| {
            Vec::<f32>::try_from(all[name].flatten(0, -1)).unwrap()
        };
        let mean = Vec::<f32>::try_from(mean.flatten(0, -1)).unwrap();
        for (mean, each) in mean.iter().zip(of(&first).iter().zip(of(&second)).zip(of(&third))) {
            let ((first, second), third) = each;
            let wanted = (f64::from(*first) + f64::from(second) + f64::from(third)) / 3.0;
            assert_eq!(*mean, wanted as f32, "{name}");
        }
    }
}

#[test]
fn a_run_begins_with_the_weights_of_another() {
    let scratch = Scratch::new();
    scratch.train("run");
    for step in [10, 7] {
        let state = through(&scratch, step);
        let path = started(&scratch, "next.toml", &format!("start-{step}"));
        let out = format!("next-{step}");
        scratch.run(&path, &out, stop_after(3)).unwrap();
        // Losses and gradients of the old state on the new run's first batch are what the new run recorded.
        let spec = spec(&path);
        let batch = loader::batch(&spec.plan, &spec.data, 1, RankSlice::WHOLE).unwrap();
        let workers = Workers::new(1);
        let wanted = step::alone(&spec, workers, |cx| {
            ThisMachine.compute(cx, &state, &batch, Detail::Sums)?.read(cx, &state.owners)
        });
        let wanted = wanted.unwrap();
        let ledger = Ledger::read(&scratch.path(&out).join("ledger.jsonl")).unwrap();
        let record = ledger.record(1).unwrap();
        let losses: Vec<u64> = wanted.micro_batches.iter().map(|one| one.loss.to_bits()).collect();
        let gradients: Vec<u64> = wanted.micro_batches.iter().map(|one| one.gradient).collect();
        assert_eq!(
            (record.micro_batch_losses.0, record.micro_batch_grad_checksums.0),
            (losses, gradients)
        );
        let path = scratch.path(&out);
        let replayer = Replayer::open(&path, &table(), Device::Cpu, Workers::new(2));
        let mut replayer = replayer.unwrap();
        let mut state = replayer.state_after(1).unwrap();
        assert_eq!(
            tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed.verdict,
            Verdict::SameBits
        );
    }
}

#[test]
fn a_start_is_known_by_its_content_and_not_by_its_place() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(6)).unwrap();
    through(&scratch, 5);
    through(&scratch, 6);
    let path = started(&scratch, "next.toml", "start-6");
    scratch.run(&path, "next", stop_after(2)).unwrap();
    // The same after the folder was moved.
    fs::rename(scratch.path("start-6"), scratch.path("moved")).unwrap();
    let moved = started(&scratch, "next.toml", "moved");
    scratch.run(&moved, "next", stop_after(4)).unwrap();
    scratch.run(&moved, "whole", stop_after(4)).unwrap();
    assert!(scratch.ledger("next") == scratch.ledger("whole"));
    // Other initial weights, or none, make another run.
    for path in [started(&scratch, "next.toml", "start-5"), scratch.path("run.toml")] {
        let fault = scratch.run(&path, "next", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch, "{fault}");
        assert!(fault.to_string().contains("set of initial weights"), "{fault}");
    }
    // Without a tokenizer the meaning of token ids is unknown.
    fs::remove_file(scratch.path("hf-6/tokenizer.json")).unwrap();
    import(&scratch.path("hf-6"), &scratch.path("bare")).unwrap();
    let bare = started(&scratch, "bare.toml", "bare");
    let fault = scratch.run(&bare, "bare-run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage);
    assert!(fault.to_string().contains("without a tokenizer"), "{fault}");
    // A model whose shapes do not fit the weights.
    let edit =
        [("store =", "init_from = \"moved\"\nstore ="), ("hidden_size = 16", "hidden_size = 24")];
    let fault = scratch.run(&scratch.edited("other.toml", &edit), "other", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage);
    assert!(fault.to_string().contains("other parameters"), "{fault}");
    // A flipped bit is detected before any step is computed.
    let weights = scratch.path("moved/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let moved = started(&scratch, "next.toml", "moved");
    let fault = scratch.run(&moved, "fresh", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Data);
    assert!(fault.to_string().contains("model.safetensors"), "{fault}");
    assert!(!scratch.path("fresh").exists(), "nothing was begun");
    let fault = Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(1));
    let fault = fault.unwrap().state_at(99).map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage);
}

/// A run with checkpoints does not need its initial weights; commands that read them report their path if missing.
#[test]
fn a_start_that_is_gone_or_changed_blocks_only_what_reads_it() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(6)).unwrap();
    through(&scratch, 6);
    let path = started(&scratch, "next.toml", "start-6");
    scratch.run(&path, "whole", stop_after(6)).unwrap();
    scratch.run(&path, "next", stop_after(2)).unwrap();
    let start = scratch.path("start-6");
    fs::rename(&start, scratch.path("moved")).unwrap();
    scratch.run(&path, "next", stop_after(4)).unwrap();
    let open =
        |run: &str| Replayer::open(&scratch.path(run), &table(), Device::Cpu, Workers::new(1));
    open("next").unwrap().state_at(3).unwrap();
    // Replaying from the first step needs them: if missing, the error names them.
    let all = scratch.path("next/checkpoints");
    fs::rename(&all, scratch.path("kept")).unwrap();
    for fault in [
        open("next").unwrap().state_at(3).map(drop).unwrap_err(),
        scratch.run(&path, "next", |exec| exec.restart = true).map(drop).unwrap_err(),
        scratch.run(&path, "fresh", |_| ()).map(drop).unwrap_err(),
    ] {
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(
            fault.to_string().contains("start-6") && fault.to_string().contains("`init_from`"),
            "{fault}"
        );
    }
    assert!(!scratch.path("fresh").exists());
    let _ = fs::remove_dir_all(&all);
    fs::rename(scratch.path("kept"), &all).unwrap();
    // Another path to the same content is the same run, and the run's curriculum then has the new path.
    scratch.run(&started(&scratch, "next.toml", "moved"), "next", stop_after(6)).unwrap();
    assert!(scratch.ledger("next") == scratch.ledger("whole"));
    open("next").unwrap().state_at(1).unwrap();
    // An edited configuration is detected, in the folder and in the run's copy.
    for (file, run) in [("moved/start.json", "fresh"), ("next/start.kept.json", "next")] {
        let text = fs::read_to_string(scratch.path(file)).unwrap();
        let edited = text.replacen("\"rms_norm_eps\": 0.00001", "\"rms_norm_eps\": 0.00002", 1);
        assert_ne!(edited, text);
        fs::write(scratch.path(file), edited).unwrap();
        let path = started(&scratch, "next.toml", if run == "next" { "nowhere" } else { "moved" });
        let fault = scratch.run(&path, run, |_| ()).map(drop).unwrap_err();
        assert!(
            fault.class() == Class::Data && fault.to_string().contains("configuration"),
            "{fault}"
        );
        fs::write(scratch.path(file), text).unwrap();
    }
}

/// Changes of the curriculum's model, and what it is in transformers.
const MODELS: [(&str, &str); 10] = [
    ("", "zaya"),
    (
        "layers = [\"gqa\"]\nfeed_forward = [\"mlp\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\n\
         tie_word_embeddings = false\n",
        "llama",
    ),
    (
        "layers = [\"gqa\"]\nfeed_forward = [\"mlp\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\n\
         qk_norm = true\n",
        "qwen3",
    ),
    (
        "layers = [\"gqa\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\nrouter = \"linear\"\n\
         skip = \"none\"\nbalance = \"none\"\nnum_experts_per_tok = 2\nnorm_topk_prob = true\n\
         tie_word_embeddings = false\n",
        "mixtral",
    ),
    (
        "layers = [\"gqa\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\nrouter = \"linear\"\n\
         skip = \"none\"\nbalance = \"none\"\nnum_experts_per_tok = 2\nqk_norm = true\n",
        "qwen3_moe",
    ),
    (
        "layers = [\"gqa\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\nrouter = \"linear\"\n\
         skip = \"none\"\nbalance = \"none\"\nnum_experts_per_tok = 3\nnorm_topk_prob = true\n\
         qk_norm = true\ntie_word_embeddings = false\n",
        "qwen3_moe",
    ),
    (
        "sliding_window = 5\nlayer_types = [\"full_attention\", \"sliding_attention\"]\n\
         sliding_rope_theta = 300.0\n",
        "zaya",
    ),
    (
        "layers = [\"gqa\"]\nfeed_forward = [\"mlp\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\n\
         qk_norm = true\nsliding_window = 7\nlayer_types = [\"sliding_attention\", \"full_attention\"]\n",
        "qwen3",
    ),
    (
        "layers = [\"gqa\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\nrouter = \"linear\"\n\
         skip = \"none\"\nbalance = \"none\"\nnum_experts_per_tok = 2\nnorm_topk_prob = true\n\
         sliding_window = 6\n",
        "mixtral",
    ),
    (
        "layers = [\"gqa\"]\nresidual = \"plain\"\npartial_rotary_factor = 1.0\nrouter = \"linear\"\n\
         skip = \"none\"\nbalance = \"none\"\nnum_experts_per_tok = 2\nqk_norm = true\n\
         sliding_window = 1\n",
        "qwen3_moe",
    ),
];

#[test]
fn transformers_computes_what_we_compute() {
    MODELS.into_iter().for_each(|(model, name)| compare_with_transformers(model, name));
}

/// An imported Mixtral has no biases; a run may begin to balance its experts.
#[test]
fn a_start_without_biases_may_be_balanced() {
    let (scratch, (model, _)) = (Scratch::new(), MODELS[3]);
    scratch.edited("run.toml", &[("[model]\n", &format!("[model]\n{model}"))]);
    scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
    through(&scratch, 2);
    for (keys, wanted) in [("", 0), ("balance = \"bias\"\n", 3)] {
        let path = started(&scratch, "next.toml", "start-2");
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replace("[optimizer]", &format!("[model]\n{keys}[optimizer]"));
        let (path, out) = (scratch.write("next.toml", &text), format!("next-{wanted}"));
        scratch.run(&path, &out, stop_after(2)).unwrap();
        let run = scratch.path(&out);
        let mut replayer = Replayer::open(&run, &table(), Device::Cpu, Workers::new(1)).unwrap();
        let state = replayer.state_after(2).unwrap();
        for layer in &state.balance {
            assert_eq!(layer.bias.len(), wanted);
            assert_eq!(layer.bias.iter().any(|bias| *bias != 0.0), wanted > 0);
        }
    }
}

/// transformers is a gigabyte, so it is not installed: `ZTRAIN_PYTHON` (or `python3`) is used.
fn compare_with_transformers(model: &str, name: &str) {
    let scratch = Scratch::new();
    scratch.edited("run.toml", &[("[model]\n", &format!("[model]\n{model}"))]);
    scratch.train("run");
    let state = through(&scratch, 10);
    let described = fs::read_to_string(scratch.path("hf-10/config.json")).unwrap();
    assert!(described.contains(&format!("\"model_type\": \"{name}\"")), "{described}");
    let path = started(&scratch, "next.toml", "start-10");
    scratch.run(&path, "next", stop_after(1)).unwrap();
    let spec = spec(&scratch.path("run.toml"));
    let config = &spec.model_at(10).unwrap().config;
    let ids: Vec<i32> = (0..24).map(|index| (index * index * 7 + 3) % 50).collect();
    let labels = [&ids[1..], &[0]].concat();
    let positions: Vec<i32> = (0..24).collect();
    let input = MicroBatchInput {
        tokens: &ids,
        labels: &labels,
        positions: &positions,
        mask: &[1; 24],
        boundaries: &[vec![0]],
        weights: &[],
        rows: 1,
        seq_len: 24,
    };
    let biases: Vec<Tensor> =
        state.balance.iter().map(|layer| Tensor::from_slice(&layer.bias)).collect();
    let ours = logits(config, &state.weights, &biases, &input).unwrap();
    let ours = Vec::<f32>::try_from(ours.reshape([-1])).unwrap();
    let bytes: Vec<u8> = ours.iter().flat_map(|value| value.to_le_bytes()).collect();
    fs::write(scratch.path("logits"), bytes).unwrap();
    scratch.write("ids.json", &format!("{ids:?}"));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/hf/check.py");
    let python = std::env::var("ZTRAIN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let output = Command::new(&python)
        .arg(script)
        .args(["hf-10", "ids.json", "logits"].map(|name| scratch.path(name)))
        .output();
    // Written past the test runner's capture, so that every log mentions a skipped check.
    let mut log = std::io::stderr();
    let said = |output: &std::process::Output| {
        String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr)
    };
    match output {
        Err(error) => writeln!(log, "1 Hugging Face check skipped: {python}: {error}").unwrap(),
        Ok(output) if output.status.code() == Some(77) => {
            writeln!(log, "1 Hugging Face check skipped: {python}: {}", said(&output).trim())
                .unwrap();
        }
        Ok(output) => {
            assert!(output.status.success(), "{}", said(&output));
            writeln!(log, "1 Hugging Face check made: {}", said(&output).trim()).unwrap();
        }
    }
}
