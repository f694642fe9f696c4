//! `--options FILE`: flags of a run in a file that a team keeps with its curriculum.

use std::ffi::OsString;
use std::path::Path;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, Command, CommandFactory as _, Parser as _};
use contract::{Fault, Result};
use settings::{File, Spanned, Table, Value};

use crate::Cli;

/// Flags that no options file gives: the first decides what is trained.
const TYPED: [&str; 2] = ["curriculum", "options"];

/// The command line read again with the flags of `path`, and the text of that file. A flag that was typed has
/// precedence.
pub(crate) fn with_file(path: &Path, typed: Vec<OsString>) -> Result<(Cli, String)> {
    let bytes = std::fs::read(path).map_err(|error| Fault::io("read", path, &error))?;
    let file = File::from_bytes(path.display().to_string(), bytes)?;
    let keys: Table = file.parse()?;
    let whole = Cli::command();
    let supervises = typed.get(1).is_some_and(|word| word == "supervise");
    let at = 1 + usize::from(supervises);
    // A supervisor has every flag of a run; its ranks read the same file.
    let all_known = whole.find_subcommand("supervise").map_or(Vec::new(), known);
    let own = known(&whole);
    let matches = whole.clone().get_matches_from(&typed);
    let matches = matches.subcommand_matches("supervise").unwrap_or(&matches);
    let mut all = typed[..at].to_vec();
    for (key, value) in &keys {
        let Some((name, flag)) = all_known.iter().find(|(name, _)| name == key.get_ref()) else {
            return Err(unknown(&file, key, &all_known));
        };
        let words = words(&file, name, flag, value, path.parent().unwrap_or(Path::new("")))?;
        let is_own = supervises || own.iter().any(|(own, _)| own == name);
        let source = |flag: &Arg| matches.value_source(flag.get_id().as_str());
        if is_own && source(flag) != Some(ValueSource::CommandLine) {
            all.extend(words);
        }
    }
    all.extend_from_slice(&typed[at..]);
    let read = Cli::try_parse_from(all);
    read.map(|cli| (cli, file.text().to_owned())).map_err(|refusal| refused(&file, &keys, &refusal))
}

/// The flags of a command that a file may give, by their names.
fn known(command: &Command) -> Vec<(&str, &Arg)> {
    let named = command.get_arguments().filter(|flag| !flag.is_hide_set());
    let named = named.filter_map(|flag| Some((flag.get_long()?, flag)));
    named.filter(|(name, _)| !TYPED.contains(name)).collect()
}

fn unknown(file: &File, key: &Spanned<String>, known: &[(&str, &Arg)]) -> Fault {
    match TYPED.contains(&key.get_ref().as_str()) {
        true => file
            .fault(key, format!("an options file cannot say `{}`", key.get_ref()))
            .wanted(format!("--{} on the command line", key.get_ref())),
        false => file.unknown_key(key, "", known.iter().map(|(name, _)| *name)),
    }
}

/// The flag `name` as it would be typed. A relative path is one from the folder of the file.
fn words(
    file: &File,
    name: &str,
    flag: &Arg,
    value: &Spanned<Value>,
    folder: &Path,
) -> Result<Vec<OsString>> {
    let of_flag =
        flag.get_value_names().and_then(<[_]>::first).map_or("VALUE", |name| name.as_str());
    let is_path = ["FILE", "PLACE", "RUN"].contains(&of_flag);
    let word = |value: &Value| {
        let text = match value {
            // An empty name is refused as it is when it is typed.
            Value::String(text) if is_path && !text.is_empty() && !text.contains("://") => {
                folder.join(text).into()
            }
            Value::String(text) => text.into(),
            Value::Integer(_) | Value::Float(_) => value.to_string().into(),
            _ => return None,
        };
        let mut word = OsString::from(format!("--{name}="));
        word.push::<OsString>(text);
        Some(word)
    };
    let words = match (value.get_ref(), flag.get_action()) {
        (Value::Boolean(on), ArgAction::SetTrue) => {
            Some(on.then(|| format!("--{name}").into()).into_iter().collect())
        }
        (_, ArgAction::SetTrue) => None,
        (Value::Array(all), ArgAction::Append) => all.iter().map(word).collect(),
        (one, _) => word(one).map(|word| vec![word]),
    };
    words.ok_or_else(|| match flag.get_action() {
        ArgAction::SetTrue => file.wrong(name, value, "true or false"),
        _ => file.wrong(name, value, &format!("what --{name} takes: {of_flag}")),
    })
}

/// What a flag of the file is refused for, at its place.
fn refused(file: &File, keys: &Table, refusal: &clap::Error) -> Fault {
    let text = refusal.render().to_string();
    let what = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    let flag = match refusal.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) => flag.trim_start_matches("--").split(' ').next(),
        _ => None,
    };
    let value = flag.and_then(|flag| keys.iter().find(|(key, _)| key.get_ref() == flag));
    let place = value.map_or(file.name().to_owned(), |(_, value)| file.place(value.span()));
    Fault::usage(what).at(place).hint("`ztrain --help` lists the flags")
}
