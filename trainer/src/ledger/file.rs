//! `ledger.jsonl` on disk: appended to, never rewritten; a torn last line is cut before anything follows it.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read as _, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};

use super::chain;
use super::record::{Head, StepRecord};

/// An open ledger. Only the place and chain of each line are held in memory.
pub struct Ledger {
    path: PathBuf,
    file: File,
    head: Head,
    lines: Vec<Line>,
    end: u64,
}

/// Where a line ends and the chain after it: the head's first, then step 1's, ...
struct Line {
    end: u64,
    chain: Digest,
}

impl Ledger {
    /// Opens the ledger at `path` to append to it, and checks every line. A torn last line is cut; `None` if not even
    /// the head is whole.
    pub fn open(path: &Path) -> Result<Option<Ledger>> {
        if !path.exists() {
            return Ok(None);
        }
        let options = OpenOptions::new().read(true).append(true).open(path);
        let file = options.map_err(|error| Fault::io("open", path, &error))?;
        let Some(ledger) = Ledger::checked(path, file)? else { return Ok(None) };
        ledger
            .file
            .set_len(ledger.end)
            .map_err(|error| Fault::io("cut the torn end of", path, &error))?;
        Ok(Some(ledger))
    }

    /// Opens the ledger at `path` to read it, and checks every line; a torn last line is passed over.
    pub fn read(path: &Path) -> Result<Ledger> {
        let file = File::open(path).map_err(|error| Fault::io("open", path, &error))?;
        Ledger::checked(path, file)?.ok_or_else(|| {
            Fault::data("the ledger is empty")
                .at(path.display().to_string())
                .hint("the run had not begun: start it again")
        })
    }

    /// A new ledger with its head; anything there (a torn head) is replaced.
    pub fn create(path: &Path, head: Head) -> Result<Ledger> {
        File::create(path).map_err(|error| Fault::io("create", path, &error))?;
        let options = OpenOptions::new().read(true).append(true).open(path);
        let file = options.map_err(|error| Fault::io("open", path, &error))?;
        let mut ledger = Ledger { path: path.to_owned(), file, head, lines: Vec::new(), end: 0 };
        let body = to_json(&ledger.head)?;
        ledger.append_body(&body)?;
        ledger.sync()?;
        Ok(ledger)
    }

    fn checked(path: &Path, file: File) -> Result<Option<Ledger>> {
        let mut reader = BufReader::with_capacity(1 << 20, &file);
        let (mut lines, mut head, mut end, mut chain) = (Vec::new(), None, 0, Digest::default());
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            let read = reader
                .read_until(b'\n', &mut bytes)
                .map_err(|error| Fault::io("read", path, &error))?;
            let Some(line) = bytes.strip_suffix(b"\n") else { break };
            let number = lines.len();
            let opened = std::str::from_utf8(line).ok().and_then(|line| chain::open(chain, line));
            let (body, after) =
                opened.ok_or_else(|| broken(path, number, "its chain is broken"))?;
            if number == 0 {
                head = Some(from_json::<Head>(path, number, &body)?);
            } else if from_json::<Numbered>(path, number, &body)?.step != number as u64 {
                return Err(broken(path, number, &format!("it should be step {number}")));
            }
            (chain, end) = (after, end + read as u64);
            lines.push(Line { end, chain });
        }
        let path = path.to_owned();
        Ok(head.map(|head| Ledger { path, file, head, lines, end }))
    }

    /// Line 0.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The last step recorded; 0 if none is.
    pub fn last_step(&self) -> u64 {
        self.lines.len() as u64 - 1
    }

    /// The chain after `step` (0: after the head).
    pub fn chain_at(&self, step: u64) -> Option<Digest> {
        self.lines.get(step as usize).map(|line| line.chain)
    }

    /// The record of `step`.
    pub fn record(&self, step: u64) -> Result<StepRecord> {
        let missing = || {
            Fault::usage(format!("step {step} is not in the ledger"))
                .at(self.path.display().to_string())
                .wanted(format!("a step from 1 to {}", self.last_step()))
        };
        if step == 0 || step > self.last_step() {
            return Err(missing());
        }
        let (start, end) = (self.lines[step as usize - 1].end, self.lines[step as usize].end);
        let mut bytes = vec![0; (end - start) as usize];
        let mut file = &self.file;
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        let line = String::from_utf8_lossy(&bytes);
        let before = self.lines[step as usize - 1].chain;
        let opened = chain::open(before, line.trim_end_matches('\n'));
        let (body, _) = opened
            .ok_or_else(|| broken(&self.path, step as usize, "it changed while it was in use"))?;
        from_json(&self.path, step as usize, &body)
    }

    /// Appends the record of the step after the last.
    pub fn append(&mut self, record: &StepRecord) -> Result<()> {
        if record.step != self.last_step() + 1 {
            return Err(Fault::bug(format!(
                "step {} was to follow step {}",
                record.step,
                self.last_step()
            )));
        }
        let body = to_json(record)?;
        self.append_body(&body)
    }

    fn append_body(&mut self, body: &str) -> Result<()> {
        let before = self.lines.last().map_or(Digest::default(), |line| line.chain);
        let (mut line, chain) = chain::seal(before, body);
        line.push('\n');
        self.file
            .write_all(line.as_bytes())
            .map_err(|error| Fault::io("append to", &self.path, &error))?;
        self.end += line.len() as u64;
        self.lines.push(Line { end: self.end, chain });
        Ok(())
    }

    /// Waits until everything is on the disk: before a checkpoint that relies on it is committed.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|error| Fault::io("flush", &self.path, &error))
    }
}

