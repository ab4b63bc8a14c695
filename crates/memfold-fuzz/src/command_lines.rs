//! Fuzzes the copying of command lines of QEMUs that memfold did not start. A guest that has taken
//! over its QEMU may have rewritten the command line and answers as it likes, and must not get by
//! that what QEMU's own user cannot get.

use std::path::Path;

use memfold_vm::foreign::{Answers, copy_line, of_arguments};
use memfold_vm::{Forward, conditions, endpoints};
use serde_json::{Value, json};

/// Divides the parts of an input: no text contains this byte.
const END: u8 = 0xFF;

const READ_CONFIG: &str = "[device \"ehci\"]\n driver = \"ich9-usb-ehci1\"\n# text\n[memory]\n size = \"1G\"\n[smbios]\n serial = \"a,b\"\n";

fn seed(line: &str, machine: &str, block: &Value, nodes: &Value) -> Vec<u8> {
    let words = line.lines().flat_map(|line| {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        [name, value]
    });
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    let line = format!("qemu\0{}\0", words.join("\0"));
    let parts = [
        &line,
        machine,
        &block.to_string(),
        &nodes.to_string(),
        READ_CONFIG,
    ];
    parts.map(str::as_bytes).join(&END)
}

/// Lines with each option that memfold rewrites, beside those of libvirt and Proxmox VE.
const OTHERS: [&str; 9] = [
    "-machine q35,accel=tcg,dump-guest-core=off\n-m 512\n-smp 2\n-drive file=/a,format=raw\n-hda b\n-cdrom c\n-drive if=pflash,format=raw,readonly=on,file=/fw\n-drive if=virtio,index=1,id=v,file=d\n-fda f\n-sd s",
    "-M pc\n-net nic,model=e1000\n-net user,hostfwd=tcp::2222-:22,guestfwd=tcp:10.0.2.100:1-cmd:cat\n-nic bridge,br=br0\n-nic none\n-netdev tap,id=n,fds=3:4,vhost=on\n-netdev hubport,id=h,hubid=1\n-nographic\n-L /usr/share/qemu\n-bios bios.bin\n-option-rom rom.bin",
    "-readconfig /q35.cfg\n-set device.ehci.addr=2\n-serial mon:stdio\n-serial tcp:127.0.0.1:1,server=on\n-parallel none\n-parallel stdio\n-debugcon stdio\n-debugcon chardev:x\n-gdb tcp::1\n-s\n-vnc :1\n-spice port=1,tls-port=2,unix=on,addr=/x\n-display vnc=:2\n-display {\"type\":\"dbus\"}\n-qmp unix:/q\n-monitor telnet:127.0.0.1:3",
    "-audio pa,model=hda\n-audiodev {\"id\":\"a,driver=wav,path=/etc/x\",\"driver\":\"spice\"}\n-icount shift=7\n-usbdevice tablet\n-overcommit cpu-pm=on\n-overcommit mem-lock=on\n-object iothread,id=i\n-object rng-random,id=r,filename=/dev/urandom\n-object secret,id=s,file=/s\n-object memory-backend-memfd,id=m,size=1G,prealloc=on,x-use-canonical-path-for-ramblock-id=off\n-mem-prealloc\n-device virtio-balloon,id=b\n-device isa-serial,chardev=c\n-chardev pty,id=c,mux=on\n-chardev socket,id=d,path=/p,server=on\n-device virtserialport,chardev=d,name=org.memfold.agent.0",
    "-object memory-backend-epc,id=e,size=1G",
    "-object memory-backend-file,id=m,mem-path=/dev/hugepages,size=1G",
    "-device vfio-pci,host=01:00.0\n-device virtio-vga-gl\n-device vhost-vsock-pci,guest-cid=7",
    "-kernel /k\n-initrd /i\n-append root=/dev/vda\n-dtb /d\n-drive if=none,id=x,,file.filename=/etc/shadow\n-device scsi-hd,drive=x\n-drive if=scsi,media=cdrom\n-drive if=floppy\n-device vmgenid,guid=1",
    "-machine q35,confidential-guest-support=sev0\n-icount rr=record,rrfile=a\n-usbdevice braille\n-plugin /x.so\n-fsdev local,id=f,path=/\n-brand-new x",
];

