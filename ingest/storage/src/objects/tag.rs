//! The tags that S3 gives objects: most are the MD5 of the bytes, or of the MD5s of the parts of the upload.
//!
//! A tag that is not an MD5 (with server-side keys, or on other servers) looks the same. So a matching tag proves that
//! the bytes are those of the object, and another one proves nothing.

use std::io::{Read, Result};

use md5::{Digest as _, Md5};
use store::regular::each_piece;

/// Larger files are uploaded in parts of this size, others in one conditional request.
pub(super) const PART_BYTES: u64 = 16 << 20;

/// The MD5 of all bytes that a tag may be.
pub(super) fn md5_of(tag: &str) -> Option<&str> {
    let digits = tag.trim_matches('"');
    let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    (digits.len() == 32 && digits.chars().all(is_digit)).then_some(digits)
}

/// The MD5 of bytes that arrive in pieces.
#[derive(Default)]
pub(super) struct Md5Sum(Md5);

impl Md5Sum {
    /// Adds the next bytes.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The sum as a tag shows it.
    pub(super) fn digits(self) -> String {
        digits(&self.0.finalize())
    }
}

/// Whether a tag matches the `size` bytes that `open` gives: put at once, in parts of our size, or in one part, as a
/// copy within the server is.
pub(super) fn is_of<R: Read>(tag: &str, size: u64, open: impl Fn() -> Result<R>) -> Result<bool> {
    let tag = tag.trim_matches('"');
    let (wanted, parts) = tag.split_once('-').map_or((tag, "0"), |(sum, parts)| (sum, parts));
    let part = match parts.parse() {
        Ok(0 | 1) => size,
        Ok(parts) if size.div_ceil(PART_BYTES) == parts => PART_BYTES,
        _ => return Ok(false),
    };
    if md5_of(wanted).is_none() {
        return Ok(false);
    }
    let (mut bytes, mut sums) = (open()?, Vec::new());
    for _ in 0..size.div_ceil(part.max(1)).max(1) {
        let mut sum = Md5::new();
        each_piece((&mut bytes).take(part), |piece| sum.update(piece))?;
        sums.extend(sum.finalize());
    }
    let found = if parts == "0" { sums } else { Md5::digest(&sums).to_vec() };
    Ok(digits(&found) == wanted)
}

fn digits(sum: &[u8]) -> String {
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_told_from_bytes_as_servers_make_it() {
        let is = |tag: &str, bytes: &[u8]| is_of(tag, bytes.len() as u64, || Ok(bytes)).unwrap();
        // RFC 1321, and the MD5 of the MD5 of one part.
        assert!(is("\"900150983cd24fb0d6963f7d28e17f72\"", b"abc"));
        assert!(is("d41d8cd98f00b204e9800998ecf8427e", b""));
        assert!(!is("900150983cd24fb0d6963f7d28e17f72", b"abd"));
        let mut parts = Md5Sum::default();
        for part in [&vec![0; PART_BYTES as usize][..], b"abc"] {
            parts.add(&Md5::digest(part));
        }
        let tag = parts.digits() + "-2";
        let bytes = [&vec![0; PART_BYTES as usize][..], b"abc"].concat();
        assert!(is(&tag, &bytes));
        assert!(!is(&tag, &bytes[1..]));
        assert!(is(&(digits(&Md5::digest(Md5::digest(b"abc"))) + "-1"), b"abc"));
        for other in ["", "no tag", "900150983cd24fb0d6963f7d28e17f72-x", "0x8D-1", "-1"] {
            assert!(!is(other, b"abc") && md5_of(other).is_none(), "{other}");
        }
    }
}
