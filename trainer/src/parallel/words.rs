//! Numbers as bytes between ranks: 64-bit words, little-endian, read back in the order in which they were written.

use contract::{Digest, Fault, Result};

/// Writes words.
#[derive(Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn word(&mut self, word: u64) -> &mut Self {
        self.0.extend(word.to_le_bytes());
        self
    }

    pub(super) fn float(&mut self, value: f64) -> &mut Self {
        self.word(value.to_bits())
    }

    pub(super) fn digest(&mut self, Digest(value): Digest) -> &mut Self {
        self.word(value as u64).word((value >> 64) as u64)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Reads them.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }

    pub(super) fn word(&mut self) -> Result<u64> {
        let Some((word, rest)) = self.0.split_first_chunk() else {
            return Err(Fault::bug("a rank wrote less than another one reads"));
        };
        self.0 = rest;
        Ok(u64::from_le_bytes(*word))
    }

    pub(super) fn float(&mut self) -> Result<f64> {
        self.word().map(f64::from_bits)
    }

    pub(super) fn digest(&mut self) -> Result<Digest> {
        let (low, high) = (self.word()?, self.word()?);
        Ok(Digest(u128::from(low) | u128::from(high) << 64))
    }

    /// Everything was read: ranks agree on what is written.
    pub(super) fn end(self) -> Result<()> {
        match self.0 {
            [] => Ok(()),
            _ => Err(Fault::bug("a rank wrote more than another one reads")),
        }
    }
}
