//! The tables `[[prepare]]`: steps with their settings, assigned to their sources.

use contract::{Fault, Result};
use settings::{File, Spanned, Table, Value};

use super::files::Pattern;
use super::spec::{SourceSpec, StepSpec};
use crate::filters::Filter;
use crate::filters::c4::C4;
use crate::filters::clean::Clean;
use crate::filters::quality::{FineWeb, GopherQuality, Length};
use crate::filters::repetition::GopherRepetition;
use crate::filters::setting::Settings;
use crate::filters::trim::Trim;
use crate::recipe::Step;
use crate::recipe::compare::{Compare, Decontaminate, Exact, Near, Repeats, Rules};

/// The keys of every step.
const COMMON: [&str; 2] = ["step", "sources"];

/// The names of the steps.
pub(crate) const STEPS: [&str; 11] = [
    Clean::NAME,
    Length::NAME,
    GopherQuality::NAME,
    GopherRepetition::NAME,
    C4::NAME,
    FineWeb::NAME,
    Exact::NAME,
    Near::NAME,
    Decontaminate::NAME,
    Repeats::NAME,
    Trim::NAME,
];

/// The limit on steps of a corpus.
const STEPS_MAX: usize = 200;

/// Assigns each source its steps.
pub(super) fn steps(
    file: &File,
    tables: &[Spanned<Table>],
    sources: &mut [SourceSpec],
) -> Result<()> {
    for (number, table) in tables.iter().enumerate() {
        if number == STEPS_MAX {
            let fault = file.fault(table, "too many steps");
            return Err(fault.wanted(format!("at most {STEPS_MAX}")));
        }
        let settings = Settings { file, table: table.get_ref() };
        let name = settings.get("step").ok_or_else(|| {
            file.fault(table, "a step of preparation has no `step`").wanted(STEPS.join(", "))
        })?;
        let place = || file.place(table.span());
        let step = step(&settings, name).map_err(|fault| fault.or_at(place))?;
        let give = |source: &mut SourceSpec| {
            if step.compares() && source.steps.iter().any(|(_, before)| before.is_repeats()) {
                let what = format!("{} comes after repeated-substrings", file.plain(name));
                return Err(file
                    .fault(name, what)
                    .found(format!("both for source {:?}", source.name))
                    .wanted("repeated-substrings as the last step that compares documents"));
            }
            source.steps.push((number, step.clone()));
            Ok(())
        };
        let Some(chosen) = settings.get("sources") else {
            sources.iter_mut().try_for_each(give)?;
            continue;
        };
        for wanted in settings.texts("sources", chosen)? {
            let Some(source) = sources.iter_mut().find(|source| source.name == wanted) else {
                let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
                let fault = file.fault(chosen, format!("no source is called {wanted:?}"));
                return Err(fault.one_of(&wanted, names));
            };
            if source.steps.last().is_some_and(|(last, _)| *last == number) {
                return Err(file.fault(chosen, format!("source {wanted:?} is named twice")));
            }
            give(source)?;
        }
    }
    Ok(())
}

fn step(settings: &Settings<'_>, name: &Spanned<Value>) -> Result<StepSpec> {
    let written = settings.file.plain(name);
    let known = |own: &[&'static str]| {
        let known: Vec<&str> = COMMON.iter().chain(own).copied().collect();
        settings.only(&format!("the step {written}"), &known)
    };
    macro_rules! read {
        ($step:ident) => {{
            known($step::KEYS)?;
            $step::read(settings)?
        }};
    }
    let (filter, compare) = (|filter| Step::Filter(Box::new(filter)), Step::Compare);
    let step = match written {
        Clean::NAME => filter(Filter::Clean(read!(Clean))),
        Length::NAME => filter(Filter::Length(read!(Length))),
        GopherQuality::NAME => filter(Filter::GopherQuality(read!(GopherQuality))),
        GopherRepetition::NAME => filter(Filter::GopherRepetition(read!(GopherRepetition))),
        C4::NAME => filter(Filter::C4(read!(C4))),
        FineWeb::NAME => filter(Filter::FineWeb(read!(FineWeb))),
        Exact::NAME => compare(Compare::Exact(read!(Exact))),
        Near::NAME => compare(Compare::Near(read!(Near).check()?)),
        Repeats::NAME => compare(Compare::Repeats(read!(Repeats).check()?)),
        Decontaminate::NAME => {
            let own: Vec<&str> = Rules::KEYS.iter().copied().chain(["files"]).collect();
            known(&own)?;
            return decontaminate(settings);
        }
        Trim::NAME => {
            let trim = read!(Trim);
            if let Some(key) = trim.empty_marker() {
                let fault = Fault::usage(format!("`{key}` is empty")).found("\"\"");
                let at = settings.get(key).map(|value| settings.file.place(value.span()));
                return Err(fault
                    .at(at.unwrap_or_default())
                    .wanted("what begins or ends a block of reasoning, like \"<think>\""));
            }
            filter(Filter::Trim(trim))
        }
        _ => {
            let fault = settings.file.fault(name, format!("no step is called {written:?}"));
            return Err(fault.one_of(written, STEPS));
        }
    };
    Ok(StepSpec::Whole(step))
}

/// The step, and the patterns of its evaluation sets.
fn decontaminate(settings: &Settings<'_>) -> Result<StepSpec> {
    let files = settings.get("files").ok_or_else(|| {
        Fault::usage("`decontaminate` has no `files`").wanted("files = [\"eval/*.jsonl\"]")
    })?;
    let place = settings.file.place(files.span());
    let globs = settings.texts("files", files)?.into_iter();
    let patterns = globs.map(|glob| Pattern { glob, place: place.clone() }).collect();
    let rules = Rules::read(settings)?;
    Decontaminate::check(&rules)?;
    Ok(StepSpec::Decontaminate(rules, patterns))
}
