//! Checking a store: every byte of every file, and the meaning of the bytes.
//!
//! Files with a wrong digest are never parsed. Damage in one is located by block sums at computed offsets, and reported
//! with the documents it touches as long as one of the two lists of documents is intact.

use std::cmp::Ordering;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::ops::Range;

use crate::documents::Documents;
use crate::folder::StoreFile;
use crate::manifest::Link;
use crate::rows::starts;
use crate::write::block_offset;
use crate::{BLOCK_TOKENS, FileRecord, Manifest, ShardRecord, SourceRecord, Split, names, open};
use crate::{Location, regular};
use contract::digest::block_sum;
use contract::fault::is_of_the_moment;
use contract::{Class, Fault, Identity, Result, counted};
use serde::Serialize;

use self::segments::{Segment, Segments, digest};

mod segments;

/// One damaged place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// The file, from the store's folder.
    pub file: String,
    /// What is wrong.
    pub what: String,
    /// The damaged block, if known.
    pub block: Option<u64>,
    /// The documents it touches, if known.
    pub documents: Option<String>,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.what)?;
        if let Some(block) = self.block {
            write!(f, ", block {block}")?;
        }
        self.documents.as_ref().map_or(Ok(()), |documents| write!(f, ", {documents}"))
    }
}

/// Checks the file that belongs to no stream: the tokenizer.
pub fn verify_tokenizer(store: impl Into<Location>, manifest: &Manifest) -> Result<Vec<Damage>> {
    let file = StoreFile::new(store, &[open::TOKENIZER]);
    let changed = |bytes: &Vec<u8>| Identity::of_bytes(bytes) != manifest.tokenizer.sha256;
    let mut read = file.read();
    if read.as_ref().is_ok_and(changed) && file.location().forget() {
        read = file.read();
    }
    let what = match read {
        Err(error) => unread(&file.location(), &error)?,
        Ok(bytes) if Identity::of_bytes(&bytes) == manifest.tokenizer.sha256 => {
            return Ok(Vec::new());
        }
        Ok(bytes) => format!(
            "its content changed: found {}, wanted {}",
            Identity::of_bytes(&bytes).short(),
            manifest.tokenizer.sha256.short()
        ),
    };
    Ok(vec![Damage { file: open::TOKENIZER.to_owned(), what, block: None, documents: None }])
}

/// Classifies a read error: a description of the damage, or a fault of the machine, which says nothing about the file.
pub fn unread(file: &Location, error: &io::Error) -> Result<String> {
    match error.kind() {
        _ if is_of_the_moment(error) => Err(file.fault("read", error)),
        io::ErrorKind::NotFound => Ok("it is missing".to_owned()),
        io::ErrorKind::InvalidData => Ok(error.to_string()),
        _ => Ok(format!("it cannot be read: {error}")),
    }
}

/// Checks one stream: its files, ids, starts, provenance and digest. Its parts may be checked on any threads.
pub struct StreamCheck<'a> {
    store: Location,
    manifest: &'a Manifest,
    source: &'a SourceRecord,
    split: Split,
}

/// What the check of a part found.
pub struct Found<'a> {
    shards: &'a [ShardRecord],
    damages: Vec<Damage>,
    segments: Segments,
    /// Whether documents are missing in the segments.
    torn: bool,
}

impl<'a> StreamCheck<'a> {
    /// The check of the stream `split` of `source`.
    pub fn new(
        store: impl Into<Location>,
        manifest: &'a Manifest,
        source: &'a SourceRecord,
        split: Split,
    ) -> Self {
        StreamCheck { store: store.into(), manifest, source, split }
    }

