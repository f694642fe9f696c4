//! Results for the host: 64-bit words that stay on their device until the host reads them, all at once.

use std::collections::VecDeque;

use tch::{Kind, Tensor};

use crate::{Error, Result};

/// Words in the order in which they were recorded. The host does not wait for a device before [`Record::read`].
#[derive(Debug, Default)]
pub struct Record {
    unread: Vec<Tensor>,
    read: VecDeque<u64>,
}

impl Record {
    /// Records the bits of each element of `numbers`, which are 64 bits wide.
    ///
    /// # Errors
    /// If elements have another width, or memory runs out.
    pub fn put(&mut self, numbers: &Tensor) -> Result<()> {
        self.unread.push(numbers.f_view_dtype(Kind::Int64)?.f_reshape([-1])?);
        Ok(())
    }

    /// Appends the unread words of another record.
    pub fn append(&mut self, other: Record) {
        self.unread.extend(other.unread);
    }

    /// Reads all words recorded since the last read: one copy from a device, for which the host waits.
    ///
    /// # Errors
    /// If something failed on the device, which shows now at the latest, or memory runs out.
    pub fn read(&mut self) -> Result<()> {
        let unread = std::mem::take(&mut self.unread);
        if unread.is_empty() {
            return Ok(());
        }
        let words = Tensor::f_cat(&unread, 0)?;
        self.read.extend(Vec::<i64>::try_from(&words)?.into_iter().map(i64::cast_unsigned));
        Ok(())
    }

    /// The next word that was read.
    ///
    /// # Errors
    /// If there is none: fewer words were recorded than are requested.
    pub fn word(&mut self) -> Result<u64> {
        self.read.pop_front().ok_or_else(|| off("its end"))
    }

    /// The same as a number of f64.
    ///
    /// # Errors
    /// As [`Record::word`].
    pub fn float(&mut self) -> Result<f64> {
        self.word().map(f64::from_bits)
    }

    /// Checks that every word was used.
    ///
    /// # Errors
    /// If a word was not used, or not read.
    pub fn end(self) -> Result<()> {
        match self.read.is_empty() && self.unread.is_empty() {
            true => Ok(()),
            false => Err(off("more words")),
        }
    }
}

/// The error if writer and reader of a record disagree.
fn off(found: &str) -> Error {
    Error::Operand {
        operation: "a record",
        operand: "its words",
        found: found.to_owned(),
        wanted: "as many as were put down".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_in_their_order() {
        let mut record = Record::default();
        record.put(&Tensor::from_slice(&[1.5f64, -0.0])).unwrap();
        let mut other = Record::default();
        other.put(&Tensor::from_slice(&[[-1i64, 2], [3, 4]].concat()).view([2, 2])).unwrap();
        record.append(other);
        assert!(record.word().is_err(), "nobody has read them");
        record.read().unwrap();
        assert_eq!(record.float().unwrap(), 1.5);
        assert_eq!(record.word().unwrap(), 1 << 63);
        assert_eq!([(); 4].map(|()| record.word().unwrap()), [u64::MAX, 2, 3, 4]);
        record.put(&Tensor::from_slice(&[7i64])).unwrap();
        record.read().unwrap();
        assert_eq!(record.word().unwrap(), 7);
        record.end().unwrap();
    }

    #[test]
    fn what_is_left_over_or_of_another_width_is_refused() {
        let mut record = Record::default();
        assert!(record.put(&Tensor::from_slice(&[1f32])).is_err());
        record.put(&Tensor::from_slice(&[7i64])).unwrap();
        record.read().unwrap();
        assert!(record.end().is_err());
    }
}
