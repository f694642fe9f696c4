//! Connected components of more documents than memory holds.
//!
//! Rounds of two steps rewrite the edges until each component is a star: its least document with an edge to every other
//! one (Kiveris et al. 2014, "Connected Components in MapReduce and Beyond"). Each step sorts the edges, which brings
//! the neighbours of a document together, and reads them once. No step adds edges, and the ends of an edge that changes
//! get lower, so the rounds end. Few are needed: about the logarithm of the longest path.

use contract::Result;

use super::Doc;
use super::sorter::{Merge, Scratch, Sorter};

/// Documents that are alike, in pairs.
pub(super) struct Components<'a> {
    scratch: &'a Scratch,
    /// From their higher ends.
    edges: Sorter<'a, 4>,
}

impl<'a> Components<'a> {
    pub(super) fn new(scratch: &'a Scratch) -> Self {
        Components { scratch, edges: scratch.sorter() }
    }

    /// Joins a document and a lower one.
    pub(super) fn join(&mut self, [a, b]: Doc, [c, d]: Doc) -> Result<()> {
        self.edges.push([a, b, c, d])
    }

    /// Every document that is not the least of its component, with the least one; sorted.
    pub(super) fn least(mut self) -> Result<Merge<'a, 4>> {
        loop {
            let edges = small_star(self.scratch, self.edges.finish()?)?;
            let stars;
            (self.edges, stars) = large_star(self.scratch, edges.finish()?)?;
            if stars {
                return self.edges.finish();
            }
        }
    }
}

/// Joins each document and its lower neighbours to the least of these. Takes edges from their higher ends, and returns
/// them from both.
fn small_star<'a>(scratch: &'a Scratch, mut edges: Merge<'a, 4>) -> Result<Sorter<'a, 4>> {
    let mut joined = scratch.sorter();
    let mut last = None;
    while let Some([a, b, c, d]) = edges.next()? {
        let (document, neighbour) = ([a, b], [c, d]);
        // The least neighbour is the first.
        let ([a, b], [c, d]) = match last {
            Some((same, least)) if same == document => (neighbour, least),
            _ => {
                last = Some((document, neighbour));
                (document, neighbour)
            }
        };
        joined.push([a, b, c, d])?;
        joined.push([c, d, a, b])?;
    }
    Ok(joined)
}

/// Joins the higher neighbours of each document to the least among the document and its neighbours. Takes edges from
/// both ends, and returns them from their higher ends, with whether they were stars before.
fn large_star<'a>(scratch: &'a Scratch, mut edges: Merge<'a, 4>) -> Result<(Sorter<'a, 4>, bool)> {
    let (mut joined, mut stars) = (scratch.sorter(), true);
    let mut last = None;
    while let Some([a, b, c, d]) = edges.next()? {
        let (document, neighbour) = ([a, b], [c, d]);
        let least = match last {
            Some((same, least)) if same == document => least,
            _ => document.min(neighbour),
        };
        last = Some((document, least));
        if neighbour > document {
            joined.push([c, d, least[0], least[1]])?;
            stars &= least == document;
        } else {
            stars &= least == neighbour;
        }
    }
    Ok((joined, stars))
}

#[cfg(test)]
mod tests;
