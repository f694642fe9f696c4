//! Gradients on their way out: made for each chunk of a micro-batch, added over chunks, handed on.

use std::collections::BTreeMap;

use contract::{Fault, Result};
use kernels::tree::Sum;
use tch::{Kind, Tensor};

use super::cut::OverChunks;
use super::param::ParamId;
use crate::refusal::refused;

/// Where gradients go, each the moment it exists.
pub trait Sink {
    /// Takes the gradient of the loss over the label count with respect to parameter `id`: its shape, f32.
    ///
    /// Each parameter has exactly one in a micro-batch; in which order they come is not promised.
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()>;
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

/// Gradients of the chunks of a micro-batch: each parameter's sum goes to the sink when its last chunk has come.
pub(super) struct Gradients<'a> {
    sink: &'a mut dyn Sink,
    chunks: u64,
    waiting: BTreeMap<usize, OverChunks<Part>>,
}

/// The same, as a chunk sees them.
pub(super) struct ChunkGradients<'a, 'b> {
    all: &'a mut Gradients<'b>,
    chunk: u64,
}

/// What a chunk adds to the gradient of a parameter.
struct Part {
    gradient: Tensor,
    /// Of a stack of experts, which of them had tokens.
    used: Option<Vec<bool>>,
}

impl<'a> Gradients<'a> {
    /// To `sink`, of a micro-batch of `chunks`.
    pub(super) fn new(sink: &'a mut dyn Sink, chunks: usize) -> Self {
        Gradients { sink, chunks: chunks as u64, waiting: BTreeMap::new() }
    }

    /// Where chunk number `chunk` hands its gradients.
    pub(super) fn of(&mut self, chunk: usize) -> ChunkGradients<'_, 'a> {
        ChunkGradients { all: self, chunk: chunk as u64 }
    }

    /// Hands on a gradient that is a sum over chunks already.
    pub(super) fn whole(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        self.sink.gradient(id, wide(&gradient)?)
    }

    fn take(&mut self, id: ParamId, chunk: u64, part: Part) -> Result<()> {
        if self.chunks == 1 {
            return self.sink.gradient(id, part.gradient);
        }
        let chunks = self.chunks;
        let sum = self.waiting.entry(id.index()).or_insert_with(|| OverChunks::new(chunks));
        sum.push(chunk, part);
        match sum.is_complete().then(|| self.waiting.remove(&id.index())).flatten() {
            Some(sum) => self.sink.gradient(id, sum.finish()?.gradient),
            None => Ok(()),
        }
    }
}

impl ChunkGradients<'_, '_> {
    /// Of a stack of experts: `used` says which had tokens. The others have no part in the sum.
    pub(super) fn experts(&mut self, id: ParamId, gradient: Tensor, used: &[bool]) -> Result<()> {
        let part = Part { gradient: wide(&gradient)?, used: Some(used.to_vec()) };
        self.all.take(id, self.chunk, part)
    }
}

/// Hands on a gradient in f32, in which everything goes on from here.
pub(super) fn emit(sink: &mut ChunkGradients<'_, '_>, id: ParamId, gradient: Tensor) -> Result<()> {
    let part = Part { gradient: wide(&gradient)?, used: None };
    sink.all.take(id, sink.chunk, part)
}

fn wide(gradient: &Tensor) -> Result<Tensor> {
    gradient.f_to_kind(Kind::Float).map_err(|error| refused(error.into()))
}

impl Sum for Part {
    /// An expert that had tokens in one of both is copied, never added to zero.
    fn sum(self, right: Part) -> Part {
        let Part { gradient, used } = self;
        let (Some(mut used), Some(others)) = (used, &right.used) else {
            return Part { gradient: gradient.sum(right.gradient), used: None };
        };
        for (expert, (here, there)) in (0i64..).zip(used.iter_mut().zip(others)) {
            let (mut own, other) = (gradient.get(expert), right.gradient.get(expert));
            match (*here, *there) {
                (_, false) => {}
                (true, true) => drop(own.sum(other)),
                (false, true) => own.copy_(&other),
            }
            *here |= *there;
        }
        Part { gradient, used: Some(used) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// -0.0 of an expert that one chunk used stays what it is; zero added to it would be 0.0.
    #[test]
    fn an_expert_without_tokens_is_absent() {
        let part = |values: [f32; 3], used: [bool; 3]| Part {
            gradient: Tensor::from_slice(&values).view([3, 1]),
            used: Some(used.to_vec()),
        };
        let bits = |part: &Part| {
            let values = Vec::<f32>::try_from(part.gradient.reshape([-1])).unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let [left, right] = [[true, false, true], [false, false, true]];
        let sum = part([-0.0, 0.0, 1.0], left).sum(part([0.0, 0.0, 2.0], right));
        assert_eq!(bits(&sum), [-0.0f32, 0.0, 3.0].map(f32::to_bits));
        assert_eq!(sum.used.as_deref(), Some(&[true, false, true][..]));
        let sum = part([0.0, 0.0, 2.0], right).sum(part([-0.0, 0.0, 1.0], left));
        assert_eq!(bits(&sum), [-0.0f32, 0.0, 3.0].map(f32::to_bits));
    }
}
