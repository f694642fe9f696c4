//! How ranks come to be: what a launcher leaves in the environment, and our own launcher on one machine.
//!
//! - [`mod@place`] finds a rank's place in what torchrun, srun, mpirun or `--nproc` left in the environment.
//! - `key` finds the secret that the run's ranks prove to each other.
//! - [`mod@spawn`] is `--nproc`: it starts this program once for each rank; `supervise` watches over the ranks until they end.
//! - [`guard`] is `ztrain supervise`: it starts the whole command, by `--nproc` or another launcher, and again where [`rules`]
//!   say so; `watch` finds ranks that hang or are slow, `ends` is what processes leave word of, `happened` tells people.
//!
//! A rank's standard input is its tie to our launcher: "stop" asks it to stop, and its end tells it that the launcher is
//! gone, however that ended. So no rank outlives its launcher, and nobody needs to send a signal to anybody. The launcher's own
//! is its tie to the supervisor in the same way, but a run without a supervisor ends in good order.

mod background;
mod ends;
pub mod guard;
mod happened;
mod key;
pub mod place;
pub mod rules;
pub mod spawn;
mod supervise;
mod watch;

pub use ends::{first_words, last_words};
pub use guard::{Guard, Supervised};
pub use place::{Launched, place, spawned_us};
pub use spawn::{Launch, meet, meet_without, rejoin, rendezvous, spawn, started_again};
