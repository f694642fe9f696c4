//! The page: one HTML file with everything in it, which loads nothing from the network.
//!
//! Foreign texts (names of sources, documents, faults) enter it only as JSON, in which `<` is escaped, and are
//! displayed as text, never as markup. A Content-Security-Policy forbids all requests except those of a live page to
//! its own server.

use std::borrow::Cow;

use contract::Result;
use contract::terminal::name as spelled;
use serde_json::{Value, json};

use super::payload::run;
use super::view::RunView;

/// The page's parts, in `assets/`.
const FRAME: &str = include_str!("assets/page.html");
const STYLE: &str = include_str!("assets/page.css");
const LIBRARY: &str = include_str!("assets/uPlot.iife.min.js");
const LIBRARY_STYLE: &str = include_str!("assets/uPlot.min.css");
const SCRIPT: [&str; 4] = [
    include_str!("assets/data.js"),
    include_str!("assets/plots.js"),
    include_str!("assets/panel.js"),
    include_str!("assets/main.js"),
];

/// The update for a live page: everything small, and the columns of the steps after `known`.
pub fn payload(view: &RunView, known: u64) -> Result<String> {
    Ok(plain(run(view, known.min(view.last_step()))?.to_string()))
}

/// The page of the first run, with the others plotted next to it; a `live` page polls its server for updates.
pub fn page(views: &[RunView], live: bool) -> Result<String> {
    let runs = views.iter().map(|view| run(view, 0)).collect::<Result<Vec<Value>>>()?;
    let name = runs.first().and_then(|run| run["name"].as_str()).unwrap_or("run");
    let title = escaped(&spelled(name));
    let connect = if live { "'self'" } else { "'none'" };
    let data = plain(json!({"live": live, "runs": runs}).to_string()).replace('<', "\\u003c");
    let parts = [
        ("{{title}}", title.as_str()),
        ("{{connect}}", connect),
        ("{{library_style}}", LIBRARY_STYLE.trim_end()),
        ("{{style}}", STYLE.trim_end()),
        ("{{library}}", LIBRARY.trim_end()),
        ("{{script}}", &SCRIPT.join("\n")),
        ("{{data}}", &data),
    ];
    Ok(filled(FRAME, &parts))
}

/// Replaces each mark of a frame once, in order; inserted text is not searched again.
fn filled(frame: &str, parts: &[(&str, &str)]) -> String {
    let length = parts.iter().map(|(_, text)| text.len()).sum::<usize>();
    let (mut page, mut rest) = (String::with_capacity(frame.len() + length), frame);
    for (mark, text) in parts {
        let (before, after) = rest.split_once(mark).unwrap_or((rest, ""));
        page.push_str(before);
        page.push_str(text);
        rest = after;
    }
    page + rest
}

/// Escapes characters in JSON that change the text direction or control a terminal, as they are escaped elsewhere.
fn plain(json: String) -> String {
    if matches!(spelled(&json), Cow::Borrowed(_)) {
        return json;
    }
    let mut out = String::with_capacity(json.len() + 64);
    for c in json.chars() {
        match spelled(c.encode_utf8(&mut [0; 4])) {
            Cow::Borrowed(same) => out.push_str(same),
            // A backslash in JSON is doubled.
            Cow::Owned(text) => out.extend(["\\", text.as_str()]),
        }
    }
    out
}

/// Escapes text for markup.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_has_each_mark_once_and_in_order() {
        let marks = ["title", "connect", "library_style", "style", "library", "script", "data"]
            .map(|mark| format!("{{{{{mark}}}}}"));
        let places: Vec<usize> =
            marks.iter().map(|mark| FRAME.find(mark.as_str()).unwrap()).collect();
        assert!(places.is_sorted(), "{places:?}");
        assert!(marks.iter().all(|mark| FRAME.matches(mark.as_str()).count() == 1));
    }

    #[test]
    fn a_name_turns_no_text_around() {
        let value = json!({"a\u{202e}b": ["\u{2066}\n\\u{202e}", "caf\u{e9} \u{5d0}"]});
        let read: Value = serde_json::from_str(&plain(value.to_string())).unwrap();
        let wanted = json!({"a\\u{202e}b": ["\\u{2066}\n\\u{202e}", "caf\u{e9} \u{5d0}"]});
        assert_eq!(read, wanted);
    }

    #[test]
    fn scripts_and_styles_cannot_end_their_own_element() {
        for text in [LIBRARY].iter().chain(&SCRIPT) {
            assert!(!text.to_lowercase().contains("</script") && !text.contains("<!--"));
        }
        assert!([STYLE, LIBRARY_STYLE].iter().all(|text| !text.to_lowercase().contains("</style")));
        assert!(SCRIPT.iter().all(|text| !text.contains("innerHTML")), "texts are put as text");
    }
}
