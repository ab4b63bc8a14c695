//! Requests to etcd (transactions and etcd leases) through the JSON gateway that every etcd has on
//! its client port (`/v3/...`).
//!
//! Reads are linearizable, which is the gateway's default. A member that is cut off from the other
//! members therefore answers no read.

use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::StatusCode;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::https::{Https, Post};
use super::place::Member;
use super::tls::TlsFiles;

/// Time limit for an etcd member's answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// A key of etcd with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kv {
    pub key: String,
    pub value: Vec<u8>,
    /// Revision at which the key was last written.
    pub revision: u64,
}

/// An etcd transaction: its conditions, and the operations that run if all conditions hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Txn {
    compare: Vec<Value>,
    success: Vec<Value>,
}

/// Result of an etcd transaction.
#[derive(Clone, Debug)]
pub(super) struct Done {
    /// Whether all conditions held, so that the operations ran.
    pub held: bool,
    /// etcd's revision after the transaction, which is also the revision of each key that the
    /// transaction wrote.
    pub revision: u64,
    /// Keys of each range that the transaction asked for, in the order of the requests.
    pub ranges: Vec<Vec<Kv>>,
}

/// One of etcd's own leases. When the lease expires, etcd removes the keys that were written with
/// it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant(i64);

/// Reason why etcd gave no usable answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct ApiError(String);

fn base64(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

/// Returns the first key after all keys that begin with `prefix`.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // The prefixes in this file end with '/'.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

impl Txn {
    /// Adds the condition that the key is still at `revision`; revision 0 means that the key does
    /// not exist.
    pub fn when_at(mut self, key: &str, revision: u64) -> Self {
        self.compare.push(json!({
            "key": base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string(),
        }));
        self
    }

    pub fn put(mut self, key: &str, value: &impl Serialize) -> Self {
        self.success.push(put(key, value, None));
        self
    }

    /// Writes a key that etcd removes when the etcd lease `grant` expires.
    pub fn put_for(mut self, key: &str, value: &impl Serialize, grant: Grant) -> Self {
        self.success.push(put(key, value, Some(grant)));
        self
    }

    pub fn delete(mut self, key: &str) -> Self {
        self.success
            .push(json!({ "request_delete_range": { "key": base64(key) } }));
        self
    }

    pub fn delete_all(mut self, prefix: &str) -> Self {
        self.success.push(json!({
            "request_delete_range": { "key": base64(prefix), "range_end": base64(end_of(prefix)) },
        }));
        self
    }

    pub fn get(mut self, key: &str) -> Self {
        self.success
            .push(json!({ "request_range": { "key": base64(key) } }));
        self
    }

    pub fn get_all(mut self, prefix: &str) -> Self {
        self.success.push(json!({
            "request_range": { "key": base64(prefix), "range_end": base64(end_of(prefix)) },
        }));
        self
    }
}

fn put(key: &str, value: &impl Serialize, grant: Option<Grant>) -> Value {
    // All values are plain structs of memfold, which serde can always write.
    let value = serde_json::to_vec(value).unwrap_or_default();
    let mut put = json!({ "key": base64(key), "value": base64(value) });
    if let Some(Grant(id)) = grant {
        put["lease"] = id.to_string().into();
    }
    json!({ "request_put": put })
}

/// Client of an etcd cluster.
pub(super) struct Api {
    http: Https,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("etcd")
    }
}

/// A 64-bit number. protobuf's JSON mapping writes such a number as text, and omits it when it is
/// 0.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Text(String),
    Plain(i64),
}

impl Number {
    fn get(&self) -> Result<i64, ApiError> {
        match self {
            Self::Text(text) => text.parse().map_err(|_| odd()),
            Self::Plain(number) => Ok(*number),
        }
    }
}

#[derive(Deserialize)]
struct Header {
    revision: Option<Number>,
}

#[derive(Deserialize)]
struct TxnAnswer {
    header: Header,
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<OpAnswer>,
}

#[derive(Deserialize)]
struct OpAnswer {
    #[serde(alias = "responseRange")]
    response_range: Option<RangeAnswer>,
}

