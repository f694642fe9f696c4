//! Fear: that an object-store URL works only in some commands, and that the others fail with a confusing message.
//!
//! Every argument that takes a location is given one in a bucket. Either the command does the same as with a local
//! path, byte for byte, or it refuses at once: exit 2, the argument, what was found, what is expected, what to do.

use std::fs;
use std::path::Path;

use contract::Digest;

use crate::bucket::Bucket;
use crate::support::{Ran, Scratch, arg, build, corpus, curriculum, zdata, zdata_command};

/// A corpus, its store and a curriculum, locally and at `s3://bucket/` under the same names.
struct Twins {
    scratch: Scratch,
    bucket: Bucket,
}

/// The URL of a served file.
fn url(name: &str) -> String {
    format!("s3://bucket/{name}")
}

impl Twins {
    fn new() -> Option<Self> {
        Twins::harmed(|_| ())
    }

    /// The same after `harm` changed the store.
    fn harmed(harm: impl FnOnce(&Path)) -> Option<Self> {
        let scratch = Scratch::new();
        let corpus = corpus(&scratch, 60, "part_bytes = 1");
        let store = build(&scratch, &corpus, "store");
        curriculum(&scratch, &store, "run.toml", &[]);
        // The curriculum names its store relative to its own folder.
        let text = fs::read_to_string(scratch.path("run.toml")).unwrap();
        scratch.write("run.toml", text.replace(arg(&store), "store"));
        harm(&store);
        let bucket = Bucket::serve(&scratch, &scratch.path(""), 0)?;
        Some(Twins { scratch, bucket })
    }

