//! How ranks come to be: what a launcher leaves in the environment, and our own launcher on one machine.
//!
//! - [`mod@place`] finds a rank's place in what torchrun, srun, mpirun or `--nproc` left in the environment.
//! - `key` finds the secret that the run's ranks prove to each other.
//! - [`mod@spawn`] is `--nproc`: it starts this program once for each rank; `supervise` watches over the ranks until they end.
//!
//! A rank's standard input is its tie to our launcher: "stop" asks it to stop, and its end tells it that the launcher is
//! gone, however that ended. So no rank outlives its launcher, and nobody needs to send a signal to anybody.

mod key;
pub mod place;
pub mod spawn;
mod supervise;

pub use place::{Launched, place};
pub use spawn::{meet, rendezvous, spawn, spawned_us};