#[derive(Deserialize)]
struct RangeAnswer {
    #[serde(default)]
    kvs: Vec<KvAnswer>,
}

#[derive(Deserialize)]
struct KvAnswer {
    key: String,
    #[serde(default)]
    value: String,
    #[serde(alias = "modRevision")]
    mod_revision: Number,
}

#[derive(Deserialize)]
struct GrantAnswer {
    #[serde(rename = "ID")]
    id: Option<Number>,
}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: String,
}

fn odd() -> ApiError {
    ApiError("cannot parse etcd's answer; etcd 3.4 or newer is needed".into())
}

fn bytes(text: &str) -> Result<Vec<u8>, ApiError> {
    STANDARD.decode(text).map_err(|_| odd())
}

fn unsigned(number: &Number) -> Result<u64, ApiError> {
    u64::try_from(number.get()?).map_err(|_| odd())
}

impl KvAnswer {
    fn read(&self) -> Result<Kv, ApiError> {
        Ok(Kv {
            key: String::from_utf8(bytes(&self.key)?).map_err(|_| odd())?,
            value: bytes(&self.value)?,
            revision: unsigned(&self.mod_revision)?,
        })
    }
}

impl Api {
    pub const fn new(members: Vec<Member>, tls: Option<TlsFiles>) -> Self {
        Self {
            http: Https::new(members, tls),
        }
    }

    fn ask<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, ApiError> {
        let body = body.to_string();
        let post = Post {
            path,
            token: None,
            body: body.as_bytes(),
            patience: PATIENCE,
        };
        let answered = self.http.post(&post);
        let (status, body) = answered.map_err(|error| ApiError(error.to_string()))?;
        if status == StatusCode::OK {
            return serde_json::from_slice(&body).map_err(|_| odd());
        }
        // This member may have no leader, for example. Another member may have one.
        self.http.pass_over();
        let said = serde_json::from_slice::<ErrorAnswer>(&body).map_or_else(
            |_| String::from_utf8_lossy(&body).chars().take(200).collect(),
            |answer| answer.error,
        );
        Err(ApiError(format!("{status}: {said}")))
    }

    /// Runs a transaction. If an error is returned, the transaction may or may not have been
    /// executed.
    pub fn txn(&self, txn: &Txn) -> Result<Done, ApiError> {
        let body = json!({ "compare": txn.compare, "success": txn.success });
        let answer: TxnAnswer = self.ask("/v3/kv/txn", &body)?;
        let ranges = answer.responses.iter().filter_map(|op| {
            let range = op.response_range.as_ref()?;
            Some(range.kvs.iter().map(KvAnswer::read).collect())
        });
        Ok(Done {
            held: answer.succeeded,
            revision: answer.header.revision.as_ref().map_or(Ok(0), unsigned)?,
            ranges: ranges.collect::<Result<_, _>>()?,
        })
    }

    /// Requests an etcd lease of at least `ttl`, rounded up to whole seconds.
    pub fn grant(&self, ttl: Duration) -> Result<Grant, ApiError> {
        let seconds = ttl.as_millis().div_ceil(1000).max(1);
        let body = json!({ "TTL": seconds.to_string() });
        let answer: GrantAnswer = self.ask("/v3/lease/grant", &body)?;
        let id = answer.id.as_ref().map_or(Err(odd()), Number::get)?;
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
        let answer: TxnAnswer = serde_json::from_str(text).unwrap();
        assert!(answer.succeeded);
        let kv = answer.responses[0].response_range.as_ref().unwrap().kvs[0].read();
        let kv = kv.unwrap();
        assert_eq!((kv.key.as_str(), kv.revision), ("a/1", 7));
        assert_eq!(kv.value, b"{}");
        let empty = answer.responses[1].response_range.as_ref().unwrap();
        assert!(empty.kvs.is_empty());
        let answer: TxnAnswer = serde_json::from_str(r#"{"header":{}}"#).unwrap();
        assert!(!answer.succeeded && answer.responses.is_empty());
    }

    #[test]
    fn the_end_of_an_etcd_key_prefix_range_is_computed() {
        assert_eq!(end_of("a/"), b"a0");
    }
}
