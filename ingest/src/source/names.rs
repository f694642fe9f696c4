//! Paths of fields: names joined by dots. A dot in a name has a backslash before it: `meta.a\.b`.

/// The names of a path, outermost first.
pub(crate) fn of(path: &str) -> Vec<String> {
    let mut names = vec![String::new()];
    let mut letters = path.chars().peekable();
    while let Some(letter) = letters.next() {
        let own = letter == '\\' && letters.next_if_eq(&'.').is_some();
        match (letter, names.last_mut()) {
            ('.', _) | (_, None) => names.push(String::new()),
            (_, Some(name)) => name.push(if own { '.' } else { letter }),
        }
    }
    names
}

/// A path as columnar files spell it: names joined by dots, without escapes.
pub(super) fn joined(path: &str) -> String {
    path.replace("\\.", ".")
}

/// A name as a part of a path.
pub(crate) fn escaped(name: &str) -> String {
    name.replace('.', "\\.")
}

/// The hint for a name that contains a dot.
pub(super) fn with_backslash(name: &str) -> String {
    format!("a dot that belongs to a name has a backslash before it: '{}'", escaped(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dot_of_a_name_has_a_backslash_before_it() {
        for (path, names) in [
            ("a", &["a"][..]),
            ("a.b.0", &["a", "b", "0"]),
            ("a\\.b", &["a.b"]),
            ("m.a\\.b.c", &["m", "a.b", "c"]),
            ("a\\b.c\\", &["a\\b", "c\\"]),
            ("a..b", &["a", "", "b"]),
            ("\\.", &["."]),
        ] {
            assert_eq!(of(path), names, "{path}");
        }
        assert_eq!(of(&escaped("a.b.c")), ["a.b.c"]);
    }
}
