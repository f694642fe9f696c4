//! Operands of the tree of additions, one per parameter: a gradient as a library computed it on a device, or a sum.
//!
//! On a device with our kernels a bf16 gradient is kept until it is added to another one: then one pass converts, adds
//! and checksums both. The bits are those of f32 tensors added by [`tree::Sum`].

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::checksum::RunningChecksum;
use crate::device::additions::{self, Addition, Operand};
use crate::device::queue::Queue;
use crate::ops::{ExpertGradient, ParamGradient};
use crate::{Error, Result, tree};

/// Numbers of a parameter that are added to others.
#[derive(Debug)]
pub struct Addend {
    /// f32; a gradient may also be bf16.
    numbers: Tensor,
    /// Where the rows of each expert end: an expert without rows counts as zeros, whatever its memory holds.
    ends: Option<Tensor>,
    /// The total to which its checksum is added when it is read, and the salt.
    asked: Option<(RunningChecksum, u64)>,
}

/// Of many parameters, in a fixed order.
#[derive(Debug)]
pub struct Addends(pub Vec<Addend>);

impl From<Tensor> for Addend {
    fn from(numbers: Tensor) -> Self {
        Addend { numbers, ends: None, asked: None }
    }
}

impl TryFrom<ParamGradient> for Addend {
    type Error = ParamGradient;

    /// Fails for sums over bands, which must be finished first.
    fn try_from(gradient: ParamGradient) -> std::result::Result<Self, ParamGradient> {
        match gradient {
            ParamGradient::Made(made) => Ok(made.into()),
            ParamGradient::Experts(ExpertGradient { made, ends }) => {
                Ok(Addend { ends: Some(ends), ..made.into() })
            }
            ParamGradient::Banded(_) => Err(gradient),
        }
    }
}

impl Addend {
    /// Its device.
    pub fn device(&self) -> Device {
        self.numbers.device()
    }

    /// Adds its checksum, as f32, to `total`: on a device later, when it is read anyway, together with others.
    pub fn counted(self, total: &RunningChecksum, salt: u64) -> Result<Addend> {
        let asked = Some((total.clone(), salt));
        if queue(Some(&self)).is_some() {
            return Ok(Addend { numbers: self.numbers.f_contiguous()?, asked, ..self });
        }
        let wide = self.numbers.f_to_kind(Kind::Float)?;
        if wide.device() != Device::Cpu {
            return Ok(Addend { asked, ..wide.into() });
        }
        total.add(&[(&wide, 0, salt)])?;
        Ok(wide.into())
    }

    /// Converts it to f32.
    pub fn wide(self) -> Result<Tensor> {
        let mut all = wide(vec![self])?;
        Ok(all.swap_remove(0))
    }

    fn side(&self) -> Operand<'_> {
        let Addend { numbers, ends, asked } = self;
        let asked = asked.as_ref().map(|(_, salt)| *salt);
        Operand { tensor: numbers, ends: ends.as_ref(), asked }
    }

    /// Memory for a result: its own, unless that is bf16.
    fn room(&self, queue: &Queue) -> Result<Tensor> {
        match self.numbers.kind() {
            Kind::Float => Ok(self.numbers.shallow_clone()),
            _ => queue.room(&self.numbers.size(), Kind::Float),
        }
    }

    fn is_wide(&self) -> bool {
        self.numbers.kind() == Kind::Float && self.ends.is_none()
    }
}

/// One row of a launch.
struct LaunchRow<'a> {
    left: &'a Addend,
    right: Option<&'a Addend>,
    /// Where to write the sum.
    out: Option<&'a Tensor>,
    /// The range of numbers.
    range: Range<i64>,
}

impl<'a> LaunchRow<'a> {
    fn of(left: &'a Addend, out: Option<&'a Tensor>) -> Self {
        LaunchRow { left, right: None, out, range: 0..left.numbers.numel() as i64 }
    }
}

/// Computes the rows, and adds requested checksums to their totals.
fn make(queue: &Queue, rows: &[LaunchRow]) -> Result<()> {
    let table = rows.iter().map(|LaunchRow { left, right, out, range }| Addition {
        left: left.side(),
        right: right.map(Addend::side),
        out: *out,
        range: range.clone(),
    });
    let sums = additions::make(queue, &table.collect::<Vec<_>>())?;
    let sides = rows.iter().map(|row| Some(row.left)).chain(rows.iter().map(|row| row.right));
    let asked = sides.flatten().filter_map(|side| side.asked.as_ref());
    let (asked, mut at) = (asked.map(|(total, _)| total).collect::<Vec<_>>(), 0);
    for same_total in asked.chunk_by(|total, next| total.is(next)) {
        let count = same_total.len() as i64;
        same_total[0].push(sums.f_narrow(0, at, count)?);
        at += count;
    }
    Ok(())
}

/// The queue for the device of the first one, if our kernels run there.
fn queue(first: Option<&Addend>) -> Option<Queue> {
    let device = first.map(Addend::device).filter(|device| *device != Device::Cpu);
    device.and_then(|device| Queue::of(device).ok())
}

