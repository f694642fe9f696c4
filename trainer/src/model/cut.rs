//! The canonical cut of a micro-batch: into chunks of its sequences, and shards of its weights.
//!
//! Chunk c is the c-th of C equal parts of every sequence. Every operation is called for one chunk at a time, so that
//! its bits do not depend on the rank that computes the chunk. What a chunk reads of other chunks are operands, never
//! sums: earlier keys and values ([`SeenKeys`]), and the adjacent rows that convolutions and the value shift read
//! ([`Chunk::around`]). Both index a table: first the rows of the local chunks, in the order of chunks, then rows
//! received from other ranks of the line ([`Chunks::beside`], [`Chunks::earlier`]). A process that has all chunks
//! exchanges nothing.
//!
//! ```text
//! sequences        a0 a1 a2 a3 | a4 a5 a6 a7        C = 2
//!                  b0 b1 b2 b3 | b4 b5 b6 b7
//! order of chunks  a0 a1 a2 a3 b0 b1 b2 b3 | a4 a5 a6 a7 b4 b5 b6 b7
//! ```

use contract::{Fault, Result};
use kernels::device;
use kernels::ops::AttentionSpan;
use kernels::ops::rotary::angles;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::grid::{ChunkGrid, REACH};
use super::input::DeviceMicroBatch;
use super::line::{Assignment, AxisComm, PendingTable, Rows, Table};
use super::visible::{ByWindow, EarlierKeys, KeyPart, SeenKeys, Visibility};
use crate::refusal::refused;

/// Into how many parts a micro-batch is cut. This decides bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Equal parts of every sequence.
    pub chunks: u64,
    /// Parts of the heads, the inner widths and the vocabulary.
    pub shards: u64,
}

impl Cut {
    /// No cut.
    pub const WHOLE: Cut = Cut { chunks: 1, shards: 1 };
}

impl Default for Cut {
    fn default() -> Cut {
        Cut::WHOLE
    }
}

/// The chunks of a micro-batch that this rank computes, on the device.
pub(super) struct Chunks<'a> {
    /// In the order of the sequence.
    parts: Vec<Chunk>,
    dealt: Assignment,
    line: Option<&'a dyn AxisComm>,
    grid: ChunkGrid,
    /// Documents of the whole micro-batch.
    documents: Vec<AttentionSpan>,
    /// Includes the rows of other ranks that convolutions and the value shift read.
    beside: Table,
    earlier: ByWindow<EarlierKeys>,
}

/// A part of every sequence.
pub(super) struct Chunk {
    /// `[n]`, i64.
    pub(super) tokens: Tensor,
    /// `[n]`, i64.
    pub(super) labels: Tensor,
    /// `[n]`, f32: 1 or 0.
    pub(super) mask: Tensor,
    /// Documents, or their parts in this chunk; in order, covering every token.
    pub(super) spans: Vec<AttentionSpan>,
    keys: ByWindow<SeenKeys>,
    /// With a window, frequencies may have another base.
    rotary: ByWindow<[Tensor; 2]>,
    /// Which adjacent rows of other chunks it reads; `None` where there is one chunk.
    others: Option<RemoteRows>,
    /// Indices of the first rows of documents in [`Chunk::around`], i64.
    starts: Tensor,
}

/// Adjacent rows that a chunk reads.
struct RemoteRows {
    /// Each part of a document with its adjacent rows, i64.
    around: Tensor,
    /// Indices of the chunk's own rows among these, i64.
    own: Tensor,
}

