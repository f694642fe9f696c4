//! The table of operations: all that a trainer computes on tensors beyond plain views.
//!
//! ```text
//! Ops         the table: one method for each operation, what it takes and what it answers with
//! cpu/        kernels for main memory: one pass where libtorch would take several, libtorch's own where those are good
//! reference/  the same in libtorch's operators, on any device: what the others are tested against
//! device/     our own kernels on a GPU, libtorch's operators for the rest
//! composed    operations made of others and of libtorch's, in every table that has none of its own; so is cross_entropy
//! linear_attention   the recurrence, its features and its gate, likewise
//! operands    what operations take and answer with     check   what an operand must be
//! update      what a step moves, and how main memory does it
//! ```
//!
//! A process chooses one table at its start ([`choose`]) and hands it to whatever computes; its name and version stand in
//! the kernel table, since two tables round differently. A table covers every kind and layout that the method promises. An
//! operand that does not fit is an error with its name, never a reason to compute in another way.
//!
//! Invariant: an operation is a function of its operands. What else was computed, and on which thread, changes no bit.

mod call;
pub(crate) mod check;
mod composed;
mod cpu;
mod cross_entropy;
mod device;
pub mod linear_attention;
mod operands;
mod reference;
#[cfg(test)]
mod tests;
mod update;

use std::fmt;

use tch::{Device, Kind, Tensor};

use crate::device::queue::Queue;
use crate::{Error, Result, checksum};
use call::Call;
pub use device::choice::{ANSWERS, ATTENTION, CHOICES, Choice, GROUPED};
pub(crate) use device::wide::multiplies as multiplies_wide;
pub use operands::{
    Attended, Attention, AttentionGrads, Banded, ConvShift, ConvShiftGrads, CrossEntropy,
    CrossEntropyGrads, Dispatch, Experts, Gradient, NewtonSchulz, NewtonSchulzForm, NormBack,
    Present, QueriesAndKeys, QueryKey, QueryKeyGrads, ResidualGrads, RouterGrads, RouterSaved,
    RouterWeights, Routes, Scaling, Span,
};
pub use update::{AdamW, CHUNK, Update, UpdateRule};

/// The variable that asks for another table than the one for the device.
pub const VARIABLE: &str = "ZTRAIN_OPS";

/// What it may ask for.
pub const TABLES: [&str; 3] = ["cpu", "reference", "device"];

/// A table, as it is handed to whatever computes.
pub type Table = &'static dyn Ops;

/// The operations. "Float" is f32 or bf16, the kind in which the model's large products are computed; all tensors are
/// contiguous unless it says otherwise, and on the table's device.
///
/// # Errors
/// [`Error::Operand`] where an operand does not fit, which is a bug of the caller; what the library below says where it
/// fails, want of memory included.
pub trait Ops: fmt::Debug + Send + Sync {
    /// Name and version, as they stand in the kernel table.
    fn name(&self) -> &'static str;

    /// `left right` in their kind, matrices or batches of them, in any layout.
    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor>;

