//! Digests: xxh3-128 for blocks and batches (the hot path), SHA-256 for identities in manifests.
//!
//! Invariant: every field that enters a hash is framed (tagged, fixed width or length-prefixed, little-endian), so
//! that no two different values feed the same bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

/// A 128-bit digest of data (xxh3), shown as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub u128);

/// A 256-bit identity (SHA-256), shown as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Identity(pub [u8; 32]);

impl Digest {
    /// The digest of raw bytes, unframed: for files and blocks, whose length is checked separately.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Digest(xxh3_128(bytes))
    }

    /// The digest of one value.
    pub fn of(value: &impl Digestible) -> Self {
        let mut hasher = Hasher::new();
        value.feed(&mut hasher);
        hasher.finish()
    }

    /// The first 8 hexadecimal digits, for messages.
    pub fn short(&self) -> String {
        self.to_string()[..8].to_owned()
    }
}

/// The 64-bit sum of one block of a shard.
pub fn block_sum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

impl Identity {
    /// The identity of raw bytes.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Identity(Sha256::digest(bytes).into())
    }

    /// The first 12 hexadecimal digits, for messages.
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }
}

/// Something that decides bits, and therefore has a digest.
///
/// Implement it by destructuring without `..`, so that a new field does not compile until someone decides how it
/// is hashed.
pub trait Digestible {
    /// Feeds every part that has an effect, framed, in a fixed order.
    fn feed(&self, hasher: &mut Hasher);
}

/// A framing xxh3-128 hasher.
#[derive(Clone)]
pub struct Hasher(Xxh3);

impl Default for Hasher {
    fn default() -> Self {
        Hasher::new()
    }
}

impl Hasher {
    /// An empty hasher.
    pub fn new() -> Self {
        Hasher(Xxh3::new())
    }

    /// Names what follows (`"plan.v1"`), so that two kinds of value never share a digest.
    pub fn tag(&mut self, tag: &str) -> &mut Self {
        self.bytes(tag.as_bytes())
    }

    /// Length, then bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.u64(bytes.len() as u64);
        self.0.update(bytes);
        self
    }

    /// Length, then UTF-8.
    pub fn str(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    /// Eight bytes, little-endian.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.update(&value.to_le_bytes());
        self
    }

    /// Sixteen bytes, little-endian.
    pub fn digest(&mut self, value: Digest) -> &mut Self {
        self.0.update(&value.0.to_le_bytes());
        self
    }

    /// Length, then each value as four bytes, little-endian.
    pub fn u32s(&mut self, values: &[u32]) -> &mut Self {
        self.words(values, u32::to_le_bytes)
    }

    /// Length, then each value as four bytes, little-endian: what [`Self::u32s`] feeds for the same bits.
    pub fn i32s(&mut self, values: &[i32]) -> &mut Self {
        self.words(values, i32::to_le_bytes)
    }

    /// Each value as four bytes, little-endian: continues what [`Self::u32s`] feeds, after the total length was fed.
    pub fn u32s_onward(&mut self, values: &[u32]) -> &mut Self {
        self.words_onward(values, u32::to_le_bytes)
    }

    fn words<T: Copy>(&mut self, values: &[T], bytes: impl Fn(T) -> [u8; 4]) -> &mut Self {
        self.u64(values.len() as u64).words_onward(values, bytes)
    }

    fn words_onward<T: Copy>(&mut self, values: &[T], bytes: impl Fn(T) -> [u8; 4]) -> &mut Self {
        let mut buffer = [0u8; 4096];
        for chunk in values.chunks(1024) {
            for (slot, value) in buffer.as_chunks_mut().0.iter_mut().zip(chunk) {
                *slot = bytes(*value);
            }
            self.0.update(&buffer[..chunk.len() * 4]);
        }
        self
    }

    /// The digest of everything fed so far.
    pub fn finish(&self) -> Digest {
        Digest(self.0.digest128())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text.len(), u128::from_str_radix(text, 16)) {
            (32, Ok(value)) => Ok(Digest(value)),
            _ => Err(format!("a digest has 32 hexadecimal digits, found {text:?}")),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl TryFrom<String> for Identity {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("an identity has 64 hexadecimal digits, found {text:?}");
        if text.len() != 64 || !text.is_ascii() {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Identity(bytes))
    }
}

impl From<Identity> for String {
    fn from(identity: Identity) -> String {
        identity.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn digests_survive_text(value: u128, bytes: [u8; 32]) {
            prop_assert_eq!(Digest(value).to_string().parse(), Ok(Digest(value)));
            prop_assert_eq!(Identity::try_from(Identity(bytes).to_string()), Ok(Identity(bytes)));
        }

        #[test]
        fn framing_keeps_neighbours_apart(a: Vec<u8>, b: Vec<u8>, c: Vec<u8>, d: Vec<u8>) {
            let pair = |x: &[u8], y: &[u8]| Hasher::new().bytes(x).bytes(y).finish();
            prop_assert_eq!(pair(&a, &b) == pair(&c, &d), a == c && b == d);
        }

        #[test]
        fn words_hash_as_little_endian_bytes(values in prop::collection::vec(any::<u32>(), 0..3000)) {
            let mut framed = (values.len() as u64).to_le_bytes().to_vec();
            framed.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            prop_assert_eq!(Hasher::new().u32s(&values).finish(), Digest::of_bytes(&framed));
            let signed: Vec<i32> = values.iter().map(|&value| value.cast_signed()).collect();
            prop_assert_eq!(Hasher::new().i32s(&signed).finish(), Digest::of_bytes(&framed));
        }
    }
}
