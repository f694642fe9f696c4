//! The one way in: whatever uses a store opens it here, and finds the files that its manifest names, or says which are not.
//!
//! One look at each file, and none at its bytes: a cut and most writing over show by the size. What is read later is held
//! against its digest then.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::thread;

use contract::{Fault, Result};

use crate::folder::{StoreFile, StoreFolder};
use crate::verify::{self, Damage, flaw_of_size};
use crate::{FileRecord, Location, Manifest, open};

/// Threads that look at files: on a file system of a network each answer is a way there and back.
const SIDES: usize = 16;

/// Files at which one thread looks alone.
const FEW: usize = 64;

/// Damaged files that are told one by one.
const SHOWN: usize = 8;

/// The sizes of the objects below a store, by their names.
type Sizes = BTreeMap<String, u64>;

/// Opens a store of which more is wanted than what stands in its manifest: its files must be those that are named there.
pub fn opened(store: impl Into<Location>) -> Result<Manifest> {
    let store = store.into();
    let manifest = open::manifest(&store)?;
    refuse_incomplete(&store, &manifest)?;
    Ok(manifest)
}

/// Refuses a store whose tokenizer is another one, or one of whose files is missing, of another size or no file of its
/// folder. What else lies there is not looked at.
pub fn refuse_incomplete(store: &Location, manifest: &Manifest) -> Result<()> {
    let mut damages = verify::verify_tokenizer(store, manifest)?;
    let files = manifest.files().into_iter();
    let files: Vec<_> = files.filter_map(|file| Some((file.path, file.record?))).collect();
    damages.extend(damaged(store, &files)?);
    let fault = verify::fault(store, &damages);
    fault.map_or(Ok(()), |fault| Err(shortened(fault, &damages)))
}

/// The fault with as many of its lines as a person reads: a folder that is gone may have held a hundred thousand files.
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

/// The files that are not as their records say, in their order.
fn damaged(store: &Location, files: &[Named<'_>]) -> Result<Vec<Damage>> {
    let sizes = &listed(store)?;
    let look = |part| damaged_of(store, sizes, part);
    let most = files.len().div_ceil(SIDES).max(FEW);
    let (own, others) = files.split_at(files.len().min(most));
    let found = thread::scope(|scope| {
        let begin = |part| (part, thread::Builder::new().spawn_scoped(scope, move || look(part)));
        let others: Vec<_> = others.chunks(most).map(begin).collect();
        let others = others.into_iter().map(|(part, side)| {
            // A machine that gives no thread has this one.
            side.ok().and_then(|side| side.join().ok()).unwrap_or_else(|| look(part))
        });
        std::iter::once(look(own)).chain(others).collect::<Result<Vec<_>>>()
    })?;
    Ok(found.into_iter().flatten().collect())
}

/// The same of some files: those of one folder lie together, and are looked at from there.
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
        // The file itself has the last word, and says what is wrong: a list may lag behind what it lists.
        let parts: Vec<&str> = path.split('/').collect();
        if let Some(what) = flaw_of_size(&StoreFile::new(store, &parts), record)? {
            damaged.push(Damage { file: path.clone(), what, block: None, documents: None });
        }
    }
    Ok(damaged)
}

/// What a bucket lists of a store, in one answer for a thousand files; nothing of a folder, and nothing where the list is
/// refused: who may read objects need not be allowed to list them.
fn listed(store: &Location) -> Result<Sizes> {
    let Location::Object(object) = store else { return Ok(Sizes::new()) };
    match object.sizes() {
        Err(error)
            if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::InvalidInput) =>
        {
            Ok(Sizes::new())
        }
        sizes => sizes.map_err(|error| store.fault("list", &error)),
    }
}
