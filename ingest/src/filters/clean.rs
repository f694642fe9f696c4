//! Normalizes a text: Unicode normal form, line ends, invisible characters.

use unicode_normalization::{IsNormalized, UnicodeNormalization as _, is_nfc_quick, is_nfkc_quick};

use super::setting::{Setting, step};

/// A Unicode normal form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Composed.
    Nfc,
    /// Composed, compatibility characters replaced.
    Nfkc,
}

impl Setting for Form {
    const WANTED: &'static str = "\"NFC\", \"NFKC\" or false";

    fn parse(text: &str) -> Option<Self> {
        match text {
            "NFC" => Some(Form::Nfc),
            "NFKC" => Some(Form::Nfkc),
            _ => None,
        }
    }

    fn show(&self) -> String {
        match self {
            Form::Nfc => "NFC".to_owned(),
            Form::Nfkc => "NFKC".to_owned(),
        }
    }
}

step! {
    /// Normalizes a text.
    Clean = "clean" version 1 {
        /// The normal form.
        unicode: Option<Form> = "NFC",
        /// Whether `\r\n` and a lone `\r` become `\n`.
        line_ends: bool = "true",
        /// Whether U+0085, U+2028 and U+2029 become `\n`.
        unicode_line_ends: bool = "false",
        /// Whether control characters other than tab and line end, and byte-order marks, are removed.
        controls: bool = "true",
        /// Whether space before a line end and at the end of the text is removed.
        trailing_space: bool = "false",
        /// The maximum of empty lines in a row.
        max_empty_lines: Option<u64> = "false",
    }
}

impl Clean {
    /// The normalized text, if it differs.
    pub(crate) fn change(&self, text: &str) -> Option<String> {
        let mut changed = None;
        if text.contains(|c| self.replaces(c)) {
            changed = Some(self.characters(text));
        }
        // After characters were removed, a combining mark may follow another letter.
        let now = changed.as_deref().unwrap_or(text);
        if let Some(form) = self.unicode
            && !now.is_ascii()
            && let Some(normal) = normal(form, now)
        {
            changed = Some(normal);
        }
        let now = changed.as_deref().unwrap_or(text);
        if self.trailing_space || self.max_empty_lines.is_some() {
            let lines = self.lines(now);
            if lines != now {
                changed = Some(lines);
            }
        }
        changed.filter(|changed| changed != text)
    }

    fn replaces(&self, c: char) -> bool {
        match c {
            '\r' => self.line_ends || self.controls,
            '\t' | '\n' => false,
            '\u{85}' | '\u{2028}' | '\u{2029}' => self.unicode_line_ends,
            '\u{feff}' => self.controls,
            c => self.controls && c.is_control(),
        }
    }

    fn characters(&self, text: &str) -> String {
        let mut kept = String::with_capacity(text.len());
        let mut after_return = false;
        for c in text.chars() {
            let joined = after_return && c == '\n';
            after_return = c == '\r' && self.line_ends;
            match c {
                '\n' if joined => {}
                '\r' if self.line_ends => kept.push('\n'),
                '\u{85}' | '\u{2028}' | '\u{2029}' if self.unicode_line_ends => kept.push('\n'),
                c if self.replaces(c) => {}
                c => kept.push(c),
            }
        }
        kept
    }

    fn lines(&self, text: &str) -> String {
        let most = self.max_empty_lines.map_or(usize::MAX, |most| most as usize);
        let mut kept = String::with_capacity(text.len());
        let (mut empty, mut first) = (0, true);
        for line in text.split('\n') {
            let line = if self.trailing_space { line.trim_end() } else { line };
            empty = if line.trim().is_empty() { empty + 1 } else { 0 };
            if empty > most {
                continue;
            }
            if !std::mem::take(&mut first) {
                kept.push('\n');
            }
            kept += line;
        }
        if self.trailing_space {
            kept.truncate(kept.trim_end().len());
        }
        kept
    }
}

fn normal(form: Form, text: &str) -> Option<String> {
    match form {
        Form::Nfc if is_nfc_quick(text.chars()) != IsNormalized::Yes => Some(text.nfc().collect()),
        Form::Nfkc if is_nfkc_quick(text.chars()) != IsNormalized::Yes => {
            Some(text.nfkc().collect())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_rule_does_its_own() {
        let clean = Clean::default();
        assert_eq!(clean.change("plain\n\ttext"), None);
        assert_eq!(clean.change("e\u{301}").unwrap(), "\u{e9}");
        assert_eq!(clean.change("a\r\nb\rc\n\rd").unwrap(), "a\nb\nc\n\nd");
        assert_eq!(clean.change("\u{feff}a\0b\x07").unwrap(), "ab");
        assert_eq!(clean.change("a\u{2028}b"), None);
        let nothing = Clean { unicode: None, line_ends: false, controls: false, ..clean.clone() };
        assert_eq!(nothing.change("e\u{301}\r\n\0"), None);
        let strict = Clean {
            unicode: Some(Form::Nfkc),
            unicode_line_ends: true,
            trailing_space: true,
            max_empty_lines: Some(1),
            ..clean
        };
        assert_eq!(strict.change("\u{fb01}n \n\n \n\nb\u{85}c  \n\n").unwrap(), "fin\n\nb\nc");
    }

    proptest! {
        #[test]
        fn cleaning_twice_is_cleaning_once(text in "[a e\u{301}\u{e9}\r\n\u{85}\u{2028}\0\u{feff}\u{1100}\u{1161}]{0,40}",
                                           trailing_space: bool, lines in 0u64..3) {
            let clean = Clean {
                unicode_line_ends: trailing_space,
                trailing_space,
                max_empty_lines: (lines > 0).then_some(lines),
                ..Clean::default()
            };
            let once = clean.change(&text).unwrap_or(text);
            prop_assert_eq!(clean.change(&once), None);
        }
    }
}
