//! Elements per second of a checksum on one core: `cargo bench -p kernels --bench checksum`.

#![expect(clippy::print_stdout, reason = "results go to standard output")]

use tch::{Device, Kind, Tensor};

/// CPU time of this thread in nanoseconds, unaffected by other processes.
fn core_nanoseconds() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0)
}

fn main() {
    for elements in [1 << 16, 1 << 24] {
        let tensor = Tensor::arange(elements, (Kind::Float, Device::Cpu));
        let rounds = (1 << 26) / elements;
        let before = core_nanoseconds();
        let sum = (0..rounds as u64).fold(0u64, |sum, salt| {
            sum.wrapping_add(kernels::checksum::tensor(&tensor, salt).expect("a sum"))
        });
        let each = (core_nanoseconds() - before) as f64 / (rounds * elements) as f64;
        println!(
            "f32 x {elements}: {:.2} ns per element, {:.1} GB/s ({sum:016x})",
            each,
            4.0 / each
        );
    }
}
