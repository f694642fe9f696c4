//! Fear: that work queued on a GPU runs before its inputs are ready, or that the host synchronizes with the GPU too
//! often.
//!
//! The GPU is a stand-in (`pretended.rs`), so the whole program runs on a device in any CI. These tests check the order
//! and the number of operations, not a real device's bits or speed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::pretended::{OnDevice, by_name, contexts, libtorch_cuda, pretend, total};
use crate::ranks::{Fixture, until_lines};
use crate::support::{
    CUT, MIDDLING, Ran, SHORT, Scratch, arg, build, corpus, curriculum, ztrain_command,
};

#[test]
fn a_run_on_a_device_is_one_run_however_it_is_computed() {
    let on = OnDevice::by_libtorch_of(&MIDDLING);
    on.finish("plain", &["--workers", "1"]);
    on.finish("two", &["--workers", "2", "--prefetch", "1"]);
    on.fixture.assert_same("plain", "two");
    let head: Value = serde_json::from_str(on.ledger("plain").lines().next().unwrap()).unwrap();
    assert_eq!(head["levels"], serde_json::json!(["D"]), "no device has shown more");

    let mut command = on.command("killed", &["--workers", "2", "--recompute", "--prefetch", "7"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until_lines(&on.fixture.scratch.path("killed"), 8, &mut child);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it was killed before its end");
    on.finish("killed", &["--workers", "1", "--recompute"]);
    on.fixture.assert_same("plain", "killed");

    let run = on.fixture.scratch.path("plain");
    let args = ["replay", "--run", arg(&run), "--step", "12", "--device", "cuda"];
    let mut command = ztrain_command(&args);
    pretend(&mut command, &on.report("replayed"));
    command.env("LD_LIBRARY_PATH", libtorch_cuda());
    let said = Ran::from(command.output().unwrap()).ok();
    assert!(said.contains("same bits"), "{said}");
    assert_eq!(total(&on.report("replayed"), "races"), 0);
}

#[test]
fn auto_is_a_gpu_that_is_visible_and_stays_what_a_run_began_on() {
    let on = OnDevice::by_libtorch_of(&SHORT);
    let scratch = &on.fixture.scratch;
    let run = |command: &mut Command| Ran::from(command.output().unwrap());
    let device = |out: &str| {
        let head: Value = serde_json::from_str(on.ledger(out).lines().next().unwrap()).unwrap();
        head["kernel_table"]["device"].as_str().unwrap().to_owned()
    };
    let auto = |command: &mut Command, report: &str| {
        pretend(command, &scratch.path(report));
        run(command)
    };
    let first = &["--validate-every", "0", "--stop-after", "2"];
    run(&mut on.fixture.run("plain", first)).ok();
    assert_eq!(device("plain"), "cpu", "there is no GPU");
    // A run continues, and is replayed, where it began, though there is a GPU now.
    let said =
        auto(&mut on.fixture.run("plain", &["--validate-every", "0", "--stop-after", "3"]), "on");
    assert!(!said.err.contains("computing on a GPU"), "{}", said.err);
    said.ok();
    let plain = scratch.path("plain");
    let replay = ["replay", "--run", arg(&plain), "--step", "2"];
    let said = auto(&mut ztrain_command(&replay), "replayed").ok();
    assert!(said.contains("same bits"), "{said}");
    let said = auto(&mut on.fixture.run("gpu", first), "gpu.report");
    assert!(
        said.err.contains("computing on a GPU (a pretended GPU); --device cpu"),
        "{}",
        said.err
    );
    said.ok();
    assert_eq!(device("gpu"), "cuda");
    let run = scratch.path("gpu");
    let out = scratch.path("exported");
    crate::support::ztrain(&["export", "--run", arg(&run), "--out", arg(&out)]).ok();
    crate::support::ztrain(&["replay", "--run", arg(&run), "--step", "2"])
        .fails(6, &["--device cuda", "no GPU half of libtorch", "--device cpu computes"]);
}

#[test]
fn devices_are_listed_with_what_is_promised_there() {
    let scratch = Scratch::new();
    let report = scratch.path("report");
    let mut command = ztrain_command(&["devices", "--json"]);
    pretend(&mut command, &report);
    let said = Ran::from(command.output().unwrap()).ok();
    let rows: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let devices: Vec<_> = rows.iter().map(|row| row["device"].as_str().unwrap()).collect();
    assert_eq!(devices, ["cpu", "cuda:0", "cuda:1"]);
    assert_eq!(rows[0]["levels"], serde_json::json!(["D", "L0", "L1", "L2", "L3"]));
    for row in &rows[1..] {
        assert_eq!(row["levels"], serde_json::json!(["D"]), "no device has shown more");
        assert_eq!(row["name"], "a pretended GPU");
        assert!(row["libraries"]["driver"].is_string() && row["libraries"]["runtime"].is_string());
        assert_eq!(row["libraries"]["compiler of our kernels"], "nvrtc 13.0");
        assert!(row["libraries"]["libtorch"].as_str().unwrap().contains("libtorch_cuda.so"));
    }
    assert_eq!(
        [1, 2].map(|row| rows[row]["uuid"].clone()),
        ["01", "02"].map(|byte| byte.repeat(16))
    );
    for what in ["operations", "contexts", "contexts_on"] {
        assert_eq!(total(&report, what), 0, "whoever lists computes nothing and holds nothing");
    }

    // Without a GPU it lists what is missing; that is not an error.
    let mut command = ztrain_command(&["devices"]);
    command.env("HOME", scratch.path("nobody")).env_remove("XDG_CACHE_HOME");
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX", "LIBTORCH", "LD_LIBRARY_PATH"] {
        command.env_remove(variable);
    }
    let said = Ran::from(command.output().unwrap()).ok();
    assert!(said.starts_with("cpu      "), "{said}");
    assert!(said.contains("levels D L0 L1 L2 L3: tested"), "{said}");
    if !said.contains("cuda:0") {
        assert!(said.contains("no GPU: no GPU half of libtorch"), "{said}");
        assert!(said.contains("provision.py --cuda"), "{said}");
    }
}

#[test]
fn waits_that_are_lost_are_found() {
    let on = OnDevice::by_libtorch();
    let one = ["--workers", "1"];
    assert_eq!(on.races("whole", "none:0", &one), 0);
    // The first wait of each of two steps: the other micro-batches wait for the same copy.
    for fault in ["wait:0", "wait:1", "wait:5"] {
        assert!(on.shows(fault, &one), "{fault} is not found");
    }
}

/// The prefetcher's ring of buffers, in which readers assemble batches: its depth changes no bit, and a buffer is only
/// rewritten after the copy from it has completed.
#[test]
fn a_buffer_is_filled_again_when_it_has_been_copied() {
    let on = OnDevice::by_libtorch();
    let ahead = ["--workers", "1", "--prefetch", "4", "--loader-threads", "2"];
    on.finish("ahead", &[&ahead[..], &["--stop-after", "8"]].concat());
    on.finish("apart", &["--workers", "1", "--prefetch", "1", "--stop-after", "8"]);
    let ledger = |out: &str| on.ledger(out);
    assert!(ledger("ahead") == ledger("apart"), "the ledgers differ");
    // One copy per batch, whatever its micro-batches, and the balancing biases of each of 2 layers.
    on.finish("four", &[&ahead[..], &["--stop-after", "4"]].concat());
    let [four, eight] = ["four", "ahead"].map(|out| total(&on.report(out), "from_host"));
    assert!(eight - four <= 4 * 3, "{} uploads in 4 steps", eight - four);

    // A computed step has waited for its copy. If its only micro-batch does not wait, the buffer is returned at the end
    // of the step, and only the check of the copy prevents it from being rewritten too early.
    let whole = ("batch = 8\nmicro_batch = 2", "batch = 8\nmicro_batch = 8");
    let on = OnDevice::by_libtorch_of(&[whole]);
    let early = |fault: &str, time: u32| {
        let (ahead, out) = (
            ["--workers", "1", "--prefetch", "1", "--loader-threads", "1"],
            format!("{fault}-{time}"),
        );
        let mut command = on.command(&out, &[&ahead[..], &["--stop-after", "8"]].concat());
        let ran = Ran::from(command.env("STANDIN_FAULT", fault).output().unwrap());
        ran.err.contains("the host wrote pinned memory that a copy")
    };
    assert!(!early("wait:1", 0));
    // A slow reader may write late enough by chance.
    assert!((0..6).any(|time| early("wait:1,host:0", time)));
}

/// A checkpoint is copied during the next step. The end of that step waits for the copies, and so does the thread that
/// writes them.
#[test]
fn a_state_is_moved_and_written_down_when_it_has_been_copied() {
    let on = OnDevice::by_libtorch();
    let blobs = |out: &str, step: u64| {
        let folder = on.fixture.scratch.path(out).join(format!("checkpoints/step-{step}"));
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = files.map(|file| std::fs::read(file).unwrap()).collect();
        files.sort();
        files
    };
    on.finish("kept", &["--workers", "1", "--stop-after", "6"]);
    // Nothing waits for the copies after step 3: neither the compute stream, for which it would be the 17th wait, after
    // those of 16 micro-batches, nor the thread that writes.
    let mut command = on.command("moved", &["--workers", "1", "--stop-after", "4"]);
    let ran = Ran::from(command.env("STANDIN_FAULT", "wait:17,host:0").output().unwrap());
    assert!(ran.err.contains("is written while it may be read by"), "{}", ran.err);

    let mut command = on.command("early", &["--workers", "1", "--stop-after", "6"]);
    let _ = command.env("STANDIN_FAULT", "host:0").output().unwrap();
    assert!(blobs("kept", 6) != blobs("early", 6), "what was not there yet is written down");
}

/// The same with our own kernels, in f32, in bf16 and with cut micro-batches. The name of their table, with the digest
/// of their source, is in the ledger.
#[test]
fn our_own_kernels_leave_one_ledger_too() {
    let cut = "micro_batch = 2\ncontext_chunks = 2\nweight_shards = 2";
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[], "4"),
        (&[("dtype = \"f32\"", "dtype = \"bf16\"")], "3"),
        (&[("micro_batch = 2", cut)], "3"),
    ];
    for (change, steps) in cases {
        let on = OnDevice::by_ours(Fixture::new(change));
        on.finish("plain", &["--workers", "1", "--stop-after", steps]);
        assert!(total(&on.report("plain"), "launches") > 500, "{change:?}");
        // The driver needs a context in each thread: the main thread, and those that compute in each step.
        assert!(total(&on.report("plain"), "contexts") > 4, "{change:?}");
        let ledger = |out: &str| on.ledger(out);
        assert!(ledger("plain").contains("device 11, kernels "));
        // A recomputed micro-batch is checked separately, the others when they are added.
        let two = ["--workers", "2", "--recompute", "--prefetch", "5", "--stop-after", "2"];
        on.finish("two", &[&two[..], &["--audit", "1/2"]].concat());
        on.finish("two", &["--workers", "1", "--stop-after", steps]);
        assert!(ledger("plain") == ledger("two"), "the ledgers differ: {change:?}");
        if change.is_empty() {
            assert!(on.shows("wait:1", &[]));
            assert!(on.shows("record:0", &[]), "memory goes while a stream may read it");
        }
    }
}

