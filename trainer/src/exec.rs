//! Options for speed, place and patience. They have no digest: no value here can change a result.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kernels::group::Transport;
use loader::PrefetchOptions;
use store::Location;

use crate::checkpoint::{Retention, SnapshotOptions};
use crate::evaluate::Task;
use crate::memory::MachineDemand;
use crate::mesh::{Degrees, GradReduce};
use crate::validate::Validation;
use crate::workers::Workers;

/// Execution options.
#[derive(Clone, Debug)]
pub struct ExecOptions {
    /// Number of micro-batches computed at once.
    pub workers: Workers,
    /// Reader threads and prefetched batches.
    pub prefetch: PrefetchOptions,
    /// When the validation loss is computed; it is only reported.
    pub validation: Validation,
    /// Tasks that are scored when the validation loss is computed.
    pub tasks: Arc<[Task]>,
    /// How many ranks may share the sequences of a micro-batch, and shard weights for each other: each phase uses the
    /// largest degree that its shape allows.
    pub degrees: Degrees,
    /// How ranks distribute the micro-batches of a step and reduce gradients.
    pub grad_reduce: GradReduce,
    /// Whether ranks communicate as if all were on one machine.
    pub flat: bool,
    /// After a rank is lost, the others continue if at least this many are left; `None`: they stop.
    pub min_ranks: Option<u32>,
    /// Whether another rank holds a replica of what each rank owns of the state, so that after the loss of a rank only
    /// the current step is recomputed.
    pub replicate: bool,
    /// The transport of tensors between ranks.
    pub transport: Transport,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Which checkpoints are kept.
    pub retention: Retention,
    /// How long the ranks may take to write a checkpoint before the run stops.
    pub checkpoint_timeout: Duration,
    /// Whether to recompute from the first step if no checkpoint can be used.
    pub restart: bool,
    /// Where checkpoints are stored if not in the run's folder: another folder, or a place in a bucket.
    pub checkpoints: Option<Location>,
    /// States kept in memory, to be written at a spike.
    pub snapshots: SnapshotOptions,
    /// A program that receives the metrics of each step on its standard input, one line of JSON each.
    pub metrics_exec: Option<String>,
    /// The text of the options file, for the record.
    pub options: Option<String>,
    /// The step to stop after, if before the last of the curriculum.
    pub stop_after: Option<u64>,
    /// Whether a line is printed for every step.
    pub progress: bool,
    /// Memory limit in bytes for all ranks of this machine together.
    pub memory: u64,
    /// The run's folder.
    pub out: PathBuf,
    /// Set from outside to stop after the current step.
    pub stop: Arc<AtomicBool>,
    /// Set from outside to save the state after the current step and continue; reset once handled.
    pub keep: Arc<AtomicBool>,
}

impl ExecOptions {
    /// The defaults, for the run in the folder `out`.
    pub fn new(out: PathBuf) -> Self {
        ExecOptions {
            workers: Workers::available(),
            prefetch: PrefetchOptions::default(),
            validation: Validation { every: 50, windows: 16 },
            tasks: Arc::default(),
            degrees: Degrees::ALONE,
            grad_reduce: GradReduce::default(),
            flat: false,
            min_ranks: None,
            replicate: false,
            transport: Transport::default(),
            checkpoint_every: 50,
            retention: Retention::default(),
            checkpoint_timeout: Duration::from_secs(3600),
            restart: false,
            checkpoints: None,
            snapshots: SnapshotOptions::OFF,
            metrics_exec: None,
            options: None,
            stop_after: None,
            progress: true,
            memory: store::memory::limit(),
            out,
            stop: Arc::default(),
            keep: Arc::default(),
        }
    }

    /// The memory demand of training: one copy of the state while a checkpoint is written, and one for each snapshot.
    pub(crate) fn demand(&self) -> MachineDemand {
        let ExecOptions { degrees, flat, grad_reduce, workers, replicate, memory: limit, .. } =
            *self;
        let copies = (self.snapshots.states as u64).saturating_add(1);
        MachineDemand { degrees, flat, grad_reduce, workers, replicate, copies, limit }
    }

    /// Whether a stop was requested.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
