//! Writing: a copy of what a writer owns, as blobs with their sums; the manifest last.

use std::borrow::Cow;
use std::collections::BTreeMap;

use contract::{Digest, Fault, Result};
use kernels::device::{Landing, Unloader};
use safetensors::tensor::{Dtype, View};
use tch::{Device, Kind, Tensor};

use super::format::{self, BlobRecord, Set};
use super::medium::Medium;
use super::region::Region;
use super::{Layout, name};
use crate::model::balance_name;
use crate::optim::balance::Balance;
use crate::optim::guard::Windows;
use crate::refusal::refused;
use crate::state::ownership::Piece;
use crate::state::{Owned, State};

/// A copy on the host of what one writer owns of a state: nothing moves it any more. A device may still be making it.
pub struct Snapshot {
    step: u64,
    pieces: Vec<Held>,
    landing: Landing,
    balance: Vec<Balance>,
    windows: Option<Windows>,
}

/// One piece, in its shape or flat.
struct Held {
    piece: Piece,
    weight: Tensor,
    first: Tensor,
    second: Option<Tensor>,
}

impl Snapshot {
    /// Copies what this rank owns of `state`, and waits until it is copied.
    pub fn of(state: &State) -> Result<Self> {
        let device = state.weights.first().map_or(Device::Cpu, Tensor::device);
        let snapshot = Snapshot::beside(state, &Unloader::new(device).map_err(refused)?)?;
        snapshot.arrive()?;
        Ok(snapshot)
    }

    /// The same without waiting: a device copies beside what follows, into pinned memory, and whoever moves the state there holds
    /// until it has. Rank 0 owns the balance; the windows, which every rank has, go into the manifest.
    pub fn beside(state: &State, unloader: &Unloader) -> Result<Self> {
        // No `..`: whatever is added to the state has to be written.
        let State { step, weights: _, fold: _, balance, windows, owners, owned: _, departures } =
            state;
        let (mut tensors, mut pieces) = (Vec::new(), Vec::new());
        for (piece, weight, Owned { master: _, first, second }) in state.own() {
            tensors.extend([weight, first.shallow_clone()]);
            tensors.extend(second.as_ref().map(Tensor::shallow_clone));
            pieces.push((piece.clone(), second.is_some()));
        }
        let (copies, landing) = unloader.copies(&tensors, departures).map_err(refused)?;
        let mut copies = copies.into_iter();
        let mut next = || copies.next().ok_or_else(|| Fault::bug("a tensor was not copied"));
        let held = |(piece, has_second): (Piece, bool)| {
            let (weight, first) = (next()?, next()?);
            let second = if has_second { Some(next()?) } else { None };
            Ok(Held { piece, weight, first, second })
        };
        let pieces = pieces.into_iter().map(held).collect::<Result<_>>()?;
        let balance = if owners.rank() == 0 { balance.clone() } else { Vec::new() };
        Ok(Snapshot { step: *step, pieces, landing, balance, windows: windows.clone() })
    }

    /// Waits until all of it is here.
    fn arrive(&self) -> Result<()> {
        self.landing.wait().map_err(refused)
    }

    /// One that holds nothing.
    pub(super) fn empty(step: u64) -> Self {
        let (pieces, landing) = (Vec::new(), Landing::default());
        Snapshot { step, pieces, landing, balance: Vec::new(), windows: None }
    }

    /// The step whose outcome this is.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The windows after it.
    pub(super) fn windows(&self) -> Option<Windows> {
        self.windows.clone()
    }

    /// The blobs that this writer writes, with what they hold.
    fn blobs(&self, layout: &Layout) -> BTreeMap<String, Vec<Entry>> {
        let mut blobs: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
        for Held { piece, weight, first, second } in &self.pieces {
            let parameter = &layout.parameters[piece.tensor];
            let sets = [(Set::Weights, Some(weight)), (Set::First, Some(first))];
            for (set, tensor) in sets.into_iter().chain([(Set::Second, second.as_ref())]) {
                let Some(flat) = tensor.map(|tensor| tensor.view([-1])) else { continue };
                let (blob, mut at) = (blobs.entry(set.blob(piece.bundle)).or_default(), 0);
                for region in Region::run(&parameter.shape, piece.first, piece.length()) {
                    let values = flat.narrow(0, at, region.volume());
                    at += region.volume();
                    blob.push(Entry::new(set, &parameter.name, &region, values));
                }
            }
        }
        for (layer, balance) in self.balance.iter().enumerate() {
            let blob = blobs.entry(format::BALANCE.to_owned()).or_default();
            for set in Set::ALL {
                let values = Tensor::from_slice(format::values(balance, set));
                let region = Region::whole(&values.size());
                blob.push(Entry::new(set, &balance_name(layer as i64), &region, values));
            }
        }
        blobs
    }
}

/// Puts the blobs of a snapshot where they belong.
pub(super) fn blobs(
    medium: &dyn Medium,
    layout: &Layout,
    snapshot: &Snapshot,
) -> Result<Vec<BlobRecord>> {
    let put = |(blob, entries): (String, Vec<Entry>)| {
        let named = entries.iter().map(|entry| (entry.key.as_str(), entry));
        let bytes = safetensors::serialize(named, None)
            .map_err(|error| Fault::bug(format!("the blob {blob} cannot be written: {error}")))?;
        medium.put(&name(snapshot.step, &blob), &bytes)?;
        Ok(BlobRecord { name: blob, bytes: bytes.len() as u64, digest: Digest::of_bytes(&bytes) })
    };
    snapshot.arrive()?;
    snapshot.blobs(layout).into_iter().map(put).collect()
}

/// One box in a blob, whose bytes exist only while it is written.
struct Entry {
    key: String,
    shape: Vec<usize>,
    values: Tensor,
}

impl Entry {
    fn new(set: Set, tensor: &str, region: &Region, values: Tensor) -> Self {
        let shape = region.lengths.iter().map(|length| *length as usize).collect();
        Entry { key: format::key(set, tensor, &region.offsets), shape, values }
    }
}

impl View for &Entry {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.values.numel() * 4];
        self.values.to_kind(Kind::Float).copy_data_u8(&mut bytes, self.values.numel());
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.values.numel() * 4
    }
}
