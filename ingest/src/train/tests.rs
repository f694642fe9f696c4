//! Training against Hugging Face's trainer, against brute-force counting, and against itself with other threads.

use std::collections::BTreeMap;

use contract::Class;
use proptest::prelude::*;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::merge::{COUNT_MIN, Learned, Pair, alphabet, learn};
use super::*;
use crate::tokenize::encoder::{Engine, FAST, Tokenizer};

const PROSE: &str = include_str!("../train.rs");
const CODE: &str = include_str!("merge.rs");

const QUICK: Options = Options { workers: 2, quiet: true };

fn request(vocab: u32) -> Request {
    Request { vocab, special: vec!["<|endoftext|>".to_owned()], sample: Ratio::new(1, 1) }
}

/// A corpus with a JSON Lines file for each list of documents, nothing held out.
fn corpus(folder: &tempfile::TempDir, files: &[Vec<String>]) -> Corpus {
    for (number, texts) in files.iter().enumerate() {
        let line = |text: &String| serde_json::json!({ "text": text }).to_string() + "\n";
        let lines: String = texts.iter().map(line).collect();
        std::fs::write(folder.path().join(format!("{number}.jsonl")), lines).unwrap();
    }
    let toml = "validation = 0\n[[source]]\nname = \"all\"\nfiles = [\"*.jsonl\"]\n";
    let path = folder.path().join("corpus.toml");
    std::fs::write(&path, toml).unwrap();
    Corpus::read(&path).unwrap()
}

fn trained(files: &[Vec<String>], request: &Request, workers: usize) -> Result<Trained> {
    let folder = tempfile::tempdir().unwrap();
    train(&corpus(&folder, files), request, Options { workers, ..QUICK })
}

fn paragraphs(text: &str) -> Vec<String> {
    text.split("\n\n").map(str::to_owned).collect()
}

fn merges_of(json: &serde_json::Value) -> Vec<[String; 2]> {
    serde_json::from_value(json["model"]["merges"].clone()).unwrap()
}

#[test]
fn hugging_face_learns_the_same_merges() {
    let texts: Vec<String> = [paragraphs(PROSE), paragraphs(CODE)].concat();
    let ours = trained(std::slice::from_ref(&texts), &request(700), 2).unwrap();
    let ours: serde_json::Value = serde_json::from_slice(&ours.bytes).unwrap();

    let mut theirs = tokenizers::Tokenizer::from_bytes(ours.to_string()).unwrap();
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(699)
        .min_frequency(COUNT_MIN)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    theirs.with_model(ModelWrapper::BPE(BPE::default()));
    theirs.train(&mut TrainerWrapper::from(trainer), texts.iter()).unwrap();
    let theirs: serde_json::Value =
        serde_json::from_str(&theirs.to_string(false).unwrap()).unwrap();

    let (ours_merges, theirs_merges) = (merges_of(&ours), merges_of(&theirs));
    assert_eq!(ours_merges.len(), 699 - 256);
    assert_eq!(ours_merges, theirs_merges);
    assert_eq!(ours["model"]["vocab"], theirs["model"]["vocab"]);
}

#[test]
fn a_pair_may_occur_more_often_than_32_bits_count() {
    let often = 1u64 << 31;
    let ours = learn(&BTreeMap::from([("ab".into(), often), ("cd".into(), 2)]), 300, || ());
    let pair = |a: u8, b: u8| {
        let id = |byte| alphabet().iter().position(|known| *known == byte).unwrap() as u32;
        (id(a), id(b))
    };
    assert_eq!(ours.merges, [pair(b'a', b'b'), pair(b'c', b'd')]);
    // The reason for our own trainer: once this fails, Hugging Face's may be used.
    let trainer = BpeTrainer::builder().show_progress(false).min_frequency(COUNT_MIN).build();
    let counts = [("ab".into(), often), ("cd".into(), 2)].into_iter().collect();
    let mut theirs = BPE::default();
    trainer.do_train(&counts, &mut theirs).unwrap();
    assert!(theirs.get_vocab().contains_key("cd") && !theirs.get_vocab().contains_key("ab"));
}

