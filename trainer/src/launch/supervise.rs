//! The launcher while its ranks run: hands on a request to stop, and ends what is left when a rank fails.

use std::io::Write as _;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contract::{Class, Fault, Result};

/// Between two looks at the ranks.
const LOOK: Duration = Duration::from_millis(10);

/// What the other ranks get to say what happened, once one has failed: on busy cores they notice late.
const GRACE: Duration = Duration::from_secs(6);

/// A rank that was started.
pub(super) struct Rank {
    rank: u32,
    child: Child,
    ended: Option<ExitStatus>,
}

impl Rank {
    /// One that runs.
    pub(super) fn new(rank: u32, child: Child) -> Self {
        Rank { rank, child, ended: None }
    }
}

/// Waits for all; when one fails, the others get a moment to end by themselves.
pub(super) fn supervise(mut ranks: Vec<Rank>, stop: &AtomicBool) -> Result<u8> {
    let (mut failed, mut asked): (Option<Instant>, bool) = (None, false);
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        if stop.load(Ordering::Relaxed) && !asked {
            asked = true;
            for rank in &mut ranks {
                // A rank that is gone already needs no word.
                let _ = rank.child.stdin.as_mut().map(|input| input.write_all(b"stop\n"));
            }
        }
        for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            let ended = rank.child.try_wait().map_err(|error| {
                Fault::machine(format!("cannot wait for rank {}: {error}", rank.rank))
            })?;
            if let Some(status) = ended.filter(|status| !status.success()) {
                failed.get_or_insert_with(Instant::now);
                if status.code().is_none() {
                    contract::note!("error: rank {} was ended from outside: {status}", rank.rank);
                }
            }
            rank.ended = ended;
        }
        if failed.is_some_and(|since| since.elapsed() > GRACE) {
            for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
                let _ = rank.child.kill();
            }
        }
        thread::sleep(LOOK);
    }
    Ok(exit_code(&ranks))
}

/// The code of the rank that knows most: those that only lost another one say "machine".
fn exit_code(ranks: &[Rank]) -> u8 {
    let lost = Class::Machine.exit_code();
    let code = |rank: &Rank| {
        let code = rank.ended.and_then(|status| status.code());
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(lost)
    };
    let codes: Vec<u8> = ranks.iter().map(code).filter(|code| *code != 0).collect();
    let told = codes.iter().find(|code| **code != lost);
    told.or(codes.first()).copied().unwrap_or(0)
}
