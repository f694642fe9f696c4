//! Gradients on their way out: made for each chunk of a micro-batch, added over chunks, handed on.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::{Fault, Result};
use kernels::ops::{Summed, Table};
use kernels::tree::{Nodes, Sum, blocks};
use tch::{Device, Kind, Tensor};

use super::line::Dealt;
use super::param::ParamId;
use crate::refusal::refused;

/// Where gradients go, each the moment it exists.
pub trait Sink {
    /// Takes the gradient of the loss over the label count with respect to parameter `id`: its shape, f32.
    ///
    /// Each parameter has exactly one in a micro-batch; in which order they come is not promised.
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()>;

    /// Takes what the chunks here add to it where other places of a line have the others: their blocks in the tree, in its
    /// order. All places hand over the same parameters in the same order.
    fn part(&mut self, id: ParamId, _: Term, _: Vec<ChunkSum>) -> Result<()> {
        Err(Fault::bug(format!("nobody adds up the parts of parameter {}", id.index())))
    }
}

/// All gradients of a micro-batch, for who wants them together.
#[derive(Debug, Default)]
pub struct Collected(Vec<Option<Tensor>>);

impl Collected {
    /// The gradients in canonical order.
    pub fn into_vec(self) -> Result<Vec<Tensor>> {
        let missing = || Fault::bug("a parameter has no gradient");
        self.0.into_iter().map(|gradient| gradient.ok_or_else(missing)).collect()
    }
}

impl Sink for Collected {
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        if self.0.len() <= id.index() {
            self.0.resize_with(id.index() + 1, || None);
        }
        match self.0[id.index()].replace(gradient) {
            None => Ok(()),
            Some(_) => Err(Fault::bug(format!("parameter {} has two gradients", id.index()))),
        }
    }
}

/// Gradients of the chunks that are here: each parameter's sum goes to the sink when its last chunk has come.
pub(super) struct Gradients<'a> {
    sink: &'a mut dyn Sink,
    dealt: Dealt,
    /// The chunks here, in the order of the sequence.
    own: Vec<u64>,
    waiting: BTreeMap<(usize, Term), Waiting>,
    /// First terms that wait for second ones, where all chunks are here.
    first: BTreeMap<usize, Tensor>,
    /// Sums over rows of some chunk that are still to be made.
    sums: Vec<(ParamId, u64, Summed)>,
    /// Gradients on a device in fewer bits, where there is one chunk.
    narrow: Vec<(ParamId, Tensor)>,
}

/// The same, as a chunk sees them.
pub(super) struct ChunkGradients<'a, 'b> {
    all: &'a mut Gradients<'b>,
    chunk: u64,
}

/// Which of the sums over chunks that make up a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Term {
    /// There is no other.
    Only,
    /// The second one is added to it.
    First,
    /// Comes when the first one has come.
    Second,
}

/// A sum over the chunks here.
struct Waiting {
    nodes: Nodes<ChunkSum>,
    missing: u64,
}

/// What a chunk, or some that stand together in the tree, add to the gradient of a parameter.
#[derive(Debug)]
pub struct ChunkSum {
    /// The numbers, f32: of the parameter's shape, or some of them in one row.
    pub(crate) gradient: Tensor,
    /// Of a stack of experts, which of them had tokens.
    pub(crate) experts: Option<Used>,
}

/// Which experts had tokens, and where their numbers stand.
#[derive(Clone, Debug)]
pub(crate) struct Used {
    /// By expert.
    pub(crate) flags: Vec<bool>,
    /// Of each run of numbers of one expert: which one, where it begins, how many they are.
    spans: Vec<(usize, i64, i64)>,
}

impl<'a> Gradients<'a> {
    /// To `sink`, of the chunks that `dealt` says are here.
    pub(super) fn new(sink: &'a mut dyn Sink, dealt: Dealt) -> Self {
        let (waiting, first) = (BTreeMap::new(), BTreeMap::new());
        let (own, sums, narrow) = (dealt.own(), Vec::new(), Vec::new());
        Gradients { sink, dealt, own, waiting, first, sums, narrow }
    }

    /// Where the `at`-th chunk here hands its gradients.
    pub(super) fn of(&mut self, at: usize) -> ChunkGradients<'_, 'a> {
        let chunk = self.own[at];
        ChunkGradients { all: self, chunk }
    }

