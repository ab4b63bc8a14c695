//! Fuzzes both ends of the NBD protocol in the relay, the process between QEMU and a lending host:
//! as a client of lenders, and as a server for QEMU.

use std::io::{self, Read, Write};

use memfold_lend::nbd::{self, Command, MAX_BYTES, Reply, Request};

pub fn streams() -> Vec<Vec<u8>> {
    let go = b"\x00\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x07\x00\x00\x00\x08\x00\x00\x00\x00\x00\x01\x00\x03";
    let request = Request {
        command: Command::Write,
        cookie: 7,
        offset: 8192,
        length: 4096,
    };
    let reply = Reply {
        error: 0,
        cookie: 7,
    };
    let server = b"\x01NBDMAGICIHAVEOPT\x00\x03\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x05\x00\x00\x00\x01\x00\x00\x00\x00\
            \x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x0c\x00\x00\x00\x00\x00\x00\x00\x40\x00\x00\x00\x01\
            \x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x00";
    vec![
        go.to_vec(),
        server.to_vec(),
        [&[2], &request.encode()[..]].concat(),
        [&[3], &reply.encode()[..]].concat(),
    ]
}

/// A simulated peer that sends these bytes and then ends the stream.
struct Peer<'a>(&'a [u8]);

impl Read for Peer<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs the parser that the first byte selects on the other bytes. Returns a number that identifies
/// the kind of result.
pub fn both(data: &[u8]) -> u64 {
    let Some((kind, data)) = data.split_first() else {
        return 0;
    };
    let mut peer = Peer(data);
    match kind {
        0 => u64::from(nbd::welcome(&mut peer, 1 << 30).is_ok()),
        1 => {
            let greeted = nbd::greet(&mut peer).and_then(|()| nbd::ask_tls(&mut peer));
            match greeted.and_then(|()| nbd::go(&mut peer)) {
                Ok(_) => 3,
                Err(_) => 2,
            }
        }
        2 => data.first_chunk().map_or(4, request),
        _ => {
            let read = data.first_chunk().map(Reply::decode);
            if let (Some(wire), Some(Ok(reply))) = (data.first_chunk::<16>(), read) {
                assert_eq!(reply.encode(), *wire);
                return 6;
            }
            5
        }
    }
}

fn request(wire: &[u8; 28]) -> u64 {
    let Ok(request) = Request::decode(wire) else {
        return 7;
    };
    let size = 1 << 30;
    assert_eq!(Request::decode(&request.encode()), Ok(request));
    if request.is_valid(size) && matches!(request.command, Command::Read | Command::Write) {
        assert!(request.length <= MAX_BYTES && request.offset + u64::from(request.length) <= size);
        return 9;
    }
    8
}
