//! `ztrain bench`: the project's own measurements of the machine.

use std::path::PathBuf;

use contract::terminal::print_raw;
use contract::{Fault, Result};
use tch::Device;
use tools::collectives::{CollectiveTiming, WAYS, measure, plot, uneven};
use tools::sizing::cluster::{ClusterDescription, NetworkLink};
use trainer::World;
use trainer::refusal::lost;

use super::Speed;
use super::bench_machine::ClusterFile;
use super::drawing::Drawing;
use super::ranks::{self, Ranks};
use super::sizes;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Benchmark,
}

#[derive(clap::Subcommand)]
enum Benchmark {
    /// Measure a training step: time of each part, the model's operations, utilisation.
    Step(super::bench_step::Args),
    /// Measure matmuls by size, ours and libtorch's, and attention.
    #[command(after_help = "Example: ztrain bench gemm --out cluster.toml --plot gemm.svg")]
    Gemm(super::bench_machine::GemmArgs),
    /// Measure memory bandwidth by operation: copy, scale, add, triad, the ledger's checksum, an addition of the tree.
    #[command(after_help = "Example: ztrain bench memory --out cluster.toml --plot memory.svg")]
    Memory(super::bench_machine::MemoryArgs),
    /// Measure the operations between matmuls, ours and libtorch's.
    #[command(
        after_help = "Example: ztrain bench kernels --curriculum phase1.toml --dtype bf16 --plot kernels.svg"
    )]
    Kernels(super::bench_machine::KernelArgs),
    /// Time the exchange of bytes between ranks: libtorch's collectives, and ours that keep bits.
    #[command(
        after_help = "Example: ztrain bench collectives --nproc 4 --to 64M --plot collectives.svg"
    )]
    Collectives(Collectives),
}

#[derive(clap::Args)]
struct Collectives {
    /// The smallest size in bytes (K, M and G are understood); each next one is four times as large.
    #[arg(long, value_name = "SIZE", default_value = "1K")]
    from: String,
    /// The largest size.
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    to: String,
    /// About how long each row is measured.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3, value_parser = super::above_zero)]
    seconds: f64,
    /// Print one line of JSON for each row.
    #[arg(long)]
    json: bool,
    /// Draw bus bandwidth over size as SVG.
    #[arg(long, value_name = "FILE", value_parser = super::local("draw into a file here"))]
    plot: Option<PathBuf>,
    /// Where the tensors of ours lie: cpu, cuda or cuda:1; libtorch's are always in plain memory, for Gloo.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: String,
    /// Write latency and bandwidth between ranks of a machine into a description for `ztrain plan --cluster`.
    #[arg(long, value_name = "FILE", value_parser = super::local("write a file here"))]
    out: Option<PathBuf>,
    #[command(flatten)]
    ranks: Ranks,
}

