//! `ztrain bench gemm`: attention over one document, on a device each way that it could be computed.

use contract::Result;
use contract::terminal::print_raw;
use tch::{Device, Kind};
use tools::sizing::attention::{AttentionRates, AttentionTiming};
use tools::sizing::machine::BenchOptions;
use trainer::model::ZayaConfig;

/// Measures documents of several lengths up to `most`, or the tokens of the model's micro-batch, with the heads of a
/// model, and prints a line for each. Answers with operations, and those in a second, forward and backward, as training
/// computes them.
pub(super) fn run(
    bench: BenchOptions,
    dtype: &'static str,
    kind: Kind,
    most: Option<i64>,
    model: Option<&(ZayaConfig, i64)>,
    json: bool,
) -> Result<Vec<[f64; 3]>> {
    let (heads, usual) = match (model, bench.device) {
        (Some((config, tokens)), _) => {
            let heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
            (heads, *tokens)
        }
        (None, Device::Cpu) => ([4, 1, 64], 2048),
        (None, _) => ([8, 2, 128], 8192),
    };
    let (mut found, most) = (Vec::new(), most.unwrap_or(usual));
    for tokens in [most / 64, most / 16, most / 4, most].into_iter().filter(|tokens| *tokens > 0) {
        let measured = bench.attention(tokens, heads, kind)?;
        match json {
            true => print_json(&measured, dtype, tokens, heads)?,
            false => print_row(&measured, dtype, tokens, heads)?,
        }
        let AttentionRates { forward, backward } = measured.trained;
        found.push([measured.operations, forward, backward]);
    }
    Ok(found)
}

fn print_json(measured: &AttentionTiming, dtype: &str, tokens: i64, heads: [i64; 3]) -> Result<()> {
    let AttentionTiming { operations, trained: AttentionRates { forward, backward }, others } =
        measured;
    let mut row = serde_json::json!({
        "attention": tokens, "dtype": dtype, "heads": heads,
        "operations": operations, "forward": forward, "backward": backward
    });
    for (name, rates) in others {
        row[*name] = serde_json::json!(rates);
    }
    print_raw(&format!("{row}\n"))
}

fn print_row(measured: &AttentionTiming, dtype: &str, tokens: i64, heads: [i64; 3]) -> Result<()> {
    let said = |AttentionRates { forward, backward }: &AttentionRates| {
        format!("{:.1} GF/s forward, {:.1} backward", forward / 1e9, backward / 1e9)
    };
    let others = measured.others.iter().map(|(name, rates)| format!("; {name} {}", said(rates)));
    print_line!(
        "attention, {dtype}, {tokens} tokens, {} heads of {}: {}{}",
        heads[0],
        heads[2],
        said(&measured.trained),
        others.collect::<String>()
    );
    Ok(())
}
