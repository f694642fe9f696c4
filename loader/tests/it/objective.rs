//! Fear: that a rearranged piece has other text than its document, other labels than its own next tokens, or depends on
//! anything but its address; that a mask moves with a cut; that a source without either key changes.

use std::fmt::Write as _;
use std::path::Path;

use contract::digest::block_sum;
use contract::{Class, Key, Purpose, Result, draw};
use loader::{
    Batch, OpenedCurriculum, RankSlice, batch, explain, hidden_by, rows, steps_without_labels,
};
use mixer::SampleSpec;
use proptest::prelude::*;

use crate::naive::{Plain, check_world};
use crate::support::{PhaseText, Text, curriculum, scratch, write_store_with};

/// The sentinels before prefix, middle and suffix: `<pre>`, `<mid>` and an id.
const SENTINELS: [u32; 3] = [7, 8, 59_999];

/// The settings of source "a": numerator and denominator of a rate, tenths that are SPM; `every` and context.
#[derive(Clone, Copy, Debug)]
struct Settings {
    fim: Option<(u64, u64, u64)>,
    mask: Option<(u64, u32)>,
    /// Tenths of the loss weight.
    weight: Option<u64>,
    packed: bool,
}

impl Settings {
    fn text(self) -> String {
        let mut text = String::new();
        if self.packed {
            text += "packing = \"best-fit\"\nlengths = { 16 = 1, 64 = 1, 32 = 1 }\n";
        }
        if let Some((num, den, tenths)) = self.fim {
            let [_, _, suffix] = SENTINELS;
            let _ = writeln!(
                text,
                "fim = {{ rate = \"{num}/{den}\", spm = 0.{tenths}, prefix = \"<pre>\", middle = \"<mid>\", suffix = {suffix} }}"
            );
        }
        if let Some((every, context)) = self.mask {
            let _ = writeln!(text, "mask = {{ every = {every}, context = {context} }}");
        }
        if let Some(tenths) = self.weight {
            let _ = writeln!(text, "loss_weight = \"{tenths}/10\"");
        }
        text
    }
}

fn open(dir: &Path, settings: Settings, amendments: &str) -> Result<OpenedCurriculum> {
    let phases = [
        PhaseText(7, 16, 4, 2, "a = 3, b = 1"),
        PhaseText(5, 64, 3, 1, "a = 1, b = 1"),
        PhaseText(7, 32, 4, 1, "a = 1"),
    ];
    let text = curriculum(&[dir], &["a", "b"], &phases);
    let text = text.replace("[source.a]\n", &format!("[source.a]\n{}", settings.text()));
    OpenedCurriculum::open_text(dir.join("run.toml"), text + amendments)
}

fn step(opened: &OpenedCurriculum, step: u64) -> Batch {
    batch(&opened.plan, opened.stores().unwrap(), step, RankSlice::WHOLE).unwrap()
}

/// A place of a row: its id, and whether it counts where it is the next token.
type Place = (u32, bool);

/// The places of one piece, tokens `piece` of the stream, and the label after them: one token after the other.
fn naive_piece(
    plain: &Plain,
    piece: &[usize],
    sample: &SampleSpec,
    settings: Settings,
    held: [bool; 2],
) -> (Vec<Place>, Option<Place>) {
    let first_of =
        |at: usize| plain.document.iter().position(|one| *one == plain.document[at]).unwrap();
    let same =
        |at: usize| at < plain.tokens.len() && plain.document[at] == plain.document[piece[0]];
    let place = |at: usize| {
        let counts = settings.mask.is_none_or(|(every, context)| {
            let context = context as usize;
            let hashed = at >= first_of(at) + context && {
                let before = &plain.tokens[at - context..at];
                let bytes: Vec<u8> = before.iter().flat_map(|id| id.to_le_bytes()).collect();
                u128::from(block_sum(&bytes)) < (1u128 << 64).div_ceil(u128::from(every))
            };
            !hashed
        });
        (plain.tokens[at], counts)
    };
    let (start, end) = (piece[0], piece[piece.len() - 1] + 1);
    let whole: Vec<Place> = piece.iter().map(|at| place(*at)).collect();
    let after = same(end).then(|| place(end));
    let Some((num, den, tenths)) = settings.fim else { return (whole, after) };
    let mut text = whole.clone();
    let tail: Vec<Place> =
        if held[1] && !same(end) { text.pop().into_iter().collect() } else { vec![] };
    let head: Vec<Place> = if held[0] && first_of(start) == start && !text.is_empty() {
        vec![text.remove(0)]
    } else {
        vec![]
    };
    if text.len() < 6 {
        return (whole, after);
    }
    text.truncate(text.len() - 3);
    let key = Key::from_seed(7).child("objective").child("a").nth(sample.epoch).nth(start as u64);
    let draw = |index: u64| u128::from(draw(key, Purpose::FillInMiddle, index));
    if draw(0) * u128::from(den) >= u128::from(num) << 64 {
        return (whole, after);
    }
    let cut = |index| usize::try_from((draw(index) * (text.len() as u128 + 1)) >> 64).unwrap();
    let mut cuts = [cut(2), cut(3)];
    cuts.sort_unstable();
    let (prefix, rest) = text.split_at(cuts[0]);
    let (middle, suffix) = rest.split_at(cuts[1] - cuts[0]);
    let [pre, mid, suf] = SENTINELS.map(|id| vec![(id, true)]);
    let spm = draw(1) * 10 < u128::from(tenths) << 64;
    let parts = match spm {
        false => [head, pre, prefix.to_vec(), suf, suffix.to_vec(), mid, middle.to_vec(), tail],
        true => [head, pre, suf, suffix.to_vec(), mid, prefix.to_vec(), middle.to_vec(), tail],
    };
    (parts.concat(), None)
}

