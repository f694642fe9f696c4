//! Checks of output places: no output may lie inside an earlier output, whose readers would find it there.

use std::path::Path;
use std::{env, fs};

use contract::{Fault, Result};
use store::{Location, open};

/// Names of a complete output, each with two files that identify it.
const WHOLE: [(&str, &str, &str); 2] = [
    ("a store", open::MANIFEST, open::MANIFEST_SUM),
    ("an export", "export.json", open::TOKENIZER),
];

/// Entries at the top of a repository.
const REPOSITORY: [&str; 4] = [".git", ".hg", ".jj", ".svn"];

/// Refuses a folder that is shared with other things: the root of the file system, a home folder that is not empty, the
/// top of a repository.
pub fn refuse_shared(place: &Location) -> Result<()> {
    // A folder that does not exist is new.
    let Some(real) = place.local().and_then(|path| fs::canonicalize(path).ok()) else {
        return Ok(());
    };
    let home = env::home_dir().and_then(|home| fs::canonicalize(home).ok());
    let is_empty = || fs::read_dir(&real).is_ok_and(|mut entries| entries.next().is_none());
    let what = if real.parent().is_none() {
        "the root of the file system"
    } else if home.as_ref() == Some(&real) && !is_empty() {
        "a home folder"
    } else if REPOSITORY.iter().any(|name| real.join(name).exists()) {
        "the top of a repository"
    } else {
        return Ok(());
    };
    Err(Fault::usage(format!("this place is {what}"))
        .at(place.to_string())
        .wanted("a folder for nothing else")
        .hint("name a new folder in it"))
}

/// Refuses a place inside a store or an export, local or in a bucket, and one that is shared with other things.
pub fn refuse_inside(place: &Location) -> Result<()> {
    refuse_shared(place)?;
    let mut above = match place {
        Location::Local(path) => {
            let whole =
                std::path::absolute(path).map_err(|error| Fault::io("find", path, &error))?;
            let there = whole.ancestors().skip(1).find(|above| above.exists());
            // Links are resolved.
            let there = there.map(|there| fs::canonicalize(there).unwrap_or(there.to_owned()));
            Location::Local(there.unwrap_or_default())
        }
        Location::Object(_) => place.folder(),
    };
    loop {
        // Without permission to look here, the next operation reports the error.
        let has = |name: &str| matches!(above.join(name).is_file(), Ok(true));
        if let Some((what, ..)) = WHOLE.iter().find(|(_, one, other)| has(one) && has(other)) {
            return Err(Fault::usage(format!("this place lies in {what}"))
                .at(place.to_string())
                .found(format!("{what} at {above}"))
                .wanted("a place of its own")
                .hint("name another place"));
        }
        let is_first = match &above {
            Location::Local(path) => path.parent().is_none_or(|it| it == Path::new("")),
            Location::Object(object) => object.address().key().is_empty(),
        };
        if is_first {
            return Ok(());
        }
        above = above.folder();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::Class;

    #[test]
    fn nothing_is_made_where_many_things_are() {
        let folder = tempfile::tempdir().unwrap();
        let place = Location::Local(folder.path().to_owned());
        refuse_shared(&place).unwrap();
        for name in REPOSITORY {
            let mark = folder.path().join(name);
            fs::write(&mark, "").unwrap();
            let fault = refuse_shared(&place).unwrap_err();
            assert!(fault.to_string().contains("the top of a repository"), "{fault}");
            refuse_shared(&place.join("new")).unwrap();
            fs::remove_file(mark).unwrap();
        }
        for root in ["/", "/..", "/usr/.."] {
            let fault = refuse_inside(&Location::Local(root.into())).unwrap_err();
            assert_eq!(fault.class(), Class::Usage, "{fault}");
        }
    }

    #[test]
    fn nothing_is_made_in_a_store_or_an_export() {
        let folder = tempfile::tempdir().unwrap();
        for (_, one, other) in WHOLE {
            let made = folder.path().join(one);
            fs::create_dir(&made).unwrap();
            for place in ["new", "deep/new"] {
                let place = Location::Local(made.join(place));
                refuse_inside(&place).unwrap();
                for name in [one, other] {
                    refuse_inside(&place).unwrap();
                    fs::write(made.join(name), "").unwrap();
                }
                let fault = refuse_inside(&place).unwrap_err();
                assert_eq!(fault.class(), Class::Usage, "{fault}");
                for name in [one, other] {
                    fs::remove_file(made.join(name)).unwrap();
                }
            }
        }
        // Other checks handle the place itself.
        fs::write(folder.path().join("deep"), "").unwrap();
        refuse_inside(&Location::Local(folder.path().join("deep"))).unwrap();
    }
}
