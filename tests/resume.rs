//! Fear: that a kill leaves a trace.
//!
//! Each test kills a real process with SIGKILL at moments spread over its life, reruns the same command until it ends,
//! and compares every byte with an undisturbed run. `ZSTACK_KILLS` sets how many kills (default 4).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use contract::{Key, Purpose, draw};
use store::disk;

use crate::support::{
    Ran, Scratch, arg, assert_same_tree, build, corpus, curriculum, json_lines, tree, zdata,
    zdata_command,
};

pub(crate) fn kills() -> u64 {
    std::env::var("ZSTACK_KILLS").map_or(4, |text| text.parse().unwrap())
}

/// Rounds of kills, each at a moment sampled from the first nine tenths of a process's life.
///
/// The length of that life is estimated from the last processes: machines are noisy, and an earlier kill leaves less
/// work. A kill that came too late shortens the estimate, one that hit lengthens it again. Rounds continue until one
/// has hit, because kills that all come too late test nothing.
pub(crate) struct Fire {
    name: String,
    whole: Duration,
    guess: Duration,
    drawn: u64,
    rounds: u64,
    kills: u64,
    hits: u64,
}

impl Fire {
    /// Kills processes that live about `whole`; the sequence of random moments starts at number `first`.
    pub(crate) fn new(whole: Duration, first: u64) -> Fire {
        let name = std::thread::current().name().unwrap_or("kills").to_owned();
        Fire { name, whole, guess: whole, drawn: first, rounds: 0, kills: 0, hits: 0 }
    }

    /// The same, reported under `name` if one test kills several kinds of process.
    pub(crate) fn named(mut self, name: &str) -> Fire {
        self.name = format!("{}, {name}", self.name);
        self
    }

    /// The number of the next round: `wanted` rounds, and more until one has hit.
    pub(crate) fn round(&mut self, wanted: u64) -> Option<u64> {
        if self.rounds >= wanted && self.hits > 0 {
            return None;
        }
        assert!(self.rounds < wanted + 20, "no process was still alive when it was to be killed");
        self.rounds += 1;
        Some(self.rounds - 1)
    }

    /// Starts `command` and kills it at the next sampled moment.
    pub(crate) fn kill(&mut self, mut command: Command) {
        let per_mille = draw(Key::from_seed(5), Purpose::Generate, self.drawn) % 900;
        self.drawn += 1;
        let mut child: Child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(self.guess.mul_f64(per_mille as f64 / 1000.0));
        let alive = child.try_wait().unwrap().is_none();
        child.kill().unwrap();
        child.wait().unwrap();
        self.kills += 1;
        self.hits += u64::from(alive);
        let factor = if alive { 1.25 } else { 0.75 };
        self.guess = self.guess.mul_f64(factor).min(self.whole);
    }
}

impl Drop for Fire {
    fn drop(&mut self) {
        let Fire { name, rounds, kills, hits, .. } = self;
        eprintln!("{name}: kills: sent {kills}, hit {hits} (in {rounds} rounds)");
    }
}

#[test]
fn a_killed_build_ends_with_the_same_bytes() {
    let scratch = Scratch::new();
    let small = corpus(&scratch, 50, "part_bytes = 1");
    scratch.write("raw/web-2.jsonl", json_lines(9, 12_000));
    let build_into =
        |store: &str| ["build", arg(&small), "--out", store, "--workers", "2"].map(str::to_owned);
    let undisturbed = scratch.path("undisturbed");
    let start = Instant::now();
    zdata(&build_into(arg(&undisturbed)).each_ref().map(String::as_str)).ok();
    let mut fire = Fire::new(start.elapsed(), 0);
    while let Some(index) = fire.round(kills()) {
        let store = scratch.path(&format!("killed-{index}"));
        let command = build_into(arg(&store));
        let command = command.each_ref().map(String::as_str);
        // Three kills in a row: later builds also have to cope with what earlier ones left.
        for _ in 0..3 {
            fire.kill(zdata_command(&command));
            if !store.join("manifest.json").exists() && store.exists() {
                zdata(&["inspect", arg(&store)]).fails(3, &["build"]);
            }
        }
        zdata(&command).ok();
        zdata(&["verify", arg(&store)]).ok();
        assert_same_tree(&undisturbed, &store);
    }
}

