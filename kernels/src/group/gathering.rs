//! What ranks tell each other, each to all.

use tch::{Device, Kind, Tensor};

use super::exchange::Exchange;
use super::peers::Peers;
use crate::Result;

/// Bytes of the first message of a rank in a gathering.
const FRAME: usize = 1024;

impl Peers {
    /// Hands `mine` to every rank and returns what each of them handed over, by rank. Lengths may differ.
    pub(super) fn all_gather(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut exchange = Exchange::new(self, what, self.next(0, what)?, Device::Cpu, None);
        // What fits into a frame travels with its length in one message: most of what ranks tell each other is small.
        let mut frame = vec![0; FRAME];
        frame[..8].copy_from_slice(&(mine.len() as u64).to_le_bytes());
        let inside = mine.len().min(FRAME - 8);
        frame[8..8 + inside].copy_from_slice(&mine[..inside]);
        let (frame, rest) = (Tensor::f_from_slice(&frame)?, Tensor::f_from_slice(&mine[inside..])?);
        for to in self.others() {
            exchange.send(0, to, &frame)?;
            exchange.send(0, to, &rest)?;
        }
        let frames = self
            .others()
            .map(|from| Ok((from, exchange.receive(0, from, Kind::Uint8, FRAME as i64)?)));
        let frames = frames.collect::<Result<Vec<_>>>()?;
        let mut found = vec![Vec::new(); self.world() as usize];
        found[self.rank() as usize] = mine.to_vec();
        for (from, frame) in frames {
            let mut bytes = vec![0; FRAME];
            frame.wait()?.f_copy_data(&mut bytes, FRAME)?;
            let (length, head) = bytes.split_at(8);
            let length = length.iter().rev().fold(0, |length, byte| length << 8 | *byte as usize);
            let inside = length.min(FRAME - 8);
            let rest = exchange.receive(0, from, Kind::Uint8, (length - inside) as i64)?.wait()?;
            let whole = &mut found[from as usize];
            whole.extend(&head[..inside]);
            whole.resize(length, 0);
            rest.f_copy_data(&mut whole[inside..], length - inside)?;
        }
        exchange.finish()?;
        Ok(found)
    }
}
