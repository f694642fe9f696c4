//! `ztrain bench gemm`, `memory` and `kernels`: what this machine can do, for people and for `ztrain plan --cluster`.

use std::path::{Path, PathBuf};

use contract::terminal::print_raw;
use contract::{Fault, Result};
use loader::OpenedCurriculum;
use serde::Serialize;
use settings::File;
use store::Location;
use tch::{Device, Kind};
use tools::chart::Chart;
use tools::sizing::Curve;
use tools::sizing::cluster::{ClusterDescription, MatmulRates, MemoryBandwidth};
use tools::sizing::machine::{BenchOptions, Implementation, MemoryPass, PASSES};
use tools::sizing::operations::MicroBatchSizes;
use tools::sizing::repeat::RepeatOptions;
use tools::sizing::shapes::{self, MatmulShape};
use trainer::RunSpec;
use trainer::model::ZayaConfig;
use trainer::workers::Workers;

use super::drawing::Drawing;
use super::{Speed, bench_attention, bench_experts, bench_hash, sizes};

/// What all of them take.
#[derive(clap::Args)]
struct MeasureArgs {
    /// Where to compute: cpu, cuda or cuda:1.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: String,
    /// How many workers do the same at once, one math thread each; rates are those of one of them.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    workers: u16,
    /// About how long each row is measured.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.2, value_parser = super::above_zero)]
    seconds: f64,
    /// Print one line of JSON for each row.
    #[arg(long)]
    json: bool,
    /// Draw the rates as SVG.
    #[arg(long, value_name = "FILE", value_parser = super::local("draw into a file here"))]
    plot: Option<PathBuf>,
}

/// Of what has operands for products.
#[derive(clap::Args)]
struct Formats {
    /// Number formats to measure.
    #[arg(long, value_name = "FORMAT", value_delimiter = ',', value_enum, default_values_t = [Format::F32, Format::Bf16])]
    dtype: Vec<Format>,
}

/// What those take that a plan is made from.
#[derive(clap::Args)]
struct ClusterOut {
    /// Write what was measured into a description of this machine for `ztrain plan --cluster`; other parts of the file
    /// stay.
    #[arg(long, value_name = "FILE", value_parser = super::local("write a file here"))]
    out: Option<PathBuf>,
}

/// Arguments of `kernels`.
#[derive(clap::Args)]
pub(crate) struct KernelArgs {
    /// Take the sizes of this curriculum's model in its first phase; store stubs are enough [default: zaya1-nano
    /// on a CPU, zaya1-8b on a GPU].
    #[arg(long, value_name = "FILE", value_parser = super::place())]
    curriculum: Option<Location>,
    /// Tokens of a micro-batch [default: of the curriculum's, else 1024 on a CPU, 16384 on a GPU].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..=1 << 20))]
    tokens: Option<i64>,
    #[command(flatten)]
    formats: Formats,
    #[command(flatten)]
    common: MeasureArgs,
}

/// Arguments of `gemm`.
#[derive(clap::Args)]
pub(crate) struct GemmArgs {
    /// Also measure the shapes of this curriculum's model in its first phase, and on a device the matmuls of its
    /// experts each way that they could be computed; store stubs are enough.
    #[arg(long, value_name = "FILE", value_parser = super::place())]
    curriculum: Option<Location>,
    /// Rows of the left operand: tokens of a micro-batch [default: 64,256,1024 on a CPU, 512,2048,8192 on a GPU].
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(i64).range(1..=1 << 20))]
    rows: Vec<i64>,
    /// Widths of square weights [default: 64,128,256,512,1024 on a CPU, 512,1024,2048,4096,7168 on a GPU].
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(i64).range(2..=1 << 17))]
    widths: Vec<i64>,
    /// Measure nothing: compute each product of the curriculum's model so many times, with those of experts and
    /// Newton-Schulz, and tell how many different outcomes there were. Exit 4 where there was more than one.
    #[arg(long, value_name = "TIMES", requires = "curriculum", value_parser = clap::value_parser!(u32).range(1..))]
    hash: Option<u32>,
    /// Tokens of the longest document of attention [default: of the curriculum's micro-batch, else 2048 on a CPU, 8192
    /// on a GPU].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..=1 << 20))]
    tokens: Option<i64>,
    #[command(flatten)]
    formats: Formats,
    #[command(flatten)]
    common: MeasureArgs,
    #[command(flatten)]
    out: ClusterOut,
}

