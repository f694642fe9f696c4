//! Runs the kernels on a GPU, if available: `tests/device.sh` does this on GPUs and on a stand-in. Elsewhere the test
//! uses the emulator through a driver's interface.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;

use sha2::{Digest as _, Sha256};
use tch::Device;

use super::tape::Tape;
use super::{large, small};
use crate::device::open;
use crate::device::queue::Queue;

/// A folder with stored digests of the emulator's results, for a machine without a C++ compiler.
const KEPT: &str = "ZTRAIN_EMULATED";

/// Bytes per digest: small enough to show how much differs, large enough to keep the files small.
const BLOCK: usize = 256;

/// A digest of each block of bytes, 8 bytes of SHA-256.
fn digests(bytes: &[u8]) -> Vec<u8> {
    bytes.chunks(BLOCK).flat_map(|block| Sha256::digest(block).into_iter().take(8)).collect()
}

/// Digests of a tape's result, followed by the sums of matrix units.
fn summary([exact, near]: [Vec<u8>; 2]) -> Vec<u8> {
    [digests(&exact), near].concat()
}

/// That of the emulator's result: read if stored; otherwise computed, and stored if `kept` is set.
fn emulated(name: &str, tape: &Tape, kept: Option<&PathBuf>) -> Vec<u8> {
    let file = kept.map(|folder| folder.join(name));
    if let Some(bytes) = file.as_ref().and_then(|file| std::fs::read(file).ok()) {
        return bytes;
    }
    let bytes = summary(tape.play().comparable(tape));
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
            // Written past the test runner's capture, so that every log reports the skipped GPU test.
            writeln!(std::io::stderr(), "1 GPU test skipped: {why}").unwrap();
            // The code path is still tested on the emulator, through a driver's interface.
            (Device::Cpu, super::queue(Device::Cpu).unwrap())
        }
    };
    let (mut kernels, mut differ) = (BTreeSet::new(), Vec::new());
    for (number, tape) in tapes.iter().enumerate() {
        let [exact, near] = tape.play_on(device, &queue).comparable(tape);
        let wanted = emulated(&format!("{which}-{number}"), tape, kept.as_ref());
        let (wanted, wanted_near) = wanted.split_at(wanted.len().saturating_sub(near.len()));
        let found = digests(&exact);
        assert_eq!(found.len(), wanted.len(), "{}", tape.name);
        let pairs = found.chunks(8).zip(wanted.chunks(8));
        let other = pairs.filter(|(found, wanted)| found != wanted).count();
        if other > 0 {
            let all = found.len() / 8;
            differ.push(format!("{}: {other} of {all} blocks of {BLOCK} bytes", tape.name));
        }
        let far = tape.far(&near, wanted_near);
        if far > 0 {
            differ.push(format!("{}: {far} sums of matrix units are far", tape.name));
        }
        kernels.extend(tape.kernels());
    }
    let same = tapes.len() - differ.len();
    let (all, count) = (tapes.len(), kernels.len());
    let by = queue.compiler();
    println!(
        "{same} of {all} {which} tapes of {count} kernels leave the emulator's bits on {device:?}, matrix units near \
         sums, by {by}"
    );
    assert!(differ.is_empty(), "other bits than on the emulator:\n{}", differ.join("\n"));
}

#[test]
fn a_gpu_leaves_the_bits_of_the_emulator() {
    compare("small", &small());
}

/// Blocks that run in parallel, partially filled tiles, several documents in one launch.
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

/// Of the sums of matrix units a rounding may differ, and no more.
#[test]
fn a_sum_that_is_too_far_is_found() {
    let mut tape = Tape::new("near");
    let sums = tape.room::<u16>(3);
    tape.by_matrix_units(sums, 16, 1.0);
    let bytes = |bits: [u16; 3]| bits.map(u16::to_le_bytes).concat();
    // 1, a small number, and what no launch writes.
    let wanted = bytes([0x3F80, 0x3800, 0xFFFF]);
    for (other, far) in [
        ([0x3F80, 0x3800, 0xFFFF], 0),
        ([0x3F81, 0x3810, 0xFFFF], 0),
        ([0x3F82, 0x3800, 0xFFFF], 1),
        ([0xBF80, 0x3C00, 0xFFFF], 2),
        ([0x3F80, 0x3800, 0x0000], 1),
        ([0x7FC0, 0x3800, 0xFFFF], 1),
    ] {
        assert_eq!(tape.far(&bytes(other), &wanted), far, "{other:x?}");
    }
}
