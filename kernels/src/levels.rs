//! Levels of determinism by kernel table, from the committed `levels.md`.

use sha2::{Digest as _, Sha256};

use crate::runtime::KernelTable;

/// All levels, as in `trainer/docs/determinism.md`: bits of the data; bits of training on one kind of machine; on any
/// number of ranks; one rank replays a run of many; any number of ranks share micro-batches.
pub const ALL: [&str; 5] = ["D", "L0", "L1", "L2", "L3"];

/// The levels that were verified on GPUs.
const SHOWN: &str = include_str!("../levels.md");

/// A row of the table.
#[derive(Debug)]
struct Row<'a> {
    digest: &'a str,
    architecture: &'a str,
    libtorch: &'a str,
    levels: &'a str,
}

impl KernelTable {
    /// Its name in `levels.md`: 16 hexadecimal digits of the SHA-256 of its fingerprint.
    pub fn digest(&self) -> String {
        let sum = Sha256::digest(self.fingerprint().as_bytes());
        sum.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// The levels that hold with it: on a GPU only that of the data, unless more were verified.
    pub fn levels(&self) -> Vec<&'static str> {
        match self.device.as_str() {
            "cpu" => ALL.to_vec(),
            _ => shown(SHOWN, |row| row.digest == self.digest()),
        }
    }
}

/// The levels that were verified with this libtorch on a GPU of this architecture, with any kernel table.
pub fn of_gpus(architecture: &str, libtorch: &str) -> Vec<&'static str> {
    shown(SHOWN, |row| row.architecture == architecture && row.libtorch == libtorch)
}

/// The level of the data, and all levels of matching rows.
fn shown(text: &str, like: impl Fn(&Row) -> bool) -> Vec<&'static str> {
    let found: Vec<_> = rows(text).filter(like).collect();
    let held = |level: &&str| {
        *level == ALL[0] || found.iter().any(|row| row.levels.split(' ').any(|own| own == *level))
    };
    ALL.into_iter().filter(held).collect()
}

fn rows(text: &str) -> impl Iterator<Item = Row<'_>> {
    text.lines().filter_map(|line| {
        let mut columns = line.strip_prefix("| `")?.strip_suffix('|')?.split('|').map(str::trim);
        let digest = columns.next()?.strip_suffix('`')?;
        let [_, architecture, libtorch, _, levels] = std::array::from_fn(|_| columns.next());
        Some(Row { digest, architecture: architecture?, libtorch: libtorch?, levels: levels? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
| kernel table | device | architecture | libtorch | operations | levels |
|---|---|---|---|---|---|
| `00000000000000aa` | a GPU | sm_90 | 2.11.0 | device 4 | D L0 |
| `00000000000000bb` | another | gfx942 | 2.11.0 | device 4 | D L0 L1 |
";

    #[test]
    fn a_level_holds_where_its_table_says_so() {
        let of = |digest: &str| shown(TEXT, |row| row.digest == digest);
        assert_eq!(of("00000000000000aa"), ["D", "L0"]);
        assert_eq!(of("00000000000000bb"), ["D", "L0", "L1"]);
        assert_eq!(of("00000000000000cc"), ["D"]);
        assert_eq!(shown(TEXT, |row| row.architecture == "gfx942"), ["D", "L0", "L1"]);
    }

    /// A row that cannot be parsed would be ignored silently.
    #[test]
    fn every_committed_row_is_understood() {
        let lines = SHOWN.lines().filter(|line| line.starts_with("| `"));
        assert_eq!(lines.count(), rows(SHOWN).count());
        for row in rows(SHOWN) {
            assert_eq!(row.digest.len(), 16, "{row:?}");
            assert!(row.levels.split(' ').all(|level| ALL.contains(&level)), "{row:?}");
        }
    }
}
