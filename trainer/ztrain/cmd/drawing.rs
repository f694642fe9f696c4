//! Files that a command writes where a person says, most of them pages and plots: where they may be written is found
//! out before anything is computed.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process;

use contract::{Fault, Result};
use store::disk;

/// How a page and a plot of ours begin.
const OURS: [&str; 2] = ["<!doctype html", "<svg"];

/// A place for such a file.
pub(crate) struct Drawing {
    flag: &'static str,
    /// Behind links, so that these stay.
    path: PathBuf,
    /// A device or a pipe, which is written into and never replaced.
    stream: bool,
}

impl Drawing {
    /// The place that `flag` names: a new file in an existing folder, or a page or plot, which is replaced. Any other
    /// file is refused: it may be a ledger.
    pub(crate) fn at(flag: &'static str, path: &Path) -> Result<Drawing> {
        let has_text =
            fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0);
        if has_text && !is_ours(path).map_err(|error| Fault::io("read", path, &error))? {
            return Err(Fault::usage(
                "this file is neither a page nor a plot: writing here would lose it",
            )
            .at(format!("{flag} {}", path.display()))
            .hint("name another file"));
        }
        Drawing::over(flag, path)
    }

    /// The same, whatever stands in a file that is there: the caller has read it and writes it anew.
    pub(crate) fn over(flag: &'static str, path: &Path) -> Result<Drawing> {
        let place = format!("{flag} {}", path.display());
        let there = match fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if fs::symlink_metadata(path).is_ok() {
                    return Err(Fault::usage("this link leads nowhere")
                        .at(place)
                        .hint("name another file"));
                }
                if !disk::folder_of(path).is_dir() {
                    let hint = "make it first, or name a file in another one";
                    return Err(Fault::usage("the folder to write into does not exist")
                        .at(place)
                        .hint(hint));
                }
                return Ok(Drawing { flag, path: path.to_owned(), stream: false });
            }
            there => there.map_err(|error| Fault::io("look at", path, &error).at(&place))?,
        };
        if there.is_dir() {
            return Err(Fault::usage("this is a folder").at(place).wanted("the name of a file"));
        }
        // `/dev/stdout` may be a file that another process has open, so it is not replaced.
        let stream =
            !there.is_file() || ["/dev", "/proc"].iter().any(|held| path.starts_with(held));
        let real = if stream { Ok(path.to_owned()) } else { fs::canonicalize(path) };
        Ok(Drawing {
            flag,
            path: real.map_err(|error| Fault::io("look at", path, &error))?,
            stream,
        })
    }

    /// Where that is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts `text` there: the file is the old one or the new one at any moment.
    pub(crate) fn put(&self, text: &str) -> Result<()> {
        let Drawing { flag, path, stream } = self;
        let written = if *stream {
            let open = fs::OpenOptions::new().write(true).open(path);
            let written = open.and_then(|mut file| file.write_all(text.as_bytes()));
            // A reader that closed the pipe is not an error, as on standard output.
            written.or_else(|error| match error.kind() {
                ErrorKind::BrokenPipe => Ok(()),
                _ => Err(error),
            })
        } else {
            replace(path, text)
        };
        written.map_err(|error| {
            Fault::io("write", path, &error).at(format!("{flag} {}", path.display()))
        })
    }
}

/// Writes to a new name in the folder of `path`, and renames.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let scratch = disk::folder_of(path).join(format!(".{name}.{}.tmp", process::id()));
    let mut file = File::create_new(&scratch)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let kept = written.and_then(|()| match fs::metadata(path) {
        Ok(there) => file.set_permissions(there.permissions()),
        Err(_) => Ok(()),
    });
    kept.and_then(|()| fs::rename(&scratch, path)).inspect_err(|_| {
        // The error at hand says more than one about this file.
        let _ = fs::remove_file(&scratch);
    })
}

fn is_ours(path: &Path) -> io::Result<bool> {
    let mut head = Vec::new();
    File::open(path)?.take(64).read_to_end(&mut head)?;
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    Ok(OURS.iter().any(|ours| head.starts_with(ours)))
}

#[cfg(test)]
mod tests {
    use contract::Class;

    use super::*;

    #[test]
    fn only_a_page_or_a_plot_is_replaced() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        for (name, before) in
            [("ledger.jsonl", "{}\n"), ("run.toml", "seed = 1\n"), ("page.html.tmp", "mine")]
        {
            fs::write(at(name), before).unwrap();
            let refused = Drawing::at("--out", &at(name)).err().unwrap();
            assert_eq!(refused.class(), Class::Usage, "{refused}");
            assert_eq!(fs::read_to_string(at(name)).unwrap(), before);
        }
        for text in ["<!doctype html>1", "<svg>2</svg>", "<!doctype html>3"] {
            Drawing::at("--out", &at("page.html")).unwrap().put(text).unwrap();
            assert_eq!(fs::read_to_string(at("page.html")).unwrap(), text);
        }
        assert_eq!(
            fs::read_dir(scratch.path()).unwrap().count(),
            4,
            "nothing is left beside it, nothing is gone"
        );
        for nowhere in [at("none/page.html"), scratch.path().to_owned()] {
            let refused = Drawing::at("--out", &nowhere).err().unwrap();
            assert_eq!(refused.class(), Class::Usage, "{refused}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_and_devices_stay_what_they_are() {
        let scratch = tempfile::tempdir().unwrap();
        let (link, real) = (scratch.path().join("link.svg"), scratch.path().join("real.svg"));
        std::os::unix::fs::symlink("real.svg", &link).unwrap();
        assert!(Drawing::at("--plot", &link).is_err(), "it leads nowhere yet");
        fs::write(&real, "").unwrap();
        Drawing::at("--plot", &link).unwrap().put("<svg/>").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "<svg/>");
        Drawing::at("--plot", Path::new("/dev/null")).unwrap().put("<svg/>").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        let full =
            Drawing::at("--plot", Path::new("/dev/full")).unwrap().put("<svg/>").err().unwrap();
        assert_eq!(
            (full.class(), full.to_string().contains("--plot /dev/full")),
            (Class::Machine, true),
            "{full}"
        );
    }
}
