//! Fear: that the Python package reads other batches than the Rust loader, or loses or repeats some among workers,
//! processes and restarts.
//!
//! The tests are `loader/python/tests`, run on the package as the tree has it: the Python files next to the library of
//! this very build. `sh tests/full.sh package` runs them on an installed wheel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bucket::Bucket;
use crate::python::{provision, provision_and, skipped};
use crate::support::{Ran, Scratch, arg, build, corpus, curriculum, zdata};
use crate::tidy::root;

/// Lays the package into a folder for `PYTHONPATH`.
fn lay(into: &Path) {
    let package = into.join("zdata");
    fs::create_dir_all(&package).unwrap();
    for entry in fs::read_dir(root().join("loader/python/zdata")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, package.join(path.file_name().unwrap())).unwrap();
        }
    }
    // Cargo builds it for this test, as a library that the root package names.
    let library = std::env::current_exe().unwrap().with_file_name("lib_zdata.so");
    fs::copy(library, package.join("_zdata.abi3.so")).unwrap();
}

/// Runs a file of tests with this Python.
fn passes(test: &str, python: Result<PathBuf, String>) {
    let python = match python {
        Ok(python) => python,
        Err(why) => return skipped(test, &why),
    };
    let scratch = Scratch::new();
    let site = scratch.path("site");
    lay(&site);
    let mut command = Command::new(python);
    command.arg(root().join("loader/python/tests").join(test)).current_dir(scratch.path("site"));
    command.env("PYTHONPATH", &site).env("PYTHONDONTWRITEBYTECODE", "1");
    let ran = command.env("ZDATA", env!("CARGO_BIN_EXE_zdata")).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains("\nOK"), "{said}");
}

#[test]
fn the_python_package_reads_what_the_rust_loader_reads() {
    passes("test_zdata.py", provision("package.txt"));
}

#[test]
fn torch_gets_every_batch_once_and_in_order() {
    passes("test_torch.py", provision_and("torch.txt", Some("torch_alone.py")));
}

/// Reads a step, and the next one in a forked child and itself.
const FORKED: &str = "
import os, sys, zdata
loader = zdata.Loader(sys.argv[1])
print(loader.batch(1).digest, flush=True)
child = os.fork()
print(loader.batch(2).digest, flush=True)
if child == 0:
    os._exit(0)
os._exit(os.waitpid(child, 0)[1])
";

/// The threads that serve requests are not in the child.
#[test]
fn a_forked_child_reads_a_bucket() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "served/store");
    let local = curriculum(&scratch, &store, "local.toml", &[]);
    let served = curriculum(&scratch, Path::new("s3://bucket/store"), "run.toml", &[]);
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    let site = scratch.path("site");
    lay(&site);
    let mut python = Command::new("python3");
    python.args(["-c", FORKED, arg(&served)]).env("PYTHONPATH", &site);
    let found = Ran::from(bucket.reached_by(python).output().unwrap()).ok();
    let wanted = zdata(&["digest", arg(&local), "--steps", "1..3"]).ok();
    let wanted: Vec<&str> =
        wanted.lines().filter_map(|line| line.split_once(' ')).map(|it| it.1).collect();
    assert_eq!(found.lines().collect::<Vec<_>>(), [wanted[0], wanted[1], wanted[1]]);
}
