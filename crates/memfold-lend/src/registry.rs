//! Who lends what to whom: the words, and what a registry has to keep.
//!
//! ```text
//!   lender     offer ----------.                        .-- publish ---- ended
//!                               v                       |                 ^
//!   borrower                  take ---> [taken] ---> [exported] ---> [released]
//!                                          `------------release-----------^
//! ```
//! A lease's bytes count as lent from [`take`](Registry::take) until its *lender* says [`ended`](Registry::ended): only the lender knows
//! that nobody can reach them any more. A deadline that passes frees nothing by itself; it tells the lender to end the export. So no
//! byte is handed out twice, whatever dies or is cut off.
//!
//! Each method is one transaction, that an etcd server could carry out as well: it compares one lender's record and one lease, and
//! changes those.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

/// Most bytes of one offer or lease: 1 PiB.
const MAX_BYTES: u64 = 1 << 50;

/// Longest time until a deadline.
pub const MAX_TTL: Duration = Duration::from_secs(3600);

/// How long a borrower has to give memory back that its lender needs.
pub const GIVE_BACK: Duration = Duration::from_secs(10);

/// What a borrower copies of a disk in a second at least, while its guest swaps.
pub const COPIED_A_SECOND: u64 = 20 << 20;

/// Longest name of a host.
pub(super) const MAX_NAME: usize = 64;

/// Why a registry refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum RegistryError {
    /// A value that makes no sense.
    #[error("{field}: {why}")]
    Value {
        /// Which.
        field: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// Nobody has so much to spare.
    #[error(
        "no lender has {wanted} to spare; {} is the most that one of {lenders} offers to '{borrower}' now. Lend more there (memfold lend --max), or use a smaller swap disk",
        ByteSize(*largest)
    )]
    NothingToSpare {
        /// What was asked for.
        wanted: ByteSize,
        /// Who asked.
        borrower: String,
        /// Most bytes that one lender has free.
        largest: u64,
        /// Lenders looked at.
        lenders: usize,
    },
    /// No such lease, or it isn't theirs who ask.
    #[error(
        "'{who}' has no lease {id}: its lender has ended it, or it never was; 'memfold leases' shows those there are"
    )]
    NoLease {
        /// Its number.
        id: LeaseId,
        /// Who asked.
        who: String,
    },
    /// Another daemon lends under this name.
    #[error(
        "another daemon lends as '{lender}' since this one began; give each host a name of its own (memfold serve --host)"
    )]
    Superseded {
        /// The name.
        lender: String,
    },
    /// What was asked doesn't fit what the lease is now.
    #[error("lease {id} is {state} and can't be {wanted}")]
    State {
        /// Its number.
        id: LeaseId,
        /// What it is.
        state: LeaseState,
        /// What it was to become.
        wanted: String,
    },
    /// The registry can't be reached or used now.
    #[error("the registry at {place} cannot be used: {why}")]
    Unusable {
        /// Where it is.
        place: String,
        /// Why.
        why: String,
    },
}

impl RegistryError {
    /// Whether it may be otherwise soon, though nothing is changed.
    #[must_use]
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::Unusable { .. })
    }
}

/// A lease's number. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which run of a lender's daemon: exports of an older one have ended with it. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

/// A lender's daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderId {
    /// Name of its host.
    pub host: String,
    /// Its run.
    pub incarnation: Incarnation,
}

/// What a lender has for others, lent or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Who lends.
    pub lender: LenderId,
    /// Bytes in all.
    pub bytes: u64,
}

/// What a borrower wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Name of the host that borrows. It is never given its own RAM.
    pub borrower: String,
    /// The VM that gets it.
    pub vm: String,
    /// Bytes, of one lender.
    pub bytes: u64,
    /// What keeps them if the lender dies.
    #[serde(default)]
    pub durability: Durability,
    /// Lenders that it must not be of: those that hold the other copy.
    #[serde(default)]
    pub apart_from: Vec<String>,
}

