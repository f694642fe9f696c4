//! Locations: local paths, and objects on servers: `s3://` (any server that speaks it), `gs://`, `az://`, and for
//! reading `https://` and `hf://datasets/`.
//!
//! A path or URL that a user names becomes a [`Location`] here, by [`locate`] or, in a file that names another one, by
//! [`resolve`]. This is the only crate with a network client and an async runtime: the other crates read and create
//! objects through what a location carries, or write folders, which [`publish`] uploads to a bucket.
//!
//! Invariant: objects are only created, never replaced. An existing object is compared, and other content is an error
//! that leaves both as they are. (An object of more than 5 GiB is created after a look, without a condition: of two
//! simultaneous publishers the last one wins.) Only checkpoints are removed, and what a killed build had put that is
//! resumed with other inputs. The manifest is put last, so a prefix that has one holds everything it names.
//! Invariant: a request whose answer was lost is repeated; a look tells whether a failed request took effect.
//!
//! Access is configured by the environment: the variables that each cloud's users know (`ingest/docs/places.md` has
//! them), `ZDATA_TIMEOUT` (seconds for a request, 60), `ZDATA_CACHE` (a folder) and `ZDATA_CACHE_BYTES` (16 GiB).

#![forbid(unsafe_code)]

#[cfg(any(test, not(feature = "clouds")))]
mod absent;
pub mod apart;
pub mod copies;
#[cfg(any(test, feature = "crash"))]
pub mod crash;
mod environment;
#[cfg(feature = "clouds")]
mod objects;
mod outputs;
pub mod process;
pub mod publish;
pub mod staging;
pub mod upload;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use contract::{Fault, Result};
pub use store::Location;
use store::location::{Address, Object, UrlScheme};

#[cfg(not(feature = "clouds"))]
use self::absent as objects;
#[cfg(feature = "crash")]
pub use self::objects::standin;

/// The location that a user typed: `s3://bucket/key`, or a path.
pub fn locate(text: &str) -> Result<Location> {
    if text.contains('\0') {
        let fault = Fault::usage("a path or URL cannot contain a zero byte");
        return Err(fault.found(format!("{text:?}")));
    }
    if UrlScheme::of(text).is_some() {
        return Ok(Location::Object(Object::new(Address::parse(text)?, objects::servers(text)?)));
    }
    let wanted = "a path, or a URL of s3://, gs://, az://, https:// or hf://";
    if text.is_empty() {
        return Err(Fault::usage("no place is named").found("an empty name").wanted(wanted));
    }
    match text.split_once("://") {
        Some((scheme, _)) if is_scheme(scheme) => {
            Err(Fault::usage(format!("URLs of {scheme}:// are not supported"))
                .found(text)
                .wanted(wanted)
                .hint(format!("for a path of this machine write \"./{text}\"")))
        }
        _ => Ok(Location::Local(PathBuf::from(text))),
    }
}

/// The folder in which this machine caches data of this kind that can be made again; `None` where no folder is known.
pub fn kept(kind: &str) -> Option<PathBuf> {
    Some(environment::cache_folder().ok()?.join(kind))
}

/// The location of an argument, which need not be UTF-8.
pub fn locate_argument(text: &OsStr) -> Result<Location> {
    match text.to_str() {
        Some(text) => locate(text),
        None => Ok(Location::Local(PathBuf::from(text))),
    }
}

/// A location as bytes, for [`locate_written`]; its name need not be UTF-8.
pub fn written(place: &Location) -> Vec<u8> {
    match place {
        Location::Local(path) => path.as_os_str().as_bytes().to_vec(),
        object => object.to_string().into_bytes(),
    }
}

/// The place that was [`written`].
pub fn locate_written(bytes: &[u8]) -> Result<Location> {
    locate_argument(OsStr::from_bytes(bytes))
}

/// The path of an argument that must be local; `otherwise` is the hint where it is not.
pub fn local_argument(text: &OsStr, otherwise: &str) -> Result<PathBuf> {
    match locate_argument(text)? {
        Location::Local(path) => Ok(path),
        Location::Object(_) => Err(Fault::usage("this place has to be on this machine")
            .found("a place in object storage")
            .wanted("a path")
            .hint(otherwise)),
    }
}

fn is_scheme(text: &str) -> bool {
    let tail = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(tail)
}

/// The location that a file in `folder` calls `name`: relative to `folder`, unless `name` is a URL or an absolute path.
pub fn resolve(folder: &Location, name: &str) -> Result<Location> {
    match locate(name)? {
        Location::Local(_) => folder.resolve(name),
        object => Ok(object),
    }
}

/// Refuses a place of a kind at which nothing can be created.
pub fn writable(place: &Location) -> Result<()> {
    match place {
        Location::Object(object) if !object.address().scheme().writes() => {
            let scheme = object.address().scheme().prefix();
            Err(Fault::usage(format!("places at {scheme} are only read"))
                .found(place.to_string())
                .wanted("a path, or a URL of s3://, gs:// or az://")
                .hint("name a place of another kind"))
        }
        _ => Ok(()),
    }
}

/// The location of an argument at which something is created.
pub fn locate_output(text: &OsStr) -> Result<Location> {
    let place = locate_argument(text)?;
    writable(&place)?;
    Ok(place)
}

#[cfg(test)]
mod places;
