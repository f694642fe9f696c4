//! Templates of five families, how records are read, and whole builds of chats.

use serde_json::json;
use store::Manifest;

use super::*;
use crate::corpus::Corpus;
use crate::recipe::tests::built;
use crate::testing::{Workbench, bytes_tokenizer};
use crate::tokenize::{Engine, Tokenizer};

/// Templates in the style of five families of models.
const TEMPLATES: [(&str, &str); 5] = [
    ("qwen", include_str!("qwen.jinja")),
    ("llama3", include_str!("llama3.jinja")),
    ("mistral", include_str!("mistral.jinja")),
    ("gemma", include_str!("gemma.jinja")),
    ("phi3", include_str!("phi3.jinja")),
];

/// The results of `transformers` 5.17 with the date 26 July 2024; `benches/peer_chat.py` computes them again.
const CASES: &str = include_str!("cases.json");

/// Control tokens of these families.
const CONTROLS: [&str; 20] = [
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|system|>",
    "<|user|>",
    "<|end|>",
    "<|endoftext|>",
];

#[derive(Deserialize)]
struct Case {
    template: String,
    tokens: BTreeMap<String, String>,
    /// None if `transformers` refuses the record.
    text: Option<String>,
}

/// A tokenizer with these control tokens, from id 256 on.
fn tokenizer(controls: &[&str]) -> Vec<u8> {
    bytes_tokenizer(|json| {
        let added = json["added_tokens"].as_array_mut().unwrap();
        let token = added[0].clone();
        *added = controls
            .iter()
            .enumerate()
            .map(|(number, control)| {
                let mut token = token.clone();
                (token["id"], token["content"]) = (json!(256 + number), json!(control));
                token
            })
            .collect();
    })
}

fn chat(templates: &[(&str, &str)], tokens: BTreeMap<String, String>, tools: bool) -> Rendered {
    let templates = templates.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
    let file = ChatFile { templates, tokens: Some(tokens) };
    let paths = Paths { messages: "messages".into(), tools: tools.then(|| "tools".into()) };
    let dated = file.templates.values().any(|text: &String| text.contains("strftime_now"));
    let date = dated.then(|| Date::parse("2024-07-26").unwrap());
    Rendered::new(paths, file, date).unwrap()
}

/// The ids of a text: those of its control tokens, and one per other character.
fn ids(text: &str, tokenizer: &Tokenizer) -> Vec<u32> {
    let (mut ids, mut rest) = (Vec::new(), text);
    while let Some(next) = rest.chars().next() {
        let control = CONTROLS.iter().position(|control| rest.starts_with(control));
        let length = control.map_or(next.len_utf8(), |number| CONTROLS[number].len());
        match control {
            Some(number) => ids.push(256 + number as u32),
            None => ids.extend(tokenizer.encode(&rest[..length]).unwrap()),
        }
        rest = &rest[length..];
    }
    ids
}

#[test]
fn texts_and_ids_are_those_of_transformers() {
    let bytes = tokenizer(&CONTROLS);
    let load = |engine| {
        let tokenizer = Tokenizer::new(bytes.clone(), engine).unwrap();
        tokenizer.with_controls(true, engine).unwrap()
    };
    let [fast, slow] = [Engine::Fastest, Engine::Reference].map(load);
    assert_eq!(fast.of(true).unwrap().encoder(), fast.encoder());
    let mut rendered = 0;
    for line in CASES.lines().filter(|line| line.starts_with('{')) {
        let line = line.trim_end_matches(',');
        let case: Case = serde_json::from_str(line).unwrap();
        // Parsed from the text, since members are rendered in their order.
        let record = written::at(line, "record").unwrap().unwrap();
        let (name, template) =
            TEMPLATES.iter().find(|(name, _)| *name == case.template).copied().unwrap();
        let chat = chat(&[(DEFAULT, template)], case.tokens.clone(), true);
        let Some(wanted) = &case.text else {
            let fault = chat.text(record).unwrap_err();
            assert_eq!(fault.class(), contract::Class::Data, "{name}: {fault}");
            continue;
        };
        let text = chat.text(record).unwrap();
        assert_eq!(&text, wanted, "{name}");
        rendered += 1;
        let ids = ids(&text, &slow);
        for tokenizer in [&fast, &slow] {
            assert_eq!(tokenizer.of(true).unwrap().encode(&text).unwrap(), ids, "{name}");
            let spelled = tokenizer.encode(&text).unwrap();
            assert!(spelled.len() == text.len() && spelled.iter().all(|id| *id < 256), "{name}");
        }
    }
    assert!(rendered > 18, "{rendered}");
}

