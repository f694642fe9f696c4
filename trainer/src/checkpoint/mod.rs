//! Checkpoints: the state after a step, stored as boxes of tensors in checksummed blobs and committed by a manifest
//! that is written last.
//!
//! The owner of each piece of the state writes it, without exchange between ranks. A reader may ask for any box,
//! however the writers' layout cut the tensors.
//!
//! Invariant: the files are independent of workers and ranks, and a function of the run alone.

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

pub use format::manifest_bytes;
pub use format::{BlobRecord, BoxRecord, CheckpointManifest, TensorRecord, TensorSet};
pub use read::{CheckpointReader, ReadRequest};
pub(crate) use read::{GO_ON, OTHER_VERSION};
pub use saver::{Saver, WrittenCheckpoint};
pub use snapshots::{SnapshotOptions, Snapshots};
pub use write::Snapshot;

use crate::model::ParamSpec;
use crate::optim::OptimizerRule;
use crate::optim::balance::RouterBalance;
use crate::spec::RunSpec;
use crate::state::ownership::ParamShard;
use medium::Medium;

/// The shape of a state, which follows from the run and not from the files.
#[derive(Clone)]
pub struct StateLayout {
    /// The parameters in canonical order.
    pub parameters: Vec<ParamSpec>,
    /// How each is updated, which decides what moments it has.
    pub rules: Vec<OptimizerRule>,
    /// The balance before the first step, by layer; its size never changes.
    pub balance: Vec<RouterBalance>,
    /// The device of the tensors.
    pub device: Device,
    /// Ascending steps, each with the number format that the model computes in from then on.
    pub dtypes: Vec<(u64, Dtype)>,
}

impl StateLayout {
    /// The layout of a run on this device.
    pub fn new(spec: &RunSpec, device: Device) -> Self {
        let (parameters, rules) = (spec.parameters.clone(), spec.rules.clone());
        let (balance, dtypes) = (spec.balance(), spec.dtypes());
        StateLayout { parameters, rules, balance, device, dtypes }
    }

    /// The number format of `step`; before the first step, that of the first.
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

/// Which checkpoints are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// This many of the newest.
    pub newest: usize,
    /// And every one whose step is a multiple of this; 0 for none.
    pub every: u64,
    /// And some older ones, at intervals that grow with age.
    pub aged: bool,
    /// This many of the newest pinned ones, which were written before spikes; they do not count as `newest`.
    pub pinned: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Retention { newest: 3, every: 0, aged: true, pinned: 8 }
    }
}

impl Retention {
    /// Of checkpoints of these ascending steps, the ones to remove.
    ///
    /// With `aged`, an old one is removed if without it the next older one (or the beginning) is at most twice as old
    /// as the next newer one. So replaying any step from the checkpoint before it never takes more steps than lie
    /// between that step and the newest checkpoint, or between two checkpoints in a row; and at most two are kept for
    /// each doubling of age.
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

/// The result of a search for a usable checkpoint.
pub struct UsableCheckpoint<T> {
    /// What was read from the newest usable one; `None`: start from the beginning.
    pub state: Option<T>,
    /// Newer ones that could not be used, newest first: the step and what is wrong with it.
    pub passed: Vec<(u64, Fault)>,
}

impl Checkpoints {
    /// The checkpoints at `place`: a folder, which need not exist, or a place in a bucket.
    pub fn new(place: impl Into<Location>) -> Self {
        Checkpoints { medium: Arc::from(medium::at(place.into())) }
    }

    /// Where they are.
    pub fn place(&self) -> Location {
        self.medium.location("")
    }

    /// Claims the place for the run that has one of the keys in `words`; refused if it holds another key.
    pub(crate) fn claim(&self, words: &str) -> Result<()> {
        match self.owner()? {
            Some(found) if is_one_of(&found, words) => Ok(()),
            Some(_) => Err(self.of_another_run()),
            // Has no owner yet. If two runs claim it at once, a bucket accepts the first.
            None => self.hand_over(words.split(' ').next().unwrap_or_default()),
        }
    }

    /// The refusal of a place that belongs to another run.
    pub(crate) fn of_another_run(&self) -> Fault {
        Fault::usage("another run keeps its checkpoints here").at(self.place().to_string()).hint(
            "give every run a place of its own with --checkpoints; the copy of a run needs a copy of this place, made with it",
        )
    }

