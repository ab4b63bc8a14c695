//! Configures tgtd, the iSCSI target that serves lent RAM, through its Unix socket. The requests
//! have the format of `tgtadm` (tgt's `usr/tgtadm.h`, unchanged since 2012). `tgtadm` itself is not
//! used: it takes passwords on its command line, where all users of the host can read them.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memfold_host::socket;

use super::{LUN, TARGET, target_name};
use crate::endpoint::Key;

/// Size of `struct tgtadm_req`, in bytes.
const REQUEST: usize = 120;
/// Size of the field `lld` of `struct tgtadm_req`, in bytes.
const DRIVER: usize = 64;
/// Maximum size of tgtd's answer in bytes.
const MOST: u64 = 1 << 20;
/// Time limit for tgtd's answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Control port of each tgtd (`--control-port`). All can have the same port, because each tgtd has
/// its own socket.
pub const CONTROL: &str = "1";

// Operations: `enum tgtadm_op`.
const NEW: u32 = 0;
const DELETE: u32 = 1;
const SHOW: u32 = 2;
const BIND: u32 = 3;
const UPDATE: u32 = 5;
// Modes: `enum tgtadm_mode`.
const M_TARGET: u32 = 1;
const M_DEVICE: u32 = 2;
const M_PORTAL: u32 = 3;
const M_CONNECTION: u32 = 6;
const M_ACCOUNT: u32 = 7;

/// The control socket of a tgtd, through which memfold sends requests.
#[derive(Debug)]
pub struct Tgt {
    pub(super) socket: PathBuf,
}

impl Tgt {
    /// Returns the control socket of the tgtd that was started with `TGT_IPC_SOCKET` = `named`.
    #[must_use]
    pub fn at(named: &Path) -> Self {
        let mut socket = named.as_os_str().to_owned();
        socket.push(format!(".{CONTROL}"));
        Self {
            socket: socket.into(),
        }
    }

    /// Returns whether tgtd accepts connections on its control socket.
    #[must_use]
    pub fn is_there(&self) -> bool {
        socket::connect(&self.socket, PATIENCE).is_ok()
    }

    /// Creates tgtd's only target, which serves `file`. Initiators need the key and must come from
    /// `address` (`ALL`: from any address). `serial` distinguishes the disk from those of other
    /// tgtds.
    pub fn set_up(&self, key: &Key, file: &Path, address: &str, serial: &str) -> io::Result<()> {
        let name = target_name(key);
        self.order(NEW, M_TARGET, 0, &format!("targetname={name}"))?;
        self.order(NEW, M_DEVICE, LUN, &format!("path={}", file.display()))?;
        // Without these values, multipath(8) takes all units of all tgtds for the same disk.
        let identity = format!(
            "vendor_id=memfold,product_id=lent RAM,scsi_id=memfold-{serial},scsi_sn={serial}"
        );
        self.order(UPDATE, M_DEVICE, LUN, &identity)?;
        let account = format!("user={},password={}", key.identity, key.hex);
        self.order(NEW, M_ACCOUNT, 0, &account)?;
        self.order(BIND, M_ACCOUNT, 0, &format!("user={}", key.identity))?;
        // This step is the last one, so that no initiator gets in before CHAP is required.
        self.order(BIND, M_TARGET, 0, &format!("initiator-address={address}"))?;
        Ok(())
    }

    /// Makes tgtd stop listening at the address `portal`. An existing session continues.
    pub fn close(&self, portal: SocketAddr) -> io::Result<()> {
        self.order(DELETE, M_PORTAL, 0, &format!("portal={portal}"))
            .map(drop)
    }

    /// Returns whether an initiator is logged in to tgtd.
    pub fn has_session(&self) -> io::Result<bool> {
        let said = self.order(SHOW, M_CONNECTION, 0, "")?;
        Ok(said.contains("Session:"))
    }

    fn order(&self, operation: u32, mode: u32, lun: u64, words: &str) -> io::Result<String> {
        let mut stream = socket::connect(&self.socket, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(&request(operation, mode, lun, words))?;
        let mut head = [[0; 4]; 2];
        stream.read_exact(head.as_flattened_mut())?;
        let [error, length] = head.map(u32::from_ne_bytes);
        if error != 0 {
            // The message leaves out the request's words, which may contain a secret.
            return Err(io::Error::other(format!(
                "tgtd refuses order {operation} in mode {mode} with error {error} (tgt's usr/tgtadm_error.h)"
            )));
        }
        let mut said = String::new();
        let rest = u64::from(length).saturating_sub(8).min(MOST);
        stream.take(rest).read_to_string(&mut said)?;
        Ok(said)
    }
}

/// Returns a `struct tgtadm_req`, followed by the words and a zero byte.
fn request(operation: u32, mode: u32, lun: u64, words: &str) -> Vec<u8> {
    let end: &[u8] = if words.is_empty() { &[] } else { &[0] };
    let length = REQUEST + words.len() + end.len();
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let mut bytes = Vec::new();
    bytes.extend(mode.to_ne_bytes());
    bytes.extend(operation.to_ne_bytes());
    let mut driver = [0; DRIVER];
    driver[..5].copy_from_slice(b"iscsi");
    bytes.extend(driver);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(TARGET.to_ne_bytes());
    bytes.extend(0_u64.to_ne_bytes()); // sid
    bytes.extend(lun.to_ne_bytes());
    bytes.resize(REQUEST, 0); // cid, host_no, device_type, ac_dir, pack, force
    [&bytes, words.as_bytes(), end].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_to_tgtd_has_the_binary_layout_of_tgtadm() {
        let bytes = request(NEW, M_DEVICE, 7, "path=/x");
        assert_eq!(bytes.len(), REQUEST + 8);
        assert_eq!(bytes[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[8..14], b"iscsi\0");
        assert_eq!(bytes[72..76], 128_u32.to_ne_bytes());
        assert_eq!(bytes[76..80], 1_i32.to_ne_bytes());
        assert_eq!(bytes[88..96], 7_u64.to_ne_bytes());
        assert_eq!(&bytes[REQUEST..], b"path=/x\0");
        assert_eq!(request(SHOW, M_CONNECTION, 0, "").len(), REQUEST);
    }
}