/// Memory that rows of a table point to is tracked: gradients from a library in bf16, sums over bands, and results of
/// both. The table itself is copied, which does not reveal its rows.
#[test]
fn what_finishes_gradients_is_seen_by_its_memory() {
    let on = OnDevice::by_ours(Fixture::new(&[("dtype = \"f32\"", "dtype = \"bf16\"")]));
    let mut command = on.command("astray", &["--workers", "1", "--stop-after", "1"]);
    let said = Ran::from(command.env("STANDIN_FAULT", "finish:2,finish_add:1").output().unwrap());
    let said = said.err;
    let read = |by: &str, reader| format!("that {by} wrote is read by {reader} on");
    // Bands, a library's grouped matmul with its row ends, and a plain matmul.
    assert!(said.contains(&read("residual_norm_gathered_backward_bf16", "finish")), "{said}");
    for by in ["aten::_grouped_mm", "dispatch_places", "aten::mm", "finish"] {
        assert!(said.contains(&read(by, "finish_add")), "{by}: {said}");
    }
    for by in ["finish", "finish_add"] {
        assert!(said.contains(&format!("that {by} wrote is read by")), "{by}: {said}");
    }
}

/// Two GPUs, connected by the stand-in library of `transport.rs`, which works on their streams.
#[test]
fn two_ranks_on_two_devices_leave_the_ledger_of_one() {
    let on = OnDevice::by_libtorch_of(&SHORT);
    let ranks = |command: &mut Command| {
        command.env("ZTRAIN_RCCL", crate::transport::standin());
    };
    let two = ["--nproc", "2", "--workers", "1", "--transport"];
    on.finish("alone", &["--workers", "1"]);
    on.finish("gloo", &[&two[..], &["gloo"]].concat());
    on.fixture.assert_same("alone", "gloo");

    let mut command = on.command("carried", &[&two[..], &["rccl"]].concat());
    ranks(&mut command);
    Ran::from(command.output().unwrap()).ok();
    assert_eq!(total(&on.report("carried"), "races"), 0);
    assert!(total(&on.report("carried"), "launches") > 0, "nothing went from device to device");
    on.fixture.assert_same("alone", "carried");

    // With this fault the communication stream does not wait for the compute stream.
    let mut command = on.command("lost", &[&two[..], &["rccl", "--stop-after", "2"]].concat());
    ranks(&mut command);
    let ran = Ran::from(command.env("STANDIN_FAULT", "side:0").output().unwrap());
    assert!(ran.err.contains("by ncclGroup on stream"), "{}", ran.err);
    assert!(total(&on.report("lost"), "races") > 0);
}

