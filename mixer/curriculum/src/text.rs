//! Formatting of single values in the canonical text.

use std::fmt::Write as _;

pub(super) fn inline(pairs: Vec<String>) -> String {
    format!("{{ {} }}", pairs.join(", "))
}

#[derive(Default)]
pub(super) struct Text(pub(super) String);

impl Text {
    pub(super) fn head(&mut self, head: &str) {
        self.0 += &format!("\n{head}\n");
    }

    pub(super) fn line(&mut self, key: &str, value: impl std::fmt::Display) {
        writeln!(self.0, "{key} = {value}").expect("writing to a string cannot fail");
    }
}

/// The shortest decimal that reads back as the same number.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() { "nan".to_owned() } else { format!("{value:e}") }
}

/// A basic string. Formatted here, since a library could change its output and thereby an identity.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            control if control.is_ascii_control() => {
                write!(out, "\\u{:04x}", u32::from(control))
                    .expect("writing to a string cannot fail");
            }
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

pub(super) fn key(name: &str) -> String {
    let bare = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if !name.is_empty() && name.bytes().all(bare) { name.to_owned() } else { quoted(name) }
}