    /// The shards of each part that has some, in order.
    pub fn parts(&self) -> Vec<&'a [ShardRecord]> {
        let shards = &self.source.stream(self.split).shards;
        shards.chunk_by(|one, next| one.part == next.part).collect()
    }

    /// Checks the shards of a part. Calls `passed` with the bytes that were read. An error is the machine's: damage is
    /// a [`Damage`].
    pub fn part(&self, shards: &'a [ShardRecord], passed: &dyn Fn(u64)) -> Result<Found<'a>> {
        self.part_after(None, shards, passed)
    }

    /// The same if the documents before them end in this segment.
    fn part_after(
        &self,
        before: Option<Segment>,
        shards: &'a [ShardRecord],
        passed: &dyn Fn(u64),
    ) -> Result<Found<'a>> {
        let segments = Segments { all: Vec::from_iter(before), first: None };
        let found = Found { shards, damages: Vec::new(), segments, torn: false };
        let StreamCheck { store, manifest, source, split: _ } = self;
        let mut check = Check { store, manifest, source, passed, found };
        for shard in shards {
            if !check.shard(shard)? {
                // Later shards are still checked, but for the digest the documents of this one are missing.
                check.found.segments.all.clear();
                check.found.torn = true;
            }
        }
        Ok(check.found)
    }

    /// The damage of the stream, by what was found in all parts, in order.
    pub fn damages(&self, parts: Vec<Found<'a>>) -> Result<Vec<Damage>> {
        let (mut damages, mut all, mut torn) = (Vec::new(), Vec::<Segment>::new(), false);
        for mut found in parts {
            let last = all.last().map(|segment| segment.place);
            if found.segments.first.is_some_and(|first| last >= Some(first)) {
                // No build cuts a segment, but a forged store may: this part depends on the one before.
                found = self.part_after(all.pop(), found.shards, &|_| ())?;
            }
            if found.torn {
                all.clear();
            }
            all.extend(found.segments.all);
            damages.extend(found.damages);
            torn |= found.torn;
        }
        let (wanted, found) =
            (self.source.stream(self.split).digest, digest(all, &self.source.inputs));
        if !torn && found != wanted {
            let file = format!("{} ({})", self.source.name, self.split.name());
            let what = format!("its documents give the digest {found}, not {wanted}");
            damages.push(Damage { file, what, block: None, documents: None });
        }
        Ok(damages)
    }
}

struct Check<'a, 'f> {
    store: &'a Location,
    manifest: &'a Manifest,
    source: &'a SourceRecord,
    passed: &'a dyn Fn(u64),
    found: Found<'f>,
}

impl Check<'_, '_> {
    fn tell(&mut self, file: String, what: String) {
        self.found.damages.push(Damage { file, what, block: None, documents: None });
    }

    /// A file of a shard as users name it.
    fn path(&self, shard: &ShardRecord, name: &str) -> String {
        format!("{}/{}/{name}", self.source.name, names::part(shard.part))
    }

    /// A file of the stream.
    fn at(&self, shard: &ShardRecord, record: &FileRecord) -> StoreFile {
        open::part_file(self.store, &self.source.name, shard.part, &record.name)
    }

    /// Checks a shard, and adds its documents to their segments. Returns whether all of them were added.
    fn shard(&mut self, shard: &ShardRecord) -> Result<bool> {
        let tokens = self.file(shard, &shard.token_file)?;
        let sums = self.file(shard, &shard.sum_file)?;
        let starts = self.file(shard, &shard.start_file)?;
        let documents = self.file(shard, &shard.document_file)?;
        let whole = Whole { starts: starts.is_ok(), documents: documents.is_ok() };
        for fault in
            [&sums, &starts, &documents].into_iter().filter_map(|found| found.as_ref().err())
        {
            self.found.damages.push(fault.clone());
        }
        match tokens {
            Ok(()) => {}
            Err(damage) => {
                let found = self.blocks(shard, sums.is_ok(), &whole)?;
                // Without a damaged block, the container around the blocks has changed.
                self.found.damages.extend(if found.is_empty() { vec![damage] } else { found });
                return Ok(false);
            }
        }
        if sums.is_ok() {
            let found = self.blocks(shard, true, &whole)?;
            self.found.damages.extend(found);
        }
        if !whole.starts || !whole.documents {
            return Ok(false);
        }
        match self.meaning(shard) {
            Ok(()) => Ok(true),
            Err(Flaw::Damage(name, what)) => {
                self.tell(self.path(shard, &name), what);
                Ok(false)
            }
            Err(Flaw::Machine(fault)) => Err(fault),
        }
    }

