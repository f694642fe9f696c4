//! Groups files into sources, and makes patterns that match exactly these files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use contract::{Class, Result};

use super::layout::{self, Layout, Records, Text};
use super::model::Model;
use super::sampled::Ratios;
use super::seen::{Input, Seen};
use crate::corpus::{bracketed, check_name};
use crate::source::{self, Fields, Format, Limits, TextAt};

/// This many folders whose names differ only in numbers become one source.
const NUMBERED: usize = 3;

/// Files that become one source.
pub(super) struct Group {
    pub(super) name: String,
    pub(super) format: Format,
    pub(super) globs: Vec<String>,
    pub(super) layout: Layout,
    pub(super) files: u64,
    /// The estimated size of its text.
    pub(super) bytes: u64,
}

/// The files of one place and format with the same layout.
struct Found {
    layout: Layout,
    files: Vec<Input>,
    bytes: u64,
}

/// The sources made from the files of a folder, and notes about the other files.
pub(super) fn groups(folder: &Path, seen: Seen) -> Result<(Vec<Group>, Vec<String>)> {
    let Seen { files, mut passed_over, names, closed } = seen;
    let tops = Tops::of(&files);
    let mut places: BTreeMap<(String, Format), Vec<Input>> = BTreeMap::new();
    for file in files {
        let format = file.parts.last().and_then(|name| Format::guess(Path::new(name)));
        if let Some(format) = format {
            places.entry((tops.place(&file.parts), format)).or_default().push(file);
        }
    }
    let mut groups: Vec<Group> = Vec::new();
    let (model, mut ratios) = (Model::of(folder), Ratios::default());
    for ((place, format), files) in places {
        for found in judged(files, format, model.as_ref(), &mut ratios, &mut passed_over)? {
            let name = free_name(&tops.name(folder, &place), format, &groups);
            groups.push(Group {
                name,
                format,
                globs: globs(&found.files, &names, &closed, &tops),
                layout: found.layout,
                files: found.files.len() as u64,
                bytes: found.bytes,
            });
        }
    }
    Ok((groups, passed_over))
}

/// Groups the files of a place by the layout of their records, one by one, so that an odd file does not affect the
/// others.
fn judged(
    files: Vec<Input>,
    format: Format,
    model: Option<&Model>,
    ratios: &mut Ratios,
    passed_over: &mut Vec<String>,
) -> Result<Vec<Found>> {
    let mut all: Vec<Found> = Vec::new();
    for file in files {
        let mut pass_over =
            |why: &str| passed_over.push(format!("{} ({why})", file.parts.join("/")));
        let name = file.parts.last().map_or("", String::as_str);
        let sample = match ratios.sample(&file.path, ending(name), format, file.bytes) {
            Err(fault) if fault.class() == Class::Data => {
                pass_over(fault.what());
                continue;
            }
            sample => sample?,
        };
        if format != Format::Text && sample.records.is_empty() {
            pass_over("no record that is a JSON object among its first ones");
            continue;
        }
        let known = all.iter().position(|found| fits(found, &sample.records, &file.path, format));
        let number = match known {
            Some(number) => number,
            None => match layout(&sample.records, &file.path, format, model) {
                Some(layout) => {
                    all.push(Found { layout, files: Vec::new(), bytes: 0 });
                    all.len() - 1
                }
                None => {
                    pass_over("no field of its first records holds text");
                    continue;
                }
            },
        };
        let found = &mut all[number];
        let (text, of) = match found.layout.text {
            Text::File => (1, 1),
            _ => found.layout.text.share(&sample.records),
        };
        let bytes = u128::from(sample.bytes) * u128::from(text) / u128::from(of.max(1));
        found.bytes = found.bytes.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
        found.files.push(file);
    }
    Ok(all)
}

/// Whether a build would accept the records of a file with this layout.
fn fits(found: &Found, records: &Records, path: &Path, format: Format) -> bool {
    match &found.layout.text {
        Text::File => true,
        text => text.fits(records) && opens(path, format, text, found.layout.id.as_deref()),
    }
}

/// Whether a file can be opened for these fields: a columnar one must have columns of the right types.
fn opens(path: &Path, format: Format, text: &Text, id: Option<&str>) -> bool {
    let text = match text {
        Text::At(path) => TextAt::Path(path.clone()),
        _ => TextAt::Record(Vec::new()),
    };
    let fields = Fields { text, id: id.map(str::to_owned), keep: Vec::new() };
    format.is_stream() || source::open(path, format, &fields, &Limits::default()).is_ok()
}

/// The layout of a file's records.
fn layout(records: &Records, path: &Path, format: Format, model: Option<&Model>) -> Option<Layout> {
    if format == Format::Text {
        let why = "each file is one document".to_owned();
        return Some(Layout { text: Text::File, id: None, why });
    }
    let holds_text = |name: &str| opens(path, format, &Text::At(name.to_owned()), None);
    let (text, why) = layout::text(records, model, holds_text)?;
    let id = layout::id(records, |id| opens(path, format, &text, Some(id)));
    Some(Layout { text, id, why })
}

/// The top-level folders, and which of them are merged.
struct Tops {
    /// The shapes of names that several folders share.
    numbered: BTreeSet<String>,
}

impl Tops {
    fn of(files: &[Input]) -> Self {
        let mut shapes: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for top in files.iter().filter_map(|file| top(&file.parts)) {
            shapes.entry(shape(top)).or_default().insert(top);
        }
        let several = |(shape, tops): (String, BTreeSet<&str>)| {
            (shape.contains('#') && tops.len() >= NUMBERED).then_some(shape)
        };
        Tops { numbered: shapes.into_iter().filter_map(several).collect() }
    }

