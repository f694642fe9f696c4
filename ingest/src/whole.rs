//! Whether a store is whole, as far as one look at its files tells.

use contract::Result;
use rayon::prelude::*;
use store::folder::StoreFile;
use store::verify::{self, Damage, flaw_of_size};
use store::{Location, Manifest, open};

use crate::parallel;

/// Opens a store of which more is said than what stands in its manifest: its files must be those that are named there.
pub fn opened(store: &Location) -> Result<Manifest> {
    let manifest = open::manifest(store)?;
    refuse_incomplete(store, &manifest)?;
    Ok(manifest)
}

/// Refuses a store whose tokenizer is another one, or one of whose files is missing or of another size, in which every cut
/// and most writing over shows: so much is looked at before a command says that nothing is to be done.
pub(crate) fn refuse_incomplete(store: &Location, manifest: &Manifest) -> Result<()> {
    parallel::start_shared()?;
    let mut damages = verify::verify_tokenizer(store, manifest)?;
    let files = manifest.files();
    // Side by side: in a bucket each answer is a way there and back.
    let found = files.par_iter().filter_map(|file| Some((file, file.record?)));
    let found = found.map(|(file, record)| {
        let parts: Vec<&str> = file.path.split('/').collect();
        let what = flaw_of_size(&StoreFile::new(store, &parts), record)?;
        let damage = |what| Damage { file: file.path.clone(), what, block: None, documents: None };
        Ok(what.map(damage))
    });
    damages.extend(found.collect::<Result<Vec<_>>>()?.into_iter().flatten());
    verify::fault(store, &damages).map_or(Ok(()), Err)
}
