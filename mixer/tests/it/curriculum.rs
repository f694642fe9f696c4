//! The curriculum file: its meaning, its errors and their places, and what an edit changes.

use contract::{Class, Ratio};
use curriculum::{Amendment, Dtype, NewtonSchulzForm, OptimizerKind};
use mixer::{Curriculum, CurriculumDifference, DataPlan, Mix, MixWeights, SourceFacts};
use proptest::prelude::*;

pub(crate) const WHOLE: &str = r#"store = ["a/store", "b/store"]
seed = 11
dtype = "bf16"

[source.math]
max_epochs = 3

[model]
preset = "zaya1-nano"
hidden_size = 32
rope_theta = 1e4

[optimizer]
kind = "adamw"
lr = 1e-2
betas = [0.8, 0.9]
eps = 1e-9
momentum = 0.5
weight_decay = 0
clip = 2

[schedule]
warmup_steps = 3
decay_steps = 30
final_lr = 1e-3

[[phase]]
name = "short"
steps = 12
seq_len = 64
batch = 8
micro_batch = 2
mix = { web = 0.7, math = "3/10" }

[[phase]]
name = "long"
tokens = 2_000
seq_len = 128
batch = 6
mix = { web = 1, math = 1e-6 }
model = { rope_theta = 1e6 }
"#;

pub(crate) fn parse(text: &str) -> Curriculum {
    Curriculum::parse(text, "c.toml").unwrap()
}

pub(crate) fn edited(from: &str, to: &str) -> String {
    assert!(WHOLE.contains(from), "the text has no {from:?}");
    WHOLE.replacen(from, to, 1)
}

fn facts(web: u64, math: u64) -> Vec<SourceFacts> {
    [("web", web), ("math", math)]
        .map(|(name, tokens)| SourceFacts {
            name: name.to_owned(),
            tokens,
            documents: 9,
            unit: 1024,
            selection: None,
        })
        .to_vec()
}

#[test]
fn every_key_arrives() {
    let c = parse(WHOLE);
    assert_eq!(c.stores, ["a/store", "b/store"]);
    assert_eq!((c.seed, c.dtype), (11, Dtype::Bf16));
    assert_eq!((c.max_epochs("math"), c.max_epochs("web")), (3, 1));
    assert_eq!(c.model.0["preset"].as_str(), Some("zaya1-nano"));
    assert_eq!(c.model.0["hidden_size"], toml::Value::Integer(32));
    assert_eq!(c.model.0["rope_theta"], toml::Value::Float(1e4));
    assert_eq!(c.model_at(0), c.model);
    assert_eq!(c.model_at(1).0["rope_theta"], toml::Value::Float(1e6));
    assert_eq!(c.model_at(1).0["hidden_size"], toml::Value::Integer(32));
    assert_eq!((c.optimizer.kind, c.optimizer.lr), (OptimizerKind::AdamW, 1e-2));
    assert_eq!((c.optimizer.betas, c.optimizer.eps), ([0.8, 0.9], 1e-9));
    assert_eq!((c.optimizer.momentum, c.optimizer.weight_decay, c.optimizer.clip), (0.5, 0.0, 2.0));
    assert_eq!(
        (c.schedule.warmup_steps, c.schedule.decay_steps, c.schedule.final_lr),
        (3, 30, Some(1e-3))
    );
    assert_eq!(c.optimizer.newton_schulz, NewtonSchulzForm::Gram);
    let direct = parse(&edited("clip = 2", "newton_schulz = \"direct\"")).optimizer;
    assert_eq!(direct.newton_schulz, NewtonSchulzForm::Direct);
    let narrow = parse(&edited("clip = 2", "newton_schulz = \"bf16\"")).optimizer;
    assert_eq!(narrow.newton_schulz, NewtonSchulzForm::Bf16);
    let [short, long] = &c.phases[..] else { panic!("two phases") };
    assert_eq!(
        (short.name.as_str(), short.steps, short.seq_len, short.batch.first(), short.micro_batch),
        ("short", 12, 64, 8, 2)
    );
    let Mix::Constant(mix) = &short.mix else { panic!("a ramp") };
    assert_eq!(mix["web"], Ratio::new(7, 10));
    assert_eq!(short.mix.weights(), whole([3, 7]));
    // Whole steps of 128 x 6 tokens in 2,000.
    assert_eq!((long.steps, long.micro_batch), (2, 1));
    assert_eq!(long.mix.weights(), whole([1, 1_000_000]));
}

