//! Tokens sorted by expert.

use tch::{Kind, Tensor};

use crate::Result;
use crate::ops::operands::{ExpertRanges, TokenOrder};
use crate::ops::{Dispatch, check};

/// Uses a stable sort on the tensors' device; reads the number of tokens of each expert once.
pub(super) fn dispatch(choice: &Tensor, classes: i64) -> Result<Dispatch> {
    check::dispatch(choice, classes)?;
    let (_, tokens) = choice.f_sort_stable(true, 0, false)?;
    let places = tokens.f_argsort(0, false)?;
    let counts = choice.f_bincount(None::<&Tensor>, classes)?;
    let known = Vec::<i64>::try_from(&counts)?;
    let (mut runs, mut end) = (Vec::new(), 0);
    for (expert, &count) in (0i64..).zip(&known).take(classes as usize - 1) {
        if count > 0 {
            runs.push([expert, end, count]);
        }
        end += count;
    }
    let filled = Tensor::f_empty([0], (Kind::Int64, choice.device()))?;
    Ok(Dispatch {
        order: TokenOrder::Listed { tokens, filled },
        places,
        counts,
        rows: choice.size()[0],
        computed: end,
        experts: classes - 1,
        groups: ExpertRanges::Known(runs),
    })
}
