//! Fear: that a run continues as a different one, or that two runs become one.

use std::fs::{self, OpenOptions};
use std::time::Duration;

use contract::Class;
use loader::OpenedCurriculum;
use tch::Device;
use tools::bench;
use trainer::folder::{RunFolder, RunLocks};
use trainer::replay::Replayer;
use trainer::workers::Workers;
use trainer::{ExecOptions, RunSpec, World, fit_workers, step, train};

use crate::support::{CURRICULUM, Scratch, stop_after, table};

#[test]
fn an_edit_is_refused_from_the_step_that_it_changes_on() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.run(&path, "run", stop_after(7)).unwrap();
    let edits = [
        (("lr = 1e-2", "lr = 2e-2"), "optimizer.lr", "step 1 "),
        (("seed = 11", "seed = 12"), "seed", "step 1 "),
        (("steps = 6", "steps = 7"), "phase.short.steps", "step 7 "),
        (("seq_len = 64", "seq_len = 128"), "phase.long.seq_len", "step 7 "),
        (("num_experts = 3", "num_experts = 3\nbalance_lr = 0.5"), "model.balance_lr", "step 1 "),
    ];
    for ((from, to), key, step) in edits {
        scratch.edited("run.toml", &[(from, to)]);
        let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        assert!(fault.to_string().contains(key) && fault.to_string().contains(step), "{fault}");
    }
    // Later steps may change, which is reported.
    scratch.edited("run.toml", &[("steps = 4", "steps = 2")]);
    assert_eq!(scratch.run(&path, "run", |_| ()).unwrap().step, 8);
    let events = fs::read_to_string(scratch.path("run/events.jsonl")).unwrap();
    assert!(events.contains("phase.long.steps"), "{events}");
    scratch.write("run.toml", CURRICULUM);
    assert_eq!(scratch.train("run").step, 10);
    scratch.train("whole");
    assert!(
        scratch.ledger("run") == scratch.ledger("whole"),
        "a detour that changed no step left no trace"
    );
}

#[test]
fn what_a_phase_is_called_decides_nothing() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.run(&path, "run", stop_after(5)).unwrap();
    // Steps 4 and 5 are recorded, but have to be recomputed.
    fs::remove_dir_all(scratch.path("run/checkpoints/step-5")).unwrap();
    scratch.edited("run.toml", &[("\"short\"", "\"first\""), ("\"long\"", "\"second\"")]);
    assert_eq!(scratch.run(&path, "run", |_| ()).unwrap().step, 10);
    assert!(scratch.ledger("run").contains("\"phase\":\"second\""));
    let mut replayer =
        Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(3).unwrap();
    for _ in 4..=10 {
        let replayed =
            tools::replay::step(&replayer, &mut state, step::Detail::Sums).unwrap().replayed;
        assert_eq!(replayed.difference, None);
    }
}

/// Both files that the user can edit agree, but the ledger differs.
#[test]
fn the_runs_own_curriculum_is_held_against_the_ledger() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.run(&path, "run", stop_after(7)).unwrap();
    let own = scratch.path("run/run.toml");
    let whole = fs::read_to_string(&own).unwrap();
    let edits = [
        (("lr = 1e-2", "lr = 2e-2"), ("lr = 1e-2", "lr = 2e-2"), "optimizer.lr"),
        (("seed = 11", "seed = 12"), ("seed = 11", "seed = 12"), "seed"),
        (
            ("weight_decay = 0.1", "weight_decay = 0.2"),
            ("weight_decay = 1e-1", "weight_decay = 2e-1"),
            "weight_decay",
        ),
    ];
    for ((from, to), (own_from, own_to), key) in edits {
        scratch.edited("run.toml", &[(from, to)]);
        assert!(whole.contains(own_from), "{whole}");
        fs::write(&own, whole.replace(own_from, own_to)).unwrap();
        let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        assert!(fault.to_string().contains(key) && fault.to_string().contains("ledger"), "{fault}");
        let replayer = Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2));
        let fault = replayer.map(|_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch, "{fault}");
        assert!(fault.to_string().contains(key), "{fault}");
    }
    scratch.write("run.toml", CURRICULUM);
    fs::write(&own, whole).unwrap();
    scratch.train("run");
}

#[test]
fn a_store_that_changed_is_refused() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
    scratch.write_store(2);
    let fault = scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    assert!(fault.to_string().contains("content of a store"), "{fault}");
}

