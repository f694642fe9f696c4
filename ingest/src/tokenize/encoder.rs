//! A tokenizer that two libraries load from the same bytes.
//!
//! Invariant: which of the two encodes affects only speed, never an id: a build stops if they differ.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Included};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use contract::fault::tells_of_memory;
use contract::guard::quietly;
use contract::{Fault, Identity, Result, fault};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use store::Location;
use tokenizers::{NormalizedString, Normalizer as _};

use super::chunks::Chunks;
use super::fast::Fast;
use super::json;
use crate::parallel::no_thread;

/// The library that encodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Engine {
    /// `fastokens` where it covers the tokenizer.
    #[default]
    Fastest,
    /// Hugging Face `tokenizers`.
    Reference,
}

/// The version of the reference, which defines the correct ids.
pub const REFERENCE: &str = "tokenizers 0.23.2";

/// The version of the fast encoder.
pub const FAST: &str = "fastokens 0.3.5";

/// A tokenizer, ready to encode from several threads at once.
pub struct Tokenizer {
    bytes: Vec<u8>,
    identity: Identity,
    vocab: u32,
    reference: tokenizers::Tokenizer,
    /// The fast encoder, or why there is none.
    fast: std::result::Result<Fast, String>,
    /// Without a fast encoder: the places at which the reference may cut a text into chunks.
    chunks: Option<Chunks>,
    rescued: AtomicU64,
    /// The same tokenizer for texts of chat templates, in which control tokens are encoded as tokens.
    controls: Option<Box<Tokenizer>>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn read(file: impl Into<Location>, engine: Engine) -> Result<Self> {
        let file = file.into();
        let bytes = file.read().map_err(|error| file.fault("read", &error))?;
        Tokenizer::new(bytes, engine).map_err(|fault| fault.or_at(|| file.to_string()))
    }

    /// Reads the bytes of a `tokenizer.json`.
    pub fn new(bytes: Vec<u8>, engine: Engine) -> Result<Self> {
        Tokenizer::load(bytes, engine, false)
    }

    /// Adds, if `wanted`, an encoder for texts in which control tokens are encoded as tokens: see [`Tokenizer::of`].
    pub(crate) fn with_controls(mut self, wanted: bool, engine: Engine) -> Result<Self> {
        if wanted {
            self.controls = Some(Box::new(Tokenizer::load(self.bytes.clone(), engine, true)?));
        }
        Ok(self)
    }

    /// The encoder that treats control tokens as tokens (`controls`) or as text.
    pub(crate) fn of(&self, controls: bool) -> Result<&Self> {
        match controls {
            true => self
                .controls
                .as_deref()
                .ok_or_else(|| Fault::bug("no control tokens were asked for")),
            false => Ok(self),
        }
    }

    fn load(bytes: Vec<u8>, engine: Engine, controls: bool) -> Result<Self> {
        // Loading a library takes as long as encoding tens of megabytes, so both load in parallel.
        let (reference, fast) = thread::scope(|scope| {
            let loader = || {
                let reference = reference(&bytes, controls)?;
                let largest = largest_id(&reference)?;
                refuse_confused(&reference)?;
                Ok((reference, largest))
            };
            let reference =
                thread::Builder::new().spawn_scoped(scope, loader).map_err(no_thread)?;
            let fast = parsed(&bytes, controls).map(|json| match engine {
                Engine::Reference => (None, Err("the reference was asked for".to_owned())),
                Engine::Fastest => (Chunks::new(&json), Fast::new(json)),
            });
            Ok::<_, Fault>((reference.join(), fast))
        })?;
        let (chunks, fast) = fast?;
        let (reference, largest) =
            reference.map_err(|_| Fault::bug("the loader of a tokenizer died"))??;
        let vocab = largest
            .and_then(|id| id.checked_add(1))
            .filter(|vocab| *vocab <= 1 << 31)
            .ok_or_else(|| Fault::usage("the tokenizer has no tokens, or an id beyond 31 bits"))?;
        let fast =
            fast.and_then(|fast| agreeing(&reference, |text| fast.encode(text)).map(|()| fast));
        let chunks = chunks.filter(|chunks| {
            let one = |chunk: &str| encode_reference(&reference, chunk);
            let all = |text: &str| chunks.encode(text, one).map_err(|fault| fault.to_string());
            fast.is_err() && Chunks::fit(&reference) && agreeing(&reference, all).is_ok()
        });
        let identity = Identity::of_bytes(&bytes);
        let rescued = AtomicU64::new(0);
        let controls = None;
        Ok(Tokenizer { bytes, identity, vocab, reference, fast, chunks, rescued, controls })
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// SHA-256 of the bytes.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// One more than the largest id, added tokens included.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// Bytes of a stored token, depending on the largest id.
    pub fn token_bytes(&self) -> u32 {
        if self.vocab <= 1 << 16 { 2 } else { 4 }
    }

    /// The library that encodes, with its version.
    pub fn encoder(&self) -> &'static str {
        if self.fast.is_ok() { FAST } else { REFERENCE }
    }