/// Rounds of three kills of `command` in its own folder, then a run to its end, which `end` judges. The folder then has
/// to equal an undisturbed one. `check` inspects what each kill left.
fn kill_in_folders(
    scratch: &Scratch,
    begin: impl Fn(&Path),
    command: impl Fn(&Path) -> Vec<String>,
    check: impl Fn(&Path, &Path),
    end: impl Fn(Ran),
) {
    let prepared = |name: &str| {
        let folder = scratch.path(name);
        begin(&folder);
        let command = command(&folder);
        (folder, command)
    };
    let args =
        |command: &[String]| zdata_command(&command.iter().map(String::as_str).collect::<Vec<_>>());
    let (undisturbed, whole) = prepared("undisturbed");
    let start = Instant::now();
    Ran::from(args(&whole).output().unwrap()).ok();
    let mut fire = Fire::new(start.elapsed(), 0);
    while let Some(index) = fire.round(kills()) {
        let (folder, command) = prepared(&format!("killed-{index}"));
        for _ in 0..3 {
            fire.kill(args(&command));
            check(&undisturbed, &folder);
        }
        end(args(&command).output().unwrap().into());
        assert_same_tree(&undisturbed, &folder);
        fs::remove_dir_all(&folder).unwrap();
    }
}

/// Every file with a final name equals that of the undisturbed folder: nothing is half written.
fn assert_whole(undisturbed: &Path, left: BTreeMap<String, Vec<u8>>) {
    let wanted = tree(undisturbed);
    for (name, bytes) in left.into_iter().filter(|(name, _)| !name.ends_with(disk::PART)) {
        assert!(wanted.get(&name) == Some(&bytes), "{name} is not whole");
    }
}

/// The same for everything in a folder.
fn whole(undisturbed: &Path, killed: &Path) {
    assert_whole(undisturbed, tree(killed));
}

#[test]
fn a_killed_training_of_a_tokenizer_ends_with_the_same_bytes() {
    let scratch = Scratch::new();
    let path = corpus(&scratch, 1500, "");
    let command = |folder: &Path| {
        let out = folder.join("tokenizer.json");
        let train = ["tokenizer", "train", arg(&path), "--vocab", "3000", "--out", arg(&out)];
        train.map(str::to_owned).to_vec()
    };
    let begin = |folder: &Path| fs::create_dir(folder).unwrap();
    kill_in_folders(&scratch, begin, command, whole, |ran| drop(ran.ok()));
}

#[test]
fn a_killed_init_ends_with_the_same_bytes() {
    let scratch = Scratch::new();
    let begin = |folder: &Path| {
        fs::create_dir_all(folder.join("web")).unwrap();
        for file in 0..200 {
            fs::write(folder.join(format!("web/{file}.jsonl")), json_lines(file, 2)).unwrap();
        }
    };
    let command = |folder: &Path| vec!["init".to_owned(), arg(folder).to_owned()];
    let end = |ran: Ran| match ran.code {
        Some(0) => {}
        // Both files existed when the kill came.
        _ => drop(ran.fails(2, &["corpus.toml", "there already"])),
    };
    kill_in_folders(&scratch, begin, command, whole, end);
}

/// An amendment writes one file, and the packs next to the store of a source with packed documents.
#[test]
fn a_killed_amendment_ends_with_the_same_bytes() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 1500, ""), "store");
    let packing =
        "[source.web]\npacking = \"best-fit\"\nlengths = { 64 = 2, 128 = 1 }\n[source.math]";
    let template =
        curriculum(&scratch, Path::new("store"), "run.toml", &[("[source.math]", packing)]);
    let before = fs::read(template).unwrap();
    let begin = |folder: &Path| {
        fs::create_dir(folder).unwrap();
        for (name, bytes) in tree(&store) {
            let path = folder.join("store").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        fs::write(folder.join("run.toml"), &before).unwrap();
    };
    let command = |folder: &Path| {
        let run = folder.join("run.toml");
        let amend = ["amend", arg(&run), "--step", "5", "--mix", "web=1,math=3/2"];
        amend.map(str::to_owned).to_vec()
    };
    let check = |undisturbed: &Path, killed: &Path| {
        let mut left = tree(killed);
        if left["run.toml"] == before {
            left.remove("run.toml");
        }
        // Packs have a temporary name until the last moment; the next command that opens packs removes such files.
        left.retain(|name, _| {
            name.rsplit_once(".packs.").is_none_or(|(_, drawn)| drawn.len() != 16)
        });
        assert_whole(undisturbed, left);
    };
    let end = |ran: Ran| match ran.code {
        Some(0) => {}
        // The amendment was written when the kill came.
        _ => drop(ran.fails(2, &["run.toml", "at one step"])),
    };
    kill_in_folders(&scratch, begin, command, check, end);
}

