//! Counts the bytes that kernels load and store. Without a device this is the earliest sign of the cost of a
//! memory-bound kernel: it shows an operand that is read twice, or a wave with uncoalesced accesses.

use super::build::{Build, played};
use super::proof::plant;
use super::tape::Tape;
use super::{attention, exact, experts, finish, router, rows, step};

/// For each launch of a tape: the kernel, and the bytes that its waves load and store per element.
fn counted(tape: &Tape, elements: usize) -> Vec<(String, f64)> {
    let (printed, left) = played(&Build::COUNTED, "one", &[tape]);
    assert!(left.is_some(), "{printed}");
    let launch = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [kernel, loaded, stored] = words[..] else { return None };
        let [loaded, stored] = [loaded, stored].map(|bytes| bytes.parse::<u64>().ok());
        Some((kernel.to_owned(), (loaded? + stored?) as f64 / elements as f64))
    };
    printed.lines().filter_map(launch).collect()
}

/// Checks the launches of tapes, in order, against limits of bytes per element; launches without a limit are skipped.
fn check_bytes(tapes: &[Tape], elements: usize, most: &[(&str, f64)]) {
    let mut wanted = most.iter().peekable();
    for (kernel, bytes) in tapes.iter().flat_map(|tape| counted(tape, elements)) {
        eprintln!("{kernel}: {bytes:.2} bytes an element");
        if let Some((_, most)) = wanted.next_if(|(name, _)| *name == kernel) {
            assert!(bytes <= *most, "{kernel} moves {bytes} bytes of an element, at most {most}");
        }
    }
    assert_eq!(wanted.next(), None, "a kernel that is not launched");
}

/// Rows in bf16 and sums in f32. The kernels' comments count the bytes of operands and results; the remainder is
/// vectors, factors and lists.
#[test]
fn rows_are_moved_once() {
    let shape = [32, 1024];
    let norms = [
        ("rms_norm_f32", 9.3),
        ("rms_norm_bf16", 7.3),
        ("rms_norm_backward_bf16", 11.2),
        ("rms_norm_backward_bf16", 15.3),
        ("residual_norm_bf16", 17.5),
        ("residual_sum_bf16", 14.4),
        ("residual_backward_bf16", 17.9),
        ("residual_norm_backward_bf16", 21.9),
    ];
    check_bytes(&rows::wide(shape), shape[0] * shape[1], &norms);
    let moves = [
        ("permute_bf16", 4.9),
        ("unpermute_bf16", 6.8),
        ("gather_bf16", 4.7),
        ("gather_backward_bf16", 8.4),
    ];
    check_bytes(&[experts::wide([128, 3, 512])], 128 * 512, &moves);
    let conv = [("conv_shift_bf16", 8.3), ("conv_shift_backward_bf16", 11.6)];
    check_bytes(&[attention::wide([64, 3, 128, 64, 64])], 64 * 512, &conv);
}

/// Per element of a router's state. The norm reads a row twice, the second time from a cache, and its vectors for every
/// two rows; the tape's backward pass writes its gradient in both kinds.
#[test]
fn routers_move_their_rows_once() {
    let moves = [
        ("router_norm_backward", 40.9),
        ("router_norm_bf16", 24.5),
        ("bias_gelu", 9.2),
        ("gelu_backward", 13.4),
        ("router_choice", 4.6),
        ("router_backward", 1.9),
    ];
    check_bytes(&[router::wide([64, 128, 17])], 64 * 128, &moves);
}

/// For a weight under AdamW and under Muon, a pair of gradients, and a gradient that is squared.
#[test]
fn weights_and_gradients_are_moved_once() {
    let weights = 1 << 15;
    let moves = [("update_chunks", 30.1), ("update_chunks", 18.1), ("nesterov", 17.1)];
    check_bytes(&step::wide(weights), weights, &moves);
    check_bytes(&finish::wide(weights), weights, &[("finish_add", 8.4), ("finish_add", 10.4)]);
    check_bytes(&[exact::wide(weights)], weights, &[("squares", 4.1)]);
}

#[test]
fn bytes_that_are_not_needed_are_found() {
    for (kernel, least, most) in
        [("faultless", 8.0, 8.5), ("reads_twice", 12.0, 12.5), ("reads_apart", 35.0, 36.5)]
    {
        let found = counted(&plant(kernel), 600)[0].1;
        assert!((least..=most).contains(&found), "{kernel}: {found}");
    }
}
