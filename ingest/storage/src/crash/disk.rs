//! An in-memory file system that tracks which bytes and names were synced.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use store::disk::Act;

use super::Tree;

/// A file or folder, independent of its names.
type Node = usize;

/// The folder that is recorded.
const ROOT: Node = 0;

type Names = BTreeMap<(Node, OsString), Node>;

/// What survives of an act on bytes.
#[derive(Clone, Copy)]
pub(super) enum Surviving {
    All,
    Nothing,
    /// Its length, with zeros.
    Zeros,
    /// This many 1024ths from its start.
    Share(u64),
}

enum Change<'a> {
    Length(u64),
    Write(u64, &'a [u8]),
}

#[derive(Default)]
struct File<'a> {
    before: &'a [u8],
    changes: Vec<(usize, Change<'a>)>,
}

/// One act on names, which is atomic.
struct Renaming {
    number: usize,
    changes: Vec<(Node, OsString, Option<Node>)>,
}

pub(super) struct Disk<'a> {
    /// Files by node; a folder has none.
    files: Vec<Option<File<'a>>>,
    /// After which act a node was synced last.
    synced: BTreeMap<Node, usize>,
    before: Names,
    now: Names,
    renamings: Vec<Renaming>,
    acts: usize,
}

impl<'a> Disk<'a> {
    /// A file system that holds `before`, synced.
    pub(super) fn new(before: &'a Tree) -> Self {
        let mut disk = Disk {
            files: vec![None],
            synced: BTreeMap::new(),
            before: Names::new(),
            now: Names::new(),
            renamings: Vec::new(),
            acts: 0,
        };
        for (path, bytes) in before {
            let file = bytes.as_ref().map(|before| File { before, changes: Vec::new() });
            disk.files.push(file);
            let (folder, name) = disk.place(path);
            disk.now.insert((folder, name), disk.files.len() - 1);
        }
        disk.before = disk.now.clone();
        disk
    }

    /// The folder of a path, and its name there.
    fn place(&self, path: &Path) -> (Node, OsString) {
        let name = path.file_name().unwrap_or_default().to_owned();
        (path.parent().map_or(ROOT, |folder| self.node(folder)), name)
    }

    fn node(&self, path: &Path) -> Node {
        path.iter().fold(ROOT, |folder, name| {
            let node = self.now.get(&(folder, name.to_owned()));
            *node.unwrap_or_else(|| panic!("no act has made {}", path.display()))
        })
    }

    fn file(&mut self, path: &Path) -> &mut File<'a> {
        let node = self.node(path);
        let file = self.files[node].as_mut();
        file.unwrap_or_else(|| panic!("{} is a folder", path.display()))
    }

    /// Applies the next act, of paths below `root`.
    pub(super) fn act(&mut self, act: &'a Act, root: &Path) {
        self.acts += 1;
        let number = self.acts;
        let below = |path: &Path| path.strip_prefix(root).unwrap_or(path).to_owned();
        match act {
            Act::CreateFolder(path) => {
                self.files.push(None);
                let node = self.files.len() - 1;
                self.rename(vec![(below(path), Some(node))]);
            }
            Act::Create(path) => {
                let (folder, name) = self.place(&below(path));
                if self.now.contains_key(&(folder, name)) {
                    self.file(&below(path)).changes.push((number, Change::Length(0)));
                } else {
                    self.files.push(Some(File::default()));
                    let node = self.files.len() - 1;
                    self.rename(vec![(below(path), Some(node))]);
                }
            }
            Act::Write(path, at, bytes) => {
                self.file(&below(path)).changes.push((number, Change::Write(*at, bytes)));
            }
            Act::SetLength(path, length) => {
                self.file(&below(path)).changes.push((number, Change::Length(*length)));
            }
            Act::Sync(path) | Act::SyncFolder(path) => {
                self.synced.insert(self.node(&below(path)), number);
            }
            Act::Rename(from, to) => {
                let node = self.node(&below(from));
                self.rename(vec![(below(from), None), (below(to), Some(node))]);
            }
            Act::Link(from, to) => {
                let node = self.node(&below(from));
                self.rename(vec![(below(to), Some(node))]);
            }
            Act::Remove(path) | Act::RemoveFolder(path) => self.rename(vec![(below(path), None)]),
        }
    }

    fn rename(&mut self, changes: Vec<(PathBuf, Option<Node>)>) {
        let mut placed = Vec::new();
        for (path, node) in changes {
            let (folder, name) = self.place(&path);
            apply(&mut self.now, folder, &name, node);
            placed.push((folder, name, node));
        }
        self.renamings.push(Renaming { number: self.acts, changes: placed });
    }

    fn lasts(&self, node: Node, number: usize) -> bool {
        self.synced.get(&node).is_some_and(|synced| *synced > number)
    }

    /// The content after a power loss now: `name` and `bytes` decide what survives of an act that was not synced.
    pub(super) fn left(
        &self,
        name: impl Fn(usize) -> bool,
        bytes: impl Fn(usize) -> Surviving,
    ) -> Tree {
        let mut names = self.before.clone();
        for Renaming { number, changes } in &self.renamings {
            let lasts = changes.iter().any(|(folder, _, _)| self.lasts(*folder, *number));
            if lasts || name(*number) {
                for (folder, name, node) in changes {
                    apply(&mut names, *folder, name, *node);
                }
            }
        }
        let mut tree = Tree::new();
        self.walk(&names, ROOT, Path::new(""), &bytes, &mut tree);
        tree
    }

    fn walk(
        &self,
        names: &Names,
        folder: Node,
        path: &Path,
        bytes: &impl Fn(usize) -> Surviving,
        tree: &mut Tree,
    ) {
        let inside = names.range((folder, OsString::new())..(folder + 1, OsString::new()));
        for ((_, name), node) in inside {
            let path = path.join(name);
            let content = self.files[*node].as_ref().map(|file| self.content(*node, file, bytes));
            let is_folder = content.is_none();
            tree.insert(path.clone(), content);
            if is_folder {
                self.walk(names, *node, &path, bytes, tree);
            }
        }
    }

    fn content(&self, node: Node, file: &File<'_>, bytes: &impl Fn(usize) -> Surviving) -> Vec<u8> {
        let mut content = file.before.to_vec();
        for (number, change) in &file.changes {
            let left = if self.lasts(node, *number) { Surviving::All } else { bytes(*number) };
            match (change, left) {
                (_, Surviving::Nothing) => {}
                (Change::Length(length), _) => content.resize(*length as usize, 0),
                (Change::Write(at, new), left) => {
                    let kept = match left {
                        Surviving::Share(share) => new.len() * share as usize / 1024,
                        _ => new.len(),
                    };
                    let end = *at as usize + kept;
                    content.resize(content.len().max(end), 0);
                    match left {
                        Surviving::Zeros => content[*at as usize..end].fill(0),
                        _ => content[*at as usize..end].copy_from_slice(&new[..kept]),
                    }
                }
            }
        }
        content
    }
}

fn apply(names: &mut Names, folder: Node, name: &OsString, node: Option<Node>) {
    match node {
        Some(node) => names.insert((folder, name.clone()), node),
        None => names.remove(&(folder, name.clone())),
    };
}
