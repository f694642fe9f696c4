//! A chart of curves as SVG, for the numbers of a bench and for a run next to its replay with a change.

use contract::terminal::name;

const COLORS: [&str; 9] = [
    "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#666666",
    "#1f78b4",
];

/// Width and height of a chart, the margin around its curves, and the width of their names.
const SIZE: (f64, f64) = (760.0, 420.0);
const EDGE: f64 = 60.0;
const NAMES: f64 = 200.0;

/// Curves over common axes.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// Its title.
    pub title: String,
    /// Whether both axes are logarithmic.
    pub log: bool,
    /// Name and points of each curve; a point that is not finite is a gap.
    pub curves: Vec<(String, Vec<(f64, f64)>)>,
}

impl Chart {
    /// The chart as a complete SVG file.
    pub fn svg(&self) -> String {
        let placed = |value: f64| if self.log { value.max(1e-9).log10() } else { value };
        let shown = |place: f64| if self.log { 10f64.powf(place) } else { place };
        let finite = |(x, y): &&(f64, f64)| x.is_finite() && y.is_finite();
        let points = || self.curves.iter().flat_map(|(_, points)| points).filter(finite);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values
                .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)))
        };
        let x_range = range(&mut points().map(|(x, _)| placed(*x)));
        let y_range = range(&mut points().map(|(_, y)| placed(*y)));
        let (width, height) = SIZE;
        let scale = |value: f64, (low, high): (f64, f64), size: f64| {
            (placed(value) - low) / (high - low).max(1e-9) * size
        };
        let x = |value: f64| EDGE + scale(value, x_range, width - EDGE - NAMES);
        let y = |value: f64| height - EDGE - scale(value, y_range, height - 2.0 * EDGE);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{EDGE}\" y=\"24\">{}</text>\n",
            escaped(&self.title)
        );
        if points().next().is_some() {
            for part in [0.0, 0.5, 1.0] {
                let at = |(low, high): (f64, f64)| shown(low + part * (high - low));
                svg += &tick(&label(at(x_range)), x(at(x_range)), height - EDGE + 18.0, "middle");
                svg += &tick(&label(at(y_range)), EDGE - 6.0, y(at(y_range)) + 4.0, "end");
            }
        }
        for (index, (name, points)) in self.curves.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            for part in points.split(|point| !finite(&point)).filter(|part| !part.is_empty()) {
                let places: Vec<(f64, f64)> =
                    part.iter().map(|(at, value)| (x(*at), y(*value))).collect();
                let places: Vec<String> =
                    thinned(&places).iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                svg += &format!(
                    "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"/>\n",
                    places.join(" ")
                );
            }
            svg += &format!(
                "<text x=\"{}\" y=\"{}\" fill=\"{color}\">{}</text>\n",
                width - NAMES + 20.0,
                60 + 18 * index,
                escaped(name)
            );
        }
        svg + "</svg>\n"
    }
}

/// The points of a curve from left to right. Where more than four share half a pixel, only the first, highest, lowest
/// and last of them are kept.
fn thinned(places: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let column = |place: &(f64, f64)| (place.0 * 2.0).floor();
    let mut kept = Vec::new();
    for group in places.chunk_by(|left, right| column(left) == column(right)) {
        if group.len() <= 4 {
            kept.extend_from_slice(group);
            continue;
        }
        let by_height = |one: &&usize, other: &&usize| group[**one].1.total_cmp(&group[**other].1);
        let numbers: Vec<usize> = (0..group.len()).collect();
        let (highest, lowest) =
            (numbers.iter().min_by(by_height), numbers.iter().max_by(by_height));
        let mut chosen: Vec<usize> =
            [Some(&0), highest, lowest, numbers.last()].into_iter().flatten().copied().collect();
        chosen.sort_unstable();
        chosen.dedup();
        kept.extend(chosen.into_iter().map(|number| group[number]));
    }
    kept
}

fn tick(text: &str, x: f64, y: f64, anchor: &str) -> String {
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"#666666\" text-anchor=\"{anchor}\">{text}</text>\n"
    )
}

/// A tick label of four digits.
fn label(value: f64) -> String {
    match value.abs() {
        size if size == 0.0 || (1e-3..1e6).contains(&size) => {
            let whole = (size.log10().floor().max(0.0) as usize).min(3);
            let text = format!("{value:.*}", 3 - whole);
            match text.contains('.') {
                true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
                false => text,
            }
        }
        _ => format!("{value:.1e}"),
    }
}

/// Escapes text for SVG.
fn escaped(text: &str) -> String {
    name(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every finite point is plotted, inside the picture, in the order of its values.
        #[test]
        fn points_keep_their_order(
            values in prop::collection::vec(1e-3..1e9f64, 2..30), log: bool, spoiled: bool,
        ) {
            let mut points: Vec<(f64, f64)> =
                values.iter().enumerate().map(|(at, value)| (1.0 + at as f64, *value)).collect();
            if spoiled {
                points.push((99.0, f64::NAN));
            }
            let chart = Chart { title: "a < b".to_owned(), log, curves: vec![("x".to_owned(), points)] };
            let svg = chart.svg();
            prop_assert!(svg.contains("a &lt; b") && !svg.contains("NaN"));
            let drawn = svg.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
            let drawn: Vec<(f64, f64)> = drawn.split(' ').map(|pair| {
                let (x, y) = pair.split_once(',').unwrap();
                (x.parse().unwrap(), y.parse().unwrap())
            }).collect();
            prop_assert_eq!(drawn.len(), values.len());
            for (one, (x, y)) in values.iter().zip(&drawn) {
                prop_assert!((0.0..=SIZE.0).contains(x) && (0.0..=SIZE.1).contains(y));
                for (other, (_, below)) in values.iter().zip(&drawn) {
                    prop_assert!(one <= other || y <= below);
                }
            }
        }
    }

    proptest! {
        /// With any number of points, the picture stays small and shows the highest and the lowest.
        #[test]
        fn long_curves_keep_their_ends_and_extremes(values in prop::collection::vec(0.0..1e3f64, 1..20_000)) {
            let places: Vec<(f64, f64)> =
                values.iter().enumerate().map(|(at, value)| (at as f64 * 500.0 / values.len() as f64, *value)).collect();
            let kept = thinned(&places);
            prop_assert!(kept.len() <= 4 * 1_001 && kept.is_sorted_by(|left, right| left.0 < right.0));
            prop_assert_eq!((kept[0], kept[kept.len() - 1]), (places[0], places[places.len() - 1]));
            let range = |of: &[(f64, f64)]| {
                of.iter().fold((f64::MAX, f64::MIN), |(low, high), (_, y)| (low.min(*y), high.max(*y)))
            };
            prop_assert_eq!(range(&kept), range(&places));
        }
    }

    #[test]
    fn what_was_no_number_is_a_gap() {
        let points = [1.0, 2.0, f64::NAN, 3.0, 4.0];
        let points = (0..).map(f64::from).zip(points).collect();
        let svg = Chart { curves: vec![("x".to_owned(), points)], ..Chart::default() }.svg();
        assert_eq!(svg.matches("<polyline").count(), 2, "{svg}");
    }

    #[test]
    fn numbers_beside_an_axis_are_short() {
        let labels = [0.0, 2.5, 1234.0, 12.3456, 1e-6, 0.125, 120.0].map(label);
        assert_eq!(labels, ["0", "2.5", "1234", "12.35", "1.0e-6", "0.125", "120"]);
    }
}
