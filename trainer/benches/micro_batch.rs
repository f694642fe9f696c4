//! Tokens per second of one micro-batch, forward and backward:
//! `cargo bench -p trainer --bench micro_batch [-- PRESET ROWS SEQ_LEN DOCUMENT]`.
//!
//! First on one thread, then on as many workers as there are cores, each with its own micro-batches.

#![expect(clippy::print_stdout, reason = "results go to standard output")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kernels::share::SharedTensors;
use trainer::model::{MicroBatchInput, ZayaConfig, forward_backward, init, init_balance};

const RUNS: usize = 7;

struct MicroBatch {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    boundaries: Vec<Vec<u32>>,
    rows: usize,
    seq_len: usize,
}

impl MicroBatch {
    /// Random tokens, in documents of `document` tokens.
    fn new(config: &ZayaConfig, rows: usize, seq_len: usize, document: usize) -> MicroBatch {
        let key = contract::Key::from_seed(1);
        let draw = |i| contract::draw(key, contract::Purpose::Generate, i);
        let vocabulary = config.vocab_size as u64;
        let count = (rows * seq_len) as u64;
        MicroBatch {
            tokens: (0..=count).map(|i| (draw(i) % vocabulary) as i32).collect(),
            positions: (0..rows * seq_len).map(|i| (i % seq_len % document) as i32).collect(),
            boundaries: vec![(0..seq_len as u32).step_by(document).collect(); rows],
            rows,
            seq_len,
        }
    }

    fn input<'a>(&'a self, mask: &'a [u8]) -> MicroBatchInput<'a> {
        let (rows, seq_len) = (self.rows, self.seq_len);
        let count = rows * seq_len;
        MicroBatchInput {
            tokens: &self.tokens[..count],
            labels: &self.tokens[1..],
            positions: &self.positions,
            mask,
            boundaries: &self.boundaries,
            weights: &[],
            rows,
            seq_len,
        }
    }
}

/// CPU time of this thread in nanoseconds, unaffected by other processes.
fn core_nanoseconds() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0)
}

fn main() {
    let given: Vec<String> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let number = |index: usize, default: usize| {
        given.get(index).map_or(default, |text| text.parse().expect("a number"))
    };
    let preset = given.first().map_or("zaya1-nano", String::as_str);
    let config = ZayaConfig::preset(preset).expect("a preset");
    let (rows, seq_len) = (number(1, 4), number(2, 256));
    let document = number(3, seq_len);
    let options = kernels::runtime::RuntimeOptions { device: "cpu".to_owned() };
    let table = kernels::runtime::start(&options).expect("the switches are in force");
    println!("{}", table.fingerprint());
    let (params, balance) =
        (init(&config, 1).expect("memory for the weights"), init_balance(&config));
    let (params, balance) = (SharedTensors::new(&params), SharedTensors::new(&balance));
    let data = MicroBatch::new(&config, rows, seq_len, document);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for workers in [1, cores] {
        let (mut times, busy) = (Vec::new(), AtomicU64::new(0));
        for _ in 0..RUNS {
            let begin = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..workers {
                    scope.spawn(|| {
                        let mask = vec![1; rows * seq_len];
                        let (params, balance) = (params.aliases(), balance.aliases());
                        let label_count = (rows * seq_len) as u64;
                        let before = core_nanoseconds();
                        forward_backward(
                            &config,
                            &params,
                            &balance,
                            &data.input(&mask),
                            label_count,
                        )
                        .expect("a micro-batch");
                        busy.fetch_add(core_nanoseconds() - before, Ordering::Relaxed);
                    });
                }
            });
            times.push(begin.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let per_second = |time: f64| (workers * rows * seq_len) as f64 / time;
        println!(
            "{preset}: {workers} workers, micro-batches of {rows} x {seq_len}, documents of {document}: {:.0} tokens/s \
             (best {:.0}); {:.0} per second of one core",
            per_second(times[times.len() / 2]),
            per_second(times[0]),
            (RUNS * workers * rows * seq_len) as f64 * 1e9 / busy.load(Ordering::Relaxed) as f64,
        );
    }
}
