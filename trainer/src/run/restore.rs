//! Resumes from a checkpoint: rank 0 chooses one, each rank reads its part, and all of them together check that it is
//! intact. Every file is read by the ranks that own something in it, whatever the number of ranks.
//!
//! ```text
//! choice    step and place of a checkpoint, or step 0: the beginning           rank 0 to all ranks
//! reading   weights and moments of its own pieces                              each rank by itself
//! verdict   checksums of its part, or its error                                all-gather, small
//! sharing   weights, as at the end of a step                                   rank to rank
//! ```

use std::path::PathBuf;

use contract::{Class, Digest, Fault, Result};
use store::Location;

use crate::checkpoint::{self, Checkpoints, StateLayout, UsableCheckpoint};
use crate::mesh::words::{Gathered, WordReader, WordWriter};
use crate::mesh::{ProcessMesh, share};
use crate::refusal::lost;
use crate::state::State;
use crate::state::ownership::Ownership;
use crate::workers::Workers;

/// What a rank needs to read a checkpoint.
pub(crate) struct RestoreInputs<'a> {
    /// The ranks.
    pub(crate) team: &'a ProcessMesh<'a>,
    /// The layout of the complete state.
    pub(crate) layout: &'a StateLayout,
    /// The owners of its pieces.
    pub(crate) owners: &'a Ownership,
    /// The workers that compute checksums.
    pub(crate) workers: Workers,
}

/// The place sent by ranks other than 0, which is ignored.
pub(super) fn nowhere() -> Location {
    Location::Local(PathBuf::new())
}

/// A restored state, and its digest.
pub(crate) type Restored = (State, Digest);

