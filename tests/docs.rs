//! Fear: that a page points nowhere, that a front door grows long, that prose becomes private.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

#[cfg(feature = "train")]
use crate::support::ztrain_command;
use crate::support::{Ran, zdata_command};
use crate::tidy::{files, forbid, root};

/// Words of a README, by the folder that it opens: these and no more.
const READMES: [(&str, usize); 7] = [
    ("", 900),
    ("curricula", 1200),
    ("ingest", 1200),
    ("kernels", 1200),
    ("loader", 1200),
    ("mixer", 1200),
    ("trainer", 1600),
];

/// Words of any other page, unless a program writes it.
const PAGE: usize = 2500;

/// Columns of a line of prose.
const COLUMNS: usize = 100;

/// Words that readers from other projects have to guess at.
const PRIVATE: [&str; 10] =
    ["told", "beside", "gone", "drawn", "mend", "whoever", "nobody", "of it", "room", "floor"];

struct Page {
    /// From the root on.
    name: String,
    text: String,
}

fn pages() -> Vec<Page> {
    let hidden = files(&root().join(".github"), &[".md"]);
    let all = files(root(), &[".md"]).into_iter().chain(hidden);
    let all: Vec<_> = all
        .map(|path| Page {
            name: path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned(),
            text: std::fs::read_to_string(&path).unwrap(),
        })
        .collect();
    assert!(all.len() > 20, "the walk found only {} pages", all.len());
    all
}

/// Lines with their numbers that are not in a block of code.
fn lines(text: &str) -> Vec<(usize, &str)> {
    let mut code = false;
    let keep = |(_, line): &(usize, &str)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    };
    text.lines().enumerate().map(|(index, line)| (index + 1, line)).filter(keep).collect()
}

/// Lines of sentences: no tables, no HTML.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let of_prose = |(_, line): &(usize, &str)| !line.trim_start().starts_with(['|', '<']);
    lines(text).into_iter().filter(of_prose).collect()
}

/// A line without what stands between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" x ")
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = lines(text).into_iter().filter(|(_, line)| line.starts_with('#'));
    let (mut found, mut counts) = (BTreeSet::new(), BTreeMap::<String, usize>::new());
    for (_, line) in headings {
        let own = anchor(line.trim_start_matches('#'));
        let count = counts.entry(own.clone()).or_default();
        found.insert(if *count == 0 { own } else { format!("{own}-{count}") });
        *count += 1;
    }
    found
}

/// What a page points to: Markdown links, and pictures in HTML.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in lines(text) {
        let line = without_code(line);
        for (begin, end) in [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"')] {
            let rest = line.split(begin).skip(1);
            found.extend(rest.map(|rest| (number, rest.split(end).next().unwrap().to_owned())));
        }
    }
    found.retain(|(_, link)| !link.contains("://"));
    found
}

/// The file that a link on a page names, from the root on, and its anchor.
fn target(page: &str, link: &str) -> (PathBuf, Option<String>) {
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, it)| (path, Some(it)));
    let mut whole = PathBuf::from(page);
    if !path.is_empty() {
        whole.pop();
        for part in Path::new(path) {
            match part.to_str().unwrap() {
                ".." => drop(whole.pop()),
                "." => {}
                name => whole.push(name),
            }
        }
    }
    (whole, anchor.map(str::to_owned))
}

#[test]
fn links_lead_somewhere() {
    let pages = pages();
    let anchors: BTreeMap<PathBuf, _> =
        pages.iter().map(|page| (page.name.clone().into(), anchors(&page.text))).collect();
    let mut offences = Vec::new();
    for page in &pages {
        for (number, link) in links(&page.text) {
            let (path, anchor) = target(&page.name, &link);
            let there = root().join(&path).exists();
            let known =
                |anchor: &String| anchors.get(&path).is_some_and(|all| all.contains(anchor));
            if !there || !anchor.as_ref().is_none_or(known) {
                offences.push(format!("{}:{number}: {link}", page.name));
            }
        }
    }
    forbid("a link names a file and a heading that exist", offences);
}

#[test]
fn every_page_is_reached_from_the_readme() {
    let pages = pages();
    let of = |name: &Path| pages.iter().find(|page| Path::new(&page.name) == name);
    let (mut reached, mut open) = (BTreeSet::new(), vec![PathBuf::from("README.md")]);
    while let Some(name) = open.pop() {
        if let Some(page) = of(&name).filter(|_| reached.insert(name.clone())) {
            open.extend(links(&page.text).iter().map(|(_, link)| target(&page.name, link).0));
        }
    }
    let lost = pages.iter().filter(|page| !reached.contains(Path::new(&page.name)));
    forbid("README.md leads to every page", lost.map(|page| page.name.clone()).collect());
}

