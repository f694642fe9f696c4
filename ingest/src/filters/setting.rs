//! Settings of steps: read from TOML as written, shown canonically, so that no float and no spelling decides data.

use contract::Ratio;

/// A value that decides what a step does.
pub(crate) trait Setting: Sized {
    /// What a wrong value is answered with.
    const WANTED: &'static str;

    /// Reads the text of a TOML value, without quotes.
    fn parse(text: &str) -> Option<Self>;

    /// The one spelling that enters the identity of a store.
    fn show(&self) -> String;
}

impl Setting for u64 {
    const WANTED: &'static str = "a whole number";

    fn parse(text: &str) -> Option<Self> {
        text.replace('_', "").parse().ok()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for bool {
    const WANTED: &'static str = "true or false";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for Ratio {
    const WANTED: &'static str = "a share: a decimal or \"3/10\"";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for String {
    const WANTED: &'static str = "a string";

    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }

    fn show(&self) -> String {
        format!("{self:?}")
    }
}

/// A rule with a threshold, which `false` switches off.
impl<T: Setting> Setting for Option<T> {
    const WANTED: &'static str = "a number, or false to switch the rule off";

    fn parse(text: &str) -> Option<Self> {
        if text == "false" { Some(None) } else { T::parse(text).map(Some) }
    }

    fn show(&self) -> String {
        self.as_ref().map_or("off".to_owned(), T::show)
    }
}

/// Declares a step: its name in `corpus.toml`, and its settings with their defaults as a person would write them.
macro_rules! step {
    ($(#[$doc:meta])* $name:ident = $step:literal {
        $($(#[$field_doc:meta])* $field:ident: $kind:ty = $default:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: $kind,)*
        }

        impl $name {
            /// The settings it knows.
            pub(crate) const KEYS: &'static [&'static str] = &[$(stringify!($field)),*];

            /// Reads the settings; those that are not there have their defaults.
            pub(crate) fn read(keys: &$crate::corpus::Keys<'_>) -> contract::Result<Self> {
                Ok($name { $($field: keys.setting(stringify!($field), $default)?,)* })
            }

            /// The step as canonical text: every setting, in this order.
            pub(crate) fn describe(&self) -> String {
                let mut text = $step.to_owned();
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

pub(crate) use step;

/// Whether `part` of `whole` is more than `limit`, exactly. Nothing of nothing is no more than anything.
pub(crate) fn above(part: usize, whole: usize, limit: Ratio) -> bool {
    part as u128 * u128::from(limit.den()) > u128::from(limit.num()) * whole as u128
}

/// Whether `part` of `whole` is less than `limit`, exactly.
pub(crate) fn below(part: usize, whole: usize, limit: Ratio) -> bool {
    part as u128 * u128::from(limit.den()) < u128::from(limit.num()) * whole as u128
}

/// A share as a person reads it.
pub(crate) fn share(part: usize, whole: usize) -> String {
    format!("{:.3}", part as f64 / whole.max(1) as f64)
}
