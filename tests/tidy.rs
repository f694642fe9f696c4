//! Fear: that code drifts from the project's rules. Each rule of `.github/ARCHITECTURE.md` that a program can check is
//! a test here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The repository's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file under `folder` with one of the endings, sorted, without build output.
pub(crate) fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
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

/// Panics with all offences.
pub(crate) fn forbid(rule: &str, offences: Vec<String>) {
    assert!(offences.is_empty(), "{rule}:\n  {}", offences.join("\n  "));
}

#[test]
fn members_use_each_other_in_one_direction() {
    let allowed = [
        ("ingest/contract", ""),
        ("ingest/settings", "contract"),
        ("ingest/store", "contract"),
        ("ingest/storage", "contract store"),
        ("ingest", "contract settings store storage"),
        ("ingest/zdata", "contract settings store storage ingest curriculum mixer loader"),
        ("mixer/curriculum", "contract settings"),
        ("mixer", "contract settings curriculum"),
        ("loader", "contract settings store storage curriculum mixer"),
        ("loader/python", "contract store storage mixer loader zdata-cli"),
        ("kernels", ""),
        ("trainer", "contract settings store storage curriculum mixer loader kernels"),
        (
            "trainer/tools",
            "contract settings store storage curriculum mixer loader kernels trainer",
        ),
    ];
    let members = "contract settings store storage ingest zdata-cli zdata-python curriculum mixer \
        loader kernels trainer tools";
    let among = |names: &str, name: &str| names.split_whitespace().any(|known| known == name);
    let mut offences = Vec::new();
    for (folder, may_use) in allowed {
        let text = std::fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let manifest: toml::Table = text.parse().unwrap();
        for used in manifest["dependencies"].as_table().unwrap().keys() {
            if among(members, used) && !among(may_use, used) {
                offences.push(format!("{folder} uses {used}"));
            }
        }
    }
    forbid("an arrow that `.github/ARCHITECTURE.md` does not have", offences);
}

/// The folders of each crate's modules.
const CRATES: [&str; 16] = [
    "ingest/src",
    "ingest/zdata",
    "ingest/contract/src",
    "ingest/settings/src",
    "ingest/store/src",
    "ingest/storage/src",
    "mixer/src",
    "mixer/curriculum/src",
    "loader/src",
    "loader/python/src",
    "kernels/src",
    "kernels/allocator/src",
    "kernels/rccl-sys/src",
    "trainer/src",
    "trainer/tools/src",
    "trainer/ztrain",
];

/// One crate's files as a tree of modules: the name of each, what it reads and re-exports, without tests.
#[derive(Default)]
struct Modules {
    /// By module path below the crate's root: the tokens of its file.
    words: BTreeMap<Vec<String>, Vec<String>>,
    /// By module: the names defined by its `use` items, with their paths.
    made: BTreeMap<Vec<String>, BTreeMap<String, Vec<String>>>,
    /// Every path in a module, from the crate's root.
    paths: Vec<(Vec<String>, Vec<String>)>,
}

impl Modules {
    fn of(source: &Path) -> Modules {
        let mut modules = Modules::default();
        let mut tests = BTreeSet::new();
        for path in files(source, &[".rs"]) {
            let name = path.strip_prefix(source).unwrap().with_extension("");
            let mut name: Vec<String> =
                name.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if ["mod", "lib", "main"].contains(&name.last().unwrap().as_str()) {
                name.pop();
            }
            if name.iter().any(|part| part.contains("tests")) {
                continue;
            }
            let (code, only_tests) = without_tests(&std::fs::read_to_string(&path).unwrap());
            tests.extend(only_tests.into_iter().map(|child| [&name[..], &[child]].concat()));
            modules.words.insert(name, words_of(&code));
        }
        modules.words.retain(|name, _| !tests.iter().any(|test| name.starts_with(test)));
        for (module, words) in modules.words.clone() {
            modules.read(&module, &words);
        }
        modules
    }

