//! Creates the objects of [`publish`](crate::publish) from files.

use std::cell::Cell;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use contract::{Fault, Result};
use store::Location;
use store::location::{Address, Object};

use super::client::{Client, PutOutcome, TransferError};
use super::tag::PART_BYTES;

/// The most that a server copies in one request.
const COPY_BYTES_MAX: u64 = 5 << 30;

/// Puts the files `names` of `folder` to `target`, in this order: the last one completes the output. Calls `passed`
/// with the bytes sent, in total exactly the size of each file.
pub(crate) fn upload(
    folder: &Path,
    target: &Object,
    names: &[String],
    passed: &dyn Fn(u64),
) -> Result<()> {
    let client = Client::new();
    let client = client.map_err(|error| Location::Object(target.clone()).fault("reach", &error))?;
    refuse_other(&client, folder, target, names)?;
    names.iter().try_for_each(|name| {
        let (from, to) = (folder.join(name), target.address().join(name));
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

/// Refuses a place that has another version of the last of these files, which completes an output.
pub(super) fn refuse_other(
    client: &Client,
    folder: &Path,
    target: &Object,
    names: &[String],
) -> Result<()> {
    let Some(name) = names.last() else { return Ok(()) };
    let (file, place) = (folder.join(name), target.address().join(name));
    if found(client, &file, &place)? { compare(client, &file, &place) } else { Ok(()) }
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

fn size(file: &Path) -> Result<u64> {
    Ok(fs::metadata(file).map_err(|error| Fault::io("read", file, &error))?.len())
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
pub(super) fn put(
    client: &Client,
    file: &Path,
    place: &Address,
    passed: &dyn Fn(u64),
) -> Result<()> {
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
        // The library completes a multipart upload without a condition: of two uploads the last one wins, or on Azure
        // the first. What is there is compared.
        return upload(place).map(|()| PutOutcome::Taken);
    }
    let beside = beside(file, place)?;
    match upload(&beside) {
        // Azure has one upload at a time for an object. Another publisher of the same bytes may have ended it, copied
        // its object and removed it: its result is compared.
        Err(_) if found(client, file, place)? => return Ok(PutOutcome::Taken),
        sent => sent?,
    }
    let put = match client.copy(&beside, place) {
        // Another publisher of the same bytes has copied and removed them: its result is compared.
        Err(error) if error.kind() == ErrorKind::NotFound => PutOutcome::Taken,
        put => put.map_err(|error| fault(error.into()))?,
    };
    client.remove(&beside).map_err(|error| fault(error.into()))?;
    Ok(put)
}
