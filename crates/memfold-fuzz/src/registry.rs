//! Fuzzes what a lease registry gets from other hosts and from etcd, and the reports of LVM.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memfold_lend::calls::{Answer, Call, answer};
use memfold_lend::lvm::tools;
use memfold_lend::{Endpoint, EtcdRegistry, Registry, RegistryAt, RegistryFiles, SqliteRegistry};

use crate::place::Place;

pub fn calls() -> Vec<Vec<u8>> {
    let lender = r#""lender":{"host":"one","incarnation":7}"#;
    let calls = [
        format!(r#"{{"offer":{{"offer":{{{lender},"bytes":1073741824}},"ttl_ms":30000}}}}"#),
        r#"{"take":{"want":{"borrower":"two","vm":"web","bytes":67108864},"ttl_ms":30000}}"#.into(),
        format!(
            r#"{{"publish":{{"id":ID,{lender},"endpoint":{{"address":{{"tcp":{{"ip":"10.0.0.1","port":7}}}},"key":{{"identity":"a","hex":"{}"}}}}}}}}"#,
            "0f".repeat(32)
        ),
        r#"{"endpoint":{"id":ID,"borrower":"two"}}"#.into(),
        r#"{"renew":{"id":ID,"borrower":"two","ttl_ms":30000}}"#.into(),
        r#"{"sole_copy":{"id":ID,"borrower":"two"}}"#.into(),
        format!(r#"{{"recall":{{"id":ID,{lender},"within_ms":1000}}}}"#),
        r#"{"picture":{}}"#.into(),
        r#"{"release":{"id":ID,"borrower":"two"}}"#.into(),
        format!(r#"{{"ended":{{"id":ID,{lender}}}}}"#),
        format!(r#"{{"withdraw":{{{lender}}}}}"#),
    ];
    let answers = [
        r#""done""#.to_owned(),
        r#"{"endpoint":{"address":{"unix":"/run/x"},"key":null}}"#.to_owned(),
        r#"{"endpoint":null}"#.to_owned(),
        r#"{"picture":{"lenders":[],"leases":[]}}"#.to_owned(),
    ];
    let key = format!(r#"{{"identity":"a","hex":"{}"}}"#, "0f".repeat(32));
    let endpoints = [
        format!(r#"{{"address":{{"tcp":{{"ip":"10.0.0.1","port":7}}}},"key":{key}}}"#),
        format!(r#"{{"address":{{"tcp":{{"ip":"::1","port":0}}}},"key":{key}}}"#),
        r#"{"address":{"tcp":{"ip":"10.0.0.1","port":7}},"key":null}"#.to_owned(),
        r#"{"address":{"tcp":{"ip":"10.0.0.1","port":7}},"key":{"identity":"a","hex":"x"}}"#
            .to_owned(),
        r#"{"address":{"unix":"/run/x"},"key":null}"#.to_owned(),
        r#"{"address":{"unix":"run/x"},"key":null}"#.to_owned(),
        r#"{"address":{"unix":"/run/x"},"key":null,"transport":"iscsi"}"#.to_owned(),
    ];
    let mut seeds = vec![
        endpoints.join("\n").into_bytes(),
        calls.join("\n").into_bytes(),
        answers.join("\n").into_bytes(),
    ];
    seeds.extend(calls[..2].iter().map(|call| call.clone().into_bytes()));
    seeds
}

/// Makes the calls in the lines of an input, of a new registry. `ID` stands for the number of the
/// last lease.
pub fn call(data: &[u8]) -> u64 {
    let place = Place::new();
    let clock = Arc::new(AtomicI64::new(1000));
    let ticks = clock.clone();
    let clock = Arc::new(move || ticks.fetch_add(10, Ordering::Relaxed));
    let registry = SqliteRegistry::open_at(&place.path().join("leases"), clock, "boot");
    let registry = registry.expect("a new registry");
    let (mut found, mut id) = (1, "1".to_owned());
    for line in data.split(|byte| *byte == b'\n').take(24) {
        let line = String::from_utf8_lossy(line).replace("ID", &id);
        if let Ok(endpoint) = serde_json::from_str::<Endpoint>(&line) {
            found |= 1 << 20 | u64::from(endpoint.check_of_another_host().is_ok()) << 21;
        }
        if let Ok(said) = serde_json::from_str::<Answer>(&line) {
            let written = serde_json::to_string(&said).expect("an answer is JSON");
            assert_eq!(serde_json::from_str::<Answer>(&written).ok(), Some(said));
            found |= 1 << 22;
        }
        let Ok(call) = serde_json::from_str::<Call>(&line) else {
            continue;
        };
        found |= u64::from(call.speaks_for().is_some()) << 23;
        let takes = matches!(call, Call::Take { .. });
        let (number, kind) = match answer(&registry, &call) {
            Answer::Done => (0, 0),
            Answer::Lease(lease) => {
                id = lease.id.to_string();
                // Nobody gets more than is offered. (A later offer may be smaller.)
                let lenders = registry.picture().expect("a picture").lenders;
                let mut its = lenders.iter().filter(|of| of.lender == lease.lender);
                assert!(its.all(|of| !takes || of.lent_bytes <= of.offered_bytes));
                (1, 0)
            }
            Answer::Endpoint(endpoint) => (2, u64::from(endpoint.is_some())),
            Answer::Picture(_) => (3, 0),
            Answer::Refused(error) => (4, error.to_string().len() as u64 % 4),
        };
        found |= 1 << (1 + number + 5 * kind);
    }
    let picture = registry.picture().expect("a picture");
    found | (picture.leases.len().min(7) as u64) << 24
}

pub fn lvm_reports() -> Vec<Vec<u8>> {
    let pv = |name: &str, uuid: &str, missing: &str, volume: &str| {
        format!(
            r#"{{"pv_name":"{name}", "pv_uuid":"{uuid}", "pv_missing":"{missing}", "pv_free":"8388608", "lv_name":"{volume}"}}"#
        )
    };
    let rows = [
        pv("/dev/vdc", "a", "", "[swap_rimage_0]"),
        pv("[unknown]", "b", "missing", "other"),
    ];
    vec![
        br#"{"report": [{"lv": [{"lv_name":"swap", "lv_layout":"raid,raid1", "lv_size":"536870912", "vg_extent_size":"4194304", "lv_active":"active", "sync_percent":"42.19"}]}], "log": []}"#.to_vec(),
        br#"{"report": [{"lv": []}], "log": []}"#.to_vec(),
        format!(r#"{{"report": [{{"pv": [{}]}}]}}"#, rows.join(",")).into(),
        format!(r#"{{"report": [{{"pvseg": [{}]}}]}}"#, rows.join(",")).into(),
    ]
}

pub fn lvm_report(data: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(data);
    let logical = match tools::parse_logical(&text) {
        Err(why) => why.len() as u64 % 8,
        Ok(None) => 8,
        Ok(Some(volume)) => {
            9 + u64::from(volume.is_mirror())
                + 2 * u64::from(volume.is_active)
                + 4 * u64::from(volume.synced.is_some())
        }
    };
    let physical = match tools::parse_physical(&text) {
        Err(why) => why.len() as u64 % 8,
        Ok(disks) => {
            let volumes: usize = disks.iter().map(|disk| disk.volumes.len()).sum();
            8 + disks.len().min(7) as u64 + 8 * volumes.min(7) as u64
        }
    };
    1 + (logical | physical << 5)
}

/// A server that plays etcd: it answers each request with the body, or the whole response, in the
/// input. Its first byte says which.
struct Played {
    registry: EtcdRegistry,
    response: Arc<Mutex<Vec<u8>>>,
}

impl Played {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port for the test");
        let port = listener.local_addr().expect("a port for the test").port();
        let response = Arc::<Mutex<Vec<u8>>>::default();
        let told = response.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = play(stream, &told);
            }
        });
        let at = format!("etcd+http://127.0.0.1:{port}");
        let place = RegistryAt::new(&at, &RegistryFiles::default()).expect("an address");
        let RegistryAt::Etcd { members, .. } = place else {
            panic!("{at} is an etcd")
        };
        Self {
            registry: EtcdRegistry::new(at, members, None),
            response,
        }
    }
}

fn play(mut stream: TcpStream, response: &Mutex<Vec<u8>>) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = Vec::new();
    let mut some = [0; 4096];
    loop {
        let head = request.windows(4).position(|four| four == b"\r\n\r\n");
        let length = head.and_then(|head| {
            let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
            let length = text
                .lines()
                .find_map(|line| line.strip_prefix("content-length:"))?
                .trim()
                .parse()
                .ok();
            Some(head + 4 + length.unwrap_or(0_usize))
        });
        if length.is_none_or(|length| request.len() < length) {
            let count = stream.read(&mut some)?;
            if count == 0 {
                return Ok(());
            }
            request.extend(&some[..count]);
            continue;
        }
        request.clear();
        let response = response
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        match response.split_first() {
            Some((0, body)) => {
                write!(
                    stream,
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                )?;
                stream.write_all(body)?;
            }
            Some((1, body)) => {
                write!(
                    stream,
                    "HTTP/1.1 503 No\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                )?;
                stream.write_all(body)?;
            }
            other => {
                stream.write_all(other.map_or(&[], |(_, response)| response))?;
                return Ok(());
            }
        }
    }
}

pub fn etcd_responses() -> Vec<Vec<u8>> {
    use base64::Engine as _;
    let base64 = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let kv = |key: &str, value: &str| {
        format!(
            r#"{{"key":"{}","mod_revision":"7","value":"{}"}}"#,
            base64(&format!("/memfold/lend/1/{key}")),
            base64(value)
        )
    };
    let answer = |ranges: &[Vec<String>]| {
        let ranges = ranges
            .iter()
            .map(|kvs| format!(r#"{{"response_range":{{"kvs":[{}]}}}}"#, kvs.join(",")));
        let ranges: Vec<String> = ranges.collect();
        format!(
            "\0{{\"header\":{{\"revision\":\"9\"}},\"succeeded\":true,\"responses\":[{}]}}",
            ranges.join(",")
        )
        .into_bytes()
    };
    let account = r#"{"incarnation":7,"bytes":1073741824,"ttl_ms":30000,"leases":{"3":67108864}}"#;
    let what = r#"{"lender":{"host":"one","incarnation":7},"borrower":"two","vm":"web","bytes":67108864,"durability":"disk","state":"exported"}"#;
    let lenders = vec![
        kv("lender/one/account", account),
        kv("lender/one/heard", r#"{"ms":30000}"#),
    ];
    let leases = vec![
        kv("lease/3/what", what),
        kv("lease/3/renewed", r#"{"ms":30000}"#),
        kv("lease/3/recall", r#"{"ms":5}"#),
    ];
    vec![
        answer(&[lenders.clone(), leases.clone()]),
        answer(&[lenders, leases.clone(), Vec::new()]),
        answer(&[
            vec![leases[0].clone()],
            vec![leases[1].clone()],
            vec![leases[2].clone()],
        ]),
        answer(&[]),
        b"\x01{\"error\":\"no leader\"}".to_vec(),
        b"\x02HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n".to_vec(),
        b"\x02HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort".to_vec(),
    ]
}

pub fn etcd_response(data: &[u8]) -> u64 {
    thread_local! {
        static PLAYED: RefCell<Option<Played>> = const { RefCell::new(None) };
    }
    PLAYED.with_borrow_mut(|played| {
        let played = played.get_or_insert_with(Played::start);
        *played
            .response
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = data.to_vec();
        let mut found = 1;
        let id = serde_json::from_str("3").expect("a lease's number");
        found |= match played.registry.picture() {
            Ok(picture) => 1 + picture.lenders.len().min(3) + 4 * picture.leases.len().min(3),
            Err(error) => 32 + error.to_string().len() % 16,
        } as u64
            * 2;
        found |= match played.registry.endpoint(id, "two") {
            Ok(endpoint) => 1 + u64::from(endpoint.is_some()),
            Err(error) => 4 + error.to_string().len() as u64 % 8,
        } << 8;
        found
    })
}
