//! Whose kernels a GPU computes with where libtorch has some and so do we.

use std::sync::OnceLock;

use crate::{Error, Result};

/// An operation of which there are two, and the variable that says which one is taken.
#[derive(Debug)]
pub struct Choice {
    /// The variable's name. Its value stands in the kernel table.
    pub variable: &'static str,
    /// What is chosen, as it is told.
    pub what: &'static str,
    /// What the variable says: read once, since it is asked before each operation.
    said: OnceLock<Option<bool>>,
}

/// What such a variable may say.
pub const ANSWERS: [&str; 2] = ["own", "library"];

/// Products of experts in bf16.
pub static GROUPED: Choice = Choice::new("ZTRAIN_GROUPED", "products of experts");

/// Attention in bf16.
pub static ATTENTION: Choice = Choice::new("ZTRAIN_ATTENTION", "attention");

/// All of them.
pub static CHOICES: [&Choice; 2] = [&GROUPED, &ATTENTION];

impl Choice {
    const fn new(variable: &'static str, what: &'static str) -> Self {
        Choice { variable, what, said: OnceLock::new() }
    }

    /// Whether the variable asks for the library's; `None` where it asks for nothing.
    ///
    /// # Errors
    /// Where it asks for what there is not.
    pub(crate) fn asked(&self) -> Result<Option<bool>> {
        self.meant(&std::env::var(self.variable).unwrap_or_default())
    }

    /// The same, once it was found at the start of the process to be meant.
    pub(super) fn known(&self) -> Option<bool> {
        *self.said.get_or_init(|| self.asked().unwrap_or_default())
    }

    fn meant(&self, value: &str) -> Result<Option<bool>> {
        match value {
            "" => Ok(None),
            "own" => Ok(Some(false)),
            "library" => Ok(Some(true)),
            other => Err(Error::Mistaken {
                what: format!(
                    "{} is {other:?}; there are {}",
                    self.variable,
                    ANSWERS.join(" and ")
                ),
            }),
        }
    }
}

/// Compute capability of an NVIDIA GPU by the name of its architecture, ten times the major number and the minor one: 90 of
/// `sm_90a`. `None` of others.
pub(super) fn capability(architecture: &str) -> Option<u32> {
    let digits = architecture.strip_prefix("sm_")?.trim_end_matches('a');
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for choice in CHOICES {
            let answers = ["", "own", "library"].map(|value| choice.meant(value).unwrap());
            assert_eq!(answers, [None, Some(false), Some(true)]);
            for wrong in ["ours", "LIBRARY", "1"] {
                let refused = choice.meant(wrong).unwrap_err().to_string();
                assert!(
                    refused.contains(wrong) && refused.contains("own and library"),
                    "{refused}"
                );
                assert!(refused.contains(choice.variable), "{refused}");
            }
        }
    }

    #[test]
    fn capabilities_are_numbers_of_one_vendor() {
        let of = ["sm_90a", "sm_80", "sm_120", "gfx942", "", "sm_"].map(capability);
        assert_eq!(of, [Some(90), Some(80), Some(120), None, None, None]);
    }
}
