//! Sources that are cut into buckets: their keys, how a mix is dealt over them, and what an edit changes.

use contract::{Class, Ratio};
use curriculum::{BucketCurve, PowerCurve};
use mixer::{Curriculum, DataPlan, SourceFacts};
use proptest::prelude::*;

use crate::curriculum::parse;

const WHOLE: &str = r#"store = "store"

[source.web]
buckets = { column = "meta.q", edges = [0.2, 0.5], none = "unknown" }
curve = { power = 2, cap = 3, drop = 0.25, tokens = 6_000 }

[source.code]
max_epochs = 9
buckets = { column = "kind", values = ["test", "lib"], names = ["t", "l"], other = "rest" }
curve = { weights = [1, "1/2"] }

[[phase]]
name = "a"
steps = 40
seq_len = 16
batch = 10
mix = { web = 7, code = 3, "web/unknown" = 1 }
"#;

fn facts(sizes: &[(&str, u64)]) -> Vec<SourceFacts> {
    let fact = |(name, tokens): &(&str, u64)| SourceFacts {
        name: (*name).to_owned(),
        tokens: *tokens,
        documents: 9,
        unit: 64,
        selection: None,
    };
    sizes.iter().map(fact).collect()
}

fn all() -> Vec<SourceFacts> {
    facts(&[
        ("web/0", 2_000),
        ("web/1", 1_500),
        ("web/2", 1_200),
        ("web/unknown", 700),
        ("code/t", 1_700),
        ("code/l", 900),
        ("code/rest", 500),
    ])
}

#[test]
fn every_key_arrives() {
    let whole = parse(WHOLE);
    let web = whole.sources["web"].buckets.as_ref().unwrap();
    assert_eq!(web.all().collect::<Vec<_>>(), ["0", "1", "2", "unknown"]);
    let curve = PowerCurve { power: 2, cap: 3, drop: Ratio::new(1, 4), tokens: 6_000 };
    assert_eq!(web.curve, BucketCurve::Power(curve));
    assert_eq!((whole.max_epochs("web/2"), whole.max_epochs("code/t")), (3, 9));
    let of = |value| web.of(value);
    assert_eq!(
        [of(Some("-1")), of(Some("0.2")), of(Some("7e3"))],
        [Ok(Some(0)), Ok(Some(1)), Ok(Some(2))]
    );
    assert_eq!((of(None), of(Some("good"))), (Ok(Some(3)), Err("not a number")));
    let code = whole.sources["code"].buckets.as_ref().unwrap();
    assert_eq!(code.all().collect::<Vec<_>>(), ["t", "l", "rest"]);
    assert_eq!(
        (code.of(Some("lib")), code.of(Some("doc")), code.of(None)),
        (Ok(Some(1)), Ok(Some(2)), Ok(None))
    );
    let text = whole.canonical();
    let again = parse(&text);
    assert_eq!(again.canonical(), text);
    assert_eq!(again.sources, whole.sources);
}

