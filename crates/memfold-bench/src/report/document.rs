//! The report as a file (its schema is in docs/operating/self-test.md), and as text for people, in
//! Markdown.

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::figures::{Outcome, ReportFigure, Spread};
use super::parts::Dose;
use super::private::Private;

/// Name and version of the file's schema. The version grows if a field changes its meaning or is
/// removed; new fields and figures may come without a new version.
pub const SCHEMA: &str = "memfold-self-test-report";
pub const SCHEMA_VERSION: u32 = 1;

/// Sentence of every report of emulated guests.
pub const EMULATED: &str = "emulated: figures are not a KVM host's";

/// A report of the self-test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Always [`SCHEMA`].
    pub schema: String,
    pub schema_version: u32,
    pub memfold_version: String,
    pub commit: String,
    /// Facts about the host, by name.
    pub machine: Map<String, Value>,
    /// Accelerator of the guests: `kvm` or `tcg`.
    pub accelerator: String,
    /// [`EMULATED`], if the guests were emulated.
    pub note: Option<String>,
    pub dose: Dose,
    /// Limit of the whole self-test, and its time, in seconds.
    pub limit_s: u64,
    pub took_s: f64,
    /// Whether all claims hold.
    pub passed: bool,
    pub claims: Vec<ClaimLine>,
    pub figures: Vec<ReportFigure>,
    pub parts: Vec<PartLine>,
}

/// A claim that the self-test has checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClaimLine {
    #[serde(rename = "what")]
    pub claim: String,
    pub holds: bool,
    /// What was observed about the claim.
    pub seen: String,
}

/// How a part of the self-test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartEnd {
    Done,
    /// The part did not begin: there was no time, memory or disk for it.
    LeftOut,
    /// The part was ended at its time limit, or because other programs needed memory.
    Ended,
    Failed,
    /// The user asked for other parts.
    NotAsked,
}

/// A part of the self-test, and its results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartLine {
    pub name: String,
    pub end: PartEnd,
    /// Why the part has no results.
    pub why: Option<String>,
    pub took_s: f64,
    /// Results of the part's study, as `memfold bench` has them; null without results.
    pub results: Value,
}

impl PartEnd {
    const fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::LeftOut => "left out",
            Self::Ended => "ended",
            Self::Failed => "**failed**",
            Self::NotAsked => "not asked for",
        }
    }
}

