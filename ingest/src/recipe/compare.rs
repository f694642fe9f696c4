//! Settings of the steps that compare a document with others, or with evaluation sets. The steps are implemented in
//! `dedup`.

use contract::{Fault, Identity, Ratio, Result};

use super::mapping::Template;
use crate::filters::setting::{Setting as _, one_of, step};
use crate::source::SourceFile;

one_of! {
    /// A comparing step with its settings.
    Compare {
        Exact(Exact),
        Near(Near),
        Decontaminate(Decontaminate),
        Repeats(Repeats),
    }
}

impl Compare {
    /// Whether it may change a text; the build then does so, as the scan has decided.
    pub(crate) fn changes(&self) -> bool {
        matches!(self, Compare::Repeats(_))
    }
}

step! {
    /// Exact duplicates.
    Exact = "exact-duplicates" version 1 {
        /// Whether documents of different sources are compared.
        across: bool = "true",
    }
}

step! {
    /// Near duplicates.
    Near = "near-duplicates" version 2 {
        /// Words in a run.
        words: u64 = "5",
        /// Bands.
        bands: u64 = "14",
        /// Values in a band.
        rows: u64 = "8",
        /// The seed of the hash functions.
        seed: u64 = "1",
        /// Whether documents of different sources are compared.
        across: bool = "true",
    }
}

impl Near {
    /// Refuses settings with which nothing can be found.
    pub(crate) fn check(self) -> Result<Self> {
        let positive = self.words > 0 && self.bands > 0 && self.rows > 0;
        let small = self.words <= 1000 && self.bands.saturating_mul(self.rows) <= 4096;
        if positive && small {
            return Ok(self);
        }
        Err(Fault::usage("near duplicates cannot be found like this").wanted(
            "words from 1 to 1000, and bands and rows above zero with a product of at most 4096",
        ))
    }
}

step! {
    /// Repeated substrings.
    Repeats = "repeated-substrings" version 1 {
        /// The minimum of bytes in a run that is removed if it repeats.
        min_bytes: u64 = "500",
        /// The minimum share of removed pieces in a range for which the gaps are removed too.
        bookend: Option<Ratio> = "4/5",
        /// Bytes of text that are compared with each other at a time.
        partition_bytes: u64 = "268435456",
        /// Whether documents of different sources are compared.
        across: bool = "true",
    }
}

impl Repeats {
    /// Refuses settings with which nothing can be found.
    pub(crate) fn check(self) -> Result<Self> {
        let runs = (1..=1 << 20).contains(&self.min_bytes);
        let partition = (self.min_bytes..1 << 30).contains(&self.partition_bytes);
        if runs && partition {
            return Ok(self);
        }
        Err(Fault::usage("repeated substrings cannot be found like this")
            .wanted("min_bytes from 1 to 1048576, partition_bytes from that to 1073741823"))
    }
}

step! {
    /// The rules for a match.
    Rules = "decontaminate" version 1 {
        /// Words in a run.
        words: u64 = "13",
        /// The minimum of runs that a removed document shares with one item.
        min_runs: u64 = "1",
        /// Whether numbers are compared; if not, any number equals any other, so an item is found with other values in
        /// it.
        numbers: bool = "true",
        /// The text of an item.
        template: String = "{text}",
    }
}

/// Decontamination against some files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decontaminate {
    pub(crate) rules: Rules,
    /// The files, sorted, with their identities when the corpus was read.
    pub(crate) files: Vec<(SourceFile, Identity)>,
}

impl Decontaminate {
    pub(crate) const NAME: &'static str = Rules::NAME;

    /// Refuses rules that match nothing or everything.
    pub(crate) fn check(rules: &Rules) -> Result<()> {
        if rules.words == 0 || rules.words > 1000 || rules.min_runs == 0 {
            return Err(Fault::usage("this finds nothing or everything")
                .found(format!("words = {}, min_runs = {}", rules.words, rules.min_runs))
                .wanted("words from 1 to 1000, min_runs above zero"));
        }
        Template::parse(&rules.template).map_err(|why| {
            Fault::usage(format!("`template` is not a template: {why}"))
                .found(rules.template.show())
                .wanted("text with fields in it, like \"{question} {answer}\"")
        })?;
        Ok(())
    }

    /// The step as canonical text: the content of the sets, not their paths.
    pub(crate) fn describe(&self) -> String {
        let sets: String = self.files.iter().map(|(_, identity)| format!(" {identity}")).collect();
        format!("{} sets=[{}]", self.rules.describe(), sets.trim_start())
    }
}
