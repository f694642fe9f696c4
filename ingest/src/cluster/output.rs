//! The parts of the encode stage on disk: a folder of files of the store, and a record of what is in it.
//!
//! ```text
//! parts/KEY/           the files of the part, as the store has them
//! parts/KEY.json       what they are: a `PartOutput` on one line, then the key and the xxh3-128 of that line
//! ```
//!
//! The record is written last: without it, the folder is what a killed task left. It is not in the folder, because it
//! depends on the encoder, and no byte of a store does.

use std::io::ErrorKind;
use std::path::Path;

use contract::{Class, Digest, Fault, Identity, Result, json};
use store::{FileRecord, disk, regular};

use super::plan::Plan;
use super::result::{self, conflict, create};
use crate::assembly::part::PartOutput;
use crate::cache_dir::CacheDir;

/// Writes the record of the part that a task made in the folder `scratch`, and gives the folder its name. If the part
/// exists, the two must be equal; a second one that differs is kept too.
pub(super) fn commit(
    plan: &Plan,
    key: Identity,
    scratch: &Path,
    output: &PartOutput,
) -> Result<Digest> {
    disk::sync_folder(scratch)?;
    let cache = &plan.cache;
    let (folder, record) = (cache.part_folder(key), cache.part_record(key));
    let (text, digest) = described(key, output)?;
    let there = match read(cache, key) {
        // The part was made anew: what is damaged is replaced.
        Err(fault) if fault.class() == Class::Data => {
            disk::remove(&record)?;
            None
        }
        there => there?,
    };
    if let Some((_, before)) = there {
        if before == digest {
            disk::remove(scratch)?;
            return Ok(digest);
        }
        let kept = folder.with_extension(format!("{digest}.conflict"));
        disk::rename(scratch, &kept).map_err(|error| Fault::io("keep", &kept, &error))?;
        return Err(conflict("the task of this part")
            .at(record.display().to_string())
            .found(format!("{digest}, kept as {}", kept.display()))
            .wanted(before));
    }
    while let Err(error) = disk::rename(scratch, &folder) {
        if !folder.is_dir() {
            return Err(Fault::io("create", &folder, &error));
        }
        // What a killed task left, or what another run of this task has just made: equal to this one.
        let aside = result::scratch(&plan.folder(), &key.to_string())?;
        let _ = disk::rename(&folder, &aside);
        disk::remove(&aside)?;
    }
    disk::sync_folder(&cache.parts_folder())?;
    let half = result::scratch(&plan.folder(), &format!("{key}.json"))?;
    disk::write_atomic(&half, text.as_bytes())?;
    if !create(&half, &record)? {
        disk::remove(&half)?;
    }
    Ok(digest)
}

/// The text of a record, and its digest.
pub(super) fn described(key: Identity, output: &PartOutput) -> Result<(String, Digest)> {
    let line = json::line(output, "a part")?;
    let digest = Digest::of_bytes(&line);
    let line = String::from_utf8(line).map_err(|_| Fault::bug("a part is not UTF-8"))?;
    Ok((format!("{line}{key} {digest}\n"), digest))
}

/// The part of this key and its digest; none if it does not exist. Its files are not looked at.
pub(super) fn read(cache: &CacheDir, key: Identity) -> Result<Option<(PartOutput, Digest)>> {
    let path = cache.part_record(key);
    let bytes = match regular::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(|error| Fault::io("read", &path, &error))?,
    };
    let damaged = |what: &str| damaged(&path, what);
    let end = bytes.iter().position(|byte| *byte == b'\n');
    let (line, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
    let digest = Digest::of_bytes(line);
    if rest != format!("{key} {digest}\n").as_bytes() {
        return Err(damaged("this is another part than its name says, or it is damaged"));
    }
    let output = serde_json::from_slice(line).map_err(|_| damaged("this part is damaged"))?;
    Ok(Some((output, digest)))
}

/// The files of a part.
pub(super) fn files(output: &PartOutput) -> impl Iterator<Item = &FileRecord> {
    let shards = output.streams.iter().flat_map(|stream| &stream.shards);
    shards.flat_map(|shard| shard.files()).chain(&output.dropped_file)
}

/// Refuses a part without all of its files, by their sizes: readers of the store check their bytes.
pub(super) fn refuse_incomplete(folder: &Path, output: &PartOutput) -> Result<()> {
    for file in files(output) {
        let path = folder.join(&file.name);
        let size = match regular::size(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            size => Some(size.map_err(|error| Fault::io("read", &path, &error))?),
        };
        if size != Some(file.bytes) {
            let found = size.map_or("nothing".to_owned(), |size| format!("{size} bytes"));
            return Err(damaged(folder, &format!("this part has not all of its {}", file.name))
                .found(found)
                .wanted(format!("{} bytes", file.bytes)));
        }
    }
    Ok(())
}

/// The digest of a part that exists, if it has all of its files.
pub(super) fn whole_digest(cache: &CacheDir, key: Identity) -> Result<Digest> {
    let there = read(cache, key)?;
    let gone = || damaged(&cache.part_record(key), "this part is missing");
    let (output, digest) = there.ok_or_else(gone)?;
    refuse_incomplete(&cache.part_folder(key), &output).map(|()| digest)
}

/// The fault for a damaged part.
fn damaged(path: &Path, what: &str) -> Fault {
    Fault::data(what).at(path.display().to_string()).hint("delete this part and run its task again")
}
