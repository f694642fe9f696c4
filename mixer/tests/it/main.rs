//! Tests of the curriculum file and the plan, in one program: each further one would be linked separately.

#![expect(clippy::unwrap_used, reason = "a failing test may panic")]

mod buckets;
mod curricula;
mod curriculum;
mod edits;
mod groups;
mod mixing;
mod naive;
mod oracle;
mod ramp_keys;
mod ramps;
mod reacting;
mod schedules;
mod shuffle;