    fn local(&self, args: &[&str]) -> Ran {
        let args: Vec<String> = args.iter().map(|it| self.here(it)).collect();
        self.bucket.zdata(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn remote(&self, args: &[&str]) -> Ran {
        let args: Vec<String> = args.iter().map(|it| it.replace('@', "s3://bucket/")).collect();
        self.bucket.zdata(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn here(&self, argument: &str) -> String {
        match argument.split_once('@') {
            Some((before, name)) => format!("{before}{}", arg(&self.scratch.path(name))),
            None => argument.to_owned(),
        }
    }
}

/// A command's output without the location it was asked about.
fn said(ran: Ran, root: &str) -> String {
    ran.ok().replace(root, "")
}

/// `@name` is replaced by a local path, and by the same name in the bucket.
const ANSWERS: &[&[&str]] = &[
    &["inspect", "@store"],
    &["inspect", "@store", "--json"],
    &["inspect", "@store", "--sample", "3", "--corpus", "@corpus.toml"],
    &["verify", "@store"],
    &["verify", "@store", "--json"],
    &["plan", "@run.toml"],
    &["digest", "@run.toml", "--steps", "1..21"],
    &["batch", "@run.toml", "--step", "2", "--json"],
    &["where", "@run.toml", "--doc", "doc-1-3"],
    &["build", "@corpus.toml", "--check"],
];

#[test]
fn what_is_asked_of_a_bucket_is_answered_as_it_is_here() {
    let Some(twins) = Twins::new() else { return };
    let here = format!("{}/", arg(&twins.scratch.path("")).trim_end_matches('/'));
    for args in ANSWERS {
        let wanted = said(twins.local(args), &here);
        assert_eq!(said(twins.remote(args), "s3://bucket/"), wanted, "{args:?}");
    }
}

/// Every command that opens a store first compares its files with its manifest, in a bucket as locally.
#[test]
fn a_store_in_a_bucket_that_lacks_a_file_or_a_piece_of_one_is_refused() {
    let name = "starts-train-00000.arrow";
    let harms: [&dyn Fn(&Path); 2] = [&|file| fs::remove_file(file).unwrap(), &|file| {
        fs::write(file, &fs::read(file).unwrap()[1..]).unwrap()
    }];
    for harm in harms {
        let Some(twins) = Twins::harmed(|store| harm(&store.join("web/00000").join(name))) else {
            return;
        };
        for args in ANSWERS.iter().filter(|args| args[0] != "build") {
            twins.local(args).fails(3, &["damaged", name]);
            twins.remote(args).fails(3, &["damaged", "s3://bucket/store", name]);
        }
    }
}

/// Local results from inputs in a bucket equal those from local inputs.
#[test]
fn what_is_made_of_a_bucket_is_what_is_made_here() {
    let Some(twins) = Twins::new() else { return };
    for args in [
        &["build", "@corpus.toml", "--out"][..],
        &["export", "@store", "--format", "megatron", "--out"],
        &["tokenizer", "train", "@corpus.toml", "--vocab", "400", "--out"],
    ] {
        let made = ["made-here", "made-there"].map(|name| twins.scratch.path(name));
        twins.local(&[args, &[arg(&made[0])]].concat()).ok();
        twins.remote(&[args, &[arg(&made[1])]].concat()).ok();
        assert_eq!(tree(&made[0]), tree(&made[1]), "{args:?}");
        for made in made {
            if made.is_dir() {
                fs::remove_dir_all(made).unwrap()
            } else {
                fs::remove_file(made).unwrap()
            }
        }
    }
    // Adds another store to the curriculum, and imports with a remote tokenizer.
    let (text, more) = (fs::read_to_string(twins.scratch.path("run.toml")).unwrap(), url("store"));
    let run = twins.scratch.write("amended.toml", text);
    let told = twins.remote(&["amend", arg(&run), "--step", "5", "--store", &more, "--dry-run"]);
    told.fails(2, &["one store is named twice", &more]);
    let out = twins.scratch.path("exported");
    twins.local(&["export", "@store", "--format", "datatrove", "--out", arg(&out)]).ok();
    let source = format!("web={}", arg(&out.join("web/train")));
    let digest = |tokenizer: &str, name: &str| {
        let store = twins.scratch.path(name);
        let head = ["import", arg(&store), "--format", "datatrove", "--tokenizer", tokenizer];
        twins.bucket.zdata(&[&head[..], &["--source", &source]].concat()).ok()[..64].to_owned()
    };
    let here = arg(&twins.scratch.path("tokenizer.json")).to_owned();
    assert_eq!(digest(&here, "imported-1"), digest(&url("tokenizer.json"), "imported-2"));
}

/// Exports to the bucket and imports from it give the same files and the same store.
#[test]
fn other_projects_files_in_a_bucket_are_those_here() {
    let Some(twins) = Twins::new() else { return };
    let tokenizer = arg(&twins.scratch.path("tokenizer.json")).to_owned();
    for peer in ["megatron", "datatrove", "olmo", "mds"] {
        let here = twins.scratch.path(&format!("here-{peer}"));
        let there = url(&format!("there {peer}"));
        let export = ["export", "@store", "--format", peer, "--out"];
        let wanted = twins.local(&[&export[..], &[arg(&here), "--json"]].concat()).ok();
        // The second time it exists already, and another export is refused.
        for _ in 0..2 {
            let found = twins.local(&[&export[..], &[&there, "--json"]].concat()).ok();
            assert_eq!(found, wanted, "{peer}");
        }
        // Leftovers of a run killed at its very end are removed by the next.
        let builds = twins.scratch.path("cache/builds");
        let left = builds.join(Digest::of_bytes(there.as_bytes()).to_string());
        twins.local(&[&export[..], &[arg(&left), "--json"]].concat()).ok();
        twins.local(&[&export[..], &[&there, "--json"]].concat()).ok();
        assert_eq!(fs::read_dir(&builds).unwrap().count(), 0, "{peer}");
        let other = [&export[..], &[&there, "--source", "web"]].concat();
        twins.local(&other).fails(2, &["another export", &there]);
        let import = |name: &str, folder: &str| {
            let (store, source) = (twins.scratch.path(name), format!("web={folder}/web/train"));
            let head = ["import", arg(&store), "--format", peer, "--tokenizer", &tokenizer];
            let mut told = twins.bucket.zdata(&[&head[..], &["--source", &source]].concat()).ok();
            told.truncate(64);
            let inspected = zdata(&["inspect", arg(&store), "--json"]).ok();
            (told, inspected)
        };
        let (wanted, _) = import(&format!("from-here-{peer}"), arg(&here));
        let (found, inspected) = import(&format!("from-there-{peer}"), &there);
        assert_eq!(found, wanted, "{peer}");
        assert!(inspected.contains(&format!("{there}/web/train")), "{peer}: {inspected}");
    }
    // An error in an object names the object.
    let source = format!("web={}", url("there olmo/web/train/part-0-00000.npy"));
    let store = twins.scratch.path("wrong");
    let head = ["import", arg(&store), "--format", "megatron", "--tokenizer", &tokenizer];
    let told = twins.bucket.zdata(&[&head[..], &["--source", &source]].concat());
    told.fails(3, &["s3://bucket/there olmo/web/train"]);
}

/// An amendment adds a store in the bucket: named in the file, identified by its digest, and planned from its step on.
#[test]
fn a_store_in_a_bucket_is_added_by_an_amendment() {
    let Some(twins) = Twins::new() else { return };
    let text = fs::read_to_string(twins.scratch.path("corpus.toml")).unwrap();
    let renamed = text.replace("name = \"web\"", "name = \"web-2\"");
    let renamed = renamed.replace("name = \"math\"", "name = \"math-2\"");
    let more = twins.scratch.write("more.toml", renamed);
    let there = url("more");
    let digest = twins.bucket.zdata(&["build", arg(&more), "--out", &there]).ok()[..64].to_owned();
    let run = twins.scratch.path("run.toml");
    let before = twins.bucket.zdata(&["digest", arg(&run), "--steps", "1..5"]).ok();
    let amend =
        ["amend", arg(&run), "--step", "5", "--store", &there, "--mix", "web=1,web-2=2,math=1"];
    twins.bucket.zdata(&amend).ok();
    let amended = fs::read_to_string(&run).unwrap();
    assert!(amended.contains(&there) && amended.contains(&digest), "{amended}");
    assert_eq!(twins.bucket.zdata(&["digest", arg(&run), "--steps", "1..5"]).ok(), before);
    let seen =
        |step: &str| twins.bucket.zdata(&["batch", arg(&run), "--step", step, "--json"]).ok();
    assert!(!seen("4").contains("web-2") && seen("5").contains("web-2"));
}

/// The files below a path, by name; a file is its own only entry.
fn tree(place: &Path) -> Vec<(String, Vec<u8>)> {
    if place.is_file() {
        return vec![(String::new(), fs::read(place).unwrap())];
    }
    let mut files = Vec::new();
    let mut entries: Vec<_> = fs::read_dir(place).unwrap().map(|it| it.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        files.extend(
            tree(&path).into_iter().map(|(below, bytes)| (format!("{name}/{below}"), bytes)),
        );
    }
    files
}

/// An invalid record is reported at its location, not at that of its cached copy.
#[test]
fn what_is_wrong_with_an_object_is_said_of_the_object() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 10, "");
    scratch.write("served/bad.jsonl", "{\"text\": \"good\"}\n{\"text\": 7}\n");
    scratch.write("served/bad.parquet", "no Parquet at all, but long enough to be looked at");
    let Some(bucket) = Bucket::serve(&scratch, &scratch.path("served"), 0) else { return };
    let head = fs::read_to_string(&corpus).unwrap();
    let head = &head[..head.find("[[source]]").unwrap()];
    for (file, place) in [("bad.jsonl", "bad.jsonl:2"), ("bad.parquet", "bad.parquet")] {
        let source = format!("[[source]]\nname = \"a\"\nfiles = [{:?}]\n", url(file));
        let bad = scratch.write("bad.toml", format!("{head}{source}"));
        let out = scratch.path(&format!("out-{file}"));
        bucket.zdata(&["build", arg(&bad), "--out", arg(&out)]).fails(3, &[&url(place)]);
        bucket.zdata(&["build", arg(&bad), "--check"]).fails(3, &[&url(place)]);
    }
}

/// Outputs made in the bucket: a tokenizer and a store.
#[test]
fn what_is_made_in_a_bucket_is_made_once() {
    let Some(twins) = Twins::new() else { return };
    let train = ["tokenizer", "train", "@corpus.toml", "--vocab", "400", "--out"];
    let out = url("made/tokenizer.json");
    for _ in 0..2 {
        let told = twins.remote(&[&train[..], &[&out]].concat()).ok();
        assert!(told.ends_with(&format!("  {out}\n")), "{told}");
    }
    let other = ["tokenizer", "train", "@corpus.toml", "--vocab", "401", "--out", &out];
    let told = twins.remote(&other).fails(2, &[&out, "is never overwritten"]);
    assert_eq!(told.matches("SHA-256").count(), 2, "{told}");
    let text = fs::read_to_string(twins.scratch.path("corpus.toml")).unwrap();
    let text = text.replace("\"tokenizer.json\"", &format!("{out:?}"));
    let corpus = twins.scratch.write("made.toml", text);
    let digest = |ran: Ran| ran.ok()[..64].to_owned();
    let store = url("made/a store, 100%");
    let built = digest(twins.remote(&["build", arg(&corpus), "--out", &store]));
    assert_eq!(built, digest(twins.remote(&["verify", &store])));
}

/// A valid plan name.
const PLAN: &str = "plan-00000000000000000000000000000000";

/// Arguments that cannot be in a bucket, each with the name in its error.
const REFUSED: &[(&[&str], &str)] = &[
    (&["init", "@corpora"], "<FOLDER>"),
    (&["build", "corpus.toml", "--out", "x", "--cache-dir", "@work"], "--cache-dir"),
    (&["build", "corpus.toml", "--executor", "slurm", "--out", "@store"], "--out"),
    (&["task", "plan", "corpus.toml", "--cache-dir", "@work"], "--cache-dir"),
    (&["task", "run", "--cache-dir", "@work", "--plan", PLAN, "--index", "0"], "--cache-dir"),
    (&["task", "merge", "--cache-dir", "@work", "--plan", PLAN, "--out", "x"], "--cache-dir"),
    (&["task", "merge", "--cache-dir", "x", "--plan", PLAN, "--out", "@store"], "--out"),
    (&["import", "@x", "--format", "olmo", "--tokenizer", "t", "--source", "a=b"], "<STORE>"),
    (&["publish", "@store", "@other"], "<STORE>"),
    (&["publish", "store", "elsewhere"], "URL"),
    (&["amend", "@run.toml", "--step", "5", "--ban", "x"], "<CURRICULUM>"),
    (&["verify-run", "@runs/a"], "<RUN>"),
];

#[test]
fn a_place_that_a_command_cannot_take_is_refused_clearly() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 10, "");
    for (args, argument) in REFUSED {
        let args: Vec<String> = args
            .iter()
            .map(|it| match *it {
                "corpus.toml" => arg(&corpus).to_owned(),
                it => it.replace('@', "s3://bucket/"),
            })
            .collect();
        let told = zdata(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let told = told.fails(2, &[argument]);
        for part in ["found:", "wanted:", "hint:"] {
            assert!(told.contains(part), "{args:?}: {told}");
        }
        assert!(!told.contains("bug of ours"), "{args:?}: {told}");
    }
}

/// Names that are not valid locations, in every argument that takes one.
#[test]
fn a_name_that_no_place_has_is_refused_before_anything_is_asked() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 10, "");
    for name in [
        "",
        "s3://",
        "s3://b",
        "s3:///key",
        "s3://b//key",
        "s3://b/a//c",
        "s3://b/a/../c",
        "s3://my bucket/x",
        "gs://b",
        "az://c//key",
        "https://host",
        "https://host/a?b",
        "http://elsewhere/key",
        "hf://datasets/key",
        "ftp://b/key",
    ] {
        for args in [
            &["inspect", name][..],
            &["verify", name],
            &["plan", name],
            &["build", name, "--out", "x"],
            &["build", arg(&corpus), "--out", name],
            &["tokenizer", "train", arg(&corpus), "--vocab", "300", "--out", name],
            &["publish", "x", name],
        ] {
            let told = zdata(args).fails(2, &["wanted:"]);
            assert!(told.contains(&format!("{name:?}")) || told.contains(name), "{args:?}: {told}");
        }
    }
    for (key, name) in [("tokenizer", "s3://b//t.json"), ("tokenizer", "")] {
        let text = format!("{key} = {name:?}\n[[source]]\nname = \"a\"\nfiles = [\"raw/*\"]\n");
        let bad = scratch.write("bad.toml", text);
        zdata(&["build", arg(&bad), "--out", "x"]).fails(2, &["bad.toml", "wanted:"]);
    }
    for glob in ["s3://b//raw/*", "s3://b/../raw/*", "ftp://b/*", "https://b/*", "s3://"] {
        let text = format!("[[source]]\nname = \"a\"\nfiles = [{glob:?}]\n");
        let bad = scratch.write("bad.toml", text);
        zdata(&["build", arg(&bad), "--out", "x"]).fails(2, &["bad.toml:3:10", "wanted:", glob]);
    }
}

