//! The dashboard behind a reverse proxy that ends TLS.

use serde_json::json;

use crate::access::{Door, code_url, cookie};
use crate::support::{code, err, out};

#[test]
fn behind_a_proxy_that_ends_tls_one_logs_in_and_changes_things() {
    let door = Door::open(&["--public-url", "https://vms.example"]);
    let url = code_url(&door.daemon, "operate");
    let public = "https://vms.example/#login=";
    let said = door.daemon.run(&["dashboard"]);
    assert!(out(&said).contains(public), "{}", out(&said));
    let body = json!({ "secret": url.split_once("#login=").unwrap().1 }).to_string();
    // As nginx sends it, which passes the browser's Host on if it is told to, and as Caddy does, which always does.
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
    // A proxy that says its own name for the host.
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
    assert!(err(&wrong).contains("no path"), "{}", err(&wrong));
}
