//! `ztrain bench gemm --hash`: whether a model's products have the same bits every time.

use contract::Result;
use contract::terminal::print_raw;
use tch::Kind;
use tools::sizing::repeat::{RepeatOptions, Repeated};
use tools::sizing::shapes::MatmulShape;
use trainer::model::ZayaConfig;

/// Computes each again and again, and prints a line for each. 4 where one has several outcomes.
pub(super) fn run(
    by: RepeatOptions,
    config: &ZayaConfig,
    tokens: i64,
    kinds: impl Iterator<Item = Kind>,
    json: bool,
) -> Result<u8> {
    let mut several = false;
    for kind in kinds {
        for row in by.of_model(config, tokens, kind)? {
            several |= row.outcomes > 1;
            match json {
                true => print_raw(&format!("{}\n", serde_json::json!(row)))?,
                false => print_row(&row)?,
            }
        }
    }
    Ok(if several { 4 } else { 0 })
}

fn print_row(row: &Repeated) -> Result<()> {
    let Repeated { name, way, dtype, shape, by, times, outcomes, digest } = row;
    let MatmulShape { rows, inner, columns } = shape;
    print_line!(
        "{outcomes:>4} of {times} {dtype:>5} {:>24}  {digest}  {name}, {way}, {by}",
        format!("{rows} x {inner} x {columns}")
    );
    Ok(())
}
