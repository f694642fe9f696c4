//! The text of documents as a step read it.

use contract::{Fault, Result};
use loader::Batch;
use serde::Serialize;
use tokenizers::Tokenizer;
use trainer::replay::Replayer;
use trainer::spec::RunSpec;

use super::ExplainedReplay;
use super::documents::{DocumentLoss, DocumentPlace};

/// A part of a document in a row of a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DocumentText {
    /// The row.
    pub row: u64,
    /// Its first token, counted in the document.
    pub first_token: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Its text.
    pub text: String,
}

/// Decodes tokens.
pub struct TextDecoder(Option<Tokenizer>);

impl TextDecoder {
    /// With the tokenizer of the run's store. If that cannot be read, tokens are shown as numbers.
    pub fn of(spec: &RunSpec) -> Result<TextDecoder> {
        Ok(TextDecoder(Tokenizer::from_bytes(spec.data.tokenizer()?).ok()))
    }

    /// The text of tokens.
    pub fn text(&self, ids: &[u32]) -> String {
        let decoded = self.0.as_ref().and_then(|tokenizer| tokenizer.decode(ids, false).ok());
        decoded.unwrap_or_else(|| ids.iter().map(|id| format!("<{id}>")).collect())
    }

    fn part(&self, batch: &Batch, place: &DocumentPlace) -> Result<DocumentText> {
        let row = batch.row(batch.columns().tokens, place.row);
        let columns = place.columns.start as usize..place.columns.end as usize;
        let ids = row[columns].iter().map(|id| u32::try_from(*id));
        let ids = ids.collect::<std::result::Result<Vec<u32>, _>>();
        let ids = ids.map_err(|_| Fault::bug("a token with a negative id"))?;
        Ok(DocumentText {
            row: place.row,
            first_token: place.first_token,
            tokens: ids.len() as u64,
            text: self.text(&ids),
        })
    }
}

/// The text of the first `count` documents of a replayed step, each as the parts in its rows.
pub fn texts(
    replayer: &Replayer,
    found: &ExplainedReplay,
    count: usize,
) -> Result<Vec<Vec<DocumentText>>> {
    let batch = replayer.batch(found.replayed.step)?;
    let decoder = TextDecoder::of(replayer.spec())?;
    let of = |document: &DocumentLoss| {
        document.places.iter().map(|place| decoder.part(&batch, place)).collect()
    };
    found.documents.iter().take(count).map(of).collect()
}
