//! Checks that a browser's request comes from the dashboard.
//!
//! A web page of another site, open in the operator's browser, may send requests to the daemon: by
//! a host name of that site that resolves to this address (DNS rebinding), or by forms and images
//! (cross-site requests). Browsers send the host name in `Host` and the page's site in `Origin`.
//! Browsers let another site set a custom header only with the server's permission, which this
//! server never gives.

use std::net::IpAddr;

use std::str::FromStr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri};

/// Header that the dashboard's scripts send with each request that may change something.
pub(crate) const OWN_HEADER: HeaderName = HeaderName::from_static("x-memfold");

/// Returns the host part of `HOST[:PORT]`, without brackets; `None` if the port is invalid.
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

/// Public URL of the dashboard behind a reverse proxy: `https://NAME` or `https://NAME:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicUrl {
    /// Origin as browsers send it: in lower case, without the scheme's default port.
    origin: String,
    name: String,
}

/// Why a text is not a [`PublicUrl`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublicUrlError {
    /// The text is not an HTTP or HTTPS URL.
    #[error(
        "not an address of the dashboard; give the address that browsers show: https://NAME or https://NAME:PORT"
    )]
    NoUrl,
    /// The URL has a path or a query.
    #[error("the dashboard cannot be served below a path; give https://NAME without a path")]
    Path,
}

impl FromStr for PublicUrl {
    type Err = PublicUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let url: Uri = text.parse().map_err(|_| PublicUrlError::NoUrl)?;
        let (Some(scheme), Some(authority)) = (url.scheme_str(), url.authority()) else {
            return Err(PublicUrlError::NoUrl);
        };
        let own_port = match scheme {
            "https" => 443,
            "http" => 80,
            _ => return Err(PublicUrlError::NoUrl),
        };
        if authority.as_str().contains('@') || name_of(authority.as_str()).is_none() {
            return Err(PublicUrlError::NoUrl);
        }
        if url.path() != "/" || url.query().is_some() {
            return Err(PublicUrlError::Path);
        }
        let host = authority.host().to_ascii_lowercase();
        let origin = match authority.port_u16() {
            Some(port) if port != own_port => format!("{scheme}://{host}:{port}"),
            _ => format!("{scheme}://{host}"),
        };
        let name = host.trim_matches(['[', ']']).to_owned();
        Ok(Self { origin, name })
    }
}

impl PublicUrl {
    /// Returns the URL, with a slash at its end.
    pub(super) fn url(&self) -> String {
        format!("{}/", self.origin)
    }

    /// Returns the name or address of the host in the URL.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    fn is_origin(&self, origin: &HeaderValue) -> bool {
        origin
            .as_bytes()
            .eq_ignore_ascii_case(self.origin.as_bytes())
    }
}

/// Returns whether the request's `Origin` header is one of the `public` URLs and uses HTTPS.
pub(super) fn is_public_https(headers: &HeaderMap, public: &[PublicUrl]) -> bool {
    headers.get(ORIGIN).is_some_and(|origin| {
        let mut https = public.iter().filter(|url| url.origin.starts_with("https:"));
        https.any(|url| url.is_origin(origin))
    })
}

/// Returns whether a request with this `Host` header is answered. Accepted are IP addresses (DNS
/// cannot redirect them), `localhost`, and `names`.
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

/// Returns whether a request that may change something comes from the dashboard, or from a client
/// that is no browser. `public`: URLs of the dashboard behind reverse proxies.
pub(super) fn is_same_origin(headers: &HeaderMap, tls: bool, public: &[PublicUrl]) -> bool {
    // Browsers set this header, and scripts cannot set it (Fetch Metadata).
    if let Some(site) = headers.get("sec-fetch-site") {
        if site != "same-origin" && site != "none" {
            return false;
        }
    }
    let mut origins = headers.get_all(ORIGIN).iter();
    match (origins.next(), origins.next()) {
        (None, _) => true,
        (Some(origin), None) if public.iter().any(|url| url.is_origin(origin)) => true,
        (Some(origin), None) => {
            let scheme = if tls { "https" } else { "http" };
            let host = headers.get(HOST).and_then(|host| host.to_str().ok());
            let own = host.map(|host| format!("{scheme}://{host}"));
            own.is_some_and(|own| origin.as_bytes().eq_ignore_ascii_case(own.as_bytes()))
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
    fn a_host_header_is_accepted_only_with_an_ip_address_localhost_or_a_configured_name() {
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
    fn a_browser_request_from_another_origin_that_changes_something_is_refused() {
        let same = |list: &[(&'static str, &str)]| is_same_origin(&headers(list), false, &[]);
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
            true,
            &[]
        ));
    }

    #[test]
    fn behind_a_proxy_only_requests_from_the_public_url_count_as_same_origin() {
        let public: [PublicUrl; 2] =
            ["https://VMs.example:443/", "http://intern:8080"].map(|url| url.parse().unwrap());
        assert_eq!(public[0].url(), "https://vms.example/");
        assert_eq!(
            (public[0].name(), public[1].name()),
            ("vms.example", "intern")
        );
        // The proxy passes the browser's Host header on, or sends its own.
        for host in ["vms.example", "127.0.0.1:8420"] {
            let same = |origin: &str| {
                let headers = headers(&[("host", host), ("origin", origin)]);
                is_same_origin(&headers, false, &public)
            };
            assert!(same("https://vms.example") && same("http://intern:8080"));
            assert!(!same("https://vms.example:444") && !same("https://intern:8080"));
            assert!(!same("https://vms.example.attacker.example") && !same("null"));
        }
        let https = |origin: &str| is_public_https(&headers(&[("origin", origin)]), &public);
        assert!(https("https://vms.example") && !https("http://intern:8080"));
        assert!(!https("https://attacker.example"));
    }

    #[test]
    fn a_public_url_with_a_path_or_without_a_host_is_refused() {
        for (text, why) in [
            ("vms.example", PublicUrlError::NoUrl),
            ("ftp://vms.example", PublicUrlError::NoUrl),
            ("https://a@vms.example", PublicUrlError::NoUrl),
            ("https://vms.example:99999", PublicUrlError::NoUrl),
            ("", PublicUrlError::NoUrl),
            ("https://vms.example/memfold", PublicUrlError::Path),
            ("https://vms.example/?x", PublicUrlError::Path),
        ] {
            assert_eq!(text.parse::<PublicUrl>(), Err(why), "{text}");
        }
        let six: PublicUrl = "https://[fd00::1]:8443".parse().unwrap();
        assert_eq!(
            (six.url(), six.name()),
            ("https://[fd00::1]:8443/".into(), "fd00::1")
        );
    }
}
