//! Exports weights of a run for other programs.

use std::path::Path;

use contract::Result;
use tch::{Device, Kind, Tensor};

use trainer::hf::export::{self, HfExport, Model};
use trainer::optim::balance::RouterBalance;
use trainer::refusal::refused;
use trainer::spec::RunSpec;
use trainer::state::State;

/// Writes the weights of `state` for `transformers`, with the model configuration of the state's last step.
pub fn export(spec: &RunSpec, state: &State, target: &Path) -> Result<HfExport> {
    write(spec, state.step, &state.balance, target, || state.in_f32())
}

fn write(
    spec: &RunSpec,
    step: u64,
    balance: &[RouterBalance],
    target: &Path,
    weights: impl FnOnce() -> Result<Vec<Tensor>>,
) -> Result<HfExport> {
    let config = &spec.model_at(step.max(1))?.config;
    let record = &spec.data.stores()[0].manifest().tokenizer;
    let tokenizer = &spec.data.tokenizer()?;
    let model = Model { config, parameters: &spec.parameters, balance, record, tokenizer };
    export::write(target, &model, weights)
}

/// The mean of the weights and balancing biases of several states of a run (Izmailov et al. 2018, arXiv 1803.05407,
/// over checkpoints). Sums are f64, in the order of the states.
#[derive(Default)]
pub struct WeightMean {
    states: u32,
    step: u64,
    weights: Vec<Tensor>,
    biases: Vec<Vec<f64>>,
}

impl WeightMean {
    /// Adds a state.
    pub fn add(&mut self, state: &State) -> Result<()> {
        let wide = |weight: &Tensor| weight.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double);
        let weights = state.in_f32()?;
        let balance = state.balance.iter().map(|balance| &balance.bias);
        let balance = balance.map(|bias| bias.iter().map(|bias| f64::from(*bias)).collect());
        (self.states, self.step) = (self.states + 1, state.step);
        if self.states == 1 {
            let weights = weights.iter().map(wide).collect::<std::result::Result<_, _>>();
            (self.weights, self.biases) = (weights.map_err(refused)?, balance.collect());
            return Ok(());
        }
        for (sum, weight) in self.weights.iter_mut().zip(&weights) {
            let _ = wide(weight).and_then(|weight| sum.f_add_(&weight)).map_err(refused)?;
        }
        for (sum, biases) in self.biases.iter_mut().zip(balance) {
            let biases: Vec<f64> = biases;
            sum.iter_mut().zip(biases).for_each(|(sum, bias)| *sum += bias);
        }
        Ok(())
    }

    /// Writes the mean for `transformers`, with the model configuration of the last state's step.
    pub fn export(self, spec: &RunSpec, target: &Path) -> Result<HfExport> {
        let WeightMean { states, step, weights, biases } = self;
        let count = f64::from(states);
        let mean = |biases: Vec<f64>| RouterBalance {
            bias: biases.into_iter().map(|sum| (sum / count) as f32).collect(),
            first: Vec::new(),
            second: Vec::new(),
        };
        let balance: Vec<_> = biases.into_iter().map(mean).collect();
        write(spec, step, &balance, target, || {
            let mean = |sum: &Tensor| sum.f_div_scalar(count)?.f_to_kind(Kind::Float);
            weights.iter().map(mean).collect::<std::result::Result<_, _>>().map_err(refused)
        })
    }
}
