//! The contents of a checkpoint, independent of the layout that wrote it. `trainer/docs/formats.md` describes the
//! folder.

use std::collections::BTreeMap;

use contract::{Digest, Fault, Result};
use serde::{Deserialize, Serialize};

use super::StateLayout;
use super::region::{self, Region};
use crate::model::balance_name;
use crate::optim::balance::RouterBalance;
use crate::optim::guard::Windows;
use crate::state::ownership::ParamShard;

/// The version of the format.
pub(super) const FORMAT: u32 = 2;

/// The version of the manifest in `bytes`, if it is not this program's.
pub(super) fn other_format(bytes: &[u8]) -> Option<u32> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let found = serde_json::from_slice::<Format>(bytes).ok()?.format;
    (found != FORMAT).then_some(found)
}

/// The name of the manifest, which turns the files next to it into a checkpoint.
pub(super) const MANIFEST: &str = "manifest.json";

/// The marker file that protects a checkpoint from removal.
pub(super) const PINNED: &str = "pinned";

/// The blob of the router balancing state: small, and known to every rank.
pub(super) const BALANCE: &str = "balance.safetensors";

/// Whether a checkpoint has files of this name. Other files in its folder are not ours and are never removed.
pub(super) fn is_file(name: &str) -> bool {
    let blob = |set: &str| {
        let number = name.strip_prefix(set).and_then(|rest| rest.strip_suffix(".safetensors"));
        number.is_some_and(|it| it.len() >= 5 && it.bytes().all(|digit| digit.is_ascii_digit()))
    };
    [MANIFEST, BALANCE, PINNED].contains(&name) || blob("weights-") || blob("moments-")
}

/// Which part of the state a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorSet {
    /// Weights, and balancing biases.
    Weights,
    /// First moments (AdamW), momenta (Muon).
    First,
    /// Second moments of AdamW.
    Second,
}

impl TensorSet {
    pub(super) const ALL: [TensorSet; 3] =
        [TensorSet::Weights, TensorSet::First, TensorSet::Second];

    fn name(self) -> &'static str {
        match self {
            TensorSet::Weights => "weights",
            TensorSet::First => "first",
            TensorSet::Second => "second",
        }
    }

    /// The blob that holds this set of a piece.
    pub(super) fn blob(self, bundle: usize) -> String {
        match self {
            TensorSet::Weights => format!("weights-{bundle:05}.safetensors"),
            TensorSet::First | TensorSet::Second => format!("moments-{bundle:05}.safetensors"),
        }
    }
}

/// `manifest.json`. It contains no time, device, path or number of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointManifest {
    /// Version of the format.
    pub format: u32,
    /// The step after which this is the state.
    pub step: u64,
    /// The state digest, as in the ledger.
    pub state: Digest,
    /// The ledger's chain after this step: identifies the run.
    pub chain: Digest,
    /// Recent losses and norms that decide on skipping and clipping, and the number of skipped steps; if the run uses
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Windows>,
    /// The files; boxes refer to them by index.
    pub blobs: Vec<BlobRecord>,
    /// The tensors, set by set in canonical order.
    pub tensors: Vec<TensorRecord>,
    /// xxh3-128 of this file with zeros here.
    pub sum: Digest,
}

/// One blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlobRecord {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// xxh3-128 of its bytes.
    pub digest: Digest,
}

/// One tensor and the boxes that hold its elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// Its part of the state.
    pub set: TensorSet,
    /// The parameter's name, as in Hugging Face transformers.
    pub name: String,
    /// "F32".
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its boxes, which hold each element exactly once.
    pub boxes: Vec<BoxRecord>,
}

/// One box of a tensor: an entry of a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoxRecord {
    /// Its offset in the tensor, by dimension.
    pub offsets: Vec<i64>,
    /// Its shape.
    pub lengths: Vec<i64>,
    /// The index of its blob.
    pub blob: usize,
}

