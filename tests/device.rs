//! Fear: that what is queued on a GPU runs before what it needs, or that the host asks the GPU at every turn.
//!
//! The GPU is a stand-in (`kernels/device/standin`, compiled here against the libtorch in use): it computes on the CPU, keeps
//! vector clocks for streams and events, and counts. So the whole program runs on a device in any CI, and what is said here is
//! about order and number of operations; nothing about a real device's bits or speed.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::ranks::{Fixture, until_lines};
use crate::support::{Ran, Scratch, arg, build, corpus, curriculum, ztrain_command};

/// Where kernels and stand-ins have their source.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/device")
}

/// The folder in which the stand-in lies as `libtorch_cuda.so`; its name says from what it was made.
pub(crate) fn libtorch_cuda() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let libtorch = PathBuf::from(std::env::var_os("LIBTORCH").expect("cargo sets LIBTORCH"));
        let libtorch = libtorch.canonicalize().unwrap();
        made(&["standin"], &libtorch, &["libtorch_cuda.so"], |compiler| {
            let include = libtorch.join("include");
            compiler.arg("-isystem").arg(&include).arg("-isystem");
            compiler.arg(include.join("torch/csrc/api/include")).arg("standin/gpu.cpp");
            compiler.arg("-L").arg(libtorch.join("lib")).args(["-ltorch_cpu", "-lc10"]);
        })
    })
}

/// The folder in which the emulator lies under the names of a compiler's and a driver's library, which run our own kernels.
fn driver() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        made(&["", "emulator"], Path::new(""), &["libcuda.so.1", "libnvrtc.so.13"], |compiler| {
            compiler.args(["-ffp-contract=off", "-fno-strict-aliasing", "emulator/driver.cpp"]);
            compiler.arg("emulator/emulator.cpp");
        })
    })
}

/// A folder with a library under these names, compiled unless it is there, out of the files in `folders` and what is at `from`.
fn made(
    folders: &[&str],
    from: &Path,
    names: &[&str],
    arguments: impl FnOnce(&mut Command),
) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    from.hash(&mut hasher);
    let entries =
        folders.iter().flat_map(|folder| std::fs::read_dir(sources().join(folder)).unwrap());
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.is_file());
    files.sort();
    files.iter().for_each(|file| std::fs::read(file).unwrap().hash(&mut hasher));
    let name = format!("{}-{:016x}", names[0], hasher.finish());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if names.iter().any(|name| !folder.join(name).exists()) {
        std::fs::create_dir_all(&folder).unwrap();
        let own = folder.join(std::process::id().to_string());
        let mut compiler = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
        compiler.current_dir(sources()).args(["-std=c++17", "-O2", "-Wall", "-shared", "-fPIC"]);
        compiler.arg("-pthread").arg("-o").arg(&own);
        arguments(&mut compiler);
        let made = compiler.output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        for name in &names[1..] {
            std::fs::copy(&own, folder.join(name)).unwrap();
        }
        std::fs::rename(own, folder.join(names[0])).unwrap();
    }
    folder
}

/// Makes a command's `--device cuda` the stand-in, which tells in `report` what it was asked for; our own kernels run on the
/// emulator.
pub(crate) fn pretend(command: &mut Command, report: &Path) {
    let folders = [libtorch_cuda(), driver()];
    command.env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap());
    command.env("STANDIN_REPORT", report).env("XDG_CACHE_HOME", driver());
}

/// What the processes that used a stand-in said at their ends, added up by name.
pub(crate) fn total(report: &Path, name: &str) -> u64 {
    let text = std::fs::read_to_string(report).unwrap();
    assert!(!text.is_empty(), "nobody used the stand-in");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| line[name].as_u64().unwrap()).sum()
}

/// The same of its operations, each by its name.
pub(crate) fn by_name(report: &Path) -> BTreeMap<String, f64> {
    let text = std::fs::read_to_string(report).unwrap();
    let mut found = BTreeMap::new();
    for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        for (name, times) in line["by_name"].as_object().unwrap() {
            *found.entry(name.clone()).or_insert(0.0) += times.as_f64().unwrap();
        }
    }
    found
}

/// A small run on the stand-in, by libtorch's operators alone, which take a tenth of the emulator's time, or by our own kernels.
pub(crate) struct OnDevice {
    pub(crate) fixture: Fixture,
    pub(crate) own: bool,
}

impl OnDevice {
    pub(crate) fn by_libtorch() -> Self {
        OnDevice { fixture: Fixture::new(&[]), own: false }
    }

    pub(crate) fn report(&self, out: &str) -> PathBuf {
        self.fixture.scratch.path(&format!("{out}.report"))
    }

