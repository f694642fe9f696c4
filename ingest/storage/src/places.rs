//! Which names are locations.

use contract::Class;

use super::*;

#[test]
fn a_place_is_a_path_or_an_address_and_nothing_else() {
    for path in ["a", "/a/b", "./s3://b/key", "a://b/../c d", "s3:/b/key", "1a://b", ":/x"] {
        let found = locate(path);
        match path {
            "a://b/../c d" => assert_eq!(found.unwrap_err().class(), Class::Usage),
            path => assert_eq!(found.unwrap(), Location::Local(PathBuf::from(path))),
        }
    }
    assert!(locate("s3://b/key").unwrap().is_remote());
    for wrong in [
        "",
        "a\0b",
        "s3://b/a\0b",
        "S3://b/key",
        "gs://b/key",
        "https://b/key",
        "s3://b",
        "s3://b/a//c",
    ] {
        assert_eq!(locate(wrong).unwrap_err().class(), Class::Usage, "{wrong}");
    }
}

#[test]
fn a_file_names_others_beside_it_or_anywhere() {
    let (local, remote) = (locate("corpora").unwrap(), locate("s3://b/corpora").unwrap());
    for (folder, name, wanted) in [
        (&local, "raw/a", "corpora/raw/a"),
        (&local, "/raw/a", "/raw/a"),
        (&local, "s3://c/a", "s3://c/a"),
        (&remote, "raw/a", "s3://b/corpora/raw/a"),
        (&remote, "../raw/a", "s3://b/raw/a"),
        (&remote, "/raw/a", "/raw/a"),
        (&remote, "s3://c/a", "s3://c/a"),
    ] {
        assert_eq!(resolve(folder, name).unwrap().to_string(), wanted, "{folder} {name}");
    }
    assert_eq!(bucket("b").join("a").to_string(), "s3://b/a");
}
