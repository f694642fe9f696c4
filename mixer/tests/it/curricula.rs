//! The shipped recipe: it plans, later phases extend earlier runs, and its numbers match the published ones.

use std::path::Path;

use mixer::{Curriculum, DataPlan, Mix, SourceFacts, store_stub};

fn plan(name: &str) -> (Curriculum, DataPlan) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../curricula");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let curriculum = Curriculum::parse(&read(name), name).unwrap();
    let facts = curriculum
        .stores
        .iter()
        .flat_map(|store| store_stub(&read(store), store).unwrap().unwrap());
    let plan = DataPlan::new(&curriculum, &facts.collect::<Vec<_>>()).unwrap();
    (curriculum, plan)
}

#[test]
fn the_recipe_is_one_run_that_grows() {
    let ((first, a), (second, b), (third, c)) =
        (plan("phase1.toml"), plan("phase2.toml"), plan("phase3.toml"));
    for step in [1, 1000, a.steps()] {
        assert_eq!(a.digest_through(step), b.digest_through(step));
        assert_eq!(a.digest_through(step), c.digest_through(step));
    }
    assert_eq!(b.digest_through(b.steps()), c.digest_through(b.steps()));
    assert_ne!(a.digest_through(a.steps()), b.digest_through(b.steps()));
    for (old, new, steps) in
        [(&first, &second, a.steps()), (&second, &third, b.steps()), (&first, &third, a.steps())]
    {
        for difference in old.difference(new) {
            assert!(difference.first_step > steps, "{difference}");
        }
    }
}

/// The numbers in the papers: tokens, lengths, tokens per step, learning rates, the midtraining mix.
#[test]
fn the_recipe_says_what_is_published() {
    let (curriculum, plan) = plan("phase3.toml");
    let published =
        [(8_000_000_000_000u64, 4096), (4_000_000_000_000, 4096), (1_200_000_000_000, 32_768)];
    assert_eq!(plan.phases().len(), published.len());
    for (phase, (tokens, seq_len)) in plan.phases().iter().zip(published) {
        let step = phase.batch * u64::from(phase.seq_len);
        assert_eq!((step, phase.seq_len), (16_777_216, seq_len));
        assert!((tokens - step + 1..=tokens).contains(&(phase.steps * step)), "{}", phase.name);
    }
    assert_eq!(
        curriculum.schedule.warmup_steps + curriculum.schedule.decay_steps,
        plan.phases()[0].steps
    );
    assert_eq!((curriculum.optimizer.lr, curriculum.schedule.final_lr), (6e-4, Some(2e-4)));
    let theta = |phase| curriculum.model_at(phase).0["rope_theta"].as_float();
    assert_eq!([theta(0), theta(1), theta(2)], [Some(1e4), Some(1e4), Some(1e6)]);
    let Mix::Constant(mix) = &curriculum.phases[2].mix else { panic!("a ramp") };
    let share = |name: &str| mix[name].num() as f64 / mix[name].den() as f64;
    assert_eq!(share("reasoning-32k"), 86.1);
    assert!((share("web") + share("multilingual") - 5.7).abs() < 1e-9);
    assert_eq!(
        [share("long"), share("code"), share("math"), share("instruction")],
        [0.8, 3.0, 3.0, 1.4]
    );
    assert!((mix.keys().map(|name| share(name)).sum::<f64>() - 100.0).abs() < 1e-9);
}

#[test]
fn a_stub_stands_in_for_a_store() {
    let text = "[[source]]\nname = \"web\"\ntokens = 9_000_000_000_000\ndocuments = 10\n\n\
                [[source]]\nname = \"code\"\ntokens = 5\ndocuments = 1\nunit = 64\n";
    let found = store_stub(text, "d.toml").unwrap().unwrap();
    assert_eq!(found[0].name, "web");
    assert_eq!(
        (found[0].tokens, found[0].documents, found[0].unit),
        (9_000_000_000_000, 10, 131_072)
    );
    assert_eq!((found[1].tokens, found[1].unit), (5, 64));
    assert_eq!(store_stub("tokenizer = \"t\"", "d.toml").unwrap(), None);
    for (from, to, word) in [
        ("tokens = 5", "token = 5", "d.toml:8:1"),
        ("tokens = 5\n", "", "d.toml:6:1"),
        ("\"code\"", "\"web\"", "two sources"),
        ("unit = 64", "unit = 0", "unit 0"),
        ("tokens = 5", "files = [\"x\"]", "name, tokens, documents, unit"),
    ] {
        let told = store_stub(&text.replacen(from, to, 1), "d.toml").unwrap_err().to_string();
        assert!(told.contains(word), "{told}");
    }
}