#[test]
fn values_are_those_that_python_reads() {
    let record = r#"{"messages": [{"a": 12345678901234567890123, "b": 1.50, "a2": 1e2, "c": -0, "b": [true, null]}]}"#;
    let text = |template| chat(&[(DEFAULT, template)], BTreeMap::new(), false).text(record);
    let json = r#"[{"a": 12345678901234567890123, "b": [true, null], "a2": 100.0, "c": 0}]"#;
    assert_eq!(text("{{ messages | tojson }}").unwrap(), json);
    assert_eq!(
        text("{{ messages[0] }} {{ messages[0].zz }} {{ tools }}").unwrap(),
        "{'a': 12345678901234567890123, 'b': [True, None], 'a2': 100.0, 'c': 0}  None"
    );
    assert!(text("{{ messages[0].zz.y }}").is_err());
    let deep = format!(r#"{{"messages": [{}1{}]}}"#, "[".repeat(5000), "]".repeat(5000));
    let chat = chat(&[(DEFAULT, "{{ messages }}")], BTreeMap::new(), true);
    assert!(chat.text(&deep).unwrap_err().to_string().contains("within each other"));
    for (record, word) in [
        (r#"{"messages": []}"#, "an empty list"),
        (r#"{"messages": "x"}"#, "`messages` holds no messages"),
        (r#"{"messages": [1], "tools": 7}"#, "`tools` holds no tools"),
        (r#"{"messages": [1], "tools": "x"}"#, "`tools` holds no tools"),
        (r#"{"messages": [1e999]}"#, "1e999"),
        (
            r#"{"messages": [123456789012345678901234567890123456789012345678901234567890]}"#,
            "128 bits",
        ),
    ] {
        let fault = chat.text(record).unwrap_err();
        assert_eq!(fault.class(), contract::Class::Data, "{record}");
        assert!(fault.to_string().contains(word), "{record}: {fault}");
    }
}

#[test]
fn tools_are_a_list_or_a_text_of_one_and_have_a_template_of_their_own() {
    let both = [(DEFAULT, "plain {{ tools is none }}"), (WITH_TOOLS, "{{ tools | tojson }}")];
    let chat = chat(&both, BTreeMap::new(), true);
    for (record, wanted) in [
        (r#"{"messages": [1]}"#, "plain True"),
        (r#"{"messages": [1], "tools": null}"#, "plain True"),
        (r#"{"messages": [1], "tools": [{"b": 1, "a": 2}]}"#, r#"[{"b": 1, "a": 2}]"#),
        (r#"{"messages": [1], "tools": " [{\"b\": 1, \"a\": 2}]"}"#, r#"[{"b": 1, "a": 2}]"#),
    ] {
        assert_eq!(chat.text(record).unwrap(), wanted);
    }
}

const CONFIG_TEXT: &str = r#"{"bos_token": {"content": "<s>", "special": true}, "eos_token": "</s>", "pad_token": null,
    "add_bos_token": true, "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"}"#;

fn bench(config: &str) -> Workbench {
    let bench = Workbench::new(3);
    bench.write("tokenizer.json", tokenizer(&["<s>", "</s>"]));
    bench.write("model/tokenizer_config.json", config);
    let line = |i: u32| json!({"m": [{"content": format!("q{i}</s>")}, {"content": "a"}], "id": i});
    bench.write("chat.jsonl", (0..20).map(|i| line(i).to_string() + "\n").collect::<String>());
    bench
}

fn corpus(bench: &Workbench, keys: &str) -> std::path::PathBuf {
    let text = format!(
        "tokenizer = \"tokenizer.json\"\nvalidation = 0\nunit = 64\n[[source]]\nname = \"chat\"\n\
         files = [\"chat.jsonl\"]\nchat = \"m\"\nid = \"id\"\n{keys}\n"
    );
    bench.write("corpus.toml", text)
}

fn tokens(manifest: &Manifest) -> u64 {
    manifest.sources[0].train.tokens
}

#[test]
fn a_store_holds_control_tokens_where_a_template_writes_them() {
    let bench = bench(CONFIG_TEXT);
    let keys = "chat_template = \"model/tokenizer_config.json\"";
    let manifest = built(&corpus(&bench, keys), &bench.path("store"), 2);
    // <s> q7 </s> </s> a </s>: a control token inside a message is a token too, as in transformers.
    let wanted: u64 = (0..20).map(|i| 5 + format!("q{i}").len() as u64).sum();
    assert_eq!(tokens(&manifest), wanted);
    // A separate template with the same tokens in its folder gives the same store; another text gives another store.
    let template = serde_json::from_str::<serde_json::Value>(CONFIG_TEXT).unwrap();
    let template = template["chat_template"].as_str().unwrap();
    bench.write("model/own.jinja", template);
    let keys = "chat_template = \"model/own.jinja\"";
    assert_eq!(built(&corpus(&bench, keys), &bench.path("own"), 2).digest, manifest.digest);
    bench.write("model/own.jinja", template.to_owned() + " ");
    assert_ne!(built(&corpus(&bench, keys), &bench.path("other"), 2).request, manifest.request);
    // Steps that count tokens count these too.
    let trimmed = format!(
        "{keys}\n[[prepare]]\nstep = \"trim\"\ncontext = 6\nkeep_unmarked = true\n\
         [[prepare]]\nstep = \"exact-duplicates\"\n"
    );
    built(&corpus(&bench, &trimmed), &bench.path("trimmed"), 2);
}

#[test]
fn control_tokens_that_are_spelled_out_are_told() {
    let bench = bench(CONFIG_TEXT);
    let told = |keys: &str| {
        let corpus = Corpus::read(corpus(&bench, keys)).unwrap();
        crate::build::spelled(&corpus, &["<s>".to_owned(), "</s>".to_owned()])
    };
    let lines = told("message = \"<s>{content}\"");
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(
        line.contains("source \"chat\"") && line.contains("(\"<s>\") are spelled out"),
        "{line}"
    );
    assert_eq!(told("message = \"{content}\""), [""; 0]);
    assert_eq!(told("chat_template = \"model/tokenizer_config.json\""), [""; 0]);
}

#[test]
fn the_date_of_a_template_is_a_key_and_in_the_identity() {
    let bench = bench(&CONFIG_TEXT.replace("{{ bos_token }}", "{{ strftime_now('%d %b %Y') }}"));
    let keys = |date: &str| format!("chat_template = \"model/tokenizer_config.json\"\n{date}");
    let fault = Corpus::read(corpus(&bench, &keys(""))).map(drop).unwrap_err();
    assert_eq!(fault.class(), contract::Class::Usage);
    assert!(
        fault.to_string().contains("chat_date") && fault.to_string().contains(":9:17"),
        "{fault}"
    );
    let store = |date: &str, name: &str| {
        let keys = keys(&format!("chat_date = {date}"));
        built(&corpus(&bench, &keys), &bench.path(name), 1)
    };
    let first = store("\"2024-07-26\"", "first");
    assert!(tokens(&first) > 20 * "26 Jul 2024".len() as u64);
    assert_eq!(store("2024-07-26", "same").digest, first.digest);
    assert_ne!(store("\"2024-07-27\"", "next").digest, first.digest);
}

#[test]
fn wrong_templates_are_refused_with_their_place() {
    let bench = bench(CONFIG_TEXT);
    bench.write("none/tokenizer_config.json", "{\"bos_token\": \"<s>\"}");
    bench.write("broken.jinja", "{% if x %}\n{{ y");
    bench.write("alone.jinja", "{{ bos_token }}");
    bench.write("plain.jinja", "{{ messages }}");
    bench.write("named.json", r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#);
    let named = |file: &str| format!("chat_template = \"{file}\"");
    for (keys, words) in [
        (named("missing.jinja"), &["missing.jinja"][..]),
        (named("none/tokenizer_config.json"), &["no `chat_template`", "chat_template.jinja"]),
        (named("broken.jinja"), &["cannot be read", "line 2", ":9:17"]),
        (named("alone.jinja"), &["`bos_token`", "tokenizer_config.json next to it"]),
        (named("named.json"), &["rag", "default"]),
        (named("tokenizer.json"), &["no `chat_template`"]),
        (named("plain.jinja") + "\nchat_date = \"2024-07-26\"", &["asks for no date"]),
        (
            named("plain.jinja") + "\nchat_date = \"2023-02-29\"",
            &["`chat_date`", ":10:13", "2024-07-26"],
        ),
        (named("plain.jinja") + "\nmessage = \"{a}\"", &["`message` and `chat_template` exclude"]),
        (named("plain.jinja") + "\ntext = \"a\"", &["`text` and `chat_template` exclude"]),
        ("chat_date = \"2024-07-26\"".to_owned(), &["`chat_date` needs a chat template"]),
        ("tools = \"tools\"".to_owned(), &["`tools` needs a chat template"]),
    ] {
        let fault = Corpus::read(corpus(&bench, &keys)).map(drop).unwrap_err().to_string();
        for word in words {
            assert!(fault.contains(word), "no {word:?} in {fault}");
        }
    }
}
