//! Fear: that a banned document is still visible to the model, or that hiding it moves anything else.

use std::path::Path;

use contract::Result;
use loader::{Batch, OpenedCurriculum, RankSlice, batch, explain};
use proptest::prelude::*;

use crate::support::{PhaseText, Text, curriculum, scratch, write_store};

const NAMES: [&str; 2] = ["a", "b"];

/// A curriculum of three phases over the store in `dir`, followed by `amendments`.
fn open(dir: &Path, packed: bool, amendments: &str) -> Result<OpenedCurriculum> {
    let phases = [
        PhaseText(9, 16, 3, 1, "a = 2, b = 1"),
        PhaseText(7, 64, 2, 1, "a = 1, b = 3"),
        PhaseText(9, 32, 3, 3, "a = 1"),
    ];
    let mut text = curriculum(&[dir], &NAMES, &phases) + amendments;
    if packed {
        let packing = "[source.a]\npacking = \"best-fit\"\nlengths = { 16 = 1, 64 = 1, 32 = 1 }\n";
        text = text.replace("[source.a]\n", packing);
    }
    OpenedCurriculum::open_text(dir.join("run.toml"), text)
}

fn step(opened: &OpenedCurriculum, step: u64) -> Batch {
    batch(&opened.plan, opened.stores().unwrap(), step, RankSlice::WHOLE).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// From its ban on, no text of the document reaches a batch: two stores that differ only in that text give the same
    /// batches. Everything else stays in place, and every label is accounted for.
    #[test]
    fn a_banned_document_cannot_be_heard(
        lengths in prop::collection::vec(prop::collection::vec(1u64..90, 3..20), 2),
        bans in prop::collection::vec((1u64..=25, any::<prop::sample::Index>(), 0usize..2), 1..5),
        packed: bool,
    ) {
        let texts: Vec<Text> =
            NAMES.iter().zip(&lengths).map(|(name, lengths)| Text::generate(name, lengths, 60_000)).collect();
        let mut bans: Vec<(u64, usize, usize)> =
            bans.into_iter().map(|(step, at, source)| (step, source, at.index(lengths[source].len()))).collect();
        bans.sort_unstable();
        let mut seen = Vec::new();
        bans.retain(|(_, source, document)| {
            let new = !seen.contains(&(*source, *document));
            seen.push((*source, *document));
            new
        });
        let mut other = texts.clone();
        for (_, source, document) in &bans {
            other[*source].train[*document].iter_mut().for_each(|token| *token ^= 0x55);
        }
        let (here, there) = (scratch(), scratch());
        write_store(here.path(), &texts, 2, 128);
        write_store(there.path(), &other, 2, 128);
        let amendments: String = bans
            .iter()
            .map(|(step, source, document)| {
                format!("[[amendment]]\nstep = {step}\nban = {{ {} = [{document}] }}\n", NAMES[*source])
            })
            .collect();
        let plain = open(here.path(), packed, "");
        prop_assume!(!packed || plain.is_ok(), "no document is packed at one of the lengths");
        let open = |dir: &Path| open(dir, packed, &amendments).unwrap();
        let (plain, banned, changed) = (plain.unwrap(), open(here.path()), open(there.path()));
        let mut hidden = 0;
        for number in 1..=25 {
            let (was, is) = (step(&plain, number), step(&banned, number));
            if number >= bans.last().unwrap().0 {
                prop_assert_eq!(&is, &step(&changed, number), "step {}", number);
            }
            if number < bans[0].0 {
                prop_assert_eq!(&is, &was, "step {}", number);
            }
            prop_assert_eq!((is.columns().positions, &is.boundaries), (was.columns().positions, &was.boundaries));
            let pieces = explain::pieces(&banned.plan, banned.stores().unwrap(), &is.samples).unwrap();
            for (row, pieces) in pieces.into_iter().enumerate() {
                let mut places = vec![false; is.seq_len as usize];
                for piece in pieces {
                    let named = |(from, source, document): &(u64, usize, usize)| {
                        *from <= number && piece.record.shown_id() == format!("{}-{document}", NAMES[*source])
                    };
                    prop_assert_eq!(piece.banned, bans.iter().any(named), "{}", piece.record.shown_id());
                    places[piece.place.start as usize..piece.place.end as usize].fill(piece.banned);
                }
                let first = row * is.seq_len as usize;
                for (place, gone) in places.into_iter().enumerate() {
                    let of = |batch: &Batch| {
                        let at = first + place;
                        (batch.columns().tokens[at], batch.columns().labels[at], batch.columns().mask[at])
                    };
                    prop_assert_eq!(of(&is), if gone { (0, 0, 0) } else { of(&was) });
                }
            }
            hidden += was.label_count - is.label_count;
        }
        let told: u64 = banned.plan.bans().iter().map(|ban| banned.plan.hidden_by(ban).unwrap().1).sum();
        prop_assert_eq!(told, hidden);
    }
}
