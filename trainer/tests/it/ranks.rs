//! Fear: that the number of ranks leaves a trace in the bits.
//!
//! Ranks are threads here, each with a group of its own over the loopback: the same code as in processes of their own.

use std::thread;
use std::time::{Duration, Instant};

use contract::{Class, Result};
use kernels::group::{Group, Place, Store};
use loader::Opened;
use trainer::lanes::Lanes;
use trainer::parallel::train_as;
use trainer::{ExecOptions, Outcome};

use crate::same_bits::assert_same;
use crate::support::{Scratch, table};

const PATIENCE: Duration = Duration::from_secs(30);

/// Trains `run.toml` in `out` with `world` ranks; `change` may give each rank other options.
pub(crate) fn train_with(
    scratch: &Scratch,
    out: &str,
    world: u32,
    change: impl Fn(u32, &mut ExecOptions) + Sync,
) -> Vec<Result<Outcome>> {
    let store = Store::serve("127.0.0.1", 0, "test/", PATIENCE).unwrap();
    let (table, change, port) = (table(), &change, store.port());
    let rank = |rank| {
        let (host, name) = ("127.0.0.1".to_owned(), "test/".to_owned());
        let interface = String::new();
        let place = Place { rank, world, host, port, rank_0_serves: false, name, interface };
        let group = Group::open(&place, PATIENCE).unwrap();
        let mut exec = ExecOptions::new(scratch.path(out));
        (exec.progress, exec.checkpoint_every, exec.lanes) = (false, 3, Lanes::new(1));
        change(rank, &mut exec);
        train_as(&Opened::open(&scratch.path("run.toml"))?, &exec, &table, &group)
    };
    let rank = &rank;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn any_number_of_ranks_writes_one_ledger() {
    let scratch = Scratch::new();
    let alone = scratch.train("alone");
    // 3 and 5 leaves: 4 and 8 ranks leave some idle, 2 cut a tree that is no power of two.
    for world in [2, 3, 4, 5, 8] {
        let out = format!("ranks-{world}");
        let outcomes = train_with(&scratch, &out, world, |rank, exec| {
            exec.lanes = Lanes::new(1 + rank as usize % 3);
        });
        for outcome in outcomes {
            assert_eq!(outcome.unwrap(), alone, "{world} ranks");
        }
        assert_same(&scratch, "alone", &out);
    }
}

#[test]
fn a_run_goes_on_with_other_numbers_of_ranks() {
    let scratch = Scratch::new();
    let alone = scratch.train("alone");
    for (world, last) in [(3, 2), (1, 4), (5, 7), (2, 10)] {
        let part = train_with(&scratch, "parts", world, |_, exec| exec.stop_after = Some(last));
        assert!(part.iter().all(|outcome| outcome.as_ref().unwrap().step == last));
    }
    assert_same(&scratch, "alone", "parts");
    assert_eq!(scratch.train("parts"), alone);
}

#[test]
fn a_tensor_may_have_several_owners() {
    let scratch = Scratch::new();
    // An embedding of more than one elementwise piece, and experts that fill a chunk of the norm alone or in pairs.
    let wide = [
        ("moe_intermediate_size = 16", "moe_intermediate_size = 2048\nvocab_size = 33000"),
        ("steps = 6", "steps = 1"),
        ("steps = 4", "steps = 2"),
    ];
    let wide = scratch.edited("wide.toml", &wide);
    std::fs::copy(wide, scratch.path("run.toml")).unwrap();
    let alone = scratch.train("alone");
    for outcome in train_with(&scratch, "ranks", 3, |_, _| ()) {
        assert_eq!(outcome.unwrap(), alone);
    }
    assert_eq!(scratch.ledger("alone"), scratch.ledger("ranks"));
}

#[test]
fn a_stop_asked_of_one_rank_stops_all_after_the_same_step() {
    use std::sync::atomic::Ordering;
    let scratch = Scratch::new();
    scratch.train("alone");
    let outcomes = train_with(&scratch, "stopped", 3, |rank, exec| {
        exec.stop.store(rank == 2, Ordering::Relaxed);
    });
    for outcome in outcomes {
        assert_eq!(outcome.unwrap().step, 1);
    }
    train_with(&scratch, "stopped", 2, |_, _| ());
    assert_same(&scratch, "alone", "stopped");
}

#[test]
fn ranks_that_do_not_agree_are_refused() {
    let scratch = Scratch::new();
    let start = Instant::now();
    let outcomes =
        train_with(&scratch, "apart", 2, |rank, exec| exec.checkpoint_every += u64::from(rank));
    for outcome in outcomes {
        let fault = outcome.unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch);
        assert!(fault.to_string().contains("rank 1 has another command line"), "{fault}");
    }
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn a_divergence_is_kept_by_all_ranks_together() {
    let scratch = Scratch::new();
    let wild = scratch.edited("wild.toml", &[("lr = 1e-2", "lr = 1e38")]);
    std::fs::copy(wild, scratch.path("run.toml")).unwrap();
    let alone = scratch.run(&scratch.path("run.toml"), "alone", |_| ()).unwrap_err();
    let outcomes = train_with(&scratch, "ranks", 3, |_, _| ());
    for outcome in outcomes {
        assert_eq!(outcome.unwrap_err().class(), Class::Diverged);
    }
    assert_eq!(alone.class(), Class::Diverged);
    let files = |out: &str| {
        let tree = scratch.tree(out);
        tree.into_iter().filter(|(name, _)| name.starts_with("checkpoints")).collect::<Vec<_>>()
    };
    assert!(!files("alone").is_empty() && files("alone") == files("ranks"));
    assert_eq!(scratch.ledger("alone"), scratch.ledger("ranks"));
}
