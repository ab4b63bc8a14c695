//! Signs the descriptions of snapshots in object stores, and checks these signatures. A signature
//! is Ed25519 over all bytes of `snapshots/NAME.json`.
//!
//! Keys are PEM files as OpenSSL writes them: `openssl genpkey -algorithm ed25519` makes a private
//! key, and `openssl pkey -pubout` extracts its public key.

use openssl::pkey::{Id, PKey};
use openssl::sign::{Signer, Verifier};

use super::error::TransferError;

/// Length in bytes of a signature.
pub(crate) const BYTES: u64 = 64;

fn bad(error: impl std::fmt::Display) -> TransferError {
    TransferError::Key(error.to_string())
}

fn check(id: Id) -> Result<(), TransferError> {
    if id == Id::ED25519 {
        return Ok(());
    }
    Err(bad(
        "it is not an Ed25519 key; 'openssl genpkey -algorithm ed25519' makes one",
    ))
}

/// Signs bytes with a private key in PEM form.
pub(crate) fn sign(bytes: &[u8], key: &str) -> Result<Vec<u8>, TransferError> {
    let key = PKey::private_key_from_pem(key.as_bytes()).map_err(bad)?;
    check(key.id())?;
    let mut signer = Signer::new_without_digest(&key).map_err(bad)?;
    signer.sign_oneshot_to_vec(bytes).map_err(bad)
}

/// Returns whether a signature of bytes was made with the private key of this public key, in PEM
/// form.
pub(crate) fn is_right(bytes: &[u8], signature: &[u8], key: &str) -> Result<bool, TransferError> {
    let key = PKey::public_key_from_pem(key.as_bytes()).map_err(bad)?;
    check(key.id())?;
    let mut verifier = Verifier::new_without_digest(&key).map_err(bad)?;
    // A signature of the wrong length is an error of OpenSSL's, and wrong all the same.
    Ok(verifier.verify_oneshot(signature, bytes).unwrap_or(false))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a private and a public key.
    pub fn keys() -> (String, String) {
        let key = PKey::generate_ed25519().unwrap();
        let text = |pem: Vec<u8>| String::from_utf8(pem).unwrap();
        (
            text(key.private_key_to_pem_pkcs8().unwrap()),
            text(key.public_key_to_pem().unwrap()),
        )
    }

    #[test]
    fn a_signature_is_accepted_only_for_the_signed_bytes_and_the_key_that_signed_them() {
        let ((private, public), (other, _)) = (keys(), keys());
        let signature = sign(b"text", &private).unwrap();
        assert!(is_right(b"text", &signature, &public).unwrap());
        assert!(!is_right(b"texT", &signature, &public).unwrap());
        assert!(!is_right(b"text", &signature[1..], &public).unwrap());
        assert!(!is_right(b"text", &sign(b"text", &other).unwrap(), &public).unwrap());
        assert!(sign(b"text", &public).is_err());
        assert!(is_right(b"text", &signature, "no key").is_err());
    }
}