    /// Records every path of a module that starts at the crate's root, at itself or above.
    fn read(&mut self, module: &[String], words: &[String]) {
        let mut at = 0;
        while at < words.len() {
            let begins = ["crate", "super", "self"].contains(&words[at].as_str());
            if words[at] == "use" {
                at = self.read_use(module, &[], words, at + 1);
            } else if begins && words.get(at + 1).is_some_and(|next| next == "::") {
                let end = (at..words.len()).step_by(2).find(|&next| {
                    words.get(next + 1).is_none_or(|word| word != "::")
                        || !words[next + 2].starts_with(|first: char| first.is_alphabetic())
                });
                let path: Vec<String> =
                    words[at..=end.unwrap()].iter().step_by(2).cloned().collect();
                self.paths.push((module.to_vec(), self.whole(module, &path)));
                at = end.unwrap();
            }
            at += 1;
        }
    }

    /// Records the paths of one `use` tree and returns where it ends.
    fn read_use(
        &mut self,
        module: &[String],
        before: &[String],
        words: &[String],
        mut at: usize,
    ) -> usize {
        let (mut path, mut name) = (before.to_vec(), None);
        loop {
            match words[at].as_str() {
                "::" => {}
                "as" => {
                    name = Some(words[at + 1].clone());
                    at += 1;
                }
                "{" => {
                    while words[at] != "}" {
                        at = self.read_use(module, &path, words, at + 1);
                    }
                    path.clear();
                }
                ";" | "," | "}" => break,
                word => path.push(word.to_owned()),
            }
            at += 1;
        }
        if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
            path.pop();
        }
        let full = self.whole(module, &path);
        if let Some(name) = name.or_else(|| path.last().cloned())
            && !full.is_empty()
        {
            self.made.entry(module.to_vec()).or_default().insert(name, full.clone());
            self.paths.push((module.to_vec(), full));
        }
        at
    }

    /// A path made absolute from the crate's root; empty if it leads out of the crate.
    fn whole(&self, module: &[String], path: &[String]) -> Vec<String> {
        let above = path.iter().take_while(|word| *word == "super").count();
        let child = path.first().is_some_and(|first| {
            self.words.contains_key(&[module, std::slice::from_ref(first)].concat())
        });
        match path.first().map(String::as_str) {
            Some("crate") => path[1..].to_vec(),
            Some("self") => [module, &path[1..]].concat(),
            Some("super") => {
                [&module[..module.len().saturating_sub(above)], &path[above..]].concat()
            }
            _ if child => [module, path].concat(),
            _ => Vec::new(),
        }
    }

    /// The modules used by a path: the one that it names, and those whose item that one re-exports.
    fn through(&self, path: &[String]) -> Vec<Vec<String>> {
        let (mut found, mut path) = (Vec::new(), path.to_vec());
        loop {
            let depth =
                (0..=path.len()).rev().find(|&depth| self.words.contains_key(&path[..depth]));
            let depth = depth.expect("every crate has a root");
            let module = path[..depth].to_vec();
            if found.contains(&module) {
                return found;
            }
            let handed = self.made.get(&module).zip(path.get(depth));
            let next = handed.and_then(|(made, name)| made.get(name)).cloned();
            found.push(module);
            match next {
                Some(next) => path = [&next[..], &path[depth + 1..]].concat(),
                None => return found,
            }
        }
    }

    /// What the modules of one folder use from each other, and where.
    fn among(&self, folder: &[String]) -> BTreeMap<(String, String), BTreeSet<String>> {
        let mut uses: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
        for (module, path) in &self.paths {
            for target in self.through(path) {
                if !module.starts_with(folder) || !target.starts_with(folder) {
                    continue;
                }
                let below = |path: &[String]| path.get(folder.len()).cloned();
                if let (Some(from), Some(to)) = (below(module), below(&target))
                    && from != to
                {
                    uses.entry((from, to)).or_default().insert(module.join("/"));
                }
            }
        }
        uses
    }
}

