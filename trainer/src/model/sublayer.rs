//! A sublayer: attention or feed-forward between the norm before it and the residual scaling after it, and the
//! activations between sublayers, by chunk.

use contract::Result;
use tch::Tensor;

use super::ZayaConfig;
use super::gradients::Gradients;
use super::layer::{self, Backward, BranchGrads, Layer, LayerPlace, Pass, Rows};
use super::layers::norm::{NormOutputGrads, Residual, RmsNorm, SavedNorm};
use super::param::ParamDeclarations;
use crate::refusal::refused;

/// Computes what is added to the residual from the normed residual.
pub(super) struct Sublayer {
    pub(super) norm: RmsNorm,
    pub(super) layer: Box<dyn Layer>,
    scale: Residual,
}

/// What a sublayer saves for its backward pass, by chunk except for `layer`.
pub(super) struct Saved {
    /// The residual at its input.
    pub(super) residual: Vec<Tensor>,
    normed: Vec<SavedNorm>,
    pub(super) layer: layer::Saved,
    out: Vec<Rows>,
}

/// The activations between two sublayers.
pub(super) struct Hidden {
    /// `[n, D]`, f32.
    pub(super) residual: Vec<Tensor>,
    /// Router states, `[n, R]`, from the first router on.
    pub(super) state: Option<Vec<Tensor>>,
    /// The next norm's output, where it was computed together with the residual.
    pub(super) normed: Option<Vec<(Tensor, SavedNorm)>>,
}

/// Gradients of the activations, up to the norm that reads the residual: the sublayer before it passes on both at once.
pub(super) struct HiddenGrad {
    /// Gradients of the norm's output, and of the residual that bypasses it.
    pub(super) residual: Vec<NormOutputGrads>,
    /// Gradients of the router states, `[n, R]`, f32.
    pub(super) state: Option<Vec<Tensor>>,
}

impl Saved {
    /// What was added to the residual.
    pub(super) fn out(&self, pass: &Pass<'_>) -> Result<Vec<Tensor>> {
        self.out.iter().map(|rows| rows.gathered(pass.ops).map_err(refused)).collect()
    }
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

/// The names of a sublayer's norm and of the scaling behind it, and its place in the layer.
pub(super) struct Names {
    pub(super) norm: &'static str,
    pub(super) scale: &'static str,
    pub(super) number: usize,
}

impl Sublayer {
    /// Declares its norm, the layer that `make` declares, and its residual scaling.
    pub(super) fn declare(
        root: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        place: LayerPlace,
        Names { norm, scale, number }: Names,
        make: impl FnOnce(&mut ParamDeclarations<'_>) -> Box<dyn Layer>,
    ) -> Sublayer {
        // Zyphra counts sublayers and scales the residual at their inputs; we scale it at the previous output.
        let (name, zyphra) = (format!("layers.{}", place.layer), 2 * place.layer + number);
        let next = match zyphra + 1 < 2 * config.num_hidden_layers as usize {
            true => format!("layers.{}.res_scale", zyphra + 1),
            false => "res_scale".to_owned(),
        };
        let mut scope = root.inside(&name, &format!("layers.{zyphra}"));
        let norm = RmsNorm::declare(&mut scope, config, norm, "input_norm.weight");
        let layer = make(&mut scope);
        let mut scope = root.inside(&format!("{name}.{scale}"), &next);
        Sublayer { norm, layer, scale: Residual::declare(&mut scope, config) }
    }

    /// Returns its output, what its backward pass reads, and its router's token counts by class. Without a `next` norm
    /// the residual is not computed: what is saved does not depend on it.
    pub(super) fn forward(
        &self,
        pass: &Pass<'_>,
        mut flow: Hidden,
        next: Option<&RmsNorm>,
    ) -> Result<(Hidden, Saved, Option<Tensor>)> {
        // The residual is f32; the operands of a layer's matmuls have the dtype of their weights.
        let (x, normed) = flow.normed(pass, &self.norm)?;
        let Hidden { residual, state, .. } = flow;
        let made = self.layer.forward(pass, &x, state)?;
        let sums = |next: &RmsNorm| -> Result<(Vec<_>, Vec<_>)> {
            let sides = made.out.iter().zip(&residual);
            sides
                .map(|(out, residual)| self.scale.forward_norm(pass, out, residual, next))
                .collect()
        };
        let (after, next) = next.map(sums).transpose()?.unzip();
        let saved = Saved { residual, normed, layer: made.saved, out: made.out };
        let residual = after.unwrap_or_default();
        Ok((Hidden { residual, state: made.state, normed: next }, saved, made.counts))
    }

    /// Takes the gradients of its output, and the norm that they reach; returns those of its input.
    pub(super) fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: HiddenGrad,
        behind: &RmsNorm,
        sink: &mut Gradients<'_>,
    ) -> Result<HiddenGrad> {
        let Saved { residual, normed, layer, out } = saved;
        let (mut rows, mut gates, mut besides) = (Vec::new(), Vec::new(), Vec::new());
        let sides = out.iter().zip(&residual);
        for (chunk, ((out, residual), returned)) in sides.zip(grad.residual).enumerate() {
            let (scale, sink) = (&self.scale, &mut sink.of(chunk));
            let found = scale.backward_norm(pass, out, residual, behind, returned, sink)?;
            rows.push(found.0);
            gates.extend(found.1);
            besides.push(found.2);
        }
        drop((out, residual));
        let out = BranchGrads { rows, gates };
        let Backward { x, state } = self.layer.backward(pass, layer, &out, grad.state, sink)?;
        let residual = normed.into_iter().zip(x).zip(besides);
        let residual = residual.map(|((normed, grad), beside)| NormOutputGrads {
            normed,
            grad,
            beside: Some(beside),
        });
        Ok(HiddenGrad { residual: residual.collect(), state })
    }
}
