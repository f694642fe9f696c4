//! Tokenizers at the limit of 16 bits, with gaps, and with ids beyond the size of their vocabulary.

use std::fs;

use contract::Class;
use serde_json::{Value, json};
use store::{Manifest, Split, Store};

use crate::build::{Outcome, build};
use crate::corpus::Corpus;
use crate::testing::{Workbench, bytes_tokenizer, options};
use crate::tokenize::{Engine, Tokenizer};
use crate::verify::verify;

/// A word of letters for a number: the token with that id.
fn word(mut number: u32) -> String {
    let mut word = String::from("q");
    while number > 0 {
        word.push(char::from(b'a' + (number % 26) as u8));
        number /= 26;
    }
    word
}

/// The byte-level tokenizer (256 bytes and two added tokens, also in the vocabulary) with a word for each of these ids.
fn tokenizer(ids: impl Iterator<Item = u32>) -> Vec<u8> {
    bytes_tokenizer(|value: &mut Value| {
        let vocab = value["model"]["vocab"].as_object_mut().unwrap();
        vocab.extend([("<|end|>".to_owned(), json!(256)), ("<tab>".to_owned(), json!(257))]);
        vocab.extend(ids.map(|id| (word(id), json!(id))));
        value["model"]["ignore_merges"] = json!(true);
    })
}

/// Builds a store of one-word documents for `ids`; returns it with its ids, without markers.
fn stored(bytes: &[u8], ids: &[u32]) -> (Manifest, Vec<Vec<u32>>) {
    let bench = Workbench::new(1);
    bench.write("tokenizer.json", bytes);
    let lines: Vec<String> = ids.iter().map(|id| json!({"text": word(*id)}).to_string()).collect();
    bench.write("words.jsonl", lines.join("\n"));
    let corpus = bench.write(
        "words.toml",
        "tokenizer = \"tokenizer.json\"\nend = \"<|end|>\"\nunit = 64\nvalidation = 0\n\
         [[source]]\nname = \"words\"\nfiles = [\"words.jsonl\"]\n",
    );
    let path = bench.path("store");
    let built = build(&Corpus::read(&corpus).unwrap(), &path, options(1)).unwrap();
    let Outcome::Built { manifest, .. } = built else { panic!("there was a store already") };
    assert_eq!(verify(&path, true).unwrap().damages, []);
    let store = Store::open(&path).unwrap();
    let stream = store.stream(0, Split::Train);
    let read = |number| {
        let record = stream.document(number).unwrap();
        let (mut tokens, end) = (Vec::new(), record.first_token + record.tokens);
        stream.read_tokens(record.first_token..end, &mut tokens).unwrap();
        assert_eq!(tokens.pop(), Some(256), "the end marker");
        tokens
    };
    (manifest, (0..ids.len() as u64).map(read).collect())
}

#[test]
fn the_largest_id_decides_the_width_exactly() {
    for (size, width) in [(65_535, 2), (65_536, 2), (65_537, 4)] {
        let bytes = tokenizer(258..size);
        let ids = [258, size / 2, size - 2, size - 1];
        let (manifest, found) = stored(&bytes, &ids);
        assert_eq!((manifest.tokenizer.vocab, manifest.token_bytes), (size, width));
        assert_eq!(found, ids.map(|id| vec![id]), "{size}");
    }
}

#[test]
fn gaps_and_ids_beyond_the_number_of_tokens_are_kept() {
    let gaps = |ids: &[u32], vocab: u32, width: u32| {
        let (manifest, found) = stored(&tokenizer(ids.iter().copied()), ids);
        assert_eq!((manifest.tokenizer.vocab, manifest.token_bytes), (vocab, width));
        let wanted: Vec<Vec<u32>> = ids.iter().map(|id| vec![*id]).collect();
        assert_eq!(found, wanted);
    };
    gaps(&[258, 1000, 65_535], 65_536, 2);
    gaps(&[300, 65_536], 65_537, 4);
    gaps(&[70_000, 1_000_000, 2_000_000_000], 2_000_000_001, 4);
}

/// `tokenizers` numbers an added token that the vocabulary lacks by the vocabulary's size, ignoring its "id": if ids
/// have gaps, the number may be another token's.
#[test]
fn two_tokens_of_one_id_are_refused() {
    let clash = bytes_tokenizer(|value| {
        let vocab = value["model"]["vocab"].as_object_mut().unwrap();
        vocab.extend((1000..1010).map(|id| (word(id), json!(id))));
        // 256 bytes and ten words: the first added token becomes number 266.
        vocab.insert(word(266), json!(266));
        vocab.remove(&word(1000));
    });
    let fault = Tokenizer::new(clash, Engine::Fastest).err().unwrap();
    let message = fault.to_string();
    assert_eq!(fault.class(), Class::Usage);
    for part in ["id 266", "<|end|>", &word(266)] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn ids_that_no_tensor_holds_are_refused_before_anything_is_written() {
    let edge = tokenizer([(1 << 31) - 1].into_iter());
    assert_eq!(Tokenizer::new(edge, Engine::Reference).unwrap().vocab(), 1 << 31);
    for id in [1 << 31, u32::MAX - 1, u32::MAX] {
        let fault = Tokenizer::new(tokenizer([id].into_iter()), Engine::Reference).err().unwrap();
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains("31 bits"), "{fault}");
    }
    let bench = Workbench::new(1);
    bench.write("tokenizer.json", tokenizer([1 << 31].into_iter()));
    let out = bench.path("store");
    build(&Corpus::read(bench.corpus("")).unwrap(), &out, options(1)).unwrap_err();
    assert!(!out.exists() || fs::read_dir(&out).unwrap().next().is_none());
}
