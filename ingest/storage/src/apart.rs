//! A place of its own: what is made here lies in nothing that was made before, whose reader would find it there.

use std::fs;
use std::path::Path;

use contract::{Fault, Result};
use store::{Location, open};

/// What is made whole, and two names that it holds.
const WHOLE: [(&str, &str, &str); 2] = [
    ("a store", open::MANIFEST, open::MANIFEST_SUM),
    ("an export", "export.json", open::TOKENIZER),
];

/// Refuses a place inside a store or an export, here or in a bucket.
pub fn refuse_inside(place: &Location) -> Result<()> {
    let mut above = match place {
        Location::Local(path) => {
            let whole =
                std::path::absolute(path).map_err(|error| Fault::io("find", path, &error))?;
            let there = whole.ancestors().skip(1).find(|above| above.exists());
            // Whatever links lead there.
            let there = there.map(|there| fs::canonicalize(there).unwrap_or(there.to_owned()));
            Location::Local(there.unwrap_or_default())
        }
        Location::Object(_) => place.folder(),
    };
    loop {
        // Whoever may not look there learns it from what is done next.
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
        // The place itself is for others to judge.
        fs::write(folder.path().join("deep"), "").unwrap();
        refuse_inside(&Location::Local(folder.path().join("deep"))).unwrap();
    }
}
