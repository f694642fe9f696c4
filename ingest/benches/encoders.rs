//! Compares the ids of the encoder with those of Hugging Face `tokenizers`, and measures it on its slowest texts.
//!
//! ```text
//! cargo bench -p ingest --bench encoders -- equal [expected_tokens.json] TOKENIZER.json.. -- TEXT..
//! cargo bench -p ingest --bench encoders -- vectors FOLDER TOKENIZER.json..
//! cargo bench -p ingest --bench encoders -- cliff TOKENIZER.json.. -- TEXT..
//! cargo bench -p ingest --bench encoders -- fuzz SECONDS SEED TOKENIZER.json.. -- TEXT..
//! ```
//!
//! A tokenizer is named by its file name without the extension, a text by its folder and name. `expected_tokens.json`
//! and the vectors encode strings that look like special tokens as these tokens. They are therefore compared with
//! `special` removed from every added token: then both libraries match all of them. Without expected ids, the reference
//! encodes every document too.

#![expect(clippy::print_stdout, reason = "a benchmark prints its rows")]

use std::path::Path;
use std::time::{Duration, Instant};

use contract::{Fault, Result};
use ingest::source::{self, Fields, Format, Limits, Parsed};
use ingest::tokenize::{Engine, Tokenizer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

#[path = "../src/tokenize/hard.rs"]
mod hard;

fn main() {
    // Cargo adds `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args.as_slice() {
        ["equal", rest @ ..] => equal(rest),
        ["vectors", folder, tokenizers @ ..] => vectors(Path::new(folder), tokenizers),
        ["cliff", rest @ ..] => cliff(rest),
        ["fuzz", seconds, seed, rest @ ..] => fuzz(seconds, seed, rest),
        _ => {
            println!("usage: encoders equal|vectors|cliff|fuzz ..., as the head of this file says");
            Ok(())
        }
    };
    if let Err(fault) = outcome {
        eprintln!("error: {fault}");
        std::process::exit(1);
    }
}

fn read(path: &str) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| Fault::io("read", Path::new(path), &error))
}

fn json_of(bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|error| Fault::usage(format!("no JSON: {error}")))
}

/// A tokenizer, as it is or with no added token marked special.
fn load(path: &str, specials_match: bool) -> Result<Tokenizer> {
    let mut bytes = read(path)?;
    if specials_match {
        let mut value = json_of(&bytes)?;
        for token in value["added_tokens"].as_array_mut().into_iter().flatten() {
            token["special"] = json!(false);
        }
        bytes = value.to_string().into_bytes();
    }
    Tokenizer::new(bytes, Engine::Fastest)
}

/// The arguments before and after the `--`.
fn sides<'a, 'b>(args: &'a [&'b str]) -> (&'a [&'b str], &'a [&'b str]) {
    let at = args.iter().position(|arg| *arg == "--").unwrap_or(args.len());
    (&args[..at], args.get(at + 1..).unwrap_or_default())
}

