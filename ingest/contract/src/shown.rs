//! Text with terminal control characters escaped.

use std::borrow::Cow;

/// Text for users: control characters are escaped (`\u{1b}`); line ends and tabs stay.
pub fn shown(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

/// The same for a name within a line: line ends and tabs are escaped too.
pub fn name(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    let obeyed = |c: char| (c.is_control() || turns(c)) && !stays(c);
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if obeyed(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// Whether a character changes the text direction, or is a line end that users do not see.
fn turns(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;
    use proptest::prelude::*;

    #[test]
    fn what_a_terminal_obeys_is_spelled_out() {
        assert_eq!(shown("plain caf\u{e9} \u{6587}\n\tx"), "plain caf\u{e9} \u{6587}\n\tx");
        assert_eq!(shown("a\u{1b}[31mb\r\u{7}\u{9b}2J"), "a\\u{1b}[31mb\\r\\u{7}\\u{9b}2J");
        assert_eq!(shown("\u{202e}txt.exe"), "\\u{202e}txt.exe");
        assert_eq!(name("a\nerror: b"), "a\\nerror: b");
        let fault = Fault::data("bad \u{1b}c name").at("x\n\u{1b}]0;t\u{7}").found("\u{1b}[2J");
        let told = fault.hint("\u{9b}1m").to_string();
        assert_eq!(told.lines().count(), 3);
        assert!(!told.contains(|c: char| c.is_control() && c != '\n'), "{told:?}");
    }

    proptest! {
        #[test]
        fn nothing_that_moves_the_cursor_passes(text in any::<String>()) {
            let told = shown(&text);
            prop_assert!(told.chars().all(|c| matches!(c, '\n' | '\t') || !c.is_control() && !turns(c)));
            prop_assert!(name(&text).chars().all(|c| !c.is_control() && !turns(c)));
            let harmless = text.chars().all(|c| matches!(c, '\n' | '\t') || !c.is_control() && !turns(c));
            prop_assert!(!harmless || told == text);
        }
    }
}
