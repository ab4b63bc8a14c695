//! Fuzzes what streamed commands and `memfold vm cp` parse: frames between client and daemon, and
//! archives from guests; and server-sent events of the daemon.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use memfold_api::{EXEC_HEADER, EXEC_PAYLOAD, EventParser, ExecEvent, ExecOrder, exec_header};
use memfold_copy::{CopyError, Destination, pack, unpack};

use crate::place::Place;

/// Parses a frame as one from the client, and a stream of frames from the daemon.
pub fn exec_frames(data: &[u8]) -> u64 {
    let order = data.split_first_chunk::<EXEC_HEADER>();
    let order = order.and_then(|(header, rest)| {
        let (kind, length) = exec_header(*header).ok()?;
        assert!(length <= EXEC_PAYLOAD);
        let payload = rest.get(..length)?;
        let order = ExecOrder::decode(kind, payload.to_vec()).ok()?;
        let again = order.encode();
        assert_eq!(again, data[..EXEC_HEADER + length]);
        Some(1 + u64::from(kind))
    });
    let mut rest = data;
    let (mut count, mut kinds) = (0, 0);
    while let Ok(Some(event)) = ExecEvent::read(&mut rest) {
        count += 1;
        kinds |= match &event {
            ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes) => {
                assert!(bytes.len() <= EXEC_PAYLOAD);
                1
            }
            ExecEvent::InputRoom(_) => 2,
            ExecEvent::Exited(_) => 4,
            ExecEvent::Failed(_) => 8,
        };
        assert_eq!(
            ExecEvent::read(&mut &event.encode()[..]).ok(),
            Some(Some(event))
        );
    }
    order.unwrap_or(0) << 16 | kinds << 8 | count.min(255)
}

pub fn exec_streams() -> Vec<Vec<u8>> {
    let (rows, columns) = (24, 80);
    let orders = [
        ExecOrder::Input(b"ls\n".to_vec()),
        ExecOrder::EndInput,
        ExecOrder::Resize { rows, columns },
        ExecOrder::Signal(2),
    ];
    let events = [
        ExecEvent::Stdout(vec![7; 100]),
        ExecEvent::Stderr(b"no\n".to_vec()),
        ExecEvent::InputRoom(1 << 17),
        ExecEvent::Exited(130),
        ExecEvent::Failed("lost".into()),
    ];
    let orders = orders.iter().map(ExecOrder::encode);
    let events: Vec<Vec<u8>> = events.iter().map(ExecEvent::encode).collect();
    orders
        .chain([events.concat()])
        .chain(events.clone())
        .collect()
}

fn names(directory: &Path) -> Vec<std::ffi::OsString> {
    let entries = fs::read_dir(directory).expect("the test's directory");
    entries
        .map(|entry| entry.expect("an entry").file_name())
        .collect()
}

/// Unpacks an archive. Whatever is in it, nothing is outside the destination afterwards.
pub fn copy_archive(data: &[u8]) -> u64 {
    let place = Place::new();
    let into = place.path().join("into");
    fs::create_dir(&into).expect("a directory for the test");
    let destination = Destination::new(OsStr::new("copy"), &into).expect("a free destination");
    let result = unpack(data, &destination);
    assert_eq!(names(place.path()), ["into"]);
    let left = names(&into);
    match &result {
        Ok(summary) => {
            assert_eq!(left, ["copy"]);
            16 + (summary.files + 8 * summary.directories + 64 * summary.links).min(255)
        }
        Err(error) => {
            assert_eq!(left, [""; 0], "{error}");
            match error {
                CopyError::Cut => 1,
                CopyError::Read(_) => 2,
                CopyError::Archive(what) => 3 + what.len() as u64 % 8,
                _ => 12,
            }
        }
    }
}

pub fn archives() -> Vec<Vec<u8>> {
    let place = Place::new();
    let tree = place.path().join("into");
    fs::create_dir(&tree).expect("a directory for the test");
    let long = tree.join("n".repeat(120));
    let write = |path: PathBuf| fs::write(path, [7; 600]).expect("a file for the test");
    write(tree.join("file"));
    write(long);
    std::os::unix::fs::symlink("../x", tree.join("link")).expect("a link for the test");
    let packed = |path: &Path| {
        let mut archive = Vec::new();
        pack(path, &mut archive).expect("an archive");
        archive
    };
    vec![packed(&tree), packed(&tree.join("file"))]
}

/// Parses server-sent events; the result does not depend on how the stream is split.
pub fn sent_events(data: &[u8]) -> u64 {
    let whole = EventParser::default().push(data);
    let mut parser = EventParser::default();
    let pieces: Vec<_> = data.chunks(3).flat_map(|p| parser.push(p)).collect();
    assert_eq!(whole, pieces);
    let ids = whole.iter().filter(|event| event.id.is_some()).count();
    1 + (whole.len().min(255) << 8 | ids.min(255)) as u64
}

pub fn event_streams() -> Vec<Vec<u8>> {
    vec![
        b"event: event\ndata: {\"at_unix_s\":1}\nid: 12\nretry: 1000\n\n".to_vec(),
        b": still here\n\nevent: gap\ndata: {\"missed\":null}\ndata: more\n\n".to_vec(),
    ]
}