/// Constant weights.
pub(crate) fn whole<const N: usize>(weights: [u64; N]) -> Option<MixWeights> {
    Some(MixWeights::Constant(weights.to_vec()))
}

/// Every error names its line and what was found, and gives a hint.
#[test]
fn mistakes_are_named() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("seed = 11", "seed = -1", &["c.toml:2:", "seed", "-1"]),
        ("seed = 11", "seed = 1.5", &["c.toml:2:", "1.5"]),
        ("seed = 11", "sed = 11", &["c.toml:2:", "unknown key `sed`", "did you mean `seed`"]),
        ("dtype = \"bf16\"", "dtype = \"bf61\"", &["c.toml:3:", "bf61", "bf16"]),
        ("dtype = \"bf16\"", "dtype = 16", &["c.toml:3:", "16", "a string"]),
        ("max_epochs = 3", "max_epoch = 3", &["c.toml:6:", "max_epochs", "source.math"]),
        ("max_epochs = 3", "max_epochs = 0", &["c.toml:6:", "at least 1"]),
        ("kind = \"adamw\"", "kind = \"adam\"", &["c.toml:14:", "adam", "did you mean `adamw`"]),
        ("lr = 1e-2", "lr = nan", &["c.toml:15:", "nan"]),
        ("lr = 1e-2", "lr = -1", &["c.toml:15:", "-1"]),
        ("betas = [0.8, 0.9]", "betas = [0.8, 1.0]", &["c.toml:16:", "1.0", "below 1"]),
        ("betas = [0.8, 0.9]", "betas = 0.9", &["c.toml:16:", "length 2"]),
        ("betas = [0.8, 0.9]", "betas = [0.8, 0.9, 7.0]", &["c.toml:16:", "length 2"]),
        ("eps = 1e-9", "eps = 1e-46", &["c.toml:17:", "1e-46", "above 0, also in f32"]),
        ("clip = 2", "clip = inf", &["c.toml:20:", "inf"]),
        ("clip = 2", "clamp = 2", &["c.toml:20:", "clamp"]),
        ("warmup_steps = 3", "warm_up_steps = 3", &["c.toml:23:", "warmup_steps"]),
        ("final_lr = 1e-3\n", "", &["c.toml:22:", "final_lr"]),
        ("decay_steps = 30\n", "", &["c.toml:24:", "decay_steps"]),
        ("name = \"short\"", "name = \"long\"", &["c.toml:36:", "two phases", "long"]),
        ("name = \"short\"\n", "", &["c.toml:27:", "name"]),
        ("steps = 12", "steps = 0", &["c.toml:29:", "above zero"]),
        ("steps = 12", "steps = 12\ntokens = 5", &["c.toml:30:", "both"]),
        ("steps = 12\n", "", &["c.toml:27:", "steps"]),
        ("tokens = 2_000", "tokens = 767", &["c.toml:37:", "128 x 6"]),
        ("tokens = 2_000", "tokens = 9223372036854775807", &["c.toml:37:", "2^62"]),
        ("steps = 12", "steps = 9223372036854775807", &["c.toml:29:", "2^62"]),
        ("seq_len = 64", "seq_length = 64", &["c.toml:30:", "did you mean `seq_len`"]),
        ("seq_len = 64", "seq_len = 4294967296", &["c.toml:30:", "2^32"]),
        ("seq_len = 64", "seq_len = 0", &["c.toml:30:"]),
        ("batch = 8\n", "", &["c.toml:27:", "batch"]),
        ("micro_batch = 2", "micro_batch = 3", &["c.toml:32:", "micro_batch = 3, batch = 8"]),
        ("micro_batch = 2", "context_chunks = 3", &["c.toml:32:", "= 3, seq_len = 64"]),
        ("micro_batch = 2", "weight_shards = 0", &["c.toml:32:", "above zero"]),
        ("micro_batch = 2", "remainder = \"drop\"", &["c.toml:32:", "join", "defer"]),
        ("web = 0.7", "web = 0", &["c.toml:33:", "web", "above zero"]),
        ("web = 0.7", "web = -0.7", &["c.toml:33:", "-0.7", "above zero"]),
        ("web = 0.7", "web = \"-1/2\"", &["c.toml:33:", "above zero"]),
        ("web = 0.7", "web = nan", &["c.toml:33:", "nan"]),
        ("web = 0.7", "web = inf", &["c.toml:33:", "inf"]),
        ("web = 0.7", "web = \"1/0\"", &["c.toml:33:", "1/0"]),
        ("web = 0.7", "web = true", &["c.toml:33:", "true"]),
        ("web = 0.7", "web = [1]", &["c.toml:33:", "[1]"]),
        ("web = 0.7", "web = 1e-300", &["c.toml:33:", "1e-300"]),
        ("web = 0.7", "web = \"1/9223372036854775807\"", &["c.toml:33:", "too fine"]),
        ("mix = { web = 0.7, math = \"3/10\" }", "mix = {}", &["c.toml:33:", "empty"]),
        ("mix = { web = 0.7, math = \"3/10\" }", "mix = 3", &["c.toml:33:", "table"]),
        ("mix = { web = 0.7, math = \"3/10\" }\n", "", &["c.toml:27:", "mix"]),
        ("store = [\"a/store\", \"b/store\"]", "store = []", &["c.toml:1:", "store"]),
        ("store = [\"a/store\", \"b/store\"]\n", "", &["c.toml", "no `store`"]),
        ("[model]", "[model", &["c.toml:8:", "TOML"]),
        ("[model]", "[source]", &["c.toml:10:", "`hidden_size`", "a table"]),
        ("clip = 2", "newton_schulz = \"qr\"", &["c.toml:20:", "qr", "gram", "direct"]),
        ("[optimizer]", "[optimiser]", &["c.toml:13:", "did you mean `optimizer`"]),
        ("[[phase]]", "[phase]", &["c.toml", "TOML"]),
    ];
    for (from, to, words) in cases {
        let fault = Curriculum::parse(&edited(from, to), "c.toml").expect_err(to);
        let told = fault.to_string();
        assert_eq!(fault.class(), Class::Usage, "{told}");
        for word in *words {
            assert!(told.contains(word), "{from:?} -> {to:?}: no {word:?} in\n{told}");
        }
    }
    let bare = Curriculum::parse("store = \"s\"", "c.toml").unwrap_err();
    assert!(bare.to_string().contains("phase"));
}

