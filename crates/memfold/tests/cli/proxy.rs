//! Tests of the dashboard behind a reverse proxy that ends TLS.

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use memfold_testkit::patience;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use crate::access::{Door, code_url, cookie};
use crate::support::{code, err, out, server, wait};

#[test]
fn login_and_changes_in_the_dashboard_work_behind_a_proxy_that_terminates_tls() {
    let door = Door::open(&["--public-url", "https://vms.example"]);
    let url = code_url(&door.daemon, "operate");
    let public = "https://vms.example/#login=";
    let said = door.daemon.run(&["dashboard"]);
    assert!(out(&said).contains(public), "{}", out(&said));
    let body = json!({ "secret": url.split_once("#login=").unwrap().1 }).to_string();
    // Headers as nginx sends them if it is configured to pass the browser's Host on, and as Caddy
    // always sends them.
    let browser = [
        ("host", "vms.example"),
        ("origin", "https://vms.example"),
        ("sec-fetch-site", "same-origin"),
        ("x-forwarded-proto", "https"),
    ];
    let login = door.ask("POST", "/v1/session", &browser, &body);
    assert_eq!(login.status, 200, "{}", login.body);
    let set = login.header("set-cookie").unwrap();
    assert!(set.contains("Secure"), "{set}");
    let cookie = cookie(&login);
    let pause = |host: &str, origin: &str| {
        let headers = [
            ("cookie", cookie.as_str()),
            ("x-memfold", "1"),
            ("host", host),
            ("origin", origin),
        ];
        door.ask("PUT", "/v1/fold", &headers, r#"{"paused":true}"#)
    };
    assert_eq!(pause("vms.example", "https://vms.example").status, 200);
    // This proxy sends its own name as Host.
    assert_eq!(pause(&door.host, "https://vms.example").status, 200);
    for (host, origin, status, hint) in [
        ("vms.example", "http://vms.example:81", 403, "--public-url"),
        (
            "vms.example",
            "https://attacker.example",
            403,
            "--public-url",
        ),
        (
            "attacker.example",
            "https://vms.example",
            421,
            "--allow-host",
        ),
    ] {
        let refused = pause(host, origin);
        assert_eq!(refused.status, status, "{host} {origin}");
        assert!(refused.body.contains(hint), "{}", refused.body);
    }
    let wrong = ["--listen", "127.0.0.1:0", "--public-url", "https://a/b"];
    let wrong = door.daemon.run(&[&["serve"], &wrong[..]].concat());
    assert_eq!(code(&wrong), 2);
    assert!(err(&wrong).contains("without a path"), "{}", err(&wrong));
}

/// Returns the how-to's configuration of a proxy: the block marked with `language`.
fn configuration(language: &str) -> String {
    let page = include_str!("../../../../docs/how-to/reverse-proxy.md");
    let (_, behind) = page.split_once(&format!("```{language}\n")).unwrap();
    behind.split_once("```").unwrap().0.to_owned()
}

/// Returns a time limit for curl, in seconds: `usual_s` on an idle machine.
fn limit(usual_s: u64) -> String {
    let limit = patience(Duration::from_secs(usual_s));
    limit.as_secs().to_string()
}

/// A proxy on a port of its own, which is ended when this is dropped.
struct Proxy {
    child: Child,
    directory: tempfile::TempDir,
    port: u16,
}

impl Proxy {
    /// Makes a certificate for `vms.example`, and finds a free port.
    fn prepare() -> (tempfile::TempDir, u16) {
        let directory = tempfile::tempdir().unwrap();
        let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=vms.example \
            -addext subjectAltName=DNS:vms.example -keyout vms.example.key -out vms.example.pem";
        let made = Command::new("openssl")
            .args(words.split_whitespace())
            .current_dir(directory.path())
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", err(&made));
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        (directory, free.local_addr().unwrap().port())
    }

    /// Starts the proxy with the how-to's configuration, for the daemon at `to`.
    fn start(program: &Path, name: &str, to: &str, (directory, port): (TempDir, u16)) -> Self {
        let place = directory.path().to_str().unwrap();
        let mut text = configuration(name).replace("127.0.0.1:8420", to);
        let mut command = Command::new(program);
        if name == "nginx" {
            text = text
                .replace("listen 443", &format!("listen 127.0.0.1:{port}"))
                .replace("/etc/ssl/", &format!("{place}/"));
            text = format!(
                "daemon off; pid {place}/pid; error_log stderr;\nevents {{}}\nhttp {{\naccess_log off; \
                 client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi; \
                 uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;\n{text}}}\n"
            );
            command.args(["-c", &format!("{place}/conf")]);
        } else {
            // Otherwise Caddy would request a certificate on the Internet.
            let own = format!(
                "https://vms.example:{port} {{\n tls {place}/vms.example.pem {place}/vms.example.key"
            );
            text = format!(
                "{{\n admin off\n auto_https disable_redirects\n}}\n{}",
                text.replacen("vms.example {", &own, 1)
            );
            let file = format!("{place}/conf");
            command.args(["run", "--adapter", "caddyfile", "--config", &file]);
            command.env("HOME", place);
        }
        std::fs::write(directory.path().join("conf"), text).unwrap();
        let log = File::create(directory.path().join("log")).unwrap();
        let child = command.stderr(log.try_clone().unwrap()).stdout(log);
        let child = child.stdin(Stdio::null()).spawn().unwrap();
        let proxy = Self {
            child,
            directory,
            port,
        };
        wait("the proxy listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        proxy
    }

    /// Sends a request with curl, with the headers of a browser at `https://vms.example:PORT`.
    /// Returns the status, and the rest of the response.
    fn browse(&self, path: &str, more: &[&str]) -> (String, String) {
        let port = self.port;
        let place = self.directory.path();
        let answer = Command::new("curl")
            .args(["--silent", "--include", "--max-time", &limit(20)])
            .arg("--cacert")
            .arg(place.join("vms.example.pem"))
            .arg("--resolve")
            .arg(format!("vms.example:{port}:127.0.0.1"))
            .args(["--cookie-jar", "cookies", "--cookie", "cookies"])
            .args(more)
            .arg(format!("https://vms.example:{port}{path}"))
            .current_dir(place)
            .output()
            .unwrap();
        let text = out(&answer);
        let status = text.split(' ').nth(1).unwrap_or_else(|| {
            let log = std::fs::read_to_string(place.join("log"));
            panic!("{answer:?}\n{log:?}")
        });
        (status.to_owned(), text.clone())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let pid = Pid::from_child(&self.child);
        // nginx's worker ends with its master only if the master is asked to end.
        let _ = kill_process(pid, Signal::TERM);
        let _ = self.child.wait();
    }
}

#[test]
fn logins_changes_and_live_figures_of_the_dashboard_work_behind_nginx_and_caddy() {
    for name in ["nginx", "caddy"] {
        let version = if name == "nginx" { "-v" } else { "version" };
        let Some(program) = server(name, name, version) else {
            return;
        };
        let prepared = Proxy::prepare();
        let origin = format!("https://vms.example:{}", prepared.1);
        let door = Door::open(&["--public-url", &origin]);
        let proxy = Proxy::start(&program, name, &door.host, prepared);
        let from = |origin: &str| format!("origin: {origin}");
        let secret = code_url(&door.daemon, "operate");
        let secret = secret.split_once("#login=").unwrap().1;
        let login = json!({ "secret": secret }).to_string();
        let (status, _) = proxy.browse("/v1/vms", &[]);
        assert_eq!(status, "401", "{name}");
        let (status, said) = proxy.browse(
            "/v1/session",
            &["--header", &from(&origin), "--json", &login],
        );
        assert_eq!(status, "200", "{name}: {said}");
        assert!(said.contains("Secure"), "{said}");
        let pause = |origin: &str| {
            let words = ["--request", "PUT", "--header", "x-memfold: 1", "--header"];
            let body = ["--json", r#"{"paused":true}"#];
            let origin = from(origin);
            let asked = [&words[..], &[origin.as_str()], &body].concat();
            proxy.browse("/v1/fold", &asked)
        };
        let (status, said) = pause(&origin);
        assert_eq!(status, "200", "{name}: {said}");
        let (status, said) = pause("https://attacker.example");
        assert_eq!(status, "403", "{name}: {said}");
        // The stream never ends: the data that came in time is what the proxy passed on at once.
        // On a busy host, a sample costs more CPU time, so the second one comes later.
        let samples = |usual_s: u64| {
            let words = ["--no-buffer", "--max-time", &limit(usual_s)];
            let (status, said) = proxy.browse("/v1/live", &words);
            assert_eq!(status, "200", "{name}");
            said.matches("\ndata:").count()
        };
        let soon = samples(8);
        assert!(soon >= 1, "{name}");
        assert!(soon >= 2 || samples(60) >= 2, "{name}");
    }
}