    /// Makes the sums over rows that wait, all at once, and f32 of what waits in fewer bits, and hands them on: a layer does so
    /// at its end.
    pub(super) fn settle(&mut self, ops: Table) -> Result<()> {
        let (places, narrow): (Vec<_>, Vec<_>) = self.narrow.drain(..).unzip();
        let wide = ops.all_wide(narrow).map_err(refused)?;
        places.into_iter().zip(wide).try_for_each(|(id, wide)| self.sink.gradient(id, wide))?;
        let (places, sums): (Vec<_>, Vec<_>) =
            self.sums.drain(..).map(|(id, chunk, sum)| ((id, chunk), sum)).unzip();
        let made = ops.sums(sums).map_err(refused)?;
        places.into_iter().zip(made).try_for_each(|((id, chunk), gradient)| {
            self.take(id, Term::Only, chunk, ChunkSum { gradient, experts: None })
        })
    }

    /// Hands on a gradient that is a sum over chunks already: in f32, in which everything goes on from here.
    pub(super) fn whole(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        if gradient.kind() == Kind::Float || gradient.device() == Device::Cpu {
            return self.sink.gradient(id, wide(&gradient)?);
        }
        let gradient = gradient.f_contiguous().map_err(|error| refused(error.into()))?;
        self.narrow.push((id, gradient));
        Ok(())
    }

    fn take(&mut self, id: ParamId, term: Term, chunk: u64, part: ChunkSum) -> Result<()> {
        let dealt = self.dealt;
        if dealt.chunks == 1 {
            return self.whole(id, part.gradient);
        }
        let part = ChunkSum { gradient: wide(&part.gradient)?, ..part };
        let leaves = dealt.leaves(dealt.place);
        let missing = leaves.end - leaves.start;
        let begin = || Waiting { nodes: Nodes::new(std::slice::from_ref(&leaves)), missing };
        let sum = self.waiting.entry((id.index(), term)).or_insert_with(begin);
        sum.nodes.push(dealt.leaf(chunk), part);
        sum.missing -= 1;
        if sum.missing > 0 {
            return Ok(());
        }
        let sum = self.waiting.remove(&(id.index(), term)).ok_or_else(missing_chunk)?;
        self.complete(id, term, sum.nodes)
    }

    /// All chunks here have come.
    fn complete(&mut self, id: ParamId, term: Term, mut sum: Nodes<ChunkSum>) -> Result<()> {
        if self.dealt.degree > 1 {
            let leaves = self.dealt.leaves(self.dealt.place);
            let blocks = blocks(leaves.start, leaves.end).into_iter();
            let blocks = blocks.map(|(_, first)| sum.take(first).ok_or_else(missing_chunk));
            return self.sink.part(id, term, blocks.collect::<Result<_>>()?);
        }
        let gradient = sum.finish().ok_or_else(missing_chunk)?.gradient;
        match term {
            Term::Only => self.sink.gradient(id, gradient),
            Term::First => {
                self.first.insert(id.index(), gradient);
                Ok(())
            }
            Term::Second => {
                let first = self.first.remove(&id.index()).ok_or_else(missing_chunk)?;
                self.sink.gradient(id, first.sum(gradient))
            }
        }
    }
}

fn missing_chunk() -> Fault {
    Fault::bug("a chunk of a sum is missing")
}

impl ChunkGradients<'_, '_> {
    /// Of a stack of experts: `used` says which had tokens. The others have no part in the sum.
    pub(super) fn experts(&mut self, id: ParamId, gradient: Tensor, used: &[bool]) -> Result<()> {
        if used.is_empty() {
            return self.all.whole(id, gradient);
        }
        let part = ChunkSum::experts(wide(&gradient)?, used);
        self.all.take(id, Term::Only, self.chunk, part)
    }

    /// One of several sums over chunks that make up a gradient.
    pub(super) fn term(&mut self, id: ParamId, term: Term, gradient: Tensor) -> Result<()> {
        self.all.take(id, term, self.chunk, ChunkSum { gradient, experts: None })
    }
}

/// Hands on the gradient of a vector: at once where it is made, otherwise when its layer ends.
pub(super) fn emit_sum(sink: &mut ChunkGradients<'_, '_>, id: ParamId, sum: Summed) -> Result<()> {
    match sum {
        Summed::Made(gradient) => emit(sink, id, gradient),
        waiting => {
            sink.all.sums.push((id, sink.chunk, waiting));
            Ok(())
        }
    }
}

