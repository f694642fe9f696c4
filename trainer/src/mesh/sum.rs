//! The sum of a step's gradients, in the order of the tree: local if one rank has all micro-batches, else reduced.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use contract::Result;
use kernels::addend::Addend;
use tch::Tensor;

use super::GradReduce;
use super::buckets::Buckets;
use super::gather::GradientReduction;
use super::gradients::MicroBatchGradients;
use super::team::PhaseMesh;
use crate::refusal::refused;
use crate::state::ownership::{Ownership, ParamShard};

/// The gradients of one step, under way: the sums of this rank's micro-batches, and their reduction.
pub(crate) struct GradientSum<'a> {
    gradients: MicroBatchGradients,
    /// `None` where this rank has all micro-batches and all pieces: nothing is sent or copied.
    gather: Option<Mutex<GradientReduction<'a>>>,
}

impl<'a> GradientSum<'a> {
    /// Begins a step of `leaves` micro-batches, for a model with `parameters` parameters in these layers. `pieces` are
    /// those of the line of gradients, with owners as positions on it.
    pub(crate) fn begin(
        lines: &'a PhaseMesh<'a>,
        pieces: &'a [ParamShard],
        parameters: usize,
        layers: &[Range<usize>],
        leaves: u64,
    ) -> Result<Self> {
        let buckets = match lines.team.grad_reduce {
            GradReduce::Whole => Buckets::whole(parameters),
            GradReduce::Bucketed => Buckets::by_layer(layers),
        };
        let gather = match lines.team.group.world() {
            1 => None,
            _ => Some(Mutex::new(GradientReduction::begin(lines, pieces, buckets, leaves)?)),
        };
        Ok(GradientSum {
            gradients: MicroBatchGradients::new(&lines.own(leaves)?, parameters),
            gather,
        })
    }

    /// Adds micro-batch `leaf`'s gradients of some parameters, and sends what they complete.
    pub(super) fn add(&self, leaf: u64, gradients: Vec<(usize, Addend)>) -> Result<()> {
        let parameters: Vec<usize> = gradients.iter().map(|(parameter, _)| *parameter).collect();
        self.gradients.add(leaf, gradients)?;
        self.gathering(|gather| {
            let mut parameters = parameters.into_iter();
            parameters.try_for_each(|parameter| gather.came(leaf, parameter, &self.gradients))
        })
    }

    /// Called when this rank's next micro-batch has been computed and has passed on its gradients.
    pub(crate) fn leaf(&self) -> Result<()> {
        self.gathering(|gather| gather.leaf(&self.gradients))
    }

    /// Called when this rank has computed its last micro-batch, before it waits for others in another exchange.
    pub(crate) fn computed(&self) -> Result<()> {
        self.gathering(GradientReduction::computed)
    }

