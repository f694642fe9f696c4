//! Finds a rank's place in the environment that its launcher set.
//!
//! ```text
//! torchrun, --nproc   RANK, WORLD_SIZE, LOCAL_RANK; they meet at MASTER_ADDR, MASTER_PORT
//! srun                SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; at the first of SLURM_STEP_NODELIST
//! mpirun              OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; on this machine, if all ranks are on it
//! ```
//!
//! A rank uses the device of its local rank, or the only visible one (`*_VISIBLE_DEVICES`). The name of its node is
//! GROUP_RANK under torchrun, SLURM_NODEID under srun, and the host name otherwise.
//!
//! If torchrun itself listens at `MASTER_PORT`, the ranks meet at the next port: its store has no authentication.
//!
//! `MASTER_ADDR` and `MASTER_PORT` always take precedence. A shell in a Slurm allocation is not a rank: only srun sets
//! the number of tasks of a step.

use contract::{Fault, Result};
use kernels::group::RankAddress;

use super::key::run_key;

/// Set for the ranks that we start ourselves.
pub(super) const LAUNCHER: &str = "ZTRAIN_LAUNCHER";

/// Whether this process is a rank that [`super::spawn()`] started.
pub fn spawned_us() -> bool {
    std::env::var_os(LAUNCHER).is_some()
}

/// A rank, and the number of ranks on its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchedRank {
    /// Its place among all ranks.
    pub place: RankAddress,
    /// Its number on this machine, from 0, which selects its device.
    pub local_rank: u32,
    /// Ranks on this machine.
    pub local_world: u32,
    /// Whether this rank sees a single device, as with `srun --gpus-per-task=1`.
    pub one_device: bool,
}

impl LaunchedRank {
    /// The meaning of `--device cuda` for this rank: the device of its local rank, or the only one that it sees.
    pub fn device(&self) -> String {
        format!("cuda:{}", if self.one_device { 0 } else { self.local_rank })
    }
}

/// Variables in which launchers list the visible devices.
const VISIBLE: [&str; 3] = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"];

/// A larger number of ranks is taken for a mistake.
const RANKS_MAX: u32 = 1 << 20;

/// The default port of torchrun.
const PORT: u16 = 29500;

/// The place of this process, if a launcher started it. `variable` reads the environment.
pub fn place(variable: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchedRank>> {
    let number = |name: &str| -> Result<Option<u32>> {
        let Some(text) = variable(name) else { return Ok(None) };
        let wrong = |_| Fault::usage("not a number").at(name).found(&text).wanted("a whole number");
        text.trim().parse().map(Some).map_err(wrong)
    };
    let ways = [
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"],
        [
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_NODEID",
        ],
        [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            // Open MPI does not number nodes.
            "",
        ],
    ];
    for [rank_name, world_name, local_name, local_world_name, node_name] in ways {
        let (Some(rank), Some(world)) = (number(rank_name)?, number(world_name)?) else { continue };
        if rank >= world {
            return Err(Fault::usage("there is no such rank")
                .at(rank_name)
                .found(rank)
                .wanted(format!("a rank below {world_name}, which is {world}")));
        }
        if world > RANKS_MAX {
            return Err(Fault::usage("there cannot be so many ranks")
                .at(world_name)
                .found(world)
                .wanted(format!("at most {RANKS_MAX}")));
        }
        if world == 1 {
            return Ok(None);
        }
        let local_rank = number(local_name)?.unwrap_or(0);
        let local_world = variable(local_world_name);
        // Slurm writes "4(x2)": four tasks on each of two nodes.
        let local_world = local_world.and_then(|text| text.split(['(', ',']).next()?.parse().ok());
        let (host, port) = store(&variable, rank_name, world)?;
        let key = run_key(&variable, &host)?;
        let place = RankAddress {
            rank,
            world,
            host,
            port,
            rank_0_serves: variable(LAUNCHER).is_none(),
            key,
            name: name(&variable),
            interface: variable("GLOO_SOCKET_IFNAME").unwrap_or_default(),
            node: variable(node_name).unwrap_or_else(host_name),
        };
        let visible = VISIBLE.iter().find_map(|name| variable(name));
        // An empty list hides all devices, which leaves no choice.
        let one_device = visible.is_some_and(|list| !list.is_empty() && !list.contains(','));
        let local_world = local_world.unwrap_or(1);
        return Ok(Some(LaunchedRank { place, local_rank, local_world, one_device }));
    }
    no_half(&variable).map(|()| None)
}

/// Refuses incomplete variables of a launcher. Slurm is exempt: it sets the rank of a batch script as well.
fn no_half(variable: &impl Fn(&str) -> Option<String>) -> Result<()> {
    for [rank, world] in [["RANK", "WORLD_SIZE"], ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]]
    {
        let [set, missing] = match [rank, world].map(|name| variable(name).is_some()) {
            [true, false] => [rank, world],
            [false, true] => [world, rank],
            _ => continue,
        };
        return Err(Fault::usage("this is half of what a launcher says")
            .at(set)
            .found(format!("no {missing}"))
            .hint(format!("set both, as torchrun does, or unset {set}: then one rank trains")));
    }
    Ok(())
}

