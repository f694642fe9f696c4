//! The sequences in a step: one number for a phase, a ramp, or a table of steps. A ramp is read into its table.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use contract::Result;
use schemars::JsonSchema;
use settings::{File, Spanned, Value};

use super::text::inline;

/// The most batch sizes of a phase: each of them is a segment of the plan.
const SIZES_MAX: usize = 1024;

/// The keys of a ramp.
const RAMP_KEYS: [&str; 4] = ["from", "to", "every", "by"];

/// The batch sizes of a phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// From a step of the phase on, counted from 1: never empty, begins with 1, no number twice in a row.
    sizes: BTreeMap<u64, u64>,
}

/// `batch`: a number, a ramp or a table.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a value that is read with its place")]
pub(super) enum BatchText {
    Number(NonZeroU64),
    Ramp(BatchRamp),
    Table(BTreeMap<String, NonZeroU64>),
}

/// A batch that grows within its phase.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "stands for a value that is read with its place")]
pub(super) struct BatchRamp {
    /// Sequences in the first steps.
    #[schemars(extend("digest" = "plan, run"))]
    from: NonZeroU64,
    /// Sequences in the last steps; above `from`.
    #[schemars(extend("digest" = "plan, run"))]
    to: NonZeroU64,
    /// Steps of each size before the next one.
    #[schemars(extend("digest" = "plan, run"))]
    every: NonZeroU64,
    /// Sequences more each time, a multiple of `micro_batch`, which is the default.
    #[schemars(extend("digest" = "plan, run"))]
    by: Option<NonZeroU64>,
}

impl BatchSizes {
    /// Reads `batch`; a ramp grows by `micro_batch` unless it says otherwise.
    pub(super) fn read(file: &File, batch: &Spanned<Value>, micro_batch: u64) -> Result<Self> {
        let sizes = match batch.get_ref() {
            Value::Table(table) if RAMP_KEYS.iter().any(|key| table.contains_key(*key)) => {
                ramp(file, batch, table, micro_batch)?
            }
            Value::Table(table) => self::table(file, batch, table)?,
            Value::Integer(size) if *size > 0 => BTreeMap::from([(1, *size as u64)]),
            _ => {
                let wanted = "a whole number above zero, { from = 64, to = 512, every = 1000 }, or a table of \
                              steps of the phase: { 1 = 64, 1001 = 128 }";
                return Err(file.wrong("batch", batch, wanted));
            }
        };
        if sizes.len() > SIZES_MAX {
            return Err(file
                .fault(batch, "the batch has too many sizes")
                .found(sizes.len())
                .wanted(format!("at most {SIZES_MAX}"))
                .hint("let it grow by more sequences at once: `by`"));
        }
        Ok(BatchSizes { sizes })
    }

    /// The first size that is not a multiple of `micro_batch`.
    pub(super) fn uneven(&self, micro_batch: u64) -> Option<u64> {
        self.sizes.values().copied().find(|size| !size.is_multiple_of(micro_batch))
    }

    /// The size of the first step.
    pub fn first(&self) -> u64 {
        self.sizes.values().next().copied().unwrap_or_default()
    }

    /// The size of a step of the phase, counted from 1.
    pub fn at(&self, step: u64) -> u64 {
        self.sizes.range(..=step).next_back().map_or_else(|| self.first(), |(_, size)| *size)
    }

    /// The runs of one size among the first `steps` steps of the phase: steps, and the size.
    pub(super) fn runs(&self, steps: u64) -> Vec<(u64, u64)> {
        let ends = self.sizes.keys().skip(1).map(|next| next - 1).chain([u64::MAX]);
        let runs = self.sizes.iter().zip(ends);
        let runs = runs.map(|((&first, &size), end)| (end.min(steps), first - 1, size));
        runs.filter(|(end, before, _)| end > before)
            .map(|(end, before, size)| (end - before, size))
            .collect()
    }

    /// Sequences in the first `steps` steps of the phase; `None` beyond 64 bits.
    pub fn samples(&self, steps: u64) -> Option<u64> {
        self.runs(steps).into_iter().try_fold(0u64, |sum, (steps, size)| {
            steps.checked_mul(size).and_then(|samples| sum.checked_add(samples))
        })
    }

