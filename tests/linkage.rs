//! Fear: that preparing data needs libtorch, or a program without object storage its packages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use crate::tidy::root;

/// The packages that a cargo command lists.
fn tree(arguments: &str) -> String {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--edges", "normal,build"])
        .args(arguments.split(' '))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The packages of a build with these features, one a line.
fn packages(features: &str) -> String {
    tree(&format!("--package zstack --prefix none --no-default-features --features {features}"))
}

fn has(tree: &str, package: &str) -> bool {
    tree.lines().any(|line| line.starts_with(&format!("{package} v")))
}

/// What reads buckets and web servers is a fifth of all packages: only the feature `clouds` brings it.
#[test]
fn a_build_without_object_storage_has_no_network() {
    let (with, without) = (packages("clouds,train"), packages("train"));
    for package in ["object_store", "reqwest", "hyper", "rustls", "tokio", "url"] {
        assert!(has(&with, package) && !has(&without, package), "{package} in:\n{without}");
    }
}

/// `zdata` is for machines without libtorch: its sources name no crate that needs it, and a build without the feature
/// `train` depends on none.
#[test]
fn zdata_builds_without_libtorch() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tree = packages("clouds");
    let foreign = ["trainer", "tools", "kernels", "tch", "torch-sys"];
    for package in foreign {
        assert!(!has(&tree, package), "{package} in:\n{tree}");
    }
    let mut folders = vec![root.join("ingest/zdata")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = std::fs::read_to_string(&path).unwrap();
            let is_of_a_name = |letter: char| letter.is_alphanumeric() || letter == '_';
            for package in foreign.map(|package| package.replace('-', "_") + "::") {
                let mut named = source.match_indices(&package);
                let is_named = named.any(|(at, _)| !source[..at].ends_with(is_of_a_name));
                assert!(!is_named, "{} names {package}", path.display());
            }
        }
    }
}

#[test]
fn zdata_links_no_libtorch() {
    let libraries = needed(env!("CARGO_BIN_EXE_zdata"));
    assert!(libraries.contains("libc.so"), "{libraries}");
    for foreign in ["torch", "c10", "gomp", "cuda", "hip", "libstdc++"] {
        assert!(!libraries.contains(foreign), "zdata needs {foreign}:\n{libraries}");
    }
}

#[cfg(feature = "train")]
#[test]
fn ztrain_links_the_cpu_half_only() {
    let libraries = needed(env!("CARGO_BIN_EXE_ztrain"));
    assert!(libraries.contains("libtorch_cpu.so"), "{libraries}");
    for foreign in ["torch_cuda", "torch_hip", "amdhip", "nccl", "rccl"] {
        assert!(!libraries.contains(foreign), "ztrain needs {foreign}:\n{libraries}");
    }
}

/// A run path reaches only the crate whose build script asks for it: without one the tests of a crate do not start.
#[cfg(feature = "train")]
#[test]
fn every_crate_that_needs_libtorch_finds_it() {
    let users = tree("--workspace --invert torch-sys --prefix none");
    let folders = users.lines().filter_map(|line| line.split_once(" (/")?.1.split_once(')'));
    let folders: BTreeSet<_> = folders.map(|(folder, _)| Path::new("/").join(folder)).collect();
    assert!(folders.contains(Path::new(env!("CARGO_MANIFEST_DIR"))), "{users}");
    let script = |folder: &Path| {
        let nested = folder.join("trainer/ztrain/build.rs");
        std::fs::read_to_string(if nested.exists() { nested } else { folder.join("build.rs") })
    };
    for folder in folders {
        let script = script(&folder).unwrap_or_default();
        assert!(script.contains("-Wl,-rpath,"), "{} sets no run path", folder.display());
    }
}

fn needed(program: &str) -> String {
    let output = Command::new("readelf")
        .args(["-d", program])
        .output()
        .expect("readelf comes with any C++ compiler");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter(|line| line.contains("(NEEDED)")).collect::<Vec<_>>().join("\n")
}

