//! Jinja as Hugging Face `transformers` configures it for chat templates: Python's string and dictionary methods,
//! Python's JSON, `raise_exception` and `strftime_now`.

use std::fmt::{self, Write as _};
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

/// The function with which a template asks for the date.
const CLOCK: &str = "strftime_now";

/// A date, for templates that ask for today's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Date {
    year: u32,
    month: u32,
    day: u32,
}

const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

const MONTHS: [(&str, u32); 12] = [
    ("January", 31),
    ("February", 28),
    ("March", 31),
    ("April", 30),
    ("May", 31),
    ("June", 30),
    ("July", 31),
    ("August", 31),
    ("September", 30),
    ("October", 31),
    ("November", 30),
    ("December", 31),
];

impl Date {
    /// Reads `2024-07-26`.
    pub(crate) fn parse(written: &str) -> Option<Date> {
        let plain = |(at, byte): (usize, u8)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        };
        let fits = written.len() == 10 && written.bytes().enumerate().all(plain);
        let number = |range: Range<usize>| written.get(range)?.parse::<u32>().ok();
        let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
        let date = Date { year, month, day };
        (fits && year > 0 && (1..=12).contains(&month) && day > 0 && day <= date.days_in(month))
            .then_some(date)
    }

    fn days_in(self, month: u32) -> u32 {
        let leap = self.year.is_multiple_of(4)
            && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400));
        MONTHS[month as usize - 1].1 + u32::from(month == 2 && leap)
    }

    /// Its day of the year, from 1.
    fn day_of_year(self) -> u32 {
        (1..self.month).map(|month| self.days_in(month)).sum::<u32>() + self.day
    }

    /// The weekday, counted from Monday; 1 January of the year 1 was a Monday.
    fn weekday(self) -> usize {
        let past = self.year - 1;
        let days = past * 365 + past / 4 - past / 100 + past / 400 + self.day_of_year() - 1;
        (days % 7) as usize
    }

    /// Formats its midnight as C's and Python's `strftime` do.
    fn format(self, format: &str) -> Result<String, String> {
        let Date { year, month, day } = self;
        let name = MONTHS[month as usize - 1].0;
        let weekday = DAYS[self.weekday()];
        let (mut out, mut rest) = (String::new(), format.chars());
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let directive = rest.next();
            let written = match directive {
                Some('Y') => write!(out, "{year}"),
                Some('y') => write!(out, "{:02}", year % 100),
                Some('m') => write!(out, "{month:02}"),
                Some('d') => write!(out, "{day:02}"),
                Some('e') => write!(out, "{day:2}"),
                Some('j') => write!(out, "{:03}", self.day_of_year()),
                Some('F') => write!(out, "{self}"),
                Some('B') => write!(out, "{name}"),
                Some('b' | 'h') => write!(out, "{}", &name[..3]),
                Some('A') => write!(out, "{weekday}"),
                Some('a') => write!(out, "{}", &weekday[..3]),
                Some('H' | 'M' | 'S') => write!(out, "00"),
                Some('I') => write!(out, "12"),
                Some('p') => write!(out, "AM"),
                Some('%') => write!(out, "%"),
                other => {
                    let found: String = other.into_iter().collect();
                    return Err(format!("{CLOCK}: %{found} is not known here"));
                }
            };
            written.map_err(|error| error.to_string())?;
        }
        Ok(out)
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

/// Parsed templates.
pub(crate) struct Templates(Environment<'static>);

impl Templates {
    /// Parses templates, each under its name.
    pub(crate) fn new<'a>(
        templates: impl IntoIterator<Item = (&'a str, &'a str)>,
        date: Option<Date>,
    ) -> Result<Templates, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(told)?);
        environment.set_unknown_method_callback(method);
        environment.set_formatter(|out, state, value| match float(value) {
            Some(text) => Ok(out.write_str(&text)?),
            None => escape_formatter(out, state, value),
        });
        environment.add_filter("trim", |text: &Value, chars: Option<&str>| {
            stripped(&text.to_string(), chars, [true; 2]).to_owned()
        });
        environment.add_filter("tojson", to_json);
        // In Python a string is a sequence, and a dictionary passes the test too.
        environment.add_test("sequence", |value: &Value| {
            matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
        });
        environment.add_test("iterable", |value: &Value| {
            value.kind() == ValueKind::String || !value.is_none() && value.try_iter().is_ok()
        });
        environment.add_function("raise_exception", |why: String| -> Result<Value, Error> {
            Err(refused(why))
        });
        if let Some(date) = date {
            environment
                .add_function(CLOCK, move |format: &str| date.format(format).map_err(refused));
        }
        for (name, text) in templates {
            let text = without_marks(&text.replace("\r\n", "\n").replace('\r', "\n"));
            environment.add_template_owned(name.to_owned(), text).map_err(told)?;
        }
        Ok(Templates(environment))
    }

    /// Whether a template may read a variable that it does not set.
    pub(crate) fn asks(&self, variable: &str) -> bool {
        self.0
            .templates()
            .any(|(_, template)| template.undeclared_variables(false).contains(variable))
    }

    /// Whether a template may ask for the date.
    pub(crate) fn asks_for_date(&self) -> bool {
        self.asks(CLOCK)
    }

    /// Renders a template with these variables.
    pub(crate) fn render(&self, name: &str, variables: Value) -> Result<String, String> {
        let template = self.0.get_template(name).map_err(told)?;
        template.render(variables).map_err(told)
    }
}

