//! A ramp in a curriculum: how it is read, written, compared and refused.

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

#[test]
fn mistakes_in_ramps_are_named() {
    let cases: &[(&str, &[&str])] = &[
        ("{ from = { a = 1 } }", &["c.toml:33:7", "no `to`"]),
        ("{ from = { a = 1 }, to = 3 }", &["c.toml:33:", "`to`", "{ source = weight }"]),
        ("{ from = { a = 1 }, too = { a = 1 } }", &["c.toml:33:", "`too`", "did you mean `to`"]),
        ("{ from = { a = 1 }, to = {} }", &["c.toml:33:", "empty"]),
        ("{ from = { a = 1 }, to = { b = 0 } }", &["c.toml:33:36", "weight of b", "above zero"]),
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
