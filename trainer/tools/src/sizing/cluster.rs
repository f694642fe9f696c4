//! A cluster as described by a file: its ranks, their memory, and their rates of computation, memory and network.
//!
//! `ztrain bench gemm | memory | collectives --out FILE` each write their part of such a file; [`PUBLISHED`] files hold
//! published figures with their sources. A plan requires the parts that it reads; if one is missing, it names the
//! command that measures it.

use contract::{Fault, Result};
use serde::Deserialize;
use settings::{File, Spanned};

use super::Curve;

/// Names and texts of the built-in clusters.
pub const PUBLISHED: [(&str, &str); 2] = [
    ("mi300x-pollara", include_str!("clusters/mi300x-pollara.toml")),
    ("h100", include_str!("clusters/h100.toml")),
];

/// The file. Missing values have not been measured.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterDescription {
    /// Its name, for people.
    pub name: Option<String>,
    /// Ranks, each with its own device, or on CPUs its own cores.
    pub ranks: Option<u32>,
    /// How many of them share a machine.
    pub ranks_per_node: Option<u32>,
    /// Memory of a rank's device, in GiB.
    pub memory_gib: Option<f64>,
    /// Micro-batches that a rank computes at once: the rates of matmuls are those of one of them.
    pub workers: Option<usize>,
    /// The part of an exchange that computation can hide, from 0 (the same processors compute and send) to 1.
    pub overlap: Option<f64>,
    /// How long a rank waits for the slowest one although all compute the same, as a share of its own computing time.
    pub uneven: Option<f64>,
    /// Rates of matmuls, in operations per second.
    pub gemm: Option<MatmulRates>,
    /// Memory bandwidths, in bytes per second.
    pub memory: Option<MemoryBandwidth>,
    /// The link between ranks of a machine.
    pub within: Option<NetworkLink>,
    /// The link between machines.
    pub between: Option<NetworkLink>,
    /// Where checkpoints are written.
    pub checkpoint: Option<CheckpointStorage>,
    /// How often ranks fail.
    pub faults: Option<FailureRates>,
}

/// Rates of matmuls over their operations: 2 m k n for `[m, k]` times `[k, n]`, with all workers of a rank busy.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulRates {
    /// With f32 operands.
    pub f32: Option<Curve>,
    /// With bf16 operands.
    pub bf16: Option<Curve>,
    /// Attention, forward, over the operations that the causal mask leaves; with bf16 operands if both were measured.
    pub attention: Option<Curve>,
    /// The same backward, over twice as many operations.
    pub attention_back: Option<Curve>,
    /// The same with f32 operands, where that rate differs.
    pub attention_f32: Option<Curve>,
    /// See above.
    pub attention_f32_back: Option<Curve>,
    /// The optimizer's Newton-Schulz iterations, f32, over the operations of all five on a matrix.
    pub newton_schulz: Option<Curve>,
}

/// Bandwidth over the bytes that an operation reads and writes, counted as in STREAM.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryBandwidth {
    /// `a = b`.
    pub copy: Option<Curve>,
    /// `a = s b`.
    pub scale: Option<Curve>,
    /// `a = b + c`.
    pub add: Option<Curve>,
    /// `a = b + s c`.
    pub triad: Option<Curve>,
    /// The checksum of the ledger.
    pub checksum: Option<Curve>,
    /// An addition of the tree: `a = a + b`.
    pub tree: Option<Curve>,
    /// The head's softmax and its gradient.
    pub softmax: Option<Curve>,
}

/// A link from rank to rank.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkLink {
    /// Seconds before the first byte arrives.
    pub latency_s: f64,
    /// Bytes per second that a rank sends while all others do.
    pub bytes_per_s: f64,
}

/// Where checkpoints are written.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointStorage {
    /// Bytes per second from a rank's device into main memory, for which the step waits.
    pub copy_bytes_per_s: f64,
    /// Bytes per second that a machine writes during training.
    pub write_bytes_per_s: f64,
}

