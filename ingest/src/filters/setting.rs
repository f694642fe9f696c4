//! Settings of steps: read from TOML as text and shown canonically, so that neither floats nor spelling affect data.

use contract::framed::quoted;
use contract::{Fault, Ratio, Result};
use settings::{File, Spanned, Table, Value};

use super::Dropped;

/// The settings of one step, as written.
pub(crate) struct Settings<'a> {
    /// The corpus file.
    pub(crate) file: &'a File,
    /// The step's table.
    pub(crate) table: &'a Table,
}

impl<'a> Settings<'a> {
    /// The value of a key, if it is there.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Spanned<Value>> {
        self.table.get(key)
    }

    /// Refuses keys other than `known`; `what` has these.
    pub(crate) fn only(&self, what: &str, known: &[&str]) -> Result<()> {
        let unknown = self.table.keys().find(|key| !known.contains(&key.get_ref().as_str()));
        unknown.map_or(Ok(()), |key| Err(self.file.unknown_key(key, what, known.iter().copied())))
    }

    /// The strings of a list, which may not be empty.
    pub(crate) fn texts(&self, key: &str, list: &Spanned<Value>) -> Result<Vec<String>> {
        let texts = list.get_ref().as_array().and_then(|list| {
            list.iter().map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        });
        texts
            .filter(|texts| !texts.is_empty())
            .ok_or_else(|| self.file.wrong(key, list, "a list of strings, at least one"))
    }

    /// A setting; `default` is written as users would write it.
    pub(crate) fn read<T: Setting>(&self, key: &str, default: &str) -> Result<T> {
        let Some(value) = self.get(key) else {
            let wrong = || Fault::bug(format!("the default of `{key}` is wrong"));
            return T::parse(default).ok_or_else(wrong);
        };
        let plain = !matches!(value.get_ref(), Value::Array(_) | Value::Table(_));
        let read = plain.then(|| T::parse(self.file.plain(value))).flatten();
        read.ok_or_else(|| self.file.wrong(key, value, &T::wanted()))
    }
}

/// A value that affects what a step does.
pub(crate) trait Setting: Sized {
    /// What is wanted, for error messages.
    const WANTED: &'static str;

    /// The same for a rule that can be switched off.
    fn wanted() -> String {
        Self::WANTED.to_owned()
    }

    /// Reads the text of a TOML value, without quotes.
    fn parse(text: &str) -> Option<Self>;

    /// The canonical spelling, which enters the identity of a store.
    fn show(&self) -> String;
}

/// A value that is read and shown as Rust does.
macro_rules! setting {
    ($type:ty, $wanted:literal, $plain:expr) => {
        impl Setting for $type {
            const WANTED: &'static str = $wanted;

            fn parse(text: &str) -> Option<Self> {
                $plain(text).parse().ok()
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    };
}

setting!(u64, "a whole number from 0 to 18446744073709551615", |text: &str| text.replace('_', ""));
setting!(bool, "true or false", str::to_owned);
setting!(Ratio, "a share of at least 0: a decimal or \"3/10\"", str::to_owned);

impl Setting for String {
    const WANTED: &'static str = "a string";

    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }

    fn show(&self) -> String {
        quoted(self)
    }
}

/// A rule with a threshold, which `false` switches off.
impl<T: Setting> Setting for Option<T> {
    const WANTED: &'static str = T::WANTED;

    fn wanted() -> String {
        let off = ", or false to switch the rule off";
        format!("{}{}", T::WANTED, if T::WANTED.ends_with("false") { "" } else { off })
    }

    fn parse(text: &str) -> Option<Self> {
        if text == "false" { Some(None) } else { T::parse(text).map(Some) }
    }

    fn show(&self) -> String {
        self.as_ref().map_or("off".to_owned(), T::show)
    }
}

/// Declares a step: its name in `corpus.toml`, its version, which must increase when the output for the same input
/// changes (checked by `versions`), and its settings with their defaults as users would write them.
macro_rules! step {
    ($(#[$doc:meta])* $name:ident = $step:literal version $version:literal {
        $($(#[$field_doc:meta])* $field:ident: $kind:ty = $default:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: $kind,)*
        }

        impl $name {
            /// Its name in `corpus.toml`.
            pub(crate) const NAME: &'static str = $step;

            /// The settings it knows.
            pub(crate) const KEYS: &'static [&'static str] = &[$(stringify!($field)),*];

            /// Reads the settings; those that are not there have their defaults.
            pub(crate) fn read(
                settings: &$crate::filters::setting::Settings<'_>,
            ) -> contract::Result<Self> {
                Ok($name { $($field: settings.read(stringify!($field), $default)?,)* })
            }

            /// The step as canonical text: every setting, in this order.
            pub(crate) fn describe(&self) -> String {
                let mut text = concat!($step, " v", $version).to_owned();
                $(
                    text += concat!(" ", stringify!($field), "=");
                    text += &$crate::filters::setting::Setting::show(&self.$field);
                )*
                text
            }
        }

        #[cfg(test)]
        impl Default for $name {
            fn default() -> Self {
                use $crate::filters::setting::Setting as _;
                $name { $($field: <$kind>::parse($default).unwrap(),)* }
            }
        }
    };
}

/// Declares an enum of several steps.
macro_rules! one_of {
    ($(#[$doc:meta])* $name:ident { $($step:ident($settings:ty),)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) enum $name {
            $($step($settings),)*
        }

        impl $name {
            /// The step as canonical text.
            pub(crate) fn describe(&self) -> String {
                match self {
                    $($name::$step(step) => step.describe(),)*
                }
            }

            /// Its name in `corpus.toml`.
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $($name::$step(_) => <$settings>::NAME,)*
                }
            }
        }
    };
}

pub(crate) use {one_of, step};

/// Dropped for `reason` if `number` is less than the limit.
pub(crate) fn fewer(limit: Option<u64>, number: usize, reason: &'static str) -> Option<Dropped> {
    let broken = limit.is_some_and(|limit| (number as u64) < limit);
    broken.then(|| Dropped::new(reason, number))
}

/// Dropped for `reason` if `number` is more than the limit.
pub(crate) fn more(limit: Option<u64>, number: usize, reason: &'static str) -> Option<Dropped> {
    let broken = limit.is_some_and(|limit| number as u64 > limit);
    broken.then(|| Dropped::new(reason, number))
}

/// Dropped for `reason` if `part` of `whole` is less than the limit, exactly.
pub(crate) fn below(
    limit: Option<Ratio>,
    part: usize,
    whole: usize,
    reason: &'static str,
) -> Option<Dropped> {
    limit.filter(|limit| times(part, limit.den()) < times(whole, limit.num()))?;
    Some(Dropped::new(reason, share(part, whole)))
}

/// Dropped for `reason` if `part` of `whole` is more than the limit, exactly. Zero of zero is never more.
pub(crate) fn above(
    limit: Option<Ratio>,
    part: usize,
    whole: usize,
    reason: &'static str,
) -> Option<Dropped> {
    limit.filter(|limit| times(part, limit.den()) > times(whole, limit.num()))?;
    Some(Dropped::new(reason, share(part, whole)))
}

fn times(number: usize, factor: u64) -> u128 {
    number as u128 * u128::from(factor)
}

/// A share in readable form.
fn share(part: usize, whole: usize) -> String {
    format!("{:.3}", part as f64 / whole.max(1) as f64)
}
