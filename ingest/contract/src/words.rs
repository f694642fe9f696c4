//! Numbers with their nouns, as in text.

/// A count with its noun, which is given in the singular: `1 file`, `2 files`, `0 batches`.
///
/// ```
/// use contract::counted;
/// assert_eq!(counted(1_u64, "bad record"), "1 bad record");
/// assert_eq!(counted(0_usize, "bad record"), "0 bad records");
/// assert_eq!(counted(2_u64, "copy"), "2 copies");
/// ```
pub fn counted(count: impl TryInto<u64>, name: &str) -> String {
    // A count that does not fit is plural too.
    let count = count.try_into().unwrap_or(u64::MAX);
    format!("{count} {}", named(count, name))
}

/// A number of bytes for users.
///
/// ```
/// use contract::words::bytes;
/// assert_eq!([bytes(1023), bytes(1536), bytes(47_538_107_146_240)], ["1023 B", "1.5 KiB", "43.2 TiB"]);
/// ```
pub fn bytes(bytes: u64) -> String {
    let units = [("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((name, shift)) => format!("{:.1} {name}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

/// A number of floating-point operations for users.
///
/// ```
/// use contract::words::flops;
/// assert_eq!([flops(2.5e6), flops(31.4e9), flops(146_714_090e9)], ["2.5 MFLOP", "31.4 GFLOP", "146.7 PFLOP"]);
/// ```
pub fn flops(flops: f64) -> String {
    let units =
        [("ZFLOP", 1e21), ("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)];
    let (name, unit) = units.into_iter().find(|(_, unit)| flops >= *unit).unwrap_or(("MFLOP", 1e6));
    format!("{:.1} {name}", flops / unit)
}

/// Steps in a row, the last one included.
///
/// ```
/// use contract::words::steps;
/// assert_eq!((steps(7, 7), steps(7, 9)), ("step 7".into(), "steps 7 to 9".into()));
/// ```
pub fn steps(first: u64, last: u64) -> String {
    match first == last {
        true => format!("step {first}"),
        false => format!("steps {first} to {last}"),
    }
}

/// The noun for a count that is printed separately: `named(1000, "file")` is `files`.
pub fn named(count: u64, name: &str) -> String {
    if count == 1 { name.to_owned() } else { plural(name) }
}

/// The plural of a name, by the rules of English and without its exceptions.
pub fn plural(name: &str) -> String {
    let vowel = |c: char| "aeiou".contains(c);
    match name.strip_suffix('y') {
        Some(stem) if !stem.ends_with(vowel) => format!("{stem}ies"),
        _ if ["s", "x", "ch", "sh"].iter().any(|end| name.ends_with(end)) => format!("{name}es"),
        _ => format!("{name}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular_and_every_other_number_is_plural() {
        for (count, name, wanted) in [
            (1, "document", "1 document"),
            (0, "document", "0 documents"),
            (11, "document", "11 documents"),
            (2, "copy", "2 copies"),
            (2, "day", "2 days"),
            (2, "batch", "2 batches"),
            (1, "batch", "1 batch"),
        ] {
            assert_eq!(counted(count, name), wanted);
        }
    }
}
