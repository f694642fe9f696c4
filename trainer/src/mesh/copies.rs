//! Which rank keeps replicas of which rank's part of the state, and their cost.

use crate::state::ownership::ParamShard;

/// The steps whose replicas are held at a time: those of one step are sent while those of the step before stay.
pub const STEPS: usize = 2;

/// The distance in ranks from each rank to the partner that gets its replicas.
#[derive(Clone, Copy, Debug)]
pub struct Partners {
    world: usize,
    distance: usize,
}

impl Partners {
    /// Chooses the distance at which most ranks have a partner on another machine.
    pub fn new(nodes: &[String]) -> Partners {
        let world = nodes.len();
        let away = |distance: usize| {
            (0..world).filter(|from| nodes[*from] != nodes[(from + distance) % world]).count()
        };
        // Of equally good distances, the smallest. Stops when every rank reaches another machine; on a single machine
        // all distances are equal.
        let several = nodes.windows(2).any(|pair| pair[0] != pair[1]);
        let mut best = (0, 1);
        for distance in (1..world).take_while(|_| several) {
            best = if away(distance) > best.0 { (away(distance), distance) } else { best };
            if best.0 == world {
                break;
            }
        }
        let distance = best.1;
        Partners { world, distance }
    }

    /// The rank that gets `rank`'s replicas, and the rank whose replicas it gets.
    pub fn of(self, rank: u32) -> (u32, u32) {
        let Partners { world, distance } = self;
        let rank = rank as usize;
        (((rank + distance) % world) as u32, ((rank + world - distance) % world) as u32)
    }

    /// Bytes of replicas that each rank holds: of its own pieces and its partner's.
    pub fn held(self, pieces: &[ParamShard]) -> Vec<u64> {
        let mut own = vec![0; self.world];
        for piece in pieces {
            own[piece.owner as usize] += 4 * STEPS as u64 * length(piece) as u64;
        }
        let partner = |rank: usize| own[self.of(rank as u32).1 as usize];
        match self.world {
            1 => own.iter().map(|_| 0).collect(),
            _ => (0..self.world).map(|rank| own[rank] + partner(rank)).collect(),
        }
    }
}

/// The length of a piece's replica: weights in f32, and moments.
pub fn length(piece: &ParamShard) -> i64 {
    let parts = if piece.rule.has_second_moment() { 3 } else { 2 };
    parts * piece.length()
}

/// Bytes that all ranks together send for the replicas of a step.
pub fn sent(pieces: &[ParamShard]) -> u64 {
    4 * pieces.iter().map(|piece| length(piece) as u64).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn machines(sizes: &[usize]) -> Vec<String> {
        let ranks = sizes.iter().enumerate();
        ranks.flat_map(|(node, count)| vec![node.to_string(); *count]).collect()
    }

    proptest! {
        #[test]
        fn each_rank_has_one_partner_and_is_that_of_one(sizes in prop::collection::vec(1usize..5, 1..5)) {
            let nodes = machines(&sizes);
            prop_assume!(nodes.len() > 1);
            let partners = Partners::new(&nodes);
            let pairs: Vec<_> = (0..nodes.len() as u32).map(|rank| partners.of(rank)).collect();
            for (rank, (to, from)) in (0..).zip(&pairs) {
                prop_assert!(*to != rank && pairs[*to as usize].1 == rank && pairs[*from as usize].0 == rank);
            }
            // With machines of equal size, every replica is on another machine.
            if sizes.len() > 1 && sizes.iter().all(|size| *size == sizes[0]) {
                prop_assert!((0..).zip(&pairs).all(|(rank, (to, _)): (usize, _)| nodes[rank] != nodes[*to as usize]));
            }
        }
    }
}
