//! `ztrain devices`: where this machine can compute, by which libraries, and what is promised there.

use std::collections::BTreeMap;

use contract::Result;
use contract::terminal::{print_raw, say};
use kernels::device::{self, Gpus};
use kernels::levels;
use kernels::runtime::KernelTable;
use serde::Serialize;
use trainer::workers::Workers;

use super::Speed;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print one line of JSON for each device.
    #[arg(long)]
    json: bool,
}

/// A device, as it is printed.
#[derive(Serialize)]
struct Row {
    /// As `--device` takes it.
    device: String,
    name: String,
    /// Instruction set of a processor, architecture of a GPU.
    architecture: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    /// Releases by library, or why there is none; of a GPU what else stands in the kernel table of a run there.
    libraries: BTreeMap<String, String>,
    levels: Vec<&'static str>,
}

/// Lists what is found; a machine without a GPU is no fault.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let (_, table) = Speed::on("cpu").start(None)?;
    let mut rows = vec![cpu(&table)];
    let gpus = device::gpus();
    if let Ok(gpus) = &gpus {
        rows.extend(gpu_rows(gpus, &table));
    }
    for row in &rows {
        match args.json {
            true => print_raw(&format!("{}\n", serde_json::json!(row)))?,
            false => print_line!("{}", row.text()),
        }
    }
    let none = match &gpus {
        Err(why) => why.clone(),
        Ok(gpus) if gpus.devices.is_empty() => {
            format!("{} is here, but the driver shows no device", gpus.library)
        }
        Ok(_) => return Ok(0),
    };
    // Not with JSON: this is for people.
    match args.json {
        true => say(format_args!("no GPU: {none}")),
        false => print_line!("no GPU: {none}"),
    }
    Ok(0)
}

fn cpu(table: &KernelTable) -> Row {
    let libraries = [
        ("instructions", &table.extensions),
        ("libtorch", &table.libtorch),
        ("MKL", &table.mkl),
        ("oneDNN", &table.onednn),
        ("operations", &table.operations),
    ];
    Row {
        device: "cpu".to_owned(),
        name: table.cpu.clone(),
        architecture: table.cpu_capability.clone(),
        cores: Some(Workers::available().count()),
        bytes: None,
        uuid: None,
        libraries: libraries.map(|(name, release)| (name.to_owned(), release.clone())).into(),
        levels: table.levels(),
    }
}

fn gpu_rows(gpus: &Gpus, table: &KernelTable) -> Vec<Row> {
    let said = |found: &std::result::Result<String, String>| match found {
        Ok(release) => release.clone(),
        Err(why) => format!("none ({why})"),
    };
    let libraries = BTreeMap::from(
        [
            ("libtorch", format!("{}, {}", table.libtorch, gpus.library)),
            ("compiler of our kernels", said(&gpus.compiler)),
            ("NCCL or RCCL", said(&gpus.between)),
        ]
        .map(|(name, release)| (name.to_owned(), release)),
    );
    let rows = gpus.devices.iter().enumerate().map(|(index, gpu)| Row {
        device: format!("cuda:{index}"),
        name: gpu.name.clone().unwrap_or_else(|| "a GPU whose driver says no name".to_owned()),
        architecture: gpu.architecture.clone(),
        cores: None,
        bytes: gpu.memory,
        uuid: gpu.uuid.clone(),
        libraries: libraries.clone().into_iter().chain(gpu.table.clone()).collect(),
        levels: levels::of_gpus(&gpu.architecture, &table.libtorch),
    });
    rows.collect()
}

impl Row {
    fn text(&self) -> String {
        let mut first = vec![self.name.clone(), self.architecture.clone()];
        first.extend(
            self.cores
                .map(|cores| format!("{} for this process", contract::counted(cores, "core"))),
        );
        first.extend(self.bytes.map(contract::words::bytes));
        first.retain(|part| !part.is_empty());
        let libraries: Vec<_> =
            self.libraries.iter().map(|(name, release)| format!("{name} {release}")).collect();
        let proven = match self.levels[..] {
            ["D"] => {
                "data alone; that training repeats its bits here `sh tests/device.sh` may show"
            }
            _ if self.device == "cpu" => "tested",
            _ => "shown on one like it; a run says whether its own kernel table is the one",
        };
        format!(
            "{:<8} {}\n         {}\n         levels {}: {proven}",
            self.device,
            first.join(", "),
            libraries.join("; "),
            self.levels.join(" "),
        )
    }
}
