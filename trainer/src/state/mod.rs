//! The state of a run as one rank holds it: every weight in the dtype in which the model reads it; and for the pieces
//! that the rank owns the moments, and the weights in f32 where the model reads them rounded. A rank that is alone owns
//! all pieces.
//!
//! Where weights are sharded ([`WeightShards`]), a rank holds its shards of them, and also its own pieces in f32.
//!
//! Invariant: the model reads an owner's weights, rounded once, by the owner.
//!
//! [`ownership`] assigns pieces to ranks, [`digest`] computes what the ledger records of a state.

pub mod digest;
pub mod ownership;

use std::collections::BTreeMap;

use contract::{Fault, Result};
use curriculum::Dtype;
use kernels::checksum;
use kernels::device::PendingCopies;
use kernels::record::Record;
use tch::{Device, Kind, Tensor};

use crate::model::{self, ParamSpec, WeightShards};
use crate::optim::balance::RouterBalance;
use crate::optim::guard::Windows;
use crate::optim::{
    self, ChecksumInputs, OptimizerRule, OptimizerSettings, ParamScales, StepScalars, UpdateItem,
    UpdateKind, UpdateResults, norm,
};
use crate::refusal::refused;
use crate::spec::RunSpec;
use crate::timing;
use crate::workers::Workers;
pub use digest::StateSums;
pub(crate) use digest::{Part, salt};
use ownership::{Ownership, ParamShard};

/// Everything that one step passes to the next.
pub struct State {
    /// The step; 0 before the first.
    pub step: u64,
    /// Weights in canonical order, as the model read them in `step`: the same on every rank, except sharded ones,
    /// which are flat buffers of this rank's shards. Those of other ranks may still be on their way
    /// ([`crate::mesh::share`]).
    pub weights: Vec<Tensor>,
    /// The shards that this rank holds.
    pub fold: WeightShards,
    /// The routers' balancing biases, by layer: the same on every rank.
    pub balance: Vec<RouterBalance>,
    /// The losses and norms that decide what is skipped and clipped, the same on every rank; `None` where the
    /// curriculum does neither, and no step was without labels.
    pub windows: Option<Windows>,
    /// Which rank owns which pieces.
    pub owners: Ownership,
    /// What only this rank holds of its pieces, in their order.
    pub owned: Vec<OwnedState>,
    /// Pending device copies of this rank's pieces for a checkpoint: wait for them before writing pieces in place.
    pub departures: PendingCopies,
}

/// What the owner of a piece holds in addition to [`State::weights`], in the shape of the piece.
pub struct OwnedState {
    /// Its weights in f32, where the model reads them rounded or in shards.
    pub master: Option<Tensor>,
    /// First moments (AdamW) or momenta (Muon).
    pub first: Tensor,
    /// Second moments; `None` under Muon.
    pub second: Option<Tensor>,
}

impl OwnedState {
    /// For `piece`; the model reads its tensor as `weight`, and `make` allocates each tensor.
    pub fn of(
        piece: &ParamShard,
        weight: &Tensor,
        mut make: impl FnMut() -> kernels::Result<Tensor>,
    ) -> kernels::Result<Self> {
        let master = (weight.kind() != Kind::Float).then(&mut make).transpose()?;
        let first = make()?;
        let second = piece.rule.has_second_moment().then(make).transpose()?;
        Ok(OwnedState { master, first, second })
    }

    fn copy(&self) -> kernels::Result<Self> {
        let copy = |tensor: &Option<Tensor>| tensor.as_ref().map(copied).transpose();
        let OwnedState { master, first, second } = self;
        Ok(OwnedState { master: copy(master)?, first: copied(first)?, second: copy(second)? })
    }
}

/// A copy in separate memory.
fn copied(tensor: &Tensor) -> kernels::Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    tch::no_grad(|| copy.f_copy_(tensor))?;
    Ok(copy)
}

/// Allocates the weights of these parameters as the model reads them under `dtype`; adjoining ones share an allocation.
pub(crate) fn room(
    parameters: &[ParamSpec],
    dtype: Dtype,
    device: Device,
) -> kernels::Result<Vec<Tensor>> {
    let mut found = Vec::with_capacity(parameters.len());
    for run in runs(parameters) {
        found.extend(room_of_run(run, run[0].kind(dtype), device)?);
    }
    Ok(found)
}