/// The one field that is read of every line.
#[derive(serde::Deserialize)]
struct Numbered {
    step: u64,
}

fn broken(path: &Path, number: usize, what: &str) -> Fault {
    Fault::mismatch(format!("this line of the ledger was changed: {what}"))
        .at(format!("{}:{}", path.display(), number + 1))
        .hint("restore the file; nothing after a changed line can be trusted")
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Fault::bug(format!("a ledger line cannot be written: {error}")))
}

fn from_json<T: serde::de::DeserializeOwned>(path: &Path, number: usize, body: &str) -> Result<T> {
    serde_json::from_str(body).map_err(|error| {
        Fault::data(format!("this line of the ledger cannot be read: {error}"))
            .at(format!("{}:{}", path.display(), number + 1))
            .hint("it was written by another version: use that one")
    })
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;
    use contract::{Class, Identity};

    fn head() -> Head {
        Head {
            kind: "head".into(),
            format: 1,
            kernel_table: serde_json::json!({"libtorch": "2.11.0"}),
            curriculum: "seed = 1\n".into(),
            stores: vec![Identity([7; 32])],
            tokenizer: Identity([8; 32]),
            levels: vec!["D".into()],
            parameters: vec!["a".into()],
        }
    }

    fn written(folder: &Path, steps: u64) -> PathBuf {
        let path = folder.join("ledger.jsonl");
        let mut ledger = Ledger::create(&path, head()).unwrap();
        (1..=steps).for_each(|step| ledger.append(&record(step, 1)).unwrap());
        path
    }

    #[test]
    fn records_come_back_and_appending_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path(), 3);
        let mut ledger = Ledger::open(&path).unwrap().unwrap();
        assert_eq!((ledger.head(), ledger.last_step()), (&head(), 3));
        assert_eq!(ledger.record(2).unwrap().difference(&record(2, 1), &[]), None);
        assert_eq!(ledger.record(4).unwrap_err().class(), Class::Usage);
        ledger.append(&record(4, 1)).unwrap();
        assert_eq!(ledger.record(4).unwrap().difference(&record(4, 1), &[]), None);
        let whole = std::fs::read(&path).unwrap();
        let again = tempfile::tempdir().unwrap();
        assert_eq!(
            whole,
            std::fs::read(written(again.path(), 4)).unwrap(),
            "nothing but the records enters"
        );
    }

    #[test]
    fn a_torn_last_line_is_cut_at_any_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path(), 2);
        let whole = std::fs::read(&path).unwrap();
        let ends: Vec<usize> =
            (0..whole.len()).filter(|at| whole[*at] == b'\n').map(|at| at + 1).collect();
        for cut in (0..whole.len()).step_by(7).chain(ends.iter().copied()) {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let complete = ends.iter().filter(|end| **end <= cut).count();
            match Ledger::open(&path).unwrap() {
                None => assert_eq!(complete, 0),
                Some(mut ledger) => {
                    assert_eq!(ledger.last_step() + 1, complete as u64);
                    (complete as u64..3).for_each(|step| ledger.append(&record(step, 1)).unwrap());
                    assert_eq!(std::fs::read(&path).unwrap(), whole);
                }
            }
        }
    }

    #[test]
    fn a_changed_line_is_refused_with_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path(), 3);
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let swapped = [lines[0], lines[2], lines[1], lines[3], ""].join("\n");
        let removed = [lines[0], lines[2], lines[3], ""].join("\n");
        let changed = text.replacen("\"step\":2", "\"step\":3", 1);
        for (damaged, line) in [(swapped, 2), (removed, 2), (changed, 3)] {
            std::fs::write(&path, damaged).unwrap();
            for fault in [
                Ledger::open(&path).map(|_| ()).unwrap_err(),
                Ledger::read(&path).map(|_| ()).unwrap_err(),
            ] {
                assert_eq!(fault.class(), Class::Mismatch);
                assert!(fault.to_string().contains(&format!("ledger.jsonl:{line}:")), "{fault}");
            }
        }
    }
}
