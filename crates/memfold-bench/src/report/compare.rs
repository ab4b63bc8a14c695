//! Compares two reports of the self-test, figure by figure.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Serialize;

use super::document::{Document, number, table};

/// A figure of two reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedFigure {
    key: String,
    what: String,
    unit: String,
    /// Medians; `None` where the figure was not measured.
    first: Option<f64>,
    second: Option<f64>,
    /// The second median divided by the first.
    ratio: Option<f64>,
}

/// The figures of two reports, and the differences that forbid to compare them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub warnings: Vec<String>,
    pub figures: Vec<ComparedFigure>,
}

/// Compares the report files of `--compare`.
pub fn compare_files(files: &[PathBuf]) -> anyhow::Result<Comparison> {
    let read = |file: &Path| {
        let text = std::fs::read_to_string(file);
        let text = text.with_context(|| format!("cannot read {}", file.display()))?;
        Document::parse(&text).with_context(|| format!("cannot use {}", file.display()))
    };
    let [first, second] = files else {
        anyhow::bail!("--compare needs two report files");
    };
    Ok(compare(&read(first)?, &read(second)?))
}

fn compare(first: &Document, second: &Document) -> Comparison {
    let mut warnings = Vec::new();
    let mut same = |what: &str, a: String, b: String| {
        if a != b {
            warnings.push(format!("{what}: {a} and {b}"));
        }
    };
    same(
        "accelerator",
        first.accelerator.clone(),
        second.accelerator.clone(),
    );
    same(
        "doses",
        format!("{:?}", first.dose),
        format!("{:?}", second.dose),
    );
    for key in ["cpu", "cpus", "kernel", "qemu"] {
        let of = |document: &Document| {
            let fact = document.machine.get(key).map(ToString::to_string);
            fact.unwrap_or_default()
        };
        same(key, of(first), of(second));
    }
    let figures = first.figures.iter().map(|a| {
        let b = second.figures.iter().find(|b| b.key == a.key);
        let [first, second] = [a.values, b.and_then(|b| b.values)].map(|of| Some(of?.median));
        ComparedFigure {
            key: a.key.clone(),
            what: a.what.clone(),
            unit: a.unit.clone(),
            first,
            second,
            ratio: first
                .zip(second)
                .filter(|(a, _)| *a != 0.0)
                .map(|(a, b)| b / a),
        }
    });
    Comparison {
        figures: figures.collect(),
        warnings,
    }
}

impl Comparison {
    /// Returns the comparison as Markdown.
    pub fn markdown(&self) -> String {
        let warnings = self.warnings.iter();
        let warnings = warnings.map(|warning| format!("differs: {warning}\n"));
        let mut text: String = warnings.collect();
        let cell = |value: Option<f64>| value.map(number).unwrap_or_default();
        let measured = self.figures.iter();
        let measured = measured.filter(|of| of.first.is_some() || of.second.is_some());
        let rows = measured.map(|of| {
            let (first, second) = (cell(of.first), cell(of.second));
            [
                of.what.clone(),
                first,
                second,
                cell(of.ratio),
                of.unit.clone(),
            ]
        });
        text += &table(
            &["figure (median)", "first", "second", "ratio", "unit"],
            rows,
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::tests::example;

    #[test]
    fn two_reports_are_compared_by_their_medians_and_differing_machines_are_told() {
        let (first, mut second) = (example(), example());
        second.accelerator = "kvm".into();
        for figure in &mut second.figures {
            if let Some(values) = &mut figure.values {
                values.median *= 2.0;
            }
        }
        let text = compare(&first, &second).markdown();
        assert!(text.contains("differs: accelerator: tcg and kvm"), "{text}");
        let row = "| CPU to fold, over that of a bare comparison | 2.40 | 4.80 | 2.00 | times |";
        assert!(text.contains(row), "{text}");
        assert!(!text.contains("start of a clone"), "{text}");
    }
}
