//! The secret of a run, and how one end of a connection proves to the other that it has it.
//!
//! A proof is an HMAC-SHA-256 (RFC 2104) over its purpose and over fresh nonces of both ends. It reveals nothing about
//! the key, and a recorded proof is useless in another connection.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::net::IpAddr;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::error::is_short;
use crate::{Error, Result};

/// Bytes of a proof, and of a nonce.
pub(super) const PROOF: usize = 32;

/// A nonce or a proof.
pub(super) type Bytes32 = [u8; PROOF];

/// The secret that both ends of every connection between the ranks of a run have to prove. It is never printed. Ranks
/// without a secret use the empty key, which anyone can prove.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct RunKey(Option<Bytes32>);

impl fmt::Debug for RunKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "RunKey(secret)" } else { "RunKey(none)" })
    }
}

impl RunKey {
    /// From a text that only the run's ranks know. The key is as hard to guess as the text.
    pub fn of(text: &str) -> RunKey {
        RunKey(Some(Sha256::digest(text.as_bytes()).into()))
    }

    /// The text of a new key: 64 hexadecimal digits from the operating system's random numbers.
    pub fn draw() -> Result<String> {
        Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Whether there is no secret.
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// Proves the key for one `purpose`, over `parts`.
    pub(super) fn proof(&self, purpose: &str, parts: &[&[u8]]) -> Bytes32 {
        // HMAC pads a short key to a block with zeros.
        let mut block = [0; 64];
        block[..PROOF].copy_from_slice(&self.0.unwrap_or_default());
        let mut hmac = Hmac::<Sha256>::new(&block.into());
        for part in [&[purpose.as_bytes()], parts].concat() {
            // Prefixed with their lengths, so that different lists of parts never give the same message.
            hmac.update(&(part.len() as u64).to_le_bytes());
            hmac.update(part);
        }
        hmac.finalize().into_bytes().into()
    }
}

/// Whether two proofs are equal, in a time that does not depend on where they differ.
pub(super) fn same(a: &Bytes32, b: &[u8]) -> bool {
    a.as_slice().ct_eq(b).into()
}

/// Unpredictable random bytes.
pub(super) fn nonce() -> Result<Bytes32> {
    let call = "draw from /dev/urandom";
    drawn().map_err(|error| match is_short(&error) {
        true => Error::Short { call, error },
        false => Error::Foreign { call, reason: error.to_string() },
    })
}

/// The same, with the system's own error.
pub(super) fn drawn() -> io::Result<Bytes32> {
    let mut bytes = Bytes32::default();
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes))?;
    Ok(bytes)
}

/// Whether a host name means this machine itself (loopback).
pub fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_one_key_purpose_and_list_of_parts() {
        let key = RunKey::of("a secret");
        let proof = key.proof("greeting", &[b"ab", b"c"]);
        assert!(same(&proof, &key.proof("greeting", &[b"ab", b"c"])));
        for other in [
            RunKey::of("another").proof("greeting", &[b"ab", b"c"]),
            RunKey::default().proof("greeting", &[b"ab", b"c"]),
            key.proof("farewell", &[b"ab", b"c"]),
            key.proof("greeting", &[b"a", b"bc"]),
        ] {
            assert!(!same(&proof, &other));
        }
        assert!(!same(&proof, &proof[..31]), "a part of a proof is none");
    }

    /// From Python: `hmac.new(sha256(b"a secret").digest(), pack("<Q", 8) + b"greeting" + pack("<Q", 1) + b"a",
    /// sha256)`.
    #[test]
    fn a_proof_is_that_of_the_standard() {
        let proof = RunKey::of("a secret").proof("greeting", &[b"a"]);
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5b2782b062f50373a9a84dea31e185c7c31a5f1345433c75db06815ae515d53b");
    }

    #[test]
    fn a_key_is_not_shown_and_no_two_are_equal() {
        let (one, other) = (RunKey::draw().unwrap(), RunKey::draw().unwrap());
        assert!(one != other && one.len() == 64);
        let shown = format!("{:?}", RunKey::of(&one));
        assert_eq!(shown, "RunKey(secret)");
        assert!(RunKey::default().is_none() && !RunKey::of(&one).is_none());
    }
}
