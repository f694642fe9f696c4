//! Whatever fails while a checkpoint is written costs at most that checkpoint, and damage is never read.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use contract::{Key, Purpose, draw};
use kernels::device::PendingCopies;
use proptest::prelude::*;
use tch::Tensor;
use tempfile::TempDir;

use super::medium::{Folder, Medium};
use super::region::Region;
use super::*;
use crate::ledger::Packed;
use crate::model::{Init, Role, WeightShards};
use crate::optim::MatrixOptimizer;
use crate::optim::guard::Windows;
use crate::state::ownership::{self, Ownership, ParamShard};
use crate::state::{OwnedState, State};
use crate::workers::Workers;

mod lasting;

const LANES: fn() -> Workers = || Workers::new(1);
const CHAIN: Digest = Digest(77);

/// A few parameters of every kind.
pub(crate) fn layout() -> StateLayout {
    layout_in(Dtype::F32)
}

/// The same, computing in `dtype`.
pub(crate) fn layout_in(dtype: Dtype) -> StateLayout {
    let parameter = |name: &str, shape: &[i64], role| ParamSpec {
        name: name.to_owned(),
        zyphra: name.to_owned(),
        shape: shape.to_vec(),
        role,
        init: Init::Constant(0.0),
        in_large_products: shape.len() > 1,
        sharding: None,
        adjoins: false,
    };
    let parameters = vec![
        parameter("embedding", &[37, 8], Role::Elementwise),
        parameter("matrix", &[5, 6], Role::Matrix),
        parameter("experts", &[3, 4, 5], Role::Experts),
        parameter("norm", &[7], Role::Vector),
        parameter("convolution", &[4, 3, 2], Role::Elementwise),
    ];
    let rule = |parameter| OptimizerRule::of(MatrixOptimizer::Muon, parameter);
    let rules = parameters.iter().map(rule).collect();
    let balance = vec![RouterBalance::new(4, true), RouterBalance::new(3, false)];
    StateLayout { parameters, rules, balance, device: Device::Cpu, dtypes: vec![(0, dtype)] }
}

/// A state as complete tensors.
pub(crate) struct Whole {
    pub(crate) weights: Vec<Tensor>,
    pub(crate) first: Vec<Tensor>,
    second: Vec<Option<Tensor>>,
    balance: Vec<RouterBalance>,
    windows: Option<Windows>,
}

impl Whole {
    /// The part of `rank` after `step`, where the state is cut into `pieces`.
    pub(crate) fn cut(&self, step: u64, pieces: &[ParamShard], rank: u32) -> State {
        let Whole { weights, first, second, balance, windows } = self;
        let owners = Ownership::cut(pieces.to_vec(), rank);
        let owned = owners.own().map(|piece| OwnedState {
            master: None,
            first: piece.of(&first[piece.tensor]).copy(),
            second: second[piece.tensor].as_ref().map(|second| piece.of(second).copy()),
        });
        let owned = owned.collect();
        let weights = weights.iter().map(Tensor::copy).collect();
        let (balance, windows) = (balance.clone(), windows.clone());
        let (fold, departures) = (WeightShards::default(), PendingCopies::default());
        State { step, weights, fold, balance, windows, owners, owned, departures }
    }
}

/// A state of this layout with one owner.
fn state(layout: &StateLayout, step: u64) -> State {
    let pieces = ownership::pieces(&layout.parameters, &layout.rules, 1);
    whole(layout, step).cut(step, &pieces, 0)
}

/// The digest of that state.
pub(crate) fn digest_of(layout: &StateLayout, step: u64) -> Digest {
    digest(&state(layout, step))
}

