//! Compares what is removed with a brute-force search, and what is kept with the promises of the rule.

use proptest::prelude::*;

use super::*;
use crate::spans::without;

/// The runs of `least` bytes of a text, with their offsets.
fn runs(text: &str, least: usize) -> impl Iterator<Item = (usize, &[u8])> {
    text.as_bytes().windows(least).enumerate()
}

/// What is removed of each text by definition: every pair of offsets is compared.
fn by_search(texts: &[String], least: usize) -> Vec<Vec<bool>> {
    let place = |text: usize, at: usize, run: &[u8]| {
        let all = texts.iter().enumerate();
        let mut same = all.flat_map(|(number, other)| {
            runs(other, least).filter(|(_, other)| *other == run).map(move |(at, _)| (number, at))
        });
        let first = same.next().unwrap();
        let alone = same.next().is_none();
        if alone { None } else { Some(first == (text, at)) }
    };
    let gone = |(number, text): (usize, &String)| {
        let (mut first, mut later) = (vec![false; text.len()], vec![false; text.len()]);
        for (at, run) in runs(text, least) {
            match place(number, at, run) {
                None => {}
                Some(true) => first[at..at + least].fill(true),
                Some(false) => later[at..at + least].fill(true),
            }
        }
        let mut gone: Vec<bool> =
            first.iter().zip(later).map(|(first, later)| later && !first).collect();
        // A character is removed or kept as a whole; one that is cut at an edge is kept.
        let chars: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for pair in chars.windows(2) {
            if gone[pair[0]..pair[1]].iter().any(|gone| !gone) {
                gone[pair[0]..pair[1]].fill(false);
            }
        }
        gone
    };
    texts.iter().enumerate().map(gone).collect()
}

/// What is removed of each text, with the step's partitions.
fn decided(texts: &[String], step: &Repeats) -> Vec<Vec<Span>> {
    let folder = tempfile::tempdir().unwrap();
    let mut all = Texts::create(&Scratch::new(folder.path(), 0)).unwrap();
    for (number, text) in texts.iter().enumerate() {
        all.push([7, number as u64], text).unwrap();
    }
    let mut found = vec![Vec::new(); texts.len()];
    let take = |[_, number]: Doc, span| {
        found[number as usize].push(span);
        Ok(())
    };
    all.decide(step, |_| Ok(Some(0)), take).unwrap();
    found
}

fn step(min_bytes: u64, bookend: Option<Ratio>) -> Repeats {
    Repeats { min_bytes, bookend, ..Repeats::default() }
}

/// Texts over few letters, with many repetitions.
fn texts() -> impl Strategy<Value = Vec<String>> {
    let piece = prop_oneof![
        "[ab]{0,6}",
        Just("the same words".to_owned()),
        Just("\u{e9}\u{4e2d}\u{1f600}".to_owned()),
        "[a-z\u{e9}\u{4e2d}]{0,12}",
    ];
    let text = prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat());
    prop::collection::vec(text, 0..8)
}

