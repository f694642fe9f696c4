//! `[[prepare]]` and the mapping keys of a `[[source]]`: the tables of `corpus.toml` that become recipes.

use std::path::Path;

use contract::{Fault, Result, fault};

use super::compare::{Compare, Decontaminate, Exact, Near, Rules};
use super::mapping::{Mapping, Template};
use super::{Recipe, Step};
use crate::corpus::{Keys, SourceFile};
use crate::files;
use crate::filters::Filter;
use crate::filters::c4::C4;
use crate::filters::clean::Clean;
use crate::filters::quality::{FineWeb, GopherQuality, Length};
use crate::filters::repetition::GopherRepetition;
use crate::filters::trim::Trim;
use crate::source::{Fields, Format};

/// What a message of a chat becomes, unless `message` says otherwise.
const MESSAGE: &str = "<|{role}|>\n{content}\n";

/// The keys of every step.
const COMMON: [&str; 2] = ["step", "sources"];

/// The names of the steps.
pub(crate) const STEPS: [&str; 10] = [
    "clean",
    "length",
    "gopher-quality",
    "gopher-repetition",
    "c4",
    "fineweb",
    "exact-duplicates",
    "near-duplicates",
    "decontaminate",
    "trim",
];

/// Steps of a corpus, at most.
const STEPS_MAX: usize = 200;

/// Reads how the records of a source become texts.
pub(crate) fn mapping(keys: &Keys<'_>, formats: &[Format]) -> Result<Option<Mapping>> {
    let template = |key: &str, written: String, place: String| {
        Template::parse(&written).map_err(|why| {
            Fault::usage(format!("`{key}` is no template: {why}"))
                .at(place)
                .found(format!("{written:?}"))
                .wanted("text with fields in it, like \"Question: {question}\\nAnswer: {answer}\"")
        })
    };
    let message = keys.text("message")?;
    let (mapping, place, key) = match (keys.text("template")?, keys.text("chat")?) {
        (None, None) => match message {
            None => return Ok(None),
            Some((_, place)) => {
                return Err(Fault::usage("`message` needs a chat")
                    .at(place)
                    .wanted("chat = \"messages\""));
            }
        },
        (Some(_), Some((_, place))) => {
            return Err(Fault::usage("`template` and `chat` exclude each other").at(place));
        }
        (Some((written, place)), None) => {
            (Mapping::Template(template("template", written, place.clone())?), place, "template")
        }
        (None, Some((path, place))) => {
            let (written, at) = message.unwrap_or_else(|| (MESSAGE.to_owned(), place.clone()));
            let message = template("message", written, at)?;
            (Mapping::Chat { path, message }, place, "chat")
        }
    };
    if let Some((_, place)) = keys.text("text")? {
        return Err(Fault::usage(format!("`text` and `{key}` exclude each other")).at(place));
    }
    let records = |format: &&Format| **format == Format::Text;
    if let Some(format) = formats.iter().find(records) {
        return Err(Fault::usage(format!("`{key}` needs records, and a text has none"))
            .at(place)
            .found(format!("a file of format {}", format.name()))
            .hint("write records: JSON Lines, Parquet or Arrow"));
    }
    Ok(Some(mapping))
}

/// What the reader of files is asked for.
pub(crate) fn fields(mapping: &Option<Mapping>, text: String, id: Option<String>) -> Fields {
    let text = mapping.as_ref().map_or(text, |mapping| Fields::record(mapping.roots()));
    Fields { text, id }
}

