//! Fear: that the number of ranks leaves a trace in the bits.
//!
//! Ranks are threads here, each with its own process group over loopback: the same code as in separate processes.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use contract::{Class, Result};
use curriculum::Dtype;
use kernels::group::{Group, KeyValueStore, RankAddress, RunKey};
use loader::OpenedCurriculum;
use serde_json::Value;
use tch::Device;
use tools::plan::{Fleet, needs};
use trainer::mesh::{Degrees, GradReduce};
use trainer::state::ownership::{self, ParamShard};
use trainer::workers::Workers;
use trainer::{ExecOptions, RunOutcome, RunSpec, World, train};

use crate::same_bits::assert_same;
use crate::support::{Scratch, table};

const PATIENCE: Duration = Duration::from_secs(30);

/// Trains `run.toml` in `out` with `world` ranks on one machine; `change` may give each rank other options.
pub(crate) fn train_with(
    scratch: &Scratch,
    out: &str,
    world: u32,
    change: impl Fn(u32, &mut ExecOptions) + Sync,
) -> Vec<Result<RunOutcome>> {
    train_on(scratch, out, &[world], change)
}

#[test]
fn an_audit_decides_no_bit() {
    let scratch = Scratch::new();
    scratch.train("whole");
    let all = |_: u32, exec: &mut ExecOptions| {
        exec.workers = exec.workers.auditing(Some("1/1".parse().unwrap()));
    };
    scratch.run(&scratch.path("run.toml"), "alone", |exec| all(0, exec)).unwrap();
    assert!(scratch.ledger("whole") == scratch.ledger("alone"));
    let outcomes = train_with(&scratch, "ranks", 3, all);
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().is_ok_and(|ended| ended.step == 10)));
    assert!(scratch.ledger("whole") == scratch.ledger("ranks"));
}

/// The same with a number of ranks on each of several machines.
fn train_on(
    scratch: &Scratch,
    out: &str,
    machines: &[u32],
    change: impl Fn(u32, &mut ExecOptions) + Sync,
) -> Vec<Result<RunOutcome>> {
    let change = &change;
    on_ranks(machines, |mut world| {
        let mut exec = ExecOptions::new(scratch.path(out));
        (exec.progress, exec.checkpoint_every, exec.workers) = (false, 3, Workers::new(1));
        change(world.comm.rank(), &mut exec);
        train(&OpenedCurriculum::open(scratch.path("run.toml"))?, &exec, &mut world)
    })
}

/// Runs `work` on each rank of several machines.
pub(crate) fn on_ranks<T: Send>(machines: &[u32], work: impl Fn(World) -> T + Sync) -> Vec<T> {
    let store =
        KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), PATIENCE).unwrap();
    let (table, work, port, world) = (table(), &work, store.port(), machines.iter().sum());
    let name = |(index, count): (usize, &u32)| vec![format!("machine {index}"); *count as usize];
    let nodes: Vec<String> = machines.iter().enumerate().flat_map(name).collect();
    let rank = |rank: u32| {
        let (host, name) = ("127.0.0.1".to_owned(), "test/".to_owned());
        let (interface, node) = (String::new(), nodes[rank as usize].clone());
        let key = RunKey::default();
        let place = RankAddress {
            rank,
            world,
            host,
            port,
            rank_0_serves: false,
            key,
            name,
            interface,
            node,
        };
        let group = Group::open(&place, PATIENCE, &|_| ()).unwrap();
        work(World::new(group, Device::Cpu, table.clone()))
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
    // 3 and 5 micro-batches: 4 and 8 ranks leave some idle, and 2 ranks split a tree whose size is not a power of two.
    for machines in [&[1][..], &[2], &[3], &[2, 2], &[3, 2], &[3, 1, 4]] {
        for grad_reduce in [GradReduce::Whole, GradReduce::Bucketed] {
            let out = format!("ranks-{machines:?}-{}", grad_reduce.name());
            let outcomes = train_on(&scratch, &out, machines, |rank, exec| {
                (exec.workers, exec.grad_reduce) =
                    (Workers::new(1 + rank as usize % 3), grad_reduce);
            });
            for outcome in outcomes {
                assert_eq!(outcome.unwrap(), alone, "{out}");
            }
            assert_same(&scratch, "alone", &out);
        }
    }
}

