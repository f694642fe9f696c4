//! The verdict of a replay.

use serde::Serialize;

use crate::ledger::{StepDifference, StepStage};

/// The verdict about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every quantity matches the ledger: if the loss is unusual, look at the data.
    SameBits,
    /// It differs, repeatably, and kernel tables or data differ: these are the cause.
    Repeatable,
    /// It differs, repeatably, although kernels and data are the same: the run computed it wrongly.
    RunHit,
    /// It differs each time: the machine is at fault.
    NotRepeatable,
    /// The step is not in the ledger: there is nothing to compare with.
    NotRecorded,
}

impl Verdict {
    /// The verdict on a difference; `same` is whether it repeats, and `kernels` how kernel tables differ, if they do.
    pub(super) fn of(same: bool, difference: &StepDifference, kernels: Option<&str>) -> Verdict {
        match (same, kernels, difference.stage) {
            (false, _, _) => Verdict::NotRepeatable,
            (true, None, stage) if stage != StepStage::Data => Verdict::RunHit,
            (true, _, _) => Verdict::Repeatable,
        }
    }

    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::SameBits => "same bits",
            Verdict::Repeatable | Verdict::RunHit => "different bits, repeatably",
            Verdict::NotRepeatable => "different bits, not repeatably",
            Verdict::NotRecorded => "not in the ledger",
        }
    }

    /// The advice on what to look at next.
    pub fn advice(self) -> &'static str {
        match self {
            Verdict::SameBits => {
                "the machine computed this step correctly: an odd loss comes from the data or the weights"
            }
            Verdict::Repeatable => "software, kernels or data changed since the run",
            Verdict::RunHit => {
                "kernel tables and data are those of the run, so the run itself computed this step wrongly"
            }
            Verdict::NotRepeatable => "the hardware does not compute the same twice",
            Verdict::NotRecorded => {
                "the run has not got past this step: there is nothing to compare with"
            }
        }
    }

    /// The same, depending on what differs first.
    pub(super) fn advice_on(
        self,
        difference: Option<&StepDifference>,
        kernels: Option<&str>,
    ) -> String {
        let Some(StepDifference { quantity, stage, .. }) = difference else {
            return self.advice().to_owned();
        };
        match (self, stage, kernels) {
            (Verdict::Repeatable, StepStage::Data, _) => {
                "the step read other text than the run: look at the stores, with `zdata verify-run`"
                    .to_owned()
            }
            (Verdict::Repeatable, _, Some(kernels)) => {
                format!("software or kernels changed since the run: {kernels}")
            }
            (Verdict::RunHit, stage, _) => format!(
                "{}: {} was hit, from its {quantity} on; look at the machine that computed it then (events.jsonl)",
                self.advice(),
                stage.words()
            ),
            _ => self.advice().to_owned(),
        }
    }
}

impl StepStage {
    /// For people.
    fn words(self) -> &'static str {
        match self {
            StepStage::Data => "what the step read",
            StepStage::Forward => "a weight at the start of the step, or its forward pass,",
            StepStage::Backward => "the backward pass of a micro-batch",
            StepStage::Sum => "the addition of gradients",
            StepStage::Update => "the update of weights and moments",
        }
    }
}
