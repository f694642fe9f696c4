//! Numbers as bytes between ranks: 64-bit words, little-endian, read back in the order in which they were written.

use contract::{Digest, Fault, Result};
use store::Location;

/// What every rank sent, by rank.
pub struct Gathered(pub Vec<Vec<u8>>);

impl Gathered {
    /// A reader for each rank's message.
    pub fn readers(&self) -> Vec<WordReader<'_>> {
        self.0.iter().map(|words| WordReader::new(words)).collect()
    }
}

/// Writes words.
#[derive(Default)]
pub struct WordWriter(Vec<u8>);

impl WordWriter {
    /// A word.
    pub fn word(&mut self, word: u64) -> &mut Self {
        self.0.extend(word.to_le_bytes());
        self
    }

    /// The bits of a number.
    pub fn float(&mut self, value: f64) -> &mut Self {
        self.word(value.to_bits())
    }

    /// A digest.
    pub fn digest(&mut self, Digest(value): Digest) -> &mut Self {
        self.word(value as u64).word((value >> 64) as u64)
    }

    /// Checksums of pieces.
    pub fn sums(&mut self, sums: &[[u64; 3]]) -> &mut Self {
        sums.iter().flatten().for_each(|sum| {
            self.word(*sum);
        });
        self
    }

    /// A text: its length and its bytes, eight to a word.
    pub fn text(&mut self, text: &str) -> &mut Self {
        self.name(text.as_bytes())
    }

    /// A location; its name may have any bytes.
    pub fn place(&mut self, place: &Location) -> &mut Self {
        self.name(&storage::written(place))
    }

    fn name(&mut self, bytes: &[u8]) -> &mut Self {
        self.word(bytes.len() as u64);
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        self
    }

    /// What was written.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Reads words.
pub struct WordReader<'a>(&'a [u8]);

impl<'a> WordReader<'a> {
    /// The words of a message.
    pub fn new(bytes: &'a [u8]) -> Self {
        WordReader(bytes)
    }

    /// The next word.
    pub fn word(&mut self) -> Result<u64> {
        let Some((word, rest)) = self.0.split_first_chunk() else {
            return Err(Fault::bug("a rank wrote less than another one reads"));
        };
        self.0 = rest;
        Ok(u64::from_le_bytes(*word))
    }

    /// The next number.
    pub fn float(&mut self) -> Result<f64> {
        self.word().map(f64::from_bits)
    }

    /// The next digest.
    pub fn digest(&mut self) -> Result<Digest> {
        let (low, high) = (self.word()?, self.word()?);
        Ok(Digest(u128::from(low) | u128::from(high) << 64))
    }

    /// The next text.
    pub fn text(&mut self) -> Result<String> {
        Ok(String::from_utf8_lossy(self.name()?).into_owned())
    }

    /// The next location.
    pub fn place(&mut self) -> Result<Location> {
        storage::locate_written(self.name()?)
    }

    fn name(&mut self) -> Result<&'a [u8]> {
        let length = self.word()? as usize;
        let Some((name, rest)) = self.0.split_at_checked(length.next_multiple_of(8)) else {
            return Err(Fault::bug("a rank wrote less than another one reads"));
        };
        self.0 = rest;
        Ok(&name[..length])
    }

    /// Checks that everything was read: readers and writers must agree on the format.
    pub fn end(self) -> Result<()> {
        match self.0 {
            [] => Ok(()),
            _ => Err(Fault::bug("a rank wrote more than another one reads")),
        }
    }
}
