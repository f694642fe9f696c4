//! Import and export of Hugging Face's `zaya`.
//!
//! ```text
//! config   converts between config.json and our configuration, including the errors of released files
//! names    Zyphra's older tensor names, where attention and experts are separate layers
//! files    reads and writes the tensors of such a folder
//! export   a model as a folder that `transformers` opens       import   such a folder as the initial weights of a run
//! start    the result of an import: the folder that a curriculum's `init_from` names
//! ```
//!
//! Our names are Hugging Face's, so an export renames nothing. Nothing is computed here: values are copied, and
//! converted to f32 if a folder has a narrower format.

pub mod config;
pub mod export;
mod files;
pub mod import;
mod names;
mod start;

#[cfg(test)]
mod tests;

pub use start::InitialModel;