/// Checks a row against the naive program.
fn check_row(found: &Batch, row: u64, plain: &Plain, settings: Settings, held: [bool; 2]) {
    let sample = &found.samples[row as usize];
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    for span in &sample.spans {
        let span: Vec<usize> = (span.start as usize..).take(span.tokens as usize).collect();
        for piece in span.chunk_by(|one, other| plain.document[*one] == plain.document[*other]) {
            let (places, after) = naive_piece(plain, piece, sample, settings, held);
            assert_eq!(places.len(), piece.len());
            tokens.extend(places.iter().map(|place| place.0 as i32));
            let next = places[1..].iter().copied().map(Some).chain([after]);
            let next = next.map(|place| place.filter(|(_, counts)| *counts));
            labels.extend(
                next.map(|place| {
                    (place.map_or(0, |place| place.0 as i32), u8::from(place.is_some()))
                }),
            );
        }
    }
    tokens.resize(found.seq_len as usize, 0);
    labels.resize(found.seq_len as usize, (0, 0));
    let columns = found.columns();
    assert_eq!(found.row(columns.tokens, row), tokens, "{sample:?}");
    let given = found
        .row(columns.labels, row)
        .iter()
        .copied()
        .zip(found.row(columns.mask, row).iter().copied());
    assert_eq!(given.collect::<Vec<_>>(), labels, "{sample:?}");
}

/// The pieces that `explain` names are those of the row, at the places and with the sentinels that it says.
fn check_pieces(opened: &OpenedCurriculum, found: &Batch, plain: &[Plain; 2]) {
    let all = explain::pieces(&opened.plan, opened.stores().unwrap(), &found.samples).unwrap();
    for (row, (sample, pieces)) in found.samples.iter().zip(all).enumerate() {
        let tokens = found.row(found.columns().tokens, row as u64);
        for piece in pieces {
            let place = &tokens[piece.place.start as usize..piece.place.end as usize];
            let mut sentinels = Vec::new();
            for (id, token) in place.iter().zip(piece.order()) {
                let text = |token: u64| {
                    plain[sample.source].tokens[(piece.record.first_token + token) as usize]
                };
                match token {
                    Some(token) => assert_eq!(*id as u32, text(token)),
                    None => sentinels.push(*id as u32),
                }
            }
            sentinels.sort_unstable();
            assert_eq!(sentinels.is_empty(), piece.infill.is_none());
            assert!(sentinels.is_empty() || sentinels == SENTINELS);
        }
    }
}

