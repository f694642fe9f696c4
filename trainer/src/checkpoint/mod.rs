//! Checkpoints: the state after a step, as boxes of tensors in checked blobs, committed by a manifest that is put last.
//!
//! Whoever owns a piece of the state writes it, and nothing is exchanged for that; whoever wants a box reads it out of
//! the boxes that there are, whatever layout cut them.
//!
//! Invariant: what is on the disk is independent of workers and ranks, and a function of the run alone.

mod format;
mod medium;
mod read;
pub mod region;
mod saver;
mod snapshots;
#[cfg(test)]
pub(crate) mod tests;
mod write;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use contract::{Class, Digest, Fault, Result};
use curriculum::Dtype;
use store::{Location, disk, open};
use tch::Device;

pub(crate) use format::manifest_bytes;
pub use format::{BlobRecord, BoxRecord, Manifest, Set, TensorRecord};
pub(crate) use read::{GO_ON, OTHER_VERSION};
pub use read::{Reader, Want};
pub use saver::{Saver, Written};
pub use snapshots::{SnapshotOptions, Snapshots};
pub use write::Snapshot;

use crate::model::ParamSpec;
use crate::optim::Rule;
use crate::optim::balance::Balance;
use crate::spec::RunSpec;
use crate::state::ownership::Piece;
use medium::Medium;

/// What a state looks like: decided by the run, not by what is on the disk.
#[derive(Clone)]
pub struct Layout {
    /// The parameters in canonical order.
    pub parameters: Vec<ParamSpec>,
    /// How each is updated, which decides what moments it has.
    pub rules: Vec<Rule>,
    /// Balance before the first step, by layer: as large as it will always be.
    pub balance: Vec<Balance>,
    /// Where tensors belong.
    pub device: Device,
    /// The steps from which on the model computes in a number format, ascending; the first from the beginning.
    pub dtypes: Vec<(u64, Dtype)>,
}

impl Layout {
    /// That of a run on this device.
    pub fn new(spec: &RunSpec, device: Device) -> Self {
        let (parameters, rules) = (spec.parameters.clone(), spec.rules.clone());
        let (balance, dtypes) = (spec.balance(), spec.dtypes());
        Layout { parameters, rules, balance, device, dtypes }
    }

    /// What the model computed in, in `step`; before the first step what it will.
    pub(crate) fn dtype_after(&self, step: u64) -> Dtype {
        let before = self.dtypes.iter().rev().find(|(first, _)| *first <= step.max(1));
        before.map_or(Dtype::F32, |(_, dtype)| *dtype)
    }
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    medium: Arc<dyn Medium>,
}

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The newest so many.
    pub newest: usize,
    /// And every one whose step this divides; 0 for none.
    pub every: u64,
    /// And some older ones, ever fewer the older they are.
    pub aged: bool,
    /// The newest so many of those that are kept beside these, for a step whose loss jumped.
    pub pinned: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Retention { newest: 3, every: 0, aged: true, pinned: 8 }
    }
}

impl Retention {
    /// Of checkpoints of these steps, ascending, those that go.
    ///
    /// With `aged` an old one goes if without it the next older one (or the beginning) is at most twice as old as the next
    /// newer one. So the way from a checkpoint to any step behind it is never longer than from that step to the newest
    /// one, or than checkpoints are apart; and at most two stay for each doubling of age.
    pub fn gone(&self, steps: &[u64]) -> Vec<u64> {
        let old = steps.len().saturating_sub(self.newest.max(1));
        let (Some(last), Some(mut newer)) = (steps.last(), steps.get(old)) else {
            return Vec::new();
        };
        let mut gone = Vec::new();
        for at in (0..old).rev() {
            let older = at.checked_sub(1).map_or(0, |before| steps[before]);
            let needed = self.aged && last - older > 2 * (last - newer);
            if needed || self.every > 0 && steps[at].is_multiple_of(self.every) {
                newer = &steps[at];
            } else {
                gone.push(steps[at]);
            }
        }
        gone
    }
}

/// What a search for a usable checkpoint found.
pub struct Found<T> {
    /// What was read of the newest usable one; `None`: begin at the beginning.
    pub state: Option<T>,
    /// What was passed over on the way, newest first: the step and what is wrong with it.
    pub passed: Vec<(u64, Fault)>,
}

impl Checkpoints {
    /// The checkpoints at `place`: a folder, which need not exist, or `s3://bucket/key`.
    pub fn new(place: impl Into<Location>) -> Self {
        Checkpoints { medium: Arc::from(medium::at(place.into())) }
    }

    /// Where they are.
    pub fn place(&self) -> Location {
        self.medium.location("")
    }

    /// Takes the place for the run that knows one of `words`; refused where another word stands.
    pub(crate) fn claim(&self, words: &str) -> Result<()> {
        match self.owner()? {
            Some(found) if is_one_of(&found, words) => Ok(()),
            Some(_) => Err(self.of_another_run()),
            // Nobody's: of two that come at once, a bucket takes the first.
            None => self.hand_over(words.split(' ').next().unwrap_or_default()),
        }
    }