/// What keeps the bytes of a swap disk on lent RAM if its lender dies.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    clap::ValueEnum,
    utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// A copy on the borrower's disk, written with each write; reads come from lent RAM.
    #[default]
    Disk,
    /// A copy in the RAM of another lender.
    Replica,
    /// Nothing: what lies there is lost, and with it programs of the guest.
    None,
}

impl Durability {
    /// In one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Replica => "replica",
            Self::None => "none",
        }
    }

    /// How long a borrower has to give back. Where the lent bytes are the only ones, or one of two, it has to copy them first.
    #[must_use]
    pub fn time_to_give_back(self, bytes: u64) -> Duration {
        let copying = self.time_to_copy(bytes);
        GIVE_BACK.saturating_add(copying).min(MAX_TTL)
    }

    /// How long it takes to copy what lies there to the borrower's disk, before it can be given back.
    #[must_use]
    pub const fn time_to_copy(self, bytes: u64) -> Duration {
        match self {
            Self::Disk => Duration::ZERO,
            Self::Replica | Self::None => Duration::from_secs(bytes / COPIED_A_SECOND),
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Disk, Self::Replica, Self::None]
            .into_iter()
            .find(|durability| durability.name() == name)
    }
}

/// What a lease is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// Its bytes are set aside; the lender is to export them.
    Taken,
    /// They can be reached.
    Exported,
    /// The borrower needs them no more; the lender is to end the export.
    Released,
}

impl LeaseState {
    /// In one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Exported => "exported",
            Self::Released => "released",
        }
    }

    /// The state of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Taken, Self::Exported, Self::Released]
            .into_iter()
            .find(|state| state.name() == name)
    }
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// RAM lent by one host to one VM of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// Who lends.
    pub lender: LenderId,
    /// Host that borrows.
    pub borrower: String,
    /// Its VM.
    pub vm: String,
    /// Bytes.
    pub bytes: u64,
    /// What keeps them if the lender dies.
    pub durability: Durability,
    /// What it is.
    pub state: LeaseState,
    /// Time left until the lender ends it, unless the borrower renews it; 0: it is over.
    pub left_ms: u64,
    /// Time left until the lender takes it back, if it needs it; 0: it does now.
    pub recall_ms: Option<u64>,
}

impl Lease {
    /// What a lender that needs it back within a time can have: who has to copy it first has the time for that.
    pub(super) fn within(&self, within: Duration) -> Duration {
        within.max(self.durability.time_to_copy(self.bytes).min(MAX_TTL))
    }
}

/// What an export speaks.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    clap::ValueEnum,
    utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// NBD: encrypted over TCP.
    #[default]
    Nbd,
    /// iSCSI: not encrypted.
    Iscsi,
}

impl Transport {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's
    fn is_nbd(&self) -> bool {
        *self == Self::Nbd
    }
}

/// How a lease's bytes are reached: an export of its own.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Where.
    pub address: Address,
    /// What proves that one may, over TCP.
    pub key: Option<Key>,
    /// What is spoken there.
    #[serde(default, skip_serializing_if = "Transport::is_nbd")]
    pub transport: Transport,
}

// A key must not get into a log.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.address)
    }
}

/// Where an export listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Address {
    /// A Unix socket: lender and borrower share a host.
    Unix(PathBuf),
    /// TCP, with TLS and a key shared beforehand.
    Tcp {
        /// IP address.
        ip: std::net::IpAddr,
        /// Port.
        port: u16,
    },
}

/// A key shared beforehand (TLS-PSK, RFC 4279).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Whose it is.
    pub identity: String,
    /// 32 bytes in hexadecimal digits.
    pub hex: String,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key of {}", self.identity)
    }
}

/// A lender as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderView {
    /// Who lends.
    pub lender: LenderId,
    /// Bytes that it has for others, lent or not.
    pub offered_bytes: u64,
    /// Bytes of all its leases that haven't ended.
    pub lent_bytes: u64,
    /// Time since it was last heard of.
    pub silent_ms: u64,
    /// Time left until nothing more is taken from it, unless it is heard of again; 0: that is so now.
    pub left_ms: u64,
}

