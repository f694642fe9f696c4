//! Mixes that react to the loss: the rule against a naive program in floats, the plan against brute force, what is
//! fixed, and what is refused.

use std::collections::BTreeMap;

use contract::Class;
use mixer::{Curriculum, DataPlan, SourceFacts};
use proptest::prelude::*;

use crate::curriculum::parse;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Every weight has so many parts.
const PARTS: f64 = 65_536.0;

/// Labels and summed losses by source of one step.
type StepLosses = BTreeMap<String, (u64, f64)>;

#[derive(Clone, Debug)]
struct Case {
    rule: &'static str,
    start: Vec<u64>,
    floor: Vec<u64>,
    reference: Vec<f64>,
    rate: f64,
    window: u64,
    steps: u64,
    batch: &'static str,
    losses: Vec<StepLosses>,
}

impl Case {
    fn table(&self, number: impl Fn(usize) -> String) -> String {
        let pairs = (0..self.start.len()).map(|at| format!("{} = {}", NAMES[at], number(at)));
        format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
    }

    fn mix(&self) -> String {
        let Case { rule, window, rate, .. } = self;
        let start = self.table(|at| self.start[at].to_string());
        let floor = self.table(|at| format!("\"{}/1000\"", self.floor[at]));
        let more = match *rule {
            "excess-loss" => {
                format!(
                    ", rate = {rate}, reference = {}",
                    self.table(|at| self.reference[at].to_string())
                )
            }
            "learnability" => format!(", rate = {rate}"),
            _ => String::new(),
        };
        format!(
            "{{ rule = \"{rule}\", start = {start}, floor = {floor}, window = {window}{more} }}"
        )
    }

    fn text(&self, mix: &str, steps: u64) -> String {
        let constant = self.table(|_| "1".to_owned());
        let limits: String = NAMES[..self.start.len()]
            .iter()
            .map(|name| format!("[source.{name}]\nmax_epochs = 100\n"))
            .collect();
        format!(
            "store = \"s\"\nseed = 5\n{limits}[[phase]]\nname = \"one\"\nsteps = {steps}\nseq_len = 16\nmicro_batch = 2\n\
             batch = {}\nmix = {mix}\n[[phase]]\nname = \"two\"\nsteps = 3\nseq_len = 8\nbatch = 4\nmicro_batch = 2\n\
             mix = {constant}\n",
            self.batch
        )
    }

    fn plan(&self) -> DataPlan {
        DataPlan::new(&parse(&self.text(&self.mix(), self.steps)), &facts(self.start.len()))
            .unwrap()
    }

    /// The plan once the losses of the first `steps` steps are known.
    fn extended(&self, steps: usize) -> DataPlan {
        let plan = self.plan();
        let mut losses = plan.losses();
        for step in &self.losses[..steps] {
            losses.add(step.iter().map(|(name, (labels, loss))| (name.as_str(), *labels, *loss)));
        }
        plan.extended(&losses).unwrap()
    }

