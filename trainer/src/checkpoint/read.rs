//! Reads checkpoints: each layout asks for its boxes, however the writers' layout cut the tensors. Every byte of a blob
//! is checked before any of its values is used.

use std::collections::BTreeMap;

use contract::{Class, Digest, Fault, Result};
use kernels::device::PendingCopies;
use safetensors::{Dtype, SafeTensors};
use store::Location;
use tch::{Device, Kind, Tensor};

use super::format::{self, BlobRecord, BoxRecord, CheckpointManifest, TensorSet};
use super::medium::Medium;
use super::region::Region;
use super::{StateLayout, name};
use crate::model::{ParamSpec, WeightShards, balance_name};
use crate::optim::balance::RouterBalance;
use crate::refusal::refused;
use crate::state::ownership::{self, Ownership, ParamShard};
use crate::state::{self, OwnedState, State};
use crate::workers::Workers;

/// A box to read, and the tensor of its shape to copy it into.
pub struct ReadRequest {
    /// The part of the state.
    pub set: TensorSet,
    /// The tensor's name.
    pub name: String,
    /// Which box of the tensor.
    pub region: Region,
    /// The destination, on any device.
    pub into: Tensor,
}

/// The error for a checkpoint of another format, which may be intact.
pub(crate) const OTHER_VERSION: &str = "this checkpoint was written by another version";

/// And the hint.
pub(crate) const GO_ON: &str = "go on with, replay or export it with the version that wrote it";

/// A checkpoint whose manifest has been checked.
pub struct CheckpointReader<'a> {
    medium: &'a dyn Medium,
    manifest: CheckpointManifest,
}

/// A part of a stored box, and its destination.
struct Copy {
    key: String,
    stored: Region,
    part: Region,
    into: Tensor,
}

impl<'a> CheckpointReader<'a> {
    /// Opens the checkpoint of `step`.
    pub(super) fn open(medium: &'a dyn Medium, step: u64) -> Result<Self> {
        let file = name(step, format::MANIFEST);
        medium.location(&file).reread(|| CheckpointReader::opened(medium, step, &file))
    }

    fn opened(medium: &'a dyn Medium, step: u64, file: &str) -> Result<Self> {
        let bytes = medium.get(file)?;
        if let Some(format) = format::other_format(&bytes) {
            return Err(Fault::data(OTHER_VERSION)
                .at(medium.location(file).to_string())
                .found(format!("format {format}"))
                .wanted(format!("format {}", format::FORMAT))
                .hint(GO_ON));
        }
        let manifest = CheckpointManifest::parse(&bytes).and_then(|manifest| match manifest.step {
            found if found == step => Ok(manifest),
            found => Err(format!("it is that of step {found}")),
        });
        let manifest = manifest.map_err(|what| damaged(medium.location(file), &what))?;
        Ok(CheckpointReader { medium, manifest })
    }

    /// The manifest.
    pub fn manifest(&self) -> &CheckpointManifest {
        &self.manifest
    }

    /// The location of this checkpoint.
    pub(crate) fn location(&self) -> Location {
        self.medium.location(&format!("step-{}", self.manifest.step))
    }

    /// The location of all checkpoints.
    pub(crate) fn place(&self) -> Location {
        self.medium.location("")
    }

    /// Refuses the checkpoint of another run: `chain` is that of this run's ledger after the step.
    pub fn of_run(&self, chain: Option<Digest>) -> Result<()> {
        match chain == Some(self.manifest.chain) {
            true => Ok(()),
            false => Err(Fault::data("this checkpoint does not belong to the ledger of its run")
                .at(self.location().to_string())),
        }
    }

