//! The audit log records requests that may change something, and refused requests, each with its
//! user, time and result.
//!
//! The log consists of JSON lines in `audit.jsonl`, readable by root only. At [`FILE_LIMIT`] bytes
//! the file is renamed to `audit.old.jsonl`, which replaces the previous file of this name.
//! Requests that only read are not logged. Scripts and QEMU's arguments are not logged either,
//! because they may contain secrets.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::Method;
use axum::response::Response;
use memfold_api::Role;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::warn;
use utoipa::ToSchema;

use super::private_file;
use crate::answer::Told;

/// Largest size of each of the two log files, in bytes.
const FILE_LIMIT: u64 = 2 << 20;
/// Longest path of a request that is logged, in characters.
const PATH_LIMIT: usize = 200;
/// Longest text value of a detail that is logged, in bytes.
const TEXT_LIMIT: usize = 100;
/// Largest number of refusals that are logged in a minute; further refusals are only counted.
const REFUSALS_A_MINUTE: u32 = 60;

/// Names of the fields of a request's body and query that are logged if their values are numbers,
/// truth values or short texts.
const DETAILS: &str = "\
    advisor allow_arguments announce autostart buffer_percent bytes cleartext compress content cover_percent cpu_percent despite_brake \
    disks domain drop_s durability encrypt for_vms force from from_boot_snapshot host input keep keep_clock \
    key_name least_bytes leave_percent listen live max_bytes memory merge min_bytes mode name no_lay one_domain order \
    pages_per_second parent paused pinned plain_disks prefetch priority qmp renew reserve role root seconds segment snapshot stream stripes \
    target_s timeout_s to top_files_bytes transport trust_domain ttl_s unmerge url vm wait when whole writer";

/// Name and role of the session that a login has begun. They are attached to the response for the
/// audit log.
#[derive(Clone, Debug)]
pub(crate) struct NewSession(pub String, pub Role);

/// The parts of a request that the audit log may record.
#[derive(Clone, Copy, Debug)]
pub(super) struct AuditedRequest<'a> {
    pub method: &'a Method,
    pub path: &'a str,
    /// Query string of the request, as received.
    pub query: &'a str,
    pub body: &'a [u8],
}

impl<'a> AuditedRequest<'a> {
    /// Makes the record of a request that is refused before its body is read. The record has no
    /// details.
    pub(super) const fn refused(method: &'a Method, path: &'a str) -> Self {
        Self {
            method,
            path,
            query: "",
            body: &[],
        }
    }
}

/// An entry of the audit log: a request that may change something, or a refused request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Time at which the request ended, in seconds since 1970.
    pub at_unix_s: f64,
    /// The sender of the request. On the Unix socket: user and process. On TCP: session or token,
    /// and address.
    pub who: String,
    /// Role of the request's sender; null for a login or a refusal.
    pub role: Option<Role>,
    /// HTTP method of the request.
    pub method: String,
    /// Path of the request.
    pub path: String,
    /// Fields of the request's body and query that cannot contain secrets, by name.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub details: BTreeMap<String, Value>,
    /// HTTP status of the response, such as 200 for success.
    pub status: u16,
    /// Error message of the response; null if the request succeeded.
    pub error: Option<String>,
    /// Time that the request took, in milliseconds.
    pub took_ms: u64,
    /// Number of refusals that were not logged between this entry and the previous one, because
    /// there were too many.
    #[serde(default)]
    pub not_noted: u64,
}

#[derive(Debug)]
struct Refusals {
    minute: Instant,
    noted: u32,
    passed_over: u64,
}

#[derive(Debug)]
pub(crate) struct Audit {
    directory: PathBuf,
    /// Held while a line is written to the log.
    writing: Mutex<()>,
    refusals: Mutex<Refusals>,
}

