//! Types of the daemon's API for lending RAM to other hosts and borrowing it: requests and reports.

use std::net::{IpAddr, Ipv4Addr};

use memfold_lend::blast::Blast;
use memfold_lend::distrust::Distrusted;
use memfold_lend::export::{Listen, TcpListen};
use memfold_lend::waits::Waits;
use memfold_lend::{Durability, Lease, LenderStatus, LenderView, Transport};
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request body of `POST /v1/lend`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LendRequest {
    /// Maximum amount of this host's RAM to lend, in bytes.
    pub max_bytes: u64,
    /// IP address on which the exports of lent RAM listen. With NBD, each export has TLS and a key
    /// of its own. Null: the exports are Unix sockets, for borrowers on this host.
    #[schema(value_type = Option<String>)]
    pub listen: Option<IpAddr>,
    /// IP address that borrowers get instead of `listen`, if a port forwarder is in between. Null:
    /// borrowers get `listen`.
    #[schema(value_type = Option<String>)]
    pub announce: Option<IpAddr>,
    /// First and last TCP port on which exports of lent RAM may listen; null: any free port.
    #[schema(value_type = Option<Vec<u16>>)]
    pub ports: Option<(u16, u16)>,
    /// Protocol by which borrowers access lent RAM. With iSCSI, a null `listen` means 127.0.0.1.
    #[serde(default)]
    pub transport: Transport,
    /// Whether the operator accepts that VMs' swapped memory is sent unencrypted (iSCSI to other
    /// hosts).
    #[serde(default)]
    pub cleartext: bool,
}

impl LendRequest {
    /// Returns the sockets on which the exports of lent RAM listen.
    ///
    /// # Errors
    /// A message if borrowers could not reach the exports, if the settings contradict each other,
    /// or if iSCSI would send memory to another host unencrypted without `cleartext`.
    pub fn listens(&self) -> Result<Listen, &'static str> {
        let is_iscsi = self.transport == Transport::Iscsi;
        if self.cleartext && !is_iscsi {
            return Err("NBD is encrypted over TCP; --cleartext is for --transport iscsi");
        }
        let own = is_iscsi.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let Some(ip) = self.listen.or(own) else {
            if self.announce.is_some() || self.ports.is_some() {
                return Err(
                    "exports on Unix sockets have neither address nor ports; pass --listen ADDRESS",
                );
            }
            return Ok(Listen::Unix);
        };
        if self.announce.unwrap_or(ip).is_unspecified() {
            return Err(
                "borrowers cannot connect to that address; pass an address that they can reach as --announce ADDRESS, or listen on it",
            );
        }
        let is_wrong = |(first, last)| first == 0 || first > last;
        if self.ports.is_some_and(is_wrong) {
            return Err("a range of ports is FIRST-LAST, and the first is not 0");
        }
        let stays = |ip: IpAddr| ip.is_loopback();
        if is_iscsi && !self.cleartext && !(stays(ip) && self.announce.is_none_or(stays)) {
            return Err(
                "iSCSI encrypts nothing: anyone on the path to the borrower can read and change what its VMs have swapped out. Lend by NBD (--transport nbd), or pass --cleartext if you trust that network",
            );
        }
        let tcp = TcpListen {
            ip,
            announce: self.announce,
            ports: self.ports,
        };
        let listen = if is_iscsi { Listen::Iscsi } else { Listen::Tcp };
        Ok(listen(tcp))
    }
}

/// Request body of `POST /v1/vms/{name}/borrow` and of `POST /v1/volumes/{group}/{name}/borrow`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BorrowRequest {
    /// Amount of lent RAM to borrow, in bytes. For a VM, any other size than that of its swap disk
    /// is refused; for a volume, less than its size. Null: the size of the swap disk or volume.
    pub bytes: Option<u64>,
    /// Protection of the swapped data against a lender's death: a copy on this host's disk, a copy
    /// at a second lender, or none.
    #[serde(default)]
    pub durability: Durability,
    /// Number of lenders over which the swap disk is striped, 1 to 8. Null: as few lenders as can
    /// hold the disk, or one if there is no copy on this host's disk.
    pub stripes: Option<u8>,
}

/// RAM that a VM, or a swap volume of this host, has borrowed from other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Borrowed {
    /// Name of the VM that borrows, or `VG/LV` for an LVM swap volume of the host.
    pub vm: String,
    /// Where the data of the swap disk is now.
    pub place: SwapPlace,
    /// Size of the swap disk, in bytes.
    pub bytes: u64,
    /// Protection of the swapped data against a lender's death; null: the disk is not on lent RAM.
    pub durability: Option<Durability>,
    /// Names of the hosts whose RAM holds the swap disk.
    pub lenders: Vec<String>,
    /// Number of lenders over which each copy of the swap disk is striped; null: the disk is not on
    /// lent RAM.
    pub stripes: Option<u8>,
    /// Time for which the guest has waited for its swap disk, since it first borrowed RAM; null:
    /// unknown, or the disk is not on lent RAM.
    pub waits: Option<Waits>,
    /// Whether the request moved the swap disk. In a list of loans, this is false.
    pub changed: bool,
    /// Duration of the request, in milliseconds. In a list of loans, this is 0.
    pub took_ms: u64,
}