/// Converts all of them to f32, with their checksums: on a device in one launch.
pub fn wide(all: Vec<Addend>) -> Result<Vec<Tensor>> {
    match queue(all.first()) {
        Some(queue) => wide_on(&queue, &all),
        None => {
            settle(&all.iter().collect::<Vec<_>>())?;
            all.iter().map(|addend| Ok(addend.numbers.f_to_kind(Kind::Float)?)).collect()
        }
    }
}

fn wide_on(queue: &Queue, all: &[Addend]) -> Result<Vec<Tensor>> {
    let out: Vec<Tensor> = all.iter().map(|addend| addend.room(queue)).collect::<Result<_>>()?;
    let left =
        all.iter().zip(&out).filter(|(addend, _)| !addend.is_wide() || addend.asked.is_some());
    let rows = left.map(|(addend, out)| LaunchRow::of(addend, (!addend.is_wide()).then_some(out)));
    make(queue, &rows.collect::<Vec<_>>())?;
    Ok(out)
}

/// Returns them unchanged, after adding their checksums to the totals that requested them.
pub fn checked(mut all: Vec<Addend>) -> Result<Vec<Addend>> {
    if let Some(queue) = queue(all.first()) {
        let asked = all.iter().filter(|addend| addend.asked.is_some());
        let rows: Vec<_> = asked.map(|addend| LaunchRow::of(addend, None)).collect();
        make(&queue, &rows)?;
    } else {
        settle(&all.iter().collect::<Vec<_>>())?;
    }
    all.iter_mut().for_each(|addend| addend.asked = None);
    Ok(all)
}

/// Adds requested checksums of f32 without our kernels: those of one total in one call.
fn settle(all: &[&Addend]) -> Result<()> {
    let asked = all.iter().filter_map(|addend| Some((&addend.numbers, addend.asked.as_ref()?)));
    let asked: Vec<_> = asked.collect();
    for same_total in asked.chunk_by(|(_, (total, _)), (_, (next, _))| total.is(next)) {
        let parts = same_total.iter().map(|(numbers, (_, salt))| (*numbers, 0, *salt));
        same_total[0].1.0.add(&parts.collect::<Vec<_>>())?;
    }
    Ok(())
}

/// The sum of each pair, left + right: on a device by one launch.
pub fn add(pairs: Vec<(Addend, Addend)>) -> Result<Vec<Addend>> {
    let fits = |(left, right): &(Addend, Addend)| left.numbers.size() == right.numbers.size();
    if !pairs.iter().all(fits) {
        let (operation, operand) = ("a sum", "what is added");
        let [found, wanted] = ["of another shape", "one shape"].map(str::to_owned);
        return Err(Error::Operand { operation, operand, found, wanted });
    }
    if let Some(queue) = queue(pairs.first().map(|(left, _)| left)) {
        return add_on(&queue, &pairs);
    }
    settle(&pairs.iter().map(|(left, _)| left).collect::<Vec<_>>())?;
    settle(&pairs.iter().map(|(_, right)| right).collect::<Vec<_>>())?;
    let sum = |(left, right): (Addend, Addend)| {
        let [mut left, right] = [left, right].map(|addend| addend.numbers);
        let _ = left.f_add_(&right)?;
        Ok(left.into())
    };
    pairs.into_iter().map(sum).collect()
}

fn add_on(queue: &Queue, pairs: &[(Addend, Addend)]) -> Result<Vec<Addend>> {
    let out = pairs.iter().map(|(left, _)| left.room(queue)).collect::<Result<Vec<Tensor>>>()?;
    let row =
        |((left, right), out)| LaunchRow { right: Some(right), ..LaunchRow::of(left, Some(out)) };
    let rows = pairs.iter().map(|(left, right)| (left, right)).zip(&out).map(row);
    make(queue, &rows.collect::<Vec<_>>())?;
    Ok(out.into_iter().map(Addend::from).collect())
}

/// Copies ranges of numbers, f32, into buffers to send: on a device in one launch. An addend with a requested checksum
/// is copied whole, in one call.
pub fn copy(parts: &mut [(&Addend, Range<i64>, Tensor)]) -> Result<()> {
    if let Some(queue) = queue(parts.first().map(|(addend, ..)| *addend)) {
        return copy_on(&queue, parts);
    }
    for (addend, range, out) in parts {
        let all = addend.numbers.f_reshape([-1])?;
        let part = all.f_narrow(0, range.start, range.end - range.start)?;
        if let Some((total, salt)) = &addend.asked {
            total.add(&[(&part, range.start.cast_unsigned(), *salt)])?;
        }
        out.f_copy_(&part)?;
    }
    Ok(())
}

fn copy_on(queue: &Queue, parts: &[(&Addend, Range<i64>, Tensor)]) -> Result<()> {
    let rows = parts.iter().map(|(addend, range, out)| LaunchRow {
        range: range.clone(),
        ..LaunchRow::of(addend, Some(out))
    });
    make(queue, &rows.collect::<Vec<_>>())
}

impl tree::Sum for Addends {
    type Error = Error;

