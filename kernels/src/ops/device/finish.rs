//! Finishes the gradients of a whole layer with one launch of each kind: adds up sums over bands of rows, converts bf16
//! to f32 and writes zeros for experts without rows.

use tch::{Device, Kind, Tensor};

use super::Queue;
use crate::device::additions::{self, Addition, Operand};
use crate::ops::call::Call;
use crate::ops::operands::BandSum;
use crate::ops::{BandSums, ExpertGradient, ParamGradient};
use crate::{Result, layout};

/// Numbers in a row of the table (`Unfinished` in `finish.h`), and columns of a block.
const ROW: i64 = 6;
const COLUMNS: i64 = 32;

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
struct Unfinished {
    device: Device,
    rows: Vec<i64>,
    blocks: i64,
}

impl Unfinished {
    /// Adds a sum over bands, for every `stride`-th column.
    fn sum(&mut self, bands: &BandSum, place: i64, stride: i64) -> Result<()> {
        let BandSum { partial, which, other, factor } = bands;
        let call = Call("finish");
        let [stack, bands, width] = call.sizes("bands", partial)?;
        if [Some(*which), *other].into_iter().flatten().any(|which| !(0..stack).contains(&which)) {
            let (found, wanted) = (format!("{which} and {other:?}"), format!("below {stack}"));
            return Err(call.refuse("which", found, wanted));
        }
        let begin = self.address(partial)?;
        let of_stack = |which: i64| begin + 4 * bands * width * which;
        let factor = factor.as_ref().map_or(Ok(0), |factor| self.address(factor))?;
        let other = other.map_or(0, of_stack);
        self.rows.extend([of_stack(*which), other, factor, place]);
        self.rows.extend([bands | width << 32, stride | self.blocks << 32]);
        self.blocks += (width + COLUMNS - 1) / COLUMNS;
        Ok(())
    }

    /// The address of contiguous f32.
    fn address(&self, tensor: &Tensor) -> Result<i64> {
        let found = layout::address(tensor, Kind::Float, self.device);
        found.map(|address| address as i64).ok_or_else(|| {
            let found = format!("{:?} on {:?}", tensor.kind(), tensor.device());
            Call("finish").refuse("bands", found, format!("contiguous f32 on {:?}", self.device))
        })
    }
}

/// Finishes all of them, f32: those that are finished already are returned unchanged.
pub(super) fn finish(queue: &Queue, all: Vec<ParamGradient>) -> Result<Vec<Tensor>> {
    let mut out = Vec::with_capacity(all.len());
    let mut table = Unfinished { device: queue.device(), rows: Vec::new(), blocks: 0 };
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
                let begin = table.address(&found)?;
                for (at, bands) in (0..).zip(sums) {
                    table.sum(bands, begin + 4 * at, sums.len() as i64)?;
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
