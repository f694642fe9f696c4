//! `zdata shuffle-test`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use contract::{Fault, Key, Permutation, Result, counted};
use mixer::shuffle_test::{SCORE_LIMIT, positions, scores};
use serde_json::json;

use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "Examples: zdata shuffle-test order.txt --next-epoch order-2.txt\n          \
    zdata shuffle-test --length 1000003 --seeds 1000\n\n\
    A score is in standard deviations from a uniformly random order; beyond 5 it is not chance. \
    An order that fails, or that has a number twice, ends with exit code 3."
)]
pub(crate) struct Args {
    /// A file with the order: whole numbers from 0, one on each line, none of them twice; - is standard input.
    #[arg(required_unless_present = "length", conflicts_with_all = ["length", "seeds"])]
    order: Option<PathBuf>,
    /// How many numbers the whole order has, where the file holds only its beginning [default: lines of the file].
    #[arg(long, value_name = "N", requires = "order", value_parser = clap::value_parser!(u64).range(..=LENGTH_MAX))]
    of: Option<u64>,
    /// The order of the next epoch, which should not resemble this one.
    #[arg(long, value_name = "FILE", requires = "order")]
    next_epoch: Option<PathBuf>,
    /// Test the order of this project for a source of so many samples.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(LENGTH_MIN..=LENGTH_MAX))]
    length: Option<u64>,
    /// With `--length`: how many seeds are tested.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The shortest order that can be tested: of a shorter one, too few positions are looked at.
const LENGTH_MIN: u64 = 2048;

/// The longest one: positions and lags are then added without an overflow.
const LENGTH_MAX: u64 = 1 << 62;

/// The worst score of a measure, and the seed that has it.
type Worst = BTreeMap<String, (f64, Option<u64>)>;

/// Does it.
pub(crate) fn exec(args: &Args) -> Result<()> {
    let (name, n, count, worst) = match (&args.order, args.length) {
        (Some(path), _) => listed(path, args.of, args.next_epoch.as_deref())?,
        (None, Some(n)) => ours(n, args.seeds),
        (None, None) => return Err(Fault::usage("an order or --length is missing")),
    };
    let failed = |score: f64| score.abs() > SCORE_LIMIT || score.is_nan();
    let failing: Vec<&str> = worst
        .iter()
        .filter(|(_, (score, _))| failed(*score))
        .map(|(name, _)| name.as_str())
        .collect();
    let measures: Vec<_> = worst
        .iter()
        .map(|(name, (score, seed))| json!({"measure": name, "score": score, "seed": seed, "passes": !failed(*score)}))
        .collect();
    let answer = json!({
        "order": name, "length": n, "positions": count, "limit": SCORE_LIMIT, "passes": failing.is_empty(),
        "measures": measures,
    });
    output::answer(args.json, &answer, || {
        let mut text = format!("{name}: {} of {n} looked at\n", counted(count, "position"));
        for (name, (score, seed)) in &worst {
            let seed = seed.map(|seed| format!("  seed {seed}")).unwrap_or_default();
            let verdict = if failed(*score) { "FAILS" } else { "passes" };
            let _ = writeln!(text, "{verdict:6} {score:>8.2}  {name}{seed}"); // A string takes everything.
        }
        text
    })?;
    match failing.is_empty() {
        true => Ok(()),
        false => Err(Fault::data("this order does not look like chance")
            .at(name)
            .found(format!(
                "{} beyond the limit: {}",
                counted(failing.len(), "measure"),
                failing.join("; ")
            ))
            .wanted(format!("scores of at most {SCORE_LIMIT}"))
            .hint("standard output has every score")),
    }
}

/// The worst scores of the permutation of this project, over seeds.
fn ours(n: u64, seeds: u64) -> (String, u64, u64, Worst) {
    let mut worst = Worst::new();
    for seed in 0..seeds {
        let order = |epoch| Permutation::new(Key::from_seed(seed).child("source").nth(epoch), n);
        let (this, next) = (order(0), order(1));
        let found = scores(
            n,
            positions(n),
            &|index| Some(this.forward(index)),
            Some(&|index| Some(next.forward(index))),
        );
        for (name, score) in found {
            let worst = worst.entry(name).or_insert((0.0, None));
            if worst.1.is_none() || score.abs() > worst.0.abs() || score.is_nan() {
                *worst = (score, Some(seed));
            }
        }
    }
    ("zdata".to_owned(), n, positions(n), worst)
}

/// The scores of an order that a file lists.
fn listed(path: &Path, of: Option<u64>, next: Option<&Path>) -> Result<(String, u64, u64, Worst)> {
    if next == Some(path) && path == Path::new("-") {
        return Err(Fault::usage("standard input has one order")
            .at("--next-epoch")
            .wanted("a file"));
    }
    let values = numbers(path)?;
    let n = of.unwrap_or(values.len() as u64);
    let place = path.display().to_string();
    refuse_short(&place, values.len() as u64, n)?;
    refuse_repeated(&place, &values, n)?;
    let next = next
        .map(|path| {
            let (next, place) = (numbers(path)?, path.display().to_string());
            refuse_short(&place, next.len() as u64, n)?;
            refuse_repeated(&place, &next, n).map(|()| next)
        })
        .transpose()?;
    let at = |values: &[u64], index: u64| values.get(usize::try_from(index).ok()?).copied();
    let next = next.as_ref().map(|next| |index| at(next, index));
    let count = positions(n).min(values.len() as u64);
    let next = next.as_ref().map(|next| next as &dyn Fn(u64) -> Option<u64>);
    let found = scores(n, count, &|index| at(&values, index), next);
    Ok((place, n, count, found.into_iter().map(|(name, score)| (name, (score, None))).collect()))
}

/// The whole numbers of a file, one on each line.
fn numbers(path: &Path) -> Result<Vec<u64>> {
    let opened: Box<dyn Read> = match path == Path::new("-") {
        true => Box::new(std::io::stdin()),
        false => {
            Box::new(std::fs::File::open(path).map_err(|error| Fault::io("open", path, &error))?)
        }
    };
    let mut numbers = Vec::new();
    for (index, line) in BufReader::new(opened).split(b'\n').enumerate() {
        let line = line.map_err(|error| Fault::io("read", path, &error))?;
        let text = String::from_utf8_lossy(&line);
        let number = text.trim().parse().map_err(|_| {
            Fault::data("this line is not a whole number")
                .at(format!("{}:{}", path.display(), index + 1))
                .found(text.trim().chars().take(40).collect::<String>())
                .wanted("one whole number from 0 on each line")
                .hint("numpy writes an order as numpy.savetxt(FILE, order, fmt=\"%d\")")
        })?;
        numbers.push(number);
    }
    Ok(numbers)
}

fn refuse_short(place: &str, lines: u64, n: u64) -> Result<()> {
    if lines > n {
        return Err(Fault::usage("the file has more numbers than the order")
            .at(place)
            .found(lines)
            .wanted(format!("at most {n} (--of)")));
    }
    if lines < LENGTH_MIN {
        return Err(Fault::data("this order is too short to be compared with chance")
            .at(place)
            .found(counted(lines, "number"))
            .wanted(format!("at least {LENGTH_MIN}")));
    }
    Ok(())
}

/// Refuses numbers outside `0..n`, and one that is there twice: whatever it looks like, that is not an order.
fn refuse_repeated(place: &str, values: &[u64], n: u64) -> Result<()> {
    let mut lines: Vec<(u64, usize)> =
        values.iter().enumerate().map(|(index, value)| (*value, index + 1)).collect();
    lines.sort_unstable();
    if let Some((value, line)) = lines.last().filter(|(value, _)| *value >= n) {
        return Err(Fault::data("this number is not of the order")
            .at(format!("{place}:{line}"))
            .found(value)
            .wanted(format!("below {n}")));
    }
    let twice = lines.windows(2).find(|pair| pair[0].0 == pair[1].0);
    twice.map_or(Ok(()), |pair| {
        Err(Fault::data("the order has a number twice")
            .at(format!("{place}:{}", pair[1].1))
            .found(format!("{}, which line {} has too", pair[0].0, pair[0].1))
            .wanted("every number once"))
    })
}