impl Document {
    /// Reads a report from a file's text.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let value: Value = serde_json::from_str(text).context("not JSON")?;
        ensure!(
            value["schema"] == SCHEMA,
            "not a report of 'memfold self-test'"
        );
        let version = &value["schema_version"];
        ensure!(
            *version == SCHEMA_VERSION,
            "the report has schema version {version}, and this memfold reads {SCHEMA_VERSION}"
        );
        serde_json::from_value(value).context("the report lacks a field, or has a wrong one")
    }

    /// Removes private words from all texts that are not memfold's own fixed words.
    pub fn remove_private(&mut self, private: &Private) {
        let clean = |text: &mut String| *text = private.without(text);
        self.machine
            .values_mut()
            .for_each(|fact| private.remove_from(fact));
        self.claims.iter_mut().for_each(|of| clean(&mut of.seen));
        self.figures
            .iter_mut()
            .filter_map(|of| of.why.as_mut())
            .for_each(clean);
        self.parts
            .iter_mut()
            .filter_map(|of| of.why.as_mut())
            .for_each(clean);
        for part in &mut self.parts {
            private.remove_from(&mut part.results);
        }
    }

    /// Returns whether every part that was asked for ended well or was left out, and not all were
    /// left out.
    pub fn is_whole(&self) -> bool {
        let has = |wanted| self.parts.iter().any(|part| part.end == wanted);
        has(PartEnd::Done) && !has(PartEnd::Failed) && !has(PartEnd::Ended)
    }

    /// Returns the report as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "# memfold self-test report\n\nmemfold {} ({}), accelerator **{}**, {} doses, {:.0} s of at most {} s.\n",
            self.memfold_version,
            self.commit,
            self.accelerator,
            match self.dose {
                Dose::Full => "full",
                Dose::Small => "small",
            },
            self.took_s,
            self.limit_s
        );
        let note = self.note.iter().map(|note| format!("\n**{note}.**\n"));
        text.extend(note);
        let machine = self.machine.iter().filter(|(_, value)| !value.is_null());
        let machine = machine.map(|(name, value)| [name.replace('_', " "), plain(value)]);
        text += &table(&["machine", ""], machine);
        let claims = self.claims.iter().map(|of| {
            let mark = if of.holds { "ok" } else { "**FAILS**" };
            [mark.to_owned(), of.claim.clone(), of.seen.clone()]
        });
        text += &table(&["", "claim", "seen"], claims);
        for part in &self.parts {
            let mine = self.figures.iter().filter(|of| of.part == part.name);
            let titles = [&*part.name, "min", "median", "max", "unit", "target", ""];
            if matches!(part.end, PartEnd::Done) {
                text += &table(&titles, mine.map(line));
            }
        }
        let parts = self.parts.iter().map(|part| {
            let took = format!("{:.0} s", part.took_s);
            let why = part.why.clone().unwrap_or_default();
            [part.name.clone(), part.end.word().to_owned(), took, why]
        });
        text += &table(&["part", "", "took", "why"], parts);
        let count = |wanted| {
            self.figures
                .iter()
                .filter(|of| of.outcome == wanted)
                .count()
        };
        let sum = format!(
            "\n{} of {} figures measured; {} targets met, {} missed.\n",
            self.figures.len() - count(Outcome::NotMeasured),
            self.figures.len(),
            count(Outcome::Met),
            count(Outcome::Missed)
        );
        text += &sum;
        text += match (self.passed, self.claims.is_empty()) {
            (false, _) => "\nSelf-test FAILED: don't fold VMs on this host, and report this.\n",
            (true, true) => "",
            (true, false) => "\nAll claims hold.\n",
        };
        text
    }
}