/// The packages of the workspace on Linux.
#[derive(Default)]
struct Graph {
    /// What each package uses, by names with versions.
    uses: BTreeMap<String, BTreeSet<String>>,
    members: Vec<String>,
}

impl Graph {
    /// cargo lists what a package uses below it, at its first mention.
    fn read() -> Graph {
        let (mut graph, mut above) = (Graph::default(), Vec::<String>::new());
        let text = tree("--workspace --prefix depth --target x86_64-unknown-linux-gnu");
        for line in text.lines().filter(|line| !line.is_empty()) {
            let (depth, rest) = line.split_at(line.find(|c: char| !c.is_ascii_digit()).unwrap());
            let package = rest.split(' ').take(2).collect::<Vec<_>>().join(" ");
            above.truncate(depth.parse().unwrap());
            match above.last().and_then(|user| graph.uses.get_mut(user)) {
                Some(used) => {
                    used.insert(package.clone());
                }
                None => graph.members.push(package.clone()),
            }
            graph.uses.entry(package.clone()).or_default();
            above.push(package);
        }
        graph
    }

    /// All packages that `roots` need, themselves included; those that begin with `without`, and what only these need,
    /// left out.
    fn needed(&self, roots: &[String], without: &str) -> usize {
        let (mut found, mut open): (BTreeSet<&String>, Vec<_>) =
            (BTreeSet::new(), roots.iter().collect());
        while let Some(package) = open.pop() {
            if !package.starts_with(without) && found.insert(package) {
                open.extend(&self.uses[package]);
            }
        }
        found.len()
    }

    /// Rows of a table for the direct dependencies, the heaviest first: how many packages each brings, how many of
    /// these nothing else needs, and its reason in `Cargo.toml`.
    fn table(&self) -> Vec<String> {
        let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
        let (nothing, all) = ("-", self.needed(&self.members, "-"));
        let row = |line: &str| {
            let ((name, _), (_, reason)) = (line.split_once(" = ")?, line.rsplit_once(" # ")?);
            let start = format!("{name} v");
            // The version that a member names: others may need an older one.
            let mut used = self.members.iter().flat_map(|member| &self.uses[member]);
            let package = used.find(|package| package.starts_with(&start))?;
            let brings = self.needed(std::slice::from_ref(package), nothing);
            let alone = all - self.needed(&self.members, package);
            assert!(brings >= alone, "{package}");
            Some((alone, brings, format!("| `{name}` | {brings} | {alone} | {reason} |\n")))
        };
        let mut rows: Vec<_> = manifest.lines().filter_map(row).collect();
        rows.sort_by(|a, b| (b.0, b.1, &a.2).cmp(&(a.0, a.1, &b.2)));
        rows.into_iter().map(|(.., row)| row).collect()
    }
}

/// The page of dependencies is computed from `Cargo.toml` and `Cargo.lock`.
#[test]
fn the_weight_of_each_dependency_is_known() {
    let count = |features: &str| {
        let text = packages(features);
        text.lines().map(|line| line.trim_end_matches(" (*)")).collect::<BTreeSet<_>>().len()
    };
    let rows = Graph::read().table();
    assert!(rows.len() > 40, "found only {} dependencies", rows.len());
    let page = format!(
        "# Dependencies\n\n<!-- generated by `UPDATE_GOLDEN=1 cargo test --test it linkage::` -->\n\n\
         This page helps you judge what a dependency costs: how many packages it brings, itself included,\n\
         and how many of these nothing else needs. Both programs together compile {} packages on Linux, {}\n\
         without the feature `clouds`. `zdata` alone compiles {}, and {} without it.\n\n\
         | dependency | brings | only it | use |\n|---|---|---|---|\n{}",
        count("clouds,train"),
        count("train"),
        count("clouds"),
        count(""),
        rows.concat()
    );
    let path = root().join(".github/DEPENDENCIES.md");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let same = std::fs::read_to_string(&path).unwrap_or_default() == page;
    assert!(same, "{} is not what Cargo.lock says: UPDATE_GOLDEN=1 writes it", path.display());
}
