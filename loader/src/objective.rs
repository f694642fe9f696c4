//! Applies the objective of a source to a row: rearranges pieces, and leaves out labels.
//!
//! A token is left out as a label by the tokens before it in its document, in reading order, even where they are in
//! another sequence. So cuts, packing, epochs and fill-in-the-middle do not move the mask, and it is the same for equal
//! text in any source and any run: the mask of a text is a function of the text alone.

use std::borrow::Cow;
use std::sync::Arc;

use contract::digest::block_sum;
use contract::{Fault, Result};
use curriculum::{Curriculum, LabelMask, Sentinel};
use mixer::{Objective, SampleSpec, Span};
use serde::Deserialize;

use crate::Stores;
use crate::assemble::{Row, Scratch};
use crate::infill::{Infill, InfillToken, Piece, sentinel_ids};
use crate::stream::SourceStream;

/// The parts of `tokenizer.json` that have names of tokens.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// The curriculum with ids in place of the names of sentinels.
pub(crate) fn resolved<'a>(
    curriculum: &'a Curriculum,
    stores: &Stores,
) -> Result<Cow<'a, Curriculum>> {
    if curriculum.sources.values().all(|spec| spec.fim.is_none()) {
        return Ok(Cow::Borrowed(curriculum));
    }
    let bytes = stores.tokenizer()?;
    let file: TokenizerFile = serde_json::from_slice(&bytes)
        .map_err(|error| Fault::data(format!("the store's tokenizer.json is damaged: {error}")))?;
    let vocab = stores.stores().first().map_or(0, |store| store.manifest().tokenizer.vocab);
    let id = |sentinel: &Sentinel| match sentinel {
        Sentinel::Id(id) if *id < vocab => Ok(*id),
        Sentinel::Id(id) => Err(Fault::usage("the tokenizer has no token with this id")
            .found(id)
            .wanted(format!("an id below {vocab}"))),
        Sentinel::Name(name) => {
            let found = file.added_tokens.iter().find(|token| token.content == *name);
            let known = || file.added_tokens.iter().map(|token| token.content.as_str());
            found.map(|token| token.id).ok_or_else(|| {
                Fault::usage("the store's tokenizer has no added token of this name")
                    .found(format!("{name:?}"))
                    .hint("build the store with such a token (`zdata tokenizer train --special`), or give an id")
                    .one_of(name, known())
            })
        }
    };
    let mut resolved = curriculum.clone();
    resolved.resolve_sentinels(id)?;
    Ok(Cow::Owned(resolved))
}

impl Row<'_> {
    /// Applies the objective of the sample's source to one span, which has been written at `at`. `markers`: whether
    /// documents of the store have a begin token, and an end token.
    pub(crate) fn apply_objective(
        &mut self,
        stream: &SourceStream,
        sample: &SampleSpec,
        span: Span,
        at: usize,
        markers: [bool; 2],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let changes = |it: &&Arc<Objective>| it.changes_text();
        let Some(objective) = sample.objective.as_ref().filter(changes) else { return Ok(()) };
        let (start, count) = (span.start, span.tokens as usize);
        let end = start + u64::from(span.tokens);
        let context = objective.mask.map_or(0, |mask| u64::from(mask.context));
        let from = start.saturating_sub(context);
        let Scratch { ids, starts } = scratch;
        starts.clear();
        stream.starts_in(from..end + 1, starts)?;
        starts.dedup();
        ids.clear();
        stream.read_ids(from..(end + 1).min(stream.tokens()), ids)?;
        let before = (start - from) as usize;
        // For each token of the span and the one after it.
        let left_out = match &objective.mask {
            Some(mask) => left_out(mask, ids, starts, from, before),
            None => vec![false; count + 1],
        };
        let first = starts.partition_point(|document| *document <= start);
        let inside = starts[first..].iter().copied().filter(|document| *document < end);
        let bounds: Vec<u64> = [start].into_iter().chain(inside).chain([end]).collect();
        let begins = |token: u64| starts.binary_search(&token).is_ok();
        let sentinels = objective.fim.as_ref().map(sentinel_ids).transpose()?.unwrap_or_default();
        for bound in bounds.windows(2) {
            let tokens = bound[0]..bound[1];
            let ends = [begins(tokens.start), begins(tokens.end) || tokens.end == stream.tokens()];
            let (here, length) =
                ((tokens.start - start) as usize, (tokens.end - tokens.start) as usize);
            let place = at + here..at + here + length;
            let left_out = &left_out[here..];
            let Some(infill) = Infill::of(sample, markers, &Piece { tokens, ends }) else {
                let labels = self.labels[place.clone()].iter_mut().zip(&mut self.mask[place]);
                for ((label, mask), left_out) in labels.zip(&left_out[1..]) {
                    if *left_out {
                        (*label, *mask) = (0, 0);
                    }
                }
                continue;
            };
            let ids = &ids[before + here..];
            for (place, token) in place.clone().zip(infill.places()) {
                let (id, is_label) = match token {
                    InfillToken::Text(token) => (ids[token as usize], !left_out[token as usize]),
                    InfillToken::Sentinel(number) => (sentinels[number], true),
                };
                self.tokens[place] = id;
                if place > at + here {
                    let label = if is_label { (id, 1) } else { (0, 0) };
                    (self.labels[place - 1], self.mask[place - 1]) = label;
                }
            }
            // What follows the middle in the document is not what follows the piece.
            (self.labels[place.end - 1], self.mask[place.end - 1]) = (0, 0);
        }
        Ok(())
    }
}

/// Which of the tokens from number `before` of `ids` on are no labels, and `false` past the end of the text. `ids`
/// begin with token `from` of the stream, `starts` are its documents.
fn left_out(mask: &LabelMask, ids: &[i32], starts: &[u64], from: u64, before: usize) -> Vec<bool> {
    let LabelMask { every, context } = *mask;
    let context = context as usize;
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let mut starts = starts.iter().map(|start| (start - from) as usize).peekable();
    // A document that began before has at least `context` tokens before the span.
    let mut document = 0;
    let mut found = Vec::with_capacity(ids.len() + 1 - before);
    for token in 0..ids.len() {
        if let Some(start) = starts.next_if_eq(&token) {
            document = start;
        }
        if token < before {
            continue;
        }
        found.push(
            token >= document + context && {
                let hash = block_sum(&bytes[4 * (token - context)..4 * token]);
                u128::from(hash) * u128::from(every) < 1 << 64
            },
        );
    }
    found.push(false);
    found
}
