//! The chain of a JSON Lines file: each line ends in the digest of the chain before it and of itself.
//!
//! `{"kind":"step", ... ,"chain":"HEX"}`: HEX is xxh3-128 over the 32 digits of the previous line's chain (32 zeros for
//! the first line), followed by the line as it would stand without its `chain` field.

use crate::Digest;

const FIELD: &str = ",\"chain\":\"";

/// The line for `body` (a JSON object with at least one field, on one line), and the chain after it.
pub fn seal(before: Digest, body: &str) -> (String, Digest) {
    let after = link(before, body);
    let open = body.strip_suffix('}').unwrap_or(body);
    (format!("{open}{FIELD}{after}\"}}"), after)
}

/// The body of a line and the chain after it; `None` if the line does not continue the chain.
pub fn open(before: Digest, line: &str) -> Option<(String, Digest)> {
    let (open, rest) = line.rsplit_once(FIELD)?;
    let found: Digest = rest.strip_suffix("\"}")?.parse().ok()?;
    let body = format!("{open}}}");
    (link(before, &body) == found).then_some((body, found))
}

/// A line without its line end, or `None` if the line is incomplete. A killed process leaves a line without its end; a
/// power loss may leave zeros where bytes did not reach the disk, followed by later lines that did.
pub fn whole(line: &[u8]) -> Option<&[u8]> {
    line.strip_suffix(b"\n").filter(|line| !line.contains(&0))
}

fn link(before: Digest, body: &str) -> Digest {
    Digest::of_bytes(format!("{before}{body}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sealed_lines_open_and_damaged_ones_do_not(
            before: u128, key in "[a-z]{1,8}", value: u64, at in any::<prop::sample::Index>(), bit in 0u8..8,
        ) {
            let body = format!("{{\"{key}\":{value}}}");
            let (line, after) = seal(Digest(before), &body);
            prop_assert_eq!(&line, &format!("{{\"{key}\":{value},\"chain\":\"{after}\"}}"));
            prop_assert_eq!(open(Digest(before), &line), Some((body, after)));
            prop_assert_eq!(open(Digest(before ^ 1), &line), None);
            let mut bytes = line.clone().into_bytes();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            if let Ok(text) = String::from_utf8(bytes) {
                // The hexadecimal digits of the chain may change case without changing its value.
                prop_assert!(text.eq_ignore_ascii_case(&line) || open(Digest(before), &text).is_none());
            }
        }
    }
}
