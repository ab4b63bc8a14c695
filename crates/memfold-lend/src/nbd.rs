//! The part of the NBD protocol that the relay between QEMU and a lender needs, as client and as
//! server (`doc/proto.md` of the NBD project): the fixed newstyle handshake with `GO`, then simple
//! replies.
//!
//! ```text
//!   server  "NBDMAGIC" "IHAVEOPT" flags                 request  magic flags command cookie offset length [bytes]
//!   client  flags                                        reply    magic error cookie [bytes]
//!   client  "IHAVEOPT" option length ...  ->  server  magic option reply length ...
//! ```
//! All numbers are big-endian. Every length that the peer sends is checked against its limit before
//! memory is allocated.

use std::io::{self, Read, Write};

/// Maximum length of a read or write request in bytes. The relay tells QEMU this limit
/// (`NBD_INFO_BLOCK_SIZE`), and QEMU keeps to it.
pub const MAX_BYTES: u32 = 1 << 20;

/// Block size in bytes. Offset and length of each request are multiples of the block size.
pub const BLOCK: u32 = 4096;

/// Length of an NBD request's header in bytes. The data of a write follow the header.
pub const REQUEST_BYTES: usize = 28;

/// Length of an NBD reply's header in bytes. The data of a read follow the header.
pub const REPLY_BYTES: usize = 16;

const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flags of client and server.
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

const OPT_EXPORT_NAME: u32 = 1;
const OPT_ABORT: u32 = 2;
const OPT_STARTTLS: u32 = 5;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;

const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
const REP_ERR_INVALID: u32 = (1 << 31) + 3;
const REP_ERR_BLOCK_SIZE: u32 = (1 << 31) + 8;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags of an export.
const HAS_FLAGS: u16 = 1;
const READ_ONLY: u16 = 1 << 1;
const SEND_FLUSH: u16 = 1 << 2;
const SEND_TRIM: u16 = 1 << 5;
const SEND_WRITE_ZEROES: u16 = 1 << 6;
const SEND_FAST_ZERO: u16 = 1 << 11;

/// Maximum length in bytes of an option, and of a reply to an option.
const MAX_OPTION: u32 = 64 << 10;

/// Maximum number of options of a client before `GO`, and of replies to one option.
const MAX_OPTIONS: u32 = 64;

/// NBD error number for an I/O error (`NBD_EIO`).
pub const EIO: u32 = 5;

/// NBD error number for an invalid request (`NBD_EINVAL`).
pub const EINVAL: u32 = 22;

/// Kind of an NBD request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads a range of the disk.
    Read,
    /// Writes the bytes that follow the request's header to a range of the disk.
    Write,
    /// Ends the connection; no more requests follow.
    Disconnect,
    /// Asks that all completed writes become durable.
    Flush,
    /// Allows the server to discard the bytes of a range of the disk.
    Trim,
    /// Writes zeroes to a range of the disk.
    WriteZeroes,
    /// A command with this number, which memfold does not know.
    Other(u16),
}

impl Command {
    const fn number(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::WriteZeroes => 6,
            Self::Other(number) => number,
        }
    }

    const fn of(number: u16) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            6 => Self::WriteZeroes,
            other => Self::Other(other),
        }
    }
}

/// Header of an NBD request: what the server has to do with which range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What the server has to do.
    pub command: Command,
    /// Number that the client chose for the request; the reply repeats it.
    pub cookie: u64,
    /// Offset on the disk of the range's first byte.
    pub offset: u64,
    /// Length of the range on the disk, in bytes.
    pub length: u32,
}

/// A violation of the NBD protocol by the peer; the text says which.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Nonsense(pub String);

impl From<Nonsense> for io::Error {
    fn from(nonsense: Nonsense) -> Self {
        Self::new(io::ErrorKind::InvalidData, nonsense)
    }
}

fn nonsense(what: impl Into<String>) -> Nonsense {
    Nonsense(what.into())
}

/// Returns `N` bytes of `from` at offset `at`. The caller has checked that they exist.
fn bytes<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut found = [0; N];
    found.copy_from_slice(&from[at..at + N]);
    found
}

