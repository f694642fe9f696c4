//! Hugging Face's `zaya`, in and out.
//!
//! ```text
//! config   config.json to our configuration and back, the quirks of released files included
//! names    Zyphra's older names of tensors, where attention and experts are layers of their own
//! files    the tensors of such a folder, read and written
//! export   a model as a folder that `transformers` opens       import   such a folder as the start of a run
//! start    what an import leaves: the folder that a curriculum's `start` names
//! ```
//!
//! Our names are Hugging Face's, so that nothing is renamed on the way out. Nothing here computes: numbers are copied, and
//! widened to f32 where a folder holds narrower ones.

pub mod config;
pub mod export;
mod files;
pub mod import;
mod names;
mod start;

#[cfg(test)]
mod tests;

pub use start::Start;
