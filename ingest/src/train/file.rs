//! The bytes of a `tokenizer.json`.

use contract::{Result, json};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::json;

use super::SPLIT;
use super::merge::{Learned, alphabet};

/// The members in the order in which Hugging Face writes them; a struct, because the order of a generic map's keys
/// depends on how `serde_json` was built.
#[derive(Serialize)]
struct File<'a> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<Added<'a>>,
    normalizer: (),
    pre_tokenizer: Sequence,
    post_processor: ByteLevel,
    decoder: ByteLevel,
    model: Model<'a>,
}

#[derive(Serialize)]
struct Added<'a> {
    id: usize,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Sequence {
    r#type: &'static str,
    pretokenizers: (Split, ByteLevel),
}

#[derive(Serialize)]
struct Split {
    r#type: &'static str,
    pattern: serde_json::Value,
    behavior: &'static str,
    invert: bool,
}

#[derive(Serialize)]
struct ByteLevel {
    r#type: &'static str,
    add_prefix_space: bool,
    trim_offsets: bool,
    use_regex: bool,
}

#[derive(Serialize)]
struct Model<'a> {
    r#type: &'static str,
    dropout: (),
    unk_token: (),
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "by_id")]
    vocab: &'a [String],
    merges: Vec<[&'a str; 2]>,
}

/// The tokenizer as Hugging Face's library writes it; special tokens follow the learned ones.
pub(super) fn tokenizer_json(learned: &Learned, special: &[String]) -> Result<Vec<u8>> {
    let shown = Shown::new();
    let vocab: Vec<String> = learned.tokens.iter().map(|token| shown.bytes(token)).collect();
    let merges = learned.merges.iter();
    let merges = merges.map(|&(a, b)| [vocab[a as usize].as_str(), vocab[b as usize].as_str()]);
    let byte_level = || ByteLevel {
        r#type: "ByteLevel",
        add_prefix_space: false,
        trim_offsets: false,
        use_regex: false,
    };
    let split = Split {
        r#type: "Split",
        pattern: json!({ "Regex": SPLIT }),
        behavior: "Isolated",
        invert: false,
    };
    let file = File {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens: (vocab.len()..)
            .zip(special)
            .map(|(id, content)| added(id, content))
            .collect(),
        normalizer: (),
        pre_tokenizer: Sequence { r#type: "Sequence", pretokenizers: (split, byte_level()) },
        post_processor: byte_level(),
        decoder: byte_level(),
        model: Model {
            r#type: "BPE",
            dropout: (),
            unk_token: (),
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: false,
            vocab: &vocab,
            merges: merges.collect(),
        },
    };
    json::pretty(&file, "a tokenizer")
}

fn added(id: usize, content: &String) -> Added<'_> {
    let (single_word, lstrip, rstrip, normalized) = (false, false, false, false);
    Added { id, content, single_word, lstrip, rstrip, normalized, special: true }
}

fn by_id<S: Serializer>(vocab: &[String], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(vocab.len()))?;
    for (id, token) in vocab.iter().enumerate() {
        map.serialize_entry(token, &id)?;
    }
    map.end()
}

/// GPT-2's mapping of bytes to printable characters.
struct Shown([char; 256]);

impl Shown {
    /// A byte that is printable in Latin-1 maps to itself; the others map to the characters from U+0100 on, in order.
    fn new() -> Self {
        let mut shown = ['\0'; 256];
        let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let mut others = '\u{100}'..;
        for byte in alphabet() {
            let other = if prints(byte) { None } else { others.next() };
            shown[usize::from(byte)] = other.unwrap_or(char::from(byte));
        }
        Shown(shown)
    }

    fn bytes(&self, bytes: &[u8]) -> String {
        bytes.iter().map(|&byte| self.0[usize::from(byte)]).collect()
    }
}