    /// The most steps that have at most `samples` sequences.
    pub(super) fn steps(&self, samples: u64) -> u64 {
        let (mut left, mut all) = (samples, 0);
        for (steps, size) in self.runs(u64::MAX) {
            let fit = steps.min(left / size);
            all += fit;
            left -= fit * size;
            if fit < steps {
                break;
            }
        }
        all
    }

    /// The first step of the phase at which two lists of sizes differ.
    pub(super) fn first_other(&self, other: &BatchSizes) -> Option<u64> {
        let mut steps: Vec<u64> = self.sizes.keys().chain(other.sizes.keys()).copied().collect();
        steps.sort_unstable();
        steps.into_iter().find(|step| self.at(*step) != other.at(*step))
    }

    /// The canonical text.
    pub(super) fn text(&self) -> String {
        match self.sizes.len() {
            1 => self.first().to_string(),
            _ => inline(self.sizes.iter().map(|(step, size)| format!("{step} = {size}")).collect()),
        }
    }
}

/// The sizes of a ramp.
fn ramp(
    file: &File,
    batch: &Spanned<Value>,
    table: &toml::Table,
    micro_batch: u64,
) -> Result<BTreeMap<u64, u64>> {
    let wanted = "{ from = 64, to = 512, every = 1000 }, numbers above zero; `by` as well";
    if let Some(key) = table.keys().find(|key| !RAMP_KEYS.contains(&key.as_str())) {
        let fault = file.fault(batch, "a ramp of the batch does not have this key");
        return Err(fault.one_of(key, RAMP_KEYS));
    }
    let number = |key: &str| {
        let Some(value) = table.get(key) else { return Ok(None) };
        let number = value.as_integer().and_then(|number| u64::try_from(number).ok());
        number.filter(|number| *number > 0).map(Some).ok_or_else(|| {
            let what = format!("`{key}` of the batch is not a whole number above zero");
            file.fault(batch, what).found(value).wanted(wanted)
        })
    };
    let needed = |key: &str| {
        let missing = || file.fault(batch, format!("the ramp has no `{key}`")).wanted(wanted);
        number(key)?.ok_or_else(missing)
    };
    let (from, to, every) = (needed("from")?, needed("to")?, needed("every")?);
    let by = number("by")?.unwrap_or(micro_batch);
    if from >= to {
        return Err(file
            .fault(batch, "the batch does not grow")
            .found(format!("from = {from}, to = {to}"))
            .wanted("`to` above `from`, or a table: { 1 = 64, 1001 = 128 }"));
    }
    let mut sizes = BTreeMap::new();
    let (mut step, mut size) = (1u64, from);
    // One more than allowed is refused later.
    while sizes.len() <= SIZES_MAX {
        sizes.insert(step, size);
        if size == to {
            break;
        }
        size = size.saturating_add(by).min(to);
        // A step that no run reaches.
        let Some(next) = step.checked_add(every) else { break };
        step = next;
    }
    Ok(sizes)
}

/// The sizes of a table of steps.
fn table(file: &File, batch: &Spanned<Value>, table: &toml::Table) -> Result<BTreeMap<u64, u64>> {
    let wrong = |what: String| {
        file.fault(batch, what).wanted(
            "steps of the phase, the first of them 1, each with its batch: { 1 = 64, 1001 = 128 }",
        )
    };
    let mut sizes = BTreeMap::new();
    for (step, size) in table {
        // One way to write a step: otherwise two keys could be one step.
        let number = step.parse::<u64>().ok().filter(|number| number.to_string() == *step);
        let number = number.filter(|number| *number > 0);
        let step = number.ok_or_else(|| {
            wrong("`batch` has a key that is not a step".to_owned()).found(format!("{step:?}"))
        })?;
        let number = size.as_integer().and_then(|size| u64::try_from(size).ok());
        let number = number.filter(|size| *size > 0).ok_or_else(|| {
            wrong(format!("the batch of step {step} is not a whole number above zero")).found(size)
        })?;
        sizes.insert(step, number);
    }
    if !sizes.contains_key(&1) {
        return Err(wrong("`batch` does not begin with step 1".to_owned()));
    }
    let mut before = 0;
    sizes.retain(|_, size| std::mem::replace(&mut before, *size) != *size);
    Ok(sizes)
}
