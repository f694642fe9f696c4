//! Compares the components with those of a search, whatever fits in memory.

use std::collections::{BTreeMap, BTreeSet};

use contract::{Key, Purpose, draw};
use proptest::prelude::*;

use super::*;

/// A node as a document, with numbers that need 64 bits.
fn document(node: u64) -> Doc {
    [(node / 7) << 40, (node % 7) << 61]
}

/// Each node with the least of its component, if that is another one.
fn by_search(edges: &[(u64, u64)]) -> Vec<[u64; 4]> {
    let mut neighbours = BTreeMap::<u64, Vec<u64>>::new();
    for (a, b) in edges {
        neighbours.entry(*a).or_default().push(*b);
        neighbours.entry(*b).or_default().push(*a);
    }
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    for least in neighbours.keys() {
        let mut open = vec![*least];
        while let Some(next) = open.pop() {
            if seen.insert(next) {
                open.extend(&neighbours[&next]);
                let ([a, b], [c, d]) = (document(next), document(*least));
                found.extend((next != *least).then_some([a, b, c, d]));
            }
        }
    }
    found.sort_unstable();
    found
}

fn found(edges: &[(u64, u64)], budget: usize) -> Vec<[u64; 4]> {
    let folder = tempfile::tempdir().unwrap();
    let scratch = Scratch::new(folder.path(), budget);
    let mut components = Components::new(&scratch);
    for (a, b) in edges {
        components.join(document(*a.max(b)), document(*a.min(b))).unwrap();
    }
    let (mut merge, mut found) = (components.least().unwrap(), Vec::new());
    while let Some(star) = merge.next().unwrap() {
        found.push(star);
    }
    found
}

proptest! {
    #[test]
    fn components_are_those_of_a_search(
        edges in prop::collection::vec((0u64..40, 0u64..40), 0..60),
        budget in prop_oneof![0usize..4000, Just(1 << 20)],
    ) {
        let edges: Vec<_> = edges.into_iter().filter(|(a, b)| a != b).collect();
        prop_assert_eq!(found(&edges, budget), by_search(&edges));
    }
}

/// What takes the most rounds.
#[test]
fn long_paths_are_one_component() {
    let key = Key::from_seed(5);
    for length in [2u64, 3, 100, 3000] {
        let ascending: Vec<_> = (1..length).map(|node| (node - 1, node)).collect();
        let mut names: Vec<u64> = (0..length).collect();
        names.sort_by_key(|name| draw(key, Purpose::Generate, *name));
        let mixed: Vec<_> = names.windows(2).map(|pair| (pair[0], pair[1])).collect();
        for edges in [ascending, mixed] {
            assert_eq!(found(&edges, 1 << 14), by_search(&edges));
        }
    }
}
