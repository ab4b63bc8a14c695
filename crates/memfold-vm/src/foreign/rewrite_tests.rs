use super::*;

fn line(text: &str) -> Vec<String> {
    let words = text.lines().flat_map(|line| {
        let (name, value) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        [name, value].map(str::to_owned)
    });
    let words = words.filter(|word| !word.is_empty());
    ["qemu".to_owned()].into_iter().chain(words).collect()
}

/// Copies a command line, given as words.
fn copy(line: &[String], facts: &Facts) -> Result<Copy, String> {
    super::copy(&options::read(line)?, facts)
}

/// Splits text into words.
fn words(text: &str) -> Vec<String> {
    let words = std::iter::once("qemu").chain(text.split_whitespace());
    words.map(str::to_owned).collect()
}

fn medium(backend: &str, device: &str, node: &str) -> Medium {
    Medium {
        backend: backend.into(),
        device: device.into(),
        node: node.into(),
    }
}

fn facts() -> Facts {
    Facts {
        machine: "pc-q35-10.0".into(),
        accel: "tcg".into(),
        ..Facts::default()
    }
}

/// Returns the nodes of a copy: device path, node, `-drive` options.
fn nodes(copy: &Copy) -> Vec<(&str, &str, &str)> {
    let nodes = copy.nodes.iter();
    nodes
        .map(|(at, node)| {
            let option = node.option.as_deref().unwrap_or_default();
            (at.as_str(), node.name.as_str(), option)
        })
        .collect()
}

fn refused(text: &str, words: &[&str]) {
    let why = copy(&line(text), &facts()).unwrap_err();
    for word in words {
        assert!(why.contains(word), "no '{word}' in: {why}");
    }
}

const LIBVIRT: &str = include_str!("../fixtures/libvirt.arguments");

/// Facts about the QEMU of [`LIBVIRT`].
fn libvirt_facts() -> Facts {
    Facts {
        media: vec![
            // A snapshot that libvirt made lies over this disk.
            medium("", "/machine/peripheral/virtio-disk0/virtio-backend", "d9"),
            medium("", "sata0-0-0", "c-storage"),
            medium("", "/machine/system.flash1", "fw1"),
        ],
        sizes: [("fw0".to_owned(), 4 << 20), ("fw1".to_owned(), 540_672)].into(),
        ..facts()
    }
}

#[test]
fn a_copy_of_a_libvirt_domain_keeps_its_devices_and_no_resources_of_the_host() {
    let copy = copy(&line(LIBVIRT), &libvirt_facts()).unwrap();
    let words = copy.foreign.words.join("\n");
    for word in [
        "-machine\npc-q35-10.0,",
        "memory-backend-ram,id=pc.ram,size=536870912",
        "driver=null-co,node-name=fw0,size=4194304,read-zeroes=on,read-only=on",
        "driver=null-co,node-name=fw1,size=540672,read-zeroes=on,read-only=off",
        r#"{"downscript":"no","id":"hostnet0","script":"no","type":"tap"}"#,
        "\"mac\":\"52:54:00:00:00:01\"",
        "-chardev\nnull,id=charmonitor",
        "-audiodev\nnone,id=audio1",
        "\"guid\":\"auto\"",
    ] {
        assert!(words.contains(word), "no '{word}' in: {words}");
    }
    for word in [
        "masterKey0",
        "fd=",
        "vhost",
        "-vnc",
        "-sandbox",
        "-S\n",
        "-mon\n",
        "no-shutdown",
        "/top",
        "/base",
        "/fw.",
        "/cd",
        "pty",
    ] {
        assert!(!words.contains(word), "'{word}' in: {words}");
    }
    assert_eq!(copy.foreign.agent.as_deref(), Some("charchannel0"));
    assert_eq!(copy.foreign.console.as_deref(), Some("charserial0"));
    assert_eq!((copy.foreign.cards, copy.balloon), (1, true));
    assert_eq!(
        nodes(&copy),
        [
            ("/machine/peripheral/virtio-disk0/virtio-backend", "d1", ""),
            ("sata0-0-0", "c-storage", ""),
        ]
    );
}

