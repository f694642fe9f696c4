//! The canonical cut of a micro-batch: into chunks of its sequences, and shards of its weights.
//!
//! Chunk c is the c-th of C equal parts of every sequence. Every operation is called for one chunk at a time, so that its bits
//! are the same whoever computes the chunk. What a chunk reads of the others are operands, never sums: earlier keys and values
//! ([`Chunk::keys`]), and the rows beside it that convolutions and the value shift reach ([`Chunk::around`]). Both take them from
//! the rows of the chunks that are here, in the order of chunks, and below them those of the places of a line that has the others
//! ([`Chunks::beside`], [`Chunks::earlier`]); one process that has all chunks exchanges nothing.
//!
//! ```text
//! sequences        a0 a1 a2 a3 | a4 a5 a6 a7        C = 2
//!                  b0 b1 b2 b3 | b4 b5 b6 b7
//! order of chunks  a0 a1 a2 a3 b0 b1 b2 b3 | a4 a5 a6 a7 b4 b5 b6 b7
//! ```

use std::cell::OnceCell;

use contract::{Fault, Result};
use kernels::device;
use kernels::ops::Span;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::grid::{Grid, REACH};
use super::input::Prepared;
use super::line::{Dealt, Fetched, Line, Rows, Table};
use super::rotary::Rotary;
use crate::refusal::refused;

/// Into how many parts a micro-batch is cut inside; decides bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Equal parts of every sequence.
    pub chunks: u64,
    /// Parts of heads, of inner widths and of the vocabulary.
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

/// The chunks of a micro-batch that are computed here, on the device.
pub(super) struct Chunks<'a> {
    /// In the order of the sequence.
    parts: Vec<Chunk>,
    dealt: Dealt,
    line: Option<&'a dyn Line>,
    grid: Grid,
    /// Documents of the whole micro-batch.
    documents: Vec<Span>,
    /// With what convolutions and the value shift reach.
    beside: Table,
    /// With earlier keys and values.
    earlier: Table,
}

/// A part of every sequence.
pub(super) struct Chunk {
    /// `[n]`, i64.
    pub(super) tokens: Tensor,
    /// `[n]`, i64.
    pub(super) labels: Tensor,
    /// `[n]`, f32: 1 or 0.
    pub(super) mask: Tensor,
    /// Documents, or what of them lies here; in order, covering every token.
    pub(super) spans: Vec<Span>,
    /// What attention made of them in the first layer.
    pub(super) attending: OnceCell<Tensor>,
    pub(super) rotary: Rotary,
    /// What it reads of other chunks; absent where there is no other.
    others: Option<Others>,
    /// Rows of [`Chunk::around`] at which documents begin, i64.
    starts: Tensor,
}

/// What a chunk reads of others, as rows of a table.
struct Others {
    /// Each part of a document with what stands beside it, i64.
    around: Tensor,
    /// Which of these are the chunk's own, i64.
    own: Tensor,
    /// Every key that its queries see, span by span, i64.
    keys: Tensor,
    /// The same by chunk.
    pieces: Vec<Piece>,
}

/// Keys of one document that lie in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The first among the keys that the reading chunk sees.
    pub(super) key: i64,
    /// Where they lie: in which document and chunk.
    pub(super) of: KeyPart,
    /// How many.
    pub(super) len: i64,
}

/// What lies of a document in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KeyPart {
    /// Of the micro-batch, counted from 0.
    pub(super) document: usize,
    pub(super) chunk: u64,
}

impl<'a> Chunks<'a> {
    /// Cuts a micro-batch into `count` chunks, of which those of this place of `line` are made; all, where there is no line.
    pub(super) fn new(
        config: &ZayaConfig,
        input: &Prepared,
        count: u64,
        line: Option<&'a dyn Line>,
    ) -> Result<Chunks<'a>> {
        let length = input.tokens.size()[0] / input.rows;
        let dealt = line.map_or(Dealt::alone(count), |line| Dealt {
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
        let grid = Grid { length, width: length / count as i64, rows: input.rows };
        Chunks::dealt(config, input, grid, (dealt, line)).map_err(refused)
    }

    fn dealt(
        config: &ZayaConfig,
        input: &Prepared,
        grid: Grid,
        (dealt, line): (Dealt, Option<&'a dyn Line>),
    ) -> kernels::Result<Chunks<'a>> {
        let (size, device) = (grid.rows * grid.width, input.tokens.device());
        let documents = input.spans.clone();
        let none = |_: u64| Vec::new();
        let [beside, earlier] = match dealt.degree {
            1 => [Table::new(dealt, size, none, device)?, Table::new(dealt, size, none, device)?],
            _ => [
                Table::new(dealt, size, |place| grid.beside(dealt, &documents, place), device)?,
                Table::new(dealt, size, |place| grid.earlier(dealt, &documents, place), device)?,
            ],
        };
        let chunks = |chunk| match dealt.chunks {
            1 => Chunk::whole(config, input),
            _ => Chunk::cut(config, input, (grid, &beside, &earlier), chunk),
        };
        let parts = dealt.own().into_iter().map(chunks).collect::<kernels::Result<_>>()?;
        Ok(Chunks { parts, dealt, line, grid, documents, beside, earlier })
    }

    /// How many there are, here and elsewhere.
    pub(super) fn count(&self) -> u64 {
        self.dealt.chunks
    }

    /// Who has which.
    pub(super) fn shared(&self) -> Dealt {
        self.dealt
    }

    /// The places that have the others.
    pub(super) fn line(&self) -> Option<&'a dyn Line> {
        self.line
    }

