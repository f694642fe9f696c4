//! From the text of a corpus file to its spec. Pure: no file access, and the same text gives the same result.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use contract::{Fault, Ratio, Result, UNIT_TOKENS_MAX};
use schemars::{JsonSchema, Schema, schema_for};
use serde::Deserialize;
use settings::{CORPUS, File, Spanned, Table, Value};
use store::UNIT_TOKENS;

use super::spec::{ChatSpec, MappingSpec, SourceSpec, Spec};
use super::steps;
use super::{OnError, files};
use crate::recipe::Date;
use crate::recipe::chat::Paths;
use crate::recipe::mapping::{Mapping, Template};
use crate::source::{Fields, Format, names};

/// Bytes of input of a part, unless `part_bytes` says otherwise.
pub const PART_BYTES: u64 = 1 << 28;

/// The largest document, unless `max_document_bytes` says otherwise.
pub const MAX_DOCUMENT_BYTES: u64 = 1 << 30;

/// What a message of a chat becomes, unless `message` says otherwise.
const MESSAGE: &str = "<|{role}|>\n{content}\n";

/// Which documents become a store, and how.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Corpus")]
struct Written {
    /// Path of a Hugging Face `tokenizer.json`; a build needs it.
    tokenizer: Option<String>,
    /// Tokens in a unit, which every `seq_len` must divide; at most 2^40.
    #[schemars(with = "Option<NonZeroU64>", extend("default" = UNIT_TOKENS))]
    unit: Option<Spanned<NonZeroU64>>,
    /// Share of documents held out for validation: a ratio, a decimal or 0, taken exactly.
    #[schemars(with = "Option<Share>", extend("default" = "1/1000"))]
    validation: Option<Spanned<Value>>,
    /// The token put before each document, by its string, such as `"<bos>"`.
    #[schemars(with = "Option<String>", extend("default" = "none"))]
    begin: Option<Spanned<Value>>,
    /// The token put after each document, by its string, such as `"<|endoftext|>"`.
    #[schemars(with = "Option<String>", extend("default" = "none"))]
    end: Option<Spanned<Value>>,
    /// Bytes of input files that a part of the store is made of. A larger Parquet or Arrow file is cut at its row
    /// groups or record batches, another one is a part by itself. Decides files, never the digest.
    #[schemars(extend("default" = PART_BYTES))]
    part_bytes: Option<NonZeroU64>,
    /// A longer document is dropped as `too large`.
    #[schemars(extend("default" = MAX_DOCUMENT_BYTES))]
    max_document_bytes: Option<NonZeroU64>,
    /// What happens at a record that is not a document.
    #[serde(default)]
    on_error: OnError,
    /// The sources; at least one.
    #[serde(default)]
    #[schemars(with = "Vec<WrittenSource>")]
    source: Vec<Spanned<WrittenSource>>,
    /// Steps of preparation, in order.
    #[serde(default)]
    #[schemars(with = "Vec<WrittenStep>")]
    prepare: Vec<Spanned<Table>>,
}

/// Documents under one name, which a curriculum mixes.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Source")]
struct WrittenSource {
    /// Unique; also the name of the source's folder in the store.
    #[schemars(with = "String")]
    name: Spanned<String>,
    /// Globs, relative to the folder of the corpus file.
    #[schemars(with = "Vec<String>")]
    files: Spanned<Vec<Spanned<String>>>,
    /// What the files hold; without it their ending decides.
    format: Option<Format>,
    /// Path of the text in a record: fields joined by dots.
    #[schemars(with = "Option<String>", extend("default" = "text"))]
    text: Option<Spanned<String>>,
    /// Path of the document's id; without it ids are `FILE#ROW` or `FILE#GROUP.ROW`.
    #[schemars(with = "Option<String>")]
    id: Option<Spanned<String>>,
    /// Paths of the fields that are stored with each document's provenance.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    keep: Vec<Spanned<String>>,
    /// The text, built from fields: `"Q: {question}\nA: {answer}"`.
    #[schemars(with = "Option<String>")]
    template: Option<Spanned<String>>,
    /// Path of a list of messages.
    #[schemars(with = "Option<String>")]
    chat: Option<Spanned<String>>,
    /// The text of each message of a `chat`.
    #[schemars(with = "Option<String>", extend("default" = MESSAGE))]
    message: Option<Spanned<String>>,
    /// With `chat`, instead of `message`: a `tokenizer_config.json` or a `.jinja` file.
    #[schemars(with = "Option<String>")]
    chat_template: Option<Spanned<String>>,
    /// For a chat template: the day used as today, `"2024-07-26"`.
    #[schemars(with = "Option<String>")]
    chat_date: Option<Spanned<Value>>,
    /// For a chat template: path of a record's list of tools.
    #[schemars(with = "Option<String>")]
    tools: Option<Spanned<String>>,
}

