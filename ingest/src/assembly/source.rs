//! The record of a source, from the outputs of its parts: a merge copies no token.

use contract::{Fault, Result};
use store::manifest::StreamDigest;
use store::{Change, InputRecord, PartRecord, ShardRecord, SourceRecord, StreamRecord};

use super::part::{Changes, InputOutput, PartOutput, count_dropped};
use crate::recipe::Recipe;
use crate::source::GroupHashes;

/// A source of a store that is being put together.
pub(crate) struct SourceBuilder<'a> {
    record: SourceRecord,
    recipe: &'a Recipe,
    digests: [StreamDigest; 2],
    /// The hashes of the groups of the last input so far, if it has some.
    hashes: Option<GroupHashes>,
    /// Whether a record has its own id.
    named: bool,
    /// Whether a record has a value, by kept column.
    kept: Vec<bool>,
}

impl<'a> SourceBuilder<'a> {
    /// Begins the source `name`, which keeps the columns `keep`.
    pub(crate) fn new(name: &str, preparation: &str, keep: &[String], recipe: &'a Recipe) -> Self {
        let record = SourceRecord { keep: keep.to_vec(), ..SourceRecord::new(name, preparation) };
        SourceBuilder {
            record,
            recipe,
            digests: Default::default(),
            hashes: None,
            named: false,
            kept: vec![false; keep.len()],
        }
    }

    /// The number of the next part.
    pub(crate) fn part(&self) -> u32 {
        self.record.parts.len() as u32
    }

    /// Adds the next part, whose files are called `paths` and whose first one is read from `first_group` on.
    pub(crate) fn push(
        &mut self,
        output: PartOutput,
        paths: impl IntoIterator<Item = String>,
        first_group: u32,
    ) -> Result<()> {
        let PartOutput { inputs, streams, dropped, dropped_file, changes, named, kept, stop: _ } =
            output;
        let (part, continues) = (self.part(), first_group > 0);
        let first_file = (self.record.inputs.len() - usize::from(continues)) as u32;
        self.record.parts.push(PartRecord { first_file, first_group, dropped_file });
        self.named |= named;
        self.kept.iter_mut().zip(kept).for_each(|(all, part)| *all |= part);
        for (input, path) in inputs.into_iter().zip(paths) {
            self.input(input, path, continues)?;
        }
        let totals = [&mut self.record.train, &mut self.record.validation];
        for (total, output) in totals.into_iter().zip(streams) {
            total.text_bytes += output.text_bytes;
            for shard in output.shards {
                let (first_token, first_document) = (total.tokens, total.documents);
                total.tokens += shard.tokens;
                total.documents += shard.documents;
                total.shards.push(ShardRecord { part, first_token, first_document, ..shard });
            }
        }
        for dropped in dropped {
            let all = &mut self.record.dropped;
            count_dropped(all, &dropped.reason, dropped.documents, dropped.bytes);
        }
        if !self.recipe.is_empty() {
            self.changes(changes);
        }
        Ok(())
    }

    /// Adds an input, or the next groups of the last one.
    fn input(&mut self, input: InputOutput, path: String, continues: bool) -> Result<()> {
        let InputOutput { bytes, mut sha256, documents, segments: chains, hashes } = input;
        let segments = chains.len() as u64;
        let before = self.record.inputs.pop_if(|_| continues);
        let record = match (before, &mut self.hashes, hashes) {
            (Some(before), Some(all), Some(next)) => {
                if !all.extend(next) {
                    return Err(changed(&path));
                }
                sha256 = all.identity();
                let (bytes, documents) = (before.bytes + bytes, before.documents + documents);
                let segments = before.segments + segments;
                InputRecord { path, bytes, sha256, documents, segments }
            }
            (_, all, hashes) => {
                *all = hashes;
                self.end_file();
                InputRecord { path, bytes, sha256, documents, segments }
            }
        };
        for chains in &chains {
            let digests = self.digests.iter_mut().zip(chains);
            digests.for_each(|(digest, chain)| digest.segment(*chain));
        }
        self.record.inputs.push(record);
        Ok(())
    }

    /// Ends the last input, of which no more groups follow.
    fn end_file(&mut self) {
        if let Some(input) = self.record.inputs.last() {
            self.digests.iter_mut().for_each(|digest| digest.end_file(input.segments));
        }
    }

    /// Adds what the steps did to the texts of a part.
    fn changes(&mut self, changes: Changes) {
        let places = self.recipe.encoding_places();
        let prepared = self.record.prepared.get_or_insert_default();
        prepared.read_bytes += changes.read_bytes;
        for (place, [documents, added, removed]) in places.into_iter().zip(changes.steps) {
            if documents == 0 {
                continue;
            }
            let step = self.recipe.step_name(place);
            // In the order of the steps, which is the order of their names' numbers.
            let all = &mut prepared.changes;
            let at = all.binary_search_by(|change| change.step.cmp(&step));
            let at = at.unwrap_or_else(|at| {
                all.insert(at, Change { step, documents: 0, added: 0, removed: 0 });
                at
            });
            all[at].documents += documents;
            all[at].added += added;
            all[at].removed += removed;
        }
    }

    /// Whether records were read and none has its own id.
    pub(crate) fn is_nameless(&self) -> bool {
        !self.named && self.record.inputs.iter().any(|input| input.documents > 0)
    }

    /// The kept columns in which no record has a value.
    pub(crate) fn never_kept(&self) -> impl Iterator<Item = &str> {
        let columns = self.record.keep.iter().zip(&self.kept);
        columns.filter(|(_, kept)| !**kept).map(|(column, _)| column.as_str())
    }

    /// The finished source.
    pub(crate) fn finish(mut self) -> SourceRecord {
        self.end_file();
        let [train, validation] = self.digests.map(|digest| digest.finish());
        let of = |stream: StreamRecord, digest| StreamRecord { digest, ..stream };
        SourceRecord {
            train: of(self.record.train, train),
            validation: of(self.record.validation, validation),
            ..self.record
        }
    }
}

/// The fault for an input of which two parts read different versions.
pub(crate) fn changed(path: &str) -> Fault {
    Fault::mismatch("this input changed while its parts were made")
        .at(path.to_owned())
        .hint("run the same command again; of tasks, `zdata task plan` and the tasks that are left")
}