#[test]
fn a_machine_adds_before_it_sends() {
    let scratch = Scratch::new();
    crossed(&scratch, "f32", &[&[2, 2][..], &[4, 4], &[3, 2]]);
}

#[test]
fn weights_travel_rounded_in_bf16() {
    let scratch = Scratch::new();
    crossed(&scratch, "bf16", &[&[3, 2][..]]);
}

/// Trains in `dtype` on these machines, and counts the bytes sent between them.
fn crossed(scratch: &Scratch, dtype: &str, fleets: &[&[u32]]) {
    // 16 micro-batches per step, so that 4 and 8 ranks have whole subtrees.
    let many = [
        ("batch = 6\nmicro_batch = 2", "batch = 16\nmicro_batch = 1"),
        ("batch = 5", "batch = 16"),
    ];
    let short = [("steps = 6", "steps = 2"), ("steps = 4", "steps = 1")];
    let dtype = format!("dtype = \"{dtype}\"");
    let numbers = [("dtype = \"f32\"", dtype.as_str())];
    scratch.edited("run.toml", &[&many[..], &short, &numbers].concat());
    let alone = scratch.train("alone");
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    for machines in fleets.iter().copied() {
        for grad_reduce in [GradReduce::Whole, GradReduce::Bucketed] {
            let [flat, joined] = [true, false].map(|flat| {
                let out = format!("{machines:?}-{}-{flat}", grad_reduce.name());
                let outcomes = train_on(scratch, &out, machines, |_, exec| {
                    (exec.grad_reduce, exec.flat) = (grad_reduce, flat);
                });
                for outcome in outcomes {
                    assert_eq!(outcome.unwrap(), alone, "{out}");
                }
                assert_eq!(scratch.ledger("alone"), scratch.ledger(&out), "{out}");
                // Labels, losses and checksums are sent to all ranks in either case.
                let large = crossing(&spec, machines, grad_reduce, flat);
                let counted = between_nodes(scratch, &out);
                assert_eq!(planned(&spec, machines, grad_reduce, flat), large, "{out}: as planned");
                (large, counted - large)
            });
            assert_eq!(flat.1, joined.1, "{machines:?} {grad_reduce:?}: what is small is the same");
            assert!(
                4 * joined.0 <= 3 * flat.0,
                "{machines:?} {grad_reduce:?}: {joined:?} {flat:?}"
            );
        }
    }
}

/// The same by `ztrain plan`, which assumes equal machines, the last one possibly with fewer ranks.
fn planned(spec: &RunSpec, machines: &[u32], grad_reduce: GradReduce, flat: bool) -> u64 {
    let fleet = Fleet {
        ranks: machines.iter().sum(),
        ranks_per_node: machines[0],
        workers: Workers::new(1),
        grad_reduce,
        flat,
        degrees: Degrees::ALONE,
        device: "cpu".to_owned(),
    };
    needs(spec, &fleet).unwrap().phases[0].sent.between_machines()
}

