//! Shell scripts by which the agent carries out the daemon's orders. The shell is a child of the
//! agent, so `/proc/$PPID/exe` is the agent's program; `$MEMFOLD_AGENT` is its path.

use super::paths::END;
use super::{
    COPY_SERIAL, DROP_LATE, GuestOrder, LAID_SOURCE, NewIdentities, RENEWED, SECOND, SWAP_SERIAL,
};

impl GuestOrder {
    /// Returns the shell script for the order. The order must be valid, and the shell a child of
    /// the guest's agent.
    #[must_use]
    pub fn script(&self) -> String {
        match self {
            Self::BootId => "cat /proc/sys/kernel/random/boot_id".into(),
            Self::WaitBooted => BOOTED.into(),
            Self::HasGenerationId => HAS_GENERATION_ID.into(),
            Self::ListFreePages => "exec /proc/$PPID/exe --free-pages".into(),
            Self::ListExtents(files) => {
                let files = files.as_str();
                format!("exec /proc/$PPID/exe --extents <<'END'\n{files}{END}")
            }
            Self::MemoryInfo => "cat /proc/meminfo".into(),
            Self::SwapUse => swap_use(),
            Self::ListSegments => r#"exec "$MEMFOLD_AGENT" --segment-list"#.into(),
            Self::Sync => "sync".into(),
            Self::DropCaches { files, limit_ms } => drop_caches(files.as_str(), *limit_ms),
            Self::DropClean => "echo 1 > /proc/sys/vm/drop_caches".into(),
            Self::ResumeTrace => TRACE.into(),
            Self::ReadClock => "date +%s.%N".into(),
            Self::StepClock { behind_ns, now_s } => step_clock(*behind_ns, *now_s),
            Self::SetRtc => RTC.into(),
            Self::Renew(new) => renew(new),
            Self::SwapOn => swap_on(),
            Self::MountSegment { name, content } => {
                let option = if *content { " --content" } else { "" };
                format!("exec \"$MEMFOLD_AGENT\" --segment-lay {name}{option}")
            }
            Self::UnmountSegment { base } => {
                format!("exec \"$MEMFOLD_AGENT\" --segment-take-off {base}")
            }
            Self::PowerOff => POWER_OFF.into(),
            Self::Reboot => REBOOT.into(),
            Self::CopyToDisk { tops } => {
                let quoted: Vec<_> = tops
                    .iter()
                    .map(|top| quoted(top.trim_start_matches('/')))
                    .collect();
                format!(
                    "serial={COPY_SERIAL}\nset -- {}\n{COPY_DISK}root=/ mounts=/proc/self/mountinfo laid={LAID_SOURCE}\n{COPY_TOPS}{COPY_END}",
                    quoted.join(" ")
                )
            }
            Self::SendArchive { path } => {
                format!("exec \"$MEMFOLD_AGENT\" --send {}", quoted(path))
            }
            Self::SendFile { path } => format!("exec cat -- {}", quoted(path)),
            Self::ReceiveArchive { name, destination } => {
                let (name, destination) = (quoted(name), quoted(destination));
                format!("exec \"$MEMFOLD_AGENT\" --receive {name} {destination}")
            }
        }
    }
}

/// Returns `text` in single quotes, so that the shell takes it as one word.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// First drops the page cache of the files, for at most the time. If all were dropped in time, it
/// drops the other caches, without a time limit. If the guest's agent is too old to drop the cache
/// of single files, the script drops all caches, without a time limit.
fn drop_caches(files: &str, limit_ms: u32) -> String {
    let seconds = f64::from(limit_ms) / 1e3;
    format!(
        "{QUIETLY}/proc/$PPID/exe --drop-caches {seconds:.1} 2> /dev/null <<'END'\n{files}{END}[ $? != {DROP_LATE} ] || exit {DROP_LATE}\necho 3 > /proc/sys/vm/drop_caches"
    )
}

/// Adds the difference to the guest's clock. A guest whose `date` supports only whole seconds sets
/// its clock to the host's time.
fn step_clock(behind_ns: i128, now_s: i128) -> String {
    format!(
        "now=$(date +%s%N)
case $now in
    *[!0-9]* | '') at={now_s} ;;
    ???????????????????*) now=$((now + {behind_ns}))
        at=$((now / {SECOND})).$(printf %09d $((now % {SECOND}))) ;;
    *) at={now_s} ;;
