//! States that a power loss may leave of a folder: for tests of code that writes through [`store::disk`]; feature
//! `crash`.
//!
//! A recording holds the content of the folder and every act since. A crash after the first n acts leaves
//!
//! - of a file: the synced bytes; of every later write or change of length, independently, all, nothing, a beginning,
//!   or zeros of the right length;
//! - of a folder: the names at its last sync; every name created, moved or removed later, or not, independently of each
//!   other and of the bytes. Syncing a file does not make its name durable.
//!
//! Every file system in use guarantees at least that, so what survives here survives there.

mod disk;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use contract::{Digest, Hasher, Key, Purpose, draw};
use store::disk::{Act, watch};

use self::disk::Disk;

/// The content below a folder; folders have no bytes.
pub type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// A folder as it was, and every act on it since.
pub struct Recording {
    folder: PathBuf,
    before: Tree,
    acts: Vec<Act>,
}

/// What happens to the acts that were not synced.
#[derive(Clone, Copy, Debug)]
enum UnsyncedLoss {
    /// All are lost.
    All,
    /// None is lost: a kill, not a crash.
    Nothing,
    /// Names survive, bytes do not.
    Bytes,
    /// Names survive, and lengths with zeros.
    Zeros,
    /// Bytes survive, names do not.
    Names,
    /// Each act is lost or not, sampled independently.
    Drawn(u64),
}

/// The state after a crash.
pub struct CrashState {
    /// After which act the crash came, and what was lost.
    pub told: String,
    /// The number of acts after it.
    pub later: usize,
    /// The content of the folder.
    pub tree: Tree,
}

impl Recording {
    /// Records what `run` does in `folder`. Panics if a file or folder appeared there without a recorded act: this
    /// finds code that writes without `store::disk`.
    pub fn of<T>(folder: &Path, run: impl FnOnce() -> T) -> (Self, T) {
        let before = tree(folder);
        let watch = watch(folder, u64::MAX);
        let result = run();
        let recording = Recording { folder: folder.to_owned(), before, acts: watch.acts() };
        let told = recording.after(recording.acts.len(), UnsyncedLoss::Nothing);
        let there = tree(folder);
        let differ = |path: &&PathBuf| told.get(*path) != there.get(*path);
        // After a power loss no process holds a folder.
        let holds = |path: &&PathBuf| {
            path.ends_with("lock")
                || path.extension().is_some_and(|end| end == "writer" || end == "lock")
        };
        let all = told.keys().chain(there.keys());
        let past: Vec<_> = all.filter(|path| differ(path) && !holds(path)).collect();
        assert!(past.is_empty(), "written past the door: {past:?}");
        (recording, result)
    }

    /// How many acts there were.
    pub fn acts(&self) -> usize {
        self.acts.len()
    }

    /// How many bytes were written.
    pub fn bytes(&self) -> u64 {
        let written = |act: &Act| if let Act::Write(_, _, bytes) = act { bytes.len() } else { 0 };
        self.acts.iter().map(|act| written(act) as u64).sum()
    }

    /// About `most` different states that a crash may leave: after every rename and every sync, just before each of
    /// them, some sampled states, and all at the end.
    pub fn states(&self, most: usize) -> Vec<CrashState> {
        let mut found: BTreeMap<Digest, CrashState> = BTreeMap::new();
        let names = |act: &Act| !matches!(act, Act::Write(..) | Act::Create(_));
        let near = |at: usize| self.acts[at.saturating_sub(1)..].iter().take(2).any(names);
        for at in (0..=self.acts.len()).filter(|at| near(*at)) {
            let drawn = (0..3).map(|turn| UnsyncedLoss::Drawn(3 * at as u64 + turn));
            let plain = [
                UnsyncedLoss::All,
                UnsyncedLoss::Nothing,
                UnsyncedLoss::Bytes,
                UnsyncedLoss::Zeros,
                UnsyncedLoss::Names,
            ];
            for loss in plain.into_iter().chain(drawn) {
                let tree = self.after(at, loss);
                let last = at.checked_sub(1).map(|last| shown(&self.acts[last]));
                let told = format!("after act {at} ({}): {loss:?}", last.unwrap_or_default());
                let later = self.acts.len() - at;
                found.insert(digest(&tree), CrashState { told, later, tree });
            }
        }
        // Sorted by content, so an even step is as good as a random sample.
        let step = found.len().div_ceil(most.max(1)).max(1);
        let drawn = |(at, state): &(usize, CrashState)| at % step == 0 || state.later < 8;
        found.into_values().enumerate().filter(drawn).map(|(_, state)| state).collect()
    }

