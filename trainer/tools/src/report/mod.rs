//! Shows a run to people: the ledger as a table, odd steps with their causes, a page of curves.
//!
//! ```text
//! ledger.jsonl --Follower--> seen --> odd (window)      events.jsonl --> log
//!                              \--> bins                    |
//!                               view: a run as far as it was read
//! ```
//!
//! Everything here only reads, so a run can be viewed while it is running.

mod bins;
mod log;
mod odd;
mod open_metrics;
mod page;
mod payload;
mod table;
mod view;
mod watch;

use std::path::Path;

use contract::shell;

use trainer::folder::RunFolder;

pub(crate) use log::SLOW;
pub use log::{EventLog, NotableEvent, NotableEventKind, ValidationPoint};
pub use odd::{OddReason, OddReasonKind, OddStep};
pub use page::{page, payload};
pub use table::StepRows;
pub use view::RunView;
pub use watch::PageServer;

/// The command that explains a step of the run at `root`, quoted for a shell.
pub fn explain_command(root: &Path, step: impl std::fmt::Display) -> String {
    format!("ztrain explain --run {} --step {step}", shell::path(root))
}

/// The commands that inspect a step of the run at `root`, each with its purpose; `{}` stands for the step.
fn commands(root: &Path) -> Vec<(&'static str, String)> {
    let curriculum = shell::path(&RunFolder::new(root).curriculum());
    vec![
        ("What caused it", explain_command(root, "{}")),
        ("The text it trained on", format!("zdata batch {curriculum} --step {{}}")),
    ]
}

/// An integer with thousands separators: "48,113".
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_number_in_groups_is_that_number(number: u64) {
            let text = grouped(number);
            prop_assert_eq!(text.replace(',', ""), number.to_string());
            prop_assert!(text.split(',').skip(1).all(|group| group.len() == 3));
            prop_assert!(text.split(',').next().is_some_and(|first| (1..=3).contains(&first.len())));
        }
    }
}
