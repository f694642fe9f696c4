//! What an import refuses; a refusal leaves no files.

use super::*;
use store::Manifest;
use store::open;

/// A store of one source, and its Megatron files, with splits called `train` and `second`.
fn store(bench: &Bench) -> (Manifest, PathBuf) {
    let docs: Vec<Vec<u32>> =
        (0..40).map(|at| (0..1 + at % 9).map(|id| id + at).collect()).collect();
    // Two files, and so two parts.
    let (first, second) = docs.split_at(20);
    let files = [bench.datatrove("a.ds", first), bench.datatrove("b.ds", second)];
    let files = files.each_ref().map(|file| (file.as_path(), false));
    let mut request = bench.import(Peer::Datatrove, "store", &files);
    request.validation = Ratio::new(1, 4);
    let Imported::Done(manifest, _) = import(&request).unwrap() else { panic!("a new store") };
    export(&bench.export(Peer::Megatron, "store", "out")).unwrap();
    // A folder with both splits is ambiguous.
    let folder = bench.path("out/web");
    let both = import(&bench.import(Peer::Megatron, "both", &[(&folder, false)])).unwrap_err();
    assert!(both.class() == Class::Usage && both.to_string().contains("validation.bin"), "{both}");
    for ending in ["bin", "idx"] {
        let [from, to] =
            ["validation", "second"].map(|name| folder.join(name).with_extension(ending));
        fs::rename(from, to).unwrap();
    }
    (manifest, folder)
}

#[test]
fn a_folder_of_megatron_files_is_all_of_its_pairs() {
    let bench = Bench::new();
    let (_, folder) = store(&bench);
    let pairs = ["second", "train"].map(|split| folder.join(split));
    let named: Vec<(&Path, bool)> = pairs.iter().map(|pair| (pair.as_path(), false)).collect();
    let [by_folder, by_name] =
        [("folder", vec![(folder.as_path(), false)]), ("names", named)].map(|(store, parts)| {
            import(&bench.import(Peer::Megatron, store, &parts)).unwrap();
            docs(&bench.path(store), Split::Train)
        });
    assert!(by_folder.len() == 40 && by_folder == by_name);
    fs::create_dir(bench.path("empty")).unwrap();
    let empty = bench.import(Peer::Megatron, "none", &[(&bench.path("empty"), false)]);
    let fault = import(&empty).unwrap_err();
    assert!(fault.class() == Class::Data && fault.to_string().contains(".bin"), "{fault}");
    assert!(!bench.path("none").exists() && !bench.path("none.partial").exists());
}

/// As in a build that drops everything it reads.
#[test]
fn documents_without_tokens_alone_make_no_store() {
    let bench = Bench::new();
    let ds = bench.datatrove("a.ds", &[vec![], vec![]]);
    let fault = import(&bench.import(Peer::Datatrove, "deep/none", &[(&ds, false)])).unwrap_err();
    assert_eq!(fault.class(), Class::Data, "{fault}");
    for word in ["nothing is left of source \"web\"", "2 records: 2 empty", "--dtype"] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
    assert!(!bench.path("deep").exists());
}

#[test]
fn a_file_is_imported_once() {
    let bench = Bench::new();
    let (_, folder) = store(&bench);
    let (train, bin, idx) =
        (folder.join("train"), folder.join("train.bin"), folder.join("../web/train.idx"));
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

/// A headerless file cut at exactly half must not be read as a narrower one: every second id would be zero.
#[test]
fn a_file_cut_in_half_is_not_taken_for_a_narrower_one() {
    let bench = Bench::new();
    let path = bench.path("o.npy");
    write_gzip(&bench.path("o.csv.gz"), b"0,3,a,src,1\n3,4,b,src,2\n");
    let whole = |width: usize| -> Vec<u8> {
        [1u32, 2, 3, 4].iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect()
    };
    for (vocab, width, other) in [(258, 2, "uint8"), (1 << 16, 2, "uint8"), (100_277, 4, "uint16")]
    {
        let hints = Hints { vocab, ..hints() };
        fs::write(&path, whole(width)).unwrap();
        let found = read_through(&Real, Peer::Olmo, &path, &hints).unwrap();
        assert_eq!(plain(found), [vec![1, 2, 3], vec![4]]);
        fs::write(&path, &whole(width)[..width * 2]).unwrap();
        let fault = read_through(&Real, Peer::Olmo, &path, &hints).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(fault.to_string().contains(&format!("--dtype {other}")), "{fault}");
    }
    // dolma writes wider tokens than necessary if configured so.
    fs::write(&path, whole(4)).unwrap();
    assert_eq!(plain(read(Peer::Olmo, &path).unwrap()), [vec![1, 2, 3], vec![4]]);
}

/// A file of u32 cut at half has the size of one of u16, and all its numbers are valid ids: as u16, every second one is
/// 0. The importer does not guess.
#[test]
fn a_wide_file_cut_in_half_is_not_taken_for_a_whole_one() {
    let bench = Bench::new();
    let wide = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let o = bench.path("o.npy");
    write_gzip(&bench.path("o.csv.gz"), b"0,3,a,src,1\n3,4,b,src,2\n");
    let ds = bench.datatrove("a.ds", &[vec![1, 2, 3], vec![4]]);
    for (peer, path) in [(Peer::Olmo, &o), (Peer::Datatrove, &ds)] {
        fs::write(path, wide(&[1, 2, 3, 4])).unwrap();
        assert_eq!(plain(read(peer, path).unwrap()), [vec![1, 2, 3], vec![4]]);
        fs::write(path, wide(&[1, 2])).unwrap();
        let fault = read(peer, path).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        assert!(fault.to_string().contains("--dtype uint16"), "{fault}");
        let hints = Hints { width: Some(Width::U16), ..hints() };
        let found = read_through(&Real, peer, path, &hints).unwrap();
        assert_eq!(plain(found), [vec![1, 0, 2], vec![0]]);
        // One nonzero number in between is proof enough.
        fs::write(path, [1u16, 0, 2, 3].map(u16::to_le_bytes).concat()).unwrap();
        assert_eq!(plain(read(peer, path).unwrap()), [vec![1, 0, 2], vec![3]]);
        // A vocabulary that does not fit is never written as a narrow file.
        let hints = Hints { vocab: 100_277, width: None, ..hints };
        let fault = read_through(&Real, peer, path, &hints).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(fault.to_string().contains("--dtype uint16"), "{fault}");
    }
}