/// The stores exist and are unchanged: the list is wrong.
#[test]
fn stores_in_another_order_or_one_more_are_called_that() {
    let scratch = Scratch::new();
    scratch.write_other_store("more", ["code", "talk"], 3);
    let both = scratch.edited("both.toml", &[("\"store\"", "[\"store\", \"more\"]")]);
    let turned = scratch.edited("turned.toml", &[("\"store\"", "[\"more\", \"store\"]")]);
    scratch.run(&scratch.path("run.toml"), "one", stop_after(2)).unwrap();
    scratch.run(&both, "two", stop_after(2)).unwrap();
    for (curriculum, run, words) in [
        (&turned, "two", ["order of the stores", "in the order"]),
        (&both, "one", ["list of stores", "zdata amend --step N --store"]),
    ] {
        let fault = scratch.run(curriculum, run, |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch);
        assert!(words.iter().all(|words| fault.to_string().contains(words)), "{fault}");
    }
}

#[test]
fn a_store_that_moved_is_the_same() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
    fs::rename(scratch.path("store"), scratch.path("elsewhere")).unwrap();
    let moved = scratch.edited("moved.toml", &[("\"store\"", "\"elsewhere\"")]);
    scratch.run(&moved, "run", |_| ()).unwrap();
    fs::rename(scratch.path("elsewhere"), scratch.path("store")).unwrap();
    scratch.train("whole");
    assert!(scratch.ledger("run") == scratch.ledger("whole"));
}

#[test]
fn another_kernel_table_is_refused_by_name() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
    let mut other = table();
    // A capability different from this processor's.
    let name = if other.cpu_capability == "AVX2" { "AVX512" } else { "AVX2" };
    other.cpu_capability = name.to_owned();
    let opened = OpenedCurriculum::open(scratch.path("run.toml")).unwrap();
    let fault = train(
        &opened,
        &ExecOptions::new(scratch.path("run")),
        &mut World::alone(Device::Cpu, other),
    )
    .unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    let text = fault.to_string();
    assert!(text.contains("cpu_capability") && text.contains(name), "{fault}");
    assert!(text.contains(&table().cpu_capability), "{fault}");
}

#[test]
fn what_does_not_fit_into_memory_is_refused_with_the_numbers() {
    let scratch = Scratch::new();
    let little = |exec: &mut ExecOptions| exec.memory = 100 << 10;
    let fault = scratch.run(&scratch.path("run.toml"), "run", little).unwrap_err();
    assert_eq!(fault.class(), Class::Machine, "{fault}");
    for word in ["more memory than the machine has", "weights", "moments", "phase \"short\""] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
    assert!(!scratch.path("run").exists(), "nothing was begun");
}

/// If the number of workers is not set, as many are used as fit into memory.
#[test]
fn workers_are_as_few_as_memory_asks_for() {
    let scratch = Scratch::new();
    let opened = OpenedCurriculum::open(scratch.path("run.toml")).unwrap();
    let world = World::alone(Device::Cpu, table());
    let fitted = |memory: u64| {
        let mut exec = ExecOptions::new(scratch.path("run"));
        (exec.memory, exec.workers) = (memory, Workers::new(64));
        fit_workers(&mut exec, &opened, &world).unwrap();
        exec.workers.count()
    };
    assert_eq!((fitted(1), fitted(u64::MAX)), (64, 64), "one alone is refused by its numbers");
    let memory = (16..40).map(|bits| 1u64 << bits).find(|memory| fitted(*memory) < 64).unwrap();
    let few = |exec: &mut ExecOptions| {
        (exec.memory, exec.workers) = (memory, Workers::new(fitted(memory)));
    };
    scratch.run(&scratch.path("run.toml"), "run", few).unwrap();
}

/// No machine has 10 TB. If this check were missing, libtorch would try to allocate them.
#[test]
fn a_measured_or_replayed_step_that_does_not_fit_into_memory_is_refused_as_well() {
    let scratch = Scratch::new();
    let path = scratch.edited(
        "large.toml",
        &[
            ("\nhidden_size = 16", "\nhidden_size = 1048576"),
            ("moe_intermediate_size = 16", "moe_intermediate_size = 1048576"),
        ],
    );
    let opened = OpenedCurriculum::open(&path).unwrap();
    let (spec, workers) = (RunSpec::new(&opened).unwrap(), Workers::new(2));
    let measured =
        step::alone(&spec, workers, |cx| bench::step(cx, Device::Cpu, 1, 1, None).map(|_| ()));
    let folder = RunFolder::new(&scratch.path("run"));
    drop(
        folder
            .open(&spec, &opened.file, &table(), &RunLocks::default(), Duration::ZERO, false)
            .unwrap(),
    );
    let replayer = Replayer::open(folder.root(), &table(), Device::Cpu, workers).unwrap();
    for answer in [measured, replayer.refuse_memory()] {
        let fault = answer.unwrap_err();
        assert_eq!(fault.class(), Class::Machine, "{fault}");
        for word in ["more memory than the machine has", "1 rank on this machine", "--recompute"] {
            assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
        }
        assert!(!fault.to_string().contains("--snapshots"), "nothing asked for it: {fault}");
    }
}

