use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::*;

/// One end of a connection: what its peer will send, and what was written to it.
struct Script {
    says: io::Cursor<Vec<u8>>,
    heard: Vec<u8>,
}

impl Script {
    fn new(says: Vec<u8>) -> Self {
        Self {
            says: io::Cursor::new(says),
            heard: Vec::new(),
        }
    }
}

impl Read for Script {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.says.read(into)
    }
}

impl Write for Script {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.heard.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const BLOCK_SIZE_WANTED: [u8; 8] = [0, 0, 0, 0, 0, 1, 0, 3];

fn client(options: &[(u32, &[u8])]) -> Vec<u8> {
    let mut says = u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes().to_vec();
    for (number, data) in options {
        says.extend(option(*number, data));
    }
    says
}

#[test]
fn an_nbd_handshake_between_our_client_and_our_server_succeeds() {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let served = std::thread::spawn(move || welcome(&mut theirs, 1 << 30));
    greet(&mut ours).unwrap();
    // The server refuses TLS as QEMU asks for it, and a client that does not support block sizes.
    assert!(ask_tls(&mut ours).unwrap_err().to_string().contains("TLS"));
    let refused = go(&mut ours).unwrap_err().to_string();
    assert!(refused.contains("0x80000008"), "{refused}");
    ours.write_all(&option(OPT_GO, &BLOCK_SIZE_WANTED)).unwrap();
    let mut kinds = Vec::new();
    loop {
        let (reply, data) = take_answer(&mut ours, OPT_GO).unwrap();
        kinds.push((reply, data.len()));
        if reply == REP_ACK {
            break;
        }
    }
    assert_eq!(kinds, [(REP_INFO, 12), (REP_INFO, 14), (REP_ACK, 0)]);
    served.join().unwrap().unwrap();
}

#[test]
fn hostile_nbd_clients_are_refused_without_large_allocations() {
    let long = [0; 12];
    for (says, why) in [
        (vec![0, 0, 0, 0], "too old"),
        (client(&[(OPT_EXPORT_NAME, b"")]), "block sizes"),
        (client(&[(OPT_ABORT, b"")]), "aborted"),
        (
            [client(&[]), b"IHAVEOPTxxxx\xff\xff\xff\xff".to_vec()].concat(),
            "4294967295 bytes",
        ),
        ([client(&[]), vec![7; 8]].concat(), "begins with"),
        (client(&[(9, &[][..]); 70]), "keeps asking"),
        (client(&[(OPT_GO, &long)]), "fill whole buffer"),
        (client(&[]), "fill whole buffer"),
    ] {
        let error = welcome(&mut Script::new(says), 4096).unwrap_err();
        assert!(error.to_string().contains(why), "{error}: {why}");
    }
    for bad in [
        &[][..],
        &[0, 0, 0, 9, 0, 1],
        &[0xff; 8],
        &[0, 0, 0, 0, 0, 2, 0, 3],
        &[0, 0, 0, 0, 0xff],
    ] {
        assert_eq!(wants_block_size(bad), None, "{bad:?}");
    }
}

#[test]
fn hostile_nbd_servers_are_refused_without_large_allocations() {
    let info = |size: u64, flags: u16| {
        let mut data = INFO_EXPORT.to_be_bytes().to_vec();
        data.extend(size.to_be_bytes());
        data.extend(flags.to_be_bytes());
        answer(OPT_GO, REP_INFO, &data)
    };
    let ack = answer(OPT_GO, REP_ACK, &[]);
    let good = [info(7, HAS_FLAGS), ack.clone()].concat();
    assert_eq!(go(&mut Script::new(good)).unwrap(), 7);
    for (says, why) in [
        (ack.clone(), "export's size"),
        ([info(7, READ_ONLY), ack].concat(), "read-only"),
        (answer(OPT_INFO, REP_ACK, &[]), "does not match"),
        (
            answer(OPT_GO, REP_INFO, &[9]).repeat(70),
            "keeps describing",
        ),
        (answer(OPT_GO, REP_ERR_UNSUP, &[]), "refuses"),
        (
            [&answer(OPT_GO, REP_INFO, &[])[..16], &[0xff; 4]].concat(),
            "4294967295",
        ),
    ] {
        let error = go(&mut Script::new(says)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}: {why}");
    }
    for (says, why) in [
        (vec![0; 18], "not NBD"),
        (b"NBDMAGICIHAVEOPT\0\0".to_vec(), "too old"),
    ] {
        let error = greet(&mut Script::new(says)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}: {why}");
    }
}

#[test]
fn nbd_requests_that_are_not_whole_blocks_of_the_disk_are_refused() {
    let valid = |command, offset, length| {
        let request = Request {
            command,
            cookie: 0,
            offset,
            length,
        };
        request.is_valid(1 << 20)
    };
    assert!(valid(Command::Read, 0, 1 << 20) && valid(Command::WriteZeroes, 4096, 4096));
    assert!(valid(Command::Flush, 7, 7) && valid(Command::Read, 4096, 0));
    for (command, offset, length) in [
        (Command::Read, 1, 4096),
        (Command::Write, 0, 4095),
        (Command::Read, 4096, 1 << 20),
        (Command::Trim, u64::MAX - 4095, 4096),
        (Command::WriteZeroes, 1 << 20, 4096),
        (Command::Other(5), 0, 0),
    ] {
        assert!(
            !valid(command, offset, length),
            "{command:?} {offset} {length}"
        );
    }
    // The request is longer than the limit that the server tells, on a disk that is large enough.
    let read = Request {
        command: Command::Read,
        cookie: 0,
        offset: 0,
        length: MAX_BYTES + 4096,
    };
    assert!(!read.is_valid(1 << 30));
}

proptest! {
    #[test]
    fn encoded_nbd_requests_and_replies_decode_to_the_same_values(number in 0_u16..20, cookie: u64, offset: u64, length in 0..=MAX_BYTES, error: u32) {
        let request = Request { command: Command::of(number), cookie, offset, length };
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
        let reply = Reply { error, cookie };
        prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }

    #[test]
    fn arbitrary_bytes_decode_to_a_valid_nbd_request_or_an_error(mut wire: [u8; 28], real: bool) {
        if real {
            wire[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        }
        let read = Request::decode(&wire);
        prop_assert!(real || read.is_err());
        if let Ok(request) = read {
            prop_assert_eq!(&request.encode()[6..], &wire[6..], "but for its flags");
        }
    }

    #[test]
    fn an_nbd_request_is_accepted_only_within_the_disk(number in 0_u16..8, at in 0_u64..24, blocks in 0_u32..24, disk in 0_u64..24, odd: bool) {
        let block = u64::from(BLOCK);
        let request = Request {
            command: Command::of(number),
            cookie: 0,
            offset: at * block + u64::from(odd),
            length: blocks * BLOCK,
        };
        let lies = !odd && at + u64::from(blocks) <= disk;
        let wanted = match number {
            0 | 1 | 4 | 6 => lies,
            2 | 3 => true,
            _ => false,
        };
        prop_assert_eq!(request.is_valid(disk * block), wanted);
    }

    #[test]
    fn an_nbd_handshake_with_arbitrary_bytes_ends_with_an_error(says: Vec<u8>, real in 0_u8..4) {
        let begins = match real {
            0 => Vec::new(),
            1 => client(&[]),
            2 => client(&[(OPT_INFO, &BLOCK_SIZE_WANTED)]),
            _ => b"NBDMAGICIHAVEOPT\0\x03".to_vec(),
        };
        let says = [begins, says].concat();
        // A random text is never a whole valid `GO` by chance.
        prop_assert!(welcome(&mut Script::new(says.clone()), 4096).is_err());
        let mut server = Script::new(says);
        if greet(&mut server).is_ok() {
            prop_assert!(ask_tls(&mut server).is_err() && go(&mut server).is_err());
        }
    }
}
