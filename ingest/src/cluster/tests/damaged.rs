//! Parts, results and files of a cache that are damaged, or not what their names say.

use super::*;

#[test]
fn a_damaged_part_is_made_again_in_a_folder_that_no_text_can_name() {
    let bench = Workbench::new(5);
    let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
    let work = bench.path("").join(OsStr::from_bytes(b"work-\xff"));
    let with_parts = || Options { work: Some(work.clone()), ..options(1) };
    crate::build(&corpus, &bench.path("first"), with_parts()).unwrap();
    // A named folder of parts and the store share the bytes of files.
    let (parts, first) = (tree(&work.join("parts")), tree(&bench.path("first")));
    for (path, bytes) in &parts {
        fs::write(work.join("parts").join(path), &bytes[..bytes.len() / 2]).unwrap();
    }
    crate::build(&corpus, &bench.path("again"), with_parts()).unwrap();
    assert!(tree(&work.join("parts")) == parts);
    assert!(tree(&bench.path("again")) == first);
}

/// A local build can make a damaged part again from its inputs; a merge of tasks cannot.
#[test]
fn a_damaged_part_is_made_again_and_never_merged() {
    let bench = Workbench::new(20);
    let corpus = Corpus::read(prepared(&bench)).unwrap();
    let (work, local) = (bench.path("work"), bench.path("local"));
    crate::build(&corpus, &local, options(2)).unwrap();
    let wanted = tree(&local);
    let with_parts = || Options { work: Some(work.clone()), ..options(2) };
    crate::build(&corpus, &bench.path("first"), with_parts()).unwrap();
    let parts = tree(&work.join("parts"));
    let harms: [fn(&mut Vec<u8>); 4] = [
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.fill(0),
        |bytes| bytes[70] ^= 4,
        |bytes| *bytes.last_mut().unwrap() ^= 1,
    ];
    for (number, harm) in harms.into_iter().enumerate() {
        // Of both stages, several in one build.
        for (path, bytes) in parts.iter().skip(number % 2).step_by(3) {
            let path = work.join("parts").join(path);
            // Of an encoded part's files only the sizes are looked at.
            let is_known = known(&work.join("parts")).contains(&path);
            let mut bytes = bytes.clone();
            if is_known {
                harm(&mut bytes)
            } else {
                bytes.truncate(bytes.len() / 2)
            }
            fs::write(path, bytes).unwrap();
        }
        let again = bench.path(&format!("again-{number}"));
        let watch = disk::watch(bench.path("").as_path(), u64::MAX);
        crate::build(&corpus, &again, with_parts()).unwrap();
        let begun = |act: &disk::Act| match act {
            disk::Act::CreateFolder(path) => path.extension().is_some_and(|it| it == "partial"),
            _ => false,
        };
        let begun = watch.acts().iter().filter(|act| begun(act)).count();
        assert_eq!(begun, 1, "all damage is found before the store is begun");
        assert!(tree(&again) == wanted, "another store after harm {number}");
        assert!(tree(&work.join("parts")) == parts, "other parts after harm {number}");
    }
    // With tasks, the user has to start them again.
    let plan = plan(&corpus, &work).unwrap();
    run(&plan);
    let mut told = 0;
    results_telling(&plan, Stage::Encode, || told += 1).unwrap();
    assert_eq!(told, plan.tasks(), "whoever waits for many tasks is told of each");
    let folder = plan.cache.part_folder(result(&plan, 2).part);
    let path = disk::entries(&folder).unwrap().remove(0);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 6]).unwrap();
    let fault = merge(&plan, &bench.path("merged"), true).unwrap_err();
    assert!(fault.class() == Class::Data && fault.to_string().contains("its task"), "{fault}");
    assert!(!bench.path("merged").exists());
}

