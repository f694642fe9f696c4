//! The rows of buckets in `zdata plan`.

use contract::Result;
use loader::OpenedCurriculum;
use serde::Serialize;
use store::Split;

use super::{SourceRow, count, decimals, epochs, many, output, table};

/// How a bucket was cut from its source.
#[derive(Serialize)]
pub(super) struct BucketRow {
    /// The source that it is cut from.
    source: String,
    /// Its own name.
    bucket: String,
    /// What its documents have in common.
    holds: String,
    /// Its share of the source's tokens; unknown where the store is a stub, as what follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<f64>,
    /// Tokens of the blocks of the store that have its text, by its tokens: what a first pass reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    read_amplification: Option<f64>,
    /// Documents and tokens of the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    of: Option<[u64; 2]>,
}

impl BucketRow {
    /// `None` if `name` is no bucket.
    pub(super) fn new(opened: &OpenedCurriculum, name: &str) -> Result<Option<Self>> {
        let Some((source, buckets, number)) = opened.curriculum.bucket(name) else {
            return Ok(None);
        };
        let mut row = BucketRow {
            source: source.to_owned(),
            bucket: buckets.all().nth(number).unwrap_or_default().to_owned(),
            holds: buckets.meaning(number),
            share: None,
            read_amplification: None,
            of: None,
        };
        if let Some(stores) = opened.text() {
            let stream = stores.stream(name, Split::Train)?;
            let whole = stream.whole_record();
            row.share = Some(epochs(stream.tokens(), whole.tokens));
            row.read_amplification = Some(epochs(stream.block_tokens()?, stream.tokens()));
            row.of = Some([whole.documents, whole.tokens]);
        }
        Ok(Some(row))
    }
}

/// The tables of buckets, one for each source that is cut.
pub(super) fn text(sources: &[SourceRow]) -> String {
    let mut out = String::new();
    let cut = |row: &SourceRow| row.bucket.as_ref().map(|bucket| bucket.source.clone());
    let mut names: Vec<String> = sources.iter().filter_map(cut).collect();
    names.dedup();
    for name in names {
        out += &format!("{}, cut into buckets\n", output::plain(&name));
        let head = ["bucket", "holds", "documents", "tokens", "share", "taken", "epochs", "reads"];
        let (mut rows, mut left, mut all) = (Vec::new(), [0, 0], None);
        for row in sources.iter().filter(|row| cut(row).as_deref() == Some(name.as_str())) {
            let SourceRow { documents, tokens, taken, epochs, bucket, .. } = row;
            let Some(BucketRow { bucket, holds, share, read_amplification, of, .. }) = bucket
            else {
                continue;
            };
            let known = |value: Option<String>| value.unwrap_or_default();
            left = [left[0] + documents, left[1] + tokens];
            all = *of;
            rows.push([
                output::plain(bucket),
                output::plain(holds),
                count(*documents),
                count(*tokens),
                known(share.map(|share| format!("{:.2} %", share * 100.0))),
                count(*taken),
                decimals(*epochs),
                known(read_amplification.map(|times| format!("{times:.2} x"))),
            ]);
        }
        out += &table(head, rows);
        if let Some([documents, tokens]) = all.filter(|[documents, _]| *documents > left[0]) {
            out += &format!(
                "  in no bucket: {} of {}\n",
                many(documents - left[0], "document"),
                many(tokens - left[1], "token")
            );
        }
    }
    out
}