    /// Why the reference encodes every text as a whole.
    pub fn why_slow(&self) -> Option<&str> {
        let why = self.fast.as_ref().err().map(String::as_str);
        why.filter(|_| self.chunks.is_none()).or_else(|| self.controls.as_ref()?.why_slow())
    }

    /// Documents on which the fast encoder failed and the reference was used.
    pub fn rescued(&self) -> u64 {
        let chats = self.controls.as_ref().map_or(0, |controls| controls.rescued());
        self.rescued.load(Ordering::Relaxed) + chats
    }

    /// The control tokens: the special ones, in the order of their ids.
    pub(crate) fn control_tokens(&self) -> Vec<String> {
        let mut added: Vec<_> = self.reference.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        added
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(_, token)| token.content)
            .collect()
    }

    /// The id of a token that `corpus.toml` names.
    pub fn id_of(&self, key: &str, token: &str) -> Result<u32> {
        if let Some(id) = self.reference.token_to_id(token) {
            return Ok(id);
        }
        let added = self.reference.get_added_tokens_decoder();
        let mut known: Vec<&str> = added.values().map(|token| token.content.as_str()).collect();
        known.sort_unstable();
        let refused = Fault::usage(format!("`{key}` names a token that the tokenizer lacks"))
            .found(format!("{token:?}"));
        Err(match fault::nearest(token, known.iter().copied()) {
            Some(near) => refused.hint(format!("did you mean {near:?}?")),
            None if known.is_empty() => refused.hint("this tokenizer has no added tokens"),
            None => refused.wanted(format!("one of {}", known[..known.len().min(8)].join(", "))),
        })
    }

    /// The ids of `text`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if let Some(chunks) = &self.chunks {
            return chunks.encode(text, |chunk| self.encode_by_reference(chunk));
        }
        let Ok(fast) = &self.fast else { return self.encode_by_reference(text) };
        if let Ok(ids) = fast.encode(text) {
            return Ok(ids);
        }
        self.rescued.fetch_add(1, Ordering::Relaxed);
        self.encode_by_reference(text)
    }

    /// The ids of `text` from the reference.
    pub fn encode_by_reference(&self, text: &str) -> Result<Vec<u32>> {
        encode_reference(&self.reference, text)
    }
}

/// The parsed file; with `controls`, no added token is marked special.
fn parsed(bytes: &[u8], controls: bool) -> Result<Value> {
    let mut json = json::parse(bytes)
        .map_err(|error| Fault::usage(format!("this is not a tokenizer.json: {error}")))?;
    refuse_chance(&json)?;
    if controls && let Some(added) = json["added_tokens"].as_array_mut() {
        added.iter_mut().for_each(|token| token["special"] = false.into());
    }
    Ok(json)
}

/// Refuses a tokenizer that samples at random: it would give other ids each time.
fn refuse_chance(json: &Value) -> Result<()> {
    match json.pointer("/model/dropout") {
        Some(Value::Number(chance)) if chance.as_f64() != Some(0.0) => {
            Err(Fault::usage("this tokenizer merges by chance")
                .found(format!("model.dropout = {chance}"))
                .wanted("\"dropout\": null")
                .hint("dropout is for training: a store needs the same ids every time"))
        }
        _ => Ok(()),
    }
}

fn reference(bytes: &[u8], controls: bool) -> Result<tokenizers::Tokenizer> {
    let refused = |error: String| {
        Fault::usage(format!("`tokenizers` refuses this tokenizer.json: {error}"))
            .hint(format!("it has to be a file that {REFERENCE} reads"))
    };
    let mut reference = quietly(|| tokenizers::Tokenizer::from_bytes(bytes))
        .map_err(|_| refused("it panicked".to_owned()))?
        .map_err(|error| refused(error.to_string()))?;
    // Truncation and padding in a file are for model batches, not for documents.
    reference.with_truncation(None).map_err(|error| refused(error.to_string()))?;
    reference.with_padding(None);
    reference.set_encode_special_tokens(!controls);
    Ok(reference)
}

