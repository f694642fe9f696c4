//! Tokenizers of the shapes that models use, with random merges, against Hugging Face `tokenizers`.

use serde_json::{Value, json};

use super::classes::Classes;
use super::splits::Splits;
use crate::testing::bytes_tokenizer;
use crate::tokenize::encoder::REFERENCE;
use crate::tokenize::hard::{self, Dice};
use crate::tokenize::{Engine, Tokenizer};

/// Merges of random pairs of letters, spaces and marks.
fn merges(json: &mut Value, seed: u64) {
    let mut dice = Dice(seed);
    let mut names: Vec<String> = "abehlorst1'-.\u{120}\u{10a}\u{e4}\u{b8}\u{143}\u{cc}\u{123}"
        .chars()
        .map(String::from)
        .collect();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let mut merges = Vec::new();
    while merges.len() < 250 {
        let mut draw = || names[dice.below(names.len())].clone();
        let (left, right) = (draw(), draw());
        let product = format!("{left}{right}");
        if product.len() > 24 || names.contains(&product) {
            continue;
        }
        merges.push(json!([left, right]));
        vocab.insert(product.clone(), json!(vocab.len()));
        names.push(product);
    }
    let next = vocab.len();
    json["model"]["merges"] = json!(merges);
    for (number, added) in json["added_tokens"].as_array_mut().unwrap().iter_mut().enumerate() {
        added["id"] = json!(next + number);
    }
}

/// Post-processors, which put tokens around a text, of every kind in files of these models.
fn post_processors(json: &Value) -> Vec<Value> {
    let id = &json["added_tokens"][0]["id"];
    let (sep, special) = (json!(["<|end|>", id]), json!({"id": "<|end|>", "type_id": 0}));
    let template =
        [json!({"SpecialToken": special}), json!({"Sequence": {"id": "A", "type_id": 0}})];
    let pair =
        json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]);
    let tokens = json!({"<|end|>": {"id": "<|end|>", "ids": [id], "tokens": ["<|end|>"]}});
    vec![
        json!({"type": "RobertaProcessing", "sep": sep, "cls": sep, "trim_offsets": true, "add_prefix_space": false}),
        json!({"type": "BertProcessing", "sep": sep, "cls": sep}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}),
        json!({"type": "TemplateProcessing", "single": template, "pair": pair, "special_tokens": tokens}),
    ]
}

/// Compares both encoders on random texts; the fast one must not fail on any.
fn compare(bytes: Vec<u8>, name: &str) {
    let tokenizer = Tokenizer::new(bytes, Engine::Fastest).unwrap();
    assert_eq!(tokenizer.why_slow(), None, "{name}");
    let fixed = [
        "",
        " ",
        "Hello  World",
        "it's  IT'S\n\n",
        "abs abs<tab>  ABS<|end|>",
        "e\u{301}A\u{30a}\u{130}",
    ];
    let mut texts: Vec<String> = fixed.map(str::to_owned).to_vec();
    texts.extend((0..120).map(|seed| hard::text(&mut Dice(seed), &[])));
    for text in texts {
        let wanted = tokenizer.encode_by_reference(&text).unwrap();
        assert!(tokenizer.encode(&text).unwrap() == wanted, "{name}: {text:?}");
    }
    assert_eq!(tokenizer.rescued(), 0, "{name}");
}

#[test]
fn a_post_processor_never_reaches_documents() {
    let shape = |json: &mut Value| merges(json, 7);
    let processors = bytes_tokenizer(shape);
    for processor in post_processors(&serde_json::from_slice(&processors).unwrap()) {
        let name = processor["type"].to_string();
        let bytes = bytes_tokenizer(|json| {
            shape(json);
            json["post_processor"] = processor;
        });
        compare(bytes, &name);
    }
}

/// A tokenizer whose pre-tokenizer is these steps, then the byte-level map.
fn steps_before_bytes(steps: &[Value], seed: u64) -> Vec<u8> {
    bytes_tokenizer(|json| {
        merges(json, seed);
        let map = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let steps: Vec<&Value> = steps.iter().chain([&map]).collect();
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
    })
}

