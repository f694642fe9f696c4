//! The kernels on a GPU, where one is at hand: `tests/device.sh` runs this there, and on a stand-in for one. Everywhere else the
//! same is done through a driver's interface over the emulator.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;

use sha2::{Digest as _, Sha256};
use tch::Device;

use super::tape::Tape;
use super::{large, small};
use crate::device::open;
use crate::device::queue::Queue;

/// A folder in which digests of what the emulator leaves are kept, for a machine without a C++ compiler.
const KEPT: &str = "ZTRAIN_EMULATED";

/// Bytes that are told apart: what is kept is small, and still says how much differs.
const BLOCK: usize = 256;

/// A digest of each block of bytes, 8 bytes of SHA-256.
fn digests(bytes: &[u8]) -> Vec<u8> {
    bytes.chunks(BLOCK).flat_map(|block| Sha256::digest(block).into_iter().take(8)).collect()
}

/// Digests of what the emulator leaves of a tape: read where they are kept, else played, and kept where that is asked for.
fn emulated(name: &str, tape: &Tape, kept: Option<&PathBuf>) -> Vec<u8> {
    let file = kept.map(|folder| folder.join(name));
    if let Some(bytes) = file.as_ref().and_then(|file| std::fs::read(file).ok()) {
        return bytes;
    }
    let bytes = digests(&tape.play().comparable(tape));
    if let Some(file) = file {
        std::fs::write(file, &bytes).unwrap();
    }
    bytes
}

/// Plays all of them on a GPU, or on the emulator through a driver's interface, and compares.
fn compare(which: &str, tapes: &[Tape]) {
    let kept = std::env::var_os(KEPT).map(PathBuf::from);
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
        let found = digests(&tape.play_on(device, &queue).comparable(tape));
        let wanted = emulated(&format!("{which}-{number}"), tape, kept.as_ref());
        assert_eq!(found.len(), wanted.len(), "{}", tape.name);
        let pairs = found.chunks(8).zip(wanted.chunks(8));
        let other = pairs.filter(|(found, wanted)| found != wanted).count();
        if other > 0 {
            let all = found.len() / 8;
            differ.push(format!("{}: {other} of {all} blocks of {BLOCK} bytes", tape.name));
        }
        kernels.extend(tape.kernels());
    }
    let same = tapes.len() - differ.len();
    let (all, count) = (tapes.len(), kernels.len());
    let by = queue.compiler();
    println!(
        "{same} of {all} {which} tapes of {count} kernels leave the emulator's bits on {device:?}, by {by}"
    );
    assert!(differ.is_empty(), "other bits than on the emulator:\n{}", differ.join("\n"));
}

#[test]
fn a_gpu_leaves_the_bits_of_the_emulator() {
    compare("small", &small());
}

/// Blocks that run side by side, tiles that are begun and not filled, documents in one launch.
#[test]
fn a_gpu_leaves_them_over_many_blocks_too() {
    compare("large", &large());
}

#[test]
fn a_bit_is_found_in_its_block() {
    let mut bytes: Vec<u8> = (0..1000u32).map(|at| (at % 251) as u8).collect();
    let before = digests(&bytes);
    bytes[700] ^= 1;
    let after = digests(&bytes);
    let differ: Vec<_> =
        (0..4).filter(|at| before[8 * at..][..8] != after[8 * at..][..8]).collect();
    assert_eq!((before.len(), differ), (32, vec![2]));
}