/// Runs of adjoining parameters.
fn runs(parameters: &[ParamSpec]) -> impl Iterator<Item = &[ParamSpec]> {
    parameters.chunk_by(|_, next| next.adjoins)
}

fn room_of_run(run: &[ParamSpec], kind: Kind, device: Device) -> kernels::Result<Vec<Tensor>> {
    let count = |parameter: &ParamSpec| parameter.elements() as i64;
    let all = Tensor::f_empty([run.iter().map(count).sum::<i64>()], (kind, device))?;
    let (mut room, mut at) = (Vec::with_capacity(run.len()), 0);
    for parameter in run {
        room.push(all.f_narrow(0, at, count(parameter))?.f_view(parameter.shape.as_slice())?);
        at += count(parameter);
    }
    Ok(room)
}

/// The weights in `dtype`, laid out as by [`room`]; those that have it already are the same tensors.
fn moved(
    parameters: &[ParamSpec],
    dtype: Dtype,
    weights: &[Tensor],
) -> kernels::Result<Vec<Tensor>> {
    let (mut found, mut left) = (Vec::with_capacity(weights.len()), weights);
    for run in runs(parameters) {
        let (narrow, rest) = left.split_at(run.len());
        left = rest;
        let (kind, device) = (run[0].kind(dtype), narrow[0].device());
        if narrow[0].kind() == kind {
            found.extend(narrow.iter().map(Tensor::shallow_clone));
            continue;
        }
        let mut room = room_of_run(run, kind, device)?;
        let mut pairs = room.iter_mut().zip(narrow);
        tch::no_grad(|| pairs.try_for_each(|(room, narrow)| room.f_copy_(narrow)))?;
        found.extend(room);
    }
    Ok(found)
}

/// Checksums of a piece: of its weights, first moments and second moments, 0 where it has no second moments.
pub type ShardChecksums = [u64; 3];

/// The results of updating this rank's pieces, for the host to read.
pub(crate) struct Updated {
    outcome: UpdateResults,
    /// The end of each piece in the list of work items.
    ends: Vec<usize>,
}

impl Updated {
    /// For each piece the sum of squares of new weights minus old ones, and its checksums.
    pub(crate) fn read(self) -> Result<Vec<(f64, ShardChecksums)>> {
        let came = self.outcome.read()?;
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        let piece = |(start, end): (usize, &usize)| {
            let squares: Vec<f64> = came[start..*end].iter().map(|(squares, _)| *squares).collect();
            let add = |[a, b, c]: ShardChecksums, (_, [d, e, f]): &(f64, ShardChecksums)| {
                [a.wrapping_add(*d), b.wrapping_add(*e), c.wrapping_add(*f)]
            };
            (norm::sum(&squares), came[start..*end].iter().fold([0; 3], add))
        };
        Ok(starts.zip(&self.ends).map(piece).collect())
    }
}

impl State {
    /// The state before the first step: sampled weights, or those of the initial model. Each rank fills in what it owns
    /// and receives the rest from the other ranks ([`crate::mesh`]).
    pub fn begin(
        spec: &RunSpec,
        device: Device,
        owners: Ownership,
        workers: Workers,
    ) -> Result<Self> {
        let balance = spec.balance();
        let weights = room(&spec.parameters, spec.dtype_at(1), device).map_err(refused)?;
        let zeros = |piece: &ParamShard| {
            Ok(Tensor::f_zeros(piece.shape.as_slice(), (Kind::Float, device))?)
        };
        let of = |piece| OwnedState::of(piece, &weights[piece.tensor], || zeros(piece));
        let owned = owners.own().map(of).collect::<kernels::Result<_>>().map_err(refused)?;
        let windows = spec.settings.guard.windows();
        let fold = WeightShards::default();
        let departures = PendingCopies::default();
        let mut state =
            State { step: 0, weights, fold, balance, windows, owners, owned, departures };
        match &spec.start {
            None => drawn(spec, &state, workers)?,
            Some(start) => {
                let mut by_tensor = BTreeMap::<usize, Vec<_>>::new();
                for (piece, into, _) in state.own() {
                    by_tensor.entry(piece.tensor).or_default().push((piece, into));
                }
                let biases = start.read(|place, weight| {
                    by_tensor.remove(&place).unwrap_or_default().into_iter().try_for_each(
                        |(piece, mut into)| {
                            tch::no_grad(|| into.f_copy_(&piece.of(weight)))
                                .map_err(refused)
                                .map(drop)
                        },
                    )
                })?;
                // A start without biases may begin to balance.
                let layers = state.balance.iter_mut().zip(biases);
                let layers = layers.filter(|(_, bias)| !bias.is_empty());
                layers.for_each(|(layer, bias)| layer.bias = bias);
            }
        }
        state.round(workers)?;
        Ok(state)
    }

