//! Fear: that a state kept by a replay is used wrongly later, and that several ranks replay differently from one.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use contract::{Class, Fault, Result};
use kernels::runtime::KernelTable;
use loader::Batch;
use tch::Device;
use tools::change::WhatIfChange;
use tools::replay::whatif::imagine;
use trainer::World;
use trainer::replay::{Executor, ReplayParallelism, Replayer, SavedStateLimits, Verdict, meet};
use trainer::state::State;
use trainer::step::{ComputedMicroBatches, Detail, StepContext};
use trainer::workers::Workers;

use crate::damage::forge;
use crate::ranks::on_ranks;
use crate::support::{Scratch, stop_after, table};

const KEEP: SavedStateLimits = SavedStateLimits { states: 4, bytes: 1 << 30 };

fn open_by(scratch: &Scratch, run: &str, table: &KernelTable) -> Replayer {
    Replayer::open(&scratch.path(run), table, Device::Cpu, Workers::new(2)).unwrap()
}

fn open(scratch: &Scratch, run: &str) -> Replayer {
    open_by(scratch, run, &table()).keeping(KEEP)
}

/// A machine that cannot compute: the state has to exist already.
struct Idle;

impl Executor for Idle {
    fn compute(
        &self,
        _: StepContext<'_>,
        _: &State,
        _: &Batch,
        _: Detail,
    ) -> Result<ComputedMicroBatches> {
        Err(Fault::bug("a step was computed"))
    }
}

/// The digest of the state after `step`, which has to be available without computing a step.
fn at_hand(replayer: Replayer, step: u64) -> Result<String> {
    let mut replayer = replayer.computed_by(Box::new(Idle));
    let state = replayer.state_after(step)?;
    state.sums(Workers::new(1)).map(|sums| sums.digest.to_string())
}

/// The folders of the kept states.
fn kept(scratch: &Scratch, run: &str) -> Vec<PathBuf> {
    let folders = |folder: PathBuf| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect()
    };
    let mut all: Vec<PathBuf> =
        folders(scratch.path(run).join("replays")).into_iter().flat_map(folders).collect();
    all.sort();
    all
}

/// The files of a run, except those left by replays.
fn own(scratch: &Scratch, run: &str) -> BTreeMap<String, Vec<u8>> {
    let mut files = scratch.tree(run);
    files.retain(|name, _| !name.starts_with("replays/"));
    files
}

