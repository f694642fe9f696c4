//! The activations between layers, and their gradients, by chunk.

use contract::Result;
use tch::Tensor;

use super::gradients::Gradients;
use super::layer::Pass;
use super::layers::norm::{NormOutputGrads, RmsNorm, SavedNorm};

/// The activations between two layers.
pub(super) struct Hidden {
    /// `[n, D]`, f32.
    pub(super) residual: Vec<Tensor>,
    /// Router states, `[n, R]`, from the first router on.
    pub(super) state: Option<Vec<Tensor>>,
    /// The next norm's output, where it was computed together with the residual.
    pub(super) normed: Option<Vec<(Tensor, SavedNorm)>>,
}

/// Gradients of the activations, up to the norm that reads the residual: the layer before it passes on both at once.
pub(super) struct HiddenGrad {
    /// Gradients of the norm's output, and of the residual that bypasses it.
    pub(super) residual: Vec<NormOutputGrads>,
    /// Gradients of the router states, `[n, R]`, f32.
    pub(super) state: Option<Vec<Tensor>>,
}

impl Hidden {
    pub(super) fn share(&self) -> Hidden {
        let shared = |parts: &Vec<Tensor>| parts.iter().map(Tensor::shallow_clone).collect();
        let (residual, state) = (shared(&self.residual), self.state.as_ref().map(shared));
        Hidden { residual, state, normed: None }
    }

    /// The residual normed by `norm`, by chunk, in [`Pass::kind`].
    pub(super) fn normed(
        &mut self,
        pass: &Pass<'_>,
        norm: &RmsNorm,
    ) -> Result<(Vec<Tensor>, Vec<SavedNorm>)> {
        match self.normed.take() {
            Some(normed) => Ok(normed.into_iter().unzip()),
            None => norm.each(pass, &self.residual),
        }
    }
}

impl HiddenGrad {
    /// Backward through the first `norm`, which follows no layer: returns the gradients of the residual.
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