impl BoxRecord {
    pub(super) fn region(&self) -> Region {
        Region { offsets: self.offsets.clone(), lengths: self.lengths.clone() }
    }
}

/// The balances of layers that have a router, with the layers' numbers.
pub(super) fn balances(all: &[RouterBalance]) -> impl Iterator<Item = (i64, &RouterBalance)> {
    (0..).zip(all).filter(|(_, balance)| !balance.is_empty())
}

/// The values of a layer's balance that belong to a set.
pub(super) fn values(balance: &RouterBalance, set: TensorSet) -> &[f32] {
    match set {
        TensorSet::Weights => &balance.bias,
        TensorSet::First => &balance.first,
        TensorSet::Second => &balance.second,
    }
}

/// The name of a box in its blob: `first/model.norm.weight@0`.
pub(super) fn key(set: TensorSet, tensor: &str, offsets: &[i64]) -> String {
    let offsets: Vec<String> = offsets.iter().map(i64::to_string).collect();
    format!("{}/{tensor}@{}", set.name(), offsets.join(","))
}

/// Every tensor of a state of this layout, in the order of the manifest: set, name, shape, and the number of the
/// parameter (`None` for balances).
pub(super) fn tensors(layout: &StateLayout) -> Vec<(TensorSet, String, Vec<i64>, Option<usize>)> {
    let mut found = Vec::new();
    for set in TensorSet::ALL {
        let parameters = layout.parameters.iter().zip(&layout.rules).enumerate();
        for (index, (parameter, rule)) in parameters {
            if set != TensorSet::Second || rule.has_second_moment() {
                found.push((set, parameter.name.clone(), parameter.shape.clone(), Some(index)));
            }
        }
        for (layer, balance) in balances(&layout.balance) {
            let length = values(balance, set).len() as i64;
            found.push((set, balance_name(layer), vec![length], None));
        }
    }
    found
}

/// Size in bytes of the manifest after `step` for a state of this layout, cut into `pieces`, without windows.
pub fn manifest_bytes(layout: &StateLayout, pieces: &[ParamShard], step: u64) -> Result<u64> {
    let mut sizes: BTreeMap<String, u64> = BTreeMap::new();
    for piece in pieces {
        for set in TensorSet::ALL {
            if set != TensorSet::Second || piece.rule.has_second_moment() {
                *sizes.entry(set.blob(piece.bundle)).or_default() += 4 * piece.length() as u64;
            }
        }
    }
    if balances(&layout.balance).next().is_some() {
        sizes.insert(BALANCE.to_owned(), 0);
    }
    let record = |(name, bytes): (String, u64)| {
        (name.clone(), BlobRecord { name, bytes, digest: Digest::default() })
    };
    let blobs = sizes.into_iter().map(record).collect();
    let (state, chain) = (Digest::default(), Digest::default());
    let manifest = CheckpointManifest::new(step, None, state, chain, layout, pieces, blobs)?;
    Ok(manifest.text()?.len() as u64)
}