/// Errors that need the sources to be found.
#[test]
fn mistakes_against_the_sources_are_named() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("web = 0.7", "wib = 0.7", &["c.toml:33:9", "wib", "did you mean `web`"]),
        ("[source.math]", "[source.maths]", &["c.toml:5:", "maths", "did you mean `math`"]),
        ("seq_len = 64", "seq_len = 100", &["c.toml:30:1", "seq_len 100", "1024"]),
        ("steps = 12", "steps = 100000", &["c.toml:", "max_epochs", "runs out at step"]),
    ];
    for (from, to, words) in cases {
        let curriculum = parse(&edited(from, to));
        let fault = DataPlan::new(&curriculum, &facts(10_000, 10_000)).expect_err(to);
        let told = fault.to_string();
        assert_eq!(fault.class(), Class::Usage, "{told}");
        for word in *words {
            assert!(told.contains(word), "{to}: no {word:?} in\n{told}");
        }
    }
    let whole = parse(WHOLE);
    assert!(DataPlan::new(&whole, &facts(10_000, 0)).unwrap_err().to_string().contains("no text"));
    let twice = [facts(10_000, 10_000), facts(1, 1)].concat();
    assert!(DataPlan::new(&whole, &twice).unwrap_err().to_string().contains("two stores"));
    DataPlan::new(&whole, &facts(10_000, 10_000)).unwrap();
}

