//! Fear: that a page points nowhere, that a front door grows long, that prose becomes private.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

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

/// Words that people wrote: without tables of keys, which programs write.
fn written_words(text: &str) -> usize {
    let parts = text.split("<!-- keys:");
    let after = |part: &str| part.split("<!-- end -->").last().map_or(0, words);
    parts.clone().next().map_or(0, words) + parts.skip(1).map(after).sum::<usize>()
}

fn words(text: &str) -> usize {
    text.split_whitespace().count()
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
        let (words, most) = (written_words(&page.text), most(&page));
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

/// What a key's value may be, in words, by its part of a JSON Schema.
fn type_of(schema: &Value, field: &Value) -> String {
    let of = |field: &Value| type_of(schema, field);
    if let Some(name) = field["$ref"].as_str() {
        return of(&schema["$defs"][name.rsplit('/').next().unwrap()]);
    }
    for several in ["anyOf", "oneOf"] {
        if let Some(kinds) = field[several].as_array() {
            let kinds: Vec<_> = kinds.iter().map(of).filter(|kind| kind != "nothing").collect();
            let constants = kinds.iter().all(|kind| kind.starts_with('`'));
            return kinds.join(if constants { ", " } else { " or " });
        }
    }
    if let Some(values) = field["enum"].as_array() {
        return values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    }
    if !field["const"].is_null() {
        return format!("`{}`", field["const"]);
    }
    let kind = match &field["type"] {
        Value::Array(kinds) => kinds.iter().find(|kind| *kind != "null").unwrap().as_str(),
        kind => kind.as_str(),
    };
    let least = field["minimum"].as_f64().filter(|least| *least > 0.0);
    match (kind.unwrap_or("any"), least) {
        ("integer", Some(least)) => format!("whole number >= {least}"),
        ("integer", None) => "whole number".to_owned(),
        ("string", _) => "text".to_owned(),
        ("null", _) => "nothing".to_owned(),
        ("array", _) if field["items"].is_null() => "list".to_owned(),
        ("array", _) => match field["maxItems"].as_u64() {
            Some(count) => format!("list of {count} {}s", of(&field["items"])),
            None => format!("list of {}", of(&field["items"])),
        },
        ("object", _) if field["additionalProperties"].is_object() => {
            format!("table of {}", of(&field["additionalProperties"]))
        }
        ("object", _) => "table".to_owned(),
        (other, _) => other.to_owned(),
    }
}

/// The table of a curriculum or corpus whose keys follow, by the name that it has there; `""`: the file itself.
fn table_of<'a>(schema: &'a Value, name: &str) -> &'a Value {
    let mut field = match name {
        "" => schema,
        name => &schema["properties"][name],
    };
    loop {
        let kinds = field["anyOf"].as_array();
        field = match field["$ref"].as_str() {
            Some(name) => &schema["$defs"][name.rsplit('/').next().unwrap()],
            None if field["properties"].is_object() => return field,
            None if field["items"].is_object() => &field["items"],
            None if kinds.is_some() => &kinds.unwrap()[0],
            None => &field["additionalProperties"],
        };
        assert!(!field.is_null(), "the schema has no table {name}");
    }
}

