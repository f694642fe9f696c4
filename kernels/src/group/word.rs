//! The word that ranks leave of why they stop. The first one stands for all.

/// Before the numbers of ranks that are lost.
const LOST: &str = "lost ";

/// Why ranks stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    /// Set where ranks were lost: by number, as far as anybody knows which. Where a rank gave up by itself: `None`.
    pub(super) lost: Option<Vec<u32>>,
    /// The same for people.
    pub(super) text: String,
}

impl Word {
    /// As it is written into the store.
    pub(super) fn write(&self) -> String {
        let Some(lost) = &self.lost else { return self.text.clone() };
        let ranks: Vec<String> = lost.iter().map(u32::to_string).collect();
        format!("{LOST}{}\n{}", ranks.join(","), self.text)
    }

    /// What was written.
    pub(super) fn read(text: &str) -> Word {
        let lost = text.strip_prefix(LOST).and_then(|rest| rest.split_once('\n'));
        match lost {
            None => Word { lost: None, text: text.to_owned() },
            Some((ranks, text)) => {
                let lost = ranks.split(',').filter_map(|rank| rank.parse().ok()).collect();
                Word { lost: Some(lost), text: text.to_owned() }
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
        fn what_is_written_is_read(lost: Option<Vec<u32>>, text in "[ -~]{0,40}(\n[ -~]{0,40})?") {
            prop_assume!(lost.is_some() || !text.starts_with(LOST));
            let word = Word { lost, text };
            prop_assert_eq!(Word::read(&word.write()), word);
        }
    }
}
