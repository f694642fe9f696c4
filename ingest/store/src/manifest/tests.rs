//! The identity of a store is frozen, and changes only with what it covers.

use contract::{Digest, Identity};
use proptest::prelude::*;

use super::{StreamDigest, chain};
use crate::{
    DocumentRecord, Dropped, InputRecord, Manifest, PartRecord, PreparedRecord, SourceRecord,
    StreamRecord, TokenizerRecord,
};

/// A manifest with names and templates that Unicode tables, or `Debug`, would escape.
fn manifest() -> Manifest {
    let input = |path: &str, bytes: u64, byte: u8| InputRecord {
        path: path.to_owned(),
        bytes,
        sha256: Identity([byte; 32]),
        documents: 1,
        segments: 1,
    };
    let train =
        StreamRecord { tokens: 12, documents: 2, digest: Digest(99), ..StreamRecord::empty() };
    Manifest {
        format: 2,
        digest: Identity([0; 32]),
        request: Identity([0; 32]),
        tokenizer: TokenizerRecord {
            sha256: Identity([7; 32]),
            vocab: 257,
            begin: None,
            end: Some(256),
            encoder: "fast".to_owned(),
        },
        token_bytes: 2,
        unit: 131_072,
        validation: "1/1000".to_owned(),
        sources: vec![SourceRecord {
            name: "caf\u{e9} \u{6587}\u{5b57} e\u{301}\u{1f9ff}".to_owned(),
            preparation: "format=jsonl text=\"\u{5185}\u{5bb9}\" id=none max=9 | \
                          template=\"\u{201e}{question}\u{201c} \\\" \u{e0fff}\""
                .to_owned(),
            inputs: vec![input("a.jsonl", 5, 1), input("b.jsonl", 0, 2)],
            train,
            validation: StreamRecord { digest: Digest(0), ..StreamRecord::empty() },
            dropped: Vec::new(),
            prepared: None,
            removed_file: None,
            keep: Vec::new(),
            parts: vec![PartRecord::default()],
        }],
    }
}

/// Frozen: computed by another program (Python's hashlib over the bytes that `contract::framed` describes).
#[test]
fn an_identity_is_the_same_for_ever() {
    let wanted = "722efa6cbb2b9a83b118486c8dd6da06d681890af88c486b81f6fd87ff3a0860";
    assert_eq!(manifest().identity().to_string(), wanted);
}

#[test]
fn what_an_identity_covers_moves_it() {
    let moved = |change: &dyn Fn(&mut Manifest)| {
        let mut other = manifest();
        change(&mut other);
        other.identity() != manifest().identity()
    };
    assert!(moved(&|m| m.format = 3));
    assert!(moved(&|m| m.tokenizer.sha256 = Identity([8; 32])));
    assert!(moved(&|m| m.tokenizer.vocab += 1));
    assert!(moved(&|m| m.tokenizer.begin = Some(0)));
    assert!(moved(&|m| m.tokenizer.end = None));
    assert!(moved(&|m| m.sources[0].keep = vec!["q".to_owned()]));
    assert!(moved(&|m| (m.tokenizer.begin, m.tokenizer.end) = (Some(256), None)));
    assert!(moved(&|m| m.unit *= 2));
    assert!(moved(&|m| m.validation = "1/100".to_owned()));
    assert!(moved(&|m| m.sources[0].name.push('x')));
    assert!(moved(&|m| m.sources[0].preparation.push('x')));
    // A letter moves from one text to its neighbour.
    assert!(moved(&|m| {
        let letter = m.sources[0].name.pop().unwrap();
        m.sources[0].preparation.insert(0, letter);
    }));
    assert!(moved(&|m| m.sources[0].inputs[1].bytes = 1));
    assert!(moved(&|m| m.sources[0].inputs.swap(0, 1)));
    assert!(moved(&|m| m.sources[0].train.tokens += 1));
    assert!(moved(&|m| m.sources[0].train.documents += 1));
    assert!(moved(&|m| m.sources[0].validation.digest = Digest(1)));
    assert!(moved(&|m| m.sources.push(m.sources[0].clone())));
    // Not covered: paths, the encoder, what was dropped or prepared, how it is stored.
    assert!(!moved(&|m| m.sources[0].inputs[0].path = "c.jsonl".to_owned()));
    assert!(!moved(&|m| m.sources[0].inputs[0].documents = 7));
    assert!(!moved(&|m| m.sources[0].inputs[0].segments = 7));
    assert!(!moved(&|m| m.tokenizer.encoder = "slow".to_owned()));
    assert!(!moved(&|m| m.token_bytes = 4));
    assert!(!moved(&|m| m.sources[0].train.text_bytes = 9));
    assert!(!moved(&|m| m.sources[0].prepared = Some(PreparedRecord::default())));
    let dropped = Dropped { reason: "empty".to_owned(), documents: 1, bytes: 0 };
    assert!(!moved(&|m| m.sources[0].dropped = vec![dropped.clone()]));
}

