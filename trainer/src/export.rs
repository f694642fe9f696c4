//! Exports a state of a run for other programs.

use std::path::Path;

use contract::Result;

use crate::hf::export::{self, HfExport, Model};
use crate::spec::RunSpec;
use crate::state::State;

/// Writes the weights of `state` for `transformers`, with the model configuration of the state's last step.
pub fn export(spec: &RunSpec, state: &State, target: &Path) -> Result<HfExport> {
    let config = &spec.model_at(state.step.max(1))?.config;
    let record = &spec.data.stores()[0].manifest().tokenizer;
    let tokenizer = &spec.data.tokenizer()?;
    let (parameters, balance) = (&spec.parameters, &state.balance);
    let model = Model { config, parameters, balance, record, tokenizer };
    export::write(target, &model, || state.in_f32())
}
