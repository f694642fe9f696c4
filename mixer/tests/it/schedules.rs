//! Schedules of the learning rate: of the run, of a phase, and amended.

use mixer::Curriculum;

/// Three phases of 40 steps, the second and third with these keys, after a warm-up of 10 steps and these.
fn text(schedule: &str, second: &str, third: &str) -> String {
    let phase = |name: &str, keys: &str| {
        let sizes = "steps = 40\nseq_len = 64\nbatch = 2\nmix = { a = 1 }";
        format!("[[phase]]\nname = \"{name}\"\n{sizes}\n{keys}\n")
    };
    let phases = [phase("one", ""), phase("two", second), phase("three", third)].concat();
    format!(
        "store = \"s\"\n[model]\npreset = \"zaya1-nano\"\n[optimizer]\nlr = 1e-3\n[schedule]\nwarmup_steps = 10\n\
         {schedule}\n{phases}"
    )
}

fn rate(curriculum: &Curriculum, step: u64) -> f64 {
    curriculum.numbers_at(step).rates().rate(step)
}

fn parse(text: &str) -> Curriculum {
    let curriculum = Curriculum::parse(text, "c.toml").unwrap();
    let again = Curriculum::parse(&curriculum.canonical(), "c.toml").unwrap();
    assert_eq!(again.canonical(), curriculum.canonical());
    assert!((1..=120).all(|step| rate(&again, step) == rate(&curriculum, step)));
    assert_eq!(curriculum.difference(&again).len(), 0);
    curriculum
}

/// A stable phase, whose decay is added when it is wanted: the steps before keep their rates.
#[test]
fn a_decay_may_be_added_to_a_stable_schedule() {
    let stable = text("kind = \"wsd\"", "", "");
    let amendment = "[[amendment]]\nstep = 91\nschedule = { stable_steps = 80, decay_steps = 30, final_lr = 0.0, \
                     decay_shape = \"sqrt\" }\n";
    let (trunk, branch) = (parse(&stable), parse(&(stable.clone() + amendment)));
    assert!((10..=120).all(|step| rate(&trunk, step) == 1e-3));
    assert!((1..=90).all(|step| rate(&trunk, step) == rate(&branch, step)));
    assert_eq!(rate(&branch, 105), 1e-3 * (1.0 - 0.5f64.sqrt()));
    assert_eq!(rate(&branch, 120), 0.0);
}

/// Each phase begins at the rate where the phase before it ended, as the second phase of ZAYA1's recipe does.
#[test]
fn a_phase_may_begin_a_schedule_of_its_own() {
    let first = "decay_steps = 20\nfinal_lr = 4e-4";
    let two = "schedule = { kind = \"linear\", decay_steps = 50, final_lr = 0.0 }";
    let three = "lr = 1e-4\nschedule = { warmup_steps = 10, decay_steps = 10, final_lr = 1e-5 }";
    let chained = parse(&text(first, two, three));
    assert_eq!([30, 40].map(|step| rate(&chained, step)), [4e-4; 2]);
    let near = |step, wanted: f64| {
        let found = rate(&chained, step);
        assert!((found - wanted).abs() < 1e-18, "step {step}: {found}, not {wanted}");
    };
    (1..=40).for_each(|step| near(40 + step, 4e-4 * (1.0 - step as f64 / 50.0)));
    // The warm-up of the third phase leads from where the second one was, 8e-5, to its own peak.
    (1..=10).for_each(|step| near(80 + step, 8e-5 + 2e-5 * step as f64 / 10.0));
    near(95, 5.5e-5);
    near(120, 1e-5);
    // A rate alone is a constant schedule.
    let held = parse(&text(first, two, "lr = 3e-5"));
    assert!((81..=120).all(|step| rate(&held, step) == 3e-5));
    let schedule = |step| {
        let found = chained.difference(&parse(&text(first, two, "lr = 3e-5")));
        assert!(found.iter().any(|it| it.first_step == step && it.key == "phase.three.schedule"));
    };
    schedule(81);
}

/// An amendment changes the schedule of its own phase, up to the next schedule.
#[test]
fn an_amended_schedule_ends_with_the_next_one() {
    let plain = text("", "schedule = { decay_steps = 40, final_lr = 1e-4 }", "lr = 2e-4");
    let amendment =
        |step: u64, keys: &str| parse(&format!("{plain}[[amendment]]\nstep = {step}\n{keys}\n"));
    let (before, early) = (parse(&plain), amendment(30, "optimizer = { lr = 5e-4 }"));
    assert_eq!(rate(&early, 40), 5e-4);
    let step = |of: &Curriculum, step: u64| rate(of, step);
    assert!((step(&early, 60) - (1e-4 + 4e-4 / 2.0)).abs() < 1e-18, "the second begins at 5e-4");
    assert_eq!(step(&early, 81), 2e-4);
    let second = amendment(60, "schedule = { final_lr = 3e-4 }");
    assert!((1..60).chain(81..=120).all(|at| rate(&second, at) == rate(&before, at)));
    assert_eq!(rate(&second, 80), 3e-4);
}

#[test]
fn mistakes_in_a_schedule_are_named() {
    let mistakes = [
        ("kind = \"cosinus\"", "", "did you mean `cosine`"),
        ("stable_steps = 3", "", "`stable_steps` has no effect on `kind = \"cosine\"`"),
        ("decay_shape = \"sqrt\"", "", "`kind = \"wsd\"`, or no such key"),
        ("kind = \"wsd\"\ndecay_steps = 5", "", "has no `final_lr`"),
        ("kind = \"constant\"\ndecay_steps = 5", "", "has no effect on `kind = \"constant\"`"),
        ("kind = \"constant\"\nfinal_lr = 1e-5", "", "keeps the peak"),
        ("kind = \"inverse-sqrt\"\ndecay_steps = 5", "", "has no effect on"),
        ("", "schedule = { kind = \"inverse-sqrt\" }", "at least 1"),
        ("", "lr = -1.0", "out of range"),
        ("", "schedule = { lr = 1e-3 }", "lr"),
        ("", "schedule = { final_lr = 1e-3 }", "never reached"),
    ];
    for (schedule, second, word) in mistakes {
        let told =
            Curriculum::parse(&text(schedule, second, ""), "c.toml").unwrap_err().to_string();
        assert!(told.contains(word) && told.contains("c.toml:"), "no {word:?} in\n{told}");
    }
    let first = text("", "", "").replacen("mix = { a = 1 }", "mix = { a = 1 }\nlr = 1e-3", 1);
    let told = Curriculum::parse(&first, "c.toml").unwrap_err().to_string();
    assert!(told.contains("the first phase begins a schedule of its own"), "{told}");
}