fn stem(path: &str) -> String {
    Path::new(path).file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The last folder and the name of a text.
fn called(path: &str) -> String {
    let parts: Vec<&str> = path.rsplit('/').take(2).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The documents of a file: of its field `text`, or of `prompt`, `question` and `answer`.
fn documents(path: &str) -> Result<Vec<String>> {
    let path = Path::new(path);
    let format = Format::guess(path).unwrap_or(Format::Text);
    let mut texts = Vec::new();
    for text in ["text", "prompt", "question", "answer"] {
        let fields = Fields::at(text, None);
        let Ok(mut input) = source::open(path, format, &fields, &Limits::default()) else {
            continue;
        };
        while let Some(slab) = input.next_slab()? {
            texts.extend(slab.parse(&fields)?.into_iter().filter_map(|parsed| match parsed {
                Parsed::Document(document) => Some(document.text),
                Parsed::Dropped { .. } => None,
            }));
        }
        if text == "text" && !texts.is_empty() {
            break;
        }
    }
    Ok(texts)
}

/// Tokens, and a SHA-256 over each document's length and ids, computed as for the expected encodings.
#[derive(Default)]
struct Sum {
    tokens: u64,
    digest: Sha256,
}

impl Sum {
    fn add(&mut self, ids: &[u32]) {
        self.tokens += ids.len() as u64;
        self.digest.update((ids.len() as u32).to_le_bytes());
        ids.iter().for_each(|id| self.digest.update(id.to_le_bytes()));
    }

    fn hex(self) -> String {
        self.digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Where two encodings differ, as text.
fn difference(found: &[u32], wanted: &[u32]) -> Option<String> {
    if found == wanted {
        return None;
    }
    let at = found.iter().zip(wanted).take_while(|(a, b)| a == b).count();
    let near = |ids: &[u32]| format!("{:?}", &ids[at.min(ids.len())..ids.len().min(at + 3)]);
    Some(format!("token {at}: {} for {}", near(found), near(wanted)))
}

fn equal(args: &[&str]) -> Result<()> {
    let (mut tokenizers, texts) = sides(args);
    let mut expected = Value::Null;
    if let Some((first, rest)) = tokenizers.split_first()
        && first.ends_with("expected_tokens.json")
    {
        (expected, tokenizers) = (json_of(&read(first)?)?, rest);
    }
    let specials_match = !expected.is_null();
    println!("| tokenizer | corpus | documents | bytes | tokens | encoder | ids |");
    println!("|---|---|---|---|---|---|---|");
    for path in tokenizers {
        let tokenizer = load(path, specials_match)?;
        if let Some(why) = tokenizer.why_slow() {
            eprintln!("{}: {why}", stem(path));
        }
        for text in texts {
            let wanted = &expected["tokenizers"][stem(path)][called(text)];
            if specials_match != wanted.is_null() {
                println!(
                    "{}",
                    row(&tokenizer, &stem(path), text, specials_match.then_some(wanted))?
                );
            }
        }
    }
    Ok(())
}

/// The encoder on one text: against what was expected, or else document by document against the reference.
fn row(tokenizer: &Tokenizer, name: &str, text: &str, wanted: Option<&Value>) -> Result<String> {
    let texts = documents(text)?;
    let (mut sum, mut bytes, mut verdict) = (Sum::default(), 0, None);
    let slow = tokenizer.why_slow().is_some();
    for (index, document) in texts.iter().enumerate() {
        bytes += document.len();
        let ids = tokenizer.encode(document)?;
        sum.add(&ids);
        // If the reference encodes, there is nothing to compare except expected ids.
        if wanted.is_none() && !slow && verdict.is_none() {
            let first = difference(&ids, &tokenizer.encode_by_reference(document)?);
            verdict = first.map(|first| format!("document {index}, {first}"));
        }
    }
    let tokens = sum.tokens;
    let verdict = match (wanted, verdict) {
        (None, None) if slow => "is the reference".to_owned(),
        (None, None) => "equal".to_owned(),
        (None, Some(verdict)) => verdict,
        (Some(wanted), _)
            if wanted["tokens"] == json!(tokens) && wanted["sha256"] == json!(sum.hex()) =>
        {
            "equal".to_owned()
        }
        (Some(wanted), _) => format!("{} tokens expected, or other ids", wanted["tokens"]),
    };
    let (text, documents) = (called(text), texts.len());
    let encoder = tokenizer.encoder();
    Ok(format!("| {name} | {text} | {documents} | {bytes} | {tokens} | {encoder} | {verdict} |"))
}

/// The cases of `kitoken_*` and `llamacpp_*` for one tokenizer.
fn cases(folder: &Path, name: &str) -> Vec<(String, String, String)> {
    let open = |file: String| std::fs::read_to_string(folder.join(file)).ok();
    let mut cases = Vec::new();
    for kind in ["small", "mixed"] {
        let found = (
            open(format!("kitoken_{kind}_input.txt")),
            open(format!("kitoken_{name}_{kind}_tokens.txt")),
        );
        let (Some(input), Some(ids)) = found else { continue };
        let inputs = input.split('\n').filter(|line| !line.is_empty());
        for (input, ids) in inputs.zip(ids.split('\n').filter(|line| !line.is_empty())) {
            let input = input.replace("\\n", "\n").replace("\\s", " ").replace("\\x", "");
            cases.push((format!("kitoken {kind}"), input, ids.to_owned()));
        }
    }
    if let (Some(input), Some(ids)) =
        (open("kitoken_utf8_input.txt".to_owned()), open(format!("kitoken_{name}_utf8_tokens.txt")))
    {
        cases.push(("kitoken utf8".to_owned(), input, ids));
    }
    if let (Some(input), Some(ids)) =
        (open("llamacpp_tests.inp".to_owned()), open(format!("llamacpp_{name}.out")))
    {
        for (input, ids) in input.split("\n__ggml_vocab_test__\n").zip(ids.lines()) {
            cases.push(("llama.cpp".to_owned(), input.to_owned(), ids.to_owned()));
        }
    }
    cases
}

fn vectors(folder: &Path, tokenizers: &[&str]) -> Result<()> {
    println!("| tokenizer | encoder | cases | differing |");
    println!("|---|---|---|---|");
    for path in tokenizers {
        let tokenizer = load(path, true)?;
        let cases = cases(folder, &stem(path));
        let mut differing = Vec::new();
        for (kind, input, ids) in &cases {
            let wanted: Vec<u32> =
                ids.split([' ', ',', '\n', '[', ']']).filter_map(|id| id.parse().ok()).collect();
            if let Some(first) = difference(&tokenizer.encode(input)?, &wanted) {
                differing.push(format!("{kind} {input:.40?}: {first}"));
            }
        }
        println!(
            "| {} | {} | {} | {} |",
            stem(path),
            tokenizer.encoder(),
            cases.len(),
            differing.len()
        );
        differing.iter().take(5).for_each(|line| eprintln!("{}: {line}", stem(path)));
    }
    Ok(())
}

/// A text of `bytes` bytes, of one kind.
fn stretch(kind: &str, bytes: usize, seed: u64) -> String {
    let mut dice = hard::Dice(seed);
    let draw: fn(&mut hard::Dice) -> String = match kind {
        "one letter" => |_| "a".to_owned(),
        "one capital" => |_| "A".to_owned(),
        "one word" => |_| "hello".to_owned(),
        "ZWJ emoji" => |_| "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}".to_owned(),
        "digits" => |dice| dice.below(10).to_string(),
        "one symbol" => |_| "=".to_owned(),
        "spaces" => |_| " ".to_owned(),
        "newlines" => |_| "\n".to_owned(),
        "apostrophes" => |_| "'".to_owned(),
        "e with accents" => |_| "e\u{301}".to_owned(),
        "CJK" => |dice| between(dice, 0x4e00, 0x61ff),
        "Thai" => |dice| between(dice, 0xe01, 0xe2e),
        "random letters" => |dice| between(dice, 0x61, 0x7a),
        "base64" => |dice| (BASE64[dice.below(64)] as char).to_string(),
        _ => |dice| between(dice, 0, 0xff),
    };
    let mut text = String::new();
    while text.len() < bytes {
        text.push_str(&draw(&mut dice));
    }
    text
}

fn between(dice: &mut hard::Dice, first: u32, last: u32) -> String {
    let drawn = first + dice.below((last - first + 1) as usize) as u32;
    char::from_u32(drawn).map(String::from).unwrap_or_default()
}

const KINDS: [&str; 15] = [
    "one letter",
    "one capital",
    "one word",
    "ZWJ emoji",
    "digits",
    "one symbol",
    "spaces",
    "newlines",
    "apostrophes",
    "e with accents",
    "CJK",
    "Thai",
    "random letters",
    "base64",
    "random bytes",
];

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// MB/s of the encoder by kind and length of text, best of three different texts, since `fastokens` caches long words.
/// The time is that of this thread alone, so other load does not matter. With more cores `fastokens` would start more
/// threads: run it under `taskset -c 0`.
fn cliff(args: &[&str]) -> Result<()> {
    let (paths, files) = sides(args);
    for path in paths {
        let tokenizer = load(path, false)?;
        println!("{} by {}: MB/s of 100 KB, 1 MB, 4 MB", stem(path), tokenizer.encoder());
        for file in files {
            let texts = documents(file)?;
            let (begun, bytes) = (ran()?, texts.iter().map(String::len).sum::<usize>());
            for text in &texts {
                std::hint::black_box(tokenizer.encode(text)?);
            }
            println!("{:<16} {:>8.1}", called(file), bytes as f64 / (ran()? - begun) / 1e6);
        }
        for kind in KINDS {
            let mut line = format!("{kind:<16}");
            for bytes in [100_000, 1_000_000, 4_000_000] {
                let mut best: f64 = 0.0;
                for round in 0..3 {
                    let text = stretch(kind, bytes - 7 * round, 7 + (bytes + round) as u64);
                    let begun = ran()?;
                    std::hint::black_box(tokenizer.encode(&text)?);
                    best = best.max(text.len() as f64 / (ran()? - begun) / 1e6);
                }
                line += &format!(" {best:>8.1}");
            }
            println!("{line}");
        }
    }
    Ok(())
}

/// CPU seconds of this thread.
fn ran() -> Result<f64> {
    let text = read("/proc/thread-self/schedstat")?;
    let text = String::from_utf8_lossy(&text);
    let nanoseconds: f64 =
        text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(f64::NAN);
    Ok(nanoseconds / 1e9)
}

/// Compares the encoders on random texts until the time is over; a difference is printed with its seed.
fn fuzz(seconds: &str, seed: &str, args: &[&str]) -> Result<()> {
    let wrong = |_| Fault::usage("SECONDS and SEED are numbers");
    let seconds: u64 = seconds.parse().map_err(wrong)?;
    let mut seed: u64 = seed.parse().map_err(wrong)?;
    let (paths, files) = sides(args);
    let tokenizers = paths.iter().map(|path| load(path, false)).collect::<Result<Vec<_>>>()?;
    let mut corpus = Vec::new();
    for file in files {
        corpus.extend(documents(file)?);
    }
    let begun = Instant::now();
    let (mut texts, mut bytes, mut differences) = (0u64, 0, 0u64);
    let mut said = begun;
    while begun.elapsed() < Duration::from_secs(seconds) {
        let text = hard::text(&mut hard::Dice(seed), &corpus);
        for (path, tokenizer) in paths.iter().zip(&tokenizers) {
            let found = tokenizer.encode(&text)?;
            if let Some(first) = difference(&found, &tokenizer.encode_by_reference(&text)?) {
                differences += 1;
                println!("{} seed {seed}: {first}: {text:?}", stem(path));
            }
        }
        (texts, bytes, seed) = (texts + 1, bytes + text.len(), seed.wrapping_add(1));
        if said.elapsed() > Duration::from_secs(60) {
            said = Instant::now();
            println!("{texts} texts, {bytes} bytes, {differences} differences, next seed {seed}");
        }
    }
    for (path, tokenizer) in paths.iter().zip(&tokenizers) {
        println!("{}: {}, rescued {}", stem(path), tokenizer.encoder(), tokenizer.rescued());
    }
    println!("{texts} texts, {bytes} bytes, {} tokenizers, {differences} differences", paths.len());
    Ok(())
}