#[test]
fn one_meaning_has_one_text() {
    let canonical = parse(WHOLE).canonical();
    assert!(!canonical.contains("newton_schulz"), "runs keep the digests from before the key");
    assert_eq!(parse(&canonical).canonical(), canonical, "{canonical}");
    let same = [
        ("web = 0.7, math = \"3/10\"", "math = 0.30, web = \"7/10\""),
        ("web = 0.7, math = \"3/10\"", "web = 7, math = 3"),
        ("web = 0.7, math = \"3/10\"", "web = +70e-2, math = 3E-1"),
        ("tokens = 2_000", "steps = 2"),
        ("lr = 1e-2", "lr = 0.01 # a comment"),
        ("clip = 2", "clip = 2.0"),
        ("seed = 11", "seed = 0xb"),
        (
            "[source.math]\nmax_epochs = 3\n",
            "source.math.max_epochs = 3\n[source.web]\nmax_epochs = 1\n",
        ),
        ("batch = 6", "batch = 6\nmicro_batch = 1\ncontext_chunks = 1\nweight_shards = 1"),
        ("batch = 6", "batch = 6\nremainder = \"join\""),
        ("rope_theta = 1e4", "rope_theta = 10_000.0"),
        ("clip = 2", "clip = 2\nnewton_schulz = \"gram\""),
    ];
    for (from, to) in same {
        assert_eq!(parse(&edited(from, to)).canonical(), canonical, "{to}");
    }
    // Tables in another order.
    let (head, schedule) = WHOLE.split_once("[schedule]").unwrap();
    let (schedule, phases) = schedule.split_once("[[phase]]").unwrap();
    let (head, optimizer) = head.split_once("[optimizer]").unwrap();
    let reordered =
        format!("{head}\n[schedule]{schedule}\n[[phase]]{phases}\n[optimizer]{optimizer}");
    assert_eq!(parse(&reordered).canonical(), canonical);
    let other = [
        ("web = 0.7", "web = 0.70001"),
        ("seed = 11", "seed = 12"),
        ("micro_batch = 2", "micro_batch = 4"),
        ("micro_batch = 2", "micro_batch = 2\ncontext_chunks = 4"),
        ("micro_batch = 2", "micro_batch = 2\nweight_shards = 2"),
        ("micro_batch = 2", "micro_batch = 2\nremainder = \"defer\""),
        ("rope_theta = 1e4", "rope_theta = 10_000"),
        ("eps = 1e-9", "eps = 1e-8"),
        ("clip = 2", "clip = 2\nnewton_schulz = \"direct\""),
        ("rope_theta = 1e6", "rope_theta = 1e7"),
        ("hidden_size = 32", "hidden_size = 64"),
        ("max_epochs = 3", "max_epochs = 4"),
        ("tokens = 2_000", "tokens = 3_000"),
        ("\"b/store\"", "\"c/store\""),
        ("dtype = \"bf16\"", "dtype = \"f32\""),
        ("decay_steps = 30", "decay_steps = 31"),
        ("clip = 2", "clip = 2\ngroup = [{ params = \"a\", weight_decay = 0 }]"),
    ];
    for (from, to) in other {
        assert_ne!(parse(&edited(from, to)).canonical(), canonical, "{to}");
    }
}

/// Appended to a curriculum: skip rules, a clip and amendments.
const MORE: &str = r#"
[skip_step]
sigma = 5

[auto_clip]
window = 64
percentile = 90

[[amendment]]
step = 5
mix = { web = 1, math = 1 }

[[amendment]]
step = 13
ban = { web = [7, 2], math = [1] }
store = "more"
digest = "abc"
"#;

