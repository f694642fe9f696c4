//! One curriculum with every feature: ramps of mix, batch and length, buckets, packs, a mix that reacts, amendments,
//! bans, objectives. The naive program sees none of the closed forms: buckets are sources to it, windows amendments.

use std::sync::Arc;

use mixer::{PackTable, PackTables};

use super::packed::Lists;
use super::*;

/// The sources of the plan, not in the order of their names.
const SOURCES: [&str; 5] = ["math", "web/0", "code", "web/1", "web/2"];

/// Where the last phase begins, whose mix reacts.
const REACTS: u64 = 101;

/// The curriculum. `web` names the mix of that source's text: the source itself, or its buckets; `mix` is the last
/// phase's.
fn text(seed: u64, web: impl Fn(u64) -> String, mix: &str) -> String {
    let sources = match web(1).contains('/') {
        true => "[source.\"web/1\"]\nmax_epochs = 99\n[source.\"web/2\"]\nmax_epochs = 99\n",
        false => {
            "[source.web]\nmax_epochs = 99\nbuckets = { column = \"quality\", edges = [0.5, 0.8] }\n\
             curve = { weights = [0, 1, 3] }\n"
        }
    };
    format!(
        "store = \"s\"\nseed = {seed}\n{sources}\
         [source.math]\nmax_epochs = 99\npacking = \"best-fit\"\nlengths = {{ 6 = 1, 12 = 2 }}\n\
         loss_weight = \"3/2\"\n\
         [source.code]\nmax_epochs = 99\nfim = {{ rate = 0.5, prefix = 1, middle = 2, suffix = 3 }}\n\
         mask = {{ every = 4 }}\n\
         [[phase]]\nname = \"warm\"\nsteps = 40\nseq_len = 6\nmicro_batch = 2\n\
         batch = {{ from = 2, to = 8, every = 9, by = 2 }}\nmix = {{ {}, code = 3, math = 2 }}\n\
         [[phase]]\nname = \"anneal\"\nsteps = 60\nseq_len = 12\nbatch = 4\nremainder = \"defer\"\n\
         mix = {{ from = {{ {}, code = 1 }}, to = {{ code = 1, math = 3 }}, curve = \"cosine\" }}\n\
         [[phase]]\nname = \"react\"\nsteps = 50\nseq_len = 6\nmicro_batch = 2\nbatch = {{ 1 = 4, 18 = 6 }}\n\
         mix = {mix}\n\
         [[amendment]]\nstep = 23\nmix = {{ {}, code = 1 }}\nban = {{ code = [2, 3] }}\n\
         [[amendment]]\nstep = 71\nban = {{ math = [1], code = [0] }}\n",
        web(5),
        web(1),
        web(2)
    )
}

/// Tokens of a document.
const DOCUMENT: u64 = 7;

fn facts(tokens: &[u64]) -> Vec<SourceFacts> {
    let fact = |(name, tokens): (&str, &u64)| SourceFacts {
        name: name.to_owned(),
        tokens: *tokens,
        documents: tokens.div_ceil(DOCUMENT),
        unit: 12,
        selection: None,
    };
    SOURCES.into_iter().zip(tokens).map(fact).collect()
}

fn placed(mut plan: DataPlan, facts: &[SourceFacts]) -> DataPlan {
    let range = |name: &str, document: &u64| {
        let tokens = facts.iter().find(|facts| facts.name == name).unwrap().tokens;
        document * DOCUMENT..tokens.min((document + 1) * DOCUMENT)
    };
    plan.place_bans(|name, documents| Ok(documents.iter().map(|it| range(name, it)).collect()))
        .unwrap();
    plan
}

