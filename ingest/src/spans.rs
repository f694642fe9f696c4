//! Pieces of a document's text.

/// A range of bytes in a document, both ends at character boundaries.
pub(crate) type Span = (u32, u32);

/// The text without these spans; none if they do not fit this text.
pub(crate) fn without(text: &str, spans: &[Span]) -> Option<String> {
    let (mut kept, mut done) = (String::with_capacity(text.len()), 0);
    for (start, end) in spans {
        kept += text.get(done..*start as usize)?;
        done = *end as usize;
    }
    kept += text.get(done..)?;
    Some(kept)
}
