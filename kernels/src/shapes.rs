//! Computes with shapes alone, to count what a computation takes: its operations, and bytes of live tensors.
//!
//! Tensors on [`device`] have a shape, a dtype and no numbers. Every operator of libtorch gives the shape of its result
//! there; whatever reads a number fails. [`crate::ops::SHAPES`] computes there as the CPU's table would, and the table
//! for GPUs as on a GPU, with launches that do nothing.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::cell::{Cell, RefCell};
use std::ffi::c_int;

use tch::{Device, Tensor};

use crate::Result;
use crate::shim::guarded;

unsafe extern "C" {
    fn shim_shapes() -> c_int;
    fn shim_shapes_live() -> i64;
    fn shim_shapes_peak() -> i64;
    fn shim_shapes_anew();
}

/// libtorch's meta device. It reports itself under this name, as tch has none for it.
pub(crate) const DEVICE: Device = Device::Mps;

/// The device of tensors without numbers, which on this thread counts as a GPU from now on, or as main memory.
///
/// # Errors
/// If libtorch refuses it.
pub fn device(gpu: bool) -> Result<Device> {
    // SAFETY: takes no argument; what it registers stays for the life of the process.
    guarded("compute with shapes", unsafe { shim_shapes() })?;
    IS_GPU.set(gpu);
    Ok(DEVICE)
}

/// Whether work on `device` is queued, as on a GPU.
pub fn queues(device: Device) -> bool {
    match device {
        DEVICE => IS_GPU.get(),
        device => device != Device::Cpu,
    }
}

/// Bytes that this thread's live tensors without numbers would take.
pub fn live() -> u64 {
    // SAFETY: reads a number.
    unsafe { shim_shapes_live() }.max(0).cast_unsigned()
}

/// The maximum of [`live`] since the last call of [`anew`] on this thread.
pub fn peak() -> u64 {
    // SAFETY: reads a number.
    unsafe { shim_shapes_peak() }.max(0).cast_unsigned()
}

/// Resets the maximum.
pub fn anew() {
    // SAFETY: writes a number.
    unsafe { shim_shapes_anew() }
}

/// How many kernels this thread has asked for on tensors without numbers, as on a GPU.
pub fn launches() -> u64 {
    LAUNCHES.get()
}

/// Counts a kernel that a GPU would run.
pub(crate) fn launched() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// An operation of some arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// `count` matmuls of `[rows, inner]` and `[inner, columns]`, whose operands are f32 (`wide`) or bf16.
    Matmul {
        /// How many.
        count: i64,
        /// Rows, inner size, columns.
        shape: [i64; 3],
        /// Whether the operands are f32.
        wide: bool,
        /// Whether the rows are those of an expert.
        routed: bool,
    },
    /// So many multiplications and additions of attention forward: scores, and sums of values. A backward pass, which
    /// has twice as many, is not reported.
    Attention(f64),
    /// The same of a recurrence over tokens, however it is computed.
    Recurrence(f64),
}

type See = Box<dyn FnMut(Work)>;

thread_local! {
    static IS_GPU: Cell<bool> = const { Cell::new(false) };
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
    static SEEN: RefCell<Option<See>> = const { RefCell::new(None) };
}

/// Runs `work` on this thread and passes the arithmetic of [`crate::ops::SHAPES`] and [`crate::ops::CPU`] in it to
/// `see`, in order; the CPU's table does not report a router network, nor which rows are those of an expert.
pub fn watched<T>(see: impl FnMut(Work) + 'static, work: impl FnOnce() -> T) -> T {
    let before = SEEN.replace(Some(Box::new(see)));
    let made = work();
    SEEN.replace(before);
    made
}

/// Reports `work`, if someone watches.
pub(crate) fn note(work: impl FnOnce() -> Work) {
    SEEN.with_borrow_mut(|see| see.as_mut().map(|see| see(work())));
}