impl<'a> Chunks<'a> {
    /// Cuts a micro-batch into `count` chunks and makes those of this rank of `line`; all, without a line.
    pub(super) fn new(
        config: &ZayaConfig,
        input: &DeviceMicroBatch,
        count: u64,
        line: Option<&'a dyn AxisComm>,
    ) -> Result<Chunks<'a>> {
        let length = input.tokens.size()[0] / input.rows;
        let dealt = line.map_or(Assignment::alone(count), |line| Assignment {
            chunks: count,
            degree: line.degree(),
            place: line.place(),
        });
        if count < 1 || length % count as i64 != 0 || !count.is_multiple_of(dealt.degree) {
            return Err(Fault::usage("sequences cannot be cut into equal chunks")
                .at("context_chunks")
                .found(format!("{count} chunks of {length} tokens for {} ranks", dealt.degree))
                .wanted("a divisor of seq_len, which the ranks that share a micro-batch divide"));
        }
        let grid = ChunkGrid { length, width: length / count as i64, rows: input.rows };
        Chunks::dealt(config, input, grid, dealt, line).map_err(refused)
    }

    fn dealt(
        config: &ZayaConfig,
        input: &DeviceMicroBatch,
        grid: ChunkGrid,
        dealt: Assignment,
        line: Option<&'a dyn AxisComm>,
    ) -> kernels::Result<Chunks<'a>> {
        let (size, device) = (grid.rows * grid.width, input.tokens.device());
        let documents = input.spans.clone();
        let reads = |place| match dealt.degree {
            1 => Vec::new(),
            _ => grid.beside(dealt, &documents, place),
        };
        let beside = Table::new(dealt, size, reads, device)?;
        let earlier =
            |window| EarlierKeys::new(Visibility { grid, window }, dealt, &documents, device);
        let window = (config.sliding_window > 0).then_some(config.sliding_window);
        let sliding = window.map(|window| earlier(Some(window))).transpose()?;
        let earlier = ByWindow { full: earlier(None)?, sliding };
        let chunks = |chunk| match dealt.chunks {
            1 => Chunk::whole(config, input),
            _ => Chunk::cut(config, input, grid, &beside, &earlier, chunk),
        };
        let parts = dealt.own().into_iter().map(chunks).collect::<kernels::Result<_>>()?;
        Ok(Chunks { parts, dealt, line, grid, documents, beside, earlier })
    }

    /// The number of chunks of the micro-batch, on all ranks.
    pub(super) fn count(&self) -> u64 {
        self.dealt.chunks
    }

    /// How the chunks are assigned to ranks.
    pub(super) fn shared(&self) -> Assignment {
        self.dealt
    }

    /// The ranks that have the other chunks.
    pub(super) fn line(&self) -> Option<&'a dyn AxisComm> {
        self.line
    }

    /// The `at`-th local chunk.
    pub(super) fn of(&self, at: usize) -> &Chunk {
        &self.parts[at]
    }

    /// The local chunks, in the order of the sequence.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Chunk> {
        self.parts.iter()
    }

    /// The number of the `at`-th local chunk among all chunks.
    pub(super) fn number(&self, at: usize) -> u64 {
        self.dealt.own()[at]
    }

    /// Tokens of a sequence in a chunk.
    pub(super) fn width(&self) -> i64 {
        self.grid.width
    }

    /// For each sequence: how many tokens of the `at`-th local chunk's first document precede the chunk, and how many
    /// of its last document follow it.
    pub(super) fn crossing(&self, at: usize) -> Vec<[i64; 2]> {
        let mut found = vec![[0; 2]; self.grid.rows as usize];
        let chunk = self.number(at) as i64;
        for part in self.documents.iter().filter_map(|one| self.grid.part(*one, chunk)) {
            let [before, after] = &mut found[part.sequence as usize];
            *before = part.before.max(*before);
            *after = part.after.max(*after);
        }
        found
    }

    /// Indices into [`Chunks::iter`] in the order of the tree of gradients, which keeps the fewest partial sums.
    pub(super) fn by_leaf(&self) -> impl Iterator<Item = usize> + use<> {
        let (dealt, chunks) = (self.dealt, self.dealt.own());
        let leaves = dealt.leaves(dealt.place);
        leaves.map(move |leaf| chunks.partition_point(|chunk| *chunk < dealt.chunk(leaf)))
    }

    /// Begins to fetch the table for [`Chunk::around`]; `tensor` has the rows of all local chunks along `dim`.
    pub(super) fn beside(&self, tensor: &Tensor, dim: i64) -> kernels::Result<PendingTable<'a>> {
        self.beside.fetch(self.line, tensor, dim)
    }

    /// The same for the [`SeenKeys`] of layers with this window.
    pub(super) fn earlier(
        &self,
        window: Option<i64>,
        tensor: &Tensor,
        dim: i64,
    ) -> kernels::Result<PendingTable<'a>> {
        self.earlier.of(window).table.fetch(self.line, tensor, dim)
    }

    /// The first row of a part in the table of [`Chunks::earlier`], and how many rows it has.
    pub(super) fn rows_of(&self, window: Option<i64>, part: KeyPart) -> Rows {
        let EarlierKeys { visible, table } = self.earlier.of(window);
        let Rows { chunk, first, len } = visible.rows(self.documents[part.document], part);
        Rows { chunk, first: table.row(chunk, first), len }
    }

    /// The chunks whose queries see a part, its own first.
    pub(super) fn seen_by(&self, window: Option<i64>, part: KeyPart) -> std::ops::Range<u64> {
        self.earlier.of(window).visible.seen_by(self.documents[part.document], part)
    }

    /// From one f32 per token, `[n]` for each local chunk: those of all tokens in the order of the micro-batch, `[N]`.
    pub(super) fn in_sequence(&self, parts: &[Tensor]) -> kernels::Result<Tensor> {
        if let ([whole], None) = (parts, self.line) {
            return Ok(whole.shallow_clone());
        }
        let stacked = Tensor::f_stack(parts, 0)?;
        let by_chunk = self.of_all("losses of tokens", &stacked)?;
        let by_chunk = by_chunk.f_view([self.dealt.chunks as i64, self.grid.rows, -1])?;
        Ok(by_chunk.f_transpose(0, 1)?.f_reshape([-1])?)
    }

    /// Gathers every rank's `[c, n]`, f32, one row per chunk: those of all chunks, in the order of chunks.
    pub(super) fn of_all(&self, what: &'static str, losses: &Tensor) -> kernels::Result<Tensor> {
        let Some(line) = self.line else { return Ok(losses.shallow_clone()) };
        let Assignment { chunks, degree, place } = self.dealt;
        let give: Vec<Tensor> =
            (0..degree).map(|_| losses.f_reshape([-1])).collect::<std::result::Result<_, _>>()?;
        let take = vec![losses.numel() as i64; degree as usize];
        let mut found = line.begin(what, &give, &take, Kind::Float)?.wait()?;
        found[place as usize] = give[place as usize].shallow_clone();
        let mut by_chunk: Vec<Option<Tensor>> = (0..chunks).map(|_| None).collect();
        for (place, found) in (0..degree).zip(&found) {
            let computed = Assignment { place, ..self.dealt }.own();
            let found = found.f_view([computed.len() as i64, -1])?;
            for (at, chunk) in (0..).zip(computed) {
                by_chunk[chunk as usize] = Some(found.f_select(0, at)?);
            }
        }
        Ok(Tensor::f_stack(&by_chunk.into_iter().flatten().collect::<Vec<_>>(), 0)?)
    }
}

