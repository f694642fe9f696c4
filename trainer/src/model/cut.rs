//! The canonical cut of a micro-batch: into chunks of its sequences, and shards of its weights.
//!
//! Chunk c is the c-th of C equal parts of every sequence. Every operation is called for one chunk at a time, so that its bits
//! are the same whoever computes the chunk. What a chunk reads of the others are operands, never sums: earlier keys and values
//! ([`Chunk::keys`]), and the rows beside it that convolutions and the value shift reach ([`Chunk::around`]). Here one process
//! holds all chunks and takes both from their rows in the order of chunks; where ranks share them, these two functions exchange.
//!
//! ```text
//! sequences        a0 a1 a2 a3 | a4 a5 a6 a7        C = 2
//!                  b0 b1 b2 b3 | b4 b5 b6 b7
//! order of chunks  a0 a1 a2 a3 b0 b1 b2 b3 | a4 a5 a6 a7 b4 b5 b6 b7
//! ```

use contract::{Fault, Result};
use kernels::ops::Span;
use kernels::tree::{Nodes, Sum};
use tch::Tensor;

use super::ZayaConfig;
use super::input::Prepared;
use super::layers::rotary::Rotary;
use crate::refusal::refused;

/// Rows before and after a part of a document that its convolutions reach: two that each see the token before.
const REACH: i64 = 2;

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

/// The chunks of a micro-batch, on the device.
pub(super) struct Chunks {
    parts: Vec<Chunk>,
    /// Sequences.
    rows: i64,
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
    pub(super) rotary: Rotary,
    /// What it reads of other chunks; absent where there is no other.
    others: Option<Others>,
    /// Rows of [`Chunk::around`] at which documents begin, i64.
    starts: Tensor,
}

/// What a chunk reads of others, as rows in the order of chunks.
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
    /// Its row in the order of chunks.
    pub(super) row: i64,
    /// How many.
    pub(super) len: i64,
}

/// Where the tokens of a cut micro-batch stand.
#[derive(Clone, Copy)]
struct Grid {
    /// Tokens in a sequence.
    length: i64,
    /// Tokens of a sequence in a chunk.
    width: i64,
    /// Sequences.
    rows: i64,
}

impl Chunks {
    /// Cuts a micro-batch into `count` chunks.
    pub(super) fn new(config: &ZayaConfig, input: &Prepared, count: u64) -> Result<Chunks> {
        let (count, length) = (count as i64, input.tokens.size()[0] / input.rows);
        if count < 1 || length % count != 0 {
            return Err(Fault::usage("sequences cannot be cut into equal chunks")
                .at("context_chunks")
                .found(format!("{count} chunks of {length} tokens"))
                .wanted("a divisor of seq_len"));
        }
        let grid = Grid { length, width: length / count, rows: input.rows };
        let parts = (0..count).map(|chunk| match count {
            1 => Chunk::whole(config, input),
            _ => Chunk::cut(config, input, grid, chunk),
        });
        let parts = parts.collect::<kernels::Result<_>>().map_err(refused)?;
        Ok(Chunks { parts, rows: input.rows })
    }

    /// How many.
    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }

    /// Chunk number `chunk`.
    pub(super) fn of(&self, chunk: usize) -> &Chunk {
        &self.parts[chunk]
    }

    /// All, in the order of the sequence.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Chunk> {
        self.parts.iter()
    }

    /// Their numbers in the order of the tree of parameter gradients, in which the fewest sums wait.
    pub(super) fn by_leaf(&self) -> impl Iterator<Item = usize> + use<> {
        let count = self.parts.len();
        (0..count).map(move |leaf| if leaf % 2 == 0 { leaf / 2 } else { count - 1 - leaf / 2 })
    }

    /// One number a token by chunk, `[n]` each, in the order of the micro-batch, `[N]`.
    pub(super) fn in_sequence(&self, parts: &[Tensor]) -> kernels::Result<Tensor> {
        if let [whole] = parts {
            return Ok(whole.shallow_clone());
        }
        let by_chunk = Tensor::f_stack(parts, 0)?;
        let by_chunk = by_chunk.f_view([parts.len() as i64, self.rows, -1])?;
        Ok(by_chunk.f_transpose(0, 1)?.f_reshape([-1])?)
    }
}

impl Chunk {
    fn whole(config: &ZayaConfig, input: &Prepared) -> kernels::Result<Chunk> {
        Ok(Chunk {
            tokens: input.tokens.shallow_clone(),
            labels: input.labels.shallow_clone(),
            mask: input.mask.shallow_clone(),
            spans: input.spans.clone(),
            rotary: Rotary::new(config, &input.positions)?,
            others: None,
            starts: input.starts.shallow_clone(),
        })
    }