#[test]
fn wrong_keys_are_refused_with_their_place() {
    let cases = [
        ("edges = [0.2, 0.5]", "edges = [0.5, 0.5]", "c.toml:4", "ascending numbers"),
        ("edges = [0.2, 0.5]", "edges = []", "c.toml:4", "ascending numbers"),
        ("edges = [0.2, 0.5]", "edges = [0.2, 9007199254740993]", "c.toml:4", "below 2^53"),
        ("edges = [0.2, 0.5], ", "", "c.toml:4", "`edges` for numbers, or `values`"),
        ("none = \"unknown\"", "none = \"1\"", "c.toml:4", "a name for each bucket"),
        ("none = \"unknown\"", "other = \"1\"", "c.toml:4", "only asked for with `values`"),
        ("none = \"unknown\"", "names = [\"a\"]", "c.toml:4", "3 names"),
        ("[\"test\", \"lib\"]", "[\"lib\", \"lib\"]", "c.toml:9", "each value once"),
        ("power = 2", "power = 17", "c.toml:5", "0 to 16"),
        ("cap = 3", "cap = 0", "c.toml:5", "1 to 2^20"),
        ("drop = 0.25", "drop = 1", "c.toml:5", "from 0 to below 1"),
        ("power = 2, ", "", "c.toml:5", "only asked for with `power`"),
        ("weights = [1, \"1/2\"]", "weights = [0, 0]", "c.toml:10", "2, in the order"),
        ("weights = [1, \"1/2\"]", "weights = [1, -1]", "c.toml:10", "at least 0"),
        (
            "weights = [1, \"1/2\"]",
            "power = 1, weights = [1, 1]",
            "c.toml:10",
            "`weights`, or `power`",
        ),
        (
            "curve = { power",
            "max_epochs = 2\ncurve = { power",
            "c.toml:5",
            "leave `max_epochs` out",
        ),
        ("buckets = { column = \"kind\"", "#", "c.toml:10", "only asked for with `buckets`"),
        ("column = \"kind\"", "colunm = \"kind\"", "c.toml:9", "column"),
    ];
    for (from, to, place, wanted) in cases {
        assert!(WHOLE.contains(from), "{from}");
        let fault = Curriculum::parse(&WHOLE.replacen(from, to, 1), "c.toml").unwrap_err();
        let shown = fault.to_string();
        assert!(fault.class() == Class::Usage && shown.starts_with(place), "{to}: {shown}");
        assert!(shown.contains(wanted), "{to}: {shown}");
    }
}

#[test]
fn a_mix_is_dealt_over_buckets() {
    let plan = DataPlan::new(&parse(WHOLE), &all()).unwrap();
    let phase = &plan.phases()[0];
    let share = |name: &str| {
        let of = |part: &mixer::SourceUse| plan.sources()[part.source].name == name;
        phase.uses.iter().position(of).map_or(0.0, |entry| phase.mixing.share(entry, 0))
    };
    // By hand: the areas of ranks 0.25 to 1 of 4,700 tokens; the best bucket is at its cap, 3 x 1,200 of 6,000.
    let area = |rank: f64| (rank / 4_700.0 - 0.25).max(0.0).powi(3);
    let rest = [area(2_000.0), area(3_500.0) - area(2_000.0)];
    let left = 2_400.0 / (rest[0] + rest[1]);
    let near = |name: &str, wanted: f64| {
        assert!((share(name) - wanted).abs() < 1e-6, "{name}: {} for {wanted}", share(name));
    };
    near("web/2", 7.0 / 11.0 * 0.6);
    near("web/0", 7.0 / 11.0 * left * rest[0] / 6_000.0);
    near("web/1", 7.0 / 11.0 * left * rest[1] / 6_000.0);
    near("web/unknown", 1.0 / 11.0);
    near("code/t", 2.0 / 11.0);
    near("code/l", 1.0 / 11.0);
    near("code/rest", 0.0);
    // Without a curve each bucket is read as often, also one that the mix names as well.
    let even = WHOLE
        .replace("curve = { power = 2, cap = 3, drop = 0.25, tokens = 6_000 }", "max_epochs = 2");
    let plan = DataPlan::new(&parse(&even), &all()).unwrap();
    let tokens = plan.phases()[0].uses.iter().map(|part| (part.source, part.samples));
    let tokens: Vec<u64> =
        tokens.filter(|(source, _)| *source < 3).map(|(_, samples)| samples * 16).collect();
    for (tokens, size) in tokens.iter().zip([2_000, 1_500, 1_200]) {
        let wanted = 6400 * 7 / 11 * size / 5_400;
        assert!(tokens.abs_diff(wanted) <= 2 * 16, "{tokens} of {size}, not {wanted}");
    }
}