proptest! {
    #[test]
    fn what_goes_is_what_a_search_finds(texts in texts(), least in 1u64..16) {
        let wanted = by_search(&texts, least as usize);
        let spans = decided(&texts, &step(least, None));
        for ((text, spans), wanted) in texts.iter().zip(spans).zip(wanted) {
            let mut gone = vec![false; text.len()];
            for (start, end) in &spans {
                gone[*start as usize..*end as usize].fill(true);
            }
            prop_assert_eq!(gone, wanted, "{:?} {:?}", texts, spans);
        }
    }

    /// Texts that are one run over and over, so that all suffixes share long beginnings.
    #[test]
    fn what_repeats_itself_is_what_a_search_finds(
        period in "[ab]{1,3}|\u{e9}", counts in prop::collection::vec(0usize..40, 1..4),
        end in "[ab]{0,2}", least in 1usize..80,
    ) {
        let texts: Vec<String> = counts.iter().map(|count| period.repeat(*count) + &end).collect();
        let spans = decided(&texts, &step(least as u64, None));
        for ((text, spans), wanted) in texts.iter().zip(spans).zip(by_search(&texts, least)) {
            let mut cut = vec![false; text.len()];
            for (start, end) in &spans {
                cut[*start as usize..*end as usize].fill(true);
            }
            prop_assert_eq!(cut, wanted, "{:?} {:?}", texts, spans);
        }
    }

    #[test]
    fn no_run_vanishes_and_gaps_go_only_between_pieces(texts in texts(), least in 1usize..16) {
        let plain = decided(&texts, &step(least as u64, None));
        let bookends = decided(&texts, &step(least as u64, Some(Ratio::new(4, 5))));
        let rest = |spans: &[Vec<Span>]| -> Vec<String> {
            texts.iter().zip(spans).map(|(text, spans)| without(text, spans).unwrap()).collect()
        };
        let kept = [rest(&plain), rest(&bookends)];
        // Everything that occurred more than once still occurs.
        for (number, text) in texts.iter().enumerate() {
            for (at, run) in runs(text, least) {
                let others = texts.iter().enumerate().flat_map(|(n, t)| runs(t, least).map(move |(a, r)| (n, a, r)));
                if others.filter(|(_, _, other)| *other == run).count() > 1 {
                    for kept in &kept {
                        prop_assert!(kept.iter().any(|text| runs(text, least).any(|(_, other)| other == run)),
                            "{number} {at}");
                    }
                }
            }
        }
        for (plain, bookends) in plain.iter().zip(&bookends) {
            let share = |(start, end): &Span| {
                let inside = plain.iter().filter(|piece| start <= &piece.0 && &piece.1 <= end);
                (inside.map(|piece| piece.1 - piece.0).sum::<u32>(), end - start)
            };
            prop_assert!(bookends.iter().map(share).all(|(part, whole)| part * 5 >= whole * 4));
            // Each begins and ends with a piece, and no piece is lost.
            for (start, end) in bookends {
                prop_assert!(plain.iter().any(|piece| piece.0 == *start));
                prop_assert!(plain.iter().any(|piece| piece.1 == *end));
            }
            for piece in plain {
                prop_assert!(bookends.iter().any(|b| b.0 <= piece.0 && piece.1 <= b.1));
            }
        }
    }

    #[test]
    fn partitions_are_decided_as_if_alone(texts in texts(), size in 20u64..80) {
        let small = Repeats { partition_bytes: size, ..step(5, None) };
        let (mut wanted, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
        for text in &texts {
            if bytes + text.len() as u64 > size {
                wanted.extend(decided(&part, &step(5, None)));
                (part, bytes) = (Vec::new(), 0);
            }
            part.push(text.clone());
            // A separator byte between two texts.
            bytes += text.len() as u64 + 1;
        }
        wanted.extend(decided(&part, &step(5, None)));
        prop_assert_eq!(decided(&texts, &small), wanted);
    }
}

#[test]
fn a_menu_goes_from_every_page_but_the_first() {
    let entries = |from: u32| (from..from + 40).map(|n| format!("entry {n}, ")).collect::<String>();
    let menu = |page: u32| format!("{}[page {page}]{}", entries(0), entries(100));
    let texts: Vec<String> = (0..3).map(|page| format!("{} text {page}", menu(page))).collect();
    let spans = decided(&texts, &step(200, Some(Ratio::new(4, 5))));
    assert!(spans[0].is_empty());
    for (page, spans) in spans.iter().enumerate().skip(1) {
        // Both halves of the menu, and the page's number between them.
        let rest = without(&texts[page], spans).unwrap();
        assert!(rest.len() < 40 && rest.ends_with(&format!("{page}")), "{rest:?}");
    }
}

/// Comparing every run of such a text as a whole would take 10^12 steps.
#[test]
fn time_does_not_grow_with_the_length_of_a_run() {
    let (bytes, least) = (3usize << 20, 1usize << 20);
    let found = places(&"a".repeat(bytes), least);
    let wanted = |at: usize| match at {
        0 => Place::First,
        _ if at + least <= bytes => Place::Later,
        _ => Place::Only,
    };
    assert!(found.into_iter().enumerate().all(|(at, place)| place == wanted(at)));
}