    /// The device of its tensors.
    pub fn device(&self) -> Device {
        self.weights.first().map_or(Device::Cpu, Tensor::device)
    }

    /// A copy that shares no memory with this one.
    pub fn copy(&self) -> Result<State> {
        let State { step, weights, fold, balance, windows, owners, owned, departures: _ } = self;
        let weights = weights.iter().map(copied).collect::<kernels::Result<_>>();
        let owned = owned.iter().map(OwnedState::copy).collect::<kernels::Result<_>>();
        Ok(State {
            step: *step,
            weights: weights.map_err(refused)?,
            fold: fold.clone(),
            balance: balance.clone(),
            windows: windows.clone(),
            owners: owners.clone(),
            owned: owned.map_err(refused)?,
            departures: PendingCopies::default(),
        })
    }

    /// This rank's pieces with aliases of their weights in f32, and what else it holds of them.
    pub fn own(&self) -> impl Iterator<Item = (&ParamShard, Tensor, &OwnedState)> {
        self.owners.own().zip(&self.owned).map(|(piece, owned)| {
            let read = || piece.of(&self.weights[piece.tensor]);
            (piece, owned.master.as_ref().map_or_else(read, Tensor::shallow_clone), owned)
        })
    }

    /// All pieces with their weights: this rank's in f32, others as the model reads them.
    fn all(&self) -> impl Iterator<Item = (&ParamShard, Tensor)> {
        let mut pieces = self.own();
        self.owners.pieces().iter().map(move |piece| {
            let pieces = if piece.owner == self.owners.rank() { pieces.next() } else { None };
            let read = || piece.of(&self.weights[piece.tensor]);
            (piece, pieces.map_or_else(read, |(_, weight, _)| weight))
        })
    }

    /// Rounds this rank's pieces to what the model reads. A step itself rounds the whole pieces that it updates.
    pub(crate) fn round(&self, workers: Workers) -> Result<()> {
        let mut whole = Vec::new();
        for (piece, owned) in self.owners.own().zip(&self.owned) {
            if let Some(master) = &owned.master
                && !self.fold.cuts(piece.tensor)
            {
                whole.push([piece.of(&self.weights[piece.tensor]), master.shallow_clone()]);
            }
        }
        workers.map(Workers::batched(self.device(), whole), |mut pairs: Vec<_>| {
            let _watch = timing::part(timing::StepPart::Round);
            workers.ops().all_rounded(&mut pairs).map_err(refused)
        })?;
        self.round_shards(workers)
    }

    /// The same for sharded pieces.
    fn round_shards(&self, workers: Workers) -> Result<()> {
        let mut shards = Vec::new();
        let cut = |(piece, _): &(&ParamShard, &OwnedState)| self.fold.cuts(piece.tensor);
        for (piece, owned) in self.owners.own().zip(&self.owned).filter(cut) {
            let Some(master) = &owned.master else { continue };
            let weight = &self.weights[piece.tensor];
            let (flat, end) = (master.reshape([-1]), piece.first + piece.length());
            for common in self.fold.common(piece.tensor, piece.first..end) {
                let [held, run] = [common.of_held(weight), common.of_run(&flat)];
                shards.push((held.map_err(refused)?, run.map_err(refused)?));
            }
        }
        workers.map(shards, |(mut read, master): (Tensor, Tensor)| {
            let _watch = timing::part(timing::StepPart::Round);
            tch::no_grad(|| read.f_copy_(&master)).map_err(refused)?;
            Ok(())
        })?;
        Ok(())
    }

