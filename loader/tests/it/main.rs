//! The loader against naive programs, damage, and every way of being fast.

#![expect(clippy::unwrap_used, reason = "a failing test may panic")]

mod many;
mod naive;
mod order;
mod support;
