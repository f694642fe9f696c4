//! Which tasks there are: a function of the corpus file and the sizes of its inputs.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::store::write::write_whole;
use contract::{Digest, Fault, Result, far};
use serde::{Deserialize, Serialize};

use crate::build;
use crate::corpus::{Corpus, Source};
use crate::journal::Head;
use crate::tokenize::{Engine, Tokenizer};

/// Bytes of input that a task gets, unless it is told otherwise; a larger file is a task by itself.
pub const TASK_BYTES: u64 = 1 << 28;

/// The most tasks of a plan, about: schedulers bound the size of a job array.
const TASKS_MAX: u64 = 1000;

const FILE: &str = "plan.json";

/// A plan and its digest, which every part carries.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The folder of the plan and its parts.
    pub work: PathBuf,
    /// Which plan this is.
    pub digest: Digest,
    pub(super) text: Text,
}

/// `plan.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Text {
    /// The corpus file.
    pub(super) corpus: PathBuf,
    /// What no task may see changed.
    pub(super) head: Head,
    /// The files of each source, as shown.
    pub(super) files: Vec<Vec<String>>,
    /// For each task its source and files.
    pub(super) tasks: Vec<(usize, Range<usize>)>,
}

/// Plans the build of `corpus`, or takes the plan up that is in `work` already if it is the same.
pub fn plan(corpus: &Corpus, work: &Path, task_bytes: u64) -> Result<Plan> {
    refuse_preparation(corpus)?;
    let tokenizer = build::tokenizer(corpus, Engine::Fastest)?;
    let file = fs::canonicalize(&corpus.file);
    let file = file.map_err(|error| Fault::io("find", &corpus.file, &error))?;
    let text = text(corpus, &tokenizer, file, task_bytes)?;
    fs::create_dir_all(work).map_err(|error| Fault::io("create", work, &error))?;
    let path = work.join(FILE);
    if path.exists() {
        let before = Plan::read(work)?;
        if before.text == text {
            return Ok(before);
        }
        return Err(Fault::mismatch("the corpus changed since this build was planned")
            .at(path.display().to_string())
            .hint("undo the change, or delete the folder and build again"));
    }
    let mut bytes = serde_json::to_vec_pretty(&text)
        .map_err(|error| Fault::bug(format!("a plan cannot be written: {error}")))?;
    bytes.push(b'\n');
    write_whole(&path, &bytes)?;
    Plan::read(work)
}

/// Steps that compare documents see all of them; a part does not yet say what the others did.
fn refuse_preparation(corpus: &Corpus) -> Result<()> {
    match corpus.sources.iter().find(|source| !source.recipe.is_empty()) {
        Some(source) => Err(Fault::usage("tasks do not prepare documents")
            .at(corpus.file.display().to_string())
            .found(format!("source `{}` with a template, a chat or steps", source.name))
            .hint("build it with --engine local")),
        None => Ok(()),
    }
}

fn text(corpus: &Corpus, tokenizer: &Tokenizer, file: PathBuf, task_bytes: u64) -> Result<Text> {
    let mut sizes: Vec<Vec<u64>> = Vec::new();
    for source in &corpus.sources {
        let size = |file: &crate::corpus::SourceFile| {
            far::size(&file.path).map_err(|error| Fault::io("read", &file.path, &error))
        };
        sizes.push(source.files.iter().map(size).collect::<Result<_>>()?);
    }
    let all: u64 = sizes.iter().flatten().sum();
    let bytes = task_bytes.max(all / TASKS_MAX).max(1);
    let mut tasks = Vec::new();
    for (source, sizes) in sizes.iter().enumerate() {
        let (mut first, mut sum) = (0, 0);
        for (number, size) in sizes.iter().enumerate() {
            if number > first && sum + size > bytes {
                tasks.push((source, first..number));
                (first, sum) = (number, 0);
            }
            sum += size;
        }
        tasks.push((source, first..sizes.len()));
    }
    Ok(Text {
        corpus: file,
        head: build::head(corpus, tokenizer)?,
        files: corpus.sources.iter().map(shown).collect(),
        tasks,
    })
}

/// The files of a source, as shown.
fn shown(source: &Source) -> Vec<String> {
    source.files.iter().map(|file| file.shown.clone()).collect()
}

impl Plan {
    /// Reads the plan in `work`.
    pub fn read(work: &Path) -> Result<Self> {
        let path = work.join(FILE);
        let bytes = fs::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
        let text = serde_json::from_slice(&bytes).map_err(|error| {
            Fault::data("this is no plan of a build").at(path.display().to_string()).found(error)
        })?;
        Ok(Plan { work: work.to_owned(), digest: Digest::of_bytes(&bytes), text })
    }

    /// How many tasks there are.
    pub fn tasks(&self) -> usize {
        self.text.tasks.len()
    }

    /// The tasks whose parts are not there yet.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.tasks()).filter(|task| !self.part(*task).exists()).collect()
    }

    /// Where the part of a task belongs.
    pub fn part(&self, task: usize) -> PathBuf {
        self.work.join(format!("part-{task:06}.bin"))
    }

    /// The corpus as it was planned, or a refusal.
    pub(super) fn corpus(&self) -> Result<(Corpus, Tokenizer)> {
        let corpus = Corpus::read(&self.text.corpus)?;
        let tokenizer = build::tokenizer(&corpus, Engine::Fastest)?;
        let found: Vec<Vec<String>> = corpus.sources.iter().map(shown).collect();
        let same = found == self.text.files;
        if same && build::head(&corpus, &tokenizer)? == self.text.head {
            return Ok((corpus, tokenizer));
        }
        Err(Fault::mismatch("the corpus changed since this build was planned")
            .at(self.text.corpus.display().to_string())
            .hint("undo the change, or delete the folder of the plan and build again"))
    }
}