esac
date -u -s \"@$at\" > /dev/null"
    )
}

fn renew(new: &NewIdentities) -> String {
    let mut parts = vec![format!(
        "{REPORT}seed={}\n{RANDOM}{SMALL_REPORTS}",
        new.seed
    )];
    if let Some(network) = &new.network {
        let (mac, cards) = (network.mac, network.cards);
        parts.push(format!("mac={mac} cards={cards}\n{ADDRESSES}"));
    }
    if let Some(names) = &new.names {
        let (name, id) = (&names.host_name, &names.machine_id);
        parts.push(format!("name={name}\nid={id}\n{IDENTITY}"));
    }
    parts.push(format!("echo {RENEWED}\n"));
    parts.concat()
}

/// Activates the swap disk, unless it is active.
///
/// virtio disks report that they rotate, so Linux would read the eight pages around each wanted
/// page. From a non-rotating disk it reads ahead along the program's access pattern, or almost
/// nothing if there is no pattern (`swap_use_vma_readahead`, `mm/swap_state.c`).
fn swap_on() -> String {
    format!(
        "for disk in /sys/block/vd*; do \
           [ \"$(cat \"$disk/serial\")\" = {SWAP_SERIAL} ] || continue; \
           device=/dev/${{disk##*/}}; \
           grep -q \"^$device \" /proc/swaps && exit 0; \
           echo 0 2> /dev/null > \"$disk/queue/rotational\"; \
           exec swapon \"$device\"; \
         done; echo 'the guest sees no swap disk' >&2; exit 1"
    )
}

fn swap_use() -> String {
    format!(
        "for disk in /sys/block/vd*; do \
           [ \"$(cat \"$disk/serial\")\" = {SWAP_SERIAL} ] || continue; \
           exec grep \"^/dev/${{disk##*/}}[[:space:]]\" /proc/swaps; \
         done 2> /dev/null; exit 1"
    )
}

/// Waits in the guest until systemd has started all units. Some units may have
/// failed (state `degraded`).
const BOOTED: &str = "state=$(timeout 280 systemctl is-system-running --wait); echo $state; [ \"$state\" = running ] || [ \"$state\" = degraded ]";

/// Reboots the guest after 0.3 s, so that the result still reaches the daemon.
const REBOOT: &str =
    "command -v systemctl > /dev/null && { (sleep 0.3; systemctl reboot) > /dev/null 2>&1 & }";

/// Shuts the guest down.
const POWER_OFF: &str =
    "if command -v systemctl > /dev/null; then systemctl poweroff; else poweroff; fi";

/// Shell script that succeeds if the guest's kernel has found the VM generation ID that QEMU
/// offers. The kernel's driver is an ACPI driver until Linux 6.9, and a platform driver since then.
const HAS_GENERATION_ID: &str = "for device in /sys/bus/acpi/drivers/vmgenid/*:* /sys/bus/platform/drivers/vmgenid/*:*; do [ -e \"$device\" ] && exit 0; done; exit 1";

/// Shell function `report WHAT COMMAND...`: runs the command, and reports its result. The lock lets
/// only one script run at a time, because a script of a former daemon may still run.
const REPORT: &str = r#"exec 9> /run/memfold-renewal.lock && flock 9 2> /dev/null
report() {
    what=$1; shift
    if said=$("$@" 2>&1); then echo "done $what"; else echo "left $what: $(echo "$said" | tail -n 1)"; fi
}
"#;

/// Reseeds the guest's random numbers by the agent's own program, whose child the shell is. Other
/// programs in the guest may see the seed; it only has to differ between VMs.
const RANDOM: &str = r#"agent=/proc/$PPID/exe
reseed() { echo "$seed" | "$agent" --reseed; }
report "random numbers" reseed
"#;

/// Makes the guest report free memory in pieces of 64 KiB instead of whole huge pages, which a
/// clone seldom has (`mm/page_reporting.c`). The host then gets back 98 % instead of 64 % of the
/// memory of a dropped cache. The clone's memory maps a file, so no huge page of the host is split.
const SMALL_REPORTS: &str = "order=/sys/module/page_reporting/parameters/page_reporting_order
[ ! -w $order ] || echo 4 > $order
";