/// Returns a table in Markdown, after an empty line. Without rows, there is no table.
pub fn table<const N: usize>(
    titles: &[&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let row = |cells: &[String]| {
        let cells = cells.iter().map(|cell| cell.replace(['|', '\n'], " "));
        format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
    };
    let rows: Vec<String> = rows.map(|cells| row(&cells)).collect();
    if rows.is_empty() {
        return String::new();
    }
    let titles = titles.map(str::to_owned);
    format!("\n{}|{}\n{}", row(&titles), "---|".repeat(N), rows.concat())
}

fn line(figure: &ReportFigure) -> [String; 7] {
    let values = figure
        .values
        .map(|Spread { min, median, max }| [min, median, max]);
    let [min, median, max] = values.map_or_else(Default::default, |all| all.map(number));
    let target = figure.target.clone().unwrap_or_default();
    let mut outcome = figure.outcome.word().to_owned();
    if let Some(why) = &figure.why {
        outcome = format!("{outcome}: {why}");
    }
    [
        figure.what.clone(),
        min,
        median,
        max,
        figure.unit.clone(),
        target,
        outcome,
    ]
}

/// Returns a number with about three significant digits.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        0.0 => 0,
        _ => 3,
    };
    format!("{value:.digits$}")
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(all) => all.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;
    use crate::report::figures::of_part;
    use crate::report::parts::Part;

    /// Returns a report in which one target is met, one is missed, and a part was left out.
    pub fn example() -> Document {
        let results = json!({
            "ratio_fold_over_compare": 2.4, "ratio_ksm_over_fold": 8.0,
            "not_measured": { "ksm_us_per_page": "KSM is in use | here" },
        });
        let mut figures = of_part(Part::Fold, Dose::Full, Ok(&results));
        let why = "no time left";
        figures.extend(of_part(Part::Clones, Dose::Full, Err(why)));
        let part = |part: Part, end, why: Option<&str>, results| PartLine {
            name: part.name().into(),
            end,
            why: why.map(str::to_owned),
            took_s: 1.0,
            results,
        };
        Document {
            schema: SCHEMA.into(),
            schema_version: SCHEMA_VERSION,
            memfold_version: "0.1.0".into(),
            commit: "0123456789ab".into(),
            machine: json!({ "cpu": "Example CPU", "cpus": 8, "nodes": null })
                .as_object()
                .cloned()
                .unwrap(),
            accelerator: "tcg".into(),
            note: Some(EMULATED.into()),
            dose: Dose::Full,
            limit_s: 1200,
            took_s: 2.5,
            passed: true,
            claims: vec![ClaimLine {
                claim: "no byte is wrong".into(),
                holds: true,
                seen: "0 of 9".into(),
            }],
            figures,
            parts: vec![
                part(Part::Fold, PartEnd::Done, None, results),
                part(Part::Clones, PartEnd::LeftOut, Some(why), Value::Null),
            ],
        }
    }

    #[test]
    fn the_text_of_a_report_shows_figures_beside_targets_and_says_what_was_left_out() {
        let text = example().markdown();
        for line in [
            "**emulated: figures are not a KVM host's.**",
            "| cpus | 8 |",
            "| ok | no byte is wrong | 0 of 9 |",
            "| CPU to fold, over that of a bare comparison | 2.40 | 2.40 | 2.40 | times | <= 3 | met |",
            "| CPU of KSM for a page, over that of folding | 8.00 | 8.00 | 8.00 | times | >= 15 | **missed** |",
            "| CPU of KSM for a merged page |  |  |  | µs |  | not measured: KSM is in use   here |",
            "| clones | left out | 1 s | no time left |",
            "1 targets met, 1 missed.",
            "All claims hold.",
        ] {
            assert!(text.contains(line), "no '{line}' in:\n{text}");
        }
        assert!(
            !text.contains("start of a clone") && !text.contains("nodes"),
            "{text}"
        );
        for line in text.lines().filter(|line| line.starts_with('|')) {
            assert!(line.ends_with('|'), "{line}");
        }
    }

    #[test]
    fn private_words_are_removed_from_every_text_of_a_report_that_is_not_fixed() {
        let secret = "cannot write /home/anna/x at 192.168.1.7";
        let mut report = example();
        report.machine.insert("cpu".into(), secret.into());
        report.claims[0].seen = secret.into();
        report.figures[0].why = Some(secret.into());
        report.parts[1].why = Some(secret.into());
        report.parts[0].results = json!({ "left_out": [{ "why": secret }] });
        report.remove_private(&Private::default());
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(
            json.matches("cannot write [removed] at [removed]").count(),
            5,
            "{json}"
        );
        for text in [json, report.markdown()] {
            assert!(
                !text.contains("anna") && !text.contains("192.168"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_failed_claim_is_the_verdict_of_the_report() {
        let mut failed = example();
        (failed.passed, failed.claims[0].holds) = (false, false);
        let text = failed.markdown();
        assert!(
            text.contains("Self-test FAILED") && text.contains("**FAILS**"),
            "{text}"
        );
    }

    #[test]
    fn a_report_file_is_read_back_and_files_of_other_schemas_are_refused() {
        let text = serde_json::to_string(&example()).unwrap();
        assert_eq!(Document::parse(&text).unwrap(), example());
        let newer = text.replace("\"schema_version\":1", "\"schema_version\":2");
        for (text, words) in [
            ("{}", "not a report"),
            ("x", "not JSON"),
            (&newer, "schema version 2"),
            (
                r#"{"schema":"memfold-self-test-report","schema_version":1}"#,
                "lacks a field",
            ),
        ] {
            let error = Document::parse(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_schema_of_the_report_is_documented_field_by_field() {
        let page = include_str!("../../../../docs/operating/self-test.md");
        let document = serde_json::to_value(example()).unwrap();
        let lines = [
            &document,
            &document["claims"][0],
            &document["figures"][0],
            &document["parts"][0],
        ];
        for field in lines
            .into_iter()
            .flat_map(|line| line.as_object().unwrap().keys())
        {
            assert!(
                page.contains(&format!("`{field}`")),
                "{field} is not documented"
            );
        }
        for part in Part::ALL {
            assert!(
                page.contains(&format!("`{}`", part.name())),
                "{}",
                part.name()
            );
        }
    }
}
