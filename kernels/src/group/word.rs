//! The report of why ranks stop. The first one stands for all.

use std::time::Duration;

use crate::Error;

/// Formats a time, in seconds, for messages.
pub(super) fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

/// Prefix of the numbers of lost ranks.
const LOST: &str = "lost ";

/// Prefix of the text for ranks that were started wrongly.
const MISTAKE: &str = "mistake\n";

/// Why ranks stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StopReason {
    /// Set if ranks were lost: their numbers, as far as known. `None` if a rank gave up by itself.
    pub(super) lost: Option<Vec<u32>>,
    /// Set if ranks were started wrongly; then none is lost.
    pub(super) mistake: bool,
    /// The message for users.
    pub(super) text: String,
}

impl StopReason {
    /// Ranks stop for a reason that may pass.
    pub(super) fn stops(text: String) -> StopReason {
        StopReason { lost: None, mistake: false, text }
    }

    /// Ranks are lost.
    pub(super) fn loses(ranks: Vec<u32>, text: String) -> StopReason {
        StopReason { lost: Some(ranks), mistake: false, text }
    }

    /// Ranks were started wrongly.
    pub(super) fn mistake(text: String) -> StopReason {
        StopReason { lost: None, mistake: true, text }
    }

    /// The error for a rank that reads the report.
    pub(super) fn error(self) -> Error {
        match self.mistake {
            true => Error::Mistaken { what: self.text },
            false => Error::Reported { what: self.text },
        }
    }

    /// The form in the store.
    pub(super) fn write(&self) -> String {
        let Some(lost) = &self.lost else {
            let before = if self.mistake { MISTAKE } else { "" };
            return format!("{before}{}", self.text);
        };
        let ranks: Vec<String> = lost.iter().map(u32::to_string).collect();
        format!("{LOST}{}\n{}", ranks.join(","), self.text)
    }

    /// Parses the form in the store.
    pub(super) fn read(text: &str) -> StopReason {
        let lost = text.strip_prefix(LOST).and_then(|rest| rest.split_once('\n'));
        match lost {
            None => match text.strip_prefix(MISTAKE) {
                Some(text) => StopReason::mistake(text.to_owned()),
                None => StopReason::stops(text.to_owned()),
            },
            Some((ranks, text)) => {
                let lost = ranks.split(',').filter_map(|rank| rank.parse().ok()).collect();
                StopReason::loses(lost, text.to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(lost: Option<Vec<u32>>, mistake: bool, text in "[ -~]{0,40}(\n[ -~]{0,40})?") {
            prop_assume!(lost.is_some() || !(text.starts_with(LOST) || text.starts_with(MISTAKE)));
            let mistake = mistake && lost.is_none();
            let word = StopReason { lost, mistake, text };
            prop_assert_eq!(StopReason::read(&word.write()), word);
        }
    }
}