/// All of it, at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picture {
    /// Lenders by name.
    pub lenders: Vec<LenderView>,
    /// Leases by number.
    pub leases: Vec<Lease>,
}

/// Keeps leases. Every implementation passes `registry_tests::suite`.
pub trait Registry: Send + Sync {
    /// Says what a lender has, for `ttl`. A later incarnation takes the name over, and leases of the one before have ended.
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<(), RegistryError>;

    /// A lender lends no more; its leases stay until they are ended.
    fn withdraw(&self, lender: &LenderId) -> Result<(), RegistryError>;

    /// Sets bytes of one lender aside, of the one that has the most free.
    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease, RegistryError>;

    /// The lender has exported a lease that was taken.
    fn publish(
        &self,
        id: LeaseId,
        lender: &LenderId,
        endpoint: &Endpoint,
    ) -> Result<(), RegistryError>;

    /// How the borrower reaches a lease; `None` until it is exported.
    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>, RegistryError>;

    /// The borrower still needs it, for `ttl` from now. Whether it was over and is so no more doesn't matter, as long as it hasn't ended.
    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease, RegistryError>;

    /// The copy that the borrower had on its disk is none any more: the lent bytes are the only ones from now on ([`Durability::None`]). If
    /// they are asked for already, there is time to copy them now, once. Fine if it is known.
    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease, RegistryError>;

    /// The lender needs it back `within` a time; a deadline that was set before stays if it is earlier. Who has to copy it first has the time for
    /// that, whatever the lender says: it may not know yet.
    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration)
    -> Result<(), RegistryError>;

    /// The borrower needs it no more. Fine if it has ended already.
    fn release(&self, id: LeaseId, borrower: &str) -> Result<(), RegistryError>;

    /// Its bytes can be reached no more: the lender has them back. Fine if it has ended already.
    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<(), RegistryError>;

    /// Everything, without keys.
    fn picture(&self) -> Result<Picture, RegistryError>;
}

impl fmt::Debug for dyn Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a registry")
    }
}

fn value(field: &str, why: impl Into<String>) -> RegistryError {
    RegistryError::Value {
        field: field.into(),
        why: why.into(),
    }
}

/// Checks the name of a host or VM: it comes from another host, and gets into paths and logs.
pub fn check_name(field: &str, name: &str) -> Result<(), RegistryError> {
    let letter = |c: char| c.is_ascii_alphanumeric();
    let good = (1..=MAX_NAME).contains(&name.len())
        && name.starts_with(letter)
        && name.chars().all(|c| letter(c) || "._-".contains(c));
    if good {
        return Ok(());
    }
    Err(value(
        field,
        "give 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
    ))
}

