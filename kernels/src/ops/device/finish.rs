//! Finishes the gradients of a whole layer with one launch of each kind: adds up sums over bands of rows, converts bf16
//! to f32 and writes zeros for experts without rows.

use tch::{Kind, Tensor};

use super::Queue;
use super::rows::tiles;
use crate::Result;
use crate::device::additions::{self, Addition, Operand};
use crate::ops::call::Call;
use crate::ops::operands::BandSum;
use crate::ops::{BandSums, ExpertGradient, ParamGradient};

/// Numbers in a row of the table (`Unfinished` in `finish.h`).
const ROW: i64 = 6;

impl ParamGradient {
    /// One of its tensors, which shows the device.
    pub(super) fn begun(&self) -> &Tensor {
        match self {
            ParamGradient::Made(made) | ParamGradient::Experts(ExpertGradient { made, .. }) => made,
            ParamGradient::Banded(banded) => &banded.sums[0].partial,
        }
    }
}

/// The table under construction.
#[derive(Default)]
struct Unfinished {
    rows: Vec<i64>,
    blocks: i64,
}

impl Unfinished {
    /// Adds a sum over bands, for every `stride`-th column.
    fn sum(&mut self, bands: &BandSum, place: i64, stride: i64) -> Result<()> {
        let BandSum { partial, other, factor } = bands;
        let [bands, width] = Call("finish").matrix("bands", partial)?;
        let [other, factor] = [other, factor].map(|tensor| tensor.as_ref().map_or(0, address));
        self.rows.extend([address(partial), other, factor, place]);
        self.rows.extend([bands | width << 32, stride | self.blocks << 32]);
        self.blocks += tiles(width);
        Ok(())
    }
}

fn address(tensor: &Tensor) -> i64 {
    tensor.data_ptr() as i64
}

/// Finishes all of them, f32: those that are finished already are returned unchanged.
pub(super) fn finish(queue: &Queue, all: Vec<ParamGradient>) -> Result<Vec<Tensor>> {
    let (mut out, mut table) = (Vec::with_capacity(all.len()), Unfinished::default());
    let mut sides = Vec::new();
    for one in &all {
        let found = match one {
            ParamGradient::Made(made) if made.kind() == Kind::Float => made.shallow_clone(),
            ParamGradient::Made(made) => {
                Call("finish").float("made", made, &made.size())?;
                let found = queue.room(&made.size(), Kind::Float)?;
                sides.push((made.into(), found.shallow_clone()));
                found
            }
            ParamGradient::Experts(ExpertGradient { made, ends }) => {
                let found = queue.room(&made.size(), Kind::Float)?;
                let side = Operand { ends: Some(ends), ..made.into() };
                sides.push((side, found.shallow_clone()));
                found
            }
            ParamGradient::Banded(BandSums { sums, shape }) => {
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
    let rows = sides.iter().map(|(side, out)| Addition::of(*side, Some(out)));
    drop(additions::make(queue, &rows.collect::<Vec<_>>())?);
    Ok(out)
}