#[test]
fn windows_and_amendments_arrive() {
    let c = parse(&(WHOLE.to_owned() + MORE));
    assert_eq!(c.skip_step.map(|skip| (skip.window, skip.sigma)), Some((128, 5.0)));
    assert_eq!(c.auto_clip.map(|clip| (clip.window, clip.percentile)), Some((64, 90)));
    assert!(c.amendments[1].ban["web"].iter().eq(&[2, 7]));
    let segments = c.segments();
    let told: Vec<_> = segments
        .iter()
        .map(|segment| (segment.phase, segment.spec.steps, segment.spec.mix.weights()))
        .collect();
    let (even, long) = (whole([1, 1]), whole([1, 1_000_000]));
    assert_eq!(told, [(0, 4, whole([3, 7])), (0, 8, even), (1, 2, long)]);
    assert_eq!(parse(&c.canonical()).canonical(), c.canonical());
    let same = MORE.replace("web = 1, math = 1", "math = 3.0, web = 3").replace("[7, 2]", "[2, 7]");
    assert_eq!(parse(&(WHOLE.to_owned() + &same)).canonical(), c.canonical());
    let changed = |from: &str, to: &str| {
        assert!(MORE.contains(from));
        let other = parse(&(WHOLE.to_owned() + &MORE.replacen(from, to, 1)));
        c.difference(&other).into_iter().map(|it| (it.key, it.first_step)).collect::<Vec<_>>()
    };
    let one = |key: &str, step: u64| vec![(key.to_owned(), step)];
    assert_eq!(changed("\"more\"", "\"moved\""), []);
    assert_eq!(changed("\"abc\"", "\"abd\""), one("amendment.2", 13));
    let moved = [one("amendment.1", 4), one("amendment.1", 5)].concat();
    assert_eq!(changed("step = 5\n", "step = 4\n"), moved);
    assert_eq!(changed("[7, 2]", "[7]"), one("amendment.2", 13));
    assert_eq!(changed("sigma = 5", "sigma = 6"), one("skip_step.sigma", 1));
    assert_eq!(changed("percentile = 90", "percentile = 91"), one("auto_clip.percentile", 1));
    let plain = parse(WHOLE).difference(&c);
    let keys: Vec<&str> = plain.iter().map(|it| it.key.as_str()).collect();
    let all = ["skip_step.window", "auto_clip.window", "amendment.1", "amendment.2"];
    assert!(all.iter().all(|key| keys.contains(key)));

    let mistakes: &[(&str, &str, &str)] = &[
        ("sigma = 5", "sigma = -5", "c.toml:44:1"),
        ("window = 64", "window = 3", "at least 4"),
        ("window = 64", "window = 65537", "65536"),
        ("percentile = 90", "percentile = 101", "1 to 100"),
        ("percentile = 90\n", "", "`percentile`"),
        ("step = 5\n", "step = 14\n", "a later one"),
        ("step = 13", "step = 15", "1 to 14"),
        ("step = 13", "step = 4", "a later one"),
        ("step = 13", "steps = 13", "`step`"),
        ("web = 1, math = 1", "web = 7, math = 3", "has already"),
        ("web = 1, math = 1", "web = 0", "above zero"),
        ("mix = { web = 1, math = 1 }\n", "", "something to change"),
        ("[7, 2]", "[-7]", "not negative"),
        ("[7, 2]", "[]", "does not name a document"),
        ("digest = \"abc\"\n", "", "`digest`"),
        ("store = \"more\"\n", "", "`store`"),
    ];
    for (from, to, word) in mistakes {
        let text = WHOLE.to_owned() + &MORE.replacen(from, to, 1);
        let told = Curriculum::parse(&text, "c.toml").expect_err(to).to_string();
        assert!(told.contains(word), "{from:?} -> {to:?}: no {word:?} in\n{told}");
    }
    let told = DataPlan::new(&c, &facts(10_000, 10_000)).map(|_| "planned");
    assert_eq!(told.unwrap(), "planned");
    let few = parse(&(WHOLE.to_owned() + &MORE.replace("[7, 2]", "[9]")));
    let told = DataPlan::new(&few, &facts(10_000, 10_000)).unwrap_err().to_string();
    assert!(told.contains("no document 9") && told.contains("c.toml:"), "{told}");
}

/// Amended numbers, appended to [`WHOLE`].
const NUMBERS: &str = r#"
[[amendment]]
step = 3
optimizer = { clip = 0.5, lr = 2e-3 }
skip = true

[[amendment]]
step = 13
schedule = { decay_steps = 50, final_lr = 1e-5, warmup_steps = 1 }
dtype = "f32"
"#;