#[test]
fn a_copy_of_a_vm_that_was_started_by_hand_keeps_its_devices() {
    let text = "-M q35\n-m 512\n-smp 2\n-enable-kvm\n-nographic\n-object memory-backend-ram,id=ram,size=512M\n\
                -drive file=a.qcow2,if=virtio\n-drive file=/fw,if=pflash,readonly=on,format=raw\n-drive if=none,id=cd,media=cdrom\n-drive file=/b,if=none,id=b,format=raw\n-device scsi-hd,drive=b,id=s0\n\
                -nic bridge,br=br0,model=e1000\n-netdev user,id=n0,hostfwd=tcp::2222-:22,hostname=x\n-device e1000,netdev=n0\n-qmp unix:/q,server=on\n-daemonize";
    let facts = Facts {
        media: vec![
            medium(
                "virtio0",
                "/machine/peripheral-anon/device[2]/virtio-backend",
                "#block1",
            ),
            medium("b", "s0", "#block2"),
            medium("pflash0", "/machine/system.flash0", "#block3"),
        ],
        sizes: [("#block3".to_owned(), 1 << 20)].into(),
        ..facts()
    };
    let copy = copy(&line(text), &facts).unwrap();
    let wanted = "-machine pc-q35-10.0 -m 512 -smp 2 -enable-kvm -serial chardev:memfold-console \
                  -object memory-backend-ram,id=ram,size=512M \
                  -drive if=pflash,unit=0,id=pflash0,format=raw,readonly=on,file.driver=null-co,file.size=1048576,file.read-zeroes=on -drive if=none,id=cd,media=cdrom -device scsi-hd,drive=b,id=s0 -nic tap,model=e1000,script=no,downscript=no \
                  -netdev user,hostname=x,id=n0 -device e1000,netdev=n0 -audio none";
    let sorted = |text: &str| {
        let mut words: Vec<String> = text
            .split(' ')
            .map(|word| {
                let mut parts: Vec<_> = word.split(',').collect();
                parts[1..].sort_unstable();
                parts.join(",")
            })
            .collect();
        words.retain(|word| !word.is_empty());
        words
    };
    assert_eq!(sorted(&copy.foreign.words.join(" ")), sorted(wanted));
    assert_eq!(copy.foreign.console.as_deref(), Some("memfold-console"));
    let virtio = "/machine/peripheral-anon/device[2]/virtio-backend";
    assert_eq!(
        nodes(&copy),
        [
            (
                virtio,
                "memfold-drive0",
                "if=virtio,id=virtio0,bus=0,unit=0"
            ),
            ("s0", "memfold-drive1", "if=none,id=b"),
        ]
    );
    assert_eq!(
        copy.foreign.left_out,
        [
            "-nic: bridge br=br0",
            "network n0: hostfwd=tcp::2222-:22",
            "-qmp unix:/q",
        ]
    );
}

/// A command line as Proxmox VE 9 writes it (`qm showcmd`), from its documentation, not from a real
/// host.
const PROXMOX: &str = include_str!("../fixtures/proxmox.arguments");

#[test]
fn a_copy_of_a_proxmox_vm_keeps_its_devices_and_no_resources_of_the_host() {
    let facts = Facts {
        machine: "pc-i440fx-10.0+pve0".into(),
        media: vec![medium("", "scsi0", "drive-scsi0")],
        ..facts()
    };
    let copy = copy(&line(PROXMOX), &facts).unwrap();
    let words = copy.foreign.words.join("\n");
    for word in [
        "-machine\npc-i440fx-10.0+pve0",
        "-drive\nif=none,id=drive-ide2,media=cdrom",
        "-device\nscsi-hd,bus=virtioscsi0.0",
        "throttle-drive-scsi0",
        "guid=auto",
    ] {
        assert!(words.contains(word), "no '{word}' in: {words}");
    }
    for word in [
        "-id\n",
        "-mon",
        "/var/run",
        "/dev/pve",
        "pve-bridge",
        "vhost",
        "-vnc",
        "-iscsi",
    ] {
        assert!(!words.contains(word), "'{word}' in: {words}");
    }
    assert_eq!(nodes(&copy), [("scsi0", "drive-scsi0", "")]);
    assert_eq!((copy.foreign.cards, copy.balloon), (1, true));
}

