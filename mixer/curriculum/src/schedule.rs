//! `[schedule]`: the keys of the learning rate, of the run and of phases that begin a schedule of their own.

use contract::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::places::{KeySpans, check_numbers};
use super::text::{Text, float, inline, quoted};

/// The form of a schedule after its warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Half a cosine down to `final_lr`, which stays.
    #[default]
    Cosine,
    /// A line down to `final_lr`, which stays.
    Linear,
    /// Warm-up, stable, decay: `stable_steps` at the peak, then `decay_steps` down to `final_lr`.
    Wsd,
    /// `lr x sqrt(warmup_steps / step)`, never below `final_lr`.
    InverseSqrt,
    /// The peak.
    Constant,
}

/// The form of a decay under `kind = "wsd"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DecayShape {
    /// A line.
    #[default]
    Linear,
    /// Half a cosine.
    Cosine,
    /// `1 - sqrt(t)` (Haegele et al. 2024, arXiv 2405.18392).
    Sqrt,
}

/// A schedule's values, every default filled in.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScheduleSpec {
    /// The form after warm-up.
    pub kind: ScheduleKind,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps at the peak before a decay, under `wsd`.
    pub stable_steps: u64,
    /// Steps of decay; 0 for none.
    pub decay_steps: u64,
    /// The form of the decay, under `wsd`.
    pub decay_shape: DecayShape,
    /// The rate after decay, or the lowest under `inverse-sqrt`.
    pub final_lr: Option<f64>,
}

/// The learning rate: a linear warm-up over `warmup_steps`, then what `kind` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Schedule")]
pub struct ScheduleChange {
    /// The form after warm-up.
    #[schemars(extend("default" = "cosine", "digest" = "run (where not `\"cosine\"`)"))]
    pub kind: Option<ScheduleKind>,
    /// Steps of linear warm-up; at least 1 under `"inverse-sqrt"`.
    #[schemars(extend("default" = 0, "digest" = "run"))]
    pub warmup_steps: Option<u64>,
    /// Steps at the peak before the decay, under `"wsd"` alone.
    #[schemars(extend("default" = 0, "digest" = "run"))]
    pub stable_steps: Option<u64>,
    /// Steps of decay to `final_lr`; 0 keeps the peak.
    #[schemars(extend("default" = 0, "digest" = "run"))]
    pub decay_steps: Option<u64>,
    /// The form of the decay, under `"wsd"` alone.
    #[schemars(extend("default" = "linear", "digest" = "run (where not `\"linear\"`)"))]
    pub decay_shape: Option<DecayShape>,
    /// The learning rate after decay, needed with `decay_steps`; the lowest one under `"inverse-sqrt"`.
    #[schemars(extend("digest" = "run"))]
    pub final_lr: Option<f64>,
}

/// `lr` and `schedule` of a phase: it counts steps from the phase's first, and its warm-up leads from the rate of the
/// step before the phase to `lr`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhaseSchedule {
    /// The peak; `None`: the rate of the step before the phase.
    pub lr: Option<f64>,
    /// The schedule.
    pub spec: ScheduleSpec,
}

impl ScheduleKind {
    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::Cosine => "cosine",
            ScheduleKind::Linear => "linear",
            ScheduleKind::Wsd => "wsd",
            ScheduleKind::InverseSqrt => "inverse-sqrt",
            ScheduleKind::Constant => "constant",
        }
    }
}

impl DecayShape {
    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            DecayShape::Linear => "linear",
            DecayShape::Cosine => "cosine",
            DecayShape::Sqrt => "sqrt",
        }
    }
}

impl ScheduleSpec {
    /// Whether it ever leaves the peak by decay.
    pub fn decays(&self) -> bool {
        let by_steps = !matches!(self.kind, ScheduleKind::InverseSqrt | ScheduleKind::Constant);
        by_steps && self.decay_steps > 0
    }

    /// With a change's values in place of its own; forgets values that have no effect then, so that a later change
    /// cannot bring them back.
    pub fn with(self, change: ScheduleChange) -> Self {
        let all = ScheduleSpec {
            kind: change.kind.unwrap_or(self.kind),
            warmup_steps: change.warmup_steps.unwrap_or(self.warmup_steps),
            stable_steps: change.stable_steps.unwrap_or(self.stable_steps),
            decay_steps: change.decay_steps.unwrap_or(self.decay_steps),
            decay_shape: change.decay_shape.unwrap_or(self.decay_shape),
            final_lr: change.final_lr.or(self.final_lr),
        };
        let ScheduleChange { stable_steps, decay_steps, decay_shape, final_lr, .. } =
            all.effective();
        ScheduleSpec {
            stable_steps: stable_steps.unwrap_or_default(),
            decay_steps: decay_steps.unwrap_or_default(),
            decay_shape: decay_shape.unwrap_or_default(),
            final_lr,
            ..all
        }
    }