    /// Refuses a checkpoint with files that are missing or have the wrong size; reads no file.
    pub fn has_its_files(&self) -> Result<()> {
        for blob in &self.manifest.blobs {
            let place = self.medium.location(&name(self.manifest.step, &blob.name));
            match place.size() {
                Ok(bytes) if bytes == blob.bytes => (),
                Ok(_) => return Err(damaged(place, "it has another size than its manifest says")),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Err(damaged(place, "it is missing"));
                }
                Err(error) => return Err(place.fault("examine", &error)),
            }
        }
        Ok(())
    }

    /// Refuses the checkpoint of another model.
    pub fn compare(&self, layout: &StateLayout) -> Result<()> {
        let wanted = format::tensors(layout);
        let wanted = wanted.iter().map(|(set, name, shape, _)| (set, name, shape));
        let found = self.manifest.tensors.iter();
        let found = found.map(|tensor| (&tensor.set, &tensor.name, &tensor.shape));
        match found.eq(wanted) {
            true => Ok(()),
            false => Err(damaged(self.location(), "its tensors are not this run's")),
        }
    }

    /// Fills all `wants`. Each blob is read at most once, and only if it is needed.
    pub fn fill(&self, wants: Vec<ReadRequest>, workers: Workers) -> Result<()> {
        let mut stored: BTreeMap<(TensorSet, &str), Vec<(Region, &BoxRecord)>> = BTreeMap::new();
        for tensor in &self.manifest.tensors {
            let boxes = tensor.boxes.iter().map(|one| (one.region(), one)).collect();
            stored.insert((tensor.set, &tensor.name), boxes);
        }
        let mut by_blob: BTreeMap<usize, Vec<Copy>> = BTreeMap::new();
        for ReadRequest { set, name, region, into } in wants {
            let boxes = stored.get(&(set, name.as_str())).map_or(&[][..], Vec::as_slice);
            let mut volume = 0;
            for (stored, record) in boxes {
                let Some(part) = stored.intersect(&region) else { continue };
                volume += part.volume();
                let (into, key) =
                    (region.part(&part, &into), format::key(set, &name, &record.offsets));
                let copy = Copy { key, stored: stored.clone(), part, into };
                by_blob.entry(record.blob).or_default().push(copy);
            }
            if volume != region.volume() {
                return Err(damaged(self.location(), &format!("it lacks a part of {name}")));
            }
        }
        let copies =
            |(blob, copies): (usize, Vec<Copy>)| self.blob(&self.manifest.blobs[blob], copies);
        workers.map(by_blob.into_iter().collect(), copies).map(drop)
    }

    /// Reads one blob, checks it, and copies the requested parts.
    fn blob(&self, blob: &BlobRecord, copies: Vec<Copy>) -> Result<()> {
        let file = name(self.manifest.step, &blob.name);
        let place = self.medium.location(&file);
        let wrong = |what: &str| damaged(place.clone(), what);
        let bytes = place.reread(|| {
            let bytes = self.medium.get(&file)?;
            let found = Digest::of_bytes(&bytes);
            if bytes.len() as u64 != blob.bytes || found != blob.digest {
                return Err(wrong("its bytes changed since it was written")
                    .found(format!("{} bytes, digest {found}", bytes.len()))
                    .wanted(format!("{} bytes, digest {}", blob.bytes, blob.digest)));
            }
            Ok(bytes)
        })?;
        let tensors =
            SafeTensors::deserialize(&bytes).map_err(|error| wrong(&error.to_string()))?;
        for Copy { key, stored, part, mut into } in copies {
            let view = tensors.tensor(&key).map_err(|error| wrong(&error.to_string()))?;
            let shape: Vec<i64> = view.shape().iter().map(|length| *length as i64).collect();
            if view.dtype() != Dtype::F32 || shape != stored.lengths {
                return Err(wrong(&format!("{key} has another shape than the manifest says")));
            }
            let tensor = Tensor::f_from_data_size(view.data(), &shape, Kind::Float);
            let tensor = tensor.map_err(|error| wrong(&error.to_string()))?;
            tch::no_grad(|| into.f_copy_(&stored.part(&part, &tensor))).map_err(refused)?;
        }
        Ok(())
    }

    /// The balance of all layers, which every rank holds completely.
    pub fn balance(&self, layout: &StateLayout, workers: Workers) -> Result<Vec<RouterBalance>> {
        let (mut wants, mut found) = (Vec::new(), Vec::new());
        for (layer, balance) in format::balances(&layout.balance) {
            for set in TensorSet::ALL {
                let length = format::values(balance, set).len() as i64;
                let into =
                    Tensor::f_zeros([length], (Kind::Float, Device::Cpu)).map_err(refused)?;
                found.push(into.shallow_clone());
                let (name, region) = (balance_name(layer), Region::whole(&[length]));
                wants.push(ReadRequest { set, name, region, into });
            }
        }
        self.fill(wants, workers)?;
        let odd = |error: tch::TchError| damaged(self.location(), &error.to_string());
        let values = |tensor: &Tensor| Vec::<f32>::try_from(tensor).map_err(odd);
        let mut all = vec![RouterBalance::default(); layout.balance.len()];
        for ((layer, _), of) in
            format::balances(&layout.balance).zip(found.chunks(TensorSet::ALL.len()))
        {
            let (bias, first, second) = (values(&of[0])?, values(&of[1])?, values(&of[2])?);
            all[layer as usize] = RouterBalance { bias, first, second };
        }
        Ok(all)
    }

    /// The state of one rank: weights and optimizer state of its own pieces. Other ranks send the other weights, once
    /// all have read their parts and checked the digest of the state.
    pub fn part(
        &self,
        layout: &StateLayout,
        owners: &Ownership,
        workers: Workers,
    ) -> Result<State> {
        self.compare(layout)?;
        let empty = |shape: &[i64]| Ok(Tensor::f_empty(shape, (Kind::Float, layout.device))?);
        let dtype = layout.dtype_after(self.manifest.step);
        let weights = state::room(&layout.parameters, dtype, layout.device).map_err(refused)?;
        let (mut owned, mut wants) = (Vec::new(), Vec::new());
        for piece in owners.own() {
            let of_piece = OwnedState::of(piece, &weights[piece.tensor], || empty(&piece.shape));
            let of_piece = of_piece.map_err(refused)?;
            let parameter = &layout.parameters[piece.tensor];
            let read = || piece.of(&weights[piece.tensor]);
            let weight = of_piece.master.as_ref().map_or_else(read, Tensor::shallow_clone);
            wants.extend(run(TensorSet::Weights, parameter, piece, &weight));
            wants.extend(run(TensorSet::First, parameter, piece, &of_piece.first));
            let second = of_piece.second.as_ref();
            wants.extend(
                second.into_iter().flat_map(|into| run(TensorSet::Second, parameter, piece, into)),
            );
            owned.push(of_piece);
        }
        self.fill(wants, workers)?;
        let balance = self.balance(layout, workers)?;
        let (step, windows) = (self.manifest.step, self.manifest.windows.clone());
        let (owners, fold) = (owners.clone(), WeightShards::default());
        let departures = PendingCopies::default();
        let state = State { step, weights, fold, balance, windows, owners, owned, departures };
        state.round(workers)?;
        Ok(state)
    }

    /// The complete state, checked.
    pub fn whole(&self, layout: &StateLayout, workers: Workers) -> Result<State> {
        let pieces = ownership::pieces(&layout.parameters, &layout.rules, 1);
        let state = self.part(layout, &Ownership::cut(pieces, 0), workers)?;
        self.check(state.sums(workers)?.digest)?;
        Ok(state)
    }

    /// Refuses a state with another digest than the one written.
    pub fn check(&self, found: Digest) -> Result<()> {
        if found == self.manifest.state {
            return Ok(());
        }
        let fault = damaged(self.location(), "its state digest does not match");
        Err(fault.found(found).wanted(self.manifest.state))
    }
}

