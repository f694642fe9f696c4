//! The memory that this process holds.

use std::fs;

/// The resident memory of this process in bytes: now, and at its peak. 0 where the system does not report it.
pub fn resident() -> (u64, u64) {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kilobytes.unwrap_or(0) << 10
    };
    (field("VmRSS:"), field("VmHWM:"))
}
