//! Fear: that the planned resources of a run differ from what it takes.

use loader::OpenedCurriculum;
use tools::plan::{Fleet, SentInStep, needs};
use trainer::RunSpec;
use trainer::mesh::{Degrees, GradReduce};
use trainer::model::ActivationCheckpointing;
use trainer::workers::Workers;

use crate::support::Scratch;

fn fleet(ranks: u32, device: &str) -> Fleet {
    Fleet {
        ranks,
        ranks_per_node: ranks,
        workers: Workers::new(1),
        grad_reduce: GradReduce::Whole,
        flat: false,
        degrees: Degrees::ALONE,
        device: device.to_owned(),
    }
}

fn spec(scratch: &Scratch) -> RunSpec {
    RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap()
}

/// Bytes of tensor data in a safetensors file: everything after its header.
fn payload(bytes: &[u8]) -> u64 {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes.len() as u64 - 8 - header
}

#[test]
fn a_checkpoint_and_the_ledger_are_as_large_as_planned() {
    let scratch = Scratch::new();
    scratch.train("run");
    let needs = needs(&spec(&scratch), &fleet(3, "cpu")).unwrap();
    let tree = scratch.tree("run");
    let blobs = tree.iter().filter(|(path, _)| path.contains("checkpoints/step-10/"));
    let (manifests, blobs): (Vec<_>, Vec<_>) =
        blobs.partition(|(path, _)| path.ends_with("manifest.json"));
    assert_eq!((manifests.len() + blobs.len()) as u64, needs.checkpoint.files);
    // The number of digits of blob sizes varies.
    let manifest = manifests[0].1.len() as u64;
    assert!(manifest.abs_diff(needs.checkpoint.manifest) < manifest / 50, "{manifest}: {needs:?}");
    let bytes: u64 = blobs.iter().map(|(_, bytes)| payload(bytes)).sum();
    assert_eq!(bytes, needs.checkpoint.bytes);
    assert!(
        needs.checkpoint.largest_part < bytes && 3 * needs.checkpoint.largest_part >= bytes / 2
    );
    // The number of digits varies from step to step.
    let lines: u64 = scratch.ledger("run").lines().skip(1).map(|line| line.len() as u64 + 1).sum();
    let off = lines.abs_diff(needs.ledger_bytes) as f64 / lines as f64;
    assert!(off < 0.05, "{lines} bytes, planned {}", needs.ledger_bytes);
}

/// A number with too many digits in a curriculum once used all memory of the machine.
#[test]
fn a_batch_beyond_all_measure_is_refused_and_one_within_is_planned_by_arithmetic() {
    let scratch = Scratch::new();
    let epochs =
        "[source.web]\nmax_epochs = 1000000000\n[source.math]\nmax_epochs = 1000000000\n\n[model]";
    let opened = |batch: u64| {
        let batch = format!("batch = {batch}\nmicro_batch = 2");
        let edits = [("[model]", epochs), ("batch = 6\nmicro_batch = 2", &*batch)];
        OpenedCurriculum::open(scratch.edited("large.toml", &edits)).unwrap()
    };
    let fault = RunSpec::new(&opened(1 << 33)).map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), contract::Class::Usage, "{fault}");
    for word in ["too many micro-batches", "large.toml", "4294967296", "1048576"] {
        assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
    }
    let line = |batch| {
        let spec = RunSpec::new(&opened(batch)).unwrap();
        needs(&spec, &fleet(8, "cpu")).unwrap().phases[0].ledger_bytes
    };
    // 35 per micro-batch: labels of two digits and two words of sixteen. Token counts by expert and labels by source
    // grow by six digits each.
    let (short, long) = (line(2), line(2 << 20));
    let grown = long - short - 35 * ((1 << 20) - 1);
    assert!((6..=20 * 6).contains(&grown), "{short} {long}");
}