pub fn lines() -> Vec<Vec<u8>> {
    let inserted = |node: &str, file: &str| json!({ "node-name": node, "drv": "qcow2", "ro": false, "image": { "filename": file } });
    let device = |backend: &str, at: &str, node: &str| json!({ "device": backend, "qdev": at, "inserted": inserted(node, "/top") });
    let libvirt = json!([
        device("", "/machine/peripheral/virtio-disk0/virtio-backend", "d9"),
        device("", "sata0-0-0", "c-storage"),
        device("", "/machine/system.flash1", "fw1"),
    ]);
    let nodes = json!([
        { "node-name": "fw0", "image": { "virtual-size": 4 << 20 } },
        { "node-name": "fw1", "image": { "virtual-size": 540_672 } },
    ]);
    let proxmox = json!([device("", "scsi0", "throttle-drive-scsi0")]);
    let mut seeds = vec![
        seed(
            include_str!("../../memfold-vm/src/fixtures/libvirt.arguments"),
            "pc-q35-10.0",
            &libvirt,
            &nodes,
        ),
        seed(
            include_str!("../../memfold-vm/src/fixtures/proxmox.arguments"),
            "pc-i440fx-10.0+pve0",
            &proxmox,
            &json!([]),
        ),
    ];
    let drives = json!([
        device("ide0-hd0", "/machine/q35/ide.0", "#block1"),
        device("v", "/machine/peripheral-anon/device[2]/virtio-backend", "#block2"),
        device("pflash0", "/machine/system.flash0", "#block3"),
        { "device": "ide2-cd0", "qdev": "x", "inserted": Value::Null },
    ]);
    let sizes = json!([{ "node-name": "#block3", "image": { "virtual-size": 4096 } }]);
    seeds.extend(OTHERS.map(|line| seed(line, "pc-q35-10.0", &drives, &sizes)));
    seeds
}

/// Copies a command line. Whatever it is, the options that memfold makes have no other keys than
/// those that memfold gives them.
pub fn copy(data: &[u8]) -> u64 {
    let mut parts = data.splitn(5, |byte| *byte == END);
    let mut part = || parts.next().unwrap_or_default();
    let line = part();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let json = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or(Value::Null);
    let answers = Answers {
        machine: text(part()),
        accel: "tcg".into(),
        block: json(part()),
        nodes: json(part()),
        ..Answers::default()
    };
    let config = text(part());
    let words: Vec<String> = text(line).split('\0').map(str::to_owned).collect();
    let told = of_arguments(&words).len();
    let facts = usize::from(conditions::says_cpu_pm(words.iter().map(String::as_str)))
        + 2 * usize::from(endpoints::guest_name(&words).is_some());
    let beside = (told.min(15) << 2 | facts) as u64;
    match copy_line(line, &answers, |_: &Path| Ok(config.clone())) {
        Err(why) => why.chars().take(12).map(u64::from).sum::<u64>() << 8 | beside,
        Ok(copied) => {
            let forward: Forward = "2222:22".parse().expect("a forward");
            let words = copied.foreign.line(&[forward]);
            check_all(&words);
            assert_eq!(copied.disks.len(), copied.foreign.disks.len());
            for disk in &copied.foreign.disks {
                if let Some(option) = &disk.option {
                    assert_keys(
                        option,
                        &["if", "id", "bus", "unit", "media", "werror", "rerror"],
                    );
                }
            }
            let kinds = usize::from(copied.balloon)
                | usize::from(copied.foreign.agent.is_some()) << 1
                | usize::from(copied.foreign.console.is_some()) << 2
                | usize::from(copied.foreign.takes_forwards()) << 3;
            let sizes = words.len().min(127) << 4 | copied.disks.len().min(7) << 11;
            1 << 40 | ((sizes | kinds) as u64) << 8 | beside
        }
    }
}

/// Checks all options of a copied command line.
fn check_all(words: &[String]) {
    let flags = [
        "-enable-kvm",
        "-no-fd-bootchk",
        "-no-reboot",
        "-no-user-config",
        "-nodefaults",
        "-usb",
        "-win2k-hack",
    ];
    let mut words = words.iter();
    while let Some(option) = words.next() {
        if !flags.contains(&option.as_str()) {
            check(option, words.next().expect("an option's value"));
        }
    }
}

/// Checks a value that memfold has made: it names no file and no other host resource.
fn check(option: &str, value: &str) {
    match option {
        "-blockdev" => {
            let keys = ["driver", "node-name", "size", "read-zeroes", "read-only"];
            assert_keys(value, &keys);
            assert!(value.starts_with("driver=null-co,"), "{value}");
        }
        "-drive" => {
            let of_file = ["file.driver", "file.size", "file.read-zeroes"];
            let keys = [
                "if", "id", "bus", "unit", "media", "werror", "rerror", "format", "readonly",
            ];
            assert_keys(value, &[&keys[..], &of_file].concat());
        }
        "-audiodev" => assert_keys(value, &["", "id"]),
        "-object" if value.starts_with("memory-backend") => {
            let naming = "x-use-canonical-path-for-ramblock-id";
            assert_keys(value, &["", "id", "size", naming]);
        }
        "-chardev" => {
            assert!(value.starts_with("null,"), "{value}");
            assert_keys(value, &["", "id", "mux"]);
        }
        _ => {}
    }
}

/// Checks the keys of a value as QEMU reads them: divided by single commas.
fn assert_keys(value: &str, wanted: &[&str]) {
    for part in value.replace(",,", "").split(',') {
        let key = part.split_once('=').map_or("", |(key, _)| key);
        assert!(wanted.contains(&key), "'{key}' in {value}");
    }
}
