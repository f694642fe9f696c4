//! What a step moves, and how main memory does it.

use tch::Tensor;

use super::Ops;
use crate::{Result, checksum};

/// The numbers of one step of AdamW, rounded to what the elements are computed in.
#[derive(Clone, Copy, Debug, Default)]
pub struct AdamW {
    /// What a weight is multiplied with first: 1 less the learning rate times the decay.
    pub keep: f32,
    /// How far a first moment goes towards the gradient.
    pub first: f32,
    /// How far a second moment goes towards the gradient's square.
    pub second: f32,
    /// What the root of a second moment is divided by.
    pub root: f32,
    /// Added to that.
    pub eps: f32,
    /// What a first moment over that is multiplied with.
    pub rate: f32,
    /// What a gradient is multiplied with before anything; 1 changes no bit of it.
    pub scale: f32,
}

/// Elements of a chunk: the unit of the norms, of the gradient and of an update.
pub const CHUNK: i64 = 65_536;

/// A tensor that a step moves: f32 of one shape, but for what the model reads of it.
#[derive(Debug)]
pub struct Update<'a> {
    /// Its weights.
    pub weight: &'a mut Tensor,
    /// Where they go rounded, if the model reads them so: into this tensor, bf16, from this element on.
    pub rounded: Option<(&'a mut Tensor, i64)>,
    /// The gradient; of a matrix that Muon moves the direction.
    pub gradient: &'a Tensor,
    /// How it moves.
    pub rule: UpdateRule<'a>,
    /// Which element of its tensor is its first, as checksums count them.
    pub number: u64,
    /// Of the checksums of its weights, first and second moments.
    pub salts: [u64; 3],
}

/// How a tensor moves, and what it has beside its weights.
#[derive(Debug)]
pub enum UpdateRule<'a> {
    /// As [`super::Ops::adamw`] does it.
    AdamW {
        /// The numbers of the step.
        by: AdamW,
        /// First and second moments.
        moments: [&'a mut Tensor; 2],
    },
    /// As [`super::Ops::descend`] does it.
    Muon {
        /// What a weight is multiplied with first.
        keep: f32,
        /// What the direction is multiplied with.
        rate: f32,
        /// Which has moved before.
        momentum: &'a Tensor,
    },
}

impl Update<'_> {
    /// What its checksums are of: weights, first and second moments.
    pub(super) fn parts(&self) -> [Option<&Tensor>; 3] {
        let [first, second] = match &self.rule {
            UpdateRule::AdamW { moments: [first, second], .. } => [Some(&**first), Some(&**second)],
            UpdateRule::Muon { momentum, .. } => [Some(*momentum), None],
        };
        [Some(&*self.weight), first, second]
    }
}

/// In main memory. The old weights of one chunk at a time are kept, in the same memory for all of a tensor: so they, and all that
/// moved, are still in the cache when they are compared, rounded and summed up.
pub(super) fn in_chunks<O: Ops + ?Sized>(ops: &O, all: &mut [Update]) -> Result<Tensor> {
    let mut words = Vec::new();
    for one in all {
        let length = one.weight.numel() as i64;
        let memory = one.weight.f_view([-1])?.f_narrow(0, 0, CHUNK.min(length))?.f_empty_like()?;
        for start in (0..length).step_by(CHUNK as usize) {
            words.extend(chunk_of(ops, one, start, &memory)?);
        }
    }
    Ok(Tensor::f_from_slice(&words)?.f_view([-1, 4])?)
}

/// What the chunk that begins at `start` came to; `memory` is for its old weights.
fn chunk_of<O: Ops + ?Sized>(
    ops: &O,
    one: &mut Update,
    start: i64,
    memory: &Tensor,
) -> Result<[i64; 4]> {
    let count = CHUNK.min(one.weight.numel() as i64 - start);
    let cut = |tensor: &Tensor, first| tensor.f_view([-1])?.f_narrow(0, first, count);
    let (mut new, mut old) = (cut(one.weight, start)?, memory.f_narrow(0, 0, count)?);
    old.f_copy_(&new)?;
    let gradient = cut(one.gradient, start)?;
    match &mut one.rule {
        UpdateRule::AdamW { by, moments: [first, second] } => {
            let moments = [&mut cut(first, start)?, &mut cut(second, start)?];
            ops.adamw(*by, &mut new, moments, &gradient)?;
        }
        UpdateRule::Muon { keep, rate, .. } => ops.descend(&mut new, &gradient, *keep, *rate)?,
    }
    if let Some((rounded, first)) = &one.rounded {
        cut(rounded, first + start)?.f_copy_(&new)?;
    }
    let squares = ops.squares(&old.f_sub_(&new)?)?;
    let mut words = [squares.to_bits().cast_signed(), 0, 0, 0];
    for ((word, part), salt) in words[1..].iter_mut().zip(one.parts()).zip(one.salts) {
        let Some(part) = part else { continue };
        let sum = checksum::slice(&cut(part, start)?, one.number + start as u64, salt)?;
        *word = sum.cast_signed();
    }
    Ok(words)
}
