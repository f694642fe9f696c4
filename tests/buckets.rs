//! Fear: that a bucket has other documents than its kept column says, that its curve reads it more often than its cap,
//! or that a command does not know it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{Scratch, arg, build, curriculum, document, zdata};
use crate::tidy::root;

const DOCUMENTS: u64 = 400;

fn parsed(args: &[&str]) -> Value {
    serde_json::from_str(&zdata(&[args, &["--json"]].concat()).ok()).unwrap()
}

/// The quality of document `index` in hundredths; one in 40 has none.
fn quality(index: u64) -> Option<u64> {
    (index % 40 != 7).then_some(index * 37 % 100)
}

/// A corpus whose source `web` keeps a number and a name.
fn corpus(scratch: &Scratch) -> PathBuf {
    let line = |index: u64| {
        let mut line = json!({"id": format!("w{index}"), "text": document(5, index),
            "kind": if index.is_multiple_of(3) { "code" } else { "prose" }});
        if let Some(hundredths) = quality(index) {
            line["quality"] = json!(hundredths as f64 / 100.0);
        }
        line.to_string() + "\n"
    };
    scratch.write("raw/web.jsonl", (0..DOCUMENTS).map(line).collect::<String>());
    let math =
        |index| json!({"id": format!("m{index}"), "text": document(6, index)}).to_string() + "\n";
    scratch.write("raw/math.jsonl", (0..100).map(math).collect::<String>());
    let source = |name: &str, more: &str| {
        format!(
            "[[source]]\nname = \"{name}\"\nfiles = [\"raw/{name}.jsonl\"]\ntext = \"text\"\nid = \"id\"\n{more}\n"
        )
    };
    let keep = source("web", "keep = [\"quality\", \"kind\"]") + &source("math", "");
    let head = "tokenizer = \"tokenizer.json\"\nunit = 1024\nvalidation = \"1/50\"\n";
    let path = scratch.write("corpus.toml", format!("{head}{keep}"));
    let tokenizer = scratch.path("tokenizer.json");
    zdata(&["tokenizer", "train", arg(&path), "--vocab", "400", "--out", arg(&tokenizer)]).ok();
    path
}

/// The keys that the page of curricula shows.
fn recipe() -> String {
    let page = fs::read_to_string(root().join("curricula/README.md")).unwrap();
    let section = page.split("## Read the best documents more often").nth(1).unwrap();
    section.split("```").nth(1).unwrap().strip_prefix("toml\n").unwrap().to_owned()
}

/// The curriculum with these settings of `web`.
fn with(scratch: &Scratch, store: &Path, name: &str, web: &str, more: &[(&str, &str)]) -> PathBuf {
    let settings = format!("[source.math]\nmax_epochs = 9\n\n{web}");
    let change = ("[source.math]\nmax_epochs = 3\n", settings.as_str());
    curriculum(scratch, store, name, &[&[change], more].concat())
}

/// What is read is what the column says, and each document is where `zdata where` finds it.
fn follows_the_column(run: &Path) {
    let bucket = |id: &str| match quality(id[1..].parse().unwrap()).unwrap() {
        0..20 => "web/0",
        20..50 => "web/1",
        50..80 => "web/2",
        _ => "web/3",
    };
    let mut seen = 0;
    for step in 1..13 {
        let batch = parsed(&["batch", arg(run), "--step", &step.to_string()]);
        for row in batch["sequences"].as_array().unwrap() {
            let source = row["source"].as_str().unwrap();
            for document in row["documents"].as_array().unwrap().iter().filter(|_| source != "math")
            {
                let id = document["id"].as_str().unwrap();
                assert_eq!(source, bucket(id));
                seen += 1;
                if seen % 10 == 0 {
                    let found = parsed(&["where", arg(run), "--doc", id]);
                    assert_eq!(
                        (found.as_array().unwrap().len(), &found[0]["source"]),
                        (1, &json!(source))
                    );
                    let places = found[0]["seen"].as_array().unwrap();
                    assert!(
                        places
                            .iter()
                            .any(|place| place["step"] == step
                                && place["sequence"] == row["sequence"])
                    );
                }
            }
        }
    }
    assert!(seen > 50);
}

#[test]
fn a_kept_column_cuts_a_source_into_buckets() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch), "store");
    let recipe = recipe();
    // The planner says for which number of tokens the curve is to be solved.
    let run =
        with(&scratch, &store, "run.toml", &recipe.replace(", tokens = 2_000_000_000", ""), &[]);
    let refused = zdata(&["plan", arg(&run)]).fails(2, &["run.toml:10:1", "tokens = "]);
    let tokens = refused.split("tokens = ").nth(1).unwrap().split(',').next().unwrap();
    let web = recipe.replace("2_000_000_000", tokens);
    let run = with(&scratch, &store, "run.toml", &web, &[]);
    let plan = parsed(&["plan", arg(&run)]);
    let rows = plan["sources"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["web/0", "web/1", "web/2", "web/3", "math"]);
    assert_eq!(
        (&rows[0]["taken"], &rows[0]["bucket"]["holds"]),
        (&json!(0), &json!("quality < 0.2"))
    );
    let epochs: Vec<f64> = rows[1..4].iter().map(|row| row["epochs"].as_f64().unwrap()).collect();
    assert!(epochs[0] < epochs[1] && epochs[1] < epochs[2] && epochs[2] < 7.1, "{epochs:?}");
    assert!(rows[3]["bucket"]["read_amplification"].as_f64().unwrap() >= 1.0);
    let text = zdata(&["plan", arg(&run)]).ok();
    assert!(text.contains("web, cut into buckets") && text.contains("in no bucket: "), "{text}");
    assert!(scratch.path("store.buckets").is_dir());
    follows_the_column(&run);
    // Bans and mixes of buckets in an amendment; the steps before it stay.
    let digests = |steps| zdata(&["digest", arg(&run), "--steps", steps]).ok();
    let (before, after) = (digests("1..8"), digests("8..13"));
    zdata(&["amend", arg(&run), "--step", "8", "--mix", "web/3=1,math=1", "--ban", "web:w99"]).ok();
    assert_eq!(digests("1..8"), before);
    assert_ne!(digests("8..13"), after);
    let banned = parsed(&["where", arg(&run), "--doc", "w99"]);
    let places = banned[0]["seen"].as_array().unwrap();
    assert!(
        places.iter().all(|place| place["banned"] == (place["step"].as_u64() >= Some(8))),
        "{banned}"
    );
}

