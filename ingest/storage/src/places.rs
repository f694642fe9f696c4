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
    for url in [
        "s3://b/key",
        "gs://b/key",
        "az://b/key",
        "https://b/key",
        "http://localhost:1/key",
        "hf://datasets/o/n/key",
    ] {
        let place = locate(url).unwrap();
        assert!(place.is_remote());
        let writes = ["s3", "gs", "az"].contains(&&url[..2]);
        assert_eq!(writable(&place).is_ok(), writes, "{url}");
    }
    for wrong in [
        "",
        "a\0b",
        "s3://b/a\0b",
        "S3://b/key",
        "ftp://b/key",
        "http://b/key",
        "gs://b",
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
}
