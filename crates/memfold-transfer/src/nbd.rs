//! A read-only NBD server for disks that are still being fetched. QEMU reads the files of a disk's
//! chain as exports, and waits until the bytes are there.
//!
//! ```text
//!   client                                   server
//!   connects                                 NBDMAGIC IHAVEOPT flags
//!   flags                                    (16 bits both)
//!   IHAVEOPT option length data              option reply ...     GO, EXPORT_NAME, ABORT, others: not supported
//!   request: magic type handle offset length reply: magic error handle data
//! ```
//! Source: the protocol's description, `doc/proto.md` in the repository of NetworkBlockDevice/nbd.
//! Only fixed newstyle negotiation and simple replies are spoken. All numbers are big-endian.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::time::Duration;

use memfold_sys::descriptor::wait_readable;

/// Files that a server exports under their names.
pub trait Exports: Send + Sync + 'static {
    /// Returns the length in bytes of the export with this name.
    fn bytes(&self, name: &str) -> Option<u64>;

    /// Reads bytes of an export, and waits until they are there.
    fn read(&self, name: &str, at: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// Most connections at once. QEMU has one for each file of a disk's chain, and a client may keep 32
/// MiB of the daemon's memory.
pub(super) const MOST_CLIENTS: usize = 64;

/// How often the server looks whether it is still needed.
const LOOK: Duration = Duration::from_secs(1);

/// Longest option of a client: a name of at most 4096 bytes, and what stands beside it.
const LONGEST_OPTION: usize = 8192;

/// Longest read, QEMU's own limit (`NBD_MAX_BUFFER_SIZE`).
const LONGEST_READ: usize = 32 << 20;

/// Length of the buffer that a connection keeps between reads.
const SHORT_READ: usize = 1 << 20;

const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// `NBD_FLAG_FIXED_NEWSTYLE`, `NBD_FLAG_NO_ZEROES`.
const HANDSHAKE_FLAGS: u16 = 1 | 2;
/// `NBD_FLAG_HAS_FLAGS`, `NBD_FLAG_READ_ONLY`.
const EXPORT_FLAGS: u16 = 1 | 2;
const NO_ZEROES: u32 = 2;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;

const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = 1 << 31 | 1;
const REPLY_UNKNOWN: u32 = 1 << 31 | 6;

const COMMAND_READ: u16 = 0;
const COMMAND_DISCONNECT: u16 = 2;
const COMMAND_FLUSH: u16 = 3;

const EIO: u32 = 5;
const EINVAL: u32 = 22;

/// Serves clients, each on a thread, as long as `is_needed` returns true. Then their connections
/// are ended. `vm`: name of the VM whose QEMU connects.
pub fn serve(
    vm: &str,
    listener: &UnixListener,
    exports: &Arc<dyn Exports>,
    is_needed: impl Fn() -> bool,
) -> io::Result<()> {
    let (mut clients, mut is_told) = (Vec::<Weak<UnixStream>>::new(), false);
    while is_needed() {
        if !wait_readable(listener, LOOK)? {
            continue;
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                // For example, too many files are open: that passes, and the VM needs its disks.
                tracing::warn!(%error, "cannot accept a connection for a disk that is being fetched; retrying");
                std::thread::sleep(LOOK);
                continue;
            }
        };
        clients.retain(|client| client.strong_count() > 0);
        if clients.len() >= MOST_CLIENTS {
            if !is_told {
                tracing::warn!(
                    vm,
                    "a VM has too many connections for disks that are being fetched, further ones are refused; find out whether its guest controls its QEMU"
                );
            }
            is_told = true;
            continue;
        }
        let stream = Arc::new(stream);
        clients.push(Arc::downgrade(&stream));
        let exports = Arc::clone(exports);
        let work = move || {
            // A client that breaks the protocol loses only its connection.
            if let Err(error) = client(&mut &*stream, &*exports) {
                tracing::debug!(%error, "connection to a disk that is being fetched ended");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("nbd".into()).spawn(work) {
            // The client loses its connection.
            tracing::warn!(%error, "cannot start a thread for a disk that is being fetched");
        }
    }
    for client in clients.iter().filter_map(Weak::upgrade) {
        // This fails if the client has just gone.
        let _ = client.shutdown(Shutdown::Both);
    }
    Ok(())
}

/// Serves one client until it goes away.
///
/// # Errors
///
/// Fails if the client violates the protocol, or if the connection ends within a message.
pub fn client(stream: &mut (impl Read + Write), exports: &dyn Exports) -> io::Result<()> {
    let mut greeting = Vec::new();
    greeting.extend(MAGIC.to_be_bytes());
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend(HANDSHAKE_FLAGS.to_be_bytes());
    stream.write_all(&greeting)?;
    let flags = u32::from_be_bytes(read_array(stream)?);
    let Some((name, bytes)) = negotiate(stream, exports, flags & NO_ZEROES != 0)? else {
        return Ok(());
    };
    let mut buffer = Vec::new();
    loop {
        if u32::from_be_bytes(read_array(stream)?) != REQUEST_MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let _flags: [u8; 2] = read_array(stream)?;
        let command = u16::from_be_bytes(read_array(stream)?);
        let handle: [u8; 8] = read_array(stream)?;
        let at = u64::from_be_bytes(read_array(stream)?);
        let length = u32::from_be_bytes(read_array(stream)?) as usize;
        let (error, length) = match command {
            COMMAND_DISCONNECT => return Ok(()),
            COMMAND_READ => {
                let end = at.checked_add(length as u64);
                if length > LONGEST_READ || end.is_none_or(|end| end > bytes) {
                    (EINVAL, 0)
                } else {
                    buffer.resize(length, 0);
                    match exports.read(&name, at, &mut buffer) {
                        Ok(()) => (0, length),
                        Err(_) => (EIO, 0),
                    }
                }
            }
            COMMAND_FLUSH => (0, 0),
            // What would change the export has data behind the request, which would be taken for
            // requests.
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let mut reply = Vec::with_capacity(16);
        reply.extend(REPLY_MAGIC.to_be_bytes());
        reply.extend(error.to_be_bytes());
        reply.extend(handle);
        stream.write_all(&reply)?;
        stream.write_all(&buffer[..length])?;
        // A client that reads much once does not keep as much memory.
        buffer.truncate(0);
        buffer.shrink_to(SHORT_READ);
    }
}

/// Answers options until the client has chosen an export. Returns its name and length; `None` if
/// the client goes away.
fn negotiate(
    stream: &mut (impl Read + Write),
    exports: &dyn Exports,
    is_short: bool,
) -> io::Result<Option<(String, u64)>> {
    loop {
        if u64::from_be_bytes(read_array(stream)?) != OPTION_MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let option = u32::from_be_bytes(read_array(stream)?);
        let length = u32::from_be_bytes(read_array(stream)?) as usize;
        if length > LONGEST_OPTION {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut data = vec![0; length];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut reply = Vec::new();
            reply.extend(OPTION_REPLY_MAGIC.to_be_bytes());
            reply.extend(option.to_be_bytes());
            reply.extend(kind.to_be_bytes());
            reply.extend(u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
            reply.extend(data);
            stream.write_all(&reply)
        };
        let found = |name: &[u8]| {
            let name = std::str::from_utf8(name).ok()?;
            Some((name.to_owned(), exports.bytes(name)?))
        };
        match option {
            OPTION_ABORT => {
                reply(REPLY_ACK, &[])?;
                return Ok(None);
            }
            OPTION_EXPORT_NAME => {
                // The protocol has no way to refuse a name here.
                let Some((name, bytes)) = found(&data) else {
                    return Ok(None);
                };
                let mut info = bytes.to_be_bytes().to_vec();
                info.extend(EXPORT_FLAGS.to_be_bytes());
                if !is_short {
                    info.extend([0; 124]);
                }
                stream.write_all(&info)?;
                return Ok(Some((name, bytes)));
            }
            OPTION_GO | OPTION_INFO => {
                // Length of the name, the name, and the kinds of information that are asked for.
                let name = data.split_first_chunk().and_then(|(length, rest)| {
                    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
                    rest.get(..length)
                });
                let Some((name, bytes)) = name.and_then(found) else {
                    reply(REPLY_UNKNOWN, &[])?;
                    continue;
                };
                let mut info = vec![0, 0]; // NBD_INFO_EXPORT
                info.extend(bytes.to_be_bytes());
                info.extend(EXPORT_FLAGS.to_be_bytes());
                reply(REPLY_INFO, &info)?;
                reply(REPLY_ACK, &[])?;
                if option == OPTION_GO {
                    return Ok(Some((name, bytes)));
                }
            }
            _ => reply(REPLY_UNSUPPORTED, &[])?,
        }
    }
}

fn read_array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    struct One(Vec<u8>);

    impl Exports for One {
        fn bytes(&self, name: &str) -> Option<u64> {
            (name == "disk0").then_some(self.0.len() as u64)
        }

        fn read(&self, _: &str, at: u64, buffer: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(at).unwrap();
            // A place that cannot be read.
            if (70_000..80_000).contains(&at) {
                return Err(io::ErrorKind::Other.into());
            }
            buffer.copy_from_slice(&self.0[at..at + buffer.len()]);
            Ok(())
        }
    }

    /// A server that runs until this value is dropped.
    struct Server {
        place: tempfile::TempDir,
        over: Arc<AtomicBool>,
        thread: Option<std::thread::JoinHandle<io::Result<()>>>,
    }

    impl Server {
        fn start(bytes: Vec<u8>) -> Self {
            let place = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(place.path().join("s")).unwrap();
            let over = Arc::<AtomicBool>::default();
            let is_over = Arc::clone(&over);
            let exports: Arc<dyn Exports> = Arc::new(One(bytes));
            let is_needed = move || !is_over.load(Ordering::Relaxed);
            let thread = std::thread::spawn(move || serve("vm", &listener, &exports, is_needed));
            Self {
                place,
                over,
                thread: Some(thread),
            }
        }

        fn connect(&self) -> UnixStream {
            UnixStream::connect(self.place.path().join("s")).unwrap()
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            self.over.store(true, Ordering::Relaxed);
            self.thread.take().unwrap().join().unwrap().unwrap();
        }
    }

    fn bytes() -> Vec<u8> {
        (0..50_000_u32).flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn qemu_reads_an_export_and_is_told_which_bytes_cannot_be_read() {
        if Command::new("qemu-io").arg("--version").output().is_err() {
            memfold_testkit::skip!("no qemu-io");
        }
        let server = Server::start(bytes());
        let socket = server.place.path().join("s");
        let url = |export: &str| format!("nbd+unix:///{export}?socket={}", socket.display());
        let run = |export: &str, command: &str| {
            let output = Command::new("qemu-io")
                .args(["-r", "-f", "raw", "-c", command, &url(export)])
                .output()
                .unwrap();
            let said = [output.stdout, output.stderr].concat();
            String::from_utf8_lossy(&said).into_owned()
        };
        // Page 10 of the numbers begins with 10,240 (0x2800).
        let said = run("disk0", "read -v 40960 16");
        assert!(said.contains("00 28 00 00 01 28 00 00"), "{said}");
        assert!(run("disk0", "read 0 199680").contains("read 199680/199680 bytes"));
        assert!(run("disk0", "read 71680 512").contains("Input/output error"));
        assert!(run("disk1", "read 0 512").contains("can't open"));
    }

    #[test]
    fn connections_beyond_the_limit_are_ended_and_all_others_with_the_server() {
        let server = Server::start(bytes());
        let greeted = |client: &mut UnixStream| client.read_exact(&mut [0; 18]);
        let mut clients: Vec<UnixStream> = (0..MOST_CLIENTS).map(|_| server.connect()).collect();
        for client in &mut clients {
            greeted(client).unwrap();
        }
        let refused = greeted(&mut server.connect()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::UnexpectedEof);
        // Another one takes the place of one that has gone.
        let gone = clients.pop();
        drop(gone);
        let place = Duration::from_secs(60);
        memfold_testkit::wait_for("there is room again", place, || {
            greeted(&mut server.connect())
        });
        drop(server);
        assert_eq!(clients[0].read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn a_client_that_breaks_the_protocol_loses_only_its_own_connection() {
        let server = Server::start(bytes());
        let mut good = server.connect();
        let mut greeting = [0; 18];
        good.read_exact(&mut greeting).unwrap();
        let mut state = 1_u64;
        for _ in 0..200 {
            let mut bad = server.connect();
            let mut noise = Vec::new();
            for _ in 0..64 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                noise.extend(state.to_be_bytes());
            }
            // Valid beginnings, so that the noise gets further.
            let begins: [&[u8]; 3] = [
                &[0, 0, 0, 3],
                b"\0\0\0\x03IHAVEOPT",
                b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x05disk0",
            ];
            let begin = begins[usize::try_from(state % 3).unwrap()];
            // The server may have ended the connection.
            let _ = bad.write_all(&[begin, &noise].concat());
            let _ = bad.shutdown(std::net::Shutdown::Write);
            let _ = io::copy(&mut bad, &mut io::sink());
        }
        good.write_all(&[0, 0, 0, 3]).unwrap();
        good.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x05disk0")
            .unwrap();
        let mut info = [0; 10];
        good.read_exact(&mut info).unwrap();
        assert_eq!(info[..8], 200_000_u64.to_be_bytes());
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend([0, 0, 0, 0]);
        request.extend(*b"handle00");
        request.extend(4096_u64.to_be_bytes());
        request.extend(8_u32.to_be_bytes());
        good.write_all(&request).unwrap();
        let mut reply = [0; 24];
        good.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..16], *b"\0\0\0\0handle00");
        assert_eq!(reply[16..20], 1024_u32.to_le_bytes());
    }
}