/// That state as complete tensors: any bits, including NaN.
pub(crate) fn whole(layout: &StateLayout, step: u64) -> Whole {
    let mut number = 0;
    let mut values = |count: i64| -> Vec<f32> {
        number += 1;
        let key = Key::from_seed(step).nth(number);
        let bits = |index| draw(key, Purpose::Generate, index) as u32;
        (0..count as u64).map(|index| f32::from_bits(bits(index))).collect()
    };
    let mut tensor = |parameter: &ParamSpec| {
        Tensor::from_slice(&values(parameter.shape.iter().product()))
            .view(parameter.shape.as_slice())
    };
    let weights = layout.parameters.iter().map(&mut tensor).collect();
    let first = layout.parameters.iter().map(&mut tensor).collect();
    let second = layout.parameters.iter().zip(&layout.rules);
    let second =
        second.map(|(parameter, rule)| rule.has_second_moment().then(|| tensor(parameter)));
    let second = second.collect();
    let mut balance = layout.balance.clone();
    for RouterBalance { bias, first, second } in &mut balance {
        [bias, first, second].into_iter().for_each(|part| *part = values(part.len() as i64));
    }
    let mut window =
        |length| Packed(values(length).iter().map(|value| value.to_bits().into()).collect());
    let (losses, norms) = (window(3), window(5));
    let windows = Some(Windows { skipped: 1, losses, norms });
    Whole { weights, first, second, balance, windows }
}

fn digest(state: &State) -> Digest {
    state.sums(LANES()).unwrap().digest
}

pub(super) fn save(checkpoints: &Checkpoints, layout: &StateLayout, step: u64) -> Result<()> {
    let state = state(layout, step);
    let snapshot = Snapshot::of(&state)?;
    let blobs = checkpoints.write(layout, &snapshot)?;
    checkpoints.commit(&snapshot, (digest(&state), CHAIN), layout, state.owners.pieces(), blobs)
}

/// Reads the newest state, which must be one that was saved; also returns the steps that were passed over.
pub(super) fn newest(
    checkpoints: &Checkpoints,
    layout: &StateLayout,
) -> (Option<u64>, Vec<(u64, Fault)>) {
    let read = |reader: &CheckpointReader<'_>| reader.whole(layout, LANES());
    let UsableCheckpoint { state: found, passed } =
        checkpoints.newest(9, |_| Some(CHAIN), read).unwrap();
    if let Some(found) = &found {
        assert_eq!(digest(found), digest(&state(layout, found.step)));
    }
    (found.map(|found| found.step), passed)
}

/// A folder that fails after some operations.
#[derive(Debug)]
struct Broken {
    inner: Folder,
    /// Operations that still succeed.
    left: AtomicUsize,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// The process is killed before the operation.
    Killed,
    /// The process is killed in the middle: half of a file has the final name, which no correct disk does.
    Torn,
    /// The same, but the half has the temporary name.
    Half,
    /// The disk is full.
    Full,
}

impl Broken {
    /// Whether the operation succeeds; if not, calls `half` to leave a partial file. The caller gives up then.
    fn works(&self, half: impl FnOnce()) -> Result<()> {
        let spend = |left: usize| left.checked_sub(1);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok() {
            return Ok(());
        }
        half();
        Err(Fault::machine("broken"))
    }
}

impl Medium for Broken {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<store::FileRecord> {
        let half = || {
            let name = match self.how {
                How::Torn => name.to_owned(),
                How::Half => format!("{name}{}", disk::PART),
                How::Killed | How::Full => return,
            };
            let path = self.inner.path(&name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let bytes = parts.concat();
            fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        };
        self.works(half).and_then(|()| self.inner.put(name, parts))
    }

    fn get(&self, name: &str) -> Result<Vec<u8>> {
        self.inner.get(name)
    }

    fn list(&self) -> Result<Vec<String>> {
        self.inner.list()
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.works(|| ()).and_then(|()| self.inner.remove(name))
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.works(|| ()).and_then(|()| self.inner.rename(from, to))
    }