impl CheckpointManifest {
    /// The manifest after a step, with the windows of that step. The state has the digest `state` and is cut into
    /// `pieces`, which are stored in `blobs`.
    pub(super) fn new(
        step: u64,
        windows: Option<Windows>,
        state: Digest,
        chain: Digest,
        layout: &StateLayout,
        pieces: &[ParamShard],
        blobs: BTreeMap<String, BlobRecord>,
    ) -> Result<Self> {
        let numbers: BTreeMap<String, usize> = blobs.keys().cloned().zip(0..).collect();
        let number = |name: &str| {
            numbers.get(name).copied().ok_or_else(|| {
                Fault::bug(format!("the writers of a checkpoint left out its blob {name}"))
            })
        };
        let balance = balances(&layout.balance).next().map_or(Ok(0), |_| number(BALANCE))?;
        let mut of_tensor = vec![Vec::new(); layout.parameters.len()];
        pieces.iter().for_each(|piece| of_tensor[piece.tensor].push(piece));
        let mut records = Vec::new();
        for (set, name, shape, index) in tensors(layout) {
            let mut boxes = Vec::new();
            for piece in index.map_or(&[][..], |index| of_tensor[index].as_slice()) {
                let blob = number(&set.blob(piece.bundle))?;
                for Region { offsets, lengths } in Region::run(&shape, piece.first, piece.length())
                {
                    boxes.push(BoxRecord { offsets, lengths, blob });
                }
            }
            if index.is_none() {
                boxes.push(BoxRecord { offsets: vec![0], lengths: shape.clone(), blob: balance });
            }
            records.push(TensorRecord { set, name, dtype: "F32".to_owned(), shape, boxes });
        }
        let blobs = blobs.into_values().collect();
        let (format, tensors, sum) = (FORMAT, records, Digest::default());
        let mut manifest =
            CheckpointManifest { format, step, state, chain, windows, blobs, tensors, sum };
        manifest.sum = Digest::of_bytes(manifest.text()?.as_bytes());
        Ok(manifest)
    }

    /// The text of the file: one line for each blob and each tensor.
    pub(super) fn text(&self) -> Result<String> {
        let CheckpointManifest { format, step, state, chain, windows, blobs, tensors, sum } = self;
        let lines = |values: Vec<serde_json::Result<String>>| -> Result<String> {
            let lines = values.into_iter().collect::<serde_json::Result<Vec<_>>>();
            let unwritten = |error| Fault::bug(format!("a manifest cannot be written: {error}"));
            lines.map(|lines| lines.join(",\n")).map_err(unwritten)
        };
        let blobs = lines(blobs.iter().map(serde_json::to_string).collect())?;
        let tensors = lines(tensors.iter().map(serde_json::to_string).collect())?;
        let windows = lines(windows.iter().map(serde_json::to_string).collect())?;
        let windows = match windows.as_str() {
            "" => String::new(),
            windows => format!("\"windows\":{windows},"),
        };
        Ok(format!(
            "{{\"format\":{format},\"step\":{step},\"state\":\"{state}\",\"chain\":\"{chain}\",{windows}\"blobs\":[\n\
             {blobs}\n],\"tensors\":[\n{tensors}\n],\"sum\":\"{sum}\"}}\n"
        ))
    }

    /// Parses a manifest. A file that [`CheckpointManifest::text`] would not write byte for byte is refused.
    pub(super) fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let manifest: CheckpointManifest =
            serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if manifest.format != FORMAT {
            return Err(format!("its format is {}", manifest.format));
        }
        let unsummed = CheckpointManifest { sum: Digest::default(), ..manifest.clone() };
        let (text, unsummed) = (manifest.text(), unsummed.text());
        let (Ok(text), Ok(unsummed)) = (text, unsummed) else { return Err("it is odd".to_owned()) };
        if text.as_bytes() != bytes || Digest::of_bytes(unsummed.as_bytes()) != manifest.sum {
            return Err("its bytes changed since it was written".to_owned());
        }
        let blob = |name: &str| is_file(name) && ![MANIFEST, PINNED].contains(&name);
        if let Some(blob) = manifest.blobs.iter().find(|one| !blob(&one.name)) {
            return Err(format!("it names {:?}, which is no file of a checkpoint", blob.name));
        }
        let tiled = |tensor: &&TensorRecord| {
            let boxes: Vec<Region> = tensor.boxes.iter().map(BoxRecord::region).collect();
            let known = tensor.boxes.iter().all(|one| one.blob < manifest.blobs.len());
            !(known && region::tile(&tensor.shape, &boxes))
        };
        match manifest.tensors.iter().find(tiled) {
            Some(tensor) => Err(format!("its boxes do not make up {}", tensor.name)),
            None => Ok(manifest),
        }
    }
}
