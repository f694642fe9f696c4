//! Fear: that a command on a page fails, or prints something else than the page shows.
//!
//! A block whose fence says `sh run` or `console run` is run here. In a `console` block, commands follow `$ `, and the
//! other lines are output: each must be printed, in this order, except for numbers, digests and what `...` replaces.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Ran, Scratch, parquet};
use crate::tidy::{files, forbid, root};

/// Every page with such blocks, and the folder where they run: a folder of texts alone (`raw`), or what the commands of
/// the README leave (`mine`).
const PAGES: &[(&str, &str)] = &[
    ("README.md", "raw"),
    ("ingest/README.md", "raw"),
    ("ingest/docs/builds.md", "mine"),
    ("ingest/docs/format.md", "mine"),
    ("ingest/docs/interop.md", "mine"),
    ("mixer/README.md", "mine"),
    ("curricula/README.md", "mine"),
    ("loader/README.md", "mine"),
    ("trainer/docs/quickstart.md", "mine"),
    ("trainer/docs/planning.md", "mine"),
    ("trainer/docs/formats.md", "mine"),
    ("trainer/docs/metrics.md", "mine"),
    ("trainer/docs/huggingface.md", "mine"),
];

/// Commands of a block, and the lines that they must print.
struct Block {
    number: usize,
    commands: String,
    printed: Vec<String>,
}

/// The blocks of a page that are to be run.
fn blocks(page: &str) -> Vec<Block> {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let mut found: Vec<Block> = Vec::new();
    let (mut kind, mut continued) = ("", false);
    for (index, line) in text.lines().enumerate() {
        if let Some(info) = line.strip_prefix("```") {
            kind = info.strip_suffix(" run").unwrap_or("");
            if !kind.is_empty() {
                assert!(["sh", "console"].contains(&kind), "{page}:{}: {info}", index + 1);
                let (commands, printed) = (String::new(), Vec::new());
                found.push(Block { number: index + 1, commands, printed });
            }
            continue;
        }
        let Some(block) = found.last_mut().filter(|_| !kind.is_empty()) else { continue };
        let command = if kind == "sh" || continued { Some(line) } else { line.strip_prefix("$ ") };
        match command {
            Some(command) => block.commands += &format!("{command}\n"),
            None => block.printed.push(line.to_owned()),
        }
        continued = command.is_some_and(|command| command.ends_with('\\'));
    }
    found
}

