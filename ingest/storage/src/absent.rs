//! Stands in for `objects` in a build without the feature `clouds`: one refusal of every place in object storage.

use std::sync::Arc;

use contract::{Fault, Result};
use store::location::Remote;

/// Refuses the place that a user named.
pub(super) fn servers(place: &str) -> Result<Arc<dyn Remote>> {
    Err(Fault::usage("this program was built without object storage and web servers")
        .found(place)
        .wanted("a path")
        .hint("build it with the feature `clouds`, which is on by default: cargo build --features clouds ..."))
}

/// Refuses an upload: no object can be named in such a build.
#[cfg(not(feature = "clouds"))]
pub(super) fn upload(
    _: &std::path::Path,
    to: &store::location::Object,
    _: &[String],
    _: &dyn Fn(u64),
) -> Result<()> {
    servers(&to.address().to_string()).map(drop)
}

/// The upload of a store while it is built, which cannot begin.
#[cfg(not(feature = "clouds"))]
pub struct Upload(std::convert::Infallible);

#[cfg(not(feature = "clouds"))]
impl Upload {
    /// Refuses it.
    pub fn begin(to: &store::location::Object, _: &std::path::Path) -> Result<Self> {
        let refused = upload(std::path::Path::new(""), to, &[], &|_| ());
        Err(refused.err().unwrap_or_else(|| Fault::bug("there is no object storage")))
    }

    /// Knows nothing.
    pub fn knows(&self, _: &str) -> bool {
        match self.0 {}
    }

    /// Puts nothing.
    pub fn put(&mut self, _: &std::path::Path, _: &str) -> Result<()> {
        match self.0 {}
    }

    /// Puts nothing.
    pub fn finish(self, _: &std::path::Path, _: &store::Manifest, _: &dyn Fn(u64)) -> Result<()> {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusal_names_the_place_and_the_feature() {
        let Err(fault) = servers("s3://bucket/key") else { panic!("there are servers") };
        assert_eq!(fault.class(), contract::Class::Usage);
        let text = fault.to_string();
        assert!(text.contains("s3://bucket/key") && text.contains("--features clouds"), "{text}");
    }
}
