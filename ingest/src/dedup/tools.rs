//! What steps need apart from the text, made once for a corpus.

use std::collections::BTreeMap;

use contract::{Fault, Result};

use super::decontaminate::Index;
use super::minhash::Functions;
use crate::corpus::Corpus;
use crate::recipe::Step;
use crate::recipe::compare::Compare;
use crate::recipe::run::CountIn;

/// What the steps of a corpus need.
pub(crate) struct Tools<'a> {
    count: Option<Box<CountIn<'a>>>,
    indexes: BTreeMap<usize, Index>,
    functions: BTreeMap<usize, Functions>,
}

impl<'a> Tools<'a> {
    /// Makes what the steps of `corpus` need. Without `count`, steps that count tokens do nothing.
    pub(crate) fn new(corpus: &Corpus, count: Option<Box<CountIn<'a>>>) -> Result<Self> {
        let mut tools = Tools { count, indexes: BTreeMap::new(), functions: BTreeMap::new() };
        for (number, step) in corpus.sources.iter().flat_map(|source| &source.recipe.steps) {
            match step {
                Step::Compare(Compare::Near(near)) => {
                    tools.functions.entry(*number).or_insert_with(|| Functions::new(near));
                }
                Step::Compare(Compare::Decontaminate(step))
                    if !tools.indexes.contains_key(number) =>
                {
                    tools.indexes.insert(*number, Index::read(step)?);
                }
                _ => {}
            }
        }
        Ok(tools)
    }

    /// The token counter.
    pub(crate) fn count(&self) -> Option<&CountIn<'a>> {
        self.count.as_deref()
    }

    /// The evaluation sets of a step.
    pub(crate) fn index(&self, number: usize) -> Result<&Index> {
        self.indexes.get(&number).ok_or_else(|| Fault::bug("a step without its sets"))
    }

    /// The random functions of a step.
    pub(crate) fn functions(&self, number: usize) -> Result<&Functions> {
        self.functions.get(&number).ok_or_else(|| Fault::bug("a step without its functions"))
    }

    /// Notes about evaluation items that are too short to be found.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        let short = self.indexes.values().map(|index| index.short).filter(|(short, _)| *short > 0);
        short.map(|(short, all)| {
            format!("{short} of {all} evaluation items are shorter than a run of words and cannot be found")
        })
    }
}
