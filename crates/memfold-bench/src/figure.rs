//! Draws the line charts of studies as SVG text.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;

/// A figure: its name, from which the file name is made, and its SVG text.
pub type Figure = (String, String);

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 250.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 55.0;

const DASH: &str = " stroke-dasharray=\"6 4\"";

/// Colours of a chart's lines, which people with impaired colour vision can distinguish (the set of
/// Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// An axis of a chart. The text is the axis's label, with the unit.
#[derive(Clone, Copy, Debug)]
pub enum Axis {
    /// An axis with a linear scale that begins at zero.
    Linear(&'static str),
    /// An axis with a logarithmic scale; every value must be above zero.
    Log(&'static str),
}

/// A line in a chart, with its points.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name of the line in the chart's legend.
    pub name: String,
    /// Points of the line (x, y), from left to right. Points that are not finite are not drawn.
    pub points: Vec<(f64, f64)>,
    /// Whether the line is dashed, as lines of baselines are.
    pub dashed: bool,
}

/// Returns the list `samples` of a study's JSON record; empty if the record has none.
pub fn samples(study: &Value) -> &[Value] {
    study["samples"].as_array().map_or(&[], Vec::as_slice)
}

/// Returns a JSON value of a study's record as a number; NaN if the value is no number.
pub fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

/// Draws the chart `name` with the lines `series`; `None` if there is no line.
pub fn drawn(name: &str, title: &str, x: Axis, y: Axis, series: &[Series]) -> Option<Figure> {
    (!series.is_empty()).then(|| (name.to_owned(), lines(title, x, y, series)))
}

/// Draws lines in a chart with common axes, with a legend at the right. Returns the SVG text.
fn lines(title: &str, x: Axis, y: Axis, series: &[Series]) -> String {
    let finite = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite();
    let points = || series.iter().flat_map(|s| &s.points).filter(finite);
    let across = Range::of(x, points().map(|p| p.0));
    let up = Range::of(y, points().map(|p| p.1));
    let at_x = |v: f64| LEFT + across.part(v) * (WIDTH - LEFT - RIGHT);
    let at_y = |v: f64| HEIGHT - BOTTOM - up.part(v) * (HEIGHT - TOP - BOTTOM);
    let (right, floor) = (WIDTH - RIGHT, HEIGHT - BOTTOM);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"28\" font-size=\"16\">{}</text>\n",
        escape(title)
    );
    let mut add = |line: String| {
        svg.push_str(&line);
        svg.push('\n');
    };
    for tick in up.ticks() {
        let height = at_y(tick);
        add(format!(
            "<line x1=\"{LEFT}\" y1=\"{height:.1}\" x2=\"{right}\" y2=\"{height:.1}\" stroke=\"#dddddd\"/>"
        ));
        add(text(LEFT - 8.0, height + 4.0, "end", &short(tick)));
    }
    for tick in across.ticks() {
        let place = at_x(tick);
        add(format!(
            "<line x1=\"{place:.1}\" y1=\"{floor}\" x2=\"{place:.1}\" y2=\"{:.1}\" stroke=\"#333333\"/>",
            floor + 5.0
        ));
        add(text(place, floor + 20.0, "middle", &short(tick)));
    }
    add(format!(
        "<path d=\"M{LEFT} {TOP}V{floor}H{right}\" fill=\"none\" stroke=\"#333333\"/>"
    ));
    let middle = f64::midpoint(LEFT, right);
    add(text(middle, HEIGHT - 12.0, "middle", x.label()));
    let middle = f64::midpoint(TOP, floor);
    add(format!(
        "<text x=\"18\" y=\"{middle:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {middle:.1})\">{}</text>",
        escape(y.label())
    ));
    for (at, line) in series.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let dash = if line.dashed { DASH } else { "" };
        let mut path = String::new();
        for &(x, y) in line.points.iter().filter(finite) {
            let step = if path.is_empty() { 'M' } else { 'L' };
            // Writing to a string cannot fail.
            let _ = write!(path, "{step}{:.1} {:.1}", at_x(x), at_y(y));
        }
        add(format!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>"
        ));
        let height = TOP + 10.0 + at as f64 * 20.0;
        add(format!(
            "<line x1=\"{:.1}\" y1=\"{height}\" x2=\"{:.1}\" y2=\"{height}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
            right + 14.0,
            right + 42.0
        ));
        add(text(right + 48.0, height + 4.0, "start", &line.name));
    }
    svg.push_str("</svg>\n");
    svg
}

