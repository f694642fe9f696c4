//! What a launch costs the host: processor time of both passes of a micro-batch, in bf16 with a GPU's table on tensors
//! without numbers, by one thread and by two: `cargo bench -p trainer --bench host [-- PRESET SEQ_LEN]`. With a third
//! word `operators` it also counts calls of libtorch's operators.
//!
//! No device and no driver take part: `kernels/docs/measured.md` says what that leaves out.

#![expect(clippy::print_stdout, reason = "results go to standard output")]

use std::collections::BTreeMap;

use curriculum::Dtype;
use kernels::addend::Addend;
use kernels::{ops, profile, shapes};
use tch::{Device, Kind, Tensor};
use trainer::model::{
    self, ChunkSum, GradientSink, GradientTerm, MicroBatchOptions, ParamId, ZayaConfig,
};

const RUNS: u32 = 200;

/// Processor time of this thread, unaffected by other processes.
fn core_nanoseconds() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0)
}

/// Drops the gradients.
struct Dropped;

impl GradientSink for Dropped {
    fn gradient(&mut self, _: ParamId, _: Addend) -> contract::Result<()> {
        Ok(())
    }

    fn part(&mut self, _: ParamId, _: GradientTerm, _: Vec<ChunkSum>) -> contract::Result<()> {
        Ok(())
    }
}

/// A thread's model.
struct Host<'a> {
    config: &'a ZayaConfig,
    weights: Vec<Tensor>,
    balance: Vec<Tensor>,
    seq_len: u64,
}

impl Host<'_> {
    fn new(config: &ZayaConfig, seq_len: u64) -> Host<'_> {
        let device = shapes::device(true).expect("libtorch's meta device");
        let empty = |shape: &[i64], kind| Tensor::empty(shape, (kind, device));
        let specs = model::parameters(config);
        let weights = specs.iter().map(|spec| empty(&spec.shape, spec.kind(Dtype::Bf16))).collect();
        let balance = model::init_balance(config);
        let balance = balance.iter().map(|one| empty(&one.size(), Kind::Float)).collect();
        Host { config, weights, balance, seq_len }
    }

    /// Both passes.
    fn pass(&self) {
        let options = MicroBatchOptions { ops: ops::DEVICE, ..MicroBatchOptions::default() };
        let (shape, how) = ([1, self.seq_len], options.into());
        model::over_shapes(self.config, &self.weights, &self.balance, shape, how, &mut Dropped)
            .expect("a micro-batch");
    }

    /// The mean of several passes: microseconds of processor time, and launches.
    fn measured(&self) -> [f64; 2] {
        self.pass();
        let (launches, begin) = (shapes::launches(), core_nanoseconds());
        (0..RUNS).for_each(|_| self.pass());
        let (launches, spent) = (shapes::launches() - launches, core_nanoseconds() - begin);
        [spent as f64 / 1e3, launches as f64].map(|all| all / f64::from(RUNS))
    }
}

/// Calls of libtorch's operators in a pass, those of other operators included.
fn operators(host: &Host) -> BTreeMap<String, u64> {
    let file = std::env::temp_dir().join(format!("host-{}.json", std::process::id()));
    let profile = profile::begin(Device::Cpu).expect("a profiler");
    host.pass();
    let events = profile.end(&file).expect("events");
    std::fs::remove_file(&file).expect("a file");
    let mut counts = BTreeMap::new();
    events.into_iter().for_each(|event| *counts.entry(event.name).or_default() += 1);
    counts
}

fn main() {
    let given: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let config = ZayaConfig::preset(given.first().map_or("zaya1-1b", String::as_str));
    let config = config.expect("a preset");
    let seq_len = given.get(1).map_or(8192, |text| text.parse().expect("a number"));
    for threads in [1, 2] {
        let found = std::thread::scope(|scope| {
            let work = || Host::new(&config, seq_len).measured();
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            all.into_iter().map(|one| one.join().expect("a thread")).collect::<Vec<_>>()
        });
        for [spent, launches] in found {
            println!(
                "{threads} threads: {launches} launches, {:.2} us of the host for each, {:.2} ms in all",
                spent / launches,
                spent / 1e3
            );
        }
    }
    if given.get(2).is_some_and(|word| word == "operators") {
        let mut counts: Vec<_> = operators(&Host::new(&config, seq_len)).into_iter().collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        counts.iter().for_each(|(name, count)| println!("{count} {name}"));
    }
}
