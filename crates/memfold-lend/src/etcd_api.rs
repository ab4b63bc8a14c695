//! Sends requests to etcd (transactions and etcd leases) through the JSON gateway that every etcd
//! has on its client port (`/v3/...`).
//!
//! Reads are linearizable, which is the gateway's default. A member that is cut off from the other
//! members therefore answers no read.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::StatusCode;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use super::https::{Https, Post};
use super::place::Member;
use super::tls::TlsFiles;

/// Time limit for an etcd member's answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// An etcd transaction: its conditions, and the operations that run if all conditions hold.
///
/// A key that ends with '/' stands for all keys that begin with it.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Txn {
    compare: Vec<Value>,
    success: Vec<Value>,
    /// Keys that the transaction writes and whose contents hold for a limited time from then on.
    #[serde(skip)]
    pub held: Vec<String>,
}

/// One of etcd's own leases. When the lease expires, etcd removes the keys that were written with
/// it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant(i64);

fn base64(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

fn keys(key: &str) -> Value {
    match key.strip_suffix('/') {
        // '0' is the next character after '/'.
        Some(rest) => json!({ "key": base64(key), "range_end": base64(format!("{rest}0")) }),
        None => json!({ "key": base64(key) }),
    }
}

impl Txn {
    /// Adds the condition that `key` was last written at etcd's revision `revision`; 0: the key
    /// does not exist.
    pub fn when_at(mut self, key: &str, revision: u64) -> Self {
        self.compare.push(json!({
            "key": base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string(),
        }));
        self
    }

    pub fn put(self, key: &str, value: &impl Serialize) -> Self {
        self.put_for(key, value, None)
    }

    /// Adds an operation that writes into `key` for how many milliseconds its contents hold. With
    /// `grant`, etcd removes the key when that etcd lease expires.
    pub fn hold(mut self, key: &str, ms: u64, grant: impl Into<Option<Grant>>) -> Self {
        self.held.push(key.to_owned());
        self.put_for(key, &json!({ "ms": ms }), grant.into())
    }

    fn put_for(mut self, key: &str, value: &impl Serialize, grant: Option<Grant>) -> Self {
        // All values are plain structs of memfold, which serde can always write.
        let value = serde_json::to_vec(value).unwrap_or_default();
        let mut put = json!({ "key": base64(key), "value": base64(value) });
        if let Some(Grant(id)) = grant {
            put["lease"] = id.to_string().into();
        }
        self.success.push(json!({ "request_put": put }));
        self
    }

    pub fn delete(mut self, key: &str) -> Self {
        self.success
            .push(json!({ "request_delete_range": keys(key) }));
        self
    }

    pub fn get(mut self, key: &str) -> Self {
        self.success.push(json!({ "request_range": keys(key) }));
        self
    }
}

/// Result of an etcd transaction.
#[derive(Debug, Deserialize)]
pub(super) struct Done {
    header: Header,
    /// Whether all conditions of the transaction held, so that its operations ran.
    #[serde(default)]
    pub succeeded: bool,
    #[serde(default)]
    responses: Vec<Response>,
    /// When this process began to send the transaction.
    #[serde(skip, default = "Instant::now")]
    pub asked: Instant,
}

#[derive(Debug, Deserialize)]
struct Header {
    #[serde(default, deserialize_with = "number")]
    revision: u64,
}

#[derive(Debug, Deserialize)]
struct Response {
    #[serde(alias = "responseRange")]
    response_range: Option<Range>,
}

#[derive(Debug, Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<Kv>,
}

/// A key of etcd with its value.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Kv {
    #[serde(deserialize_with = "text")]
    pub key: String,
    #[serde(default, deserialize_with = "bytes")]
    pub value: Vec<u8>,
    /// Revision at which the key was last written.
    #[serde(
        rename = "mod_revision",
        alias = "modRevision",
        deserialize_with = "number"
    )]
    pub revision: u64,
    /// When this process began to ask for the key.
    #[serde(skip, default = "Instant::now")]
    pub asked: Instant,
}

impl Done {
    /// Returns etcd's revision after the transaction, which is also the revision of each key that
    /// the transaction wrote.
    pub const fn revision(&self) -> u64 {
        self.header.revision
    }

    /// Returns the keys that each range request of the transaction found, in the order of the
    /// requests.
    pub fn ranges(self) -> Vec<Vec<Kv>> {
        let ranges = self.responses.into_iter().filter_map(|r| r.response_range);
        ranges.map(|range| range.kvs).collect()
    }
}

#[derive(Deserialize)]
struct Granted {
    #[serde(rename = "ID", default, deserialize_with = "number")]
    id: i64,
}

