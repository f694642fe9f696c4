//! Compares the loader with naive programs, on damaged files, and under every setting of speed.

#![expect(clippy::unwrap_used, reason = "a failing test may panic")]
#![expect(clippy::print_stdout, reason = "a test that runs itself again answers there")]

mod amended;
mod buckets;
mod late;
mod many;
mod naive;
mod objective;
mod order;
mod packed;
mod support;