    /// The weights as the model reads them under `dtype`, aliases where they have it already. A wider dtype than the
    /// held one is available only where one rank owns everything.
    pub(crate) fn read_as(
        &self,
        parameters: &[ParamSpec],
        dtype: Dtype,
        workers: Workers,
    ) -> Result<Vec<Tensor>> {
        let wide = |(parameter, weight): (&ParamSpec, &Tensor)| {
            parameter.kind(dtype) == Kind::Float && weight.kind() != Kind::Float
        };
        let weights = match parameters.iter().zip(&self.weights).any(wide) {
            true => self.in_f32()?,
            false => self.weights.iter().map(Tensor::shallow_clone).collect(),
        };
        workers.map(parameters.iter().zip(weights).collect(), |(parameter, weight)| {
            let _watch = timing::part(timing::StepPart::Round);
            model::rounded(parameter, &weight, dtype).map_err(refused)
        })
    }

    /// All weights in f32, of a state that this rank owns completely; aliases where they are f32.
    pub fn in_f32(&self) -> Result<Vec<Tensor>> {
        let whole = self.weights.iter().map(|weight| weight.f_to_kind(Kind::Float));
        let whole = whole.collect::<std::result::Result<Vec<_>, _>>();
        let whole = whole.map_err(refused)?;
        for (piece, weight) in self.all() {
            if weight.kind() != Kind::Float {
                return Err(Fault::bug("the f32 weights of another rank are asked for"));
            }
            // A weight held in f32 is an alias already.
            if self.weights[piece.tensor].kind() != Kind::Float {
                tch::no_grad(|| piece.of(&whole[piece.tensor]).f_copy_(&weight))
                    .map_err(refused)?;
            }
        }
        Ok(whole)
    }

    /// Whether the held weights are those that the model reads under `dtype`, sharded by `fold`.
    pub(crate) fn holds(
        &self,
        parameters: &[ParamSpec],
        dtype: Dtype,
        fold: &WeightShards,
    ) -> bool {
        let mut both = parameters.iter().zip(&self.weights);
        self.fold == *fold && both.all(|(parameter, weight)| parameter.kind(dtype) == weight.kind())
    }

    /// Changes the held weights to what the model reads under `dtype`, sharded by `fold`. Returns whether other ranks
    /// have to send theirs, because they were held in a narrower dtype, or not held.
    pub(crate) fn cast_weights(
        &mut self,
        parameters: &[ParamSpec],
        dtype: Dtype,
        fold: WeightShards,
        workers: Workers,
    ) -> Result<bool> {
        if self.holds(parameters, dtype, &fold) {
            return Ok(false);
        }
        // Whole tensors are overwritten, other ranks' pieces included.
        self.await_copies()?;
        if self.fold != fold || fold.degree() > 1 {
            self.allocate_weights(parameters, dtype, fold).map_err(refused)?;
            return self.round(workers).map(|()| true);
        }
        self.cast_in_place(parameters, dtype).map_err(refused)
    }

    /// Allocates the weights under `fold` and copies this rank's pieces into them. Other ranks must send theirs.
    fn allocate_weights(
        &mut self,
        parameters: &[ParamSpec],
        dtype: Dtype,
        fold: WeightShards,
    ) -> kernels::Result<()> {
        let masters: Vec<Tensor> = self.own().map(|(_, weight, _)| weight).collect();
        let mut changed = vec![false; self.weights.len()];
        for (tensor, (parameter, weight)) in parameters.iter().zip(&mut self.weights).enumerate() {
            let kind = parameter.kind(dtype);
            changed[tensor] = kind != weight.kind() || fold.cuts(tensor) || self.fold.cuts(tensor);
            if changed[tensor] {
                *weight = fold.room(parameter, tensor, kind, weight.device())?;
            }
        }
        self.fold = fold;
        self.place_masters(&changed, masters)
    }