/// Measures.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let args = match args.what {
        Benchmark::Step(args) => return super::bench_step::exec(args),
        Benchmark::Gemm(args) => return super::bench_machine::gemm(args),
        Benchmark::Memory(args) => return super::bench_machine::memory(args),
        Benchmark::Kernels(args) => return super::bench_machine::kernels(args),
        Benchmark::Collectives(args) => args,
    };
    let (from, to) = sizes(&args.from, &args.to)?;
    let drawing = args.plot.as_deref().map(|path| Drawing::at("--plot", path)).transpose()?;
    let cluster = args.out.as_deref().map(ClusterFile::open).transpose()?;
    let (speed, stop) = (Speed::on(&args.device), std::sync::Arc::default());
    if let Some(count) = args.ranks.to_spawn(&speed)? {
        return ranks::start_all(count);
    }
    let launched = args.ranks.launched()?.ok_or_else(|| {
        Fault::usage("one rank exchanges nothing")
            .at("--nproc")
            .wanted("at least 2")
            .hint("ztrain bench collectives --nproc 2")
    })?;
    let World { comm: mut group, device, .. } =
        args.ranks.world(&speed, Some(&launched), None, &stop)?;
    let chosen = group.choose_transport(device, args.ranks.transport()).map_err(lost)?;
    let speaks = group.rank() == 0;
    if speaks && !args.json {
        print_line!(
            "{} ranks, libtorch over Gloo, ours by {}; size and bandwidths as rccl-tests define them",
            group.world(),
            chosen.words()
        );
        head()?;
    }
    let mut all = Vec::new();
    let mut size = from.max(4 * u64::from(group.world()));
    let to = to.max(size);
    while size <= to {
        for way in WAYS {
            let found = measure(&group, way, size, args.seconds)?;
            if speaks {
                print(&found, args.json)?;
            }
            all.push(found);
        }
        size *= 4;
    }
    let uneven = uneven(&group, 10.0 * args.seconds)?;
    if speaks {
        print_uneven(uneven, args.json)?;
    }
    group.barrier("the end").map_err(lost)?;
    if let (true, Some(drawing)) = (speaks, &drawing) {
        drawing.put(&plot(&all, group.world()))?;
    }
    if let (true, Some(cluster)) = (speaks, cluster) {
        keep(cluster, &all, uneven, group.world(), device)?;
    }
    Ok(if all.iter().any(|one| one.wrong > 0) { 6 } else { 0 })
}

/// Writes what a plan reads of this: so many ranks, which share this machine.
fn keep(
    cluster: ClusterFile,
    all: &[CollectiveTiming],
    uneven: f64,
    world: u32,
    device: Device,
) -> Result<()> {
    let (latency_s, bytes_per_s) = link(all);
    cluster.put(|described| {
        described.ranks = Some(world);
        described.ranks_per_node = described.ranks;
        let shared = ClusterDescription::of_this_machine().memory_gib;
        described.memory_gib = shared.map(|gib| gib / f64::from(world));
        described.uneven = Some(uneven);
        described.within = Some(NetworkLink { latency_s, bytes_per_s });
        // Cores that send and add do not compute meanwhile.
        described.overlap = Some(if device == Device::Cpu { 0.0 } else { 1.0 });
    })
}

/// Seconds of the smallest exchange of ours, and the highest bus bandwidth of its all-to-all: what blocks of gradients
/// travel at.
fn link(all: &[CollectiveTiming]) -> (f64, f64) {
    let ours = all.iter().filter(|one| one.by != "libtorch" && one.collective == "all-to-all");
    let least = ours.clone().map(|one| one.microseconds * 1e-6).fold(f64::INFINITY, f64::min);
    let most = ours.map(|one| 1e9 * one.bus_gb_per_s).fold(0.0, f64::max);
    (if least.is_finite() { least } else { 0.0 }, most)
}

fn print_uneven(uneven: f64, json: bool) -> Result<()> {
    if json {
        return print_raw(&format!("{}\n", serde_json::json!({ "uneven": uneven })));
    }
    print_line!(
        "where all ranks compute the same, a rank waits for the slowest {:.1} % of the time that it computes",
        100.0 * uneven
    );
    Ok(())
}

fn head() -> Result<()> {
    print_line!(
        "{:>12} {:>15} {:>11} {:>7} {:>12} {:>11} {:>11} {:>6}",
        "bytes",
        "collective",
        "by",
        "rounds",
        "us",
        "alg GB/s",
        "bus GB/s",
        "wrong"
    );
    Ok(())
}

fn print(found: &CollectiveTiming, json: bool) -> Result<()> {
    if json {
        return print_raw(&format!("{}\n", serde_json::json!(found)));
    }
    let CollectiveTiming { collective, by, bytes, rounds, microseconds, wrong, .. } = found;
    print_line!(
        "{bytes:>12} {collective:>15} {by:>11} {rounds:>7} {microseconds:>12.1} {:>11.4} {:>11.4} {wrong:>6}",
        found.algorithm_gb_per_s,
        found.bus_gb_per_s
    );
    Ok(())
}
