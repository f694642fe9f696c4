//! Pieces of a document's text.

/// Bytes of a document from one place to another, both between characters.
pub(crate) type Span = (u32, u32);

/// The text without these spans; nothing if they are not of this text.
pub(crate) fn without(text: &str, spans: &[Span]) -> Option<String> {
    let (mut kept, mut done) = (String::with_capacity(text.len()), 0);
    for (start, end) in spans {
        kept += text.get(done..*start as usize)?;
        done = *end as usize;
    }
    kept += text.get(done..)?;
    Some(kept)
}
