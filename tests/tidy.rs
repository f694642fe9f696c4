//! Fear: that the house rules rot. Each rule of the README's map that a machine can check is a test here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The repository's root.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file under `folder` with one of the endings, sorted, build output left out.
fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut entries: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir()
            && !path.is_symlink()
            && !name.starts_with('.')
            && !["target", "runs"].contains(&name)
        {
            found.extend(files(&path, endings));
        } else if path.is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
    found
}

fn sources() -> Vec<(String, String)> {
    let read = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read_to_string(&path).unwrap())
    };
    let all: Vec<_> = files(root(), &[".rs"]).into_iter().map(read).collect();
    assert!(all.len() > 20, "the walk found only {} files", all.len());
    all
}

/// Panics with every offence at once.
fn forbid(rule: &str, offences: Vec<String>) {
    assert!(offences.is_empty(), "{rule}:\n  {}", offences.join("\n  "));
}

#[test]
fn members_use_each_other_in_one_direction() {
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("ingest/contract", &[][..]),
        ("ingest/store", &["contract"]),
        ("ingest/storage", &["contract", "store"]),
        ("ingest", &["contract", "store", "storage"]),
        ("mixer/curriculum", &["contract"]),
        ("mixer", &["contract", "curriculum"]),
        ("loader", &["contract", "store", "storage", "curriculum", "mixer"]),
        ("kernels", &[]),
        ("trainer", &["contract", "store", "storage", "curriculum", "mixer", "loader", "kernels"]),
    ]);
    let members = [
        "contract",
        "store",
        "storage",
        "ingest",
        "curriculum",
        "mixer",
        "loader",
        "kernels",
        "trainer",
    ];
    let mut offences = Vec::new();
    for (folder, may_use) in allowed {
        let text = std::fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let manifest: toml::Table = text.parse().unwrap();
        for used in manifest["dependencies"].as_table().unwrap().keys() {
            if members.contains(&used.as_str()) && !may_use.contains(&used.as_str()) {
                offences.push(format!("{folder} uses {used}"));
            }
        }
    }
    forbid("an arrow that layout does not have (README, map)", offences);
}

#[test]
fn unsafe_stands_only_in_kernels() {
    let mut offences = Vec::new();
    for member in [
        "ingest/contract",
        "ingest/store",
        "ingest/storage",
        "ingest",
        "mixer/curriculum",
        "mixer",
        "loader",
        "trainer",
    ] {
        let lib = std::fs::read_to_string(root().join(member).join("src/lib.rs")).unwrap();
        if !lib.contains("#![forbid(unsafe_code)]") {
            offences.push(format!("{member}/src/lib.rs does not forbid it"));
        }
    }
    for folder in ["ingest/zdata", "trainer/ztrain"] {
        for path in files(&root().join(folder), &[".rs"]) {
            if std::fs::read_to_string(&path).unwrap().contains("unsafe ") {
                offences.push(path.display().to_string());
            }
        }
    }
    forbid("unsafe code outside kernels", offences);
}

#[test]
fn the_mixer_sees_no_files_threads_or_clock() {
    let banned = ["std::fs", "std::thread", "std::time", "std::net", "std::env"];
    let mut offences = Vec::new();
    for path in files(&root().join("mixer/src"), &[".rs"]) {
        let text = std::fs::read_to_string(&path).unwrap();
        offences.extend(
            banned
                .iter()
                .filter(|word| text.contains(*word))
                .map(|word| format!("{}: {word}", path.display())),
        );
    }
    forbid("the mixer is arithmetic", offences);
}

