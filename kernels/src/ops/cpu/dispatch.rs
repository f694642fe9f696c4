//! Tokens sorted by expert.

use tch::Tensor;

use super::integers;
use crate::Result;
use crate::ops::operands::{ExpertRanges, TokenOrder};
use crate::ops::{Dispatch, check};

/// Rows of an expert are padded with zeros to a multiple of this. oneDNN prepares a matmul for each number of rows, so
/// having few different numbers is worth some zeros. Zeros change no gradient.
const ROWS: usize = 8;

pub(super) fn dispatch(choice: &Tensor, classes: i64) -> Result<Dispatch> {
    check::dispatch(choice, classes)?;
    let choice = integers(choice)?;
    let mut counts = vec![0i64; classes as usize];
    choice.iter().for_each(|&class| counts[class as usize] += 1);
    let (mut next, mut runs, mut end) = (Vec::new(), Vec::new(), 0);
    for (expert, &count) in (0i64..).zip(&counts[..counts.len() - 1]) {
        let length = (count as usize).next_multiple_of(ROWS);
        next.push(end);
        if count > 0 {
            runs.push([expert, end as i64, length as i64]);
        }
        end += length;
    }
    next.push(end);
    let skipped = counts[counts.len() - 1];
    let mut tokens = vec![-1i64; end + skipped as usize];
    let mut places = Vec::with_capacity(choice.len());
    for (token, &class) in (0i64..).zip(choice) {
        let place = &mut next[class as usize];
        tokens[*place] = token;
        places.push(*place as i64);
        *place += 1;
    }
    let filled = (0i64..).zip(&tokens).filter(|(_, token)| **token < 0);
    let filled: Vec<i64> = filled.map(|(place, _)| place).collect();
    tokens.iter_mut().for_each(|token| *token = 0.max(*token));
    let there = |numbers: &[i64]| Tensor::f_from_slice(numbers);
    Ok(Dispatch {
        order: TokenOrder::Listed { tokens: there(&tokens)?, filled: there(&filled)? },
        places: there(&places)?,
        counts: there(&counts)?,
        rows: end as i64 + skipped,
        computed: end as i64,
        experts: classes - 1,
        groups: ExpertRanges::Known(runs),
    })
}
