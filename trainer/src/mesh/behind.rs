//! Bytes that each rank of a line owns, and bytes of the ranks elsewhere that it leads its machine for: computed once,
//! so that a lookup does not depend on the number of ranks.

use std::collections::BTreeMap;

use super::team::NodeLayout;

/// Bytes that each position of a line owns.
pub struct OwnedBytes {
    bytes: Vec<u64>,
    all: u64,
    /// By the number of ranks of a machine: sums by the remainder of the owner's position, which determines its leader
    /// ([`NodeLayout::leader`]).
    by_remainder: BTreeMap<u32, Vec<u64>>,
}

impl OwnedBytes {
    /// From the bytes of each position.
    pub fn new(bytes: Vec<u64>, nodes: &NodeLayout) -> OwnedBytes {
        let mut by_remainder = BTreeMap::new();
        for size in nodes.sizes() {
            by_remainder.entry(size).or_insert_with(|| {
                let mut sums = vec![0; size as usize];
                bytes.iter().enumerate().for_each(|(place, bytes)| {
                    sums[place % size as usize] += bytes;
                });
                sums
            });
        }
        OwnedBytes { all: bytes.iter().sum(), bytes, by_remainder }
    }

    /// Bytes of all positions.
    pub fn all(&self) -> u64 {
        self.all
    }

    /// Bytes of `place`.
    pub fn of(&self, place: u32) -> u64 {
        self.bytes[place as usize]
    }

    /// Bytes of the ranks elsewhere for which `place` is the leader of its machine.
    pub fn behind(&self, nodes: &NodeLayout, place: u32) -> u64 {
        let here = nodes.ranks(nodes.of(place));
        let size = here.end - here.start;
        let remainder = place - here.start;
        let sum = self.by_remainder.get(&size).map_or(0, |sums| sums[remainder as usize]);
        // Subtracts the one local position that has this remainder.
        sum - self.of(here.start + (remainder + size - here.start % size) % size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_behind_a_place_is_what_its_machine_says(
            sizes in prop::collection::vec(1u32..6, 1..6), bytes in prop::collection::vec(0u64..1000, 30), flat: bool,
        ) {
            let machines = sizes.iter().enumerate();
            let names: Vec<String> =
                machines.flat_map(|(node, size)| vec![node.to_string(); *size as usize]).collect();
            let nodes = NodeLayout::new(&names, 0, flat).unwrap();
            let owned = OwnedBytes::new(bytes[..names.len()].to_vec(), &nodes);
            for place in 0..names.len() as u32 {
                let behind: u64 = nodes.behind(place).map(|other| owned.of(other)).sum();
                prop_assert_eq!(owned.behind(&nodes, place), behind);
            }
        }
    }
}