    fn location(&self, name: &str) -> Location {
        self.inner.location(name)
    }
}

/// Every operation of a checkpoint and its retention fails once, in every way.
#[test]
fn a_kill_in_any_phase_leaves_the_state_before_or_the_new_one() {
    let (layout, retention) = (layout(), Retention { newest: 1, every: 0, aged: false, pinned: 8 });
    let whole = |how, left| {
        let folder = TempDir::new().unwrap();
        let good = Checkpoints::new(folder.path());
        save(&good, &layout, 3).unwrap();
        let inner = Folder(folder.path().to_owned());
        let broken = Broken { inner, left: AtomicUsize::new(left), how };
        let broken = Checkpoints { medium: Arc::new(broken) };
        let outcome = save(&broken, &layout, 6).and_then(|()| broken.retain(retention));
        good.clean().unwrap();
        let (found, passed) = newest(&good, &layout);
        assert!(found == Some(3) || found == Some(6), "{how:?} {left}: {found:?}");
        // Only an incorrect disk leaves an invalid checkpoint.
        assert!(passed.is_empty() || how == How::Torn, "{how:?} {left}: {passed:?}");
        passed.iter().for_each(|(step, _)| good.set_aside(*step).unwrap());
        let files = good.medium.list().unwrap();
        assert!(!files.iter().any(|file| file.ends_with(disk::PART)), "{files:?}");
        let whole = found == Some(6) && good.steps().unwrap() == [6];
        assert!(outcome.is_err() || whole, "{how:?} {left}: {found:?}");
        // Whatever was left, the next process computes the same step again and saves it.
        save(&good, &layout, 6).unwrap();
        good.retain(retention).unwrap();
        assert_eq!(newest(&good, &layout), (Some(6), Vec::new()), "{how:?} {left}");
        assert_eq!(good.steps().unwrap(), [6]);
        outcome.is_ok()
    };
    for how in [How::Killed, How::Torn, How::Half, How::Full] {
        let needed = (0..100).find(|left| whole(how, *left)).unwrap();
        assert!(needed > 10, "only {needed} operations were cut");
    }
}

#[test]
fn of_those_that_are_kept_for_a_jump_the_newest_stay() {
    let (layout, folder) = (layout(), TempDir::new().unwrap());
    let checkpoints = Checkpoints::new(folder.path());
    for step in 1..=6 {
        if step < 5 {
            checkpoints.pin(step).unwrap();
        }
        save(&checkpoints, &layout, step).unwrap();
    }
    let retention = Retention { newest: 1, every: 2, aged: false, pinned: 2 };
    checkpoints.retain(retention).unwrap();
    // The second is due as well: a multiple of `every`.
    assert_eq!(checkpoints.steps().unwrap(), [2, 3, 4, 6]);
    checkpoints.retain(Retention { every: 0, ..retention }).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [3, 4, 6]);
    assert_eq!(checkpoints.pinned().unwrap().into_iter().collect::<Vec<_>>(), [3, 4]);
}

#[test]
fn files_of_others_stay_in_any_folder() {
    let (layout, retention) = (layout(), Retention { newest: 1, every: 0, aged: false, pinned: 8 });
    let folder = TempDir::new().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let others = ["step-3/model.pt", "step-5/model.safetensors", "step-5/notes.tmp"];
    let others = others.map(|name| folder.path().join(name));
    for path in &others {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "years of training").unwrap();
    }
    save(&checkpoints, &layout, 3).unwrap();
    save(&checkpoints, &layout, 6).unwrap();
    checkpoints.clean().unwrap();
    checkpoints.retain(retention).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [6]);
    checkpoints.set_aside(6).unwrap();
    checkpoints.set_aside(5).unwrap();
    assert!(others.iter().all(|path| path.exists()));
}

