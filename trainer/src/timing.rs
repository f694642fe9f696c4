//! Where the time of a step goes: parts, each with the time that its own code took on all workers together.
//!
//! Off unless [`measured`] runs: then a part costs two looks at the clock. A part inside a part is not counted twice.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reading and assembling the batch; a run hides it behind the step before.
    Batch,
    /// Weights rounded to what products compute in, where the step that moves them does not.
    Round,
    /// Embedding, norms, residual scaling: what is between the other parts of the model, both ways.
    Stream,
    /// Attention with its projections and convolutions, forward.
    Attention,
    /// The router, forward.
    Router,
    /// The experts, or what stands in their place, forward.
    Experts,
    /// The head and the loss, both ways.
    Head,
    /// Attention, backward.
    AttentionBack,
    /// The router, backward.
    RouterBack,
    /// The same, backward.
    ExpertsBack,
    /// Checksums of the micro-batches' gradients.
    MicroBatchSums,
    /// The additions of the tree.
    Tree,
    /// Blocks of the gradient packed and sent to other ranks.
    Send,
    /// Waiting for blocks of other ranks.
    Blocks,
    /// Waiting for what every rank says: losses, norms, checksums.
    Peers,
    /// Checksums and norm of the summed gradient.
    Norm,
    /// Muon on the matrices.
    Muon,
    /// AdamW on the rest, or on all. What moves is rounded, measured and summed up in the same pass, by either.
    AdamW,
    /// New weights sent to every rank and received from every rank.
    Share,
    /// Checksums of a state that has not moved.
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

/// Parts that exist so that bits can be checked; without them the same weights would come out.
pub(crate) const EXACTNESS: [Part; 3] = [Part::MicroBatchSums, Part::Norm, Part::StateSums];

static ON: AtomicBool = AtomicBool::new(false);
static SPENT: [AtomicU64; PARTS.len()] = [const { AtomicU64::new(0) }; PARTS.len()];

thread_local! {
    /// Nanoseconds that finished parts took inside the one that runs on this thread.
    static INSIDE: Cell<u64> = const { Cell::new(0) };
}

/// Runs until it is dropped.
#[must_use]
pub(crate) struct Watch(Option<Running>);

struct Running {
    part: Part,
    begin: Instant,
    before: u64,
}

/// Starts the watch of a part on this thread.
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

/// Runs `work` with the watches on: its outcome, and the seconds of each part of [`PARTS`], in that order.
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