/// Groups of ranks that share micro-batches have their own communication stream.
#[test]
fn two_devices_that_share_micro_batches_leave_the_ledger_of_one() {
    let on = OnDevice::by_libtorch_of(&[CUT]);
    on.finish("alone", &["--workers", "1", "--stop-after", "4"]);
    let groups = ["--cp", "--tsp", "--prefetch"].map(|what| {
        let two = ["--nproc", "2", "--workers", "1", "--transport", "rccl", "--stop-after", "4"];
        let mut command = on.command(what, &[&two[..], &[what, "2"]].concat());
        command.env("ZTRAIN_RCCL", crate::transport::standin());
        Ran::from(command.output().unwrap()).ok();
        assert_eq!(total(&on.report(what), "races"), 0, "{what}");
        let ledger = |out: &str| on.ledger(out);
        assert!(ledger("alone") == ledger(what), "{what}: the ledgers differ");
        total(&on.report(what), "launches")
    });
    let [context, folded, apart] = groups;
    // Two ranks, 4 steps of 4 micro-batches, 2 layers: at least keys, values and their gradients, and two shards in
    // each direction.
    let least = 2 * 4 * 4 * 2 * 4;
    assert!(context > apart + least && folded > context, "{groups:?} groups of transfers");
}

/// Counts the operations and host reads of runs over one store, with our own matmuls of experts.
struct Counter {
    scratch: Scratch,
    store: PathBuf,
    /// Whether our own kernels run, or libtorch alone.
    own: bool,
    dtype: &'static str,
    /// The keys that cut micro-batches.
    cut: &'static str,
}

