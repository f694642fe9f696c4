//! The file format of the documents of a bucket.
//!
//! ```text
//! head   magic (`zbucket2`), key                                                                   u64, u128
//! runs   of each run of neighbours in the store: first token and document in the bucket, then in the store   4 x u64
//! sparse each run whose number is a multiple of 256, once more                                    4 x u64
//! tail   runs, documents, tokens                                                                   3 x u64
//! sums   as of each file next to a store (`sealed.rs`)
//! ```
//!
//! Numbers are little-endian, and all four columns ascend. The sparse runs are held in memory; reading a sequence takes
//! one read of the runs from there on.

use std::path::{Path, PathBuf};

use contract::{Digest, Result};

use crate::sealed::{Kind, SealedFile, SealedWriter};

/// The file's first word.
const MAGIC: u64 = u64::from_le_bytes(*b"zbucket2");

/// Words of the head, of a run and of the tail.
const HEAD_WORDS: usize = 3;
const RUN_WORDS: usize = 4;
const TAIL_WORDS: usize = 3;

/// Runs of which one is held in memory.
const STRIDE: u64 = 256;

/// Neighbours in the store that are in one bucket, up to the first document that is not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Run {
    /// Its first token, counted in the bucket.
    pub(crate) token: u64,
    /// Its first document, counted in the bucket.
    pub(crate) document: u64,
    /// Its first token, counted in the stream of the store.
    pub(crate) store_token: u64,
    /// Its first document, counted there.
    pub(crate) store_document: u64,
}

/// Writes the documents of one bucket.
pub(crate) struct SelectionWriter {
    file: SealedWriter,
    runs: u64,
    documents: u64,
    tokens: u64,
    sparse: Vec<u64>,
    /// The store's document that would continue the open run.
    next: Option<u64>,
}

impl SelectionWriter {
    pub(crate) fn create(folder: &Path, key: Digest) -> Result<Self> {
        let mut file = SealedWriter::create(Kind::Bucket, folder, &Kind::Bucket.file(key))?;
        file.put(&MAGIC.to_le_bytes())?;
        file.put(&key.0.to_le_bytes())?;
        let sparse = Vec::new();
        Ok(SelectionWriter { file, runs: 0, documents: 0, tokens: 0, sparse, next: None })
    }

    /// Adds a document of the store, which begins at `start` there.
    pub(crate) fn add(&mut self, document: u64, start: u64, tokens: u64) -> Result<()> {
        if self.next != Some(document) {
            let run = [self.tokens, self.documents, start, document];
            if self.runs.is_multiple_of(STRIDE) {
                self.sparse.extend(run);
            }
            self.file.put_words(&run)?;
            self.runs += 1;
        }
        self.next = Some(document + 1);
        self.documents += 1;
        self.tokens += tokens;
        Ok(())
    }

    pub(crate) fn commit(mut self) -> Result<PathBuf> {
        self.file.put_words(&self.sparse)?;
        self.file.put_words(&[self.runs, self.documents, self.tokens])?;
        self.file.commit()
    }
}

/// The documents of a bucket.
#[derive(Debug)]
pub(crate) struct Selection {
    file: SealedFile,
    /// Documents of the bucket.
    pub(crate) documents: u64,
    /// Tokens of the bucket.
    pub(crate) tokens: u64,
    runs: u64,
    /// Each run whose number is a multiple of [`STRIDE`].
    sparse: Vec<Run>,
}

impl Selection {
    /// Opens the file with the documents of `key` and checks its digest.
    pub(crate) fn open(path: &Path, key: Digest) -> Result<Self> {
        let file = SealedFile::open(Kind::Bucket, path)?;
        let fixed = (HEAD_WORDS + TAIL_WORDS) as u64 * 8;
        let Some(rows) = file.body.checked_sub(fixed) else {
            return Err(file.damaged("it ends early"));
        };
        let head = file.words(0, HEAD_WORDS)?;
        let named = Digest(u128::from(head[1]) | u128::from(head[2]) << 64);
        if head[0] != MAGIC || named != key {
            return Err(file.damaged("it is not what its name says").found(named).wanted(key));
        }
        let tail = file.words(file.body - TAIL_WORDS as u64 * 8, TAIL_WORDS)?;
        let (runs, documents, tokens) = (tail[0], tail[1], tail[2]);
        let sparse = runs.div_ceil(STRIDE);
        let both = runs.checked_add(sparse).and_then(|all| all.checked_mul(RUN_WORDS as u64 * 8));
        if both != Some(rows) {
            return Err(file.damaged("its runs do not end where it says"));
        }
        let mut opened = Selection { file, documents, tokens, runs, sparse: Vec::new() };
        // The sparse runs follow the last run.
        opened.sparse = opened.rows(runs, sparse)?;
        Ok(opened)
    }

    /// The digest of the file.
    pub(crate) fn digest(&self) -> Digest {
        self.file.digest
    }

    /// Calls `each` with the run that has `at` (in the column `by`, or the first run if it is before it) and the one
    /// behind it, then with those that follow, as long as it returns true.
    pub(crate) fn runs_from(
        &self,
        by: impl Fn(&Run) -> u64,
        at: u64,
        mut each: impl FnMut(&Run, &Run) -> Result<bool>,
    ) -> Result<()> {
        let block = self.sparse.partition_point(|run| by(run) <= at).saturating_sub(1) as u64;
        let mut first = block * STRIDE;
        let mut skip = None;
        while first < self.runs {
            let count = STRIDE.min(self.runs - first);
            // And the first of the next block, which ends this one.
            let mut rows = self.rows(first, (count + 1).min(self.runs - first))?;
            if rows.len() as u64 == count {
                rows.push(Run { token: self.tokens, document: self.documents, ..Run::default() });
            }
            let of_block = &rows[..count as usize];
            let from = *skip
                .get_or_insert_with(|| of_block.partition_point(|run| by(run) <= at).max(1) - 1);
            for two in rows[from..].windows(2) {
                if !each(&two[0], &two[1])? {
                    return Ok(());
                }
            }
            skip = Some(0);
            first += count;
        }
        Ok(())
    }

    /// `count` runs from number `first` on.
    fn rows(&self, first: u64, count: u64) -> Result<Vec<Run>> {
        let from = (HEAD_WORDS as u64 + first * RUN_WORDS as u64) * 8;
        let words = self.file.words(from, count as usize * RUN_WORDS)?;
        let run = |row: &[u64; RUN_WORDS]| Run {
            token: row[0],
            document: row[1],
            store_token: row[2],
            store_document: row[3],
        };
        Ok(words.as_chunks().0.iter().map(run).collect())
    }
}
