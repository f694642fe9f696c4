//! The embedding of tokens, from which the residual begins.

use contract::Result;
use tch::{Kind, Tensor};

use crate::model::ZayaConfig;
use crate::model::cut::Chunk;
use crate::model::gradients::{ChunkGradients, GradientTerm, Gradients, emit};
use crate::model::layer::Pass;
use crate::model::param::{ParamDeclarations, ParamId};
use crate::refusal::refused;

/// The embedding, which is also the head, and the scaling that makes the first residual.
pub(in crate::model) struct Embedding {
    pub(in crate::model) tokens: ParamId,
    scale: ParamId,
    bias: ParamId,
}

impl Embedding {
    pub(in crate::model) fn declare(
        root: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
    ) -> Embedding {
        let width = config.hidden_size;
        let tokens = "embed_tokens.weight";
        Embedding {
            tokens: root.embedding(tokens, tokens, [config.vocab_size, width]),
            scale: root.vector(
                "input_hidden_states_scale",
                "layers.0.res_scale.hidden_states_scale",
                width,
                1.0,
            ),
            bias: root.vector(
                "input_hidden_states_bias",
                "layers.0.res_scale.hidden_states_bias",
                width,
                0.0,
            ),
        }
    }

    /// Embeddings with their bias, and the residual computed from them, by chunk.
    pub(in crate::model) fn forward(&self, pass: &Pass<'_>) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let w = pass.weights;
        let (bias, scale) = (&w[self.bias], &w[self.scale]);
        let made = pass.chunks.iter().map(|chunk| {
            let made = pass.ops.embedding(&w[self.tokens], &chunk.tokens, bias, scale);
            made.map(|[embedded, residual]| (embedded, residual)).map_err(refused)
        });
        made.collect()
    }

    /// Takes the gradient of the residual and, if there is one chunk, the head's term of the embedding's gradient.
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
            sink.term(self.tokens, GradientTerm::Second, table.into())?;
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
        let (ops, scale) = (pass.ops, &pass.weights[self.scale]);
        let found = ops.embedding_backward(&chunk.tokens, embedded, scale, residual, table);
        let [bias, scale] = found.map_err(refused)?;
        emit(sink, self.scale, scale)?;
        emit(sink, self.bias, bias)
    }
}
