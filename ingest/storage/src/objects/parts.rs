//! The upload of a store while it is built: see [`crate::upload`].

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use contract::{Class, Digest, Fault, Result, json};
use serde::{Deserialize, Serialize};
use store::disk::{self, AppendFile};
use store::location::Object;
use store::{Location, Manifest, open, regular};

use super::client::Client;
use super::upload::{put, refuse_other, upload};
use crate::outputs::{self, RECORD};

/// A line of the record: an object that may have been put.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Line {
    name: String,
    bytes: u64,
    digest: Digest,
}

/// The upload of a store that is being built.
pub struct Upload {
    target: Object,
    record: PathBuf,
    client: Client,
    /// Opened at the first object: by then the build holds its folder.
    log: Option<AppendFile>,
    /// The objects that this build or an earlier one here may have put.
    known: BTreeSet<Line>,
    /// The names of those that are put.
    done: BTreeSet<String>,
}

impl Upload {
    /// Begins or resumes the upload to `target` of the store that is built in `folder`.
    pub fn begin(target: &Object, folder: &Path) -> Result<Self> {
        let place = Location::Object(target.clone());
        let client = Client::new().map_err(|error| place.fault("reach", &error))?;
        let record = disk::beside(folder, RECORD);
        let (target, known, done) = (target.clone(), read(&record)?, BTreeSet::new());
        Ok(Upload { target, record, client, log: None, known, done })
    }

    /// Whether this build or an earlier one here may have put an object of this name.
    pub fn knows(&self, name: &str) -> bool {
        self.known.iter().any(|line| line.name == name)
    }

    /// Puts the local file `from` under its final name.
    pub fn put(&mut self, from: &Path, name: &str) -> Result<()> {
        if self.done.contains(name) {
            return Ok(());
        }
        let digest = regular::open(from).and_then(|file| regular::digest(file, &|_| ()));
        let (bytes, digest) = digest.map_err(|error| Fault::io("read", from, &error))?;
        self.note(Line { name: name.to_owned(), bytes, digest })?;
        let place = self.target.address().join(name);
        let again = || put(&self.client, from, &place, &|_| ());
        match again() {
            Err(fault) if fault.class() == Class::Mismatch && self.reclaim(name)? => again()?,
            made => made?,
        }
        self.done.insert(name.to_owned());
        Ok(())
    }

    /// Puts what is left of the finished store in `folder`; its manifest last, once nothing else that was put is there.
    pub fn finish(
        mut self,
        folder: &Path,
        manifest: &Manifest,
        passed: &dyn Fn(u64),
    ) -> Result<()> {
        let mut names = outputs::files(manifest);
        let last = names.split_off(names.len().saturating_sub(1));
        refuse_other(&self.client, folder, &self.target, &last)?;
        for name in &names {
            self.put(&folder.join(name), name)?;
            passed(outputs::bytes(folder, std::slice::from_ref(name))?);
        }
        let others = self.known.iter().filter(|line| !names.contains(&line.name));
        others.map(|line| self.reclaim(&line.name)).collect::<Result<Vec<_>>>()?;
        upload(folder, &self.target, &last, passed)
    }

    /// Records durably that an object may be put.
    fn note(&mut self, line: Line) -> Result<()> {
        if self.known.contains(&line) {
            return Ok(());
        }
        let fault = |error: &std::io::Error| Fault::io("write", &self.record, error);
        let log = match &mut self.log {
            Some(log) => log,
            none => {
                disk::create_folder(disk::folder_of(&self.record))?;
                let log = AppendFile::open(&self.record).map_err(|error| fault(&error))?;
                // A torn line would swallow the next one.
                let whole = fs::read(&self.record).map_err(|error| fault(&error))?;
                let end = whole.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
                log.cut(end as u64).map_err(|error| fault(&error))?;
                disk::sync_folder(disk::folder_of(&self.record))?;
                none.insert(log)
            }
        };
        let bytes = json::line(&line, "a record of an upload")?;
        log.append(&bytes).and_then(|()| log.sync()).map_err(|error| fault(&error))?;
        self.known.insert(line);
        Ok(())
    }

    /// Removes the object of this name if this upload had put it and the place is no store. Returns whether there is
    /// none now.
    fn reclaim(&self, name: &str) -> Result<bool> {
        let (object, place) = (self.target.join(name), self.target.address().join(name));
        let fault = |error: &std::io::Error| Location::Object(object.clone()).fault("read", error);
        let about = match self.client.about(&place) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
            about => about.map_err(|error| fault(&error))?,
        };
        let mut lines = self.known.iter().filter(|line| line.name == name);
        if !lines.clone().any(|line| line.bytes == about.bytes) {
            return Ok(false);
        }
        let (bytes, digest) = self.client.digest(&place).map_err(|error| fault(&error))?;
        let is_ours = lines.any(|line| (line.bytes, line.digest) == (bytes, digest));
        let manifest = self.target.address().join(open::MANIFEST);
        if !is_ours || self.client.is_there(&manifest).map_err(|error| fault(&error))? {
            return Ok(false);
        }
        // By the client that has listed the place: it forgets what it knew of this object.
        object.remove().map_err(|error| fault(&error)).map(|()| true)
    }
}

/// The lines of a record; a torn last one is of an object that was not put.
fn read(record: &Path) -> Result<BTreeSet<Line>> {
    let log = match AppendFile::read(record) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        log => log.map_err(|error| Fault::io("read", record, &error))?,
    };
    let lines = BufReader::new(log.file()).lines();
    let lines = lines.map(|line| line.map_err(|error| Fault::io("read", record, &error)));
    let parsed = |line: Result<String>| line.map(|line| serde_json::from_str(&line).ok());
    lines.map(parsed).filter_map(Result::transpose).collect()
}