/// Arguments of `memory`.
#[derive(clap::Args)]
pub(crate) struct MemoryArgs {
    /// The smallest size of all tensors of an operation together (K, M and G are understood); each next one is four
    /// times as large.
    #[arg(long, value_name = "SIZE", default_value = "1K")]
    from: String,
    /// The largest size.
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    to: String,
    #[command(flatten)]
    common: MeasureArgs,
    #[command(flatten)]
    out: ClusterOut,
}

/// A number format.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    F32,
    Bf16,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
        }
    }

    fn kind(self) -> Kind {
        match self {
            Format::F32 => Kind::Float,
            Format::Bf16 => Kind::BFloat16,
        }
    }
}

/// A row of `gemm`.
#[derive(Serialize)]
struct Product {
    name: String,
    dtype: &'static str,
    #[serde(flatten)]
    shape: MatmulShape,
    /// Operations.
    operations: f64,
    /// Operations in a second, as the trainer would compute it.
    ours: f64,
    /// The same by libtorch's own call.
    libtorch: f64,
    /// Of the highest rate of ours in this format.
    of_peak: f64,
    /// Whether all dimensions are multiples of 64.
    aligned: bool,
}

/// A row of `memory`.
#[derive(Serialize)]
struct Bandwidth {
    operation: &'static str,
    bytes: u64,
    bytes_per_s: f64,
}

/// A row of `kernels`.
#[derive(Serialize)]
struct Timed {
    operation: &'static str,
    dtype: &'static str,
    /// Of what it takes and answers with.
    bytes: u64,
    /// Seconds, as the trainer would compute it.
    ours: f64,
    /// The same by libtorch's operators.
    libtorch: f64,
}

impl MeasureArgs {
    /// Checks the device and the places of results before minutes of measuring.
    fn start(&self, out: Option<&Path>) -> Result<(BenchOptions, Device, Results)> {
        let plot = self.plot.as_deref().map(|path| Drawing::at("--plot", path)).transpose()?;
        let cluster = out.map(ClusterFile::open).transpose()?;
        let (device, table) = Speed::on(&self.device).start(None)?;
        let ops = table.ops().map_err(|error| Fault::machine(error.to_string()))?;
        let workers = Workers::new(usize::from(self.workers)).computing_by(ops);
        let bench = BenchOptions { device, workers, seconds: self.seconds };
        Ok((bench, device, Results { plot, cluster, workers: usize::from(self.workers) }))
    }
}

/// The places of the results.
struct Results {
    plot: Option<Drawing>,
    cluster: Option<ClusterFile>,
    workers: usize,
}

impl Results {
    /// Draws, and changes the file that `--out` names.
    fn put(self, chart: &Chart, change: impl FnOnce(&mut ClusterDescription)) -> Result<()> {
        self.plot.map_or(Ok(()), |plot| plot.put(&chart.svg()))?;
        let Some(cluster) = self.cluster else { return Ok(()) };
        cluster.put(|described| {
            described.workers = Some(self.workers);
            change(described);
        })
    }
}

/// A file that describes a cluster, to be changed: as it is, or begun for this machine with a single rank.
pub(super) struct ClusterFile {
    place: Drawing,
    described: ClusterDescription,
}

impl ClusterFile {
    /// Reads it.
    pub(super) fn open(path: &Path) -> Result<ClusterFile> {
        let place = Drawing::over("--out", path)?;
        let fault = |error| Fault::io("read", path, &error);
        let described = match std::fs::metadata(path).is_ok_and(|there| there.len() > 0) {
            true => {
                let bytes = std::fs::read(path).map_err(fault)?;
                ClusterDescription::parse(&File::from_bytes(path.display().to_string(), bytes)?)?
            }
            false => ClusterDescription::of_this_machine(),
        };
        Ok(ClusterFile { place, described })
    }

    /// Writes it with a change.
    pub(super) fn put(mut self, change: impl FnOnce(&mut ClusterDescription)) -> Result<()> {
        change(&mut self.described);
        self.place.put(&self.described.text())
    }
}