    /// Size and digest of one file.
    fn file(
        &self,
        shard: &ShardRecord,
        record: &FileRecord,
    ) -> Result<std::result::Result<(), Damage>> {
        let file = self.path(shard, &record.name);
        let damage = |what| Damage { file, what, block: None, documents: None };
        let found = flaw(&self.at(shard, record), record, self.passed)?;
        Ok(found.map_or(Ok(()), |what| Err(damage(what))))
    }

    /// The blocks of a token file whose sums are wrong.
    fn blocks(&self, shard: &ShardRecord, sums_whole: bool, whole: &Whole) -> Result<Vec<Damage>> {
        let name = &shard.token_file.name;
        if !sums_whole {
            return Ok(Vec::new());
        }
        let (tokens, sums) = (self.at(shard, &shard.token_file), self.at(shard, &shard.sum_file));
        let path = tokens.location();
        let sums = match sums.read() {
            Ok(sums) => sums,
            Err(error) => return unread(&sums.location(), &error).map(|_| Vec::new()),
        };
        let mut file = match tokens.open() {
            Ok(file) => file,
            Err(error) => return unread(&path, &error).map(|_| Vec::new()),
        };
        let mut damages = Vec::new();
        for (block, sum) in (0u64..).zip(sums.chunks_exact(8)) {
            let range = block_range(shard, block);
            let found = read_block(&mut file, self.manifest.token_bytes, block, &range);
            let what = match found {
                Err(error) => unread(&path, &error)?,
                Ok(bytes) if block_sum(&bytes).to_le_bytes() == sum => continue,
                Ok(_) => "its bytes changed".to_owned(),
            };
            damages.push(Damage {
                file: self.path(shard, name),
                what,
                block: Some(block),
                documents: self.documents_in(shard, range, whole),
            });
        }
        Ok(damages)
    }

    /// The documents that own these tokens of the shard, as text.
    fn documents_in(
        &self,
        shard: &ShardRecord,
        tokens: Range<u64>,
        whole: &Whole,
    ) -> Option<String> {
        let mut named: Vec<String> = Vec::new();
        let mut count = 0u64;
        let mut add = |name: String| {
            count += 1;
            if named.len() < 4 {
                named.push(name);
            }
        };
        if whole.documents {
            let first_file = self.source.first_file(shard.part);
            for record in Documents::open(&self.at(shard, &shard.document_file)).ok()? {
                let mut record = record.ok()?;
                record.file = record.file.saturating_add(first_file);
                let end = record.first_token.saturating_add(record.tokens);
                if record.first_token < tokens.end && end > tokens.start {
                    add(record.shown_id().into_owned());
                }
            }
        } else if whole.starts {
            let file = self.at(shard, &shard.start_file);
            let starts = starts(file, shard.documents).ok()?;
            let starts: Vec<u64> = starts.collect::<Result<_>>().ok()?;
            let first = starts.partition_point(|start| *start <= tokens.start).saturating_sub(1);
            let end = starts.partition_point(|start| *start < tokens.end);
            (first..end)
                .for_each(|index| add(format!("number {}", shard.first_document + index as u64)));
        } else {
            return None;
        }
        let more = if count as usize > named.len() { ", ..." } else { "" };
        Some(format!("{}: {}{more}", counted(count, "document"), named.join(", ")))
    }

