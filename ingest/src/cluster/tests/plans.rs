//! Plans are independent: results and running tasks of one plan do not affect another.

use super::*;
use crate::cache_dir::CacheDir;
use crate::cluster::plan_build;
use crate::tokenize::Engine;

fn planned(bench: &Workbench, keys: &str) -> Plan {
    let corpus = Corpus::read(bench.corpus(keys)).unwrap();
    plan(&corpus, &bench.path("work")).unwrap()
}

#[test]
fn a_merge_makes_the_store_of_the_plan_that_it_names() {
    let bench = Workbench::new(9);
    let mut made = Vec::new();
    for (name, keys) in [("a", IN_PARTS), ("b", "part_bytes = 2")] {
        let corpus = Corpus::read(bench.corpus(keys)).unwrap();
        crate::build(&corpus, &bench.path(&format!("local-{name}")), options(1)).unwrap();
        let plan = planned(&bench, keys);
        run(&plan);
        made.push((name, plan.name));
    }
    for (name, plan) in &made {
        let out = bench.path(&format!("out-{name}"));
        merge(&Plan::read(&bench.path("work"), *plan).unwrap(), &out, true).unwrap();
        assert!(tree(&out) == tree(&bench.path(&format!("local-{name}"))), "{name}");
    }
    // A merged store no longer needs its plan, which is removed when the next one is planned.
    let third = planned(&bench, "part_bytes = 3");
    for (_, plan) in made {
        let fault = Plan::read(&bench.path("work"), plan).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Data);
        let told = fault.to_string();
        assert!(
            told.contains(&plan.to_string()) && told.contains(&third.name.to_string()),
            "{told}"
        );
    }
    // A plan in the folder of another one, and a merge into the folder of parts.
    let (name, corpus) = (third.name, Corpus::read(bench.corpus("")).unwrap());
    let other = plan(&corpus, &bench.path("elsewhere")).unwrap();
    fs::copy(other.folder().join("plan.json"), third.folder().join("plan.json")).unwrap();
    let fault = Plan::read(&bench.path("work"), name).map(drop).unwrap_err();
    assert!(fault.to_string().contains("another plan"), "{fault}");
    run(&other);
    let fault = merge(&other, &bench.path("elsewhere/store"), true).unwrap_err();
    assert!(fault.class() == Class::Usage && !bench.path("elsewhere/store").exists(), "{fault}");
}

#[test]
fn builds_and_tasks_leave_each_others_scratch_alone() {
    let bench = Workbench::new(9);
    let tasks = planned(&bench, IN_PARTS);
    let half = tasks.folder().join(".encode-000000.part-elsewhere--7.tmp");
    fs::write(&half, "half a part of another machine").unwrap();
    // Of the same corpus, and of another one; killed, failed and done, here and by tasks.
    for keys in [IN_PARTS, "part_bytes = 20"] {
        let corpus = Corpus::read(bench.corpus(keys)).unwrap();
        let killed = plan_build(&corpus, &bench.path("work"), Engine::Fastest).unwrap();
        fs::write(killed.folder().join(".half"), "half").unwrap();
        let (folder, name) = (killed.folder(), killed.name);
        assert!(name != tasks.name && half.exists());
        let with_parts = || Options { work: Some(bench.path("work")), ..options(1) };
        let other = Corpus::read(bench.corpus("part_bytes = 500")).unwrap();
        // Tasks of the killed build are still running, as those of a job whose build has ended.
        let store = bench.path(&format!("store-{}", keys.len()));
        crate::build(&other, &store, with_parts()).unwrap();
        assert!(half.exists() && folder.join(".half").exists());
        drop(killed);
        fs::remove_dir_all(&store).unwrap();
        crate::build(&other, &store, with_parts()).unwrap();
        assert!(half.exists() && !folder.exists(), "what a killed build left goes");
    }
    // The folder next to a store is removed together with what is useless, but not with what is needed.
    let corpus = Corpus::read(bench.corpus("")).unwrap();
    fs::rename(bench.path("work"), bench.path("store.work")).unwrap();
    crate::build(&corpus, &bench.path("store"), options(1)).unwrap();
    let cache = CacheDir::open(&bench.path("store.work")).unwrap();
    let plan = Plan::read(cache.path(), tasks.name).unwrap();
    assert!(plan.folder().join(half.file_name().unwrap()).exists());
    run(&plan);
    merge(&plan, &bench.path("merged"), true).unwrap();
    drop((plan, tasks));
    crate::build(&corpus, &bench.path("store"), options(1)).unwrap();
    assert!(!cache.path().exists());
}
