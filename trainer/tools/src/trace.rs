//! The time of a traced step: the names that took most, and parts, assigned by the names of kernels. On a GPU this is
//! device time, kernel by kernel; on a CPU it is the self time of libtorch's operations, so our own kernels, which
//! libtorch does not see, are missing.

use std::collections::BTreeMap;

use kernels::profile::Event;
use serde::Serialize;

/// How many names are reported.
const TOLD: usize = 10;

/// A traced step.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Trace {
    /// Whether these are kernels and copies on a GPU; otherwise operations on the host.
    pub on_device: bool,
    /// Wall time of the step; tracing lengthens it.
    pub seconds: f64,
    /// The sum of all shares, in seconds.
    pub busy: f64,
    /// The names with the most time, in descending order.
    pub top: Vec<TimeShare>,
    /// All time by [`part`], in descending order.
    pub parts: Vec<TimeShare>,
    /// Seconds of the parts that only serve verification: checksums, and sums of squares.
    pub exactness: f64,
}

/// The time of one name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeShare {
    /// The name of a kernel, an operation or a part.
    pub name: String,
    /// Seconds, without nested events.
    pub seconds: f64,
    /// How often it ran.
    pub calls: u64,
}

/// Parts by prefixes of the names of our own kernels; `kernels/device` has them.
const PARTS: [(&str, &[&str]); 10] = [
    (CHECKSUMS, &["checksum_"]),
    (SQUARES, &["squares"]),
    ("tree of additions", &["finish_add", "add_present"]),
    (ATTENTION, &["attention_", "conv_shift_", "query_key_"]),
    ("norms, residuals, embedding", &["rms_norm_", "residual_", "column_", "embedding_"]),
    ("gradients finished", &["finish"]),
    ("router and dispatch", &["router_", "dispatch_", "permute_", "unpermute_", "gather_"]),
    ("experts, our products", &["grouped_", "swiglu_"]),
    (HEAD, &["cross_entropy_", "scale_rows_"]),
    (
        "optimizer",
        &[
            "update_chunks",
            "nesterov",
            "newton_schulz_",
            "unit_blocks",
            "polynomial_blocks",
            "stacked_products",
        ],
    ),
];

const ATTENTION: &str = "attention";
const HEAD: &str = "head and loss";
const CHECKSUMS: &str = "checksums";
const SQUARES: &str = "sums of squares";

/// Substrings of a library's attention kernels, whose names often also contain those of matmuls (`cutlass`).
const ATTENTIONS: [&str; 5] =
    ["flash", "fmha", "sdpa", "scaled_dot_product", "efficient_attention"];

/// The same for a library's loss.
const LOSSES: [&str; 4] = ["log_softmax", "logsumexp", "nll_loss", "cross_entropy"];

/// Substrings of a library's matmul kernels.
const PRODUCTS: [&str; 14] = [
    "gemm",
    "cutlass",
    "cublas",
    "nvjet",
    "xmma",
    "cijk",
    "gemv",
    "splitk",
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "grouped_mm",
    "mkldnn",
];

/// Copies, and blocks sent between ranks.
const COPIES: [&str; 5] = ["memcpy", "memset", "copy_", "round_blocks", "aten::fill_"];

/// The part that a name belongs to.
pub fn part(name: &str) -> &'static str {
    let begins = |(_, names): &&(&str, &[&str])| names.iter().any(|begin| name.starts_with(begin));
    if let Some((part, _)) = PARTS.iter().find(begins) {
        return part;
    }
    let name = name.to_lowercase();
    let has = |names: &[&str]| names.iter().any(|part| name.contains(part));
    let libraries = [
        (ATTENTION, &ATTENTIONS[..]),
        (HEAD, &LOSSES),
        ("products by a library", &PRODUCTS),
        ("copies", &COPIES),
    ];
    let found = libraries.iter().find(|(_, names)| has(names));
    found.map_or("libtorch's other operations", |(part, _)| part)
}

impl Trace {
    /// From the events of a step that took `seconds`.
    pub fn of(events: &[Event], seconds: f64) -> Trace {
        let on_device = events.iter().any(|event| event.on_device);
        let mut own: Vec<_> = events.iter().filter(|event| event.on_device == on_device).collect();
        own.sort_by_key(|event| (event.place, event.begin, std::cmp::Reverse(event.nanoseconds)));
        let alone = alone(&own);
        let (mut names, mut parts) = (BTreeMap::new(), BTreeMap::new());
        for (event, nanoseconds) in own.iter().zip(&alone) {
            add(&mut names, &event.name, *nanoseconds);
            add(&mut parts, part(&event.name), *nanoseconds);
        }
        let (mut top, parts) = (sorted(names), sorted(parts));
        top.truncate(TOLD);
        let exact = parts.iter().filter(|share| [CHECKSUMS, SQUARES].contains(&&*share.name));
        Trace {
            on_device,
            seconds,
            busy: parts.iter().fold(0.0, |sum, share| sum + share.seconds),
            exactness: exact.fold(0.0, |sum, share| sum + share.seconds),
            top,
            parts,
        }
    }
}

