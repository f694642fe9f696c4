//! Measures how fast ranks exchange bytes: libtorch's own collectives, and the reproducible ones for comparison (only
//! bytes move; each owner adds in the order of the tree).
//!
//! Sizes and bandwidths are defined as in rccl-tests and nccl-tests: `size` is the larger of a rank's input and output,
//! algorithm bandwidth is size / time, bus bandwidth is that times the share of `size` that must cross a rank's link.

use std::collections::BTreeMap;
use std::time::Instant;

use contract::{Fault, Result};
use kernels::group::{Collective, Group};
use kernels::tree::Counter;
use serde::Serialize;
use tch::{Kind, Tensor};

use crate::chart::Chart;
use trainer::mesh::words::{WordReader, WordWriter};
use trainer::refusal::{lost, refused};

/// A collective and its implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// libtorch's own, over Gloo.
    Libtorch(Collective),
    /// Ours: transfers between ranks, sums by the fixed tree.
    Exact(Collective),
    /// Gathers shards of weights (`--tsp`): their holders send to all ranks one after the other, the next meanwhile.
    InTurn,
    /// Gathers them around a ring: each rank forwards what it has just received, so that all send at once, but each
    /// rank receives the shards in a different order.
    Around,
}

/// Everything that is measured.
pub const WAYS: [CollectiveKind; 11] = [
    CollectiveKind::Libtorch(Collective::AllReduce),
    CollectiveKind::Exact(Collective::AllReduce),
    CollectiveKind::Libtorch(Collective::ReduceScatter),
    CollectiveKind::Exact(Collective::ReduceScatter),
    CollectiveKind::Libtorch(Collective::AllGather),
    CollectiveKind::Exact(Collective::AllGather),
    CollectiveKind::InTurn,
    CollectiveKind::Around,
    CollectiveKind::Libtorch(Collective::Broadcast),
    CollectiveKind::Libtorch(Collective::AllToAll),
    CollectiveKind::Exact(Collective::AllToAll),
];

/// One measurement, the same on every rank.
#[derive(Clone, Debug, Serialize)]
pub struct CollectiveTiming {
    /// "all-reduce".
    pub collective: &'static str,
    /// "libtorch", "fixed tree", or "rccl" for the fixed tree with RCCL transfers; for shards, "in turn" or "a ring".
    pub by: &'static str,
    /// Bytes, as defined above.
    pub bytes: u64,
    /// How often it ran.
    pub rounds: u32,
    /// The median over its rounds, of the slowest rank, because others may use the machines.
    pub microseconds: f64,
    /// Algorithm bandwidth.
    pub algorithm_gb_per_s: f64,
    /// Bus bandwidth.
    pub bus_gb_per_s: f64,
    /// Elements with wrong values, over all ranks.
    pub wrong: u64,
}

impl CollectiveKind {
    fn collective(self) -> Collective {
        match self {
            CollectiveKind::Libtorch(collective) | CollectiveKind::Exact(collective) => collective,
            CollectiveKind::InTurn | CollectiveKind::Around => Collective::AllGather,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self.collective() {
            Collective::AllReduce => "all-reduce",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllGather => "all-gather",
            Collective::Broadcast => "broadcast",
            Collective::AllToAll => "all-to-all",
        }
    }

    /// The name of its implementation.
    pub fn by(self, group: &Group) -> &'static str {
        match self {
            CollectiveKind::Libtorch(_) => "libtorch",
            CollectiveKind::InTurn => "in turn",
            CollectiveKind::Around => "a ring",
            CollectiveKind::Exact(_) if group.by_rccl() => "rccl",
            CollectiveKind::Exact(_) => "fixed tree",
        }
    }

    /// The share of the size that crosses each rank's link at best.
    fn bus_share(self, world: u32) -> f64 {
        let others = f64::from(world - 1) / f64::from(world);
        match self.collective() {
            Collective::AllReduce => 2.0 * others,
            Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll => others,
            Collective::Broadcast => 1.0,
        }
    }

    fn run(self, group: &Group, input: &Tensor, output: &mut Tensor) -> Result<()> {
        match self {
            CollectiveKind::Libtorch(collective) => {
                group.collective(collective, input, output).map_err(lost)
            }
            CollectiveKind::Exact(collective) => exact(group, collective, input, output),
            CollectiveKind::InTurn => in_turn(group, input, &parts(group, output)),
            CollectiveKind::Around => around(group, input, &parts(group, output)),
        }
    }
}

