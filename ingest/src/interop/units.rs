//! The data files at a location, and how each is opened: directly, or through a local copy of an object.

use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use storage::copies::ObjectCopies;
use store::{InputRecord, Location, Split, disk};

use super::{Documents, Hints, NextDocument, Peer, datatrove, mds, megatron, olmo};
use crate::disk::Disk;

/// One data file, with everything needed to open it.
pub(super) enum Unit {
    File(Location),
    Shard(Location, Box<mds::Shard>),
}

impl Unit {
    /// The file that holds its tokens.
    pub(super) fn path(&self, peer: Peer) -> Location {
        match self {
            Unit::Shard(folder, shard) => folder.join(&shard.raw_data.basename),
            Unit::File(Location::Local(path)) if peer == Peer::Megatron => {
                megatron::pair(path).0.into()
            }
            Unit::File(path) if peer == Peer::Megatron => {
                let (bin, _) = megatron::pair(Path::new(&path.name()));
                path.folder().join(&bin.to_string_lossy())
            }
            Unit::File(path) => path.clone(),
        }
    }

    /// Its approximate size, used only for the progress.
    pub(super) fn bytes(&self, peer: Peer) -> u64 {
        match self {
            Unit::Shard(_, shard) => shard.raw_data.bytes,
            Unit::File(_) => self.path(peer).size().unwrap_or(0),
        }
    }

    pub(super) fn open(
        &self,
        disk: &dyn Disk,
        peer: Peer,
        hints: &Hints,
    ) -> Result<Box<dyn Documents>> {
        let (place, names) = match self {
            Unit::File(path) => (path, files_of(peer, &path.name())),
            Unit::Shard(folder, shard) => (folder, shard.files()),
        };
        match place {
            Location::Local(path) => self.open_at(path, disk, peer, hints),
            Location::Object(_) => {
                let is_file = matches!(self, Unit::File(_));
                let folder = if is_file { place.folder() } else { place.clone() };
                let copies = ObjectCopies::of(&folder, &names)?;
                let path =
                    if is_file { copies.path(&place.name()) } else { copies.folder().into() };
                let documents = self.open_at(&path, disk, peer, hints);
                let documents = documents.map_err(|fault| copies.told(fault))?;
                Ok(Box::new(Copied { documents, copies }))
            }
        }
    }

    /// Opens it at a local path: the file, or the folder of a shard.
    fn open_at(
        &self,
        path: &Path,
        disk: &dyn Disk,
        peer: Peer,
        hints: &Hints,
    ) -> Result<Box<dyn Documents>> {
        Ok(match (self, peer) {
            (Unit::Shard(_, shard), _) => Box::new(mds::Reader::open(disk, path, shard, hints)?),
            (Unit::File(_), Peer::Megatron) => Box::new(megatron::Reader::open(disk, path, hints)?),
            (Unit::File(_), Peer::Datatrove) => {
                Box::new(datatrove::Reader::open(disk, path, hints)?)
            }
            (Unit::File(_), _) => Box::new(olmo::Reader::open(disk, path, hints)?),
        })
    }
}

/// The names of a data file and of all files that may belong to it.
fn files_of(peer: Peer, name: &str) -> Vec<String> {
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    match peer {
        Peer::Megatron => {
            let (bin, idx) = megatron::pair(Path::new(name));
            vec![text(bin), text(idx)]
        }
        Peer::Datatrove => {
            ["", ".index", ".metadata", ".loss"].map(|end| format!("{name}{end}")).into()
        }
        Peer::Olmo | Peer::Mds => vec![name.to_owned(), text(olmo::csv_of(Path::new(name)))],
    }
}

/// Documents of objects, read from local copies.
struct Copied {
    documents: Box<dyn Documents>,
    copies: ObjectCopies,
}

impl Copied {
    fn input(copies: &ObjectCopies, record: InputRecord) -> InputRecord {
        let path = copies.object(&record.path).unwrap_or(record.path);
        InputRecord { path, ..record }
    }
}

impl Documents for Copied {
    fn next(&mut self, tokens: &mut Vec<u32>) -> Result<Option<NextDocument>> {
        self.documents.next(tokens).map_err(|fault| self.copies.told(fault))
    }

