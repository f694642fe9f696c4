//! The progress of a rank, as it publishes it in the store: for ranks that miss it, and for monitoring.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::time::Duration;

use super::KeyValueStore;
use super::exchange_id::AXES;
use crate::Result;
use crate::shim::symbol;

/// Steps whose times are kept. The launcher polls five times a second and sees what was published up to a tenth of a
/// second before: so it sees every step that takes a twentieth of a second.
const STEPS: usize = 6;

/// The progress of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankProgress {
    /// The number of exchanges begun on each axis; the axis of all ranks comes first.
    pub begun: [u64; AXES],
    /// The last steps for which it finished its own computation, with the time of a micro-batch; the newest last.
    /// `None` if it had no micro-batch.
    pub computed: Vec<(u64, Option<Duration>)>,
    /// The last exchange that it began ("the gathering of losses"); empty before the first one.
    pub exchange: String,
    /// What it is doing ("step 12, micro-batch 3").
    pub place: String,
}

impl RankProgress {
    /// For a rank that has just met the others.
    pub(super) fn start() -> Self {
        let (exchange, place) = (String::new(), "the start".to_owned());
        RankProgress { begun: [0; AXES], computed: Vec::new(), exchange, place }
    }

    /// Adds a step and drops the oldest beyond [`STEPS`].
    pub(super) fn add(&mut self, step: u64, time: Option<Duration>) {
        self.computed.push((step, time));
        let old = self.computed.len().saturating_sub(STEPS);
        self.computed.drain(..old);
    }

    /// Publishes the progress in the store, for `rank`.
    pub(super) fn post(&self, store: &KeyValueStore, rank: u32) -> Result<()> {
        store.set(&key(rank), &self.written())
    }

    /// The progress of `rank`, once it has published any.
    pub(super) fn find(store: &KeyValueStore, rank: u32) -> Result<Option<Self>> {
        Ok(store.find(&key(rank))?.as_deref().and_then(RankProgress::read))
    }

    /// `BEGUN|COMPUTED|EXCHANGE|PLACE`.
    fn written(&self) -> String {
        let begun: Vec<String> = self.begun.iter().map(u64::to_string).collect();
        let nanos =
            |time: &Option<Duration>| time.map_or_else(String::new, |it| it.as_nanos().to_string());
        let step = |(step, time): &(u64, Option<Duration>)| format!("{step}:{}", nanos(time));
        let computed: Vec<String> = self.computed.iter().map(step).collect();
        format!("{}|{}|{}|{}", begun.join(","), computed.join(","), self.exchange, self.place)
    }

    fn read(text: &str) -> Option<Self> {
        let mut parts = text.splitn(4, '|');
        let (numbers, mut begun) = (parts.next()?, [0; AXES]);
        for (begun, number) in begun.iter_mut().zip(numbers.split(',')) {
            *begun = number.parse().ok()?;
        }
        let step = |text: &str| {
            let (step, time) = text.split_once(':')?;
            let nanos = (!time.is_empty()).then(|| time.parse()).transpose().ok()?;
            Some((step.parse().ok()?, nanos.map(Duration::from_nanos)))
        };
        let computed = parts.next()?.split(',').filter_map(step).collect();
        let (exchange, place) = (parts.next()?.to_owned(), parts.next()?.to_owned());
        Some(RankProgress { begun, computed, exchange, place })
    }
}

/// The function `void ztrain_progress(const char* text, size_t bytes)` of a library that was loaded with the program
/// (`LD_PRELOAD`): a tracer, or a test that ends a rank at a place. The text is that of the store, not terminated.
#[derive(Clone, Copy)]
pub(super) struct Observer(Show);

type Show = unsafe extern "C" fn(*const c_char, usize);

/// The observer of this process, if there is one.
pub(super) fn observer() -> Option<Observer> {
    static FOUND: OnceLock<Option<Observer>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let found = symbol(c"ztrain_progress");
        // SAFETY: its type as documented; null is `None`.
        unsafe { std::mem::transmute::<*mut c_void, Option<Show>>(found) }.map(Observer)
    })
}

impl Observer {
    /// Shows it this progress.
    pub(super) fn show(self, progress: &RankProgress) {
        let text = progress.written();
        // SAFETY: the text outlives the call, with its length.
        unsafe { (self.0)(text.as_ptr().cast(), text.len()) }
    }
}

fn key(rank: u32) -> String {
    format!("at/{rank}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(
            begun: [u64; AXES], steps: Vec<(u64, Option<u64>)>, exchange in "[ -{}~]{0,40}", place in "[ -~]{0,40}",
        ) {
            let computed = steps.iter().map(|(step, nanos)| (*step, nanos.map(Duration::from_nanos))).collect();
            let written = RankProgress { begun, computed, exchange, place };
            prop_assert_eq!(RankProgress::read(&written.written()), Some(written));
        }
    }
}