fn split(expression: &str) -> Value {
    let pattern = json!({"Regex": expression});
    json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
}

fn digits(alone: bool) -> Value {
    json!({"type": "Digits", "individual_digits": alone})
}

/// The steps of DeepSeek V2, over fewer letters.
fn deepseek() -> Vec<Value> {
    vec![
        split("[\r\n]"),
        split("\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}]+"),
        split("\\s?[!-/:-~\u{2018}-\u{201f}\u{3000}-\u{3002}]+"),
        split(r"\s+$"),
        split("[\u{4e00}-\u{9fa5}\u{ac00}-\u{d7ff}]+"),
        digits(true),
    ]
}

#[test]
fn splits_in_a_row_have_the_ids_of_the_reference() {
    // The shapes of DeepSeek V2, of one with only classes, and of Spark.
    let rows = [
        (deepseek(), true),
        (vec![split("[b-y]+"), split("\\s?[a-z\u{300}-\u{36f}]+"), digits(false)], true),
        (
            vec![
                split(r"\p{N}{1,3}"),
                split("[\u{4e00}-\u{9fa5}]+"),
                split(r" ?\p{L}+|\s+"),
                digits(false),
            ],
            false,
        ),
    ];
    for (number, (row, classes)) in rows.into_iter().enumerate() {
        let bytes = steps_before_bytes(&row, 20 + number as u64);
        let splits = Splits::new(&serde_json::from_slice(&bytes).unwrap()).unwrap();
        assert_eq!(matches!(splits, Splits::Classes(_)), classes, "row {number}");
        compare(bytes, &format!("row {number}"));
    }
}

#[test]
fn splits_of_classes_have_the_ids_of_the_reference() {
    let tokenizer = Tokenizer::new(steps_before_bytes(&deepseek(), 20), Engine::Fastest).unwrap();
    // Every character that is in a class, a space or a digit in some split, and a sample of the others.
    let edge = |c: &char| (*c as u32) < 0x3400 || c.is_numeric() || (*c as u32).is_multiple_of(61);
    let chars: Vec<char> = ('\0'..=char::MAX).filter(edge).collect();
    for chars in chars.chunks(1000) {
        let mut text = String::new();
        for c in chars {
            text += &format!("{c} {c}a {c}{c}\u{2018}{c}1 {c}\u{4e00}{c} {c}\n");
        }
        let wanted = tokenizer.encode_by_reference(&text).unwrap();
        assert!(tokenizer.encode(&text).unwrap() == wanted, "from {:?} on", chars[0]);
    }
    assert_eq!(tokenizer.rescued(), 0);
}

#[test]
fn expressions_of_other_forms_are_not_taken_for_classes() {
    let other = [
        r"[a-z]+?",
        "[^a]+",
        "[a-z]*",
        "[a&&b]",
        r"[\p{L}]+",
        "[a-]",
        "[b-a]",
        "[]",
        "a+",
        r"\s?[a]",
        r"\s+$",
    ];
    for expression in other {
        assert!(Classes::new(&[split(expression)]).is_none(), "{expression}");
    }
    let inverted = json!({"type": "Split", "pattern": {"Regex": "[a]"}, "behavior": "Isolated", "invert": true});
    assert!(Classes::new(&[inverted]).is_none());
    assert!(Classes::new(&[split("[\n]"), split(r"\s+$")]).is_some());
}

