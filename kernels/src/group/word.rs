//! The word that ranks leave of why they stop. The first one stands for all.

use std::time::Duration;

use crate::Error;

/// A time for people, in seconds.
pub(super) fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

/// Before the numbers of ranks that are lost.
const LOST: &str = "lost ";

/// Before the text of ranks that were started wrongly.
const MISTAKE: &str = "mistake\n";

/// Why ranks stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    /// Set where ranks were lost: by number, as far as anybody knows which. Where a rank gave up by itself: `None`.
    pub(super) lost: Option<Vec<u32>>,
    /// Set where ranks were started wrongly; none is lost then.
    pub(super) mistake: bool,
    /// The same for people.
    pub(super) text: String,
}

impl Word {
    /// That of ranks that stop, for a reason that may pass.
    pub(super) fn stops(text: String) -> Word {
        Word { lost: None, mistake: false, text }
    }

    /// That of ranks that are lost.
    pub(super) fn loses(ranks: Vec<u32>, text: String) -> Word {
        Word { lost: Some(ranks), mistake: false, text }
    }

    /// That of ranks that were started wrongly.
    pub(super) fn mistake(text: String) -> Word {
        Word { lost: None, mistake: true, text }
    }

    /// What to say to whoever reads it.
    pub(super) fn error(self) -> Error {
        match self.mistake {
            true => Error::Mistaken { what: self.text },
            false => Error::Reported { what: self.text },
        }
    }

    /// As it is written into the store.
    pub(super) fn write(&self) -> String {
        let Some(lost) = &self.lost else {
            let before = if self.mistake { MISTAKE } else { "" };
            return format!("{before}{}", self.text);
        };
        let ranks: Vec<String> = lost.iter().map(u32::to_string).collect();
        format!("{LOST}{}\n{}", ranks.join(","), self.text)
    }

    /// What was written.
    pub(super) fn read(text: &str) -> Word {
        let lost = text.strip_prefix(LOST).and_then(|rest| rest.split_once('\n'));
        match lost {
            None => match text.strip_prefix(MISTAKE) {
                Some(text) => Word::mistake(text.to_owned()),
                None => Word::stops(text.to_owned()),
            },
            Some((ranks, text)) => {
                let lost = ranks.split(',').filter_map(|rank| rank.parse().ok()).collect();
                Word::loses(lost, text.to_owned())
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
            let word = Word { lost, mistake, text };
            prop_assert_eq!(Word::read(&word.write()), word);
        }
    }
}
