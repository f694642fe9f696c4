//! Counts the bytes that kernels load and store. Without a device this is the earliest sign of the cost of a
//! memory-bound kernel: it shows an operand that is read twice, or a wave with uncoalesced accesses.

use super::build::{Build, played};
use super::proof::plant;
use super::tape::Tape;
use super::{attention, exact, experts, finish, routed, router, rows, step};

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
    let gates = [("swiglu_bf16", 6.2), ("swiglu_backward_bf16", 10.2)];
    check_bytes(&[experts::gates([64, 512])], 64 * 512, &gates);
    // Padding is written, too: 21 places for 64 tokens.
    let routed = [
        ("residual_norm_gathered_bf16", 17.1),
        ("residual_norm_gathered_backward_bf16", 24.1),
        ("residual_norm_unpermuted_backward_bf16", 23.3),
    ];
    check_bytes(&[routed::wide([64, 3, 1024])], 64 * 1024, &routed);
    let conv = [("conv_shift_bf16", 8.3), ("conv_shift_backward_bf16", 11.6)];
    check_bytes(&[attention::wide([64, 3, 128, 64, 64])], 64 * 512, &conv);
}

/// Per element of a router's state. Forward it reads the projection and the state before, and writes the state and what
/// both GELUs are of: 18 bytes. Back it reads those, the state, that before and a gradient, and writes what comes to
/// the layers and to the logits, the gradients of the layers' matmuls, that of the state before and, in bf16, of the
/// state: 46. The remainder comes from caches: all weights for each band of rows, 34 bytes, and vectors for each row.
#[test]
fn routers_move_their_rows_once() {
    let moves = [("router_bf16", 74.0), ("router_backward", 100.0)];
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