impl Borrowed {
    /// Returns a text for people that says where the data of the swap disk is.
    #[must_use]
    pub fn where_it_is(&self) -> String {
        match self.place {
            SwapPlace::Lent => format!(
                "{} of {}{} ({})",
                ByteSize(self.bytes),
                self.lenders.join(" and "),
                match self.stripes {
                    Some(2..) => ", in stripes",
                    _ => "",
                },
                match self.durability {
                    Some(Durability::Disk) => "with a copy on this host's disk",
                    Some(Durability::Replica) => "one a copy of the other",
                    _ => "without a copy: programs of the guest die with the lender",
                }
            ),
            SwapPlace::Degraded => format!("{}, with one copy only", self.lenders.join(" and ")),
            SwapPlace::OnCopy => "this host's disk: its lender is gone".into(),
            SwapPlace::OnDisk => "this host's disk".into(),
            SwapPlace::Lost => "nowhere: lost with its lender".into(),
        }
    }
}

/// Response of `GET /v1/leases`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseReport {
    /// Name under which this host lends and borrows.
    pub host: String,
    /// Address of the registry in which this host looks for lenders and leases.
    pub registry: String,
    /// Why the registry of leases cannot be used now; lenders, leases and blast radius are then
    /// unknown. Null: the registry answers.
    pub registry_away: Option<String>,
    /// Status of this host as a lender; null: this host does not lend.
    #[schema(value_type = Option<Object>)]
    pub lending: Option<LenderStatus>,
    /// Current settings of lending, as a request that can be repeated with another `max_bytes`.
    /// Null: this host does not lend, or is recalling all its memory.
    pub lends_as: Option<LendRequest>,
    /// RAM that VMs and swap volumes of this host have borrowed.
    pub borrowed: Vec<Borrowed>,
    /// Names of VMs that swap to this host's disk although lent RAM was requested for them. The VMs
    /// borrow again when a lender has room.
    #[serde(default)]
    pub again: Vec<String>,
    /// All lenders that the registry knows.
    #[schema(value_type = Vec<Object>)]
    pub lenders: Vec<LenderView>,
    /// All leases that the registry knows.
    #[schema(value_type = Vec<Object>)]
    pub leases: Vec<Lease>,
    /// Effects of each lender's death (its blast radius): one entry for each lender.
    #[schema(value_type = Vec<Object>)]
    pub blast: Vec<Blast>,
    /// Lenders that have served wrong bytes to VMs of this host. This host borrows nothing from
    /// them now.
    #[schema(value_type = Vec<Object>)]
    pub distrusted: Vec<Distrusted>,
    /// Number of times that lenders served wrong bytes to VMs of this host since the daemon's
    /// start. No VM received these bytes.
    pub lies: u64,
}

/// Status of a VM's swap disk. The disk's contents do not count as guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSwap {
    /// Size of the swap disk, in bytes.
    pub bytes: u64,
    /// Where the data of the swap disk is now.
    pub place: SwapPlace,
    /// Protection of the swapped data against a lender's death; null: the disk is not on lent RAM.
    pub durability: Option<Durability>,
    /// Parts of the swap disk that lenders hold, one for each lender: all parts of the first copy,
    /// then those of the second.
    pub lent: Vec<LentPart>,
}

/// Part of a VM's swap disk that one lender holds in its RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LentPart {
    /// Name of the lending host.
    pub lender: String,
    /// Bytes of the swap disk that this lender holds; rounded up if the disk is striped over
    /// several lenders.
    pub bytes: u64,
    /// Number of the swap disk's copy to which this part belongs: 0 or 1.
    pub copy: usize,
}

/// Where the data of a VM's swap disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SwapPlace {
    /// The swap disk's data is on lent RAM.
    Lent,
    /// The swap disk's data is on lent RAM, with fewer copies than requested.
    Degraded,
    /// The swap disk's data is on this host's disk although lent RAM was requested, because the
    /// lender died or recalled its RAM.
    OnCopy,
    /// The swap disk's data is on this host's disk, and no RAM is borrowed.
    OnDisk,
    /// The swap disk's data is lost with its lender.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_option_cleartext_lending_over_iscsi_on_a_non_loopback_address_is_refused() {
        let request = |words: &str| -> LendRequest {
            serde_json::from_str(&format!(r#"{{"max_bytes": 1, {words}}}"#)).unwrap()
        };
        let iscsi = r#""transport": "iscsi""#;
        let own = request(iscsi).listens().unwrap();
        assert_eq!(own.to_string(), "127.0.0.1, by iSCSI, not encrypted");
        for (words, agreed) in [
            (r#""listen": "127.0.0.1""#, true),
            (r#""listen": "::1""#, true),
            (r#""listen": "10.0.0.1""#, false),
            (r#""listen": "127.0.0.1", "announce": "10.0.0.1""#, false),
        ] {
            let words = format!("{iscsi}, {words}");
            let said = request(&words).listens();
            assert_eq!(said.is_ok(), agreed, "{words}: {said:?}");
            let words = format!(r#"{words}, "cleartext": true"#);
            request(&words).listens().unwrap();
        }
        request(r#""listen": "10.0.0.1", "cleartext": true"#)
            .listens()
            .unwrap_err();
    }
}