/// Measures products.
pub(crate) fn gemm(args: GemmArgs) -> Result<u8> {
    let model = args.curriculum.as_ref().map(model).transpose()?;
    let (bench, device, results) = args.common.start(args.out.out.as_deref())?;
    if let (Some(times), Some(model)) = (args.hash, &model) {
        let kinds = args.formats.dtype.iter().map(|format| format.kind());
        let by = RepeatOptions { ops: bench.workers.ops(), device, times };
        let (config, tokens) = (&model.0, args.tokens.unwrap_or(model.1));
        return bench_hash::run(by, config, tokens, kinds, args.common.json);
    }
    let or = |given: &[i64], cpu: &[i64], gpu: &[i64]| match (given, device) {
        ([], Device::Cpu) => cpu.to_vec(),
        ([], _) => gpu.to_vec(),
        (given, _) => given.to_vec(),
    };
    let rows = or(&args.rows, &[64, 256, 1024], &[512, 2048, 8192]);
    let widths = or(&args.widths, &[64, 128, 256, 512, 1024], &[512, 1024, 2048, 4096, 7168]);
    let mut all = shapes::sweep(&rows, &widths);
    if let Some((config, tokens)) = &model {
        let products = shapes::of_model(config, *tokens).into_iter();
        all.extend(products.map(|product| (product.name.to_owned(), product.shape)));
    }
    let mut found = Vec::new();
    let mut gemm = MatmulRates::default();
    for format in &args.formats.dtype {
        let own = products(bench, *format, &all)?;
        print_matmuls(&own, &args.common)?;
        let points = own.iter().filter(|row| row.aligned || row.name != "width less 1");
        let curve = Curve::of(points.map(|row| [row.operations, row.ours]).collect());
        match format {
            Format::F32 => gemm.f32 = Some(curve),
            Format::Bf16 => gemm.bf16 = Some(curve),
        }
        found.extend(own);
        // On a processor experts are a loop, whose products stand above.
        if let (Some((config, tokens)), true) = (&model, device != Device::Cpu) {
            let (dtype, kind, json) = (format.name(), format.kind(), args.common.json);
            bench_experts::run(bench, config, *tokens, dtype, kind, json)?;
        }
    }
    // Of f32 operands by itself where bf16 ones were measured too.
    for format in args.formats.dtype.iter().rev() {
        let (dtype, kind, json) = (format.name(), format.kind(), args.common.json);
        let found = bench_attention::run(bench, dtype, kind, args.tokens, model.as_ref(), json)?;
        let curve =
            |which: usize| Some(Curve::of(found.iter().map(|it| [it[0], it[which]]).collect()));
        match args.formats.dtype.contains(&Format::Bf16) && *format == Format::F32 {
            true => (gemm.attention_f32, gemm.attention_f32_back) = (curve(1), curve(2)),
            false => (gemm.attention, gemm.attention_back) = (curve(1), curve(2)),
        }
    }
    gemm.newton_schulz = Some(newton_schulz(bench, &widths, &args.common)?);
    results.put(&product_chart(&found), |described| {
        let before = described.gemm.take().unwrap_or_default();
        gemm.f32 = gemm.f32.take().or(before.f32);
        gemm.bf16 = gemm.bf16.take().or(before.bf16);
        described.gemm = Some(gemm);
    })?;
    Ok(0)
}

/// The model of a curriculum's first phase, and the tokens of its micro-batches.
fn model(place: &Location) -> Result<(ZayaConfig, i64)> {
    let opened = OpenedCurriculum::open(place)?;
    let spec = RunSpec::for_planning(&opened)?;
    let step = spec.plan.step(1)?;
    let tokens = step.micro_batch * u64::from(step.seq_len);
    Ok((spec.config().clone(), tokens as i64))
}

fn products(
    bench: BenchOptions,
    format: Format,
    all: &[(String, MatmulShape)],
) -> Result<Vec<Product>> {
    let mut found = Vec::new();
    for (name, shape) in all {
        found.push(Product {
            name: name.clone(),
            dtype: format.name(),
            shape: *shape,
            operations: shape.operations(),
            ours: bench.product(*shape, format.kind(), Implementation::Ours)?,
            libtorch: bench.product(*shape, format.kind(), Implementation::Libtorch)?,
            of_peak: 0.0,
            aligned: shapes::is_aligned(*shape),
        });
    }
    let peak = found.iter().map(|row| row.ours).fold(0.0, f64::max);
    found.iter_mut().for_each(|row| row.of_peak = row.ours / peak);
    Ok(found)
}

