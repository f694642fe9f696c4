//! The heuristics of C4 (Raffel et al. 2020, 2.2): lines that do not read like sentences are removed. Pages that look
//! like code or placeholders are dropped, and so are pages with too few sentences left.
//!
//! No list of bad words is built in, since it belongs to its authors.

use super::Dropped;
use super::setting::step;
use super::words::{chars, is_space, lines, sentences, strip};

step! {
    /// C4's rules.
    C4 = "c4" version 1 {
        /// The minimum of sentences left.
        min_sentences: Option<u64> = "5",
        /// The minimum of words in a line.
        min_line_words: Option<u64> = "3",
        /// The maximum of characters in a word.
        max_word_chars: Option<u64> = "1000",
        /// Whether a line must end in `.`, `?`, `!` or a quote, and not in an ellipsis.
        ended_lines: bool = "true",
        /// Whether `[12]`, `[edit]` and `[citation needed]` are removed.
        citations: bool = "true",
        /// Whether pages with "lorem ipsum" are dropped.
        lorem_ipsum: bool = "true",
        /// Whether lines that mention Javascript are removed.
        javascript: bool = "true",
        /// Whether pages with a curly bracket are dropped.
        curly_bracket: bool = "true",
        /// Whether lines about cookies and terms of use are removed.
        policy: bool = "true",
    }
}

const POLICY: [&str; 6] = [
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
];

impl C4 {
    /// The lines that are kept, or why the page is dropped.
    pub(crate) fn change(&self, text: &str) -> Result<String, Dropped> {
        let mut kept: Vec<String> = Vec::new();
        let mut count = 0;
        for line in lines(text) {
            let Some(line) = self.line(strip(line))? else { continue };
            if self.min_sentences.is_some() {
                count += sentences(&line);
            }
            kept.push(line);
        }
        if self.min_sentences.is_some_and(|least| (count as u64) < least) {
            return Err(Dropped::new("c4: too few sentences", count));
        }
        Ok(strip(&kept.join("\n")).to_owned())
    }

    /// The line with its changes, if it is kept.
    fn line(&self, line: &str) -> Result<Option<String>, Dropped> {
        let words = || line.split(is_space).filter(|word| !word.is_empty());
        if self.max_word_chars.is_some_and(|most| words().any(|word| chars(word) as u64 > most)) {
            return Ok(None);
        }
        let kept = if self.citations { without_citations(line) } else { line.to_owned() };
        let ended = kept.ends_with(['.', '?', '!', '"', '\'']) && !kept.ends_with("...");
        if self.ended_lines && !ended {
            return Ok(None);
        }
        if self.min_line_words.is_some_and(|least| (words().count() as u64) < least) {
            return Ok(None);
        }
        let lower = kept.to_lowercase();
        if self.lorem_ipsum && lower.contains("lorem ipsum") {
            return Err(Dropped::new("c4: lorem ipsum", "the words"));
        }
        if self.javascript && lower.contains("javascript") {
            return Ok(None);
        }
        if self.curly_bracket && kept.contains('{') {
            return Err(Dropped::new("c4: curly bracket", "{"));
        }
        if self.policy && POLICY.iter().any(|phrase| lower.contains(phrase)) {
            return Ok(None);
        }
        Ok(Some(kept))
    }
}

/// Removes `[`, digits, `]` and the two other marks of an encyclopedia.
fn without_citations(line: &str) -> String {
    let mut kept = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(open) = rest.find('[') {
        let (before, from) = rest.split_at(open);
        kept += before;
        match citation(from) {
            Some(length) => rest = &from[length..],
            None => {
                kept.push('[');
                rest = &from[1..];
            }
        }
    }
    kept + rest
}

fn citation(from: &str) -> Option<usize> {
    for mark in ["[edit]", "[citation needed]"] {
        if from.starts_with(mark) {
            return Some(mark.len());
        }
    }
    let inner = &from[1..];
    let digits = inner.len() - inner.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    inner[digits..].starts_with(']').then_some(digits + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_pages_go_by_rule() {
        let rules = C4 { min_sentences: Some(2), ..C4::default() };
        let page = "Menu\n  The river[12] is long.[edit] It is deep.  \nWe use cookies on this site.\n\
                    Enable Javascript to go on.\nToo short.\nAnd then it went on...\nHe said \"no, thanks\"";
        assert_eq!(
            rules.change(page).unwrap(),
            "The river is long. It is deep.\nHe said \"no, thanks\""
        );
        let gone = |text: &str| rules.change(text).unwrap_err().reason;
        assert_eq!(gone("One two three."), "c4: too few sentences");
        assert_eq!(gone("Here is lorem Ipsum dolor."), "c4: lorem ipsum");
        assert_eq!(gone("if (a) { return a; } is code."), "c4: curly bracket");
        let long = format!("A word {} is long.", "x".repeat(1001));
        let lenient = C4 { min_sentences: None, ..C4::default() };
        assert_eq!(lenient.change(&long).unwrap(), "");
        assert_eq!(lenient.change("a [b] c [] d [1x] e f.").unwrap(), "a [b] c  d [1x] e f.");
    }
}
