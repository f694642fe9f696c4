//! The table of operations: everything that a trainer computes on tensors beyond plain views.
//!
//! ```text
//! Ops         the table: a method for each operation, with its operands and results
//! cpu/        kernels for main memory: one pass where libtorch would need several, libtorch's own where those are good
//! reference/  the same in libtorch's operators, on any device: what the others are tested against
//! device/     our own kernels on a GPU, libtorch's operators for the rest
//! shapes      shapes of results alone, and the arithmetic that they take
//! composed    operations composed of others and of libtorch's, for tables without their own; so is cross_entropy
//! linear_attention   the recurrence, its features and its gate, likewise; so are linear_router and rotary
//! operands    operands and results of operations; so is experts       check   requirements on operands
//! update      the tensors that a step updates, and the update in main memory
//! ```
//!
//! A process chooses one table at its start ([`choose`]) and passes it to everything that computes; its name and
//! version are part of the kernel table, since two tables round differently. A table supports every kind and layout
//! that the method promises. An operand that does not fit is an error with its name. Invariant: an operation is a
//! function of its operands. Other computations and the choice of thread change no bit.

mod call;
pub(crate) mod check;
mod composed;
mod cpu;
mod cross_entropy;
mod device;
mod experts;
pub mod linear_attention;
pub mod linear_router;
mod operands;
mod reference;
pub mod rotary;
mod shapes;
#[cfg(test)]
mod tests;
mod update;

use std::fmt;

use tch::{Device, Kind, Tensor};

use crate::device::queue::Queue;
use crate::{Error, Result, checksum};
use call::Call;
#[cfg(test)]
pub(crate) use cpu::exp;
pub use device::choice::{ANSWERS, ATTENTION, CHOICES, GROUPED, KernelChoice};
pub(crate) use device::wide::multiplies as multiplies_wide;
pub use experts::ExpertInput;
pub use operands::{
    Attended, Attention, AttentionGrads, AttentionSpan, BandSums, ConvShift, ConvShiftGrads,
    CrossEntropy, CrossEntropyGrads, Dispatch, ExpertGradient, ExpertRows, HeadGrads, KEY_BLOCK,
    NewtonSchulz, NewtonSchulzIterate, NormBack, ParamGradient, QueriesAndKeys, QueryKey,
    QueryKeyGrads, ResidualGrads, ResidualScaling, RouterGrads, RouterSaved, RouterWeights, Routes,
    UsedExperts,
};
pub use update::{AdamWStep, CHUNK, Update, UpdateRule, chunks};

/// The variable that requests another table than the device's default.
pub const VARIABLE: &str = "ZTRAIN_OPS";

/// Its values.
pub const TABLES: [&str; 3] = ["cpu", "reference", "device"];

/// A table, as passed to everything that computes.
pub type OpsTable = &'static dyn Ops;

/// The operations. "Float" is f32 or bf16, the kind of the model's large matmuls; all tensors are contiguous unless
/// stated otherwise, and on the table's device.
///
/// # Errors
/// [`Error::Operand`] if an operand does not fit, which is a bug of the caller; otherwise errors of the
/// library below, including lack of memory.
pub trait Ops: fmt::Debug + Send + Sync {
    /// Name and version, as in the kernel table.
    fn name(&self) -> &'static str;

    /// `left right` in their kind, matrices or batches of them, in any layout.
    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor>;