/// The boxes of `piece` to read; `into` holds its elements in order.
fn run(
    set: TensorSet,
    parameter: &ParamSpec,
    piece: &ParamShard,
    into: &Tensor,
) -> Vec<ReadRequest> {
    let (flat, mut at) = (into.view([-1]), 0);
    let regions = Region::run(&parameter.shape, piece.first, piece.length()).into_iter();
    let want = |region: Region| {
        at += region.volume();
        let into = flat.narrow(0, at - region.volume(), region.volume());
        let into = into.view(region.lengths.as_slice());
        ReadRequest { set, name: parameter.name.clone(), region, into }
    };
    regions.map(want).collect()
}

fn damaged(place: Location, what: &str) -> Fault {
    Fault::new(Class::Data, format!("this checkpoint is damaged: {what}")).at(place.to_string())
}

#[cfg(test)]
mod tests {
    use store::location::memory::Memory;

    use super::super::Checkpoints;
    use super::super::tests::{layout, newest, save};

    /// A blob from a bucket that arrives with wrong bytes is fetched again before the checkpoint is called damaged.
    #[test]
    fn a_copy_that_came_wrongly_is_no_damage() {
        let checkpoints = Checkpoints::new(Memory::spoiled().holding("s3://b/kept"));
        save(&checkpoints, &layout(), 3).unwrap();
        let (step, passed) = newest(&checkpoints, &layout());
        assert!(step == Some(3) && passed.is_empty(), "{passed:?}");
    }
}
