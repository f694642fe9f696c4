//! Tokenizers whose pre-tokenizer isolates words, with random merges and vocabularies: chunked against whole encoding.

use serde_json::{Value, json};

use super::{CLIP, Chunks};
use crate::testing::bytes_tokenizer;
use crate::tokenize::hard::{self, Dice};
use crate::tokenize::{Engine, Tokenizer, encoder};

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": true, "special": special})
}

/// A tokenizer of CLIP's shape: bytes with and without a suffix, and merges of random pairs.
fn clip(seed: u64) -> Value {
    let mut json: Value = serde_json::from_slice(&bytes_tokenizer(|_| ())).unwrap();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let bytes: Vec<String> = vocab.keys().cloned().collect();
    for byte in &bytes {
        vocab.insert(format!("{byte}</w>"), json!(vocab.len()));
    }
    let mut dice = Dice(seed);
    let mut names: Vec<String> =
        "abehlorst1'-.<|\u{e4}\u{b8}\u{143}\u{cc}\u{123}".chars().map(String::from).collect();
    let mut merges = Vec::new();
    while merges.len() < 300 {
        let left = names[dice.below(names.len())].clone();
        let right = names[dice.below(names.len())].clone() + dice.pick(&["", "</w>"]);
        let product = format!("{left}{right}");
        if product.len() > 24 || vocab.contains_key(&product) || !vocab.contains_key(&right) {
            continue;
        }
        merges.push(json!([left, right]));
        vocab.insert(product.clone(), json!(vocab.len()));
        if !product.ends_with("</w>") {
            names.push(product);
        }
    }
    let next = vocab.len();
    json["added_tokens"] = json!([added(next, "<|end|>", true)]);
    json["model"]["merges"] = json!(merges);
    json["model"]["end_of_word_suffix"] = json!("</w>");
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}, {"type": "Lowercase"}]});
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": CLIP}, "behavior": "Removed", "invert": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]});
    json
}

/// A tokenizer of BERT's shape, cased or uncased.
fn bert(lowercase: bool) -> Value {
    let mut json = clip(3);
    let mut vocab =
        vec!["[UNK]".to_owned(), "the".to_owned(), "hello".to_owned(), "##llo".to_owned()];
    for c in (' '..='~').chain("\u{e9}\u{301}\u{430}\u{436}\u{4e2d}\u{6587}\u{3042}".chars()) {
        vocab.extend([c.to_string(), format!("##{c}")]);
    }
    let vocab: serde_json::Map<String, Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    json["added_tokens"] = json!([added(0, "[UNK]", true)]);
    json["model"] = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                           "max_input_chars_per_word": 100, "vocab": vocab});
    json["normalizer"] = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                                "strip_accents": null, "lowercase": lowercase});
    json["pre_tokenizer"] = json!({"type": "BertPreTokenizer"});
    json["decoder"] = Value::Null;
    json
}

/// A tokenizer of words separated by white space, which begin with a mark.
fn spaced() -> Value {
    let mut json = bert(false);
    let letters = ('!'..='~').chain("\u{2581}\u{e9}\u{430}\u{4e2d}".chars());
    let mut vocab = vec![json!(["<unk>", 0.0]), json!(["\u{2581}the", -2.5]), json!(["he", -3.0])];
    vocab.extend(letters.enumerate().map(|(number, c)| json!([c, -4.0 - number as f64 / 16.0])));
    json["added_tokens"] = json!([]);
    json["model"] = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": vocab});
    json["normalizer"] = json!({"type": "NFKC"});
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "WhitespaceSplit"},
        {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}]});
    json
}

/// SentencePiece's map of characters, empty: a table of 256 entries that lead to nothing.
fn empty_map() -> Value {
    let base64 = format!("AAQA{}AAA=", "AAAA".repeat(341));
    json!({"type": "Precompiled", "precompiled_charsmap": base64})
}

fn with(mut json: Value, change: impl FnOnce(&mut Value)) -> Value {
    change(&mut json);
    json
}

/// A token that no text contains, which makes the fast encoder leave CLIP's words to the reference.
fn spaced_token(json: &mut Value) {
    json["model"]["vocab"]["a\u{120}"] = json!(9999);
}

/// The covered shapes.
fn shapes() -> Vec<(&'static str, Value)> {
    vec![
        ("clip", with(clip(1), spaced_token)),
        ("clip, other merges", with(clip(2), spaced_token)),
        (
            "clip, of either case",
            with(clip(4), |json| json["normalizer"] = json!({"type": "NFKD"})),
        ),
        (
            "clip, an added token",
            with(clip(5), |json| {
                let id = json["added_tokens"][0]["id"].clone();
                json["added_tokens"] = json!([added(id.as_u64().unwrap() as usize, "hel", false)]);
            }),
        ),
        ("bert, uncased", bert(true)),
        ("bert, cased", bert(false)),
        ("bert, as it is", with(bert(false), |json| json["normalizer"] = Value::Null)),
        ("spaced", spaced()),
        ("spaced, with a map", with(spaced(), |json| json["normalizer"] = empty_map())),
        ("clip, with a map", with(clip(6), |json| json["normalizer"] = empty_map())),
    ]
}

