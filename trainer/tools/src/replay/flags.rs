//! A change in words, and as flags of a command that a user may paste into a shell.

use crate::change::WhatIfChange;
use contract::shell;
use store::Location;

/// The change for people: one phrase for each part.
pub fn words(change: &WhatIfChange) -> Vec<String> {
    let WhatIfChange { drop_documents, drop_sources, lr, clip, fp32, skip } = change;
    let documents = drop_documents.iter().map(|id| format!("without document {id:?}"));
    let sources = drop_sources
        .iter()
        .map(|source| format!("without source {source:?}, whose place the others take"));
    let numbers = [
        lr.map(|lr| {
            format!("with learning rate {lr:e} in the first step, and in proportion later where that can be")
        }),
        clip.map(|clip| format!("with gradients clipped at {clip:e}")),
        fp32.then(|| "computed in f32".to_owned()),
        skip.then(|| "with a first step that moves nothing".to_owned()),
    ];
    documents.chain(sources).chain(numbers.into_iter().flatten()).collect()
}

/// The change as flags of `ztrain replay` and `ztrain fork`, for a shell.
pub fn flags(change: &WhatIfChange) -> String {
    let WhatIfChange { drop_documents, drop_sources, lr, clip, fp32, skip } = change;
    let documents = drop_documents.iter().map(|id| flag("--drop-doc", id));
    let sources = drop_sources.iter().map(|name| flag("--drop-source", name));
    let numbers = [
        lr.map(|lr| format!(" --lr {lr:e}")),
        clip.map(|clip| format!(" --clip {clip:e}")),
        fp32.then(|| " --fp32".to_owned()),
        skip.then(|| " --optimizer-skip".to_owned()),
    ];
    documents.chain(sources).chain(numbers.into_iter().flatten()).collect()
}

/// A flag with its value, quoted for a shell and with a blank before it; a value that begins with `-` is joined by `=`.
pub fn flag(name: &str, value: &str) -> String {
    let between = if value.starts_with('-') { '=' } else { ' ' };
    format!(" {name}{between}{}", shell::word(value))
}

/// The flags that say where a run's stores are now, for a shell; empty if they did not move.
pub fn moved(stores: &[Location]) -> String {
    stores.iter().map(|store| flag("--store", &store.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use contract::terminal;
    use proptest::prelude::*;

    use super::*;

    /// Text with characters that are special for shells and terminals.
    fn word() -> impl Strategy<Value = String> {
        let minded = prop::sample::select(vec![
            '\'', '"', '\\', '$', '`', '!', '-', ' ', '\n', '\t', '\u{1b}', '\u{7}', '\u{9b}',
            '\u{202e}', '7', '\u{e9}',
        ]);
        prop::collection::vec(
            prop_oneof![minded, any::<char>().prop_filter("an argument has none", |c| *c != '\0')],
            0..12,
        )
        .prop_map(|chars| chars.into_iter().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Users paste these commands into bash: quoted text must come back unchanged and run nothing.
        #[test]
        fn a_shell_gives_back_what_a_terminal_may_show(words in prop::collection::vec(word(), 1..8)) {
            let line: String = words.iter().map(|word| flag("--drop-doc", word)).collect();
            prop_assert_eq!(terminal::name(&line), line.as_str());
            let printed = Command::new("bash").args(["-c", &format!("printf '%s\\0'{line}")]).output().unwrap();
            let printed = String::from_utf8(printed.stdout).unwrap();
            let mut arguments = printed.strip_suffix('\0').unwrap().split('\0');
            for word in &words {
                let first = arguments.next().unwrap();
                let value = first.strip_prefix("--drop-doc=").or_else(|| arguments.next());
                prop_assert_eq!(value, Some(word.as_str()));
            }
            prop_assert_eq!(arguments.next(), None);
        }
    }
}