#[test]
fn amended_numbers_hold_from_their_step_on() {
    let c = parse(&(WHOLE.to_owned() + NUMBERS));
    let plain = parse(WHOLE);
    assert_eq!(c.numbers_at(2), plain.numbers_at(2));
    let (third, last) = (c.numbers_at(3), c.numbers_at(14));
    assert_eq!((third.optimizer.lr, third.optimizer.clip), (2e-3, 0.5));
    assert_eq!(third.schedule, plain.schedule);
    assert_eq!(last.optimizer, third.optimizer, "a key that is not named stays");
    assert_eq!(last.schedule.final_lr, Some(1e-5));
    assert_eq!((last.schedule.decay_steps, last.schedule.warmup_steps), (50, 1));
    assert_eq!((third.dtype, last.dtype), (Dtype::Bf16, Dtype::F32));
    assert_eq!(parse(&c.canonical()).canonical(), c.canonical());
    assert_eq!(parse(&c.canonical()).amendments, c.amendments);
    let keys: Vec<_> = plain.difference(&c).into_iter().map(|it| (it.key, it.first_step)).collect();
    assert_eq!(keys, [("amendment.1".to_owned(), 3), ("amendment.2".to_owned(), 13)]);
    // Numbers change no text: the plan is the same without them.
    let plan =
        |of: &Curriculum| DataPlan::new(of, &facts(10_000, 10_000)).unwrap().digest_through(14);
    assert_eq!(plan(&c), plan(&plain));

    let mistakes: &[(&str, &str, &str)] = &[
        ("lr = 2e-3", "lr = -1", "out of range"),
        ("clip = 0.5", "klip = 0.5", "klip"),
        ("clip = 0.5", "kind = \"adamw\"", "kind"),
        ("decay_steps = 50", "decay_steps = 0", "never reached"),
        ("dtype = \"f32\"", "dtype = \"f16\"", "f16"),
        ("skip = true", "skip = true\n[[amendment]]\nstep = 3\nskip = true", "skipped already"),
        ("skip = true", "[[amendment]]\nstep = 4\noptimizer = { clip = 0.5 }", "has already"),
    ];
    for (from, to, word) in mistakes {
        let text = WHOLE.to_owned() + &NUMBERS.replacen(from, to, 1);
        let told = Curriculum::parse(&text, "c.toml").expect_err(to).to_string();
        assert!(told.contains(word) && told.contains("c.toml:"), "{to:?}: no {word:?} in\n{told}");
    }
}

#[test]
fn what_is_taken_in_makes_later_amendments_needless() {
    let mut c = parse(&(WHOLE.to_owned() + MORE + NUMBERS.split("\n\n").nth(1).unwrap()));
    assert_eq!(c.amendments.len(), 3);
    let ban = |documents: &[u64]| [("web".to_owned(), documents.iter().copied().collect())].into();
    let clip = curriculum::OptimizerChange { clip: Some(0.25), lr: None };
    let numbers = curriculum::NumbersChange { optimizer: clip, ..Default::default() };
    c.amend(vec![Amendment { step: 2, ban: ban(&[7]), numbers, ..Amendment::default() }]);
    let again = parse(&c.canonical());
    assert_eq!(again.amendments.iter().map(|one| one.step).collect::<Vec<_>>(), [2, 5, 13, 13]);
    assert!(again.amendments[2].ban["web"].iter().eq(&[2]), "7 is banned by then");
    assert_eq!(again.numbers_at(12).optimizer.clip, 0.25);
    assert!(!c.clone().drop_source("news", 3..21).unwrap());
    let mut short = c.clone();
    assert!(short.drop_source("math", 3..4).unwrap(), "of the segment alone that has these steps");
    let left: Vec<_> =
        parse(&short.canonical()).segments().iter().map(|it| it.spec.mix.sources().len()).collect();
    assert_eq!((left[..2].to_vec(), left.last()), (vec![2, 1], Some(&2)));
    assert!(c.drop_source("math", 3..21).unwrap());
    let again = parse(&c.canonical());
    let segments = again.segments();
    let told: Vec<_> =
        segments.iter().map(|it| (it.spec.steps, it.spec.mix.sources().len())).collect();
    assert_eq!(told, [(2, 2), (10, 1), (2, 1)], "one mix to the end of each phase");
    let alone = c.drop_source("web", 3..21).unwrap_err().to_string();
    assert!(alone.contains("only source"), "{alone}");
    // The same amendments, read from a file of their own.
    let base = parse(WHOLE);
    let read = base.read_amendments(NUMBERS, "a.toml").unwrap();
    assert_eq!(read, parse(&(WHOLE.to_owned() + NUMBERS)).amendments);
    let told = base.read_amendments("[[amendment]]\nstep = 99\nskip = true\n", "a.toml");
    assert!(told.unwrap_err().to_string().contains("a.toml:2"));
    assert!(base.read_amendments("", "a.toml").is_err());
}

