//! `ztrain supervise`.

use std::ffi::{OsStr, OsString};

use contract::{Fault, Result};
use store::Location;
use trainer::launch::rules::FaultRules;
use trainer::launch::{self, Supervisor};

use super::{SignalRequests, StartupStage, place, train};

/// Arguments.
#[derive(clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Faults and supervision")]
pub(crate) struct Args {
    /// What to do about each kind of fault; without it lost ranks are started again, then the run
    /// continues without them.
    #[arg(long, value_name = "FILE", value_parser = place())]
    rules: Option<Location>,
    /// Start the ranks by this, a line for the shell, in the place of --nproc: 'srun --kill-on-bad-exit=1'.
    #[arg(long, value_name = "LINE", conflicts_with = "nproc")]
    launch: Option<String>,
    #[command(flatten)]
    pub(crate) train: train::Args,
}

/// Watches over a run until it is done.
pub(crate) fn exec(mut args: Args) -> Result<u8> {
    let requests = SignalRequests::default();
    requests.listen()?;
    let stop = &requests.stop;
    if let Some(launched) = launch::place(|name| std::env::var(name).ok())? {
        let rank = launched.place.rank;
        return Err(Fault::usage("one supervisor watches over all ranks")
            .at("the environment")
            .found(format!("rank {rank} of {}", launched.place.world))
            .hint("give the launcher to it: ztrain supervise --launch 'srun ...' ..."));
    }
    let read = args.rules.as_ref().map(FaultRules::read).transpose()?;
    let (rules, text) = read.unwrap_or_default();
    let mut arguments = of_training(std::env::args_os().skip(1));
    let ranks = args.train.ranks_to_spawn()?.unwrap_or(1);
    // Between two attempts no other process may take the folder.
    let locks = args.train.lock_folder()?;
    arguments.extend(train::of_group(&locks));
    let (launch, run) = (args.launch, args.train.folder()?);
    requests.answer(if launch.is_some() { StartupStage::Others } else { StartupStage::Ranks })?;
    let ended = Supervisor { rules, text, arguments, launch, run, ranks }.run(stop);
    locks.release();
    ended
}

/// The arguments but those that are the supervisor's own.
fn of_training(all: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let (mut kept, mut skip) = (Vec::new(), false);
    for argument in all.skip_while(|argument| argument != OsStr::new("supervise")).skip(1) {
        let text = argument.to_string_lossy();
        let own = ["--rules", "--launch"].into_iter().find(|flag| text.starts_with(flag));
        match own.map(|flag| text[flag.len()..].starts_with('=')) {
            _ if skip => skip = false,
            Some(inside) => skip = !inside,
            None => kept.push(argument),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_supervisors_own_arguments_go_no_further() {
        let all = [
            "ztrain",
            "supervise",
            "--rules",
            "a.toml",
            "--curriculum",
            "c",
            "--launch=srun -n 4",
            "--out",
            "x",
        ];
        let kept = of_training(all.into_iter().map(OsString::from));
        assert_eq!(kept, ["--curriculum", "c", "--out", "x"]);
    }
}