/// The self time of each event in nanoseconds: without nested events. Events are sorted by place, outer before inner;
/// on a device none are nested.
fn alone(events: &[&Event]) -> Vec<u64> {
    let mut alone: Vec<u64> = events.iter().map(|event| event.nanoseconds).collect();
    let mut open: Vec<usize> = Vec::new();
    for (index, event) in events.iter().enumerate() {
        let end = |outer: &Event| outer.begin + outer.nanoseconds;
        let within = |outer: &Event| {
            outer.place == event.place && end(outer) >= end(event) && end(outer) > event.begin
        };
        while open.last().is_some_and(|last| !within(events[*last])) {
            open.pop();
        }
        if let (Some(last), false) = (open.last(), event.on_device) {
            alone[*last] = alone[*last].saturating_sub(event.nanoseconds);
        }
        open.push(index);
    }
    alone
}

fn add(to: &mut BTreeMap<String, (u64, u64)>, name: &str, nanoseconds: u64) {
    let (all, calls) = to.entry(name.to_owned()).or_default();
    (*all, *calls) = (*all + nanoseconds, *calls + 1);
}

/// Sorted by seconds, descending; equal ones by name.
fn sorted(all: BTreeMap<String, (u64, u64)>) -> Vec<TimeShare> {
    let share =
        |(name, (nanoseconds, calls))| TimeShare { name, seconds: nanoseconds as f64 / 1e9, calls };
    let mut found: Vec<TimeShare> = all.into_iter().map(share).collect();
    found.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, on_device: bool, place: u64, [begin, nanoseconds]: [u64; 2]) -> Event {
        Event { name: name.to_owned(), on_device, place, begin, nanoseconds }
    }

    #[test]
    fn what_is_inside_counts_once() {
        let events = [
            event("aten::matmul", false, 1, [0, 100]),
            event("aten::mm", false, 1, [10, 60]),
            event("aten::copy_", false, 1, [20, 30]),
            event("aten::mm", false, 1, [100, 50]),
            // Another thread at the same time.
            event("aten::mm", false, 2, [10, 7]),
        ];
        let trace = Trace::of(&events, 1.0);
        let share = |name: &str, nanoseconds: f64, calls| TimeShare {
            name: name.to_owned(),
            seconds: nanoseconds / 1e9,
            calls,
        };
        let wanted = [("aten::mm", 87.0, 3), ("aten::matmul", 40.0, 1), ("aten::copy_", 30.0, 1)];
        assert_eq!(trace.top, wanted.map(|(name, time, calls)| share(name, time, calls)));
        assert!((trace.busy - 157e-9).abs() < 1e-15 && !trace.on_device);
    }

    #[test]
    fn a_device_counts_alone_where_there_is_one() {
        let events = [
            event("aten::mm", false, 1, [0, 1000]),
            event("nvjet_tst_128x64", true, 7, [50, 40]),
            // Streams overlap, and so may a copy and a kernel of one stream.
            event("checksum_blocks", true, 7, [60, 10]),
            event("squares", true, 8, [60, 5]),
            event("Memcpy DtoH", true, 8, [70, 20]),
        ];
        let trace = Trace::of(&events, 1.0);
        let parts: Vec<_> = trace.parts.iter().map(|share| share.name.as_str()).collect();
        assert_eq!(parts, ["products by a library", "copies", CHECKSUMS, SQUARES]);
        assert!(trace.on_device && (trace.exactness - 15e-9).abs() < 1e-15);
        assert!((trace.busy - 75e-9).abs() < 1e-15, "{trace:?}");
    }

    #[test]
    fn a_librarys_kernels_are_filed_by_what_they_do() {
        let flash = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>";
        for (name, wanted) in [
            (flash, ATTENTION),
            ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", ATTENTION),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", ATTENTION),
            ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
            (
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>",
                "products by a library",
            ),
            ("aten::_log_softmax", HEAD),
            ("scale_rows_narrow", HEAD),
            ("Memcpy DtoH", "copies"),
        ] {
            assert_eq!(part(name), wanted, "{name}");
        }
    }

    /// A new kernel must be assigned to a part.
    #[test]
    fn every_kernel_of_ours_has_a_part() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/device");
        let mut count = 0;
        for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if file.extension().is_none_or(|extension| extension != "h") {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            for name in text.split("\nKERNEL(").skip(1) {
                let name = name.split(',').next().unwrap();
                count += 1;
                let part = part(name);
                assert_ne!(part, "libtorch's other operations", "{name}");
                assert_ne!(part, "products by a library", "{name}");
            }
        }
        assert!(count > 70, "{count} kernels");
    }
}