/// An intact part in place of another one: of the same stage, of the other one, of another source, of a corpus that
/// allows more than this one.
#[test]
fn a_part_in_the_place_of_another_is_made_again_and_never_merged() {
    let bench = Workbench::new(20);
    let (work, local) = (bench.path("work"), bench.path("local"));
    let with_parts = || Options { work: Some(work.clone()), ..options(2) };
    // Its parts have ids that this vocabulary lacks, and dropped records.
    bench.write("other/web-0.jsonl", "nothing\n".to_owned() + &json_lines(7, 30));
    bench.write(
        "other/tokenizer.json",
        bytes_tokenizer(|it| {
            let names = ["<|end|>", "<tab>", "one", "\u{120}one", "\u{120}two", "\u{120}a"];
            for (id, name) in (256..).zip(names) {
                it["model"]["vocab"][name] = json!(id);
            }
            it["model"]["ignore_merges"] = json!(true);
        }),
    );
    let other = "tokenizer = \"tokenizer.json\"\non_error = \"skip\"\nend = \"<|end|>\"\n[[source]]\nname = \"web\"\n\
                 files = [\"web-0.jsonl\"]\n[[prepare]]\nstep = \"exact-duplicates\"\n";
    let other = Corpus::read(bench.write("other/corpus.toml", other)).unwrap();
    crate::build(&other, &bench.path("other-store"), with_parts()).unwrap();
    let known = || -> Vec<Vec<u8>> {
        known(&work.join("parts")).iter().map(|path| fs::read(path).unwrap()).collect()
    };
    let others = known();
    assert_eq!(others.len(), 2);
    let corpus = Corpus::read(prepared(&bench)).unwrap();
    crate::build(&corpus, &local, with_parts()).unwrap();
    let (wanted, parts) = (tree(&local), known());
    for (number, stage) in
        [(0, Stage::Scan), (7, Stage::Encode), (8, Stage::Scan), (8, Stage::Encode)]
    {
        // The previous plan was removed at the end of its build.
        let plan = plan(&corpus, &work).unwrap();
        run(&plan);
        let own = TaskResult::read(&plan, stage, number).unwrap().unwrap().part;
        let path = plan.known_by(stage, own);
        let good = fs::read(&path).unwrap();
        // Of the same kind: a record, or what a scan saw.
        let like = |bytes: &&Vec<u8>| **bytes != good && bytes[0] == good[0];
        for bytes in parts.iter().filter(like).step_by(3) {
            fs::write(&path, bytes).unwrap();
            if stage == Stage::Scan {
                assert!(!is_whole(&path).unwrap(), "what is known by a name is held against it");
            }
            fs::remove_dir_all(plan.folder().join("decided")).unwrap();
            let made = decide(&plan, true).and_then(|()| merge(&plan, &bench.path("merged"), true));
            let fault = made.map(drop).unwrap_err();
            assert!(fault.class() == Class::Data && fault.place() == path.to_str(), "{fault}");
            assert!(fault.to_string().contains("another part"), "{fault}");
            assert!(!bench.path("merged").exists());
            fs::write(&path, &good).unwrap();
            decide(&plan, true).unwrap();
        }
        let foreign = others.iter().chain(parts.iter().step_by(3));
        for (round, bytes) in foreign.filter(|bytes| **bytes != good).enumerate() {
            fs::write(&path, bytes).unwrap();
            // A decision is not made again.
            let _ = fs::remove_dir_all(plan.decided());
            let store = bench.path(&format!("again-{number}-{}-{round}", stage.name()));
            crate::build(&corpus, &store, with_parts()).unwrap();
            assert!(tree(&store) == wanted && fs::read(&path).unwrap() == good, "{store:?}");
        }
    }
    let plan = plan(&corpus, &work).unwrap();
    run(&plan);
    merge(&plan, &bench.path("merged"), true).unwrap();
    assert!(tree(&bench.path("merged")) == wanted);
}

/// The result of one task is not accepted for another one, though its part is intact and it has equally many files.
#[test]
fn a_result_in_the_place_of_another_is_never_merged() {
    let bench = Workbench::new(20);
    let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
    let plan = plan(&corpus, &bench.path("work")).unwrap();
    run(&plan);
    let place = |task: usize| plan.folder().join(format!("encode-{task:06}.json"));
    assert!(place(1).exists(), "two tasks of one source");
    let good = fs::read(place(1)).unwrap();
    fs::copy(place(0), place(1)).unwrap();
    let fault = merge(&plan, &bench.path("merged"), true).map(drop).unwrap_err();
    assert!(fault.class() == Class::Data && fault.place() == place(1).to_str(), "{fault}");
    assert!(fault.to_string().contains("the result of another task"), "{fault}");
    assert!(!bench.path("merged").exists());
    fs::write(place(1), good).unwrap();
    merge(&plan, &bench.path("merged"), true).unwrap();
}

/// Any file in a folder of parts may have been replaced by a pipe, which never ends.
#[test]
fn pipes_among_parts_keep_nobody_waiting() {
    let bench = Workbench::new(9);
    let path = prepared(&bench);
    let text = fs::read_to_string(&path).unwrap().replace(IN_PARTS, "part_bytes = 1000000000");
    fs::write(&path, text).unwrap();
    let corpus = Corpus::read(path).unwrap();
    let work = bench.path("work");
    let plan = plan(&corpus, &work).unwrap();
    run(&plan);
    let log = plan.folder().join("scan.log");
    fs::write(&log, "error: this is known").unwrap();
    let told = |store: &Path| -> Vec<String> {
        let parts = plan.cache.parts();
        let part = |part: &PathBuf| match part.extension().is_some_and(|it| it == "bin") {
            true => is_whole(part).map(|_| ()),
            false => Ok(()),
        };
        let mut all: Vec<Result<()>> = parts.iter().flatten().map(part).collect();
        let run = |stage| Runner::new(&plan, 1).and_then(|runner| runner.run(stage, 0, true));
        all.extend([Stage::Scan, Stage::Encode].map(|stage| run(stage).map(|_| ())));
        all.push(parts.map(|parts| parts.first().into_iter().for_each(|part| prune::used(part))));
        all.push(Plan::read(&work, plan.name).map(|_| ()));
        all.push(decide(&plan, true).map(|_| ()));
        all.push(merge(&plan, store, true).map(|_| ()));
        all.push(prune(&work, Duration::ZERO, true).map(|_| ()));
        made::kind(&work);
        let faults = all.into_iter().filter_map(Result::err);
        faults.map(|fault| fault.to_string()).chain([last_words(&log)]).collect()
    };
    assert_eq!(told(&bench.path("store")), ["error: this is known"]);
    std::thread::scope(|scope| {
        for (number, (path, bytes)) in tree(&work).into_iter().enumerate() {
            let (path, store) = (work.join(path), bench.path(&format!("store-{number}")));
            if bytes.is_empty() {
                continue;
            }
            fs::remove_file(&path).unwrap();
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            let (done, end) = channel();
            let told = &told;
            scope.spawn(move || done.send(told(&store)));
            let Ok(told) = end.recv_timeout(Duration::from_secs(60)) else {
                // A reader that waits for a writer resumes once there is one.
                let _writer = fs::File::options().read(true).write(true).open(&path);
                panic!("somebody waits for {}", path.display());
            };
            // By its name, or as a part that has to be made again.
            assert_ne!(told, ["error: this is known"], "nobody misses {path:?}");
            fs::remove_file(&path).unwrap();
            fs::write(path, bytes).unwrap();
            // Whatever was pruned is made again.
            run(&plan);
        }
    });
}
