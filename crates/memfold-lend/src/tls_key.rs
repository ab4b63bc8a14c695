//! Reads this host's private key for TLS to a lease registry, from a PEM file.

use std::path::Path;

use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::{Error, PemObject};

/// Reads the first private key in a PEM file. An error says why the key cannot be used.
pub fn read(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| match error {
        Error::NoItemsFound if is_encrypted(path) => format!(
            "the key is encrypted, and memfold cannot ask for its passphrase; write the key without one: openssl pkey -in {} -out NEW.key",
            path.display()
        ),
        Error::NoItemsFound => "the file contains no private key (PEM)".into(),
        error => error.to_string(),
    })
}

fn is_encrypted(path: &Path) -> bool {
    std::fs::read_to_string(path).is_ok_and(|text| text.contains("ENCRYPTED"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_a_tls_key_is_encrypted_or_missing_the_error_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let why = |text: &str| {
            let file = directory.path().join("key");
            std::fs::write(&file, text).unwrap();
            read(&file).unwrap_err()
        };
        let pem = |label: &str| format!("-----BEGIN {label}-----\nMAA=\n-----END {label}-----\n");
        assert!(why(&pem("ENCRYPTED PRIVATE KEY")).contains("openssl pkey -in"));
        assert!(why(&pem("CERTIFICATE")).contains("no private key"));
        assert!(why("").contains("no private key"));
        let missing = read(&directory.path().join("missing")).unwrap_err();
        assert!(missing.contains("No such file"), "{missing}");
    }
}