fn encode_reference(reference: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
    match quietly(|| reference.encode_fast(text, false)) {
        Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
        Ok(Err(error)) => Err(Fault::data(format!("the tokenizer refuses a document: {error}"))
            .hint("leave the document out, or use a tokenizer that knows every byte")),
        // Oniguruma's Rust wrapper panics with its message; where it does not check an allocation, the process crashes.
        Err(panic) if tells_of_memory(&panic) => {
            Err(Fault::machine(format!("cannot encode a document: out of memory ({panic})"))
                .hint("free some memory, raise `ulimit -v` or lower --workers, and run the same command again"))
        }
        Err(panic) => Err(Fault::data("the reference tokenizer panicked on a document")
            .found(panic)
            .hint("leave the document out, or use another tokenizer")),
    }
}

/// The largest id. Refuses two tokens with the same id, since a stored id would be ambiguous.
fn largest_id(reference: &tokenizers::Tokenizer) -> Result<Option<u32>> {
    let mut tokens: Vec<(u32, String)> =
        reference.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    match tokens.windows(2).find(|two| two[0].0 == two[1].0) {
        None => Ok(tokens.last().map(|(id, _)| *id)),
        Some(two) => Err(Fault::usage(format!("two tokens have the id {}", two[0].0))
            .found(format!("{:?} and {:?}", two[0].1, two[1].1))
            .hint(format!(
                "{REFERENCE} numbers added tokens that the vocabulary lacks after its size: put them into it"
            ))),
    }
}

/// Refuses two added tokens that the normalizer makes equal: which one the reference matches depends on the order of a
/// hash map, which differs between processes. Special ones are never matched.
fn refuse_confused(reference: &tokenizers::Tokenizer) -> Result<()> {
    let Some(normalizer) = reference.get_normalizer() else { return Ok(()) };
    let mut added: Vec<_> = reference.get_added_tokens_decoder().into_iter().collect();
    added.sort_unstable_by_key(|(id, _)| *id);
    let mut seen = BTreeMap::new();
    for (_, token) in added.into_iter().filter(|(_, token)| token.normalized) {
        let mut text = NormalizedString::from(token.content.as_str());
        normalizer.normalize(&mut text).map_err(|error| {
            Fault::usage("the normalizer refuses an added token")
                .found(format!("{:?}: {error}", token.content))
        })?;
        let Some(other) = seen.insert(text.get().to_owned(), token.clone()) else { continue };
        if !(other.special && token.special) {
            return Err(Fault::usage(
                "two added tokens are one to the normalizer: chance would pick the id",
            )
            .found(format!("{:?} and {:?}, both {:?}", other.content, token.content, text.get()))
            .hint("take one of them out, or set \"normalized\": false"));
        }
    }
    Ok(())
}

/// Compares an encoder with the reference on texts where tokenizers are known to differ; an error is the first
/// difference.
fn agreeing(
    reference: &tokenizers::Tokenizer,
    encode: impl Fn(&str) -> std::result::Result<Vec<u32>, String>,
) -> std::result::Result<(), String> {
    for text in probes(reference) {
        let wanted = encode_reference(reference, &text).map_err(|fault| fault.to_string())?;
        match encode(&text) {
            Ok(ids) if ids == wanted => {}
            Ok(_) => return Err(format!("its ids differ on the probe {text:?}")),
            Err(why) => return Err(format!("it gives up on the probe {text:?}: {why}")),
        }
    }
    Ok(())
}