/// Where a sequence shows a banned document, token by token.
fn hidden(sample: &SampleSpec, step: u64) -> Vec<u32> {
    let banned = |token: u64| match (SOURCES[sample.source], token / DOCUMENT) {
        ("code", 2 | 3) => step >= 23,
        ("code", 0) | ("math", 1) => step >= 71,
        _ => false,
    };
    let tokens =
        sample.spans.iter().flat_map(|span| span.start..span.start + u64::from(span.tokens));
    (0..).zip(tokens).filter(|(_, token)| banned(*token)).map(|(place, _)| place).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_curriculum_with_every_feature_is_the_simulation(
        seed in 0u64..1 << 40,
        tokens in prop::collection::vec(60u64..1500, 5),
        cuts in prop::collection::vec((0usize..2, 1u32..4, 0u32..9), 2..20),
        rule in prop::sample::select(vec!["excess-loss", "learnability"]),
        losses in prop::collection::vec(prop::array::uniform4(0.5..6.0f64), 50),
    ) {
        let lists = Arc::new(Lists::new(tokens[0], &cuts, &[6, 12]));
        prop_assume!(lists.packs.iter().all(|packs| !packs.is_empty()));
        let tables = || PackTables::from([("math".to_owned(), Arc::clone(&lists) as Arc<dyn PackTable>)]);
        let facts = facts(&tokens);
        let reference = match rule {
            "excess-loss" => ", reference = { code = 1, math = 2, web = 1.5 }",
            _ => "",
        };
        let mix = format!("{{ rule = \"{rule}\", start = {{ code = 2, math = 1, web = 5 }}, window = 7{reference} }}");
        let curriculum = Curriculum::parse(&text(seed, |part| format!("web = {part}"), &mix), "c.toml").unwrap();
        let plan = DataPlan::with_packs(&curriculum, &facts, tables()).unwrap();
        prop_assert_eq!(plan.fixed_until(), REACTS - 1 + 2 * 7);
        let mut known = plan.losses();
        for step in 1..=plan.steps() {
            let of_step = losses[(step % 50) as usize];
            known.add(["code", "math", "web/1", "web/2"].into_iter().zip(of_step).map(|(name, loss)| (name, 10, 10.0 * loss)));
        }
        let plan = placed(plan.extended(&known).unwrap(), &facts);
        prop_assert_eq!((plan.fixed_until(), plan.windows().len()), (150, 8));

        // The same in other words: the buckets of `web` have 1 and 3 parts of 4, as in its curve, and a window is an
        // amendment where its weights are new. The rule itself has a naive program of its own.
        let parts: Vec<[u64; 3]> = plan.windows().iter().map(|window| [0, 1, 2].map(|at| window.weights[at].1)).collect();
        let web = |part: u64| format!("\"web/1\" = \"{part}/4\", \"web/2\" = \"{}/4\"", 3 * part);
        let windowed = |[code, math, of_web]: [u64; 3]| format!("{{ code = {code}, math = {math}, {} }}", web(of_web));
        let mut naive = text(seed, web, &windowed(parts[0]));
        for (window, number) in plan.windows().iter().zip(0..).skip(1) {
            if parts[number] != parts[number - 1] {
                naive += &format!("[[amendment]]\nstep = {}\nmix = {}\n", window.first_step, windowed(parts[number]));
            }
        }
        let naive = Curriculum::parse(&naive, "naive.toml").unwrap();
        let samples = simulate_with(&naive, &facts, &BTreeMap::from([("math", &*lists)]));
        prop_assert_eq!(plan.samples(), samples.len() as u64);
        for sample in &samples {
            let found = plan.sample(sample.sample).unwrap();
            let banned: Vec<u32> = found.banned.iter().cloned().flatten().collect();
            prop_assert_eq!(banned, hidden(sample, plan.step_of(sample.sample).unwrap()));
            let objective = found.objective.as_ref().map(ToString::to_string);
            prop_assert_eq!(objective.as_deref(), match SOURCES[sample.source] {
                "math" => Some("loss weight 3/2"),
                "code" => Some("fill-in-the-middle in 1/2 of the pieces, 1/2 of them SPM; \
                                1 in 4 tokens is no label, by the 13 before it"),
                _ => None,
            });
            prop_assert_eq!(&SampleSpec { banned: Vec::new(), objective: None, ..found }, sample);
        }
        totals_agree(&plan, &samples)?;
        steps_agree(&plan)?;
        for (source, facts) in facts.iter().enumerate() {
            visits_agree(&plan, &samples, source, 0, facts.tokens)?;
        }
    }
}