/// Sets new MAC addresses. Waits for the network cards first, because a guest that was saved during
/// its boot finds them later.
const ADDRESSES: &str = r#"ethernet() {
    for nic in /sys/class/net/*; do
        [ -e "$nic/device" ] && [ "$(cat "$nic/type")" = 1 ] && echo "${nic##*/}"
    done
}
for second in 1 2 3 4 5 6 7 8 9 10; do
    [ "$(ethernet | wc -l)" -ge "$cards" ] && break
    sleep 1
done
# udev gives the cards their names.
udevadm settle --timeout=10 2> /dev/null
for nic in $(ethernet); do
    address=$(printf '52:54:00:%02x:%02x:%02x' $((mac >> 16 & 255)) $((mac >> 8 & 255)) $((mac & 255)))
    report "MAC address of $nic: $address" ip link set dev "$nic" address "$address"
    mac=$((mac + 1 & 0xffffff)) cards=$((cards - 1))
done
[ "$cards" -le 0 ] || echo "left MAC addresses: the guest lacks a driver for $cards of its network cards"
"#;

const IDENTITY: &str = r#"host() {
    old=$(cat /proc/sys/kernel/hostname)
    echo "$name" > /etc/hostname && echo "$name" > /proc/sys/kernel/hostname || return
    [ -e /etc/hosts ] || return 0
    sed "s/\([[:space:]]\)$old\([[:space:]]\|\$\)/\1$name\2/g" /etc/hosts > /etc/hosts.memfold && cat /etc/hosts.memfold > /etc/hosts
    rm -f /etc/hosts.memfold
}
machine() {
    for file in /etc/machine-id /var/lib/dbus/machine-id; do
        [ -e "$file" ] && [ ! -L "$file" ] || continue
        chmod u+w "$file" && echo "$id" > "$file" && chmod 444 "$file" || return
    done
}
next_seed() { head -c 512 /dev/urandom > /var/lib/systemd/random-seed; }
keys() {
    new=/etc/ssh/memfold-new
    rm -rf $new && mkdir -m 700 $new || return
    # New keys of the same kinds. The old keys stay until all new ones exist, so there are always keys.
    for key in /etc/ssh/ssh_host_*_key; do
        kind=${key#/etc/ssh/ssh_host_}
        ssh-keygen -q -t "${kind%_key}" -N '' -C "root@$name" -f "$new/${key##*/}" || { rm -rf $new; return 1; }
    done
    mv $new/ssh_host_* /etc/ssh/ || { rm -rf $new; return 1; }
    rm -rf $new
    for unit in ssh sshd; do systemctl try-restart "$unit" 2> /dev/null; done
    return 0
}
report "host name: $name" host
report "machine ID: $id" machine
[ ! -e /var/lib/systemd/random-seed ] || report "random seed of the next boot" next_seed
for key in /etc/ssh/ssh_host_*_key; do [ ! -e "$key" ] || { report "SSH host keys" keys; break; }; done
"#;

/// Begins a script that drops the guest's caches after dirty pages are written back. The agent's
/// trace events are off meanwhile (`set_event`, `Documentation/trace/events.rst`), because
/// reporting each dropped page would take about half of the time.
const QUIETLY: &str = r"saved=/run/memfold-events
on() { [ ! -s $saved ] || { cat $saved > set_event && rm $saved; }; }
if cd /sys/kernel/tracing/instances/memfold 2> /dev/null; then
    on
    trap on EXIT
    cat set_event > $saved && : > set_event
fi
";

/// Script that turns the agent's trace events on again after an interrupted drop.
const TRACE: &str = "saved=/run/memfold-events
    [ ! -s $saved ] || { cat $saved > /sys/kernel/tracing/instances/memfold/set_event && rm $saved; }";

/// Shell script that corrects the guest's RTC (hardware clock) if it is wrong by more than 2 s. The
/// RTC follows the host's time by itself, unless QEMU runs with `-rtc clock=vm`. The guest's
/// `hwclock` knows whether the RTC holds local time (`/etc/adjtime`).
const RTC: &str = "rtc=/sys/class/rtc/rtc0/since_epoch
[ -r $rtc ] || exit 0
off=$(($(cat $rtc) - $(date +%s)))
[ ${off#-} -gt 2 ] || exit 0
command -v hwclock > /dev/null || { echo \"the RTC is $off s off, and the guest has no hwclock\"; exit 1; }
hwclock --systohc";

/// Shell script that finds the disk to copy to, and mounts it at `$place` until the script ends.
const COPY_DISK: &str = r#"set -e
find_disk() {
    for disk in /sys/block/vd*; do
        [ "$(cat "$disk/serial" 2> /dev/null)" = "$serial" ] && return 0
    done
    return 1
}
tries=0
until find_disk; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || { echo "the disk to copy to does not appear" >&2; exit 1; }
    sleep 0.2
done
mkdir -p /run/memfold
# Each copy mounts at its own place, because the copy of a killed daemon may still be unmounting.
place=$(mktemp -d /run/memfold/copy-out.XXXXXX)
# umount fails while a process, such as the agent, has a file open there.
leave() {
    tries=0
    while mountpoint -q $place && ! umount $place 2> /dev/null; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || { umount $place; exit 1; }
        sleep 0.2
    done
    rmdir $place
}
trap leave EXIT
mount -t ext4 -o nosuid,nodev,noexec "/dev/${disk##*/}" $place
"#;

/// Shell script that copies directories to `$place`: with owners, modes, times, links, capabilities
/// and access lists, but without other file systems that are mounted below the directories.
/// Directories over which a segment is mounted (`$laid` in the table `$mounts`) are copied, because
/// they show the guest's own files.
const COPY_TOPS: &str = r#"cd $root
for top in "$@"; do
    [ -e "./$top" ] || continue
    cp -a -x --parents "./$top" $place/
    while read -r _ _ _ _ point rest; do
        case $rest in
            *" - overlay $laid"*) ;;
            *) continue ;;
        esac
        # The table has # as \043, for which printf wants \0043.
        point=$(printf %b "$(printf '%s\n' "$point" | sed 's/\\/\\0/g')")
        case $point in
            "/${top:+$top/}"*) ;;
            *) continue ;;
        esac
        cp -a -x --parents ".$point" $place/
    done < $mounts
