//! Settings of speed affect nothing: threads, depth, open files and earlier reads leave no trace in a batch.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::support::{PhaseText, Text, curriculum, plan, scratch, write_store};
use contract::{Class, Digest};
use loader::{
    Batch, BatchMemory, Columns, ColumnsMut, PrefetchOptions, PrefetchSource, Prefetcher,
    RankSlice, Stores, batch,
};
use mixer::DataPlan;
use proptest::prelude::*;
use store::read::ReadCache;

fn two_sources() -> Vec<Text> {
    let lengths = |salt: u64| (0..300).map(|i| 1 + (i * i * salt) % 97).collect::<Vec<u64>>();
    ["web", "math"]
        .into_iter()
        .zip([3, 5])
        .map(|(name, salt)| Text {
            shard_tokens: 700,
            ..Text::generate(name, &lengths(salt), 60_000)
        })
        .collect()
}

fn world(dir: &std::path::Path, cache: Arc<ReadCache>) -> (Arc<DataPlan>, Arc<Stores>) {
    let stores = Stores::open_with(&[dir], cache).unwrap();
    let phases = [
        PhaseText(12, 64, 6, 2, "web = 0.7, math = 0.3"),
        PhaseText(8, 256, 4, 1, "web = 1, math = 1"),
    ];
    let text = curriculum(&[dir], &["web", "math"], &phases);
    (Arc::new(plan(&text, &stores)), Arc::new(stores))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn prefetching_changes_no_bit(
        threads in 1usize..6, depth in 1usize..6, files in 1u64..40, from in 1u64..20, rank in 0u32..3,
    ) {
        let dir = scratch();
        write_store(dir.path(), &two_sources(), 2, 512);
        let (plan, stores) = world(dir.path(), ReadCache::new(files));
        let slice = RankSlice::new(rank, 3).unwrap();
        let options = PrefetchOptions { threads, depth };
        let stream = Prefetcher::start(Arc::clone(&plan), stores, from..21, slice, options, Ok).unwrap();
        let found: Vec<Batch> = stream.map(Result::unwrap).collect();
        // Backwards, from a freshly opened store: no step depends on earlier reads.
        let (plan, stores) = world(dir.path(), ReadCache::new(1));
        let mut wanted: Vec<Batch> =
            (from..21).rev().map(|step| batch(&plan, &stores, step, slice).unwrap()).collect();
        wanted.reverse();
        prop_assert_eq!(found, wanted);
    }
}

/// Memory as a device might have it: separate columns, the mask first, garbage as initial content. Counts its
/// instances.
struct Apart {
    words: Vec<i32>,
    mask: Vec<u8>,
    alive: Arc<AtomicUsize>,
}

impl Apart {
    fn take(tokens: usize, alive: &Arc<AtomicUsize>) -> Box<dyn BatchMemory> {
        alive.fetch_add(1, Ordering::Relaxed);
        let words = vec![-7; 3 * (tokens + 5)];
        Box::new(Apart { words, mask: vec![9; tokens], alive: Arc::clone(alive) })
    }
}