/// Gives a tokenizer CLIP's form: `merges` of random pairs, many of which end words.
fn clip(json: &mut Value, seed: u64) {
    let runs = json!({"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "});
    json["normalizer"] =
        json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, runs, {"type": "Lowercase"}]});
    let expression = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";
    let split = json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Removed", "invert": true});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
    let model = &mut json["model"];
    model["end_of_word_suffix"] = json!("</w>");
    model["unk_token"] = json!("<|end|>");
    let vocab = model["vocab"].as_object_mut().unwrap();
    for byte in vocab.keys().cloned().collect::<Vec<_>>() {
        vocab.insert(format!("{byte}</w>"), json!(vocab.len()));
    }
    let mut dice = Dice(seed);
    let mut names: Vec<String> =
        "abehlorstvd1'-.\u{e4}\u{b8}\u{143}\u{cc}\u{123}".chars().map(String::from).collect();
    let ends: Vec<String> = names.iter().map(|name| format!("{name}</w>")).collect();
    names.extend(ends);
    let mut merges = Vec::new();
    while merges.len() < 300 {
        let mut draw = || names[dice.below(names.len())].clone();
        let (left, right) = (draw(), draw());
        let product = format!("{left}{right}");
        if left.ends_with("</w>") || product.len() > 24 || vocab.contains_key(&product) {
            continue;
        }
        // Both forms that files use.
        merges.push(if seed.is_multiple_of(2) {
            json!([left, right])
        } else {
            json!(format!("{left} {right}"))
        });
        vocab.insert(product.clone(), json!(vocab.len()));
        names.push(product);
    }
    let next = vocab.len();
    model["merges"] = json!(merges);
    let mut added = json["added_tokens"].take();
    for (number, token) in added.as_array_mut().unwrap().iter_mut().enumerate() {
        token["id"] = json!(next + number);
        token["special"] = json!(true);
        json["model"]["vocab"][token["content"].as_str().unwrap()] = json!(next + number);
    }
    json["added_tokens"] = added;
}

#[test]
fn words_that_end_in_a_suffix_have_the_ids_of_the_reference() {
    for seed in 0..6 {
        compare(bytes_tokenizer(|json| clip(json, seed)), &format!("seed {seed}"));
    }
    // Every character except letters, signs, digits, white space and apostrophes.
    let tokenizer = Tokenizer::new(bytes_tokenizer(|json| clip(json, 3)), Engine::Fastest).unwrap();
    // After the fourth plane few are assigned.
    let few = ('\u{40000}'..=char::MAX).step_by(61).chain('\u{e0000}'..'\u{e0200}');
    let chars: Vec<char> = ('\0'..'\u{40000}').chain(few).collect();
    for chars in chars.chunks(4000) {
        let text: String = chars.iter().map(|c| format!("a{c}1{c}-{c}'{c}s {c}{c} ")).collect();
        let wanted = tokenizer.encode_by_reference(&text).unwrap();
        assert!(tokenizer.encode(&text).unwrap() == wanted, "from {:?} on", chars[0]);
    }
    assert_eq!(tokenizer.rescued(), 0);
}

/// Tokenizers that differ from CLIP's form in a relevant way.
#[test]
fn other_words_that_end_in_a_suffix_are_left_to_the_reference() {
    let changes: [fn(&mut Value); 9] = [
        |json| json["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("Isolated"),
        |json| json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"\p{L}+"),
        |json| json["pre_tokenizer"] = json!({"type": "Whitespace"}),
        |json| json["normalizer"]["normalizers"][1]["content"] = json!("  "),
        |json| json["normalizer"]["normalizers"][0]["type"] = json!("NFD"),
        |json| json["added_tokens"][1]["special"] = json!(false),
        |json| drop(json["model"]["vocab"].as_object_mut().unwrap().remove("q</w>")),
        |json| json["model"]["vocab"]["a\u{120}"] = json!(5000),
        |json| json["model"]["ignore_merges"] = json!(true),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let bytes = bytes_tokenizer(|json| {
            clip(json, 1);
            change(json);
        });
        let tokenizer = Tokenizer::new(bytes, Engine::Fastest).unwrap();
        assert_eq!(tokenizer.encoder(), REFERENCE, "change {number}");
        assert_eq!(
            tokenizer.encode("ab q").unwrap(),
            tokenizer.encode_by_reference("ab q").unwrap()
        );
    }
}