#[test]
fn odd_names_survive_the_canonical_text() {
    let text = "store = \"s\"\n[source.\"a b\"]\nmax_epochs = 2\n[[phase]]\nname = \"q\\\"uote\\\\\\n\"\nsteps = 1\n\
                seq_len = 1\nbatch = 1\nmix = { \"a b\" = 1, \"x.y\" = 2, \"\u{e9}\" = 3 }\n";
    let (first, again) = (parse(text), parse(&parse(text).canonical()));
    assert_eq!(
        first.phases,
        again
            .phases
            .clone()
            .into_iter()
            .map(|mut phase| {
                phase.mix = first.phases[0].mix.clone();
                phase
            })
            .collect::<Vec<_>>()
    );
    assert_eq!(first.canonical(), again.canonical());
    assert_eq!(again.max_epochs("a b"), 2);
}

/// The cut of a micro-batch affects bits, so it has a digest. Uncut micro-batches keep the digest from before cuts
/// existed.
#[test]
fn the_cut_of_a_micro_batch_enters_the_plan_digest() {
    let digest = |to: &str| {
        let plan = DataPlan::new(&parse(&edited("batch = 6", to)), &facts(10_000, 10_000)).unwrap();
        [12, 13].map(|step| plan.digest_through(step))
    };
    let [before, plain] = digest("batch = 6");
    assert_eq!(digest("batch = 6\ncontext_chunks = 1\nweight_shards = 1"), [before, plain]);
    let mut seen = vec![plain];
    let cuts =
        ["context_chunks = 2", "context_chunks = 4", "weight_shards = 2", "weight_shards = 4"];
    for to in cuts.into_iter().chain(["remainder = \"defer\""]) {
        let [early, late] = digest(&format!("batch = 6\n{to}"));
        assert_eq!(early, before, "{to}");
        assert!(!seen.contains(&late), "{to}");
        seen.push(late);
    }
}

/// Model keys pass through uninterpreted: only the trainer knows them.
#[test]
fn the_models_table_passes_through() {
    let odd = edited("rope_theta = 1e4", "a.\"b c\" = [1, 2.5, [true]]\nd = { e = \"f\", g = {} }");
    let (first, again) = (parse(&odd), parse(&parse(&odd).canonical()));
    assert_eq!(first.model, again.model);
    assert_eq!(first.canonical(), again.canonical());
    assert_eq!(first.model.0["a"]["b c"][2][0].as_bool(), Some(true));
    assert!(first.place("model.d").starts_with("c.toml:12:"), "{}", first.place("model.d"));
    let mut rest = parse(WHOLE);
    let taken = rest.take_models();
    assert_eq!((taken.len(), &taken[0]), (3, &parse(WHOLE).model));
    assert_eq!(taken[2].0["rope_theta"].as_float(), Some(1e6));
    assert!(!rest.canonical().contains("rope_theta"));
}

fn change(from: &str, to: &str) -> Vec<(String, u64)> {
    let key = |difference: CurriculumDifference| (difference.key, difference.first_step);
    parse(WHOLE).difference(&parse(&edited(from, to))).into_iter().map(key).collect()
}