/// A file's code without comments and test code, and the names of test-only modules.
fn without_tests(text: &str) -> (String, Vec<String>) {
    let (mut code, mut tests) = (String::new(), Vec::new());
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            code.push_str(line.split("//").next().unwrap());
            code.push('\n');
            continue;
        }
        let close = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
        let item = lines.find(|line| !line.trim_start().starts_with("#[")).unwrap();
        if !item.ends_with([';', ',', '}']) {
            lines.find(|line| line.starts_with(&close)).unwrap();
        }
        if let Some((_, name)) = item.split_once("mod ") {
            tests.push(name.trim_end_matches([' ', '{', ';']).to_owned());
        }
    }
    (code, tests)
}

/// Splits code into names, `::` and single other characters.
fn words_of(code: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let name = rest.find(|sign: char| !sign.is_alphanumeric() && sign != '_');
        let length = match name.unwrap_or(rest.len()) {
            0 if rest.starts_with("::") => 2,
            0 => first.len_utf8(),
            length => length,
        };
        words.push(rest[..length].to_owned());
        rest = rest[length..].trim_start();
    }
    words
}

/// The maximal sets of modules that all use each other, directly or indirectly.
fn circles(uses: &BTreeMap<(String, String), BTreeSet<String>>) -> BTreeSet<BTreeSet<String>> {
    let mut reaches: BTreeSet<(String, String)> = uses.keys().cloned().collect();
    let names: BTreeSet<String> = uses.keys().map(|(from, _)| from.clone()).collect();
    for middle in &names {
        let into: Vec<_> = reaches.iter().filter(|(_, to)| to == middle).cloned().collect();
        let out: Vec<_> = reaches.iter().filter(|(from, _)| from == middle).cloned().collect();
        for (from, _) in &into {
            reaches.extend(out.iter().map(|(_, to)| (from.clone(), to.clone())));
        }
    }
    let turned = |name: &String| {
        let mutual = |other: &&String| {
            reaches.contains(&(name.clone(), (*other).clone()))
                && reaches.contains(&((*other).clone(), name.clone()))
        };
        names.iter().filter(mutual).cloned().collect::<BTreeSet<String>>()
    };
    names.iter().map(turned).filter(|circle| circle.len() > 1).collect()
}

/// A crate can be read one module after the other only if there are no cycles.
#[test]
fn modules_use_each_other_in_one_direction() {
    let mut offences = Vec::new();
    for source in CRATES {
        let modules = Modules::of(&root().join(source));
        let above = modules.words.keys().filter_map(|name| name.split_last());
        for folder in above.map(|(_, above)| above).collect::<BTreeSet<_>>() {
            let uses = modules.among(folder);
            for circle in circles(&uses) {
                offences.push(format!("{}: {circle:?}", [source, &folder.join("/")].join("/")));
                let inside =
                    |(from, to): &(String, String)| circle.contains(from) && circle.contains(to);
                let within = uses.iter().filter(|(pair, _)| inside(pair));
                offences
                    .extend(within.map(|((from, to), by)| format!("    {from} -> {to} in {by:?}")));
            }
        }
    }
    forbid("modules of one folder that use each other in a circle", offences);
}

/// A search for a name finds one type. `Result` is each crate's own, as elsewhere in Rust.
#[test]
fn no_public_type_name_stands_in_two_crates() {
    let mut crates: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (path, text) in sources() {
        let member = CRATES.iter().find(|source| path.starts_with(&format!("{source}/")));
        for line in text.lines().filter(|_| member.is_some()) {
            let words = words_of(line);
            let [public, kind, name, ..] = &words[..] else { continue };
            let kinds = ["struct", "enum", "trait", "type", "union"];
            if public == "pub" && kinds.contains(&&**kind) && name != "Result" {
                crates.entry(name.clone()).or_default().extend(member);
            }
        }
    }
    assert!(crates.len() > 100, "found only {} types", crates.len());
    crates.retain(|_, members| members.len() > 1);
    let offences = crates.iter().map(|twice| format!("{twice:?}")).collect();
    forbid("a public type name stands in one crate", offences);
}

