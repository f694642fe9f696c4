//! `zdata inspect`.

use contract::{Fault, Result, terminal};
use ingest::progress::meanwhile;
use ingest::{Corpus, dropped, inspect, sample};
use store::{Location, whole};

use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Examples: zdata inspect store\n          \
    zdata inspect store --dropped\n          \
    zdata inspect store --sample 5 --corpus corpus.toml")]
pub(crate) struct Args {
    /// The store: a folder or a URL.
    #[arg(value_parser = super::place())]
    store: Location,
    /// Answer a program.
    #[arg(long)]
    json: bool,
    /// Show every record that was read and not kept instead: where it stands, and why.
    #[arg(long, conflicts_with = "sample")]
    dropped: bool,
    /// Show N random records instead, and what each step of preparation did to them.
    #[arg(long, value_name = "N", requires = "corpus")]
    sample: Option<u64>,
    /// The corpus file that the store was built from: a sample reads its inputs again.
    #[arg(long, value_name = "CORPUS", value_parser = super::place(), requires = "sample")]
    corpus: Option<Location>,
    /// Seed of the sample.
    #[arg(long, default_value_t = 0, requires = "sample")]
    seed: u64,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    if args.store.is_file()? {
        return Err(Fault::usage("this is a file, and a store is a folder")
            .at(args.store.to_string())
            .wanted("the folder that `zdata build --out` wrote")
            .hint("for a corpus file: `zdata build CORPUS.toml --check`; for a curriculum: `zdata plan`"));
    }
    let manifest = whole::opened(&args.store)?;
    if let (Some(count), Some(corpus)) = (args.sample, &args.corpus) {
        let corpus = Corpus::read(corpus)?;
        let drawn = || sample::sample(&corpus, &args.store, &manifest, count, args.seed);
        let sample = meanwhile("inspect", "reading the inputs of the sample", drawn)?;
        if !args.json {
            return terminal::print(&sample::text(&sample));
        }
        let lines: String = sample.iter().map(output::json).collect::<Result<_>>()?;
        return terminal::print_raw(&lines);
    }
    if args.dropped {
        return dropped::each_of(&args.store, &manifest, |source, line| {
            let shown = inspect::dropped(&manifest, source, &line);
            output::answer(args.json, &shown.json, || shown.text.clone())
        });
    }
    let text = || inspect::text(&args.store, &manifest);
    output::answer(args.json, &inspect::json(&args.store, &manifest), text)
}
