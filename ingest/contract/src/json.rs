//! JSON as it is written to files and to other programs.

use serde::Serialize;
use serde_json::Error;

use crate::{Fault, Result};

/// Compact JSON; `what` names the value in an error.
pub fn bytes(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    written(serde_json::to_vec(value), what)
}

/// Compact JSON with a line end.
pub fn line(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    bytes(value, what).map(ended)
}

/// Indented JSON with a line end.
pub fn pretty(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    written(serde_json::to_vec_pretty(value), what).map(ended)
}

fn ended(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.push(b'\n');
    bytes
}

/// None of our values is unrepresentable in JSON, as a map with keys that are not strings would be.
fn written(made: std::result::Result<Vec<u8>, Error>, what: &str) -> Result<Vec<u8>> {
    made.map_err(|error| Fault::bug(format!("{what} cannot be written: {error}")))
}
