//! Fear: that guarantees tested with NVIDIA's library names fail with AMD's, where models will be trained.
//!
//! Runs on the stand-in GPU as `libtorch_hip.so`, with the emulator as `libamdhip64.so` and `libhiprtc.so`
//! (`pretended.rs`).

use std::process::Stdio;

use serde_json::Value;

use crate::pretended::{OnDevice, Vendor, by_name, contexts, total};
use crate::ranks::{Fixture, until_lines};
use crate::support::{Ran, arg, ztrain_command};

const BF16: [(&str, &str); 1] = [("dtype = \"f32\"", "dtype = \"bf16\"")];

fn over(change: &[(&str, &str)]) -> OnDevice {
    OnDevice::by_ours_on_amd(Fixture { every: "1", ..Fixture::new(change) })
}

/// Replays a step of a run.
fn replayed(on: &OnDevice, out: &str, step: &str) {
    let run = on.fixture.scratch.path(out);
    let args = ["replay", "--run", arg(&run), "--step", step, "--device", "cuda"];
    let mut command = ztrain_command(&args);
    Vendor::Amd.pretend(&mut command, &on.report("replayed"));
    let said = Ran::from(command.output().unwrap()).ok();
    assert!(said.contains("same bits"), "{said}");
    assert_eq!(total(&on.report("replayed"), "races"), 0);
}

/// Two ranks on two devices write the same ledger as one.
fn ranks(on: &OnDevice, transport: &str, last: &str) {
    let two = ["--nproc", "2", "--workers", "1", "--transport", transport, "--stop-after", last];
    let mut command = on.command(transport, &two);
    command.env("ZTRAIN_RCCL", crate::transport::standin());
    Ran::from(command.output().unwrap()).ok();
    assert_eq!(total(&on.report(transport), "races"), 0);
    assert_eq!(contexts(&on.report(transport)), [1, 2], "each rank on its own device");
    assert!(on.ledger("plain") == on.ledger(transport), "the ledgers differ");
}

#[test]
fn a_run_goes_the_way_of_amds_libraries() {
    let on = over(&[]);
    on.finish("plain", &["--workers", "1", "--stop-after", "2"]);
    let head: Value = serde_json::from_str(on.ledger("plain").lines().next().unwrap()).unwrap();
    let table = &head["kernel_table"];
    assert_eq!([&table["device"], &table["architecture"]], ["cuda", ""]);
    assert_eq!(table["compiler"], "hiprtc 13.0");
    let gpu = table["gpu"].as_object().unwrap();
    for name in ["compute units", "driver", "runtime", "rocBLAS", "hipBLASLt", "MIOpen"] {
        assert!(gpu.contains_key(name), "{name}: {table}");
    }
    assert_eq!(table["environment"]["ROCBLAS_DEFAULT_ATOMICS_MODE"], "0");

    let mut command = on.command("killed", &["--workers", "2", "--recompute"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until_lines(&on.fixture.scratch.path("killed"), 2, &mut child);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it was killed before its end");
    on.finish("killed", &["--workers", "1", "--stop-after", "2"]);
    assert!(on.ledger("plain") == on.ledger("killed"), "the ledgers differ");
    replayed(&on, "plain", "2");
    ranks(&on, "gloo", "2");
}

/// In bf16 our own kernels multiply experts on AMD: libtorch's grouped matmul reads each expert's row counts on the
/// host.
#[test]
fn in_bf16_the_host_is_asked_for_no_rows_of_experts() {
    let on = over(&BF16);
    on.finish("plain", &["--workers", "1", "--stop-after", "2"]);
    let names = by_name(&on.report("plain"));
    assert!(names["grouped_bf16"] > 0.0 && !names.contains_key("aten::_grouped_mm"), "{names:?}");
    let apart = ["permute_bf16", "swiglu_bf16", "swiglu_backward_bf16"];
    assert!(!apart.iter().any(|name| names.contains_key(*name)), "{names:?}");
    let reads = |out: &str| total(&on.report(out), "host_reads");
    let own = reads("plain");
    replayed(&on, "plain", "1");
    ranks(&on, "rccl", "2");

    let mut command = on.command("library", &["--workers", "1", "--stop-after", "1"]);
    Ran::from(command.env("ZTRAIN_GROUPED", "library").output().unwrap()).ok();
    // Two layers and four micro-batches, with six expert matmuls each.
    assert!(reads("library") >= own / 2 + 48, "{own} reads in 2 steps, {}", reads("library"));
    assert!(!by_name(&on.report("library")).contains_key("grouped_bf16"));
}
