//! Learning merges from counted words.
//!
//! A priority queue orders pairs of tokens by count. Counts in it may be out of date, but are never too low: a pair is
//! queued again when its count increases, and an entry with a count that is too high is put back with the true one. So
//! the first entry with a true count is the most frequent pair. The order is total (count, then lowest ids), and does
//! not depend on the order of a hash table.
//!
//! Why not the trainer of `tokenizers` 0.23.2, which learns the same merges where it is correct (the tests compare):
//! - It counts pairs in signed 32 bits. A pair that occurs 2^31 times, as the most common ones do in about 100 GB of
//!   text, gets a negative count and is never merged (`a_pair_may_occur_more_often_than_32_bits_count`).
//! - Where two merges spell the same token, its queue may hold a pair twice with the same count but other positions.
//!   Which of them comes first then depends on the order of a randomly seeded hash table.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::BYTES;

/// Rarer pairs are not worth a token.
pub(super) const COUNT_MIN: u64 = 2;

/// Two neighbouring tokens.
pub(super) type Pair = (u32, u32);

/// A vocabulary and the merges that produce it, in order.
pub(super) struct Learned {
    /// The bytes of each token, by id.
    pub(super) tokens: Vec<Vec<u8>>,
    pub(super) merges: Vec<Pair>,
}

#[expect(clippy::disallowed_types, reason = "only looked up by pair, never iterated")]
type Pairs = std::collections::HashMap<Pair, Occurrences>;

/// Where a pair occurs, and how often.
#[derive(Default)]
struct Occurrences {
    count: u64,
    /// Words that contained the pair at some time, some perhaps twice.
    words: Vec<u32>,
}

/// A word as tokens, and its count in the corpus.
struct Word {
    tokens: Vec<u32>,
    count: u64,
}

struct Learner {
    words: Vec<Word>,
    pairs: Pairs,
    queue: BinaryHeap<(u64, Reverse<Pair>)>,
    learned: Learned,
    /// Two merges can spell the same bytes, which are then one token.
    ids: BTreeMap<Vec<u8>, u32>,
    merged: BTreeSet<Pair>,
}

/// Learns until the vocabulary, bytes included, holds `size` tokens or no pair occurs often enough.
pub(super) fn learn(
    words: &BTreeMap<Box<str>, u64>,
    size: u32,
    mut learned: impl FnMut(),
) -> Learned {
    let mut learner = Learner::new(words);
    while (learner.learned.tokens.len() as u64) < u64::from(size) {
        let Some(pair) = learner.most_frequent() else { break };
        learner.merge(pair);
        learned();
    }
    learner.learned
}

/// The bytes in the order of their ids, as in GPT-2: printable ones first.
pub(super) fn alphabet() -> [u8; BYTES as usize] {
    let prints = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut bytes = [0; BYTES as usize];
    let all = (0..=255u8).filter(prints).chain((0..=255u8).filter(|byte| !prints(byte)));
    bytes.iter_mut().zip(all).for_each(|(slot, byte)| *slot = byte);
    bytes
}

impl Learner {
    fn new(words: &BTreeMap<Box<str>, u64>) -> Self {
        let alphabet = alphabet();
        let mut id_of = [0; BYTES as usize];
        (0..).zip(alphabet).for_each(|(id, byte)| id_of[usize::from(byte)] = id);
        let word = |text: &str, count| Word {
            tokens: text.bytes().map(|byte| id_of[usize::from(byte)]).collect(),
            count,
        };
        let words: Vec<Word> = words.iter().map(|(text, count)| word(text, *count)).collect();
        let tokens: Vec<Vec<u8>> = alphabet.iter().map(|&byte| vec![byte]).collect();
        let ids = (0..).zip(&tokens).map(|(id, bytes)| (bytes.clone(), id)).collect();
        let learned = Learned { tokens, merges: Vec::new() };
        let (pairs, queue, merged) = (Pairs::new(), BinaryHeap::new(), BTreeSet::new());
        let mut learner = Learner { words, pairs, queue, learned, ids, merged };
        learner.count_pairs();
        learner
    }

    fn count_pairs(&mut self) {
        for (index, word) in (0..).zip(&self.words) {
            for pair in word.tokens.windows(2) {
                let pair = self.pairs.entry((pair[0], pair[1])).or_default();
                pair.count += word.count;
                if pair.words.last() != Some(&index) {
                    pair.words.push(index);
                }
            }
        }
        // The order of insertion does not affect a heap: its entries are all different.
        self.queue = self.pairs.iter().map(|(pair, at)| (at.count, Reverse(*pair))).collect();
    }

    fn most_frequent(&mut self) -> Option<Pair> {
        loop {
            let (count, Reverse(pair)) = self.queue.pop()?;
            let now = self.pairs.get(&pair).map_or(0, |at| at.count);
            if now == count && count >= COUNT_MIN {
                return Some(pair);
            }
            if now < count && now >= COUNT_MIN {
                self.queue.push((now, Reverse(pair)));
            }
        }
    }

    /// Replaces `pair` by a token wherever it occurs.
    fn merge(&mut self, pair: Pair) {
        let Some(Occurrences { mut words, .. }) = self.pairs.remove(&pair) else { return };
        let token = self.token(pair);
        words.sort_unstable();
        words.dedup();
        let mut raised = BTreeSet::new();
        for index in words {
            let word = &mut self.words[index as usize];
            let count = word.count;
            word.merge(pair, token, |near, appears| {
                if near == pair {
                    return;
                }
                if appears {
                    let at = self.pairs.entry(near).or_default();
                    at.count += count;
                    if at.words.last() != Some(&index) {
                        at.words.push(index);
                    }
                    raised.insert(near);
                } else if let Some(at) = self.pairs.get_mut(&near) {
                    at.count -= count;
                }
            });
        }
        let counts = raised.into_iter().map(|pair| (self.pairs[&pair].count, Reverse(pair)));
        self.queue.extend(counts.filter(|(count, _)| *count >= COUNT_MIN));
    }

    /// The id of the token that `pair` becomes.
    fn token(&mut self, pair: Pair) -> u32 {
        let (left, right) = (pair.0 as usize, pair.1 as usize);
        let bytes = [self.learned.tokens[left].as_slice(), &self.learned.tokens[right]].concat();
        if self.merged.insert(pair) {
            self.learned.merges.push(pair);
        }
        *self.ids.entry(bytes).or_insert_with_key(|bytes| {
            self.learned.tokens.push(bytes.clone());
            self.learned.tokens.len() as u32 - 1
        })
    }
}

impl Word {
    /// Replaces `pair` by `token` from left to right, and reports each neighbouring pair that disappears or appears.
    fn merge(&mut self, pair: Pair, token: u32, mut tell: impl FnMut(Pair, bool)) {
        let tokens = &mut self.tokens;
        let (mut read, mut write) = (0, 0);
        while read < tokens.len() {
            if read + 1 == tokens.len() || (tokens[read], tokens[read + 1]) != pair {
                tokens[write] = tokens[read];
                (read, write) = (read + 1, write + 1);
                continue;
            }
            if let Some(before) = write.checked_sub(1).map(|at| tokens[at]) {
                tell((before, pair.0), false);
                tell((before, token), true);
            }
            if let Some(&after) = tokens.get(read + 2) {
                tell((pair.1, after), false);
                tell((token, after), true);
            }
            tokens[write] = token;
            (read, write) = (read + 2, write + 1);
        }
        tokens.truncate(write);
    }
}
