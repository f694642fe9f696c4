//! Quotes words of printed commands, so that a shell reads them back unchanged and a terminal interprets nothing in
//! them.

use std::path::Path;

use crate::shown;

/// Quotes a word for a shell. Terminal control characters are escaped, in the quotes that bash, zsh and POSIX 2024 have
/// for that.
pub fn word(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=+,@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        return word.to_owned();
    }
    if shown::name(word) == word {
        return format!("'{}'", word.replace('\'', "'\\''"));
    }
    spelled(word.as_bytes())
}

/// Quotes a path. One that looks like an option gets a `./`, and one that is not UTF-8 is escaped.
pub fn path(path: &Path) -> String {
    let bytes = path.as_os_str().as_encoded_bytes();
    let whole = if bytes.starts_with(b"-") { [b"./", bytes].concat() } else { bytes.to_vec() };
    match String::from_utf8(whole) {
        Ok(text) => word(&text),
        Err(error) => spelled(error.as_bytes()),
    }
}

/// The text, with terminal control characters escaped and bytes that are not UTF-8 as octal digits.
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
                _ if shown::name(shown) == *shown => out.push(c),
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

    /// Bytes that include characters special to shells and terminals.
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
        /// Users are assumed to paste commands into bash.
        #[test]
        fn a_shell_gives_back_the_path_that_was_printed(names in prop::collection::vec(name(), 1..8)) {
            let names: Vec<OsString> = names.into_iter().map(OsString::from_vec).collect();
            let line: String = names.iter().map(|name| format!(" {}", path(Path::new(name)))).collect();
            prop_assert_eq!(shown::name(&line), line.as_str());
            let printed = Command::new("bash").args(["-c", &format!("printf '%s\\0'{line}")]).output().unwrap();
            let heard: Vec<&[u8]> = printed.stdout.split(|byte| *byte == 0).collect();
            for (name, heard) in names.iter().zip(&heard) {
                let before: &[u8] = if name.as_bytes().starts_with(b"-") { b"./" } else { b"" };
                prop_assert_eq!(&[before, name.as_bytes()].concat(), heard);
            }
            prop_assert_eq!(heard.len(), names.len() + 1);
        }
    }
}
