//! The secret key of a run: where ranks find it.
//!
//! ```text
//! --nproc                  a random key for each start, in the environment of the ranks
//! ZTRAIN_RUN_KEY           the text itself
//! ZTRAIN_RUN_KEY_FILE      the name of a file that contains it and that only its owner can read
//! neither                  no key on one machine, over loopback; an error elsewhere
//! ```
//!
//! It is never printed or written to disk.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;

use contract::{Fault, Result};
use kernels::group::{RunKey, is_loopback};

/// The variable with the key.
pub(super) const KEY: &str = "ZTRAIN_RUN_KEY";

/// The variable with the name of the key file.
pub(super) const KEY_FILE: &str = "ZTRAIN_RUN_KEY_FILE";

/// Shorter keys can be guessed.
const SHORTEST: usize = 16;

/// A longer file is not a key.
const LONGEST: u64 = 4096;

/// How to make a key.
const HINT: &str = "make one with `(umask 077; head -c 32 /dev/urandom | base64 > run.key)`, where all ranks see it or \
     copied to each machine, and export ZTRAIN_RUN_KEY_FILE with its name";

/// The key of a rank that meets the others at `host`. `variable` reads the environment.
pub(super) fn run_key(variable: &impl Fn(&str) -> Option<String>, host: &str) -> Result<RunKey> {
    let (text, name) = match (variable(KEY), variable(KEY_FILE)) {
        (Some(text), _) => (text, KEY.to_owned()),
        (None, Some(path)) => (read(&path)?, path),
        (None, None) if is_loopback(host) => return Ok(RunKey::default()),
        (None, None) => {
            return Err(Fault::usage(
                "ranks on several machines need a key that they prove to each other",
            )
            .at(KEY_FILE)
            .found(format!("neither {KEY} nor {KEY_FILE}"))
            .wanted("the same secret for every rank")
            .hint(HINT));
        }
    };
    let text = text.trim();
    if text.len() < SHORTEST {
        // Not even a rejected key is shown.
        return Err(Fault::usage("the run's key is too short")
            .at(name)
            .found(format!("{} bytes", text.len()))
            .wanted(format!("at least {SHORTEST}"))
            .hint(HINT));
    }
    Ok(RunKey::of(text))
}

/// Reads the file at `path`, which only its owner may be able to read.
fn read(path: &str) -> Result<String> {
    let failed = |error: std::io::Error| {
        Fault::usage(format!("cannot read the run's key: {error}")).at(path).hint(HINT)
    };
    let file = File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(Fault::usage("others may read the run's key")
            .at(path)
            .found(format!("mode {mode:03o}"))
            .wanted("mode 600 or 400")
            .hint(format!("chmod 600 {path}; if others had access to it, make a new one")));
    }
    let mut text = String::new();
    let read = file.take(LONGEST + 1).read_to_string(&mut text).map_err(failed)?;
    if read as u64 > LONGEST {
        return Err(Fault::usage("this file is too long for a run's key")
            .at(path)
            .wanted(format!("at most {LONGEST} bytes"))
            .hint(HINT));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::Class;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt as _;

    const SECRET: &str = "a secret of twenty-five...";

    fn found(environment: &[(&str, &str)], host: &str) -> Result<RunKey> {
        let read = |name: &str| {
            let entry = environment.iter().find(|(key, _)| *key == name);
            entry.map(|(_, value)| (*value).to_owned())
        };
        run_key(&read, host)
    }

    #[test]
    fn one_machine_needs_no_key_and_several_do() {
        for here in ["127.0.0.1", "localhost", "::1"] {
            assert!(found(&[], here).unwrap().is_none());
        }
        for there in ["node7", "10.0.0.1"] {
            let fault = found(&[], there).unwrap_err();
            assert_eq!(fault.class(), Class::Usage);
            assert!(fault.to_string().contains("ZTRAIN_RUN_KEY_FILE"), "{fault}");
            assert!(found(&[(KEY, SECRET)], there).unwrap() == RunKey::of(SECRET));
        }
        let short = found(&[(KEY, "hunter2")], "node7").unwrap_err().to_string();
        assert!(short.contains("too short") && !short.contains("hunter2"), "{short}");
    }

    #[test]
    fn a_file_that_others_may_read_holds_no_secret() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("run.key");
        let name = path.to_str().unwrap();
        assert_eq!(found(&[(KEY_FILE, name)], "node7").unwrap_err().class(), Class::Usage);
        write(&path, format!("{SECRET}\n")).unwrap();
        for (mode, well) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            match found(&[(KEY_FILE, name)], "127.0.0.1") {
                Ok(key) => assert!(well && key == RunKey::of(SECRET), "{mode:o}"),
                Err(fault) => {
                    assert!(!well && fault.class() == Class::Usage, "{mode:o}");
                    let said = fault.to_string();
                    assert!(said.contains(&format!("mode {mode:o}")), "{said}");
                    assert!(!said.contains(SECRET), "{said}");
                }
            }
        }
        assert!(found(&[(KEY, SECRET), (KEY_FILE, "nowhere")], "node7").is_ok());
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        write(&path, "x".repeat(5000)).unwrap();
        let long = found(&[(KEY_FILE, name)], "node7").unwrap_err().to_string();
        assert!(long.contains("too long"), "{long}");
    }
}