#[test]
fn copying_a_vm_with_devices_that_a_second_qemu_cannot_have_is_refused() {
    refused("-device vfio-pci,host=01:00.0", &["vfio-pci", "this host"]);
    refused("-device loader,file=/etc/shadow", &["loader"]);
    refused(
        "-object memory-backend-file,id=m,mem-path=/dev/hugepages,size=1G",
        &["'m'", "mem-path"],
    );
    refused(
        "-object memory-backend-memfd,id=m,hugetlb=on,size=1G",
        &["'m'", "huge"],
    );
    refused(
        "-object input-linux,id=i,evdev=/dev/input/event0",
        &["input-linux"],
    );
    refused("-fsdev local,id=f,path=/,security_model=none", &["-fsdev"]);
    refused("-plugin /tmp/x.so", &["-plugin"]);
    refused("-drive file=/a", &["ide0-hd0", "gone"]);
    refused("disk.img", &["ide0-hd0", "gone"]);
    refused("-device virtio-vga-gl", &["virtio-vga-gl", "OpenGL"]);
    refused("-mem-path /dev/hugepages", &["-mem-path", "RAM"]);
    refused("-icount shift=7,rr=record,rrfile=a", &["rr=record"]);
    refused("-usbdevice braille", &["braille"]);
    refused(
        "-device vhost-vsock-pci,guest-cid=7",
        &["guest-cid=7", "only one VM", "without that device"],
    );
    refused("-mem-prealloc\n-brand-new x", &["'-brand-new'"]);
    refused(
        "-machine q35,confidential-guest-support=sev0",
        &["encrypted"],
    );
}

#[test]
fn copying_a_vm_with_a_disk_whose_device_cannot_be_identified_is_refused() {
    let with = |device: &str, text: &str| {
        let facts = Facts {
            media: vec![medium("", device, "over")],
            ..facts()
        };
        copy(&line(text), &facts).map(|copy| copy.foreign.words.join(" "))
    };
    let text = "-blockdev driver=file,node-name=d,filename=/d\n-device virtio-blk-pci,drive=d,id=a";
    with("a", text).unwrap();
    // The device has no id, and another node lies over the node that it was started with.
    let why = with("/machine/peripheral-anon/device[0]/virtio-backend", text).unwrap_err();
    assert!(why.contains("give that device an id"), "{why}");
    let why = with("", text).unwrap_err();
    assert!(why.contains("'d'") && why.contains("gone"), "{why}");
    // The file of an ejected drive is not opened.
    let ejected = "-drive if=none,id=cd,file.driver=file,file.filename=/etc/shadow\n-device ide-cd,drive=cd,id=c";
    let words = with("", ejected).unwrap();
    assert!(
        words.contains("-drive if=none,id=cd,media=cdrom") && !words.contains("shadow"),
        "{words}"
    );
}

