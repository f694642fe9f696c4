//! Fear: that a network between us and the data changes a byte, loses a store, or duplicates one.
//!
//! Uses real server processes, through a proxy that refuses, stalls, cuts and drops answers (`bucket.rs`). If a server
//! is not available, each test says so in the log.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use contract::Digest;

use crate::bucket::{Bucket, Cloud, Trouble};
use crate::faults::limited;
use crate::resume::{Fire, kills};
use crate::support::{
    Ran, Scratch, arg, build, corpus, curriculum, document, json_lines, parquet_in_groups, tree,
    zdata,
};

const URL: &str = "s3://bucket/stores/small";

/// The same corpus on disk and in the bucket.
fn twins(scratch: &Scratch, documents: u64) -> (std::path::PathBuf, std::path::PathBuf) {
    twins_in(Cloud::S3, scratch, documents)
}

/// The same in any cloud.
fn twins_in(
    cloud: Cloud,
    scratch: &Scratch,
    documents: u64,
) -> (std::path::PathBuf, std::path::PathBuf) {
    let near = corpus(scratch, documents, "part_bytes = 1");
    let raw = format!("\"{}", cloud.url("raw/"));
    let text = fs::read_to_string(&near).unwrap().replace("\"raw/", &raw);
    let far = scratch.write("far.toml", text);
    // The bucket serves this folder.
    fs::create_dir_all(scratch.path("served")).unwrap();
    fs::rename(scratch.path("raw"), scratch.path("served/raw")).unwrap();
    std::os::unix::fs::symlink(scratch.path("served/raw"), scratch.path("raw")).unwrap();
    (near, far)
}

#[test]
fn a_store_in_a_bucket_is_the_store_on_the_disk() {
    // Each waits for stalled requests most of its time.
    std::thread::scope(|scope| {
        for cloud in Cloud::ALL {
            scope.spawn(move || a_store_in(cloud));
        }
    });
}

fn a_store_in(cloud: Cloud) {
    let scratch = Scratch::new();
    let (near, far) = twins_in(cloud, &scratch, 240);
    let Some(bucket) = Bucket::of(cloud, &scratch, &scratch.path("served"), 120) else { return };
    let url = &bucket.url("stores/small");
    let store = build(&scratch, &near, "store");
    let digest = |told: String| told.split_whitespace().next().unwrap().to_owned();
    let wanted = digest(zdata(&["build", arg(&near), "--out", arg(&store)]).ok());
    bucket.zdata(&["inspect", url]).fails(3, &["store does not exist"]);
    let found = bucket.zdata(&["build", arg(&far), "--out", url]).ok();
    assert_eq!(digest(found), wanted);
    let again = bucket.zdata(&["build", arg(&far), "--out", url]);
    assert!(again.err.contains("up to date"), "{again:?}");
    assert!(bucket.zdata(&["inspect", url]).ok().contains(&wanted));
    assert_eq!(digest(bucket.zdata(&["verify", url]).ok()), wanted);
    let here = curriculum(&scratch, &store, "here.toml", &[]);
    let there = curriculum(&scratch, Path::new(url), "there.toml", &[]);
    let steps = |path: &Path| bucket.zdata(&["digest", arg(path), "--steps", "1..21"]).ok();
    assert_eq!(steps(&here), steps(&there));
    // Packed documents: packs are next to a local store, or in the cache for a store in a bucket. The text is the same.
    let packing =
        "[source.web]\npacking = \"best-fit\"\nlengths = { 64 = 2, 128 = 1 }\n[source.math]";
    let packed = |name, store| curriculum(&scratch, store, name, &[("[source.math]", packing)]);
    let (here, packed) =
        (packed("packed.toml", &store), packed("packed-there.toml", Path::new(url)));
    assert_eq!(steps(&here), steps(&packed));
    assert!(scratch.path("store.packs").is_dir());
    let batch = bucket.zdata(&["batch", arg(&there), "--step", "2"]).ok();
    assert!(batch.contains(&bucket.url("raw/web-")), "{batch}");
    // Commands that read inputs again, and builds that reuse parts of earlier ones.
    let trained = scratch.path("trained.json");
    let train = ["--vocab", "400", "--out", arg(&trained)];
    bucket.zdata(&[&["tokenizer", "train", arg(&far)][..], &train].concat()).ok();
    assert!(fs::read(&trained).unwrap() == fs::read(scratch.path("tokenizer.json")).unwrap());
    let sample = bucket.zdata(&["inspect", url, "--sample", "3", "--corpus", arg(&far)]).ok();
    assert!(sample.contains(&bucket.url("raw/")), "{sample}");
    let work = scratch.path("work");
    for (name, tally) in [("made", "encode: made 3 of 3 parts"), ("reused", "reused 3 parts")] {
        let out = scratch.path(name);
        let told =
            bucket.zdata(&["build", arg(&far), "--cache-dir", arg(&work), "--out", arg(&out)]);
        assert!(told.err.contains(tally), "{told:?}");
        assert_eq!(digest(told.ok()), wanted);
    }
    for trouble in [Trouble::Refuse, Trouble::Forget, Trouble::Cut, Trouble::Stall] {
        assert!(bucket.seen(trouble) > 0, "no request met {trouble:?}");
    }
}