/// Rows of Markdown for the keys of a table.
fn keys(schema: &Value, name: &str) -> String {
    let table = table_of(schema, name);
    let presets = table["presets"].as_object();
    let required = table["required"].as_array().cloned().unwrap_or_default();
    let fields = table["properties"].as_object().unwrap();
    // Whether a key's table has a section of its own.
    let is_section = |key: &str, kind: &str| {
        name.is_empty() && kind.starts_with(['t', 'l']) && kind.contains("table") && key != "mix"
    };
    let digest = fields.values().any(|field| !field["digest"].is_null());
    let mut columns = vec!["key".to_owned(), "type".to_owned()];
    match presets {
        // The smallest first.
        Some(presets) => {
            let mut names: Vec<&String> = presets.keys().collect();
            names.sort_by_key(|name| presets[*name]["num_hidden_layers"].as_i64());
            columns.extend(names.into_iter().map(|name| format!("`{name}`")));
        }
        None => columns.push("default".to_owned()),
    }
    columns.push("meaning".to_owned());
    columns.extend(digest.then(|| "digest".to_owned()));
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = row(&columns) + &"|---".repeat(columns.len()) + "|\n";
    let typed = |value: &Value| match value {
        Value::Null => String::new(),
        value => format!("`{value}`").replace('|', "\\|"),
    };
    // What has to be there comes first.
    let first = required.iter().filter_map(Value::as_str).map(|key| (key, &fields[key]));
    let others = fields.iter().map(|(key, field)| (key.as_str(), field));
    let others = others.filter(|(key, _)| !required.iter().any(|name| name == key));
    for (key, field) in first.chain(others) {
        let kind = type_of(schema, field);
        if is_section(key, &kind) {
            continue;
        }
        let mut cells = vec![format!("`{key}`"), kind];
        match presets {
            Some(presets) => cells.extend(columns[2..2 + presets.len()].iter().map(|column| {
                let preset = &presets[column.trim_matches('`')];
                if key == "preset" { typed(&field["default"]) } else { typed(&preset[key]) }
            })),
            None if required.iter().any(|name| name == key) => cells.push("required".to_owned()),
            None => cells.push(typed(&field["default"])),
        }
        let meaning = field["description"].as_str().unwrap_or_default();
        assert!(!meaning.is_empty(), "{name} {key} has no meaning");
        // A choice is explained where its values are.
        let choices = match field["$ref"].as_str().or(field["anyOf"][0]["$ref"].as_str()) {
            Some(name) => &schema["$defs"][name.rsplit('/').next().unwrap()]["oneOf"],
            None => &Value::Null,
        };
        let choices = choices.as_array().into_iter().flatten().map(|choice| {
            let text = choice["description"].as_str().unwrap_or_default();
            format!("`{}`: {}", choice["const"], text.trim_end_matches('.').to_owned())
        });
        let choices = choices.collect::<Vec<_>>().join("; ");
        let choices = if choices.is_empty() { choices } else { format!(" {choices}.") };
        cells.push(format!("{}{choices}", meaning.replace('\n', " ")).replace('|', "\\|"));
        if digest {
            cells.push(field["digest"].as_str().unwrap_or_default().to_owned());
        }
        text += &row(&cells);
    }
    text
}

/// The tables of keys on a page are what the types that parse them say.
fn has_the_keys(page: &str, file: &str, schema: &Value) {
    let path = root().join(page);
    let before = std::fs::read_to_string(&path).unwrap();
    let (mark, end) = (format!("<!-- keys: {file}"), "<!-- end -->");
    let mut parts = before.split(&mark);
    let mut found = parts.next().unwrap().to_owned();
    let mut tables = 0;
    for part in parts {
        let (name, rest) = part.split_once(" -->").unwrap();
        let (_, after) = rest.split_once(end).unwrap();
        found += &format!("{mark}{name} -->\n{}{end}{after}", keys(schema, name.trim()));
        tables += 1;
    }
    assert!(tables > 1, "{page} has {tables} tables of keys");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let same = std::fs::read_to_string(&path).unwrap() == found;
    assert!(
        same,
        "the keys of {page} are not those that are read: UPDATE_GOLDEN=1 writes them anew"
    );
}

#[test]
fn the_keys_of_a_corpus_are_those_that_are_read() {
    let schema = unwrapped(zdata_command(&["schema", "corpus"]));
    has_the_keys("ingest/docs/corpus.md", "corpus", &serde_json::from_str(&schema).unwrap());
}

#[cfg(feature = "train")]
#[test]
fn the_keys_of_a_curriculum_are_those_that_are_read() {
    let schema = unwrapped(ztrain_command(&["schema"]));
    has_the_keys("curricula/KEYS.md", "curriculum", &serde_json::from_str(&schema).unwrap());
}
