//! Fear: that a plan does not warn of a problem.

use loader::OpenedCurriculum;
use tools::plan::{Fleet, needs};
use tools::sizing::estimate::{self, PlannedRun, StepTime};
use tools::sizing::{Cluster, ClusterDescription, Curve, degrees, hints};
use trainer::RunSpec;
use trainer::mesh::{Degrees, GradReduce};
use trainer::workers::Workers;

fn published() -> Cluster {
    ClusterDescription::read("mi300x-pollara").unwrap().resolve("mi300x-pollara").unwrap()
}

fn shipped(name: &str) -> RunSpec {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../curricula").join(name);
    RunSpec::for_planning(&OpenedCurriculum::open(path).unwrap()).unwrap()
}

fn fleet(ranks: u32) -> Fleet {
    Fleet {
        ranks,
        ranks_per_node: 8.min(ranks),
        workers: Workers::new(1),
        grad_reduce: GradReduce::Whole,
        flat: false,
        degrees: Degrees::ALONE,
        device: "mi300x".to_owned(),
    }
}

/// Times and hints of each phase.
fn plan(spec: &RunSpec, fleet: &Fleet, cluster: &Cluster) -> Vec<(StepTime, Vec<String>)> {
    let needs = needs(spec, fleet).unwrap();
    let setting = PlannedRun { spec, cluster, fleet };
    let of = |phase| {
        let time = estimate::step(setting, phase).unwrap();
        let hints = hints::of_phase(setting, phase, &time, None).unwrap();
        (time, hints)
    };
    needs.phases.iter().map(of).collect()
}

#[test]
fn idle_ranks_and_small_memories_are_told_before_anyone_pays() {
    let (spec, fleet) = (shipped("phase3.toml"), fleet(1024));
    let small = Cluster { memory_bytes: 8 << 30, ..published() };
    let told = plan(&spec, &fleet, &small);
    assert!(told[0].1.iter().any(|hint| hint.contains("memory does not fit")), "{:?}", told[0].1);
    let (time, hints) = &told[2];
    assert_eq!(time.idle_ranks, 512);
    assert!(hints.iter().any(|hint| hint.contains("512 of 1024 ranks are idle")), "{hints:?}");
    assert_eq!(told[0].0.idle_ranks, 0, "4,096 sequences in micro-batches of 4");
    let large = Cluster { memory_bytes: u64::MAX, ..published() };
    let told = plan(&spec, &fleet, &large);
    assert!(told.iter().all(|(_, hints)| !hints.iter().any(|hint| hint.contains("memory"))));
}

#[test]
fn a_machine_twice_as_fast_takes_half_the_time() {
    let spec = shipped("phase1.toml");
    let slow = Cluster { call_s: 1e-6, newton_schulz: Some(Curve::flat(1e13)), ..published() };
    let twice = |curve: &Curve| Curve(curve.0.iter().map(|[at, rate]| [*at, 2.0 * rate]).collect());
    let link = |link: tools::sizing::cluster::NetworkLink| tools::sizing::cluster::NetworkLink {
        latency_s: link.latency_s / 2.0,
        bytes_per_s: 2.0 * link.bytes_per_s,
    };
    let fast = Cluster {
        f32: twice(&slow.f32),
        bf16: twice(&slow.bf16),
        attention: slow.attention.each_ref().map(twice),
        attention_f32: slow.attention_f32.each_ref().map(twice),
        newton_schulz: slow.newton_schulz.as_ref().map(twice),
        stream: twice(&slow.stream),
        checksum: twice(&slow.checksum),
        tree: twice(&slow.tree),
        softmax: twice(&slow.softmax),
        call_s: slow.call_s / 2.0,
        within: slow.within.map(link),
        between: slow.between.map(link),
        ..slow.clone()
    };
    let fleet = fleet(64);
    let [slow, fast] = [&slow, &fast].map(|cluster| plan(&spec, &fleet, cluster)[0].0.clone());
    assert!((slow.seconds / fast.seconds - 2.0).abs() < 1e-9);
    assert!((slow.utilisation / fast.utilisation - 1.0).abs() < 1e-9, "of its own peak");
    let parts: f64 = slow.parts.iter().map(|(_, seconds)| seconds).sum();
    assert!((parts / slow.seconds - 1.0).abs() < 1e-9 && slow.hidden <= slow.gradients);
}

