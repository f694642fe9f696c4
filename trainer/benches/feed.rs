//! The host's cost per token from an assembled batch to its device: `cargo bench -p trainer --bench feed`.
//!
//! For comparison, the former cost: readers wrote each batch a second time, in 64-bit words, for a device to copy.

#![expect(clippy::print_stdout, reason = "results go to standard output")]

use std::hint::black_box;
use std::time::Instant;

use kernels::device::Stager;
use loader::{BatchMemory, Columns};
use tch::Device;
use trainer::model::{BatchBuffer, MicroBatchInput, ZayaConfig};

const ROWS: usize = 256;
const SEQ_LEN: usize = 4096;
const TOKENS: usize = ROWS * SEQ_LEN;
const DOCUMENT: usize = 600;
/// Repetitions per measurement: the kernel updates CPU times only every few hundredths of a second.
const TIMES: usize = 32;

/// The best of several measurements, in nanoseconds of this thread's CPU time per token; wall clock if the kernel has
/// no CPU times.
fn best(mut work: impl FnMut()) -> f64 {
    let spent = || -> Option<u64> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let turn = |_| {
        let (begin, before) = (Instant::now(), spent());
        (0..TIMES).for_each(|_| work());
        let wall = begin.elapsed().as_nanos() as u64;
        before.zip(spent()).map_or(wall, |(before, after)| after - before)
    };
    (0..9).map(turn).min().unwrap_or(0) as f64 / (TIMES * TOKENS) as f64
}

/// The micro-batches of a batch, one row each.
fn micro_batches<'a>(
    columns: Columns<'a>,
    boundaries: &'a [Vec<u32>],
) -> impl Iterator<Item = MicroBatchInput<'a>> {
    (0..ROWS).map(move |row| {
        let at = row * SEQ_LEN..(row + 1) * SEQ_LEN;
        MicroBatchInput {
            tokens: &columns.tokens[at.clone()],
            labels: &columns.labels[at.clone()],
            positions: &columns.positions[at.clone()],
            mask: &columns.mask[at],
            boundaries: &boundaries[row..=row],
            weights: &[],
            rows: 1,
            seq_len: SEQ_LEN,
        }
    })
}

/// Writes a micro-batch a second time: as 64-bit words, with two f32 of the mask per word.
fn write_again(micro_batch: &MicroBatchInput<'_>, words: &mut [i64]) {
    let (tokens, words) = words.split_at_mut(SEQ_LEN);
    let (labels, words) = words.split_at_mut(SEQ_LEN);
    let (positions, mask) = words.split_at_mut(SEQ_LEN);
    tokens.iter_mut().zip(micro_batch.tokens).for_each(|(word, token)| *word = i64::from(*token));
    let places = micro_batch.labels.iter().zip(micro_batch.mask);
    let label = |(label, mask): (&i32, &u8)| if *mask == 0 { 0 } else { i64::from(*label) };
    labels.iter_mut().zip(places.map(label)).for_each(|(word, label)| *word = label);
    positions
        .iter_mut()
        .zip(micro_batch.positions)
        .for_each(|(word, place)| *word = i64::from(*place));
    let bits = |mask: &u8| i64::from(f32::from(u8::from(*mask != 0)).to_bits());
    let pair = |pair: &[u8]| bits(&pair[0]) | pair.get(1).map_or(0, bits) << 32;
    mask.iter_mut().zip(micro_batch.mask.chunks(2).map(pair)).for_each(|(word, pair)| *word = pair);
}

fn main() {
    let config = ZayaConfig::preset("zaya1-nano").expect("a preset");
    let stager = Stager::new(Device::Cpu).expect("a stager");
    let mut buffer = BatchBuffer::take(stager.buffers(), TOKENS).expect("memory");
    let columns = buffer.columns_mut().expect("memory");
    let vocabulary = config.vocab_size as usize;
    for place in 0..TOKENS {
        let last = (place % SEQ_LEN + 1).is_multiple_of(DOCUMENT);
        columns.tokens[place] = (place * 37 % vocabulary) as i32;
        columns.labels[place] = if last { 0 } else { ((place + 1) * 37 % vocabulary) as i32 };
        columns.positions[place] = (place % SEQ_LEN % DOCUMENT) as i32;
        columns.mask[place] = u8::from(!last);
    }
    let boundaries = vec![(0..SEQ_LEN as u32).step_by(DOCUMENT).collect::<Vec<u32>>(); ROWS];
    let row = |what: &str, nanoseconds: f64| println!("{what:<64} {nanoseconds:>6.2} ns/token");
    let in_place = best(|| {
        for micro_batch in micro_batches(buffer.columns(), &boundaries) {
            black_box(micro_batch.check_in_place(&config).expect("a micro-batch"));
        }
    });
    row("readers: checked in place", in_place);
    let checked = best(|| {
        for micro_batch in micro_batches(buffer.columns(), &boundaries) {
            black_box(micro_batch.check(&config).expect("a micro-batch"));
        }
    });
    let mut words = vec![0i64; TOKENS / 2 * 7];
    let again = best(|| {
        for (micro_batch, words) in
            micro_batches(buffer.columns(), &boundaries).zip(words.chunks_mut(SEQ_LEN / 2 * 7))
        {
            write_again(&micro_batch, black_box(words));
        }
    });
    row("readers, as before: checked", checked);
    row("readers, as before: written again as words of 64 bits", again);
    let widened = best(|| {
        let micro_batches =
            micro_batches(buffer.columns(), &boundaries).map(|one| one.check(&config));
        let micro_batches = micro_batches.collect::<Result<Vec<_>, _>>().expect("micro-batches");
        black_box(buffer.send(micro_batches, &stager).expect("sent"));
    });
    row("last stage on a CPU: widened (a device does it by itself)", widened - checked);
}