/// Operations and host reads in total, and operations by name.
type Counted = BTreeMap<String, f64>;

/// The difference of `a` and `b`, divided by `by`.
fn less(a: &Counted, b: &Counted, by: f64) -> Counted {
    let names = a.keys().chain(b.keys());
    let of = |counted: &Counted, name: &String| counted.get(name).copied().unwrap_or(0.0);
    names.map(|name| (name.clone(), (of(a, name) - of(b, name)) / by)).collect()
}

/// The most frequent names with their counts.
fn table(counted: &Counted) -> String {
    let mut rows: Vec<_> = counted.iter().filter(|(_, times)| times.abs() > 0.01).collect();
    rows.sort_by(|a, b| b.1.total_cmp(a.1));
    rows.iter().fold(String::new(), |text, (name, times)| format!("{text}{times:8.2}  {name}\n"))
}

impl Counter {
    fn count(&self, layers: u64, micro_batches: u64, steps: u64) -> Counted {
        let layers = format!("num_hidden_layers = {layers}");
        let batch = format!("batch = {}\nmicro_batch = 2\n{}", 2 * micro_batches, self.cut);
        let dtype = format!("dtype = \"{}\"", self.dtype);
        // The values of the nano preset.
        let (experts, heads) = match layers.as_str() {
            "num_hidden_layers = 6" => ("num_experts = 8", "num_attention_heads = 4"),
            _ => ("num_experts = 4", "num_attention_heads = 2"),
        };
        let change = [
            ("dtype = \"f32\"", dtype.as_str()),
            ("num_hidden_layers = 2", layers.as_str()),
            ("num_experts = 4", experts),
            ("num_attention_heads = 2", heads),
            ("batch = 8\nmicro_batch = 2", batch.as_str()),
        ];
        let name = format!("{layers}-{micro_batches}-{steps}");
        let file = curriculum(&self.scratch, &self.store, &format!("{name}.toml"), &change);
        let (out, report) =
            (self.scratch.path(&name), self.scratch.path(&format!("{name}.report")));
        let steps = steps.to_string();
        let mut args = vec!["--curriculum", arg(&file), "--out", arg(&out), "--device", "cuda"];
        args.extend(["--validate-every", "0", "--workers", "1", "--stop-after", &steps]);
        let mut command = ztrain_command(&args);
        pretend(&mut command, &report);
        command.env("ZTRAIN_GROUPED", "own");
        if self.dtype == "bf16" {
            // As on an H200; the stand-in has no architecture.
            command.env("ZTRAIN_ATTENTION", "library");
        }
        if !self.own {
            command.env("LD_LIBRARY_PATH", libtorch_cuda());
        }
        Ran::from(command.output().unwrap()).ok();
        assert_eq!(total(&report, "races"), 0);
        let totals = ["operations", "host_reads"];
        let totals = totals.map(|what| (what.to_owned(), total(&report, what) as f64));
        totals.into_iter().chain(by_name(&report)).collect()
    }
}