/// Reading a pipe would block, and reading a device would never end. A folder is not the fault of any argument.
#[test]
fn what_is_no_file_is_passed_over() {
    let layout = layout();
    for name in [format::MANIFEST, format::BALANCE] {
        let folder = TempDir::new().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        save(&checkpoints, &layout, 3).unwrap();
        save(&checkpoints, &layout, 6).unwrap();
        let path = folder.path().join("step-6").join(name);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert_eq!(newest(&checkpoints, &layout).0, Some(3));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(newest(&checkpoints, &layout).0, Some(3));
    }
}

#[test]
fn setting_aside_can_be_killed_anywhere() {
    let layout = layout();
    for left in 0..100 {
        let folder = TempDir::new().unwrap();
        let good = Checkpoints::new(folder.path());
        save(&good, &layout, 3).unwrap();
        save(&good, &layout, 6).unwrap();
        let inner = Folder(folder.path().to_owned());
        let medium = Arc::new(Broken { inner, left: AtomicUsize::new(left), how: How::Killed });
        let ended = Checkpoints { medium }.set_aside(6);
        good.clean().unwrap();
        let (found, passed) = newest(&good, &layout);
        assert!(passed.is_empty() && found == Some(if left == 0 { 6 } else { 3 }), "{left}");
        if ended.is_ok() {
            assert!(
                left > 3
                    && good
                        .medium
                        .list()
                        .unwrap()
                        .iter()
                        .any(|file| file.starts_with("damaged-step-6/"))
            );
            return;
        }
    }
    panic!("it never ended");
}