#[test]
fn another_store_at_the_same_place_is_refused_and_both_are_kept() {
    let scratch = Scratch::new();
    let (_, far) = twins(&scratch, 60);
    // Objects that exist before the bucket is used.
    let taken = ("taken", "tokens-train-00000.arrow");
    for (place, name) in
        [("begun", "x-00009.arrow"), ("left", "tokens-train-00000.arrow.0f.part"), taken]
    {
        let folder = scratch.path("served/stores").join(place).join("web/00000");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), "another's").unwrap();
    }
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    bucket.zdata(&["build", arg(&far), "--out", URL]).ok();
    let more = "[[source]]\nname = \"more\"\nfiles = [\"s3://bucket/raw/*.jsonl\"]\n";
    let other = fs::read_to_string(&far).unwrap().replace("1/50", "1/7") + more;
    let other = scratch.write("other.toml", other);
    bucket.zdata(&["build", arg(&other), "--out", URL]).fails(2, &["validation"]);
    // A prefix with other objects is refused, as a folder with other files is.
    bucket.zdata(&["build", arg(&far), "--out", "s3://bucket/raw"]).fails(2, &["something else"]);
    assert!(!scratch.path("served/raw/manifest.json").exists());
    // No file of another store is added to an existing one, not even a missing one.
    let local = build_far_inputs(&bucket, &other, &scratch.path("other"));
    let place = URL.strip_prefix("s3://bucket/").unwrap();
    let before = bucket.objects(place);
    let told = bucket.zdata(&["publish", arg(&local), URL]).fails(4, &["something else is there"]);
    assert!(told.contains(URL), "{told}");
    assert!(bucket.objects(place) == before, "{:?}", bucket.objects(place).keys());
    bucket.zdata(&["verify", URL]).ok();
    bucket.zdata(&["verify", arg(&local)]).ok();
    // A damaged store is not published: what is published is never replaced.
    let damaged = build_far_inputs(&bucket, &other, &scratch.path("damaged"));
    let sums = damaged.join("web/00000/tokens-train-00000.sums");
    fs::write(&sums, [&fs::read(&sums).unwrap()[..], b"x"].concat()).unwrap();
    let place = "s3://bucket/stores/damaged";
    bucket.zdata(&["publish", arg(&damaged), place]).fails(3, &["damaged", arg(&sums)]);
    bucket.zdata(&["publish", arg(&local), place]).ok();
    // So does an object of a part that another one put; it stays.
    let taken = "web/00000/tokens-train-00000.arrow";
    let told = bucket.zdata(&["build", arg(&far), "--out", "s3://bucket/stores/taken"]);
    told.fails(4, &["something else is there", taken]);
    assert_eq!(bucket.objects("stores/taken")[taken], b"another's");
    // An object whose name is not in this store's manifest blocks it; the leftovers of an upload do not.
    let place = "s3://bucket/stores/begun";
    bucket.zdata(&["publish", arg(&local), place]).fails(2, &["something else", "x-00009"]);
    bucket.zdata(&["publish", arg(&local), "s3://bucket/stores/left"]).ok();
    // Publishing an identical store succeeds.
    let same = build_far_inputs(&bucket, &far, &scratch.path("same"));
    bucket.zdata(&["publish", arg(&same), URL]).ok();
    for (pattern, word) in [
        ("s3://bucket/raw/*.nothing", "no file"),
        ("s3://none/*", "the bucket does not exist"),
        ("s3://none/x.jsonl", "the bucket does not exist"),
        ("s3://bucket/raw/nope*", "nothing in s3://bucket"),
    ] {
        let text = format!(
            "tokenizer = \"tokenizer.json\"\n[[source]]\nname = \"a\"\nfiles = [\"{pattern}\"]\n"
        );
        let bad = scratch.write("bad.toml", text);
        bucket
            .zdata(&["build", arg(&bad), "--out", arg(&scratch.path("bad"))])
            .fails(3, &[word, "bad.toml"]);
    }
}

