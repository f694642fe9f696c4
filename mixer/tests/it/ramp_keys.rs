//! Ramps of the mix and of the batch in a curriculum: how they are read, written, compared and refused.

use mixer::{Curriculum, MixWeights};

use crate::curriculum::{edited, parse, whole};

/// A ramp in the first phase of a curriculum.
fn ramp(mix: &str) -> String {
    edited("mix = { web = 0.7, math = \"3/10\" }", &format!("mix = {mix}"))
}

#[test]
fn ramps_arrive_and_keep_their_meaning() {
    let c = parse(&ramp("{ from = { web = 0.70, math = \"3/10\" }, to = { code = 2, web = 3 } }"));
    let wanted = MixWeights::Ramp {
        from: vec![0, 3, 7],
        to: vec![4, 0, 6],
        knots: vec![0, curriculum::RAMP_ONE],
    };
    assert_eq!(c.phases[0].mix.weights(), Some(wanted));
    let canonical = c.canonical();
    let text =
        "mix = { from = { math = 3, web = 7 }, to = { code = 2, web = 3 }, curve = \"linear\" }";
    assert!(canonical.contains(text), "{canonical}");
    assert_eq!(parse(&canonical).canonical(), canonical);
    let table = ramp(
        "{ from = { a = 1 }, to = { b = 1 }, curve = \"table\", table = [\n0.50, # half\n1, \"1/3\"] }",
    );
    let table = parse(&table);
    let MixWeights::Ramp { knots, .. } = table.phases[0].mix.weights().unwrap() else {
        panic!("a constant mix")
    };
    assert_eq!(knots, [1 << 31, 1 << 32, 1_431_655_765]);
    assert_eq!(parse(&table.canonical()).canonical(), table.canonical());
    let sources = parse(&ramp("{ from = 1, to = 2 }"));
    assert_eq!(sources.phases[0].mix.weights(), whole([1, 2]), "sources have any name");

    let changes = |other: &Curriculum| {
        let all = c.difference(other).into_iter().map(|it| (it.key, it.first_step));
        all.collect::<Vec<_>>()
    };
    let longer = parse(&canonical.replace("steps = 12", "steps = 13"));
    assert_eq!(changes(&longer), [("phase.short.steps".to_owned(), 1)]);
    let other = parse(&canonical.replace("\"linear\"", "\"cosine\""));
    assert_eq!(changes(&other), [("phase.short.mix".to_owned(), 1)]);

    let mut dropped = c.clone();
    let late = dropped.drop_source("web", 3..9).unwrap_err().to_string();
    assert!(late.contains("begin at step 1"), "{late}");
    assert!(dropped.drop_source("web", 1..9).unwrap());
    let dropped = parse(&dropped.canonical());
    let ramp = "mix = { from = { math = 1 }, to = { code = 1 }, curve = \"linear\" }";
    assert!(dropped.canonical().contains(ramp), "{}", dropped.canonical());
    let mut alone = dropped;
    assert!(alone.drop_source("math", 1..9).unwrap());
    assert!(alone.canonical().contains("mix = { code = 1 }"), "{}", alone.canonical());
}

/// The path to a weight of one phase may be the name of another, in either order.
#[test]
fn phases_may_have_names_like_paths() {
    let phase = |name: &str, mix: &str| {
        format!("[[phase]]\nname = \"{name}\"\nseq_len = 64\nbatch = 8\nsteps = 4\nmix = {mix}\n")
    };
    let ramp = phase("a", "{ from = { web = 0.10, math = 1 }, to = { web = 2, math = 1 } }");
    let named = phase("a.mix.from.web", "{ web = 1 }");
    for phases in [[&ramp, &named], [&named, &ramp]] {
        let read = parse(&format!("store = \"s\"\n{}{}", phases[0], phases[1]));
        let alone = parse(&format!("store = \"s\"\n{ramp}"));
        let read = read.phases.iter().find(|phase| phase.name == "a").unwrap();
        assert_eq!(read.mix.weights(), alone.phases[0].mix.weights());
    }
}

#[test]
fn mistakes_in_ramps_are_named() {
    let cases: &[(&str, &[&str])] = &[
        ("{ from = { a = 1 } }", &["c.toml:33:7", "no `to`"]),
        ("{ from = { a = 1 }, to = 3 }", &["c.toml:33:", "`to`", "{ source = weight }"]),
        ("{ from = { a = 1 }, too = { a = 1 } }", &["c.toml:33:", "`too`", "did you mean `to`"]),
        ("{ from = { a = 1 }, to = {} }", &["c.toml:33:", "empty"]),
        ("{ from = { a = 1 }, to = { b = 0 } }", &["c.toml:33:38", "weight of b", "above zero"]),
        ("{ from = { a = 1 }, to = { a = 2 } }", &["c.toml:33:7", "changes nothing"]),
        ("{ from = { a = 1 }, to = { b = 1 }, curve = \"cosin\" }", &["did you mean `cosine`"]),
        ("{ from = { a = 1 }, to = { b = 1 }, curve = 3 }", &["c.toml:33:", "`curve`", "cosine"]),
        ("{ from = { a = 1 }, to = { b = 1 }, curve = \"table\" }", &["no `table`", "c.toml:33:"]),
        (
            "{ from = { a = 1 }, to = { b = 1 }, table = [0, 1] }",
            &["`table` is not used", "linear"],
        ),
        (
            "{ from = { a = 1 }, to = { b = 1 }, curve = \"table\", table = [0] }",
            &["`table`", "2 to 1,025"],
        ),
        (
            "{ from = { a = 1 }, to = { b = 1 }, curve = \"table\", table = [0, 1.5] }",
            &["`table`", "1.5", "0 to 1"],
        ),
        (
            "{ from = { a = 1 }, to = { b = 1 }, curve = \"table\", table = [1, 1.0] }",
            &["c.toml:33:", "changes nothing", "`table` are equal"],
        ),
        (
            "{ from = { a = \"1/9223372036854775807\", b = \"1/9223372036854775806\" }, \
             to = { a = \"1/9223372036854775805\", b = \"1/9223372036854775804\" } }",
            &["too fine", "the same sum"],
        ),
        (
            "{ from = { a = 1, b = 3037000498 }, to = { b = 1, c = 3037000506 } }",
            &["c.toml:33:7", "too fine", "the same sum"],
        ),
        (
            "{ from = { a = 1, b = 2147483646 }, to = { b = 1, c = 2147483645 } }",
            &["c.toml:33:7", "so long a phase", "the same sum"],
        ),
    ];
    for (mix, words) in cases {
        let text = match mix.contains("2147483646") {
            true => ramp(mix).replace("steps = 12", "steps = 1_000_000_000_000"),
            false => ramp(mix),
        };
        let told = Curriculum::parse(&text, "c.toml").expect_err(mix).to_string();
        for word in *words {
            assert!(told.contains(word), "{mix}: no {word:?} in\n{told}");
        }
    }
}

