//! The tensors that a step updates, and the update in main memory.

use tch::Tensor;

use super::Ops;
use crate::{Result, checksum};

/// The numbers of one step of AdamW, rounded to the precision of the elements' arithmetic.
#[derive(Clone, Copy, Debug, Default)]
pub struct AdamWStep {
    /// Factor of the weight, applied first: 1 minus learning rate times weight decay.
    pub keep: f32,
    /// Fraction by which the first moment moves towards the gradient.
    pub first: f32,
    /// Fraction by which the second moment moves towards the gradient's square.
    pub second: f32,
    /// Divisor of the root of the second moment.
    pub root: f32,
    /// Added to the result.
    pub eps: f32,
    /// Factor of the first moment over that.
    pub rate: f32,
    /// Factor of the gradient, applied first; 1 changes no bit.
    pub scale: f32,
}

/// Elements of a chunk: the unit of the gradient norm and of the norm of an update.
pub const CHUNK: i64 = 65_536;

/// A tensor that a step updates: f32 of one shape, except for the copy that the model reads.
#[derive(Debug)]
pub struct Update<'a> {
    /// Its weights.
    pub weight: &'a mut Tensor,
    /// Where to write the bf16 copy, if the model reads one: the tensor, and the first element.
    pub rounded: Option<(&'a mut Tensor, i64)>,
    /// The gradient; for a matrix that Muon updates, the direction.
    pub gradient: &'a Tensor,
    /// How it is updated.
    pub rule: UpdateRule<'a>,
    /// Number of its first element in its tensor, for the checksums.
    pub number: u64,
    /// Salts of the checksums of its weights, first and second moments.
    pub salts: [u64; 3],
}

/// How a tensor is updated, and its optimizer state.
#[derive(Debug)]
pub enum UpdateRule<'a> {
    /// As [`super::Ops::adamw`].
    AdamW {
        /// The numbers of the step.
        by: AdamWStep,
        /// First and second moments.
        moments: [&'a mut Tensor; 2],
    },
    /// As [`super::Ops::descend`].
    Muon {
        /// Factor of the weight, applied first.
        keep: f32,
        /// Factor of the direction.
        rate: f32,
        /// Already updated.
        momentum: &'a Tensor,
    },
}

impl Update<'_> {
    /// The tensors of its checksums: weights, first and second moments.
    pub(super) fn parts(&self) -> [Option<&Tensor>; 3] {
        let [first, second] = match &self.rule {
            UpdateRule::AdamW { moments: [first, second], .. } => [Some(&**first), Some(&**second)],
            UpdateRule::Muon { momentum, .. } => [Some(*momentum), None],
        };
        [Some(&*self.weight), first, second]
    }
}

/// The update in main memory. It keeps the old weights of one chunk at a time, in memory that all chunks of a tensor
/// reuse: so they, and the updated numbers, are still in cache when they are compared, rounded and checksummed.
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

/// Updates the chunk that begins at `start` and returns its row; `memory` is for its old weights.
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

/// Splits a tensor, flattened, into chunks of `chunk` elements; the last one may be shorter.
///
/// # Errors
/// If memory runs out.
pub fn chunks(tensor: &Tensor, chunk: i64) -> Result<Vec<Tensor>> {
    let flat = tensor.f_reshape([-1])?;
    let length = flat.size()[0];
    let starts = (0..length).step_by(chunk as usize);
    starts.map(|start| Ok(flat.f_narrow(0, start, chunk.min(length - start))?)).collect()
}
