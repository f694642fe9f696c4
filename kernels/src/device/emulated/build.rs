//! Compiles the kernels for the CPU in several ways, and plays tapes on them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use super::tape::Tape;

/// A way of compiling the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Build {
    /// `None` for the compiler of the build.
    pub(super) compiler: Option<&'static str>,
    pub(super) flags: &'static [&'static str],
}

impl Build {
    pub(super) const PLAIN: Build = Build { compiler: None, flags: &["-O1"] };
    /// Counts every memory access: `counter.cpp` implements the calls that the compiler inserts for a sanitizer.
    pub(super) const COUNTED: Build =
        Build { compiler: None, flags: &["-O2", "-fsanitize=thread", "-DCOUNTED"] };

    fn command(&self) -> Command {
        let own = || std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let mut command =
            Command::new(self.compiler.map_or_else(own, |compiler| compiler.to_owned()));
        command.args(["-std=c++17", "-Wall", "-Wextra", "-ffp-contract=off"]);
        command.arg("-fno-strict-aliasing");
        command
    }
}

/// The sources of the kernels.
pub(super) fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("device")
}

/// The text of every file that a build reads, with its name.
pub(super) fn texts() -> &'static [(String, String)] {
    static TEXTS: OnceLock<Vec<(String, String)>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let folders = [sources(), sources().join("emulator")];
        let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
        let paths = entries.map(|entry| entry.unwrap().path());
        let read = |path: PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read_to_string(path).unwrap())
        };
        let ours = |path: &PathBuf| {
            ["h", "cpp"].map(OsStr::new).contains(&path.extension().unwrap_or_default())
        };
        let mut texts: Vec<_> = paths.filter(ours).map(read).collect();
        texts.sort();
        texts
    })
}

/// A file in this build's folder, written by `make` unless it exists: its name has a hash of what it is made from.
fn made(name: &str, from: impl Hash, make: impl FnOnce(&Path)) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (texts(), from).hash(&mut hasher);
    let path = Path::new(env!("OUT_DIR")).join(format!("{name}-{:016x}", hasher.finish()));
    if !path.exists() {
        let own = path.with_extension(std::process::id().to_string());
        make(&own);
        std::fs::rename(own, &path).unwrap();
    }
    path
}

fn finish(mut command: Command) {
    let out = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// The emulator, never compiled with a sanitizer.
fn emulator() -> PathBuf {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        made("emulator", Build::PLAIN, |out| {
            let mut command = Build::PLAIN.command();
            command.args(["-O2", "-c", "-o"]).arg(out).arg(sources().join("emulator/emulator.cpp"));
            finish(command);
        })
    };
    MADE.get_or_init(make).clone()
}

/// The program that plays tapes, compiled this way.
fn player(build: &Build) -> PathBuf {
    type Slots = Mutex<BTreeMap<Build, Arc<OnceLock<PathBuf>>>>;
    static SLOTS: LazyLock<Slots> = LazyLock::new(Slots::default);
    let slot = SLOTS.lock().unwrap().entry(*build).or_default().clone();
    let make = || {
        made("run", build, |out| {
            let source = |name| sources().join("emulator").join(name);
            let (mut command, object) = (build.command(), out.with_added_extension("o"));
            match *build == Build::COUNTED {
                // Linked without those flags, which would link the sanitizer, too.
                true => {
                    let mut kernels = build.command();
                    kernels.args(build.flags).arg("-c").arg("-o").arg(&object);
                    kernels.arg(source("run.cpp"));
                    finish(kernels);
                    command.args(Build::PLAIN.flags).arg(&object).arg(source("counter.cpp"))
                }
                false => command.args(build.flags).arg(source("run.cpp")),
            };
            // The object file has no extension that the compiler knows.
            command.args(["-x", "none"]).arg(emulator()).arg("-o").arg(out);
            finish(command);
            let _ = std::fs::remove_file(object);
        })
    };
    slot.get_or_init(make).clone()
}

/// A library of one source of the emulator, together with the emulator.
pub(super) fn library(source: &str) -> PathBuf {
    made(&format!("{source}.so"), Build::PLAIN, |out| {
        let mut command = Build::PLAIN.command();
        command.args(Build::PLAIN.flags).args(["-shared", "-fPIC", "-o"]).arg(out);
        command.args([source, "emulator.cpp"].map(|name| sources().join("emulator").join(name)));
        finish(command);
    })
}

/// A fresh name in the folder of this build.
pub(super) fn fresh() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    Path::new(env!("OUT_DIR")).join(format!("tape-{}-{number}", std::process::id()))
}

/// Plays tapes on a build: returns its output, and, on success, what the last tape wrote.
pub(super) fn played(build: &Build, ways: &str, tapes: &[&Tape]) -> (String, Option<Vec<u8>>) {
    let out = fresh();
    let paths: Vec<PathBuf> = tapes.iter().map(|_| fresh()).collect();
    for (path, tape) in paths.iter().zip(tapes) {
        std::fs::write(path, tape.bytes()).unwrap();
    }
    let mut command = Command::new(player(build));
    command.env("TSAN_OPTIONS", "exitcode=66 report_signal_unsafe=0");
    let ended = command.arg(&out).arg(ways).args(&paths).output().unwrap();
    let left = std::fs::read(&out);
    for path in paths.iter().chain([&out]) {
        let _ = std::fs::remove_file(path);
    }
    let told = [ended.stdout, ended.stderr].concat();
    let told = String::from_utf8_lossy(&told).into_owned();
    (told, left.ok().filter(|_| ended.status.success()))
}
