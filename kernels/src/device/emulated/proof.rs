//! Checks of all kernels: no races, no out-of-bounds accesses, equal bits from every compiler. Planted faults must be
//! found.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::build::{Build, played, sources, texts};
use super::products::SHUFFLED;
use super::tape::{Argument, Tape};
use super::{large, small};
use crate::device::library::NVIDIA;

const THREADS: Build = Build { compiler: None, flags: &["-O1", "-g1", "-fsanitize=thread"] };
const ADDRESSES: Build = Build {
    compiler: None,
    flags: &[
        "-O1",
        "-g1",
        "-fsanitize=address,alignment,shift,signed-integer-overflow",
        "-fno-sanitize-recover=all",
    ],
};
/// The names of all kernels, from the sources.
fn kernels() -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for (_, text) in texts() {
        let heads = text.split("\nKERNEL(").skip(1);
        named.extend(heads.map(|head| head.split(',').next().unwrap().to_owned()));
    }
    named
}

#[test]
fn every_kernel_is_played() {
    for tapes in [small(), large()] {
        let launched: BTreeSet<String> =
            tapes.iter().flat_map(|tape| tape.kernels().map(str::to_owned)).collect();
        assert_eq!(kernels(), launched);
    }
}

/// Checks registers, shared memory and spills in the compilers' reports, that nothing may be reordered, and the table
/// of `docs/resources.md`.
#[test]
fn kernels_keep_to_their_limits() {
    let page = include_str!("../../../docs/resources.md");
    for kernel in kernels() {
        assert!(page.contains(&format!("| `{kernel}` |")), "run resources.py --write: no {kernel}");
    }
    let script = sources().join("resources.py");
    let text = std::fs::read_to_string(&script).unwrap();
    for option in NVIDIA.options {
        assert!(text.contains(&format!("b\"{option}\"")), "it compiles without {option}");
    }
    let Ok(ran) = Command::new("python3").arg("-B").arg(script).output() else {
        eprintln!("SKIPPED: no python3");
        return;
    };
    let told = String::from_utf8_lossy(&ran.stderr);
    told.lines().filter(|line| line.starts_with("SKIPPED")).for_each(|line| eprintln!("{line}"));
    assert!(matches!(ran.status.code(), Some(0 | 77)), "{told}");
}

/// The bf16 and f32 variants of a kernel share a template and synchronize at the same points, unless one uses matrix
/// units. Threads are slow under a sanitizer, so only one variant of a template runs.
#[test]
fn no_thread_races_with_another() {
    let tapes = small();
    let own = |tape: &&Tape| !tape.name.ends_with("bf16") || tape.has_matrix_units();
    let wide: Vec<&Tape> = tapes.iter().filter(own).collect();
    assert!(wide.len() < tapes.len());
    let (told, left) = played(&THREADS, "one", &wide);
    assert!(left.is_some() && !told.contains("WARNING: ThreadSanitizer"), "{told}");
}

#[test]
fn no_thread_leaves_its_memory() {
    let tapes = small();
    let (told, left) = played(&ADDRESSES, "all", &tapes.iter().collect::<Vec<_>>());
    assert!(left.is_some(), "{told}");
}

/// Compares the digests of the tapes to the committed ones, so that no bit changes unnoticed between versions. For an
/// intended change, raise the version in the name of the table of operations and write the digests again with
/// `UPDATE_GOLDEN=1 cargo test -p kernels every_compiler`.
fn golden(found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/kernels.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let frozen = std::fs::read_to_string(&path).unwrap();
    let (frozen, found): (Vec<_>, Vec<_>) = (frozen.lines().collect(), found.lines().collect());
    let moved: Vec<_> = found.iter().filter(|line| !frozen.contains(line)).collect();
    assert!(moved.is_empty(), "bits of kernels moved: {moved:?}");
    assert_eq!(found.len(), frozen.len(), "tests/golden/kernels.txt has other tapes");
}

#[test]
fn every_compiler_makes_the_same_bits() {
    let tapes = small();
    let tapes: Vec<&Tape> = tapes.iter().collect();
    let (wanted, left) = played(&Build::PLAIN, "one", &tapes);
    assert!(left.is_some(), "{wanted}");
    golden(&wanted);
    let mut builds = vec![
        Build { compiler: None, flags: &["-O0"] },
        Build { compiler: None, flags: &["-O3", "-march=native"] },
        SHUFFLED,
    ];
    match ["clang++-19", "clang++"].into_iter().find(|name| there(name)) {
        Some(clang) => {
            builds.push(Build { compiler: Some(clang), flags: &["-O3", "-march=native"] })
        }
        None => eprintln!("SKIPPED (1 of 4 builds): no clang++"),
    }
    for build in builds {
        assert_eq!(played(&build, "one", &tapes).0, wanted, "{build:?}");
    }
}

fn there(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success())
}

/// A tape with a planted fault: 600 numbers in, 600 out, over three blocks.
pub(super) fn plant(kernel: &str) -> Tape {
    let mut tape = Tape::new(kernel);
    let (x, out) = (tape.with(&super::numbers(600, 3)), tape.room::<f32>(600));
    tape.launch(kernel, 3, &[x.into(), out.into(), Argument::from(600)]);
    tape
}

#[test]
fn planted_races_are_found() {
    let (told, left) = played(&THREADS, "one", &[&plant("faultless")]);
    assert!(left.is_some(), "{told}");
    for kernel in ["no_barrier", "one_barrier", "two_blocks", "shuffle_as_barrier"] {
        let (told, left) = played(&THREADS, "one", &[&plant(kernel)]);
        assert!(
            left.is_none() && told.contains("WARNING: ThreadSanitizer: data race"),
            "{kernel}: {told}"
        );
    }
}

#[test]
fn planted_faults_in_memory_are_found() {
    let (told, left) = played(&ADDRESSES, "all", &[&plant("faultless")]);
    assert!(left.is_some(), "{told}");
    for kernel in ["beyond_the_end", "beyond_what_is_shared", "before_the_start"] {
        let (told, left) = played(&ADDRESSES, "one", &[&plant(kernel)]);
        assert!(left.is_none() && told.contains("AddressSanitizer"), "{kernel}: {told}");
    }
}

#[test]
fn planted_faults_of_order_are_found() {
    for (kernel, says) in [
        ("parted", "threads part at a barrier"),
        ("early_end", "threads part at a barrier"),
        ("half_a_wave", "a shuffle without all lanes of the wave"),
        ("unwritten", "other bits with waves of"),
        ("order_of_threads", "other bits with waves of"),
        ("order_of_blocks", "other bits with waves of"),
        ("too_much", "more shared memory"),
    ] {
        let (told, left) = played(&Build::PLAIN, "all", &[&plant(kernel)]);
        assert!(left.is_none() && told.contains(says), "{kernel}: {told}");
    }
}
