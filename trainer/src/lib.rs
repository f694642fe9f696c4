//! (skeleton)

pub mod model;
