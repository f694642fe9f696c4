//! The identity of a store is frozen, and changes only with what it covers.

use contract::{Digest, Identity};

use crate::{
    Dropped, InputRecord, Manifest, PreparedRecord, SourceRecord, StreamRecord, TokenizerRecord,
};

/// A manifest with names and templates that Unicode tables, or `Debug`, would escape.
fn manifest() -> Manifest {
    let input = |path: &str, bytes: u64, byte: u8| InputRecord {
        path: path.to_owned(),
        bytes,
        sha256: Identity([byte; 32]),
        documents: 1,
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
            validation: StreamRecord::empty(),
            dropped: Vec::new(),
            prepared: None,
            dropped_file: None,
        }],
    }
}

/// Frozen: computed by another program (Python's hashlib over the bytes that `contract::framed` describes).
#[test]
fn an_identity_is_the_same_for_ever() {
    let wanted = "5067da4452f5aa4b3be76c5dc2d0e4dcc27015706a474771dded2a1abb67939a";
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
    assert!(!moved(&|m| m.tokenizer.encoder = "slow".to_owned()));
    assert!(!moved(&|m| m.token_bytes = 4));
    assert!(!moved(&|m| m.sources[0].train.text_bytes = 9));
    assert!(!moved(&|m| m.sources[0].prepared = Some(PreparedRecord::default())));
    let dropped = Dropped { reason: "empty".to_owned(), documents: 1, bytes: 0 };
    assert!(!moved(&|m| m.sources[0].dropped = vec![dropped.clone()]));
}
