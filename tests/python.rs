//! Python environments with other projects' packages, installed once into the user's cache by pip.
//!
//! If one is not available, the test that needs it says so in the log and is skipped.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder with the lists of packages.
pub(crate) fn tests_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// A Python with the packages of `list`, a file in this folder; or why there is none.
pub(crate) fn provision(list: &str) -> Result<PathBuf, String> {
    provision_and(list, None)
}

/// The same after the program `finish`, a file in this folder, ran with it.
pub(crate) fn provision_and(list: &str, finish: Option<&str>) -> Result<PathBuf, String> {
    let list = tests_folder().join(list);
    let finish = finish.map(|program| tests_folder().join(program));
    let mut wanted = fs::read(&list).unwrap();
    wanted.extend(finish.iter().flat_map(|program| fs::read(program).unwrap()));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let cache = cache.ok_or("no HOME")?.join("ztrain");
    let home = cache.join(format!("peers-{}", contract::Digest::of_bytes(&wanted).short()));
    let python = home.join("bin/python");
    if python.exists() {
        return Ok(python);
    }
    fs::create_dir_all(&cache).map_err(|error| error.to_string())?;
    // Built in a temporary folder and renamed, so concurrent or killed test runs do no harm.
    let scratch = tempfile::tempdir_in(&cache).map_err(|error| error.to_string())?;
    let fresh = scratch.path().join("venv");
    ran(Command::new("python3").args(["-m", "venv"]).arg(&fresh))?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
    let pip = [&pip[..], &["--only-binary=:all:", "--timeout=20", "--retries=1", "-r"]].concat();
    ran(Command::new(fresh.join("bin/python")).args(pip).arg(&list))?;
    if let Some(program) = &finish {
        ran(Command::new(fresh.join("bin/python")).arg(program))?;
    }
    if fs::rename(&fresh, &home).is_err() && !python.exists() {
        return Err(format!("{} cannot be made", home.display()));
    }
    Ok(python)
}

fn ran(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let told = String::from_utf8_lossy(&output.stderr);
    let last = told.lines().last().unwrap_or_default();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {last}")) }
}

/// Logs a skipped test past the test runner's capture, so that every log has it.
#[expect(clippy::explicit_write, reason = "the runner captures eprintln!")]
pub(crate) fn skipped(what: &str, why: &str) {
    writeln!(std::io::stderr(), "1 test of {what} skipped: {why}").unwrap();
}
