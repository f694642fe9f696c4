//! dev
fn main() {
    for f in std::env::args().skip(1) {
        let bytes = std::fs::read(&f).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        json["model"].as_object_mut().unwrap().remove("type");
        let r = fastokens::Tokenizer::from_json(json).map(|_| ());
        println!("{f}: raw {r:?}");
        match ingest::tokenize::Tokenizer::new(bytes, ingest::tokenize::Engine::Fastest) {
            Ok(t) => println!("   {} {:?} vocab {}", t.encoder(), t.why_slow(), t.vocab()),
            Err(e) => println!("   {e}"),
        }
    }
}
