//! Fear: that the Python package reads other batches than the Rust loader, or loses or repeats some among workers,
//! processes and restarts.
//!
//! The tests are `loader/python/tests`, run on the package as the tree has it: the Python files next to the library of
//! this very build. `sh tests/full.sh package` runs them on an installed wheel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::python::{provision, provision_and, skipped};
use crate::support::Scratch;
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
