//! How much memory a process may use: that of the machine, or the limit of its control groups.
//!
//! Slurm, systemd and containers put a job into a group, nested in others; the limit of each group up to the root
//! counts. `/proc/self/cgroup` names the group, and `/proc/self/mountinfo` where its hierarchy is mounted, and from
//! which group on.

use std::path::{Path, PathBuf};

/// Bytes that this process may use; an impossibly large number where the system does not say.
pub fn limit() -> u64 {
    limit_in(Path::new("/"))
}

/// The same with the system's files below `root`.
fn limit_in(root: &Path) -> u64 {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let system = |path: &str| read(&root.join(path));
    let (machine, groups) = (system("proc/meminfo"), system("proc/self/cgroup"));
    let machine = machine.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let machine = machine.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let mounts = system("proc/self/mountinfo");
    let limits = mounts.lines().filter_map(Mount::read).flat_map(|mount| {
        let group = groups.lines().find_map(|line| mount.group(line)).unwrap_or("/");
        let below = Path::new(group).strip_prefix(mount.root).unwrap_or(Path::new(""));
        let top = root.join(mount.point.trim_start_matches('/'));
        // A group outside the mounted hierarchy, as seen in a container, counts as its top.
        let inside = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let folder = if inside { top.join(below) } else { top.clone() };
        let folders = folder.ancestors().take_while(|folder| folder.starts_with(&top));
        let files: Vec<PathBuf> = folders.map(|folder| folder.join(mount.file)).collect();
        files.into_iter().filter_map(|file| read(&file).trim().parse::<u64>().ok())
    });
    limits.chain(machine.map(|kilobytes| kilobytes << 10)).min().unwrap_or(u64::MAX)
}

/// A control-group hierarchy that limits memory, with its mount point.
struct Mount<'a> {
    /// The group that is visible at the mount point.
    root: &'a str,
    point: &'a str,
    /// The name of the file with a group's limit.
    file: &'a str,
}

impl Mount<'_> {
    /// Parses a line of `/proc/self/mountinfo`.
    fn read(line: &str) -> Option<Mount<'_>> {
        let (mount, system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let file = match kind {
            "cgroup2" => "memory.max",
            "cgroup" if options.split(',').any(|one| one == "memory") => "memory.limit_in_bytes",
            _ => return None,
        };
        Some(Mount { root, point, file })
    }

    /// The group that a line of `/proc/self/cgroup` names, if it belongs to this hierarchy.
    fn group<'a>(&self, line: &'a str) -> Option<&'a str> {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let is_of_this = match self.file {
            "memory.max" => controllers.is_empty(),
            _ => controllers.split(',').any(|one| one == "memory"),
        };
        is_of_this.then_some(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    /// The limit on a machine of 64 GiB with these files.
    fn limit_of(mounts: &str, groups: &str, files: &[(&str, &str)]) -> u64 {
        let root = tempfile::tempdir().unwrap();
        let system = [
            ("proc/meminfo", "MemTotal:       67108864 kB\nMemFree: 1 kB\n"),
            ("proc/self/mountinfo", mounts),
            ("proc/self/cgroup", groups),
        ];
        for (path, text) in system.iter().chain(files) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        limit_in(root.path())
    }

    #[test]
    fn the_limit_of_a_job_counts_wherever_it_is_set() {
        let all = 64 << 30;
        let scope = "0::/system.slice/run-7.scope\n";
        let slice = ("sys/fs/cgroup/system.slice/memory.max", "max\n");
        let of_scope = ("sys/fs/cgroup/system.slice/run-7.scope/memory.max", "8589934592\n");
        assert_eq!(limit_of(V2, scope, &[slice]), all);
        assert_eq!(limit_of(V2, scope, &[slice, of_scope]), 8 << 30);
        // Of a parent group.
        let slice = ("sys/fs/cgroup/system.slice/memory.max", "4294967296\n");
        assert_eq!(limit_of(V2, scope, &[slice, of_scope]), 4 << 30);
        // Slurm: the job's limit, and the lower ones of its tasks.
        let slurm = "0::/system.slice/slurmstepd.scope/job_9/step_0/user/task_0\n";
        let job = ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_9/memory.max", "2147483648");
        assert_eq!(limit_of(V2, slurm, &[job]), 2 << 30);
        let v1 = "35 23 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                  36 23 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";
        let slurm = "5:cpu,cpuacct:/elsewhere\n9:memory:/slurm/uid_7/job_9/step_0\n";
        let job = ("sys/fs/cgroup/memory/slurm/uid_7/job_9/memory.limit_in_bytes", "3221225472\n");
        let top = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit_of(v1, slurm, &[job, top]), 3 << 30);
        assert_eq!(limit_of(v1, slurm, &[top]), all);
        // Both versions at once: v1 limits the memory.
        let both = format!("{v1}{V2}");
        assert_eq!(limit_of(&both, &format!("{slurm}0::/x\n"), &[job]), 3 << 30);
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_top() {
        let top = ("sys/fs/cgroup/memory.max", "1073741824\n");
        // With a namespace of its own, and with the machine's names.
        assert_eq!(limit_of(V2, "0::/\n", &[top]), 1 << 30);
        assert_eq!(limit_of(V2, "0::/../../other\n", &[top]), 1 << 30);
        let bound = "30 23 0:26 /docker/ab /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(limit_of(bound, "0::/docker/ab\n", &[top]), 1 << 30);
        let below = ("sys/fs/cgroup/job/memory.max", "536870912\n");
        assert_eq!(limit_of(bound, "0::/docker/ab/job\n", &[top, below]), 1 << 29);
        assert_eq!(limit_of("", "", &[]), 64 << 30);
        assert_eq!(limit_in(Path::new("/nowhere")), u64::MAX);
    }
}
