//! Every importer on slow, interrupted or broken disks.

use super::*;
use crate::disk::faulty::{Badly, ERRORS, Faulty, SOUND};

/// Reads files with an importer, one of them from a faulty disk.
fn read_on(peer: Peer, opened: &Path, file: &Path, disk: Faulty) -> Result<Vec<Doc>> {
    read_through(&Badly { file, disk }, peer, opened, &hints())
}

#[test]
fn short_reads_and_interruptions_change_nothing() {
    let bench = Bench::new();
    for peer in Peer::ALL {
        let (files, opened) = sample(&bench, peer);
        let wanted = read(peer, &opened).unwrap();
        assert!(!wanted.is_empty());
        for (file, _) in &files {
            for (most, interrupted) in [(1, false), (usize::MAX, true), (1, true), (7, true)] {
                let disk = Faulty { most, interrupted, ..SOUND };
                let found = read_on(peer, &opened, file, disk).unwrap();
                assert_eq!(found, wanted, "{} by {most}", file.display());
            }
        }
    }
}

#[test]
fn an_error_at_any_byte_is_the_machines_and_names_the_file() {
    let bench = Bench::new();
    for (peer, wanted_files) in Peer::ALL.into_iter().zip([2, 3, 2, 2]) {
        let (files, opened) = sample(&bench, peer);
        let wanted = read(peer, &opened).unwrap();
        let (mut failing, mut in_pieces) = (0, 0);
        for (file, bytes) in &files {
            let length = bytes.len() as u64;
            let judge = |at: u64, disk: Faulty| match read_on(peer, &opened, file, disk) {
                Ok(found) => {
                    assert_eq!(found, wanted, "byte {at} of {}", file.display());
                    false
                }
                Err(fault) => {
                    let place = file.display().to_string();
                    assert_eq!(fault.class(), Class::Machine, "byte {at}: {fault}");
                    assert!(fault.to_string().starts_with(&place), "{fault}");
                    true
                }
            };
            let (mut failed, mut pieces) = (0, 0);
            for at in 0..=length {
                let error = ERRORS[(at % 3) as usize];
                failed += u64::from(judge(at, Faulty { stream_ends: at, error, ..SOUND }));
                pieces += u64::from(judge(at, Faulty { pieces_end: at, error, ..SOUND }));
            }
            // A file of this data set is read to its last byte, some also beyond, to find the end; other files are not
            // read.
            assert!([0, length, length + 1].contains(&failed), "{}: {failed}", file.display());
            failing += u64::from(failed > 0);
            in_pieces += pieces;
        }
        assert_eq!(failing, wanted_files, "{}", peer.name());
        assert_eq!(in_pieces > 0, peer == Peer::Megatron, "{}", peer.name());
    }
}

/// Without its metadata, the width of a `.ds` is computed from its index: one more read that may fail.
#[test]
fn a_width_that_is_measured_is_read_with_care_too() {
    let bench = Bench::new();
    let ds = bench.datatrove("a.ds", &golden_docs());
    let index = bench.path("a.ds.index");
    for at in 0..16 {
        let fault =
            read_on(Peer::Datatrove, &ds, &index, Faulty { pieces_end: at, ..SOUND }).unwrap_err();
        assert_eq!(fault.class(), Class::Machine, "{fault}");
        assert!(fault.to_string().starts_with(&index.display().to_string()), "{fault}");
    }
}
