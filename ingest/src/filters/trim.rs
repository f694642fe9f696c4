//! Answer-preserving trimming: a reasoning document that exceeds the context loses reasoning, not its answer.
//!
//! A document that fits is unchanged. Otherwise as much as necessary is cut from the end of the last reasoning block,
//! right before the answer. If that is not enough, the blocks before it are removed whole, and the last one is cut
//! again. A document that is still too long is dropped.

use contract::Result;

use super::Dropped;
use super::setting::step;

step! {
    /// Answer-preserving trimming.
    Trim = "trim" version 1 {
        /// The maximum of tokens in a document, including those put before and after it.
        context: u64 = "4096",
        /// The start marker of a reasoning block.
        open: String = "<think>",
        /// The end marker of one.
        close: String = "</think>",
        /// Whether a document without such a block is kept, however long.
        keep_unmarked: bool = "false",
    }
}

impl Trim {
    /// The name of an empty marker, with which no reasoning block can be found.
    pub(crate) fn empty_marker(&self) -> Option<&'static str> {
        [("open", &self.open), ("close", &self.close)]
            .into_iter()
            .find_map(|(key, marker)| marker.is_empty().then_some(key))
    }

    /// The text that fits, if it has to change; `count` counts its tokens.
    pub(crate) fn change(
        &self,
        text: &str,
        count: &dyn Fn(&str) -> Result<usize>,
    ) -> Result<std::result::Result<Option<String>, Dropped>> {
        let tokens = count(text)?;
        if tokens as u64 <= self.context {
            return Ok(Ok(None));
        }
        let blocks = self.blocks(text);
        let Some((last, before)) = blocks.split_last() else {
            if self.keep_unmarked {
                return Ok(Ok(None));
            }
            return Ok(Err(Dropped::new("trim: longer than the context", tokens)));
        };
        let (thought, answer) = (&text[last.clone()], &text[last.end..]);
        let whole = text[..last.start].to_owned();
        for head in [whole, self.without_blocks(&text[..last.start], before)] {
            if let Some(kept) = self.cut(&head, thought, answer, count)? {
                return Ok(Ok(Some(kept)));
            }
        }
        Ok(Err(Dropped::new("trim: longer than the context without its reasoning", tokens)))
    }

    /// The ranges of reasoning, without the markers.
    fn blocks(&self, text: &str) -> Vec<std::ops::Range<usize>> {
        let (mut blocks, mut at) = (Vec::new(), 0);
        while let Some(open) = text[at..].find(&self.open) {
            let start = at + open + self.open.len();
            let Some(length) = text[start..].find(&self.close) else { break };
            blocks.push(start..start + length);
            at = start + length + self.close.len();
        }
        blocks
    }

    fn without_blocks(&self, text: &str, blocks: &[std::ops::Range<usize>]) -> String {
        let (mut kept, mut at) = (String::with_capacity(text.len()), 0);
        for block in blocks {
            kept += &text[at..block.start - self.open.len()];
            at = block.end + self.close.len();
        }
        kept + &text[at..]
    }

    /// The text with as much of the thought as fits; none if it is too long even without the thought.
    fn cut(
        &self,
        head: &str,
        thought: &str,
        answer: &str,
        count: &dyn Fn(&str) -> Result<usize>,
    ) -> Result<Option<String>> {
        let joined = |end: usize| format!("{head}{}{answer}", &thought[..end]);
        let fits = |end: usize| Ok(count(&joined(end))? as u64 <= self.context);
        if !fits(0)? {
            return Ok(None);
        }
        if fits(thought.len())? {
            return Ok(Some(joined(thought.len())));
        }
        // Invariant: `fitting` fits and `beyond` does not; the search ends when they are adjacent.
        let (mut fitting, mut beyond) = (0, thought.len());
        loop {
            let mut middle = thought.floor_char_boundary(fitting + (beyond - fitting) / 2);
            if middle == fitting {
                middle = thought.ceil_char_boundary(fitting + 1);
            }
            if middle >= beyond {
                return Ok(Some(joined(fitting)));
            }
            if fits(middle)? {
                fitting = middle;
            } else {
                beyond = middle;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trim(context: u64, text: &str) -> std::result::Result<Option<String>, Dropped> {
        // A token is a character.
        Trim { context, ..Trim::default() }.change(text, &|text| Ok(text.chars().count())).unwrap()
    }

    #[test]
    fn reasoning_goes_and_the_answer_stays() {
        let text = "Q<think>abcd</think>A\nR<think>efgh</think>B";
        let length = text.len() as u64;
        assert_eq!(trim(length, text), Ok(None));
        let kept = |context| trim(context, text).unwrap().unwrap();
        assert_eq!(kept(length - 1), "Q<think>abcd</think>A\nR<think>efg</think>B");
        assert_eq!(kept(length - 4), "Q<think>abcd</think>A\nR<think></think>B");
        // One token less: the previous block is removed whole, so the last one may fit uncut.
        assert_eq!(kept(length - 5), "QA\nR<think>efgh</think>B");
        assert_eq!(kept(20), "QA\nR<think></think>B");
        assert_eq!(
            trim(19, text).unwrap_err().reason,
            "trim: longer than the context without its reasoning"
        );
        assert_eq!(trim(2, "abc").unwrap_err().reason, "trim: longer than the context");
        assert_eq!(
            trim(2, "a<think>never closed").unwrap_err().reason,
            "trim: longer than the context"
        );
        let lenient = Trim { context: 2, keep_unmarked: true, ..Trim::default() };
        assert_eq!(lenient.change("abc", &|text| Ok(text.len())).unwrap(), Ok(None));
    }

    proptest! {
        #[test]
        fn what_is_kept_fits_and_no_more_would(
            turns in prop::collection::vec(("[a\u{e9}]{0,5}", "[b\u{4e2d}]{0,9}", "[c]{1,5}"), 1..4),
            context in 10u64..120,
        ) {
            let text: String = turns.iter().map(|(q, t, a)| format!("{q}<think>{t}</think>{a}\n")).collect();
            let length = |text: &str| text.chars().count() as u64;
            let answers: String = turns.iter().map(|(q, _, a)| format!("{q}{a}\n")).collect();
            match trim(context, &text) {
                Ok(None) => prop_assert!(length(&text) <= context),
                Err(_) => prop_assert!(length(&answers) + 15 > context),
                Ok(Some(kept)) => {
                    prop_assert!(length(&text) > context && length(&kept) <= context);
                    let (_, answer) = text.rsplit_once("</think>").unwrap();
                    let ending = ["</think>", answer].concat();
                    prop_assert!(kept.ends_with(&ending));
                    let (_, thought) = text.rsplit_once("<think>").unwrap();
                    let (_, left) = kept.rsplit_once("<think>").unwrap();
                    let (thought, left) = (thought.split("</think>").next().unwrap(), left.split("</think>").next().unwrap());
                    prop_assert!(thought.starts_with(left));
                    prop_assert!(left == thought || length(&kept) == context);
                }
            }
        }
    }
}