/// Measures one way at about `bytes`, for about `seconds`.
pub fn measure(
    group: &Group,
    way: CollectiveKind,
    bytes: u64,
    seconds: f64,
) -> Result<CollectiveTiming> {
    let world = i64::from(group.world());
    let share = (bytes as i64 / 4 / world).max(1);
    let (input_shares, output_shares) = match way.collective() {
        Collective::AllGather => (1, world),
        Collective::ReduceScatter => (world, 1),
        _ => (world, world),
    };
    let device = match way {
        CollectiveKind::Libtorch(_) => tch::Device::Cpu,
        CollectiveKind::Exact(_) | CollectiveKind::InTurn | CollectiveKind::Around => {
            group.device()
        }
    };
    let input = filled(group.rank(), 0, share * input_shares);
    let input = input.f_to_device(device).map_err(refused)?;
    let output = Tensor::f_zeros([share * output_shares], (Kind::Float, device));
    let mut output = output.map_err(refused)?;
    // libtorch's all-reduce and broadcast work in place.
    let in_place =
        matches!(way, CollectiveKind::Libtorch(Collective::AllReduce | Collective::Broadcast));
    let run = |output: &mut Tensor| {
        if in_place {
            tch::no_grad(|| output.copy_(&input));
        }
        group.barrier("a measurement").map_err(lost)?;
        let start = Instant::now();
        match in_place {
            true => way.run(group, &output.shallow_clone(), output)?,
            false => way.run(group, &input, output)?,
        }
        if device != tch::Device::Cpu {
            // Reading a number waits for the device.
            output.get(0).double_value(&[]);
        }
        Ok(start.elapsed().as_secs_f64())
    };
    let first = (0..2).map(|_| run(&mut output)).collect::<Result<Vec<f64>>>()?;
    let rounds = agree(group, first[1])?;
    let rounds = (seconds / rounds.max(1e-6)).clamp(3.0, 200.0) as u32;
    let mut taken = (0..rounds).map(|_| run(&mut output)).collect::<Result<Vec<f64>>>()?;
    taken.sort_by(f64::total_cmp);
    let output = output.f_to_device(tch::Device::Cpu).map_err(refused)?;
    let wrong = wrong(group, way.collective(), &output, share);
    let median = agree(group, taken[taken.len() / 2])?;
    let wrong = agree(group, wrong as f64)? as u64;
    let bytes = (share * world * 4) as u64;
    let algorithm = bytes as f64 / median / 1e9;
    Ok(CollectiveTiming {
        collective: way.name(),
        by: way.by(group),
        bytes,
        rounds,
        microseconds: median * 1e6,
        algorithm_gb_per_s: algorithm,
        bus_gb_per_s: algorithm * way.bus_share(group.world()),
        wrong,
    })
}

/// Seconds of computation between two synchronizations in [`uneven`]: about a step of a small model.
const STRETCH: f64 = 0.2;

/// Rows of its matmuls, and numbers in its passes over memory.
const LOAD: (i64, i64) = (256, 1 << 20);

/// The share of its computing time that a rank waits for the slowest rank although all compute the same: the median of
/// about `seconds`, over all ranks. Others may use the machines, or processors may run at different clocks.
pub fn uneven(group: &Group, seconds: f64) -> Result<f64> {
    let (rows, count) = LOAD;
    let float = (Kind::Float, group.device());
    let (square, long) = (Tensor::ones([rows, rows], float), Tensor::ones([count], float));
    let (out, mut sum) = (square.empty_like(), long.zeros_like());
    let mut load = |calls: u32| -> Result<f64> {
        let begin = Instant::now();
        for _ in 0..calls {
            for _ in 0..4 {
                kernels::product::into(&out, &square, &square).map_err(refused)?;
            }
            sum += &long;
        }
        // Reading a number waits for the device.
        sum.get(0).double_value(&[]);
        Ok(begin.elapsed().as_secs_f64())
    };
    load(4)?;
    // Every rank makes as many calls as the slowest one makes in that time.
    let once = agree(group, load(16)? / 16.0)?;
    let calls = (STRETCH / once).clamp(1.0, 1e6) as u32;
    let rounds = (seconds / STRETCH).ceil().clamp(5.0, 1e3) as usize;
    let mut shares = Vec::new();
    for _ in 0..rounds {
        group.barrier("a stretch of computing").map_err(lost)?;
        let message = WordWriter::default().float(load(calls)?).bytes().to_vec();
        let gathered = group.all_gather("a stretch of computing", &message).map_err(lost)?;
        let all = gathered.iter().map(|gathered| WordReader::new(gathered).float());
        let all = all.collect::<Result<Vec<f64>>>()?;
        let slowest = all.iter().copied().fold(0.0, f64::max);
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        shares.push(slowest / mean - 1.0);
    }
    shares.sort_by(f64::total_cmp);
    Ok(shares[rounds / 2])
}