fn print_matmuls(found: &[Product], common: &MeasureArgs) -> Result<()> {
    if common.json {
        return found
            .iter()
            .try_for_each(|row| print_raw(&format!("{}\n", serde_json::json!(row))));
    }
    print_line!(
        "{:>22} {:>5} {:>24} {:>9} {:>11} {:>11} {:>8}  rule",
        "product",
        "",
        "rows x inner x columns",
        "MFLOP",
        "ours GF/s",
        "torch GF/s",
        "of peak"
    );
    for Product { name, dtype, shape, operations, ours, libtorch, of_peak, aligned } in found {
        let MatmulShape { rows, inner, columns } = shape;
        let rule = if *aligned { "" } else { "not multiples of 64" };
        print_line!(
            "{name:>22} {dtype:>5} {:>24} {:>9.1} {:>11.1} {:>11.1} {:>7.0}%  {rule}",
            format!("{rows} x {inner} x {columns}"),
            operations / 1e6,
            ours / 1e9,
            libtorch / 1e9,
            100.0 * of_peak
        );
    }
    Ok(())
}

/// Rates of the optimizer's iterations: square matrices of each width, and such as are twice as long.
fn newton_schulz(bench: BenchOptions, widths: &[i64], common: &MeasureArgs) -> Result<Curve> {
    let mut found = Vec::new();
    for shape in widths.iter().flat_map(|width| [[*width, *width], [*width, 2 * width]]) {
        let [operations, rate] = bench.newton_schulz(shape)?;
        let [rows, columns] = shape;
        match common.json {
            true => {
                let row = serde_json::json!({
                    "newton_schulz": shape, "operations": operations, "rate": rate
                });
                print_raw(&format!("{row}\n"))?;
            }
            false => print_line!("Newton-Schulz, {rows} x {columns}: {:.1} GF/s", rate / 1e9),
        }
        found.push([operations, rate]);
    }
    Ok(Curve::of(found))
}

fn product_chart(found: &[Product]) -> Chart {
    let mut curves: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let mut put =
        |name: String, point: (f64, f64)| match curves.iter_mut().find(|(known, _)| *known == name)
        {
            Some((_, points)) => points.push(point),
            None => curves.push((name, vec![point])),
        };
    for row in found {
        let rule = if row.aligned { "" } else { ", not multiples of 64" };
        put(format!("{}, ours{rule}", row.dtype), (row.operations, row.ours / 1e9));
        if row.aligned {
            put(format!("{}, libtorch", row.dtype), (row.operations, row.libtorch / 1e9));
        }
    }
    for dtype in ["f32", "bf16"] {
        let own = found.iter().filter(|row| row.dtype == dtype && row.aligned);
        let curve = Curve::of(own.map(|row| [row.operations, row.ours / 1e9]).collect());
        if curve.is_valid() {
            let (from, peak) = (curve.reaches(0.9), curve.peak());
            let name = format!("{dtype}: 90 % of peak from {:.3} GFLOP", from / 1e9);
            put(name.clone(), (from, peak / 100.0));
            put(name, (from, peak));
        }
    }
    for (_, points) in &mut curves {
        points.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.total_cmp(&right.1)));
    }
    let title = "rate of matmuls (GFLOP/s of a worker) over their operations, log-log".to_owned();
    Chart { title, log: true, curves }
}

/// Measures memory.
pub(crate) fn memory(args: MemoryArgs) -> Result<u8> {
    let (from, to) = sizes(&args.from, &args.to)?;
    let (bench, _, results) = args.common.start(args.out.out.as_deref())?;
    if !args.common.json {
        let head = PASSES.map(|pass| format!("{:>14}", pass.name()));
        print_line!("{:>12}{}  (GB/s of a worker, read and written)", "bytes", head.concat());
    }
    let mut found: Vec<Vec<Bandwidth>> = PASSES.map(|_| Vec::new()).into();
    let mut bytes = from.max(1 << 10);
    while bytes <= to.max(1 << 10) {
        for (pass, found) in PASSES.into_iter().zip(&mut found) {
            let row = Bandwidth {
                operation: pass.name(),
                bytes,
                bytes_per_s: bench.memory(pass, bytes)?,
            };
            if args.common.json {
                print_raw(&format!("{}\n", serde_json::json!(row)))?;
            }
            found.push(row);
        }
        if !args.common.json {
            let last = found.iter().filter_map(|rows| rows.last());
            let cells = last.map(|row| format!("{:>14.2}", row.bytes_per_s / 1e9));
            print_line!("{bytes:>12}{}", cells.collect::<String>());
        }
        bytes *= 4;
    }
    let curve = |pass: MemoryPass| {
        let own = found.iter().flatten().filter(|row| row.operation == pass.name());
        Some(Curve::of(own.map(|row| [row.bytes as f64, row.bytes_per_s]).collect()))
    };
    let points = |rows: &Vec<Bandwidth>| {
        rows.iter().map(|row| (row.bytes as f64, row.bytes_per_s / 1e9)).collect()
    };
    let named = PASSES.iter().zip(&found);
    let chart = Chart {
        title: "bandwidth (GB/s of a worker) over size (bytes of all tensors), log-log".to_owned(),
        log: true,
        curves: named.map(|(pass, rows)| (pass.name().to_owned(), points(rows))).collect(),
    };
    results.put(&chart, |described| {
        described.memory = Some(MemoryBandwidth {
            copy: curve(MemoryPass::Copy),
            scale: curve(MemoryPass::Scale),
            add: curve(MemoryPass::Add),
            triad: curve(MemoryPass::Triad),
            checksum: curve(MemoryPass::Checksum),
            tree: curve(MemoryPass::Tree),
            softmax: curve(MemoryPass::Softmax),
        });
    })?;
    Ok(0)
}