/// The counts of a step of 2 layers and 4 micro-batches, by part.
fn parts(own: bool, dtype: &'static str) -> [(&'static str, Counted); 4] {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let counter = Counter { scratch, store, own, dtype, cut: "" };
    let (short, long) = (counter.count(2, 4, 1), counter.count(2, 4, 2));
    let step = less(&long, &short, 1.0);
    // The difference cancels everything but the micro-batches.
    let shallow = less(&counter.count(2, 8, 1), &short, 4.0);
    let deep = less(&counter.count(4, 8, 1), &counter.count(4, 4, 1), 4.0);
    let layer = less(&deep, &shallow, 2.0);
    let outside = less(&less(&shallow, &layer, 1.0), &layer, 1.0);
    let rest = less(&step, &less(&shallow, &Counted::new(), 0.25), 1.0);
    [
        ("a layer of a micro-batch", layer),
        ("the rest of a micro-batch", outside),
        ("norm, clip and optimizer", rest),
        ("a step", step),
    ]
}

/// Asserts bounds on operations and host reads.
#[track_caller]
fn bounded(what: &str, counted: &Counted, bound: [f64; 2]) {
    let found = ["operations", "host_reads"].map(|name| counted[name]);
    assert!(found[0] <= bound[0] && found[1] <= bound[1], "{what}: {found:?}, not {bound:?}");
}

#[test]
fn operations_of_a_step_are_bounded() {
    let bounds = [[39.0, 0.0], [28.0, 0.0], [32.0, 2.0], [452.0, 2.0]];
    let parts = parts(true, "f32");
    for ((what, counted), bound) in parts.iter().zip(bounds) {
        println!("{what}:\n{}", table(counted));
        bounded(what, counted, bound);
    }
    moves_once(&parts[3].1);
}