/// The bytes of gradients and weights sent between machines in a step of 16 micro-batches: each block of a rank, or of
/// a machine, to every owner on other machines; each owner's new weights to every other rank, or machine.
fn crossing(spec: &RunSpec, machines: &[u32], grad_reduce: GradReduce, flat: bool) -> u64 {
    let world: u32 = machines.iter().sum();
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, world);
    let length = |owner: u32| 4 * ownership::length(&pieces, owner) as u64;
    // New weights are sent as the model reads them: rounded if they are operands of large matmuls.
    let rounded = |piece: &&ParamShard| {
        spec.curriculum.dtype == Dtype::Bf16 && spec.parameters[piece.tensor].in_large_products
    };
    let narrow = |owner: u32| {
        let own = pieces.iter().filter(|piece| piece.owner == owner);
        own.filter(rounded).map(|piece| 2 * piece.length() as u64).sum::<u64>()
    };
    let (mut bytes, mut first) = (0, 0);
    for count in machines {
        let ranks = first..first + count;
        first = ranks.end;
        let outside: Vec<u32> = (0..world).filter(|rank| !ranks.contains(rank)).collect();
        let senders: Vec<Range<u32>> = match flat {
            true => ranks.clone().map(|rank| rank..rank + 1).collect(),
            false => vec![ranks.clone()],
        };
        let (count, world) = (16u64, u64::from(world));
        let rounds = if grad_reduce == GradReduce::Whole { 1 } else { count.div_ceil(world) };
        for (sender, round) in
            senders.iter().flat_map(|one| (0..rounds).map(move |round| (one, round)))
        {
            let cut = |rank: u32| match grad_reduce {
                GradReduce::Whole => count * u64::from(rank) / world,
                GradReduce::Bucketed => count.min(round * world + u64::from(rank)),
            };
            let blocks = kernels::tree::blocks(cut(sender.start), cut(sender.end)).len() as u64;
            bytes += blocks * outside.iter().map(|owner| length(*owner)).sum::<u64>();
        }
        let hearers = if flat { outside.len() } else { machines.len() - 1 } as u64;
        bytes += ranks.map(|rank| length(rank) - narrow(rank)).sum::<u64>() * hearers;
    }
    bytes
}

/// Bytes that all ranks of `out` sent to other machines in its second step.
fn between_nodes(scratch: &Scratch, out: &str) -> u64 {
    let events = std::fs::read_to_string(scratch.path(out).join("events.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut exchanges = events.filter(|event| event["event"] == "exchange" && event["step"] == 2);
    exchanges.next().unwrap()["bytes_between_nodes"].as_u64().unwrap()
}

#[test]
fn a_run_goes_on_with_other_numbers_of_ranks() {
    let scratch = Scratch::new();
    let alone = scratch.train("alone");
    for (machines, last) in [(&[2, 1][..], 2), (&[1], 4), (&[3, 2], 7), (&[2], 10)] {
        let part = train_on(&scratch, "parts", machines, |_, exec| {
            exec.stop_after = Some(last);
            // Alternates: each `grad_reduce` continues what the other began.
            exec.grad_reduce = if last % 3 == 1 { GradReduce::Bucketed } else { GradReduce::Whole };
        });
        assert!(part.iter().all(|outcome| outcome.as_ref().unwrap().step == last));
    }
    assert_same(&scratch, "alone", "parts");
    assert_eq!(scratch.train("parts"), alone);
}

#[test]
fn a_tensor_may_have_several_owners() {
    let scratch = Scratch::new();
    // An embedding of several elementwise pieces, and experts that fill a chunk of the norm alone or in pairs.
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
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains("rank 1 has another command line"), "{fault}");
        assert!(fault.to_string().contains("--checkpoint-every 4"), "{fault}");
    }
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn ranks_of_different_curricula_are_told_the_key() {
    let scratch = Scratch::new();
    for (key, edit, values) in [
        ("optimizer.lr", ("lr = 1e-2", "lr = 2e-2"), ["2e-2", "1e-2"]),
        ("seed", ("seed = 11", "seed = 12"), ["12", "11"]),
    ] {
        let other = scratch.edited("other.toml", &[edit]);
        let outcomes = on_ranks(&[2], |mut world| {
            let file = if world.comm.rank() == 1 { &other } else { &scratch.path("run.toml") };
            let mut exec = ExecOptions::new(scratch.path("apart"));
            (exec.progress, exec.workers) = (false, Workers::new(1));
            train(&OpenedCurriculum::open(file.clone())?, &exec, &mut world)
        });
        for outcome in outcomes {
            let fault = outcome.unwrap_err();
            assert_eq!(fault.class(), Class::Mismatch);
            let told = format!("rank 1 has another {key} than rank 0");
            assert!(fault.to_string().contains(&told), "{fault}");
            assert!(values.iter().all(|value| fault.to_string().contains(value)), "{fault}");
        }
    }
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