/// How often ranks fail, and the cost of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailureRates {
    /// Failures of a rank per hour that end the run.
    pub per_rank_hour: f64,
    /// Seconds from a failure until a step is computed again.
    pub restart_s: f64,
}

/// The values of the file that a plan reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Its name, for people.
    pub name: String,
    /// Ranks.
    pub ranks: u32,
    /// How many of them share a machine.
    pub ranks_per_node: u32,
    /// Bytes of a rank's device.
    pub memory_bytes: u64,
    /// Micro-batches that a rank computes at once.
    pub workers: usize,
    /// The part of an exchange that computation can hide: all of the exchange, by default.
    pub overlap: f64,
    /// How long a rank waits for the slowest one, as a share of its computing time: 0 by default.
    pub uneven: f64,
    /// Rates of f32 matmuls.
    pub f32: Curve,
    /// Rates of bf16 matmuls.
    pub bf16: Curve,
    /// Rates of attention, forward and backward.
    pub attention: [Curve; 2],
    /// The same with f32 operands.
    pub attention_f32: [Curve; 2],
    /// Rates of Newton-Schulz iterations; by default those of f32 matmuls.
    pub newton_schulz: Option<Curve>,
    /// Bandwidth of an operation that reads and writes once.
    pub stream: Curve,
    /// Bandwidth of checksums.
    pub checksum: Curve,
    /// Bandwidth of additions of the tree.
    pub tree: Curve,
    /// Bandwidth of the head's softmax and its gradient.
    pub softmax: Curve,
    /// Seconds of a minimal call, if measured.
    pub call_s: f64,
    /// The link between ranks of a machine.
    pub within: Option<NetworkLink>,
    /// The link between machines.
    pub between: Option<NetworkLink>,
    /// Where checkpoints are written.
    pub checkpoint: Option<CheckpointStorage>,
    /// How often ranks fail.
    pub faults: Option<FailureRates>,
    /// Values missing from the file, and what is assumed for them.
    pub assumed: Vec<String>,
}

impl ClusterDescription {
    /// This machine as a single rank, without measurements.
    pub fn of_this_machine() -> ClusterDescription {
        ClusterDescription {
            name: Some("this machine".to_owned()),
            ranks: Some(1),
            ranks_per_node: Some(1),
            memory_gib: Some(store::memory::limit() as f64 / f64::from(1 << 30)),
            ..ClusterDescription::default()
        }
    }

    /// Reads a file, or the built-in one of that name.
    pub fn read(place: &str) -> Result<ClusterDescription> {
        if let Some((name, text)) = PUBLISHED.iter().find(|(name, _)| *name == place) {
            return ClusterDescription::parse(&File::new(format!("cluster {name}"), *text));
        }
        let location = storage::locate(place)?;
        if !location.is_file()? {
            let known: Vec<&str> = PUBLISHED.iter().map(|(name, _)| *name).collect();
            return Err(Fault::usage("there is no such cluster")
                .at("--cluster")
                .found(place)
                .wanted(format!("a TOML file, or {}", known.join(" or ")))
                .hint("`ztrain bench gemm --out cluster.toml` begins a file with what this machine can do"));
        }
        let bytes = location.read().map_err(|error| location.fault("read", &error))?;
        ClusterDescription::parse(&File::from_bytes(place, bytes)?)
    }