impl Request {
    /// Encodes the header of the NBD request. All request flags are 0, because memfold needs none.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut wire = [0; REQUEST_BYTES];
        wire[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        wire[6..8].copy_from_slice(&self.command.number().to_be_bytes());
        wire[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        wire[16..24].copy_from_slice(&self.offset.to_be_bytes());
        wire[24..].copy_from_slice(&self.length.to_be_bytes());
        wire
    }

    /// Decodes the header of an NBD request.
    ///
    /// # Errors
    /// Fails if the bytes are not a request, or a write is longer than [`MAX_BYTES`]. The caller
    /// then cannot know where the next request begins.
    pub fn decode(wire: &[u8; REQUEST_BYTES]) -> Result<Self, Nonsense> {
        let magic = u32::from_be_bytes(bytes(wire, 0));
        if magic != REQUEST_MAGIC {
            return Err(nonsense(format!("a request begins with {magic:#x}")));
        }
        let request = Self {
            command: Command::of(u16::from_be_bytes(bytes(wire, 6))),
            cookie: u64::from_be_bytes(bytes(wire, 8)),
            offset: u64::from_be_bytes(bytes(wire, 16)),
            length: u32::from_be_bytes(bytes(wire, 24)),
        };
        if request.command == Command::Write && request.length > MAX_BYTES {
            return Err(nonsense(format!("a write of {} bytes", request.length)));
        }
        Ok(request)
    }

    /// Returns whether the request's range is valid on a disk of `size` bytes: inside the disk,
    /// whole blocks, and not longer than [`MAX_BYTES`] if data are transferred.
    #[must_use]
    pub fn is_valid(&self, size: u64) -> bool {
        let end = self.offset.checked_add(u64::from(self.length));
        let inside = end.is_some_and(|end| end <= size);
        let whole = self.offset % u64::from(BLOCK) == 0 && self.length % BLOCK == 0;
        match self.command {
            Command::Read | Command::Write => inside && whole && self.length <= MAX_BYTES,
            Command::Trim | Command::WriteZeroes => inside && whole,
            Command::Flush | Command::Disconnect => true,
            Command::Other(_) => false,
        }
    }
}

/// Header of an NBD reply, without the data of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// 0 if the request succeeded, else an NBD error number (`NBD_E...`).
    pub error: u32,
    /// Number that the client chose for the request to which this reply belongs.
    pub cookie: u64,
}

impl Reply {
    /// Encodes the header of the NBD reply, without the data of a read.
    #[must_use]
    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut wire = [0; REPLY_BYTES];
        wire[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
        wire[4..8].copy_from_slice(&self.error.to_be_bytes());
        wire[8..].copy_from_slice(&self.cookie.to_be_bytes());
        wire
    }

    /// Decodes the header of an NBD reply.
    ///
    /// # Errors
    /// Fails if the bytes are not a reply.
    pub fn decode(wire: &[u8; REPLY_BYTES]) -> Result<Self, Nonsense> {
        let magic = u32::from_be_bytes(bytes(wire, 0));
        if magic != REPLY_MAGIC {
            return Err(nonsense(format!("an answer begins with {magic:#x}")));
        }
        Ok(Self {
            error: u32::from_be_bytes(bytes(wire, 4)),
            cookie: u64::from_be_bytes(bytes(wire, 8)),
        })
    }
}

fn take<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut wire = [0; N];
    stream.read_exact(&mut wire)?;
    Ok(wire)
}

fn take_bytes(stream: &mut impl Read, length: u32) -> io::Result<Vec<u8>> {
    if length > MAX_OPTION {
        return Err(nonsense(format!("an option of {length} bytes")).into());
    }
    let mut wire = vec![0; length as usize];
    stream.read_exact(&mut wire)?;
    Ok(wire)
}

