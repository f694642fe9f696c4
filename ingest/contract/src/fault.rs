//! Errors that help: what went wrong, where, what was found, what was wanted, what to do next.
//!
//! One type for every module, because every error ends in the same place: on a user's terminal, with an exit code that
//! a script can act on.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;

use crate::shown::{name, shown};

/// The result of anything that can go wrong outside our own code.
pub type Result<T> = std::result::Result<T, Fault>;

/// Who has to act, and thereby the exit code (`0` is "done").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// 1: a bug of ours.
    Bug,
    /// 2: wrong use, or a curriculum or corpus file that cannot run.
    Usage,
    /// 3: data that is missing or damaged.
    Data,
    /// 4: two digests that had to agree do not.
    Mismatch,
    /// 5: the run diverged.
    Diverged,
    /// 6: the machine: disk full, device lost, a folder in use.
    Machine,
}

impl Class {
    /// The process exit code of this class.
    pub const fn exit_code(self) -> u8 {
        match self {
            Class::Bug => 1,
            Class::Usage => 2,
            Class::Data => 3,
            Class::Mismatch => 4,
            Class::Diverged => 5,
            Class::Machine => 6,
        }
    }
}

/// What an environment fault indicates, for supervisors that need more than the class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symptom {
    /// No space is left to write.
    DiskFull,
    /// The same computation gave different results.
    Untrusted,
    /// Another process holds the resource.
    InUse,
}