/// A wrong environment variable is not reported as a bug: it is named before any request is made.
#[test]
fn a_wrong_setting_of_the_environment_is_named() {
    let scratch = Scratch::new();
    let cache = scratch.path("cache");
    for (name, value, wanted) in [
        ("AWS_ENDPOINT_URL", "localhost:9000", "localhost:9000"),
        ("AWS_ENDPOINT_URL", "", "http://host:port"),
        ("AWS_ENDPOINT_URL", "http://localhost ", "http://host:port"),
        ("AWS_ACCESS_KEY_ID", "a\nb", "line break"),
        ("ZDATA_TIMEOUT", "0", "1 or more"),
        ("ZDATA_CACHE_BYTES", "abc", "abc"),
        ("ZDATA_CACHE", "s3://bucket/c", "a folder of this machine"),
    ] {
        let mut command = zdata_command(&["verify", "s3://bucket/x"]);
        let ran: Ran = command.env("ZDATA_CACHE", &cache).env(name, value).output().unwrap().into();
        ran.fails(2, &[name, wanted, "s3://bucket/x"]);
    }
    let mut command = zdata_command(&["verify", "s3://bucket/x"]);
    let ran: Ran = command.env("ZDATA_CACHE", "/proc/nope").output().unwrap().into();
    ran.fails(6, &["/proc/nope", "ZDATA_CACHE"]);
}