#[test]
fn what_cannot_be_dealt_is_refused() {
    let refused = |from: &str, to: &str, facts: &[SourceFacts]| {
        assert!(WHOLE.contains(from), "{from}");
        let fault = DataPlan::new(&parse(&WHOLE.replacen(from, to, 1)), facts).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        fault.to_string()
    };
    let shown = refused(", tokens = 6_000", "", &all());
    assert!(shown.starts_with("c.toml:5:1: the curve is not solved"), "{shown}");
    // Of 400 sequences of 16 tokens, 7 of 11.
    assert!(shown.contains("tokens = 4080, which this run takes"), "{shown}");
    let shown = refused("tokens = 6_000", "tokens = 14_101", &all());
    assert!(
        shown.contains("cannot give so many tokens") && shown.contains("at most 14100"),
        "{shown}"
    );
    let shown = refused("steps = 40", "steps = 100", &all());
    assert!(shown.starts_with("c.toml:5:1: source \"web/2\" runs out"), "{shown}");
    assert!(shown.contains("the `cap` of its curve") && shown.contains("set `tokens`"), "{shown}");
    let mut bare = all();
    bare[5].tokens = 0;
    let shown = refused("steps", "steps", &bare);
    assert!(shown.starts_with("c.toml:10:1: bucket \"l\" has no text"), "{shown}");
    let shown = refused("steps", "steps", &all()[1..]);
    assert!(shown.contains("no store has a source \"web/0\""), "{shown}");
    let shown = refused("steps", "steps", &facts(&[("web", 9_000), ("code", 9_000)]));
    assert!(
        shown.contains("a [[source]] for each bucket, such as \"web/0\"")
            || shown.contains("code/t"),
        "{shown}"
    );
    let shown = refused("\"web/unknown\" = 1", "\"web/3\" = 1", &all());
    assert!(shown.contains("no store has a source \"web/3\""), "{shown}");
}

#[test]
fn an_edit_of_buckets_matters_from_the_first_step_that_has_one() {
    let later = format!("{WHOLE}\n[[phase]]\nname = \"b\"\nsteps = 5\nseq_len = 16\nbatch = 10\nmix = {{ \"code/rest\" = 1 }}\n")
        .replace("code = 3, ", "");
    let one = parse(&later);
    let edited = |from: &str, to: &str| {
        let found = one.difference(&parse(&later.replacen(from, to, 1)));
        found.into_iter().map(|it| (it.key, it.first_step)).collect::<Vec<_>>()
    };
    assert_eq!(edited("0.5]", "0.6]"), [("source.web.buckets".to_owned(), 1)]);
    assert_eq!(edited("cap = 3", "cap = 4"), [("source.web.curve".to_owned(), 1)]);
    assert_eq!(edited("\"test\"", "\"tests\""), [("source.code.buckets".to_owned(), 41)]);
    // A table of one bucket, whose source the mix names.
    let packed = "[source.\"web/0\"]\npacking = \"best-fit\"\nlengths = { 16 = 1 }\n\n[[phase]]";
    assert_eq!(edited("[[phase]]", packed), [("source.web/0.packing".to_owned(), 1)]);
}

/// A table of one bucket takes nothing from what its source says.
#[test]
fn a_bucket_may_have_a_table_of_its_own() {
    let with = |table: &str| WHOLE.replacen("[[phase]]", &format!("{table}\n[[phase]]"), 1);
    let packed = parse(&with("[source.\"web/2\"]\npacking = \"best-fit\"\nlengths = { 16 = 1 }\n"));
    assert_eq!((packed.max_epochs("web/2"), packed.max_epochs("code/t")), (3, 9));
    let limited =
        |epochs: u64| parse(&with(&format!("[source.\"code/t\"]\nmax_epochs = {epochs}\n")));
    assert_eq!((limited(1).max_epochs("code/t"), limited(1).max_epochs("code/l")), (1, 9));
    let canonical = limited(1).canonical();
    assert_eq!(parse(&canonical).max_epochs("code/t"), 1, "{canonical}");
    let few = {
        let mut few = all();
        few[4].tokens = 64;
        few
    };
    let shown = DataPlan::new(&limited(1), &few).unwrap_err().to_string();
    assert!(shown.contains("under [source.code/t]") && shown.contains("c.toml:13"), "{shown}");
    let again = with("[source.\"web/0\"]\nbuckets = { column = \"meta.q\", edges = [0.1] }\n");
    let shown = Curriculum::parse(&again, "c.toml").unwrap_err().to_string();
    assert!(shown.contains("\"web/0\" is a bucket of \"web\" already"), "{shown}");
}

