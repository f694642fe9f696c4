//! (skeleton)

pub mod source;