/// Reports `left right`; `routed` if its rows are those of an expert.
pub(crate) fn note_matmul(left: &Tensor, right: &Tensor, routed: bool) {
    note(|| {
        let (left_size, right_size) = (left.size(), right.size());
        let last =
            |sizes: &[i64], place: usize| sizes.iter().rev().nth(place).copied().unwrap_or(1);
        let shape = [last(&left_size, 1), last(&left_size, 0), last(&right_size, 0)];
        let count = left_size.iter().rev().skip(2).product();
        Work::Matmul { count, shape, wide: left.kind() == tch::Kind::Float, routed }
    });
}

/// Runs `work`, whose operations are reported as the one operation `whole`.
pub(crate) fn as_one<T>(whole: Option<Work>, work: impl FnOnce() -> T) -> T {
    let see = SEEN.take();
    let made = work();
    SEEN.set(see);
    whole.into_iter().for_each(|whole| note(|| whole));
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{CPU, DEVICE as OPS_OF_A_DEVICE, OpsTable, SHAPES};
    use std::cell::RefCell;
    use std::rc::Rc;
    use tch::Kind;

    #[test]
    fn bytes_are_counted_and_numbers_are_refused() {
        let device = device(false).unwrap();
        let begun = live();
        anew();
        let large = Tensor::empty([1 << 20, 1 << 20], (Kind::Float, device));
        assert_eq!([live(), peak()], [begun + (4 << 40); 2]);
        let half = large.narrow(0, 0, 1 << 19).to_kind(Kind::BFloat16);
        assert_eq!(live(), begun + (5 << 40), "views are free");
        drop(large);
        assert_eq!([live(), peak()], [begun + (1 << 40), begun + (5 << 40)]);
        anew();
        assert_eq!(peak(), begun + (1 << 40));
        assert!(half.sum(Kind::Float).f_double_value(&[]).is_err());
        drop(half);
        assert_eq!(live(), begun);
        let moved = Tensor::ones([3], (Kind::Float, tch::Device::Cpu)).to_device(device);
        assert_eq!((moved.device(), live()), (device, begun + 12));
    }

    /// Another thread counts by itself, and what is inside an operation is not reported.
    #[test]
    fn work_is_reported_on_its_thread_only() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let into = Rc::clone(&seen);
        let note_one = || note(|| Work::Attention(1.0));
        watched(
            move |work| into.borrow_mut().push(work),
            || {
                note_one();
                as_one(Some(Work::Recurrence(2.0)), note_one);
                as_one(None, note_one);
                std::thread::scope(|scope| scope.spawn(note_one).join()).unwrap();
            },
        );
        note_one();
        assert_eq!(*seen.borrow(), [Work::Attention(1.0), Work::Recurrence(2.0)]);
    }

    /// Results of the operations that each table implements by itself have the shapes and kinds of the CPU's.
    #[test]
    fn results_are_shaped_as_those_of_the_cpu() {
        let there = device(true).unwrap();
        let made = |ops: OpsTable, device, kind| {
            let wide = (Kind::Float, device);
            let (x, vector) = (Tensor::zeros([6, 8], wide), Tensor::zeros([8], wide));
            let narrow = x.to_kind(kind);
            let (normed, factors) = ops.rms_norm(&x, &vector, 1e-5, kind).unwrap();
            let (back, _) = ops.rms_norm_backward(&x, &factors, &vector, &narrow).unwrap();
            let product = ops.matmul(&narrow, &narrow.tr()).unwrap();
            let part = ops.matmul_part(&narrow, &narrow.tr()).unwrap();
            let parts = [&narrow, &narrow.tr()].map(|side| side.unsqueeze(0));
            let parts = ops.matmul_part(&parts[0], &parts[1]).unwrap();
            let gated = ops.swiglu(&narrow).unwrap();
            let ungated = ops.swiglu_backward(&narrow, &gated).unwrap();
            let all = [normed, factors, back, product, part, parts, gated, ungated];
            all.map(|tensor| (tensor.size(), tensor.kind()))
        };
        for kind in [Kind::Float, Kind::BFloat16] {
            let wanted = made(CPU, tch::Device::Cpu, kind);
            assert_eq!(made(SHAPES, there, kind), wanted);
            assert_eq!(made(OPS_OF_A_DEVICE, there, kind), wanted);
        }
    }
}
