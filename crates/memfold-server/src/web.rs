//! Serves the files of the dashboard (HTML, scripts, styles), which are built into the program.
//!
//! These files are the same for all users and contain no figures, so they need no login.

use axum::Router;
use axum::extract::Request;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// A file of the dashboard: path, content type, content.
type File = (&'static str, &'static str, &'static [u8]);

macro_rules! files {
    ($($path:literal $file:literal $kind:expr,)*) => {
        &[$(($path, $kind, include_bytes!(concat!("../../../web/", $file)) as &[u8]),)*]
    };
}

const FILES: &[File] = files![
    "/" "index.html" HTML,
    "/favicon.svg" "favicon.svg" "image/svg+xml",
    "/style.css" "style.css" STYLE,
    "/app/theme.js" "app/theme.js" SCRIPT,
    "/app/main.js" "app/main.js" SCRIPT,
    "/app/api.js" "app/api.js" SCRIPT,
    "/app/charts.js" "app/charts.js" SCRIPT,
    "/app/format.js" "app/format.js" SCRIPT,
    "/app/html.js" "app/html.js" SCRIPT,
    "/app/starts.js" "app/starts.js" SCRIPT,
    "/app/ui.js" "app/ui.js" SCRIPT,
    "/app/pages/doctor.js" "app/pages/doctor.js" SCRIPT,
    "/app/pages/ended.js" "app/pages/ended.js" SCRIPT,
    "/app/pages/estimate.js" "app/pages/estimate.js" SCRIPT,
    "/app/pages/events.js" "app/pages/events.js" SCRIPT,
    "/app/pages/host.js" "app/pages/host.js" SCRIPT,
    "/app/pages/leases.js" "app/pages/leases.js" SCRIPT,
    "/app/pages/plan.js" "app/pages/plan.js" SCRIPT,
    "/app/pages/rightsize.js" "app/pages/rightsize.js" SCRIPT,
    "/app/pages/segments.js" "app/pages/segments.js" SCRIPT,
    "/app/pages/sharing.js" "app/pages/sharing.js" SCRIPT,
    "/app/pages/snapshots.js" "app/pages/snapshots.js" SCRIPT,
    "/app/pages/vm.js" "app/pages/vm.js" SCRIPT,
    "/app/pages/vms.js" "app/pages/vms.js" SCRIPT,
    "/vendor/preact.js" "vendor/preact.js" SCRIPT,
    "/vendor/preact-hooks.js" "vendor/preact-hooks.js" SCRIPT,
    "/vendor/htm.js" "vendor/htm.js" SCRIPT,
    "/vendor/uplot.js" "vendor/uplot.js" SCRIPT,
    "/vendor/uplot.css" "vendor/uplot.css" STYLE,
];

/// Returns whether a path is that of a file of the dashboard.
pub(super) fn is_page(path: &str) -> bool {
    FILES.iter().any(|(known, ..)| *known == path)
}

pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES
        .iter()
        .fold(Router::new(), |router, &(path, kind, bytes)| {
            let tag = format!("\"{}\"", &blake3::hash(bytes).to_hex()[..16]);
            router.route(
                path,
                get(move |request: Request| {
                    let answer = answer(&request, kind, bytes, &tag);
                    async move { answer }
                }),
            )
        })
}

/// Returns the response with a file, or status 304 if the browser has the file already.
fn answer(request: &Request, kind: &'static str, bytes: &'static [u8], tag: &str) -> Response {
    let known = request.headers().get(IF_NONE_MATCH);
    let mut response = if known.is_some_and(|known| known == tag) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        ([(CONTENT_TYPE, kind)], bytes).into_response()
    };
    let headers = response.headers_mut();
    // The browser must check the tag each time, because a new program has new files under the same
    // names.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(tag) {
        headers.insert(ETAG, tag);
    }
    response
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// Collects the files below a directory of `web/`, as paths of the API.
    fn below(directory: &Path, prefix: &str, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}/{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                below(&entry.path(), &name, found);
            } else if !name.contains("LICENSE") && !name.ends_with("README.md") {
                found.insert(name);
            }
        }
    }

    #[test]
    fn every_file_of_the_dashboard_is_embedded_in_the_program() {
        let web = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web");
        let mut wanted: BTreeSet<String> = ["/", "/favicon.svg", "/style.css"]
            .map(str::to_owned)
            .into();
        below(&web.join("app"), "/app", &mut wanted);
        below(&web.join("vendor"), "/vendor", &mut wanted);
        let served = FILES.iter().map(|(path, ..)| (*path).to_owned());
        assert_eq!(served.collect::<BTreeSet<_>>(), wanted);
    }

    #[test]
    fn the_dashboard_has_at_most_300_kb_and_requests_no_other_server() {
        let bytes: usize = FILES.iter().map(|(_, _, bytes)| bytes.len()).sum();
        println!("{bytes} bytes in {} files", FILES.len());
        assert!(bytes <= 300_000, "{bytes}");
        for (path, kind, bytes) in FILES.iter().filter(|f| !f.0.starts_with("/vendor/")) {
            let text = std::str::from_utf8(bytes).unwrap();
            let elsewhere = text
                .match_indices("://")
                .filter(|(at, _)| !text[at + 3..].starts_with("www.w3.org/2000/svg"));
            assert_eq!(elsewhere.count(), 0, "{path} speaks of another place");
            if *kind == HTML {
                assert!(!text.contains("<script>") && !text.contains("style="));
            }
        }
    }

    #[test]
    fn third_party_files_of_the_dashboard_have_the_recorded_digests() {
        let notes = include_str!("../../../web/vendor/README.md");
        let vendored = FILES.iter().filter(|f| f.0.starts_with("/vendor/"));
        let noted = notes.lines().filter(|l| l.ends_with("` |"));
        assert_eq!(vendored.clone().count(), noted.count());
        for (path, _, bytes) in vendored {
            let name = path.trim_start_matches("/vendor/");
            let line = notes
                .lines()
                .find(|l| l.starts_with(&format!("| {name} |")));
            let line = line.unwrap_or_else(|| panic!("{name} is not noted"));
            let mut digest = String::new();
            for byte in openssl::sha::sha256(bytes) {
                write!(digest, "{byte:02x}").unwrap();
            }
            let told = format!("| {} | `{digest}` |", bytes.len());
            assert!(line.contains(&told), "{line} is not {told}");
        }
    }
}