/// Cases: an option, its copy, and words that must not occur in the copy.
const KINDS: &[(&str, &str, &str)] = &[
    ("-watchdog-action reset", "-watchdog-action reset", ""),
    ("-k en-us -name x", "", "en-us"),
    ("-mem-prealloc -name x", "", "prealloc"),
    (
        "-overcommit mem-lock=on,cpu-pm=on",
        "-overcommit cpu-pm=on",
        "mem-lock",
    ),
    ("-overcommit mem-lock=on -name x", "", "overcommit"),
    ("-nodefaults -nographic", "-nodefaults", "-serial"),
    (
        "-nographic",
        "-serial chardev:memfold-console",
        "-nographic",
    ),
    (
        "-nographic -chardev null,id=c -device isa-serial,chardev=c",
        "-device isa-serial,chardev=c",
        "-nographic",
    ),
    (
        "-chardev null,id=c -serial chardev:c",
        "-serial chardev:c",
        "-chardev",
    ),
    (
        "-serial chardev:c -chardev stdio,mux=on,id=c -mon chardev=c",
        "-serial chardev:c",
        "-chardev",
    ),
    (
        "-serial null -chardev pty,id=a,mux=on -serial chardev:b -chardev pty,id=b",
        "-serial null -chardev null,id=a,mux=on -serial chardev:b",
        "pty",
    ),
    (
        "-serial mon:stdio -serial pty",
        "-serial chardev:memfold-console -serial null",
        "pty",
    ),
    ("-serial none", "-serial none", "console"),
    (
        "-debugcon file:/log -parallel pty",
        "-debugcon null -parallel null",
        "/log",
    ),
    (
        "-netdev {\"type\":\"socket\",\"id\":\"n\",\"mcast\":\"230.0.0.1:1\"}",
        "-netdev {\"id\":\"n\",\"restrict\":true,\"type\":\"user\"}",
        "230",
    ),
    (
        "-netdev tap,id=n,queues=2,vhost=on",
        "-netdev tap,downscript=no,id=n,queues=2,script=no",
        "vhost",
    ),
    (
        "-net nic,model=e1000 -net tap,ifname=t",
        "-net nic,model=e1000 -net tap,downscript=no,script=no",
        "ifname",
    ),
    (
        "-audio pa,model=hda,server=/run/pulse",
        "-audio none,model=hda",
        "pulse",
    ),
    (
        "-chardev spicevmc,id=u,name=usbredir -device usb-redir,chardev=u",
        "-chardev null,id=u -device usb-redir,chardev=u",
        "spicevmc",
    ),
    ("-usbdevice tablet -usb", "-usbdevice tablet -usb", ""),
    (
        "-L /firmware -s -S -daemonize -display gtk,gl=on -full-screen",
        "",
        "firmware",
    ),
    (
        "-seed 7 -win2k-hack -smbios type=1,serial=a",
        "-seed 7 -win2k-hack -smbios type=1,serial=a",
        "",
    ),
    (
        "-object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"r\",\"size\":4096,\"x-use-canonical-path-for-ramblock-id\":false}",
        "-object memory-backend-ram,id=r,size=4096,x-use-canonical-path-for-ramblock-id=off",
        "memfd",
    ),
    ("-object filter-dump,id=f,netdev=n,file=/dump", "", "dump"),
    (
        "-cdrom /a.iso",
        "-drive if=ide,id=ide2-cd0,bus=2,unit=0,media=cdrom",
        "a.iso",
    ),
    (
        "-fda /a.img",
        "-drive if=floppy,id=floppy0,bus=0,unit=0",
        "a.img",
    ),
];

#[test]
fn each_kind_of_qemu_option_is_rewritten_so_that_a_second_qemu_can_use_it() {
    for (text, wanted, gone) in KINDS {
        let copy = copy(&words(text), &facts()).unwrap_or_else(|why| panic!("{text}: {why}"));
        let made = copy.foreign.words.join(" ");
        let made = made
            .replace("-machine pc-q35-10.0", "")
            .replace("-accel tcg", "")
            .replace(
                " -audio none",
                if wanted.contains("-audio") {
                    " -audio none"
                } else {
                    ""
                },
            );
        assert_eq!(made.trim(), *wanted, "{text}");
        assert!(gone.is_empty() || !made.contains(gone), "'{gone}': {made}");
    }
}

#[test]
fn a_console_that_several_devices_of_a_vm_use_counts_as_shared() {
    let shared = "-chardev stdio,id=c,mux=on -serial chardev:c -device virtio-serial-pci -device virtconsole,chardev=c";
    let made = copy(&words(shared), &facts()).unwrap();
    assert_eq!(
        (made.foreign.console.as_deref(), made.foreign.console_shared),
        (Some("c"), true)
    );
    // Here the console's device is shared with a monitor only, which the copy leaves out.
    let alone = "-chardev stdio,id=c,mux=on -serial chardev:c -mon chardev=c";
    assert!(
        !copy(&words(alone), &facts())
            .unwrap()
            .foreign
            .console_shared
    );
}