    /// The `at`-th of those here.
    pub(super) fn of(&self, at: usize) -> &Chunk {
        &self.parts[at]
    }

    /// Those here, in the order of the sequence.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Chunk> {
        self.parts.iter()
    }

    /// Which one the `at`-th of those here is of all.
    pub(super) fn number(&self, at: usize) -> u64 {
        self.dealt.own()[at]
    }

    /// Tokens of a sequence in a chunk.
    pub(super) fn width(&self) -> i64 {
        self.grid.width
    }

    /// By sequence, how many tokens stand before the `at`-th chunk here of the document with which it begins, and how many
    /// after it of the one with which it ends.
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

    /// Places in [`Chunks::iter`] in the order of the tree of parameter gradients, in which the fewest sums wait.
    pub(super) fn by_leaf(&self) -> impl Iterator<Item = usize> + use<> {
        let (dealt, own) = (self.dealt, self.dealt.own());
        let leaves = dealt.leaves(dealt.place);
        leaves.map(move |leaf| own.partition_point(|chunk| *chunk < dealt.chunk(leaf)))
    }

    /// Begins to bring together the rows of [`Chunk::around`], of which `own` are those of all chunks here, along `dim`.
    pub(super) fn beside(&self, own: &Tensor, dim: i64) -> kernels::Result<Fetched<'a>> {
        self.beside.fetch(self.line, own, dim)
    }

    /// The same of [`Chunk::keys`].
    pub(super) fn earlier(&self, own: &Tensor, dim: i64) -> kernels::Result<Fetched<'a>> {
        self.earlier.fetch(self.line, own, dim)
    }

    /// Where a part of a document lies: its first row in the table of [`Chunks::earlier`], and how many it has.
    pub(super) fn rows_of(&self, part: KeyPart) -> Rows {
        let Rows { chunk, first, len } =
            self.grid.rows_of(self.documents[part.document], part.chunk);
        Rows { chunk, first: self.earlier.row(chunk, first), len }
    }

    /// The chunks whose queries see a part of a document: its own to the last that the document reaches.
    pub(super) fn seen_by(&self, part: KeyPart) -> std::ops::Range<u64> {
        part.chunk..self.grid.reach(self.documents[part.document]).end
    }

    /// One number a token, f32, of the chunks here, `[n]` each: of all tokens in the order of the micro-batch, `[N]`.
    pub(super) fn in_sequence(&self, parts: &[Tensor]) -> kernels::Result<Tensor> {
        if let ([whole], None) = (parts, self.line) {
            return Ok(whole.shallow_clone());
        }
        let own = Tensor::f_stack(parts, 0)?;
        let by_chunk = self.of_all("losses of tokens", &own)?;
        let by_chunk = by_chunk.f_view([self.dealt.chunks as i64, self.grid.rows, -1])?;
        Ok(by_chunk.f_transpose(0, 1)?.f_reshape([-1])?)
    }

    /// What every place has for its chunks, `[c, n]`, f32: of all of them, in the order of chunks.
    pub(super) fn of_all(&self, what: &'static str, own: &Tensor) -> kernels::Result<Tensor> {
        let Some(line) = self.line else { return Ok(own.shallow_clone()) };
        let Dealt { chunks, degree, place } = self.dealt;
        let give: Vec<Tensor> =
            (0..degree).map(|_| own.f_reshape([-1])).collect::<std::result::Result<_, _>>()?;
        let take = vec![own.numel() as i64; degree as usize];
        let mut found = line.begin(what, &give, &take, Kind::Float)?.wait()?;
        found[place as usize] = give[place as usize].shallow_clone();
        let mut by_chunk: Vec<Option<Tensor>> = (0..chunks).map(|_| None).collect();
        for (place, found) in (0..degree).zip(&found) {
            let theirs = Dealt { place, ..self.dealt }.own();
            let found = found.f_view([theirs.len() as i64, -1])?;
            for (at, chunk) in (0..).zip(theirs) {
                by_chunk[chunk as usize] = Some(found.f_select(0, at)?);
            }
        }
        Ok(Tensor::f_stack(&by_chunk.into_iter().flatten().collect::<Vec<_>>(), 0)?)
    }
}

