//! Test of the daemon's `AppArmor` profile where the kernel enforces it. A Debian guest takes the
//! place of the host: this host's kernel may have no `AppArmor`. QEMU comes from this host.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use super::console_guest::{self, Machine, run};
use crate::support;

/// Shell script that collects, in the directory `$1`, what the guest lacks: memfold `$2`, its
/// library `$3`, its files for the host `$4`, QEMU with its libraries and firmware, and the parser
/// of profiles.
const PAYLOAD: &str = r#"
set -eu
mkdir -p "$1/lib" "$1/share/qemu" "$1/apparmor.d"
strip -o "$1/memfold" "$2"
strip -o "$1/libmemfold_qemu.so" "$3"
cp "$4/systemd/memfold.service" "$4/apparmor/memfold-daemon" "$1"
cp "$(command -v qemu-system-x86_64)" "$(command -v apparmor_parser)" "$1"
ldd "$1/qemu-system-x86_64" | awk '/=> \// { print $3 }' | xargs cp -Lt "$1/lib"
find /usr/share/qemu -name '*.rom' -exec cp -Lt "$1/share/qemu" {} +
for file in bios-256k.bin kvmvapic.bin linuxboot_dma.bin vgabios-stdvga.bin efi-virtio.rom; do
    for from in /usr/share/qemu /usr/share/seabios; do
        if [ -e "$from/$file" ]; then cp -L "$from/$file" "$1/share/qemu"; fi
    done
done
cp -r /etc/apparmor.d/abi /etc/apparmor.d/tunables /etc/apparmor.d/abstractions "$1/apparmor.d"
"#;

/// Shell script that puts these things where packages would, starts the unit, and prints a line
/// `result NAME VALUE` for each thing that was found or tried.
const SCRIPT: &str = r#"
exec 2>&1
payload=/opt/payload
result() { printf '\nresult %s %s\n' "$1" "$2"; }
mkdir -p /usr/lib/memfold /usr/share/qemu /etc/apparmor.d/local /etc/memfold/vms /var/lib/memfold/access /opt/lib
for file in /usr/bin/qemu-system-x86_64 /usr/bin/memfold /usr/lib/memfold/libmemfold_qemu.so; do
    touch $file
    mount --bind $payload/${file##*/} $file
done
mount --bind $payload/share/qemu /usr/share/qemu
# QEMU runs with the guest's libraries where there are such.
for file in $payload/lib/*; do
    name=${file##*/}
    [ -e /usr/lib/x86_64-linux-gnu/$name ] || ln -s $file /opt/lib/$name
done
echo /opt/lib >/etc/ld.so.conf.d/payload.conf
ldconfig
cp -r $payload/apparmor.d/. /etc/apparmor.d/
for name in memfold-daemon memfold-daemon-qemu; do echo "$payload/** mr," >/etc/apparmor.d/local/$name; done
cp $payload/memfold-daemon /etc/apparmor.d/
cp $payload/memfold.service /etc/systemd/system/
echo secret >/var/lib/memfold/access/operate.token

$payload/apparmor_parser -r -T /etc/apparmor.d/memfold-daemon
result loaded $?
systemctl daemon-reload
systemctl start memfold
result started $?
daemon=$(systemctl show --property=MainPID --value memfold)
result daemon "$(cat /proc/$daemon/attr/current)"
memfold doctor --json >/run/doctor
# 3: a requirement is missing, such as a KVM.
case $? in 0 | 3) result doctor 0 ;; *) result doctor 1 ;; esac
memfold vm run --name root --memory 64M --domain d -- -S
result root $?
memfold vm run --name nobody --memory 64M --domain d --user nobody -- -S
result nobody $?
memfold vm list --json >/run/list
result folded "$(grep -c '"fold_problems": \[\]' /run/list)"
for pid in $(sed -n 's/.*"pid": \([0-9]*\).*/\1/p' /run/list); do
    result qemu "$(cat /proc/$pid/attr/current)"