fn refused(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// The error, with its line.
fn told(error: Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("line {line}: {what}"),
        None => what,
    }
}

/// A template without `{% generation %}` and `{% endgeneration %}`, which mark what a model is trained on: they are
/// specific to `transformers`, and do not change the text.
fn without_marks(template: &str) -> String {
    let mut out = String::new();
    let mut rest = template;
    while let Some(at) = rest.find("{%") {
        let (before, from) = rest.split_at(at);
        out += before;
        let Some(end) = from.find("%}") else { return out + from };
        let (tag, after) = from.split_at(end);
        let word = tag[2..].trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        out += &match word {
            "generation" => tag.replacen(word, "if true", 1),
            "endgeneration" => tag.replacen(word, "endif", 1),
            _ => tag.to_owned(),
        };
        rest = after;
    }
    out + rest
}

/// A Python method that Jinja calls.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let ends = match name {
        "strip" => [true, true],
        "lstrip" => [true, false],
        "rstrip" => [false, true],
        _ => return unknown_method_callback(state, value, name, args),
    };
    match (value.as_str(), args) {
        (Some(text), []) => Ok(stripped(text, None, ends).into()),
        (Some(text), [chars]) if chars.is_none() => Ok(stripped(text, None, ends).into()),
        (Some(text), [chars]) if chars.as_str().is_some() => {
            Ok(stripped(text, chars.as_str(), ends).into())
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// Strips these characters, or Python's white space, from the selected ends of a text.
fn stripped<'a>(text: &'a str, chars: Option<&str>, [left, right]: [bool; 2]) -> &'a str {
    let goes = |c: char| match chars {
        Some(chars) => chars.contains(c),
        None => c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c),
    };
    let text = if left { text.trim_start_matches(goes) } else { text };
    if right { text.trim_end_matches(goes) } else { text }
}

/// A float in Python's format: the shortest digits that identify it, and an exponent with a sign and two digits.
fn float(value: &Value) -> Option<String> {
    let number = (value.is_number() && !value.is_integer()).then(|| f64::try_from(value.clone()));
    let text = format!("{:?}", number?.ok()?);
    Some(match text.split_once('e') {
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
        None => text,
    })
}

/// The options of `json.dumps`.
struct Style {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

/// `json.dumps`, as the filter `tojson` of `transformers` calls it.
fn to_json(value: &Value, rest: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    if !rest.is_empty() {
        return Err(refused("tojson: an argument needs its name, like indent=4".to_owned()));
    }
    let flag = |name| Ok::<_, Error>(named.get::<Option<bool>>(name)?.unwrap_or(false));
    let indent = match named.get::<Option<Value>>("indent")?.filter(|value| !value.is_none()) {
        None => None,
        Some(value) => Some(match (value.as_str(), value.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(spaces @ 0..=64)) => " ".repeat(spaces),
            _ => {
                return Err(refused(
                    "tojson: an indent is a text, or at most 64 spaces".to_owned(),
                ));
            }
        }),
    };
    let (mut item, mut key) =
        (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
    if let Some(both) = named.get::<Option<Vec<String>>>("separators")? {
        let [one, other] = <[String; 2]>::try_from(both)
            .map_err(|_| refused("tojson: separators are two texts".to_owned()))?;
        (item, key) = (one, other);
    }
    let style =
        Style { ascii: flag("ensure_ascii")?, sorted: flag("sort_keys")?, indent, item, key };
    named.assert_all_used()?;
    let mut out = String::new();
    style.value(value, 1, &mut out)?;
    Ok(out)
}

impl Style {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => *out += "null",
            ValueKind::Bool => *out += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => *out += &float(value).unwrap_or_else(|| value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', &items, depth, out, |item, out| {
                    self.value(item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut members: Vec<(String, Value)> = Vec::new();
                for key in value.try_iter()? {
                    members.push((key.to_string(), value.get_item(&key)?));
                }
                if self.sorted {
                    members.sort_by(|(one, _), (other, _)| one.cmp(other));
                }
                self.list('{', '}', &members, depth, out, |(key, value), out| {
                    self.string(key, out);
                    *out += &self.key;
                    self.value(value, depth + 1, out)
                })?;
            }
            kind => return Err(refused(format!("tojson: JSON has no {kind}"))),
        }
        Ok(())
    }