/// The address where the ranks meet.
fn store(
    variable: &impl Fn(&str) -> Option<String>,
    rank_name: &str,
    world: u32,
) -> Result<(String, u16)> {
    let port = match variable("MASTER_PORT") {
        Some(text) => Some(text.parse().ok().filter(|port: &u16| *port > 0).ok_or_else(|| {
            Fault::usage("not a port").at("MASTER_PORT").found(text).wanted("1 to 65535")
        })?),
        None => None,
    };
    if let Some(host) = variable("MASTER_ADDR") {
        let (port, taken) = (port.unwrap_or(PORT), variable("TORCHELASTIC_USE_AGENT_STORE"));
        let next = || port.checked_add(1).unwrap_or(port - 1);
        return Ok((host, if taken.as_deref() == Some("True") { next() } else { port }));
    }
    if rank_name.starts_with("SLURM")
        && let Some(host) = variable("SLURM_STEP_NODELIST").as_deref().and_then(first_host)
    {
        let job: u32 = variable("SLURM_JOB_ID").and_then(|text| text.parse().ok()).unwrap_or(0);
        // Two jobs that share a node must not share a port.
        return Ok((host, port.unwrap_or(20_000 + (job % 20_000) as u16)));
    }
    let here = variable("OMPI_COMM_WORLD_LOCAL_SIZE").and_then(|text| text.parse().ok());
    if rank_name.starts_with("OMPI") && here == Some(world) {
        return Ok(("127.0.0.1".to_owned(), port.unwrap_or(PORT)));
    }
    Err(Fault::usage("the ranks do not know where to meet")
        .at("MASTER_ADDR")
        .found("nothing")
        .wanted("the name or address of rank 0's machine")
        .hint("export MASTER_ADDR and MASTER_PORT, or start the ranks with torchrun or --nproc"))
}

/// The name of this machine; in a Slurm task, Slurm's name for it. Empty on all machines if it cannot be read.
pub(super) fn host_name() -> String {
    if let Ok(node) = std::env::var("SLURMD_NODENAME") {
        return node;
    }
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map(|name| name.trim().to_owned()).unwrap_or_default()
}

/// A name that separates this launch from an earlier one, since the launcher's store may outlive it.
pub(super) fn name(variable: &impl Fn(&str) -> Option<String>) -> String {
    let part = |name: &str| variable(name).unwrap_or_else(|| "0".to_owned());
    format!("ztrain/{}/{}/", part("TORCHELASTIC_RUN_ID"), part("TORCHELASTIC_RESTART_COUNT"))
}