/// The error names the flag that needs the memory.
#[test]
fn states_that_do_not_fit_into_memory_are_refused_by_their_flag() {
    let scratch = Scratch::new();
    let many = |exec: &mut ExecOptions| exec.snapshots.states = 99_999_999;
    let fault = scratch.run(&scratch.path("run.toml"), "run", many).unwrap_err();
    assert_eq!(fault.class(), Class::Machine, "{fault}");
    assert!(fault.to_string().contains("fewer --snapshots"), "{fault}");
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("run")).unwrap();
    let lock = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .open(scratch.path("run/lock"))
        .unwrap();
    lock.try_lock().unwrap();
    let fault = scratch.run(&scratch.path("run.toml"), "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Machine);
    assert!(!scratch.path("run/ledger.jsonl").exists(), "the refused run wrote nothing");
    drop(lock);
    scratch.train("run");
}

#[test]
fn divergence_keeps_the_state_and_names_the_step() {
    let scratch = Scratch::new();
    let wild = [
        ("lr = 1e-2", "lr = 1e30"),
        ("\"muon\"", "\"adamw\""),
        ("warmup_steps = 3", "warmup_steps = 0"),
    ];
    let path = scratch.edited("wild.toml", &wild);
    for _ in 0..2 {
        let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Diverged);
        assert!(
            fault.to_string().contains("step 2") && fault.to_string().contains("replay"),
            "{fault}"
        );
        assert_eq!(scratch.ledger("run").lines().count(), 2, "head and step 1");
        assert!(scratch.path("run/checkpoints/step-1/manifest.json").exists());
    }
}

#[test]
fn a_state_that_could_not_be_kept_is_not_said_to_be() {
    let scratch = Scratch::new();
    let wild = [
        ("lr = 1e-2", "lr = 1e30"),
        ("\"muon\"", "\"adamw\""),
        ("warmup_steps = 3", "warmup_steps = 0"),
    ];
    let path = scratch.edited("wild.toml", &wild);
    // A file is where the checkpoint's folder would be.
    fs::create_dir_all(scratch.path("run/checkpoints")).unwrap();
    fs::write(scratch.path("run/checkpoints/step-1"), "").unwrap();
    let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Diverged);
    let told = fault.to_string();
    assert!(told.contains("could not be kept") && !told.contains("is kept;"), "{fault}");
}

#[test]
fn a_model_that_cannot_be_is_refused_with_its_key() {
    let scratch = Scratch::new();
    let cases = [
        (("num_experts = 3", "num_experts = 3\nvocab_size = 49"), "at least 50"),
        (("num_experts = 3", "num_experts = 3\nbalance_lr = -1"), "balance_lr"),
        (("num_experts = 3", "num_experts = 3\nz_loss = -1e-4"), "a number from 0 to 1"),
        (("num_experts = 3", "num_experts = 3\nz_loss = nan"), "`z_loss` is not a finite number"),
        (("num_experts = 3", "num_experts = 3\nbalance_lr = nan"), "nan or inf"),
        (("num_experts = 3", "num_expert = 3"), "did you mean `num_experts`?"),
        (("preset = \"zaya1-nano\"", "preset = \"zaya2\""), "unknown preset"),
        (("head_dim = 8", "head_dim = {}"), "wrong kind"),
        (
            ("micro_batch = 1", "micro_batch = 1\nmodel = { preset = \"x\" }"),
            "cannot change `preset`",
        ),
        (("micro_batch = 1", "micro_batch = 1\nmodel = { rope_teta = 1e6 }"), "`rope_theta`"),
        (("micro_batch = 1", "micro_batch = 1\ncontext_chunks = 6"), "seq_len = 64"),
        (
            ("micro_batch = 1", "micro_batch = 1\nweight_shards = 17"),
            "at most 16, an expert's width and the vocabulary",
        ),
        (
            ("micro_batch = 1", "micro_batch = 1\nmodel = { hidden_size = 32 }"),
            "the structure of the model",
        ),
        (("micro_batch = 1", "micro_batch = 1\nmodel = { rope_theta = -1.0 }"), "rope_theta"),
        (("num_experts = 3", "num_experts = 3\nmax_position_embeddings = 63"), "at most 63"),
    ];
    for ((from, to), word) in cases {
        let path = scratch.edited("bad.toml", &[(from, to)]);
        let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        assert!(fault.to_string().contains(word), "{fault}");
        assert!(fault.to_string().contains("bad.toml:"), "{fault}");
        assert!(!scratch.path("run").exists(), "{word}: nothing was begun");
    }
    let path = scratch.edited(
        "good.toml",
        &[("micro_batch = 1", "micro_batch = 1\nmodel = { rope_theta = 1e6 }")],
    );
    assert_eq!(scratch.run(&path, "good", |_| ()).unwrap().step, 10);
}
