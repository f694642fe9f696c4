//! Measures the time of each part of a step: the time of the part's own code, summed over all workers.
//!
//! Disabled unless [`measured`] runs; then a part costs two clock readings. Nested parts are not counted twice.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
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
pub const PARTS: [(Part, &str); 20] = [
    (Part::Batch, "batch: read, assemble"),
    (Part::Round, "weights rounded for products"),
    (Part::Stream, "embedding, norms, residuals"),
    (Part::Attention, "attention, forward"),
    (Part::Router, "router, forward"),
    (Part::Experts, "experts, forward"),
    (Part::Head, "head and loss, both ways"),
    (Part::ExpertsBack, "experts, backward"),
    (Part::RouterBack, "router, backward"),
    (Part::AttentionBack, "attention, backward"),
    (Part::MicroBatchSums, "checksums of micro-batches"),
    (Part::Tree, "tree of additions"),
    (Part::Send, "blocks packed and sent"),
    (Part::Blocks, "waiting for blocks of other ranks"),
    (Part::Peers, "waiting for the slowest rank"),
    (Part::Norm, "checksums and norm of the sum"),
    (Part::Muon, "Muon"),
    (Part::AdamW, "AdamW"),
    (Part::Share, "new weights to every rank"),
    (Part::StateSums, "checksums of the state"),
];

/// Parts that only serve verification; the weights would be the same without them.
pub(crate) const EXACTNESS: [Part; 3] = [Part::MicroBatchSums, Part::Norm, Part::StateSums];

static ON: AtomicBool = AtomicBool::new(false);
static SPENT: [AtomicU64; PARTS.len()] = [const { AtomicU64::new(0) }; PARTS.len()];

thread_local! {
    /// Nanoseconds of finished parts inside the one that is running on this thread.
    static INSIDE: Cell<u64> = const { Cell::new(0) };
}

/// Measures a part until it is dropped.
#[must_use]
pub(crate) struct Watch(Option<Running>);

struct Running {
    part: Part,
    begin: Instant,
    before: u64,
}

/// Starts to measure a part on this thread.
pub(crate) fn part(part: Part) -> Watch {
    let on = ON.load(Ordering::Relaxed);
    Watch(on.then(|| Running { part, begin: Instant::now(), before: INSIDE.replace(0) }))
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(Running { part, begin, before }) = self.0.take() else { return };
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
        |(part, _): &(Part, &str)| SPENT[*part as usize].load(Ordering::Relaxed) as f64 / 1e9;
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
            let _outer = part(Part::Tree);
            nap(20);
            {
                let _inner = part(Part::Batch);
                nap(40);
            }
            nap(20);
        });
        let of = |part| {
            let index = PARTS.iter().position(|(one, _)| *one == part);
            spent[index.unwrap()]
        };
        assert!(of(Part::Batch) >= 0.04 && of(Part::Tree) >= 0.04);
        let all = start.elapsed().as_secs_f64();
        assert!(of(Part::Tree) + of(Part::Batch) <= all, "the inner part is not in the outer one");
        for (index, (part, _)) in PARTS.iter().enumerate() {
            let twice = PARTS[index + 1..].iter().any(|(other, _)| other == part);
            assert!(!twice, "{part:?} stands there twice");
        }
    }
}