    /// `out = left right`: `out` of their kind or f32, in any layout.
    fn matmul_into(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()>;

    /// `out += left right`: matrices, `out` f32.
    fn matmul_add(&self, out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()>;

    /// `left right` of float matrices, or batches of them, in f32: a part of a sum, which must not be rounded before
    /// the other parts are added.
    fn matmul_part(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        self.matmul(&left.f_to_kind(Kind::Float)?, &right.f_to_kind(Kind::Float)?)
    }

    /// The output of attention.
    fn attention(&self, by: Attention) -> Result<Attended>;

    /// Backward of [`Ops::attention`], from the gradient of the output in its kind, into `out`.
    fn attention_backward(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
        out: AttentionGrads,
    ) -> Result<()>;

    /// The same where each key is that of a query's token: the gradients of queries and keys, and those of values in
    /// their kind.
    fn attention_backward_whole(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
    ) -> Result<(HeadGrads, Tensor)> {
        composed::attention_backward_whole(self, by, saved, grad)
    }

    /// Rows `tokens` of `table`, `[V, D]` float, with `bias` added; and the same times `scale`: `[N, D]`, f32.
    fn embedding(
        &self,
        table: &Tensor,
        tokens: &Tensor,
        bias: &Tensor,
        scale: &Tensor,
    ) -> Result<[Tensor; 2]> {
        composed::embedding(table, tokens, bias, scale)
    }

    /// Backward of [`Ops::embedding`], from the gradient of the scaled rows: the gradients of the bias and of the
    /// scale. The gradient of the table, f32, is added to `table`, in token order.
    fn embedding_backward(
        &self,
        tokens: &Tensor,
        embedded: &Tensor,
        scale: &Tensor,
        grad: &Tensor,
        table: &mut Tensor,
    ) -> Result<[ParamGradient; 2]> {
        composed::embedding_backward(tokens, embedded, scale, grad, table)
    }

    /// Routes of `x`, `[N, D]`, with exponential depth averaging over the state `before`. `balance`, `[C]`, is added to
    /// the probabilities for the choice only.
    fn router(
        &self,
        by: RouterWeights,
        x: &Tensor,
        before: Option<&Tensor>,
        balance: &Tensor,
    ) -> Result<(Routes, RouterSaved)> {
        composed::router(self, by, x, before, balance)
    }

    /// Backward of [`Ops::router`], from the gradients of the weights, `[N, 1]`, and of the state as used by the next
    /// router.
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

    /// Sorts tokens by the class of each, `[N]` i64 below `classes`; the last class has no expert. On a device the host
    /// does not wait.
    fn dispatch(&self, choice: &Tensor, classes: i64) -> Result<Dispatch>;

    /// [`Ops::dispatch`] of what a router chose.
    fn dispatch_routes(&self, routes: &Routes, classes: i64) -> Result<Dispatch> {
        self.dispatch(&routes.choice, classes)
    }

    /// Rows of `x`, `[N, D]`, in expert order: `[P, D]`, zeros in padding.
    fn permute(&self, x: &Tensor, by: &Dispatch) -> Result<Tensor> {
        composed::permute(x, by)
    }

    /// Rows of `x`, `[N, D]`, as operands of experts' matmuls.
    fn expert_input(&self, x: &Tensor, by: &Dispatch) -> Result<ExpertInput> {
        Ok(ExpertInput::Sorted(self.permute(x, by)?.f_narrow(0, 0, by.computed)?))
    }

    /// Each expert's rows times its weights, `[E, B, A]`: of `rows`, `[P, A]` or the first rows of such, `[P, B]` in
    /// their kind; rows without an expert are undefined.
    fn grouped_matmul(&self, rows: &Tensor, weights: &Tensor, by: &Dispatch) -> Result<Tensor> {
        composed::grouped_matmul(self, rows, weights, by)
    }

    /// Backward of [`Ops::grouped_matmul`]: the gradient of `rows`, `[P, A]`, undefined for rows without an expert.
    fn grouped_matmul_input(
        &self,
        grad: &Tensor,
        weights: &Tensor,
        by: &Dispatch,
    ) -> Result<Tensor> {
        composed::grouped_matmul_input(self, grad, weights, by)
    }

    /// Backward of [`Ops::grouped_matmul`]: the gradient of the weights, in the kind of `rows`; exact zeros for an
    /// expert without tokens.
    fn grouped_matmul_weights(
        &self,
        grad: &Tensor,
        rows: &ExpertInput,
        by: &Dispatch,
    ) -> Result<ParamGradient> {
        let rows = rows.sorted(self, by)?;
        Ok(composed::grouped_matmul_weights(self, grad, &rows, by)?.into())
    }

    /// [`Ops::grouped_matmul`] by the weights of gate and up, `[E, 2 I, D]`, and [`Ops::swiglu`] of its result: both
    /// results, with their bits.
    fn grouped_swiglu(
        &self,
        rows: &ExpertInput,
        weights: &Tensor,
        by: &Dispatch,
    ) -> Result<[Tensor; 2]> {
        composed::grouped_swiglu(self, rows, weights, by)
    }

    /// [`Ops::grouped_matmul_input`] followed by [`Ops::swiglu_backward`] of `x`, with their bits.
    fn grouped_swiglu_backward(
        &self,
        grad: &Tensor,
        weights: &Tensor,
        x: &Tensor,
        by: &Dispatch,
    ) -> Result<Tensor> {
        composed::grouped_swiglu_backward(self, grad, weights, x, by)
    }

    /// Rows back in token order and without padding, each plus its token's: `[N, D]`, in their kind.
    fn unpermute(&self, rows: ExpertRows) -> Result<Tensor> {
        composed::unpermute(rows)
    }

    /// The loss of each label, `[N]` f32: nats, 0 for a token without a label.
    fn cross_entropy(&self, by: CrossEntropy) -> Result<Tensor> {
        cross_entropy::cross_entropy(self, by)
    }

    /// The same, and gradients of the sum of losses over `divisor`, with z-loss if it has a coefficient.
    fn cross_entropy_backward(&self, by: CrossEntropy, divisor: f64) -> Result<CrossEntropyGrads> {
        cross_entropy::cross_entropy_backward(self, by, divisor)
    }

    /// `x * f * weight` with `f = 1 / sqrt(mean(x^2) + eps)` for each row of `x`, `[N, D]` f32, in this kind; and `f`,
    /// `[N, 1]`.
    fn rms_norm(
        &self,
        x: &Tensor,
        weight: &Tensor,
        eps: f64,
        kind: Kind,
    ) -> Result<(Tensor, Tensor)>;

    /// Backward of [`Ops::rms_norm`], from the gradient of its output, float: the gradients of `x` and of `weight`.
    fn rms_norm_backward(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, ParamGradient)>;

    /// The same where `x` is also used outside of the norm: `beside`, the gradient from there, is added to its
    /// gradient.
    fn rms_norm_backward_beside(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        beside: &Tensor,
    ) -> Result<(Tensor, ParamGradient)> {
        let (input, weight) = self.rms_norm_backward(x, factors, weight, grad)?;
        Ok((beside.f_add(&input)?, weight))
    }

    /// Finishes gradients of this table: each complete and in f32.
    fn finish(&self, all: Vec<ParamGradient>) -> Result<Vec<Tensor>> {
        let made = all.into_iter().map(|one| match one {
            ParamGradient::Made(made) => Ok(made.f_to_kind(Kind::Float)?),
            ParamGradient::Banded(_) | ParamGradient::Experts(_) => {
                let found = "another table's".to_owned();
                Err(Call("finish").refuse("all", found, "its own".to_owned()))
            }
        });
        made.collect()
    }

    /// `(branch + bias) * scale + (residual + residual_bias) * residual_scale`, `[N, D]`: `branch` float, the others
    /// and the sum f32.
    fn residual(&self, branch: &Tensor, residual: &Tensor, by: ResidualScaling) -> Result<Tensor>;

    /// [`Ops::residual`] followed by [`Ops::rms_norm`], in the kind of `branch`: the sum, the norm, and its factors.
    fn residual_norm(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        weight: &Tensor,
        eps: f64,
    ) -> Result<[Tensor; 3]> {
        let sum = self.residual(branch, residual, by)?;
        let (out, factors) = self.rms_norm(&sum, weight, eps, branch.kind())?;
        Ok([sum, out, factors])
    }

    /// Backward of [`Ops::residual`], from the gradient of its output, f32.
    fn residual_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        grad: &Tensor,
    ) -> Result<ResidualGrads>;

    /// [`Ops::gather`] followed by [`Ops::residual_norm`], with their bits.
    fn residual_norm_gathered(
        &self,
        branch: ExpertRows,
        residual: &Tensor,
        by: ResidualScaling,
        weight: &Tensor,
        eps: f64,
    ) -> Result<[Tensor; 3]> {
        composed::residual_norm_gathered(self, branch, residual, by, weight, eps)
    }

    /// Backward of [`Ops::residual_norm`], from the gradient of the norm in its kind, with the bits of
    /// [`Ops::rms_norm_backward_beside`] followed by [`Ops::residual_backward`]: the gradients of the addition's
    /// operands, and that of the norm's weight.
    fn residual_norm_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        norm: NormBack,
        grad: &Tensor,
    ) -> Result<(ResidualGrads, ParamGradient)> {
        let NormBack { x, factors, weight, beside } = norm;
        let (sum, weight) = match beside {
            None => self.rms_norm_backward(x, factors, weight, grad)?,
            Some(beside) => self.rms_norm_backward_beside(x, factors, weight, grad, beside)?,
        };
        Ok((self.residual_backward(branch, residual, by, &sum)?, weight))
    }

