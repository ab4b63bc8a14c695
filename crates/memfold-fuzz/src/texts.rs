//! Fuzzes the parsers of what users and API clients write: descriptions of VMs in TOML and JSON,
//! bodies of requests, and short texts such as addresses and names.

use memfold_api as api;
use memfold_ledger::estimate::fingerprint::Fingerprint;
use memfold_ledger::estimate::place::propose;
use memfold_segment::Reference;
use memfold_vm::{Definition, Forward, MacAddress, Network, VmSpec, check_name, host_name};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

const VM: &str = "name = 'web1'\nmemory = '512MiB'\nmemory_max = '1GiB'\nmemory_slots = 4\nvcpus = 2\ndomain = 'shop'\naccel = 'tcg'\ncpu = 'max'\nballoon = true\nnetwork = 'user'\nmac = '52:54:00:00:00:01'\nmerge = 'domain'\nuser = 'nobody'\nswap = '64MiB'\nforwards = ['2222:22', 'udp:127.0.0.1:80:8080']\nqemu_args = ['-device', 'virtio-rng-pci']\nsegment_slots = 1\n[boot]\nkernel = '/k'\ninitrd = '/i'\ncmdline = 'root=/dev/vda'\n[cloud_init]\nuser_data = '/u'\nssh_keys = ['/s.pub']\n[[disks]]\npath = '/a.qcow2'\nformat = 'qcow2'\ncache = 'none'\naio = 'native'\nsnapshot = true\n[[disks]]\npath = 'b.img'\nread_only = true\n";

pub fn descriptions() -> Vec<Vec<u8>> {
    let defined = format!("autostart = true\norder = 3\nsnapshot = 'warm'\n{VM}");
    vec![
        VM.into(),
        defined.into_bytes(),
        b"name = 'a'\nmemory = 4096\n".to_vec(),
    ]
}

pub fn description(data: &[u8]) -> u64 {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    let Ok(definition) = Definition::parse(text) else {
        return 1;
    };
    // What was read can be written, and is the same when it is read again.
    let written = definition.to_toml().expect("a definition is valid TOML");
    assert_eq!(
        Definition::parse(&written).ok(),
        Some(definition.clone()),
        "{written}"
    );
    let json = serde_json::to_value(&definition.vm).expect("a description is valid JSON");
    assert_eq!(
        serde_json::from_value::<VmSpec>(json).ok(),
        Some(definition.vm.clone())
    );
    let mut checked = definition.clone();
    let is_valid = checked.validate().is_ok();
    let vm = &definition.vm;
    let sizes =
        vm.disks.len().min(7) | vm.forwards.len().min(7) << 3 | vm.qemu_args.len().min(7) << 6;
    let kinds = usize::from(is_valid)
        | usize::from(vm.boot.kernel.is_some()) << 1
        | usize::from(vm.cloud_init.is_some()) << 2
        | usize::from(vm.merges()) << 3
        | vm.cards().min(3) << 4
        | (vm.slots() as usize).min(15) << 6;
    2 | (sizes as u64) << 2 | (kinds as u64) << 12
}

/// Parses the JSON of a request as `T`. If it is one, what it says is the same after writing.
fn body<T: DeserializeOwned + Serialize>(json: &[u8]) -> u64 {
    let Ok(request) = serde_json::from_slice::<T>(json) else {
        return 0;
    };
    let written = serde_json::to_value(&request).expect("a request is valid JSON");
    let again: T = serde_json::from_value(written.clone()).expect("what was written can be read");
    assert_eq!(serde_json::to_value(&again).ok(), Some(written));
    1
}

const BODIES: [fn(&[u8]) -> u64; 22] = [
    body::<VmSpec>,
    body::<Definition>,
    body::<api::SaveRequest>,
    body::<api::RestoreRequest>,
    body::<api::ForkRequest>,
    body::<api::PushBody>,
    body::<api::PullBody>,
    body::<api::RebootRequest>,
    body::<api::LendRequest>,
    body::<api::BorrowRequest>,
    body::<api::RightsizeRequest>,
    body::<api::BuildRequest>,
    body::<api::RankRequest>,
    body::<api::AttachSegmentRequest>,
    body::<api::FoldRequest>,
    body::<api::KsmStartRequest>,
    body::<api::DebtRequest>,
    body::<api::AttachRequest>,
    body::<api::ExecRequest>,
    body::<api::ExecStreamRequest>,
    body::<api::SetRequest>,
    body::<api::LibvirtEnableRequest>,
];

pub fn requests() -> Vec<Vec<u8>> {
    let vm: VmSpec = toml::from_str(VM).expect("a valid description");
    let definition = json!({ "autostart": true, "order": 1, "snapshot": "warm", "vm": vm });
    vec![
        json!(vm).to_string().into(),
        definition.to_string().into(),
        br#"{"name":"warm","keep":"hot","live":true,"parent":"base","compress":true}"#.to_vec(),
        br#"{"vm":"web2","vms":["a"],"renew":"identity","network":"user","mac":"52:54:00:00:00:01","forwards":["1:2"],"memory":"1GiB"}"#.to_vec(),
        br#"{"remote":"s3://b/p","name":"warm","as":"other","trust":"-----BEGIN","sign":"x","stream":true}"#.to_vec(),
        br#"{"max_bytes":1073741824,"listen":"10.0.0.1","registry":"a:1","min_bytes":1,"mode":"act","bytes":7,"peers":2}"#.to_vec(),
        br#"{"command":["sh","-c","ls"],"script":"ls","timeout_s":3,"terminal":{"rows":24,"columns":80,"kind":"xterm"},"input":true}"#.to_vec(),
        br#"{"name":"web","from":["/usr"],"lay":["/usr"],"domain":"shop","include":["*"],"exclude":[],"pinned":true,"root":false}"#.to_vec(),
        br#"{"socket":"/run/q","qmp":"/run/q","agent":"/run/a","domain":"shop","fields":{"memory":"2GiB"},"when":"now","on":true,"percent":10,"pages":100}"#.to_vec(),
    ]
}