/// The same definition without a queue or stored counts: every pair is counted again each time.
fn brute_force(words: &BTreeMap<Box<str>, u64>, size: usize) -> (Vec<Vec<u8>>, Vec<Pair>) {
    let mut tokens: Vec<Vec<u8>> = alphabet().map(|byte| vec![byte]).into();
    let mut merges: Vec<Pair> = Vec::new();
    let id = |tokens: &[Vec<u8>], bytes: &[u8]| tokens.iter().position(|t| t == bytes);
    let mut texts: Vec<(Vec<u32>, u64)> = words
        .iter()
        .map(|(word, &count)| {
            (word.bytes().map(|byte| id(&tokens, &[byte]).unwrap() as u32).collect(), count)
        })
        .collect();
    while tokens.len() < size {
        let mut counts: BTreeMap<Pair, u64> = BTreeMap::new();
        for (text, count) in &texts {
            for pair in text.windows(2) {
                *counts.entry((pair[0], pair[1])).or_default() += count;
            }
        }
        let best = counts.into_iter().max_by_key(|&(pair, count)| (count, std::cmp::Reverse(pair)));
        let Some((pair, _)) = best.filter(|(_, count)| *count >= 2) else { break };
        let bytes = [tokens[pair.0 as usize].clone(), tokens[pair.1 as usize].clone()].concat();
        let token = id(&tokens, &bytes).unwrap_or_else(|| {
            tokens.push(bytes);
            tokens.len() - 1
        }) as u32;
        if !merges.contains(&pair) {
            merges.push(pair);
        }
        for (text, _) in &mut texts {
            let mut merged = Vec::new();
            let mut rest = text.as_slice();
            while let Some((&first, after)) = rest.split_first() {
                let joins = after.first().is_some_and(|&second| (first, second) == pair);
                merged.push(if joins { token } else { first });
                rest = if joins { &after[1..] } else { after };
            }
            *text = merged;
        }
    }
    (tokens, merges)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_queue_finds_what_counting_anew_finds(
        words in prop::collection::btree_map("[ab]{0,12}|[abcd]{1,9}|[a-z\u{e9}]{1,6}", 1u64..9, 0..30),
        size in 256u32..320,
    ) {
        let words = words.into_iter().map(|(word, count)| (word.into(), count)).collect();
        let Learned { tokens, merges } = learn(&words, size, || ());
        let (tokens_wanted, merges_wanted) = brute_force(&words, size as usize);
        prop_assert_eq!(merges, merges_wanted);
        prop_assert_eq!(tokens, tokens_wanted);
    }
}

#[test]
fn threads_and_order_leave_no_trace() {
    let texts: Vec<String> = [paragraphs(PROSE), paragraphs(CODE)].concat();
    let files: Vec<Vec<String>> = texts.chunks(7).map(<[_]>::to_vec).collect();
    let wanted = trained(&files, &request(500), 1).unwrap();
    let turned: Vec<Vec<String>> = files.iter().rev().cloned().collect();
    for (files, workers) in [(&files, 2), (&files, 7), (&turned, 3), (&vec![texts], 2)] {
        let again = trained(files, &request(500), workers).unwrap();
        assert!(again.bytes == wanted.bytes, "{workers} workers made another tokenizer");
        assert_eq!(again.text_bytes, wanted.text_bytes);
    }
}

#[test]
fn both_encoders_take_the_result_and_give_the_text_back() {
    let texts: Vec<String> = [paragraphs(PROSE), paragraphs(CODE)].concat();
    let trained = trained(&[texts], &request(600), 2).unwrap();
    let fast = Tokenizer::new(trained.bytes.clone(), Engine::Fastest).unwrap();
    let slow = Tokenizer::new(trained.bytes.clone(), Engine::Reference).unwrap();
    assert_eq!(fast.encoder(), FAST, "{:?}", fast.why_slow());
    assert_eq!((fast.vocab(), trained.vocab), (600, 600));
    assert_eq!(fast.id_of("end", "<|endoftext|>").unwrap(), 599);
    let reference = tokenizers::Tokenizer::from_bytes(&trained.bytes).unwrap();
    let check = |text: &str| {
        let ids = slow.encode(text).unwrap();
        prop_assert_eq!(&ids, &fast.encode(text).unwrap());
        prop_assert!(ids.iter().all(|&id| id < 599), "text became a special token");
        prop_assert_eq!(reference.decode(&ids, false).unwrap(), text);
        Ok(())
    };
    check("It's 12,345 \u{1f468}\u{200d}\u{1f469} <|endoftext|>\r\n\n  \u{0}\u{85}x").unwrap();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let text = prop_oneof![any::<String>(), "[ -~\n\t]{0,200}", "[\\p{L}\\p{N}\\s]{0,60}"];
    runner.run(&text, |text| check(&text)).unwrap();
}