impl Axis {
    fn label(&self) -> &'static str {
        match self {
            Self::Linear(label) | Self::Log(label) => label,
        }
    }
}

fn text(x: f64, y: f64, anchor: &str, words: &str) -> String {
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escape(words)
    )
}

fn escape(words: &str) -> String {
    let words = words.replace('&', "&amp;");
    words.replace('<', "&lt;").replace('>', "&gt;")
}

/// Formats the number at a tick as short as possible.
fn short(value: f64) -> String {
    ((value * 1e4).round() / 1e4).to_string()
}

/// Range of values on an axis.
struct Range {
    axis: Axis,
    low: f64,
    high: f64,
}

impl Range {
    fn of(axis: Axis, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let (low, least_high) = match axis {
            Axis::Linear(_) => (low.min(0.0), 0.0),
            Axis::Log(_) if low > 0.0 && low.is_finite() => (low, low),
            Axis::Log(_) => (1.0, 1.0),
        };
        let high = match axis {
            _ if high > least_high => high,
            Axis::Linear(_) => 1.0,
            Axis::Log(_) => low * 10.0,
        };
        Self { axis, low, high }
    }

    /// Returns the position of a value on the axis, from 0 to 1.
    fn part(&self, value: f64) -> f64 {
        match self.axis {
            Axis::Linear(_) => (value - self.low) / (self.high - self.low),
            Axis::Log(_) => {
                (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
            }
        }
        .clamp(0.0, 1.0)
    }

    /// Returns round values to mark on the axis: four to ten.
    fn ticks(&self) -> Vec<f64> {
        let floor = |value: f64| 10f64.powf(value.log10().floor());
        match self.axis {
            Axis::Linear(_) => {
                let rough = (self.high - self.low) / 5.0;
                let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * floor(rough));
                let step = steps.into_iter().find(|step| *step >= rough);
                let step = step.unwrap_or(rough);
                let first = (self.low / step).ceil() * step;
                let ticks = std::iter::successors(Some(first), |tick| Some(tick + step));
                ticks.take_while(|t| *t <= self.high * 1.0001).collect()
            }
            Axis::Log(_) => {
                let is_wide = (self.high / self.low).log10() > 3.0;
                let steps: &[f64] = if is_wide { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let powers =
                    std::iter::successors(Some(floor(self.low)), |power| Some(power * 10.0));
                let powers = powers.take_while(|power| *power <= self.high);
                let ticks = powers.flat_map(|power| steps.iter().map(move |n| n * power));
                ticks
                    .filter(|t| (self.low..=self.high).contains(t))
                    .collect()
            }
        }
    }
}

/// Writes figures to a directory, as files `NAME.svg`.
pub fn write(directory: &Path, figures: &[Figure]) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    for (name, svg) in figures {
        let path = directory.join(format!("{name}.svg"));
        std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_a_line_and_a_legend_for_each_series() {
        let series = [("one & two", false), ("three", true)].map(|(name, dashed)| Series {
            name: name.into(),
            points: vec![(0.0, 1.0), (10.0, f64::NAN), (20.0, 3.0)],
            dashed,
        });
        let svg = lines(
            "Title",
            Axis::Linear("time (s)"),
            Axis::Linear("MB"),
            &series,
        );
        assert_eq!(svg.matches("stroke-width=\"2\"/>").count(), 2);
        assert_eq!(svg.matches("stroke-dasharray").count(), 2);
        assert!(svg.contains("one &amp; two") && !svg.contains("NaN"));
    }

    #[test]
    fn axis_ticks_are_round_numbers_within_the_range() {
        let linear = Range::of(Axis::Linear(""), [3.0, 47.0].into_iter());
        assert_eq!(linear.ticks(), [0.0, 10.0, 20.0, 30.0, 40.0]);
        let log = Range::of(Axis::Log(""), [0.5, 60.0].into_iter());
        assert_eq!(log.ticks(), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
        assert!((log.part(0.5)).abs() < 1e-9 && (log.part(60.0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_chart_without_data_is_a_valid_svg() {
        let svg = lines("t", Axis::Log("x"), Axis::Linear("y"), &[]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}