    fn list<T>(
        &self,
        open: char,
        close: char,
        items: &[T],
        depth: usize,
        out: &mut String,
        put: impl Fn(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                *out += &indent.repeat(depth);
            }
        };
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            *out += if index > 0 { &self.item } else { "" };
            line(depth, out);
            put(item, out)?;
        }
        if !items.is_empty() {
            line(depth - 1, out);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ascii {
            *out += &quoted;
            return;
        }
        let mut units = [0; 2];
        for c in quoted.chars() {
            match c {
                ' '..='~' => out.push(c),
                _ => c.encode_utf16(&mut units).iter().for_each(|unit| {
                    *out += &format!("\\u{unit:04x}");
                }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(template: &str) -> Result<String, String> {
        let templates = Templates::new([("t", template)], Date::parse("2024-07-26"))?;
        let messages = Value::from_pairs([("role", "user"), ("content", "hi")]);
        let variables = [("messages", Value::from(vec![messages])), ("tools", Value::from(()))];
        templates.render("t", Value::from_pairs(variables))
    }

    #[test]
    fn what_is_written_is_what_python_writes() {
        for (template, wanted) in [
            ("{{ none }} {{ true }} {{ 1.0 }} {{ 1e16 }} {{ 1e-5 }}", "None True 1.0 1e+16 1e-05"),
            ("{{ x }}|{{ tools }}|{{ none | trim }}|{{ 'a' ~ none ~ 3 }}", "|None|None|aNone3"),
            ("{{ [1, 'it\\'s', none, {'k': true}] }}", "[1, \"it's\", None, {'k': True}]"),
            (
                "{{ {'b': [1, 'caf\u{e9}<'], 'a': {}} | tojson }}",
                "{\"b\": [1, \"caf\u{e9}<\"], \"a\": {}}",
            ),
            (
                "{{ {'b': [1, '\u{1f600}'], 'a': {}} | tojson(sort_keys=true, ensure_ascii=true, indent=1) }}",
                "{\n \"a\": {},\n \"b\": [\n  1,\n  \"\\ud83d\\ude00\"\n ]\n}",
            ),
            ("{{ [1, [2]] | tojson(separators=(',', ':')) }}", "[1,[2]]"),
            ("{{ '\\x1c a\\x1f'.strip() }}{{ '\\x1c b' | trim }}{{ 'xxc'.lstrip('x') }}", "abc"),
            (
                "{{ 'x y'.split() }} {{ 'A'.lower() }} {{ messages[0].items() | list }}",
                "['x', 'y'] a [('role', 'user'), ('content', 'hi')]",
            ),
            (
                "{{ 'x' is sequence }} {{ 'x' is iterable }} {{ none is iterable }} {{ {} is sequence }}",
                "True True False True",
            ),
            ("  {% if true %}\r\n  a\r\n  {% endif %}\r\nb\r\n", "  a\nb"),
            (
                "{% generation %}a{% endgeneration %}\n {%- generation -%} b {%- endgeneration %}",
                "ab",
            ),
            (
                "{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "012",
            ),
            (
                "{{ strftime_now('%A %d %B %Y, %j; %a %b %y %m %e %H:%M:%S %I%p %F %%') }}",
                "Friday 26 July 2024, 208; Fri Jul 24 07 26 00:00:00 12AM 2024-07-26 %",
            ),
        ] {
            assert_eq!(rendered(template).as_deref(), Ok(wanted), "{template}");
        }
    }

    #[test]
    fn what_python_refuses_is_refused() {
        for (template, word) in [
            ("a\n{{ raise_exception('no such role') }}", "line 2: no such role"),
            ("{{ 'a' + none }}", "+"),
            ("{{ x.y }}", "undefined"),
            ("{{ x | tojson }}", "undefined"),
            ("{{ strftime_now('%Q') }}", "%Q"),
            ("{{ 'a'.no_such() }}", "no_such"),
            ("{{ [] | tojson(4) }}", "indent=4"),
            ("{% if %}", "line 1"),
        ] {
            let why = rendered(template).unwrap_err();
            assert!(why.contains(word), "{template}: {why}");
        }
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        for (day, wanted) in [
            ("2000-02-29", "Tuesday 060"),
            ("1900-03-01", "Thursday 060"),
            ("0001-01-01", "Monday 001"),
            ("2026-11-27", "Friday 331"),
            ("9999-12-31", "Friday 365"),
        ] {
            assert_eq!(Date::parse(day).unwrap().format("%A %j").unwrap(), wanted);
        }
        for wrong in [
            "1900-02-29",
            "2024-13-01",
            "2024-00-01",
            "2024-1-01",
            "+024-01-01",
            "0000-01-01",
            "2024-04-31",
            "2024-04-30T",
            "",
        ] {
            assert_eq!(Date::parse(wrong), None, "{wrong}");
        }
    }
}
