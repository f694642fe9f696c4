//! Fear: that preparing data needs libtorch.

use std::path::Path;
use std::process::Command;

/// `zdata` is for machines without libtorch: its sources name no crate that needs it, and a build without the feature
/// `train` depends on none.
#[test]
fn zdata_builds_without_libtorch() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tree = "tree --package zstack --no-default-features --edges normal,build --prefix none";
    let output = Command::new(env!("CARGO"))
        .args(tree.split(' '))
        .args(["--locked", "--offline"])
        .current_dir(root)
        .output()
        .unwrap();
    let tree = String::from_utf8(output.stdout).unwrap();
    assert!(tree.contains("ingest v"), "{tree}{}", String::from_utf8_lossy(&output.stderr));
    let foreign = ["trainer", "kernels", "tch", "torch-sys"];
    for package in foreign {
        assert!(!tree.lines().any(|line| line.starts_with(&format!("{package} v"))), "{tree}");
    }
    let mut folders = vec![root.join("ingest/zdata")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = std::fs::read_to_string(&path).unwrap();
            let is_of_a_name = |letter: char| letter.is_alphanumeric() || letter == '_';
            for package in foreign.map(|package| package.replace('-', "_") + "::") {
                let mut named = source.match_indices(&package);
                let is_named = named.any(|(at, _)| !source[..at].ends_with(is_of_a_name));
                assert!(!is_named, "{} names {package}", path.display());
            }
        }
    }
}

#[test]
fn zdata_links_no_libtorch() {
    let libraries = needed(env!("CARGO_BIN_EXE_zdata"));
    assert!(libraries.contains("libc.so"), "{libraries}");
    for foreign in ["torch", "c10", "gomp", "cuda", "hip", "libstdc++"] {
        assert!(!libraries.contains(foreign), "zdata needs {foreign}:\n{libraries}");
    }
}

#[cfg(feature = "train")]
#[test]
fn ztrain_links_the_cpu_half_only() {
    let libraries = needed(env!("CARGO_BIN_EXE_ztrain"));
    assert!(libraries.contains("libtorch_cpu.so"), "{libraries}");
    for foreign in ["torch_cuda", "torch_hip", "amdhip", "nccl", "rccl"] {
        assert!(!libraries.contains(foreign), "ztrain needs {foreign}:\n{libraries}");
    }
}

fn needed(program: &str) -> String {
    let output = Command::new("readelf")
        .args(["-d", program])
        .output()
        .expect("readelf comes with any C++ compiler");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter(|line| line.contains("(NEEDED)")).collect::<Vec<_>>().join("\n")
}
