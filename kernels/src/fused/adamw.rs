//! The elementwise step of AdamW.

use tch::Tensor;

use super::{apart, read, wide, write};

/// The numbers of one step, rounded to what the elements are computed in.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// What a weight is multiplied with first: 1 less the learning rate times the decay.
    pub keep: f32,
    /// How far a first moment goes towards the gradient.
    pub first: f32,
    /// How far a second moment goes towards the gradient's square.
    pub second: f32,
    /// What the root of a second moment is divided by.
    pub root: f32,
    /// Added to that.
    pub eps: f32,
    /// What a first moment over that is multiplied with.
    pub rate: f32,
    /// What a gradient is multiplied with before anything; 1 changes no bit of it.
    pub scale: f32,
}

/// Moves `weight` and its moments by `gradient`, all of one length.
///
/// ```text
/// g = scale * gradient;        w <- keep * w
/// m <- m + first * (g - m);    v <- v + second * (g * g - v)
/// w <- w - rate * (m / (sqrt(v) / root + eps))
/// ```
pub fn adamw(
    rates: Rates,
    weight: &mut Tensor,
    first: &mut Tensor,
    second: &mut Tensor,
    gradient: &Tensor,
) {
    apart(&[weight, first, second], &[gradient]);
    pass(rates, write(weight), write(first), write(second), read(gradient));
}

wide! {
    fn pass(rates: Rates, weight: &mut [f32], first: &mut [f32], second: &mut [f32], gradient: &[f32]) {
        let count = gradient.len();
        assert!(weight.len() == count && first.len() == count && second.len() == count, "one of each");
        for (((w, m), v), g) in weight.iter_mut().zip(first).zip(second).zip(gradient) {
            let g = rates.scale * *g;
            *m += rates.first * (g - *m);
            *v += rates.second * (g * g - *v);
            let step = *m / (v.sqrt() / rates.root + rates.eps);
            *w = rates.keep * *w - rates.rate * step;
        }
    }
}
