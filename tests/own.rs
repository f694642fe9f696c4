//! Fear: that on a device our own kernels break guarantees that libtorch's operators keep. That a run continues
//! although its kernel table changed, or stops because of another CPU.
//!
//! Runs on the stand-in GPU (`device.rs`), with the emulator as its driver.

use std::process::{Command, Stdio};

use contract::Packed;
use serde_json::Value;

use crate::pretended::{OnDevice, by_name, pretend, total};
use crate::ranks::{Fixture, until_lines};
use crate::support::{Ran, arg, ztrain_command};

/// One ledger, whether killed and resumed, replayed, or run by two ranks on two devices.
#[test]
fn our_own_kernels_outlive_kills_and_ranks() {
    let z_loss = ("num_hidden_layers = 2", "num_hidden_layers = 2\nz_loss = 1e-4");
    let on = OnDevice::by_ours(Fixture { every: "2", ..Fixture::new(&[z_loss]) });
    let last = ["--stop-after", "4"];
    on.finish("plain", &[&["--workers", "1"][..], &last].concat());

    let ways = ["--workers", "2", "--recompute", "--prefetch", "7"];
    let mut command = on.command("killed", &[&ways[..], &last].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until_lines(&on.fixture.scratch.path("killed"), 4, &mut child);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it was killed before its end");
    on.finish("killed", &[&["--workers", "1"][..], &last].concat());
    assert!(on.ledger("plain") == on.ledger("killed"), "the ledgers differ");
    assert!(on.ledger("plain").contains("\"z_loss\""), "a step has z-loss");

    let run = on.fixture.scratch.path("plain");
    let mut command =
        ztrain_command(&["replay", "--run", arg(&run), "--step", "4", "--device", "cuda"]);
    pretend(&mut command, &on.report("replayed"));
    let said = Ran::from(command.output().unwrap()).ok();
    assert!(said.contains("same bits"), "{said}");
    for what in ["races", "launches"] {
        let found = total(&on.report("replayed"), what);
        assert_eq!(found > 500, what == "launches", "{found} {what}");
    }

    let two = ["--nproc", "2", "--workers", "1", "--transport", "rccl"];
    let mut command = on.command("two", &[&two[..], &last].concat());
    command.env("ZTRAIN_RCCL", crate::transport::standin());
    let ran = Ran::from(command.output().unwrap());
    assert!(!ran.err.contains("no kernels of our own"), "{}", ran.err);
    ran.ok();
    assert_eq!(total(&on.report("two"), "races"), 0);
    assert!(on.ledger("plain") == on.ledger("two"), "the ledgers differ");
}

/// Attention by libtorch's kernels: workers, recomputation, resuming and a replay give one ledger. Its losses equal
/// those of our own kernels up to bf16 rounding, for whole micro-batches and for parts of documents, whose sums
/// libtorch computes in f32; there with a window in one layer of two.
#[test]
fn attention_by_the_library_is_one_run_too() {
    let cut = "micro_batch = 2\ncontext_chunks = 2\nweight_shards = 2";
    let types = "layer_types = [\"full_attention\", \"sliding_attention\"]";
    let window = format!("[model]\nsliding_window = 3\n{types}");
    for cut in [None, Some(("micro_batch = 2", cut))] {
        let window = cut.map(|_| ("[model]", &*window));
        let change = [Some(("dtype = \"f32\"", "dtype = \"bf16\"")), cut, window];
        let change: Vec<_> = change.into_iter().flatten().collect();
        let on = OnDevice::by_ours(Fixture { every: "1", ..Fixture::new(&change) });
        on.finish("ours", &["--workers", "1", "--stop-after", "2"]);
        let on = on.choosing(&[("ZTRAIN_ATTENTION", "library")]);
        on.finish("plain", &["--workers", "1", "--stop-after", "2"]);
        on.finish("other", &["--workers", "2", "--recompute", "--stop-after", "1"]);
        on.finish("other", &["--workers", "1", "--stop-after", "2"]);
        assert!(on.ledger("plain") == on.ledger("other"), "the ledgers differ: {cut:?}");

        let line = |out: &str, number: usize| -> Value {
            serde_json::from_str(on.ledger(out).lines().nth(number).unwrap()).unwrap()
        };
        let table = &line("plain", 0)["kernel_table"];
        assert_eq!(table["environment"]["ZTRAIN_ATTENTION"], "library");
        assert_eq!(table["gpu"]["products of bf16 in f32"], "libtorch");
        if window.is_some() {
            // A window that no kernel heeded would leave the bits of a model without one.
            let full = Fixture { every: "1", ..Fixture::new(&change[..2]) };
            let full = OnDevice::by_ours(full).choosing(&[("ZTRAIN_ATTENTION", "library")]);
            full.finish("plain", &["--workers", "1", "--stop-after", "1"]);
            let full = full.ledger("plain").lines().nth(1).map(serde_json::from_str::<Value>);
            let full = full.unwrap().unwrap();
            for sum in ["loss", "state_digest"] {
                assert_ne!(full[sum], line("plain", 1)[sum], "{sum}");
            }
        }
        // Of each step's loss, and of the norm of each layer's gradient in the first.
        let numbers = |out: &str| -> Vec<f64> {
            let norms = line(out, 1)["layer_gradient_norms"].clone();
            let norms: Packed = serde_json::from_value(norms).unwrap();
            [1, 2]
                .map(|step| line(out, step)["loss"].as_f64().unwrap())
                .into_iter()
                .chain(norms.values())
                .collect()
        };
        for (at, (found, wanted)) in numbers("plain").into_iter().zip(numbers("ours")).enumerate() {
            let (far, within) = ((found / wanted - 1.0).abs(), if at < 2 { 1e-3 } else { 1e-2 });
            assert!(far < within, "{at}: {found}, not {wanted}: {cut:?}");
        }
        let names = by_name(&on.report("plain"));
        let [own, there, back] = [
            "attention_64_bf16",
            "aten::_flash_attention_forward",
            "aten::_flash_attention_backward",
        ]
        .map(|name| names.get(name).copied().unwrap_or(0.0));
        assert!(own == 0.0 && there > 0.0 && there == back, "{names:?}");

        let mut command =
            on.replay(&["--run", arg(&on.fixture.scratch.path("plain")), "--step", "2"]);
        let said = Ran::from(command.output().unwrap()).ok();
        assert!(said.contains("same bits"), "{said}");
        let mut command = on.command("ours", &["--workers", "1", "--stop-after", "3"]);
        Ran::from(command.output().unwrap()).fails(4, &["ZTRAIN_ATTENTION"]);
    }
}

/// On a device the host's CPU affects nothing and is only in the run's events. The device and its libraries are fixed.
#[test]
fn a_run_on_a_device_stops_at_another_device_and_not_at_another_processor() {
    let on = OnDevice::by_libtorch();
    on.finish("run", &["--stop-after", "2"]);
    let head: Value = serde_json::from_str(on.ledger("run").lines().next().unwrap()).unwrap();
    let table = &head["kernel_table"];
    for of_the_host in ["cpu", "cpu_capability", "mkl", "onednn", "mathematics"] {
        assert_eq!(table[of_the_host], "", "{of_the_host} is the host's");
    }
    assert!(table["switches"].get("f32_products_by_onednn").is_none(), "{table}");
    assert!(table.get("extensions").is_none(), "{table}");
    for (name, value) in [("compute units", "2"), ("driver", "13000"), ("cuBLAS", "0.1.2")] {
        assert_eq!(table["gpu"][name], value, "{table}");
    }
    assert_eq!(table["environment"]["CUBLAS_WORKSPACE_CONFIG"], ":4096:8");

    let events = on.fixture.scratch.path("run").join("events.jsonl");
    let events = std::fs::read_to_string(events).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let start = events.into_iter().find(|event| event["event"] == "start").unwrap();
    assert!(start["processor"].as_str().is_some_and(|name| name.len() > 3), "{start}");
    assert_eq!(start["device"], "cuda:0", "as --device names it");
    assert_eq!(start["workers"], 1, "one thread feeds a device, whatever the machine has");

    let with = |name: &str, value: &str, steps: &str| -> Ran {
        let mut command: Command = on.command("run", &["--stop-after", steps]);
        command.env(name, value).output().unwrap().into()
    };
    // A variable that chooses CPU kernels in general, but not with this value.
    with("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7", "3").ok();
    with("STANDIN_UNITS", "3", "4").fails(4, &["gpu.compute units", "\"3\"", "\"2\""]);
    with("NVIDIA_TF32_OVERRIDE", "1", "4").fails(4, &["NVIDIA_TF32_OVERRIDE"]);
    with("STANDIN_UNITS", "2", "4").ok();
}

/// Expert matmuls and attention are measured in each available way, and the way used in training is compared with the
/// fastest.
#[test]
fn experts_and_attention_are_measured_each_way() {
    let on = OnDevice::by_ours(Fixture::new(&[]));
    let file = arg(&on.fixture.curriculum);
    let words = ["bench", "gemm", "--curriculum", file, "--device", "cuda", "--json"];
    let little = ["--rows", "64", "--widths", "64", "--tokens", "64", "--seconds", "0.001"];
    let mut command = ztrain_command(&[&words[..], &little].concat());
    pretend(&mut command, &on.report("gemm"));
    let said = Ran::from(command.output().unwrap()).ok();
    let rows = said.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let rows: Vec<_> = rows.filter(|row| row.get("experts").is_some()).collect();
    assert_eq!(rows.len(), 3 * 2 * 2, "two products and a layer, two formats, there and back");
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap_or(0.0);
        let times = if row["way"] == "backward" { 4.0 } else { 2.0 };
        let sizes = ["rows", "inner", "columns"].map(number);
        assert_eq!(number("operations"), times * sizes.iter().product::<f64>(), "{row}");
        assert_eq!(row["count"], 4);
        let ways = ["own", "library", "loop", "padded"].map(number);
        assert_eq!(ways[1] > 0.0, row["dtype"] == "bf16", "{row}");
        assert!(ways[0] > 0.0 && ways[2] > 0.0 && ways[3] > 0.0, "{row}");
        let fastest = ways.into_iter().fold(0.0, f64::max);
        assert!((number("of_best") * fastest / number("trained") - 1.0).abs() < 1e-9, "{row}");
    }
    let names = crate::pretended::by_name(&on.report("gemm"));
    let attention = said.lines().filter(|line| line.contains("\"attention\""));
    let attention: Vec<Value> = attention.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!attention.is_empty());
    for row in attention {
        // The library does not handle sequences of single tokens.
        let several = row["dtype"] == "bf16" && row["attention"].as_i64() > Some(1);
        for way in ["own", "library"] {
            assert_eq!(
                row[way]["backward"].as_f64().is_some_and(|rate| rate > 0.0),
                several,
                "{row}"
            );
        }
    }
    for name in [
        "grouped_bf16",
        "grouped_swiglu_bf16",
        "grouped_swiglu_backward_bf16",
        "grouped_weights_bf16",
        "swiglu_bf16",
        "grouped_f32",
        "aten::_grouped_mm",
        "aten::bmm",
        "attention_64_bf16",
        "aten::_flash_attention_backward",
    ] {
        assert!(names.contains_key(name), "{name} was measured by nobody: {names:?}");
    }
}

