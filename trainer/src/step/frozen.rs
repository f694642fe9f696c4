//! The model as the workers of a step read it: weights in the dtype of their matmuls, and the routers' biases.

use contract::Result;
use kernels::device;
use kernels::share::SharedTensors;
use loader::Batch;
use tch::{Device, Tensor};

use super::rows::{inputs, place};
use crate::model::{MicroBatchInput, MicroBatchOptions, ZayaConfig};
use crate::optim::balance::RouterBalance;
use crate::refusal::{caught, refused};
use crate::spec::{PhaseModel, RunSpec};
use crate::state::State;
use crate::workers::Workers;

/// A thread's own aliases of the weights, in canonical order, and of the biases, one tensor per layer.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// The weights.
    pub weights: &'a [Tensor],
    /// The biases.
    pub biases: &'a [Tensor],
}

/// The model of a step, for any number of workers to read.
pub struct FrozenModel<'a> {
    spec: &'a RunSpec,
    model: &'a PhaseModel,
    weights: SharedTensors,
    biases: SharedTensors,
    device: Device,
    workers: Workers,
}

impl<'a> FrozenModel<'a> {
    /// The model of `step`, with the weights and biases of `state`: aliases where their dtype is already right.
    pub fn at(
        spec: &'a RunSpec,
        step: u64,
        state: &State,
        workers: Workers,
    ) -> Result<FrozenModel<'a>> {
        let device = state.device();
        let biases = SharedTensors::new(&bias_tensors(device, &state.balance)?);
        let weights = state.read_as(&spec.parameters, spec.dtype_at(step), workers)?;
        let (model, weights) = (spec.model_at(step)?, SharedTensors::new(&weights));
        Ok(FrozenModel { spec, model, weights, biases, device, workers })
    }

    /// The configuration of the model.
    pub fn config(&self) -> &'a ZayaConfig {
        &self.model.config
    }

    /// The device of the weights.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The options with which a worker computes.
    pub fn options(&self) -> MicroBatchOptions {
        self.workers.options().cut(self.model.cut)
    }

    /// Runs `compute` on the calling thread. A failure in it is reported as a fault at `place`.
    pub fn read<T>(
        &self,
        compute: impl FnOnce(Weights<'_>) -> Result<T>,
        place: impl FnOnce() -> String,
    ) -> Result<T> {
        let (weights, biases) = (self.weights.aliases(), self.biases.aliases());
        let compute = || compute(Weights { weights: &weights, biases: &biases });
        caught(compute).map_err(|fault| fault.or_at(place))
    }

    /// Runs `compute` on the workers for each micro-batch of `batch`; results in order.
    pub fn map<T: Send>(
        &self,
        batch: &Batch,
        compute: impl Fn(&MicroBatchInput<'_>, Weights<'_>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let work = |(micro_batch, input): (u64, MicroBatchInput<'_>)| {
            self.read(|weights| compute(&input, weights), || place(self.spec, batch, micro_batch))
        };
        self.workers.map((0..).zip(inputs(batch)).collect(), work)
    }
}

/// The balancing biases as tensors on `device`.
fn bias_tensors(device: Device, balance: &[RouterBalance]) -> Result<Vec<Tensor>> {
    let all: Vec<f32> = balance.iter().flat_map(|layer| layer.bias.iter().copied()).collect();
    let (all, mut at) = (device::floats(device, &all).map_err(refused)?, 0);
    let mut layers = Vec::with_capacity(balance.len());
    for layer in balance {
        let classes = layer.bias.len() as i64;
        layers.push(all.f_narrow(0, at, classes).map_err(refused)?);
        at += classes;
    }
    Ok(layers)
}
