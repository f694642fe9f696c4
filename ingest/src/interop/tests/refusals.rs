//! What an import refuses, and what a refusal leaves: nothing.

use super::*;
use store::Manifest;
use store::open;

/// A store of one source, and its Megatron files in a folder: pairs called `one` and `two`.
fn store(bench: &Bench) -> (Manifest, PathBuf) {
    let docs: Vec<Vec<u32>> =
        (0..40).map(|at| (0..1 + at % 9).map(|id| id + at).collect()).collect();
    let ds = bench.datatrove("a.ds", &docs);
    let mut request = bench.import(Peer::Datatrove, "store", &[(&ds, false)]);
    request.validation = Ratio::new(1, 4);
    let Imported::Done(manifest, _) = import(&request).unwrap() else { panic!("a new store") };
    export(&bench.export(Peer::Megatron, "store", "out")).unwrap();
    fs::create_dir(bench.path("pairs")).unwrap();
    for (split, name) in [("train", "one"), ("validation", "two")] {
        for ending in [".bin", ".idx"] {
            let to = bench.path("pairs").join(format!("{name}{ending}"));
            fs::copy(bench.path("out/web").join(format!("{split}{ending}")), to).unwrap();
        }
    }
    (manifest, bench.path("pairs"))
}

#[test]
fn a_folder_of_megatron_files_is_all_of_its_pairs() {
    let bench = Bench::new();
    let (_, folder) = store(&bench);
    let pairs = ["one", "two"].map(|pair| folder.join(pair));
    let named: Vec<(&Path, bool)> = pairs.iter().map(|pair| (pair.as_path(), false)).collect();
    let [by_folder, by_name] =
        [("folder", vec![(folder.as_path(), false)]), ("names", named)].map(|(store, parts)| {
            import(&bench.import(Peer::Megatron, store, &parts)).unwrap();
            docs(&bench.path(store), Split::Train)
        });
    assert!(by_folder.len() == 40 && by_folder == by_name);
    // What an export held out is not trained on because somebody named the folder of both.
    let export = bench.path("out/web");
    let splits = bench.import(Peer::Megatron, "none", &[(&export, false)]);
    let fault = import(&splits).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("splits"), "{fault}");
    fs::create_dir(bench.path("empty")).unwrap();
    let empty = bench.import(Peer::Megatron, "none", &[(&bench.path("empty"), false)]);
    let fault = import(&empty).unwrap_err();
    assert!(fault.class() == Class::Data && fault.to_string().contains(".bin"), "{fault}");
    assert!(!bench.path("none").exists() && !bench.path("none.partial").exists());
}

#[test]
fn a_file_is_imported_once() {
    let bench = Bench::new();
    let (_, folder) = store(&bench);
    let (train, bin, idx) =
        (folder.join("one"), folder.join("one.bin"), folder.join("../pairs/one.idx"));
    for twice in [[&train, &train], [&train, &bin], [&bin, &idx], [&folder, &train]] {
        let parts = twice.map(|path| (path.as_path(), false));
        let mut request = bench.import(Peer::Megatron, "twice", &parts);
        for source in ["web", "other"] {
            request.parts[1].source = source.to_owned();
            let fault = import(&request).unwrap_err();
            assert!(
                fault.class() == Class::Usage && fault.to_string().contains("twice"),
                "{fault}"
            );
            assert!(!bench.path("twice").exists() && !bench.path("twice.partial").exists());
        }
    }
}

#[test]
fn a_refused_import_leaves_no_folder() {
    let bench = Bench::new();
    let ds = bench.datatrove("a.ds", &[vec![1, 2], vec![3, 60_000]]);
    let fault = import(&bench.import(Peer::Datatrove, "deep/store", &[(&ds, false)])).unwrap_err();
    assert_eq!(fault.class(), Class::Data, "{fault}");
    assert!(!bench.path("deep/store").exists() && !bench.path("deep/store.partial").exists());
}

#[test]
fn a_manifest_that_lies_ends_no_export_with_a_bug() {
    type Lie = fn(&mut Manifest);
    let lies: [Lie; 6] = [
        |manifest| manifest.sources[0].train.documents += 1,
        |manifest| manifest.sources[0].train.tokens -= 1,
        |manifest| manifest.sources[0].train.shards[0].documents -= 1,
        |manifest| manifest.sources[0].train.shards[0].tokens = u64::MAX,
        |manifest| manifest.sources[0].train.shards[1].first_token = 1,
        |manifest| manifest.sources[0].train.shards.reverse(),
    ];
    for lie in lies {
        let bench = Bench::new();
        let (mut manifest, _) = store(&bench);
        lie(&mut manifest);
        manifest.digest = manifest.identity();
        open::commit(&bench.path("store"), &manifest).unwrap();
        for peer in Peer::ALL {
            let fault = export(&bench.export(peer, "store", "lie")).unwrap_err();
            assert_eq!(fault.class(), Class::Data, "{fault}");
            assert!(!bench.path("lie").exists() && !bench.path("lie.partial").exists());
        }
    }
}