#[test]
fn more_ranks_hold_less_each_and_send_more() {
    let scratch = Scratch::new();
    let spec = spec(&scratch);
    let of = |ranks| needs(&spec, &fleet(ranks, "mi300x")).unwrap();
    let [one, two, four] = [of(1), of(2), of(4)];
    assert_eq!(one.phases[0].sent, SentInStep::default());
    assert!(two.phases[0].sent.sum() > 0 && four.phases[0].sent.sum() > two.phases[0].sent.sum());
    assert!(two.phases[0].memory.moments < one.phases[0].memory.moments);
    assert!(four.phases[0].memory.moments < two.phases[0].memory.moments);
    assert_eq!(one.checkpoint.bytes, four.checkpoint.bytes);
    // Only the routers' balance is not copied; the ranks of one machine together hold the whole state.
    let [alone, shared] = [&one, &four].map(|needs| needs.checkpoint.copies);
    assert_eq!((alone, alone), (shared, one.checkpoint.largest_part));
    assert!(alone < one.checkpoint.bytes && 100 * alone > 99 * one.checkpoint.bytes);
    assert!(one.fits && four.fits, "a model of some thousand numbers");
}

/// The keys that make the fixture's model small.
const SMALL: &str = "hidden_size = 16\nnum_hidden_layers = 2\nnum_attention_heads = 2\nnum_key_value_heads = 2\nhead_dim = 8\n\
    moe_intermediate_size = 16\nnum_experts = 3\nrouter_hidden_size = 8\n";

/// The largest model, 16,384 tokens per micro-batch, on one machine with eight ranks and bucketed gradient reduction.
#[test]
fn eight_ranks_hold_the_largest_model() {
    let scratch = Scratch::new();
    let often =
        "[source.web]\nmax_epochs = 10000000\n\n[source.math]\nmax_epochs = 10000000\n\n[model]";
    for (micro_batches, most) in [(8, 55), (1024, 100)] {
        let batch = format!("batch = {}\nmicro_batch = 512", 512 * micro_batches);
        scratch.edited(
            "run.toml",
            &[
                (SMALL, "vocab_size = 262272\n"),
                ("zaya1-nano", "zaya1-8b"),
                ("[model]", often),
                ("dtype = \"f32\"", "dtype = \"bf16\""),
                ("batch = 6\nmicro_batch = 2", &batch),
            ],
        );
        let workers = Workers::new(1).keeping(ActivationCheckpointing::LayerInputs);
        let fleet = Fleet { workers, grad_reduce: GradReduce::Bucketed, ..fleet(8, "mi300x") };
        let needs = needs(&spec(&scratch), &fleet).unwrap();
        let phase = &needs.phases[0];
        assert_eq!(needs.parameters, 8_840_488_784);
        assert_eq!(phase.micro_batch * u64::from(phase.seq_len), 4 * 4096);
        assert_eq!(phase.batch / phase.micro_batch, micro_batches);
        let held = phase.memory.sum();
        assert!(held < most * 1_000_000_000, "{micro_batches}: {held} bytes: {:?}", phase.memory);
        // Each micro-batch's gradient in f32, from the rank that computed it to the seven other owners; new weights in
        // bf16, except vectors, from each owner to the seven others.
        let (sent, parameters) = (phase.sent, needs.parameters as f64);
        let near = |found: u64, wanted: f64| (found as f64 / wanted - 1.0).abs() < 0.01;
        let gradients = 4.0 * parameters * 7.0 / 8.0 * micro_batches as f64;
        assert!(near(sent.gradients_within_machines, gradients), "{sent:?}");
        assert!(near(sent.weights_within_machines, 2.0 * parameters * 7.0), "{sent:?}");
        assert_eq!(sent.between_machines(), 0);
    }
}

/// ZAYA1-8B on 64 ranks and on 1,024, computed by the formulas alone.
#[test]
fn no_rank_writes_more_than_tens_of_files_of_a_large_model() {
    let scratch = Scratch::new();
    let large = [(SMALL, "vocab_size = 262272\n"), ("zaya1-nano", "zaya1-8b")];
    scratch.edited("run.toml", &large);
    let spec = spec(&scratch);
    for (ranks, files) in [(64, 36), (1024, 6)] {
        let found = needs(&spec, &fleet(ranks, "mi300x")).unwrap().checkpoint;
        assert!(found.most_files <= files && found.most_files > 1, "{ranks} ranks: {found:?}");
        // This is read before it is known which of the 70 GB are needed.
        assert!(found.manifest < 4_000_000 && found.bytes > 60_000_000_000, "{found:?}");
    }
}

#[test]
fn an_unknown_device_is_named() {
    let scratch = Scratch::new();
    let fault = needs(&spec(&scratch), &fleet(1, "abacus")).unwrap_err();
    for word in ["abacus", "--device", "mi300x"] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
}