impl BatchMemory for Apart {
    fn columns(&self) -> Columns<'_> {
        let tokens = self.mask.len();
        let mut parts = self.words.chunks(tokens + 5).map(|part| &part[..tokens]);
        let mut next = || parts.next().unwrap();
        Columns { tokens: next(), labels: next(), positions: next(), mask: &self.mask }
    }

    fn columns_mut(&mut self) -> contract::Result<ColumnsMut<'_>> {
        let tokens = self.mask.len();
        let mut parts = self.words.chunks_mut(tokens + 5).map(|part| &mut part[..tokens]);
        let mut next = || parts.next().unwrap();
        let (tokens, labels, positions) = (next(), next(), next());
        Ok(ColumnsMut { tokens, labels, positions, mask: &mut self.mask })
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Readers write each batch once, into memory that the caller supplies. They run the check on their own threads, and
/// its results reach the last stage in step order.
#[test]
fn readers_write_the_callers_memory_and_the_last_stage_sees_it_in_order() {
    let dir = scratch();
    write_store(dir.path(), &two_sources(), 2, 512);
    let (plan, stores) = world(dir.path(), ReadCache::new(8));
    let (steps, alive) = (plan.steps(), Arc::new(AtomicUsize::new(0)));
    let check = |batch: Batch| {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        Ok((thread, batch))
    };
    let mut calls = 0;
    let last = move |(thread, mut batch): (String, Batch)| {
        calls += 1;
        let place =
            batch.memory_mut::<Apart>().expect("it lies where it was asked for").words.as_ptr();
        assert_eq!(batch.columns().tokens.as_ptr(), place);
        Ok((calls, thread, batch))
    };
    let slice = |step| RankSlice::new((step % 3) as u32, 3);
    let ahead = PrefetchSource {
        plan: Arc::clone(&plan).into(),
        stores: Arc::clone(&stores),
        steps: 1..steps + 1,
        options: PrefetchOptions { threads: 3, depth: 2 },
    };
    let counted = Arc::clone(&alive);
    let memory = move |tokens| Ok(Apart::take(tokens, &counted));
    let ahead = Prefetcher::by_step(ahead, slice, memory, check, last).unwrap();
    let mut found = 0;
    for (number, one) in (1..).zip(ahead) {
        let (call, thread, mut found_batch) = one.unwrap();
        assert_eq!((call, found_batch.step), (number, number));
        assert!(["loader-0", "loader-1", "loader-2"].contains(&thread.as_str()), "{thread}");
        let mut wanted = batch(&plan, &stores, number, slice(number).unwrap()).unwrap();
        assert_eq!(found_batch, wanted);
        if wanted.rows > 0 {
            let place = 3..wanted.seq_len / 2;
            assert_eq!(found_batch.hide(0, place.clone()), wanted.hide(0, place));
            assert_eq!((&found_batch, found_batch.digest()), (&wanted, wanted.digest()));
        }
        let copy = found_batch.clone();
        drop(found_batch);
        assert_eq!(copy, wanted, "a copy has memory of its own");
        assert!(alive.load(Ordering::Relaxed) <= 2 + 3 + 2, "memory goes with its batch");
        found += 1;
    }
    assert_eq!((found, alive.load(Ordering::Relaxed)), (steps, 0));
}

/// Summarizing a step needs little memory, and its digest equals that of the whole batch.
#[test]
fn a_digest_holds_only_so_many_tokens() {
    let dir = scratch();
    write_store(dir.path(), &two_sources(), 2, 512);
    let (plan, stores) = world(dir.path(), ReadCache::new(8));
    let steps = 1..plan.steps() + 1;
    let wanted: Vec<(u64, Digest)> = steps
        .clone()
        .map(|step| (step, batch(&plan, &stores, step, RankSlice::WHOLE).unwrap().digest()))
        .collect();
    for (held, threads) in [(0, 1), (64, 3), (200, 2), (512, 1), (u64::MAX, 3)] {
        let alive = Arc::new(AtomicUsize::new(0));
        let memory = move |tokens: usize| {
            // The longest rows are of 256 tokens.
            assert!(tokens as u64 <= held.max(256), "{tokens} tokens where {held} may be held");
            assert!(alive.load(Ordering::Relaxed) < threads, "one piece a thread");
            Ok(Apart::take(tokens, &alive))
        };
        let options = PrefetchOptions { threads, depth: 2 };
        let (plan, stores) = (Arc::clone(&plan).into(), Arc::clone(&stores));
        let ahead = PrefetchSource { plan, stores, steps: steps.clone(), options };
        let found = Prefetcher::summaries_in(ahead, held, memory).unwrap();
        let found = found.map(Result::unwrap).map(|found| (found.step, found.digest));
        assert_eq!(found.collect::<Vec<_>>(), wanted);
    }
}

/// One step is enough for all threads: each of them begins with a row before any has its second.
#[test]
fn threads_share_the_rows_of_a_step() {
    let dir = scratch();
    write_store(dir.path(), &two_sources(), 2, 512);
    let (plan, stores) = world(dir.path(), ReadCache::new(8));
    let wanted = batch(&plan, &stores, 13, RankSlice::WHOLE).unwrap().digest();
    let (threads, begun) = (3, (Mutex::new(BTreeSet::new()), Condvar::new()));
    let alive = Arc::new(AtomicUsize::new(0));
    let memory = move |tokens| {
        let (names, changed) = &begun;
        let mut names = names.lock().unwrap();
        names.insert(std::thread::current().name().unwrap().to_owned());
        changed.notify_all();
        let few = |names: &mut BTreeSet<String>| names.len() < threads;
        let waited = changed.wait_timeout_while(names, Duration::from_secs(60), few).unwrap();
        assert!(!waited.1.timed_out(), "a thread took no part");
        Ok(Apart::take(tokens, &alive))
    };
    let options = PrefetchOptions { threads, depth: threads };
    let ahead = PrefetchSource { plan: plan.into(), stores, steps: 13..14, options };
    let mut found = Prefetcher::summaries_in(ahead, 256, memory).unwrap();
    assert_eq!(found.next().unwrap().unwrap().digest, wanted);
    assert_eq!(found.next(), None);
}