fn settings() -> impl Strategy<Value = Settings> {
    let fim = (1u64..=4, 0u64..10).prop_map(|(quarters, tenths)| (quarters, 4, tenths));
    let mask = (2u64..6, 1u32..20);
    let weight = prop_oneof![Just(None), Just(Some(10)), (1u64..90).prop_map(Some)];
    (prop::option::weighted(0.8, fim), prop::option::weighted(0.6, mask), weight, any::<bool>())
        .prop_map(|(fim, mask, weight, packed)| Settings { fim, mask, weight, packed })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Every row of every step equals the naive one: packed or cut, across windows, epochs and lengths, whatever tokens
    /// the store puts around documents. Ranks, and rows asked for alone, give the same. Source "b" stays as it is.
    #[test]
    fn rows_are_those_of_the_naive_program(
        lengths in prop::collection::vec(prop_oneof![4 => 1u64..40, 1 => 1u64..200], 8..40),
        settings in settings(),
        held: [bool; 2],
        ban in prop::option::of((1u64..=19, any::<prop::sample::Index>())),
    ) {
        let texts = [Text::generate("a", &lengths, 50), Text::generate("b", &[300, 9], 50)];
        let plain = [Plain::new(&texts[0].train), Plain::new(&texts[1].train)];
        let dir = scratch();
        let path = dir.path().join("store");
        std::fs::create_dir(&path).unwrap();
        write_store_with(&path, &texts, 2, 128, held.map(|held| held.then_some(1)));
        let none = Settings { fim: None, mask: None, weight: None, ..settings };
        let (was, opened) = (open(&path, none, ""), open(&path, settings, ""));
        prop_assume!(was.is_ok(), "no document is packed at one of the lengths");
        let (was, opened) = (was.unwrap(), opened.unwrap());
        let (plan, stores) = (&opened.plan, opened.stores().unwrap());
        let weight = settings.weight.map_or(1.0, |tenths| tenths as f32 / 10.0);
        prop_assert_eq!(
            was.plan.digest_through(19) == plan.digest_through(19),
            settings.fim.is_none() && settings.mask.is_none() && weight == 1.0
        );
        for number in 1..=plan.steps() {
            let (before, found) = (step(&was, number), step(&opened, number));
            prop_assert_eq!(&found.boundaries, &before.boundaries);
            prop_assert_eq!(found.columns().positions, before.columns().positions);
            for row in 0..found.rows {
                match found.samples[row as usize].source {
                    0 => check_row(&found, row, &plain[0], settings, held),
                    _ => prop_assert_eq!(found.sequences[row as usize], before.sequences[row as usize]),
                }
                let own = if found.samples[row as usize].source == 0 { weight } else { 1.0 };
                prop_assert_eq!(found.weights.get(row as usize).copied().unwrap_or(1.0), own);
                prop_assert!(own == 1.0 || found.sequences[row as usize] != before.sequences[row as usize]);
                let alone = rows(plan, stores, number, [row]).unwrap();
                prop_assert_eq!(alone.sequences[0], found.sequences[row as usize]);
            }
            let labels = found.columns().mask.iter().map(|label| u64::from(*label)).sum::<u64>();
            prop_assert_eq!(found.label_count, labels);
            check_pieces(&opened, &found, &plain);
            for world in [1, 2, 3] {
                check_world(plan, stores, &found, world);
            }
        }
        let Some((from, document)) = ban else { return Ok(()) };
        let document = document.index(lengths.len());
        let ban = format!("[[amendment]]\nstep = {from}\nban = {{ a = [{document}] }}\n");
        let banned = open(&path, settings, &ban).unwrap();
        let labels = |opened: &OpenedCurriculum| {
            (1..=19).map(|number| step(opened, number).label_count).sum::<u64>()
        };
        let (_, hidden) = hidden_by(&banned, &banned.plan.bans()[0]).unwrap();
        prop_assert_eq!(labels(&opened) - labels(&banned), hidden);
    }
}

