//! Canonical text: equal meaning, equal text.
//!
//! Every key is written with its default filled in, tables and sources in a fixed order, weights as integers without a
//! common divisor, `tokens` as steps. The text is itself a curriculum with the same meaning.

use super::text::{Text, float, inline, key, quoted};
use super::{
    AutoClipSpec, BucketCurve, Buckets, Curriculum, ModelTable, NewtonSchulzForm, OptimizerSpec,
    ParamGroup, Phase, RemainderRule, SkipStepSpec, SourceSpec, model, objective,
};

impl Curriculum {
    /// The canonical text. Two curricula mean the same if and only if it is equal.
    pub fn canonical(&self) -> String {
        // No `..`: a new field does not compile until it is written here.
        let Curriculum {
            stores,
            init_from,
            seed,
            dtype,
            phases,
            sources,
            model: ModelTable(fields),
            optimizer,
            schedule,
            skip_step,
            auto_clip,
            amendments,
            places: _,
        } = self;
        let mut out = Text::default();
        let stores: Vec<String> = stores.iter().map(|store| quoted(store)).collect();
        out.line("store", format!("[{}]", stores.join(", ")));
        if let Some(init_from) = init_from {
            out.line("init_from", quoted(init_from));
        }
        out.line("seed", seed);
        out.line("dtype", quoted(dtype.name()));
        out.head("[model]");
        for (field, value) in fields {
            out.line(&key(field), model::text(value));
        }
        optimizer_text(optimizer, &mut out);
        out.head("[schedule]");
        for (key, value) in schedule.keys() {
            out.line(key, value);
        }
        // Written only if set, so that curricula without them keep their text.
        if let Some(SkipStepSpec { window, sigma, non_finite }) = skip_step {
            out.head("[skip_step]");
            out.line("window", window);
            out.line("sigma", float(*sigma));
            out.line("non_finite", quoted(non_finite.name()));
        }
        if let Some(AutoClipSpec { window, percentile }) = auto_clip {
            out.head("[auto_clip]");
            out.line("window", window);
            out.line("percentile", percentile);
        }
        for (name, spec) in sources {
            source_text(name, spec, &mut out);
        }
        phases.iter().for_each(|phase| phase_text(phase, &mut out));
        amendments.iter().for_each(|amendment| amendment.write(&mut out));
        out.0
    }
}

fn source_text(name: &str, spec: &SourceSpec, out: &mut Text) {
    // A spelled-out default means the same as an absent key.
    if *spec == SourceSpec::default() {
        return;
    }
    let SourceSpec { max_epochs, packing, buckets, fim, mask, loss_weight } = spec;
    out.head(&format!("[source.{}]", key(name)));
    // A curve has its own limit.
    let capped = |buckets: &Buckets| matches!(buckets.curve, BucketCurve::Power(_));
    if let Some(max_epochs) = max_epochs.filter(|_| !buckets.as_ref().is_some_and(capped)) {
        out.line("max_epochs", max_epochs);
    }
    if let Some(packing) = packing {
        out.line("packing", quoted("best-fit"));
        out.line("lengths", packing.lengths_text());
        out.line("pack_documents", packing.documents);
    }
    buckets.iter().for_each(|buckets| buckets.write(out));
    objective::write(fim, mask, out);
    if let Some(weight) = loss_weight {
        out.line("loss_weight", quoted(&weight.to_string()));
    }
}

fn optimizer_text(optimizer: &OptimizerSpec, out: &mut Text) {
    let OptimizerSpec { kind, lr, betas, eps, momentum, newton_schulz, weight_decay, clip, groups } =
        optimizer;
    out.head("[optimizer]");
    out.line("kind", quoted(kind.name()));
    out.line("lr", float(*lr));
    out.line("betas", format!("[{}, {}]", float(betas[0]), float(betas[1])));
    out.line("eps", float(*eps));
    out.line("momentum", float(*momentum));
    // Omitted at the default, so that curricula older than this key keep their text.
    if *newton_schulz != NewtonSchulzForm::default() {
        out.line("newton_schulz", quoted(newton_schulz.name()));
    }
    out.line("weight_decay", float(*weight_decay));
    out.line("clip", float(*clip));
    for group in groups {
        out.head("[[optimizer.group]]");
        group.values().for_each(|(key, value)| out.line(key, value));
    }
}

impl ParamGroup {
    /// Its keys and values; a scale of 1 is no other group than none.
    fn values(&self) -> impl Iterator<Item = (&'static str, String)> {
        let ParamGroup { params, lr_scale, weight_decay } = self;
        let scale = Some(*lr_scale).filter(|scale| *scale != 1.0);
        let values = [
            Some(("params", quoted(params))),
            scale.map(|scale| ("lr_scale", float(scale))),
            weight_decay.map(|decay| ("weight_decay", float(decay))),
        ];
        values.into_iter().flatten()
    }

    /// The group as an inline table.
    pub(super) fn text(&self) -> String {
        inline(self.values().map(|(key, value)| format!("{key} = {value}")).collect())
    }
}

fn phase_text(phase: &Phase, out: &mut Text) {
    let Phase {
        name,
        steps,
        seq_len,
        batch,
        micro_batch,
        context_chunks,
        weight_shards,
        remainder,
        mix,
        model: ModelTable(fields),
        schedule,
    } = phase;
    out.head("[[phase]]");
    out.line("name", quoted(name));
    out.line("steps", steps);
    out.line("seq_len", seq_len);
    out.line("batch", batch.text());
    out.line("micro_batch", micro_batch);
    // Omitted at 1, so that curricula older than these keys keep their text.
    for (key, parts) in [("context_chunks", context_chunks), ("weight_shards", weight_shards)] {
        if *parts != 1 {
            out.line(key, parts);
        }
    }
    if *remainder != RemainderRule::default() {
        out.line("remainder", quoted(remainder.name()));
    }
    out.line("mix", mix.text());
    if !fields.is_empty() {
        let pair =
            |(field, value): (&String, _)| format!("{} = {}", key(field), model::text(value));
        out.line("model", inline(fields.iter().map(pair).collect()));
    }
    if let Some(schedule) = schedule {
        schedule.write(out);
    }
}
