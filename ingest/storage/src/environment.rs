//! The variables of the environment, and the folder of the cache that they name.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Error, ErrorKind, Result};
use std::path::PathBuf;

use store::location::UrlScheme;

/// The variables of a process, or those of a test.
#[derive(Clone, Debug)]
pub(super) struct Environment(pub(super) BTreeMap<String, OsString>);

/// The folder of cached copies, of this process.
pub(super) fn cache_folder() -> Result<PathBuf> {
    Environment::here().cache_folder()
}

impl Environment {
    /// The variables of this process.
    pub(super) fn here() -> Self {
        let named = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value));
        Environment(std::env::vars_os().filter_map(named).collect())
    }

    /// Some variables.
    #[cfg(test)]
    pub(super) fn of(variables: &[(&str, &str)]) -> Self {
        let variables = variables.iter();
        Environment(variables.map(|(name, value)| ((*name).to_owned(), value.into())).collect())
    }

    /// The folder of cached copies.
    pub(super) fn cache_folder(&self) -> Result<PathBuf> {
        if let Some(folder) = self.0.get("ZDATA_CACHE") {
            let shown = folder.to_string_lossy();
            if shown.is_empty() || UrlScheme::of(&shown).is_some() {
                return Err(wrong("ZDATA_CACHE", &shown, "a folder of this machine"));
            }
            return Ok(PathBuf::from(folder));
        }
        let root = self.0.get("XDG_CACHE_HOME").map(PathBuf::from);
        let home = || Some(PathBuf::from(self.0.get("HOME")?).join(".cache"));
        let root = root.or_else(home).ok_or_else(|| refused("HOME is not set: set ZDATA_CACHE"))?;
        Ok(root.join("ztrain").join("objects"))
    }
}

pub(super) fn wrong(name: &str, value: &str, wanted: &str) -> Error {
    refused(format!("{name} is {value:?}, wanted {wanted}"))
}

pub(super) fn refused(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, what.into())
}
