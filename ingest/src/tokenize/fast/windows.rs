//! Long words merged window by window: a model's own queue of all pairs takes thirty times as long.
//!
//! Merging repeatedly takes the pair of lowest rank, leftmost first. Restricted to a part of the word that no merge has
//! crossed so far, it does the same as merging the part alone. Let the ids of `A` end with those of `G`, the ids of `B`
//! begin with those of `H`, and `G H` merge to the ids of `G` and `H`. Then no merge of `A B` crosses from `A` to `B`:
//! take the first merge that crosses the begin of `G`, the end of `G` or the end of `H`. Until then all four parts are
//! as when merged alone, so the same merge would be taken in `A`, in `G H` or in `B`, none of which crosses there.
//! Hence the ids of `A B` are those of `A` and `B`; and the ids of a beginning that ends between two tokens are a
//! beginning of the ids. If `G H` merges otherwise, the window moves back and grows, eventually to the whole word.

use std::sync::OnceLock;

use fastokens::models::Model;

/// Longer words are merged by windows.
pub(super) const LONG: usize = 512;

/// Bytes merged at a time.
const WINDOW: usize = 64;

/// The initial symbols that a model merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symbols {
    /// Bytes, each named by a character.
    Bytes,
    /// Characters, and for those that the vocabulary lacks their bytes, named like `<0xE2>`.
    Characters,
}

impl Symbols {
    /// Appends the ids of a word.
    pub(super) fn encode(
        self,
        model: &Model,
        word: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), String> {
        match self {
            Symbols::Bytes => model.tokenize_into_fused(word, ids),
            Symbols::Characters => model.tokenize_into(word, ids),
        }
    }

    /// The number of text bytes for each token.
    fn lengths(self, model: &Model) -> Vec<u32> {
        let length = |token: &str| match self {
            Symbols::Bytes => token.chars().count(),
            Symbols::Characters if is_byte(token) => 1,
            Symbols::Characters => token.len(),
        };
        let ids = 0..model.vocab_size() as u32;
        ids.map(|id| model.id_to_token(id).map_or(0, length) as u32).collect()
    }
}

/// Whether a token has the name of a byte.
pub(super) fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| {
        digits.len() == 2 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'A'..=b'F'))
    })
}

/// The windows of one tokenizer.
pub(super) struct Windows {
    symbols: Symbols,
    /// Bytes of each token.
    lengths: OnceLock<Vec<u32>>,
}

impl Windows {
    pub(super) fn new(symbols: Symbols) -> Self {
        Windows { symbols, lengths: OnceLock::new() }
    }

    /// Appends the ids of a word that is longer than every token that merges do not produce.
    pub(super) fn merge(
        &self,
        model: &Model,
        word: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), String> {
        let lengths = self.lengths.get_or_init(|| self.symbols.lengths(model));
        let base = ids.len();
        // Byte offset and number of ids at each place that is between two tokens and two characters, from the start of
        // the word.
        let mut cuts = vec![(0, base)];
        let (mut failures, mut furthest) = (0u32, 0);
        let (mut window, mut joint, mut found) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(&(done, _)) = cuts.last() {
            if done > furthest {
                (failures, furthest) = (0, done);
            }
            let width = WINDOW.saturating_mul(1 << failures.min(40));
            let rest = word.len() - done;
            let end = if rest <= width.saturating_mul(2) {
                word.len()
            } else {
                word.floor_char_boundary(done + width)
            };
            window.clear();
            self.symbols.encode(model, &word[done..end], &mut window)?;
            let keep = if end == word.len() { end } else { end - width / 8 };
            found_cuts(word, lengths, done, &window, ids.len(), &mut found);
            let new = found.partition_point(|(at, _)| *at <= keep);
            // A single id for a whole window may come from the vocabulary instead of from merges.
            if new == 0
                || window.len() == 1
                || !self.joins(
                    model,
                    &word[..found[0].0],
                    &cuts,
                    ids,
                    &window[..found[0].1 - ids.len()],
                    &mut joint,
                )?
            {
                failures += 1;
                let left = cuts.len().saturating_sub(1 << failures.min(40)).max(1);
                cuts.truncate(left);
                ids.truncate(cuts[left - 1].1);
                continue;
            }
            let (at, length) = found[new - 1];
            ids.extend_from_slice(&window[..length - ids.len()]);
            if at == word.len() {
                return Ok(());
            }
            cuts.extend_from_slice(&found[..new]);
        }
        Err("a word came to no end".to_owned())
    }

    /// Whether merging the last part before a window together with the window's first part, which ends `word` and has
    /// the ids `right`, leaves both unchanged.
    fn joins(
        &self,
        model: &Model,
        word: &str,
        cuts: &[(usize, usize)],
        ids: &[u32],
        right: &[u32],
        joint: &mut Vec<u32>,
    ) -> Result<bool, String> {
        let [.., (before, from), (_, to)] = cuts else { return Ok(true) };
        joint.clear();
        self.symbols.encode(model, &word[*before..], joint)?;
        let left = &ids[*from..*to];
        Ok(joint.len() == left.len() + right.len()
            && joint.starts_with(left)
            && joint.ends_with(right))
    }
}

/// The places between two tokens of `window` that are also between two characters: byte offset in the word, number of
/// ids.
fn found_cuts(
    word: &str,
    lengths: &[u32],
    done: usize,
    window: &[u32],
    ids: usize,
    found: &mut Vec<(usize, usize)>,
) {
    let mut at = done;
    found.clear();
    for (index, id) in window.iter().enumerate() {
        at += lengths.get(*id as usize).map_or(0, |length| *length as usize);
        if word.is_char_boundary(at) {
            found.push((at, ids + index + 1));
        }
    }
}