    /// The key of a source's folder: its name, or its shape if several folders share it. Empty for files at the top.
    fn place(&self, parts: &[String]) -> String {
        let Some(top) = top(parts) else { return String::new() };
        let shape = shape(top);
        if self.numbered.contains(&shape) { shape } else { top.to_owned() }
    }

    /// The name of a source from this place.
    fn name(&self, folder: &Path, place: &str) -> String {
        let own = || folder.canonicalize().ok()?.file_name()?.to_str().map(str::to_owned);
        let plain = match self.numbered.contains(place) {
            true => place.replace('#', "").trim_matches(['-', '_', '.', ' ']).to_owned(),
            false => place.to_owned(),
        };
        // Such a name is not informative: a data set is named after its folder.
        let says_nothing = ["data", "train", "default"].contains(&plain.as_str());
        let whole =
            if plain.is_empty() && !place.is_empty() || says_nothing { own() } else { None };
        named(&whole.unwrap_or(plain))
    }

    /// The pattern for the top-level folder of a file.
    fn pattern(&self, parts: &[String]) -> String {
        let top = top(parts).unwrap_or_default();
        let digit = |c: char| if c.is_ascii_digit() { "[0-9]".to_owned() } else { c.to_string() };
        match self.numbered.contains(&shape(top)) {
            true => bracketed(top).chars().map(digit).collect(),
            false => bracketed(top),
        }
    }
}

/// The top-level folder of a file, if it is in one.
fn top(parts: &[String]) -> Option<&str> {
    parts.first().filter(|_| parts.len() > 1).map(String::as_str)
}

/// A name with its numbers replaced by wildcards.
fn shape(name: &str) -> String {
    let mut shape = String::new();
    for letter in name.chars() {
        match letter.is_ascii_digit() {
            true if shape.ends_with('#') => {}
            true => shape.push('#'),
            false => shape.push(letter),
        }
    }
    shape
}

/// Patterns that match exactly these files, preferably one for a top-level folder, otherwise one per folder, otherwise
/// one per file.
fn globs(
    files: &[Input],
    names: &[Vec<String>],
    closed: &[Vec<String>],
    tops: &Tops,
) -> Vec<String> {
    let mine: BTreeSet<&[String]> = files.iter().map(|file| &*file.parts).collect();
    let mut globs = BTreeSet::new();
    let endings: BTreeSet<&str> = mine.iter().map(|parts| ending(last(parts))).collect();
    for ending in endings {
        // For each top-level folder: whether a pattern would match only these files, and whether all are directly in
        // it.
        let (mut below, mut beside) = (BTreeMap::new(), BTreeMap::new());
        for parts in names.iter().filter(|parts| last(parts).ends_with(ending)) {
            let is_mine = mine.contains(&**parts);
            let (only, flat) = below.entry(tops.pattern(parts)).or_insert((true, true));
            *only &= is_mine;
            *flat &= parts.len() <= 2;
            *beside.entry(folder(parts)).or_insert(true) &= is_mine;
        }
        for parts in mine.iter().filter(|parts| self::ending(last(parts)) == ending) {
            let top = tops.pattern(parts);
            let (only, flat) = below.get(&top).copied().unwrap_or_default();
            let leads_on = closed.iter().any(|it| it.len() > 1 && tops.pattern(it) == top);
            let whole = only && (flat || !leads_on);
            let within: String = folder(parts).iter().map(|part| bracketed(part) + "/").collect();
            globs.insert(match folder(parts) {
                [] if whole => format!("*{ending}"),
                [_, ..] if whole && flat => format!("{top}/*{ending}"),
                [_, ..] if whole => format!("{top}/**/*{ending}"),
                parent if beside.get(parent) == Some(&true) => format!("{within}*{ending}"),
                _ => within + &bracketed(last(parts)),
            });
        }
    }
    globs.into_iter().collect()
}

fn folder(parts: &[String]) -> &[String] {
    &parts[..parts.len().saturating_sub(1)]
}

fn last(parts: &[String]) -> &str {
    parts.last().map_or("", String::as_str)
}

/// A name that no group has, ignoring case: `plain` itself, with its format, or with a number.
fn free_name(plain: &str, format: Format, groups: &[Group]) -> String {
    let formatted = format!("{plain}-{}", format.name());
    let numbered = (2..=groups.len() + 2).map(|number| format!("{plain}-{number}"));
    let names = [plain.to_owned(), formatted].into_iter().chain(numbered);
    let mut free =
        names.filter(|name| !groups.iter().any(|group| group.name.eq_ignore_ascii_case(name)));
    // There are more candidates than groups, so one is free.
    free.next().unwrap_or_default()
}

/// The extension of a name, including that of a compression.
fn ending(name: &str) -> &str {
    let packed = [".gz", ".zst"].into_iter().find(|packed| name.to_lowercase().ends_with(packed));
    let plain = packed.map_or(name, |packed| &name[..name.len() - packed.len()]);
    &name[plain.rfind('.').unwrap_or(plain.len())..]
}

/// The name of a source whose files are in `top`.
fn named(top: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = top.chars().map(fits).collect();
    // Commands would take a leading dash for an option.
    let name = name.trim_start_matches('-');
    if check_name(name, "").is_ok() { name.to_owned() } else { "text".to_owned() }
}
