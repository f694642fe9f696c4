//! Fear: that a cluster refuses a manifest, or that a manifest gives a flag that the program does not have.

use std::fs;
use std::process::Command;

use crate::python::{provision, skipped, tests_folder};
#[cfg(feature = "train")]
use crate::support::ztrain;
use crate::support::{Ran, zdata};
use crate::tidy::{files, forbid, root};

/// The folders of manifests and recipes.
const FOLDERS: [&str; 2] = ["ingest/deploy", "trainer/deploy"];

#[test]
fn manifests_are_what_the_published_schemas_describe() {
    let python = match provision("manifests.txt") {
        Ok(python) => python,
        Err(why) => return skipped("the manifests", &why),
    };
    let script = tests_folder().join("manifests.py");
    let checked: Ran = Command::new(python).arg(script).output().unwrap().into();
    assert!(checked.ok().contains("objects hold"));
}

/// The commands of our programs in a text, word by word: manifests write each as one line of JSON, some for a shell.
fn commands(text: &str) -> Vec<Vec<String>> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("command: "));
    let words = lines.map(|line| serde_json::from_str::<Vec<String>>(line).unwrap());
    let split = |words: Vec<String>| -> Vec<String> {
        words.iter().flat_map(|word| word.split(' ')).map(str::to_owned).collect()
    };
    let ours = |words: Vec<String>| {
        let own = words.iter().position(|word| ["zdata", "ztrain"].contains(&word.as_str()));
        words[own.expect("a command of zdata or ztrain")..].to_vec()
    };
    words.map(split).map(ours).collect()
}

/// What a command says of itself; `None` where this build has no such program.
fn help(words: &[String]) -> Option<String> {
    let is_name = |word: &&String| word.chars().all(|c| c.is_ascii_lowercase());
    let names = words[1..].iter().take_while(is_name).map(String::as_str);
    let args: Vec<&str> = names.chain(["--help"]).collect();
    match words[0].as_str() {
        "zdata" => Some(zdata(&args).ok()),
        #[cfg(feature = "train")]
        "ztrain" => Some(ztrain(&args).ok()),
        _ => None,
    }
}

#[test]
fn every_flag_of_a_manifest_is_one_of_its_command() {
    let (mut offences, mut count) = (Vec::new(), 0);
    for path in FOLDERS.iter().flat_map(|folder| files(&root().join(folder), &[".yaml"])) {
        for words in commands(&fs::read_to_string(&path).unwrap()) {
            count += 1;
            let Some(help) = help(&words) else { continue };
            let known: Vec<&str> = help.split([' ', ',', '\n', '[', ']', '=']).collect();
            let flags = words.iter().filter(|word| word.starts_with("--"));
            let unknown = flags.filter(|flag| !known.contains(&flag.as_str()));
            offences.extend(unknown.map(|flag| format!("{}: {flag}", path.display())));
        }
    }
    assert!(count >= 6, "only {count} commands were found");
    forbid("a flag of a manifest is in the help of its command", offences);
}

#[test]
fn ranks_of_a_machine_have_their_numbers_and_end_with_the_code_that_says_most() {
    let ranks = |script: &str| -> Ran {
        let mut command = Command::new("bash");
        command.arg(root().join("trainer/deploy/ranks.sh")).args(["2", "sh", "-c", script]);
        command.envs([("NODES", "2"), ("JOB_COMPLETION_INDEX", "0"), ("MASTER_PORT", "29500")]);
        command.envs([("MASTER_ADDR", "a-name"), ("POD_IP", "10.0.0.1")]);
        command.output().unwrap().into()
    };
    let told =
        ranks("echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR");
    let told = told.ok();
    let mut lines: Vec<&str> = told.lines().collect();
    lines.sort();
    assert_eq!(lines, ["0 4 0 2 0 10.0.0.1", "1 4 1 2 0 10.0.0.1"]);
    for first in ["4", "6"] {
        let other = 10 - first.parse::<u8>().unwrap();
        let ended = ranks(&format!("[ $RANK = 0 ] && exit {first}; sleep 0.5; exit {other}"));
        assert_eq!(ended.code, Some(4), "{ended:?}");
    }
}