/// A `[[prepare]]`; its other keys are those of its step.
#[derive(JsonSchema)]
#[schemars(rename = "Step")]
#[expect(dead_code, reason = "stands for a table that is read key by key")]
struct WrittenStep {
    /// The name of the step.
    #[schemars(extend("enum" = steps::STEPS))]
    step: String,
    /// Names of the sources that it is for [default: all].
    sources: Option<Vec<String>>,
}

/// A share: a number, or a ratio as text.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a value that is read as it is typed")]
enum Share {
    Number(f64),
    Ratio(String),
}

/// The JSON Schema of a corpus file.
pub fn schema() -> Schema {
    schema_for!(Written)
}

impl Spec {
    /// Parses the text of a corpus file.
    pub fn parse(file: &File) -> Result<Spec> {
        file.check_kind(CORPUS)?;
        let written: Written = file.parse()?;
        let mut sources = sources(file, &written.source)?;
        steps::steps(file, &written.prepare, &mut sources)?;
        let unit = written.unit.as_ref();
        if let Some(unit) = unit.filter(|unit| unit.get_ref().get() > UNIT_TOKENS_MAX) {
            return Err(file.wrong("unit", unit, "at most 2^40 tokens"));
        }
        let count = |number: Option<NonZeroU64>, default| number.map_or(default, NonZeroU64::get);
        Ok(Spec {
            tokenizer: written.tokenizer,
            unit: count(unit.map(|unit| *unit.get_ref()), UNIT_TOKENS),
            validation: validation(file, written.validation.as_ref())?,
            begin: marker(file, "begin", written.begin.as_ref())?,
            end: marker(file, "end", written.end.as_ref())?,
            part_bytes: count(written.part_bytes, PART_BYTES),
            max_document_bytes: count(written.max_document_bytes, MAX_DOCUMENT_BYTES),
            on_error: written.on_error,
            sources,
        })
    }
}

fn validation(file: &File, share: Option<&Spanned<Value>>) -> Result<Ratio> {
    let Some(share) = share else { return Ok(Ratio::new(1, 1000)) };
    match file.ratio(share) {
        Ok(ratio) if ratio.num() < ratio.den() => Ok(ratio),
        Ok(_) => Err(file
            .wrong("validation", share, "a share below 1, like \"1/1000\"")
            .hint("it would leave nothing to train on")),
        Err(why) => {
            Err(file.wrong("validation", share, "a share below 1, like \"1/1000\"").hint(why))
        }
    }
}

/// `begin` and `end`: a token, or "none" (also by absence, and as `false`).
fn marker(file: &File, key: &str, token: Option<&Spanned<Value>>) -> Result<Option<String>> {
    let Some(token) = token else { return Ok(None) };
    match token.get_ref() {
        Value::Boolean(false) => Ok(None),
        Value::String(text) if text == "none" => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        _ => Err(file.wrong(key, token, "a token, or \"none\"")),
    }
}

fn sources(file: &File, written: &[Spanned<WrittenSource>]) -> Result<Vec<SourceSpec>> {
    if written.is_empty() {
        return Err(Fault::usage("the corpus has no source")
            .at(file.name())
            .wanted("at least one [[source]] with `name` and `files`"));
    }
    let mut names = BTreeMap::new();
    let mut sources = Vec::new();
    for written in written.iter().map(Spanned::get_ref) {
        let name = &written.name;
        let place = file.place(name.span());
        check_name(name.get_ref(), &place)?;
        // Folders on some systems ignore case.
        if let Some(before) = names.insert(name.get_ref().to_lowercase(), place.clone()) {
            return Err(Fault::usage(format!("two sources are called {:?}", name.get_ref()))
                .at(place)
                .found(format!("the other one at {before}"))
                .hint("give each source its own name"));
        }
        sources.push(source(file, written)?);
    }
    Ok(sources)
}

fn source(file: &File, written: &WrittenSource) -> Result<SourceSpec> {
    let field = |key: &str, path: &Spanned<String>| -> Result<String> {
        if names::of(path.get_ref()).iter().any(String::is_empty) {
            let wanted = "names of fields joined by dots, like \"text\" or \"meta.id\"";
            return Err(file.wrong(key, path, wanted));
        }
        Ok(path.get_ref().clone())
    };
    let named = |key: &str, path: &Option<Spanned<String>>| {
        path.as_ref().map(|path| field(key, path)).transpose()
    };
    if written.files.get_ref().is_empty() {
        return Err(file.wrong("files", &written.files, "at least one glob"));
    }
    let pattern = |glob: &Spanned<String>| files::Pattern::new(file, glob);
    let (mapping, mapping_place) = mapping(file, written)?;
    let (text, id) = (named("text", &written.text)?, named("id", &written.id)?);
    let fields = match &mapping {
        Some(MappingSpec::Whole(mapping)) => Fields::record(mapping.roots(), id.as_deref()),
        Some(MappingSpec::Rendered(chat)) => Fields::record(chat.paths.roots(), id.as_deref()),
        None => Fields::at(text.as_deref().unwrap_or("text"), id.as_deref()),
    };
    let mut keep = Vec::new();
    for path in &written.keep {
        let name = field("keep", path)?;
        if keep.contains(&name) {
            return Err(file.wrong("keep", path, "each field once"));
        }
        keep.push(name);
    }
    let fields = Fields { keep, ..fields };
    Ok(SourceSpec {
        name: written.name.get_ref().clone(),
        files: written.files.get_ref().iter().map(pattern).collect(),
        format: written.format,
        fields,
        mapping,
        mapping_place,
        steps: Vec::new(),
    })
}

