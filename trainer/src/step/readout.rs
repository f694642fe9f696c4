//! The results of a micro-batch for the record of its step: they stay on the device until the host reads the record.
//!
//! ```text
//! of each micro-batch, in words of 64 bits: sum of losses (f64) | with z-loss, its sum (f64)
//!     | sum of losses of each row (f64) | tokens by router class of each layer
//!     | checksums of its gradients, to be added, known once these are summed
//! ```

use contract::Result;
use kernels::checksum;
use kernels::record::Record;
use tch::{Kind, Tensor};

use crate::model::{MicroBatchInput, MicroBatchLosses};
use crate::refusal::{refused, values};
use crate::timing;

/// The ledger's entries of a micro-batch, and details that explain it.
#[derive(Clone, Debug)]
pub struct MicroBatchSums {
    /// Sum of its token losses.
    pub loss: f64,
    /// Sum of the z-losses of the same tokens; 0 without a coefficient.
    pub z_loss: f64,
    /// Its labels.
    pub labels: u64,
    /// Checksum of its gradient.
    pub gradient: u64,
    /// Sum of token losses and labels of each of its rows: the ledger keeps them by source.
    pub rows: Vec<(f64, u64)>,
    /// The loss of each token, only where requested.
    pub token_losses: Vec<f32>,
}

/// How much detail is recorded of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// What the ledger needs.
    Sums,
    /// Also the loss of each token.
    Tokens,
}

/// The results of one micro-batch, not yet read by the host.
pub(super) struct MicroBatchReport {
    words: Tensor,
    /// Whether z-loss is among them.
    has_z_loss: bool,
    /// The checksum.
    gradient: checksum::RunningChecksum,
    labels: u64,
    /// Labels of each row.
    rows: Vec<u64>,
    /// Router classes of each layer.
    classes: Vec<usize>,
    /// Only where requested.
    token_losses: Option<Tensor>,
}

/// The results as read: sums, and tokens by layer and router class.
pub(super) type MicroBatchReading = (MicroBatchSums, Vec<Vec<u64>>);

impl MicroBatchReport {
    pub(super) fn of(
        output: MicroBatchLosses,
        gradient: checksum::RunningChecksum,
        input: &MicroBatchInput<'_>,
        detail: Detail,
    ) -> Result<MicroBatchReport> {
        let _watch = timing::part(timing::StepPart::MicroBatchSums);
        let labels = |mask: &[u8]| mask.iter().map(|mask| u64::from(*mask != 0)).sum();
        let classes = output.counts.iter().map(|counts| counts.as_ref().map_or(0, Tensor::numel));
        let words = || {
            let by_row = output.token_losses.f_view([input.rows as i64, -1])?;
            let by_row = by_row.f_sum_dim_intlist(1, false, Kind::Double)?;
            let mut words = Vec::with_capacity(3 + output.counts.len());
            for losses in [&output.loss].into_iter().chain(&output.z_loss).chain([&by_row]) {
                words.push(losses.f_view_dtype(Kind::Int64)?.f_view([-1])?);
            }
            words.extend(output.counts.iter().flatten().map(Tensor::shallow_clone));
            Tensor::f_cat(&words, 0)
        };
        Ok(MicroBatchReport {
            words: words().map_err(refused)?,
            has_z_loss: output.z_loss.is_some(),
            gradient,
            labels: output.labels,
            rows: input.mask.chunks(input.seq_len).map(labels).collect(),
            classes: classes.collect(),
            token_losses: (detail == Detail::Tokens).then_some(output.token_losses),
        })
    }

    /// Adds its words to `record`, to be read with others.
    pub(super) fn put(&self, record: &mut Record) -> Result<()> {
        let (_, on_device) = self.gradient.parts();
        let mut words = std::iter::once(&self.words).chain(&on_device);
        words.try_for_each(|words| record.put(words)).map_err(refused)
    }

    /// Reads one micro-batch alone, in the middle of a step: the host waits for the device here.
    pub(super) fn alone(&self) -> Result<MicroBatchReading> {
        let _watch = timing::part(timing::StepPart::MicroBatchSums);
        let mut record = Record::default();
        self.put(&mut record)?;
        record.read().map_err(refused)?;
        let read = self.take(&mut record)?;
        record.end().map_err(refused)?;
        Ok(read)
    }

    /// Takes its words from a record that was read.
    pub(super) fn take(&self, record: &mut Record) -> Result<MicroBatchReading> {
        let MicroBatchReport { has_z_loss, gradient, labels, rows, classes, token_losses, .. } =
            self;
        let mut next = || record.word().map_err(refused);
        let loss = f64::from_bits(next()?);
        let z_loss = if *has_z_loss { f64::from_bits(next()?) } else { 0.0 };
        let rows = rows.iter().map(|labels| Ok((f64::from_bits(next()?), *labels)));
        let rows = rows.collect::<Result<_>>()?;
        let layer = |classes: &usize| (0..*classes).map(|_| next()).collect::<Result<_>>();
        let counts = classes.iter().map(layer).collect::<Result<_>>()?;
        let (known, on_device) = gradient.parts();
        let words: usize = on_device.iter().map(Tensor::numel).sum();
        let gradient = (0..words).try_fold(known, |sum, _| Ok(sum.wrapping_add(next()?)))?;
        let token_losses =
            token_losses.as_ref().map(|losses| values(&losses.flatten(0, -1))).transpose()?;
        let token_losses = token_losses.unwrap_or_default();
        let sums = MicroBatchSums { loss, z_loss, labels: *labels, gradient, rows, token_losses };
        Ok((sums, counts))
    }
}
