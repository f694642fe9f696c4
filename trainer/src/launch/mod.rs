//! Starting ranks: what a launcher puts into the environment, and our own launcher for one machine.
//!
//! - [`mod@place`] finds a rank's place in what torchrun, srun, mpirun or `--nproc` left in the environment.
//! - `key` finds the secret by which the ranks of a run authenticate to each other.
//! - [`mod@spawn`] is `--nproc`: it starts this program once per rank; `launcher` monitors the ranks until they end.
//! - [`supervisor`] is `ztrain supervise`: it starts the whole command, with `--nproc` or another launcher, and
//!   restarts it as [`rules`] say; `watch` detects hung and slow ranks, `ends` has the exit reports, `failure` informs
//!   people.
//!
//! Our launcher controls a rank through its standard input: "stop" asks it to stop, and end of file means that the
//! launcher has died in any way. So no rank outlives its launcher, and no signals are needed. The supervisor controls
//! the launcher in the same way, but a run whose supervisor dies stops cleanly.

mod background;
mod ends;
mod failure;
mod key;
mod launcher;
pub mod place;
pub mod rules;
pub mod spawn;
pub mod supervisor;
mod watch;

pub use ends::{first_words, last_words};
pub use place::{LaunchedRank, place, spawned_us};
pub use spawn::{Launch, meet, meet_without, rejoin, rendezvous, spawn, started_again};
pub(crate) use supervisor::signal;
pub use supervisor::{Supervisor, SupervisorLink};
