//! Whether a browser's request comes from the dashboard itself.
//!
//! A page of another site that the operator has open may send requests here: by its own name that it points to this address (DNS rebinding),
//! by forms and images (cross-site requests). Browsers say in `Host` by which name they came and in `Origin` from which page, and let no other
//! site set a header of its own without asking first, which is never granted.

use std::net::IpAddr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName};

/// What scripts of the dashboard send with each change.
pub(in crate::api) const OWN_HEADER: HeaderName = HeaderName::from_static("x-memfold");

/// The name in `HOST[:PORT]`, without brackets.
fn name_of(host: &str) -> Option<&str> {
    if let Some(rest) = host.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        return (port.is_empty() || is_port(port.strip_prefix(':')?)).then_some(address);
    }
    match host.split_once(':') {
        None => Some(host),
        Some((name, port)) if is_port(port) => Some(name),
        Some(_) => None,
    }
}

fn is_port(text: &str) -> bool {
    text.parse::<u16>().is_ok()
}

/// Whether the `Host` header may be answered: an address, which no name service can point elsewhere, `localhost`, or one of `names`.
pub(super) fn host_is_ours(headers: &HeaderMap, names: &[String]) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    host.to_str().ok().and_then(name_of).is_some_and(|name| {
        name.parse::<IpAddr>().is_ok()
            || name.eq_ignore_ascii_case("localhost")
            || names.iter().any(|known| name.eq_ignore_ascii_case(known))
    })
}

/// Whether a change comes from our own page, or from no browser at all.
pub(super) fn is_same_origin(headers: &HeaderMap, tls: bool) -> bool {
    // Browsers set it, and scripts can't (Fetch Metadata).
    if let Some(site) = headers.get("sec-fetch-site") {
        if site != "same-origin" && site != "none" {
            return false;
        }
    }
    let mut origins = headers.get_all(ORIGIN).iter();
    match (origins.next(), origins.next()) {
        (None, _) => true,
        (Some(origin), None) => {
            let scheme = if tls { "https" } else { "http" };
            let host = headers.get(HOST).and_then(|host| host.to_str().ok());
            host.is_some_and(|host| {
                origin
                    .to_str()
                    .is_ok_and(|origin| origin.eq_ignore_ascii_case(&format!("{scheme}://{host}")))
            })
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn only_addresses_localhost_and_known_names_are_hosts() {
        let ours = |host: &str| host_is_ours(&headers(&[("host", host)]), &["vm1.example".into()]);
        for host in [
            "127.0.0.1:8420",
            "[::1]:8420",
            "[::1]",
            "localhost",
            "LocalHost:1",
            "10.0.0.3",
            "VM1.example:8420",
        ] {
            assert!(ours(host), "{host}");
        }
        for host in [
            "attacker.example:8420",
            "127.0.0.1.attacker.example",
            "localhost.attacker.example",
            "localhost:",
            "localhost:99999",
            "[::1",
            "[::1]x",
            "a@127.0.0.1",
            "",
        ] {
            assert!(!ours(host), "{host}");
        }
        assert!(!host_is_ours(&headers(&[]), &[]));
        let two = headers(&[("host", "localhost"), ("host", "attacker.example")]);
        assert!(!host_is_ours(&two, &[]));
    }

    #[test]
    fn changes_come_from_the_page_itself_or_from_no_browser() {
        let same = |list: &[(&'static str, &str)]| is_same_origin(&headers(list), false);
        let host = ("host", "127.0.0.1:8420");
        assert!(same(&[host]));
        assert!(same(&[host, ("origin", "http://127.0.0.1:8420")]));
        assert!(same(&[host, ("sec-fetch-site", "same-origin")]));
        for wrong in [
            [host, ("origin", "http://127.0.0.1:9999")],
            [host, ("origin", "https://127.0.0.1:8420")],
            [host, ("origin", "http://localhost:8420")],
            [host, ("origin", "http://attacker.example")],
            [host, ("origin", "null")],
            [host, ("sec-fetch-site", "same-site")],
            [host, ("sec-fetch-site", "cross-site")],
        ] {
            assert!(!same(&wrong), "{wrong:?}");
        }
        assert!(is_same_origin(
            &headers(&[host, ("origin", "https://127.0.0.1:8420")]),
            true
        ));
    }
}
