//! Staging of micro-batches for a device: the columns of a batch lie side by side in a buffer of the device's ring,
//! where the readers of a prefetcher write them.
//!
//! ```text
//! flags: the mask | words: tokens | labels | positions | where the spans of each micro-batch start
//! ```
//!
//! A column of words begins at a multiple of 16 words: of 64 bytes here, and 128 on the device, whose words are twice
//! as wide. Starts come last, because their number is known only after the columns are written: there is space for as
//! many as tokens, and the unused rest is not sent.

use contract::{Fault, Result};
use kernels::device::{self, Staged, Stager, StagingBuffer, StagingRing};
use loader::{BatchMemory, Columns, ColumnsMut};
use tch::{Device, Kind, Tensor};

use super::ZayaConfig;
use super::input::{CheckedMicroBatch, DeviceMicroBatch, MicroBatchInput};
use crate::refusal::{lost, refused};

/// Words or flags between the starts of two columns are a multiple of this.
const ALIGNED: usize = 16;

/// The columns of a batch in a buffer of a device's ring.
#[derive(Debug)]
pub struct BatchBuffer {
    buffer: StagingBuffer,
    tokens: usize,
}

/// A micro-batch on its way to the device: a prefetcher's last stage sends it, [`super::micro_batch`] computes it.
#[derive(Debug)]
pub struct StagedMicroBatch {
    batch: Staged,
    /// Tokens of the batch that precede it.
    first: usize,
    /// Words from one column of the batch to the next.
    column: usize,
    /// The offset of its starts among the words.
    starts: usize,
    micro_batch: CheckedMicroBatch,
}

/// Words from one column of `tokens` tokens to the next.
fn column(tokens: usize) -> usize {
    tokens.next_multiple_of(ALIGNED)
}

impl BatchBuffer {
    /// A buffer for a batch of `tokens` tokens, with undefined contents.
    pub fn take(buffers: &StagingRing, tokens: usize) -> Result<BatchBuffer> {
        let words = 3 * column(tokens) + tokens;
        let buffer = buffers.take(tokens, words).map_err(lost)?;
        Ok(BatchBuffer { buffer, tokens })
    }

    /// A buffer with a copy of a batch's columns.
    pub(crate) fn copy_of(batch: Columns<'_>, buffers: &StagingRing) -> Result<BatchBuffer> {
        let mut copy = BatchBuffer::take(buffers, batch.tokens.len())?;
        let ColumnsMut { tokens, labels, positions, mask } = copy.columns_mut()?;
        tokens.copy_from_slice(batch.tokens);
        positions.copy_from_slice(batch.positions);
        // A position without a label may hold any value: replaced by 0, a token of every vocabulary.
        let places = batch.labels.iter().zip(batch.mask).zip(labels.iter_mut().zip(mask));
        for ((label, counts), (own_label, own_mask)) in places {
            *own_mask = u8::from(*counts != 0);
            *own_label = if *counts == 0 { 0 } else { *label };
        }
        Ok(copy)
    }

    /// Starts to copy it to the device: the batch of the checked `micro_batches`, one after the other.
    pub fn send(
        &mut self,
        micro_batches: Vec<CheckedMicroBatch>,
        stager: &Stager,
    ) -> Result<Vec<StagedMicroBatch>> {
        if micro_batches.iter().map(|part| part.tokens).sum::<usize>() != self.tokens {
            return Err(Fault::bug("micro-batches that are not those of their batch"));
        }
        let (column, mut end) = (column(self.tokens), 3 * column(self.tokens));
        let (_, words) = self.buffer.parts_mut().map_err(lost)?;
        for span in micro_batches.iter().flat_map(|part| &part.spans) {
            words[end] = i32::try_from(span.start)
                .map_err(|_| Fault::bug("a micro-batch of more tokens than an i32 counts"))?;
            end += 1;
        }
        let batch = stager.send(&mut self.buffer, end).map_err(lost)?;
        let (mut first, mut starts) = (0, 3 * column);
        let staged = |micro_batch: CheckedMicroBatch| {
            let batch = batch.alias().map_err(lost)?;
            let staged = StagedMicroBatch { batch, first, column, starts, micro_batch };
            (first, starts) =
                (first + staged.micro_batch.tokens, starts + staged.micro_batch.spans.len());
            Ok(staged)
        };
        micro_batches.into_iter().map(staged).collect()
    }
}