#[test]
fn chunks_have_the_ids_of_the_whole() {
    let fixed = [
        "",
        " ",
        " \u{2003} ",
        "it's  IT'S 'tis 't's ''s -'s'-s 12'3 a1b2\n\n",
        "don't\u{301} 'll\u{e9} x'\u{17f} \u{212a}'s \u{ff07}s \u{bd}2",
        "a\u{0}b.\u{0}c \u{b}\u{c}d\u{85}e\u{a0} f\u{feff}.g",
        "=\u{338} < \u{338}<|end|>hello<|end|>helhel",
        "a\r\nb\t\tc\u{600} d",
    ];
    for (name, json) in shapes() {
        let tokenizer =
            Tokenizer::new(serde_json::to_vec(&json).unwrap(), Engine::Fastest).unwrap();
        assert_eq!(tokenizer.why_slow(), None, "{name}");
        assert_eq!(tokenizer.encoder(), encoder::REFERENCE, "{name}");
        let drawn = (0..400).map(|seed| hard::text(&mut Dice(seed), &[]));
        for text in fixed.map(str::to_owned).into_iter().chain(drawn) {
            let wanted = tokenizer.encode_by_reference(&text).unwrap();
            // The second time all chunks are cached.
            for _ in 0..2 {
                assert!(tokenizer.encode(&text).unwrap() == wanted, "{name}: {text:?}");
            }
        }
    }
}

#[test]
fn every_pair_of_characters_is_cut_rightly() {
    let mut characters: Vec<char> = ('\0'..='\u{7f}').collect();
    characters.extend(
        "\u{85}\u{a0}\u{bd}\u{e9}\u{130}\u{17f}\u{212a}\u{300}\u{301}\u{338}\u{345}\u{600}\u{663}"
            .chars(),
    );
    characters.extend(
        "\u{1100}\u{1161}\u{200d}\u{2028}\u{2019}\u{3000}\u{4e2d}\u{ff07}\u{ff11}\u{fb01}\u{1f600}"
            .chars(),
    );
    for (name, json) in shapes() {
        let tokenizer =
            Tokenizer::new(serde_json::to_vec(&json).unwrap(), Engine::Fastest).unwrap();
        for left in &characters {
            let mut text = String::new();
            for right in &characters {
                text += &format!("a{left}{right}s1'{left}{right}'re.{left}{right}\n");
            }
            let wanted = tokenizer.encode_by_reference(&text).unwrap();
            assert!(tokenizer.encode(&text).unwrap() == wanted, "{name}: {left:?}");
        }
    }
}

#[test]
fn what_looks_across_a_cut_is_encoded_whole() {
    let change = |key: &'static str, value: Value| with(clip(1), |json| json[key] = value);
    let token = |content: &str, key: &str| {
        with(clip(1), |json| {
            let id = json["added_tokens"][0]["id"].as_u64().unwrap() as usize;
            let mut token = added(id, content, false);
            if let Some(flag) = token.get_mut(key) {
                *flag = json!(true);
            }
            json["added_tokens"] = json!([token]);
        })
    };
    let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true});
    let sequence =
        json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]});
    let split = json!({"type": "Split", "pattern": {"Regex": CLIP}, "behavior": "Isolated", "invert": false});
    for (name, json) in [
        ("a sign and letters", token("<tab>", "")),
        ("white space", token("  ", "")),
        ("beyond ASCII", token("a\u{bd}", "")),
        ("whole words", token("hel", "single_word")),
        ("space before", token("hel", "lstrip")),
        ("space behind", token("hel", "rstrip")),
        ("prepended", change("normalizer", json!({"type": "Prepend", "prepend": "x"}))),
        (
            "stripped",
            change("normalizer", json!({"type": "Strip", "strip_left": true, "strip_right": true})),
        ),
        (
            "letters replaced",
            change(
                "normalizer",
                json!({"type": "Replace", "pattern": {"String": "a b"}, "content": ""}),
            ),
        ),
        ("the first piece", change("pre_tokenizer", sequence)),
        ("white space kept", change("pre_tokenizer", split)),
        ("nothing isolated", change("pre_tokenizer", Value::Null)),
    ] {
        assert!(Chunks::new(&json).is_none(), "{name}");
    }
    assert!(Chunks::new(&token("hel", "")).is_some());
}