#[test]
fn buckets_are_made_again_and_refused_where_they_cannot_be() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch), "store");
    let kinds = "[source.web]\nmax_epochs = 20\nbuckets = { column = \"kind\", values = [\"code\"], other = \"rest\", \
        none = \"bare\" }\n\
        curve = { weights = [1] }\n";
    let run = with(&scratch, &store, "run.toml", kinds, &[]);
    let digests = || zdata(&["digest", arg(&run), "--steps", "1..21"]).ok();
    let made = digests();
    fs::remove_dir_all(scratch.path("store.buckets")).unwrap();
    assert_eq!(digests(), made);
    // Each document is in one bucket, and those of the code are in its own but for what is held out.
    let raw = fs::read_to_string(scratch.path("raw/web.jsonl")).unwrap();
    let code: Vec<&str> = raw.lines().filter(|line| line.contains("\"code\"")).collect();
    let plan = parsed(&["plan", arg(&run)]);
    let all = parsed(&["inspect", arg(&store)])["sources"][0]["accounting"].clone();
    let [train, held] = ["train", "validation"].map(|split| all[split].as_u64().unwrap());
    let buckets = [0, 1, 2].map(|bucket| plan["sources"][bucket]["documents"].as_u64().unwrap());
    assert_eq!(buckets.iter().sum::<u64>(), train);
    assert!((code.len() as u64 - held..=code.len() as u64).contains(&buckets[0]), "{buckets:?}");
    let refused = |web: &str, words: &[&str]| {
        let run = with(&scratch, &store, "wrong.toml", web, &[]);
        zdata(&["plan", arg(&run)]).fails(2, words);
    };
    refused(
        "[source.web]\nbuckets = { column = \"score\", edges = [1] }\n",
        &["wrong.toml:9:13", "does not keep the column", "keep = [\"score\"]"],
    );
    refused(
        "[source.web]\nbuckets = { column = \"kind\", edges = [1] }\n",
        &["wrong.toml:9:13", "not a number"],
    );
    refused(
        "[source.web]\nbuckets = { column = \"kind\", values = [\"ode\"] }\n",
        &["no bucket of the source has text"],
    );
    let kept = fs::read_dir(scratch.path("store.buckets")).unwrap().map(|it| it.unwrap().path());
    kept.for_each(|file| fs::write(file, "torn").unwrap());
    zdata(&["plan", arg(&run)]).fails(3, &["this file of a bucket is damaged", "remove it"]);
    // A stub names buckets as sources.
    let stub = "[[source]]\nname = \"web/code\"\ntokens = 40_000\ndocuments = 9\nunit = 1024\n[[source]]\n\
        name = \"web/rest\"\ntokens = 9_000\ndocuments = 9\nunit = 1024\n[[source]]\nname = \"web/bare\"\n\
        tokens = 9\ndocuments = 1\nunit = 1024\n[[source]]\nname = \"math\"\ntokens = 30_000\n\
        documents = 9\nunit = 1024\n";
    let stub = scratch.write("stub.toml", stub);
    let run = with(&scratch, &stub, "stubbed.toml", kinds, &[]);
    assert!(parsed(&["plan", arg(&run)])["sources"][0]["taken"].as_u64() > Some(0));
}

#[cfg(feature = "train")]
#[test]
fn a_run_over_buckets_is_resumed_replayed_and_explained() {
    use crate::packed::resumed_and_explained;
    use crate::support::{SHORT, ztrain};

    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch), "store");
    let web = "[source.web]\nbuckets = { column = \"quality\", edges = [0.5], names = [\"low\", \"high\"] }\n\
        curve = { weights = [1, 3] }\n";
    let run = with(&scratch, &store, "run.toml", web, &SHORT);
    let (whole, explained) = resumed_and_explained(&scratch, &run, "store.buckets");
    let documents = explained["documents"].as_array().unwrap();
    let sources = documents.iter().map(|document| document["source"].as_str().unwrap());
    assert!(sources.clone().all(|source| ["web/low", "web/high", "math"].contains(&source)));
    let page = scratch.path("page.html");
    ztrain(&["report", "--run", arg(&whole), "--out", arg(&page)]).ok();
    let page = fs::read_to_string(page).unwrap();
    // The plan mixes `web`, the run reads its buckets: the page knows which belong to it.
    for of in [r#""names":["math","web/high","web/low"]"#, r#""wholes":["math","web","web"]"#] {
        assert!(page.contains(of), "{of}");
    }
    // A curve that reads other proportions is another run.
    let text = fs::read_to_string(&run).unwrap().replace("[1, 3]", "[1, 1]");
    let edited = scratch.write("edited.toml", text);
    ztrain(&["--curriculum", arg(&edited), "--out", arg(&whole), "--quiet"])
        .fails(2, &["source.web", "step 1"]);
}