impl RestoreInputs<'_> {
    /// On rank 0: tries checkpoints from the newest down, the run's place first, until one `fits` and every rank can
    /// read it.
    pub(crate) fn lead(
        &self,
        places: &[&Checkpoints],
        last: u64,
        chain: impl Fn(u64) -> Option<Digest>,
        fits: impl Fn(&checkpoint::CheckpointReader<'_>) -> Result<()>,
    ) -> Result<UsableCheckpoint<Restored>> {
        let found = Checkpoints::newest_of(places, last, chain, |reader| {
            fits(reader)?;
            self.choose(reader.manifest().step, &reader.place())?;
            self.verdict(Ok(reader))
        })?;
        if found.state.is_none() {
            self.choose(0, &places.first().map_or_else(nowhere, |place| place.place()))?;
        }
        Ok(found)
    }

    /// On other ranks: reads what rank 0 chooses until all agree; `None` means the beginning. Also returns rank 0's
    /// place of checkpoints.
    pub(crate) fn follow(&self) -> Result<(Option<Restored>, Checkpoints)> {
        loop {
            let (step, place) = self.choose(0, &nowhere())?;
            let checkpoints = Checkpoints::new(place);
            if step == 0 {
                return Ok((None, checkpoints));
            }
            let opened = checkpoints.open(step);
            let opened = opened.as_ref().map_err(|fault| {
                // Rank 0 has read it: if other ranks see something else at this place, the checkpoint is not damaged.
                Fault::machine("this rank does not see the checkpoint that rank 0 sees")
                    .found(fault)
                    .hint("a run's folder has to be the same on every rank: share it, or name a bucket with --checkpoints")
            });
            match self.verdict(opened) {
                Ok(shard) => return Ok((Some(shard), checkpoints)),
                Err(fault) if fault.class() == Class::Data => (),
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Receives rank 0's choice: a step, and its place of checkpoints.
    pub(super) fn choose(&self, step: u64, place: &Location) -> Result<(u64, Location)> {
        let mut message = WordWriter::default();
        message.word(step).place(place);
        let gathered = self.team.group.all_gather("the choice of a checkpoint", message.bytes());
        let gathered = gathered.map_err(lost)?;
        let mut gathered = WordReader::new(&gathered[0]);
        Ok((gathered.word()?, gathered.place()?))
    }

    /// Reads this rank's part and exchanges the result, then the weights. An error on any rank is returned on all.
    fn verdict(&self, opened: Result<&checkpoint::CheckpointReader<'_>>) -> Result<Restored> {
        let read = opened.and_then(|reader| {
            let state = reader.part(self.layout, self.owners, self.workers)?;
            let sums = state.own_sums(self.workers)?;
            Ok((state, sums, reader))
        });
        let mut message = WordWriter::default();
        match &read {
            Ok((_, sums, _)) => message.word(0).sums(sums),
            Err(fault) => {
                message.word(u64::from(fault.class().exit_code())).text(&fault.to_string())
            }
        };
        let gathered = self.team.group.all_gather("the reading of a checkpoint", message.bytes());
        let gathered = Gathered(gathered.map_err(lost)?);
        let (mut gathered, mut faults) = (gathered.readers(), Vec::new());
        for (rank, gathered) in gathered.iter_mut().enumerate() {
            let class = gathered.word()?;
            if class != 0 {
                faults.push((class == u64::from(Class::Data.exit_code()), rank, gathered.text()?));
            }
        }
        // Errors other than damaged data take precedence: they must not mark the checkpoint as damaged.
        if let Some((data, rank, text)) = faults.into_iter().min() {
            let fault = if data { Fault::data(text) } else { Fault::machine(text) };
            // That rank itself returns its original error.
            let original = read.err().filter(|_| rank == self.team.group.rank() as usize);
            return Err(original.unwrap_or_else(|| fault.at(format!("rank {rank}"))));
        }
        let (state, _, reader) = read?;
        let sums = state.sums_of(&share::sums(self.owners, gathered)?);
        reader.check(sums.digest)?;
        share::weights(self.team, &state)?;
        Ok((state, sums.digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Snapshot;
    use crate::checkpoint::tests::{digest_of, layout_in, pieces_of, whole};
    use curriculum::Dtype;
    use proptest::prelude::*;
    use proptest::sample::Index;
    use tempfile::TempDir;

    /// How ranks share the state: cuts of every tensor, ends of buckets, owners.
    fn shares() -> impl Strategy<Value = (Vec<Index>, Vec<bool>, Vec<u32>, u32)> {
        prop::sample::select(vec![1u32, 2, 3, 5, 7]).prop_flat_map(|world| {
            let cuts = prop::collection::vec(any::<Index>(), 1..9);
            let ends = prop::collection::vec(any::<bool>(), 1..9);
            (cuts, ends, prop::collection::vec(0..world, 1..9), Just(world))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// If some ranks write and others read with another layout, the readers together have the state, bit for bit.
        #[test]
        fn any_layout_reads_what_any_other_wrote(writers in shares(), readers in shares(), narrow: bool) {
            let dtype = if narrow { Dtype::Bf16 } else { Dtype::F32 };
            let (layout, workers) = (layout_in(dtype), Workers::new(1));
            let (wanted, all) = (digest_of(&layout, 5), whole(&layout, 5));
            let folder = TempDir::new().unwrap();
            let checkpoints = Checkpoints::new(folder.path());
            let cut = |(cuts, ends, owners, _): &(Vec<Index>, Vec<bool>, Vec<u32>, u32)| {
                pieces_of(&layout, cuts, ends, owners)
            };
            let (pieces, mut blobs) = (cut(&writers), Vec::new());
            let snapshot = |rank| Snapshot::of(&all.cut(5, &pieces, rank)).unwrap();
            for rank in 0..writers.3 {
                blobs.extend(checkpoints.write(&layout, &snapshot(rank)).unwrap());
            }
            checkpoints.commit(&snapshot(0), (wanted, Digest(1)), &layout, &pieces, blobs).unwrap();
            let (pieces, reader) = (cut(&readers), checkpoints.open(5).unwrap());
            let read = |rank| {
                let owners = Ownership::cut(pieces.clone(), rank);
                reader.part(&layout, &owners, workers).unwrap()
            };
            let states: Vec<State> = (0..readers.3).map(read).collect();
            let said = states.iter().map(|state| {
                let mut words = WordWriter::default();
                words.sums(&state.own_sums(workers).unwrap());
                words.bytes().to_vec()
            });
            let said = Gathered(said.collect());
            for state in &states {
                let sums = share::sums(&state.owners, said.readers()).unwrap();
                prop_assert_eq!(state.sums_of(&sums).digest, wanted);
                for piece in state.owners.own() {
                    let (parameter, number) = (&layout.parameters[piece.tensor], piece.tensor);
                    let (found, wanted) = (&state.weights[number], &all.weights[number]);
                    prop_assert_eq!(found.kind(), parameter.kind(dtype));
                    let (found, wanted) = (piece.of(found), piece.of(wanted));
                    // Weights may have any bits here, and NaN stays NaN.
                    let wanted = wanted.to_kind(found.kind());
                    let same = wanted.eq_tensor(&found).logical_or(&wanted.isnan().logical_and(&found.isnan()));
                    prop_assert!(same.all().int64_value(&[]) == 1, "a rank has the weights of its pieces");
                    let sum = |tensor| kernels::checksum::tensor(tensor, 1).unwrap();
                    prop_assert!(narrow || sum(&found) == sum(&wanted));
                }
            }
        }
    }
}