fn build_far_inputs(bucket: &Bucket, corpus: &Path, out: &Path) -> std::path::PathBuf {
    bucket.zdata(&["build", arg(corpus), "--out", arg(out)]).ok();
    out.to_owned()
}

#[test]
fn what_preparation_wrote_goes_into_the_bucket_too() {
    let scratch = Scratch::new();
    corpus(&scratch, 20, "");
    fs::create_dir_all(scratch.path("served")).unwrap();
    let text = |i: u64| (0..9).map(|word| format!("word{}x{word} ", i / 2)).collect::<String>();
    let line = |i: u64| format!("{{\"text\": \"{}\"}}\n", text(i));
    scratch.write("few.jsonl", (0..24).map(line).collect::<String>());
    scratch.write("evaluation.jsonl", line(6));
    let corpus = scratch.write(
        "few.toml",
        "tokenizer = \"tokenizer.json\"\nvalidation = \"1/4\"\n\
         [[source]]\nname = \"web\"\nfiles = [\"few.jsonl\"]\n\
         [[prepare]]\nstep = \"exact-duplicates\"\n\
         [[prepare]]\nstep = \"decontaminate\"\nfiles = [\"evaluation.jsonl\"]\nwords = 4\n",
    );
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    let (store, published) = (scratch.path("few"), "s3://bucket/stores/few");
    let told = bucket.zdata(&["build", arg(&corpus), "--out", URL]).ok();
    assert_eq!(told[..64], bucket.zdata(&["verify", URL]).ok()[..64]);
    assert!(fs::read_dir(bucket.cache.join("builds")).unwrap().next().is_none());
    // Leftovers of a build killed at its very end are removed by the next build; another store is kept.
    let left = bucket.cache.join("builds").join(Digest::of_bytes(URL.as_bytes()).to_string());
    for (corpus, stays) in [(&corpus, false), (&scratch.path("corpus.toml"), true)] {
        zdata(&["build", arg(corpus), "--out", arg(&left)]).ok();
        bucket.zdata(&["build", arg(&scratch.path("few.toml")), "--out", URL]).ok();
        assert_eq!(left.exists(), stays);
    }
    zdata(&["build", arg(&corpus), "--out", arg(&store)]).ok();
    for list in ["00000/dropped.jsonl.zst", "contaminated.jsonl"] {
        assert!(store.join("web").join(list).exists(), "the steps leave no {list}");
    }
    bucket.zdata(&["publish", arg(&store), published]).ok();
    let verified = bucket.zdata(&["verify", published]).ok();
    assert_eq!(verified, zdata(&["verify", arg(&store)]).ok());
}

#[test]
fn a_killed_build_into_a_bucket_goes_on_and_is_no_store_before() {
    let scratch = Scratch::new();
    let (near, _) = twins(&scratch, 200);
    scratch.write("served/raw/web-2.jsonl", json_lines(9, 600));
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    let start = Instant::now();
    let wanted = bucket.zdata(&["build", arg(&near), "--out", URL]).ok();
    let mut fire = Fire::new(start.elapsed(), 0);
    while let Some(index) = fire.round(kills().div_ceil(4)) {
        let url = format!("s3://bucket/stores/killed-{index}");
        let args = ["build", arg(&near), "--out", &url];
        for _ in 0..3 {
            fire.kill(bucket.command(&args));
            let told = bucket.zdata(&["verify", &url]);
            assert!(matches!(told.code, Some(0 | 3)), "{told:?}");
        }
        let found = bucket.zdata(&args).ok();
        assert_eq!(found.split_whitespace().next(), wanted.split_whitespace().next());
        bucket.zdata(&["verify", &url]).ok();
    }
}

