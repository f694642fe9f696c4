//! What is left to do for gradients, done for all of a layer by one launch: sums over bands of rows are added up, those of bf16
//! are widened, and experts without rows get their zeros.

use tch::{Kind, Tensor};

use super::Queue;
use super::rows::tiles;
use crate::Result;
use crate::ops::call::Call;
use crate::ops::operands::Bands;
use crate::ops::{Banded, Experts, Gradient};

/// Elements of a block that widens (`ELEMENTS` in `finish.h`).
const ELEMENTS: i64 = 4096;

/// Numbers in a row of the table (`Unfinished` in `finish.h`).
const ROW: i64 = 6;

impl Gradient {
    /// Something of it that stands on its device.
    pub(super) fn begun(&self) -> &Tensor {
        match self {
            Gradient::Made(made) | Gradient::Experts(Experts { made, .. }) => made,
            Gradient::Banded(banded) => &banded.sums[0].partial,
        }
    }
}

/// The table, as it grows.
#[derive(Default)]
struct Unfinished {
    rows: Vec<i64>,
    blocks: i64,
}

impl Unfinished {
    /// A sum over bands, for one column in `stride`.
    fn sum(&mut self, bands: &Bands, place: i64, stride: i64) -> Result<()> {
        let Bands { partial, other, factor } = bands;
        let [bands, width] = Call("finish").matrix("bands", partial)?;
        let [other, factor] = [other, factor].map(|tensor| tensor.as_ref().map_or(0, address));
        self.rows.extend([address(partial), other, factor, place]);
        self.rows.extend([bands | width << 32, stride | self.blocks << 32]);
        self.blocks += tiles(width);
        Ok(())
    }

    /// A tensor of bf16 or f32 that goes into `out`; zeros for experts that have no rows before their end.
    fn wide(&mut self, from: &Tensor, ends: Option<&Tensor>, out: &Tensor) {
        let elements = from.numel() as i64;
        let each = elements / from.size().first().copied().unwrap_or(1).max(1);
        let width = from.kind().elt_size_in_bytes() as i64;
        self.rows.extend([address(from), ends.map_or(0, address), elements, address(out)]);
        self.rows.extend([each << 32, width | self.blocks << 32]);
        self.blocks += (elements + ELEMENTS - 1) / ELEMENTS;
    }
}

fn address(tensor: &Tensor) -> i64 {
    tensor.data_ptr() as i64
}

/// All of them, f32: those that are so already are the same.
pub(super) fn finish(queue: &Queue, all: Vec<Gradient>) -> Result<Vec<Tensor>> {
    let (mut out, mut table) = (Vec::with_capacity(all.len()), Unfinished::default());
    for one in &all {
        let found = match one {
            Gradient::Made(made) if made.kind() == Kind::Float => made.shallow_clone(),
            Gradient::Made(made) => {
                Call("finish").float("made", made, &made.size())?;
                let found = queue.room(&made.size(), Kind::Float)?;
                table.wide(made, None, &found);
                found
            }
            Gradient::Experts(Experts { made, ends }) => {
                let found = queue.room(&made.size(), Kind::Float)?;
                table.wide(made, Some(ends), &found);
                found
            }
            Gradient::Banded(Banded { sums, shape }) => {
                let found = queue.room(shape, Kind::Float)?;
                for (at, bands) in (0..).zip(sums) {
                    table.sum(bands, address(&found) + 4 * at, sums.len() as i64)?;
                }
                found
            }
        };
        out.push(found);
    }
    if !table.rows.is_empty() {
        let count = table.rows.len() as i64 / ROW;
        let rows = queue.upload(&table.rows)?;
        queue.launch(c"finish", table.blocks, &[(&rows).into(), count.into()])?;
    }
    Ok(out)
}