    fn sum(self, right: Self) -> Result<Self> {
        Ok(Addends(add(self.0.into_iter().zip(right.0).collect())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum;
    use crate::device::emulated::queue;

    const SALT: u64 = 0x1234_5678_9abc_def1;

    /// Gradients of experts as on a device, and as they should read: an expert without rows has NaN in the first and
    /// zeros in the second.
    fn experts(shape: [i64; 3], counts: &[i64], seed: i64, kind: Kind) -> (Addend, Tensor) {
        let made = Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu));
        let made = ((made + seed as f64) * 0.7).sin().view(shape).to_kind(kind);
        let ends = Tensor::from_slice(counts).cumsum(0, Kind::Int);
        let rows = Tensor::from_slice(counts).view([-1, 1, 1]);
        let none = Tensor::from(f32::NAN).to_kind(kind);
        let whole = made.where_self(&rows.ne(0), &Tensor::zeros_like(&none)).to_kind(Kind::Float);
        let made = made.where_self(&rows.ne(0), &none);
        (Addend { ends: Some(ends), ..made.into() }, whole)
    }

    fn asks(addend: Addend, total: &RunningChecksum) -> Addend {
        Addend { asked: Some((total.clone(), SALT)), ..addend }
    }

    fn plain(values: &Tensor) -> Addend {
        values.copy().into()
    }

    fn checksum(values: &Tensor) -> u64 {
        checksum::slice(values, 0, SALT).unwrap()
    }

    /// Adding unconverted leaves gives the bits and the checksums of converting them first.
    #[test]
    fn leaves_are_added_as_if_they_had_been_widened() {
        let queue = queue(Device::Cpu).unwrap();
        for (shape, kind) in
            [([4, 3, 5], Kind::BFloat16), ([4, 70, 33], Kind::BFloat16), ([4, 9, 7], Kind::Float)]
        {
            let counts = [[3i64, 0, 2, 0], [0, 0, 1, 8], [1, 1, 0, 1]];
            let leaves = [0, 1, 2].map(|at| experts(shape, &counts[at], 7 * at as i64, kind));
            let totals = [0, 1, 2].map(|_| RunningChecksum::default());
            let wanted = leaves.each_ref().map(|(_, whole)| whole.copy());
            let small = Tensor::from_slice(&[-0.0f32, 1.0, -0.0]);
            let [a, b, c] = leaves.map(|(leaf, _)| leaf);
            // The same launch adds a pair without requested checksums.
            let pairs =
                [(asks(a, &totals[0]), asks(b, &totals[1])), (plain(&small), plain(&small))];
            let mut sums = add_on(&queue, &pairs).unwrap();
            assert_eq!(checksum(&sums.remove(1).numbers), checksum(&(&small + &small)));
            let pair = [(sums.remove(0), asks(c, &totals[2]))];
            let all = add_on(&queue, &pair).unwrap().remove(0);
            let whole = &wanted[0] + &wanted[1] + &wanted[2];
            assert_eq!(checksum(&all.numbers), checksum(&whole), "{shape:?}");
            for (total, wanted) in totals.iter().zip(&wanted) {
                assert_eq!(total.read().unwrap(), checksum(wanted), "{shape:?}");
            }
        }
    }

    /// A leaf without a partner is converted whole, or in pieces into the send buffer.
    #[test]
    fn a_leaf_alone_is_counted_once() {
        let queue = queue(Device::Cpu).unwrap();
        for kind in [Kind::BFloat16, Kind::Float] {
            let leaf = |total: &RunningChecksum| {
                let (leaf, whole) = experts([3, 50, 41], &[0, 5, 1], 3, kind);
                (asks(leaf, total), whole)
            };
            let total = RunningChecksum::default();
            let (addend, wanted) = leaf(&total);
            let vector = Tensor::from_slice(&[-0.0f32, 2.0]);
            let found = wide_on(&queue, &[addend, asks(plain(&vector), &total)]).unwrap();
            assert_eq!(checksum(&found[0]), checksum(&wanted));
            let both = checksum(&wanted).wrapping_add(checksum(&vector));
            assert_eq!(total.read().unwrap(), both);

            let total = RunningChecksum::default();
            let (addend, _) = leaf(&total);
            let room = Tensor::zeros([3 * 50 * 41 + 1], (Kind::Float, Device::Cpu));
            let cuts = [0, 1, 2049, 2050, 3 * 50 * 41];
            let part = |pair: &[i64]| {
                let into = room.narrow(0, 1 + pair[0], pair[1] - pair[0]);
                (&addend, pair[0]..pair[1], into)
            };
            copy_on(&queue, &cuts.windows(2).map(part).collect::<Vec<_>>()).unwrap();
            let sent = room.narrow(0, 1, 3 * 50 * 41);
            assert_eq!(checksum(&sent.copy()), checksum(&wanted.view([-1])));
            assert_eq!(total.read().unwrap(), checksum(&wanted));
        }
    }

    #[test]
    fn what_has_another_shape_is_not_added() {
        let [two, three] = [2, 3].map(|n| Tensor::zeros([n], (Kind::Float, Device::Cpu)).into());
        assert!(add(vec![(two, three)]).unwrap_err().to_string().contains("another shape"));
    }
}
