//! The secret of a run, and how one end of a connection proves to the other that it has it.
//!
//! A proof is an HMAC (RFC 2104) by SHA-256 over what it is for and over numbers that both ends have drawn anew: it tells nothing
//! of the key, and one that was overheard is worth nothing in the next connection.

use std::fmt;
use std::fs::File;
use std::hint::black_box;
use std::io::Read as _;

use sha2::{Digest as _, Sha256};

use crate::{Error, Result};

/// Bytes of a proof, and of a nonce.
pub(super) const PROOF: usize = 32;

/// A number that is used once, or a proof.
pub(super) type Bytes32 = [u8; PROOF];

/// Bytes of a block of SHA-256.
const BLOCK: usize = 64;

/// The secret that every connection between the ranks of a run has to prove. It is never shown. Ranks without one prove that none
/// was given to them: anybody can.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct RunKey(Option<Bytes32>);

impl fmt::Debug for RunKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "RunKey(secret)" } else { "RunKey(none)" })
    }
}

impl RunKey {
    /// Of a text that only the run's ranks know. The key is as hard to guess as the text.
    pub fn of(text: &str) -> RunKey {
        RunKey(Some(Sha256::digest(text.as_bytes()).into()))
    }

    /// The text of a new key: 64 hexadecimal digits, drawn from the operating system.
    pub fn draw() -> Result<String> {
        Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Whether there is no secret.
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// Proves the key for one `purpose`, over `parts`.
    pub(super) fn proof(&self, purpose: &str, parts: &[&[u8]]) -> Bytes32 {
        let mut message = Vec::new();
        for part in [&[purpose.as_bytes()], parts].concat() {
            // With their lengths: no two lists of parts are the same message.
            message.extend((part.len() as u64).to_le_bytes());
            message.extend(part);
        }
        hmac(&self.0.unwrap_or_default(), &message)
    }
}

/// Whether two proofs are equal, in a time that does not depend on where they differ.
pub(super) fn same(a: &Bytes32, b: &[u8]) -> bool {
    let differ = a.iter().zip(b).fold(0, |differ, (a, b)| black_box(differ | (a ^ b)));
    a.len() == b.len() && differ == 0
}

/// Bytes that nobody can foresee.
pub(super) fn nonce() -> Result<Bytes32> {
    let mut bytes = Bytes32::default();
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Error::Foreign {
        call: "draw from /dev/urandom",
        reason: error.to_string(),
    })?;
    Ok(bytes)
}

/// HMAC-SHA-256.
fn hmac(key: &[u8], message: &[u8]) -> Bytes32 {
    let mut block = [0; BLOCK];
    match key.len() > BLOCK {
        true => block[..PROOF].copy_from_slice(&Sha256::digest(key)),
        false => block[..key.len()].copy_from_slice(key),
    }
    let pad = |with: u8| block.map(|byte| byte ^ with);
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Test cases 1, 2 and 6 of RFC 4231.
    #[test]
    fn hmac_is_that_of_the_standard() {
        let found = hmac(&[0x0b; 20], b"Hi There");
        assert_eq!(hex(&found), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
        let found = hmac(b"Jefe", b"what do ya want for nothing?");
        assert_eq!(hex(&found), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let found = hmac(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First");
        assert_eq!(hex(&found), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

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

    #[test]
    fn a_key_is_not_shown_and_no_two_are_equal() {
        let (one, other) = (RunKey::draw().unwrap(), RunKey::draw().unwrap());
        assert!(one != other && one.len() == 64);
        let shown = format!("{:?}", RunKey::of(&one));
        assert_eq!(shown, "RunKey(secret)");
        assert!(RunKey::default().is_none() && !RunKey::of(&one).is_none());
    }
}
