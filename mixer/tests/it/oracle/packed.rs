//! Packed sources compared with lists of packs in permuted order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use contract::{Digest, Key, Permutation, Result};
use mixer::{
    Composition, Curriculum, DataPlan, PackPlace, PackTable, PackTables, PackedLength, SourceFacts,
    Span, Visit,
};
use proptest::prelude::*;

/// Packs as lists: for each length the contiguous ones, the joined ones, those with free space.
#[derive(Debug)]
pub(super) struct Lists {
    lengths: Vec<PackedLength>,
    pub(super) packs: Vec<Vec<Vec<Span>>>,
}

impl Lists {
    /// Cuts a stream into packs of these lengths by an arbitrary rule.
    pub(super) fn new(tokens: u64, cuts: &[(usize, u32, u32)], lengths: &[u32]) -> Self {
        let mut kinds = vec![[Vec::new(), Vec::new(), Vec::new()]; lengths.len()];
        let mut at = 0;
        for &(length, pieces, lacks) in cuts.iter().cycle() {
            let length = length % lengths.len();
            let seq_len = lengths[length];
            let whole = u64::from(seq_len - lacks % seq_len).min(tokens - at);
            let pieces = u64::from(pieces).clamp(1, whole.max(1));
            let mut pack = Vec::new();
            for piece in 0..pieces {
                let tokens = whole / pieces + u64::from(piece < whole % pieces);
                pack.push(Span { start: at, tokens: tokens as u32 });
                at += tokens;
            }
            let kind = if whole < u64::from(seq_len) { 2 } else { usize::from(pieces > 1) };
            kinds[length][kind].push(pack);
            if at == tokens {
                break;
            }
        }
        let size = |(kinds, seq_len): (&[Vec<Vec<Span>>; 3], &u32)| PackedLength {
            seq_len: *seq_len,
            contiguous: kinds[0].len() as u64,
            joined: kinds[1].len() as u64,
            padding: kinds[2].iter().map(|pack| seq_len - total(pack)).collect(),
            documents: 0,
            cut: 0,
        };
        let sizes = kinds.iter().zip(lengths).map(size).collect();
        Lists { lengths: sizes, packs: kinds.into_iter().map(|kinds| kinds.concat()).collect() }
    }

    /// The epoch and the text of the sample of source `name` after `served` others of this length.
    pub(super) fn served(
        &self,
        seed: u64,
        name: &str,
        seq_len: u32,
        served: u64,
    ) -> (u64, Vec<Span>) {
        let packs = &self.packs[self.lengths.iter().position(|it| it.seq_len == seq_len).unwrap()];
        let (epoch, place) = (served / packs.len() as u64, served % packs.len() as u64);
        let key = Key::from_seed(seed).child("packs").child(name).nth(u64::from(seq_len));
        let order = Permutation::new(key.nth(epoch), packs.len() as u64);
        (epoch, packs[order.forward(place) as usize].clone())
    }
}

fn total(pack: &[Span]) -> u32 {
    pack.iter().map(|piece| piece.tokens).sum()
}

impl PackTable for Lists {
    fn digest(&self) -> Digest {
        Digest::of_bytes(format!("{self:?}").as_bytes())
    }

    fn lengths(&self) -> &[PackedLength] {
        &self.lengths
    }

    fn spans(&self, length: usize, pack: u64) -> Result<Vec<Span>> {
        Ok(self.packs[length][pack as usize].clone())
    }

    fn places(&self, tokens: Range<u64>) -> Result<Vec<PackPlace>> {
        let mut found = Vec::new();
        for (length, packs) in self.packs.iter().enumerate() {
            for (pack, pieces) in (0u64..).zip(packs) {
                let mut offset = 0;
                for piece in pieces {
                    let end = piece.start + u64::from(piece.tokens);
                    let inside = piece.start.max(tokens.start)..end.min(tokens.end);
                    if !inside.is_empty() {
                        let offset = offset + (inside.start - piece.start) as u32;
                        found.push(PackPlace { length, pack, offset, tokens: inside });
                    }
                    offset += piece.tokens;
                }
            }
        }
        Ok(found)
    }
}

const LENGTHS: [u32; 2] = [6, 12];

fn text(phases: &[(bool, u64, u64)]) -> String {
    let mut text =
        "store = \"x\"\nseed = 9\n[source.a]\nmax_epochs = 1000000\npacking = \"best-fit\"\n\
                    lengths = { 6 = 1, 12 = 2 }\n[source.b]\nmax_epochs = 1000000\n"
            .to_owned();
    for (number, (long, steps, batch)) in phases.iter().enumerate() {
        let length = LENGTHS[usize::from(*long)];
        text += &format!(
            "[[phase]]\nname = \"{number}\"\nsteps = {steps}\nseq_len = {length}\nbatch = {batch}\n\
             mix = {{ a = 2, b = 1 }}\n"
        );
    }
    text
}