#[cfg(feature = "train")]
mod training {
    use super::*;
    use crate::faults::under;
    use crate::support::{ztrain, ztrain_command};

    #[test]
    fn a_killed_run_ends_with_the_same_bytes() {
        killed_runs("f32");
    }

    #[test]
    fn a_killed_run_in_bf16_ends_with_the_same_bytes() {
        killed_runs("bf16");
    }

    fn killed_runs(dtype: &str) {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
        let dtype = format!("dtype = \"{dtype}\"");
        let curriculum = curriculum(&scratch, &store, "run.toml", &[("dtype = \"f32\"", &dtype)]);
        let run = |out: &str| {
            ["--curriculum", arg(&curriculum), "--out", out, "--checkpoint-every", "3"]
                .map(str::to_owned)
        };
        let undisturbed = scratch.path("undisturbed");
        let start = Instant::now();
        ztrain(&run(arg(&undisturbed)).each_ref().map(String::as_str)).ok();
        let mut fire = Fire::new(start.elapsed(), 0);
        while let Some(index) = fire.round(kills()) {
            let folder = scratch.path(&format!("killed-{index}"));
            let command = run(arg(&folder));
            let command = command.each_ref().map(String::as_str);
            for _ in 0..2 {
                fire.kill(ztrain_command(&command));
            }
            ztrain(&command).ok();
            let read =
                |run: &std::path::Path| fs::read_to_string(run.join("ledger.jsonl")).unwrap();
            assert!(read(&undisturbed) == read(&folder), "the ledgers of kill {index} differ");
            assert_same_tree(
                &undisturbed.join("checkpoints/step-20"),
                &folder.join("checkpoints/step-20"),
            );
            ztrain(&["compare", arg(&undisturbed), arg(&folder)]).ok();
        }
        for step in ["1", "13", "20"] {
            let verdict = ztrain(&["replay", "--run", arg(&undisturbed), "--step", step]).ok();
            assert!(verdict.contains("same bits"), "{verdict}");
        }
        zdata(&["verify-run", arg(&undisturbed)]).ok();
    }