/// An error with its place and its way out.
///
/// ```
/// use contract::{Class, Fault};
/// let fault = Fault::usage("a weight must be positive").at("mix.toml:14").found("-3").hint("use 0.3 or \"3/10\"");
/// assert_eq!(fault.class(), Class::Usage);
/// assert_eq!(
///     fault.to_string(),
///     "mix.toml:14: a weight must be positive\n  found:  -3\n  hint:   use 0.3 or \"3/10\""
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(Box<Inner>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Inner {
    class: Class,
    what: String,
    place: Option<String>,
    found: Option<String>,
    wanted: Option<String>,
    hint: Option<String>,
    symptom: Option<Symptom>,
}

impl Fault {
    /// A fault of `class` that says `what` went wrong, as a lower-case sentence without a full stop.
    pub fn new(class: Class, what: impl Into<String>) -> Self {
        let (place, found, wanted, hint, symptom) = (None, None, None, None, None);
        Fault(Box::new(Inner { class, what: what.into(), place, found, wanted, hint, symptom }))
    }

    /// A bug of ours (exit 1).
    pub fn bug(what: impl Into<String>) -> Self {
        Fault::new(Class::Bug, what)
            .hint("this is a bug of ours: please report it with the command that led here")
    }

    /// Wrong use, or a file that cannot run (exit 2).
    pub fn usage(what: impl Into<String>) -> Self {
        Fault::new(Class::Usage, what)
    }

    /// Data missing or damaged (exit 3).
    pub fn data(what: impl Into<String>) -> Self {
        Fault::new(Class::Data, what)
    }

    /// Two digests that had to agree do not (exit 4).
    pub fn mismatch(what: impl Into<String>) -> Self {
        Fault::new(Class::Mismatch, what)
    }

    /// The run diverged (exit 5).
    pub fn diverged(what: impl Into<String>) -> Self {
        Fault::new(Class::Diverged, what)
    }

    /// The machine failed or refused (exit 6).
    pub fn machine(what: impl Into<String>) -> Self {
        Fault::new(Class::Machine, what)
    }

    /// An I/O error on `path` while trying to do `what` ("read", "create the folder of").
    ///
    /// A missing file is missing data; a file in place of a folder, or one that is not a regular file, is wrong use;
    /// everything else (disk full, no memory or handles left, no permission) is an environment fault.
    pub fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        let (class, hint) = match error.kind() {
            io::ErrorKind::NotFound => (
                Class::Data,
                "check the path: in a file it starts at that file's folder, on a command line at the one you are in",
            ),
            io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::AlreadyExists => (
                Class::Usage,
                "this is a file where a folder is wanted, or a folder where a file is: name another path",
            ),
            io::ErrorKind::UnexpectedEof => {
                (Class::Data, "the file is shorter than it should be: restore it")
            }
            io::ErrorKind::InvalidInput => {
                (Class::Usage, "name a regular file, or a folder where one is wanted")
            }
            io::ErrorKind::OutOfMemory => (
                Class::Machine,
                "free some memory, raise `ulimit -v` or lower --workers, and run the same command again",
            ),
            io::ErrorKind::InvalidData => {
                (Class::Data, "what is there is not the file it should be: restore it")
            }
            _ if matches!(error.raw_os_error(), Some(ENFILE | EMFILE)) => (
                Class::Machine,
                "close what holds so many files, or raise `ulimit -n`, and run the same command again",
            ),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                (Class::Machine, "free some space and run the same command again")
            }
            io::ErrorKind::FileTooLarge => {
                (Class::Machine, "raise `ulimit -f` and run the same command again")
            }
            _ => (Class::Machine, "repair this on the machine, and run the same command again"),
        };
        if error.kind() == io::ErrorKind::InvalidFilename {
            return too_long(what, path, error);
        }
        let full = matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        let why = match error.kind() {
            // The library says how it read, not what it met.
            io::ErrorKind::UnexpectedEof => "it ends too soon".to_owned(),
            _ => error.to_string(),
        };
        let mut fault = Fault::new(class, format!("cannot {what} it: {why}"));
        fault.0.symptom = full.then_some(Symptom::DiskFull);
        fault.at(path.display().to_string()).hint(hint)
    }

    /// The system could not start a thread or process for `what`.
    pub fn not_started(what: &str, error: &io::Error) -> Self {
        Fault::machine(format!("cannot start {what}: {error}")).hint(more_of(error))
    }

    /// Documents of these sources have the id that `flag` names, and one of them is meant.
    pub fn of_several_sources(flag: &str, id: &str, sources: &[&str]) -> Self {
        let named = |source: &&str| format!("{:?}", format!("{source}:{id}"));
        let wanted: Vec<_> = sources.iter().map(named).collect();
        Fault::usage(format!("documents of {} sources have this id", sources.len()))
            .at(flag)
            .found(format!("{id:?}"))
            .wanted(format!("the one that is meant: {}", wanted.join(" or ")))
    }

    /// Sets the symptom.
    pub fn sign_of(mut self, symptom: Symptom) -> Self {
        self.0.symptom = Some(symptom);
        self
    }

    /// Sets the class: who has to act.
    pub fn of(mut self, class: Class) -> Self {
        self.0.class = class;
        self
    }

    /// Where: a file, `file:line`, or a key.
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.0.place = Some(place.into());
        self
    }

    /// Where, if no more precise place is known yet.
    pub fn or_at(mut self, place: impl FnOnce() -> String) -> Self {
        self.0.place.get_or_insert_with(place);
        self
    }

    /// What was found.
    pub fn found(mut self, found: impl fmt::Display) -> Self {
        self.0.found = Some(found.to_string());
        self
    }

    /// What was wanted instead.
    pub fn wanted(mut self, wanted: impl fmt::Display) -> Self {
        self.0.wanted = Some(wanted.to_string());
        self
    }

    /// What was wanted instead of `word`: the nearest known word, or all of them.
    pub fn one_of<'a>(self, word: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let known: Vec<&str> = known.into_iter().collect();
        match nearest(word, known.iter().copied()) {
            Some(near) => self.hint(format!("did you mean `{near}`?")),
            None => self.wanted(known.join(", ")),
        }
    }

    /// What to do next.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds that `done` has already happened, because the same command run again is refused.
    pub fn after(self, done: impl fmt::Display) -> Self {
        self.hint(format!("{done}, and whole: only these words are lost"))
    }

    /// What went wrong, in one sentence.
    pub fn what(&self) -> &str {
        &self.0.what
    }

    /// Where, if that is known.
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }

    /// What was found, what was wanted and what to do next, where they are known.
    pub fn details(&self) -> [Option<&str>; 3] {
        [self.0.found.as_deref(), self.0.wanted.as_deref(), self.0.hint.as_deref()]
    }

    /// Who has to act.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// The symptom, where known.
    pub fn symptom(&self) -> Option<Symptom> {
        self.0.symptom
    }
}