    /// Checks ids, starts and provenance of a shard whose bytes are intact, and adds its documents to their segments.
    fn meaning(&mut self, shard: &ShardRecord) -> std::result::Result<(), Flaw> {
        let in_starts = |what: String| Flaw::Damage(shard.start_file.name.clone(), what);
        let in_documents = |what: String| Flaw::Damage(shard.document_file.name.clone(), what);
        let of_starts = |fault| Flaw::of(&shard.start_file, fault);
        let of_documents = |fault| Flaw::of(&shard.document_file, fault);
        let mut tokens = Tokens::open(self.at(shard, &shard.token_file), shard, self.manifest)?;
        let starts =
            starts(self.at(shard, &shard.start_file), shard.documents).map_err(of_starts)?;
        let mut documents =
            Documents::open(&self.at(shard, &shard.document_file)).map_err(of_documents)?;
        if documents.keep() != self.source.keep {
            return Err(in_documents(format!(
                "it keeps the columns {:?}, not {:?}",
                documents.keep(),
                self.source.keep
            )));
        }
        let (mut next, mut count) = (0, 0u64);
        for start in starts {
            let start = start.map_err(of_starts)?;
            let mut record = documents
                .next()
                .ok_or_else(|| in_documents(format!("it ends at document {count}")))?
                .map_err(of_documents)?;
            record.file = record.file.saturating_add(self.source.first_file(shard.part));
            if start != next || record.tokens == 0 {
                return Err(in_starts(format!("document {count} starts at {start}, not {next}")));
            }
            if record.first_token != start {
                let (id, first) = (record.shown_id(), record.first_token);
                return Err(in_documents(format!(
                    "{id} begins at {first}, by its start at {start}"
                )));
            }
            let chain =
                self.found.segments.of(&record, &self.source.inputs).map_err(in_documents)?;
            let mut link = Link::begin(*chain, record.tokens);
            tokens.take(record.tokens, |tokens| link.tokens(tokens))?;
            *chain = link.end(&record);
            next += record.tokens;
            count += 1;
        }
        if documents.next().is_some() || count != shard.documents {
            return Err(in_documents(format!(
                "it holds more or fewer than {} documents",
                shard.documents
            )));
        }
        if next != shard.tokens {
            return Err(in_starts(format!("the documents end at token {next}")));
        }
        Ok(())
    }
}

/// Why the content of a shard could not be checked.
enum Flaw {
    /// A file and what is wrong with it.
    Damage(String, String),
    /// A fault of the machine, which says nothing about the file.
    Machine(Fault),
}

impl Flaw {
    fn of(file: &FileRecord, fault: Fault) -> Self {
        match fault.class() {
            Class::Machine => Flaw::Machine(fault),
            _ => Flaw::Damage(file.name.clone(), fault.to_string()),
        }
    }

    fn io(file: &FileRecord, path: &Location, error: &io::Error) -> Self {
        match unread(path, error) {
            Ok(what) => Flaw::Damage(file.name.clone(), what),
            Err(fault) => Flaw::Machine(fault),
        }
    }
}

/// Which lists of documents can be trusted.
struct Whole {
    starts: bool,
    documents: bool,
}

/// The tokens of a block, as offsets in its shard.
fn block_range(shard: &ShardRecord, block: u64) -> Range<u64> {
    let start = block * BLOCK_TOKENS;
    start.min(shard.tokens)..(start + BLOCK_TOKENS).min(shard.tokens)
}

fn read_block(
    file: &mut File,
    token_bytes: u32,
    block: u64,
    tokens: &Range<u64>,
) -> io::Result<Vec<u8>> {
    let width = u64::from(token_bytes);
    let mut bytes = vec![0; ((tokens.end - tokens.start) * width) as usize];
    file.seek(SeekFrom::Start(block_offset(BLOCK_TOKENS * width, block)))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// How a file differs from its record, if it does. A file of another size is not read, and a local copy that differs is
/// fetched once more. Calls `passed` with the bytes that were read.
pub fn flaw(file: &StoreFile, record: &FileRecord, passed: &dyn Fn(u64)) -> Result<Option<String>> {
    match flaw_of_bytes(file, record, passed)? {
        Some(_) if file.location().forget() => flaw_of_bytes(file, record, &|_| ()),
        found => Ok(found),
    }
}

fn flaw_of_bytes(
    file: &StoreFile,
    record: &FileRecord,
    passed: &dyn Fn(u64),
) -> Result<Option<String>> {
    let found = file.open().and_then(|file| {
        let bytes = file.metadata()?.len();
        let same = bytes == record.bytes;
        Ok((bytes, if same { Some(regular::digest(file, passed)?.1) } else { None }))
    });
    Ok(match found {
        Err(error) => Some(unread(&file.location(), &error)?),
        Ok((bytes, None)) => wrong_size(bytes, record),
        Ok((_, Some(digest))) => (digest != record.digest)
            .then(|| format!("its bytes changed: found {digest}, wanted {}", record.digest)),
    })
}

/// The same without reading the file: whether it exists and has the recorded size.
pub fn flaw_of_size(file: &StoreFile, record: &FileRecord) -> Result<Option<String>> {
    match file.size() {
        Err(error) => unread(&file.location(), &error).map(Some),
        Ok(bytes) => Ok(wrong_size(bytes, record)),
    }
}

fn wrong_size(bytes: u64, record: &FileRecord) -> Option<String> {
    match bytes.cmp(&record.bytes) {
        Ordering::Less => Some(format!("it is truncated: {bytes} of {} bytes", record.bytes)),
        Ordering::Equal => None,
        Ordering::Greater => Some(format!("it is too long: {bytes} bytes, not {}", record.bytes)),
    }
}

/// Reads a shard's tokens front to back.
struct Tokens<'a> {
    file: File,
    path: Location,
    shard: &'a ShardRecord,
    vocab: u32,
    token_bytes: u32,
    block: u64,
    ids: Vec<u32>,
    at: usize,
}

