//! The curve of a ramp, as integers: no float decides what a sample reads.

use contract::{Ratio, Result};
use serde::Deserialize;
use settings::{File, Spanned, Table, Value};

/// The whole way of a ramp, as an integer.
pub const RAMP_ONE: u64 = 1 << 32;

/// Straight pieces of a cosine: it is within 0.0002 of the real one.
const PIECES: u64 = 64;

/// The most numbers in a table.
const TABLE_MAX: usize = 1025;

/// What stands before a table's list when it is read alone.
const KEY: &str = "table = ";

/// A table read alone.
#[derive(Deserialize)]
struct List {
    table: Vec<Spanned<Value>>,
}

/// How a ramp moves from one mix to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MixCurve {
    /// The same change with every sample.
    Linear,
    /// Half a cosine: slow at both ends.
    Cosine,
    /// The part of the way at equal distances, with straight lines between.
    Table(Vec<Ratio>),
}

impl MixCurve {
    /// Reads the `curve` and the `table` of a ramp.
    pub(super) fn read(
        file: &File,
        ramp: &Spanned<Table>,
        curve: Option<&Spanned<Value>>,
        table: Option<&Spanned<Value>>,
    ) -> Result<MixCurve> {
        let name = match curve.map(|curve| (curve, curve.get_ref().as_str())) {
            None => "linear",
            Some((_, Some(name @ ("linear" | "cosine" | "table")))) => name,
            Some((curve, name)) => {
                let fault = file.wrong("curve", curve, "\"linear\", \"cosine\" or \"table\"");
                let known = ["linear", "cosine", "table"];
                return Err(name.map_or(fault.clone(), |name| fault.one_of(name, known)));
            }
        };
        match (name, table) {
            ("table", Some(table)) => Ok(MixCurve::Table(numbers(file, table)?)),
            ("table", None) => Err(file
                .fault(
                    curve.unwrap_or(&Spanned::new(ramp.span(), Value::Boolean(true))),
                    "the ramp has no `table`",
                )
                .wanted("table = [0, 0.2, 1]: parts of the way at equal distances")),
            (_, Some(table)) => Err(file
                .fault(table, "`table` is not used by this curve")
                .found(format!("curve = {name:?}"))
                .wanted("curve = \"table\", or no `table`")),
            ("cosine", None) => Ok(MixCurve::Cosine),
            _ => Ok(MixCurve::Linear),
        }
    }

    /// The curve at equal distances, in units of 1 / [`RAMP_ONE`].
    pub(super) fn knots(&self) -> Vec<u64> {
        match self {
            MixCurve::Linear => vec![0, RAMP_ONE],
            MixCurve::Cosine => (0..=PIECES).map(cosine).collect(),
            MixCurve::Table(parts) => parts.iter().map(nearest).collect(),
        }
    }

    /// Its name in a curriculum.
    pub(super) fn name(&self) -> &'static str {
        match self {
            MixCurve::Linear => "linear",
            MixCurve::Cosine => "cosine",
            MixCurve::Table(_) => "table",
        }
    }

    /// Adds its canonical keys.
    pub(super) fn write(&self, pairs: &mut Vec<String>) {
        pairs.push(format!("curve = \"{}\"", self.name()));
        if let MixCurve::Table(parts) = self {
            let number = |part: &Ratio| match part.den() {
                1 => part.to_string(),
                _ => format!("\"{part}\""),
            };
            let numbers: Vec<String> = parts.iter().map(number).collect();
            pairs.push(format!("table = [{}]", numbers.join(", ")));
        }
    }
}

/// The numbers of a table, exactly as typed.
fn numbers(file: &File, table: &Spanned<Value>) -> Result<Vec<Ratio>> {
    let wanted = "2 to 1,025 numbers from 0 to 1: [0, 0.2, 1]";
    let wrong = || {
        let count = table.get_ref().as_array().map_or(0, Vec::len);
        let fault = file.wrong("table", table, wanted);
        // A long list is shown by its length.
        if count > 9 { fault.found(format!("{count} numbers")) } else { fault }
    };
    if !table.get_ref().is_array() {
        return Err(wrong());
    }
    // Values in a list have no places of their own: the list is read once more, alone.
    let alone = File::new(file.name(), format!("{KEY}{}", file.typed(table.span())));
    let List { table: list } = alone.parse().map_err(|_| wrong())?;
    if !(2..=TABLE_MAX).contains(&list.len()) {
        return Err(wrong());
    }
    let number = |value: &Spanned<Value>| {
        let part = alone.ratio(value).map_err(|reason| wrong().hint(reason))?;
        let outside = || wrong().found(alone.typed(value.span()));
        if part.num() > part.den() { Err(outside()) } else { Ok(part) }
    };
    let numbers = list.iter().map(number).collect::<Result<Vec<Ratio>>>()?;
    if numbers.iter().all(|number| *number == numbers[0]) {
        return Err(file
            .fault(table, "the ramp changes nothing: all numbers of `table` are equal")
            .wanted(wanted));
    }
    Ok(numbers)
}

/// The nearest integer part of [`RAMP_ONE`].
fn nearest(part: &Ratio) -> u64 {
    let (num, den) = (u128::from(part.num()), u128::from(part.den()));
    ((2 * num * u128::from(RAMP_ONE) + den) / (2 * den)) as u64
}

/// `(1 - cos(pi piece / PIECES)) / 2`, rounded to nearest: the square of the sine of half the angle, by its series in
/// fixed point. Its error is far below the rounding.
fn cosine(piece: u64) -> u64 {
    const SHIFT: u32 = 60;
    /// Pi, rounded down.
    const PI: i128 = 0x3243_F6A8_885A_308D;
    let angle = PI * i128::from(piece) / i128::from(2 * PIECES);
    let square = (angle * angle) >> SHIFT;
    let (mut sine, mut term) = (0, angle);
    for number in (1..40).step_by(2) {
        sine += term;
        term = -((term * square) >> SHIFT) / ((number + 1) * (number + 2));
    }
    let square = (sine * sine) >> SHIFT;
    let step = 1i128 << (SHIFT - RAMP_ONE.trailing_zeros());
    ((square + step / 2) / step) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cosine_is_the_cosine() {
        for piece in 0..=PIECES {
            let real = (1.0 - (std::f64::consts::PI * piece as f64 / PIECES as f64).cos()) / 2.0;
            assert!((cosine(piece) as f64 - real * RAMP_ONE as f64).abs() < 0.5001, "{piece}");
            assert_eq!(cosine(piece) + cosine(PIECES - piece), RAMP_ONE, "{piece}");
        }
        assert_eq!((cosine(0), cosine(PIECES)), (0, RAMP_ONE));
    }
}
