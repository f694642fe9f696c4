//! The embedding of tokens, from which the residual begins.

use contract::Result;
use tch::{Kind, Tensor};

use crate::model::ZayaConfig;
use crate::model::cut::Chunk;
use crate::model::gradients::{ChunkGradients, GradientTerm, Gradients, emit};
use crate::model::kinds::ResidualKind;
use crate::model::layer::Pass;
use crate::model::param::{ParamDeclarations, ParamId};
use crate::refusal::refused;

/// The embedding, and the scaling that makes the first residual.
pub(in crate::model) struct Embedding {
    pub(in crate::model) tokens: ParamId,
    /// Scale and bias, unless the residual is plain.
    scaling: Option<[ParamId; 2]>,
    /// Whether it is also the head, whose term of the gradient is the first of two.
    tied: bool,
}

impl Embedding {
    pub(in crate::model) fn declare(
        root: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
    ) -> Embedding {
        let width = config.hidden_size;
        let tokens = "embed_tokens.weight";
        let tokens = root.embedding(tokens, tokens, [config.vocab_size, width]);
        let mut vector = |part: &str, value: f32| {
            let zyphra = format!("layers.0.res_scale.hidden_states_{part}");
            root.vector(&format!("input_hidden_states_{part}"), &zyphra, width, value)
        };
        let scaled = config.residual == ResidualKind::Scaled;
        let scaling = scaled.then(|| [vector("scale", 1.0), vector("bias", 0.0)]);
        Embedding { tokens, scaling, tied: config.tie_word_embeddings }
    }

    /// Scale and bias.
    fn scaling<'a>(&self, pass: &'a Pass<'_>) -> Result<[&'a Tensor; 2]> {
        match self.scaling {
            Some(ids) => Ok(ids.map(|id| pass.weights.of(id))),
            None => pass.neutral(),
        }
    }

    /// Embeddings with their bias, and the residual computed from them, by chunk.
    pub(in crate::model) fn forward(&self, pass: &Pass<'_>) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let (w, [scale, bias]) = (pass.weights, self.scaling(pass)?);
        let made = pass.chunks.iter().map(|chunk| {
            let made = pass.ops.embedding(&w[self.tokens], &chunk.tokens, bias, scale);
            made.map(|[embedded, residual]| (embedded, residual)).map_err(refused)
        });
        made.collect()
    }

    /// Takes the gradient of the residual and, if there is one chunk and the embedding is the head, the head's term of
    /// its gradient.
    pub(in crate::model) fn backward(
        &self,
        pass: &Pass<'_>,
        embedded: &[Tensor],
        residual: &[Tensor],
        head: Option<Tensor>,
        sink: &mut Gradients<'_>,
    ) -> Result<()> {
        // The head's term was computed first; the input's is added to it.
        if let Some(mut head) = head {
            let (embedded, residual) = (&embedded[0], &residual[0]);
            let chunk = pass.chunks.of(0);
            self.looked_up(pass, chunk, embedded, residual, &mut head, &mut sink.of(0))?;
            return sink.whole(self.tokens, head);
        }
        let weights = &pass.weights[self.tokens];
        for at in pass.chunks.by_leaf() {
            let (chunk, mut sink) = (pass.chunks.of(at), sink.of(at));
            let table = Tensor::f_zeros(weights.size(), (Kind::Float, weights.device()));
            let mut table = table.map_err(refused)?;
            let (embedded, residual) = (&embedded[at], &residual[at]);
            self.looked_up(pass, chunk, embedded, residual, &mut table, &mut sink)?;
            let term = if self.tied { GradientTerm::Second } else { GradientTerm::Only };
            sink.term(self.tokens, term, table.into())?;
        }
        Ok(())
    }

    /// Adds the gradients of a chunk's embedding rows to `table`.
    fn looked_up(
        &self,
        pass: &Pass<'_>,
        chunk: &Chunk,
        embedded: &Tensor,
        residual: &Tensor,
        table: &mut Tensor,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<()> {
        let (ops, [scale, _]) = (pass.ops, self.scaling(pass)?);
        let found = ops.embedding_backward(&chunk.tokens, embedded, scale, residual, table);
        let [bias, scale] = found.map_err(refused)?;
        let ids = self.scaling.into_iter().flatten().zip([scale, bias]);
        ids.into_iter().try_for_each(|(id, gradient)| emit(sink, id, gradient))
    }
}