pub fn request(data: &[u8]) -> u64 {
    BODIES.iter().fold(1, |found, body| found << 1 | body(data))
}

pub fn names() -> Vec<Vec<u8>> {
    let names = [
        "2222:22",
        "udp:127.0.0.1:80:8080",
        "127.0.0.1:80:8080",
        "[::1]:443:443/tcp",
        "tcp:127.0.0.1:2222-10.0.2.15:22",
        "udp::53-:53",
        "52:54:00:ab:cd:ef",
        "bridge:br0",
        "macvtap:eth0",
        "tap:t0",
        "user",
        "none",
        "web@12",
        "web-1.example",
        "1.5GiB",
        "64 MiB",
        "6.12.48+deb13-amd64",
        "5.15.0-1084-azure",
        "vg0/swap",
    ];
    names.map(|name| name.as_bytes().to_vec()).into()
}

pub fn name(data: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(data);
    let mut found = 1;
    // Each value's text is the value's again.
    if let Ok(forward) = text.parse::<Forward>() {
        assert_eq!(
            forward.to_string().parse::<Forward>().as_ref(),
            Ok(&forward)
        );
        assert_eq!(Forward::of_rule(&forward.rule()).as_ref(), Some(&forward));
        found |= 1 << 1 | u64::from(forward.is_any()) << 2;
    }
    if let Some(forward) = Forward::of_rule(&text) {
        assert_eq!(
            forward.to_string().parse::<Forward>().as_ref(),
            Ok(&forward)
        );
        found |= 1 << 3;
    }
    if let Ok(network) = text.parse::<Network>() {
        assert_eq!(
            network.to_string().parse::<Network>().as_ref(),
            Ok(&network)
        );
        let interface = network.interface().unwrap_or("none");
        assert!(!interface.contains(['/', ',', ' ', '\n']) && interface.len() < 16);
        found |= 1 << 4 | u64::from(network.needs_tap()) << 5;
    }
    if let Ok(address) = text.parse::<MacAddress>() {
        assert_eq!(
            address.to_string().parse::<MacAddress>().as_ref(),
            Ok(&address)
        );
        found |= 1 << 6;
    }
    if let Ok(reference) = Reference::parse(&text) {
        assert_eq!(reference.to_string(), text);
        found |= 1 << 7 | u64::from(reference.generation.is_some()) << 8;
    }
    if check_name("name", &text).is_ok() {
        assert!((1..=64).contains(&text.len()) && !text.contains(['/', '\n', ',']));
        let host = host_name(&text);
        assert!(
            (1..=64).contains(&host.len()) && !host.starts_with('-'),
            "{host}"
        );
        found |= 1 << 9;
    }
    if let Ok(size) = text.parse::<memfold_units::ByteSize>() {
        found |= 1 << 10 | u64::from(size.0 > 0) << 11;
    }
    if let Some(release) = memfold_host::kernel_release::Release::parse(&text) {
        assert!(!format!("{release:?}").is_empty());
        found |= 1 << 12;
    }
    if let Ok(volume) = text.parse::<memfold_lend::lvm::Volume>() {
        assert_eq!(volume.to_string(), text);
        found |= 1 << 13;
    }
    found
}

pub fn fingerprints() -> Vec<Vec<u8>> {
    let content = |level: u64, number: u64| level << 58 | number;
    let vm = |name: &str, first: u64| {
        let contents: Vec<u64> = (0..8).map(|n| content(2, first + n)).collect();
        json!({ "name": name, "domain": "shop", "ram_bytes": 1 << 28, "beside_bytes": 1 << 20, "contents": contents })
    };
    let host = |name: &str, vms: serde_json::Value| json!({ "format": 1, "host": name, "key": "k", "level": 2, "memory_bytes": 1_u64 << 32, "others_bytes": 1 << 20, "vms": vms });
    let prints = json!([
        host("one", json!([vm("a", 1), vm("b", 100)])),
        host("two", json!([vm("c", 1), vm("d", 100)])),
    ]);
    vec![
        prints.to_string().into(),
        json!([host("one", json!([]))]).to_string().into(),
    ]
}

/// Reads the fingerprints of several hosts, and proposes where their VMs should be.
pub fn fingerprint(data: &[u8]) -> u64 {
    let Ok(prints) = serde_json::from_slice::<Vec<Fingerprint>>(data) else {
        return 1;
    };
    match propose(&prints, 1 << 20, 10.0, None) {
        Ok(proposal) => {
            assert_eq!(proposal.hosts.len(), prints.len());
            let moves = proposal.moves.len().min(15) as u64;
            16 | moves << 5 | (prints.len().min(7) as u64) << 10
        }
        Err(error) => 2 + error.to_string().len() as u64 % 8,
    }
}
