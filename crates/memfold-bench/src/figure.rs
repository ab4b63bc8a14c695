//! Draws line charts as SVG text.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;

/// Name and SVG text of a figure.
pub type Figure = (String, String);

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 250.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 55.0;

/// Colours of lines that people with impaired colour vision can distinguish, too (the set of Okabe
/// and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear scale, from zero.
    Linear,
    /// Logarithmic scale; every value must be above zero.
    Log,
}

/// An axis of a chart.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Label of the axis, with the unit.
    pub label: String,
    /// Scale of the axis.
    pub scale: Scale,
}

impl Axis {
    /// Creates an axis with a linear scale from zero.
    #[must_use]
    pub fn linear(label: &str) -> Self {
        let label = label.to_owned();
        let scale = Scale::Linear;
        Self { label, scale }
    }

    /// Creates an axis with a logarithmic scale.
    #[must_use]
    pub fn log(label: &str) -> Self {
        let label = label.to_owned();
        let scale = Scale::Log;
        Self { label, scale }
    }
}

/// A line in a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name of the line in the legend.
    pub name: String,
    /// Points from left to right; those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
    /// Whether the line is dashed, for baselines.
    pub dashed: bool,
}

/// Draws lines in a chart with common axes, with a legend at the right. Returns the SVG text.
#[must_use]
pub fn lines(title: &str, x: &Axis, y: &Axis, series: &[Series]) -> String {
    let points = || {
        series
            .iter()
            .flat_map(|s| &s.points)
            .filter(|p| finite(**p))
    };
    let across = Range::of(x.scale, points().map(|p| p.0));
    let up = Range::of(y.scale, points().map(|p| p.1));
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
        add(text(LEFT - 8.0, height + 4.0, "end", &number(tick)));
    }
    for tick in across.ticks() {
        let place = at_x(tick);
        add(format!(
            "<line x1=\"{place:.1}\" y1=\"{floor}\" x2=\"{place:.1}\" y2=\"{:.1}\" stroke=\"#333333\"/>",
            floor + 5.0
        ));
        add(text(place, floor + 20.0, "middle", &number(tick)));
    }
    add(format!(
        "<path d=\"M{LEFT} {TOP}V{floor}H{right}\" fill=\"none\" stroke=\"#333333\"/>"
    ));
    add(text(
        f64::midpoint(LEFT, right),
        HEIGHT - 12.0,
        "middle",
        &x.label,
    ));
    let middle = f64::midpoint(TOP, floor);
    add(format!(
        "<text x=\"18\" y=\"{middle:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {middle:.1})\">{}</text>",
        escape(&y.label)
    ));
    for (at, line) in series.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let dash = if line.dashed {
            " stroke-dasharray=\"6 4\""
        } else {
            ""
        };
        let mut path = String::new();
        for &(x, y) in line.points.iter().filter(|p| finite(**p)) {
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

fn finite((x, y): (f64, f64)) -> bool {
    x.is_finite() && y.is_finite()
}

fn text(x: f64, y: f64, anchor: &str, words: &str) -> String {
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escape(words)
    )
}

fn escape(words: &str) -> String {
    words
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Formats the number at a tick as short as possible.
fn number(value: f64) -> String {
    let rounded = (value * 1e4).round() / 1e4;
    format!("{rounded}")
}

/// Range of values on an axis.
struct Range {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Range {
    fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            low = low.min(value);
            high = high.max(value);
        }
        match scale {
            Scale::Linear => Self {
                scale,
                low: low.min(0.0),
                high: if high > 0.0 { high } else { 1.0 },
            },
            Scale::Log => {
                let low = if low > 0.0 && low.is_finite() {
                    low
                } else {
                    1.0
                };
                let high = if high > low { high } else { low * 10.0 };
                Self { scale, low, high }
            }
        }
    }

    /// Returns the position of a value on the axis, from 0 to 1.
    fn part(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => {
                (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
            }
        }
        .clamp(0.0, 1.0)
    }

    /// Returns round values to mark on the axis: four to ten.
    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let rough = (self.high - self.low) / 5.0;
                let power = 10f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0]
                    .map(|n| n * power)
                    .into_iter()
                    .find(|step| *step >= rough)
                    .unwrap_or(rough);
                let mut ticks = Vec::new();
                let mut tick = (self.low / step).ceil() * step;
                while tick <= self.high * 1.0001 {
                    ticks.push(tick);
                    tick += step;
                }
                ticks
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10();
                let steps: &[f64] = if decades > 3.0 {
                    &[1.0]
                } else {
                    &[1.0, 2.0, 5.0]
                };
                let mut ticks = Vec::new();
                let mut power = 10f64.powf(self.low.log10().floor());
                while power <= self.high {
                    ticks.extend(
                        steps
                            .iter()
                            .map(|n| n * power)
                            .filter(|t| *t >= self.low && *t <= self.high),
                    );
                    power *= 10.0;
                }
                ticks
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
            &Axis::linear("time (s)"),
            &Axis::linear("MB"),
            &series,
        );
        assert_eq!(svg.matches("stroke-width=\"2\"/>").count(), 2);
        assert_eq!(svg.matches("stroke-dasharray").count(), 2);
        assert!(svg.contains("one &amp; two") && !svg.contains("NaN"));
    }

    #[test]
    fn axis_ticks_are_round_numbers_within_the_range() {
        let linear = Range::of(Scale::Linear, [3.0, 47.0].into_iter());
        assert_eq!(linear.ticks(), [0.0, 10.0, 20.0, 30.0, 40.0]);
        let log = Range::of(Scale::Log, [0.5, 60.0].into_iter());
        assert_eq!(log.ticks(), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
        assert!((log.part(0.5)).abs() < 1e-9 && (log.part(60.0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_chart_without_data_is_a_valid_svg() {
        let svg = lines("t", &Axis::log("x"), &Axis::linear("y"), &[]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}
