//! Which steps an edit of a curriculum affects, compared with everything that each step depends on. Whatever the
//! amendments or the edit, no step before the first reported one changes.

use mixer::Curriculum;
use proptest::prelude::*;

const KINDS: [&str; 5] = ["cosine", "linear", "wsd", "inverse-sqrt", "constant"];
const SOURCES: [&str; 3] = ["a", "b", "c"];

/// A curriculum of two phases, in numbers.
#[derive(Clone, Debug)]
struct Drawn {
    /// Index into `KINDS`.
    kind: usize,
    warmup: u64,
    stable: u64,
    decay: u64,
    last: u64,
    /// By source: 0 if its documents are concatenated, else the weight of the longer of two lengths.
    packings: [u64; 3],
    /// Steps, and each source's weight.
    phases: [(u64, [u64; 3]); 2],
    /// The second phase's own schedule: its `lr` if any, its warm-up and its decay.
    chained: Option<(Option<u64>, u64, u64)>,
    amendments: Vec<Amended>,
}

#[derive(Clone, Debug)]
enum Amended {
    Mix(u64, [u64; 3]),
    Warmup(u64, u64),
    Decay(u64, u64, u64),
    Kind(u64, usize),
    Skip(u64),
}

impl Amended {
    fn step(&self) -> u64 {
        match self {
            Amended::Mix(step, _) | Amended::Warmup(step, _) | Amended::Decay(step, ..) => *step,
            Amended::Kind(step, _) | Amended::Skip(step) => *step,
        }
    }
}

fn mix(weights: &[u64; 3]) -> String {
    let pairs = SOURCES.iter().zip(weights).filter(|(_, weight)| **weight > 0);
    let pairs: Vec<String> = pairs.map(|(source, weight)| format!("{source} = {weight}")).collect();
    format!("mix = {{ {} }}\n", pairs.join(", "))
}

fn decay(decay: u64, last: u64) -> String {
    match decay {
        0 => "decay_steps = 0".to_owned(),
        _ => format!("decay_steps = {decay}, final_lr = {last}e-4"),
    }
}

impl Drawn {
    /// `None` if it is invalid: an amendment that changes nothing, or sets the final rate without decay.
    fn curriculum(&self) -> Option<Curriculum> {
        let mut text = "store = \"s\"\nseed = 1\n[model]\npreset = \"zaya1-nano\"\n".to_owned();
        for (source, weight) in SOURCES.iter().zip(self.packings).filter(|(_, weight)| *weight > 0)
        {
            text += &format!(
                "[source.{source}]\npacking = \"best-fit\"\nlengths = {{ 64 = 1, 128 = {weight} }}\n"
            );
        }
        let kind = KINDS[self.kind];
        text += &format!("[schedule]\nkind = {kind:?}\nwarmup_steps = {}\n", self.warmup);
        text += &match kind {
            "constant" => String::new(),
            "inverse-sqrt" => format!("final_lr = {}e-4\n", self.last),
            _ => decay(self.decay, self.last).replace(", ", "\n") + "\n",
        };
        if kind == "wsd" {
            text += &format!("stable_steps = {}\n", self.stable);
        }
        for (name, (steps, weights)) in ["one", "two"].iter().zip(&self.phases) {
            let mix = mix(weights);
            text += &format!(
                "[[phase]]\nname = \"{name}\"\nsteps = {steps}\nseq_len = 64\nbatch = 2\n{mix}"
            );
        }
        if let Some((lr, warmup, steps)) = self.chained {
            text += &lr.map_or_else(String::new, |lr| format!("lr = {lr}e-4\n"));
            let decay = decay(steps, 1);
            text += &format!("schedule = {{ warmup_steps = {warmup}, {decay} }}\n");
        }
        let mut amendments = self.amendments.clone();
        amendments.sort_by_key(Amended::step);
        for amended in &amendments {
            text += &format!("[[amendment]]\nstep = {}\n", amended.step());
            text += &match amended {
                Amended::Mix(_, weights) => mix(weights),
                Amended::Warmup(_, steps) => format!("schedule = {{ warmup_steps = {steps} }}\n"),
                Amended::Decay(_, steps, last) => {
                    format!("schedule = {{ {} }}\n", decay(*steps, *last))
                }
                Amended::Kind(_, kind) => format!("schedule = {{ kind = {:?} }}\n", KINDS[*kind]),
                Amended::Skip(_) => "skip = true\n".to_owned(),
            };
        }
        Curriculum::parse(&text, "c.toml").ok()
    }
}