    /// Backward of [`Ops::residual_norm_gathered`], with the bits of [`Ops::residual_norm_backward`] followed by
    /// [`Ops::gather_backward`].
    fn residual_norm_gathered_backward(
        &self,
        branch: ExpertRows,
        residual: &Tensor,
        by: ResidualScaling,
        norm: NormBack,
        grad: &Tensor,
    ) -> Result<(ResidualGrads, ParamGradient)> {
        composed::residual_norm_gathered_backward(self, branch, residual, by, norm, grad)
    }

    /// [`Ops::unpermute`] followed by [`Ops::residual_norm_backward`] from its output, with their bits.
    fn residual_norm_unpermuted_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        norm: NormBack,
        grad: ExpertRows,
    ) -> Result<(ResidualGrads, ParamGradient)> {
        self.residual_norm_backward(branch, residual, by, norm, &self.unpermute(grad)?)
    }

    /// The depthwise convolution and the value shift over a token and the previous one, of `z`, `[N, W]` float: first G
    /// d channels of queries and keys, then a + b values. The channels give `c_t = bias + now z_t + before z_{t-1}`,
    /// returned as `[G, N, 2 d]` with `c_{t-1}` and `c_t` of each channel interleaved; before a document `c` is the
    /// bias. The values are returned as `[N, a + b]`, the last b of them from the previous token, zeros at the start of
    /// a document. Both are in the kind of `z`.
    fn conv_shift(&self, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]>;

    /// Backward of [`Ops::conv_shift`], from the gradients of both outputs in the kind of `z`. `means`, `[M, G d]` f32,
    /// the gradients through the means for the counted rows in order, are added to the gradient of the channels.
    fn conv_shift_backward(
        &self,
        z: &Tensor,
        by: ConvShift,
        grads: [&Tensor; 2],
        means: &Tensor,
    ) -> Result<ConvShiftGrads>;

    /// Computes queries and keys from `raw`, `[G, N, d]` in the kind of `z`, whose memory may be reused, and the first
    /// G d columns of `z`, `[N, G d and more]` float: adds bias and means, normalizes to length sqrt(d), multiplies
    /// keys by their temperature, and applies rotary embedding.
    ///
    /// ```text
    /// m_h = (q_h + k) / 2        for query head h and the key head of its group
    /// raw_h += bias_h + m_h;  raw_k += bias_k + mean of m_h over the group
    /// f = sqrt(d) / max(|raw|, 2^-23);  out = turn(raw f temperature)
    /// ```
    fn query_key(&self, z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys>;

    /// Backward of [`Ops::query_key`], from the gradient of its output; the gradient of `raw` is in this kind.
    fn query_key_backward(
        &self,
        raw: &Tensor,
        factors: &Tensor,
        by: QueryKey,
        grad: HeadGrads,
        kind: Kind,
    ) -> Result<QueryKeyGrads>;

    /// `silu(gate) * up` of `[P, 2 I]` float, the gate first: `[P, I]` in its kind.
    fn swiglu(&self, x: &Tensor) -> Result<Tensor>;

    /// Backward of [`Ops::swiglu`], from the gradient of its output in the kind of `x`: the gradient of `x`.
    fn swiglu_backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor>;

    /// The row of each token times its factor: `[N, D]`, in their kind.
    fn gather(&self, rows: ExpertRows) -> Result<Tensor>;

    /// Backward of [`Ops::gather`], from the gradient of its output in its kind: the gradient of the rows, `[P, D]` in
    /// their kind, of `x` and, for tokens without an expert, of `passed`, with zeros in padding; and that of
    /// the factors.
    fn gather_backward(&self, rows: ExpertRows, grad: &Tensor) -> Result<[Tensor; 2]>;

    /// Updates `weight` and its moments with `gradient`, all f32 of one shape.
    ///
    /// ```text
    /// g = scale * gradient;        w <- keep * w
    /// m <- m + first * (g - m);    v <- v + second * (g * g - v)
    /// w <- w - rate * (m / (sqrt(v) / root + eps))
    /// ```
    fn adamw(
        &self,
        by: AdamWStep,
        weight: &mut Tensor,
        moments: [&mut Tensor; 2],
        gradient: &Tensor,
    ) -> Result<()>;

    /// Muon's direction from a momentum and a gradient, f32 of one shape: `g = scale * gradient; m <- by * m + g; g +
    /// by * m`.
    fn nesterov(
        &self,
        momentum: &mut Tensor,
        gradient: &Tensor,
        by: f32,
        scale: f32,
    ) -> Result<Tensor>;

    /// `w <- keep * w - rate * direction`, f32 of one shape.
    fn descend(&self, weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()>;

    /// Iterates a matrix `[rows, columns]`, or each of a stack, f32: divided by its length, then iterated as `by.form`
    /// says, transposed if it has more rows than columns. The bits of a matrix do not depend on the rest of its stack.
    fn newton_schulz(&self, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor>;

    /// The same for many contiguous matrices of any shapes, with the same bits.
    fn all_newton_schulz(&self, matrices: &[Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
        matrices.iter().map(|matrix| self.newton_schulz(matrix, by)).collect()
    }

    /// The sum of squares of the elements of f32, in f64.
    fn squares(&self, x: &Tensor) -> Result<f64>;

    /// The same for each `chunk` elements of many tensors, where a tensor's last chunk may be shorter: f64 `[n]`, in
    /// order, on the tensors' device. On a GPU this is one launch, and the host does not wait.
    fn chunk_squares(&self, tensors: &[Tensor], chunk: i64) -> Result<Tensor> {
        let mut squares = Vec::new();
        for tensor in tensors {
            for chunk in chunks(tensor, chunk)? {
                squares.push(self.squares(&chunk)?);
            }
        }
        Ok(Tensor::f_from_slice(&squares)?)
    }

    /// The same for parts of tensors, contiguous f32, and their contributions to the checksums of their tensors, i64,
    /// as many numbers, split among them in any way. Each part comes with the number of its first element in its
    /// tensor, and the salt. In main memory a chunk is read once, on a device each element.
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

    /// Rounds the second of each pair, f32, into the first, bf16: to nearest, ties to even.
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

    /// Updates tensors as [`Ops::adamw`] and [`Ops::descend`] do, with the same bits, and returns i64 `[n, 4]`, a row
    /// for each [`CHUNK`] elements of each tensor, on the tensors' device. The first word has the bits of an f64:
    /// [`Ops::squares`] of new weights minus old ones. The other three, summed over the rows of a tensor with wrapping,
    /// are checksums of its new weights, first and second moments, or 0. On a GPU this is one launch, which reads and
    /// writes each number once, and the host does not wait.
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

impl Eq for dyn Ops {}

/// The table for main memory.
pub const CPU: OpsTable = &cpu::Cpu;

/// The table of libtorch's operators, for any device.
pub const REFERENCE: OpsTable = &reference::Reference;

/// Refuses invalid values of the environment variables that choose implementations.
pub(crate) fn known_choices() -> Result<()> {
    CHOICES.iter().try_for_each(|choice| choice.asked().map(drop))
}

/// The table of our own kernels on a GPU.
pub const DEVICE: OpsTable = &device::DeviceTable::GPU;

/// The table for tensors without numbers ([`crate::shapes`]), which makes what [`CPU`] would make.
pub const SHAPES: OpsTable = &shapes::Shapes { routed: false };

/// The same as [`DEVICE`] with our own matmuls of experts, and with libtorch's grouped matmul where it applies: for
/// benchmarks that compare them.
pub const EXPERTS: [OpsTable; 2] =
    [&device::DeviceTable::with_grouped(false), &device::DeviceTable::with_grouped(true)];

/// The same with our own attention, and with libtorch's where it applies.
pub const ATTENTIONS: [OpsTable; 2] =
    [&device::DeviceTable::with_attention(false), &device::DeviceTable::with_attention(true)];

/// Whether the second of [`ATTENTIONS`] uses libtorch's kernels for this call; otherwise it uses our own.
///
/// # Errors
/// If the operands are not on a GPU.
pub fn library_attends(by: Attention) -> Result<bool> {
    Ok(device::takes_attention(&Queue::of(by.query.device())?, by))
}

/// Maximum memory of [`Ops::all_newton_schulz`] on a GPU in bytes, including results, for matrices of these shapes.
pub fn newton_schulz_bytes(shapes: &[[i64; 2]], by: NewtonSchulz) -> u64 {
    device::newton_schulz::bytes(shapes, by)
}

/// The table for a device: the one that [`VARIABLE`] requests; otherwise the CPU's kernels in main memory, and on a GPU
/// our own, or, with a message, the reference if they cannot be compiled.
pub fn choose(device: Device) -> Result<OpsTable> {
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
pub fn named(name: &str) -> Option<OpsTable> {
    [CPU, REFERENCE, DEVICE].into_iter().find(|table| table.name() == name)
}
