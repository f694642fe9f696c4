//! All-gather of byte strings.
//!
//! Between machines messages pass through node leaders: each rank sends to the first rank of its machine, leaders
//! exchange what they received and pass everything on. N ranks on M machines then send 2 (N - M) + M (M - 1) messages
//! instead of N (N - 1). On one machine each rank sends to every other, which takes one message time instead of two.
//! The route does not affect which rank is reported missing: a rank that times out asks the store which ranks have not
//! come as far ([`Peers::stalled`]).

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::exchange::{Arrival, Exchange};
use super::peers::Peers;
use crate::{Error, Result};

/// Bytes of a rank's first message in a gathering.
const FRAME: usize = 1024;

impl Peers {
    /// Sends `message` to every rank and returns the bytes of all ranks, by rank. Lengths may differ.
    pub(super) fn all_gather(&self, operation: &str, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut exchange =
            Exchange::new(self, operation, self.next(0, operation)?, Device::Cpu, None);
        let machines = machines(self.nodes());
        let by_node = machines.len() > 1 && machines.len() < self.world() as usize;
        let found = match by_node {
            true => self.by_node(&mut exchange, &machines, message)?,
            false => {
                let others: Vec<u32> = self.others().collect();
                send_bytes(&mut exchange, &others, message)?;
                let mut found = vec![Vec::new(); self.world() as usize];
                found[self.rank() as usize] = message.to_vec();
                for (from, received) in others.iter().zip(receive_bytes(&mut exchange, &others)?) {
                    found[*from as usize] = received;
                }
                found
            }
        };
        exchange.finish()?;
        Ok(found)
    }

    /// The same through node leaders.
    fn by_node(
        &self,
        exchange: &mut Exchange<'_>,
        machines: &[Range<u32>],
        message: &[u8],
    ) -> Result<Vec<Vec<u8>>> {
        let me = self.rank();
        let is_here = |machine: &&Range<u32>| machine.contains(&me);
        let here = machines.iter().find(is_here).cloned().unwrap_or(me..me + 1);
        if me != here.start {
            send_bytes(exchange, &[here.start], message)?;
            let all = receive_bytes(exchange, &[here.start])?.concat();
            return opened(&all, self.world());
        }
        let members: Vec<u32> = (here.start + 1..here.end).collect();
        let leaders: Vec<u32> = machines.iter().map(|machine| machine.start).collect();
        let others: Vec<u32> = leaders.iter().copied().filter(|leader| *leader != me).collect();
        let mut all_here = bundled(message);
        receive_bytes(exchange, &members)?
            .iter()
            .for_each(|bundle| all_here.extend(bundled(bundle)));
        send_bytes(exchange, &others, &all_here)?;
        let mut received = receive_bytes(exchange, &others)?.into_iter();
        let mut of =
            |leader: &u32| if *leader == me { Some(all_here.clone()) } else { received.next() };
        // Each machine holds consecutive ranks, so concatenating the machines' messages gives rank order.
        let all = leaders.iter().filter_map(&mut of).collect::<Vec<_>>().concat();
        send_bytes(exchange, &members, &all)?;
        opened(&all, self.world())
    }
}

/// Ranges of ranks on the same machine: consecutive equal names.
fn machines(names: &[String]) -> Vec<Range<u32>> {
    let mut begun = 0;
    let run = |run: &[String]| {
        let first = begun;
        begun += run.len() as u32;
        first..begun
    };
    names.chunk_by(|one, next| one == next).map(run).collect()
}

/// Sends `bytes` to each of `to`. Up to a frame, the bytes travel in one message with their length: most messages are
/// small.
fn send_bytes(exchange: &mut Exchange<'_>, to: &[u32], bytes: &[u8]) -> Result<()> {
    let mut frame = vec![0; FRAME];
    frame[..8].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    let inside = bytes.len().min(FRAME - 8);
    frame[8..8 + inside].copy_from_slice(&bytes[..inside]);
    let (frame, rest) = (Tensor::f_from_slice(&frame)?, Tensor::f_from_slice(&bytes[inside..])?);
    for to in to {
        exchange.send(0, *to, &frame)?;
        exchange.send(0, *to, &rest)?;
    }
    Ok(())
}

/// What each of `from` sends, in that order.
fn receive_bytes(exchange: &mut Exchange<'_>, from: &[u32]) -> Result<Vec<Vec<u8>>> {
    let mut begin =
        |from: &u32, bytes: usize| exchange.receive(0, *from, Kind::Uint8, bytes as i64);
    let frames =
        from.iter().map(|from| begin(from, FRAME)).collect::<Result<Vec<Arrival<'_>>>>()?;
    let whole = |(from, frame): (&u32, Arrival<'_>)| {
        let mut bytes = vec![0; FRAME];
        frame.wait()?.f_copy_data(&mut bytes, FRAME)?;
        let (length, head) = bytes.split_at(8);
        let length = length.iter().rev().fold(0, |length, byte| length << 8 | *byte as usize);
        let inside = length.min(FRAME - 8);
        let rest = begin(from, length - inside)?.wait()?;
        let mut whole = head[..inside].to_vec();
        whole.resize(length, 0);
        rest.f_copy_data(&mut whole[inside..], length - inside)?;
        Ok(whole)
    };
    from.iter().zip(frames).map(whole).collect()
}

/// A rank's bytes prefixed with their length, for concatenation.
fn bundled(words: &[u8]) -> Vec<u8> {
    [&(words.len() as u64).to_le_bytes(), words].concat()
}

/// Splits the concatenated bytes of `world` ranks.
fn opened(mut bundle: &[u8], world: u32) -> Result<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    while let Some((length, rest)) = bundle.split_first_chunk() {
        let words = rest.split_at_checked(u64::from_le_bytes(*length) as usize);
        let Some((words, rest)) = words else { break };
        found.push(words.to_vec());
        bundle = rest;
    }
    if found.len() == world as usize && bundle.is_empty() {
        return Ok(found);
    }
    let reason = format!("the words of {} ranks came instead of those of {world}", found.len());
    Err(Error::Foreign { call: "tell all ranks", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_runs_of_ranks_and_words_come_apart_as_they_were() {
        let names = ["a", "a", "b", "a"].map(String::from);
        assert_eq!(machines(&names), [0..2, 2..3, 3..4]);
        let words: Vec<Vec<u8>> = vec![vec![], vec![7; 2000], vec![1]];
        let all = words.iter().map(|one| bundled(one)).collect::<Vec<_>>().concat();
        assert_eq!(opened(&all, 3).unwrap(), words);
        for wrong in [&all[..all.len() - 1], &all[8..], &all[..3], &[]] {
            assert!(opened(wrong, 3).is_err());
        }
    }
}