    pub(crate) fn command(&self, out: &str, extra: &[&str]) -> Command {
        let args = [&["--device", "cuda", "--validate-every", "0", "--quiet"], extra].concat();
        let mut command = self.fixture.run(out, &args);
        pretend(&mut command, &self.report(out));
        if !self.own {
            command.env("LD_LIBRARY_PATH", libtorch_cuda());
        }
        command
    }

    /// Runs to the end, or as far as `extra` says, and asserts that everything waited for what it needs.
    #[track_caller]
    pub(crate) fn finish(&self, out: &str, extra: &[&str]) {
        let ran = Ran::from(self.command(out, extra).output().unwrap());
        assert!(!ran.err.contains("stand-in:"), "{}", ran.err);
        assert!(!ran.err.contains("Warning"), "libtorch warns: {}", ran.err);
        // Without a compiler for a GPU libtorch computes all, which is said.
        assert_eq!(!self.own, ran.err.contains("no kernels of our own on Cuda("), "{}", ran.err);
        ran.ok();
        assert_eq!(total(&self.report(out), "races"), 0);
    }

    /// Whether a run of two steps shows a race with a fault. A single wait is not missed where a thread of the host has happened
    /// to wait for the same, so it may be lost several times.
    fn shows(&self, fault: &str, extra: &[&str]) -> bool {
        (0..8).any(|turn| self.races(&format!("lost-{turn}"), fault, extra) > 0)
    }

    /// How many races a run of two steps shows with a fault.
    fn races(&self, name: &str, fault: &str, extra: &[&str]) -> u64 {
        let out = format!("{name}-{}", fault.replace(':', "-"));
        let mut command = self.command(&out, &[&["--stop-after", "2"], extra].concat());
        Ran::from(command.env("STANDIN_FAULT", fault).output().unwrap()).ok();
        total(&self.report(&out), "races")
    }
}

#[test]
fn a_run_on_a_device_is_one_run_however_it_is_computed() {
    let on = OnDevice::by_libtorch();
    on.finish("plain", &["--workers", "1"]);
    on.finish("two", &["--workers", "2", "--prefetch", "1"]);
    on.fixture.assert_same("plain", "two");
    let ledger = std::fs::read_to_string(on.fixture.scratch.path("plain").join("ledger.jsonl"));
    let head: Value = serde_json::from_str(ledger.unwrap().lines().next().unwrap()).unwrap();
    assert_eq!(head["levels"], serde_json::json!(["D"]), "no device has shown more");

    let mut command = on.command("killed", &["--workers", "2", "--recompute", "--prefetch", "7"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until_lines(&on.fixture.scratch.path("killed"), 8, &mut child);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it was killed before its end");
    on.finish("killed", &["--workers", "1", "--recompute"]);
    on.fixture.assert_same("plain", "killed");

    let run = on.fixture.scratch.path("plain");
    let args = ["replay", "--run", arg(&run), "--step", "14", "--device", "cuda"];
    let mut command = ztrain_command(&args);
    pretend(&mut command, &on.report("replayed"));
    command.env("LD_LIBRARY_PATH", libtorch_cuda());
    let said = Ran::from(command.output().unwrap()).ok();
    assert!(said.contains("same bits"), "{said}");
    assert_eq!(total(&on.report("replayed"), "races"), 0);
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
    for what in ["operations", "contexts"] {
        assert_eq!(total(&report, what), 0, "whoever lists computes nothing and holds nothing");
    }

    // Without a GPU it says what is missing, and that is no fault.
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

/// The prefetcher's ring of buffers, in which its readers assemble batches: how deep it is changes no bit, and what is in it is
/// written again when the copy out of it is over.
#[test]
fn a_buffer_is_filled_again_when_it_has_been_copied() {
    let on = OnDevice::by_libtorch();
    let ahead = ["--workers", "1", "--prefetch", "4", "--loader-threads", "2"];
    on.finish("ahead", &[&ahead[..], &["--stop-after", "8"]].concat());
    on.finish("apart", &["--workers", "1", "--prefetch", "1", "--stop-after", "8"]);
    let ledger = |out: &str| {
        std::fs::read_to_string(on.fixture.scratch.path(out).join("ledger.jsonl")).unwrap()
    };
    assert!(ledger("ahead") == ledger("apart"), "the ledgers differ");
    // One copy for each batch, whatever its micro-batches are, and the balance of each of 2 layers.
    on.finish("four", &[&ahead[..], &["--stop-after", "4"]].concat());
    let [four, eight] = ["four", "ahead"].map(|out| total(&on.report(out), "from_host"));
    assert!(eight - four <= 4 * 3, "{} uploads in 4 steps", eight - four);

    // A step that was computed has waited for its copy. Where its only micro-batch does not, nothing but the look at the copy
    // keeps the buffer, which is given back when the step is done, from being written too early.
    let whole = ("batch = 8\nmicro_batch = 2", "batch = 8\nmicro_batch = 8");
    let on = OnDevice { fixture: Fixture::new(&[whole]), own: false };
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
    // A reader that is slow today writes late enough all the same.
    assert!((0..6).any(|time| early("wait:1,host:0", time)));
}

/// A checkpoint leaves beside the step that follows: that one's end waits for the copies, and who writes them down too.
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
    // Nobody waits for the copies after step 3: neither the stream that computes, for which that would be its 17th wait, behind
    // those of the 16 micro-batches so far, nor the thread that writes.
    let mut command = on.command("moved", &["--workers", "1", "--stop-after", "4"]);
    let ran = Ran::from(command.env("STANDIN_FAULT", "wait:17,host:0").output().unwrap());
    assert!(ran.err.contains("is written while it may be read by"), "{}", ran.err);

    let mut command = on.command("early", &["--workers", "1", "--stop-after", "6"]);
    let _ = command.env("STANDIN_FAULT", "host:0").output().unwrap();
    assert!(blobs("kept", 6) != blobs("early", 6), "what was not there yet is written down");
}

/// The same by our own kernels; their table's name, with the digest of their source, stands in the ledger. In f32, in bf16, and
/// where micro-batches are cut inside.
#[test]
fn our_own_kernels_leave_one_ledger_too() {
    let cut = "micro_batch = 2\ncontext_chunks = 2\nweight_shards = 2";
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[], "4"),
        (&[("dtype = \"f32\"", "dtype = \"bf16\"")], "3"),
        (&[("micro_batch = 2", cut)], "3"),
    ];
    for (change, steps) in cases {
        let on = OnDevice { fixture: Fixture::new(change), own: true };
        on.finish("plain", &["--workers", "1", "--stop-after", steps]);
        assert!(total(&on.report("plain"), "launches") > 500, "{change:?}");
        // The driver refuses a thread without one: that of the process, and those that compute in each step.
        assert!(total(&on.report("plain"), "contexts") > 4, "{change:?}");
        let ledger = |out: &str| {
            std::fs::read_to_string(on.fixture.scratch.path(out).join("ledger.jsonl")).unwrap()
        };
        assert!(ledger("plain").contains("device 5, kernels "));
        let two = ["--workers", "2", "--recompute", "--prefetch", "5", "--stop-after", "2"];
        on.finish("two", &two);
        on.finish("two", &["--workers", "1", "--stop-after", steps]);
        assert!(ledger("plain") == ledger("two"), "the ledgers differ: {change:?}");
        if change.is_empty() {
            assert!(on.shows("wait:1", &[]));
            assert!(on.shows("record:0", &[]), "memory goes while a stream may read it");
        }
    }
}