    fn cut(
        config: &ZayaConfig,
        input: &Prepared,
        grid: Grid,
        chunk: i64,
    ) -> kernels::Result<Chunk> {
        let own = |x: &Tensor| {
            x.f_view([grid.rows, -1, grid.width])?
                .f_select(1, chunk)?
                .f_reshape([-1])?
                .f_contiguous()
        };
        let (mut spans, mut around, mut mine, mut starts) = (vec![], vec![], vec![], vec![]);
        let (mut keys, mut pieces) = (vec![], vec![]);
        for document in &input.spans {
            let Some(part) = grid.part(*document, chunk) else { continue };
            let [first, last] = [part.before.min(REACH), part.after.min(REACH)];
            starts.push(around.len() as i64);
            let begin = around.len() as i64 + first;
            mine.extend(begin..begin + part.span.len);
            around.extend(
                (part.place - first..part.place + part.span.len + last)
                    .map(|place| grid.row(part.sequence, place)),
            );
            spans.push(part.span);
            pieces.extend(grid.pieces(part, keys.len() as i64));
            keys.extend(
                (part.place - part.before..part.place + part.span.len)
                    .map(|place| grid.row(part.sequence, place)),
            );
        }
        let there = |list: &[i64]| Tensor::f_from_slice(list)?.f_to_device(input.tokens.device());
        Ok(Chunk {
            tokens: own(&input.tokens)?,
            labels: own(&input.labels)?,
            mask: own(&input.mask)?,
            spans,
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

    /// Of `all` rows in the order of chunks, along `dim`: the chunk's own, and those beside them in their documents.
    pub(super) fn around(&self, all: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        self.select(all, dim, |others| &others.around)
    }

    /// The chunk's own rows of what [`Chunk::around`] answered with.
    pub(super) fn own(&self, around: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        self.select(around, dim, |others| &others.own)
    }

    /// Of `all` rows in the order of chunks, along `dim`: every one that a query of the chunk sees, span by span.
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

/// What lies in a chunk of a document.
#[derive(Clone, Copy)]
struct DocumentPart {
    sequence: i64,
    /// Place of its first token in the sequence.
    place: i64,
    span: Span,
    before: i64,
    after: i64,
}

impl Grid {
    /// Row of a token in the order of chunks.
    fn row(self, sequence: i64, place: i64) -> i64 {
        let Grid { width, rows, .. } = self;
        (place / width * rows + sequence) * width + place % width
    }

    /// What of a document lies in a chunk.
    fn part(self, document: Span, chunk: i64) -> Option<DocumentPart> {
        let (sequence, begins) = (document.start / self.length, document.start % self.length);
        let (left, ends) = (chunk * self.width, begins + document.len);
        let (first, end) = (begins.max(left), ends.min(left + self.width));
        let (before, len) = (first - begins, end - first);
        let span = Span { start: sequence * self.width + first - left, len, before };
        (len > 0).then_some(DocumentPart {
            sequence,
            place: first,
            span,
            before,
            after: ends - end,
        })
    }

    /// The keys that a part of a document sees, by chunk; its keys begin at `key`.
    fn pieces(self, part: DocumentPart, key: i64) -> impl Iterator<Item = Piece> {
        let begins = part.place - part.before;
        let end = part.place + part.span.len;
        (begins / self.width..=(end - 1) / self.width).map(move |chunk| {
            let first = begins.max(chunk * self.width);
            let len = end.min((chunk + 1) * self.width) - first;
            Piece { key: key + first - begins, row: self.row(part.sequence, first), len }
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

/// A sum over chunks: a tree in which chunks stand in the order 0, C-1, 1, C-2, ..., so that what a rank computes where the
/// first chunks are dealt with the last ones is a node. Chunks may come in any order.
pub(super) struct OverChunks<T> {
    nodes: Nodes<T>,
    count: u64,
    missing: u64,
}

impl<T: Sum> OverChunks<T> {
    /// Of `count` chunks.
    pub(super) fn new(count: u64) -> Self {
        OverChunks { nodes: Nodes::new(std::slice::from_ref(&(0..count))), count, missing: count }
    }

    /// Takes what chunk number `chunk` comes to; each once.
    pub(super) fn push(&mut self, chunk: u64, value: T) {
        let leaf = if 2 * chunk < self.count { 2 * chunk } else { 2 * (self.count - chunk) - 1 };
        self.nodes.push(leaf, value);
        self.missing = self.missing.saturating_sub(1);
    }

    /// Whether all have come.
    pub(super) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// The sum of all.
    pub(super) fn finish(self) -> Result<T> {
        self.nodes.finish().ok_or_else(|| Fault::bug("a chunk of a sum is missing"))
    }
}
