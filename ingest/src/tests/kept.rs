//! Fields that `keep` names: stored with the provenance of each document, shown, and part of the digest.

use serde_json::json;

use super::*;

#[test]
fn kept_fields_are_stored_with_their_documents_and_hashed() {
    let bench = Workbench::new(1);
    let line = |q: u64, first: u64, i: u64| {
        let meta = if i.is_multiple_of(3) { json!({"q": q}) } else { json!({"tags": [i, "a b"]}) };
        json!({"id": format!("d{i}"), "text": document(first + i), "meta": meta}).to_string() + "\n"
    };
    let lines = |q: u64, first: u64| (0..90).map(|i| line(q, first, i)).collect::<String>();
    bench.write("web-0.jsonl", lines(5, 0));
    bench.write("web-1.jsonl", lines(5, 200));
    let keep = r#"["meta.q", "meta.tags", "meta.none"]"#;
    let corpus = |keep: &str| {
        let text = fs::read_to_string(bench.corpus(IN_PARTS)).unwrap();
        bench.write("corpus.toml", text.replacen("id = \"id\"\n", keep, 1))
    };
    let with = corpus(&format!("id = \"id\"\nkeep = {keep}\n"));
    let store = bench.path("store");
    let manifest = built(&with, &store, 2);
    let record = &manifest.sources[0];
    assert_eq!(record.keep, ["meta.q", "meta.tags", "meta.none"]);
    let mut seen = 0;
    for shard in record.train.shards.iter().chain(&record.validation.shards) {
        let file = open::part_file(&store, "web", shard.part, &shard.document_file.name);
        for row in Documents::open(&file).unwrap() {
            let row = row.unwrap();
            let i = row.row - 1;
            let wanted = match i.is_multiple_of(3) {
                true => [Some("5".to_owned()), None, None],
                false => [None, Some(format!("[{i},\"a b\"]")), None],
            };
            assert_eq!(row.kept, wanted);
            let kept = record.kept(&row);
            assert_eq!(kept.len(), 1);
            seen += 1;
        }
    }
    assert_eq!(seen, 180);
    assert_eq!(verify(&store, true).unwrap().damages, []);
    // Tokens and ids are equal, a kept value is not.
    bench.write("web-0.jsonl", lines(6, 0));
    let other = built(&with, &bench.path("other"), 1);
    assert_eq!(other.sources[0].train.tokens, record.train.tokens);
    assert_ne!(other.sources[0].train.digest, record.train.digest);
    // A source that keeps nothing has another request and the same tokens.
    let without = built(&corpus("id = \"id\"\n"), &bench.path("without"), 1);
    assert_eq!(without.sources[0].train.tokens, record.train.tokens);
    assert_ne!(without.request, other.request);
}