/// Parts are objects under their final names as soon as they are made. What a build put there that ended early and is
/// resumed with other inputs is removed, and nothing else; the manifest comes last.
#[test]
fn parts_are_in_the_bucket_before_the_store_is_and_stale_ones_go() {
    let scratch = Scratch::new();
    let (near, far) = twins(&scratch, 40);
    let table = |seed: u64, rows: u64| {
        let texts: Vec<String> = (0..rows).map(|i| document(seed, i)).collect();
        let bytes = parquet_in_groups(&[("text", texts)], 20);
        scratch.write("served/raw/table.parquet", bytes);
    };
    let source = |corpus: &Path, name: &str, file: &str| {
        let more = format!("[[source]]\nname = \"{name}\"\nfiles = [\"{file}\"]\n");
        fs::write(corpus, fs::read_to_string(corpus).unwrap() + &more).unwrap();
    };
    table(5, 60);
    source(&near, "table", "raw/table.parquet");
    source(&far, "table", "s3://bucket/raw/table.parquet");
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    // A table is cut where it is.
    let cut = build_far_inputs(&bucket, &far, &scratch.path("cut"));
    assert!(cut.join("table/00002").is_dir());
    let digest = |store: &Path| zdata(&["verify", arg(store)]).ok()[..64].to_owned();
    assert_eq!(digest(&cut), digest(&build(&scratch, &near, "before")));
    // A build that stops at its last file.
    scratch.write("raw/z.jsonl", "nonsense\n");
    source(&near, "last", "raw/z.jsonl");
    let place = URL.strip_prefix("s3://bucket/").unwrap();
    let build_there = || bucket.zdata(&["build", arg(&near), "--out", URL, "--workers", "1"]);
    build_there().fails(3, &["z.jsonl:1"]);
    let parts = bucket.objects(place);
    for part in ["web/00001", "math/00000", "table/00000", "table/00002"] {
        let name = format!("{part}/tokens-train-00000.arrow");
        assert!(parts.contains_key(&name), "{name} of {:?}", parts.keys());
    }
    assert!(!parts.contains_key("manifest.json"));
    // Other text in parts that are there, and a part that is no more.
    scratch.write("raw/web-0.jsonl", json_lines(8, 30));
    table(6, 30);
    scratch.write("raw/z.jsonl", json_lines(9, 30));
    build_there().ok();
    assert!(fs::read_dir(bucket.cache.join("builds")).unwrap().next().is_none());
    let whole = build(&scratch, &near, "whole");
    assert!(bucket.objects(place) == tree(&whole), "{:?}", bucket.objects(place).keys());
}

/// Small stores of many files, and stores with a multipart upload: a kill leaves such parts as objects next to the
/// store.
#[test]
fn a_killed_publication_goes_on_and_is_no_store_before() {
    let scratch = Scratch::new();
    let (near, _) = twins(&scratch, 200);
    let small = build(&scratch, &near, "small");
    let beside = Scratch::new();
    let [large, _] = large_twins(&beside);
    let few = kills().div_ceil(4);
    for cloud in Cloud::ALL {
        let served = Scratch::new();
        let bucket = Bucket::of(cloud, &served, &served.path(""), 0);
        let rounds = if cloud == Cloud::S3 { kills() } else { few };
        let stores = [(&*small, "small", rounds), (&*large, "large", few)];
        bucket.iter().for_each(|bucket| killed_publications(bucket, stores));
    }
}

fn killed_publications(bucket: &Bucket, stores: [(&Path, &str, u64); 2]) {
    for (store, kind, rounds) in stores {
        let publish = |place: &str| bucket.command(&["publish", arg(store), &bucket.url(place)]);
        let (whole, start) = (tree(store), Instant::now());
        Ran::from(publish(&format!("{kind}/whole")).output().unwrap()).ok();
        let mut fire = Fire::new(start.elapsed(), 0).named(kind);
        while let Some(index) = fire.round(rounds) {
            let place = format!("{kind}/killed-{index}");
            for _ in 0..3 {
                fire.kill(publish(&place));
                let left = bucket.objects(&place);
                // The manifest is written last, and each file appears complete.
                let is_store = left.contains_key("manifest.json");
                assert!(!is_store || whole.keys().all(|name| left.contains_key(name)), "{place}");
                for (name, bytes) in left.iter().filter(|(name, _)| !name.ends_with(".part")) {
                    assert!(whole.get(name) == Some(bytes), "{place}/{name} is not whole");
                }
            }
            Ran::from(publish(&place).output().unwrap()).ok();
            assert!(bucket.objects(&place) == whole, "{place}");
        }
    }
}

