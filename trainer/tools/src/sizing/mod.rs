//! Estimates how fast a run will be on machines described in a file, and what to change before paying for them.
//!
//! ```text
//! curve      a rate over a size                         cluster    the file: measured here, or published
//! machine    measures matmuls and memory                shapes     which matmuls the bench measures
//! operations  measures the other operations          attention  measures attention, with each implementation
//! traffic    bytes of a micro-batch outside of matmuls
//! estimate   the seconds of a step, part by part        hints      rules of thumb that a run breaks
//! repeat     whether each matmul is reproducible
//! faults     failures, in closed form and simulated   degrees    ranks that share micro-batches
//! standing   a run on a cluster, and how long its ranks wait for each other
//! ```
//!
//! Nothing here decides a bit. The planned work is that of [`trainer::step`], computed from the same shapes.

pub mod attention;
pub mod cluster;
pub mod curve;
pub mod degrees;
pub mod estimate;
pub mod experts;
pub mod faults;
pub mod hints;
pub mod machine;
pub(crate) mod numbers;
pub mod operations;
pub mod repeat;
pub mod shapes;
mod standing;
pub mod traffic;

pub use cluster::{Cluster, ClusterDescription};
pub use curve::Curve;