#[test]
fn pages_are_short() {
    let most = |page: &Page| {
        let readme = READMES
            .iter()
            .find(|(folder, _)| Path::new(&page.name) == Path::new(folder).join("README.md"));
        readme.map_or(PAGE, |(_, most)| *most)
    };
    let written = |page: &Page| {
        page.text.contains("<!-- generated") || page.text.contains("<!-- resources -->")
    };
    let offences = pages().into_iter().filter(|page| !written(page)).filter_map(|page| {
        let (words, most) = (page.text.split_whitespace().count(), most(&page));
        (words > most).then(|| format!("{}: {words} words, at most {most}", page.name))
    });
    forbid("a page is read in minutes", offences.collect());
}

#[test]
fn prose_can_be_guessed_and_fits_on_a_screen() {
    let mut offences = Vec::new();
    for page in pages() {
        for (number, line) in prose(&page.text) {
            let place = format!("{}:{number}", page.name);
            if line.chars().count() > COLUMNS && line.contains(' ') {
                offences.push(format!("{place}: {} columns", line.chars().count()));
            }
            let plain = without_code(line).to_lowercase();
            let words = plain.replace(|c: char| !c.is_alphanumeric(), " ");
            let words = format!(" {} ", words.split_whitespace().collect::<Vec<_>>().join(" "));
            let private = PRIVATE.iter().filter(|word| words.contains(&format!(" {word} ")));
            offences.extend(private.map(|word| format!("{place}: \"{word}\"")));
        }
    }
    forbid("prose is plain, in lines of 100 columns", offences);
}

#[test]
fn pages_are_read_as_github_reads_them() {
    let text = "# A page: of `x` & y\n```\n# no heading\n[no](link)\n```\n## Twice\n## Twice\n\
        `[no](code)` [yes](a/b.md#c-d)";
    let wanted = ["a-page-of-x--y", "twice", "twice-1"].map(str::to_owned);
    assert_eq!(anchors(text), BTreeSet::from(wanted));
    assert_eq!(links(text), [(8, "a/b.md#c-d".to_owned())]);
    let (path, anchor) = target("x/docs/page.md", "../../y/README.md#here");
    assert_eq!((path.to_str().unwrap(), anchor.as_deref()), ("y/README.md", Some("here")));
    assert_eq!(target("x/page.md", "#here").0.to_str().unwrap(), "x/page.md");
}

/// `--help` of a command and of all commands below it, as sections of a page.
fn sections(path: &[&str], help: &dyn Fn(&[&str]) -> String, out: &mut String) {
    let text = help(path);
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let level = "#".repeat(path.len().min(2) + 1);
    out.push_str(&format!("\n{level} {}\n\n```\n{}\n```\n", path.join(" "), lines.join("\n")));
    let commands = lines.iter().skip_while(|line| **line != "Commands:").skip(1);
    for line in commands.take_while(|line| !line.is_empty()) {
        let name = line.strip_prefix("  ").and_then(|rest| rest.split(' ').next());
        if let Some(name) = name.filter(|name| !["", "help"].contains(name)) {
            sections(&[path, &[name]].concat(), help, out);
        }
    }
}

/// A reference of all commands and flags of a program is what the program itself says.
fn is_the_reference(program: &str, page: &str, run: impl Fn(&[&str]) -> String) {
    let mut found = format!("# Commands of {program}\n\n");
    found += "<!-- generated by `UPDATE_GOLDEN=1 cargo test --test it docs::` -->\n\n";
    found += &format!(
        "This page lists every command and flag of `{program}`, as `--help` prints them.\n"
    );
    sections(&[program], &|path| run(&[&path[1..], &["--help"]].concat()), &mut found);
    let path = root().join(page);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let same = std::fs::read_to_string(&path).unwrap() == found;
    assert!(same, "{page} is not what `{program} --help` prints: UPDATE_GOLDEN=1 writes it anew");
}

/// What a command prints, however wide somebody's terminal is.
fn unwrapped(mut command: std::process::Command) -> String {
    Ran::from(command.env_remove("COLUMNS").output().unwrap()).ok()
}

#[test]
fn the_page_of_zdata_is_what_it_prints() {
    is_the_reference("zdata", "ingest/docs/commands.md", |args| unwrapped(zdata_command(args)));
}

#[cfg(feature = "train")]
#[test]
fn the_page_of_ztrain_is_what_it_prints() {
    is_the_reference("ztrain", "trainer/docs/commands.md", |args| unwrapped(ztrain_command(args)));
}
