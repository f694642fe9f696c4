//! One token back, inside spans: what convolutions and the value shift are made of.

use tch::Tensor;

/// Rows at which a span starts, and how many rows there are.
#[derive(Debug)]
pub(super) struct Starts {
    rows: Tensor,
    count: i64,
    total: i64,
}

impl Starts {
    pub(super) fn new(rows: Tensor, total: i64) -> Starts {
        Starts { count: rows.size()[0], rows, total }
    }

    /// The rows, i64.
    pub(super) fn rows(&self) -> &Tensor {
        &self.rows
    }

    /// Writes into row t of `out` row t - 1 of `x`; where a span starts, `first` or zero.
    pub(super) fn delay(&self, x: &Tensor, first: Option<&Tensor>, out: &mut Tensor) {
        if self.total > 1 {
            out.narrow(0, 1, self.total - 1).copy_(&x.narrow(0, 0, self.total - 1));
        }
        match first {
            None => self.clear(out),
            Some(first) => {
                let mut shape = first.size();
                shape.insert(0, self.count);
                let first = first.to_kind(out.kind()).unsqueeze(0).expand(&shape, false);
                let _ = out.index_copy_(0, &self.rows, &first);
            }
        }
    }

    /// Zeroes the rows of `x` at which a span starts.
    pub(super) fn clear(&self, x: &mut Tensor) {
        let _ = x.index_fill_(0, &self.rows, 0.0);
    }

    /// The rows of `x` at which a span starts.
    pub(super) fn of(&self, x: &Tensor) -> Tensor {
        x.index_select(0, &self.rows)
    }

    /// Rows 1.. of `later` and rows ..-1 of `earlier`: each pair is a token and the one before it.
    pub(super) fn pairs(&self, later: &Tensor, earlier: &Tensor) -> (Tensor, Tensor) {
        (later.narrow(0, 1, self.total - 1), earlier.narrow(0, 0, self.total - 1))
    }
}
