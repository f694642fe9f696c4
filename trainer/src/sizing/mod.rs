//! How fast a run will be on machines that are described in a file, and what to change before anyone pays for them.
//!
//! ```text
//! curve      a rate over a size                         cluster    the file: as measured here, or as published
//! machine    measures products and memory               shapes     which products the bench measures
//! operations  measures what lies between products    attention  by itself, each way that it could be computed
//! products   those of a micro-batch, by part            traffic    its bytes outside of products
//! estimate   the seconds of a step, part by part        hints      rules of thumb that a run breaks
//! repeat     whether each product has the same bits every time
//! faults     failures, in closed form and simulated   degrees    ranks that share micro-batches
//! standing   a run on a cluster, and what its ranks wait for each other
//! ```
//!
//! Nothing here decides a bit: what is planned is the work that [`crate::step`] does, read from the same shapes.

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
pub mod products;
pub mod repeat;
pub mod shapes;
mod standing;
pub mod traffic;

#[cfg(test)]
mod counted;

pub use cluster::{Cluster, Described};
pub use curve::Curve;
