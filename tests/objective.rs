//! Fear: that the recipe for objectives on the page of curricula does not run, or that a command does not know one.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Scratch, arg, build, corpus, curriculum, zdata};
use crate::tidy::root;

fn parsed(args: &[&str]) -> Value {
    serde_json::from_str(&zdata(&[args, &["--json"]].concat()).ok()).unwrap()
}

/// The keys that the page of curricula shows, for source `web`.
fn recipe() -> String {
    let page = fs::read_to_string(root().join("curricula/README.md")).unwrap();
    let section = page.split("## Fill in the middle, mask, weigh").nth(1).unwrap();
    let keys = section.split("```").nth(1).unwrap().strip_prefix("toml\n").unwrap();
    keys.replace("source.code", "source.web")
}

fn ids(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// What is at the places of a rearranged document, from the ids that are there without a recipe.
fn rearranged(document: &Value, text: &[u64], sentinels: [u64; 3]) -> Vec<u64> {
    let infill = &document["infill"];
    let first = document["of_document"][0].as_u64().unwrap();
    let part = |name: &str| {
        let ends = ids(&infill[name]);
        text[(ends[0] - first) as usize..(ends[1] - first) as usize].to_vec()
    };
    let end = text[(infill["left_out"][1].as_u64().unwrap() - first) as usize..].to_vec();
    let [pre, mid, suf] = sentinels.map(|id| vec![id]);
    let (prefix, middle, suffix) = (part("prefix"), part("middle"), part("suffix"));
    match infill["mode"].as_str().unwrap() {
        "psm" => [pre, prefix, suf, suffix, mid, middle, end].concat(),
        _ => [pre, suf, suffix, mid, prefix, middle, end].concat(),
    }
}

#[test]
fn the_recipe_runs_and_commands_know_it() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 200, "");
    let specials = ["<|endoftext|>", "<|pre|>", "<|mid|>", "<|suf|>"];
    let train = ["tokenizer", "train", arg(&corpus), "--vocab", "400", "--out"];
    let tokenizer = scratch.path("tokenizer.json");
    let flags = specials.iter().flat_map(|name| ["--special", name]);
    let args: Vec<&str> = train.into_iter().chain([arg(&tokenizer)]).chain(flags).collect();
    fs::remove_file(&tokenizer).unwrap();
    zdata(&args).ok();
    let store = build(&scratch, &corpus, "store");
    let added: Value = serde_json::from_slice(&fs::read(&tokenizer).unwrap()).unwrap();
    let id = |name: &str| {
        let mut all = added["added_tokens"].as_array().unwrap().iter();
        all.find(|token| token["content"] == name).unwrap()["id"].as_u64().unwrap()
    };
    let sentinels = ["<|pre|>", "<|mid|>", "<|suf|>"].map(id);
    let with = |name: &str, keys: &str| {
        let change = ("[source.math]\n", &*format!("{keys}\n[source.math]\n"));
        curriculum(&scratch, &store, name, &[change])
    };
    let (plain, run) = (with("plain.toml", ""), with("run.toml", &recipe()));
    let text = zdata(&["plan", arg(&run)]).ok();
    let line = "web: fill-in-the-middle in 1/2 of the pieces, 1/2 of them SPM; \
                1 in 4 tokens is no label, by the 13 before it; loss weight 3/2\n";
    assert!(text.contains(line), "{text}");
    let (mut seen, mut labels) = (0, [0; 2]);
    for step in ["1", "2", "13"] {
        let rows = |run: &Path| parsed(&["batch", arg(run), "--step", step])["sequences"].clone();
        let (plain, run) = (rows(&plain), rows(&run));
        for (plain, row) in plain.as_array().unwrap().iter().zip(run.as_array().unwrap()) {
            if row["source"] == "math" {
                assert_eq!(plain, row);
                continue;
            }
            assert_eq!(row["loss_weight"], json!("3/2"));
            labels =
                [0, 1].map(|at| labels[at] + [plain, row][at]["label_count"].as_u64().unwrap());
            let [text, found] = [plain, row].map(|row| ids(&row["token_ids"]));
            for document in row["documents"].as_array().unwrap() {
                let place = ids(&document["tokens"]);
                let place = place[0] as usize..place[1] as usize;
                let text = text[place.clone()].to_vec();
                let wanted = match document["infill"].is_null() {
                    true => text,
                    false => rearranged(document, &text, sentinels),
                };
                assert_eq!(found[place], wanted, "{document}");
                seen += usize::from(!document["infill"].is_null());
            }
        }
    }
    assert!(seen > 5, "{seen} pieces are rearranged");
    let share = labels[1] as f64 / labels[0] as f64;
    assert!((0.6..0.95).contains(&share), "{labels:?}");
    let shown = zdata(&["batch", arg(&run), "--step", "1"]).ok();
    assert!(shown.contains("loss weight 3/2") && shown.contains("m: prefix "), "{shown}");
    let refused = with("refused.toml", &recipe().replace("<|mid|>", "<|mit|>"));
    zdata(&["plan", arg(&refused)]).fails(2, &["refused.toml:6:", "did you mean `<|mid|>`?"]);
}
