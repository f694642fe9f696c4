//! JSON as it is written to files and to other programs.

use serde::Serialize;
use serde_json::Error;

use crate::{Fault, Result};

/// The shortest bytes; `what` names the value in an error.
pub fn bytes(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    written(serde_json::to_vec(value), what)
}

/// The same as a line, with its end.
pub fn line(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    bytes(value, what).map(ended)
}

/// A text for people, with the end of its last line.
pub fn pretty(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    written(serde_json::to_vec_pretty(value), what).map(ended)
}

fn ended(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.push(b'\n');
    bytes
}

/// No value of ours has what JSON cannot say, such as a map whose keys are no strings.
fn written(made: std::result::Result<Vec<u8>, Error>, what: &str) -> Result<Vec<u8>> {
    made.map_err(|error| Fault::bug(format!("{what} cannot be written: {error}")))
}