/// Texts on which tokenizers are known to differ, and every added token: alone, inside text and overlapping others.
///
/// The two libraries read each added token separately (if the vocabulary has it under another id, `tokenizers` uses
/// that one), so each has to be tested.
fn probes(reference: &tokenizers::Tokenizer) -> Vec<String> {
    let fixed = [
        "",
        " ",
        "\u{2581}",
        "\u{2581} a",
        "  leading and trailing  ",
        "tabs\t\t and\r\nlines\n\n\n  indented\n",
        "don't we'll I'VE it's 'tis O'Brien's",
        "1234567890 3.14159 1e-10 0xFF 1,000,000",
        "caf\u{e9} cafe\u{301} \u{fb01}n \u{212b} \u{1e9b}\u{323}",
        "\u{6587}\u{5b57}\u{5316}\u{3051} \u{432}\u{44b}\u{445}\u{43e}\u{434} \u{645}\u{631}\u{62d}\u{628}\u{627} \
         \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f1e9}\u{1f1ea}",
        "\u{0}\u{1}\u{7f}\u{85}\u{a0}\u{2028}\u{feff}\u{fffd}\u{10ffff}",
        "fn main() { let x = &mut v[..]; } // ==> `a` != b",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa          bbbb\u{2581}\u{2581}c",
        "<s>[INST] <|endoftext|><unk></s> [CLS]a[SEP] <pad>",
    ];
    let mut probes: Vec<String> = fixed.iter().map(|text| (*text).to_owned()).collect();
    // Words that are merged by windows.
    let long = [
        "a",
        " ",
        "hello",
        "\u{6587}\u{5b57}",
        "-",
        "\u{1f468}\u{200d}\u{1f469}\u{200d}",
        "e\u{301}",
    ];
    probes.extend(long.map(|word| format!("of {} it", word.repeat(1 + 700 / word.len()))));
    let added: BTreeSet<String> =
        reference.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
    for token in &added {
        probes.push(token.clone());
        probes.push(format!("{token}word word{token}word  {token}  {token}{token} end {token}"));
    }
    probes.extend(overlapping(&added));
    probes
}