/// The update is one launch, which also rounds the weights that the model reads.
fn moves_once(step: &Counted) {
    for (name, times) in [("update_chunks", 1.0), ("nesterov", 1.0), ("round_blocks", 0.0)] {
        assert_eq!(step.get(name).copied().unwrap_or(0.0), times, "{name}");
    }
}

/// Rounding to bf16 is fused into the operation that produces the value, if it is ours. Our matmuls of experts read
/// rows of tokens and compute SwiGLU, for which libtorch's need three launches more.
#[test]
fn operations_of_a_step_in_bf16_are_bounded() {
    let bounds = [[36.0, 0.0], [29.0, 0.0], [32.0, 2.0], [432.0, 2.0]];
    // Gradients are checked when added, their sum when squared, and the state when updated.
    let parts = parts(true, "bf16");
    for ((what, counted), bound) in parts.iter().zip(bounds) {
        println!("{what}:\n{}", table(counted));
        bounded(what, counted, bound);
        let times = |name: &str| counted.get(name).copied().unwrap_or(0.0);
        assert!(times("checksum_blocks") == 0.0, "{what}: a pass that only checks gradients");
    }
    moves_once(&parts[3].1);
}

/// A step of 2 layers and 4 cut micro-batches: sums over chunks of a layer's gradients are computed together, and a
/// sharded vocabulary adds no launches except its matmuls. The cost of a layer is the difference to runs of 2 steps
/// with 4 layers, including the optimizer.
#[test]
fn operations_of_a_step_that_is_cut_are_bounded() {
    for (cut, a_layer, bound) in [
        ("context_chunks = 2", [147.0, 0.0], [1320.0, 2.0]),
        ("weight_shards = 2", [132.0, 0.0], [1050.0, 2.0]),
    ] {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
        let counter = Counter { scratch, store, own: true, dtype: "f32", cut };
        let long = counter.count(2, 4, 2);
        let layer = less(&counter.count(4, 4, 2), &long, 16.0);
        let step = less(&long, &counter.count(2, 4, 1), 1.0);
        for (what, counted, bound) in [("a layer", layer, a_layer), ("a step", step, bound)] {
            println!("{cut}, {what}:\n{}", table(&counted));
            bounded(&format!("{cut}, {what}"), &counted, bound);
        }
    }
}

/// libtorch's choices by timing are refused, since they cannot be reproduced; on a CPU there are none. AMD's library is
/// pinned so that it does not choose by free compute units, unless the user asks for that.
#[test]
fn kernels_are_not_chosen_by_time() {
    let on = OnDevice::by_libtorch();
    let with = |out: &str, variable: &str, value: &str| {
        let mut command = on.command(out, &["--stop-after", "1"]);
        Ran::from(command.env(variable, value).output().unwrap())
    };
    let tunable = "PYTORCH_TUNABLEOP_ENABLED";
    with("tuned", tunable, "1").fails(6, &["PYTORCH_TUNABLEOP_ENABLED=1", "unset it"]);
    assert!(!on.fixture.scratch.path("tuned").exists(), "nothing was begun");
    let environment = |out: &str| -> Value {
        let head: Value = serde_json::from_str(on.ledger(out).lines().next().unwrap()).unwrap();
        head["kernel_table"]["environment"].clone()
    };
    with("fixed", tunable, "0").ok();
    let method = "TENSILE_SOLUTION_SELECTION_METHOD";
    assert_eq!(environment("fixed")[method], "0");
    with("asked", method, "2").ok();
    assert_eq!(environment("asked")[method], "2");
    let mut command = on.fixture.run("cpu", &["--stop-after", "1"]);
    Ran::from(command.env(tunable, "1").output().unwrap()).ok();
}

/// The expert matmul is chosen by a known name, which is in the kernel table.
#[test]
fn products_of_experts_are_known_by_name() {
    let on = OnDevice::by_libtorch();
    let with = |out: &str, value: &str| {
        let mut command = on.command(out, &["--stop-after", "1"]);
        Ran::from(command.env("ZTRAIN_GROUPED", value).output().unwrap())
    };
    with("run", "fastest").fails(2, &["ZTRAIN_GROUPED", "fastest", "own, library"]);
    with("run", "own").ok();
    with("run", "library").fails(4, &["ZTRAIN_GROUPED"]);
}

