//! Lists of a server, without the keys that no address can name: the library refuses the whole list for one of them.
//!
//! Keys that end in a slash and have no bytes mark empty folders for some tools. Other keys with an empty part, or with
//! `.` or `..`, are reported once and skipped.

use store::location::UrlScheme;

/// How a list names its objects, as elements of XML.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entries {
    entry: &'static str,
    key: &'static str,
    size: &'static str,
}

impl Entries {
    /// Those of the answer to a request with this query, if it is one for a list.
    pub(super) fn of(scheme: UrlScheme, query: Option<&str>) -> Option<Self> {
        let (asked, entries) = match scheme {
            UrlScheme::S3 | UrlScheme::Gs => {
                ("list-type=2", Entries { entry: "Contents", key: "Key", size: "Size" })
            }
            UrlScheme::Az => {
                ("comp=list", Entries { entry: "Blob", key: "Name", size: "Content-Length" })
            }
            UrlScheme::Https | UrlScheme::Http | UrlScheme::Hf => return None,
        };
        query.unwrap_or_default().split('&').any(|part| part == asked).then_some(entries)
    }
}

/// A list without the keys that no address can name, each reported through `tell` unless it marks a folder.
pub(super) fn readable(list: &str, entries: Entries, mut tell: impl FnMut(&str)) -> String {
    let (begin, end) = (format!("<{}>", entries.entry), format!("</{}>", entries.entry));
    let mut kept = String::with_capacity(list.len());
    for piece in list.split_inclusive(&end) {
        let (before, entry) = piece.split_at(piece.find(&begin).unwrap_or(piece.len()));
        kept += before;
        let inner = |name: &str| {
            let (_, rest) = entry.split_once(&format!("<{name}>"))?;
            Some(rest.split_once("</")?.0)
        };
        match inner(entries.key) {
            Some(key) if !is_named(key) => {
                if !(key.ends_with('/') && inner(entries.size) == Some("0")) {
                    tell(key);
                }
            }
            _ => kept += entry,
        }
    }
    kept
}

/// Whether an address can name a key, given as it stands in XML.
pub(super) fn is_named(key: &str) -> bool {
    let is_control = |code: &str| {
        let code = code.split(';').next().unwrap_or_default();
        let number = match code.strip_prefix('x') {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => code.parse(),
        };
        number.is_ok_and(|number| char::from_u32(number).is_none_or(char::is_control))
    };
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    key.split('/').all(plain)
        && !key.chars().any(char::is_control)
        && !key.split("&#").skip(1).any(is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_address_names_is_passed_by_and_told() {
        for (scheme, query, shape) in [
            (UrlScheme::S3, "list-type=2", ["Contents", "Key", "Size"]),
            (UrlScheme::Gs, "list-type=2&prefix=a", ["Contents", "Key", "Size"]),
            (UrlScheme::Az, "restype=container&comp=list", ["Blob", "Name", "Content-Length"]),
        ] {
            let entries = Entries::of(scheme, Some(query)).unwrap();
            let [one, name, bytes] = shape;
            let entry = |key: &str, size: u64| {
                format!("<{one}><{name}>{key}</{name}><X><{bytes}>{size}</{bytes}></X></{one}>")
            };
            let list = |entries: &[String]| {
                format!("<List><Prefix>a//</Prefix>{}<IsTruncated/></List>", entries.concat())
            };
            let fine = ["a/b", "a/b c", "a/.b", "a/b&amp;c", "a/&#39;b"].map(|key| entry(key, 0));
            let odd = ["/a", "a//b", "a/./b", "a/..", "a/b&#1;", "a/&#xA;", "a/b/"];
            let mut all: Vec<_> = fine.to_vec();
            all.extend(odd.map(|key| entry(key, 7)));
            all.insert(2, entry("a/mark/", 0));
            let mut told = Vec::new();
            let kept = readable(&list(&all), entries, |key| told.push(key.to_owned()));
            assert_eq!(kept, list(&fine));
            assert_eq!(told, odd);
            for whole in [list(&fine), String::new(), "<Error/>".to_owned()] {
                assert_eq!(readable(&whole, entries, |key| panic!("{key}")), whole);
            }
            assert!(Entries::of(scheme, Some("prefix=list-type=2")).is_none());
        }
    }
}