/// Suffixes of names: for outputs that are not complete yet, and for files that lie next to an output.
const ADDED: [&str; 3] = [".partial", ".work", ".zdata.tmp"];

/// A name that the file system refuses as too long, with the limit; our own suffix may be what makes it too long.
fn too_long(what: &str, path: &Path, error: &io::Error) -> Fault {
    let longest = path.iter().max_by_key(|part| part.len()).unwrap_or_default();
    let bytes = longest.len();
    let fault = Fault::usage(format!("cannot {what} it: {error}")).at(path.display().to_string());
    if bytes <= NAME_BYTES {
        return fault.hint("name a path of fewer bytes, or go to a folder nearer by");
    }
    let added = longest.to_str().and_then(|name| ADDED.iter().find(|it| name.ends_with(**it)));
    let (added, why) = match added {
        Some(added) => (added.len(), format!(": `{added}` is added to it for a while")),
        None => (0, String::new()),
    };
    fault
        .found(format!("a name of {} bytes", bytes - added))
        .wanted(format!("at most {} bytes{why}", NAME_BYTES - added))
        .hint("name a shorter one")
}

/// The longest name that a file system takes.
const NAME_BYTES: usize = 255;

/// Errors without a name in the standard library: too many open files, on this machine or in this process.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
/// The disk could not read what it holds.
const EIO: i32 = 5;

/// The hint where the system refuses a process more files, memory or threads.
pub fn more_of(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(ENFILE | EMFILE) => "raise `ulimit -n`",
        _ if error.kind() == io::ErrorKind::OutOfMemory => "free some memory, or raise `ulimit -v`",
        // A thread needs memory too.
        _ => "raise `ulimit -u`, or free some memory",
    }
}

/// Whether a read error is about the machine at this moment, such as "no more handles", and not about the file: the
/// file is then unread, neither whole nor damaged.
pub fn is_of_the_moment(error: &io::Error) -> bool {
    let class = Fault::io("read", Path::new(""), error).class();
    class == Class::Machine && error.raw_os_error() != Some(EIO)
}

/// The I/O error that caused a library's error, if there is one.
pub fn io_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    let mut cause = Some(error);
    while let Some(link) = cause {
        if let Some(error) = link.downcast_ref::<io::Error>() {
            return Some(error);
        }
        cause = link.source();
    }
    None
}

/// Whether memory ran out, which is an environment fault; some libraries report it only in their text.
pub fn is_out_of_memory(error: &(dyn Error + 'static)) -> bool {
    match io_cause(error) {
        Some(error) if error.kind() == io::ErrorKind::OutOfMemory => true,
        Some(error) => tells_of_memory(&error.to_string()),
        None => tells_of_memory(&error.to_string()),
    }
}

/// Whether this is a library's message for a lack of memory, in an error or a panic: of zstd, its wrapper or Oniguruma.
pub fn tells_of_memory(text: &str) -> bool {
    let words = ["not enough memory", "zstd returned null pointer", "fail to memory allocation"];
    words.iter().any(|words| text.contains(words))
}

/// A copy of an I/O error, to keep while the original is returned.
pub fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { class: _, what, place, found, wanted, hint, symptom: _ } = &*self.0;
        // Paths, ids and file contents are untrusted text.
        if let Some(place) = place {
            write!(f, "{}: ", name(place))?;
        }
        write!(f, "{}", shown(what))?;
        for (label, text) in [("found: ", found), ("wanted:", wanted), ("hint:  ", hint)] {
            if let Some(text) = text {
                write!(f, "\n  {label} {}", shown(text))?;
            }
        }
        Ok(())
    }
}

