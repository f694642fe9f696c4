//! Fear: that text of a web server or of the Hugging Face Hub is not the text of the files there.
//!
//! Both are the stand-in of `storage`, in this process: what is held here is the way from a corpus to a store.

use std::fs;

use storage::standin::{COMMIT, StandIn};
use store::location::UrlScheme;

use crate::support::{Ran, Scratch, arg, build, corpus, tree, zdata_command};

/// A server with the raw files of a corpus.
struct Served {
    scratch: Scratch,
    server: StandIn,
}

impl Served {
    fn new(documents: u64) -> Served {
        let (scratch, server) = (Scratch::new(), StandIn::new().unwrap());
        corpus(&scratch, documents, "part_bytes = 1");
        for entry in fs::read_dir(scratch.path("raw")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            server.put(
                &format!("raw/{name}"),
                &fs::read(&path).unwrap(),
                &format!("tag-{name}"),
                1,
            );
        }
        Served { scratch, server }
    }

    fn zdata(&self, args: &[&str], more: &[(&str, &str)]) -> Ran {
        let mut command = zdata_command(args);
        command.envs(self.server.variables()).env("ZDATA_CACHE", self.scratch.path("cache"));
        command.envs(more.iter().copied()).output().unwrap().into()
    }

    /// The corpus whose inputs are these.
    fn corpus(&self, name: &str, web: &[String], math: &str) -> String {
        let text = fs::read_to_string(self.scratch.path("corpus.toml")).unwrap();
        let text = text.replace("[\"raw/web-*\"]", &format!("{web:?}"));
        let text = text.replace("\"raw/math.jsonl\"", &format!("{math:?}"));
        arg(&self.scratch.write(name, text)).to_owned()
    }

    fn build(&self, corpus: &str, out: &str) -> Ran {
        self.zdata(&["build", corpus, "--out", arg(&self.scratch.path(out))], &[])
    }
}

#[test]
fn text_of_a_web_server_and_of_the_hub_is_the_text_of_the_files() {
    let served = Served::new(60);
    let near = build(&served.scratch, &served.scratch.path("corpus.toml"), "near");
    let wanted = served.zdata(&["verify", arg(&near)], &[]).ok()[..64].to_owned();
    let web = |name: &str| served.server.url(UrlScheme::Http, &format!("raw/{name}"));
    let hub = |pattern: &str| format!("hf://datasets/o/b@v1/raw/{pattern}");
    let files = ["web-0.jsonl", "web-1.jsonl.zst"].map(web);
    for (name, files, math) in [
        ("web", files.to_vec(), web("math.jsonl")),
        ("hub", vec![hub("web-*")], hub("math.jsonl")),
        ("both", vec![web("{web-0.jsonl,web-1.jsonl.zst}")], hub("m*.jsonl")),
    ] {
        let corpus = served.corpus(&format!("{name}.toml"), &files, &math);
        assert_eq!(served.build(&corpus, name).ok()[..64], wanted, "{name}");
        // Nothing is asked of the servers again where everything is here.
        served.zdata(&["verify", arg(&served.scratch.path(name))], &[("HF_ENDPOINT", "x")]).ok();
    }
    // The store says at which commit its text was.
    let hub_store = served.scratch.path("hub");
    let inspected = served.zdata(&["inspect", arg(&hub_store), "--json"], &[]).ok();
    assert!(
        inspected.contains(&format!("hf://datasets/o/b@{COMMIT}/raw/web-0.jsonl")),
        "{inspected}"
    );
    // Another name of the commit is the same text: nothing is built again.
    let pinned = format!("hf://datasets/o/b@{COMMIT}/raw/");
    let corpus =
        served.corpus("pinned.toml", &[format!("{pinned}web-*")], &format!("{pinned}math.jsonl"));
    let again = served.build(&corpus, "hub");
    assert!(again.err.contains("up to date"), "{again:?}");
}

/// A web server has no list of a store's files: each is asked for by itself.
#[test]
fn a_store_on_a_web_server_or_the_hub_is_the_store_here() {
    let served = Served::new(40);
    let store = build(&served.scratch, &served.scratch.path("corpus.toml"), "store");
    for (name, bytes) in tree(&store) {
        served.server.put(&format!("store/{name}"), &bytes, &name, 1);
    }
    let wanted = served.zdata(&["verify", arg(&store)], &[]).ok();
    let lacking = "store/web/00000/starts-train-00000.arrow";
    for scheme in [UrlScheme::Http, UrlScheme::Hf] {
        let url = served.server.url(scheme, "store");
        assert_eq!(served.zdata(&["verify", &url], &[]).ok()[..64], wanted[..64]);
        let bytes = served.server.state(|state| state.objects.remove(lacking)).unwrap();
        served.zdata(&["inspect", &url], &[]).fails(3, &["damaged", "starts-train-00000", &url]);
        served.server.put(lacking, &bytes.bytes, "again", 1);
    }
}

/// What cannot be is refused with its place and a way out, and nothing is written.
#[test]
fn what_the_web_and_the_hub_do_not_give_is_said() {
    let served = Served::new(20);
    let hub = |rest: &str| format!("hf://datasets/o/b{rest}");
    let math = hub("@main/raw/math.jsonl");
    let fails = |file: String, code: i32, words: &[&str]| {
        let corpus = served.corpus("bad.toml", &[file], &math);
        let told = served.build(&corpus, "bad").fails(code, words);
        assert!(
            told.contains("bad.toml:") || told.contains("hf://") || told.contains("http://"),
            "{told}"
        );
        assert!(!served.scratch.path("bad").exists());
    };
    let web = |key: &str| served.server.url(UrlScheme::Http, key);
    fails(web("raw/[a-z].jsonl"), 2, &["has no list", "name each file"]);
    fails(web("raw/none.jsonl"), 3, &["no file is named by", &web("raw/none.jsonl")]);
    fails(hub("@v2/raw/web-*"), 3, &["no such revision", "hf://datasets/o/b@v2", "HF_TOKEN"]);
    fails(hub("/raw/none*"), 3, &["no file is named by"]);
    served.server.state(|state| state.whole_only = true);
    fails(web("raw/web-0.jsonl"), 2, &["does not send parts of files", &web("raw/web-0.jsonl")]);
    served.server.state(|state| (state.whole_only, state.token) = (false, Some("secret".into())));
    fails(hub("/raw/web-*"), 3, &["HF_TOKEN does not open it", "bad.toml:"]);
    let corpus = served.corpus("gated.toml", &[hub("/raw/web-*")], &math);
    let out = served.scratch.path("gated");
    let args = ["build", &*corpus, "--out", arg(&out)];
    served.zdata(&args, &[("HF_TOKEN", "wrong")]).fails(6, &["gated", "ask for access"]);
    served.zdata(&args, &[("HF_TOKEN", "secret")]).ok();
    for place in [hub("/store"), "https://example.org/store".to_owned()] {
        let told = served.zdata(&["build", &*corpus, "--out", &place], &[]);
        let told = told.fails(2, &["--out", "only read", &place]);
        assert!(told.contains("wanted:") && told.contains("hint:"), "{told}");
    }
}
