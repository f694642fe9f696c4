//! The model (stand-in for a build before it lands).
mod config;
mod normal;
mod params;
pub use config::*;
pub use params::*;
