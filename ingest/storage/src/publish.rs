//! Uploads a locally built store to a bucket: every file, then the manifest. Exports are uploaded the same way.
//!
//! Each object is created only if it does not exist. The content of an existing one is compared: the same content is a
//! success (an earlier, killed run; a lost answer; another builder of the same store), other content an error. So two
//! builders of different stores for one place end with one store and one error. Where another complete store exists,
//! nothing is uploaded.
//!
//! The exception is a file of more than 5 GiB, which no server copies in one request. It is put after a check that it
//! does not exist; of two simultaneous builders the second one replaces what the first one put.

use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};
use store::Location;
use store::location::Object;

pub use super::outputs::{bytes, files};
use super::{apart, environment};

/// The local folder in which a store for `target` is built before it is uploaded: always the same one, so that a killed
/// build resumes.
pub fn scratch(target: &Object) -> Result<PathBuf> {
    let key = Digest::of_bytes(target.address().to_string().as_bytes());
    let folder = environment::cache_folder();
    let folder = folder
        .map_err(|error| Location::Object(target.clone()).fault("find the cache for", &error))?;
    Ok(folder.join("builds").join(key.to_string()))
}

/// Refuses a place that contains an object whose relative name `is_ours` does not accept: a store needs a place of its
/// own, not inside another. Objects of an earlier run of the same upload are accepted.
pub fn check_place(target: &Object, is_ours: impl Fn(&str) -> bool) -> Result<()> {
    let place = Location::Object(target.clone());
    super::writable(&place)?;
    if place.is_file()? {
        return Err(Fault::usage("this is a file, and a folder of them belongs here")
            .at(place.to_string())
            .hint("name another place"));
    }
    apart::refuse_inside(&place)?;
    let names = target.list().map_err(|error| place.fault("list", &error))?;
    // A multipart upload is stored next to its target, named by its content.
    let whole = |name: &str| match name.strip_suffix(".part").and_then(|it| it.rsplit_once('.')) {
        Some((whole, _)) => whole.to_owned(),
        None => name.to_owned(),
    };
    match names.iter().find(|name| !is_ours(&whole(name))) {
        None => Ok(()),
        Some(other) => Err(Fault::usage("this place holds something else")
            .at(place.to_string())
            .found(other)
            .wanted("nothing, or what was put there of a store")
            .hint("name another place")),
    }
}

/// Puts the files `names` of `folder` to `target`, in this order: the last one completes the output. Calls `passed`
/// with the bytes sent, in total exactly the size of each file.
pub fn publish(
    folder: &Path,
    target: &Object,
    names: &[String],
    passed: &dyn Fn(u64),
) -> Result<()> {
    super::objects::upload(folder, target, names, passed)
}