fn recorded_state(scratch: &Scratch, run: &str, step: usize) -> String {
    let line = scratch.ledger(run).lines().nth(step).unwrap().to_owned();
    serde_json::from_str::<serde_json::Value>(&line).unwrap()["state_digest"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn the_second_question_about_a_step_computes_nothing_on_the_way() {
    let scratch = Scratch::new();
    scratch.train("run");
    let before = own(&scratch, "run");
    assert!(at_hand(open(&scratch, "run"), 8).is_err(), "the checkpoint before is that of step 6");
    let mut first = open(&scratch, "run");
    first.state_after(8).unwrap();
    assert_eq!(first.warnings, Vec::<String>::new());
    assert_eq!(at_hand(open(&scratch, "run"), 8).unwrap(), recorded_state(&scratch, "run", 8));
    // Step 9 has a checkpoint, so nothing is kept.
    open(&scratch, "run").state_after(9).unwrap();
    assert_eq!(kept(&scratch, "run").len(), 1);
    assert!(before == own(&scratch, "run"), "what the run wrote was changed");
    let mut state = open(&scratch, "run").state_after(8).unwrap();
    let replayed =
        tools::replay::step(&open(&scratch, "run"), &mut state, Detail::Tokens).unwrap().replayed;
    assert_eq!(replayed.verdict, Verdict::SameBits);
}

#[test]
fn a_kept_state_that_is_stale_foreign_or_damaged_is_never_used() {
    let scratch = Scratch::new();
    scratch.train("run");
    let other = scratch.edited("other.toml", &[("seed = 11", "seed = 12")]);
    scratch.run(&other, "other", |_| ()).unwrap();
    open(&scratch, "other").state_after(8).unwrap();
    open(&scratch, "run").state_after(8).unwrap();
    let (place, foreign) = (&kept(&scratch, "run")[0], &kept(&scratch, "other")[0]);
    let files = |folder: &PathBuf| -> Vec<PathBuf> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let damage: [&dyn Fn(); 2] = [
        &|| {
            for file in files(foreign) {
                fs::copy(&file, place.join(file.file_name().unwrap())).unwrap();
            }
        },
        &|| {
            let weights = files(place);
            let weights = weights.iter().find(|path| path.to_str().unwrap().contains("/weights-"));
            let mut bytes = fs::read(weights.unwrap()).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(weights.unwrap(), bytes).unwrap();
        },
    ];
    for harm in damage {
        harm();
        assert!(at_hand(open(&scratch, "run"), 8).is_err());
        let mut replayer = open(&scratch, "run");
        replayer.state_after(8).unwrap();
        assert!(replayer.warnings[0].contains("passed over: checkpoint step-8"), "it says so");
        // The correct state is there again.
        assert_eq!(at_hand(open(&scratch, "run"), 8).unwrap(), recorded_state(&scratch, "run", 8));
    }
    let mut later = table();
    later.libtorch += " of another day";
    let other_table = open_by(&scratch, "run", &later).keeping(KEEP);
    assert!(at_hand(other_table, 8).is_err(), "another kernel table computed it");
}

#[test]
fn kept_states_are_bounded_in_number_and_bytes() {
    let scratch = Scratch::new();
    scratch.train("run");
    let keeping = |keep: SavedStateLimits, step: u64| {
        let mut replayer = open_by(&scratch, "run", &table()).keeping(keep);
        replayer.state_after(step).unwrap();
        replayer.warnings
    };
    for step in [1, 2, 4, 5] {
        assert!(keeping(SavedStateLimits { states: 2, ..KEEP }, step).is_empty());
    }
    let names = || -> Vec<String> {
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        kept(&scratch, "run").iter().map(name).collect()
    };
    assert_eq!(names(), ["step-4", "step-5"]);
    let size: u64 = fs::read_dir(&kept(&scratch, "run")[0])
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(keeping(SavedStateLimits { states: 9, bytes: size * 3 / 2 }, 7).is_empty());
    assert_eq!(names(), ["step-7"], "two are more than half as much again");
    // The state's numbers fit into this limit, its files are slightly larger.
    assert!(keeping(SavedStateLimits { states: 9, bytes: size - 1 }, 5).is_empty());
    assert_eq!(names(), ["step-5"], "the newest one stays");
    let warnings = keeping(SavedStateLimits { states: 9, bytes: 1000 }, 8);
    assert!(warnings[0].contains("state after step 8 is not kept"), "{warnings:?}");
    assert!(
        keeping(SavedStateLimits { states: 0, ..KEEP }, 8).is_empty(),
        "a result that was not asked for"
    );
    assert_eq!(names(), ["step-5"]);
    // If nothing can be written, the answer is the same, with a message.
    fs::remove_dir_all(scratch.path("run/replays")).unwrap();
    fs::write(scratch.path("run/replays"), "in the way").unwrap();
    let warnings = keeping(KEEP, 8);
    assert!(warnings[0].contains("is not kept"), "{warnings:?}");
}

#[test]
fn a_run_never_goes_on_from_a_kept_state() {
    let scratch = Scratch::new();
    scratch.train("whole");
    let every = |exec: &mut trainer::ExecOptions| exec.checkpoint_every = 6;
    scratch
        .run(&scratch.path("run.toml"), "run", |exec| {
            every(exec);
            exec.stop_after = Some(9);
        })
        .unwrap();
    open(&scratch, "run").state_after(8).unwrap();
    fs::remove_dir_all(scratch.path("run/checkpoints/step-9")).unwrap();
    scratch.run(&scratch.path("run.toml"), "run", every).unwrap();
    let events = fs::read_to_string(scratch.path("run/events.jsonl")).unwrap();
    assert!(events.contains("\"from_step\":6") && !events.contains("\"from_step\":8"), "{events}");
    assert!(scratch.ledger("whole") == scratch.ledger("run"));
    assert_eq!(kept(&scratch, "run").len(), 1, "and micro_batches it to the replays");
}

/// Opens a run as one of several ranks.
fn as_rank(scratch: &Scratch, run: &str, mut world: World, asked: &str) -> Result<Replayer> {
    meet(&mut world, kernels::group::Transport::Auto)?;
    let together =
        ReplayParallelism { asked: vec![asked.to_owned()], ..ReplayParallelism::default() };
    let root = scratch.path(run);
    Replayer::open_with(&root, &[], &Arc::new(world), Workers::new(1), together)
}

#[test]
fn several_ranks_replay_as_one_does() {
    let scratch = Scratch::new();
    scratch.train("run");
    let mut alone = open(&scratch, "run");
    let mut state = alone.state_after(8).unwrap();
    let wanted = tools::replay::step(&alone, &mut state, Detail::Tokens).unwrap();
    let change = WhatIfChange { lr: Some(1e-4), ..WhatIfChange::default() };
    let imagined = imagine(&mut alone, 8..10, &change).unwrap();
    let by_one: BTreeMap<_, _> = scratch.tree("run");
    for world in [2, 3, 5] {
        fs::remove_dir_all(scratch.path("run/replays")).unwrap();
        let answers = on_ranks(&[world], |world| {
            let is_rank_0 = world.comm.rank() == 0;
            let mut replayer = as_rank(&scratch, "run", world, "step 9").unwrap().keeping(KEEP);
            let mut state = replayer.state_after(8).unwrap();
            let replayed = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
            let imagined = imagine(&mut replayer, 8..10, &change).unwrap();
            replayer.end().unwrap();
            assert_eq!(replayer.is_rank_0(), is_rank_0);
            (replayed, imagined)
        });
        for (rank, (found, other)) in answers.into_iter().enumerate() {
            assert_eq!(
                found.replayed.verdict,
                Verdict::SameBits,
                "{:?}",
                found.replayed.difference
            );
            assert_eq!(found.documents, if rank == 0 { wanted.documents.clone() } else { vec![] });
            let parameters = &alone.spec().names();
            let (one, two) =
                (found.replayed.record.unwrap(), wanted.replayed.record.as_ref().unwrap());
            assert_eq!(one.difference(two, parameters), None);
            let steps = |answer: &tools::replay::whatif::WhatIfSteps| {
                answer.steps.iter().map(|step| (step.was, step.would_be)).collect::<Vec<_>>()
            };
            assert_eq!(steps(&other), steps(&imagined));
        }
        assert!(scratch.tree("run") == by_one, "{world} ranks keep the bytes that one keeps");
    }
}

#[test]
fn ranks_that_see_or_are_asked_other_things_are_refused() {
    let scratch = Scratch::new();
    scratch.train("run");
    scratch.run(&scratch.path("run.toml"), "part", stop_after(5)).unwrap();
    let opened = |run: fn(u32) -> &'static str, asked: fn(u32) -> &'static str| {
        on_ranks(&[2], |world| {
            let rank = world.comm.rank();
            as_rank(&scratch, run(rank), world, asked(rank)).map(|replayer| replayer.recorded())
        })
    };
    // A ledger that one rank sees shorter than another is still being written.
    let shorter = opened(|rank| ["run", "part"][rank as usize], |_| "step 3");
    assert_eq!(shorter.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [5, 5]);
    let asked = opened(|_| "run", |rank| ["step 3", "step 4"][rank as usize]);
    let fault = asked.into_iter().find_map(Result::err).unwrap();
    assert!(fault.to_string().contains("another command line"), "{fault}");
    forge(&scratch.path("part/ledger.jsonl"), 5, |line| line["lr"] = "3ff0000000000000".into());
    let other = opened(|rank| ["run", "part"][rank as usize], |_| "step 3");
    let fault = other.into_iter().find_map(Result::err).unwrap();
    assert_eq!(fault.class(), Class::Mismatch);
    assert!(fault.to_string().contains("rank 1 sees another ledger than rank 0"), "{fault}");
}
