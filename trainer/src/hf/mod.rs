//! Import and export of Hugging Face's `zaya`, and of `llama`, `qwen3`, `mixtral` and `qwen3_moe`.
//!
//! ```text
//! family   which of these models a configuration is
//! config   converts between config.json and our configuration, including the errors of released files; zyphra: the
//!          layout of Zyphra's first releases
//! names    names of tensors in files: parts of experts, and Zyphra's older layout
//! files    reads and writes the tensors of such a folder
//! export   a model as a folder that `transformers` opens       import   such a folder as the initial weights of a run
//! start    the result of an import: the folder that a curriculum's `init_from` names
//! ```
//!
//! Our names are those of Hugging Face's modules; only experts may be stored in parts. Nothing is computed here: values
//! are copied, and converted to f32 if a folder has a narrower format.

pub mod config;
pub mod export;
pub mod family;
mod files;
pub mod import;
mod names;
mod start;
mod zyphra;

#[cfg(test)]
mod dense_tests;
#[cfg(test)]
mod tests;

pub use start::InitialModel;