done
memfold report >/dev/null
result report $?
systemctl restart memfold
result restarted $?
result adopted "$(memfold vm list --json | grep -c '"pid"')"
memfold vm stop root --timeout 0
result stopped $?
result denied "$(dmesg | grep -c 'apparmor="DENIED"')"
dmesg | grep 'apparmor="DENIED"'
journalctl --unit=memfold --no-pager | tail -n 20

# Runs a program with the rights of a profile.
as() {
    profile=$1 name=$2
    shift 2
    (
        echo -n "exec $profile" >/proc/$BASHPID/attr/exec
        exec "$@" >/dev/null
    )
    result "$name" $?
}
for profile in memfold-daemon memfold-daemon//qemu; do
    kind=${profile##*[/-]}
    as $profile $kind-shadow cat /etc/shadow
    as $profile $kind-program cp /usr/share/qemu/kvmvapic.bin /usr/bin/evil
    as $profile $kind-unit cp /usr/share/qemu/kvmvapic.bin /etc/systemd/system/evil.service
    as $profile $kind-start sh -c 'exec id'
    as $profile $kind-token cat /var/lib/memfold/access/operate.token
    as $profile $kind-process cat /proc/1/environ
    as $profile $kind-disk cp /usr/share/qemu/kvmvapic.bin /var/lib/disk-of-$kind
done
echo all is said
"#;

/// Boots the guest, whose kernel enforces `AppArmor` profiles.
fn boot(directory: &Path) -> Machine {
    let payload = directory.join("payload");
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    run(Command::new("sh")
        .args(["-c", PAYLOAD, "payload"])
        .args([&payload, Path::new(env!("CARGO_BIN_EXE_memfold"))])
        .args([memfold_host::library().unwrap(), deploy]));
    std::fs::write(payload.join("script"), SCRIPT).unwrap();
    let machine = ["-machine", "q35", "-m", "1024"];
    let words = "apparmor=1 security=apparmor";
    console_guest::boot(&payload, "400M", &machine, words)
}

#[test]
fn under_apparmor_the_daemon_runs_vms_and_what_its_profile_does_not_list_is_refused() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let mut machine = boot(directory.path());
    let mut keys = machine.child.stdin.take().unwrap();
    let command = "mkdir /opt/payload; mount -o ro /dev/vdb /opt/payload; bash /opt/payload/script";
    writeln!(keys, "{command}").unwrap();
    let said = machine.says("all is said");
    let mut results: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in said.lines() {
        let words = line.strip_prefix("result ").and_then(|l| l.split_once(' '));
        if let Some((name, value)) = words {
            results.entry(name).or_default().push(value.trim());
        }
    }
    println!("{results:#?}");
    let stacked = "memfold-daemon//&memfold-daemon//qemu (enforce)";
    for (name, wanted) in [
        ("loaded", &["0"][..]),
        ("started", &["0"]),
        ("daemon", &["memfold-daemon (enforce)"]),
        ("doctor", &["0"]),
        ("root", &["0"]),
        ("nobody", &["0"]),
        ("folded", &["2"]),
        ("qemu", &[stacked, stacked]),
        ("report", &["0"]),
        ("restarted", &["0"]),
        ("adopted", &["2"]),
        ("stopped", &["0"]),
        ("denied", &["0"]),
    ] {
        assert_eq!(results[name], wanted, "{name}: {said}");
    }
    // What cat, cp and sh answer if they are refused.
    for (name, wanted) in [
        ("daemon-shadow", "1"),
        ("daemon-program", "1"),
        ("daemon-unit", "1"),
        ("daemon-start", "126"),
        ("daemon-token", "0"),
        ("daemon-process", "0"),
        ("daemon-disk", "0"),
        ("qemu-shadow", "1"),
        ("qemu-program", "1"),
        ("qemu-unit", "1"),
        ("qemu-start", "126"),
        ("qemu-token", "1"),
        ("qemu-process", "1"),
        ("qemu-disk", "0"),
    ] {
        assert_eq!(results[name], [wanted], "{name}: {said}");
    }
}