    /// Writes each of about `most` states into the folder, in turn, and checks it. Nothing is really synced meanwhile.
    pub fn each(&self, most: usize, mut check: impl FnMut(&CrashState)) {
        for state in self.states(most) {
            let _naming = StateOnPanic(&state.told);
            state.put(&self.folder);
            let _watch = watch(&self.folder, u64::MAX);
            check(&state);
        }
    }

    /// The folder after the first `acts` acts.
    fn after(&self, acts: usize, loss: UnsyncedLoss) -> Tree {
        let mut disk = Disk::new(&self.before);
        self.acts[..acts].iter().for_each(|act| disk.act(act, &self.folder));
        let key = |turn| Key::from_seed(turn);
        let coin = |number: usize, sides: u64| match loss {
            UnsyncedLoss::Drawn(turn) => draw(key(turn), Purpose::Generate, number as u64) % sides,
            _ => 0,
        };
        let name = |number: usize| match loss {
            UnsyncedLoss::All | UnsyncedLoss::Names => false,
            UnsyncedLoss::Nothing | UnsyncedLoss::Bytes | UnsyncedLoss::Zeros => true,
            UnsyncedLoss::Drawn(_) => coin(number, 2) == 0,
        };
        let bytes = |number: usize| match loss {
            UnsyncedLoss::All | UnsyncedLoss::Bytes => disk::Surviving::Nothing,
            UnsyncedLoss::Nothing | UnsyncedLoss::Names => disk::Surviving::All,
            UnsyncedLoss::Zeros => disk::Surviving::Zeros,
            UnsyncedLoss::Drawn(_) => match coin(number, 4) {
                0 => disk::Surviving::All,
                1 => disk::Surviving::Nothing,
                2 => disk::Surviving::Zeros,
                _ => disk::Surviving::Share(coin(number, 1 << 10)),
            },
        };
        disk.left(name, bytes)
    }
}

impl CrashState {
    /// Makes the content of `folder` this state.
    pub fn put(&self, folder: &Path) {
        let put = || -> io::Result<()> {
            fs::remove_dir_all(folder)?;
            fs::create_dir(folder)?;
            for (name, bytes) in &self.tree {
                match bytes {
                    None => fs::create_dir(folder.join(name))?,
                    Some(bytes) => fs::write(folder.join(name), bytes)?,
                }
            }
            Ok(())
        };
        put().unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    }
}

/// Prints the current state if its check panics.
struct StateOnPanic<'a>(&'a str);

impl Drop for StateOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the state {}", self.0);
        }
    }
}

/// The content below `folder`.
pub fn tree(folder: &Path) -> Tree {
    fn walk(folder: &Path, root: &Path, found: &mut Tree) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let is_folder = path.is_dir();
            let bytes = if is_folder { None } else { Some(fs::read(&path)?) };
            found.insert(path.strip_prefix(root).unwrap_or(&path).to_owned(), bytes);
            if is_folder {
                walk(&path, root, found)?;
            }
        }
        Ok(())
    }
    let mut found = Tree::new();
    walk(folder, folder, &mut found)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    found
}

fn digest(tree: &Tree) -> Digest {
    let mut hasher = Hasher::new();
    for (path, bytes) in tree {
        hasher.bytes(path.as_os_str().as_encoded_bytes());
        match bytes {
            None => hasher.tag("folder"),
            Some(bytes) => hasher.tag("file").bytes(bytes),
        };
    }
    hasher.finish()
}

fn shown(act: &Act) -> String {
    match act {
        Act::Write(path, at, bytes) => {
            format!("{} bytes at {at} of {}", bytes.len(), path.display())
        }
        act => format!("{act:?}"),
    }
}
