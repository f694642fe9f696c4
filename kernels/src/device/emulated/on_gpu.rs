//! The kernels on a GPU, where one is at hand: `tests/device.sh` runs this there, and on a stand-in for one. Everywhere else the
//! same is done through a driver's interface over the emulator.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;

use tch::Device;

use super::small;
use super::tape::Tape;
use crate::device::open;
use crate::device::queue::Queue;

/// A folder in which what the emulator leaves is kept, for a machine without a C++ compiler.
const KEPT: &str = "ZTRAIN_EMULATED";

/// What the emulator leaves of a tape: read where it is kept, else played, and kept where that is asked for.
fn emulated(number: usize, tape: &Tape, kept: Option<&PathBuf>) -> Vec<u8> {
    let file = kept.map(|folder| folder.join(format!("{number}.bytes")));
    if let Some(bytes) = file.as_ref().and_then(|file| std::fs::read(file).ok()) {
        return bytes;
    }
    let bytes = tape.play().comparable(tape);
    if let Some(file) = file {
        std::fs::write(file, &bytes).unwrap();
    }
    bytes
}

#[test]
fn a_gpu_leaves_the_bits_of_the_emulator() {
    let kept = std::env::var_os(KEPT).map(PathBuf::from);
    let tapes = small();
    let (device, queue) = match open("cuda") {
        Ok(device) => (device, Queue::of(device).unwrap()),
        Err(why) => {
            // Past the test runner's capture: a skipped GPU test says so in every log.
            writeln!(std::io::stderr(), "1 GPU test skipped: {why}").unwrap();
            // Its way is tried on the emulator, through a driver's interface.
            (Device::Cpu, super::queue(Device::Cpu).unwrap())
        }
    };
    let (mut kernels, mut differ) = (BTreeSet::new(), Vec::new());
    for (number, tape) in tapes.iter().enumerate() {
        let found = tape.play_on(device, &queue).comparable(tape);
        let wanted = emulated(number, tape, kept.as_ref());
        assert_eq!(found.len(), wanted.len(), "{}", tape.name);
        let other = found.iter().zip(&wanted).filter(|(found, wanted)| found != wanted).count();
        if other > 0 {
            differ.push(format!("{}: {other} of {} bytes", tape.name, found.len()));
        }
        kernels.extend(tape.kernels());
    }
    let same = tapes.len() - differ.len();
    let (all, count) = (tapes.len(), kernels.len());
    let by = queue.compiler();
    println!(
        "{same} of {all} tapes of {count} kernels leave the emulator's bits on {device:?}, by {by}"
    );
    assert!(differ.is_empty(), "other bits than on the emulator:\n{}", differ.join("\n"));
}