    /// Makes the run with this key the owner.
    pub(crate) fn hand_over(&self, word: &str) -> Result<()> {
        self.medium.put(OWNER, &[word.as_bytes()]).map(drop)
    }

    /// Whether the place belongs to the run that has one of the keys in `words`.
    pub(crate) fn knows(&self, words: &str) -> Result<bool> {
        Ok(self.owner()?.is_some_and(|found| is_one_of(&found, words)))
    }

    /// Whether the place belongs to any run.
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

    /// Whether the place is a store, which must not be altered.
    pub(crate) fn is_a_store(&self) -> Result<bool> {
        let files = [open::MANIFEST, open::MANIFEST_SUM].map(|file| self.medium.get(file));
        match files.into_iter().collect::<Result<Vec<_>>>() {
            Ok(_) => Ok(true),
            Err(fault) if fault.class() == Class::Data => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// The steps that have a checkpoint, ascending.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let files = self.medium.list()?;
        let committed = files
            .iter()
            .filter_map(|file| step_of(file).filter(|(_, name)| *name == format::MANIFEST));
        let steps: BTreeSet<u64> = committed.map(|(step, _)| step).collect();
        Ok(steps.into_iter().collect())
    }

    /// Steps with files but no manifest: a kill left them half written or half removed, or someone removed the
    /// manifest.
    pub(crate) fn without_manifest(&self) -> Result<BTreeSet<u64>> {
        let (committed, files) = (self.steps()?, self.medium.list()?);
        let whole = files.iter().filter_map(|file| step_of(file));
        let left = whole.filter(|(step, name)| format::is_file(name) && !committed.contains(step));
        Ok(left.map(|(step, _)| step).collect())
    }

    /// Removes checkpoints that a kill left half written or half removed.
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

    /// Writes the blobs of one writer. They become part of a checkpoint with [`Checkpoints::commit`].
    pub fn write(&self, layout: &StateLayout, snapshot: &Snapshot) -> Result<Vec<BlobRecord>> {
        write::blobs(self.medium.as_ref(), layout, snapshot)
    }

    /// Commits a checkpoint from what the writers wrote. `snapshot` is that of any writer, `digests` are those of the
    /// state and of the ledger's chain after the step, `pieces` and `blobs` those of all writers.
    pub fn commit(
        &self,
        snapshot: &Snapshot,
        digests: (Digest, Digest),
        layout: &StateLayout,
        pieces: &[ParamShard],
        blobs: Vec<BlobRecord>,
    ) -> Result<()> {
        let blobs: BTreeMap<_, _> =
            blobs.into_iter().map(|blob| (blob.name.clone(), blob)).collect();
        let (state, chain) = digests;
        let manifest = CheckpointManifest::new(
            snapshot.step(),
            snapshot.windows(),
            state,
            chain,
            layout,
            pieces,
            blobs,
        )?;
        let text = manifest.text()?;
        self.medium.put(&name(snapshot.step(), format::MANIFEST), &[text.as_bytes()]).map(drop)
    }

    /// Opens the checkpoint of `step`.
    pub fn open(&self, step: u64) -> Result<CheckpointReader<'_>> {
        CheckpointReader::open(self.medium.as_ref(), step)
    }

    /// Calls `read` for the newest checkpoint up to step `last` that is intact and, by the ledger's `chain`, belongs to
    /// this run.
    pub fn newest<T>(
        &self,
        last: u64,
        chain: impl Fn(u64) -> Option<Digest>,
        read: impl FnMut(&CheckpointReader<'_>) -> Result<T>,
    ) -> Result<UsableCheckpoint<T>> {
        Checkpoints::newest_of(&[self], last, chain, read)
    }

    /// The same over several places; if two have a checkpoint of the same step, the earlier place is preferred.
    pub(crate) fn newest_of<T>(
        places: &[&Checkpoints],
        last: u64,
        chain: impl Fn(u64) -> Option<Digest>,
        mut read: impl FnMut(&CheckpointReader<'_>) -> Result<T>,
    ) -> Result<UsableCheckpoint<T>> {
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
                Ok(state) => return Ok(UsableCheckpoint { state: Some(state), passed }),
                // A machine that cannot read does not mean that the bytes are damaged.
                Err(fault) if fault.class() == Class::Data => passed.push((step, fault)),
                Err(fault) => return Err(fault),
            }
        }
        Ok(UsableCheckpoint { state: None, passed })
    }