    /// Every key with its value in canonical text, whether it has an effect or not.
    pub(super) fn values(&self) -> [(&'static str, Option<String>); 6] {
        let ScheduleSpec { kind, warmup_steps, stable_steps, decay_steps, decay_shape, final_lr } =
            *self;
        let change = ScheduleChange {
            kind: Some(kind),
            warmup_steps: Some(warmup_steps),
            stable_steps: Some(stable_steps),
            decay_steps: Some(decay_steps),
            decay_shape: Some(decay_shape),
            final_lr,
        };
        change.values()
    }

    /// The values that have an effect, as a change would set them.
    pub fn effective(&self) -> ScheduleChange {
        let wsd = self.kind == ScheduleKind::Wsd;
        let by_steps = !matches!(self.kind, ScheduleKind::InverseSqrt | ScheduleKind::Constant);
        let floor = self.kind == ScheduleKind::InverseSqrt || self.decays();
        ScheduleChange {
            kind: Some(self.kind),
            warmup_steps: Some(self.warmup_steps),
            stable_steps: wsd.then_some(self.stable_steps),
            decay_steps: by_steps.then_some(self.decay_steps),
            decay_shape: wsd.then_some(self.decay_shape),
            final_lr: self.final_lr.filter(|_| floor),
        }
    }

    /// The keys of its canonical text. Defaults that came after the first curricula are left out.
    pub(super) fn keys(&self) -> Vec<(&'static str, String)> {
        let mut effective = self.effective();
        effective.kind.take_if(|kind| *kind == ScheduleKind::default());
        effective.decay_shape.take_if(|shape| *shape == DecayShape::default());
        let keys = effective.values().into_iter();
        keys.filter_map(|(key, value)| Some((key.strip_prefix("schedule.")?, value?))).collect()
    }

    fn text(&self) -> String {
        let pair = |(key, value)| format!("{key} = {value}");
        inline(self.keys().into_iter().map(pair).collect())
    }
}

impl ScheduleChange {
    /// Every key with its value in canonical text.
    pub fn values(&self) -> [(&'static str, Option<String>); 6] {
        // No `..`: a new key does not compile until it is listed here.
        let ScheduleChange { kind, warmup_steps, stable_steps, decay_steps, decay_shape, final_lr } =
            *self;
        let count = |value: Option<u64>| value.map(|value| value.to_string());
        [
            ("schedule.kind", kind.map(|kind| quoted(kind.name()))),
            ("schedule.warmup_steps", count(warmup_steps)),
            ("schedule.stable_steps", count(stable_steps)),
            ("schedule.decay_steps", count(decay_steps)),
            ("schedule.decay_shape", decay_shape.map(|shape| quoted(shape.name()))),
            ("schedule.final_lr", final_lr.map(float)),
        ]
    }

    /// `before` with these values, which the table at `path` sets; refuses values without effect and missing ones.
    pub(super) fn apply(
        &self,
        places: &KeySpans,
        path: &str,
        before: ScheduleSpec,
    ) -> Result<ScheduleSpec> {
        let key = |name: &str| format!("{path}.{name}");
        if let Some(final_lr) = self.final_lr {
            check_numbers(places, &[(&key("final_lr"), final_lr, f64::INFINITY)])?;
        }
        let after = before.with(*self);
        let kind = after.kind;
        let wsd = [
            ("stable_steps", self.stable_steps.is_some()),
            ("decay_shape", self.decay_shape.is_some()),
        ];
        if let Some((name, _)) = wsd.iter().find(|(_, set)| *set && kind != ScheduleKind::Wsd) {
            let what = format!("`{name}` has no effect on `kind = {:?}`", kind.name());
            let fault = places.fault(&key(name), what);
            return Err(fault.wanted("`kind = \"wsd\"`, or no such key"));
        }
        if self.decay_steps.is_some_and(|steps| steps > 0) && !after.decays() {
            let what = format!("`decay_steps` has no effect on `kind = {:?}`", kind.name());
            let fault = places.fault(&key("decay_steps"), what);
            return Err(fault.wanted("another kind, or no such key"));
        }
        match kind {
            ScheduleKind::InverseSqrt if after.warmup_steps == 0 => {
                let what = "`kind = \"inverse-sqrt\"` has no `warmup_steps`";
                Err(places.fault(path, what).wanted("at least 1: the rate falls from there"))
            }
            ScheduleKind::InverseSqrt => Ok(after),
            _ if after.decays() && after.final_lr.is_none() => {
                let wanted = "the learning rate that `decay_steps` leads to";
                Err(places.fault(path, "the schedule has no `final_lr`").wanted(wanted))
            }
            ScheduleKind::Constant if self.final_lr.is_some() => {
                let what = "`final_lr` is never reached: `kind = \"constant\"` keeps the peak";
                Err(places.fault(&key("final_lr"), what))
            }
            _ if self.final_lr.is_some() && !after.decays() => {
                let what = "`final_lr` is never reached: `decay_steps` is missing or 0";
                let fault = places.fault(&key("final_lr"), what);
                Err(fault.hint("set `decay_steps`, or leave both out"))
            }
            _ => Ok(after),
        }
    }
}

impl PhaseSchedule {
    /// The schedule that a phase's `lr` and `schedule` begin; `path` is the phase's.
    pub(super) fn read(
        places: &KeySpans,
        path: &str,
        lr: Option<f64>,
        schedule: Option<ScheduleChange>,
    ) -> Result<Option<Self>> {
        let key = |name: &str| format!("{path}.{name}");
        check_numbers(places, &[(&key("lr"), lr.unwrap_or(0.0), f64::INFINITY)])?;
        if lr.is_none() && schedule.is_none() {
            return Ok(None);
        }
        let change = schedule.unwrap_or_default();
        let spec = change.apply(places, &key("schedule"), ScheduleSpec::default())?;
        Ok(Some(PhaseSchedule { lr, spec }))
    }

    /// Writes its canonical text.
    pub(super) fn write(&self, out: &mut Text) {
        if let Some(lr) = self.lr {
            out.line("lr", float(lr));
        }
        out.line("schedule", self.spec.text());
    }

    /// Its values on one line, for people.
    pub(super) fn text(&self) -> String {
        let peak = self.lr.map_or_else(|| "the rate before".to_owned(), float);
        format!("{} from lr = {peak}", self.spec.text())
    }
}
