//! Words of commands that are printed to be pasted: the shell gives them back as they were, and a terminal obeys nothing in them.

use std::path::Path;

use crate::terminal;

/// A word as a shell takes it. What a terminal would obey is spelled out, in the quotes that bash, zsh and POSIX of 2024 have
/// for that.
pub fn word(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=+,@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        return word.to_owned();
    }
    if terminal::name(word) == word {
        return format!("'{}'", word.replace('\'', "'\\''"));
    }
    spelled(word.as_bytes())
}

/// A path: one that looks like an option is named from the folder at hand, and one that is no text is spelled out.
pub fn path(path: &Path) -> String {
    let bytes = path.as_os_str().as_encoded_bytes();
    let whole = if bytes.starts_with(b"-") { [b"./", bytes].concat() } else { bytes.to_vec() };
    match String::from_utf8(whole) {
        Ok(text) => word(&text),
        Err(error) => spelled(error.as_bytes()),
    }
}

/// Text as it is, but for what a terminal would obey and what is no text: that by its bytes, in octal digits.
fn spelled(bytes: &[u8]) -> String {
    let mut out = "$'".to_owned();
    let octal = |out: &mut String, bytes: &[u8]| {
        bytes.iter().for_each(|byte| out.push_str(&format!("\\{byte:03o}")));
    };
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            let mut buffer = [0; 4];
            let shown = c.encode_utf8(&mut buffer);
            match c {
                '\'' | '\\' => out.extend(['\\', c]),
                _ if terminal::name(shown) == *shown => out.push(c),
                _ => octal(&mut out, shown.as_bytes()),
            }
        }
        octal(&mut out, chunk.invalid());
    }
    out.push('\'');
    out
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    /// Bytes with what shells and terminals mind.
    fn name() -> impl Strategy<Value = Vec<u8>> {
        let minded = prop::sample::select(
            [
                "'", "\"", "\\", "$", "`", "!", "-", " ", "\n", "\t", "\u{1b}", "\u{9b}",
                "\u{202e}", "7", "\u{e9}",
            ]
            .map(str::as_bytes)
            .to_vec(),
        );
        let any = prop::collection::vec(1..=u8::MAX, 1..3);
        let part = prop_oneof![minded.prop_map(<[u8]>::to_vec), any];
        prop::collection::vec(part, 1..10).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// bash is the shell of whoever pastes a command.
        #[test]
        fn a_shell_gives_back_the_path_that_was_printed(names in prop::collection::vec(name(), 1..8)) {
            let names: Vec<OsString> = names.into_iter().map(OsString::from_vec).collect();
            let line: String = names.iter().map(|name| format!(" {}", path(Path::new(name)))).collect();
            prop_assert_eq!(terminal::name(&line), line.as_str());
            let printed = Command::new("bash").args(["-c", &format!("printf '%s\\0'{line}")]).output().unwrap();
            let heard: Vec<&[u8]> = printed.stdout.split(|byte| *byte == 0).collect();
            for (name, heard) in names.iter().zip(&heard) {
                let is_option = name.as_bytes().starts_with(b"-");
                let whole = [if is_option { &b"./"[..] } else { b"" }, name.as_bytes()].concat();
                prop_assert_eq!(&whole, heard);
            }
            prop_assert_eq!(heard.len(), names.len() + 1);
        }
    }
}