    fn gathering(&self, work: impl FnOnce(&mut GradientReduction<'a>) -> Result<()>) -> Result<()> {
        let Some(gather) = &self.gather else { return Ok(()) };
        work(&mut gather.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The sums of this rank's pieces, in their order, once every rank has computed its micro-batches.
    pub(crate) fn finish(self, owners: &Ownership) -> Result<Vec<Tensor>> {
        let Some(gather) = self.gather else {
            let sum = self.gradients.finish()?;
            // Pieces alias the tensor, which must be contiguous.
            let whole = sum.iter().map(|one| one.f_contiguous().map_err(refused));
            let sum = whole.collect::<Result<Vec<Tensor>>>()?;
            return Ok(owners.own().map(|piece| piece.of(&sum[piece.tensor])).collect());
        };
        let mut found = gather.into_inner().unwrap_or_else(PoisonError::into_inner).finish()?;
        found.sort_by_key(|(piece, _)| (piece.tensor, piece.first));
        Ok(found.into_iter().map(|(_, sum)| sum).collect())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::thread;
    use std::time::Duration;

    use kernels::group::{AxisRanks, Group, KeyValueStore, RankAddress, RunKey};
    use kernels::tree::Counter;
    use tch::Kind;

    use super::*;
    use crate::checkpoint::StateLayout;
    use crate::checkpoint::tests::layout;
    use crate::mesh::{Degrees, ProcessMesh};
    use crate::model::Cut;
    use crate::refusal::lost;
    use crate::state::ownership;
    use crate::workers::Workers;

    pub(in crate::mesh) const PATIENCE: Duration = Duration::from_secs(30);

    /// Micro-batch `leaf`'s gradient of each parameter: numbers whose sums depend on their order.
    fn gradient(layout: &StateLayout, leaf: u64) -> Vec<Tensor> {
        let values = |(index, parameter): (usize, &crate::model::ParamSpec)| {
            let count = parameter.shape.iter().product::<i64>();
            let places = Tensor::arange(count, (Kind::Float, tch::Device::Cpu)) + index as f64;
            ((places + 1.0) * (leaf as f64 * 0.7 + 0.1)).sin().view(parameter.shape.as_slice())
        };
        layout.parameters.iter().enumerate().map(values).collect()
    }

    /// Simulates the exchange of a layer: every rank of the line sends the others its turn.
    fn exchange_in_layer(line: &AxisRanks, turn: u64) -> Result<()> {
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

    /// Reduces `leaves` micro-batches as one rank, with an exchange inside each, and compares with the whole sum.
    fn gather(place: &RankAddress, grad_reduce: GradReduce, line: Range<u32>, leaves: u64) {
        let (layout, me) = (layout(), place.rank);
        let group = Group::open(place, PATIENCE, &|_| ()).unwrap();
        let team = ProcessMesh::new(&group, Degrees::ALONE, grad_reduce, false).unwrap();
        let lines = team.lines(Cut::WHOLE).unwrap();
        let line = group.axis(1, &line.collect::<Vec<_>>()).unwrap();
        let pieces = ownership::pieces(&layout.parameters, &layout.rules, place.world);
        let owners = Ownership::cut(pieces, me);
        let numbers = lines.micro_batches(leaves).unwrap();
        // Layers of one parameter, of two, and a last one that follows the layers.
        let (count, layers) = (layout.parameters.len(), [0..1, 1..3, 3..4, 4..5]);
        let sum = GradientSum::begin(&lines, owners.pieces(), count, &layers, leaves).unwrap();
        let compute = |turn: u64| {
            for layer in 0..3 {
                let mixed = (turn * 3 + layer + 1) * (u64::from(me) + 7) * 0x9e37_79b9;
                thread::sleep(Duration::from_micros(mixed >> 5 & 0x7ff));
                exchange_in_layer(&line, turn * 3 + layer)?;
            }
            let leaf = numbers[turn as usize];
            // Mostly from the last layer backwards, but a layer may begin before the one above it is complete.
            let whole = gradient(&layout, leaf).into_iter().map(Addend::from);
            let mut tensors: Vec<_> = whole.enumerate().collect();
            tensors.sort_by_key(|(parameter, _)| (4 - parameter + leaf as usize % 2 * 2) % 5);
            let (first, rest) = (tensors.remove(0), tensors);
            sum.add(leaf, vec![first])?;
            sum.add(leaf, rest)
        };
        Workers::new(1).fold(numbers.len() as u64, compute, |_, ()| sum.leaf()).unwrap();
        sum.computed().unwrap();
        let own = sum.finish(&owners).unwrap();
        let mut tree = Counter::new();
        (0..leaves).for_each(|leaf| tree.push(gradient(&layout, leaf)).unwrap());
        let whole = tree.finish().unwrap().unwrap();
        assert_eq!(own.len(), owners.own().count());
        for (piece, found) in owners.own().zip(&own) {
            let wanted = piece.of(&whole[piece.tensor]).contiguous();
            let sum =
                |tensor: &Tensor| kernels::checksum::tensor(&tensor.reshape([-1]), 1).unwrap();
            assert_eq!(sum(found), sum(&wanted), "rank {me}, {piece:?}");
        }
        group.barrier("the end").unwrap();
    }

    #[test]
    fn a_layer_may_exchange_while_gradients_are_gathered() {
        for (world, size) in [(1, 1), (2, 2), (3, 3), (4, 2), (8, 4)] {
            for grad_reduce in [GradReduce::Whole, GradReduce::Bucketed] {
                // The same number of turns on every rank of a line.
                let leaves = 3 * u64::from(world);
                on_ranks(world, |place| {
                    let first = place.rank / size * size;
                    gather(&place, grad_reduce, first..first + size, leaves);
                });
            }
        }
    }

    /// Runs `work` as each rank, on threads; every two ranks are a machine.
    pub(in crate::mesh) fn on_ranks(world: u32, work: impl Fn(RankAddress) + Sync) {
        let store =
            KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), PATIENCE).unwrap();
        let (port, work) = (store.port(), &work);
        thread::scope(|scope| {
            for rank in 0..world {
                let (host, name) = ("127.0.0.1".to_owned(), "test/".to_owned());
                let (interface, node) = (String::new(), (rank / 2).to_string());
                let (rank_0_serves, key) = (false, RunKey::default());
                let place = RankAddress {
                    rank,
                    world,
                    host,
                    port,
                    rank_0_serves,
                    key,
                    name,
                    interface,
                    node,
                };
                scope.spawn(move || work(place));
            }
        });
    }
}