/// Does the server's part of the NBD handshake, for a disk of `size` bytes. The client must support
/// block sizes.
///
/// # Errors
/// Fails if the client disconnected, aborted the negotiation, or violated the protocol.
pub fn welcome(stream: &mut (impl Read + Write), size: u64) -> io::Result<()> {
    let magic = [NBD_MAGIC, OPTION_MAGIC].map(u64::to_be_bytes);
    let flags = (FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes();
    stream.write_all(&[magic.as_flattened(), &flags].concat())?;
    let flags = u32::from_be_bytes(take(stream)?);
    if flags & u32::from(FIXED_NEWSTYLE) == 0 {
        return Err(nonsense("a client that is too old (no fixed newstyle)").into());
    }
    for _ in 0..MAX_OPTIONS {
        let magic = u64::from_be_bytes(take(stream)?);
        if magic != OPTION_MAGIC {
            return Err(nonsense(format!("an option begins with {magic:#x}")).into());
        }
        let option = u32::from_be_bytes(take(stream)?);
        let length = u32::from_be_bytes(take(stream)?);
        let data = take_bytes(stream, length)?;
        let mut answer = |reply: u32, data: &[u8]| stream.write_all(&answer(option, reply, data));
        match option {
            OPT_INFO | OPT_GO => match wants_block_size(&data) {
                None => answer(REP_ERR_INVALID, &[])?,
                Some(false) => answer(REP_ERR_BLOCK_SIZE, &[])?,
                Some(true) => {
                    answer(REP_INFO, &export_info(size))?;
                    answer(REP_INFO, &block_size_info())?;
                    answer(REP_ACK, &[])?;
                    if option == OPT_GO {
                        return Ok(());
                    }
                }
            },
            OPT_ABORT => {
                answer(REP_ACK, &[])?;
                return Err(io::Error::other("the client aborted the negotiation"));
            }
            // The protocol has no error reply to this option. A client that uses it does not
            // support block sizes.
            OPT_EXPORT_NAME => {
                return Err(nonsense("a client that does not support block sizes").into());
            }
            _ => answer(REP_ERR_UNSUP, &[])?,
        }
    }
    Err(nonsense("a client that keeps asking for options").into())
}

/// Returns a message of the handshake: numbers, the length of the data, and the data.
fn message(magic: u64, words: &[u32], data: &[u8]) -> Vec<u8> {
    let mut wire = magic.to_be_bytes().to_vec();
    let length = u32::try_from(data.len()).unwrap_or(0);
    for word in words.iter().chain([&length]) {
        wire.extend(word.to_be_bytes());
    }
    wire.extend(data);
    wire
}

fn answer(option: u32, reply: u32, data: &[u8]) -> Vec<u8> {
    message(OPTION_REPLY_MAGIC, &[option, reply], data)
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    message(OPTION_MAGIC, &[option], data)
}

fn export_info(size: u64) -> Vec<u8> {
    let flags = HAS_FLAGS | SEND_FLUSH | SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO;
    let [kind, flags] = [INFO_EXPORT, flags].map(u16::to_be_bytes);
    [&kind[..], &size.to_be_bytes(), &flags].concat()
}

fn block_size_info() -> Vec<u8> {
    let sizes = [BLOCK, BLOCK, MAX_BYTES].map(u32::to_be_bytes);
    [&INFO_BLOCK_SIZE.to_be_bytes()[..], sizes.as_flattened()].concat()
}

/// Returns whether a `GO` asks for block sizes, so that the client will keep to them; `None` if the
/// option is malformed. The export's name is ignored, because there is only one export.
fn wants_block_size(data: &[u8]) -> Option<bool> {
    let (name, rest) = data.split_first_chunk()?;
    let rest = rest.get(u32::from_be_bytes(*name) as usize..)?;
    let (count, wanted) = rest.split_first_chunk()?;
    let mut kinds = wanted.chunks(2);
    let is_whole = wanted.len() == usize::from(u16::from_be_bytes(*count)) * 2;
    is_whole.then(|| kinds.any(|kind| kind == INFO_BLOCK_SIZE.to_be_bytes()))
}

/// Does the first part of the client's NBD handshake: the greeting and the flags.
///
/// # Errors
/// Fails if the server disconnected or violated the protocol.
pub fn greet(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let (magic, option) = (
        u64::from_be_bytes(take(stream)?),
        u64::from_be_bytes(take(stream)?),
    );
    if (magic, option) != (NBD_MAGIC, OPTION_MAGIC) {
        return Err(nonsense("the server's greeting is not NBD").into());
    }
    let flags = u16::from_be_bytes(take(stream)?);
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(nonsense("the server is too old (no fixed newstyle)").into());
    }
    // Without this flag, some replies of the server would end with 124 zero bytes.
    let ours = FIXED_NEWSTYLE | (flags & NO_ZEROES);
    stream.write_all(&u32::from(ours).to_be_bytes())
}

/// Reads a reply to an option, and returns its kind and its data.
fn take_answer(stream: &mut impl Read, to: u32) -> io::Result<(u32, Vec<u8>)> {
    let magic = u64::from_be_bytes(take(stream)?);
    let option = u32::from_be_bytes(take(stream)?);
    if (magic, option) != (OPTION_REPLY_MAGIC, to) {
        return Err(nonsense("the server's answer does not match the request").into());
    }
    let reply = u32::from_be_bytes(take(stream)?);
    let length = u32::from_be_bytes(take(stream)?);
    Ok((reply, take_bytes(stream, length)?))
}

/// Asks the NBD server to start TLS. After success, the caller starts TLS and continues the
/// handshake inside it.
///
/// # Errors
/// Fails if the server refuses TLS, disconnected, or violated the protocol.
pub fn ask_tls(stream: &mut (impl Read + Write)) -> io::Result<()> {
    stream.write_all(&option(OPT_STARTTLS, &[]))?;
    match take_answer(stream, OPT_STARTTLS)? {
        (REP_ACK, _) => Ok(()),
        (reply, _) => Err(refusal("TLS", reply)),
    }
}

fn refusal(what: &str, reply: u32) -> io::Error {
    io::Error::other(format!("the server refuses {what} (NBD answer {reply:#x})"))
}

/// Does the last part of the client's NBD handshake, after which requests may follow. Returns the
/// size of the server's disk in bytes.
///
/// # Errors
/// Fails if the server refuses, disconnected, or violated the protocol, or if the export is
/// read-only.
pub fn go(stream: &mut (impl Read + Write)) -> io::Result<u64> {
    // The option has an empty export name, and requests no information besides the size.
    stream.write_all(&option(OPT_GO, &[0; 6]))?;
    let mut export = None;
    for _ in 0..MAX_OPTIONS {
        let (reply, data) = take_answer(stream, OPT_GO)?;
        match reply {
            REP_INFO if data.len() == 12 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                let flags = u16::from_be_bytes(bytes(&data, 10));
                export = Some((u64::from_be_bytes(bytes(&data, 2)), flags));
            }
            REP_INFO => {}
            REP_ACK => {
                let none = || nonsense("the server does not report the export's size");
                let (size, flags) = export.ok_or_else(none)?;
                if flags & READ_ONLY != 0 {
                    return Err(io::Error::other("the export is read-only"));
                }
                return Ok(size);
            }
            reply => return Err(refusal("its export", reply)),
        }
    }
    Err(nonsense("the server keeps describing its export").into())
}

#[cfg(test)]
#[path = "nbd_tests.rs"]
mod tests;