impl BatchMemory for BatchBuffer {
    fn columns(&self) -> Columns<'_> {
        let ((mask, words), column) = (self.buffer.parts(), column(self.tokens));
        let part = |number: usize| &words[number * column..number * column + self.tokens];
        Columns { tokens: part(0), labels: part(1), positions: part(2), mask }
    }

    fn columns_mut(&mut self) -> Result<ColumnsMut<'_>> {
        let (tokens, column) = (self.tokens, column(self.tokens));
        let (mask, words) = self.buffer.parts_mut().map_err(lost)?;
        let (ids, words) = words.split_at_mut(column);
        let (labels, positions) = words.split_at_mut(column);
        Ok(ColumnsMut {
            tokens: &mut ids[..tokens],
            labels: &mut labels[..tokens],
            positions: &mut positions[..tokens],
            mask,
        })
    }
}

impl MicroBatchInput<'_> {
    /// Checks the micro-batch and starts to copy it to the device alone; on a GPU this overlaps with computation.
    pub fn stage(&self, config: &ZayaConfig, stager: &Stager) -> Result<StagedMicroBatch> {
        let checked = self.check(config)?;
        let MicroBatchInput { tokens, labels, positions, mask, .. } = *self;
        let columns = Columns { tokens, labels, positions, mask };
        let micro_batch =
            BatchBuffer::copy_of(columns, stager.buffers())?.send(vec![checked], stager)?.pop();
        micro_batch.ok_or_else(|| Fault::bug("a micro-batch was not staged"))
    }

    /// Copies the micro-batch to `device` at once.
    pub(super) fn prepare(&self, config: &ZayaConfig, device: Device) -> Result<DeviceMicroBatch> {
        let stager = Stager::kept(device).map_err(lost)?;
        self.stage(config, &stager)?.arrive()
    }
}

impl StagedMicroBatch {
    /// Waits, on the device, for the copy; the arrays are views of the device buffer.
    pub(super) fn arrive(self) -> Result<DeviceMicroBatch> {
        let StagedMicroBatch { batch, first, column, starts, micro_batch } = self;
        let (flags, words) = batch.arrive().map_err(refused)?;
        let views = || -> kernels::Result<_> {
            let part = |of: &Tensor, begin: usize| -> kernels::Result<Tensor> {
                let view = of.f_narrow(0, (begin + first) as i64, micro_batch.tokens as i64)?;
                if first.is_multiple_of(ALIGNED) {
                    return Ok(view);
                }
                // A micro-batch of odd size gets separate arrays, so that each is aligned for vector loads of a device.
                let mut apart = view.f_empty_like()?;
                apart.f_copy_(&view)?;
                Ok(apart)
            };
            let positions = match micro_batch.by_document {
                true => part(&words, 2 * column)?,
                false => {
                    let row = Tensor::f_arange(micro_batch.seq_len, (Kind::Int64, words.device()))?;
                    row.f_repeat([micro_batch.rows])?
                }
            };
            let mut mask = part(&flags, 0)?;
            if !micro_batch.weights.is_empty() {
                // A row is text of one source. The head scales gradients by the mask, so weights cost no kernel there.
                let weights = device::floats(mask.device(), &micro_batch.weights)?;
                let rows = mask.f_view([micro_batch.rows, -1])?;
                mask = rows.f_mul(&weights.f_unsqueeze(1)?)?.f_view([-1])?;
            }
            Ok(DeviceMicroBatch {
                tokens: part(&words, 0)?,
                labels: part(&words, column)?,
                positions,
                mask,
                starts: words.f_narrow(0, starts as i64, micro_batch.spans.len() as i64)?,
                spans: micro_batch.spans,
                rows: micro_batch.rows,
                label_count: micro_batch.label_count,
            })
        };
        views().map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use contract::{Class, Key, Purpose, draw};
    use proptest::prelude::*;

    use super::*;

    /// A batch of micro-batches as a loader produces it, and what the model should read.
    struct Batch {
        tokens: Vec<i32>,
        labels: Vec<i32>,
        positions: Vec<i32>,
        mask: Vec<u8>,
        boundaries: Vec<Vec<u32>>,
        rows: usize,
        seq_len: usize,
    }

    impl Batch {
        fn draw(seed: u64, micro_batches: usize, rows: usize, seq_len: usize) -> Batch {
            let key = Key::from_seed(seed);
            let draw =
                |number: usize, below: u64| draw(key, Purpose::Generate, number as u64) % below;
            let count = micro_batches * rows * seq_len;
            let starts = |row: usize| {
                let inside = (1..seq_len).filter(|place| draw(row * seq_len + place, 5) == 0);
                [0].into_iter().chain(inside.map(|place| place as u32)).collect()
            };
            let boundaries: Vec<Vec<u32>> = (0..micro_batches * rows).map(starts).collect();
            let position = |place: usize| {
                let (row, at) = (&boundaries[place / seq_len], (place % seq_len) as u32);
                let start = row.iter().rfind(|start| **start <= at).unwrap();
                (at - start) as i32
            };
            let mask: Vec<u8> =
                (0..count).map(|place| (draw(count + place, 4) > 0).into()).collect();
            let token = |place: usize| draw(2 * count + place, 97) as i32;
            Batch {
                tokens: (0..count).map(token).collect(),
                labels: mask
                    .iter()
                    .zip(1..)
                    .map(|(mask, at)| i32::from(*mask) * token(at))
                    .collect(),
                positions: (0..count).map(position).collect(),
                mask,
                boundaries,
                rows,
                seq_len,
            }
        }

        fn columns(&self) -> Columns<'_> {
            let Batch { tokens, labels, positions, mask, .. } = self;
            Columns { tokens, labels, positions, mask }
        }

        fn micro_batch(&self, number: usize) -> MicroBatchInput<'_> {
            let Batch { rows, seq_len, .. } = *self;
            let at = number * rows * seq_len..(number + 1) * rows * seq_len;
            MicroBatchInput {
                tokens: &self.tokens[at.clone()],
                labels: &self.labels[at.clone()],
                positions: &self.positions[at.clone()],
                mask: &self.mask[at],
                boundaries: &self.boundaries[number * rows..(number + 1) * rows],
                weights: &[],
                rows,
                seq_len,
            }
        }

