//! Files that are of another kind than their name or `format` says, known by their first bytes: a decoder would only say that
//! they are damaged, or drop each of their lines.

use std::io::Read;
use std::path::Path;

use contract::{Class, Fault};

use crate::disk::Disk;

/// Bytes that tell a kind.
pub(super) const HEAD: usize = 10;

/// What to do with a file that is compressed in a way that nothing here reads.
const AGAIN: &str = "decompress it, or compress it with gzip or zstd instead";

/// What files begin with, what such a file is, and the next step.
const KINDS: [(&[u8], &str, &str); 10] = [
    (b"\x1f\x8b", "is compressed by gzip", "end its name in .gz"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd", "end its name in .zst"),
    (b"BZh", "is compressed by bzip2, which is not read", AGAIN),
    (b"\xfd7zXZ\0", "is compressed by xz, which is not read", AGAIN),
    (b"\x04\"M\x18", "is compressed by lz4, which is not read", AGAIN),
    (b"PK\x03\x04", "is a zip archive, which is not read", "unpack it, and name what was in it"),
    (b"PAR1", "is a Parquet file", "end its name in .parquet, or say format = \"parquet\""),
    (
        b"PARE",
        "is an encrypted Parquet file, and no key can be given here",
        "write it again without encryption",
    ),
    (b"ARROW1", "is an Arrow file", "end its name in .arrow, or say format = \"arrow\""),
    (
        b"FEA1",
        "is of Feather version 1, which is not read",
        "write it again as version 2: pyarrow.feather.write_feather(pyarrow.feather.read_table(OLD), NEW)",
    ),
];

/// What follows the mark of bzip2 and the digit of its level.
const BZIP2: &[u8] = b"1AY&SY";

/// The fault of a file that begins with `head` and was to be read as something else; none if no kind begins so.
pub(super) fn misnamed(path: &Path, head: &[u8]) -> Option<Fault> {
    let head = &head[..head.len().min(HEAD)];
    // A text may begin with the letters of a mark, and not with control characters behind them.
    let controls = head.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace());
    let (mark, is, next) = KINDS.iter().find(|(mark, ..)| head.starts_with(mark))?;
    if mark.is_ascii() && !controls && head.get(4..HEAD) != Some(BZIP2) {
        return None;
    }
    Some(Fault::data(format!("this file {is}")).at(path.display().to_string()).hint(*next))
}

/// The fault of a file that no decoder takes: that of its kind, where it is of another one than was asked for.
pub(super) fn instead(disk: &dyn Disk, path: &Path, fault: Fault) -> Fault {
    let mut head = Vec::new();
    let read = || disk.stream(path)?.take(HEAD as u64).read_to_end(&mut head);
    match fault.class() == Class::Data && { read }().is_ok() {
        true => misnamed(path, &head).filter(|_| !head.starts_with(b"PAR1")).unwrap_or(fault),
        false => fault,
    }
}

/// What a file whose name ends so is compressed by or packed into, if nothing here reads that.
pub(crate) fn unread(name: &str) -> Option<&'static str> {
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(name);
    let (_, ending) = name.rsplit_once('.')?;
    let known = [
        ("bz2", "bzip2"),
        ("xz", "xz"),
        ("lzma", "lzma"),
        ("lz4", "lz4"),
        ("br", "brotli"),
        ("zip", "zip"),
        ("7z", "7-Zip"),
        ("tar", "tar"),
        ("tgz", "tar"),
    ];
    known.into_iter().find(|(known, _)| ending.eq_ignore_ascii_case(known)).map(|(_, kind)| kind)
}