impl Chunk {
    fn whole(config: &ZayaConfig, input: &Prepared) -> kernels::Result<Chunk> {
        Ok(Chunk {
            tokens: input.tokens.shallow_clone(),
            labels: input.labels.shallow_clone(),
            mask: input.mask.shallow_clone(),
            spans: input.spans.clone(),
            attending: OnceCell::new(),
            rotary: Rotary::new(config, &input.positions)?,
            others: None,
            starts: input.starts.shallow_clone(),
        })
    }

    fn cut(
        config: &ZayaConfig,
        input: &Prepared,
        (grid, beside, earlier): (Grid, &Table, &Table),
        number: u64,
    ) -> kernels::Result<Chunk> {
        let chunk = number as i64;
        let own = |x: &Tensor| {
            x.f_view([grid.rows, -1, grid.width])?
                .f_select(1, chunk)?
                .f_reshape([-1])?
                .f_contiguous()
        };
        let (mut spans, mut around, mut mine, mut starts) = (vec![], vec![], vec![], vec![]);
        let (mut keys, mut pieces) = (vec![], vec![]);
        for (index, document) in input.spans.iter().enumerate() {
            let Some(part) = grid.part(*document, chunk) else { continue };
            let [first, last] = [part.before.min(REACH), part.after.min(REACH)];
            starts.push(around.len() as i64);
            let begin = around.len() as i64 + first;
            mine.extend(begin..begin + part.span.len);
            around.extend(
                (part.place - first..part.place + part.span.len + last)
                    .map(|place| beside.row(grid.chunk(place), grid.row(part.sequence, place))),
            );
            spans.push(part.span);
            for chunk in grid.reach(*document).start..=number {
                let rows = grid.rows_of(*document, chunk);
                let of = KeyPart { document: index, chunk };
                pieces.push(Piece { key: keys.len() as i64, of, len: rows.len });
                let first = earlier.row(chunk, rows.first);
                keys.extend(first..first + rows.len);
            }
        }
        let there = |list: &[i64]| device::integers(input.tokens.device(), list);
        Ok(Chunk {
            tokens: own(&input.tokens)?,
            labels: own(&input.labels)?,
            mask: own(&input.mask)?,
            spans,
            attending: OnceCell::new(),
            rotary: Rotary::new(config, &own(&input.positions)?)?,
            others: Some(Others {
                around: there(&around)?,
                own: there(&mine)?,
                keys: there(&keys)?,
                pieces,
            }),
            starts: there(&starts)?,
        })
    }

    /// Of the table of [`Chunks::beside`], along `dim`: the chunk's own rows, and those beside them in their documents.
    pub(super) fn around(&self, all: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        self.select(all, dim, |others| &others.around)
    }

    /// The chunk's own rows of what [`Chunk::around`] answered with.
    pub(super) fn own(&self, around: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        self.select(around, dim, |others| &others.own)
    }

    /// Of the table of [`Chunks::earlier`], along `dim`: every row that a query of the chunk sees, span by span.
    pub(super) fn keys(&self, all: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        self.select(all, dim, |others| &others.keys)
    }

    /// Rows of [`Chunk::around`] at which documents begin, or what there is of them.
    pub(super) fn starts(&self) -> &Tensor {
        &self.starts
    }

    /// Rows of [`Chunk::around`] that are its own; absent where all are.
    pub(super) fn counted(&self) -> Option<&Tensor> {
        self.others.as_ref().map(|others| &others.own)
    }

    /// The keys that its queries see by chunk and document; nothing where there is one chunk.
    pub(super) fn pieces(&self) -> &[Piece] {
        self.others.as_ref().map_or(&[], |others| &others.pieces)
    }

    fn select(
        &self,
        all: &Tensor,
        dim: i64,
        which: impl Fn(&Others) -> &Tensor,
    ) -> kernels::Result<Tensor> {
        Ok(match &self.others {
            None => all.shallow_clone(),
            Some(others) => all.f_index_select(dim, which(others))?,
        })
    }
}

/// What chunks come to, in one row after the other.
pub(super) fn joined(parts: &[Tensor], dim: i64) -> kernels::Result<Tensor> {
    match parts {
        [whole] => Ok(whole.shallow_clone()),
        parts => Ok(Tensor::f_cat(parts, dim)?),
    }
}
