//! Uploads a locally built store to a bucket: every file, then the manifest. Exports are uploaded the same way.
//!
//! Each object is created only if it does not exist. The content of an existing one is compared: the same content is a
//! success (an earlier, killed run; a lost answer; another builder of the same store), other content an error. So two
//! builders of different stores for one place end with one store and one error. Where another complete store exists,
//! nothing is uploaded.
//!
//! The exception is a file of more than 5 GiB, which no server copies in one request. It is put after a check that it
//! does not exist; of two simultaneous builders the second one replaces what the first one put.

use std::cell::Cell;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};
use store::location::{Address, Object};
use store::{Location, Manifest};

use super::client::{Client, PutOutcome, TransferError};
use super::tag::PART_BYTES;
use super::{apart, cache};

/// The most that a server copies in one request.
const COPY_BYTES_MAX: u64 = 5 << 30;

/// The local folder in which a store for `target` is built before it is uploaded: always the same one, so that a killed
/// build resumes.
pub fn scratch(target: &Object) -> Result<PathBuf> {
    let key = Digest::of_bytes(target.address().to_string().as_bytes());
    let folder = cache::folder();
    let folder = folder
        .map_err(|error| Location::Object(target.clone()).fault("find the cache for", &error))?;
    Ok(folder.join("builds").join(key.to_string()))
}

/// The file names of a store, the manifest last.
pub fn files(manifest: &Manifest) -> Vec<String> {
    manifest.files().into_iter().map(|file| file.path).collect()
}

/// The total size of some files of a folder.
pub fn bytes(folder: &Path, names: &[String]) -> Result<u64> {
    names.iter().map(|name| size(&folder.join(name))).sum()
}

fn size(file: &Path) -> Result<u64> {
    Ok(fs::metadata(file).map_err(|error| Fault::io("read", file, &error))?.len())
}

/// Refuses a place that contains an object whose relative name `is_ours` does not accept: a store needs a place of its
/// own, not inside another. Objects of an earlier run of the same upload are accepted.
pub fn check_place(target: &Object, is_ours: impl Fn(&str) -> bool) -> Result<()> {
    let place = Location::Object(target.clone());
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
    let client = Client::new();
    let client = client.map_err(|error| Location::Object(target.clone()).fault("reach", &error))?;
    let ends = |name: &String| (folder.join(name), target.address().join(name));
    if let Some((file, place)) = names.last().map(ends) {
        let there = found(&client, &file, &place)?;
        there.then(|| compare(&client, &file, &place)).transpose()?;
    }
    names.iter().try_for_each(|name| {
        let (from, to) = ends(name);
        let left = Cell::new(size(&from)?);
        let told = |bytes: u64| {
            // Bytes sent again were reported before.
            let bytes = bytes.min(left.get());
            left.set(left.get() - bytes);
            passed(bytes);
        };
        put(&client, &from, &to, &told)?;
        told(left.get());
        Ok(())
    })
}

/// Makes the fault of a failure, for the file or for the object.
fn failed<'a>(file: &'a Path, place: &'a Address) -> impl Fn(TransferError) -> Fault + 'a {
    |failed| match failed {
        TransferError::Here(error) => Fault::io("read", file, &error),
        TransferError::There(error) => Fault::io("write", Path::new(""), &error)
            .at(place.to_string())
            .hint("run the same command again: what is there already is compared, not sent"),
    }
}

/// Whether there is an object at `place`.
fn found(client: &Client, file: &Path, place: &Address) -> Result<bool> {
    client.is_there(place).map_err(|error| failed(file, place)(error.into()))
}

/// Refuses an object with other bytes than those of the file.
fn compare(client: &Client, file: &Path, place: &Address) -> Result<()> {
    let size = size(file)?;
    if client.holds(place, size, || fs::File::open(file)).map_err(failed(file, place))? {
        return Ok(());
    }
    Err(Fault::mismatch("something else is there already")
        .at(place.to_string())
        .wanted(format!("no object, or the {size} bytes of this build"))
        .hint("name another place; an object is never replaced"))
}

/// Creates one object, or finds that it exists with the same content.
fn put(client: &Client, file: &Path, place: &Address, passed: &dyn Fn(u64)) -> Result<()> {
    let fault = failed(file, place);
    let size = size(file)?;
    let put = if size <= PART_BYTES {
        let bytes = fs::read(file).map_err(|error| Fault::io("read", file, &error))?;
        client.create(place, &bytes).map_err(|error| fault(error.into()))?
    } else if found(client, file, place)? {
        PutOutcome::Taken
    } else {
        put_large(client, file, place, size, passed, &fault)?
    };
    if put == PutOutcome::Created {
        return Ok(());
    }
    compare(client, file, place)?;
    // Left by a kill between the copy and the removal of its source.
    if size > PART_BYTES {
        client.remove(&beside(file, place)?).map_err(|error| fault(error.into()))?;
    }
    Ok(())
}

/// Where the bytes of a large file are stored before they are copied to their place.
fn beside(file: &Path, place: &Address) -> Result<Address> {
    let (_, sum) = Location::from(file).content()?;
    Ok(place.folder().join(&format!("{}.{sum}.part", place.name())))
}

/// Creates a large object that was not found. The client's multipart upload has no condition, but a copy on the server
/// has one: so the bytes are put next to the target, named by their content, and copied to it if it still does not
/// exist.
fn put_large(
    client: &Client,
    file: &Path,
    place: &Address,
    size: u64,
    passed: &dyn Fn(u64),
    fault: &dyn Fn(TransferError) -> Fault,
) -> Result<PutOutcome> {
    let upload = |place: &Address| client.upload(place, file, PART_BYTES, passed).map_err(fault);
    if size > COPY_BYTES_MAX {
        // The library completes a multipart upload without a condition: of two uploads the last one wins.
        return upload(place).map(|()| PutOutcome::Created);
    }
    let beside = beside(file, place)?;
    upload(&beside)?;
    let put = match client.copy(&beside, place) {
        // Another publisher of the same bytes has copied and removed them: its result is compared.
        Err(error) if error.kind() == ErrorKind::NotFound => PutOutcome::Taken,
        put => put.map_err(|error| fault(error.into()))?,
    };
    client.remove(&beside).map_err(|error| fault(error.into()))?;
    Ok(put)
}