/// Two stores of one long document in a file of more than 16 MiB, uploaded in parts; they differ in one token.
fn large_twins(scratch: &Scratch) -> [std::path::PathBuf; 2] {
    corpus(scratch, 20, "");
    ["a", "b"].map(|name| {
        let tokens: Vec<u8> = (0..9_000_000u32)
            .flat_map(|n| ((n.wrapping_mul(n) >> 7) as u16 % 256).to_le_bytes())
            .collect();
        let path = scratch.write(&format!("{name}.ds"), tokens);
        if name == "b" {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &[9, 0], 10_000_000).unwrap();
        }
        scratch.write(&format!("{name}.ds.index"), 9_000_000u64.to_le_bytes());
        let store = scratch.path(&format!("store-{name}"));
        let source = format!("web={}", arg(&path));
        let tokenizer = scratch.path("tokenizer.json");
        let named = ["--tokenizer", arg(&tokenizer), "--source", &source, "--validation", "0"];
        let head = ["import", arg(&store), "--format", "datatrove", "--unit", "1024"];
        zdata(&[&head[..], &named].concat()).ok();
        assert!(
            fs::metadata(store.join("web/00000/tokens-train-00000.arrow")).unwrap().len()
                > 16 << 20
        );
        store
    })
}

#[test]
fn of_two_publishers_at_once_one_wins_or_both_if_they_agree() {
    let scratch = Scratch::new();
    let [a, b] = large_twins(&scratch);
    for cloud in Cloud::ALL {
        let served = Scratch::new();
        let bucket = Bucket::of(cloud, &served, &served.path(""), 0);
        bucket.iter().for_each(|bucket| two_publishers(bucket, &a, &b));
    }
}