    /// The refusal of a place that is another run's.
    pub(crate) fn of_another_run(&self) -> Fault {
        Fault::usage("another run keeps its checkpoints here").at(self.place().to_string()).hint(
            "give every run a place of its own with --checkpoints; the copy of a run needs a copy of this place, made with it",
        )
    }

    /// From now on this word stands there.
    pub(crate) fn hand_over(&self, word: &str) -> Result<()> {
        self.medium.put(OWNER, &[word.as_bytes()]).map(drop)
    }

    /// Whether the place is that of the run that knows `words`.
    pub(crate) fn knows(&self, words: &str) -> Result<bool> {
        Ok(self.owner()?.is_some_and(|found| is_one_of(&found, words)))
    }

    /// Whether the place is any run's.
    pub(crate) fn has_owner(&self) -> Result<bool> {
        Ok(self.owner()?.is_some())
    }

    fn owner(&self) -> Result<Option<Vec<u8>>> {
        match self.medium.get(OWNER) {
            Ok(found) => Ok(Some(found)),
            Err(fault) if fault.class() == Class::Data => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// The folder of the checkpoint of `step`.
    pub(crate) fn location(&self, step: u64) -> Location {
        self.medium.location(&format!("step-{step}"))
    }

    /// Whether the place is a store's, which is never altered.
    pub(crate) fn is_a_store(&self) -> Result<bool> {
        let files = [open::MANIFEST, open::MANIFEST_SUM].map(|file| self.medium.get(file));
        match files.into_iter().collect::<Result<Vec<_>>>() {
            Ok(_) => Ok(true),
            Err(fault) if fault.class() == Class::Data => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// The steps that have one, ascending.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let files = self.medium.list()?;
        let committed = files
            .iter()
            .filter_map(|file| step_of(file).filter(|(_, name)| *name == format::MANIFEST));
        let steps: BTreeSet<u64> = committed.map(|(step, _)| step).collect();
        Ok(steps.into_iter().collect())
    }

    /// Steps of which there are files and no manifest: a kill left them half written or half removed, or somebody took it away.
    pub(crate) fn without_manifest(&self) -> Result<BTreeSet<u64>> {
        let (committed, files) = (self.steps()?, self.medium.list()?);
        let whole = files.iter().filter_map(|file| step_of(file));
        let left = whole.filter(|(step, name)| format::is_file(name) && !committed.contains(step));
        Ok(left.map(|(step, _)| step).collect())
    }

    /// Removes what a kill left half written or half removed.
    pub fn clean(&self) -> Result<()> {
        let (committed, files) = (self.steps()?, self.medium.list()?);
        let left = files.iter().filter(|file| {
            step_of(file).is_some_and(|(step, name)| {
                let half = name.strip_suffix(disk::PART);
                format::is_file(half.unwrap_or(name))
                    && (half.is_some() || !committed.contains(&step))
            })
        });
        left.map(String::as_str).try_for_each(|file| self.medium.remove(file))
    }

    /// Writes what one writer owns. Nothing counts before [`Checkpoints::commit`].
    pub fn write(&self, layout: &Layout, snapshot: &Snapshot) -> Result<Vec<BlobRecord>> {
        write::blobs(self.medium.as_ref(), layout, snapshot)
    }

    /// Makes what the writers wrote a checkpoint: `snapshot` is any one of theirs, `digests` are those of its state and of
    /// the ledger's chain after it, `pieces` are everybody's, `blobs` their records.
    pub fn commit(
        &self,
        snapshot: &Snapshot,
        digests: (Digest, Digest),
        layout: &Layout,
        pieces: &[Piece],
        blobs: Vec<BlobRecord>,
    ) -> Result<()> {
        let blobs: BTreeMap<_, _> =
            blobs.into_iter().map(|blob| (blob.name.clone(), blob)).collect();
        let manifest =
            Manifest::new((snapshot.step(), snapshot.windows()), digests, layout, pieces, blobs)?;
        let text = manifest.text()?;
        self.medium.put(&name(snapshot.step(), format::MANIFEST), &[text.as_bytes()]).map(drop)
    }

    /// Opens the checkpoint of `step`.
    pub fn open(&self, step: u64) -> Result<Reader<'_>> {
        Reader::open(self.medium.as_ref(), step)
    }

    /// What `read` makes of the newest checkpoint up to step `last` that is whole and, by the ledger's `chain`, of this
    /// run.
    pub fn newest<T>(
        &self,
        last: u64,
        chain: impl Fn(u64) -> Option<Digest>,
        read: impl FnMut(&Reader<'_>) -> Result<T>,
    ) -> Result<Found<T>> {
        Checkpoints::newest_of(&[self], last, chain, read)
    }

    /// The same over several places; of two checkpoints of one step that of the earlier place comes first.
    pub(crate) fn newest_of<T>(
        places: &[&Checkpoints],
        last: u64,
        chain: impl Fn(u64) -> Option<Digest>,
        mut read: impl FnMut(&Reader<'_>) -> Result<T>,
    ) -> Result<Found<T>> {
        let (mut all, mut passed) = (Vec::new(), Vec::new());
        for (number, place) in places.iter().enumerate() {
            let steps = place.steps()?.into_iter().filter(|step| *step <= last);
            all.extend(steps.map(|step| (Reverse(step), number)));
        }
        all.sort_unstable();
        for (Reverse(step), number) in all {
            let place = places[number];
            let found = place.open(step).and_then(|reader| {
                reader.of_run(chain(step))?;
                read(&reader)
            });
            match found {
                Ok(state) => return Ok(Found { state: Some(state), passed }),
                // A machine that cannot read says nothing about the bytes.
                Err(fault) if fault.class() == Class::Data => passed.push((step, fault)),
                Err(fault) => return Err(fault),
            }
        }
        Ok(Found { state: None, passed })
    }

    /// Renames a damaged checkpoint, so that nobody counts on it and somebody can look at it.
    pub(crate) fn set_aside(&self, step: u64) -> Result<()> {
        let files = self.medium.list()?;
        let old = format!("damaged-{}", name(step, ""));
        // Where the manifest is gone it may have been moved by one that was killed at this.
        let whole = files.contains(&name(step, format::MANIFEST));
        files
            .iter()
            .filter(|file| whole && file.starts_with(&old))
            .try_for_each(|file| self.medium.remove(file))?;
        self.first_manifest(step)?
            .iter()
            .try_for_each(|file| self.medium.rename(file, &format!("damaged-{file}")))
    }

    /// Lets the checkpoint of `step` stay beside those that the retention counts.
    pub(crate) fn pin(&self, step: u64) -> Result<()> {
        self.medium.put(&name(step, format::PINNED), &[]).map(drop)
    }

    /// The steps of those.
    pub(crate) fn pinned(&self) -> Result<BTreeSet<u64>> {
        let files = self.medium.list()?;
        let pinned = files.iter().filter_map(|file| step_of(file));
        Ok(pinned.filter(|(_, name)| *name == format::PINNED).map(|(step, _)| step).collect())
    }

    /// Removes the checkpoints that `retention` does not keep.
    pub fn retain(&self, retention: Retention) -> Result<()> {
        let (mut steps, pinned) = (self.steps()?, self.pinned()?);
        // A pinned one stays beside the newest, not in place of one.
        steps.retain(|step| !pinned.contains(step));
        let old = pinned.len().saturating_sub(retention.pinned);
        let gone = retention.gone(&steps).into_iter().chain(pinned.into_iter().take(old));
        gone.collect::<Vec<_>>().into_iter().try_for_each(|step| self.remove(step))
    }

    /// Removes the checkpoint of `step`, whole or half.
    pub(crate) fn remove(&self, step: u64) -> Result<()> {
        self.first_manifest(step)?.iter().try_for_each(|file| self.medium.remove(file))
    }

    /// Puts the checkpoint of `step` into another place as well: by links where both are folders of one file system, else by
    /// copies. A file of a checkpoint is never written again, so a link is as good as a copy.
    pub(crate) fn share(&self, step: u64, to: &Checkpoints) -> Result<()> {
        // The manifest last: a kill in between leaves none that counts.
        for file in self.first_manifest(step)?.iter().rev() {
            let places = (self.medium.location(file), to.medium.location(file));
            let linked = match &places {
                (Location::Local(from), Location::Local(to)) => link(from, to)?,
                _ => false,
            };
            if !linked {
                to.medium.put(file, &[&self.medium.get(file)?])?;
            }
        }
        Ok(())
    }

    /// The files of a checkpoint in the order in which it is undone: a kill in between leaves none that counts.
    fn first_manifest(&self, step: u64) -> Result<Vec<String>> {
        let (folder, manifest) = (name(step, ""), name(step, format::MANIFEST));
        let mut files = self.medium.list()?;
        files.retain(|file| file.strip_prefix(&folder).is_some_and(format::is_file));
        files.sort_by_key(|file| (*file != manifest, file.clone()));
        Ok(files)
    }
}

/// Gives a file another name as well; `false` where the file system cannot.
fn link(from: &Path, to: &Path) -> Result<bool> {
    disk::create_folder(disk::folder_of(to))?;
    Ok(disk::link(from, to).is_ok())
}

/// The file that says whose checkpoints these are, where they lie outside of the run's folder.
const OWNER: &str = "owner";

/// Whether a word stands in a list with spaces between its words.
fn is_one_of(word: &[u8], words: &str) -> bool {
    words.split(' ').any(|one| one.as_bytes() == word)
}

/// The name of a file of the checkpoint of `step`.
fn name(step: u64, file: &str) -> String {
    format!("step-{step}/{file}")
}

/// The step and the file that a name means.
fn step_of(name: &str) -> Option<(u64, &str)> {
    let (step, file) = name.strip_prefix("step-")?.split_once('/')?;
    Some((step.parse().ok()?, file))
}