        fn micro_batches(&self) -> impl Iterator<Item = MicroBatchInput<'_>> {
            (0..self.boundaries.len() / self.rows).map(|micro_batch| self.micro_batch(micro_batch))
        }

        /// Writes it into `buffer`.
        fn write(&self, buffer: &mut BatchBuffer) {
            let ColumnsMut { tokens, labels, positions, mask } = buffer.columns_mut().unwrap();
            tokens.copy_from_slice(&self.tokens);
            labels.copy_from_slice(&self.labels);
            positions.copy_from_slice(&self.positions);
            mask.copy_from_slice(&self.mask);
        }
    }

    fn config(document_mask: bool) -> ZayaConfig {
        ZayaConfig { vocab_size: 97, document_mask, ..ZayaConfig::preset("zaya1-nano").unwrap() }
    }

    /// Asserts that the staged tensors are the micro-batch.
    fn assert_is(found: DeviceMicroBatch, micro_batch: &MicroBatchInput<'_>, documents: bool) {
        let wide = |values: &[i32]| values.iter().copied().map(i64::from).collect::<Vec<_>>();
        let read = |tensor: &Tensor| Vec::<i64>::try_from(tensor).unwrap();
        assert_eq!(read(&found.tokens), wide(micro_batch.tokens));
        assert_eq!(read(&found.labels), wide(micro_batch.labels));
        let mask: Vec<f32> = micro_batch.mask.iter().copied().map(f32::from).collect();
        assert_eq!(Vec::<f32>::try_from(&found.mask).unwrap(), mask);
        let (mut starts, mut positions) = (Vec::new(), Vec::new());
        for (row, inside) in micro_batch.boundaries.iter().enumerate() {
            let inside = if documents { &inside[..] } else { &[0] };
            starts.extend(
                inside.iter().map(|start| (row * micro_batch.seq_len) as i64 + i64::from(*start)),
            );
            positions.extend(0..micro_batch.seq_len as i64);
        }
        let positions = if documents { wide(micro_batch.positions) } else { positions };
        assert_eq!((read(&found.positions), read(&found.starts)), (positions, starts.clone()));
        assert_eq!(found.spans.iter().map(|span| span.start).collect::<Vec<_>>(), starts);
        let ends = found.spans.iter().map(|span| span.start + span.len);
        assert!(ends.eq(starts[1..].iter().copied().chain([micro_batch.tokens.len() as i64])));
        assert_eq!(found.rows, micro_batch.rows as i64);
        assert_eq!(
            found.label_count,
            micro_batch.mask.iter().map(|mask| u64::from(*mask)).sum::<u64>()
        );
        for array in [&found.tokens, &found.labels, &found.positions, &found.mask] {
            assert_eq!(array.data_ptr().addr() % 64, 0);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Written in place, copied as a batch, or each micro-batch alone: what is staged equals the ordinary columns.
        #[test]
        fn what_arrives_is_what_was_written(
            seed: u64, count in 0usize..5, rows in 1usize..4, seq_len in 1usize..40, documents: bool,
        ) {
            let (config, stager) = (config(documents), Stager::new(Device::Cpu).unwrap());
            // The second batch reuses the first one's buffer, or a part.
            for batch in [Batch::draw(seed, count + 1, rows, seq_len), Batch::draw(seed ^ 1, count, rows, seq_len)] {
                let mut buffer = BatchBuffer::take(stager.buffers(), batch.tokens.len()).unwrap();
                batch.write(&mut buffer);
                prop_assert_eq!(buffer.columns(), batch.columns());
                let checked = batch.micro_batches().map(|micro_batch| micro_batch.check_in_place(&config).unwrap()).collect();
                let staged = buffer.send(checked, &stager).unwrap();
                prop_assert_eq!(buffer.columns(), batch.columns());
                drop(buffer);
                prop_assert_eq!(staged.len(), batch.boundaries.len() / rows);
                for (staged_micro_batch, micro_batch) in staged.into_iter().zip(batch.micro_batches()) {
                    assert_is(staged_micro_batch.arrive().unwrap(), &micro_batch, documents);
                }
                // In ordinary columns a position without a label may hold any value.
                let mut dirty = Batch { labels: batch.labels.clone(), ..Batch::draw(seed, 0, rows, seq_len) };
                dirty.labels.iter_mut().zip(&batch.mask).for_each(|(label, mask)| *label -= i32::from(*mask == 0));
                let labels = &dirty.labels;
                let columns = Columns { labels, ..batch.columns() };
                let mut copy = BatchBuffer::copy_of(columns, stager.buffers()).unwrap();
                prop_assert_eq!(copy.columns(), batch.columns());
                let checked = batch.micro_batches().map(|micro_batch| micro_batch.check(&config).unwrap()).collect();
                let together = copy.send(checked, &stager).unwrap();
                for ((number, micro_batch), staged_micro_batch) in batch.micro_batches().enumerate().zip(together) {
                    assert_is(staged_micro_batch.arrive().unwrap(), &micro_batch, documents);
                    let labels = &labels[number * micro_batch.tokens.len()..][..micro_batch.tokens.len()];
                    let alone = MicroBatchInput { labels, ..micro_batch }.stage(&config, &stager).unwrap();
                    assert_is(alone.arrive().unwrap(), &micro_batch, documents);
                }
            }
        }
    }

    #[test]
    fn a_device_reads_no_label_where_none_is_and_no_micro_batch_of_another_batch() {
        let (config, stager) = (config(true), Stager::new(Device::Cpu).unwrap());
        let batch = Batch::draw(3, 2, 2, 8);
        let dirty = |label: i32, mask: u8| {
            let mut changed = Batch::draw(3, 2, 2, 8);
            (changed.labels[5], changed.mask[5]) = (label, mask);
            changed.micro_batch(0).check_in_place(&config)
        };
        assert!(dirty(0, 0).is_ok() && dirty(7, 1).is_ok());
        for refused in [dirty(7, 0), dirty(7, 2)] {
            assert_eq!(refused.unwrap_err().class(), Class::Bug);
        }
        let mut buffer = BatchBuffer::copy_of(batch.columns(), stager.buffers()).unwrap();
        let checked = vec![batch.micro_batch(0).check(&config).unwrap()];
        assert_eq!(buffer.send(checked, &stager).unwrap_err().class(), Class::Bug);
    }
}
