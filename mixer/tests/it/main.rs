//! The curriculum file and the plan, in one program: each further test program would be linked by itself.

#![expect(clippy::unwrap_used, reason = "a failing test may panic")]

mod curricula;
mod curriculum;
mod edits;
mod mixing;
mod oracle;
