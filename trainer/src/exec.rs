//! How fast, never what: nothing here has a digest, and no value of it can change a bit.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kernels::group::Transport;
use loader::PrefetchOptions;
use store::Location;

use crate::checkpoint::{Retention, SnapshotOptions};
use crate::memory::Demand;
use crate::mesh::{Degrees, GradReduce};
use crate::validate::Validation;
use crate::workers::Workers;

/// Everything that only decides speed, place and patience.
#[derive(Clone, Debug)]
pub struct ExecOptions {
    /// Micro-batches computed at once.
    pub workers: Workers,
    /// Reader threads and batches that wait.
    pub prefetch: PrefetchOptions,
    /// When the loss on held-out text is taken: it is told, and decides nothing.
    pub validation: Validation,
    /// How many ranks may share the sequences of a micro-batch, and hold its weights for each other: each phase uses the most
    /// that its cut allows.
    pub degrees: Degrees,
    /// How several ranks deal the micro-batches of a step and bring their gradients together.
    pub grad_reduce: GradReduce,
    /// Whether several ranks send to each other as if all were on one machine.
    pub flat: bool,
    /// After the loss of a rank the others go on if so many are left; `None`: they end.
    pub min_ranks: Option<u32>,
    /// Whether what each rank owns of the state is also kept by another one, so that after a loss nothing before the step at
    /// hand is computed again.
    pub replicate: bool,
    /// How tensors travel between several ranks.
    pub transport: Transport,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Which checkpoints stay.
    pub retention: Retention,
    /// How long the ranks may take to write one, after which the run ends.
    pub checkpoint_timeout: Duration,
    /// Whether steps are computed again from the first one where no checkpoint can be used.
    pub restart: bool,
    /// Where checkpoints lie if not in the run's folder: another folder, or `s3://bucket/key`.
    pub checkpoints: Option<Location>,
    /// States that stay in memory, for the step whose loss jumps.
    pub snapshots: SnapshotOptions,
    /// A program that gets the curves of each step on its standard input, as a line of JSON.
    pub metrics_exec: Option<String>,
    /// The step after which to stop, if before the curriculum's last.
    pub stop_after: Option<u64>,
    /// Whether a line is printed for every step.
    pub progress: bool,
    /// Bytes of memory that the ranks of this machine may hold together.
    pub memory: u64,
    /// The run's folder.
    pub out: PathBuf,
    /// Set from outside to stop after the step at hand.
    pub stop: Arc<AtomicBool>,
    /// Set from outside to keep the state after it, and to go on; taken back when that is heard.
    pub keep: Arc<AtomicBool>,
}

impl ExecOptions {
    /// Everything by default, in the folder `out`.
    pub fn new(out: PathBuf) -> Self {
        ExecOptions {
            workers: Workers::available(),
            prefetch: PrefetchOptions::default(),
            validation: Validation { every: 50, windows: 16 },
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
            snapshots: SnapshotOptions { states: 0, every: 10, spike: 6.0 },
            metrics_exec: None,
            stop_after: None,
            progress: true,
            memory: store::memory::limit(),
            out,
            stop: Arc::default(),
            keep: Arc::default(),
        }
    }

    /// What the steps of training ask of memory: a copy of the state is being written down, and some recent ones stay.
    pub(crate) fn demand(&self) -> Demand {
        let ExecOptions { degrees, flat, grad_reduce, workers, replicate, memory: limit, .. } =
            *self;
        let copies = (self.snapshots.states as u64).saturating_add(1);
        Demand { degrees, flat, grad_reduce, workers, replicate, copies, limit }
    }

    /// Whether somebody asked to stop.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
