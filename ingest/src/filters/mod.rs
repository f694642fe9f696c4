//! Steps that process one text at a time: cleaning, the published quality filters, trimming.
//!
//! Invariant: the result of a filter depends only on the text and the settings. Only `trim` depends on the tokenizer
//! too, through the count it is given.

pub(crate) mod c4;
pub(crate) mod clean;
pub(crate) mod quality;
pub(crate) mod repetition;
pub(crate) mod setting;
pub(crate) mod trim;
pub(crate) mod words;

use contract::Result;

use words::Text;

/// Counts the tokens of a text, with those that are put around each document.
pub(crate) type Count<'a> = dyn Fn(&str) -> Result<usize> + Sync + 'a;

/// Why a document is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dropped {
    /// The step and the rule, under which the document is counted.
    pub(crate) reason: &'static str,
    /// What was found, for users.
    pub(crate) found: String,
}

impl Dropped {
    /// A document dropped for `reason`.
    pub(crate) fn new(reason: &'static str, found: impl ToString) -> Self {
        Dropped { reason, found: found.to_string() }
    }
}

/// What a step did to a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing was wrong.
    Kept,
    /// The document has this text now.
    Changed(String),
    /// The document is dropped.
    Dropped(Dropped),
}

setting::one_of! {
    /// One filter, with its settings.
    Filter {
        Clean(clean::Clean),
        Length(quality::Length),
        GopherQuality(quality::GopherQuality),
        GopherRepetition(repetition::GopherRepetition),
        C4(c4::C4),
        FineWeb(quality::FineWeb),
        Trim(trim::Trim),
    }
}

impl Filter {
    /// Whether it may change a text.
    pub(crate) fn changes(&self) -> bool {
        matches!(self, Filter::Clean(_) | Filter::C4(_) | Filter::Trim(_))
    }

    /// Runs the filter on a text. Without a `count`, filters that need one do nothing.
    pub(crate) fn run(&self, text: &Text<'_>, count: Option<&Count<'_>>) -> Result<Effect> {
        let judged = |dropped: Option<Dropped>| dropped.map_or(Effect::Kept, Effect::Dropped);
        Ok(match self {
            Filter::Clean(filter) => changed(filter.change(text.text), "clean: nothing left"),
            Filter::Length(filter) => judged(filter.judge(text)),
            Filter::GopherQuality(filter) => judged(filter.judge(text)),
            Filter::GopherRepetition(filter) => judged(filter.judge(text)),
            Filter::C4(filter) => match filter.change(text.text) {
                Err(dropped) => Effect::Dropped(dropped),
                Ok(kept) => changed((kept != text.text).then_some(kept), "c4: nothing left"),
            },
            Filter::FineWeb(filter) => judged(filter.judge(text)),
            Filter::Trim(filter) => match count {
                None => Effect::Kept,
                Some(count) => match filter.change(text.text, count)? {
                    Err(dropped) => Effect::Dropped(dropped),
                    Ok(kept) => changed(kept, "trim: nothing left"),
                },
            },
        })
    }
}

/// The effect of a step that returned another text, or none.
pub(crate) fn changed(text: Option<String>, emptied: &'static str) -> Effect {
    match text {
        None => Effect::Kept,
        Some(text) if text.is_empty() => Effect::Dropped(Dropped::new(emptied, 0)),
        Some(text) => Effect::Changed(text),
    }
}
