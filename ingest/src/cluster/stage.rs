//! The stages of a build that are split into tasks.

/// A stage of many tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Documents are analyzed, so that they can be compared.
    Scan,
    /// Documents are prepared and encoded.
    Encode,
}

impl Stage {
    /// Its name in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Scan => "scan",
            Stage::Encode => "encode",
        }
    }
}