#[test]
fn a_sample_is_chosen_by_content_and_validation_is_left_out() {
    let texts: Vec<String> = (0..4000).map(|i| format!("document {i}")).collect();
    let tenth = Request { sample: Ratio::new(1, 10), ..request(300) };
    let one = trained(std::slice::from_ref(&texts), &tenth, 2).unwrap();
    assert!(one.documents.abs_diff(400) < 100, "{}", one.documents);
    let files: Vec<Vec<String>> = texts.chunks(300).rev().map(<[_]>::to_vec).collect();
    assert!(trained(&files, &tenth, 1).unwrap().bytes == one.bytes);

    let folder = tempfile::tempdir().unwrap();
    let mut half = corpus(&folder, &[texts]);
    half.validation = Ratio::new(1, 2);
    let documents = train(&half, &request(300), QUICK).unwrap().documents;
    assert!(documents.abs_diff(2000) < 160, "{documents}");
}

#[test]
fn a_text_without_more_pairs_gives_a_smaller_vocabulary() {
    let trained = trained(&[vec!["abab".to_owned()]], &request(5000), 1).unwrap();
    assert_eq!(trained.vocab, 256 + 1 + 1);
}

#[test]
fn a_long_run_without_a_joint_takes_linear_time() {
    let long = "ab".repeat(500_000);
    let trained = trained(&[vec![long]], &request(300), 1).unwrap();
    assert!(trained.words < 10, "{}", trained.words);
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let texts = vec!["some text".to_owned()];
    let refused =
        |request: &Request, texts: &[String]| trained(&[texts.to_vec()], request, 2).unwrap_err();
    assert_eq!(refused(&request(256), &texts).class(), Class::Usage);
    let twice = Request { special: vec!["<a>".to_owned(), "<a>".to_owned()], ..request(300) };
    assert_eq!(refused(&twice, &texts).class(), Class::Usage);
    assert_eq!(refused(&request(300), &[]).class(), Class::Data);

    let folder = tempfile::tempdir().unwrap();
    let mut corpus = corpus(&folder, &[texts]);
    let broken = folder.path().join("1.jsonl");
    std::fs::write(&broken, "{\"text\":\"a\"}\n{\"text\":\n").unwrap();
    let format = crate::source::Format::JsonLines;
    let file = crate::corpus::SourceFile::new((&broken).into(), "1.jsonl".to_owned(), format);
    corpus.sources[0].files.push(file);
    let message = train(&corpus, &request(300), QUICK).unwrap_err().to_string();
    assert!(message.contains("1.jsonl:2"), "{message}");
    corpus.on_error = crate::corpus::OnError::Skip;
    let trained = train(&corpus, &request(300), QUICK).unwrap();
    let records = &trained.records[0];
    assert_eq!((records.kept, records.reasons().collect()), (2, vec![(1, "malformed")]));
    // A source of which nothing is left is refused, as in a build.
    std::fs::write(&broken, "{\"text\": 7}\n{\"text\":\n").unwrap();
    let mut other = corpus.sources[0].clone();
    other.name = "other".to_owned();
    other.files = corpus.sources[0].files.split_off(1);
    corpus.sources.push(other);
    let fault = train(&corpus, &request(300), QUICK).unwrap_err();
    assert_eq!(fault.class(), Class::Data);
    for word in ["nothing is left of source \"other\"", "2 records: 1 malformed, 1 missing text"] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
}

#[test]
fn another_tokenizer_is_never_overwritten() {
    let texts = [paragraphs(PROSE)];
    let [one, other] = [300, 301].map(|vocab| trained(&texts, &request(vocab), 2).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    assert!(one.write(path.as_path()).unwrap());
    assert!(!one.write(path.as_path()).unwrap(), "the same bytes are there already");
    let fault = other.write(path.as_path()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage, "{fault}");
    for bytes in [&one.bytes, &other.bytes] {
        assert!(fault.to_string().contains(&Identity::of_bytes(bytes).to_string()), "{fault}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), one.bytes);
    let fault = one.write(folder.path()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage, "{fault}");
}

/// Of several simultaneous writers to one place one succeeds, and its tokenizer is the result.
#[test]
fn a_tokenizer_is_written_by_one_at_a_time() {
    let texts = [paragraphs(PROSE)];
    let all = [300, 301, 302, 303].map(|vocab| trained(&texts, &request(vocab), 2).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    for _ in 0..40 {
        let start = std::sync::Barrier::new(all.len());
        let write = &|one| {
            start.wait();
            Trained::write(one, path.as_path()).is_ok().then_some(one)
        };
        let written: Vec<&Trained> = std::thread::scope(|scope| {
            let running = all.each_ref().map(|one| scope.spawn(move || write(one)));
            running.into_iter().filter_map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(written.len(), 1);
        assert!(written[0].bytes == std::fs::read(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
    }
}