/// Measures what lies between products.
pub(crate) fn kernels(args: KernelArgs) -> Result<u8> {
    let model = args.curriculum.as_ref().map(model).transpose()?;
    let (bench, device, results) = args.common.start(None)?;
    let (config, tokens) = match model {
        Some(model) => model,
        None => {
            let (preset, tokens) = match device {
                Device::Cpu => ("zaya1-nano", 1024),
                _ => ("zaya1-8b", 16_384),
            };
            let config =
                ZayaConfig::preset(preset).ok_or_else(|| Fault::bug("a preset is missing"))?;
            (config, tokens)
        }
    };
    let tokens = args.tokens.unwrap_or(tokens);
    if !args.common.json {
        let names = ["MB", "ours us", "torch us", "ours GB/s", "torch GB/s", "times as fast"];
        let head = names.map(|name| format!("{name:>14}"));
        print_line!("{:>26} {:>5}{}  ({tokens} tokens)", "operation", "", head.concat());
    }
    let mut found = Vec::new();
    for format in &args.formats.dtype {
        let numbers = MicroBatchSizes { config: config.clone(), tokens, kind: format.kind() };
        for of in numbers.operations() {
            let narrow = [Format::F32, Format::Bf16].into_iter().find(|it| it.kind() == of.kind());
            let dtype = narrow.unwrap_or(*format).name();
            // What is f32 in either format is measured once.
            if found.iter().any(|row: &Timed| (row.operation, row.dtype) == (of.name, dtype)) {
                continue;
            }
            let row = Timed {
                operation: of.name,
                dtype,
                bytes: of.bytes,
                ours: bench.operation(&numbers, &of, Implementation::Ours)?,
                libtorch: bench.operation(&numbers, &of, Implementation::Libtorch)?,
            };
            print_kernel(&row, &args.common)?;
            found.push(row);
        }
    }
    let points = |format: &Format, seconds: fn(&Timed) -> f64| {
        let own = found.iter().filter(|row| row.dtype == format.name());
        let mut points: Vec<_> =
            own.map(|row| (row.bytes as f64, row.bytes as f64 / seconds(row) / 1e9)).collect();
        points.sort_by(|left, right| left.0.total_cmp(&right.0));
        points
    };
    let curves = args.formats.dtype.iter().flat_map(|format| {
        let name = format.name();
        [
            (format!("{name}, ours"), points(format, |row| row.ours)),
            (format!("{name}, libtorch"), points(format, |row| row.libtorch)),
        ]
    });
    let title = "operations: GB/s of a worker over bytes taken and answered, log-log".to_owned();
    let chart = Chart { title, log: true, curves: curves.collect() };
    results.put(&chart, |_| ())?;
    Ok(0)
}

fn print_kernel(row: &Timed, common: &MeasureArgs) -> Result<()> {
    if common.json {
        return print_raw(&format!("{}\n", serde_json::json!(row)));
    }
    let Timed { operation, dtype, bytes, ours, libtorch } = row;
    let rate = |seconds: &f64| *bytes as f64 / seconds / 1e9;
    let cells = [
        *bytes as f64 / 1e6,
        1e6 * ours,
        1e6 * libtorch,
        rate(ours),
        rate(libtorch),
        libtorch / ours,
    ];
    let cells = cells.map(|cell| format!("{cell:>14.2}"));
    print_line!("{operation:>26} {dtype:>5}{}", cells.concat());
    Ok(())
}
