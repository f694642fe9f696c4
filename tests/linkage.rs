//! Fear: that preparing data needs libtorch.

use std::process::Command;

/// `zdata` is for machines that have no libtorch. That it builds without is checked by `.ci/run`; that the program
/// asks the loader for none, here.
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
