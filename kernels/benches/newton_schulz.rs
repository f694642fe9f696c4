//! Newton-Schulz of one matrix on one thread: the CPU's table, the same steps with the library's matmuls, and the
//! reference.
//! `cargo bench -p kernels --bench newton_schulz`

#![expect(clippy::print_stdout, reason = "results go to standard output")]

use kernels::ops::{CPU, NewtonSchulz, NewtonSchulzIterate, REFERENCE};
use kernels::{Result, product};
use tch::{Device, Kind, Tensor};

const QUINTIC: NewtonSchulz = NewtonSchulz {
    coefficients: [3.4445, -4.7750, 2.0315],
    steps: 5,
    eps: 1e-7,
    form: NewtonSchulzIterate::Gram,
};

fn main() -> Result<()> {
    let options = kernels::runtime::RuntimeOptions { device: "cpu".to_owned() };
    println!("{}", kernels::runtime::start(&options)?.cpu);
    println!(
        "{:>12} {:>10} {:>12} {:>10} {:>14}",
        "matrix", "cpu, ms", "library, ms", "ref., ms", "product, GF/s"
    );
    for (rows, columns) in [(256, 256), (256, 512), (512, 512), (512, 1024), (1024, 1024)] {
        let matrix = Tensor::randn([rows, columns], (Kind::Float, Device::Cpu));
        // Long enough for a clock with a resolution of a few milliseconds.
        let turns = (1 << 28) / (rows * rows * columns) + 1;
        let (mut best, mut rate) = ([f64::MAX; 3], 0f64);
        // Alternating, and the best of several: load from other processes affects all alike.
        for _ in 0..5 {
            best[0] = best[0].min(milliseconds(turns, || CPU.newton_schulz(&matrix, QUINTIC))?);
            best[1] = best[1].min(milliseconds(turns, || by_library(&matrix))?);
            best[2] =
                best[2].min(milliseconds(turns, || REFERENCE.newton_schulz(&matrix, QUINTIC))?);
            let square = Tensor::randn([768, 768], (Kind::Float, Device::Cpu));
            let once = milliseconds(20, || product::of(&square, &square))?;
            rate = rate.max(2.0 * 768f64.powi(3) / once / 1e6);
        }
        let [cpu, library, reference] = best;
        println!(
            "{rows:>5} x {columns:>4} {cpu:>10.2} {library:>12.2} {reference:>10.2} {rate:>14.0}"
        );
    }
    Ok(())
}

/// CPU time of this thread: other processes may use the machine.
fn milliseconds(turns: i64, work: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let start = core_nanoseconds();
    for _ in 0..turns {
        let _ = work()?;
    }
    Ok((core_nanoseconds() - start) as f64 / 1e6 / turns as f64)
}

fn core_nanoseconds() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Symmetric matmuls in blocks by the library, and the Gram form if the matrix is twice as wide as high.
fn by_library(matrix: &Tensor) -> Result<Tensor> {
    let (rows, columns) = (matrix.size()[0], matrix.size()[1]);
    let mut x = matrix / (matrix.norm() + f64::from(QUINTIC.eps));
    let fresh = || Tensor::empty([rows, rows], (Kind::Float, Device::Cpu));
    let (square, factor, spare) = (fresh(), fresh(), fresh());
    let oblong = columns >= 2 * rows;
    let mut all: Option<Tensor> = None;
    for step in 1..=QUINTIC.steps {
        if step == 1 || !oblong {
            symmetric(&square, &x, &x.tr())?;
        }
        symmetric(&factor, &square, &square)?;
        let [a, b, c] = QUINTIC.coefficients.map(f64::from);
        let _ = factor.shallow_clone().g_mul_scalar_(c);
        let _ = factor.shallow_clone().g_add_(&(&square * b));
        let _ = factor.diagonal(0, 0, 1).g_add_scalar_(a);
        if !oblong {
            x = product::of(&factor, &x)?;
            continue;
        }
        let next = fresh();
        match &all {
            None => next.shallow_clone().copy_(&factor),
            Some(before) => symmetric(&next, before, &factor)?,
        }
        all = Some(next);
        if step < QUINTIC.steps {
            symmetric(&spare, &square, &factor)?;
            symmetric(&square, &spare, &factor)?;
        }
    }
    all.map_or_else(|| Ok(x.shallow_clone()), |all| product::of(&all, &x))
}

/// Blocks below the diagonal are copied, not computed.
fn symmetric(out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
    let rows = out.size()[0];
    if rows <= 128 {
        return product::into(out, left, right);
    }
    let (top, bottom) = (rows / 2, rows - rows / 2);
    let (above, below) = (left.narrow(0, 0, top), left.narrow(0, top, bottom));
    let (before, after) = (right.narrow(1, 0, top), right.narrow(1, top, bottom));
    symmetric(&out.narrow(0, 0, top).narrow(1, 0, top), &above, &before)?;
    symmetric(&out.narrow(0, top, bottom).narrow(1, top, bottom), &below, &after)?;
    let corner = out.narrow(0, 0, top).narrow(1, top, bottom);
    product::into(&corner, &above, &after)?;
    out.narrow(0, top, bottom).narrow(1, 0, top).copy_(&corner.tr());
    Ok(())
}
