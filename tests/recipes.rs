//! Fear: that a curriculum which we ship cannot be planned, or does not fit where it says that it does.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Scratch, arg, zdata, ztrain};

/// The store of the demo, as far as a plan needs to know it.
const DEMO: &str = "[[source]]\nname = \"code\"\ntokens = 1_200_000\ndocuments = 900\n\
    [[source]]\nname = \"prose\"\ntokens = 400_000\ndocuments = 300\n\
    [[source]]\nname = \"manifests\"\ntokens = 200_000\ndocuments = 400\n";

fn recipes() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("curricula");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|ending| ending == "toml")).collect();
    found.sort();
    found
}

#[test]
fn every_recipe_is_planned_and_fits() {
    let scratch = Scratch::new();
    scratch.write("runs/demo/store.toml", DEMO);
    let recipes = recipes();
    assert!(recipes.len() >= 7, "{recipes:?}");
    for recipe in recipes {
        let name = recipe.file_name().unwrap().to_str().unwrap();
        let text = fs::read_to_string(&recipe).unwrap();
        // The demo's store is there once the demo has run.
        let path = match text.contains("\"../runs/demo/store\"") {
            true => scratch.write(
                &format!("curricula/{name}"),
                text.replace("../runs/demo/store", "../runs/demo/store.toml"),
            ),
            false => recipe.clone(),
        };
        zdata(&["plan", arg(&path), "--json"]).ok();
        let (ranks, more) = match name {
            "linear-128k.toml" => ("8", &["--cp", "8"][..]),
            name if name.starts_with("phase") => ("1024", &["--ranks-per-node", "8"][..]),
            _ => ("1", &[][..]),
        };
        let device = if name.starts_with("phase") { "mi300x" } else { "h100" };
        let plan = ["plan", arg(&path), "--ranks", ranks, "--device", device, "--json"];
        let planned = ztrain(&[&plan[..], more].concat()).ok();
        let planned: Value = serde_json::from_str(&planned).unwrap();
        assert_eq!(planned["fits"], true, "{name} on {ranks} of {device}");
    }
}