    /// Copies this rank's pieces in f32, `masters`, to the weights that were `changed`: into a weight that the model
    /// reads whole in f32, else next to it.
    fn place_masters(&mut self, changed: &[bool], masters: Vec<Tensor>) -> kernels::Result<()> {
        let pieces = self.owners.own().zip(&mut self.owned).zip(masters);
        for ((piece, owned), master) in pieces.filter(|((piece, _), _)| changed[piece.tensor]) {
            let read = &self.weights[piece.tensor];
            if read.kind() == Kind::Float && !self.fold.cuts(piece.tensor) {
                tch::no_grad(|| piece.of(read).f_copy_(&master))?;
                owned.master = None;
            } else if owned.master.is_none() {
                // A copy: an alias would keep the whole tensor.
                owned.master = Some(copied(&master)?);
            }
        }
        Ok(())
    }

    /// The same where all weights are whole: returns whether others have to send theirs.
    fn cast_in_place(&mut self, parameters: &[ParamSpec], dtype: Dtype) -> kernels::Result<bool> {
        let (mut asks, mut changed) = (false, vec![false; self.weights.len()]);
        let masters: Vec<Tensor> = self.own().map(|(_, weight, _)| weight).collect();
        for ((parameter, weight), changed) in
            parameters.iter().zip(&mut self.weights).zip(&mut changed)
        {
            let kind = parameter.kind(dtype);
            if weight.kind() != kind {
                (asks, *changed) = (asks || kind == Kind::Float, true);
            }
        }
        if changed.contains(&true) {
            self.weights = moved(parameters, dtype, &self.weights)?;
        }
        self.place_masters(&changed, masters)?;
        Ok(asks)
    }

    /// Work queued from here on may write this rank's pieces: it runs after a device's copies for a checkpoint.
    fn await_copies(&self) -> Result<()> {
        self.departures.order_after(self.device()).map_err(refused)
    }

    /// Updates this rank's pieces by their gradients, given in the order of the pieces; `scales` are those of each
    /// parameter. A gradient is freed when its piece is done; `done` hears how many of the first pieces are. The caller
    /// advances `step`.
    pub(crate) fn update(
        &self,
        by: (&OptimizerSettings, &[ParamScales]),
        gradients: Vec<Tensor>,
        at: StepScalars,
        workers: Workers,
        mut done: impl FnMut(usize) -> Result<()> + Send,
    ) -> Result<Updated> {
        self.await_copies()?;
        let (settings, scales) = by;
        let (mut items, mut ends) = (Vec::new(), Vec::new());
        for ((piece, owned), gradient) in self.owners.own().zip(&self.owned).zip(gradients) {
            let (weight, rounded) = self.moves(piece, owned);
            let salts = [Part::Weight, Part::First, Part::Second];
            let salts = salts.map(|part| salt(part, piece.tensor));
            let sums = ChecksumInputs { first: piece.first as u64, salts };
            let first = owned.first.shallow_clone();
            let how = match (piece.rule, &owned.second) {
                (OptimizerRule::AdamW { .. }, Some(second)) => {
                    UpdateKind::AdamW { second: second.shallow_clone() }
                }
                _ => UpdateKind::Muon,
            };
            let scales = scales[piece.tensor];
            let whole = UpdateItem { weight, rounded, first, gradient, how, scales, sums };
            optim::split(piece.rule, whole, &mut items);
            ends.push(items.len());
        }
        let pieces = |items: usize| done(ends.partition_point(|end| *end <= items));
        let outcome = optim::run(settings, items, at, workers, pieces)?;
        self.round_shards(workers)?;
        Ok(Updated { outcome, ends })
    }

    /// What is updated for one of this rank's pieces: its weights in f32, and the rounded tensor that the model reads,
    /// with the first element there, unless that is sharded.
    fn moves(&self, piece: &ParamShard, owned: &OwnedState) -> (Tensor, Option<(Tensor, i64)>) {
        let read = &self.weights[piece.tensor];
        let Some(master) = &owned.master else { return (piece.of(read), None) };
        let whole = !self.fold.cuts(piece.tensor);
        (master.shallow_clone(), whole.then(|| (read.shallow_clone(), piece.first)))
    }

