//! Starts a real S3 server for tests of snapshots in object stores: s3rver, which `make setup`
//! installs with the packages of `web`.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::wait_until;

/// An S3 server on 127.0.0.1 with an empty bucket `memfold`. Access key and secret are `S3RVER`.
/// Dropping the value ends the server.
#[derive(Debug)]
pub struct S3Server {
    child: Child,
    /// TCP port of the S3 server.
    pub port: u16,
}

impl S3Server {
    /// Starts an S3 server that keeps its objects in `directory`. If the server is not installed,
    /// the error says so.
    ///
    /// # Panics
    ///
    /// If the server does not answer within 30 s.
    pub fn start(directory: &Path) -> Result<Self, &'static str> {
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web/node_modules/s3rver");
        if !package.exists() {
            return Err("no web/node_modules/s3rver; run 'make setup'");
        }
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = free.local_addr().expect("the port's number").port();
        drop(free);
        let child = Command::new("node")
            .arg(package.join("bin/s3rver.js"))
            .args(["--silent", "--address", "127.0.0.1", "--port"])
            .arg(port.to_string())
            .arg("--directory")
            .arg(directory)
            .args(["--configure-bucket", "memfold"])
            .stdin(Stdio::null())
            .spawn()
            .map_err(|_| "no node; run 'make setup'")?;
        let server = Self { child, port };
        let answers = || TcpStream::connect(("127.0.0.1", port)).is_ok();
        wait_until("the S3 server answers", Duration::from_secs(30), answers);
        Ok(server)
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