    /// On SIGTERM the present step ends, its state is saved, the exit code is 0, and the same command continues.
    #[test]
    fn a_signal_ends_a_run_cleanly_and_the_same_command_goes_on() {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 100, ""), "store");
        let epochs = ("max_epochs = 3", "max_epochs = 1000\n\n[source.web]\nmax_epochs = 1000");
        let path =
            curriculum(&scratch, &store, "run.toml", &[epochs, ("steps = 12", "steps = 80")]);
        let ledger = |run: &std::path::Path| {
            fs::read_to_string(run.join("ledger.jsonl")).unwrap_or_default()
        };
        let run = |out: &str| ["--curriculum", arg(&path), "--out", out].map(str::to_owned);
        let whole = scratch.path("whole");
        ztrain(&run(arg(&whole)).each_ref().map(String::as_str)).ok();
        let stopped = scratch.path("stopped");
        let command = run(arg(&stopped));
        let command = command.each_ref().map(String::as_str);
        let mut last = 0;
        for signal in ["-TERM", "-INT"] {
            let mut child = ztrain_command(&command)
                .arg("--quiet")
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            while ledger(&stopped).lines().count() < last + 4 {
                assert!(child.try_wait().unwrap().is_none(), "it ended before it could be stopped");
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            let id = child.id().to_string();
            assert!(
                std::process::Command::new("kill").args([signal, &id]).status().unwrap().success()
            );
            let output = child.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{signal}");
            let told = String::from_utf8(output.stdout).unwrap();
            last = ledger(&stopped).lines().count() - 1;
            assert!(told.starts_with(&format!("stopped after step {last} of 88")), "{told}");
            assert!(stopped.join(format!("checkpoints/step-{last}/manifest.json")).exists());
        }
        let told = ztrain(&command).ok();
        assert!(told.starts_with("done after step 88"), "{told}");
        assert!(ledger(&stopped) == ledger(&whole), "a clean stop left a trace");
        let events = fs::read_to_string(stopped.join("events.jsonl")).unwrap();
        assert!(!events.contains("\"again\":true"), "no step was lost");
        assert!(events.contains("\"event\":\"validation\""), "{events}");
    }

    /// Wherever memory runs out, in libtorch, in C++ below it or in our own code, there is a message and an exit code,
    /// never a signal. How far a run with so little memory gets is a matter of chance.
    #[test]
    fn a_process_with_hardly_any_memory_is_not_killed_by_it() {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 100, ""), "store");
        let wide = [
            ("dtype = \"f32\"", "dtype = \"bf16\""),
            ("hidden_size = 32", "hidden_size = 256"),
            ("moe_intermediate_size = 32", "moe_intermediate_size = 256"),
            ("num_hidden_layers = 2", "num_hidden_layers = 6"),
        ];
        let path = curriculum(&scratch, &store, "run.toml", &wide);
        for mebibytes in (660..900).step_by(40) {
            let (run, limit) =
                (scratch.path(&mebibytes.to_string()), format!("-v {}", mebibytes << 10));
            let args = ["--curriculum", arg(&path), "--out", arg(&run), "--stop-after", "2"];
            let program = env!("CARGO_BIN_EXE_ztrain");
            let ran: Ran = under(&limit, program, &[&args[..], &["--workers", "2"]].concat())
                .output()
                .unwrap()
                .into();
            if ran.code != Some(0) {
                let told = ran.fails(6, &[]);
                // A thread needs memory too, which the system reports in its own words.
                let lack = ["memory", "cannot start a thread"];
                assert!(lack.iter().any(|lack| told.contains(lack)), "{mebibytes} MiB: {told}");
            }
        }
    }

    /// A micro-batch of half a million tokens, in a process limited to three gigabytes.
    #[test]
    fn a_run_that_finds_no_memory_says_where_and_goes_on() {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 100, ""), "store");
        let epochs = ("max_epochs = 3", "max_epochs = 100000\n\n[source.web]\nmax_epochs = 100000");
        let (length, batch) = (
            "seq_len = 128\nbatch = 6\nmicro_batch = 2",
            "seq_len = 1024\nbatch = 512\nmicro_batch = 512",
        );
        let steps = ("steps = 12", "steps = 2");
        let path = curriculum(&scratch, &store, "run.toml", &[epochs, (length, batch), steps]);
        let run = scratch.path("run");
        let args = ["--curriculum", arg(&path), "--out", arg(&run), "--workers", "1"];
        let limited = under("-v 3000000", env!("CARGO_BIN_EXE_ztrain"), &args).output();
        let ran = Ran::from(limited.unwrap());
        ran.fails(
            6,
            &["step 3, micro-batch 0: there is not enough memory", "can't allocate memory"],
        );
        // With micro-batches that fit, the run continues where it stopped, as if it never failed.
        let fits =
            curriculum(&scratch, &store, "run.toml", &[epochs, steps, ("steps = 8", "steps = 2")]);
        ztrain(&["--curriculum", arg(&fits), "--out", arg(&run)]).ok();
        let whole = scratch.path("whole");
        ztrain(&["--curriculum", arg(&fits), "--out", arg(&whole)]).ok();
        ztrain(&["compare", arg(&run), arg(&whole)]).ok();
        let steps = |run: &std::path::Path| {
            let ledger = fs::read_to_string(run.join("ledger.jsonl")).unwrap();
            let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
            ledger
                .lines()
                .skip(1)
                .map(|text| line(text)["state_digest"].clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(steps(&run).len(), 4);
        assert_eq!(steps(&run), steps(&whole));
    }
}