done
"#;

/// Shell script that ends a copy. What was only cached may fail to be written.
const COPY_END: &str = "sync -f $place\n";

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::agent::ToAgent;
    use crate::frame::Validate;
    use crate::order::{NewAddresses, NewNames};
    use crate::permission::Permission;

    fn identities(names: Option<NewNames>) -> GuestOrder {
        let network = names.is_some().then_some(NewAddresses { mac: 7, cards: 1 });
        GuestOrder::Renew(NewIdentities {
            seed: "0123456789abcdef".repeat(4),
            network,
            names,
        })
    }

    fn names(host_name: &str, machine_id: &str) -> NewNames {
        let (host_name, machine_id) = (host_name.into(), machine_id.into());
        NewNames {
            host_name,
            machine_id,
        }
    }

    fn is_valid(order: GuestOrder) -> bool {
        let message = ToAgent::Order { command: 1, order };
        message.validate().is_ok()
    }

    /// An order of each kind.
    fn all() -> Vec<GuestOrder> {
        let files = super::super::PathList::new([&b"/etc/a b"[..]]).0;
        let path = String::from("/it's");
        vec![
            GuestOrder::BootId,
            GuestOrder::WaitBooted,
            GuestOrder::HasGenerationId,
            GuestOrder::ListFreePages,
            GuestOrder::ListExtents(files.clone()),
            GuestOrder::MemoryInfo,
            GuestOrder::SwapUse,
            GuestOrder::ListSegments,
            GuestOrder::Sync,
            GuestOrder::DropCaches {
                files,
                limit_ms: 1500,
            },
            GuestOrder::DropClean,
            GuestOrder::ResumeTrace,
            GuestOrder::ReadClock,
            GuestOrder::StepClock {
                behind_ns: -5,
                now_s: 7,
            },
            GuestOrder::SetRtc,
            identities(None),
            identities(Some(names("web-1.example", &"0".repeat(32)))),
            GuestOrder::SwapOn,
            GuestOrder::MountSegment {
                name: "base@3".into(),
                content: true,
            },
            GuestOrder::UnmountSegment {
                base: "base".into(),
            },
            GuestOrder::PowerOff,
            GuestOrder::Reboot,
            GuestOrder::CopyToDisk {
                tops: vec![path.clone()],
            },
            GuestOrder::SendArchive { path: path.clone() },
            GuestOrder::SendFile { path: path.clone() },
            GuestOrder::ReceiveArchive {
                name: String::new(),
                destination: path,
            },
        ]
    }

    #[test]
    fn the_script_of_each_order_is_one_that_the_shell_can_parse() {
        for order in all() {
            let script = order.script();
            assert!(is_valid(order.clone()), "{order:?}");
            assert_ne!(order.permission(), Permission::Exec);
            let shell = Command::new("/bin/sh").args(["-n", "-c", &script]).status();
            assert!(shell.unwrap().success(), "{script}");
        }
    }

    #[test]
    fn an_order_whose_texts_the_shell_would_interpret_is_refused_before_a_script_is_made() {
        let id = "0".repeat(32);
        for (name, machine) in [
            ("a b", &*id),
            ("$(x)", &id),
            ("", &id),
            ("a", "x"),
            ("-a", &id),
        ] {
            assert!(
                !is_valid(identities(Some(names(name, machine)))),
                "{name} {machine}"
            );
        }
        for segment in ["a;b", "a b", "", "--content", "a\nb", "a/b"] {
            let base = segment.to_owned();
            assert!(!is_valid(GuestOrder::UnmountSegment { base }), "{segment}");
            let (name, content) = (segment.to_owned(), false);
            assert!(!is_valid(GuestOrder::MountSegment { name, content }));
        }
        let path = "/a\0b".to_owned();
        assert!(!is_valid(GuestOrder::SendFile { path: path.clone() }));
        assert!(!is_valid(GuestOrder::CopyToDisk { tops: vec![path] }));
        for many in [vec!["/usr".to_owned(); 10_000], vec!["'".repeat(10_000)]] {
            assert!(!is_valid(GuestOrder::CopyToDisk { tops: many }));
        }
    }

    #[test]
    fn a_copy_for_a_segment_contains_the_directories_over_which_a_segment_is_mounted() {
        let root = std::env::temp_dir().join(format!("copy-tops-{}", std::process::id()));
        for directory in ["usr", "opt/a#1", "opt2", "mnt"] {
            std::fs::create_dir_all(root.join(directory)).unwrap();
        }
        let mounts = root.join("mountinfo");
        let table = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            40 22 0:40 / /usr rw shared:9 - overlay memfold:web@3 rw,lowerdir=/a:/b\n\
            41 22 0:41 / /opt/a\\0431 rw - overlay memfold:web@3 rw,lowerdir=/a:/b\n\
            42 22 0:42 / /opt2 rw - overlay overlay rw,lowerdir=/a:/b\n\
            43 22 0:43 / /mnt rw - tmpfs memfold:web@3 rw\n";
        std::fs::write(&mounts, table).unwrap();
        let copied = |tops: &str| {
            let script = format!(
                "set -e\ncp() {{ echo \"$*\"; }}\nset -- {tops}\nroot='{}' mounts='{}' laid={LAID_SOURCE} place=/out\n{COPY_TOPS}",
                root.display(),
                mounts.display()
            );
            let shell = Command::new("/bin/sh").args(["-c", &script]).output();
            let shell = shell.unwrap();
            assert!(shell.status.success(), "{shell:?}");
            let said = String::from_utf8(shell.stdout).unwrap();
            let of_line = |line: &str| {
                let path = line.strip_prefix("-a -x --parents ./")?;
                Some(path.strip_suffix(" /out/")?.to_owned())
            };
            said.lines().map(of_line).collect::<Option<Vec<String>>>()
        };
        let (all, opt, usr) = (copied("''"), copied("opt opt2 gone"), copied("usr"));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(all.unwrap(), ["", "usr", "opt/a#1"]);
        assert_eq!(opt.unwrap(), ["opt", "opt/a#1", "opt2"]);
        assert_eq!(usr.unwrap(), ["usr"]);
    }

    #[test]
    fn a_path_in_an_order_to_read_a_file_is_one_word_for_the_shell() {
        let directory = std::env::temp_dir().join(format!("order-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let file = directory.join("it's $(a) `b` \"c\"\n*");
        std::fs::write(&file, "right").unwrap();
        let path = file.to_str().unwrap().to_owned();
        let script = GuestOrder::SendFile { path }.script();
        let read = Command::new("/bin/sh").args(["-c", &script]).output();
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(read.unwrap().stdout, b"right");
    }

    #[test]
    fn a_report_about_new_identities_has_a_line_for_each_and_the_reason_of_a_failure() {
        let steps = "report one true; report two sh -c 'echo not here >&2; false'";
        let script = format!("{REPORT}{steps}").replace("/run/memfold-renewal.lock", "/dev/null");
        let said = Command::new("/bin/sh").args(["-c", &script]).output();
        assert_eq!(said.unwrap().stdout, b"done one\nleft two: not here\n");
    }
}
