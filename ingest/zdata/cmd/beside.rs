//! The run whose own curriculum (`run.toml`) is amended.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use contract::{Fault, Result};
use store::disk::{Held, draw_group};
use store::regular;

/// The ledger of the run whose own curriculum lies at `path`, if it is one.
pub(super) fn ledger_beside(path: &Path) -> Option<PathBuf> {
    let ledger = path.with_file_name("ledger.jsonl");
    (path.file_name().is_some_and(|name| name == "run.toml") && ledger.is_file()).then_some(ledger)
}

/// Holds the run whose own curriculum lies at `path`, if it is one, so that it does not begin while the file is
/// replaced. One that is under way would never see what is written, and its folder would tell of an amendment that it
/// has not.
pub(super) fn held(path: &Path) -> Result<Option<Held>> {
    let lock = ledger_beside(path).map(|ledger| ledger.with_file_name("lock"));
    let Some(lock) = lock.filter(|lock| lock.exists()) else { return Ok(None) };
    Held::take(&lock, &draw_group(), Duration::ZERO)?.map(Some).map_err(|who| {
        Fault::usage("this run is under way, and has read its curriculum")
            .at(path.display().to_string())
            .found(who)
            .wanted("a run that stands still")
            .hint("stop it (Ctrl-C leaves a checkpoint), amend this file, and go on with it")
    })
}

/// Refuses to amend a run's own curriculum of so many steps at a step that the run's ledger already has.
pub(super) fn refuse_recorded(path: &Path, step: u64, steps: u64) -> Result<()> {
    let Some(ledger) = ledger_beside(path) else { return Ok(()) };
    let recorded = last_step(&ledger).map_err(|error| Fault::io("read", &ledger, &error))?;
    if step > recorded {
        return Ok(());
    }
    Err(Fault::usage(format!("step {step} is trained already"))
        .at("--step")
        .found(format!("{recorded} steps in {}", ledger.display()))
        .wanted(match recorded < steps {
            true => format!("a step from {} to {steps}", recorded + 1),
            false => "no step: every one of this curriculum is trained".to_owned(),
        })
        .hint("for another past, train a run of its own with `ztrain --out`"))
}

/// The step of the last whole line of a ledger, found from its end; 0 where there is none.
fn last_step(ledger: &Path) -> std::io::Result<u64> {
    #[derive(serde::Deserialize)]
    struct Line {
        #[serde(default)]
        step: u64,
    }
    let mut file = regular::open(ledger)?;
    let (end, mut back) = (file.metadata()?.len(), 1 << 16);
    loop {
        let first = end.saturating_sub(back);
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(first))?;
        (&file).take(end - first).read_to_end(&mut bytes)?;
        // What follows the last end of a line is torn, what precedes the first may be.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
        let begins = bytes[..whole].iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        match begins.or((first == 0).then_some(0)) {
            Some(begins) => {
                let line = serde_json::from_slice::<Line>(&bytes[begins..whole]);
                return Ok(line.map_or(0, |line| line.step));
            }
            None => back *= 4,
        }
    }
}