impl Error for Fault {}

/// The known word nearest to `word`, for "did you mean": at most a third of its letters differ.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let best = known.into_iter().map(|name| (strsim::osa_distance(word, name), name)).min()?;
    (best.0 <= word.chars().count().div_ceil(3)).then_some(best.1)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn what_there_is_no_more_of_is_what_is_to_be_raised() {
        let (no_thread, no_memory) = (11, 12);
        for (code, limit) in [(EMFILE, "-n"), (ENFILE, "-n"), (no_thread, "-u"), (no_memory, "-v")]
        {
            let fault = Fault::not_started("rank 2", &io::Error::from_raw_os_error(code));
            assert_eq!(fault.class(), Class::Machine);
            let told = fault.to_string();
            assert!(told.contains("cannot start rank 2") && told.contains(limit), "{told}");
            assert_eq!(told.matches("ulimit").count(), 1, "{told}");
        }
    }

    #[test]
    fn nearest_finds_typos_and_refuses_guesses() {
        let known = ["seq_len", "batch", "steps", "mix"];
        assert_eq!(nearest("seq_length", known), Some("seq_len"));
        assert_eq!(nearest("btach", known), Some("batch"));
        assert_eq!(nearest("optimizer", known), None);
    }

    #[test]
    fn exit_codes_are_the_documented_ones() {
        let classes = [
            Class::Bug,
            Class::Usage,
            Class::Data,
            Class::Mismatch,
            Class::Diverged,
            Class::Machine,
        ];
        assert_eq!(classes.map(Class::exit_code), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_missing_file_is_missing_data_and_a_full_disk_is_the_machine() {
        let path = Path::new("x");
        assert_eq!(Fault::io("read", path, &io::ErrorKind::NotFound.into()).class(), Class::Data);
        assert_eq!(
            Fault::io("write", path, &io::ErrorKind::StorageFull.into()).class(),
            Class::Machine
        );
        // A folder read as a file, a file used as a folder, a folder created where a file exists.
        for code in [21, 20, 17].map(io::Error::from_raw_os_error) {
            assert_eq!(Fault::io("read", path, &code).class(), Class::Usage, "{code}");
        }
        let handles = Fault::io("open", path, &io::Error::from_raw_os_error(24));
        assert!(handles.class() == Class::Machine && handles.to_string().contains("ulimit -n"));
    }

    #[test]
    fn a_name_that_is_too_long_is_wrong_use_and_says_how_long_it_may_be() {
        let too_long = io::Error::from_raw_os_error(36);
        for (name, most) in [(".partial", 247), (".work", 250), (".zdata.tmp", 245), (".md", 255)] {
            let path = PathBuf::from("x".repeat(253) + name);
            let fault = Fault::io("create", &path, &too_long);
            assert_eq!(fault.class(), Class::Usage, "{fault}");
            assert!(fault.to_string().contains(&format!("at most {most} bytes")), "{fault}");
        }
        // A path whose names are each short enough.
        let fault = Fault::io("read", Path::new("a/b"), &too_long);
        assert!(fault.class() == Class::Usage && !fault.to_string().contains("255"), "{fault}");
    }

    #[test]
    fn a_failing_disk_damages_files_and_a_busy_machine_does_not() {
        let of_the_moment = [4, 11, 12, 13, 23, 24].map(io::Error::from_raw_os_error);
        assert!(of_the_moment.iter().all(is_of_the_moment));
        let of_the_file = [2, 5].map(io::Error::from_raw_os_error);
        assert!(!of_the_file.iter().any(is_of_the_moment));
        assert!(!is_of_the_moment(&io::ErrorKind::UnexpectedEof.into()));
        let wrapped = io::Error::other(io::Error::from_raw_os_error(24));
        assert_eq!(again(io_cause(&wrapped).unwrap()).to_string(), again(&wrapped).to_string());
    }
}