#[test]
fn who_is_faster_than_others_waits_for_them() {
    let spec = shipped("phase1.toml");
    let alike = Cluster { overlap: 0.0, ..published() };
    let fleet = fleet(64);
    let part = |time: &StepTime, name: &str| {
        time.parts.iter().find(|(own, _)| *own == name).map_or(0.0, |(_, seconds)| *seconds)
    };
    let of = |uneven: f64| plan(&spec, &fleet, &Cluster { uneven, ..alike.clone() })[0].0.clone();
    let (even, uneven, much) = (of(0.0), of(0.1), of(10.0));
    let (wait, blocks) = ("waiting for the slowest rank", "waiting for blocks of other ranks");
    let sent = ["blocks packed and sent", "new weights to every rank", wait, blocks];
    let computed = even.seconds - sent.iter().map(|name| part(&even, name)).sum::<f64>();
    let more = part(&uneven, wait) - part(&even, wait);
    assert!((more / computed - 0.1).abs() < 1e-9, "{more} of {computed}");
    // Waiting for the slowest rank does not add to waiting for overlapped transfers.
    assert_eq!((even.hidden, part(&even, blocks)), (0.0, even.gradients));
    assert_eq!((much.hidden, part(&much, blocks)), (much.gradients, 0.0));
    assert!((uneven.hidden - more.min(uneven.gradients)).abs() < 1e-9);
    let alone = Fleet { ranks: 1, ranks_per_node: 1, ..fleet.clone() };
    let [left, right] = [0.0, 10.0]
        .map(|uneven| plan(&spec, &alone, &Cluster { uneven, ..alike.clone() })[0].0.seconds);
    assert_eq!(left, right, "one rank waits for nobody");
}

/// A change of the dtype within a phase is planned for the steps after it, and for no other phase.
#[test]
fn each_part_of_a_phase_has_its_own_time() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../curricula/phase3.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let shipped = RunSpec::for_planning(&OpenedCurriculum::open_text(&path, text.clone()).unwrap());
    let amended = text + "[[amendment]]\nstep = 3\ndtype = \"f32\"\n";
    let amended = RunSpec::for_planning(&OpenedCurriculum::open_text(&path, amended).unwrap());
    let (fleet, cluster) = (fleet(1024), published());
    let [shipped, amended] =
        [shipped.unwrap(), amended.unwrap()].map(|spec| plan(&spec, &fleet, &cluster));
    let seconds = |all: &[(StepTime, Vec<String>)]| -> Vec<(u64, f64)> {
        all.iter().map(|(time, _)| (time.first_step, time.seconds)).collect()
    };
    let ([first, rest @ ..], found) = (&seconds(&shipped)[..], seconds(&amended)) else {
        panic!("no phase");
    };
    assert_eq!(found.len(), rest.len() + 2);
    assert_eq!((found[0], found[1].0), (*first, 3));
    assert!(found[1].1 > first.1, "f32 is slower than bf16: {found:?}");
    for (amended, shipped) in found[2..].iter().zip(rest) {
        assert!(amended.0 == shipped.0 && amended.1 > shipped.1, "{amended:?}, {shipped:?}");
    }
}

/// The third phase with sequences cut into chunks, and fewer sequences per step than ranks.
fn long() -> RunSpec {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../curricula/phase3.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace("batch = 512 ", "batch = 8 #");
    let cut = "seq_len = 32_768\ncontext_chunks = 16\nweight_shards = 2 #";
    let text = text.replace("seq_len = 32_768", cut);
    RunSpec::for_planning(&OpenedCurriculum::open_text(path, text).unwrap()).unwrap()
}

#[test]
fn sharing_pays_where_ranks_would_be_idle() {
    let (spec, fleet) = (long(), fleet(16));
    let cluster = Cluster { memory_bytes: u64::MAX, ..published() };
    let setting = PlannedRun { spec: &spec, cluster: &cluster, fleet: &fleet };
    let all = degrees::compared(setting).unwrap();
    let of = |cp: u32, tsp: u32| {
        let mut found = all.iter().filter(|one| (one.cp, one.tsp) == (cp, tsp));
        found
            .find(|one| one.phase == "midtrain-32k")
            .unwrap_or_else(|| panic!("{cp} x {tsp}: {all:?}"))
    };
    let alone = plan(&spec, &fleet, &cluster);
    let third = &alone[2].0;
    assert_eq!(third.idle_ranks, 8);
    assert_eq!(of(1, 1).seconds, third.seconds, "nobody shares");
    // Half of the ranks had nothing to do. What they now wait for each other is less than the work they take over.
    let [two, four] = [of(2, 1), of(4, 1)];
    assert!(two.seconds < third.seconds && two.seconds > third.seconds / 2.0, "{all:?}");
    assert!(two.memory < of(1, 1).memory && of(2, 2).memory < four.memory, "{all:?}");
    // With twice as many ranks as there is work for, they wait for each other and compute no less in total.
    assert!(four.seconds > two.seconds, "{all:?}");
    // In phases without chunks, ranks share nothing.
    assert!(all.iter().filter(|one| one.phase != "midtrain-32k").all(|one| one.cp * one.tsp == 1));
    let free = |link: tools::sizing::cluster::NetworkLink| tools::sizing::cluster::NetworkLink {
        latency_s: 0.0,
        bytes_per_s: link.bytes_per_s * 1e6,
    };
    let (within, between) = (cluster.within.map(free), cluster.between.map(free));
    let near = Cluster { within, between, ..cluster.clone() };
    let free = degrees::compared(PlannedRun { cluster: &near, ..setting }).unwrap();
    assert!(free.iter().zip(&all).all(|(free, paid)| free.seconds <= paid.seconds));
}