    /// Checksums of this rank's pieces, in their order, computed on the workers.
    pub(crate) fn own_sums(&self, workers: Workers) -> Result<Vec<ShardChecksums>> {
        let items = self.own().map(|(piece, weight, OwnedState { first, second, .. })| {
            let second = second.as_ref().map(Tensor::shallow_clone);
            (piece.clone(), weight, first.shallow_clone(), second)
        });
        let found = workers.map(Workers::batched(self.device(), items), |items: Vec<_>| {
            let _watch = timing::part(timing::StepPart::StateSums);
            let mut slices = Vec::with_capacity(3 * items.len());
            for (piece, weight, first, second) in &items {
                let of = |tensor, part| (tensor, piece.first as u64, salt(part, piece.tensor));
                slices.extend([of(weight, Part::Weight), of(first, Part::First)]);
                slices.extend(second.as_ref().map(|second| of(second, Part::Second)));
            }
            let mut record = Record::default();
            record.put(&checksum::slices(&slices).map_err(refused)?).map_err(refused)?;
            record.read().map_err(refused)?;
            let mut next = || record.word().map_err(refused);
            let mut three = |has_second: bool| -> Result<ShardChecksums> {
                Ok([next()?, next()?, if has_second { next()? } else { 0 }])
            };
            items.iter().map(|(.., second)| three(second.is_some())).collect::<Result<Vec<_>>>()
        })?;
        Ok(found.into_iter().flatten().collect())
    }

    /// The checksums of the whole state, from those of all pieces in canonical order.
    pub(crate) fn sums_of(&self, pieces: &[ShardChecksums]) -> StateSums {
        // No `..`, so that a new field of the state cannot be missed in its digest.
        // The distribution over ranks does not enter the digest.
        let State { step, weights, fold: _, balance, windows, owners, owned: _, departures: _ } =
            self;
        let mut sums = [(); 3].map(|()| vec![0u64; weights.len()]);
        let mut has_second = vec![false; weights.len()];
        for (piece, of_piece) in owners.pieces().iter().zip(pieces) {
            has_second[piece.tensor] = piece.rule.has_second_moment();
            for (sums, sum) in sums.iter_mut().zip(of_piece) {
                sums[piece.tensor] = sums[piece.tensor].wrapping_add(*sum);
            }
        }
        let [weights, first, second] = sums;
        let second = second.iter().zip(&has_second).filter(|(_, has)| **has).map(|(sum, _)| *sum);
        let all: Vec<u64> = weights.iter().chain(&first).copied().chain(second).collect();
        let digest = digest::digest(*step, &has_second, &all, balance, windows.as_ref());
        StateSums { weights, digest }
    }

    /// The same for a state that this rank owns completely.
    pub fn sums(&self, workers: Workers) -> Result<StateSums> {
        Ok(self.sums_of(&self.own_sums(workers)?))
    }
}

/// Elements that a worker samples at a time.
const DRAWN: usize = 1 << 20;

/// Samples this rank's initial weights in place: each number depends only on its index. Uses all cores, even if a
/// device has few workers: one thread takes most of a minute for 10^9 weights.
fn drawn(spec: &RunSpec, state: &State, workers: Workers) -> Result<()> {
    let mut parts = Vec::new();
    for (piece, weight, _) in state.own() {
        let (flat, count) = (weight.view([-1]), piece.length() as u64);
        for first in (0..count).step_by(DRAWN) {
            let length = count.min(first + DRAWN as u64) - first;
            let (into, at) = (flat.narrow(0, first as i64, length as i64), piece.first as u64);
            parts.push((&spec.parameters[piece.tensor], at + first..at + first + length, into));
        }
    }
    let cores = match state.device() {
        Device::Cpu => workers,
        _ => Workers::available(),
    };
    cores.map(parts, |(parameter, part, mut into)| {
        let values = model::initial(parameter, spec.curriculum.seed, part).map_err(refused)?;
        tch::no_grad(|| into.f_copy_(&values)).map_err(refused)
    })?;
    Ok(())
}
