//! Tests of the daemon's metrics (`GET /metrics`): the test parses them, promtool checks them, and
//! a real Prometheus scrapes them and evaluates the alert rules.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_testkit::wait_for;
use serde_json::Value;

use super::support::{Daemon, server, wait};

const OPEN_METRICS: &str = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5";

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy")
        .join(file)
}

/// Finds a program of the Prometheus package.
fn tool(name: &str) -> Option<PathBuf> {
    server("prometheus", name, "--version")
}

fn value(text: &str, sample: &str) -> f64 {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(sample)?.strip_prefix(' '));
    let value = line.unwrap_or_else(|| panic!("no {sample} in:\n{text}"));
    value.parse().unwrap()
}

#[test]
fn metrics_equal_the_ledgers_report_in_each_scrape_format_and_are_cached_for_ten_seconds() {
    let daemon = Daemon::start();
    daemon.paused_vm("alone", &[]);
    let taken = Instant::now();
    let (head, plain) = daemon.get("/metrics", "*/*");
    assert!(
        head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"),
        "{head}"
    );
    let sample = r#"memfold_vm_ram_bytes{vm="alone",domain="vm/alone"}"#;
    let report = daemon.json(&["report"]);
    let host = &report["ledger"]["host"];
    let ram = report["ledger"]["vms"][0]["ram_bytes"].as_f64().unwrap();
    assert!(ram >= f64::from(64 << 20));
    assert_eq!(value(&plain, sample).to_bits(), ram.to_bits());
    assert_eq!(
        value(&plain, "memfold_host_memory_bytes").to_bits(),
        host["mem_total_bytes"].as_f64().unwrap().to_bits()
    );
    assert!(value(&plain, "process_resident_memory_bytes") > 1e6);

    // A VM that started meanwhile appears only when the figures are taken again; the figures report
    // their age.
    daemon.paused_vm("later", &[]);
    let (head, open) = daemon.get("/metrics", OPEN_METRICS);
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    assert!(open.ends_with("# EOF\n"));
    // On a slow machine, starting the VM may take as long as figures are cached.
    if taken.elapsed() < Duration::from_secs(9) {
        assert_eq!(value(&open, "memfold_vms").to_bits(), 1f64.to_bits());
    }
    let kept_s = (value(&open, "memfold_figures_cpu_seconds") * 100.0).max(10.0);
    let age = value(&open, "memfold_figures_age_seconds");
    assert!(age > 0.0 && age < kept_s, "{age}");
    // Here, figures are not cached for long, but a host may have many processes.
    std::thread::sleep(Duration::from_secs_f64((kept_s - age).max(0.0)));
    let (_, text) = daemon.get("/metrics", OPEN_METRICS);
    assert_eq!(value(&text, "memfold_vms").to_bits(), 2f64.to_bits());
    assert!(value(&text, "memfold_figures_age_seconds") < kept_s);
}

#[test]
fn promtool_reports_no_problem_in_metrics_and_alert_rules() {
    let Some(promtool) = tool("promtool") else {
        return;
    };
    let daemon = Daemon::start();
    daemon.paused_vm("web1", &["--domain", "shop"]);
    daemon.paused_vm("db-1", &[]);
    let (_, text) = daemon.get("/metrics", "text/plain");
    let mut check = Command::new(&promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    check
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = check.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");

    for (arguments, file) in [
        (["check", "rules"], "prometheus/memfold.rules.yml"),
        (["test", "rules"], "prometheus/memfold.rules.test.yml"),
    ] {
        let output = Command::new(&promtool)
            .args(arguments)
            .arg(deploy(file))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{said}{}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
}

/// Returns the names of metrics in a text.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("memfold_") || word.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

/// Returns the expressions of the Grafana board.
fn asked_by_the_board() -> Vec<String> {
    let board = std::fs::read_to_string(deploy("grafana/memfold.json")).unwrap();
    let board: Value = serde_json::from_str(&board).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let mut asked = Vec::new();
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{}", panel["title"]);
        let expressions = targets
            .iter()
            .map(|target| target["expr"].as_str().unwrap());
        asked.extend(expressions.map(str::to_owned));
    }
    asked
}

#[test]
fn the_grafana_dashboard_and_the_alert_rules_use_only_existing_metrics() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let document = std::fs::read_to_string(document).unwrap();
    // A test beside the code checks that this table lists the exported metrics.
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    let there: BTreeSet<String> = rows.flat_map(names).collect();
    let mut asked: BTreeSet<String> = asked_by_the_board().iter().flat_map(|e| names(e)).collect();
    assert!(asked.len() > 30, "{asked:?}");
    let rules = std::fs::read_to_string(deploy("prometheus/memfold.rules.yml")).unwrap();
    let exprs = rules
        .lines()
        .filter_map(|l| l.trim().strip_prefix("expr: "));
    asked.extend(exprs.flat_map(names));
    assert_eq!(asked.difference(&there).collect::<Vec<_>>(), [""; 0]);
}

