//! The launcher while its ranks run: hands on a request to stop, and ends what is left when a rank fails. Where ranks may go on
//! without each other it tells them who has ended, and ends those whom the others went on without.

use std::io::Write as _;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contract::{Class, Fault, Result};
use kernels::group::Agent;

use crate::refusal::lost;

/// Between two looks at the ranks.
const LOOK: Duration = Duration::from_millis(10);

/// Between two looks at who the ranks are that go on.
const ROLL: Duration = Duration::from_millis(200);

/// What the other ranks get to say what happened, once one has failed: on busy cores they notice late.
const GRACE: Duration = Duration::from_secs(6);

/// A rank that was started.
pub(super) struct Rank {
    rank: u32,
    child: Child,
    ended: Option<ExitStatus>,
    /// Why the launcher itself has ended it.
    evicted: Option<&'static str>,
}

impl Rank {
    /// One that runs.
    pub(super) fn new(rank: u32, child: Child) -> Self {
        Rank { rank, child, ended: None, evicted: None }
    }

    /// Whether it is lost, and not stopped by what would stop every other rank as well: it was ended from outside, or by its
    /// machine.
    fn is_lost(&self) -> bool {
        let machine = i32::from(Class::Machine.exit_code());
        self.ended.is_some_and(|status| status.code().is_none_or(|code| code == machine))
    }

    fn failed(&self) -> bool {
        self.ended.is_some_and(|status| !status.success())
    }
}

/// Ranks that may go on without each other.
pub(super) struct Elastic {
    agent: Agent,
    /// How many have to be left.
    least: u32,
    looked: Instant,
}

impl Elastic {
    /// At least so many.
    pub(super) fn new(agent: Agent, least: u32) -> Self {
        Elastic { agent, least, looked: Instant::now() }
    }

    /// Whether what is lost so far may be lost.
    fn allows(&self, ranks: &[Rank]) -> bool {
        let left = ranks.iter().filter(|rank| !rank.failed()).count();
        let other = ranks.iter().any(|rank| rank.failed() && !rank.is_lost());
        !other && left as u64 >= u64::from(self.least)
    }

    /// Tells the others of a rank that has ended.
    fn ended(&mut self, rank: &Rank, status: ExitStatus) -> Result<()> {
        self.agent
            .ended(rank.rank, status.success(), &format!("its process ended ({status})"))
            .map_err(lost)
    }

    /// Ends the ranks whom the others went on without.
    fn evict(&mut self, ranks: &mut [Rank]) -> Result<()> {
        if self.looked.elapsed() < ROLL {
            return Ok(());
        }
        self.looked = Instant::now();
        let members = self.agent.members().map_err(lost)?;
        for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            if !members.contains(&rank.rank) && rank.evicted.is_none() {
                rank.evicted = Some("the others went on without it, since it gave no answer");
                let _ = rank.child.kill();
            }
        }
        Ok(())
    }
}

/// Waits for all; when one fails, the others get a moment to end by themselves, unless they may go on without it.
pub(super) fn supervise(
    mut ranks: Vec<Rank>,
    mut elastic: Option<Elastic>,
    stop: &AtomicBool,
) -> Result<u8> {
    let (mut failed, mut asked): (Option<Instant>, bool) = (None, false);
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        if stop.load(Ordering::Relaxed) && !asked {
            asked = true;
            for rank in &mut ranks {
                // A rank that is gone already needs no word.
                let _ = rank.child.stdin.as_mut().map(|input| input.write_all(b"stop\n"));
            }
        }
        look(&mut ranks, elastic.as_mut())?;
        let endured = elastic.as_ref().is_some_and(|elastic| elastic.allows(&ranks));
        if !endured && ranks.iter().any(Rank::failed) {
            failed.get_or_insert_with(Instant::now);
        }
        if failed.is_some_and(|since| since.elapsed() > GRACE) {
            for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
                rank.evicted = Some("another rank failed, and it did not end by itself");
                let _ = rank.child.kill();
            }
        }
        if let Some(elastic) = &mut elastic {
            elastic.evict(&mut ranks)?;
        }
        thread::sleep(LOOK);
    }
    let endured = elastic.is_some_and(|elastic| elastic.allows(&ranks));
    Ok(if endured { 0 } else { exit_code(&ranks) })
}

/// Looks which ranks have ended.
fn look(ranks: &mut [Rank], mut elastic: Option<&mut Elastic>) -> Result<()> {
    for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
        let ended = rank.child.try_wait().map_err(|error| {
            Fault::machine(format!("cannot wait for rank {}: {error}", rank.rank))
        })?;
        if let Some(status) = ended.filter(|status| status.code().is_none()) {
            match rank.evicted {
                Some(why) => contract::note!("rank {} was ended by the launcher: {why}", rank.rank),
                None => {
                    contract::note!("error: rank {} was ended from outside: {status}", rank.rank)
                }
            }
        }
        rank.ended = ended;
        if let (Some(status), Some(elastic)) = (ended, elastic.as_deref_mut()) {
            elastic.ended(rank, status)?;
        }
    }
    Ok(())
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