/// The largest value that any rank has.
fn agree(group: &Group, seconds: f64) -> Result<f64> {
    let gathered = group
        .all_gather("a measurement", WordWriter::default().float(seconds).bytes())
        .map_err(lost)?;
    let values = gathered
        .iter()
        .map(|gathered| WordReader::new(gathered).float())
        .collect::<Result<Vec<_>>>()?;
    Ok(values.into_iter().fold(0.0, f64::max))
}

/// Elements `first` to `first + count` of `rank`'s input: small integers, exact in f32 in any order of addition.
/// Allocates nothing but the result: at a gigabyte there may be no more memory.
fn filled(rank: u32, first: i64, count: i64) -> Tensor {
    const PERIOD: i64 = 97;
    let skip = first % PERIOD;
    let mut all =
        Tensor::arange(PERIOD, tch::kind::FLOAT_CPU).repeat([(skip + count) / PERIOD + 1]);
    let _ = all.g_add_scalar_(f64::from(rank));
    all.narrow(0, skip, count)
}

/// Counts the wrong elements, a slice at a time.
fn wrong(group: &Group, collective: Collective, output: &Tensor, share: i64) -> i64 {
    const SLICE: usize = 1 << 20;
    let (world, rank) = (group.world(), group.rank());
    // Element `at` of part `part` of the output.
    let wanted = |part: i64, at: i64, count: i64| {
        let place = |from: u32, part: i64| filled(from, part * share + at, count);
        let sum = |part: i64| (1..world).fold(place(0, part), |sum, from| sum + place(from, part));
        match collective {
            Collective::AllReduce => sum(part),
            Collective::ReduceScatter => sum(i64::from(rank)),
            Collective::AllGather => place(part as u32, 0),
            Collective::Broadcast => place(0, part),
            Collective::AllToAll => place(part as u32, i64::from(rank)),
        }
    };
    let slices = (0..output.numel() as i64 / share)
        .flat_map(|part| (0..share).step_by(SLICE).map(move |at| (part, at)));
    let wrong = slices.map(|(part, at)| {
        let count = (share - at).min(SLICE as i64);
        let found = output.narrow(0, part * share + at, count);
        found.not_equal_tensor(&wanted(part, at, count)).sum(Kind::Int64).int64_value(&[])
    });
    wrong.sum()
}

/// A row for each rank.
fn parts(group: &Group, tensor: &Tensor) -> Tensor {
    tensor.view([i64::from(group.world()), -1])
}

/// The collectives as training uses them.
fn exact(group: &Group, collective: Collective, input: &Tensor, output: &mut Tensor) -> Result<()> {
    let world = i64::from(group.world());
    let parts = |tensor: &Tensor| parts(group, tensor);
    tch::no_grad(|| match collective {
        Collective::AllGather => all_gather(group, input, &parts(output)),
        Collective::AllToAll => {
            let received = all_to_all(group, &parts(input))?;
            let out = parts(output);
            (0..world).zip(received).for_each(|(from, part)| out.get(from).copy_(&part));
            Ok(())
        }
        Collective::ReduceScatter => {
            output.copy_(&own_sum(group, &parts(input))?);
            Ok(())
        }
        Collective::AllReduce => all_gather(group, &own_sum(group, &parts(input))?, &parts(output)),
        Collective::Broadcast => Err(Fault::bug("training broadcasts nothing")),
    })
}

/// This rank's part of the sum over all ranks, added in the order of the tree.
fn own_sum(group: &Group, parts: &Tensor) -> Result<Tensor> {
    let mut sum = Counter::new();
    all_to_all(group, parts)?.into_iter().try_for_each(|part| sum.push(part)).map_err(refused)?;
    sum.finish().map_err(refused)?.ok_or_else(|| Fault::bug("a group without ranks"))
}