#[test]
fn an_edit_matters_from_a_known_step() {
    let one = |key: &str, step: u64| vec![(key.to_owned(), step)];
    assert_eq!(change("seed = 11", "seed = 11"), []);
    assert_eq!(change("name = \"short\"", "name = \"brief\""), []);
    assert_eq!(change("max_epochs = 3", "max_epochs = 30"), []);
    assert_eq!(change("\"b/store\"", "\"moved/store\""), []);
    assert_eq!(change("web = 0.7, math = \"3/10\"", "web = 7, math = 3"), []);
    assert_eq!(change("seed = 11", "seed = 12"), one("seed", 1));
    assert_eq!(change("lr = 1e-2", "lr = 2e-2"), one("optimizer.lr", 1));
    assert_eq!(
        change("clip = 2", "clip = 2\nnewton_schulz = \"direct\""),
        one("optimizer.newton_schulz", 1)
    );
    assert_eq!(change("hidden_size = 32\n", ""), one("model.hidden_size", 1));
    assert_eq!(change("warmup_steps = 3", "warmup_steps = 4"), one("schedule.warmup_steps", 1));
    assert_eq!(change("decay_steps = 30", "decay_steps = 31"), one("schedule.decay_steps", 3));
    assert_eq!(change("final_lr = 1e-3", "final_lr = 2e-3"), one("schedule.final_lr", 3));
    assert_eq!(
        change("rope_theta = 1e6", "rope_theta = 2e6"),
        one("phase.long.model.rope_theta", 13)
    );
    assert_eq!(change("seq_len = 64", "seq_len = 32"), one("phase.short.seq_len", 1));
    assert_eq!(
        change("batch = 6", "batch = 6\ncontext_chunks = 8"),
        one("phase.long.context_chunks", 13)
    );
    assert_eq!(
        change("batch = 6", "batch = 6\nweight_shards = 3"),
        one("phase.long.weight_shards", 13)
    );
    assert_eq!(
        change("batch = 6", "batch = 6\nremainder = \"defer\""),
        one("phase.long.remainder", 13)
    );
    assert_eq!(change("steps = 12", "steps = 15"), one("phase.short.steps", 13));
    assert_eq!(change("steps = 12", "steps = 10"), one("phase.short.steps", 11));
    assert_eq!(change("tokens = 2_000", "steps = 5"), one("phase.long.steps", 15));
    assert_eq!(
        change("batch = 6", "batch = 5"),
        [("phase.long.batch".to_owned(), 13), ("phase.long.steps".to_owned(), 15)]
    );
    assert_eq!(change("web = 1,", "web = 2,"), one("phase.long.mix.web", 13));
    assert_eq!(change("web = 1,", "code = 1, web = 1,"), one("phase.long.mix.code", 13));
    let longer = format!(
        "{WHOLE}\n[[phase]]\nname = \"more\"\nsteps = 1\nseq_len = 64\nbatch = 1\nmix = {{ web = 1 }}\n"
    );
    let (short, long) = (parse(WHOLE), parse(&longer));
    for (a, b) in [(&short, &long), (&long, &short)] {
        let found: Vec<_> = a.difference(b).into_iter().map(|d| (d.key, d.first_step)).collect();
        assert_eq!(found, one("phase.more", 15));
    }
    let told = parse(WHOLE).difference(&parse(&edited("lr = 1e-2", "lr = 2e-2")))[0].to_string();
    assert!(told.contains("optimizer.lr") && told.contains("step 1"), "{told}");
}

proptest! {
    /// No text makes the parser panic, and all accepted text has a canonical text of the same meaning.
    #[test]
    fn no_text_breaks_the_parser(cut in 0usize..WHOLE.len(), keep in 0usize..40, noise in "[\\PC\n]{0,6}") {
        let mut text = WHOLE.to_owned();
        text.replace_range(cut..(cut + keep).min(WHOLE.len()), &noise);
        if let Ok(curriculum) = Curriculum::parse(&text, "c.toml") {
            let canonical = curriculum.canonical();
            let again = Curriculum::parse(&canonical, "c.toml").unwrap();
            prop_assert_eq!(again.canonical(), canonical);
            prop_assert_eq!(curriculum.difference(&again), vec![]);
        }
    }
}

/// Initial weights are part of the meaning; the path to them is not.
#[test]
fn a_start_is_named_by_a_path_that_an_edit_may_move() {
    let with = |line: &str| Curriculum::parse(&format!("{line}\n{WHOLE}"), "c.toml");
    let (none, here) = (with("").unwrap(), with("init_from = \"a/start\"").unwrap());
    assert_eq!((none.init_from.as_deref(), here.init_from.as_deref()), (None, Some("a/start")));
    assert!(here.place("init_from").starts_with("c.toml:1"), "{}", here.place("init_from"));
    let again = Curriculum::parse(&here.canonical(), "again.toml").unwrap();
    assert_eq!(again.canonical(), here.canonical());
    assert_eq!(here.canonical().replace("init_from = \"a/start\"\n", ""), none.canonical());
    assert!(here.difference(&with("init_from = \"b/start\"").unwrap()).is_empty());
    for wrong in ["init_from = \"\"", "init_from = 3", "init_form = \"a\""] {
        assert_eq!(with(wrong).unwrap_err().class(), Class::Usage, "{wrong}");
    }
}
