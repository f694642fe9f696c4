//! Measures the time of each part of a step: the time of the part's own code, summed over all workers.
//!
//! Disabled unless [`measured`] runs; then a part costs two clock readings. Nested parts are not counted twice.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPart {
    /// Reading and assembling the batch; a run overlaps this with the step before.
    Batch,
    /// Rounding weights to the dtype of matmuls, where the step that updates them does not.
    Round,
    /// Embedding, norms, residual scaling: the rest of the model, forward and backward.
    Stream,
    /// Attention with its projections and convolutions, forward.
    Attention,
    /// The router, forward.
    Router,
    /// The experts or a plain feed-forward, forward.
    Experts,
    /// The head and the loss, forward and backward.
    Head,
    /// Attention, backward.
    AttentionBack,
    /// The router, backward.
    RouterBack,
    /// The experts or a plain feed-forward, backward.
    ExpertsBack,
    /// Checksums of the micro-batches' gradients.
    MicroBatchSums,
    /// The additions of the tree.
    Tree,
    /// Packing gradient blocks and sending them to other ranks.
    Send,
    /// Waiting for blocks of other ranks.
    Blocks,
    /// Waiting for the ranks' reports: losses, norms, checksums.
    Peers,
    /// Checksums and norm of the summed gradient.
    Norm,
    /// Muon for the matrices.
    Muon,
    /// AdamW for the rest, or for all. Either also rounds, measures and checksums what it updates in the same pass.
    AdamW,
    /// New weights sent to every rank and received from every rank.
    Share,
    /// Checksums of a state that was not updated.
    StateSums,
}

/// Every part, in the order of a step, with its name.
pub const PARTS: [(StepPart, &str); 20] = [
    (StepPart::Batch, "batch: read, assemble"),
    (StepPart::Round, "weights rounded for products"),
    (StepPart::Stream, "embedding, norms, residuals"),
    (StepPart::Attention, "attention, forward"),
    (StepPart::Router, "router, forward"),
    (StepPart::Experts, "experts, forward"),
    (StepPart::Head, "head and loss, both ways"),
    (StepPart::ExpertsBack, "experts, backward"),
    (StepPart::RouterBack, "router, backward"),
    (StepPart::AttentionBack, "attention, backward"),
    (StepPart::MicroBatchSums, "checksums of micro-batches"),
    (StepPart::Tree, "tree of additions"),
    (StepPart::Send, "blocks packed and sent"),
    (StepPart::Blocks, "waiting for blocks of other ranks"),
    (StepPart::Peers, "waiting for the slowest rank"),
    (StepPart::Norm, "checksums and norm of the sum"),
    (StepPart::Muon, "Muon"),
    (StepPart::AdamW, "AdamW"),
    (StepPart::Share, "new weights to every rank"),
    (StepPart::StateSums, "checksums of the state"),
];

/// Parts that only serve verification; the weights would be the same without them.
pub const EXACTNESS: [StepPart; 3] =
    [StepPart::MicroBatchSums, StepPart::Norm, StepPart::StateSums];

static ON: AtomicBool = AtomicBool::new(false);
static SPENT: [AtomicU64; PARTS.len()] = [const { AtomicU64::new(0) }; PARTS.len()];

thread_local! {
    /// Nanoseconds of finished parts inside the one that is running on this thread.
    static INSIDE: Cell<u64> = const { Cell::new(0) };
    /// The innermost part that is running on this thread.
    static CURRENT: Cell<StepPart> = const { Cell::new(StepPart::Stream) };
}

/// Measures a part until it is dropped.
#[must_use]
pub struct PartTimer {
    /// The part outside.
    outer: StepPart,
    running: Option<Running>,
}

struct Running {
    part: StepPart,
    begin: Instant,
    before: u64,
}

/// Starts to measure a part on this thread.
pub fn part(part: StepPart) -> PartTimer {
    let on = ON.load(Ordering::Relaxed);
    let running = on.then(|| Running { part, begin: Instant::now(), before: INSIDE.replace(0) });
    PartTimer { outer: CURRENT.replace(part), running }
}

/// The part that this thread computes.
pub(crate) fn current() -> StepPart {
    CURRENT.get()
}

impl Drop for PartTimer {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
        let Some(Running { part, begin, before }) = self.running.take() else { return };
        let all = begin.elapsed().as_nanos() as u64;
        let own = all.saturating_sub(INSIDE.replace(before + all));
        SPENT[part as usize].fetch_add(own, Ordering::Relaxed);
    }
}

/// Runs `work` and measures it: returns its result, and the seconds of each part of [`PARTS`], in that order.
pub fn measured<T>(work: impl FnOnce() -> T) -> (T, Vec<f64>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    SPENT.iter().for_each(|spent| spent.store(0, Ordering::Relaxed));
    ON.store(true, Ordering::Relaxed);
    let outcome = work();
    ON.store(false, Ordering::Relaxed);
    let seconds =
        |(part, _): &(StepPart, &str)| SPENT[*part as usize].load(Ordering::Relaxed) as f64 / 1e9;
    (outcome, PARTS.iter().map(seconds).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;
    use std::time::Duration;

    #[test]
    fn a_part_inside_a_part_is_counted_once() {
        let nap = |milliseconds| sleep(Duration::from_millis(milliseconds));
        let start = Instant::now();
        let ((), spent) = measured(|| {
            let _outer = part(StepPart::Tree);
            nap(20);
            {
                let _inner = part(StepPart::Batch);
                nap(40);
            }
            nap(20);
        });
        let of = |part| {
            let index = PARTS.iter().position(|(one, _)| *one == part);
            spent[index.unwrap()]
        };
        assert!(of(StepPart::Batch) >= 0.04 && of(StepPart::Tree) >= 0.04);
        let all = start.elapsed().as_secs_f64();
        assert!(
            of(StepPart::Tree) + of(StepPart::Batch) <= all,
            "the inner part is not in the outer one"
        );
        for (index, (part, _)) in PARTS.iter().enumerate() {
            let twice = PARTS[index + 1..].iter().any(|(other, _)| other == part);
            assert!(!twice, "{part:?} stands there twice");
        }
    }
}
