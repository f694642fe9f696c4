//! Chooses between libtorch's kernels and our own where a GPU has both.

use std::sync::OnceLock;

use crate::{Error, Result};

/// An operation with two implementations, and the variable that chooses one.
#[derive(Debug)]
pub struct KernelChoice {
    /// The variable's name. Its value is part of the kernel table.
    pub variable: &'static str,
    /// The operation's name in messages.
    pub what: &'static str,
    /// The variable's value: read once, since it is needed before each operation.
    said: OnceLock<Option<bool>>,
}

/// Values of such a variable.
pub const ANSWERS: [&str; 2] = ["own", "library"];

/// bf16 matmuls of experts.
pub static GROUPED: KernelChoice = KernelChoice::new("ZTRAIN_GROUPED", "products of experts");

/// bf16 attention.
pub static ATTENTION: KernelChoice = KernelChoice::new("ZTRAIN_ATTENTION", "attention");

/// All of them.
pub static CHOICES: [&KernelChoice; 2] = [&GROUPED, &ATTENTION];

impl KernelChoice {
    const fn new(variable: &'static str, what: &'static str) -> Self {
        KernelChoice { variable, what, said: OnceLock::new() }
    }

    /// Whether the variable requests the library's implementation; `None` if it requests none.
    ///
    /// # Errors
    /// If it requests an unknown implementation.
    pub(crate) fn asked(&self) -> Result<Option<bool>> {
        self.meant(&std::env::var(self.variable).unwrap_or_default())
    }

    /// The same, after it was validated at the start of the process.
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

/// Compute capability of an NVIDIA GPU from the name of its architecture, as ten times the major plus the minor number:
/// 90 for `sm_90a`. `None` for others.
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