/// A document of file `file`, with one token.
fn document(id: Option<&str>, file: u32, group: Option<u32>, row: u64) -> DocumentRecord {
    let (id, bytes, first_token) = (id.map(str::to_owned), Some((row, row + 1)), 7 * row);
    DocumentRecord { id, file, group, row, bytes, first_token, tokens: 1, kept: Vec::new() }
}

/// The digest of files, each a list of segments with the rows of their documents.
fn digest(files: &[Vec<Vec<u64>>]) -> Digest {
    let mut digest = StreamDigest::default();
    for (file, segments) in (0..).zip(files) {
        for (group, rows) in (0..).zip(segments) {
            for row in rows {
                let record = document(None, file, Some(group), *row);
                digest.document(&[*row as u32], &record).unwrap();
            }
        }
        digest.end_file(segments.len() as u64);
    }
    digest.finish()
}

proptest! {
    /// Whatever stands before a segment has no effect on its chain, and every other difference has one.
    #[test]
    fn different_files_have_different_digests(
        a in prop::collection::vec(prop::collection::vec(prop::collection::vec(0u64..2, 0..3), 0..3), 0..3),
        b in prop::collection::vec(prop::collection::vec(prop::collection::vec(0u64..2, 0..3), 0..3), 0..3),
    ) {
        prop_assert_eq!(a == b, digest(&a) == digest(&b));
    }
}

#[test]
fn a_link_covers_a_document_but_not_where_it_came_to_stand() {
    let base = document(None, 1, None, 5);
    let link = |record: &DocumentRecord| chain(Digest(3), &[1, 2], record);
    let moved = DocumentRecord { file: 9, first_token: 1 << 40, ..base.clone() };
    assert_eq!(link(&moved), link(&base));
    // An id that is like the one shown to users is another one.
    let own = DocumentRecord { id: Some(base.shown_id().into_owned()), ..base.clone() };
    let others = [
        own,
        DocumentRecord { id: Some(String::new()), ..base.clone() },
        DocumentRecord { group: Some(0), ..base.clone() },
        DocumentRecord { row: 6, ..base.clone() },
        DocumentRecord { bytes: None, ..base.clone() },
        DocumentRecord { kept: vec![None], ..base.clone() },
        DocumentRecord { kept: vec![Some(String::new())], ..base.clone() },
        DocumentRecord { kept: vec![None, None], ..base.clone() },
        DocumentRecord { kept: vec![Some("ab".to_owned()), Some("c".to_owned())], ..base.clone() },
        DocumentRecord { kept: vec![Some("a".to_owned()), Some("bc".to_owned())], ..base.clone() },
        DocumentRecord { bytes: Some((5, 7)), ..base.clone() },
    ];
    others.iter().for_each(|other| assert_ne!(link(other), link(&base), "{other:?}"));
    assert_ne!(chain(Digest(4), &[1, 2], &base), link(&base));
    assert_ne!(chain(Digest(3), &[1, 3], &base), link(&base));
    // A segment that has ended takes nothing more.
    let mut digest = StreamDigest::default();
    digest.document(&[1], &document(None, 0, Some(2), 0)).unwrap();
    assert!(digest.document(&[1], &document(None, 0, Some(1), 0)).is_err());
}
