//! Braces in a pattern: `{a,b}/*` is `a/*` and `b/*`.

/// The limit on patterns that one may expand to.
pub(super) const ALTERNATIVES_MAX: usize = 1000;

/// The patterns without braces that a pattern with braces stands for; `None` if there are too many. Each has its own
/// start folder, its own depth and its own rule for hidden names.
pub(super) fn alternatives(pattern: &str) -> Option<Vec<String>> {
    let (mut depth, mut class, mut escaped) = (0, None, false);
    let (mut start, mut cuts) = (0, Vec::new());
    for (at, c) in pattern.char_indices() {
        match c {
            _ if escaped => escaped = false,
            // In a class a brace is literal.
            '\\' if class.is_none() => escaped = true,
            // A `]` at the start of a class, or after a `!`, is literal.
            ']' if class.is_some_and(|from| !matches!(&pattern[from..at], "" | "!" | "^")) => {
                class = None;
            }
            _ if class.is_some() => {}
            '[' => class = Some(at + 1),
            '{' => {
                depth += 1;
                if depth == 1 {
                    (start, cuts) = (at, vec![at]);
                }
            }
            ',' if depth == 1 => cuts.push(at),
            '}' if depth == 1 => {
                cuts.push(at);
                let mut all = Vec::new();
                for cut in cuts.windows(2) {
                    let within = &pattern[cut[0] + 1..cut[1]];
                    // The matcher ignores empty alternatives too.
                    if within.is_empty() {
                        continue;
                    }
                    let one = format!("{}{within}{}", &pattern[..start], &pattern[at + 1..]);
                    all.extend(alternatives(&one)?);
                    if all.len() > ALTERNATIVES_MAX {
                        return None;
                    }
                }
                return Some(all);
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    Some(vec![pattern.to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_with_braces_stands_for_those_without() {
        for (pattern, wanted) in [
            ("a", &["a"][..]),
            ("{a,b}/c", &["a/c", "b/c"]),
            ("x{a,{b,c}d}{e,f}", &["xae", "xaf", "xbde", "xbdf", "xcde", "xcdf"]),
            ("{,a}b", &["ab"]),
            ("a\\{b,c}[{,}]", &["a\\{b,c}[{,}]"]),
            ("[]{]{a,b}", &["[]{]a", "[]{]b"]),
            ("[\\]{a,b}", &["[\\]a", "[\\]b"]),
            ("[a!]{a,b}", &["[a!]a", "[a!]b"]),
        ] {
            assert_eq!(alternatives(pattern).unwrap(), wanted, "{pattern}");
        }
        assert_eq!(alternatives(&"{a,b}".repeat(12)), None);
    }
}