/// Two GPUs, and the stand-in of `transport.rs` for the library between them, which works on their streams.
#[test]
fn two_ranks_on_two_devices_leave_the_ledger_of_one() {
    let on = OnDevice::by_libtorch();
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

    // The stream between the devices no longer waits for the one that computes.
    let mut command = on.command("lost", &[&two[..], &["rccl", "--stop-after", "2"]].concat());
    ranks(&mut command);
    let ran = Ran::from(command.env("STANDIN_FAULT", "side:0").output().unwrap());
    assert!(ran.err.contains("by ncclGroup on stream"), "{}", ran.err);
    assert!(total(&on.report("lost"), "races") > 0);
}

/// The lines of ranks that share micro-batches have a stream of their own between the devices.
#[test]
fn two_devices_that_share_micro_batches_leave_the_ledger_of_one() {
    let cut = "micro_batch = 2\ncontext_chunks = 4\nweight_shards = 2";
    let on = OnDevice { fixture: Fixture::new(&[("micro_batch = 2", cut)]), own: false };
    on.finish("alone", &["--workers", "1", "--stop-after", "4"]);
    let groups = ["--cp", "--tsp", "--prefetch"].map(|what| {
        let two = ["--nproc", "2", "--workers", "1", "--transport", "rccl", "--stop-after", "4"];
        let mut command = on.command(what, &[&two[..], &[what, "2"]].concat());
        command.env("ZTRAIN_RCCL", crate::transport::standin());
        Ran::from(command.output().unwrap()).ok();
        assert_eq!(total(&on.report(what), "races"), 0, "{what}");
        let ledger = |out: &str| {
            std::fs::read_to_string(on.fixture.scratch.path(out).join("ledger.jsonl")).unwrap()
        };
        assert!(ledger("alone") == ledger(what), "{what}: the ledgers differ");
        total(&on.report(what), "launches")
    });
    let [context, folded, apart] = groups;
    // Two ranks, 4 steps of 4 micro-batches, 2 layers: at least keys, values and their gradients, and two shards each way.
    let least = 2 * 4 * 4 * 2 * 4;
    assert!(context > apart + least && folded > context, "{groups:?} groups of transfers");
}

