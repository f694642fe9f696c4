//! The worst tokens of a document, with their context.

use contract::{Fault, Result};
use loader::{Batch, InfillToken};
use serde::Serialize;

use crate::replay::documents::{DocumentLoss, DocumentPlace};
use crate::replay::texts::TextDecoder;

/// Tokens of context on either side.
const CONTEXT: usize = 12;

/// A token with a high loss.
#[derive(Clone, Debug, Serialize)]
pub struct WorstToken {
    /// Its position in the document, in tokens; `None` for a token that marks a part of a rearranged piece.
    pub token: Option<u64>,
    /// The row of the batch in which it is a label.
    pub row: u64,
    /// Its id.
    pub id: u32,
    /// Its loss, in nats.
    pub loss: f32,
    /// The text before it, its own text, and the text after it, within the row.
    pub text: [String; 3],
}

/// Which token of the document is at number `number` of a place.
fn token_at(place: &DocumentPlace, number: usize) -> Option<u64> {
    let Some(infill) = &place.infill else { return Some(place.first_token + number as u64) };
    match infill.places().get(number)? {
        InfillToken::Text(token) => Some(place.first_token + u64::from(*token)),
        InfillToken::Sentinel(_) => None,
    }
}

/// The `count` tokens of `document` with the highest loss, worst first; `losses` has one value per token of the batch.
pub(super) fn worst(
    batch: &Batch,
    document: &DocumentLoss,
    losses: &[f32],
    count: usize,
    decoder: &TextDecoder,
) -> Result<Vec<WorstToken>> {
    let width = batch.seq_len as usize;
    let mut found = Vec::new();
    for (index, place) in document.places.iter().enumerate() {
        let row = place.row as usize * width;
        let columns = place.columns.start as usize..place.columns.end as usize;
        let labelled = columns.clone().filter(|column| batch.columns().mask[row + column] != 0);
        found.extend(labelled.map(|column| (losses[row + column], index, column)));
    }
    // NaN is the worst; equal losses are in the order of the text.
    let key = |loss: f32| if loss.is_nan() { f32::INFINITY } else { loss };
    found.sort_by(|a, b| key(b.0).total_cmp(&key(a.0)).then((a.1, a.2).cmp(&(b.1, b.2))));
    let token = |(loss, index, column): (f32, usize, usize)| {
        let place = &document.places[index];
        let row = place.row as usize * width;
        let ids = |from: usize, to: usize| {
            let ids =
                batch.columns().tokens[row + from..row + to].iter().map(|id| u32::try_from(*id));
            let ids = ids.collect::<std::result::Result<Vec<_>, _>>();
            ids.map_err(|_| Fault::bug("a token with a negative id"))
        };
        let (start, end) = (place.columns.start as usize, place.columns.end as usize);
        let id = u32::try_from(batch.columns().labels[row + column])
            .map_err(|_| Fault::bug("a label with a negative id"))?;
        let before = ids(start.max((column + 1).saturating_sub(CONTEXT)), column + 1)?;
        let after = ids((column + 2).min(end), (column + 2 + CONTEXT).min(end))?;
        Ok(WorstToken {
            token: token_at(place, column + 1 - start),
            row: place.row,
            id,
            loss,
            text: [decoder.text(&before), decoder.text(&[id]), decoder.text(&after)],
        })
    };
    found.into_iter().take(count).map(token).collect()
}