    /// Parses a text.
    pub fn parse(file: &File) -> Result<ClusterDescription> {
        let found: ClusterDescription = file.parse()?;
        let spanned: std::collections::BTreeMap<String, Spanned<settings::Value>> = file.parse()?;
        let wrong = |key: &str, wanted: &str| match spanned.get(key) {
            Some(value) => file.wrong(key, value, wanted),
            None => Fault::usage(format!("`{key}` is wrong")).at(file.name()),
        };
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let counts = [("ranks", found.ranks), ("ranks_per_node", found.ranks_per_node)];
        for (key, value) in counts {
            if value.is_some_and(|value| value == 0 || value > 1 << 20) {
                return Err(wrong(key, "a whole number from 1 to 1,048,576"));
            }
        }
        if found.workers.is_some_and(|workers| workers == 0 || workers > 1 << 16) {
            return Err(wrong("workers", "a whole number from 1 to 65,536"));
        }
        if found.overlap.is_some_and(|part| !(0.0..=1.0).contains(&part)) {
            return Err(wrong("overlap", "a part, from 0 to 1"));
        }
        if found.uneven.is_some_and(|part| !(0.0..=1e3).contains(&part)) {
            return Err(wrong("uneven", "a share of the time that ranks compute, from 0"));
        }
        if found.memory_gib.is_some_and(|value| !positive(value)) {
            return Err(wrong("memory_gib", "a number above 0"));
        }
        for (table, curves) in [("gemm", found.rates()), ("memory", found.bandwidths())] {
            if let Some((key, _)) = curves.iter().find(|(_, curve)| !curve.is_valid()) {
                return Err(wrong(table, "[[size, rate], ...], all above 0 and sizes ascending")
                    .hint(format!("{key} is not such a list")));
            }
        }
        for (key, link) in [("within", found.within), ("between", found.between)] {
            let right = |link: NetworkLink| positive(link.bytes_per_s) && link.latency_s >= 0.0;
            if link.is_some_and(|link| !right(link)) {
                return Err(wrong(key, "a latency from 0 and a bandwidth above 0"));
            }
        }
        let medium = |part: CheckpointStorage| {
            positive(part.copy_bytes_per_s) && positive(part.write_bytes_per_s)
        };
        if found.checkpoint.is_some_and(|part| !medium(part)) {
            return Err(wrong("checkpoint", "bandwidths above 0"));
        }
        let faults = |part: FailureRates| {
            (0.0..1e3).contains(&part.per_rank_hour) && (0.0..1e9).contains(&part.restart_s)
        };
        if found.faults.is_some_and(|part| !faults(part)) {
            return Err(wrong("faults", "failures in an hour and seconds, from 0"));
        }
        Ok(found)
    }

    /// The rates of matmuls in the file, with their keys.
    fn rates(&self) -> Vec<(&'static str, &Curve)> {
        let Some(gemm) = &self.gemm else { return Vec::new() };
        let MatmulRates { f32, bf16, attention, attention_back, newton_schulz, .. } = gemm;
        let MatmulRates { attention_f32, attention_f32_back, .. } = gemm;
        present([
            ("f32", f32),
            ("bf16", bf16),
            ("attention", attention),
            ("attention_back", attention_back),
            ("attention_f32", attention_f32),
            ("attention_f32_back", attention_f32_back),
            ("newton_schulz", newton_schulz),
        ])
    }

    /// The bandwidths in the file, with their keys.
    fn bandwidths(&self) -> Vec<(&'static str, &Curve)> {
        let Some(MemoryBandwidth { copy, scale, add, triad, checksum, tree, softmax }) =
            &self.memory
        else {
            return Vec::new();
        };
        present([
            ("copy", copy),
            ("scale", scale),
            ("add", add),
            ("triad", triad),
            ("checksum", checksum),
            ("tree", tree),
            ("softmax", softmax),
        ])
    }