/// Hands on a gradient.
pub(super) fn emit(sink: &mut ChunkGradients<'_, '_>, id: ParamId, gradient: Tensor) -> Result<()> {
    sink.term(id, Term::Only, gradient)
}

fn wide(gradient: &Tensor) -> Result<Tensor> {
    gradient.f_to_kind(Kind::Float).map_err(|error| refused(error.into()))
}

impl ChunkSum {
    fn experts(gradient: Tensor, used: &[bool]) -> ChunkSum {
        let gradient = gradient.contiguous();
        let whole = 0..gradient.numel() as i64;
        let experts = Used::of(used.to_vec(), gradient.numel() as i64, &[whole]);
        ChunkSum { gradient, experts: Some(experts) }
    }

    /// Some ranges of its numbers, one after the other in memory of their own.
    pub(crate) fn cut(&self, ranges: &[Range<i64>]) -> ChunkSum {
        let all = self.gradient.reshape([-1]);
        let parts = ranges.iter().map(|range| all.narrow(0, range.start, range.end - range.start));
        let parts: Vec<Tensor> = parts.collect();
        let gradient = match parts.is_empty() {
            // An alias, be it of nothing, would keep the whole gradient.
            true => Tensor::empty([0], (all.kind(), all.device())),
            false => Tensor::cat(&parts, 0),
        };
        let elements = all.numel() as i64;
        let experts =
            self.experts.as_ref().map(|used| Used::of(used.flags.clone(), elements, ranges));
        ChunkSum { gradient, experts }
    }
}

impl Used {
    /// Of a stack of `elements` numbers in all, of which `ranges` stand here, one after the other.
    pub(crate) fn of(flags: Vec<bool>, elements: i64, ranges: &[Range<i64>]) -> Used {
        let (each, mut spans, mut at) = (elements / flags.len().max(1) as i64, Vec::new(), 0);
        for range in ranges {
            let mut first = range.start;
            while first < range.end {
                let expert = first / each;
                let end = range.end.min((expert + 1) * each);
                spans.push((expert as usize, at, end - first));
                (at, first) = (at + end - first, end);
            }
        }
        Used { flags, spans }
    }
}

impl Sum for ChunkSum {
    /// An expert that had tokens in one of both is copied, never added to zero.
    fn sum(self, right: ChunkSum) -> ChunkSum {
        let ChunkSum { gradient, experts } = self;
        let (Some(mut experts), Some(others)) = (experts, &right.experts) else {
            return ChunkSum { gradient: gradient.sum(right.gradient), experts: None };
        };
        let (all, theirs) = (gradient.view([-1]), right.gradient.reshape([-1]));
        for (expert, first, len) in &experts.spans {
            let (mut own, other) = (all.narrow(0, *first, *len), theirs.narrow(0, *first, *len));
            match (experts.flags[*expert], others.flags[*expert]) {
                (_, false) => {}
                (true, true) => drop(own.sum(other)),
                (false, true) => own.copy_(&other),
            }
        }
        experts.flags.iter_mut().zip(&others.flags).for_each(|(here, there)| *here |= *there);
        ChunkSum { gradient, experts: Some(experts) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// -0.0 of an expert that one chunk used stays what it is; zero added to it would be 0.0.
    #[test]
    fn an_expert_without_tokens_is_absent() {
        let part = |values: [f32; 3], used: [bool; 3]| {
            ChunkSum::experts(Tensor::from_slice(&values).view([3, 1]), &used)
        };
        let bits = |part: &ChunkSum| {
            let values = Vec::<f32>::try_from(part.gradient.reshape([-1])).unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let [left, right] = [[true, false, true], [false, false, true]];
        let sum = part([-0.0, 0.0, 1.0], left).sum(part([0.0, 0.0, 2.0], right));
        assert_eq!(bits(&sum), [-0.0f32, 0.0, 3.0].map(f32::to_bits));
        assert_eq!(sum.experts.as_ref().unwrap().flags, [true, false, true]);
        let sum = part([0.0, 0.0, 2.0], right).sum(part([-0.0, 0.0, 1.0], left));
        assert_eq!(bits(&sum), [-0.0f32, 0.0, 3.0].map(f32::to_bits));
    }
}