/// The first host of a Slurm list: "gpu07" of "gpu[07-09,12],login1".
fn first_host(list: &str) -> Option<String> {
    let first = list.split(',').next()?;
    let Some((prefix, rest)) = first.split_once('[') else {
        return (!first.is_empty()).then(|| first.to_owned());
    };
    let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let suffix = list.split_once(']').map_or("", |(_, rest)| rest.split(',').next().unwrap_or(""));
    Some(format!("{prefix}{number}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::Class;

    const SECRET: (&str, &str) = ("ZTRAIN_RUN_KEY", "a secret of twenty-five...");

    fn found(environment: &[(&str, &str)]) -> Result<Option<LaunchedRank>> {
        place(|name| {
            let entry = environment.iter().find(|(key, _)| *key == name);
            entry.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn launchers_are_understood() {
        assert_eq!(found(&[]).unwrap(), None);
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "1"),
            ("MASTER_ADDR", "node7"),
            ("MASTER_PORT", "1234"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "job"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            SECRET,
        ];
        let launched = found(&torchrun).unwrap().unwrap();
        assert_eq!(launched.device(), "cuda:1");
        let RankAddress { rank, world, host, port, rank_0_serves, name, node, .. } = launched.place;
        assert_eq!((rank, world, host.as_str(), port), (3, 8, "node7", 1235));
        assert_eq!(node, "1");
        assert_eq!((rank_0_serves, name.as_str()), (true, "ztrain/job/2/"));
        assert_eq!((launched.local_rank, launched.local_world), (1, 2));
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "6"),
            ("SLURM_STEP_NODELIST", "gpu[07-09,12]"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_JOB_ID", "123456"),
            SECRET,
        ];
        let launched = found(&slurm).unwrap().unwrap();
        assert_eq!((launched.place.host.as_str(), launched.place.port), ("gpu07", 23_456));
        assert_eq!((launched.place.rank_0_serves, launched.local_world), (true, 4));
        assert_eq!(launched.place.node, "6");
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let launched = found(&mpi).unwrap().unwrap();
        assert_eq!((launched.place.host.as_str(), launched.place.node), ("127.0.0.1", host_name()));
        let slip = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "99999999")];
        let fault = found(&slip).unwrap_err();
        assert_eq!(fault.class(), contract::Class::Usage);
        assert_eq!(fault.place(), Some("OMPI_COMM_WORLD_SIZE"), "{fault}");
    }

    #[test]
    fn a_rank_that_sees_one_device_takes_it() {
        for (variable, visible, device) in [
            ("CUDA_VISIBLE_DEVICES", "3", "cuda:0"),
            ("ROCR_VISIBLE_DEVICES", "GPU-9f1c", "cuda:0"),
            ("CUDA_VISIBLE_DEVICES", "0,1,2,3", "cuda:2"),
            ("CUDA_VISIBLE_DEVICES", "", "cuda:2"),
        ] {
            let task = [
                ("SLURM_PROCID", "6"),
                ("SLURM_STEP_NUM_TASKS", "8"),
                ("SLURM_LOCALID", "2"),
                ("SLURM_STEP_NODELIST", "gpu[07-08]"),
                SECRET,
                (variable, visible),
            ];
            assert_eq!(found(&task).unwrap().unwrap().device(), device, "{variable}={visible}");
        }
    }

    #[test]
    fn one_rank_is_no_group_and_a_batch_script_is_no_rank() {
        assert_eq!(found(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
        assert_eq!(found(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]).unwrap(), None);
        for half in ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"] {
            let fault = found(&[(half, "1")]).unwrap_err().to_string();
            assert!(
                fault.contains("half of what a launcher says") && fault.contains(half),
                "{fault}"
            );
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for wrong in [
            &[("RANK", "x"), ("WORLD_SIZE", "2")][..],
            &[("RANK", "0")],
            &[("WORLD_SIZE", "1")],
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
            &[("RANK", "0"), ("WORLD_SIZE", "2")],
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")],
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "p")],
            &[
                ("RANK", "0"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "localhost"),
                ("MASTER_PORT", "0"),
            ],
            &[
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ],
        ] {
            assert_eq!(found(wrong).unwrap_err().class(), Class::Usage, "{wrong:?}");
        }
    }

    #[test]
    fn the_first_machine_of_a_list() {
        for (list, first) in
            [("a1", "a1"), ("a1,b2", "a1"), ("gpu[07-09,12],x", "gpu07"), ("n[1,3]-ib,m", "n1-ib")]
        {
            assert_eq!(first_host(list).as_deref(), Some(first));
        }
        assert_eq!(first_host(""), None);
    }
}