/// A batch in the first phase of a curriculum.
fn batch(text: &str) -> String {
    edited("batch = 8", &format!("batch = {text}"))
}

#[test]
fn batches_arrive_and_keep_their_meaning() {
    // Five steps of 4 sequences, five of 6, two of 7: micro-batches of 1.
    let text = batch("{ from = 4, to = 7, every = 5, by = 2 }").replace("micro_batch = 2", "");
    let c = parse(&text);
    let sizes =
        |of: &Curriculum| (1..14).map(|step| of.phases[0].batch.at(step)).collect::<Vec<_>>();
    assert_eq!(sizes(&c), [4, 4, 4, 4, 4, 6, 6, 6, 6, 6, 7, 7, 7]);
    assert_eq!(c.phases[0].samples(), 64);
    let canonical = c.canonical();
    assert!(canonical.contains("batch = { 1 = 4, 6 = 6, 11 = 7 }"), "{canonical}");
    assert_eq!(parse(&canonical).canonical(), canonical);
    let by_micro_batch = parse(&batch("{ from = 4, to = 8, every = 5 }"));
    assert_eq!(sizes(&by_micro_batch)[..11], [4, 4, 4, 4, 4, 6, 6, 6, 6, 6, 8]);
    let segments: Vec<_> =
        c.segments().iter().map(|it| (it.spec.steps, it.batch, it.mix_before)).collect();
    assert_eq!(segments, [(5, 4, 0), (5, 6, 20), (2, 7, 50), (2, 6, 0)]);
    // 64 sequences of 64 tokens are 12 steps, and one token fewer is 11.
    let tokens = |count: u64| {
        let text = text.replace("steps = 12", &format!("tokens = {count}"));
        parse(&text).phases[0].steps
    };
    assert_eq!((tokens(64 * 64), tokens(64 * 64 - 1), tokens(71 * 64)), (12, 11, 13));
    let other = parse(&canonical.replace("11 = 7", "11 = 8"));
    let changes: Vec<_> =
        c.difference(&other).into_iter().map(|it| (it.key, it.first_step)).collect();
    assert_eq!(changes, [("phase.short.batch".to_owned(), 11)]);
    // A size of a step that the phase does not have changes nothing.
    assert!(c.difference(&parse(&canonical.replace("11 = 7", "11 = 7, 13 = 9"))).is_empty());
    // A size of a step that no run reaches is read at once.
    let far = "{ from = 2, to = 9000000000000000000, every = 9000000000000000000 }";
    assert_eq!(sizes(&parse(&batch(far)))[..3], [2, 2, 2]);
}

#[test]
fn mistakes_in_batches_are_named() {
    let cases: &[(&str, &[&str])] = &[
        ("0", &["c.toml:31:9", "`batch`", "above zero"]),
        ("8.5", &["c.toml:31:9", "8.5"]),
        ("{ from = 4, to = 8 }", &["c.toml:31:9", "no `every`"]),
        ("{ to = 8, every = 2 }", &["c.toml:31:9", "no `from`"]),
        ("{ from = 4, to = 8, every = 0 }", &["`every`", "above zero", "found:  0"]),
        ("{ from = 4, to = 8, every = 1, bye = 2 }", &["did you mean `by`"]),
        ("{ from = 8, to = 8, every = 1 }", &["does not grow", "table"]),
        ("{ from = 4, to = 9, every = 1 }", &["micro_batch = 2, batch = 9"]),
        ("{ from = 2, to = 8000, every = 1 }", &["too many sizes", "at most 1024", "`by`"]),
        ("{ 2 = 8 }", &["does not begin with step 1"]),
        ("{ 1 = 8, x = 4 }", &["not a step", "\"x\""]),
        ("{ 1 = 8, 01 = 4 }", &["not a step", "\"01\""]),
        ("{ 1 = 8, 1_0 = 4 }", &["not a step", "\"1_0\""]),
        ("{ 1 = 8, 5 = 0 }", &["step 5 is not a whole number above zero", "found:  0"]),
    ];
    for (text, words) in cases {
        let told = Curriculum::parse(&batch(text), "c.toml").expect_err(text).to_string();
        for word in *words {
            assert!(told.contains(word), "{text}: no {word:?} in\n{told}");
        }
    }
}