impl Chunk {
    fn whole(config: &ZayaConfig, input: &DeviceMicroBatch) -> kernels::Result<Chunk> {
        Ok(Chunk {
            tokens: input.tokens.shallow_clone(),
            labels: input.labels.shallow_clone(),
            mask: input.mask.shallow_clone(),
            spans: input.spans.clone(),
            keys: ByWindow { full: SeenKeys::whole(input.spans.clone()), sliding: None },
            rotary: rotary_of(config, &input.positions, input)?,
            others: None,
            starts: input.starts.shallow_clone(),
        })
    }

    fn cut(
        config: &ZayaConfig,
        input: &DeviceMicroBatch,
        grid: ChunkGrid,
        beside: &Table,
        earlier: &ByWindow<EarlierKeys>,
        number: u64,
    ) -> kernels::Result<Chunk> {
        let chunk = number as i64;
        let select = |x: &Tensor| {
            x.f_view([grid.rows, -1, grid.width])?
                .f_select(1, chunk)?
                .f_reshape([-1])?
                .f_contiguous()
        };
        let (mut spans, mut around, mut computed, mut starts) = (vec![], vec![], vec![], vec![]);
        for document in &input.spans {
            let Some(part) = grid.part(*document, chunk) else { continue };
            let [first, last] = [part.before.min(REACH), part.after.min(REACH)];
            starts.push(around.len() as i64);
            let begin = around.len() as i64 + first;
            computed.extend(begin..begin + part.span.len);
            around.extend(
                (part.place - first..part.place + part.span.len + last)
                    .map(|place| beside.row(grid.chunk(place), grid.row(part.sequence, place))),
            );
            spans.push(part.span);
        }
        let on = input.tokens.device();
        let on_device = |list: &[i64]| device::integers(on, list);
        let keys = |by| SeenKeys::cut(by, &input.spans, number, on);
        let sliding = earlier.sliding.as_ref().map(keys).transpose()?;
        Ok(Chunk {
            tokens: select(&input.tokens)?,
            labels: select(&input.labels)?,
            mask: select(&input.mask)?,
            spans,
            keys: ByWindow { full: keys(&earlier.full)?, sliding },
            rotary: rotary_of(config, &select(&input.positions)?, input)?,
            others: Some(RemoteRows { around: on_device(&around)?, own: on_device(&computed)? }),
            starts: on_device(&starts)?,
        })
    }