/// How the records of a source become texts, if from more than one field, with the place of that key.
fn mapping(file: &File, written: &WrittenSource) -> Result<(Option<MappingSpec>, String)> {
    if written.chat_template.is_some() || written.chat_date.is_some() || written.tools.is_some() {
        return rendered(file, written);
    }
    let template = |key: &str, template: &Spanned<String>| {
        Template::parse(template.get_ref()).map_err(|why| {
            let wanted = "text with fields in it, like \"Question: {question}\\nAnswer: {answer}\"";
            file.wrong(key, template, wanted).hint(why)
        })
    };
    let WrittenSource { template: whole, chat, message, text, .. } = written;
    let (mapping, place, key) = match (whole, chat) {
        (None, None) => match message {
            None => return Ok((None, String::new())),
            Some(message) => {
                let fault = file.fault(message, "`message` needs a chat");
                return Err(fault.wanted("chat = \"messages\""));
            }
        },
        (Some(_), Some(chat)) => {
            return Err(file.fault(chat, "`template` and `chat` exclude each other"));
        }
        (Some(whole), None) => {
            (Mapping::Template(template("template", whole)?), file.place(whole.span()), "template")
        }
        (None, Some(chat)) => {
            let message = match message {
                Some(message) => template("message", message)?,
                None => Template::parse(MESSAGE).map_err(Fault::bug)?,
            };
            let path = chat.get_ref().clone();
            (Mapping::Chat { path, message }, file.place(chat.span()), "chat")
        }
    };
    match text {
        Some(text) => Err(file.fault(text, format!("`text` and `{key}` exclude each other"))),
        None => Ok((Some(MappingSpec::Whole(mapping)), place)),
    }
}