impl<'a> Tokens<'a> {
    fn open(
        file: StoreFile,
        shard: &'a ShardRecord,
        manifest: &Manifest,
    ) -> std::result::Result<Self, Flaw> {
        let path = file.location();
        let file = file.open().map_err(|error| Flaw::io(&shard.token_file, &path, &error))?;
        let (vocab, token_bytes) = (manifest.tokenizer.vocab, manifest.token_bytes);
        Ok(Tokens { file, path, shard, vocab, token_bytes, block: 0, ids: Vec::new(), at: 0 })
    }

    /// Passes on the next `count` tokens, in parts: a document need not fit into memory.
    fn take(
        &mut self,
        mut count: u64,
        mut each: impl FnMut(&[u32]),
    ) -> std::result::Result<(), Flaw> {
        while count > 0 {
            if self.at == self.ids.len() {
                self.fill()?;
            }
            let part = count.min((self.ids.len() - self.at) as u64) as usize;
            each(&self.ids[self.at..self.at + part]);
            self.at += part;
            count -= part as u64;
        }
        Ok(())
    }

    fn fill(&mut self) -> std::result::Result<(), Flaw> {
        let flaw = |what: String| Flaw::Damage(self.shard.token_file.name.clone(), what);
        let range = block_range(self.shard, self.block);
        if range.is_empty() {
            return Err(flaw("it ends before its documents do".to_owned()));
        }
        let bytes = read_block(&mut self.file, self.token_bytes, self.block, &range)
            .map_err(|error| Flaw::io(&self.shard.token_file, &self.path, &error))?;
        self.ids.clear();
        if self.token_bytes == 2 {
            self.ids.extend(bytes.as_chunks().0.iter().map(|b| u32::from(u16::from_le_bytes(*b))));
        } else {
            self.ids.extend(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)));
        }
        if let Some(id) = self.ids.iter().find(|id| **id >= self.vocab) {
            return Err(flaw(format!(
                "block {} holds the id {id} of a vocabulary of {}",
                self.block, self.vocab
            )));
        }
        (self.block, self.at) = (self.block + 1, 0);
        Ok(())
    }
}

/// The fault for a list of damages.
pub fn fault(store: impl Into<Location>, damages: &[Damage]) -> Option<Fault> {
    let first = damages.first()?;
    let lines: Vec<String> = damages.iter().map(Damage::to_string).collect();
    let what = match damages.len() {
        1 => "this store is damaged".to_owned(),
        count => format!("this store is damaged in {count} places"),
    };
    let found = lines.join("\n           ");
    let store = store.into();
    let hint = match store.is_remote() {
        true => {
            "remove these objects and `zdata publish` the store again: what is whole stays, what is missing is put"
        }
        false => {
            "restore these files from a copy, or remove the folder and build the store again: it will be the same"
        }
    };
    Some(Fault::data(what).at(store.join(&first.file).to_string()).found(found).hint(hint))
}
