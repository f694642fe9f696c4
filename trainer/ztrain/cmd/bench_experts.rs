//! `ztrain bench gemm --curriculum` on a device: matmuls of experts, each way that they could be computed.

use contract::Result;
use contract::terminal::print_raw;
use serde::Serialize;
use tch::Kind;
use tools::sizing::experts::{ExpertMatmuls, ExpertRates};
use tools::sizing::machine::BenchOptions;
use tools::sizing::shapes::{self, MatmulBatching, MatmulShape, ModelMatmul};
use trainer::model::ZayaConfig;

/// A row: one way of all experts of a layer.
#[derive(Serialize)]
struct Row {
    /// Where a model has it.
    experts: String,
    dtype: &'static str,
    /// How many experts there are.
    count: i64,
    /// Rows of all together.
    #[serde(flatten)]
    shape: MatmulShape,
    way: &'static str,
    operations: f64,
    #[serde(flatten)]
    rates: ExpertRates,
    /// What training reaches of the fastest way.
    of_best: f64,
}

/// Measures those of a model, and prints a line for each.
pub(super) fn run(
    bench: BenchOptions,
    config: &ZayaConfig,
    tokens: i64,
    dtype: &'static str,
    kind: Kind,
    json: bool,
) -> Result<()> {
    let of_experts = |all: &ModelMatmul| all.together == MatmulBatching::Experts;
    let mut all: Vec<_> = shapes::of_model(config, tokens)
        .into_iter()
        .filter(of_experts)
        .map(|ModelMatmul { name, shape, .. }| {
            (name.strip_prefix("expert, ").unwrap_or(name), shape, false)
        })
        .collect();
    if !all.is_empty() {
        let (inner, columns) = (config.hidden_size, 3 * config.moe_intermediate_size);
        all.push(("a layer", MatmulShape { rows: tokens, inner, columns }, true));
    }
    for (product, shape, layer) in all {
        let shape = MatmulShape { rows: tokens, ..shape };
        let of = ExpertMatmuls { count: config.num_experts, shape, layer };
        let ways = [("forward", 1.0), ("backward", 2.0)];
        for ((way, times), rates) in ways.into_iter().zip(bench.experts(of, kind)?) {
            let row = Row {
                experts: product.to_owned(),
                dtype,
                count: of.count,
                shape: of.shape,
                way,
                operations: times * of.shape.operations(),
                of_best: rates.of_best(),
                rates,
            };
            match json {
                true => print_raw(&format!("{}\n", serde_json::json!(row)))?,
                false => print_row(&row)?,
            }
        }
    }
    Ok(())
}

fn print_row(row: &Row) -> Result<()> {
    let MatmulShape { rows, inner, columns } = row.shape;
    let rate = |rate: f64| format!("{:.1}", rate / 1e9);
    let ways = row
        .rates
        .alternatives()
        .map(|(name, of)| format!("{name} {}", of.map_or_else(|| "-".to_owned(), rate)));
    print_line!(
        "{} experts, {}, {}, {}: {rows} x {inner} x {columns}, GF/s: {}; of the fastest {:.2}",
        row.count,
        row.experts,
        row.dtype,
        row.way,
        ways.join(", "),
        row.of_best
    );
    Ok(())
}