/// A Prometheus of the test, which is ended when this is dropped.
struct Prometheus {
    child: Child,
    port: u16,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // Prometheus may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    /// Starts Prometheus as docs/operating/monitoring.md configures it: over TCP, with a copy of
    /// the read token.
    fn start(program: &Path, directory: &Path, target: &str, token: &Path) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let rules = deploy("prometheus/memfold.rules.yml");
        let rules = rules.canonicalize().unwrap();
        let config = format!(
            "global: {{scrape_interval: 10s, scrape_timeout: 10s, evaluation_interval: 1s}}\n\
             rule_files: ['{}']\n\
             scrape_configs: [{{job_name: memfold, authorization: {{credentials_file: '{}'}}, static_configs: [{{targets: ['{target}']}}]}}]\n",
            rules.display(),
            token.display()
        );
        let file = directory.join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        let child = Command::new(program)
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                directory.join("tsdb").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(directory.join("prometheus.log")).unwrap())
            .spawn()
            .unwrap();
        Self { child, port }
    }

    /// Returns `data` of a response; `None` while Prometheus does not answer.
    fn data(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(
            stream,
            "GET /api/v1/{path} HTTP/1.0\r\nhost: localhost\r\n\r\n"
        )
        .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        let answer: Value = serde_json::from_str(body).ok()?;
        (answer["status"] == "success").then(|| answer["data"].clone())
    }

    /// Returns the only value of a metric; `None` if there is none yet.
    fn value(&self, name: &str) -> Option<f64> {
        let data = self.data(&format!("query?query={name}"))?;
        let result = data["result"].as_array()?;
        result.first()?["value"][1].as_str()?.parse().ok()
    }
}

#[test]
fn if_folding_is_paused_a_prometheus_that_scrapes_the_daemon_shows_it() {
    let Some(prometheus) = tool("prometheus") else {
        return;
    };
    let daemon = Daemon::start_with(&["--listen", "127.0.0.1:0"]);
    daemon.paused_vm("web1", &["--domain", "shop"]);
    daemon.json(&["fold", "pause"]);
    let login = daemon.json(&["dashboard", "--role", "read"]);
    let url = login["urls"][0].as_str().unwrap();
    let target = url.split('/').nth(2).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("memfold.token");
    std::fs::copy(daemon.state().join("access/read.token"), &token).unwrap();
    let prometheus = Prometheus::start(&prometheus, directory.path(), target, &token);
    wait("Prometheus has scraped", || {
        prometheus.value("memfold_vm_ram_bytes").is_some()
    });
    let report = daemon.json(&["report"]);
    let ram = report["ledger"]["vms"][0]["ram_bytes"].as_f64().unwrap();
    let seen = prometheus.value("memfold_vm_ram_bytes").unwrap();
    assert_eq!(seen.to_bits(), ram.to_bits());
    // Prometheus requests OpenMetrics, and takes type, meaning and unit from it.
    let metadata = prometheus
        .data("targets/metadata?metric=memfold_vm_ram_bytes")
        .unwrap();
    assert_eq!(metadata[0]["type"], "gauge");
    assert_eq!(metadata[0]["unit"], "bytes");
    // On a slow machine, a scrape may time out.
    let scraped = || {
        let targets = prometheus.data("targets").unwrap_or_default();
        let target = &targets["activeTargets"][0];
        let is_up = target["health"] == "up" && target["lastError"] == "";
        is_up.then_some(()).ok_or(targets)
    };
    wait_for("a scrape succeeds", Duration::from_secs(180), scraped);

    wait("the alert is pending", || {
        let Some(alerts) = prometheus.data("alerts") else {
            return false;
        };
        let alerts = alerts["alerts"].as_array().unwrap();
        let is = |alert: &&Value| alert["labels"]["alertname"] == "MemfoldFoldingPaused";
        alerts
            .iter()
            .find(is)
            .is_some_and(|a| a["state"] == "pending")
    });
    // Each panel has data if the daemon exports the metrics that the panel shows.
    let (_, exported) = daemon.get("/metrics", "text/plain");
    // A metric without a value has only its description.
    let samples = exported.lines().filter(|line| !line.starts_with('#'));
    let exported: BTreeSet<String> = samples.flat_map(names).collect();
    let (mut with_data, mut without) = (0, Vec::new());
    for asked in asked_by_the_board() {
        let all = asked.replace("$host", ".*").replace("$domain", ".*");
        let all = all.replace("$__rate_interval", "1m");
        assert!(!all.contains('$'), "{all}");
        let encoded = all.bytes().fold(String::new(), |mut encoded, byte| {
            let _ = write!(encoded, "%{byte:02x}");
            encoded
        });
        let query = format!("query?query={encoded}");
        if names(&asked).is_subset(&exported) {
            // A rate needs two scrapes.
            wait(&format!("there is data for {all}"), || {
                let data = prometheus.data(&query);
                data.is_some_and(|data| data["result"].as_array().is_some_and(|r| !r.is_empty()))
            });
            with_data += 1;
        } else {
            let data = prometheus.data(&query);
            let data = data.unwrap_or_else(|| panic!("Prometheus can't understand {all}"));
            assert_eq!(data["result"].as_array().unwrap().len(), 0, "{all}");
            without.push(all);
        }
    }
    println!("{with_data} expressions of the board have data; without: {without:#?}");
    assert!(with_data >= 30, "{with_data}");

    let rules = prometheus.data("rules").unwrap();
    for rule in rules["groups"][0]["rules"].as_array().unwrap() {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
}
