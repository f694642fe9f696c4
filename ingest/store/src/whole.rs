//! Opens a store for every reader, and checks that all files that its manifest names exist.
//!
//! Only names and sizes are checked: most truncations and replacements change the size. Content is checked against its
//! digest when it is read.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::thread;

use contract::{Fault, Result};

use crate::folder::{StoreFile, StoreFolder};
use crate::verify::{self, Damage, flaw_of_size};
use crate::{FileRecord, Location, Manifest, open};

/// Threads that check files: on a network file system each check is a round trip.
const SIDES: usize = 16;

/// Up to this many files are checked by one thread.
const FEW: usize = 64;

/// The number of damaged files that are listed one by one.
const SHOWN: usize = 8;

/// The sizes of the objects below a store, by their names.
type Sizes = BTreeMap<String, u64>;

/// Opens a store whose data is needed, not only its manifest: its files must be those that the manifest names.
pub fn opened(store: impl Into<Location>) -> Result<Manifest> {
    let store = store.into();
    let manifest = open::manifest(&store)?;
    refuse_incomplete(&store, &manifest)?;
    Ok(manifest)
}

/// Refuses a store whose tokenizer differs from its record, or with a file that is missing, of another size or not a
/// regular file of its folder. Other files in the folder are ignored.
pub fn refuse_incomplete(store: &Location, manifest: &Manifest) -> Result<()> {
    let mut damages = verify::verify_tokenizer(store, manifest)?;
    let files = manifest.files().into_iter();
    let files: Vec<_> = files.filter_map(|file| Some((file.path, file.record?))).collect();
    damages.extend(damaged(store, &files)?);
    let fault = verify::fault(store, &damages);
    fault.map_or(Ok(()), |fault| Err(shortened(fault, &damages)))
}

/// A fault with a readable number of lines: a deleted folder may have held a hundred thousand files.
fn shortened(fault: Fault, damages: &[Damage]) -> Fault {
    if damages.len() <= SHOWN {
        return fault;
    }
    let mut lines: Vec<String> = damages[..SHOWN].iter().map(Damage::to_string).collect();
    lines.push(format!("and {} more, which `zdata verify` names", damages.len() - SHOWN));
    fault.found(lines.join("\n           "))
}

/// A file of a manifest: its path in the store, and its record.
type Named<'a> = (String, &'a FileRecord);

/// The files that differ from their records, in order.
fn damaged(store: &Location, files: &[Named<'_>]) -> Result<Vec<Damage>> {
    let sizes = &listed(store)?;
    let look = |part| damaged_of(store, sizes, part);
    let most = files.len().div_ceil(SIDES).max(FEW);
    let (own, others) = files.split_at(files.len().min(most));
    let found = thread::scope(|scope| {
        let begin = |part| (part, thread::Builder::new().spawn_scoped(scope, move || look(part)));
        let others: Vec<_> = others.chunks(most).map(begin).collect();
        let others = others.into_iter().map(|(part, side)| {
            // If no thread can be started, this thread does the work.
            side.ok().and_then(|side| side.join().ok()).unwrap_or_else(|| look(part))
        });
        std::iter::once(look(own)).chain(others).collect::<Result<Vec<_>>>()
    })?;
    Ok(found.into_iter().flatten().collect())
}

/// The same for some files: those of one folder are checked together, from that folder.
fn damaged_of(store: &Location, sizes: &Sizes, files: &[Named<'_>]) -> Result<Vec<Damage>> {
    let (mut at, mut open, mut damaged) = (None, None, Vec::new());
    for (path, record) in files {
        let (folder, name) = path.rsplit_once('/').unwrap_or_default();
        if at != Some(folder) {
            at = Some(folder);
            open = store.local().and_then(|store| StoreFolder::open(store, folder).ok());
        }
        let seen = open.as_ref().and_then(|open| open.size(name));
        if seen.or_else(|| sizes.get(path).copied()) == Some(record.bytes) {
            continue;
        }
        // The file itself decides, and gives the message: a list may be out of date.
        let parts: Vec<&str> = path.split('/').collect();
        if let Some(what) = flaw_of_size(&StoreFile::new(store, &parts), record)? {
            damaged.push(Damage { file: path.clone(), what, block: None, documents: None });
        }
    }
    Ok(damaged)
}

/// The objects of a store as a bucket lists them, a thousand per request; empty for a local folder, and where listing
/// is not allowed: permission to read objects does not imply permission to list them.
fn listed(store: &Location) -> Result<Sizes> {
    let Location::Object(object) = store else { return Ok(Sizes::new()) };
    match object.sizes() {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::PermissionDenied | ErrorKind::InvalidInput | ErrorKind::Unsupported
            ) =>
        {
            Ok(Sizes::new())
        }
        sizes => sizes.map_err(|error| store.fault("list", &error)),
    }
}