    /// The values for a plan: required parts must be in the file, defaults are assumed for others.
    pub fn resolve(self, place: &str) -> Result<Cluster> {
        let missing = |what: &str, hint: &str| {
            Fault::usage(format!("the cluster has no {what}"))
                .at(place)
                .hint(format!("`ztrain bench {hint} --out {place}` measures it"))
        };
        let mut assumed = Vec::new();
        let gemm = self.gemm.ok_or_else(|| missing("[gemm]", "gemm"))?;
        let memory = self.memory.ok_or_else(|| missing("[memory]", "memory"))?;
        let MatmulRates { f32, bf16, attention, attention_back, newton_schulz, .. } = gemm;
        let wide = [gemm.attention_f32, gemm.attention_f32_back];
        let (f32, bf16) = match (f32, bf16) {
            (Some(f32), Some(bf16)) => (f32, bf16),
            (Some(known), None) | (None, Some(known)) => {
                assumed.push("matmuls of the other number format are as fast".to_owned());
                (known.clone(), known)
            }
            (None, None) => return Err(missing("rate of matmuls in [gemm]", "gemm")),
        };
        let half = || Curve(bf16.0.iter().map(|[size, rate]| [*size, rate / 2.0]).collect());
        if attention.is_none() || attention_back.is_none() {
            assumed.push("attention runs at half the rate of matmuls".to_owned());
        }
        let attention = [attention.unwrap_or_else(half), attention_back.unwrap_or_else(half)];
        let [forward, back] = wide;
        let attention_f32 =
            [forward.unwrap_or(attention[0].clone()), back.unwrap_or(attention[1].clone())];
        let stream = memory.triad.or(memory.add).or(memory.copy).or(memory.scale);
        let stream = stream.ok_or_else(|| missing("bandwidth in [memory]", "memory"))?;
        let mut or = |curve: Option<Curve>, what: &str| {
            curve.unwrap_or_else(|| {
                assumed.push(format!("{what} at the bandwidth of the other operations"));
                stream.clone()
            })
        };
        let (checksum, tree) = (or(memory.checksum, "checksums"), or(memory.tree, "the tree"));
        let softmax = or(memory.softmax, "the softmax of the head");
        let smallest = tree.0.first().filter(|[bytes, _]| *bytes <= 4096.0);
        let call_s = smallest.map_or(0.0, |[bytes, rate]| bytes / rate);
        let ranks = self.ranks.unwrap_or(1);
        let gib = self.memory_gib.ok_or_else(|| missing("memory_gib", "gemm"))?;
        Ok(Cluster {
            name: self.name.unwrap_or_else(|| place.to_owned()),
            ranks,
            ranks_per_node: self.ranks_per_node.unwrap_or(ranks).min(ranks),
            memory_bytes: (gib * f64::from(1 << 30)) as u64,
            workers: self.workers.unwrap_or(1),
            overlap: self.overlap.unwrap_or(1.0),
            uneven: self.uneven.unwrap_or(0.0),
            f32,
            bf16,
            attention,
            attention_f32,
            newton_schulz,
            stream,
            checksum,
            tree,
            softmax,
            call_s,
            within: self.within,
            between: self.between,
            checkpoint: self.checkpoint,
            faults: self.faults,
            assumed,
        })
    }

    /// The file's text, with comments that explain the numbers.
    pub fn text(&self) -> String {
        let mut out = String::from(
            "# What these machines can do, for `ztrain plan CURRICULUM --cluster FILE`. `ztrain bench gemm`, `memory` and\n\
             # `collectives` write their part with --out FILE and keep the others; comments are not kept.\n",
        );
        let mut line = |key: &str, value: Option<String>, what: &str| {
            if let Some(value) = value {
                out += &format!("{key} = {value} # {what}\n");
            }
        };
        line("name", self.name.as_ref().map(|name| format!("{name:?}")), "what people call it");
        line("ranks", self.ranks.map(|ranks| ranks.to_string()), "processes with a device each");
        let per_node = self.ranks_per_node.map(|ranks| ranks.to_string());
        line("ranks_per_node", per_node, "of them on a machine");
        let gib = self.memory_gib.map(|gib| format!("{gib:.2}"));
        line("memory_gib", gib, "memory of a rank");
        let workers = self.workers.map(|workers| workers.to_string());
        line("workers", workers, "micro-batches that a rank computes at once");
        let overlap = self.overlap.map(|part| part.to_string());
        line("overlap", overlap, "the part of an exchange that computing can hide");
        let uneven = self.uneven.map(|part| format!("{part:.3}"));
        line(
            "uneven",
            uneven,
            "how long ranks wait for the slowest, of the time that they compute",
        );
        if self.gemm.is_some() {
            out += "\n[gemm] # [operations of a product, operations in a second], with all workers at work\n";
            out += &curves(&self.rates());
        }
        if self.memory.is_some() {
            out += "\n[memory] # [bytes read and written, bytes in a second]\n";
            out += &curves(&self.bandwidths());
        }
        let links = [("within", self.within, "a machine"), ("between", self.between, "machines")];
        for (key, link, what) in links {
            if let Some(NetworkLink { latency_s, bytes_per_s }) = link {
                out += &format!(
                    "\n[{key}] # {key} {what}, of a rank while all send\nlatency_s = {latency_s:e}\n\
                     bytes_per_s = {bytes_per_s:.4e}\n"
                );
            }
        }
        if let Some(CheckpointStorage { copy_bytes_per_s, write_bytes_per_s }) = self.checkpoint {
            out += &format!(
                "\n[checkpoint]\ncopy_bytes_per_s = {copy_bytes_per_s:.4e}  # of a rank, while the step waits\n\
                 write_bytes_per_s = {write_bytes_per_s:.4e} # of a machine, while steps run\n"
            );
        }
        if let Some(FailureRates { per_rank_hour, restart_s }) = self.faults {
            out += &format!(
                "\n[faults]\nper_rank_hour = {per_rank_hour:e}\nrestart_s = {restart_s:e}\n"
            );
        }
        out
    }
}