impl Audit {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            writing: Mutex::default(),
            refusals: Mutex::new(Refusals {
                minute: Instant::now(),
                noted: 0,
                passed_over: 0,
            }),
        }
    }

    fn file(&self) -> PathBuf {
        self.directory.join("audit.jsonl")
    }

    fn old_file(&self) -> PathBuf {
        self.directory.join("audit.old.jsonl")
    }

    /// Logs a request that may change something, or a request that was refused.
    pub(super) fn note(
        &self,
        (who, role): (&str, Option<Role>),
        asked: &AuditedRequest<'_>,
        response: &Response,
        took: Duration,
    ) {
        // Requests of a client that may not operate count like refusals, whose number is limited:
        // such a client could fill the log and push out entries of operators.
        let begun = response.extensions().get::<NewSession>();
        let operates =
            role == Some(Role::Operate) || begun.is_some_and(|begun| begun.1 == Role::Operate);
        let not_noted = if operates { Some(0) } else { self.may_note() };
        let Some(not_noted) = not_noted else { return };
        let mut details = details(asked);
        if let Some(NewSession(label, role)) = begun {
            details.insert("begins".into(), label.as_str().into());
            details.insert("role".into(), role.name().into());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let told = response.extensions().get::<Told>();
        self.write(&AuditEntry {
            at_unix_s: now.map_or(0.0, |t| t.as_millis() as f64 / 1e3),
            who: who.to_owned(),
            role,
            method: asked.method.to_string(),
            path: asked.path.chars().take(PATH_LIMIT).collect(),
            details,
            status: response.status().as_u16(),
            error: told.map(|told| told.0.clone()),
            took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            not_noted,
        });
    }

    /// Writes a failed TLS handshake to the daemon's log, unless there are too many refusals.
    pub(super) fn failed_hello(&self, from: std::net::IpAddr, why: &str) {
        if let Some(not_noted) = self.may_note() {
            warn!(%from, why, not_noted, "TLS connection refused; check that the client uses https:// and trusts the right certificate");
        }
    }

    /// Returns the number of refusals that were not logged before, if a further refusal may be
    /// logged; else `None`.
    fn may_note(&self) -> Option<u64> {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if refusals.minute.elapsed() >= Duration::from_secs(60) {
            refusals.minute = Instant::now();
            refusals.noted = 0;
        }
        if refusals.noted >= REFUSALS_A_MINUTE {
            refusals.passed_over += 1;
            return None;
        }
        refusals.noted += 1;
        Some(std::mem::take(&mut refusals.passed_over))
    }

    fn write(&self, entry: &AuditEntry) {
        // The disk may be slow. Meanwhile, other requests continue, and only further log entries
        // wait.
        let appended = tokio::task::block_in_place(|| {
            let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            self.append(entry)
        });
        if let Err(error) = appended {
            warn!(path = %self.file().display(), %error, "cannot write the audit log; free space in the --records directory");
        }
    }

    fn append(&self, entry: &AuditEntry) -> io::Result<()> {
        let path = self.file();
        std::fs::create_dir_all(&self.directory)?;
        if std::fs::metadata(&path).is_ok_and(|facts| facts.len() >= FILE_LIMIT) {
            std::fs::rename(&path, self.old_file())?;
        }
        let mut file = private_file::open(File::options().read(true).append(true), &path)?;
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        // A line that did not fit on a full disk must not make this one unreadable.
        if !ends_with_a_line(&file)? {
            line.insert(0, b'\n');
        }
        file.write_all(&line)
    }

    /// Returns the last `count` entries of the audit log, newest first.
    pub(crate) fn last(&self, count: usize) -> io::Result<Vec<AuditEntry>> {
        let mut found = Vec::new();
        for path in [self.file(), self.old_file()] {
            let text = match read(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                text => text?,
            };
            let lines = text.rsplit(|&byte| byte == b'\n');
            // A line that was not complete when a daemon died is skipped.
            let entries = lines.filter_map(|line| serde_json::from_slice(line).ok());
            found.extend(entries.take(count - found.len()));
            if found.len() == count {
                break;
            }
        }
        Ok(found)
    }
}

/// Returns whether the last line of a file is complete.
fn ends_with_a_line(file: &File) -> io::Result<bool> {
    let Some(last) = file.metadata()?.len().checked_sub(1) else {
        return Ok(true);
    };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    Ok(byte == *b"\n")
}