/// Checks a number of bytes.
pub fn check_bytes(bytes: u64, least: u64) -> Result<(), RegistryError> {
    if (least..=MAX_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(value(
        "bytes",
        format!("{bytes} is not {least} to {MAX_BYTES}"),
    ))
}

/// Checks a time until a deadline.
pub fn check_ttl(ttl: Duration) -> Result<u64, RegistryError> {
    if ttl <= MAX_TTL {
        return Ok(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
    }
    Err(value("ttl", format!("longer than {} s", MAX_TTL.as_secs())))
}

impl Want {
    /// Checks what came from elsewhere.
    pub fn check(&self) -> Result<(), RegistryError> {
        check_name("borrower", &self.borrower)?;
        check_name("vm", &self.vm)?;
        check_bytes(self.bytes, 1)
    }
}

impl Endpoint {
    /// Checks what a lender of another host may have written: a socket's path there is one here.
    pub fn check_of_another_host(&self) -> Result<(), RegistryError> {
        self.check()?;
        match self.address {
            Address::Tcp { .. } => Ok(()),
            Address::Unix(_) => Err(value(
                "address",
                "a Unix socket is for borrowers on the lender's own host; lend there with 'memfold lend --listen ADDRESS'",
            )),
        }
    }

    /// Checks what came from elsewhere: it gets into QEMU's options and into a file of keys.
    pub fn check(&self) -> Result<(), RegistryError> {
        match (&self.address, &self.key) {
            (Address::Unix(_), _) if self.transport == Transport::Iscsi => {
                return Err(value("address", "iSCSI needs an IP address"));
            }
            (Address::Unix(path), _) => {
                let length = path.as_os_str().len();
                if !path.is_absolute()
                    || path.to_str().is_none()
                    || length > memfold_vm::directory::MAX_SOCKET_PATH
                {
                    return Err(value(
                        "address",
                        "a Unix socket needs an absolute path of UTF-8, not longer than the kernel takes",
                    ));
                }
            }
            (Address::Tcp { port: 0, .. }, _) => return Err(value("address", "port 0 is none")),
            (Address::Tcp { .. }, None) => {
                return Err(value("key", "an export over TCP needs one"));
            }
            (Address::Tcp { .. }, Some(_)) => {}
        }
        if let Some(key) = &self.key {
            check_name("key", &key.identity)?;
            if key.hex.len() != 64 || !key.hex.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(value("key", "32 bytes in hexadecimal digits are wanted"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_endpoints_from_elsewhere_are_checked() {
        for bad in ["", "-a", "a/b", "a b", "a\n", &"a".repeat(65)] {
            assert!(check_name("host", bad).is_err(), "{bad}");
        }
        check_name("host", "Node-1.example").unwrap();
        let tcp = |port, key| Endpoint {
            address: Address::Tcp {
                ip: [127, 0, 0, 1].into(),
                port,
            },
            key,
            transport: Transport::Nbd,
        };
        let key = |identity: &str, hex: String| {
            Some(Key {
                identity: identity.into(),
                hex,
            })
        };
        tcp(1, key("a", "0f".repeat(32))).check().unwrap();
        let refused = |endpoint: Endpoint, why: &str| {
            let error = endpoint.check().unwrap_err().to_string();
            assert!(error.contains(why), "{endpoint:?}: {error}");
        };
        for (bad, why) in [
            (tcp(1, None), "over TCP needs one"),
            (tcp(0, key("a", "0f".repeat(32))), "port 0"),
            (tcp(1, key("a:b", "0f".repeat(32))), "key"),
            (tcp(1, key("a", "0f".repeat(31))), "32 bytes in hexadecimal"),
            (tcp(1, key("a", "\n".repeat(64))), "32 bytes in hexadecimal"),
        ] {
            refused(bad, why);
        }
        let unix = |path: &str| Endpoint {
            address: Address::Unix(path.into()),
            key: None,
            transport: Transport::Nbd,
        };
        unix("/run/x").check().unwrap();
        unix("/run/x").check_of_another_host().unwrap_err();
        let tls = tcp(1, key("a", "0f".repeat(32)));
        tls.check_of_another_host().unwrap();
        let mut iscsi = unix("/run/x");
        iscsi.transport = Transport::Iscsi;
        refused(iscsi, "iSCSI needs an IP address");
        // What a daemon of before has written.
        let text = serde_json::to_string(&unix("/run/x")).unwrap();
        assert!(!text.contains("transport"), "{text}");
        assert_eq!(
            serde_json::from_str::<Endpoint>(&text).unwrap(),
            unix("/run/x")
        );
        refused(unix("run/x"), "absolute path");
        refused(unix(&format!("/{}", "x".repeat(200))), "not longer than");
    }

    #[test]
    fn keys_are_not_shown() {
        let key = Key {
            identity: "a".into(),
            hex: "0123456789abcdef".repeat(4),
        };
        let endpoint = Endpoint {
            address: Address::Unix("/x".into()),
            key: Some(key.clone()),
            transport: Transport::Nbd,
        };
        assert!(!format!("{endpoint:?} {key:?}").contains("0123"));
    }
}