#[test]
fn a_copied_vm_loses_displays_and_ports_that_only_one_vm_can_use_and_they_are_named() {
    for (text, wanted) in [
        ("-vnc 127.0.0.1:0,password=on", "-vnc 127.0.0.1:0"),
        ("-vnc none", ""),
        ("-spice port=5900,password=secret", "-spice port=5900"),
        ("-s -gdb tcp::9", "-gdb tcp::1234; -gdb tcp::9"),
        ("-monitor tcp::4,server=on -qmp stdio", "-monitor tcp::4"),
        (
            "-chardev socket,id=c,path=/s,server=on -chardev null,id=n",
            "chardev 'c' (socket path=/s)",
        ),
        (
            "-serial mon:telnet:127.0.0.1:4,server",
            "-serial mon:telnet:127.0.0.1:4",
        ),
        ("-display vnc=:1 -display none", "-display vnc"),
        (
            "-netdev user,id=n,hostfwd=tcp::2-:22",
            "network n: hostfwd=tcp::2-:22",
        ),
        ("-netdev tap,id=n,ifname=t0", "network n: tap ifname=t0"),
        (
            "-mem-prealloc -overcommit mem-lock=on,cpu-pm=on",
            "-mem-prealloc (RAM is not filled at the start); -overcommit mem-lock=on (RAM is not locked)",
        ),
        (
            "-object memory-backend-ram,id=m,size=1G,prealloc=on",
            "prealloc=on of memory 'm' (RAM is not filled at the start)",
        ),
        ("-overcommit mem-lock=off", ""),
    ] {
        let copy = copy(&words(text), &facts()).unwrap();
        assert_eq!(copy.foreign.left_out.join("; "), wanted, "{text}");
    }
}

#[test]
fn relative_file_names_of_a_copied_vm_are_resolved_in_the_working_directory_of_qemu() {
    let place = tempfile::tempdir().unwrap();
    let inner = place.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    for name in ["inner/f", "up"] {
        std::fs::write(place.path().join(name), name).unwrap();
    }
    let view = View::default().at(&inner);
    let facts = Facts { view, ..facts() };
    let inner = inner.display();
    let up = place.path().join("up");
    for (text, wanted) in [
        (
            "-fw_cfg name=opt/a,file=f",
            format!("file={inner}/f,name=opt/a"),
        ),
        ("-fw_cfg opt/a,file=./f", format!("opt/a,file={inner}/f")),
        (
            "-fw_cfg name=opt/f,string=f",
            "name=opt/f,string=f".to_owned(),
        ),
        ("-kernel ../up", up.display().to_string()),
        ("-option-rom f", format!("{inner}/f")),
        (
            "-device e1000,romfile=f",
            format!("e1000,romfile={inner}/f"),
        ),
        (
            "-device e1000,romfile=pxe.rom",
            "e1000,romfile=pxe.rom".to_owned(),
        ),
        ("-smbios file=f", format!("file={inner}/f")),
        (
            "-boot menu=on,splash=f",
            format!("menu=on,splash={inner}/f"),
        ),
        ("-bios f", format!("{inner}/f")),
        ("-acpitable file=f", format!("file={inner}/f")),
    ] {
        let made = copy(&words(text), &facts).unwrap();
        assert_eq!(made.foreign.words[1], wanted, "{text}");
    }
    let made = copy(
        &words(&format!("-bios up -L {}", place.path().display())),
        &facts,
    )
    .unwrap();
    assert_eq!(made.foreign.words[1], up.display().to_string());
}