/// Keys with every allowed character, and relative names that lead up and down from a file in a bucket.
#[test]
fn relative_names_start_beside_the_file_that_says_them() {
    let scratch = Scratch::new();
    let local = corpus(&scratch, 40, "");
    let wanted = zdata(&["build", arg(&local), "--out", arg(&scratch.path("wanted"))]).ok();
    let served = scratch.path("served");
    let odd = "served/a b/100%/d%20e+f";
    for (from, to) in [("raw", "served/raw"), ("tokenizer.json", "served/a b/tokenizer.json")] {
        fs::create_dir_all(scratch.path(to).parent().unwrap()).unwrap();
        fs::rename(scratch.path(from), scratch.path(to)).unwrap();
    }
    let text = fs::read_to_string(&local).unwrap();
    let text = text.replace("\"tokenizer.json\"", "\"../../tokenizer.json\"");
    let text = text.replace("\"raw/", "\"../.././../raw/");
    scratch.write(&format!("{odd}/corpus.toml"), &text);
    let beyond = text.replace("\"../.././../raw/", "\"../../../../raw/");
    scratch.write(&format!("{odd}/beyond.toml"), beyond);
    let none = text.replace("/raw/", "/war/");
    scratch.write(&format!("{odd}/none.toml"), none);
    let Some(bucket) = Bucket::serve(&scratch, &served, 0) else { return };
    let at = |name: &str| url(&format!("a b/100%/d%20e+f/{name}"));
    let store = at("st ore");
    let told = bucket.zdata(&["build", &at("corpus.toml"), "--out", &store]).ok();
    // A store's digest depends on its content, not on the names of its inputs.
    assert_eq!(told[..64], wanted[..64]);
    assert_eq!(told[..64], bucket.zdata(&["verify", &store]).ok()[..64]);
    bucket
        .zdata(&["build", &at("beyond.toml"), "--out", "x"])
        .fails(2, &["leaves the bucket", "../../../../raw", "beyond.toml:"]);
    bucket
        .zdata(&["build", &at("none.toml"), "--out", "x"])
        .fails(3, &["no file is named", "none.toml:"]);
}