/// libtorch's wrapper reports only text, and its allocator counts what is allocated.
#[test]
fn a_gpu_without_memory_says_so() {
    let on_device = OnDevice::by_libtorch();
    for (device, out) in [("cuda", "first"), ("cuda:1", "second")] {
        let mut command = on_device.command_on(device, out, &["--stop-after", "1"]);
        let ran = Ran::from(command.env("STANDIN_MEMORY", "1500000").output().unwrap());
        ran.fails(6, &["there is not enough memory", "smaller micro-batches"]);
    }
}

/// Refused before the 0.35 billion weights are initialized. The stand-in's driver says that a GPU has 1 GiB.
#[test]
fn a_state_that_a_gpu_cannot_hold_is_refused_with_the_numbers() {
    let large =
        OnDevice::by_ours(Fixture::new(&[("\nhidden_size = 32", "\nhidden_size = 262144")]));
    let ran = Ran::from(large.command("large", &[]).output().unwrap());
    let told = ran.fails(6, &["the state of this run needs more memory than the GPU has"]);
    for word in ["weights 1.", "moments 1.", "less than 1.0 GiB", "phase \"short\"", "more ranks"] {
        assert!(told.contains(word), "{word}: {told}");
    }
    assert!(!large.fixture.scratch.path("large").exists(), "nothing was begun");
}

/// This holds for all threads: those that read, compute, recompute, validate and write checkpoints start at the first
/// device.
#[test]
fn a_run_on_the_second_device_has_no_context_on_the_first() {
    let on = OnDevice::by_libtorch();
    let again = ["--workers", "2", "--audit", "1/2", "--validate-every", "2"];
    for (device, out, held) in [("cuda", "first", 1), ("cuda:1", "second", 2)] {
        let extra = [&again[..], &["--stop-after", "4"]].concat();
        let ran = Ran::from(on.command_on(device, out, &extra).output().unwrap());
        assert!(!ran.err.contains("stand-in:"), "{}", ran.err);
        ran.ok();
        assert_eq!(total(&on.report(out), "races"), 0, "{device}");
        assert_eq!(contexts(&on.report(out)), [held], "{device}");
    }
}

/// The layers, experts and heads of `zaya1-nano` with an eighth of its width: the same tensors and as many launches.
#[test]
fn operations_of_nano_are_bounded() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let counter = Counter { scratch, store, own: true, dtype: "f32", cut: "" };
    let whole = counter.count(6, 2, 1);
    let (step, more) = (less(&counter.count(6, 2, 2), &whole, 1.0), counter.count(6, 4, 1));
    let rest = less(&step, &less(&more, &whole, 1.0), 1.0);
    println!("norm, clip and optimizer:\n{}", table(&rest));
    bounded("norm, clip and optimizer of nano", &rest, [32.0, 2.0]);
}

/// Without a GPU compiler.
#[test]
fn operations_of_libtorch_alone_are_bounded() {
    let bounds = [[1070.0, 2.0], [115.0, 0.0], [8400.0, 2.0], [17400.0, 18.0]];
    for ((what, counted), bound) in parts(false, "f32").iter().zip(bounds) {
        println!("{what}:\n{}", table(counted));
        bounded(what, counted, bound);
    }
}

/// A file that is not a library is reported as such, not as missing.
#[test]
fn a_gpu_half_that_is_damaged_is_called_so() {
    let on = OnDevice::by_libtorch();
    let folder = on.fixture.scratch.path("libraries");
    std::fs::create_dir(&folder).unwrap();
    let with = || {
        let mut command = on.command("run", &[]);
        Ran::from(command.env("LD_LIBRARY_PATH", &folder).output().unwrap())
    };
    with().fails(6, &["no GPU half of libtorch"]);
    std::fs::write(folder.join("libtorch_cuda.so"), "no library").unwrap();
    with().fails(6, &["the GPU half of libtorch could not be opened", "libtorch_cuda.so"]);
}