/// Facts of a source; `selection` marks a bucket of another one.
fn facts(name: &str, tokens: u64) -> SourceFacts {
    SourceFacts { name: name.to_owned(), tokens, documents: 1_000, unit: 131_072, selection: None }
}

/// The curriculum of a block of the cookbook: keys of a phase or whole tables, and what the block leaves out.
fn recipe(block: &str) -> toml::Table {
    let mut found: toml::Table = toml::from_str(block).unwrap();
    let is_whole = block.lines().any(|line| line.starts_with('['));
    let phase = if is_whole { toml::Table::new() } else { std::mem::take(&mut found) };
    let phases = found.remove("phase").unwrap_or_else(|| vec![phase].into());
    let mixed = found.get("source").and_then(|sources| sources.as_table());
    let mixed: toml::Table = match mixed {
        Some(sources) => sources.keys().map(|name| (name.clone(), 1.into())).collect(),
        None => toml::from_str("web = 1\ncode = 1").unwrap(),
    };
    let complete = |(number, phase): (usize, &toml::Value)| {
        let mut whole: toml::Table =
            toml::from_str("steps = 4000\nseq_len = 512\nbatch = 8").unwrap();
        whole.insert("name".to_owned(), format!("phase {number}").into());
        whole.insert("mix".to_owned(), mixed.clone().into());
        whole.extend(phase.as_table().unwrap().clone());
        toml::Value::from(whole)
    };
    let phases: Vec<_> = phases.as_array().unwrap().iter().enumerate().map(complete).collect();
    // A schedule of a phase follows one that begins with the run.
    let before = complete((phases.len(), &toml::Table::new().into()));
    let first = phases[0].get("schedule").map(|_| before);
    found.insert("phase".to_owned(), first.into_iter().chain(phases).collect::<Vec<_>>().into());
    found.entry("store").or_insert_with(|| "store".into());
    found
}

/// Every block of the cookbook is a part of a curriculum that plans.
#[test]
fn every_recipe_of_the_cookbook_plans() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../curricula");
    let page = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let blocks: Vec<&str> =
        page.split("```toml\n").skip(1).map(|block| block.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 12, "{}", blocks.len());
    let mut planned = 0;
    for block in blocks {
        if block.starts_with("[[source]]") {
            assert_eq!(store_stub(block, "stub.toml").unwrap().unwrap().len(), 1);
            continue;
        }
        let text = toml::to_string(&recipe(block)).unwrap();
        let curriculum = Curriculum::parse(&text, "recipe.toml")
            .unwrap_or_else(|fault| panic!("{fault} in\n{text}"));
        assert_eq!(
            Curriculum::parse(&curriculum.canonical(), "c").unwrap().canonical(),
            curriculum.canonical()
        );
        // Packs and special tokens need a store.
        if block.contains("packing") || block.contains("fim") {
            continue;
        }
        let names = ["web", "code", "math", "articles", "notes", "instruction"].map(str::to_owned);
        let buckets = (0..4).map(|number| format!("web/{number}"));
        let all: Vec<_> =
            names.into_iter().chain(buckets).map(|name| facts(&name, 1 << 40)).collect();
        let plan = DataPlan::new(&curriculum, &all);
        planned += 1;
        assert!(plan.unwrap_or_else(|fault| panic!("{fault} in\n{text}")).steps() >= 40);
    }
    assert!(planned >= 10, "{planned}");
}
