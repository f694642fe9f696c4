//! The group calls of a round: how its transfers are divided, so that no call exceeds the limit of the library.
//!
//! RCCL and NCCL take 2,048 transfers in a group call. A part of a round is what one call holds: at most 1,024 sends
//! and as many receives. Both ends of a transfer compute its part alike, without a message: the k-th transfer (from 0)
//! from one rank to another in the round, with the distance `d = (to - from) mod world`, has the position `k * world +
//! d`, and 1,024 positions are a part.
//!
//! - The sends of a rank have different positions: with `d < world` a position gives `k` and `d`, and so the receiver.
//!   So at most 1,024 of them are in a part. The same holds for its receives and their senders.
//! - Transfers between two ranks keep their order: of the same distance, later ones have larger positions.
//! - Every rank queues its parts in ascending order. Of the unfinished parts of a round take one with the smallest
//!   number: all ranks that have transfers in it have finished their smaller ones, so each of them is at this part, and
//!   all of its transfers have both ends. So it ends, and by induction the round does, also where a call itself waits
//!   for the other ends of its transfers.
//!
//! A round of up to 1,024 ranks with one transfer in each direction between any two is a single part.

use std::collections::BTreeMap;

/// Positions in a part.
const POSITIONS: u64 = 1024;

/// The transfers of a rank in one group call, by their indices among the sends and the receives of the round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) sends: Vec<usize>,
    pub(super) receives: Vec<usize>,
}

/// The parts of a round of rank `me` by their numbers, in the order in which they are queued. `sends` are the receivers
/// of what it sends, `receives` the senders of what it receives, in the order of its transfers. Ranks are numbered from
/// 0 to `world`, as in the communicator.
pub(super) fn parts(world: u32, me: u32, sends: &[u32], receives: &[u32]) -> BTreeMap<u64, Part> {
    let mut parts = BTreeMap::<u64, Part>::new();
    for (index, part) in numbers(world, sends, |to| (me, to)).enumerate() {
        parts.entry(part).or_default().sends.push(index);
    }
    for (index, part) in numbers(world, receives, |from| (from, me)).enumerate() {
        parts.entry(part).or_default().receives.push(index);
    }
    parts
}

