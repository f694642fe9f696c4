//! The sum of a step's gradients, in the order of the tree: here, where one rank has all leaves, or gathered from many.

use contract::Result;
use tch::Tensor;

use super::gather::Gather;
use super::sink::Gradients;
use super::team::Lines;
use crate::state::ownership::{Ownership, Piece};

/// The gradients of one step, under way.
pub(crate) enum Sum<'a> {
    /// All leaves are this rank's, and so are all pieces: nothing travels, nothing is copied.
    Here,
    /// Leaves and pieces are dealt among ranks.
    Gathered(Box<Gather<'a>>),
}

impl<'a> Sum<'a> {
    /// Begins a step of `leaves` leaves; `pieces` are those of the line of gradients, as its places own them.
    pub(crate) fn begin(lines: &'a Lines<'a>, pieces: &'a [Piece], leaves: u64) -> Result<Self> {
        Ok(match lines.team.group.world() {
            1 => Sum::Here,
            _ => Sum::Gathered(Box::new(Gather::begin(lines, pieces, leaves)?)),
        })
    }

    /// Hears that this rank's next leaf has been computed, and handed its gradient to `gradients`.
    pub(crate) fn leaf(&mut self, gradients: &Gradients) -> Result<()> {
        match self {
            Sum::Here => Ok(()),
            Sum::Gathered(gather) => gather.leaf(gradients),
        }
    }

    /// The sum of this rank's pieces, in their order, once every rank has computed its leaves.
    pub(crate) fn finish(self, owners: &Ownership, gradients: Gradients) -> Result<Vec<Tensor>> {
        match self {
            Sum::Here => {
                let sum = gradients.finish()?;
                // Pieces are aliases of what is contiguous.
                let sum: Vec<Tensor> = sum.iter().map(Tensor::contiguous).collect();
                Ok(owners.own().map(|piece| piece.of(&sum[piece.tensor])).collect())
            }
            Sum::Gathered(gather) => Ok(owners.unpack(owners.rank(), &gather.finish()?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::thread;
    use std::time::Duration;

    use kernels::group::{Axis, Group, Place, Store};
    use kernels::tree::Counter;
    use tch::Kind;

    use super::*;
    use crate::checkpoint::Layout;
    use crate::checkpoint::tests::layout;
    use crate::mesh::{Schedule, Team};
    use crate::refusal::lost;
    use crate::state::ownership;
    use crate::workers::Workers;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// What leaf `leaf` has for each parameter: numbers whose sums depend on their order.
    fn gradient(layout: &Layout, leaf: u64) -> Vec<Tensor> {
        let values = |(index, parameter): (usize, &crate::model::ParamSpec)| {
            let count = parameter.shape.iter().product::<i64>();
            let places = Tensor::arange(count, (Kind::Float, tch::Device::Cpu)) + index as f64;
            ((places + 1.0) * (leaf as f64 * 0.7 + 0.1)).sin().view(parameter.shape.as_slice())
        };
        layout.parameters.iter().enumerate().map(values).collect()
    }

    /// What a layer would exchange: every rank of the line tells the others which turn it is at.
    fn exchange_in_layer(line: &Axis, turn: u64) -> Result<()> {
        let mut exchange = line.begin("a layer").map_err(lost)?;
        let receive = |from| exchange.receive(0, from, Kind::Int64, 1).map_err(lost);
        let arrivals = line.others().map(receive).collect::<Result<Vec<_>>>()?;
        for to in line.others() {
            exchange.send(0, to, &Tensor::from_slice(&[turn as i64])).map_err(lost)?;
        }
        for arrival in arrivals {
            let found = arrival.wait().map_err(lost)?.int64_value(&[0]);
            assert_eq!(found, turn as i64, "another turn of the line");
        }
        exchange.finish().map_err(lost)
    }

    /// Gathers `leaves` as one rank, with an exchange inside each, and compares what it owns with the whole sum.
    fn gather(place: &Place, schedule: Schedule, line: Range<u32>, leaves: u64) {
        let (layout, me) = (layout(), place.rank);
        let group = Group::open(place, PATIENCE, &|_| ()).unwrap();
        let team = Team::new(&group, 1, schedule, false).unwrap();
        let lines = team.lines(1).unwrap();
        let line = group.axis(1, &line.collect::<Vec<_>>()).unwrap();
        let pieces = ownership::pieces(&layout.parameters, &layout.rules, place.world);
        let owners = Ownership::cut(pieces, me);
        let numbers = lines.leaves(leaves).unwrap();
        let gradients = Gradients::new(&lines.own(leaves).unwrap(), layout.parameters.len());
        let mut sum = Sum::begin(&lines, owners.pieces(), leaves).unwrap();
        let compute = |turn: u64| {
            for layer in 0..3 {
                let mixed = (turn * 3 + layer + 1) * (u64::from(me) + 7) * 0x9e37_79b9;
                thread::sleep(Duration::from_micros(mixed >> 5 & 0x7ff));
                exchange_in_layer(&line, turn * 3 + layer)?;
            }
            let leaf = numbers[turn as usize];
            let mut tensors = gradient(&layout, leaf).into_iter().enumerate();
            tensors.try_for_each(|(parameter, tensor)| gradients.add(parameter, leaf, tensor))
        };
        let take = |_, ()| sum.leaf(&gradients);
        Workers::new(1).fold(numbers.len() as u64, compute, take).unwrap();
        let own = sum.finish(&owners, gradients).unwrap();
        let mut tree = Counter::new();
        (0..leaves).for_each(|leaf| tree.push(gradient(&layout, leaf)));
        let whole = tree.finish().unwrap();
        assert_eq!(own.len(), owners.own().count());
        for (piece, found) in owners.own().zip(&own) {
            let wanted = piece.of(&whole[piece.tensor]).contiguous();
            let sum = |tensor: &Tensor| kernels::checksum::tensor(&tensor.reshape([-1]), 1);
            assert_eq!(sum(found), sum(&wanted), "rank {me}, {piece:?}");
        }
        group.barrier("the end").unwrap();
    }

    #[test]
    fn a_layer_may_exchange_while_gradients_are_gathered() {
        for (world, size) in [(1, 1), (2, 2), (3, 3), (4, 2), (8, 4)] {
            for schedule in [Schedule::Subtree, Schedule::Streaming] {
                // As many turns on every rank of a line.
                let leaves = 3 * u64::from(world);
                let store = Store::serve("127.0.0.1", 0, "test/", PATIENCE).unwrap();
                let port = store.port();
                thread::scope(|scope| {
                    for rank in 0..world {
                        let (host, name) = ("127.0.0.1".to_owned(), "test/".to_owned());
                        let (interface, node) = (String::new(), (rank / 2).to_string());
                        let rank_0_serves = false;
                        let place =
                            Place { rank, world, host, port, rank_0_serves, name, interface, node };
                        let line = rank / size * size..rank / size * size + size;
                        scope.spawn(move || gather(&place, schedule, line, leaves));
                    }
                });
            }
        }
    }
}
