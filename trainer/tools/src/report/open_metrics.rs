//! A run's newest values as OpenMetrics text, for Prometheus and others to scrape from `ztrain watch`.
//!
//! A curve `GROUP/NAME` is the gauge `ztrain_GROUP_NAME`. For losses by source and norms by layer, NAME is a label
//! instead. Source: OpenMetrics 1.0, section "Text Format".

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The content type.
pub(super) const KIND: &str = "application/openmetrics-text; version=1.0.0";

/// Groups whose names depend on the run, with the label for them.
const LABELLED: [(&str, &str); 7] = [
    ("loss", "source"),
    ("validation", "source"),
    ("accuracy", "task"),
    ("accuracy_norm", "task"),
    ("log_likelihood", "task"),
    ("gradient_norm", "layer"),
    ("update_norm", "layer"),
];

/// The status of a run, shown next to its curves.
pub(super) struct RunStatus {
    /// The run's name.
    pub(super) run: String,
    /// The newest step.
    pub(super) step: u64,
    /// How often a process started training.
    pub(super) starts: u64,
    /// Number of odd steps.
    pub(super) odd: u64,
    /// Whether a process has started and not ended.
    pub(super) running: bool,
}

/// The text.
pub(super) fn text(standing: &RunStatus, curves: &[(String, f64)]) -> String {
    let RunStatus { run, step, starts, odd, running } = standing;
    let mut families: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    for (curve, value) in curves {
        let Some((group, name)) = curve.split_once('/') else { continue };
        // It only grows, so it is a counter.
        if curve == "data/tokens" {
            continue;
        }
        let label = LABELLED.iter().find(|(labelled, _)| *labelled == group);
        let (family, label) = match label {
            Some((group, label)) => {
                ((*group).to_owned(), format!(",{label}=\"{}\"", escaped(name)))
            }
            None => (format!("{group}_{name}"), String::new()),
        };
        families.entry(family).or_default().push((label, *value));
    }
    let run = format!("run=\"{}\"", escaped(run));
    let mut text = String::new();
    let mut gauge = |family: &str, values: &[(String, f64)]| {
        let _ = writeln!(text, "# TYPE ztrain_{family} gauge");
        for (label, value) in values {
            let _ = writeln!(text, "ztrain_{family}{{{run}{label}}} {value}");
        }
    };
    for (family, values) in &families {
        gauge(family, values);
    }
    let alone = |value: f64| [(String::new(), value)];
    gauge("step", &alone(*step as f64));
    gauge("running", &alone(f64::from(u8::from(*running))));
    gauge("odd_steps", &alone(*odd as f64));
    let tokens = curves.iter().find(|(name, _)| name == "data/tokens").map(|(_, value)| *value);
    for (counter, value) in [("starts", Some(*starts as f64)), ("tokens", tokens)] {
        if let Some(value) = value {
            let _ = writeln!(text, "# TYPE ztrain_{counter} counter");
            let _ = writeln!(text, "ztrain_{counter}_total{{{run}}} {value}");
        }
    }
    text + "# EOF\n"
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_stand_together_and_names_are_escaped() {
        let curves = [
            ("total/loss", 2.5),
            ("loss/all", 3.0),
            ("optimizer/lr", 1e-4),
            ("loss/we\"b", 2.0),
            ("data/tokens", 4096.0),
            ("gradient_norm/layer 1", 0.5),
        ];
        let curves = curves.map(|(name, value)| (name.to_owned(), value));
        let run = "a\\b".to_owned();
        let standing = RunStatus { run, step: 3, starts: 2, odd: 0, running: true };
        let wanted = "\
            # TYPE ztrain_gradient_norm gauge\n\
            ztrain_gradient_norm{run=\"a\\\\b\",layer=\"layer 1\"} 0.5\n\
            # TYPE ztrain_loss gauge\n\
            ztrain_loss{run=\"a\\\\b\",source=\"all\"} 3\n\
            ztrain_loss{run=\"a\\\\b\",source=\"we\\\"b\"} 2\n\
            # TYPE ztrain_optimizer_lr gauge\n\
            ztrain_optimizer_lr{run=\"a\\\\b\"} 0.0001\n\
            # TYPE ztrain_total_loss gauge\n\
            ztrain_total_loss{run=\"a\\\\b\"} 2.5\n\
            # TYPE ztrain_step gauge\n\
            ztrain_step{run=\"a\\\\b\"} 3\n\
            # TYPE ztrain_running gauge\n\
            ztrain_running{run=\"a\\\\b\"} 1\n\
            # TYPE ztrain_odd_steps gauge\n\
            ztrain_odd_steps{run=\"a\\\\b\"} 0\n\
            # TYPE ztrain_starts counter\n\
            ztrain_starts_total{run=\"a\\\\b\"} 2\n\
            # TYPE ztrain_tokens counter\n\
            ztrain_tokens_total{run=\"a\\\\b\"} 4096\n\
            # EOF\n";
        assert_eq!(text(&standing, &curves), wanted);
    }
}