#[cfg(feature = "train")]
mod training {
    use super::*;
    use crate::support::{ztrain, ztrain_command};

    /// The curriculum, the store next to it, and the checkpoints are all in the bucket.
    #[test]
    fn a_run_of_a_curriculum_in_a_bucket_is_the_run_of_the_one_here() {
        let Some(twins) = Twins::new() else { return };
        let here = |name: &str| arg(&twins.scratch.path(name)).to_owned();
        let ledger = |run: &str, curriculum: &str, store: &str| {
            let run = twins.scratch.path(run);
            let args =
                ["--curriculum", curriculum, "--out", arg(&run), "--stop-after", "2", "--quiet"];
            let told: Ran = twins.bucket.reached_by(ztrain_command(&args)).output().unwrap().into();
            told.ok();
            let begun = fs::read_to_string(run.join("run.toml")).unwrap();
            assert!(begun.contains(&format!("{store:?}")), "{begun}");
            fs::read_to_string(run.join("ledger.jsonl")).unwrap()
        };
        let wanted = ledger("here", &here("run.toml"), &here("store"));
        assert!(wanted == ledger("there", &url("run.toml"), &url("store")));
        let plan = |curriculum: &str| -> Ran {
            let command = ztrain_command(&["plan", curriculum, "--json"]);
            twins.bucket.reached_by(command).output().unwrap().into()
        };
        assert_eq!(plan(&here("run.toml")).ok(), plan(&url("run.toml")).ok());
    }

