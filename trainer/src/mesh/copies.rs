//! Who keeps copies of what each rank owns of the state, and what that costs.

use crate::state::ownership::Piece;

/// The steps of which there are copies at a time: those of one travel while those of the step before stay.
pub(crate) const STEPS: usize = 2;

/// How far ahead all ranks look for whom they send copies to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partners {
    world: usize,
    distance: usize,
}

impl Partners {
    /// Of ranks on these machines: as far as it takes for most of them to reach another one.
    pub(crate) fn new(nodes: &[String]) -> Partners {
        let world = nodes.len();
        let away = |distance: usize| {
            (0..world).filter(|from| nodes[*from] != nodes[(from + distance) % world]).count()
        };
        // Of equally good ones the nearest: none is better than one by which all reach another machine, and on a single machine
        // all are as good.
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

    /// To whom `rank` sends its copies, and from whom it gets some.
    pub(crate) fn of(self, rank: u32) -> (u32, u32) {
        let Partners { world, distance } = self;
        let rank = rank as usize;
        (((rank + distance) % world) as u32, ((rank + world - distance) % world) as u32)
    }

    /// The same of every rank.
    pub(crate) fn all_held(self, pieces: &[Piece]) -> Vec<u64> {
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

    /// Bytes of the copies that `rank` holds: of its own pieces and its partner's.
    pub(crate) fn held(self, pieces: &[Piece], rank: u32) -> u64 {
        if self.world == 1 {
            return 0;
        }
        let (_, from) = self.of(rank);
        let held = pieces.iter().filter(|piece| [rank, from].contains(&piece.owner));
        4 * STEPS as u64 * held.map(|piece| length(piece) as u64).sum::<u64>()
    }
}

/// How many numbers a copy of a piece has: weights in f32, and moments.
pub(crate) fn length(piece: &Piece) -> i64 {
    let parts = if piece.rule.has_second_moment() { 3 } else { 2 };
    parts * piece.length()
}

/// Bytes that all ranks together send for the copies of a step.
pub(crate) fn sent(pieces: &[Piece]) -> u64 {
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
            // Machines of one size: nobody's copies lie beside it.
            if sizes.len() > 1 && sizes.iter().all(|size| *size == sizes[0]) {
                prop_assert!((0..).zip(&pairs).all(|(rank, (to, _)): (usize, _)| nodes[rank] != nodes[*to as usize]));
            }
        }
    }
}
