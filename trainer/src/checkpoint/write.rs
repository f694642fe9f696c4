//! Writes checkpoints: a copy of the pieces that a writer owns, as checksummed blobs; the manifest is written last.

use std::borrow::Cow;
use std::collections::BTreeMap;

use contract::{Fault, Result};
use kernels::device::{HostCopier, HostCopies};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use store::FileRecord;
use tch::Kind;

use super::format::{self, BlobRecord, TensorSet};
use super::medium::Medium;
use super::region::Region;
use super::{StateLayout, name};
use crate::model::balance_name;
use crate::optim::balance::RouterBalance;
use crate::optim::guard::Windows;
use crate::refusal::refused;
use crate::state::ownership::ParamShard;
use crate::state::{OwnedState, State};

/// Bytes of an element.
const F32: usize = 4;

/// A host copy of what one writer owns of a state, which later updates do not change. A device may still be copying it.
pub struct Snapshot {
    step: u64,
    /// Each piece with its copied sets: weight, first moment and, if it has one, second moment.
    pieces: Vec<(ParamShard, &'static [TensorSet])>,
    /// The values of all pieces, set by set; f32.
    copies: HostCopies,
    balance: Vec<RouterBalance>,
    windows: Option<Windows>,
}

impl Snapshot {
    /// Copies what this rank owns of `state`, and waits for the copy.
    pub fn of(state: &State) -> Result<Self> {
        let copier = HostCopier::kept(state.device()).map_err(refused)?;
        let snapshot = Snapshot::beside(state, &copier)?;
        snapshot.arrive()?;
        Ok(snapshot)
    }

    /// The same without waiting: a device copies into pinned memory while training continues, and the next update of
    /// the state waits for it. Rank 0 owns the balance; the windows, which every rank has, are stored in the manifest.
    pub fn beside(state: &State, unloader: &HostCopier) -> Result<Self> {
        // No `..`: every new field of the state must be written.
        let State { step, weights: _, fold: _, balance, windows, owners, owned: _, departures } =
            state;
        let (mut tensors, mut pieces) = (Vec::new(), Vec::new());
        for (piece, weight, OwnedState { master: _, first, second }) in state.own() {
            let held = [Some(&weight), Some(first), second.as_ref()];
            tensors.extend(held.iter().flatten().map(|tensor| tensor.to_kind(Kind::Float)));
            pieces.push((piece.clone(), &TensorSet::ALL[..held.iter().flatten().count()]));
        }
        let copies = unloader.copies(&tensors, departures).map_err(refused)?;
        let balance = if owners.rank() == 0 { balance.clone() } else { Vec::new() };
        Ok(Snapshot { step: *step, pieces, copies, balance, windows: windows.clone() })
    }

    /// Waits until the copy is complete.
    fn arrive(&self) -> Result<()> {
        self.copies.wait().map_err(refused)
    }

    /// An empty one.
    #[cfg(test)]
    pub(super) fn empty(step: u64) -> Self {
        let (pieces, copies) = (Vec::new(), HostCopies::default());
        Snapshot { step, pieces, copies, balance: Vec::new(), windows: None }
    }

    /// The step after which this is the state.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The windows after that step.
    pub(super) fn windows(&self) -> Option<Windows> {
        self.windows.clone()
    }