fn two_publishers(bucket: &Bucket, a: &Path, b: &Path) {
    for (round, other) in [a, b, b].into_iter().enumerate() {
        let url = bucket.url(&format!("stores/{round}"));
        let both = [a, other].map(|store| {
            let mut command = bucket.command(&["publish", arg(store), &url]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        });
        let [first, second] = both.map(|child| Ran::from(child.wait_with_output().unwrap()));
        let verified = bucket.zdata(&["verify", &url]).ok();
        let digest = |store: &Path| zdata(&["verify", arg(store)]).ok()[..64].to_owned();
        if other == a {
            assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
            continue;
        }
        let (winner, loser) = if first.code == Some(0) { (a, second) } else { (other, first) };
        loser.fails(4, &["something else is there already", &url]);
        assert!(verified.starts_with(&digest(winner)), "{verified}");
    }
}

#[test]
fn a_full_disk_stops_the_copies_which_are_then_made() {
    let scratch = Scratch::new();
    let (near, far) = twins(&scratch, 100);
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    let whole = build(&scratch, &near, "whole");
    let store = scratch.path("store");
    let args = ["build", arg(&far), "--out", arg(&store)];
    // 4 KiB: less than any input.
    let ran: Ran = bucket.reached_by(limited("-f 8", &args)).output().unwrap().into();
    ran.fails(6, &["s3://bucket/raw/", "File too large"]);
    let copies = fs::read_dir(bucket.cache.join("copies")).unwrap();
    assert_eq!(copies.count(), 0, "half a copy was kept");
    bucket.zdata(&args).ok();
    let tokens = |store: &Path| fs::read(store.join("web/00000/tokens-train-00000.arrow")).unwrap();
    assert!(tokens(&whole) == tokens(&store));
    bucket.zdata(&["verify", arg(&store)]).ok();
}

#[test]
fn copies_are_kept_within_their_bound() {
    let scratch = Scratch::new();
    let (near, far) = twins(&scratch, 400);
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    let store = scratch.path("bounded");
    let mut command = bucket.command(&["build", arg(&far), "--out", arg(&store)]);
    let limit = 100_000;
    let ran: Ran = command.env("ZDATA_CACHE_BYTES", limit.to_string()).output().unwrap().into();
    let digest = |told: String| told.split_whitespace().next().unwrap().to_owned();
    let found = digest(ran.ok());
    assert_eq!(
        found,
        digest(zdata(&["build", arg(&near), "--out", arg(&scratch.path("near"))]).ok())
    );
    let copies = fs::read_dir(bucket.cache.join("copies")).unwrap();
    let copies = copies.map(|copy| copy.unwrap().path());
    let copies = copies.filter(|copy| copy.extension().is_none_or(|ending| ending != "sum"));
    let bytes: Vec<u64> = copies.map(|copy| copy.metadata().unwrap().len()).collect();
    let all: u64 = fs::read_dir(scratch.path("served/raw"))
        .unwrap()
        .map(|f| f.unwrap().metadata().unwrap().len())
        .sum();
    assert!(all > 2 * limit, "the inputs are too small to show anything: {all}");
    // The file in use is kept, however large it is.
    assert!(bytes.iter().sum::<u64>() <= limit.max(*bytes.iter().max().unwrap()), "{bytes:?}");
}

#[cfg(feature = "train")]
mod training {
    use super::*;
    use crate::support::{ztrain, ztrain_command};

    const PLACE: &str = "s3://bucket/runs/a";

    /// Text and checkpoints in a bucket, through network trouble, kills and changing numbers of ranks.
    #[test]
    fn a_run_that_lives_in_a_bucket_is_the_run_on_the_disk() {
        let scratch = Scratch::new();
        let (near, far) = twins(&scratch, 300);
        let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 40) else { return };
        let store = build(&scratch, &near, "store");
        bucket.zdata(&["build", arg(&far), "--out", URL]).ok();
        let here = curriculum(&scratch, &store, "here.toml", &[]);
        let there = curriculum(&scratch, Path::new(URL), "there.toml", &[]);
        let (whole, run) = (scratch.path("whole"), scratch.path("run"));
        let every = ["--checkpoint-every", "3"];
        let near = ["--curriculum", arg(&here), "--out", arg(&whole)];
        ztrain(&[&near[..], &every].concat()).ok();
        let ran = |args: &[&str], more: &[&str]| -> Ran {
            let command = ztrain_command(&[args, more].concat());
            bucket.reached_by(command).output().unwrap().into()
        };
        let far = ["--curriculum", arg(&there), "--out", arg(&run)];
        let far = [&far[..], &every].concat();
        ran(&far, &["--checkpoints", PLACE, "--stop-after", "4"]).ok();
        // The run's folder now records the location. Another run is refused there, and this run elsewhere.
        let other = scratch.path("other");
        let twice = ["--curriculum", arg(&there), "--out", arg(&other), "--checkpoints", PLACE];
        ran(&twice, &[]).fails(2, &["another run keeps its checkpoints here", PLACE]);
        ran(&far, &["--checkpoints", "s3://bucket/runs/b"]).fails(2, &[PLACE]);
        ran(&far, &["--nproc", "2", "--stop-after", "9"]).ok();
        let mut fire = Fire::new(Duration::from_secs(2), 40);
        while fire.round(1).is_some() {
            fire.kill(bucket.reached_by(ztrain_command(&far)));
        }
        let told = ran(&far, &["--nproc", "3"]).ok();
        assert!(told.starts_with("done after step 20 of 20"), "{told}");
        let ledger = |run: &Path| fs::read_to_string(run.join("ledger.jsonl")).unwrap();
        assert!(ledger(&whole) == ledger(&run), "the network left a trace");
        assert!(!run.join("checkpoints").exists());
        let events = fs::read_to_string(run.join("events.jsonl")).unwrap();
        assert!(
            events.contains("\"from_step\":4") && events.contains("\"from_step\":9"),
            "{events}"
        );
        let verdict = ran(&["replay", "--run", arg(&run), "--step", "20"], &[]).ok();
        assert!(verdict.contains("same bits"), "{verdict}");
        // A fork copies the newest checkpoint from the bucket into its own folder and continues from it; without
        // changes it equals the run.
        let fork = scratch.path("fork");
        let told = ran(&["fork", arg(&run), "--step", "19", "--out", arg(&fork)], &[]).ok();
        assert!(told.contains("checkpoints: step-18\n"), "{told}");
        assert!(fork.join("checkpoints/step-18/manifest.json").exists());
        let curriculum = fork.join("run.toml");
        let told = ran(&["--curriculum", arg(&curriculum), "--out", arg(&fork)], &[]).ok();
        assert!(told.starts_with("done after step 20 of 20"), "{told}");
        assert!(ledger(&whole) == ledger(&fork), "a fork that changes nothing is the run");
    }
}