/// The rounding that a curve is allowed belongs to its mix, however often the batch changes: 620 sequences each, of
/// which the best bucket gets 11 more than its cap.
#[test]
fn a_ramp_of_the_batch_lends_a_curve_no_more() {
    for (steps, batch) in [(62, "10"), (50, "{ from = 1, to = 20, every = 2, by = 1 }")] {
        let text = WHOLE.replace("batch = 10", &format!("batch = {batch}"));
        let curriculum = parse(&text.replace("steps = 40", &format!("steps = {steps}")));
        assert_eq!(curriculum.phases[0].samples(), 620);
        let shown = DataPlan::new(&curriculum, &all()).unwrap_err().to_string();
        assert!(shown.contains("the `cap` of its curve"), "{shown}");
    }
}

proptest! {
    /// A run that takes what its curve is solved for is never refused by the rounding of its mix, and no bucket is read
    /// more often than that rounding can add. A later phase changes no step before it.
    #[test]
    fn a_run_of_the_solved_tokens_fits(
        sizes in prop::collection::vec(1u64..4_000, 1..6), power in 0u32..4, cap in 1u64..5, part in 1u64..=100,
        weight in 1u64..5, ramp: bool,
    ) {
        let web: u64 = sizes.iter().sum();
        let edges: Vec<String> = (1..sizes.len()).map(|edge| edge.to_string()).collect();
        prop_assume!(sizes.len() > 1);
        let mix = if ramp {
            format!("{{ from = {{ web = {weight}, code = 1 }}, to = {{ web = 1, code = 2 }} }}")
        } else {
            format!("{{ web = {weight}, code = 3 }}")
        };
        let text = |steps: u64, tokens: u64, more: &str| format!(
            "store = \"s\"\n[source.code]\nmax_epochs = 1000000\n[source.web]\n\
             buckets = {{ column = \"q\", edges = [{}] }}\n\
             curve = {{ power = {power}, cap = {cap}, tokens = {tokens} }}\n\
             [[phase]]\nname = \"a\"\nsteps = {steps}\nseq_len = 16\nbatch = 4\nmix = {mix}\n{more}", edges.join(", ")
        );
        let mut facts: Vec<_> = (0..).zip(&sizes).map(|(at, size)| (format!("web/{at}"), *size)).collect();
        facts.push(("code".to_owned(), 900));
        let facts: Vec<_> = facts.iter().flat_map(|(name, size)| self::facts(&[(name, *size)])).collect();
        // As many steps as leave the source within the curve, whose tokens the planner says.
        let steps = (web * cap * part / 100 / 64).max(1);
        let shown = DataPlan::new(&parse(&text(steps, 0, "")), &facts).unwrap_err().to_string();
        let tokens = shown.split("tokens = ").nth(1).unwrap().split(',').next().unwrap().parse::<u64>().unwrap();
        prop_assume!(tokens > 0 && tokens <= cap * web);
        let plan = DataPlan::new(&parse(&text(steps, tokens, "")), &facts).unwrap();
        for (source, size) in sizes.iter().enumerate() {
            let taken = plan.tokens_needed(source);
            prop_assert!(taken <= cap * size + 16 * 5, "{} of {}", taken, size);
        }
        let later = "[[phase]]\nname = \"b\"\nsteps = 9\nseq_len = 16\nbatch = 4\nmix = { code = 1 }\n";
        let longer = DataPlan::new(&parse(&text(steps, tokens, later)), &facts).unwrap();
        prop_assert_eq!(longer.digest_through(steps), plan.digest_through(steps));
    }
}
