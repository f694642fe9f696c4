//! Every format on slow, interrupted or broken disks.

use std::io;

use store::pieces::Pieces;

use super::*;
use crate::disk::faulty::{ERRORS, Faulty, SOUND};

/// Every kind of file with the fields to read from it: intact ones, plain ones, and Parquet and Arrow as whole records.
fn files() -> Vec<(Scratch, Fields)> {
    let fields = |text: &str| Fields::at(text, None);
    let sound = sound_files();
    let (_, parquet) = sound.iter().find(|(name, _)| name.ends_with("parquet")).unwrap();
    let whole = || Fields::record(["text", "n"], None);
    let (_, arrow) = sound.iter().find(|(name, _)| name.ends_with("arrow")).unwrap();
    let records = [(write("r.parquet", parquet), whole()), (write("r.arrow", arrow), whole())];
    let plain = json_lines(&[Row { text: Some("plain".repeat(40)), id: None }], "\r\n").repeat(5);
    let plain = [("p.jsonl", &plain), ("p.md", &plain)];
    let plain = plain.map(|(name, text)| (write(name, text.as_bytes()), fields("text")));
    let sound = sound.iter().map(|(name, bytes)| (write(name, bytes), fields("text")));
    sound.chain(plain).chain(records).collect()
}

#[test]
fn short_reads_and_interruptions_change_nothing() {
    for (file, fields) in files() {
        let wanted = outcomes(read_on(&SOUND, &file, &fields, &limits(300)).unwrap());
        assert!(!wanted.is_empty() && wanted.iter().all(|(.., outcome)| outcome.is_ok()));
        for (most, interrupted) in [(1, false), (usize::MAX, true), (1, true), (7, true)] {
            let disk = Faulty { most, interrupted, ..SOUND };
            let found = read_on(&disk, &file, &fields, &limits(300)).unwrap();
            assert_eq!(outcomes(found), wanted, "{} by {most}", file.path.display());
        }
    }
}

#[test]
fn an_error_at_any_byte_is_the_machines_and_names_the_file() {
    for (file, fields) in files() {
        let length = std::fs::metadata(&file.path).unwrap().len();
        let wanted = outcomes(read_on(&SOUND, &file, &fields, &limits(300)).unwrap());
        let near = |at: u64| at < 120 || at + 120 > length || at.is_multiple_of(13);
        let mut failed = 0;
        for at in (0..=length).filter(|&at| near(at)) {
            let error = ERRORS[(at % 3) as usize];
            let judge = |disk: Faulty| match read_on(&disk, &file, &fields, &limits(300)) {
                Ok(parsed) => Ok(outcomes(parsed)),
                Err(fault) => {
                    let place = file.path.display().to_string();
                    assert_eq!(fault.class(), Class::Machine, "byte {at} of {place}: {fault}");
                    assert!(fault.to_string().starts_with(&place), "{fault}");
                    Err(())
                }
            };
            // Every reader reads its file to the end, if only for the identity of the bytes.
            assert_eq!(judge(Faulty { stream_ends: at, error, ..SOUND }), Err(()), "byte {at}");
            match judge(Faulty { pieces_end: at, error, ..SOUND }) {
                Ok(found) => assert_eq!(found, wanted, "byte {at}"),
                Err(()) => failed += 1,
            }
        }
        let format = Format::guess(&file.path).unwrap();
        assert_eq!(failed > 0, !format.is_stream(), "{}", file.path.display());
    }
}

#[test]
fn a_file_that_cannot_be_opened_says_why() {
    struct Closed;
    impl Disk for Closed {
        fn stream(&self, _: &Path, _: u64) -> io::Result<Box<dyn io::Read + Send>> {
            Err(io::Error::from_raw_os_error(24))
        }

        fn pieces(&self, _: &Path) -> io::Result<Pieces> {
            Err(io::Error::from_raw_os_error(24))
        }
    }
    for (file, fields) in files() {
        let fault = read_on(&Closed, &file, &fields, &limits(300)).unwrap_err();
        assert_eq!(fault.class(), Class::Machine);
        let message = fault.to_string();
        assert!(message.starts_with(file.path.to_str().unwrap()) && message.contains("ulimit -n"));
    }
}