    /// `out = left right`: `out` of their kind or f32, in any layout.
    fn matmul_into(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()>;

    /// `out += left right`: matrices, `out` f32.
    fn matmul_add(&self, out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()>;

    /// `left right` of float matrices, or batches of them, in f32: a part of a sum, which is not rounded before the others have
    /// come.
    fn matmul_part(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        self.matmul(&left.f_to_kind(Kind::Float)?, &right.f_to_kind(Kind::Float)?)
    }

    /// Heads of attention.
    fn attention(&self, by: Attention) -> Result<Attended>;

    /// Back through [`Ops::attention`], from the gradient of the heads in their kind, into `out`.
    fn attention_backward(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
        out: AttentionGrads,
    ) -> Result<()>;

    /// Rows `tokens` of `table`, `[V, D]` float, with `bias` added; and that times `scale`: `[N, D]`, f32.
    fn embedding(
        &self,
        table: &Tensor,
        tokens: &Tensor,
        bias: &Tensor,
        scale: &Tensor,
    ) -> Result<[Tensor; 2]> {
        composed::embedding(table, tokens, bias, scale)
    }

    /// Back through [`Ops::embedding`], from the gradient of the scaled rows: those of the bias and of the scale; that of the
    /// table, f32, is added to `table`, token by token in order.
    fn embedding_backward(
        &self,
        tokens: &Tensor,
        embedded: &Tensor,
        scale: &Tensor,
        grad: &Tensor,
        table: &mut Tensor,
    ) -> Result<[Gradient; 2]> {
        composed::embedding_backward(tokens, embedded, scale, grad, table)
    }

    /// Routes of `x`, `[N, D]`, with exponential depth averaging over the state `before`, and `balance`, `[C]`, added to the
    /// probabilities for the choice alone.
    fn router(
        &self,
        by: RouterWeights,
        x: &Tensor,
        before: Option<&Tensor>,
        balance: &Tensor,
    ) -> Result<(Routes, RouterSaved)> {
        composed::router(self, by, x, before, balance)
    }

    /// Back through [`Ops::router`], from the gradient of the weights, `[N, 1]`, and of the state as the next router used it.
    fn router_backward(
        &self,
        by: RouterWeights,
        x: &Tensor,
        saved: RouterSaved,
        weight: &Tensor,
        state: Option<&Tensor>,
    ) -> Result<RouterGrads> {
        composed::router_backward(self, by, x, saved, weight, state)
    }

    /// Sorts tokens by the class of each, `[N]` i64 below `classes`; the last class has no expert. On a device the host waits for
    /// nothing.
    fn dispatch(&self, choice: &Tensor, classes: i64) -> Result<Dispatch>;

    /// Rows of `x`, `[N, D]`, where they are computed: `[P, D]`, zeros where places are filled up.
    fn permute(&self, x: &Tensor, by: &Dispatch) -> Result<Tensor> {
        composed::permute(x, by)
    }

    /// Each expert's rows times its weights, `[E, B, A]`: of `rows`, `[P, A]` or the first rows of such, `[P, B]` in their kind;
    /// rows without an expert have no value.
    fn grouped_matmul(&self, rows: &Tensor, weights: &Tensor, by: &Dispatch) -> Result<Tensor> {
        composed::grouped_matmul(self, rows, weights, by)
    }

    /// Back through [`Ops::grouped_matmul`]: the gradient of `rows`, `[P, A]`, of which those without an expert have no value.
    fn grouped_matmul_input(
        &self,
        grad: &Tensor,
        weights: &Tensor,
        by: &Dispatch,
    ) -> Result<Tensor> {
        composed::grouped_matmul_input(self, grad, weights, by)
    }

    /// Back through [`Ops::grouped_matmul`]: the gradient of the weights, made in the kind of `rows`; exact zeros for an expert
    /// without tokens.
    fn grouped_matmul_weights(
        &self,
        grad: &Tensor,
        rows: &Tensor,
        by: &Dispatch,
    ) -> Result<Gradient> {
        Ok(composed::grouped_matmul_weights(self, grad, rows, by)?.into())
    }

    /// Rows `[P, D]` float back in the order of tokens, those of places that are filled up left out, with `beside`,
    /// `[N, D]`, added: all of it in their kind. For a token without an expert the row of `passed` stands in, `[P, D]`, or zeros:
    /// that of `x` has no value.
    fn unpermute(
        &self,
        x: &Tensor,
        by: &Dispatch,
        passed: Option<&Tensor>,
        beside: &Tensor,
    ) -> Result<Tensor> {
        composed::unpermute(x, by, passed, beside)
    }

    /// The loss of each label, `[N]` f32: nats, 0 where there is none.
    fn cross_entropy(&self, by: CrossEntropy) -> Result<Tensor> {
        cross_entropy::cross_entropy(self, by)
    }

    /// The same, and gradients of their sum over `divisor`.
    fn cross_entropy_backward(&self, by: CrossEntropy, divisor: f64) -> Result<CrossEntropyGrads> {
        cross_entropy::cross_entropy_backward(self, by, divisor)
    }

    /// `x * f * weight` with `f = 1 / sqrt(mean(x^2) + eps)` for each row of `x`, `[N, D]` f32; and `f`, `[N, 1]`.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)>;

    /// Back through [`Ops::rms_norm`], from the gradient of its outcome, float: that of `x`, and that of `weight`.
    fn rms_norm_backward(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, Gradient)>;

    /// The same where `x` has gone past the norm too: to its gradient `beside`, what came that way, is added.
    fn rms_norm_backward_beside(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        beside: &Tensor,
    ) -> Result<(Tensor, Gradient)> {
        let (input, weight) = self.rms_norm_backward(x, factors, weight, grad)?;
        Ok((beside.f_add(&input)?, weight))
    }

    /// Gradients that this table began, each made and in f32.
    fn finish(&self, all: Vec<Gradient>) -> Result<Vec<Tensor>> {
        let made = all.into_iter().map(|one| match one {
            Gradient::Made(made) => Ok(made.f_to_kind(Kind::Float)?),
            Gradient::Banded(_) | Gradient::Experts(_) => {
                let found = "another table's".to_owned();
                Err(Call("finish").refuse("all", found, "its own".to_owned()))
            }
        });
        made.collect()
    }

    /// `(branch + bias) * scale + (residual + residual_bias) * residual_scale`, `[N, D]`: `branch` float, the others and the
    /// sum f32.
    fn residual(&self, branch: &Tensor, residual: &Tensor, by: Scaling) -> Result<Tensor>;

    /// [`Ops::residual`], and its [`Ops::rms_norm`] in the kind of `branch`: the sum, the norm, and its factors.
    fn residual_norm(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: Scaling,
        (weight, eps): (&Tensor, f64),
    ) -> Result<[Tensor; 3]> {
        let sum = self.residual(branch, residual, by)?;
        let (out, factors) = self.rms_norm(&sum, weight, eps)?;
        Ok([sum, out.f_to_kind(branch.kind())?, factors])
    }

    /// Back through [`Ops::residual`], from the gradient of its outcome, f32.
    fn residual_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: Scaling,
        grad: &Tensor,
    ) -> Result<ResidualGrads>;

    /// Back through [`Ops::residual_norm`], from the gradient of the norm in its kind, with the bits that
    /// [`Ops::rms_norm_backward_beside`] and [`Ops::residual_backward`] have in turn: what comes back through the addition, and
    /// the gradient of the norm's weight.
    fn residual_norm_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: Scaling,
        norm: NormBack,
    ) -> Result<(ResidualGrads, Gradient)> {
        let NormBack { x, factors, weight, grad, beside } = norm;
        let (sum, weight) = match beside {
            None => self.rms_norm_backward(x, factors, weight, grad)?,
            Some(beside) => self.rms_norm_backward_beside(x, factors, weight, grad, beside)?,
        };
        Ok((self.residual_backward(branch, residual, by, &sum)?, weight))
    }

