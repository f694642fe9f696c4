//! A rate over a size: what benches measure and plans read.

use serde::{Deserialize, Serialize};

/// Points (size, rate), sizes ascending, all positive. Between two points the logarithm of the rate is linear in the
/// logarithm of the size; beyond the ends the rate is constant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curve(pub Vec<[f64; 2]>);

impl Curve {
    /// The same rate for every size.
    pub fn flat(rate: f64) -> Curve {
        Curve(vec![[1.0, rate]])
    }

    /// From measurements in any order: sizes that differ by less than a tenth become one point, their median.
    pub fn of(mut found: Vec<[f64; 2]>) -> Curve {
        found.retain(|[size, rate]| *size > 0.0 && *rate > 0.0 && (size + rate).is_finite());
        found.sort_by(|left, right| left[0].total_cmp(&right[0]));
        let near = |left: &[f64; 2], right: &[f64; 2]| right[0] <= 1.1 * left[0];
        let point = |group: &[[f64; 2]]| {
            let mut rates: Vec<f64> = group.iter().map(|[_, rate]| *rate).collect();
            rates.sort_by(f64::total_cmp);
            let (low, high) = (rates[(rates.len() - 1) / 2], rates[rates.len() / 2]);
            [group[group.len() / 2][0], f64::midpoint(low, high)]
        };
        Curve(found.chunk_by(near).map(point).collect())
    }

    /// Whether the points are valid in a file.
    pub fn is_valid(&self) -> bool {
        let finite = |[size, rate]: &[f64; 2]| {
            *size > 0.0 && *rate > 0.0 && size.is_finite() && rate.is_finite()
        };
        !self.0.is_empty()
            && self.0.iter().all(finite)
            && self.0.windows(2).all(|pair| pair[0][0] < pair[1][0])
    }

    /// The rate at `size`; 0 without points.
    pub fn at(&self, size: f64) -> f64 {
        let after = self.0.partition_point(|[at, _]| *at <= size);
        let (Some(first), Some(last)) = (self.0.first(), self.0.last()) else { return 0.0 };
        match after {
            0 => first[1],
            after if after == self.0.len() => last[1],
            after => {
                let ([from, low], [to, high]) = (self.0[after - 1], self.0[after]);
                let part = (size / from).ln() / (to / from).ln();
                (low.ln() + part * (high / low).ln()).exp()
            }
        }
    }

    /// The highest rate.
    pub fn peak(&self) -> f64 {
        self.0.iter().map(|[_, rate]| *rate).fold(0.0, f64::max)
    }

    /// The smallest size from which every larger point has at least `part` of the peak.
    pub fn reaches(&self, part: f64) -> f64 {
        let enough = part * self.peak();
        let tail = self.0.iter().rev().take_while(|[_, rate]| *rate >= enough);
        tail.last().or(self.0.last()).map_or(0.0, |[size, _]| *size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A power law is reproduced between its points, and a rate stays between those of the adjacent points.
        #[test]
        fn it_goes_through_its_points(
            power in -2.0..2.0f64, scale in 0.1..1e9f64, sizes in prop::collection::vec(1.0..1e12f64, 2..12), at in 0.5..2e12f64,
        ) {
            let law = |size: f64| scale * size.powf(power);
            let curve = Curve::of(sizes.iter().map(|size| [*size, law(*size)]).collect());
            prop_assert!(curve.is_valid());
            let (first, last) = (curve.0[0][0], curve.0[curve.0.len() - 1][0]);
            // Near sizes became one point, with the rate of one of them.
            let room = 1.1f64.powf(2.0 * power.abs() * sizes.len() as f64);
            let found = curve.at(at) / law(at.clamp(first, last));
            prop_assert!((1.0 / room - 1e-9..=room + 1e-9).contains(&found), "{found} of {room}");
            for [size, rate] in &curve.0 {
                prop_assert!((curve.at(*size) / rate - 1.0).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn it_says_where_the_peak_begins() {
        let curve = Curve(vec![[1.0, 10.0], [2.0, 95.0], [4.0, 50.0], [8.0, 91.0], [16.0, 100.0]]);
        assert_eq!((curve.peak(), curve.reaches(0.9), curve.reaches(0.99)), (100.0, 8.0, 16.0));
        assert_eq!(Curve::flat(7.0).at(1e12), 7.0);
        assert!(!Curve(vec![[2.0, 1.0], [2.0, 1.0]]).is_valid() && !Curve::default().is_valid());
    }
}
