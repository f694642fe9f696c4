//! Fear: that the story of `trainer/docs/story.md` no longer holds: runs `story.sh` with a shorter run.

use std::path::Path;
use std::process::Command;

use crate::python::tests_folder;
use crate::support::{Ran, Scratch, arg};

#[test]
fn planted_trouble_is_found_explained_and_banned() {
    let scratch = Scratch::new();
    let bin = Path::new(env!("CARGO_BIN_EXE_ztrain")).parent().unwrap();
    let work = scratch.path("story");
    let mut story = Command::new("sh");
    story.arg(tests_folder().join("story.sh")).args([arg(bin), arg(&work), "140"]);
    let told = Ran::from(story.output().unwrap()).ok();
    // The script stops at the first claim that does not hold.
    assert_eq!(told.matches("  holds: ").count(), 7, "{told}");
    for command in [
        "ztrain spikes",
        "ztrain explain",
        "ztrain replay",
        "ztrain fork",
        "ztrain compare",
        "ztrain report",
    ] {
        assert!(told.contains(&format!("$ {command} ")), "{command}: {told}");
    }
    assert!(work.join("run/report.html").exists() && work.join("both.svg").exists());
}