#[test]
fn unsafe_stands_only_in_kernels() {
    let mut offences = Vec::new();
    for member in [
        "ingest/contract",
        "ingest/settings",
        "ingest/store",
        "ingest/storage",
        "ingest",
        "mixer/curriculum",
        "mixer",
        "loader",
        "loader/python",
        "trainer",
        "trainer/tools",
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

/// Sums have the order of the reduction tree; a library's order would change with sizes, channels and releases.
#[test]
fn no_library_adds_up_across_ranks() {
    let sums = ["Reduce", "reduce_scatter", "allreduce"];
    let collective = [".coll", "ective("].concat();
    let may = ["trainer/tools/src/collectives.rs", "kernels/src/group/tests.rs"];
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
    // Exceptions: the crash simulation writes what a crash left, the cache re-creates copies, and `init` writes files
    // for users.
    let doors = [
        "ingest/store/src/disk",
        "ingest/storage/src/crash",
        "ingest/storage/src/objects/cache.rs",
    ];
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

/// Whether a line starts a function.
fn opens_function(line: &str) -> bool {
    let before = line.trim_start().split_once("fn ").map(|(before, _)| before);
    let word = |word: &str| {
        ["const", "unsafe", "async", "extern"].contains(&word) || word.starts_with('"')
    };
    before.is_some_and(|before| {
        let visible = before.strip_prefix("pub(").and_then(|rest| rest.split_once(") "));
        let rest = visible.map_or(before.strip_prefix("pub ").unwrap_or(before), |(_, rest)| rest);
        rest.split_whitespace().all(word) && (rest.is_empty() || rest.ends_with(' '))
    })
}

/// Whether a pattern without a name ends in this line of a signature.
fn has_tuple_pattern(line: &str) -> bool {
    let named = |part: &str| {
        part.rsplit_once('(').is_some_and(|(name, _)| name.ends_with(char::is_alphabetic))
    };
    line.rsplit("): ").skip(1).any(|part| !named(part))
}

#[test]
fn functions_fit_on_a_screen_and_name_their_parameters() {
    let mut offences = Vec::new();
    for (name, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        for (start, line) in lines.iter().enumerate().filter(|(_, line)| opens_function(line)) {
            let body = lines[start..].iter().position(|line| line.ends_with(['{', '}', ';']));
            if lines[start..=start + body.unwrap_or(0)].iter().any(|line| has_tuple_pattern(line)) {
                offences.push(format!("{name}:{}: takes a tuple apart", start + 1));
            }
            if line.trim_end().ends_with(['}', ';']) {
                continue;
            }
            // A trait's declaration over several lines has no body.
            let indent = " ".repeat(line.len() - line.trim_start().len());
            let (end, close) = (format!("{indent})"), format!("{indent}}}"));
            let signature = lines[start..].iter().find(|line| line.starts_with(&end));
            if !line.ends_with('{') && signature.is_some_and(|line| line.ends_with(';')) {
                continue;
            }
            match lines[start..].iter().position(|line| *line == close) {
                Some(last) if last < 70 => {}
                Some(last) => offences.push(format!("{name}:{}: {} lines", start + 1, last + 1)),
                None => offences.push(format!("{name}:{}: its end was not found", start + 1)),
            }
        }
    }
    forbid("a function has at most 70 lines, and a name for each parameter", offences);
}

#[test]
fn nothing_is_left_for_later_in_the_source() {
    let marks = [["TO", "DO"], ["FIX", "ME"], ["X", "XX"], ["#[ign", "ore"]];
    let marks = marks.map(|parts| parts.concat());
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
    let lines = table.lines().filter(|line| line.contains("version =") || line.contains(" = \""));
    let offences = lines.filter(|line| !line.contains(" # ") && !line.contains("path ="));
    let offences = offences.map(str::to_owned);
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