/// Reads the `[[prepare]]` tables and gives each source its steps.
pub(crate) fn steps(
    root: &Keys<'_>,
    folder: &Path,
    sources: &mut [(String, &mut Recipe)],
) -> Result<()> {
    for (number, (table, place)) in root.tables("prepare")?.into_iter().enumerate() {
        if number == STEPS_MAX {
            return Err(Fault::usage("too many steps").at(place).wanted(format!("{STEPS_MAX}")));
        }
        let keys = Keys::open(root, table);
        let name = keys.text("step")?.ok_or_else(|| {
            Fault::usage("a step of preparation has no `step`")
                .at(place.clone())
                .wanted(STEPS.join(", "))
        })?;
        let step = step(&keys, name, folder).map_err(|fault| fault.or_at(|| place.clone()))?;
        let Some(chosen) = keys.texts("sources")? else {
            for (_, recipe) in sources.iter_mut() {
                recipe.steps.push((number, step.clone()));
            }
            continue;
        };
        for (wanted, place) in chosen {
            let names: Vec<String> = sources.iter().map(|(name, _)| name.clone()).collect();
            let Some((_, recipe)) = sources.iter_mut().find(|(name, _)| *name == wanted) else {
                let refused = Fault::usage(format!("there is no source {wanted:?}")).at(place);
                return Err(match fault::nearest(&wanted, names.iter().map(String::as_str)) {
                    Some(near) => refused.hint(format!("did you mean {near:?}?")),
                    None => refused.wanted(names.join(", ")),
                });
            };
            if recipe.steps.last().is_some_and(|(last, _)| *last == number) {
                return Err(Fault::usage(format!("source {wanted:?} is named twice")).at(place));
            }
            recipe.steps.push((number, step.clone()));
        }
    }
    Ok(())
}

fn step(keys: &Keys<'_>, (name, place): (String, String), folder: &Path) -> Result<Step> {
    let known = |own: &[&'static str]| {
        let known: Vec<&str> = COMMON.iter().chain(own).copied().collect();
        keys.only(&format!("the step {name}"), &known)
    };
    Ok(match name.as_str() {
        "clean" => {
            known(Clean::KEYS)?;
            Step::Filter(Filter::Clean(Clean::read(keys)?))
        }
        "length" => {
            known(Length::KEYS)?;
            Step::Filter(Filter::Length(Length::read(keys)?))
        }
        "gopher-quality" => {
            known(GopherQuality::KEYS)?;
            Step::Filter(Filter::GopherQuality(GopherQuality::read(keys)?))
        }
        "gopher-repetition" => {
            known(GopherRepetition::KEYS)?;
            Step::Filter(Filter::GopherRepetition(GopherRepetition::read(keys)?))
        }
        "c4" => {
            known(C4::KEYS)?;
            Step::Filter(Filter::C4(C4::read(keys)?))
        }
        "fineweb" => {
            known(FineWeb::KEYS)?;
            Step::Filter(Filter::FineWeb(FineWeb::read(keys)?))
        }
        "exact-duplicates" => {
            known(Exact::KEYS)?;
            Step::Compare(Compare::Exact(Exact::read(keys)?))
        }
        "near-duplicates" => {
            known(Near::KEYS)?;
            let near = Near::read(keys)?;
            near.check().map_err(|wanted| {
                Fault::usage("near duplicates cannot be found like this").wanted(wanted)
            })?;
            Step::Compare(Compare::Near(near))
        }
        "decontaminate" => {
            let own: Vec<&str> = Rules::KEYS.iter().copied().chain(["files"]).collect();
            known(&own)?;
            Step::Compare(Compare::Decontaminate(decontaminate(keys, folder)?))
        }
        "trim" => {
            known(Trim::KEYS)?;
            let trim = Trim::read(keys)?;
            if let Some(key) = trim.empty_marker() {
                let place = keys.text(key)?.map_or(place, |(_, place)| place);
                return Err(Fault::usage(format!("`{key}` is empty"))
                    .at(place)
                    .found("\"\"")
                    .wanted("what begins or ends a block of reasoning, like \"<think>\""));
            }
            Step::Filter(Filter::Trim(trim))
        }
        _ => {
            let refused = Fault::usage(format!("there is no step {name:?}")).at(place);
            return Err(match fault::nearest(&name, STEPS) {
                Some(near) => refused.hint(format!("did you mean {near:?}?")),
                None => refused.wanted(STEPS.join(", ")),
            });
        }
    })
}

/// The step and its evaluation sets.
fn decontaminate(keys: &Keys<'_>, folder: &Path) -> Result<Decontaminate> {
    let patterns = keys.texts("files")?.ok_or_else(|| {
        Fault::usage("`decontaminate` has no `files`").wanted("files = [\"eval/*.jsonl\"]")
    })?;
    let file = |found: files::Found| SourceFile {
        path: found.path,
        shown: found.shown,
        format: Format::JsonLines,
    };
    let found = files::find(folder, &patterns)?;
    Decontaminate::new(Rules::read(keys)?, found.into_iter().map(file).collect())
}