    /// The mean losses of a window.
    fn means(&self, window: usize) -> Vec<Option<f64>> {
        let steps = self.window as usize;
        let mean = |name: &&str| {
            let of_steps = self.losses[window * steps..(window + 1) * steps].iter();
            let sums = of_steps.filter_map(|step| step.get(*name)).filter(|sum| sum.1.is_finite());
            let (labels, loss) = sums.fold((0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            (labels > 0).then(|| loss / labels as f64)
        };
        NAMES[..self.start.len()].iter().map(mean).collect()
    }

    /// How far the weights of window `number` may be from exact ones because losses are multiples of 2^-20: much where
    /// hardly any loss falls.
    fn rounding(&self, number: usize) -> f64 {
        if self.rule != "learnability" || number < 3 {
            return 0.0;
        }
        let means: Vec<_> = (0..number - 1).map(|at| self.means(at)).collect();
        let (now, before) = means.split_last().unwrap();
        let fall = |at: usize| {
            let last = before.iter().rev().find_map(|one| one[at]);
            last.zip(now[at]).map_or(0.0, |(last, now)| (last - now).max(0.0))
                * self.start[at] as f64
        };
        let falls: f64 = (0..self.start.len()).map(fall).sum();
        let start: u64 = self.start.iter().sum();
        PARTS * 1e-5 * start as f64 / falls.max(1e-12)
    }

    /// The weights of window `number`, by those of the first one, in parts, and those of the one before it.
    fn naive(&self, number: usize, first: &[f64], before: &[f64]) -> Vec<f64> {
        let start: Vec<f64> = match number {
            0 => self.start.iter().map(|weight| *weight as f64).collect(),
            _ => first.to_vec(),
        };
        let mut means: Vec<Vec<Option<f64>>> =
            (0..number.max(1) - 1).map(|at| self.means(at)).collect();
        let masses: Vec<f64> = match (self.rule, number) {
            ("fixed", _) | (_, 0 | 1) => start,
            ("excess-loss", _) => {
                // The last mean that is known.
                let mean = |at: usize| means.iter().rev().find_map(|one| one[at]).unwrap_or(0.0);
                let excess = |at: usize| (mean(at) - self.reference[at]).max(0.0);
                let top = (0..start.len()).map(excess).fold(0.0, f64::max);
                (0..start.len())
                    .map(|at| before[at] * (self.rate * (excess(at) - top)).exp())
                    .collect()
            }
            _ => {
                let (now, last) = (means.pop().unwrap(), means);
                let fall = |at: usize| {
                    let last = last.iter().rev().find_map(|one| one[at]);
                    last.zip(now[at]).map_or(0.0, |(last, now)| (last - now).max(0.0)) * start[at]
                };
                let sum: f64 = (0..start.len()).map(fall).sum();
                let way = |at: usize| match sum > 0.0 {
                    true => before[at] / PARTS * (1.0 - self.rate) + self.rate * fall(at) / sum,
                    false => before[at],
                };
                (0..start.len()).map(way).collect()
            }
        };
        let sum: f64 = masses.iter().sum();
        let parts = |t: f64| -> Vec<f64> {
            let floors = self.floor.iter().map(|floor| (*floor as f64 * PARTS / 1000.0).ceil());
            masses.iter().zip(floors).map(|(mass, floor)| (t * mass / sum).max(floor)).collect()
        };
        let (mut low, mut high) = (0.0, 1e9);
        for _ in 0..200 {
            let middle = (low + high) / 2.0;
            if parts(middle).iter().sum::<f64>() < PARTS { low = middle } else { high = middle }
        }
        parts(high)
    }
}

fn facts(sources: usize) -> Vec<SourceFacts> {
    let fact = |(at, name): (u64, &&str)| SourceFacts {
        name: (*name).to_owned(),
        tokens: 1_000 + 333 * at,
        documents: 9,
        unit: 64,
        selection: None,
    };
    (0..).zip(&NAMES[..sources]).map(fact).collect()
}

fn cases() -> impl Strategy<Value = Case> {
    let rule = prop::sample::select(vec!["excess-loss", "learnability", "fixed"]);
    let source = (1u64..50, 1u64..20, 0.5..6.0f64);
    let loss = prop_oneof![9 => 0.0..8.0f64, 1 => Just(f64::NAN)];
    let step = prop::collection::vec((0u64..50, loss), 4);
    let size = prop::sample::select(vec!["4", "{ from = 2, to = 8, every = 3 }"]);
    let all = (rule, prop::collection::vec(source, 1..5), 1u64..5, 1u64..24);
    (all, 0.05..1.0f64, size, prop::collection::vec(step, 24))
        .prop_map(|(all, rate, batch, losses)| {
            let (rule, sources, window, steps) = all;
            let start: Vec<u64> = sources.iter().map(|source| source.0).collect();
            let sum: u64 = start.iter().sum();
            // No more than the start has.
            let floor =
                sources.iter().map(|source| source.1.min(source.0 * 900 / sum).max(1)).collect();
            let round = |number: f64| (number * 1000.0).round() / 1000.0;
            let reference = sources.iter().map(|source| round(source.2)).collect();
            let of_step = |step: Vec<(u64, f64)>| {
                let named = NAMES.iter().zip(step).filter(|(_, (labels, _))| *labels > 0);
                named
                    .map(|(name, (labels, mean))| {
                        ((*name).to_owned(), (labels, labels as f64 * mean))
                    })
                    .collect()
            };
            let losses = losses.into_iter().map(of_step).collect();
            Case { rule, start, floor, reference, rate: round(rate), window, steps, batch, losses }
        })
        .prop_filter("the start has its floors", |case| {
            let sum: u64 = case.start.iter().sum();
            case.start.iter().all(|weight| weight * 1000 > sum * 2)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Each window has the weights of the naive program, and what is fixed ends where it must.
    #[test]
    fn weights_are_those_of_a_naive_program(case in cases(), known in 0usize..24) {
        let known = known.min(case.steps as usize);
        let plan = case.extended(known);
        let windows = known as u64 / case.window + 2;
        match case.rule != "fixed" && windows * case.window < case.steps {
            true => prop_assert_eq!(plan.fixed_until(), windows * case.window),
            false => prop_assert_eq!(plan.fixed_until(), plan.steps()),
        }
        let (mut first, mut before) = (Vec::new(), Vec::new());
        for (number, window) in plan.windows().iter().enumerate() {
            prop_assert_eq!(window.first_step, number as u64 * case.window + 1);
            let found: Vec<f64> = window.weights.iter().map(|(_, part)| *part as f64).collect();
            prop_assert_eq!(found.iter().sum::<f64>(), PARTS);
            let most = 1.6 + case.rounding(number);
            for (found, naive) in found.iter().zip(case.naive(number, &first, &before)) {
                prop_assert!((found - naive).abs() < most, "window {}: {} is not {}", number, found, naive);
            }
            if number == 0 {
                first.clone_from(&found);
            }
            before = found;
        }
    }

    /// Sample by sample: in a window each source has its share, and a source's samples follow each other over windows
    /// and phases as if it were alone.
    #[test]
    fn samples_are_those_of_brute_force(case in cases(), known in 0usize..24) {
        let plan = case.extended(known.min(case.steps as usize));
        let alone: Vec<DataPlan> = NAMES[..case.start.len()].iter().map(|name| {
            let text = |steps: u64, seq_len, name: &str| format!(
                "[[phase]]\nname = \"p{seq_len}\"\nsteps = {steps}\nseq_len = {seq_len}\nbatch = 1\nmix = {{ {name} = 1 }}\n"
            );
            let of_source = plan.phases().iter().filter(|phase| phase.name == "one").flat_map(|phase| {
                phase.uses.iter().filter(|part| plan.sources()[part.source].name == *name)
            });
            let long: u64 = of_source.map(|part| part.samples).sum();
            let phases = [text(long.max(1), 16, name), text(12, 8, name)];
            let phases = phases[(long == 0) as usize..].concat();
            let all = format!("store = \"s\"\nseed = 5\n[source.{name}]\nmax_epochs = 100\n{phases}");
            DataPlan::new(&parse(&all), &facts(case.start.len())).unwrap()
        }).collect();
        let mut given = vec![0u64; alone.len()];
        for sample in 0..plan.samples() {
            let step = plan.step_of(sample).unwrap();
            if step > plan.fixed_until() {
                let fault = plan.sample(sample).unwrap_err();
                prop_assert!(fault.class() == Class::Usage && fault.to_string().contains("--run RUN"));
                break;
            }
            let found = plan.sample(sample).unwrap();
            let wanted = alone[found.source].sample(given[found.source]).unwrap();
            prop_assert_eq!((found.epoch, &found.spans), (wanted.epoch, &wanted.spans));
            given[found.source] += 1;
            let visits = plan.visits(found.source, found.spans[0].start..found.spans[0].start + 1).unwrap();
            prop_assert!(visits.iter().any(|visit| visit.sample == sample));
        }
        for window in plan.windows() {
            let steps = window.first_step..window.last_step + 1;
            let samples = steps.flat_map(|step| {
                let step = plan.step(step).unwrap();
                step.first_sample..step.first_sample + step.batch
            });
            let samples: Vec<u64> = samples.collect();
            for (name, part) in &window.weights {
                let of_source = |sample: &&u64| plan.sources()[plan.sample(**sample).unwrap().source].name == *name;
                let count = samples.iter().filter(of_source).count() as f64;
                let share = *part as f64 / PARTS * samples.len() as f64;
                prop_assert!((count - share).abs() < 4.0, "{} has {} of {}", name, count, share);
            }
        }
    }

    /// Losses come one by one or together; later ones and a longer phase change nothing before.
    #[test]
    fn what_is_fixed_stays(case in cases(), known in 0usize..24, more in 1u64..9) {
        let known = known.min(case.steps as usize);
        let plan = case.extended(known);
        let last = plan.fixed_until().min(case.steps);
        let later = case.extended(case.steps as usize);
        prop_assert_eq!(later.fixed_until(), later.steps());
        prop_assert_eq!(plan.digest_through(last), later.digest_through(last));
        prop_assert_eq!(plan.extended(&later.losses()).unwrap().windows().len(), case.plan().windows().len());
        let longer = Case { steps: case.steps + more, ..case.clone() }.extended(known);
        prop_assert_eq!(plan.digest_through(last), longer.digest_through(last));
        let canonical = parse(&parse(&case.text(&case.mix(), case.steps)).canonical());
        let again = DataPlan::new(&canonical, &facts(case.start.len())).unwrap();
        prop_assert_eq!(again.digest_through(last), case.plan().digest_through(last));
    }

    /// The control reads what a constant mix of its weights reads.
    #[test]
    fn the_control_is_a_constant_mix(case in cases()) {
        let case = Case { rule: "fixed", ..case };
        let plan = case.plan();
        prop_assert_eq!(plan.fixed_until(), plan.steps());
        let weights = &plan.windows()[0].weights;
        let mix = case.table(|at| weights[at].1.to_string());
        let constant = DataPlan::new(&parse(&case.text(&mix, case.steps)), &facts(case.start.len())).unwrap();
        for sample in 0..plan.samples() {
            let (one, other) = (plan.sample(sample).unwrap(), constant.sample(sample).unwrap());
            prop_assert_eq!((one.source, one.spans), (other.source, other.spans));
        }
        prop_assert_eq!(plan.digest_through(plan.steps()), constant.digest_through(plan.steps()));
    }

    /// A source whose text runs out is read to its end, not beyond, and the others share what it leaves.
    #[test]
    fn a_source_that_runs_out_has_no_weight(tokens in 64u64..600, window in 1u64..6, steps in 12u64..30) {
        let text = format!(
            "store = \"s\"\nseed = 5\n[source.b]\nmax_epochs = 9\n[[phase]]\nname = \"one\"\nsteps = {steps}\nseq_len = 16\n\
             batch = 4\nmix = {{ rule = \"fixed\", start = {{ a = 1, b = 1 }}, window = {window} }}\n"
        );
        let mut facts = facts(2);
        facts[0].tokens = tokens;
        let plan = DataPlan::new(&parse(&text), &facts).unwrap();
        let used: u64 = plan.phases().iter().flat_map(|phase| &phase.uses)
            .filter(|part| part.source == 0).map(|part| part.samples).sum();
        prop_assert!(used <= tokens.div_ceil(16));
        if used < 2 * steps - 2 {
            // Once it is near its end, a window takes all but a few samples.
            prop_assert!(used + 4 * window + 6 >= tokens.div_ceil(16), "{} of {}", used, tokens.div_ceil(16));
        }
        let weights: Vec<u64> = plan.windows().iter().map(|window| window.weights[0].1).collect();
        prop_assert!(weights.is_sorted_by(|one, next| one >= next), "{:?}", weights);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// With the greatest weight for later phases these have their text, and with a little more they run out: as of a
    /// constant mix of that weight.
    #[test]
    fn later_phases_have_text_up_to_a_weight(
        tokens in 2_000u64..9_000, epochs in 1u64..4, later in 10u64..80, window in 1u64..5, steps in 20u64..60,
    ) {
        let text = |mix: &str| parse(&format!(
            "store = \"s\"\nseed = 5\n[source.a]\nmax_epochs = {epochs}\n[source.b]\nmax_epochs = 900\n\
             [[phase]]\nname = \"one\"\nsteps = {steps}\nseq_len = 16\nbatch = 8\nmix = {mix}\n\
             [[phase]]\nname = \"two\"\nsteps = {later}\nseq_len = 8\nbatch = 8\nmix = {{ a = 1 }}\n"
        ));
        let mut facts = facts(2);
        facts[0].tokens = tokens;
        let start = "{ rule = \"learnability\", start = { a = 1, b = 99 }, window = WINDOW }";
        let Ok(plan) = DataPlan::new(&text(&start.replace("WINDOW", &window.to_string())), &facts) else {
            return Ok(());
        };
        let bounds = plan.weights_for_later("phase.one.mix");
        prop_assert_eq!(bounds.len(), 2);
        prop_assert_eq!(bounds[1], None, "no later phase takes it");
        let fixed = plan.fixed_until();
        let accepts = |parts: u64| {
            let mix = format!("{{ a = {parts}, b = {} }}", 65_536 - parts);
            let amended = format!("[[amendment]]\nstep = {}\nmix = {mix}\n", fixed + 1);
            let all = text("{ a = 656, b = 64880 }").canonical() + &amended;
            DataPlan::new(&parse(&all), &facts).is_ok()
        };
        let slack = 65_536 * 6 / ((steps - fixed) * 8);
        match bounds[0] {
            None => prop_assert!(accepts(65_535 - slack.min(65_000))),
            Some(most) => {
                if let Some(less @ 1..) = most.checked_sub(slack) {
                    prop_assert!(accepts(less), "{} of {}", less, most);
                }
                if most + slack < 65_536 {
                    prop_assert!(!accepts(most + slack), "{} of {}", most + slack, most);
                }
            }
        }
    }
}

#[test]
fn too_little_text_is_refused_before_a_step() {
    let text = |steps, rule| {
        format!(
            "store = \"s\"\nseed = 5\n[[phase]]\nname = \"one\"\nsteps = {steps}\nseq_len = 16\nbatch = 4\n\
             mix = {{ rule = \"{rule}\", start = {{ a = 1, b = 1 }}, window = 2 }}\n"
        )
    };
    // 63 and 84 sequences.
    let fault = DataPlan::new(&parse(&text(40, "learnability")), &facts(2)).unwrap_err();
    assert_eq!(fault.class(), Class::Usage);
    let fault = fault.to_string();
    assert!(fault.starts_with("c.toml:8") || fault.contains(":8:"), "{fault}");
    assert!(fault.contains("run out, whatever its weights become"), "{fault}");
    // Enough, but not for a window of what is left of both.
    let fault = DataPlan::new(&parse(&text(36, "fixed")), &facts(2)).unwrap_err().to_string();
    assert!(fault.contains("run out in the window of step 35"), "{fault}");
    let plan = DataPlan::new(&parse(&text(33, "learnability")), &facts(2)).unwrap();
    let mut losses = plan.losses();
    for step in 0..33 {
        losses.add([("a", 9, 9.0 * f64::from(99 - step)), ("b", 9, 9.0)]);
    }
    assert_eq!(plan.extended(&losses).unwrap().fixed_until(), 33);
}

/// What losses make of a mix may take more text than there is: the steps before stay readable, and the next one says
/// why.
#[test]
fn a_source_that_runs_out_on_the_way_ends_what_is_fixed() {
    let text = "store = \"s\"\nseed = 5\n[[phase]]\nname = \"one\"\nsteps = 36\nseq_len = 16\nbatch = 4\n\
                mix = { rule = \"learnability\", start = { a = 1, b = 1 }, window = 2 }\n";
    let plan = DataPlan::new(&parse(text), &facts(2)).unwrap();
    let mut losses = plan.losses();
    for step in 0..36 {
        losses.add([("a", 9, 9.0 * f64::from(99 - step)), ("b", 9, 9.0)]);
    }
    let grown = plan.extended(&losses).unwrap();
    assert!(!grown.can_grow() && (4..36).contains(&grown.fixed_until()), "{}", grown.fixed_until());
    grown.check_fixed(grown.fixed_until()).unwrap();
    let fault = grown.check_fixed(grown.fixed_until() + 1).unwrap_err().to_string();
    assert!(fault.contains("run out in the window of step"), "{fault}");
    let readable = grown.step(grown.fixed_until()).unwrap();
    grown.sample(readable.first_sample).unwrap();
}

#[test]
fn buckets_react_as_the_source_that_they_are_cut_from() {
    let text = "store = \"s\"\nseed = 5\n[source.web]\nmax_epochs = 50\nbuckets = { column = \"q\", edges = [0.5] }\n\
        curve = { weights = [1, 3] }\n[source.a]\nmax_epochs = 50\n[[phase]]\nname = \"one\"\nsteps = 40\nseq_len = 16\n\
        batch = 8\nmix = { rule = \"excess-loss\", start = { a = 1, web = 1 }, window = 4, reference = { a = 1, web = 1 } }\n";
    let mut facts = facts(3);
    for (fact, name) in facts.iter_mut().zip(["a", "web/0", "web/1"]) {
        fact.name = name.to_owned();
    }
    let plan = DataPlan::new(&parse(text), &facts).unwrap();
    let mut losses = plan.losses();
    for _ in 0..40 {
        // Two bits of excess in the mean of both buckets.
        let excess = 2.0 * std::f64::consts::LN_2;
        losses.add([("a", 10, 10.0), ("web/0", 10, 10.0), ("web/1", 10, 10.0 + 20.0 * excess)]);
    }
    let plan = plan.extended(&losses).unwrap();
    let web: Vec<u64> = plan.windows().iter().map(|window| window.weights[1].1).collect();
    assert_eq!(web[..4], [32_768, 32_768, 52_429, 61_681]);
    let shares: Vec<u64> = plan.phases()[1].uses.iter().map(|part| part.samples).collect();
    // 32 samples, a fifth from `a`; the buckets of `web` have 1 and 3 parts of the others.
    assert_eq!(shares.iter().sum::<u64>(), 32);
    assert!(
        shares[0].abs_diff(6) < 2 && shares[1].abs_diff(6) < 2 && shares[2].abs_diff(19) < 2,
        "{shares:?}"
    );
}

#[test]
fn an_amendment_ends_a_reaction() {
    let text = |amendment: &str| {
        format!(
            "store = \"s\"\nseed = 5\n[[phase]]\nname = \"one\"\nsteps = 12\nseq_len = 16\nbatch = 4\n\
             mix = {{ rule = \"learnability\", start = {{ a = 1, b = 1 }}, window = 3 }}\n{amendment}"
        )
    };
    let plan = |text: &str| DataPlan::new(&parse(text), &facts(2)).unwrap();
    assert_eq!(plan(&text("")).fixed_until(), 6);
    let early = plan(&text("[[amendment]]\nstep = 5\nmix = { a = 1 }\n"));
    assert_eq!((early.fixed_until(), early.windows().len()), (12, 2));
    assert_eq!(early.digest_through(4), plan(&text("")).digest_through(4));
    let late = plan(&text("[[amendment]]\nstep = 8\nmix = { a = 1 }\n"));
    assert_eq!((late.fixed_until(), late.windows().len()), (6, 2));
    let again = text(
        "[[amendment]]\nstep = 5\nmix = { rule = \"learnability\", start = { a = 1, b = 3 }, window = 2 }\n",
    );
    assert_eq!(plan(&again).fixed_until(), 8);
    let mut curriculum = parse(&text(""));
    let fault = curriculum.drop_source("a", 4..9).unwrap_err().to_string();
    assert!(
        fault.contains("a mix that reacts to the loss cannot lose \"a\" on its way"),
        "{fault}"
    );
    assert!(curriculum.drop_source("a", 1..9).unwrap());
    let left = curriculum.segments()[0].spec.mix.clone();
    assert_eq!(left.sources(), ["b"]);
}

/// A limit decides weights here, so editing it changes data; a longer phase does not.
#[test]
fn an_edit_is_known_by_what_it_decides() {
    let text = |window: u64, epochs: u64, steps: u64| {
        parse(&format!(
            "store = \"s\"\nseed = 5\n[source.a]\nmax_epochs = {epochs}\n[[phase]]\nname = \"zero\"\nsteps = 4\nseq_len = 16\n\
             batch = 4\nmix = {{ b = 1 }}\n[[phase]]\nname = \"one\"\nsteps = {steps}\nseq_len = 16\nbatch = 4\n\
             mix = {{ rule = \"fixed\", start = {{ a = 1, b = 1 }}, window = {window} }}\n"
        ))
    };
    let told = |one: &Curriculum, other: &Curriculum| {
        let all = one.difference(other).into_iter();
        all.map(|it| (it.key, it.first_step)).collect::<Vec<_>>()
    };
    let was = text(2, 3, 9);
    assert_eq!(told(&was, &text(2, 4, 9)), [("source.a.max_epochs".to_owned(), 5)]);
    assert_eq!(told(&was, &text(3, 3, 9)), [("phase.one.mix".to_owned(), 5)]);
    assert_eq!(told(&was, &text(2, 3, 11)), [("phase.one.steps".to_owned(), 14)]);
    assert_eq!(told(&was, &parse(&was.canonical())), []);
}

#[test]
fn wrong_keys_are_named() {
    let told = |mix: &str| {
        let text = format!(
            "store = \"s\"\n[[phase]]\nname = \"a\"\nsteps = 9\nseq_len = 8\nbatch = 1\nmix = {mix}\n"
        );
        Curriculum::parse(&text, "c.toml").unwrap_err().to_string()
    };
    let base = "start = { a = 1, b = 1 }, window = 4";
    for (mix, what) in [
        ("{ start = { a = 1 }, window = 4 }".to_owned(), "the mix reacts, and has no `rule`"),
        (format!("{{ rule = \"excess\", {base} }}"), "wanted: excess-loss, learnability, fixed"),
        ("{ rule = \"fixed\", start = { a = 1 } }".to_owned(), "has no `window`"),
        ("{ rule = \"fixed\", start = { a = 1 }, window = 0 }".to_owned(), "above zero"),
        (format!("{{ rule = \"fixed\", {base}, rate = 1 }}"), "`rate` is not used by this rule"),
        (format!("{{ rule = \"learnability\", {base}, rate = 1.5 }}"), "at most 1"),
        (format!("{{ rule = \"learnability\", {base}, rate = 0 }}"), "at most 1"),
        (format!("{{ rule = \"excess-loss\", {base} }}"), "has no `reference`"),
        (
            format!("{{ rule = \"excess-loss\", {base}, reference = {{ a = 1 }} }}"),
            "does not have source \"b\"",
        ),
        (
            format!("{{ rule = \"excess-loss\", {base}, reference = {{ a = 1, b = 2, c = 3 }} }}"),
            "does not have source \"c\"",
        ),
        (
            format!("{{ rule = \"excess-loss\", {base}, reference = {{ a = 1, b = 70000 }} }}"),
            "out of range",
        ),
        (format!("{{ rule = \"fixed\", {base}, floor = 0 }}"), "is zero"),
        (format!("{{ rule = \"fixed\", {base}, floor = 0.6 }}"), "more than the whole"),
        (
            "{ rule = \"fixed\", start = { a = 1, b = 999 }, window = 4 }".to_owned(),
            "less of a than its least share",
        ),
        (format!("{{ rule = \"fixed\", {base}, flor = 0.1 }}"), "floor"),
    ] {
        let told = told(&mix);
        assert!(told.starts_with("c.toml:7:") && told.contains(what), "{mix}: {told}");
    }
}