/// Operations and reads by the host that runs of one store ask a device for.
struct Counter {
    scratch: Scratch,
    store: PathBuf,
    /// By our own kernels, or by libtorch alone.
    own: bool,
    dtype: &'static str,
    /// How micro-batches are cut inside.
    cut: &'static str,
}

/// Operations, reads by the host, and operations by name.
type Counted = BTreeMap<String, f64>;

/// What `a` has more than `b`, by each of so many.
fn less(a: &Counted, b: &Counted, by: f64) -> Counted {
    let names = a.keys().chain(b.keys());
    let of = |counted: &Counted, name: &String| counted.get(name).copied().unwrap_or(0.0);
    names.map(|name| (name.clone(), (of(a, name) - of(b, name)) / by)).collect()
}

/// The names that come most often, with how often.
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
        // As nano has them.
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

/// A step of 2 layers and 4 micro-batches in its parts.
fn parts(own: bool, dtype: &'static str) -> [(&'static str, Counted); 4] {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let counter = Counter { scratch, store, own, dtype, cut: "" };
    let (short, long) = (counter.count(2, 4, 1), counter.count(2, 4, 2));
    let step = less(&long, &short, 1.0);
    // What runs of equal length have besides their micro-batches cancels.
    let shallow = less(&counter.count(2, 8, 2), &long, 8.0);
    let deep = less(&counter.count(4, 8, 2), &counter.count(4, 4, 2), 8.0);
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

/// Holds operations and reads by the host to what they may be.
#[track_caller]
fn bounded(what: &str, counted: &Counted, bound: [f64; 2]) {
    let found = ["operations", "host_reads"].map(|name| counted[name]);
    assert!(found[0] <= bound[0] && found[1] <= bound[1], "{what}: {found:?}, not {bound:?}");
}

#[test]
fn operations_of_a_step_are_bounded() {
    let bounds = [[60.0, 0.0], [42.0, 0.0], [50.0, 2.0], [700.0, 2.0]];
    for ((what, counted), bound) in parts(true, "f32").iter().zip(bounds) {
        println!("{what}:\n{}", table(counted));
        bounded(what, counted, bound);
    }
}

/// What bf16 rounds is rounded by the operation that makes it, as far as that is ours.
#[test]
fn operations_of_a_step_in_bf16_are_bounded() {
    let bounds = [[60.0, 0.0], [43.0, 0.0], [70.0, 2.0], [720.0, 2.0]];
    for ((what, counted), bound) in parts(true, "bf16").iter().zip(bounds) {
        println!("{what}:\n{}", table(counted));
        bounded(what, counted, bound);
    }
}

/// A step of 2 layers and 4 micro-batches that are cut inside: sums over chunks of a layer's gradients are made together, and a
/// vocabulary in shards costs no launch more than its products. The share of a layer of each micro-batch is what runs of 2 steps
/// with 4 layers have more, the optimizer's included.
#[test]
fn operations_of_a_step_that_is_cut_are_bounded() {
    for (cut, a_layer, bound) in [
        ("context_chunks = 2", [186.0, 0.0], [1700.0, 2.0]),
        ("weight_shards = 2", [152.0, 0.0], [1270.0, 2.0]),
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

/// libtorch's wrapper hands on words alone; its allocator counts.
#[test]
fn a_gpu_without_memory_says_so() {
    let on_device = OnDevice::by_libtorch();
    let mut command = on_device.command("run", &["--stop-after", "1"]);
    let ran = Ran::from(command.env("STANDIN_MEMORY", "1500000").output().unwrap());
    ran.fails(6, &["there is not enough memory", "smaller micro-batches"]);
}

/// The layers, experts and heads of `zaya1-nano`, in an eighth of its width: all of its parameters, and as many launches.
#[test]
fn operations_of_nano_are_bounded() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let counter = Counter { scratch, store, own: true, dtype: "f32", cut: "" };
    let whole = counter.count(6, 2, 1);
    let (step, more) = (less(&counter.count(6, 2, 2), &whole, 1.0), counter.count(6, 4, 1));
    let rest = less(&step, &less(&more, &whole, 1.0), 1.0);
    println!("norm, clip and optimizer:\n{}", table(&rest));
    bounded("norm, clip and optimizer of nano", &rest, [400.0, 2.0]);
}

/// Without a compiler for a GPU.
#[test]
fn operations_of_libtorch_alone_are_bounded() {
    let bounds = [[1120.0, 2.0], [160.0, 0.0], [8250.0, 2.0], [17500.0, 18.0]];
    for ((what, counted), bound) in parts(false, "f32").iter().zip(bounds) {
        println!("{what}:\n{}", table(counted));
        bounded(what, counted, bound);
    }
}
