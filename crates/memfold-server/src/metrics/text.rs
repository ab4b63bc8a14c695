//! Converts the daemon's metrics from `OpenMetrics` 1.0 to Prometheus' older text format 0.0.4.
//!
//! The formats differ in the lines above the samples: the text format names counters with `_total`,
//! and has no units, no `info` type and no end mark. Samples are the same.

/// Converts `text`, which this program has written in the `OpenMetrics` format.
pub(super) fn prometheus(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    // HELP comes before TYPE, but the name in HELP depends on the type.
    let mut help = None;
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(_), rest) => help = Some(rest.unwrap_or_default()),
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    other => ("", other),
                };
                if let Some(help) = help.take() {
                    for part in ["# HELP ", name, suffix, " ", help, "\n"] {
                        plain.push_str(part);
                    }
                }
                for part in ["# TYPE ", name, suffix, " ", kind, "\n"] {
                    plain.push_str(part);
                }
            }
            (Some("#"), ..) => {}
            _ => {
                plain.push_str(line);
                plain.push('\n');
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    #[test]
    fn in_the_older_prometheus_text_format_type_lines_name_metrics_with_their_suffix() {
        let open = "\
# HELP a_bytes Bytes of it.
# TYPE a_bytes gauge
# UNIT a_bytes bytes
a_bytes{vm=\"x y\"} 1.0
# HELP b_seconds Time.
# TYPE b_seconds counter
# UNIT b_seconds seconds
b_seconds_total 2.0
# HELP c About.
# TYPE c info
c_info{version=\"1\"} 1
# EOF
";
        let plain = "\
# HELP a_bytes Bytes of it.
# TYPE a_bytes gauge
a_bytes{vm=\"x y\"} 1.0
# HELP b_seconds_total Time.
# TYPE b_seconds_total counter
b_seconds_total 2.0
# HELP c_info About.
# TYPE c_info gauge
c_info{version=\"1\"} 1
";
        assert_eq!(super::prometheus(open), plain);
    }
}