fn facts(tokens: [u64; 2]) -> Vec<SourceFacts> {
    let fact = |(name, tokens): (&str, u64)| SourceFacts {
        name: name.to_owned(),
        tokens,
        documents: 1,
        unit: 12,
        selection: None,
    };
    ["a", "b"].into_iter().zip(tokens).map(fact).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn a_packed_source_serves_its_packs_length_by_length(
        tokens in [60u64..400, 1u64..200],
        cuts in prop::collection::vec((0usize..2, 1u32..4, 0u32..9), 2..20),
        phases in prop::collection::vec((any::<bool>(), 1u64..20, 1u64..4), 1..5),
    ) {
        let lists = Arc::new(Lists::new(tokens[0], &cuts, &LENGTHS));
        prop_assume!(lists.packs.iter().all(|packs| !packs.is_empty()));
        let curriculum = Curriculum::parse(&text(&phases), "test.toml").unwrap();
        let tables = || PackTables::from([("a".to_owned(), Arc::clone(&lists) as Arc<dyn PackTable>)]);
        let plan = DataPlan::with_packs(&curriculum, &facts(tokens), tables()).unwrap();
        let mut served = [0u64; 2];
        let mut seen: BTreeMap<u64, Vec<(u64, u32)>> = BTreeMap::new();
        let mut taken = 0;
        for (phase, (long, ..)) in phases.iter().enumerate() {
            let length = usize::from(*long);
            let planned = &plan.phases()[phase];
            let part = planned.uses.iter().position(|part| part.source == 0).unwrap();
            prop_assert_eq!(planned.uses[part].tokens_before, taken);
            let mut composition = Composition::default();
            for sample in planned.first_sample..planned.first_sample + planned.samples() {
                let found = plan.sample(sample).unwrap();
                if found.source != 0 {
                    continue;
                }
                let (epoch, pack) = lists.served(9, "a", LENGTHS[length], served[length]);
                prop_assert_eq!((found.epoch, &found.spans), (epoch, &pack));
                served[length] += 1;
                let full = total(&pack) == LENGTHS[length];
                composition += Composition {
                    contiguous: u64::from(full && pack.len() == 1),
                    joined: u64::from(full && pack.len() > 1),
                    padded: u64::from(!full),
                };
                let mut offset = 0;
                for piece in &pack {
                    for token in 0..piece.tokens {
                        let at = (sample, offset + token);
                        seen.entry(piece.start + u64::from(token)).or_default().push(at);
                    }
                    offset += piece.tokens;
                }
                taken += u64::from(offset);
            }
            prop_assert_eq!(plan.composition(phase, part), composition);
            prop_assert_eq!(planned.uses[part].tokens_before + planned.uses[part].tokens, taken);
        }
        for token in 0..tokens[0] {
            let visits = plan.visits(0, token..token + 1).unwrap();
            let found: Vec<_> = visits.iter().map(|at: &Visit| (at.sample, at.offset_in_sequence)).collect();
            prop_assert_eq!(found, seen.remove(&token).unwrap_or_default());
        }
        let all = plan.visits(0, 0..tokens[0]).unwrap();
        prop_assert_eq!(all.iter().map(|visit| u64::from(visit.tokens)).sum::<u64>(), taken);
        let begun = served.iter().zip(&lists.packs).map(|(served, packs)| served.div_ceil(packs.len() as u64));
        prop_assert_eq!(plan.epochs_needed(0), begun.max().unwrap());
        // The plan depends on where documents are cut, and the packs are part of its digest.
        let unpacked = text(&phases).replace("packing = \"best-fit\"\nlengths = { 6 = 1, 12 = 2 }\n", "");
        let unpacked = Curriculum::parse(&unpacked, "test.toml").unwrap();
        let unpacked = DataPlan::new(&unpacked, &facts(tokens)).unwrap();
        if served != [0, 0] {
            prop_assert_ne!(unpacked.digest_through(plan.steps()), plan.digest_through(plan.steps()));
        }
    }

    #[test]
    fn a_source_that_runs_out_of_packs_is_refused_with_the_step(
        cuts in prop::collection::vec((0usize..2, 1u32..4, 0u32..9), 2..20), steps in 1u64..60,
    ) {
        let lists = Arc::new(Lists::new(200, &cuts, &LENGTHS));
        prop_assume!(lists.packs.iter().all(|packs| !packs.is_empty()));
        let text = format!(
            "store = \"x\"\n[source.a]\npacking = \"best-fit\"\nlengths = {{ 6 = 1, 12 = 1 }}\n[[phase]]\nname = \"p\"\n\
             steps = {steps}\nseq_len = 12\nbatch = 2\nmix = {{ a = 1 }}\n"
        );
        let curriculum = Curriculum::parse(&text, "test.toml").unwrap();
        let tables = PackTables::from([("a".to_owned(), Arc::clone(&lists) as Arc<dyn PackTable>)]);
        let packs = lists.packs[1].len() as u64;
        match DataPlan::with_packs(&curriculum, &facts([200, 1]), tables) {
            Ok(_) => prop_assert!(steps * 2 <= packs),
            Err(fault) => {
                prop_assert!(steps * 2 > packs);
                let (step, said) = (packs / 2 + 1, fault.to_string());
                prop_assert!(said.contains(&format!("runs out at step {step}")), "{}", said);
                prop_assert!(said.contains(&format!("takes {} of its {packs} packs", steps * 2)), "{}", said);
            }
        }
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let curriculum = |lines: &str| {
        let text = format!(
            "store = \"x\"\n[source.a]\n{lines}\n[[phase]]\nname = \"p\"\nsteps = 1\nseq_len = 12\nbatch = 1\nmix = {{ a = 1 }}\n"
        );
        Curriculum::parse(&text, "test.toml")
    };
    for (lines, says) in [
        ("packing = \"first-fit\"", "best-fit"),
        ("packing = \"best-fit\"", "lengths"),
        ("packing = \"best-fit\"\nlengths = { 12 = 0 }", "weight of length 12"),
        ("packing = \"best-fit\"\nlengths = { 012 = 1 }", "not a number of tokens"),
        ("packing = \"best-fit\"\nlengths = { twelve = 1 }", "test.toml:4"),
        ("packing = \"best-fit\"\nlengths = {}", "no length is declared"),
        ("packing = \"best-fit\"\nlengths = { 12 = 1 }\npack_documents = 0", "at least 1"),
        ("lengths = { 12 = 1 }", "`lengths` is only asked for where documents are packed"),
        ("packing = \"concatenate\"\npack_documents = 3", "`pack_documents` is only asked for"),
    ] {
        let fault = curriculum(lines).unwrap_err().to_string();
        assert!(fault.contains(says), "{lines}: {fault}");
    }
    let lists: Arc<dyn PackTable> = Arc::new(Lists::new(30, &[(0, 1, 0)], &[6, 24]));
    let best_fit = |lengths: &str| {
        curriculum(&format!("packing = \"best-fit\"\nlengths = {lengths}")).unwrap()
    };
    let refused = |lengths: &str, tables: PackTables| {
        DataPlan::with_packs(&best_fit(lengths), &facts([30, 1]), tables)
            .map(drop)
            .unwrap_err()
            .to_string()
    };
    let tables = || PackTables::from([("a".to_owned(), Arc::clone(&lists))]);
    assert!(refused("{ 12 = 1 }", PackTables::new()).contains("a store stub"));
    let fault = refused("{ 6 = 1, 24 = 1 }", tables());
    assert!(fault.contains("not packed at this length") && fault.contains("[6, 24]"), "{fault}");
    let lists: Arc<dyn PackTable> = Arc::new(Lists::new(30, &[(0, 1, 0)], &[6, 12]));
    let tables = PackTables::from([("a".to_owned(), lists)]);
    assert!(refused("{ 6 = 1, 12 = 1 }", tables).contains("no document of \"a\""));
}

#[test]
fn packing_is_part_of_what_a_curriculum_means() {
    let text = |lines: &str| {
        format!(
            "store = \"x\"\n[source.a]\n{lines}\n[[phase]]\nname = \"p\"\nsteps = 3\nseq_len = 6\nbatch = 1\nmix = {{ b = 1 }}\n\
             [[phase]]\nname = \"q\"\nsteps = 3\nseq_len = 6\nbatch = 1\nmix = {{ a = 1 }}\n"
        )
    };
    let parse = |lines: &str| Curriculum::parse(&text(lines), "test.toml").unwrap();
    let one = parse("packing = \"best-fit\"\nlengths = { 6 = 2, 12 = 4 }");
    let same = parse(
        "max_epochs = 1\nlengths = { 12 = 2, 6 = 1 }\npack_documents = 256\npacking = \"best-fit\"",
    );
    assert_eq!(one.canonical(), same.canonical());
    assert_eq!(
        Curriculum::parse(&one.canonical(), "again.toml").unwrap().canonical(),
        one.canonical()
    );
    assert!(one.difference(&same).is_empty());
    let plain = parse("packing = \"concatenate\"");
    assert_eq!(plain.canonical(), parse("").canonical());
    let found = plain.difference(&one);
    assert_eq!((found.len(), found[0].first_step), (1, 4));
    assert_eq!(
        found[0].to_string(),
        "source.a.packing: concatenate became best-fit, lengths = { 6 = 1, 12 = 2 }, pack_documents = 256, \
         which matters from step 4"
    );
}