/// Reads a file of the log, up to twice its limit (this program writes no longer files).
fn read(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    File::open(path)?
        .take(2 * FILE_LIMIT)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn details(asked: &AuditedRequest<'_>) -> BTreeMap<String, Value> {
    let fields: serde_json::Map<_, _> = serde_json::from_slice(asked.body).unwrap_or_default();
    let pairs = asked
        .query
        .split('&')
        .filter_map(|pair| pair.split_once('='));
    // The query's values are parsed as in a JSON body: `true`, numbers, texts.
    let pairs = pairs.map(|(key, value)| {
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        (key.to_owned(), value)
    });
    let harmless = |(key, value): &(String, Value)| {
        let short = match value {
            Value::Bool(_) | Value::Number(_) => true,
            Value::String(text) => text.len() <= TEXT_LIMIT,
            _ => false,
        };
        short && is_detail(key)
    };
    pairs.chain(fields).filter(harmless).collect()
}

fn is_detail(field: &str) -> bool {
    DETAILS.split(' ').any(|detail| detail == field)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use axum::response::IntoResponse;

    fn done(audit: &Audit, path: &str, body: &str) {
        let response = ().into_response();
        let who = ("uid 0", Some(Role::Operate));
        let took = Duration::from_millis(7);
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let asked = AuditedRequest {
            method: &Method::POST,
            path,
            query,
            body: body.as_bytes(),
        };
        audit.note(who, &asked, &response, took);
    }

    #[test]
    fn the_audit_log_contains_the_user_the_action_and_the_outcome_and_no_secret() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::new(directory.path().join("records"));
        done(
            &audit,
            "/v1/vms/web/exec",
            r#"{"script": "passwd", "timeout_s": 3}"#,
        );
        let mut response = axum::http::StatusCode::CONFLICT.into_response();
        response.extensions_mut().insert(Told("it is used".into()));
        let took = Duration::ZERO;
        let asked = AuditedRequest::refused(&Method::DELETE, "/v1/x");
        audit.note(("127.0.0.1", None), &asked, &response, took);
        let last = audit.last(10).unwrap();
        assert_eq!(last.len(), 2);
        assert_eq!(last[0].error.as_deref(), Some("it is used"));
        assert_eq!((last[0].status, last[0].role), (409, None));
        assert_eq!((last[1].status, last[1].took_ms), (200, 7));
        assert_eq!(last[1].role, Some(Role::Operate));
        let details: Vec<&str> = last[1].details.keys().map(String::as_str).collect();
        assert_eq!(details, ["timeout_s"]);
        assert_eq!(audit.last(1).unwrap(), last[..1]);
        let facts = std::fs::metadata(audit.file()).unwrap();
        assert_eq!(facts.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn an_entry_after_a_line_that_was_cut_off_by_a_full_disk_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::new(directory.path().to_owned());
        done(&audit, "/v1/fold", "{}");
        let half = &std::fs::read(audit.file()).unwrap()[..20];
        let mut file = File::options().append(true).open(audit.file()).unwrap();
        file.write_all(half).unwrap();
        done(&audit, "/v1/lend", "{}");
        done(&audit, "/v1/host", "{}");
        let last = audit.last(10).unwrap();
        let paths: Vec<&str> = last.iter().map(|entry| entry.path.as_str()).collect();
        assert_eq!(paths, ["/v1/host", "/v1/lend", "/v1/fold"]);
    }

    #[test]
    fn query_parameters_of_a_change_request_are_written_to_the_audit_log() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::new(directory.path().to_owned());
        done(
            &audit,
            "/v1/vms?despite_brake=true&token=x",
            r#"{"name": "web"}"#,
        );
        let last = audit.last(1).unwrap().remove(0);
        assert_eq!(last.path, "/v1/vms");
        let expected = BTreeMap::from([
            ("despite_brake".to_owned(), Value::Bool(true)),
            ("name".to_owned(), "web".into()),
        ]);
        assert_eq!(last.details, expected);
    }

    /// Fields that may contain secrets and are never logged.
    const LEFT_OUT: [&str; 7] = [
        "copy", "key", "script", "secret", "settings", "terminal", "trust",
    ];

    #[test]
    fn each_field_of_a_change_request_is_either_audited_or_listed_as_not_audited() {
        let description = crate::routes::openapi();
        let mut fields = std::collections::BTreeSet::new();
        for (path, methods) in description["paths"].as_object().unwrap() {
            for (method, what) in methods.as_object().unwrap() {
                if method == "get" || path == "/v1/registry" {
                    continue;
                }
                let name = what["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                    .as_str()
                    .and_then(|name| name.strip_prefix("#/components/schemas/"));
                let properties = name.map(|name| {
                    description["components"]["schemas"][name]["properties"]
                        .as_object()
                        .unwrap()
                });
                let of_body = properties.into_iter().flatten();
                let lists =
                    |schema: &Value| schema["type"] == "array" || schema["type"][0] == "array";
                fields.extend(
                    of_body
                        .filter(|(_, schema)| !lists(schema))
                        .map(|(key, _)| key.clone()),
                );
                let of_query = what["parameters"].as_array().into_iter().flatten();
                fields.extend(
                    of_query
                        .filter(|parameter| parameter["in"] == "query")
                        .map(|parameter| parameter["name"].as_str().unwrap().to_owned()),
                );
            }
        }
        assert!(fields.contains("despite_brake") && fields.contains("trust_domain"));
        // One name can be harmless in one request and a secret in another one.
        assert!(LEFT_OUT.iter().all(|field| !is_detail(field)));
        fields.retain(|field| !is_detail(field) && !LEFT_OUT.contains(&&**field));
        assert!(fields.is_empty(), "neither noted nor left out: {fields:?}");
    }

    #[test]
    fn the_audit_log_is_kept_in_two_files_of_bounded_length() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::new(directory.path().to_owned());
        let path = format!("/v1/{}", "x".repeat(10_000));
        for _ in 0..20_000 {
            done(&audit, &path, "{}");
        }
        let bytes = |path: PathBuf| std::fs::metadata(path).unwrap().len();
        assert!(bytes(audit.file()) <= FILE_LIMIT + 1000);
        assert!(bytes(audit.old_file()) <= FILE_LIMIT + 1000);
        assert_eq!(audit.last(200).unwrap().len(), 200);
    }

    #[test]
    fn a_flood_of_refused_requests_is_counted_and_not_written_to_the_audit_log() {
        let directory = tempfile::tempdir().unwrap();
        let audit = Audit::new(directory.path().to_owned());
        let response = axum::http::StatusCode::UNAUTHORIZED.into_response();
        let asked = AuditedRequest::refused(&Method::GET, "/v1/vms");
        let refuse = || audit.note(("::1", None), &asked, &response, Duration::ZERO);
        for _ in 0..1000 {
            refuse();
        }
        assert_eq!(audit.last(2000).unwrap().len(), 60);
        let minute_ago = Instant::now().checked_sub(Duration::from_secs(61)).unwrap();
        audit.refusals.lock().unwrap().minute = minute_ago;
        refuse();
        assert_eq!(audit.last(1).unwrap()[0].not_noted, 940);
    }
}