/// A chat with a Hugging Face template.
fn rendered(file: &File, written: &WrittenSource) -> Result<(Option<MappingSpec>, String)> {
    let WrittenSource { template, chat, message, text, chat_template, chat_date, tools, .. } =
        written;
    let Some(named) = chat_template else {
        let fault = match (chat_date, tools) {
            (Some(date), _) => file.fault(date, "`chat_date` needs a chat template"),
            (None, Some(tools)) => file.fault(tools, "`tools` needs a chat template"),
            (None, None) => Fault::bug("a chat without its keys"),
        };
        return Err(fault.wanted("chat_template = \"tokenizer_config.json\", or a .jinja file"));
    };
    let others = [("template", template), ("message", message), ("text", text)];
    if let Some((key, other)) = others.iter().find_map(|(key, other)| Some((key, other.as_ref()?)))
    {
        return Err(file.fault(other, format!("`{key}` and `chat_template` exclude each other")));
    }
    let Some(chat) = chat else {
        let fault = file.fault(named, "`chat_template` needs a chat");
        return Err(fault.wanted("chat = \"messages\""));
    };
    let date = |date: &Spanned<Value>| {
        let written = match date.get_ref() {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let wanted = "a day, like \"2024-07-26\"";
        Date::parse(&written).ok_or_else(|| file.wrong("chat_date", date, wanted))
    };
    let place = file.place(named.span());
    let chat = ChatSpec {
        paths: Paths {
            messages: chat.get_ref().clone(),
            tools: tools.as_ref().map(|tools| tools.get_ref().clone()),
        },
        template: named.get_ref().clone(),
        date: chat_date.as_ref().map(date).transpose()?,
        place: place.clone(),
    };
    Ok((Some(MappingSpec::Rendered(chat)), place))
}

/// A name becomes a folder, on any system.
pub(crate) fn check_name(name: &str, place: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let taken = ["manifest.json", "manifest.sum", "tokenizer.json", "export.json"];
    if !name.is_empty()
        && name.len() <= 100
        && name.chars().all(fits)
        && !name.starts_with('.')
        && !taken.contains(&name.to_lowercase().as_str())
    {
        return Ok(());
    }
    Err(Fault::usage("this name cannot be a source's folder")
        .at(place.to_owned())
        .found(format!("{name:?}"))
        .wanted(format!(
            "up to 100 letters, digits, '-', '_' and '.', not beginning with '.'; not {}",
            taken.join(", ")
        )))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "tokenizer = \"t.json\"\nend = \"<eos>\"\nbegin = false\nvalidation = 0.010\n\
        on_error = \"skip\"\n[[source]]\nname = \"web\"\nfiles = [\"raw/*.csv\"]\nformat = \"text\"\n\
        [[source]]\nname = \"chat\"\nfiles = [\"c.jsonl\"]\nchat = \"m\"\nid = \"meta.id\"\n\
        [[prepare]]\nstep = \"clean\"\nsources = [\"web\"]\n";

    #[test]
    fn parsing_looks_at_no_file() {
        let spec = Spec::parse(&File::new("no/such/folder/corpus.toml", WHOLE)).unwrap();
        assert_eq!((spec.validation, spec.on_error), (Ratio::new(1, 100), OnError::Skip));
        assert_eq!((spec.begin, spec.end.as_deref()), (None, Some("<eos>")));
        assert_eq!((spec.unit, spec.part_bytes), (UNIT_TOKENS, PART_BYTES));
        let [web, chat] = &spec.sources[..] else { panic!("two sources") };
        assert_eq!((web.format, web.steps.len(), chat.steps.len()), (Some(Format::Text), 1, 0));
        assert_eq!(chat.fields, Fields::record(["m"], Some("meta.id")));
    }

    #[test]
    fn every_mistake_has_its_place_and_its_way_out() {
        let cases = [
            ("end = \"<eos>\"", "end = 3", ":2:7: ", "a token, or \"none\""),
            ("begin = false", "unit = 1099511627777", ":3:8: ", "at most 2^40 tokens"),
            ("begin = false", "unit = 0", ":3:8: ", "a whole number above zero"),
            ("validation = 0.010", "validation = 1.0", ":4:14: ", "found:  1.0"),
            ("validation = 0.010", "validation = \"x\"", ":4:14: ", "a share below 1"),
            ("\"skip\"", "\"skp\"", ":5:12: ", "did you mean `skip`?"),
            ("on_error", "on_eror", ":5:1: ", "did you mean `on_error`?"),
            ("[[source]]\nname = \"web\"", "[[source]]", ":6:1: ", "[source] has no `name`"),
            ("\"web\"\nfiles", "\"chat\"\nfiles", ":11:8: ", "corpus.toml:7:8"),
            ("\"web\"\nfiles", "\"..\"\nfiles", ":7:8: ", "letters, digits"),
            ("\"web\"\nfiles", "\"Export.json\"\nfiles", ":7:8: ", "not manifest.json"),
            ("[\"raw/*.csv\"]", "[]", ":8:9: ", "at least one glob"),
            ("[\"raw/*.csv\"]", "\"raw/*.csv\"", ":8:9: ", "wanted: a list"),
            ("\"text\"", "\"cvs\"", ":9:10: ", "jsonl, parquet, arrow, text"),
            ("\"text\"", "\"parqet\"", ":9:10: ", "did you mean `parquet`?"),
            ("\"meta.id\"", "\"meta.\"", ":14:6: ", "joined by dots"),
            ("\"clean\"", "\"claen\"", ":16:8: ", "did you mean `clean`?"),
            (
                "\"clean\"",
                "\"clean\"\nunicode = \"NFD\"",
                ":17:11: ",
                "wanted: \"NFC\", \"NFKC\" or false",
            ),
            (
                "\"clean\"",
                "\"length\"\nmin_bytes = -1",
                ":17:13: ",
                "`min_bytes` cannot have this value",
            ),
            ("\"clean\"", "\"length\"\nmin_words = 0.5", ":17:13: ", "a whole number from 0 to"),
            (
                "\"clean\"",
                "\"gopher-quality\"\nmax_symbols = -0.1",
                ":17:15: ",
                "a share of at least 0",
            ),
            ("\"clean\"", "\"length\"\nmin_bytes = 1e400", ":17:13: ", "`min_bytes` is too large"),
            (
                "\"clean\"",
                "\"length\"\nmin_bytes = 18446744073709551616",
                ":17:13: ",
                "`min_bytes` ",
            ),
            ("sources = [\"web\"]", "sources = [\"wed\"]", ":17:11: ", "did you mean `web`?"),
        ];
        for (from, to, place, help) in cases {
            assert!(WHOLE.contains(from), "{from}");
            let file = File::new("corpus.toml", WHOLE.replacen(from, to, 1));
            let told = Spec::parse(&file).map(drop).unwrap_err().to_string();
            assert!(told.contains(&format!("corpus.toml{place}")), "{to}: {told}");
            assert!(told.contains(help), "{to}: {told}");
        }
    }
}