    /// Renames a damaged checkpoint: it is not used any more, and can still be inspected.
    pub(crate) fn set_aside(&self, step: u64) -> Result<()> {
        let files = self.medium.list()?;
        let old = format!("damaged-{}", name(step, ""));
        // Without a manifest: an earlier call may have been killed after it renamed the manifest.
        let whole = files.contains(&name(step, format::MANIFEST));
        files
            .iter()
            .filter(|file| whole && file.starts_with(&old))
            .try_for_each(|file| self.medium.remove(file))?;
        self.first_manifest(step)?
            .iter()
            .try_for_each(|file| self.medium.rename(file, &format!("damaged-{file}")))
    }

    /// Marks the checkpoint of `step` as pinned: it is kept in addition to the newest ones.
    pub(crate) fn pin(&self, step: u64) -> Result<()> {
        self.medium.put(&name(step, format::PINNED), &[]).map(drop)
    }

    /// The steps of pinned checkpoints.
    pub(crate) fn pinned(&self) -> Result<BTreeSet<u64>> {
        let files = self.medium.list()?;
        let pinned = files.iter().filter_map(|file| step_of(file));
        Ok(pinned.filter(|(_, name)| *name == format::PINNED).map(|(step, _)| step).collect())
    }

    /// Removes the checkpoints that `retention` does not keep.
    pub fn retain(&self, retention: Retention) -> Result<()> {
        let (all, pinned) = (self.steps()?, self.pinned()?);
        // Pinned ones are kept in addition to the newest.
        let steps = all.iter().copied().filter(|step| !pinned.contains(step));
        let mut gone = retention.gone(&steps.collect::<Vec<_>>());
        // A pinned one may be a checkpoint that is due as well: then it stays as long as others do.
        let due = retention.gone(&all);
        let old = pinned.len().saturating_sub(retention.pinned);
        gone.extend(pinned.into_iter().take(old).filter(|step| due.contains(step)));
        gone.into_iter().try_for_each(|step| self.remove(step))
    }

    /// Removes the checkpoint of `step`, complete or not.
    pub(crate) fn remove(&self, step: u64) -> Result<()> {
        self.first_manifest(step)?.iter().try_for_each(|file| self.medium.remove(file))
    }

    /// Puts the checkpoint of `step` into another place as well: by hard links where both are folders on one file
    /// system, else by copies. Checkpoint files are never modified, so a link is as safe as a copy.
    pub fn share(&self, step: u64, to: &Checkpoints) -> Result<()> {
        // The manifest last: a kill in between leaves no valid checkpoint.
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

    /// The files of a checkpoint, manifest first, so that a kill during their removal leaves no valid checkpoint.
    fn first_manifest(&self, step: u64) -> Result<Vec<String>> {
        let (folder, manifest) = (name(step, ""), name(step, format::MANIFEST));
        let mut files = self.medium.list()?;
        files.retain(|file| file.strip_prefix(&folder).is_some_and(format::is_file));
        files.sort_by_key(|file| (*file != manifest, file.clone()));
        Ok(files)
    }
}

/// Hard-links a file; `false` where the file system cannot.
fn link(from: &Path, to: &Path) -> Result<bool> {
    disk::create_folder(disk::folder_of(to))?;
    Ok(disk::link(from, to).is_ok())
}

/// The file that names the run which owns these checkpoints, where they are outside the run's folder.
const OWNER: &str = "owner";

/// Whether `words`, separated by spaces, contain this word.
fn is_one_of(word: &[u8], words: &str) -> bool {
    words.split(' ').any(|one| one.as_bytes() == word)
}

/// The name of a file of the checkpoint of `step`.
fn name(step: u64, file: &str) -> String {
    format!("step-{step}/{file}")
}

/// Splits a name into step and file.
fn step_of(name: &str) -> Option<(u64, &str)> {
    let (step, file) = name.strip_prefix("step-")?.split_once('/')?;
    Some((step.parse().ok()?, file))
}
