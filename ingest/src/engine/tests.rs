//! A part says what was put into it, or that it does not.

use std::fs;

use super::part::PartReader;
use super::task::Ran;
use super::{Plan, merge, plan, run};
use crate::corpus::Corpus;
use crate::testing::{Workbench, options, tree};

fn read(plan: &Plan, task: usize) -> contract::Result<usize> {
    let mut part = PartReader::open(&plan.part(task), plan.digest)?;
    let mut entries = 0;
    while part.next()?.is_some() {
        entries += 1;
    }
    Ok(entries)
}

#[test]
fn every_flipped_bit_and_every_cut_of_a_part_is_found() {
    let bench = Workbench::new(4);
    let corpus = Corpus::read(&bench.corpus("")).unwrap();
    let plan = plan(&corpus, &bench.path("work"), 1).unwrap();
    assert_eq!(plan.tasks(), 3);
    assert!(matches!(run(&plan, 0, 2).unwrap(), Ran::New(_)));
    assert_eq!(read(&plan, 0).unwrap(), 4 + 1);
    let good = fs::read(plan.part(0)).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(plan.part(0), &bad).unwrap();
        let fault = read(&plan, 0).expect_err("a flipped bit");
        assert!(fault.to_string().contains("part-000000"), "{fault}");
        fs::write(plan.part(0), &good[..at]).unwrap();
        assert!(read(&plan, 0).is_err(), "cut at {at}");
    }
}

#[test]
fn tasks_of_any_size_make_the_store_of_a_local_build() {
    let bench = Workbench::new(30);
    for (number, keys) in ["", "shard_tokens = 500", "on_error = \"skip\""].into_iter().enumerate()
    {
        bench.write(
            "web-2.jsonl",
            if number == 2 { "{\"text\": 3}\n{\"text\": \"a\"}\n" } else { "" },
        );
        let corpus = Corpus::read(&bench.corpus(keys)).unwrap();
        let local = bench.path(&format!("local-{number}"));
        crate::build(&corpus, &local, options(2)).unwrap();
        for bytes in [1, 5_000, u64::MAX] {
            let plan =
                plan(&corpus, &bench.path(&format!("work-{number}-{bytes}")), bytes).unwrap();
            for task in (0..plan.tasks()).rev() {
                run(&plan, task, 1).unwrap();
                assert!(matches!(run(&plan, task, 3).unwrap(), Ran::Again(_)));
            }
            let store = bench.path(&format!("store-{number}-{bytes}"));
            merge(&plan, &store).unwrap();
            assert_eq!(tree(&store), tree(&local), "{keys} {bytes}");
        }
    }
}

#[test]
fn a_corpus_with_steps_is_refused() {
    let bench = Workbench::new(2);
    let file = bench.corpus("");
    let text = fs::read_to_string(&file).unwrap() + "\n[[prepare]]\nstep = \"clean\"\n";
    fs::write(&file, text).unwrap();
    let corpus = Corpus::read(&file).unwrap();
    let Err(fault) = plan(&corpus, &bench.path("work"), 1) else { panic!("planned") };
    let fault = fault.to_string();
    assert!(fault.contains("do not prepare") && fault.contains("web"), "{fault}");
    assert!(!bench.path("work").exists());
}