/// Muon's part of a step is reported separately on a device, too.
#[test]
fn parts_of_the_optimizer_are_told_apart_on_a_device() {
    let on = OnDevice::by_libtorch();
    let file = arg(&on.fixture.curriculum);
    let words = ["bench", "step", "--curriculum", file, "--steps", "1", "--device", "cuda"];
    let mut command = ztrain_command(&[&words[..], &["--json"]].concat());
    pretend(&mut command, &on.report("step"));
    command.env("LD_LIBRARY_PATH", crate::pretended::libtorch_cuda());
    let said = Ran::from(command.output().unwrap()).ok();
    let found: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    let parts = found["table"]["parts"].as_array().unwrap();
    for name in ["Muon", "AdamW"] {
        let part = parts.iter().find(|part| part[0] == name).unwrap();
        assert!(part[1].as_f64().unwrap() > 0.0, "{name}: {parts:?}");
    }
}

/// Planned device memory equals what its allocator gave, also when matrices are orthogonalized in stacks.
#[test]
fn a_device_holds_what_the_formula_says() {
    let vocabulary = [("num_hidden_layers = 2", "num_hidden_layers = 3\nvocab_size = 8192")];
    let narrow = [vocabulary[0], ("dtype = \"f32\"", "dtype = \"bf16\"")];
    for change in [&[][..], &vocabulary, &narrow] {
        let on = OnDevice::by_ours(Fixture::new(change));
        let file = arg(&on.fixture.curriculum);
        let words = ["bench", "step", "--curriculum", file, "--steps", "1", "--workers", "1"];
        let mut command = ztrain_command(&[&words[..], &["--device", "cuda", "--json"]].concat());
        pretend(&mut command, &on.report("step"));
        let said = Ran::from(command.output().unwrap()).ok();
        let found: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
        let memory = &found["table"]["memory"][0];
        let parts = memory["formula"].as_object().unwrap().values();
        let formula: f64 = parts.map(|bytes| bytes.as_f64().unwrap()).sum();
        let far = memory["on_device"].as_f64().unwrap() / formula - 1.0;
        println!("{far}: {memory}");
        assert!(far.abs() < 0.1, "{far}: {memory}");
    }
}