    const REFUSED: &[(&[&str], &str)] = &[
        (&["--curriculum", "x.toml", "--out", "@runs/a"], "--out"),
        (&["replay", "--run", "@runs/a", "--step", "1"], "--run"),
        (&["export", "--run", "@runs/a", "--format", "hf", "--out", "x"], "--run"),
        (&["export", "--run", "x", "--format", "hf", "--out", "@x"], "--out"),
        (&["import", "@x", "--out", "x"], "<HF_DIR>"),
        (&["import", "x", "--out", "@x"], "--out"),
        (&["compare", "@a", "b"], "[A]"),
        (&["compare", "a", "@b"], "[B]"),
        (&["bench", "collectives", "--plot", "@plot.svg"], "--plot"),
        (&["replay", "--run", "x", "--step", "1", "--clip", "1", "--plot", "@plot.svg"], "--plot"),
        (&["fork", "@runs/a", "--step", "1", "--out", "x"], "[RUN]"),
        (&["fork", "x", "--step", "1", "--out", "@x"], "--out"),
        (&["fork", "x", "--step", "1", "--out", "y", "--amend", "@x.toml"], "--amend"),
    ];

    #[test]
    fn a_place_that_ztrain_cannot_take_is_refused_clearly() {
        for (args, argument) in REFUSED {
            let args: Vec<String> = args.iter().map(|it| it.replace('@', "s3://bucket/")).collect();
            let told = ztrain(&args.iter().map(String::as_str).collect::<Vec<_>>());
            let told = told.fails(2, &[argument]);
            for part in ["found:", "wanted:", "hint:"] {
                assert!(told.contains(part), "{args:?}: {told}");
            }
        }
        for name in ["", "s3://b//key", "ftp://b/key"] {
            for argument in ["--curriculum", "--checkpoints"] {
                let mut args = ["--curriculum", "x.toml", "--checkpoints", "x"];
                let at = args.iter().position(|it| *it == argument).unwrap();
                args[at + 1] = name;
                ztrain(&args).fails(2, &[argument, "wanted:"]);
            }
        }
    }
}

/// Outputs get a location of their own: neither inside a store, nor where a file or a store exists.
#[test]
fn nothing_is_made_inside_of_a_store() {
    let Some(twins) = Twins::new() else { return };
    let export = ["export", "@store", "--format", "olmo", "--out"];
    for out in ["@store", "@store/sub", "@store/web/deep"] {
        let build = ["build", "@corpus.toml", "--out", out];
        if out != "@store" {
            twins.local(&build).fails(2, &["lies in a store"]);
            twins.remote(&build).fails(2, &["lies in a store", "s3://bucket/store"]);
        }
        twins.local(&[&export[..], &[out]].concat()).fails(2, &[]);
        twins.remote(&[&export[..], &[out]].concat()).fails(2, &["s3://bucket/store"]);
    }
    twins.remote(&[&export[..], &["@corpus.toml"]].concat()).fails(2, &["this is a file"]);
    let store = arg(&twins.scratch.path("store")).to_owned();
    twins.remote(&["publish", &store, "@store/inner"]).fails(2, &["lies in a store"]);
    twins.remote(&["publish", &store, "@corpus.toml"]).fails(2, &["this is a file"]);
    assert!(!twins.scratch.path("store/sub.work").exists());
    twins.local(&["verify", "@store"]).ok();
}