/// Sends part `r` of `parts` to rank `r`; returns what was received, by rank.
fn all_to_all(group: &Group, parts: &Tensor) -> Result<Vec<Tensor>> {
    let mut exchange = group.begin("an all-to-all").map_err(lost)?;
    let count = parts.size()[1];
    let mut arrivals = Vec::new();
    for from in group.others() {
        arrivals.push((from, exchange.receive(0, from, Kind::Float, count).map_err(lost)?));
    }
    for to in group.others() {
        exchange.send(0, to, &parts.get(i64::from(to))).map_err(lost)?;
    }
    exchange.close(0).map_err(lost)?;
    let mut found = vec![(group.rank(), parts.get(i64::from(group.rank())).copy())];
    for (from, arrival) in arrivals {
        found.push((from, arrival.wait().map_err(lost)?));
    }
    exchange.finish().map_err(lost)?;
    found.sort_by_key(|(from, _)| *from);
    Ok(found.into_iter().map(|(_, part)| part).collect())
}

/// Sends `tensor` to all ranks; row `r` of `out` is rank `r`'s.
fn all_gather(group: &Group, tensor: &Tensor, out: &Tensor) -> Result<()> {
    let mut exchange = group.begin("an all-gather").map_err(lost)?;
    let mut arrivals = Vec::new();
    for from in group.others() {
        let count = tensor.numel() as i64;
        arrivals.push((from, exchange.receive(0, from, Kind::Float, count).map_err(lost)?));
    }
    for to in group.others() {
        exchange.send(0, to, tensor).map_err(lost)?;
    }
    exchange.close(0).map_err(lost)?;
    out.get(i64::from(group.rank())).copy_(tensor);
    for (from, arrival) in arrivals {
        out.get(i64::from(from)).copy_(&arrival.wait().map_err(lost)?);
    }
    exchange.finish().map_err(lost)
}

/// Each rank sends to all others, one rank after the other; row `r` of `out` is rank `r`'s. The next transfer runs
/// while one is awaited.
fn in_turn(group: &Group, tensor: &Tensor, out: &Tensor) -> Result<()> {
    let mut exchange = group.begin("shards in turn").map_err(lost)?;
    let (me, count) = (group.rank(), tensor.numel() as i64);
    let mut before = None;
    for holder in 0..group.world() {
        let round = u64::from(holder);
        let coming = match holder == me {
            true => {
                let send = |to| exchange.send(round, to, tensor);
                group.others().try_for_each(send).map_err(lost)?;
                None
            }
            false => {
                let arrival = exchange.receive(round, holder, Kind::Float, count).map_err(lost)?;
                Some((holder, arrival))
            }
        };
        exchange.close(round).map_err(lost)?;
        if let Some((holder, arrival)) = std::mem::replace(&mut before, coming) {
            out.get(i64::from(holder)).copy_(&arrival.wait().map_err(lost)?);
        }
    }
    if let Some((holder, arrival)) = before {
        out.get(i64::from(holder)).copy_(&arrival.wait().map_err(lost)?);
    }
    out.get(i64::from(me)).copy_(tensor);
    exchange.finish().map_err(lost)
}

/// The same around a ring: forwards to the next rank what the previous one sent.
fn around(group: &Group, tensor: &Tensor, out: &Tensor) -> Result<()> {
    let mut exchange = group.begin("shards around a ring").map_err(lost)?;
    let (me, world, count) = (group.rank(), group.world(), tensor.numel() as i64);
    let mut here = tensor.shallow_clone();
    out.get(i64::from(me)).copy_(tensor);
    for step in 1..world {
        let (round, from) = (u64::from(step), (me + world - 1) % world);
        let arrival = exchange.receive(round, from, Kind::Float, count).map_err(lost)?;
        exchange.send(round, (me + 1) % world, &here).map_err(lost)?;
        exchange.close(round).map_err(lost)?;
        here = arrival.wait().map_err(lost)?;
        out.get(i64::from((me + world - step) % world)).copy_(&here);
    }
    exchange.finish().map_err(lost)
}

/// Plots bus bandwidth over size, both axes logarithmic.
pub fn plot(measured: &[CollectiveTiming], world: u32) -> String {
    let mut curves: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for one in measured {
        let name = format!("{}, {}", one.collective, one.by);
        curves.entry(name).or_default().push((one.bytes as f64, one.bus_gb_per_s));
    }
    let title = format!("bus bandwidth (GB/s) over size (bytes), {world} ranks, log-log");
    Chart { title, log: true, curves: curves.into_iter().collect() }.svg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_slice_is_what_the_whole_has_there(rank in 0u32..9, first in 0i64..500, count in 0i64..500) {
            let found = Vec::<f32>::try_from(filled(rank, first, count)).unwrap();
            let wanted = (first..first + count).map(|at| (at % 97) as f32 + rank as f32);
            prop_assert_eq!(found, wanted.collect::<Vec<_>>());
        }
    }
}
