//! What runs through the layers of a model, and what comes back, by chunk.

use contract::Result;
use tch::Tensor;

use super::gradients::Gradients;
use super::layer::Pass;
use super::layers::norm::{Normed, Returned, RmsNorm};

/// What runs through the layers.
pub(super) struct Flow {
    /// `[n, D]`, f32.
    pub(super) residual: Vec<Tensor>,
    /// `[n, R]`, from the first router on.
    pub(super) state: Option<Vec<Tensor>>,
    /// What the next norm makes of the residual, where that was made with it.
    pub(super) normed: Option<Vec<(Tensor, Normed)>>,
}

/// Its gradients, as far as the norm that reads the residual: what comes before goes back through both at once.
pub(super) struct FlowBack {
    /// To the norm, and past it.
    pub(super) residual: Vec<Returned>,
    /// `[n, R]`, f32.
    pub(super) state: Option<Vec<Tensor>>,
}

impl Flow {
    pub(super) fn share(&self) -> Flow {
        let shared = |parts: &Vec<Tensor>| parts.iter().map(Tensor::shallow_clone).collect();
        let (residual, state) = (shared(&self.residual), self.state.as_ref().map(shared));
        Flow { residual, state, normed: None }
    }

    /// The residual normed by `norm`, by chunk, in [`Pass::kind`].
    pub(super) fn normed(
        &mut self,
        pass: &Pass<'_>,
        norm: &RmsNorm,
    ) -> Result<(Vec<Tensor>, Vec<Normed>)> {
        match self.normed.take() {
            Some(normed) => Ok(normed.into_iter().unzip()),
            None => norm.each(pass, &self.residual),
        }
    }
}

impl FlowBack {
    /// Through `norm`, before which there is no layer: the gradients of the residual.
    pub(super) fn through(
        self,
        pass: &Pass<'_>,
        norm: &RmsNorm,
        sink: &mut Gradients<'_>,
    ) -> Result<Vec<Tensor>> {
        let chunks = self.residual.into_iter().enumerate();
        chunks.map(|(chunk, returned)| norm.backward(pass, returned, &mut sink.of(chunk))).collect()
    }
}