/// The numbers of the parts of the transfers with `others`, whose ends `ends` returns: from, to.
fn numbers(
    world: u32,
    others: &[u32],
    ends: impl Fn(u32) -> (u32, u32),
) -> impl Iterator<Item = u64> {
    let (world, mut earlier) = (u64::from(world), BTreeMap::<u32, u64>::new());
    others.iter().map(move |other| {
        let (from, to) = ends(*other);
        let distance = (u64::from(to) + world - u64::from(from)) % world;
        let earlier = earlier.entry(*other).or_default();
        let position = *earlier * world + distance;
        *earlier += 1;
        position / POSITIONS
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// A transfer: from, to, and its number among those from the one to the other, from 0.
    type Transfer = (u32, u32, u64);

    /// The transfers in one part of a rank, first the sends.
    type Own = [Vec<Transfer>; 2];

    /// Numbers the transfers of these pairs, in order.
    fn numbered(pairs: impl Iterator<Item = (u32, u32)>) -> Vec<Transfer> {
        let mut counts = BTreeMap::<(u32, u32), u64>::new();
        let mut number = |pair| {
            let count = counts.entry(pair).or_default();
            *count += 1;
            *count - 1
        };
        pairs.map(|(from, to)| (from, to, number((from, to)))).collect()
    }

    /// The parts of each rank in a round of these transfers. Each rank begins its own in an order of its own, in which
    /// `mixed` sorts the others.
    fn parts_of_all(
        world: u32,
        transfers: &[(u32, u32)],
        mixed: impl Fn(u32, u32) -> u32,
    ) -> Vec<BTreeMap<u64, Own>> {
        let mut ends = vec![[Vec::new(), Vec::new()]; world as usize];
        for (from, to) in transfers {
            ends[*from as usize][0].push(*to);
            ends[*to as usize][1].push(*from);
        }
        let of = |(me, [mut to, mut from]): (u32, [Vec<u32>; 2])| {
            to.sort_by_key(|other| mixed(me, *other));
            from.sort_by_key(|other| mixed(*other, me));
            let sends = numbered(to.iter().map(|to| (me, *to)));
            let receives = numbered(from.iter().map(|from| (*from, me)));
            let parts = parts(world, me, &to, &from).into_iter().map(|(number, part)| {
                let pick = |from: &[Transfer], indices: Vec<usize>| {
                    indices.into_iter().map(|index| from[index]).collect()
                };
                (number, [pick(&sends, part.sends), pick(&receives, part.receives)])
            });
            parts.collect()
        };
        (0..).zip(ends).map(of).collect()
    }

    /// The transfers of each part of each rank.
    fn calls(parts: Vec<BTreeMap<u64, Own>>) -> Vec<Vec<Vec<Transfer>>> {
        let of = |parts: BTreeMap<u64, Own>| parts.into_values().map(|own| own.concat()).collect();
        parts.into_iter().map(of).collect()
    }

    /// Runs the parts of each rank in order. A part ends when each of its transfers has been in the current part
    /// of both ends. Returns how many parts are left when nothing moves any more.
    fn left(parts: &[Vec<Vec<Transfer>>]) -> usize {
        // The transfers that one end has reached; for how many each rank waits in its part; how many parts it ended.
        let mut reached = BTreeSet::new();
        let (mut waits, mut ended) = (vec![0; parts.len()], vec![0; parts.len()]);
        let mut fresh: Vec<usize> = (0..parts.len()).collect();
        while let Some(rank) = fresh.pop() {
            let Some(part) = parts[rank].get(ended[rank]) else { continue };
            waits[rank] = part.len();
            for transfer in part {
                if reached.insert(*transfer) {
                    continue;
                }
                reached.remove(transfer);
                for end in [transfer.0, transfer.1].map(|end| end as usize) {
                    waits[end] -= 1;
                    if waits[end] == 0 {
                        ended[end] += 1;
                        fresh.push(end);
                    }
                }
            }
        }
        parts.iter().zip(ended).map(|(parts, ended)| parts.len() - ended).sum()
    }

    /// The transfers of each call of a rank that sends its weights to each other rank, and gets those of each.
    fn sharing(world: u32, me: u32) -> Vec<usize> {
        let others: Vec<u32> = (1..world).map(|distance| (me + distance) % world).collect();
        let ascending: Vec<u32> = (0..world).filter(|rank| *rank != me).collect();
        let parts = parts(world, me, &others, &ascending);
        parts.values().map(|part| part.sends.len() + part.receives.len()).collect()
    }

    #[test]
    fn the_weights_of_a_thousand_ranks_are_shared_in_one_call() {
        for me in [0, 1, 511, 1023] {
            assert_eq!(sharing(1024, me), [2046]);
            assert_eq!(sharing(8, me % 8), [14]);
            assert_eq!(sharing(1025, me), [2046, 2]);
            assert_eq!(sharing(3000, me), [2046, 2048, 1904]);
        }
    }

    /// So many ranks take two calls, of which the second holds few distances.
    #[test]
    fn a_round_of_all_pairs_of_more_ranks_ends() {
        let world = 1100;
        let pairs = |from| (0..world).filter(move |to| *to != from).map(move |to| (from, to));
        let transfers: Vec<(u32, u32)> = (0..world).flat_map(pairs).collect();
        let parts = parts_of_all(world, &transfers, |one, two| (one ^ two).wrapping_mul(77));
        assert!(parts.iter().all(|own| own.len() == 2));
        assert_eq!(left(&calls(parts)), 0);
    }

    #[test]
    fn a_small_round_is_one_call() {
        // Two ranks, and 511 transfers in each direction.
        assert_eq!(parts(2, 0, &[1; 511], &[1; 511]).len(), 1);
        let found = parts(2, 0, &[1; 1300], &[1; 1300]);
        let sends: Vec<usize> = found.values().map(|part| part.sends.len()).collect();
        assert_eq!(sends, [512, 512, 276]);
        assert!(parts(3, 1, &[], &[]).is_empty());
    }

    /// Calls that each rank cuts from its own order wait for each other in a ring.
    #[test]
    fn the_simulation_finds_a_deadlock() {
        let [a, b, c] = [(0, 1, 0), (1, 2, 0), (2, 0, 0)];
        let stuck = [vec![vec![a], vec![c]], vec![vec![b], vec![a]], vec![vec![c], vec![b]]];
        assert_eq!(left(&stuck), 6);
        let moves = [vec![vec![a], vec![c]], vec![vec![a], vec![b]], vec![vec![b], vec![c]]];
        assert_eq!(left(&moves), 0);
    }

    /// The number of ranks of a round, pairs with some transfers each, and ranks with some to and from each other one.
    type Shape = (u32, Vec<(u32, u32, usize)>, Vec<(u32, usize)>);

    fn shapes() -> impl Strategy<Value = Shape> {
        let world = prop_oneof![2u32..40, 900u32..1200, 2u32..3001];
        world.prop_flat_map(|world| {
            let pair = (0..world, 0..world, 1usize..4);
            let hub = (0..world, 1usize..4);
            let (pairs, hubs) =
                (prop::collection::vec(pair, 0..600), prop::collection::vec(hub, 0..4));
            (Just(world), pairs, hubs)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn parts_agree_and_end(shape in shapes(), salt: u32) {
            let (world, pairs, hubs) = shape;
            let mut transfers = Vec::new();
            for (from, to, count) in pairs {
                transfers.extend(std::iter::repeat_n((from, to), count));
            }
            for (hub, count) in hubs {
                let all = (0..world).flat_map(|other| [(hub, other), (other, hub)]);
                transfers.extend(all.flat_map(|pair| std::iter::repeat_n(pair, count)));
            }
            transfers.retain(|(from, to)| from != to);
            let mix = |one: u32, two: u32| {
                (one.wrapping_mul(0x9e37_79b9) ^ two.wrapping_add(salt)).wrapping_mul(0x85eb_ca6b)
            };
            let parts = parts_of_all(world, &transfers, mix);

            // By pair, what its sender and its receiver have in which part, in their own order.
            let mut ends = [BTreeMap::new(), BTreeMap::new()];
            for (number, part) in parts.iter().flatten() {
                for (end, own) in ends.iter_mut().zip(part) {
                    prop_assert!(own.len() <= 1024);
                    for (from, to, count) in own {
                        let pair: &mut Vec<(u64, u64)> = end.entry((*from, *to)).or_default();
                        pair.push((*number, *count));
                    }
                }
            }
            prop_assert_eq!(&ends[0], &ends[1]);
            for in_order in ends[0].values() {
                prop_assert!(in_order.is_sorted());
                prop_assert!((0..).zip(in_order).all(|(count, transfer)| transfer.1 == count));
            }
            prop_assert_eq!(ends[0].values().map(Vec::len).sum::<usize>(), transfers.len());
            prop_assert_eq!(left(&calls(parts)), 0);
        }
    }
}
