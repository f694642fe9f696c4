//! Short formats of rates and times, for people.

use std::time::Duration;

/// "812", "41.2k", "3.10M".
pub(crate) fn rate(value: f64) -> String {
    match value {
        _ if value >= 1e6 => format!("{:.2}M", value / 1e6),
        _ if value >= 1e4 => format!("{:.1}k", value / 1e3),
        _ => format!("{value:.0}"),
    }
}

/// "12s", "3m10s", "5h02m".
pub(crate) fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}