/// Rates are met, each order is used, cuts are uniform, and another epoch has other cuts.
#[test]
fn pieces_are_rearranged_as_often_as_asked() {
    let texts = [Text::generate("a", &[32; 400], 50), Text::generate("b", &[900], 50)];
    let dir = scratch();
    write_store_with(dir.path(), &texts, 2, 128, [None; 2]);
    let phases = [PhaseText(400, 32, 4, 1, "a = 1")];
    let fim = Settings { fim: Some((3, 4, 2)), mask: None, weight: None, packed: false }.text();
    let text = curriculum(&[dir.path()], &["a", "b"], &phases);
    let text = text.replace("[source.a]\n", &format!("[source.a]\n{fim}"));
    let opened = OpenedCurriculum::open_text(dir.path().join("run.toml"), text).unwrap();
    let (mut pieces, mut lengths, mut spm) = (0, [0.0; 3], 0.0);
    let mut cuts = std::collections::BTreeMap::new();
    let mut again = [0; 2];
    for number in 1..=opened.plan.steps() {
        let found = step(&opened, number);
        let all = explain::pieces(&opened.plan, opened.stores().unwrap(), &found.samples).unwrap();
        for piece in all.into_iter().flatten() {
            pieces += 1;
            if let Some(infill) = &piece.infill {
                let parts = [&infill.prefix, &infill.middle, &infill.suffix];
                lengths.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part.len() as f64);
                spm += f64::from(u8::from(infill.mode == loader::InfillMode::Spm));
            }
            if let Some(before) = cuts.insert(piece.document, piece.infill.clone()) {
                again[usize::from(before == piece.infill)] += 1;
            }
        }
    }
    let count = (lengths.iter().sum::<f64>() / 29.0).round();
    assert_eq!(pieces, 1600);
    // Five standard deviations.
    assert!((count - 1200.0).abs() < 5.0 * (1600.0f64 * 0.75 * 0.25).sqrt(), "{count}");
    assert!((spm - 0.2 * count).abs() < 5.0 * (count * 0.16).sqrt(), "{spm} of {count}");
    // Parts of 29 tokens at two uniform places: a mean of a third each, and a standard deviation of about 7.
    for sum in lengths {
        assert!((sum / count - 29.0 / 3.0).abs() < 5.0 * 7.5 / count.sqrt(), "{lengths:?}");
    }
    assert!(again[0] > 9 * again[1], "an epoch repeats the one before: {again:?}");
}

#[test]
fn sentinels_that_the_tokenizer_lacks_are_refused() {
    let dir = scratch();
    let texts = [Text::generate("a", &[40; 40], 50), Text::generate("b", &[900], 50)];
    write_store_with(dir.path(), &texts, 2, 128, [None; 2]);
    let refused = |prefix: &str, middle: &str| {
        let phases = [PhaseText(1, 32, 4, 1, "a = 1")];
        let fim =
            format!("fim = {{ rate = 1, prefix = {prefix}, middle = {middle}, suffix = 9 }}\n");
        let text = curriculum(&[dir.path()], &["a", "b"], &phases);
        let text = text.replace("[source.a]\n", &format!("[source.a]\n{fim}"));
        let fault =
            OpenedCurriculum::open_text(dir.path().join("run.toml"), text).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        fault.to_string()
    };
    let said = refused("\"<pro>\"", "\"<mid>\"");
    assert!(said.contains("run.toml:11:19: ") && said.contains("did you mean `<pre>`?"), "{said}");
    let said = refused("65536", "\"<mid>\"");
    assert!(said.contains("no token with this id") && said.contains("65536"), "{said}");
    let said = refused("8", "\"<mid>\"");
    assert!(said.contains("`middle` is a token that marks another part"), "{said}");
}

/// A text of one token has one context, so a mask takes all of its labels or none: no run is long enough to be
/// sure of a label.
#[test]
fn a_step_may_lose_its_labels_to_a_ban_and_a_mask() {
    let context =
        (1..99).find(|context| block_sum(&5u32.to_le_bytes().repeat(*context)) >> 63 == 0);
    let mut texts = [Text::generate("a", &[356, 28], 50), Text::generate("b", &[900], 50)];
    texts[0].train[0].fill(5);
    let dir = scratch();
    write_store_with(dir.path(), &texts, 2, 128, [None; 2]);
    let phases = [PhaseText(3, 128, 1, 1, "a = 1")];
    let text = curriculum(&[dir.path()], &["a", "b"], &phases);
    let open = |mask: &str| {
        let text = text.replace("[source.a]\n", &format!("[source.a]\n{mask}"));
        let ban = "[[amendment]]\nstep = 1\nban = { a = [1] }\n";
        OpenedCurriculum::open_text(dir.path().join("run.toml"), text + ban).unwrap()
    };
    let mask = format!("mask = {{ every = 2, context = {} }}\n", context.unwrap());
    let (plain, masked) = (open(""), open(&mask));
    let last = |number: &u64| step(&masked, *number).samples[0].spans[0].start == 256;
    let wanted: Vec<u64> = (1..=3).filter(last).collect();
    assert_eq!((wanted.len(), step(&masked, wanted[0]).label_count), (1, 0));
    assert_eq!(steps_without_labels(&masked).unwrap(), wanted);
    assert_eq!(steps_without_labels(&plain).unwrap(), Vec::<u64>::new());
}
