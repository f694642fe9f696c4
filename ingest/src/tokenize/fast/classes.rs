//! Consecutive splits that depend only on character classes, done without regular expressions.
//!
//! DeepSeek's older tokenizers cut a text in six steps, each of which cuts the pieces of the previous one. With regular
//! expressions these are six searches per word. But each has one of five forms: a character of a class, a run of such
//! characters, such a run with one space before it, the space at a piece's end, or digits. Here each character is
//! looked up once, in a table of its classes, and the steps use the result.
//!
//! Guarantee: the same pieces. A search for `[class]+` starts at the first character of the class and takes all that
//! follow; `\s?` before it takes the previous character if that is a space outside earlier matches. The expression
//! `\s+$` finds the space at a piece's end; it would also match at a line end inside a piece, so it is accepted only
//! after a step that cuts at every `\n`. Tested by `splits_of_classes_have_the_ids_of_the_reference` on every
//! character, and by `splits_in_a_row_have_the_ids_of_the_reference` on random texts.

use std::ops::Range;

use fastokens::pre_tokenized::{PreTokenizedString, Split};
use serde_json::Value;

/// Bit in the table: the character is a space.
const SPACE: u8 = 1 << 7;

/// The limit on classes, which share a byte with [`SPACE`].
const CLASSES_MAX: usize = 7;

/// What a step makes into a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Each character of the class.
    One,
    /// Each run of them.
    Run,
    /// Each run of them, with one space before it.
    Spaced,
    /// The space at the end; its class is [`SPACE`].
    Trailing,
}

/// A step, with the bit of its class in the table.
struct Step {
    form: Form,
    bit: u8,
}

/// Steps over classes of characters.
pub(super) struct Classes {
    steps: Vec<Step>,
    /// For each character the classes that it is in.
    table: Vec<u8>,
}

impl Classes {
    /// For these steps of a pre-tokenizer, if each has one of the forms.
    pub(super) fn new(steps: &[Value]) -> Option<Classes> {
        if steps.len() > CLASSES_MAX {
            return None;
        }
        let mut found = Classes { steps: Vec::new(), table: vec![0; char::MAX as usize + 1] };
        for c in ('\0'..=char::MAX).filter(|c| c.is_whitespace()) {
            found.table[c as usize] = SPACE;
        }
        for (number, step) in steps.iter().enumerate() {
            let bit = 1 << number;
            let form = match step["type"].as_str()? {
                "Digits" => {
                    for c in ('\0'..=char::MAX).filter(|c| c.is_numeric()) {
                        found.table[c as usize] |= bit;
                    }
                    if step["individual_digits"] == true { Form::One } else { Form::Run }
                }
                "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
                    found.expression(step.pointer("/pattern/Regex")?.as_str()?, bit)?
                }
                _ => return None,
            };
            let bit = if form == Form::Trailing { SPACE } else { bit };
            found.steps.push(Step { form, bit });
        }
        Some(found)
    }

    /// The form of an expression; its class is added to the table as `bit`.
    fn expression(&mut self, expression: &str, bit: u8) -> Option<Form> {
        if expression == r"\s+$" {
            let lines = self.table['\n' as usize];
            let cut = self.steps.iter().any(|step| step.form == Form::One && lines & step.bit != 0);
            return cut.then_some(Form::Trailing);
        }
        let (form, class) = match (expression.strip_prefix(r"\s?"), expression.strip_suffix('+')) {
            (Some(run), Some(_)) => (Form::Spaced, run.strip_suffix('+')?),
            (None, Some(class)) => (Form::Run, class),
            (None, None) => (Form::One, expression),
            (Some(_), None) => return None,
        };
        for range in ranges(class)? {
            self.table[range].iter_mut().for_each(|classes| *classes |= bit);
        }
        Some(form)
    }

    /// Cuts the pieces of a text into those of all steps.
    pub(super) fn pre_tokenize(&self, pieces: &mut PreTokenizedString) {
        let text = pieces.buffer();
        let mut cuts =
            Cuts { steps: &self.steps, text, classes: self.look_up(text), found: Vec::new() };
        cuts.found.reserve(text.len() / 4);
        for piece in pieces.splits() {
            match piece.token_id {
                Some(_) => cuts.found.push(piece.clone()),
                None => cuts.piece(0, piece.range.clone()),
            }
        }
        let found = cuts.found;
        pieces.refine_splits(found);
    }

    /// For each byte, the classes of its character.
    fn look_up(&self, text: &str) -> Vec<u8> {
        let mut classes = Vec::with_capacity(text.len());
        let mut rest = text;
        loop {
            let ascii = rest.bytes().position(|byte| !byte.is_ascii()).unwrap_or(rest.len());
            classes.extend(rest.as_bytes()[..ascii].iter().map(|byte| self.table[*byte as usize]));
            rest = &rest[ascii..];
            let Some(c) = rest.chars().next() else { return classes };
            classes.resize(classes.len() + c.len_utf8(), self.table[c as usize]);
            rest = &rest[c.len_utf8()..];
        }
    }
}

