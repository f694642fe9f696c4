//! Reports what a supervisor does: a line for people, and an event of the run.

use std::path::Path;

use serde_json::json;

use super::rules::{Action, Cause};
use crate::events::Events;

/// A failure of a run, and the action taken.
pub(super) struct FailureEvent<'a> {
    pub(super) cause: Cause,
    /// As launched; `None` if it concerns all ranks, or is unknown.
    pub(super) rank: Option<u32>,
    pub(super) action: Action,
    pub(super) what: &'a str,
    pub(super) host: &'a str,
}

/// Prints and records it. A run without a folder has no events.
pub(super) fn record_failure(events: &Path, failure: &FailureEvent<'_>) {
    let FailureEvent { cause, rank, action, what, host } = failure;
    let of_rank = rank.map_or_else(String::new, |rank| format!(" of rank {rank}"));
    contract::note!("supervisor: {}{of_rank} ({what}): {}", cause.name(), action.name());
    if events.is_file() {
        let fields =
            json!({"cause": cause, "rank": rank, "action": action, "what": what, "host": host});
        // A full disk is handled even if that cannot be recorded.
        let _ = Events::open(events).and_then(|mut events| events.write("supervisor", fields));
    }
}