    /// Cosines and sines of the rotary angles of its tokens, `[n, half]`, in layers with a window or without.
    pub(super) fn angles(&self, window: Option<i64>) -> [&Tensor; 2] {
        self.rotary.of(window).each_ref()
    }

    /// The keys that its queries see in layers with this window.
    pub(super) fn seen(&self, window: Option<i64>) -> &SeenKeys {
        self.keys.of(window)
    }

    /// From the table of [`Chunks::beside`], along `dim`: the chunk's rows, and adjacent rows of their documents.
    pub(super) fn around(&self, all: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        self.select(all, dim, |others| &others.around)
    }

    /// The chunk's own rows of the result of [`Chunk::around`].
    pub(super) fn own(&self, around: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        self.select(around, dim, |others| &others.own)
    }

    /// Rows of [`Chunk::around`] where documents, or their parts, begin.
    pub(super) fn starts(&self) -> &Tensor {
        &self.starts
    }

    /// The chunk's own rows in [`Chunk::around`]; `None` where all are its own.
    pub(super) fn counted(&self) -> Option<&Tensor> {
        self.others.as_ref().map(|others| &others.own)
    }

    fn select(
        &self,
        all: &Tensor,
        dim: i64,
        which: impl Fn(&RemoteRows) -> &Tensor,
    ) -> kernels::Result<Tensor> {
        Ok(match &self.others {
            None => all.shallow_clone(),
            Some(others) => all.f_index_select(dim, which(others))?,
        })
    }
}

/// Cosines and sines of the rotary angles at some of the positions of `input`.
fn rotary_of(
    config: &ZayaConfig,
    positions: &Tensor,
    input: &DeviceMicroBatch,
) -> kernels::Result<ByWindow<[Tensor; 2]>> {
    let length = input.tokens.size()[0] / input.rows;
    let of = |theta| angles(positions, length, config.rotary_dim(), theta);
    let [full, sliding] = [false, true].map(|slides| config.theta(slides));
    let sliding = (sliding != full).then(|| of(sliding)).transpose()?;
    Ok(ByWindow { full: of(full)?, sliding })
}

/// Concatenates the results of chunks, or of shards.
pub(super) fn joined(parts: &[Tensor], dim: i64) -> kernels::Result<Tensor> {
    match parts {
        [whole] => Ok(whole.shallow_clone()),
        parts => Ok(Tensor::f_cat(parts, dim)?),
    }
}