/// Sums have the order of the tree; a library's own would move with sizes, channels and releases.
#[test]
fn no_library_adds_up_across_ranks() {
    let sums = ["Reduce", "reduce_scatter", "allreduce"];
    let collective = [".coll", "ective("].concat();
    let may = ["trainer/src/mesh/bench.rs", "kernels/src/group/tests.rs"];
    let (mut offences, mut looked) = (Vec::new(), 0);
    for (name, text) in sources() {
        let between = name.starts_with("kernels/rccl-sys/");
        looked += usize::from(between);
        for (number, line) in text.lines().enumerate() {
            let asks = line.contains(&collective) && !may.contains(&name.as_str());
            if asks || (between && sums.iter().any(|sum| line.contains(sum))) {
                offences.push(format!("{name}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert!(looked > 0, "the library between devices is not where it was");
    forbid("ranks send and receive, and their owners add up (kernels/src/tree.rs)", offences);
}

#[test]
fn the_trainer_opens_no_shard() {
    let mut offences = Vec::new();
    for (name, text) in sources() {
        if name.starts_with("trainer/src")
            && (text.contains("StreamReader") || text.contains("store::read"))
        {
            offences.push(name);
        }
    }
    forbid("the trainer reads text only through the loader", offences);
}

#[test]
fn the_data_side_writes_through_one_door() {
    let acts = [
        " File::create(",
        "(File::create(",
        "fs::File::create(",
        ".append(true)",
        ".write(true)",
        ".sync_all(",
        "fs::write(",
        "fs::rename(",
        "fs::create_dir",
        "fs::remove_",
        "fs::hard_link(",
    ];
    // The double puts what a crash left; the cache makes copies again; `init` makes texts for people.
    let doors =
        ["ingest/store/src/disk", "ingest/storage/src/crash", "ingest/storage/src/cache.rs"];
    let exempt = |name: &str| {
        let tests = ["test", "benches", "crashes.rs"].iter().any(|word| name.contains(word));
        tests || doors.iter().any(|door| name.starts_with(door))
    };
    let mut offences = Vec::new();
    for (name, text) in sources() {
        if !name.starts_with("ingest/") || exempt(&name) {
            continue;
        }
        let code = text.split("#[cfg(test)]").next().unwrap();
        for (number, line) in code.lines().enumerate() {
            if acts.iter().any(|act| line.contains(act)) {
                offences.push(format!("{name}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    forbid("write through store::disk, where tests see what a crash may leave", offences);
}

#[test]
fn every_file_says_what_it_is() {
    let offences =
        sources().into_iter().filter(|(_, text)| !text.starts_with("//! ")).map(|(name, _)| name);
    forbid("a file opens with a //! sentence", offences.collect());
}

#[test]
fn files_fit_in_the_head() {
    let mut offences = Vec::new();
    for (name, text) in sources() {
        if text.lines().count() > 600 {
            offences.push(format!("{name}: {} lines", text.lines().count()));
        }
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > 130 {
                offences.push(format!("{name}:{}: {} columns", number + 1, line.chars().count()));
            }
        }
    }
    forbid("at most 600 lines of 130 columns", offences);
}

#[test]
fn functions_fit_on_a_screen() {
    let mut offences = Vec::new();
    for (name, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        for (start, line) in lines.iter().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let head =
                line.trim_start().trim_start_matches("pub ").trim_start_matches("pub(crate) ");
            if !head.starts_with("fn ") || line.trim_end().ends_with(['}', ';']) {
                continue;
            }
            // A declaration of a trait over several lines has no body.
            let end = format!("{})", " ".repeat(indent));
            let signature = lines[start..].iter().find(|line| line.starts_with(&end));
            if !line.ends_with('{') && signature.is_some_and(|line| line.ends_with(';')) {
                continue;
            }
            let close = format!("{}}}", " ".repeat(indent));
            let length = lines[start..].iter().position(|line| *line == close).unwrap_or(0) + 1;
            if length > 70 {
                offences.push(format!("{name}:{}: {length} lines", start + 1));
            }
        }
    }
    forbid("a function has at most 70 lines", offences);
}

#[test]
fn nothing_is_left_for_later_in_the_source() {
    let marks = [
        "TO".to_owned() + "DO",
        "FIX".to_owned() + "ME",
        "X".repeat(3),
        "#[ign".to_owned() + "ore",
    ];
    let mut offences = Vec::new();
    for (name, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark.as_str())) || !line.is_ascii() {
                offences.push(format!("{name}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    forbid("no marks for later, no ignored tests, ASCII only", offences);
}

#[test]
fn every_dependency_says_why() {
    let text = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let table = text.split("[workspace.dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
    let lines = table
        .lines()
        .filter(|line| line.contains("version =") || line.contains(" = \""))
        .filter(|line| !line.contains("path ="));
    let offences = lines.filter(|line| !line.contains(" # ")).map(str::to_owned);
    forbid("a dependency carries a one-line reason", offences.collect());
}

#[test]
fn every_curriculum_stands_in_the_readme() {
    let readme = std::fs::read_to_string(root().join("curricula/README.md")).unwrap();
    let offences = files(&root().join("curricula"), &[".toml"])
        .into_iter()
        .filter(|path| !readme.contains(path.file_name().unwrap().to_str().unwrap()))
        .map(|path| path.display().to_string());
    forbid("curricula/README.md names every file beside it", offences.collect());
}