/// Pairs of overlapping added tokens: one token, then the rest of another one that begins with its end. An encoder may
/// find either of them.
///
/// Of those that begin with the same end, only the first four and the last four are tested: they differ only after it.
fn overlapping(added: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for token in added {
        for (at, _) in token.char_indices() {
            let end = &token[at..];
            let beyond = format!("{end}{}", char::MAX);
            let others = || added.range::<str, _>((Included(end), Excluded(beyond.as_str())));
            let some: BTreeSet<&String> = others().take(4).chain(others().rev().take(4)).collect();
            let rests =
                some.into_iter().filter(|other| *other != token).map(|other| &other[end.len()..]);
            found.extend(rests.map(|rest| format!("a{token}{rest} b{token}{rest}{token}")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bytes_tokenizer;
    use serde_json::json;

    #[test]
    fn special_tokens_stay_text_and_others_match() {
        for engine in [Engine::Fastest, Engine::Reference] {
            let tokenizer = Tokenizer::new(bytes_tokenizer(|_| ()), engine).unwrap();
            assert_eq!(tokenizer.why_slow().is_none(), engine == Engine::Fastest);
            let ids = tokenizer.encode("a<|end|><tab>b").unwrap();
            assert_eq!(ids.len(), 1 + "<|end|>".len() + 1 + 1);
            assert_eq!(ids[8], 257);
            assert!(!ids.contains(&256));
            assert_eq!(tokenizer.reference.decode(&ids, false).unwrap(), "a<|end|><tab>b");
            assert_eq!((tokenizer.vocab(), tokenizer.token_bytes()), (258, 2));
        }
    }

    #[test]
    fn cropping_and_padding_of_the_file_do_not_reach_documents() {
        let bytes = bytes_tokenizer(|json| {
            json["truncation"] = json!({"direction": "Right", "max_length": 4,
                                        "strategy": "LongestFirst", "stride": 0});
            json["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                                     "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
        });
        for engine in [Engine::Fastest, Engine::Reference] {
            let tokenizer = Tokenizer::new(bytes.clone(), engine).unwrap();
            assert_eq!(tokenizer.encode("abc").unwrap().len(), 3);
            assert_eq!(tokenizer.encode("abcdefghijkl").unwrap().len(), 12);
        }
    }

    #[test]
    fn what_the_fast_encoder_does_not_cover_is_encoded_by_the_reference() {
        let bytes = bytes_tokenizer(|json| json["added_tokens"][1]["single_word"] = json!(true));
        let tokenizer = Tokenizer::new(bytes, Engine::Fastest).unwrap();
        assert_eq!(tokenizer.encoder(), REFERENCE);
        assert!(tokenizer.why_slow().unwrap().contains("whole words"));
        assert_eq!(tokenizer.encode("a<tab>b").unwrap().len(), 7);
        let unigram = bytes_tokenizer(|json| {
            json["model"] =
                json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]});
            json["pre_tokenizer"] = Value::Null;
            json["decoder"] = Value::Null;
        });
        let tokenizer = Tokenizer::new(unigram, Engine::Fastest).unwrap();
        assert_eq!(tokenizer.encoder(), REFERENCE);
    }

    #[test]
    fn added_tokens_that_the_normalizer_makes_one_are_refused() {
        let tokenizer = |normalized: bool, special: bool| {
            bytes_tokenizer(|json| {
                json["normalizer"] = json!({"type": "Lowercase"});
                let added = json["added_tokens"].as_array_mut().unwrap();
                added[1]["normalized"] = json!(true);
                added[1]["special"] = json!(special);
                added.push(added[1].clone());
                added[2]["id"] = json!(258);
                added[2]["content"] = json!("<TAB>");
                added[2]["normalized"] = json!(normalized);
            })
        };
        let refused = Tokenizer::new(tokenizer(true, false), Engine::Fastest).err().unwrap();
        assert_eq!(refused.class(), contract::Class::Usage);
        assert!(refused.to_string().contains(r#""<tab>" and "<TAB>""#), "{refused}");
        // One that is matched before normalization, and two that are never matched.
        for bytes in [tokenizer(false, false), tokenizer(true, true)] {
            let ids = |engine| {
                Tokenizer::new(bytes.clone(), engine).unwrap().encode("<tab> <TAB>").unwrap()
            };
            assert_eq!(ids(Engine::Fastest), ids(Engine::Reference));
        }
    }

    #[test]
    fn every_added_token_is_probed() {
        // A hundred that the vocabulary has too, the last one under another id, which `tokenizers` uses.
        let bytes = |last: u32| {
            bytes_tokenizer(|json| {
                let plain = json["added_tokens"][1].clone();
                json["added_tokens"] = json!([]);
                for number in 0..100 {
                    let content =
                        if number == 99 { "zz".to_owned() } else { format!("<{number}>") };
                    let id = if number == 99 { 400 } else { 256 + number };
                    json["model"]["vocab"][&content] = json!(id);
                    let mut token = plain.clone();
                    token["id"] = json!(if number == 99 { last } else { id });
                    token["content"] = json!(content);
                    json["added_tokens"].as_array_mut().unwrap().push(token);
                }
            })
        };
        let ids = |engine| Tokenizer::new(bytes(356), engine).unwrap().encode("azzb zz").unwrap();
        assert_eq!(ids(Engine::Fastest), ids(Engine::Reference));
        let refused = Tokenizer::new(bytes(356), Engine::Fastest).unwrap();
        assert!(refused.why_slow().unwrap().contains("\"zz\""), "{:?}", refused.why_slow());
        assert_eq!(Tokenizer::new(bytes(400), Engine::Fastest).unwrap().encoder(), FAST);
    }

    #[test]
    fn added_tokens_that_overlap_are_probed_together() {
        let added = ["ab", "abc", "bcd", "c", "xyz"].map(str::to_owned);
        let wanted = ["aabc babcab", "aabcd babcdab", "aabcd babcdabc", "aabc babcabc"];
        let found = overlapping(&added.into());
        assert_eq!(found, wanted);
        let many: BTreeSet<String> = (0..500).map(|number| format!("_{number}_")).collect();
        assert!(overlapping(&many).len() <= 500 * 8);
    }

    #[test]
    fn odd_files_are_refused_with_a_reason() {
        for (bytes, word) in [
            (b"{".to_vec(), "not a tokenizer.json"),
            (b"{}".to_vec(), "refuses"),
            (b"[]".to_vec(), "refuses"),
            (b"7".to_vec(), "refuses"),
            (bytes_tokenizer(|json| json["model"]["dropout"] = json!(0.1)), "chance"),
            (bytes_tokenizer(|json| json["model"]["vocab"] = json!({})), "tokenizer"),
        ] {
            match Tokenizer::new(bytes, Engine::Fastest) {
                Ok(_) => assert_eq!(word, "tokenizer"),
                Err(fault) => assert!(fault.to_string().contains(word), "{fault}"),
            }
        }
        let tokenizer = Tokenizer::new(bytes_tokenizer(|_| ()), Engine::Fastest).unwrap();
        let fault = tokenizer.id_of("end", "<|edn|>").unwrap_err().to_string();
        assert!(fault.contains("<|end|>"), "{fault}");
    }
}