/// Everything that a step depends on except earlier steps; `None` after the end.
fn follows_from(curriculum: &Curriculum, step: u64) -> Option<String> {
    let mut before = 0;
    let segment = curriculum.segments().into_iter().find(|segment| {
        before += segment.spec.steps;
        step <= before
    })?;
    let numbers = curriculum.numbers_at(step);
    let schedule = &numbers.schedule;
    let (since, warmup) = (step - numbers.origin.after, schedule.warmup_steps);
    let decays = |begin: u64, shape: &str| match (schedule.decay_steps, since < begin) {
        (0, _) | (_, true) => "the peak".to_owned(),
        (steps, _) if since >= begin + steps => format!("{:?}", schedule.final_lr),
        (steps, _) => {
            format!("{} of {steps} to {:?} by {shape}", since - begin, schedule.final_lr)
        }
    };
    let rate = match schedule.kind.name() {
        _ if since < warmup => format!("{since} of {warmup} from {}", numbers.origin.rate),
        "constant" => "the peak".to_owned(),
        "inverse-sqrt" => {
            format!("root of {warmup} of {since} above {}", schedule.final_lr.unwrap_or_default())
        }
        "wsd" => decays(warmup + schedule.stable_steps, "linear"),
        shape => decays(warmup, shape),
    };
    let rate = format!("{rate} from {}", numbers.optimizer.lr);
    let packings = segment.spec.mix.sources().into_iter().map(|source| curriculum.packing(source));
    let skipped = curriculum.amendments.iter().any(|one| one.step == step && one.skip);
    Some(format!(
        "{rate} {skipped} {:?} {:?} {:?}",
        segment.spec.mix.sources(),
        segment.spec.mix.weights(),
        packings.collect::<Vec<_>>()
    ))
}

/// The first step that differs between the two.
fn first_other(one: &Curriculum, other: &Curriculum) -> Option<u64> {
    (1..40).find(|step| follows_from(one, *step) != follows_from(other, *step))
}

fn told(one: &Curriculum, other: &Curriculum) -> Option<u64> {
    one.difference(other).first().map(|difference| difference.first_step)
}

fn weights() -> impl Strategy<Value = [u64; 3]> {
    [0u64..3, 0..3, 0..3]
        .prop_filter("a source", |weights| weights.iter().any(|weight| *weight > 0))
}

fn amended() -> impl Strategy<Value = Amended> {
    let step = || 1u64..7;
    prop_oneof![
        (step(), weights()).prop_map(|(step, weights)| Amended::Mix(step, weights)),
        (step(), 0u64..9).prop_map(|(step, steps)| Amended::Warmup(step, steps)),
        (step(), 0u64..4, 1u64..3)
            .prop_map(|(step, steps, last)| Amended::Decay(step, steps, last)),
        (step(), 0..KINDS.len()).prop_map(|(step, kind)| Amended::Kind(step, kind)),
        step().prop_map(Amended::Skip),
    ]
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let phases = [(3u64..8, weights()), (1u64..8, weights())];
    let amendments = prop::collection::vec(amended(), 0..4);
    let schedule = (0..KINDS.len(), 0u64..12, 0u64..4, 0u64..4, 1u64..3);
    let chained = prop::option::of((prop::option::of(1u64..4), 0u64..4, 0u64..4));
    (schedule, [0u64..3, 0..3, 0..3], phases, chained, amendments).prop_map(
        |((kind, warmup, stable, decay, last), packings, phases, chained, amendments)| Drawn {
            kind,
            warmup,
            stable,
            decay,
            last,
            packings,
            phases,
            chained,
            amendments,
        },
    )
}

/// The curriculum with values of `other` in the given places.
fn with(one: &Drawn, other: &Drawn, places: u32) -> Drawn {
    let mut edited = one.clone();
    let taken = |place: u32| places >> place & 1 == 1;
    if taken(0) {
        edited.kind = other.kind;
    }
    if taken(1) {
        edited.decay = other.decay;
    }
    if taken(2) {
        edited.last = other.last;
    }
    if taken(3) {
        edited.warmup = other.warmup;
    }
    if taken(4) {
        edited.stable = other.stable;
    }
    for place in 0..3 {
        if taken(5 + place) {
            edited.packings[place as usize] = other.packings[place as usize];
        }
    }
    for place in 0..2 {
        if taken(8 + place) {
            edited.phases[place as usize] = other.phases[place as usize];
        }
    }
    if taken(10) {
        edited.chained = other.chained;
    }
    if taken(11) {
        edited.amendments.clone_from(&other.amendments);
    }
    if taken(12) {
        edited.amendments.extend(other.amendments.first().cloned());
    }
    edited
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_step_before_the_first_one_told_of_is_another(one in drawn(), other in drawn(), places: u32) {
        let edited = with(&one, &other, places);
        if let (Some(one), Some(edited)) = (one.curriculum(), edited.curriculum()) {
            let (told, wanted) = (told(&one, &edited), first_other(&one, &edited));
            prop_assert!(wanted.is_none() || told.is_some_and(|told| told <= wanted.unwrap()), "{told:?} {wanted:?}");
        }
    }

    /// An edit is not refused because of steps that it does not affect: one key, whose effect amendments may hide.
    #[test]
    fn the_first_step_of_one_edit_is_told_exactly(one in drawn(), other in drawn(), place in 0u32..8) {
        let edited = with(&one, &other, 1 << place);
        if let (Some(one), Some(edited)) = (one.curriculum(), edited.curriculum()) {
            prop_assert_eq!(told(&one, &edited), first_other(&one, &edited));
        }
    }
}

/// Enough of the sampled curricula are valid: otherwise the tests above would prove nothing.
#[test]
fn most_of_what_is_drawn_is_a_curriculum() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let many = (0..300).filter(|_| {
        let one = drawn().new_tree(&mut runner).unwrap().current();
        one.curriculum().is_some_and(|one| !one.amendments.is_empty())
    });
    assert!(many.count() > 100);
}