fn present<'a, const N: usize>(
    all: [(&'static str, &'a Option<Curve>); N],
) -> Vec<(&'static str, &'a Curve)> {
    all.into_iter().filter_map(|(key, curve)| Some((key, curve.as_ref()?))).collect()
}

fn curves(all: &[(&str, &Curve)]) -> String {
    let point = |[size, rate]: &[f64; 2]| format!("[{size:.3e}, {rate:.3e}]");
    let line = |(key, Curve(points)): &(&str, &Curve)| {
        let rows: Vec<String> = points
            .chunks(5)
            .map(|row| format!("    {},\n", row.iter().map(point).collect::<Vec<_>>().join(", ")))
            .collect();
        format!("{key} = [\n{}]\n", rows.concat())
    };
    all.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_clusters_can_be_planned_on() {
        for (name, _) in PUBLISHED {
            let cluster = ClusterDescription::read(name).unwrap().resolve(name).unwrap();
            assert_eq!(cluster.name, name);
            assert!(cluster.within.is_some() && cluster.between.is_some());
            assert!(cluster.checkpoint.is_some() && cluster.faults.is_some());
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for (name, _) in PUBLISHED {
            let described = ClusterDescription::read(name).unwrap();
            let again = ClusterDescription::parse(&File::new("again", described.text())).unwrap();
            assert_eq!(again.text(), described.text());
            let (left, right) = (again.resolve(name).unwrap(), described.resolve(name).unwrap());
            assert_eq!(
                (left.ranks, left.within, left.faults),
                (right.ranks, right.within, right.faults)
            );
            assert!((left.f32.at(1e10) / right.f32.at(1e10) - 1.0).abs() < 1e-2);
        }
    }

    #[test]
    fn mistakes_have_their_place() {
        let told = |text: &str| {
            let file = File::new("c.toml", text);
            let found = ClusterDescription::parse(&file).and_then(|found| found.resolve("c.toml"));
            found.unwrap_err().to_string()
        };
        for (text, wanted) in [
            ("rank = 3", "did you mean `ranks`"),
            ("\nranks = 0", "c.toml:2:9"),
            ("memory_gib = -1", "above 0"),
            ("overlap = 1.5", "from 0 to 1"),
            ("uneven = -0.1", "from 0"),
            ("[gemm]\nf32 = [[2.0, 1.0], [1.0, 1.0]]", "sizes ascending"),
            ("[within]\nlatency_s = 0\nbytes_per_s = 0", "bandwidth above 0"),
            ("[faults]\nper_rank_hour = -1\nrestart_s = 0", "from 0"),
            ("ranks = 2", "ztrain bench gemm --out c.toml"),
            ("[gemm]\nf32 = [[1.0, 1.0]]", "ztrain bench memory --out c.toml"),
        ] {
            assert!(told(text).contains(wanted), "{text}: {}", told(text));
        }
    }
}
