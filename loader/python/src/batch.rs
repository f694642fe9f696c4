//! A batch, or a rank's part of one.

use std::ops::Range;
use std::sync::Arc;

use contract::Fault;
use loader::{OpenedCurriculum, step_digest};
use mixer::StepSpec;
use pyo3::prelude::*;

use crate::array::{Array, I32, U8};
use crate::error::Outcome;
use crate::process::{Mine, Owned, PerProcess};

/// Rows of one step.
#[pyclass(frozen, module = "zdata._zdata")]
pub(crate) struct Batch {
    held: Arc<Owned<loader::Batch>>,
    opened: Arc<PerProcess<OpenedCurriculum>>,
    spec: StepSpec,
    phase: String,
    /// The rows, counted in the step.
    rows: Vec<u64>,
    /// Where the columns are: tokens, labels, positions, loss mask. Python may write there, so nothing here reads them.
    addresses: [usize; 4],
}

impl Batch {
    pub(crate) fn new(
        mut batch: loader::Batch,
        opened: &Arc<PerProcess<OpenedCurriculum>>,
        mine: &Mine<OpenedCurriculum>,
        spec: StepSpec,
    ) -> Outcome<Self> {
        let rows = batch.samples.iter().map(|sample| sample.sample - spec.first_sample).collect();
        let phase = mine.plan.phases()[spec.phase].name.clone();
        let columns = batch.columns_mut()?;
        let words = [columns.tokens, columns.labels, columns.positions];
        let [tokens, labels, positions] =
            words.map(|column| column.as_mut_ptr().expose_provenance());
        let addresses = [tokens, labels, positions, columns.mask.as_mut_ptr().expose_provenance()];
        let (held, opened) = (Arc::new(Owned::new(batch)), Arc::clone(opened));
        Ok(Batch { held, opened, spec, phase, rows, addresses })
    }

    /// The batch; a forked child has its parent's memory only by chance.
    fn get(&self) -> Outcome<&loader::Batch> {
        Ok(self.held.get().ok_or_else(|| {
            Fault::usage("this batch was read by the parent process")
                .hint("read it in the process that uses it, or send its arrays")
        })?)
    }

    /// Checks a range of rows.
    fn part(&self, rows: (usize, usize)) -> Outcome<(&loader::Batch, Range<usize>)> {
        let (batch, part) = (self.get()?, rows.0..rows.1);
        if part.start > part.end || part.end > self.rows.len() {
            let fault = Fault::usage("the batch does not have these rows");
            return Err(fault
                .found(format!("{part:?}"))
                .wanted(format!("rows within 0..{}", self.rows.len()))
                .into());
        }
        Ok((batch, part))
    }
}

#[pymethods]
impl Batch {
    #[getter]
    fn step(&self) -> u64 {
        self.spec.step
    }

    #[getter]
    fn phase(&self) -> &str {
        &self.phase
    }

    #[getter]
    fn seq_len(&self) -> u32 {
        self.spec.seq_len
    }

    #[getter]
    fn micro_batch(&self) -> u64 {
        self.spec.micro_batch
    }

    #[getter]
    fn first_sample(&self) -> u64 {
        self.spec.first_sample
    }

    #[getter]
    fn rows(&self) -> Vec<u64> {
        self.rows.clone()
    }

    #[getter]
    fn sequence_digests(&self) -> Outcome<Vec<String>> {
        Ok(self.get()?.sequences.iter().map(ToString::to_string).collect())
    }

    /// For each row: what the losses of its labels are multiplied by.
    #[getter]
    fn loss_weights(&self) -> Outcome<Vec<f32>> {
        Ok(self.get()?.samples.iter().map(mixer::SampleSpec::loss_weight).collect())
    }

    /// The digest of a run of rows.
    fn digest(&self, rows: (usize, usize)) -> Outcome<String> {
        let (batch, part) = self.part(rows)?;
        Ok(step_digest([&batch.sequences[part]]).to_string())
    }

    /// The column of this name: a row for each sequence.
    fn column(&self, name: &str) -> Outcome<Array> {
        self.get()?;
        let shape = [self.rows.len(), self.spec.seq_len as usize];
        let [tokens, labels, positions, mask] = self.addresses;
        let (address, kind) = match name {
            "tokens" => (tokens, I32),
            "labels" => (labels, I32),
            "positions" => (positions, I32),
            "loss_mask" => (mask, U8),
            _ => return Err(Fault::bug(format!("a batch has no column {name:?}")).into()),
        };
        Ok(Array::column(&self.held, address, kind, shape))
    }

    /// Where documents begin in a run of rows, laid one after the other, and their end; and the longest document.
    fn cu_seqlens(&self, rows: (usize, usize)) -> Outcome<(Array, u32)> {
        let (batch, part) = self.part(rows)?;
        let width = self.spec.seq_len;
        let (mut starts, mut longest) = (vec![0], 0);
        for (row, boundaries) in (0..).zip(&batch.boundaries[part]) {
            let ends = boundaries.iter().skip(1).copied().chain([width]);
            for (from, to) in boundaries.iter().zip(ends) {
                longest = longest.max(to - from);
                let end = i32::try_from(row * u64::from(width) + u64::from(to));
                starts
                    .push(end.map_err(|_| Fault::usage("these rows have more than 2^31 tokens"))?);
            }
        }
        Ok((Array::of(starts), longest))
    }

    /// The documents of a run of rows, as JSON.
    fn documents(&self, py: Python<'_>, rows: (usize, usize), text: bool) -> Outcome<String> {
        let (batch, part) = self.part(rows)?;
        let opened = self.opened.get(py)?;
        Ok(py.detach(|| {
            let samples = &batch.samples[part];
            zdata_cli::answers::documents(&opened.plan, opened.stores()?, samples, text)
        })?)
    }

    /// The source, epoch and global number of a row's sample.
    fn sample(&self, py: Python<'_>, row: usize) -> Outcome<(String, u64, u64)> {
        let (batch, part) = self.part((row, row + 1))?;
        let sample = &batch.samples[part.start];
        let source = self.opened.get(py)?.plan.sources()[sample.source].name.clone();
        Ok((source, sample.epoch, sample.sample))
    }
}