/// Reads a 64-bit number. protobuf's JSON mapping writes such a number as text, and omits it when
/// it is 0.
fn number<'de, D: Deserializer<'de>, T: TryFrom<i64>>(from: D) -> Result<T, D::Error> {
    let value = Value::deserialize(from)?;
    let number = value
        .as_str()
        .map_or(value.as_i64(), |text| text.parse().ok());
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| D::Error::custom("no number"))
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    STANDARD.decode(text).map_err(D::Error::custom)
}

fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::from_utf8(bytes(from)?).map_err(D::Error::custom)
}

fn odd() -> String {
    "cannot parse etcd's answer; etcd 3.4 or newer is needed".into()
}

/// Client of an etcd cluster. Its errors tell why etcd gave no usable answer.
#[derive(Debug)]
pub(super) struct Api {
    http: Https,
}

impl Api {
    pub const fn new(members: Vec<Member>, tls: Option<TlsFiles>) -> Self {
        Self {
            http: Https::new(members, tls),
        }
    }

    fn ask<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, String> {
        let body = serde_json::to_vec(body).map_err(|error| error.to_string())?;
        let post = Post {
            path,
            token: None,
            body: &body,
            patience: PATIENCE,
        };
        let answered = self.http.post(&post);
        let (status, body) = answered.map_err(|error| error.to_string())?;
        if status == StatusCode::OK {
            return serde_json::from_slice(&body).map_err(|_| odd());
        }
        // This member may have no leader, for example. Another member may have one.
        self.http.pass_over();
        let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
        let said = answer["error"].as_str().map_or_else(
            || String::from_utf8_lossy(&body).chars().take(200).collect(),
            str::to_owned,
        );
        Err(format!("{status}: {said}"))
    }

    /// Runs a transaction in etcd. After an error, etcd may or may not have executed the
    /// transaction.
    pub fn txn(&self, txn: &Txn) -> Result<Done, String> {
        let asked = Instant::now();
        let mut done: Done = self.ask("/v3/kv/txn", txn)?;
        done.asked = asked;
        let ranges = done.responses.iter_mut();
        for range in ranges.filter_map(|response| response.response_range.as_mut()) {
            range.kvs.iter_mut().for_each(|kv| kv.asked = asked);
        }
        Ok(done)
    }

    /// Requests an etcd lease of at least `ttl`, rounded up to whole seconds, at least 1 s.
    pub fn grant(&self, ttl: Duration) -> Result<Grant, String> {
        let seconds = ttl.as_millis().div_ceil(1000).max(1);
        let body = json!({ "TTL": seconds.to_string() });
        let Granted { id } = self.ask("/v3/lease/grant", &body)?;
        if id == 0 { Err(odd()) } else { Ok(Grant(id)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_responses_of_etcd_are_parsed() {
        // This answer is from etcd 3.4.23.
        let text = r#"{"header":{"cluster_id":"14841639068965178418","revision":"7","raft_term":"2"},"succeeded":true,
            "responses":[{"response_range":{"header":{"revision":"7"},"kvs":[{"key":"YS8x","create_revision":"2",
            "mod_revision":"7","version":"6","value":"e30=","lease":"7587"}],"count":"1"}},{"response_range":{"header":{}}}]}"#;
        let answer: Done = serde_json::from_str(text).unwrap();
        assert!(answer.succeeded);
        assert_eq!(answer.revision(), 7);
        let [range, empty] = answer.ranges().try_into().unwrap();
        assert_eq!((range[0].key.as_str(), range[0].revision), ("a/1", 7));
        assert_eq!(range[0].value, b"{}");
        assert!(empty.is_empty());
        let answer: Done = serde_json::from_str(r#"{"header":{}}"#).unwrap();
        assert!(!answer.succeeded && answer.responses.is_empty());
        // A number may be written as such; a wrong one, or none, is an error.
        let kv = |revision: &str| {
            let text = format!(r#"{{"key":"YQ==","modRevision":{revision}}}"#);
            serde_json::from_str::<Kv>(&text)
        };
        assert_eq!(kv("3").unwrap().revision, 3);
        for bad in ["-1", "null", "\"x\"", "1.5"] {
            kv(bad).unwrap_err();
        }
        serde_json::from_str::<Kv>(r#"{"key":"YQ=="}"#).unwrap_err();
    }

    #[test]
    fn the_end_of_an_etcd_key_prefix_range_is_computed() {
        assert_eq!(keys("a/")["range_end"], base64("a0"));
        assert_eq!(keys("a").get("range_end"), None);
    }
}
