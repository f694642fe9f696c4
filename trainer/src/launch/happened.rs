//! What a supervisor does, told: a line for people, and an event of the run.

use std::path::Path;

use serde_json::json;

use super::rules::{Action, Cause};
use crate::events::Events;

/// What befell a run, and what is done about it.
pub(super) struct Happened<'a> {
    pub(super) cause: Cause,
    /// As launched; `None` where it concerns all, or nobody knows which.
    pub(super) rank: Option<u32>,
    pub(super) action: Action,
    pub(super) what: &'a str,
    pub(super) host: &'a str,
}

/// Tells it. A run that has no folder yet has no events.
pub(super) fn tell(events: &Path, happened: &Happened<'_>) {
    let Happened { cause, rank, action, what, host } = happened;
    let who = rank.map_or_else(String::new, |rank| format!(" of rank {rank}"));
    contract::note!("supervisor: {}{who} ({what}): {}", cause.name(), action.name());
    if events.is_file() {
        let fields =
            json!({"cause": cause, "rank": rank, "action": action, "what": what, "host": host});
        // A disk that is full is dealt with, whether that can be written down or not.
        let _ = Events::open(events).and_then(|mut events| events.write("supervisor", fields));
    }
}
