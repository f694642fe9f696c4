//! `zdata publish`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use ingest::progress::{Measure, Progress};
use storage::publish;
use store::{Location, open, verify};

use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata publish store s3://bucket/store")]
pub(crate) struct Args {
    /// The store's folder.
    #[arg(value_parser = super::local("what lies in a bucket already is copied by the tools of its provider"))]
    store: PathBuf,
    /// Where to put it: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
    #[arg(value_parser = super::output_place())]
    url: Location,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let Location::Object(target) = &args.url else {
        return Err(Fault::usage("a store is published into a bucket")
            .at("URL")
            .found(&args.url)
            .wanted("s3://bucket/prefix, gs://bucket/prefix or az://container/prefix")
            .hint("a store on this machine is already where it was built"));
    };
    let manifest = open::manifest(&args.store)?;
    let files = publish::files(&manifest);
    let names: BTreeSet<&str> = files.iter().map(String::as_str).collect();
    publish::check_place(target, |name| names.contains(name))?;
    // An object is never replaced: what is damaged here would spoil the place.
    let damages = ingest::verify::verify(args.store.as_path(), quiet)?.damages;
    verify::fault(args.store.as_path(), &damages).map_or(Ok(()), Err)?;
    let put = |passed: &dyn Fn(u64)| publish::publish(&args.store, target, &files, passed);
    during(&args.store, &files, quiet, put)?;
    let (digest, url) = (manifest.digest.to_string(), args.url.to_string());
    let answer = serde_json::json!({ "digest": digest, "url": url });
    output::answer(args.json, &answer, || format!("{digest}  {url}\n"))
}

/// Puts the store in a folder into a bucket by `put`, and tells how far it is.
pub(super) fn during(
    folder: &Path,
    files: &[String],
    quiet: bool,
    put: impl FnOnce(&dyn Fn(u64)) -> Result<()>,
) -> Result<()> {
    let bytes = publish::bytes(folder, files)?;
    Progress::new("publish", Measure::Bytes, bytes, quiet).during(|passed| put(passed))
}