    fn inputs(&self) -> Vec<InputRecord> {
        let inputs = self.documents.inputs().into_iter();
        inputs.map(|record| Copied::input(&self.copies, record)).collect()
    }
}

/// The canonical path of a file. A missing file gets a better error when it is opened, and an MDS shard may exist only
/// in compressed form.
pub(super) fn canonical(file: Location) -> Location {
    let Location::Local(path) = file else { return file };
    let folder = disk::folder_of(&path).canonicalize();
    let beside = folder.map(|folder| folder.join(path.file_name().unwrap_or_default()));
    Location::Local(path.canonicalize().or(beside).unwrap_or(path))
}

/// The data files at a location, in order, and other files that were read to find them.
pub(super) fn units(
    disk: &dyn Disk,
    peer: Peer,
    place: &Location,
) -> Result<(Vec<Unit>, Option<InputRecord>)> {
    if peer == Peer::Mds {
        return shards(disk, place);
    }
    // The stem of a Megatron pair may also be the name of a folder: the pair takes precedence.
    let file = Unit::File(place.clone());
    if file.path(peer).is_file()? {
        return Ok((vec![file], None));
    }
    let ending = match peer {
        Peer::Megatron => ".bin",
        Peer::Datatrove => ".ds",
        Peer::Olmo | Peer::Mds => ".npy",
    };
    let mut found: Vec<Location> = match place {
        Location::Local(path) if !path.is_dir() => return Ok((vec![file], None)),
        Location::Local(path) => disk::entries(path)?.into_iter().map(Location::Local).collect(),
        Location::Object(object) => {
            let names = object.list().map_err(|error| place.fault("list", &error))?;
            let here = names.iter().filter(|name| !name.contains('/'));
            here.map(|name| place.join(name)).collect()
        }
    };
    found.retain(|file| file.name().ends_with(ending));
    if found.is_empty() {
        return Err(Fault::data(format!("this folder holds no file that ends in {ending}"))
            .at(place.to_string())
            .hint("name the folder that holds the files, or one of the files"));
    }
    refuse_splits(place, &found)?;
    Ok((found.into_iter().map(Unit::File).collect(), None))
}

/// Refuses a folder in which one file contains the documents held out in another: both would be trained on.
fn refuse_splits(place: &Location, files: &[Location]) -> Result<()> {
    let [train, validation] = Split::ALL.map(|split| {
        let ours = |name: &String| name.split('.').next() == Some(split.name());
        files.iter().map(Location::name).find(ours)
    });
    let (Some(train), Some(validation)) = (train, validation) else { return Ok(()) };
    Err(Fault::usage("this folder holds the splits of one source, not its files")
        .at(place.to_string())
        .found(format!("{train} and {validation}"))
        .hint(format!(
            "name the files of each: --source NAME={} --held-out NAME={}",
            place.join(&train),
            place.join(&validation)
        )))
}

/// The shards of an MDS data set, and its index.
fn shards(disk: &dyn Disk, place: &Location) -> Result<(Vec<Unit>, Option<InputRecord>)> {
    let folder = if place.name() == mds::INDEX { place.folder() } else { place.clone() };
    let (shards, index) = match &folder {
        Location::Local(path) => mds::shards(disk, path)?,
        Location::Object(_) => {
            let copies = ObjectCopies::of(&folder, &[mds::INDEX.to_owned()])?;
            let found = mds::shards(disk, copies.folder());
            let (shards, index) = found.map_err(|fault| copies.told(fault))?;
            (shards, Copied::input(&copies, index))
        }
    };
    let unit = |shard| Unit::Shard(folder.clone(), Box::new(shard));
    Ok((shards.into_iter().map(unit).collect(), Some(index)))
}

/// Every document of the files at `path`: the entry point for tests with damaged files.
#[cfg(test)]
pub(super) fn read_through(
    disk: &dyn Disk,
    peer: Peer,
    path: &Path,
    hints: &Hints,
) -> Result<Vec<(Option<String>, Vec<u32>)>> {
    let (mut found, mut tokens) = (Vec::new(), Vec::new());
    for unit in units(disk, peer, &path.into())?.0 {
        let mut documents = unit.open(disk, peer, hints)?;
        while let Some(NextDocument { id, .. }) = documents.next(&mut tokens)? {
            found.push((id, tokens.clone()));
        }
        documents.inputs();
    }
    Ok(found)
}
