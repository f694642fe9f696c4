//! Checkpoints: the state after a step, committed by one rename, checked when it is written and again when it is read.
//!
//! Invariant: what is on the disk is independent of lanes and ranks, and a function of the run alone.

mod format;
mod read;
mod saver;
mod write;

use std::fs;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};

pub use format::{FileRecord, Manifest, ParameterRecord};
pub use read::Layout;
pub use saver::{Saver, Written};

use crate::lanes::Lanes;
use crate::model::ParamSpec;
use crate::state::State;

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The newest so many.
    pub newest: usize,
    /// And every one whose step this divides; 0 for none.
    pub every: u64,
}

/// What a search for a usable checkpoint found.
pub struct Found {
    /// The newest usable state; `None`: begin at the beginning.
    pub state: Option<State>,
    /// What was passed over on the way, newest first: the step and what is wrong with it.
    pub passed: Vec<(u64, Fault)>,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which need not exist.
    pub fn new(folder: &Path) -> Self {
        Checkpoints { folder: folder.to_owned() }
    }

    /// The folder of the checkpoint of `step`.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step}"))
    }

    /// The steps that have one, ascending.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> = self
            .names()?
            .iter()
            .filter_map(|name| name.strip_prefix("step-")?.parse().ok())
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    fn names(&self) -> Result<Vec<String>> {
        if !self.folder.exists() {
            return Ok(Vec::new());
        }
        let entries =
            fs::read_dir(&self.folder).map_err(|error| Fault::io("list", &self.folder, &error))?;
        let name = |entry: std::io::Result<fs::DirEntry>| {
            Ok(entry?.file_name().to_string_lossy().into_owned())
        };
        let names: std::io::Result<Vec<_>> = entries.map(name).collect();
        names.map_err(|error| Fault::io("list", &self.folder, &error))
    }

    /// Removes what a kill left half written.
    pub fn clean(&self) -> Result<()> {
        let names = self.names()?;
        let partial = names.iter().filter(|name| name.starts_with(PARTIAL));
        partial.map(|name| self.folder.join(name)).try_for_each(|path| write::remove(&path))
    }

    /// Commits `state`; `digest` is its own and `chain` the ledger's after its step.
    pub fn save(
        &self,
        state: &State,
        parameters: &[ParamSpec],
        digest: Digest,
        chain: Digest,
    ) -> Result<()> {
        let files = self.write_part(state, parameters, (0, 1))?;
        self.commit((state.step, digest, chain), parameters, vec![files])
    }

    /// Writes the blobs of writer `number` of `writers`, which reads only the tensors that [`writers`] gives it.
    pub fn write_part(
        &self,
        state: &State,
        parameters: &[ParamSpec],
        (number, writers): (usize, usize),
    ) -> Result<Vec<FileRecord>> {
        write::part(&self.scratch(state.step), state, parameters, |blob| blob % writers == number)
    }

    /// Makes what the writers wrote a checkpoint: `parts` are their records, by writer.
    pub fn commit(
        &self,
        what: (u64, Digest, Digest),
        parameters: &[ParamSpec],
        parts: Vec<Vec<FileRecord>>,
    ) -> Result<()> {
        let count = parts.iter().map(Vec::len).sum::<usize>();
        let writers = parts.len();
        let mut parts: Vec<_> = parts.into_iter().map(Vec::into_iter).collect();
        let in_order =
            (0..count).map_while(|blob| parts[blob % writers].next()).collect::<Vec<_>>();
        if in_order.len() != count {
            return Err(Fault::bug("the writers of a checkpoint do not agree on its blobs"));
        }
        write::commit(&self.scratch(what.0), &self.path(what.0), parameters, what, in_order)
    }

    fn scratch(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PARTIAL}{step}"))
    }

    /// The state after `step`.
    pub fn load(&self, step: u64, layout: Layout<'_>, lanes: Lanes) -> Result<(State, Manifest)> {
        let (state, manifest) = read::read(&self.path(step), layout, lanes)?;
        if state.step != step {
            return Err(Fault::data("this checkpoint holds another step than its name says")
                .at(self.path(step).display().to_string())
                .found(state.step));
        }
        Ok((state, manifest))
    }

    /// The newest usable state of a step up to `last`. `chain_at` gives the ledger's chain after a step, if it has it.
    pub fn newest(
        &self,
        last: u64,
        layout: Layout<'_>,
        lanes: Lanes,
        chain_at: impl Fn(u64) -> Option<Digest>,
    ) -> Result<Found> {
        let mut passed = Vec::new();
        for step in self.steps()?.into_iter().rev().filter(|step| *step <= last) {
            let loaded =
                self.load(step, layout, lanes).and_then(|(state, manifest)| match chain_at(step) {
                    Some(chain) if chain == manifest.chain => Ok(state),
                    _ => {
                        Err(Fault::data("this checkpoint does not belong to the ledger beside it")
                            .at(self.path(step).display().to_string()))
                    }
                });
            match loaded {
                Ok(state) => return Ok(Found { state: Some(state), passed }),
                // A machine that cannot read says nothing about the bytes.
                Err(fault) if fault.class() == contract::Class::Data => passed.push((step, fault)),
                Err(fault) => return Err(fault),
            }
        }
        Ok(Found { state: None, passed })
    }

    /// Renames a damaged checkpoint, so that nobody counts on it and somebody can look at it.
    pub fn set_aside(&self, step: u64) -> Result<()> {
        let aside = self.folder.join(format!("damaged-step-{step}"));
        write::remove(&aside)?;
        let path = self.path(step);
        fs::rename(&path, aside).map_err(|error| Fault::io("rename", &path, &error))
    }

    /// Removes the checkpoints that `retention` does not keep.
    pub fn retain(&self, retention: Retention) -> Result<()> {
        let steps = self.steps()?;
        let old = steps.len().saturating_sub(retention.newest.max(1));
        let kept = |step: u64| retention.every > 0 && step.is_multiple_of(retention.every);
        steps[..old].iter().filter(|step| !kept(**step)).try_for_each(|step| {
            // First out of sight, then gone: a kill in between leaves no half checkpoint under its name.
            let doomed = self.folder.join(format!("{PARTIAL}{step}"));
            write::remove(&doomed)?;
            let path = self.path(*step);
            fs::rename(&path, &doomed).map_err(|error| Fault::io("rename", &path, &error))?;
            write::remove(&doomed)
        })
    }
}

/// Which of `writers` writes each tensor: for weights, first and second moments in turn, by parameter. `like` tells what
/// there is; its values are not read.
pub fn writers(like: &State, parameters: &[ParamSpec], writers: usize) -> [Vec<usize>; 3] {
    let homes = format::homes(like, parameters);
    ["weights", "first", "second"].map(|set| {
        let home = |parameter: &ParamSpec| homes.get(&(set, parameter.name.clone()));
        parameters
            .iter()
            .map(|parameter| home(parameter).map_or(0, |blob| blob % writers))
            .collect()
    })
}

/// What a folder is called before it is committed.
const PARTIAL: &str = ".partial-step-";