#[test]
fn a_flipped_bit_a_cut_and_a_lost_file_are_found_in_every_file() {
    let layout = layout();
    let folder = TempDir::new().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    save(&checkpoints, &layout, 3).unwrap();
    save(&checkpoints, &layout, 6).unwrap();
    let files = checkpoints.medium.list().unwrap();
    let files: Vec<_> = files.iter().filter(|file| file.starts_with("step-6/")).collect();
    assert!(files.len() > 4, "{files:?}");
    for file in files {
        let path = folder.path().join(file);
        let good = fs::read(&path).unwrap();
        let mut bad: Vec<Option<Vec<u8>>> =
            vec![Some(Vec::new()), Some(good[..good.len() - 1].to_vec())];
        bad.extend((!file.ends_with(format::MANIFEST)).then_some(None));
        bad.push(Some([good.as_slice(), b"\n"].concat()));
        for place in [0, 8, good.len() / 2, good.len() - 1] {
            let mut flipped = good.clone();
            flipped[place] ^= 1;
            bad.push(Some(flipped));
        }
        for bytes in bad {
            match bytes {
                Some(bytes) => fs::write(&path, bytes).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            let (found, passed) = newest(&checkpoints, &layout);
            assert_eq!((found, passed.len(), passed[0].0), (Some(3), 1, 6), "{file}");
            assert!(passed[0].1.to_string().contains(file.as_str()), "{}", passed[0].1);
        }
        fs::write(&path, good).unwrap();
    }
    assert_eq!(newest(&checkpoints, &layout), (Some(6), Vec::new()));
}

#[test]
fn a_manifest_with_any_byte_changed_is_none() {
    let layout = layout();
    let folder = TempDir::new().unwrap();
    save(&Checkpoints::new(folder.path()), &layout, 3).unwrap();
    let good = fs::read(folder.path().join("step-3/manifest.json")).unwrap();
    assert!(CheckpointManifest::parse(&good).is_ok());
    for place in 0..good.len() {
        let mut bad = good.clone();
        bad[place] ^= 1 << (place % 7);
        assert!(CheckpointManifest::parse(&bad).is_err(), "byte {place}");
    }
}

/// A manifest with a valid checksum that names a file outside its folder.
#[test]
fn a_manifest_that_leads_elsewhere_is_none() {
    let layout = layout();
    let folder = TempDir::new().unwrap();
    save(&Checkpoints::new(folder.path()), &layout, 3).unwrap();
    let good = fs::read(folder.path().join("step-3/manifest.json")).unwrap();
    for name in ["../step-2/weights-00000.safetensors", "/etc/passwd", "manifest.json", ""] {
        let mut bad = CheckpointManifest::parse(&good).unwrap();
        bad.blobs[0].name = name.to_owned();
        bad.sum = Digest::default();
        bad.sum = Digest::of_bytes(bad.text().unwrap().as_bytes());
        let said = CheckpointManifest::parse(bad.text().unwrap().as_bytes()).unwrap_err();
        assert!(said.contains("no file of a checkpoint"), "{name}: {said}");
    }
}

/// Opening a checkpoint reads only its manifest; reading a tensor reads only the files that hold it.
#[test]
fn nothing_is_read_but_what_is_wanted() {
    let layout = layout();
    let folder = TempDir::new().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    save(&checkpoints, &layout, 3).unwrap();
    let reader = checkpoints.open(3).unwrap();
    let CheckpointManifest { blobs, tensors, .. } = reader.manifest();
    let of_matrix =
        |tensor: &&TensorRecord| (tensor.set, &*tensor.name) == (TensorSet::Weights, "matrix");
    let boxes = &tensors.iter().find(of_matrix).unwrap().boxes;
    let needed: Vec<&str> = boxes.iter().map(|one| blobs[one.blob].name.as_str()).collect();
    for blob in blobs.iter().filter(|blob| !needed.contains(&blob.name.as_str())) {
        fs::remove_file(folder.path().join("step-3").join(&blob.name)).unwrap();
    }
    let want = |set| {
        let (name, region) = ("matrix".to_owned(), Region::whole(&[5, 6]));
        ReadRequest { set, name, region, into: Tensor::zeros([5, 6], tch::kind::FLOAT_CPU) }
    };
    let wanted = want(TensorSet::Weights);
    let into = wanted.into.shallow_clone();
    reader.fill(vec![wanted], LANES()).unwrap();
    let whole = state(&layout, 3).weights[1].shallow_clone();
    assert_eq!(into, whole);
    assert!(reader.fill(vec![want(TensorSet::First)], LANES()).is_err(), "its file is gone");
}

#[test]
fn writers_that_leave_something_out_commit_nothing() {
    let layout = layout();
    let folder = TempDir::new().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let state = state(&layout, 3);
    let (snapshot, pieces) = (Snapshot::of(&state).unwrap(), state.owners.pieces());
    let blobs = checkpoints.write(&layout, &snapshot).unwrap();
    for missing in 0..blobs.len() {
        let mut some = blobs.clone();
        some.remove(missing);
        let fault = checkpoints
            .commit(&snapshot, (digest(&state), CHAIN), &layout, pieces, some)
            .unwrap_err();
        assert!(fault.to_string().contains(&blobs[missing].name), "{fault}");
    }
    assert!(checkpoints.steps().unwrap().is_empty());
}

/// Runs of elements that a layout asks for, cut anywhere.
fn runs(length: i64, cuts: &[prop::sample::Index]) -> Vec<(i64, i64)> {
    let mut bounds: Vec<i64> = cuts.iter().map(|cut| cut.index(length as usize) as i64).collect();
    bounds.extend([0, length]);
    bounds.sort_unstable();
    bounds.dedup();
    bounds.windows(2).map(|pair| (pair[0], pair[1] - pair[0])).collect()
}

/// The pieces of a layout that cuts every tensor anywhere, in buckets that end anywhere, each with some owner.
pub(crate) fn pieces_of(
    layout: &StateLayout,
    cuts: &[prop::sample::Index],
    ends: &[bool],
    owners: &[u32],
) -> Vec<ParamShard> {
    let (mut pieces, mut bundle) = (Vec::new(), 0);
    for (tensor, (parameter, rule)) in layout.parameters.iter().zip(&layout.rules).enumerate() {
        let length = parameter.shape.iter().product();
        for (first, length) in runs(length, &cuts[tensor % cuts.len()..]) {
            bundle += usize::from(!pieces.is_empty() && ends[pieces.len() % ends.len()]);
            let owner = owners[bundle % owners.len()];
            let (shape, rule) = (vec![length], *rule);
            pieces.push(ParamShard { tensor, first, shape, rule, bundle, owner });
        }
    }
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any cut by any number of writers makes a checkpoint from which any box can be read.
    #[test]
    fn any_box_is_read_out_of_any_boxes(
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 1..9),
        ends in prop::collection::vec(any::<bool>(), 1..9),
        owners in prop::collection::vec(0u32..7, 1..9),
        wanted: (prop::sample::Index, prop::sample::Index),
    ) {
        let (layout, folder) = (layout(), TempDir::new().unwrap());
        let state = whole(&layout, 3);
        let wanted_digest = digest_of(&layout, 3);
        let checkpoints = Checkpoints::new(folder.path());
        let pieces = pieces_of(&layout, &cuts, &ends, &owners);
        let (mut blobs, mut snapshots) = (Vec::new(), Vec::new());
        for rank in 0..7 {
            let snapshot = Snapshot::of(&state.cut(3, &pieces, rank)).unwrap();
            blobs.extend(checkpoints.write(&layout, &snapshot).unwrap());
            snapshots.push(snapshot);
        }
        checkpoints.commit(&snapshots[6], (wanted_digest, CHAIN), &layout, &pieces, blobs).unwrap();
        let reader = checkpoints.open(3).unwrap();
        prop_assert_eq!(digest(&reader.whole(&layout, LANES()).unwrap()), wanted_digest);
        let mut asked: BTreeMap<usize, (Tensor, Tensor)> = BTreeMap::new();
        let mut wants = Vec::new();
        for (index, parameter) in layout.parameters.iter().enumerate() {
            let corner = |at: prop::sample::Index, length: i64| at.index(length as usize) as i64;
            let offsets: Vec<i64> =
                parameter.shape.iter().map(|length| corner(wanted.0, *length)).collect();
            let rest = parameter.shape.iter().zip(&offsets);
            let lengths = rest.map(|(length, offset)| 1 + corner(wanted.1, length - offset)).collect();
            let region = region::Region { offsets, lengths };
            let there = region::Region::whole(&parameter.shape).part(&region, &state.first[index]);
            let into = there.zeros_like();
            asked.insert(index, (there, into.shallow_clone()));
            wants.push(ReadRequest { set: TensorSet::First, name: parameter.name.clone(), region, into });
        }
        reader.fill(wants, LANES()).unwrap();
        for (there, into) in asked.values() {
            let sum = |tensor: &Tensor| kernels::checksum::tensor(tensor, 1).unwrap();
            prop_assert_eq!(sum(there), sum(into));
        }
    }
}

proptest! {
    /// Checkpoints of any steps are thinned out by age: no gap is longer than the age of its end, and few are kept.
    #[test]
    fn old_checkpoints_are_thinned_out_by_age(
        gaps in prop::collection::vec(1u64..60, 1..400), newest in 1usize..5,
    ) {
        let retention = Retention { newest, ..Retention::default() };
        let (mut made, mut kept, mut last) = (vec![0], Vec::new(), 0);
        for gap in gaps {
            last += gap;
            made.push(last);
            kept.push(last);
            let gone = retention.gone(&kept);
            kept.retain(|step| !gone.contains(step));
            prop_assert!(made.iter().rev().take(newest.min(made.len() - 1)).all(|it| kept.contains(it)));
            let olders = std::iter::once(&0).chain(&kept);
            for (older, newer) in olders.zip(&kept) {
                let beside = made.windows(2).any(|two| two == [*older, *newer]);
                prop_assert!(beside || newer - older <= last - newer, "{kept:?} after {last}");
            }
            let doublings = (last as f64).log2();
            prop_assert!(kept.len() as f64 <= newest as f64 + 2.0 * doublings + 2.0, "{kept:?}");
        }
    }
}