/// A line with each number and digest replaced by `#`, and without repeated spaces: columns follow a table's numbers.
fn shape(line: &str) -> String {
    let of_word = |c: char| c.is_ascii_alphanumeric() || ".,+-".contains(c);
    let of_number = |c: char| c.is_ascii_hexdigit() || ".,+-".contains(c);
    let is_number = |word: &str| {
        word.chars().all(of_number)
            && (word.contains(|c: char| c.is_ascii_digit()) || word.len() >= 8)
    };
    let (mut shaped, mut rest) = (String::new(), line);
    while !rest.is_empty() {
        let (word, after) = rest.split_at(rest.find(|c| !of_word(c)).unwrap_or(rest.len()));
        let (between, next) = after.split_at(after.find(of_word).unwrap_or(after.len()));
        shaped += if is_number(word) { "#" } else { word };
        shaped += between;
        rest = next;
    }
    shaped.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a program's line is one that a page shows: `...` on the page stands for any text.
fn shows(shown: &str, printed: &str) -> bool {
    let (shown, printed) = (shown.trim(), shape(printed));
    let pieces: Vec<_> = shown.split("...").map(shape).collect();
    let (first, last) = (&pieces[0], &pieces[pieces.len() - 1]);
    if pieces.len() == 1 {
        return printed == *first;
    }
    let Some(mut rest) = printed.strip_prefix(first.as_str()) else { return false };
    for piece in &pieces[1..] {
        let Some(at) = rest.find(piece.as_str()) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.is_empty() || last.is_empty()
}

/// Texts as somebody may have them: the project's own pages as Parquet, and its sources as JSON Lines.
fn texts(folder: &Path) {
    fs::create_dir_all(folder.join("articles")).unwrap();
    fs::create_dir_all(folder.join("notes")).unwrap();
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let pages: Vec<String> = files(root(), &[".md"]).iter().map(|path| read(path)).collect();
    let sections = pages.iter().flat_map(|page| page.split("\n## ")).map(str::to_owned);
    let sections: Vec<String> = sections.collect();
    let ids = (0..sections.len()).map(|index| format!("a-{index}")).collect();
    let file = parquet(&[("id", ids), ("text", sections)]);
    fs::write(folder.join("articles/pages.parquet"), file).unwrap();
    let line = |(index, path): (usize, &std::path::PathBuf)| {
        serde_json::json!({"id": format!("n-{index}"), "text": read(path)}).to_string() + "\n"
    };
    let sources = files(&root().join("ingest"), &[".rs"]);
    let lines: String = sources.iter().enumerate().map(line).collect();
    fs::write(folder.join("notes/sources.jsonl"), lines).unwrap();
}

/// Runs the blocks of a page one after another in one shell; returns what failed, or was not printed.
fn run(page: &str, folder: &Path) -> Vec<String> {
    let blocks = blocks(page);
    const MARK: &str = "==== block of a page";
    let script: String =
        blocks.iter().map(|block| format!("echo '{MARK}'\n{}", block.commands)).collect();
    let bin = Path::new(env!("CARGO_BIN_EXE_zdata")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", &format!("exec 2>&1\n{script}")]).current_dir(folder);
    let ran = Ran::from(shell.env("PATH", path).stdin(Stdio::null()).output().unwrap());
    let printed: Vec<&str> = ran.out.split(&format!("{MARK}\n")).skip(1).collect();
    let place = |block: &Block| format!("{page}:{}", block.number);
    if ran.code != Some(0) {
        let last = printed.len() - 1;
        return vec![format!("{} fails:\n{}", place(&blocks[last]), printed[last])];
    }
    let mut missing = Vec::new();
    for (block, printed) in blocks.iter().zip(printed) {
        let mut lines = printed.lines();
        let shown = block.printed.iter().filter(|line| !line.trim().is_empty());
        let first = shown.into_iter().find(|shown| !lines.any(|line| shows(shown, line)));
        missing
            .extend(first.map(|shown| format!("{}: {shown} is not in:\n{printed}", place(block))));
    }
    missing
}

#[test]
fn commands_on_pages_run_and_print_what_is_shown() {
    let scratch = Scratch::new();
    let (raw, mine) = (scratch.path("raw"), scratch.path("first/mine"));
    texts(&raw);
    let copy = |from: &Path, to: &Path| {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        assert!(Command::new("cp").arg("-r").args([from, to]).status().unwrap().success());
        std::os::unix::fs::symlink(root().join("curricula"), to.join("curricula")).ok();
    };
    let marked =
        |text: &str| text.lines().any(|line| line.starts_with("```") && line.ends_with(" run"));
    let hidden = files(&root().join(".github"), &[".md"]);
    for path in files(root(), &[".md"]).into_iter().chain(hidden) {
        let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
        let known = PAGES.iter().any(|(page, _)| *page == name);
        assert_eq!(
            marked(&fs::read_to_string(&path).unwrap()),
            known,
            "{name} stands in PAGES if it has blocks to run"
        );
    }
    copy(&raw, &mine);
    let mut failed = run("README.md", mine.parent().unwrap());
    for (index, (page, start)) in PAGES.iter().enumerate().skip(1) {
        let folder = scratch.path(&format!("{index}/mine"));
        copy(if *start == "raw" { &raw } else { &mine }, &folder);
        failed.extend(run(page, &folder));
    }
    forbid("a page shows commands that work, and what they print", failed);
}

#[test]
fn what_a_page_shows_is_held_but_for_numbers() {
    assert!(shows(
        "step 40/40 | first | loss 5.687096 | ...",
        "step 3/9 | first | loss 6.1 | lr 4e-3"
    ));
    assert!(shows(
        "digest 6d021e73414c782b5e985eecc8985426",
        "digest 00001e73414c782b5e985eecc8985426"
    ));
    assert!(shows(
        "494 documents, ... in 0.2 s (13.7 MB/s)",
        "1 documents, 2.93 MiB of text in 10 s (3 MB/s)"
    ));
    assert!(!shows("step 30: same bits", "step 30: other bits"));
    assert!(!shows("494 documents", "494 documents, 3 tokens"));
}