    /// What each token has of itself and of the one before it, of `z`, `[N, W]` float: first G d channels of queries and keys,
    /// then a + b numbers of values. `c_t = bias + now z_t + before z_{t-1}` of the channels as `[G, N, 2 d]`, `c_{t-1}` and
    /// `c_t` of each in turn; before a document `c` is the bias. Values as `[N, a + b]`, the last b of them those of the token
    /// before, zeros where a document begins. Both in the kind of `z`.
    fn conv_shift(&self, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]>;

    /// Back through [`Ops::conv_shift`], from the gradients of both its outcomes in the kind of `z`. To that of the channels goes
    /// what comes through the means, `[M, G d]` f32, of the rows that are counted, in order.
    fn conv_shift_backward(
        &self,
        z: &Tensor,
        by: ConvShift,
        grads: [&Tensor; 2],
        means: &Tensor,
    ) -> Result<ConvShiftGrads>;

    /// Adds to each of `raw`, `[G, N, d]` in the kind of `z` and whose memory may be used, its bias and the mean that belongs to
    /// it of what stands first in the rows of `z`, `[N, G d and more]` float; makes it sqrt(d) long, multiplies keys with their
    /// temperature, and turns all.
    ///
    /// ```text
    /// m_h = (q_h + k) / 2        for query head h and the key head of its group
    /// raw_h += bias_h + m_h;  raw_k += bias_k + mean of m_h over the group
    /// f = sqrt(d) / max(|raw|, 2^-23);  out = turn(raw f temperature)
    /// ```
    fn query_key(&self, z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys>;

    /// Back through [`Ops::query_key`], from the gradient of its outcome, f32, whose memory may be used; that of `raw` in this
    /// kind.
    fn query_key_backward(
        &self,
        raw: &Tensor,
        factors: &Tensor,
        by: QueryKey,
        grad: (Tensor, Kind),
    ) -> Result<QueryKeyGrads>;

    /// `silu(gate) * up` of `[P, 2 I]` float, the gate first: `[P, I]` in its kind.
    fn swiglu(&self, x: &Tensor) -> Result<Tensor>;

    /// Back through [`Ops::swiglu`], from the gradient of its outcome in the kind of `x`: that of `x`.
    fn swiglu_backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor>;

    /// The row of each token in `x`, `[P, D]` float, times `weight`, `[N, 1]` f32: `[N, D]`, in the kind of `x`. For a token
    /// without an expert the row of `passed` stands in, `[P, D]` in the kind of `x`, or zeros: that of `x` has no value.
    fn gather(
        &self,
        x: &Tensor,
        by: &Dispatch,
        passed: Option<&Tensor>,
        weight: &Tensor,
    ) -> Result<Tensor>;

    /// Back through [`Ops::gather`], from the gradient of its outcome in its kind: that of the rows, `[P, D]` in the kind of `x`,
    /// of `x` and, where tokens have no expert, of `passed`, with zeros where places are filled up; and that of `weight`.
    fn gather_backward(
        &self,
        x: &Tensor,
        by: &Dispatch,
        passed: Option<&Tensor>,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 2]>;

    /// Moves `weight` and its moments by `gradient`, all f32 of one shape.
    ///
    /// ```text
    /// g = scale * gradient;        w <- keep * w
    /// m <- m + first * (g - m);    v <- v + second * (g * g - v)
    /// w <- w - rate * (m / (sqrt(v) / root + eps))
    /// ```
    fn adamw(
        &self,
        by: AdamW,
        weight: &mut Tensor,
        moments: [&mut Tensor; 2],
        gradient: &Tensor,
    ) -> Result<()>;

    /// What Muon makes of a momentum and a gradient, f32 of one shape: `g = scale * gradient; m <- by * m + g; g + by * m`.
    fn nesterov(
        &self,
        momentum: &mut Tensor,
        gradient: &Tensor,
        by: f32,
        scale: f32,
    ) -> Result<Tensor>;

    /// `w <- keep * w - rate * direction`, f32 of one shape.
    fn descend(&self, weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()>;

    /// Each matrix of `[rows, columns]`, or of a stack of such, f32: divided by its length, then iterated by its form,
    /// transposed where it is higher than wide. A matrix has the same bits whatever it is stacked with.
    fn newton_schulz(&self, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor>;

    /// The same of many matrices of any shapes, contiguous, with the same bits.
    fn all_newton_schulz(&self, matrices: &[Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
        matrices.iter().map(|matrix| self.newton_schulz(matrix, by)).collect()
    }

    /// The sum of squares of the elements, f32, in f64.
    fn squares(&self, x: &Tensor) -> Result<f64>;

    /// The same of each `chunk` elements of many tensors, the last chunk of each as long as is left: f64 `[n]`, in their order,
    /// where they are. Of a device by one launch, for which the host does not wait.
    fn chunk_squares(&self, tensors: &[Tensor], chunk: i64) -> Result<Tensor> {
        let mut squares = Vec::new();
        for tensor in tensors {
            for chunk in chunks(tensor, chunk)? {
                squares.push(self.squares(&chunk)?);
            }
        }
        Ok(Tensor::f_from_slice(&squares)?)
    }

    /// The same of parts of tensors, contiguous f32, and what they add to the checksums of their tensors, i64, as many numbers in
    /// which way ever divided: of each part is said the number of its first element in its tensor, and the salt. In main memory a
    /// chunk is read once, on a device each element.
    fn chunk_sums(&self, parts: &[(&Tensor, u64, u64)], chunk: i64) -> Result<[Tensor; 2]> {
        let (mut squares, mut sums) = (Vec::new(), Vec::new());
        for (tensor, first, salt) in parts {
            for (at, part) in (*first..).step_by(chunk as usize).zip(chunks(tensor, chunk)?) {
                squares.push(self.squares(&part)?);
                sums.push(checksum::slice(&part, at, *salt)?.cast_signed());
            }
        }
        Ok([Tensor::f_from_slice(&squares)?, Tensor::f_from_slice(&sums)?])
    }

    /// Writes the first of each pair, bf16, from the second, f32: to nearest, ties to even.
    fn all_rounded(&self, pairs: &mut [[Tensor; 2]]) -> Result<()> {
        pairs.iter_mut().try_for_each(|[narrow, wide]| {
            check::rounded(narrow, wide)?;
            Ok(tch::no_grad(|| narrow.f_copy_(wide))?)
        })
    }

    /// [`Ops::nesterov`] for many momenta and gradients, with the same bits.
    fn all_nesterov(
        &self,
        pairs: &mut [(&mut Tensor, &Tensor)],
        by: f32,
        scale: f32,
    ) -> Result<Vec<Tensor>> {
        let one = |(momentum, gradient): &mut (&mut Tensor, &Tensor)| {
            self.nesterov(momentum, gradient, by, scale)
        };
        pairs.iter_mut().map(one).collect()
    }

    /// Moves tensors by [`Ops::adamw`] and [`Ops::descend`], with the same bits, and says what that came to: i64 `[n, 4]`, a row
    /// for each [`CHUNK`] elements of each tensor, where the tensors are. First the bits of [`Ops::squares`] of new weights less
    /// old ones, f64. Then three words whose sums over the rows of a tensor, wrapping, are checksums of what its weights, first
    /// and second moments have become, or 0. On a device by one launch, which reads and writes each number once, and for which
    /// the host does not wait.
    fn update(&self, all: &mut [Update]) -> Result<Tensor> {
        all.iter().try_for_each(check::update)?;
        update::in_chunks(self, all)
    }
}

impl PartialEq for dyn Ops {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

/// Each `chunk` elements of a tensor, flat, the last as many as are left.
///
/// # Errors
/// Where memory ends.
pub fn chunks(tensor: &Tensor, chunk: i64) -> Result<Vec<Tensor>> {
    let flat = tensor.f_reshape([-1])?;
    let length = flat.size()[0];
    let starts = (0..length).step_by(chunk as usize);
    starts.map(|start| Ok(flat.f_narrow(0, start, chunk.min(length - start))?)).collect()
}

impl Eq for dyn Ops {}

/// The table for main memory.
pub const CPU: Table = &cpu::Cpu;

/// The table of libtorch's operators, for any device.
pub const REFERENCE: Table = &reference::Reference;

/// Refuses a choice of the environment that cannot be meant.
pub(crate) fn known_choices() -> Result<()> {
    CHOICES.iter().try_for_each(|choice| choice.asked().map(drop))
}

/// The table of our own kernels on a GPU.
pub const DEVICE: Table = &device::Own::GPU;

/// The same with products of experts by our own kernels, and by libtorch's grouped product where that takes them: to be measured
/// beside each other.
pub const EXPERTS: [Table; 2] =
    [&device::Own::with_grouped(false), &device::Own::with_grouped(true)];

/// The same with attention by our own kernels, and by libtorch's where that takes it.
pub const ATTENTIONS: [Table; 2] =
    [&device::Own::with_attention(false), &device::Own::with_attention(true)];

/// Whether the second of [`ATTENTIONS`] computes this by libtorch's kernels: where it cannot, it goes by our own.
///
/// # Errors
/// Where the operands are not on a GPU.
pub fn library_attends(by: Attention) -> Result<bool> {
    Ok(device::takes_attention(&Queue::of(by.query.device())?, by))
}

/// Bytes that [`Ops::all_newton_schulz`] holds on a GPU for matrices of these shapes, what it answers with included.
pub fn newton_schulz_bytes(shapes: &[[i64; 2]], by: NewtonSchulz) -> u64 {
    device::newton_schulz::bytes(shapes, by)
}

/// The table for a device: the one that [`VARIABLE`] asks for, else the CPU's kernels in main memory, and on a GPU our own, or
/// the reference where they cannot be compiled, which is said.
pub fn choose(device: Device) -> Result<Table> {
    let asked = std::env::var(VARIABLE).unwrap_or_default();
    match (asked.as_str(), device) {
        ("" | "cpu", Device::Cpu) => Ok(CPU),
        ("reference", _) => Ok(REFERENCE),
        ("device", Device::Cuda(_)) => Queue::of(device).map(|_| DEVICE),
        ("", _) => match Queue::of(device) {
            Ok(_) => Ok(DEVICE),
            Err(why) => {
                eprintln!("no kernels of our own on {device:?}, so libtorch computes all: {why}");
                Ok(REFERENCE)
            }
        },
        (asked, _) => Err(Error::NoDevice {
            device: format!("{device:?}"),
            reason: format!(
                "{VARIABLE} is {asked:?}; there are `reference`, `cpu` for main memory, and `device` for a GPU"
            ),
        }),
    }
}

/// The table with this name, as a kernel table states it.
pub fn named(name: &str) -> Option<Table> {
    [CPU, REFERENCE, DEVICE].into_iter().find(|table| table.name() == name)
}