    /// The blobs of this writer by name, with their entries. Waits until the copy is complete.
    fn blobs(&self, layout: &StateLayout) -> Result<BTreeMap<String, Vec<Entry<'_>>>> {
        let mut blobs: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
        let sets =
            self.pieces.iter().flat_map(|(piece, sets)| sets.iter().map(move |set| (piece, *set)));
        for ((piece, set), mut rest) in sets.zip(self.copies.bytes().map_err(refused)?) {
            let parameter = &layout.parameters[piece.tensor];
            let blob = blobs.entry(set.blob(piece.bundle)).or_default();
            for region in Region::run(&parameter.shape, piece.first, piece.length()) {
                let bytes = rest.split_off(..F32 * region.volume() as usize);
                let bytes = bytes.ok_or_else(|| Fault::bug("a piece was not copied whole"))?;
                blob.push(Entry::new(set, &parameter.name, &region, Cow::Borrowed(bytes)));
            }
        }
        for (layer, balance) in format::balances(&self.balance) {
            let blob = blobs.entry(format::BALANCE.to_owned()).or_default();
            for set in TensorSet::ALL {
                let values = format::values(balance, set);
                let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                let region = Region::whole(&[values.len() as i64]);
                blob.push(Entry::new(set, &balance_name(layer), &region, Cow::Owned(bytes)));
            }
        }
        blobs.values_mut().for_each(|blob| blob.sort_by(|one, other| one.key.cmp(&other.key)));
        Ok(blobs)
    }
}

/// Writes the blobs of a snapshot.
pub(super) fn blobs(
    medium: &dyn Medium,
    layout: &StateLayout,
    snapshot: &Snapshot,
) -> Result<Vec<BlobRecord>> {
    let put = |(blob, entries): (String, Vec<Entry>)| {
        let head = head(&entries)
            .map_err(|error| Fault::bug(format!("the blob {blob} cannot be written: {error}")))?;
        // The parts are not concatenated in memory, which would take as long as writing them.
        let bodies = entries.iter().map(|entry| &*entry.bytes);
        let parts: Vec<&[u8]> = [head.as_slice()].into_iter().chain(bodies).collect();
        let record = medium.put(&name(snapshot.step, &blob), &parts)?;
        let FileRecord { name, bytes, digest } = record;
        Ok(BlobRecord { name, bytes, digest })
    };
    snapshot.blobs(layout)?.into_iter().map(put).collect()
}

/// The header of a safetensors file whose values are those of `entries`, in this order.
fn head(entries: &[Entry]) -> std::result::Result<Vec<u8>, SafeTensorError> {
    let mut end = 0;
    let info = |Entry { key, shape, bytes }: &Entry| {
        let (begin, shape) = (end, shape.clone());
        end += bytes.len();
        (key.clone(), TensorInfo { dtype: Dtype::F32, shape, data_offsets: (begin, end) })
    };
    let infos = entries.iter().map(info).collect();
    let mut text = serde_json::to_vec(&Metadata::new(None, infos)?)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes(), text.as_slice()].concat())
}

/// A box in a blob.
struct Entry<'a> {
    key: String,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> Entry<'a> {
    fn new(set: TensorSet, tensor: &str, region: &Region, bytes: Cow<'a, [u8]>) -> Self {
        let shape = region.lengths.iter().map(|length| *length as usize).collect();
        Entry { key: format::key(set, tensor, &region.offsets), shape, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use safetensors::View;

    impl View for &Entry<'_> {
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }

        fn shape(&self) -> &[usize] {
            &self.shape
        }

        fn data(&self) -> Cow<'_, [u8]> {
            Cow::Borrowed(&self.bytes)
        }

        fn data_len(&self) -> usize {
            self.bytes.len()
        }
    }

    proptest! {
        #[test]
        fn a_blob_is_what_safetensors_writes(
            shapes in prop::collection::btree_map("[a-z.]{1,9}@[0-9,]{0,5}", prop::collection::vec(1usize..5, 0..4), 0..9),
        ) {
            let entry = |(key, shape): (String, Vec<usize>)| {
                let bytes = (0..F32 * shape.iter().product::<usize>()).map(|at| (at * 37) as u8);
                Entry { key, bytes: bytes.collect(), shape }
            };
            let entries: Vec<Entry> = shapes.into_iter().map(entry).collect();
            let bodies = entries.iter().flat_map(|entry| entry.bytes.to_vec());
            let found: Vec<u8> = head(&entries).unwrap().into_iter().chain(bodies).collect();
            let named = entries.iter().rev().map(|entry| (entry.key.as_str(), entry));
            prop_assert_eq!(found, safetensors::serialize(named, None).unwrap());
        }
    }
}