#[test]
fn in_any_order_of_qemu_options_a_copied_drive_keeps_its_bus_and_unit() {
    let text = "-drive if=virtio,index=1,file=b -drive if=virtio,index=0,file=a -hda c -drive if=none,id=d7,file=d,werror=stop -device scsi-hd,drive=d7 \
                -drive if=pflash,file=e,readonly=on -drive if=pflash,file=f,id=drive-efi -drive if=none,file=g -device ide-hd,drive=none1";
    let facts = Facts {
        media: vec![
            medium(
                "virtio1",
                "/machine/peripheral-anon/device[2]/virtio-backend",
                "#1",
            ),
            medium(
                "virtio0",
                "/machine/peripheral-anon/device[3]/virtio-backend",
                "#2",
            ),
            medium("ide0-hd0", "/machine/unattached/device[9]", "#3"),
            medium("d7", "/machine/peripheral-anon/device[0]", "#4"),
            medium("pflash0", "/machine/system.flash0", "#5"),
            medium("drive-efi", "/machine/system.flash1", "#6"),
            medium("none1", "/machine/peripheral-anon/device[1]", "#7"),
        ],
        sizes: [("#5".to_owned(), 4096), ("#6".to_owned(), 8192)].into(),
        ..facts()
    };
    let copy = copy(&words(text), &facts).unwrap();
    let found = nodes(&copy);
    let options: Vec<&str> = found.iter().map(|(.., option)| *option).collect();
    assert_eq!(
        options,
        [
            "if=none,id=d7,werror=stop",
            "if=none,id=none1",
            "if=virtio,id=virtio1,bus=0,unit=1",
            "if=virtio,id=virtio0,bus=0,unit=0",
            "if=ide,id=ide0-hd0,bus=0,unit=0,media=disk",
        ]
    );
    let names: std::collections::BTreeSet<&str> = found.iter().map(|(_, name, _)| *name).collect();
    assert_eq!(names.len(), found.len(), "{found:?}");
    let made = copy.foreign.words.join(" ");
    for flash in [
        "if=pflash,unit=0,id=pflash0,format=raw,readonly=on,file.driver=null-co,file.size=4096",
        "if=pflash,unit=1,id=drive-efi,format=raw,readonly=off,file.driver=null-co,file.size=8192",
    ] {
        assert!(made.contains(flash), "{made}");
    }
}

#[test]
fn copying_a_damaged_qemu_command_line_never_causes_a_panic() {
    let whole: Vec<char> = LIBVIRT.chars().collect();
    let facts = libvirt_facts();
    let mut random = 1_u64;
    let (mut made, mut refused) = (0, 0);
    for _ in 0..5000 {
        let mut next = |below: usize| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            usize::try_from(random >> 33).unwrap() % below
        };
        let mut text = whole.clone();
        for _ in 0..=next(4) {
            let at = next(text.len());
            match next(3) {
                0 => text[at] = [',', '=', '-', '{', '"', ' ', '\n', '/', '\u{fffd}'][next(9)],
                1 => text.truncate(at.max(1)),
                _ if text.len() > 1 => drop(text.remove(at)),
                _ => {}
            }
        }
        let text: String = text.into_iter().collect();
        match copy(&line(&text), &facts) {
            Ok(mut copy) => {
                made += 1;
                let _ = super::super::files::take_out(&mut copy.foreign.words, &View::default());
            }
            Err(why) => {
                refused += 1;
                assert!(!why.is_empty());
            }
        }
    }
    // Both results occurred often.
    assert!(made > 100 && refused > 100, "{made} {refused}");
}

#[test]
fn a_name_with_a_comma_on_a_copied_command_line_adds_no_option_of_qemu() {
    // Another driver or file would be opened with the rights of the second QEMU.
    let text = r#"-object {"qom-type":"memory-backend-ram","id":"m,share=on","size":"1G,x=y"}
        -audiodev {"id":"a,driver=wav,path=/x","driver":"spice"}
        -chardev {"backend":"pty","id":"c,path=/x"}
        -drive if=none,id=d,,file.filename=/x,media=cdrom
        -device scsi-cd,drive=d,,file.filename=/x"#;
    let copy = copy(&line(text), &facts()).unwrap();
    let words = &copy.foreign.words;
    for wanted in [
        "memory-backend-ram,id=m,,share=on,size=1G,,x=y",
        "none,id=a,,driver=wav,,path=/x",
        "null,id=c,,path=/x",
        "if=none,id=d,,file.filename=/x,media=cdrom",
    ] {
        assert!(
            words.iter().any(|word| word == wanted),
            "no '{wanted}' in {words:?}"
        );
    }
}