/// The characters of a bracket class that consists only of characters and ranges.
fn ranges(class: &str) -> Option<Vec<Range<usize>>> {
    let class = class.strip_prefix('[')?.strip_suffix(']')?;
    if class.is_empty() || class.contains(['\\', '[', ']', '^', '&']) {
        return None;
    }
    let (mut found, mut chars) = (Vec::new(), class.chars().peekable());
    while let Some(first) = chars.next() {
        let last = if chars.next_if_eq(&'-').is_some() { chars.next()? } else { first };
        if first == '-' || last == '-' || last < first {
            return None;
        }
        found.push(first as usize..last as usize + 1);
    }
    Some(found)
}

/// The pieces found in one text.
struct Cuts<'a> {
    steps: &'a [Step],
    text: &'a str,
    classes: Vec<u8>,
    found: Vec<Split>,
}

impl Cuts<'_> {
    /// Runs a piece through the steps from `step` on.
    fn piece(&mut self, step: usize, piece: Range<usize>) {
        if piece.is_empty() {
            return;
        }
        let any = self.classes[piece.clone()].iter().fold(0, |any, classes| any | classes);
        // A step leaves a piece whole if no character is in its class.
        let wanted = |step: &Step| any & step.bit != 0;
        let Some(ahead) = self.steps[step..].iter().position(wanted) else {
            self.found.push(Split { range: piece, token_id: None });
            return;
        };
        let step = step + ahead;
        let mut start = piece.start;
        while let Some(found) = self.search(&self.steps[step], start..piece.end) {
            if found == piece {
                break;
            }
            self.piece(step + 1, start..found.start);
            start = found.end;
            self.piece(step + 1, found);
        }
        self.piece(step + 1, start..piece.end);
    }

    /// The first match of a step.
    fn search(&self, step: &Step, piece: Range<usize>) -> Option<Range<usize>> {
        let classes = &self.classes[piece.clone()];
        let inside = |classes: &u8| classes & step.bit != 0;
        if step.form == Form::Trailing {
            let outside = classes.iter().rposition(|classes| !inside(classes));
            let start = piece.start + outside.map_or(0, |last| last + 1);
            return (start < piece.end).then_some(start..piece.end);
        }
        let first = classes.iter().position(inside)?;
        let run = classes[first..].iter().position(|classes| !inside(classes));
        let (mut start, mut end) =
            (piece.start + first, run.map_or(piece.end, |run| piece.start + first + run));
        if step.form == Form::One {
            end = start + self.text[start..].chars().next().map_or(1, char::len_utf8);
        }
        if step.form == Form::Spaced && first > 0 && classes[first - 1] & SPACE != 0 {
            start -= self.text[..start].chars().next_back().map_or(0, char::len_utf8);
        }
        Some(start..end)
    }
}
