//! Fear: that the bits of a cut micro-batch depend on which ranks compute it.

use trainer::model::ActivationCheckpointing;
use trainer::workers::Workers;

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after, workers};

/// A scratch folder whose `run.toml` cuts the micro-batches of both phases, in `dtype`.
pub(crate) fn cut(dtype: &str) -> Scratch {
    let scratch = Scratch::new();
    let changes = [
        ("dtype = \"f32\"".to_owned(), format!("dtype = \"{dtype}\"")),
        (
            "micro_batch = 2".to_owned(),
            "micro_batch = 2\ncontext_chunks = 4\nweight_shards = 3".to_owned(),
        ),
        (
            "micro_batch = 1".to_owned(),
            "micro_batch = 1\ncontext_chunks = 16\nweight_shards = 2".to_owned(),
        ),
    ];
    let changes: Vec<_> = changes.iter().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    scratch.edited("run.toml", &changes);
    scratch
}

#[test]
fn workers_ranks_parts_and_recomputation_do_not_show_in_a_cut() {
    for dtype in ["f32", "bf16"] {
        let scratch = cut(dtype);
        scratch.five_steps();
        let whole = scratch.train("whole");
        scratch.run(&scratch.path("run.toml"), "workers", workers(3)).unwrap();
        assert_same(&scratch, "whole", "workers");
        let again = |exec: &mut trainer::ExecOptions| {
            exec.workers = Workers::new(2).keeping(ActivationCheckpointing::LayerInputs);
        };
        scratch.run(&scratch.path("run.toml"), "recomputed", again).unwrap();
        assert_same(&scratch, "whole", "recomputed");
        for last in [2, 4] {
            scratch.run(&scratch.path("run.toml"), "parts", stop_after(last)).unwrap();
        }
        assert_eq!(scratch.train("parts"), whole);
        assert_same(&scratch, "whole", "parts");
        for world in [2, 3] {
            let out = format!("ranks-{world}");
            for outcome in train_with(&scratch, &out, world, |_, _| ()) {
                assert_eq!(outcome.unwrap(), whole);
            }
            assert_same(&scratch, "whole", &out);
        }
    }
}

/// Text and order equal the run without cuts; the numbers are close, but not equal.
#[test]
fn a_cut_changes_rounding_and_nothing_else() {
    let (plain, cut) = (Scratch::new(), cut("f32"));
    plain.train("run");
    cut.train("run");
    let steps = |scratch: &Scratch| -> Vec<serde_json::Value> {
        let ledger = scratch.ledger("run");
        let lines = ledger.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.filter(|line: &serde_json::Value| line["kind"] == "step").collect()
    };
    let (plain, cut) = (steps(&plain), steps(&cut));
    assert_eq!((plain.len(), cut.len()), (10, 10));
    for (plain, cut) in plain.iter().zip(&cut) {
        assert_eq!(plain["batch_digest"], cut["batch_digest"]);
        assert_eq!(plain["label_count"], cut["label_count"]);
    }
    assert_ne!(plain[0]["state_digest"], cut[0]["state_digest"]);
    let loss = |line: &serde_json::Value| line["loss"].as_f64().unwrap();
    assert!((loss(&plain[0]) / loss(&cut[0]) - 1.0).abs() < 1e-5);
}
