//! Recognizes, by their first bytes, files of another kind than their name or `format` says: a decoder would only
//! report damage, or drop each of their lines.

use std::io::Read;
use std::path::Path;

use contract::{Class, Fault};

use crate::disk::Disk;

/// Bytes needed to recognize a kind.
pub(super) const HEAD: usize = 10;

/// The hint for a file with an unsupported compression.
const AGAIN: &str = "decompress it, or compress it with gzip or zstd instead";

/// The first bytes of a kind of file, its name, and the hint.
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

/// The bytes after bzip2's magic and level digit.
const BZIP2: &[u8] = b"1AY&SY";

/// The fault for a file that begins with `head` and was to be read as something else; none if no kind matches.
pub(super) fn misnamed(path: &Path, head: &[u8]) -> Option<Fault> {
    let head = &head[..head.len().min(HEAD)];
    // Text may begin with the letters of a magic, but not be followed by control characters.
    let controls = head.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace());
    let (mark, is, next) = KINDS.iter().find(|(mark, ..)| head.starts_with(mark))?;
    if mark.is_ascii() && !controls && head.get(4..HEAD) != Some(BZIP2) {
        return None;
    }
    Some(Fault::data(format!("this file {is}")).at(path.display().to_string()).hint(*next))
}

/// The fault for a file that its decoder refuses: that of its real kind, if it is another one than expected.
pub(super) fn instead(disk: &dyn Disk, path: &Path, fault: Fault) -> Fault {
    let mut head = Vec::new();
    let read = || disk.stream(path, 0)?.take(HEAD as u64).read_to_end(&mut head);
    match fault.class() == Class::Data && { read }().is_ok() {
        true => misnamed(path, &head).filter(|_| !head.starts_with(b"PAR1")).unwrap_or(fault),
        false => fault,
    }
}

/// The unsupported compression or archive format of a file with this name, if it has one.
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