#[test]
fn shard_cuts_and_token_width_leave_no_trace() {
    let digests = |shard_tokens: u64, token_bytes: u32| -> Vec<Digest> {
        let dir = scratch();
        let texts: Vec<Text> =
            two_sources().into_iter().map(|text| Text { shard_tokens, ..text }).collect();
        write_store(dir.path(), &texts, token_bytes, 512);
        let (plan, stores) = world(dir.path(), ReadCache::new(8));
        (1..=plan.steps())
            .map(|step| batch(&plan, &stores, step, RankSlice::WHOLE).unwrap().digest())
            .collect()
    };
    let wanted = digests(u64::MAX, 2);
    for (shard_tokens, token_bytes) in [(1, 2), (700, 2), (3000, 4), (u64::MAX, 4)] {
        assert_eq!(digests(shard_tokens, token_bytes), wanted, "{shard_tokens}, {token_bytes}");
    }
}

#[test]
fn damage_comes_at_its_step_and_names_its_place() {
    let dir = scratch();
    write_store(dir.path(), &two_sources(), 2, 512);
    let shard = dir.path().join("math/00000/tokens-train-00003.arrow");
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[400] ^= 1; // Values begin at byte 384 and are over a kilobyte long.
    std::fs::write(&shard, bytes).unwrap();
    let (plan, stores) = world(dir.path(), ReadCache::new(8));
    let good = |step| batch(&plan, &stores, step, RankSlice::WHOLE);
    let first_bad = (1..=plan.steps()).find(|step| good(*step).is_err()).unwrap();
    let (plan, stores) = world(dir.path(), ReadCache::new(8));
    let steps = 1..plan.steps() + 1;
    let options = PrefetchOptions { threads: 3, depth: 3 };
    let stream =
        Prefetcher::start(plan, stores, steps, RankSlice::WHOLE, options, |b| Ok(b.step)).unwrap();
    let found: Vec<_> = stream.collect();
    assert_eq!(found.len() as u64, first_bad);
    let fault = found.last().unwrap().as_ref().unwrap_err();
    assert_eq!(fault.class(), Class::Data);
    let message = fault.to_string();
    assert!(
        message.contains("math/00000/tokens-train-00003.arrow") && message.contains("documents "),
        "{message}"
    );
}

#[test]
fn stores_that_cannot_act_as_one_are_refused() {
    let (a, b) = (scratch(), scratch());
    write_store(a.path(), &two_sources(), 2, 512);
    write_store(b.path(), &two_sources()[..1], 2, 512);
    let refused = |paths: &[&std::path::Path]| Stores::open(paths).err().unwrap();
    let fault = refused(&[a.path(), b.path()]);
    assert_eq!(fault.class(), Class::Usage);
    assert!(fault.to_string().contains("\"web\""), "{fault}");
    assert_eq!(refused(&[]).class(), Class::Usage);
    let other = Text { name: "other".to_owned(), ..two_sources().remove(0) };
    write_store(b.path(), &[other], 4, 512); // A larger vocabulary, and thus really another tokenizer.
    std::fs::write(b.path().join("tokenizer.json"), "{} ").unwrap();
    let mut manifest = store::open::manifest(b.path()).unwrap();
    manifest.tokenizer.sha256 = contract::Identity::of_bytes(b"{} ");
    manifest.digest = manifest.identity();
    store::open::commit(b.path(), &manifest).unwrap();
    let told = refused(&[a.path(), b.path()]).to_string();
    assert!(told.contains("different tokenizers"), "{told}");
    assert!(!told.contains("Record"), "what is wanted is said in words: {told}");
}
