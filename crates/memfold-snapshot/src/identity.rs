//! Gives a restored VM new identities (random numbers, MAC addresses, host name, ...), so that it
//! differs from other VMs that run from the same snapshot. QEMU and the guest's agent renew them:
//!
//! ```text
//!   QEMU    a new VM generation ID: a kernel with a driver for it reseeds its random numbers before user code runs
//!   agent   reseeds random numbers, too, for kernels without the driver; on request, new MAC addresses, host name,
//!           machine ID, SSH host keys
//! ```
//! The agent renews identities with a shell script, which the daemon sends as soon as the agent
//! answers. If the daemon dies meanwhile, the script may run a second time, with the same result.

use std::fs::File;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use memfold_vm::{MacAddress, VmDirectory, VmSpec, host_name, missing_is_fine};

/// File in a VM's directory that contains a [`Plan`] until the plan is executed.
const FILE: &str = "renewal.json";

/// Shell script that succeeds if the guest's kernel has found the VM generation ID that QEMU
/// offers. The kernel's driver is an ACPI driver until Linux 6.9, and a platform driver since then.
pub const HAS_GENERATION_ID: &str = "for device in /sys/bus/acpi/drivers/vmgenid/*:* /sys/bus/platform/drivers/vmgenid/*:*; do [ -e \"$device\" ] && exit 0; done; exit 1";

/// Which identities a restored VM renews.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Renew {
    /// Only random numbers: the VM continues as the saved VM.
    #[default]
    Random,
    /// Random numbers and MAC addresses: for a second VM, perhaps on the same network.
    Network,
    /// Random numbers, MAC addresses, host name, machine ID and SSH host keys.
    Identity,
}

/// Result of renewing the identities of a restored VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Renewal {
    /// Whether the guest has not answered yet; the lists are then empty.
    pub pending: bool,
    /// Identities that the guest has renewed, as text.
    pub done: Vec<String>,
    /// Identities that are still those of the snapshot, each with the reason.
    pub left: Vec<String>,
}

/// New identities for one restored VM, before the guest has received them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    renew: Renew,
    host_name: String,
    /// Seed that is mixed into the guest's random numbers: 64 hexadecimal digits.
    seed: String,
    /// Machine ID: 32 hexadecimal digits, a random UUID.
    machine_id: String,
    /// Last three bytes of the first network card's MAC address; the addresses of further cards
    /// count up. The first three bytes are QEMU's prefix.
    mac: u32,
    /// Number of the VM's network cards.
    cards: usize,
    /// Whether the guest's clock continues from the moment of the save.
    #[serde(default)]
    keep_clock: bool,
}

impl Plan {
    /// Creates random new identities for the VM with description `spec`. `renew` selects the
    /// identities that the guest will renew.
    pub fn new(renew: Renew, keep_clock: bool, spec: &VmSpec) -> io::Result<Self> {
        let mut random = File::open("/dev/urandom")?;
        let mut word = || {
            let mut bytes = [0; 8];
            random.read_exact(&mut bytes)?;
            io::Result::Ok(u64::from_ne_bytes(bytes))
        };
        // machine-id(5) requires version and variant of a random UUID (RFC 9562).
        let high = word()? & !0xf000 | 0x4000;
        let low = word()? & !(0b11 << 62) | 0b10 << 62;
        #[allow(clippy::cast_possible_truncation)] // only 24 bits are used
        let random_mac = (word()? & 0xff_ffff) as u32;
        // The description's address is the one that the host expects.
        let mac = spec.mac.map_or(random_mac, MacAddress::last_bytes);
        let seed = [word()?, word()?, word()?, word()?].map(|word| format!("{word:016x}"));
        Ok(Self {
            renew,
            host_name: host_name(&spec.name),
            seed: seed.concat(),
            machine_id: format!("{high:016x}{low:016x}"),
            mac,
            cards: spec.cards(),
            keep_clock,
        })
    }

    /// Returns whether the guest's clock continues from the moment of the save, instead of being
    /// set to the host's time.
    #[must_use]
    pub const fn keeps_clock(&self) -> bool {
        self.keep_clock
    }

    /// Writes the plan to the VM's directory, where the daemon that runs when the guest's agent
    /// answers will read the plan.
    pub fn write(&self, directory: &VmDirectory) -> io::Result<()> {
        directory.write_json(&directory.path().join(FILE), self)
    }

    /// Reads the plan from the VM's directory; `None` if there is none, or if the plan was
    /// executed.
    pub fn read(directory: &VmDirectory) -> io::Result<Option<Self>> {
        match VmDirectory::read_json(&directory.path().join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    /// Removes the plan from the VM's directory after the plan was executed.
    pub fn remove(directory: &VmDirectory) -> io::Result<()> {
        missing_is_fine(std::fs::remove_file(directory.path().join(FILE)))
    }

    /// Returns the shell script that renews the guest's identities. The shell must be a child of
    /// the guest's agent. [`Renewal::read`] parses the script's output.
    pub fn script(&self) -> String {
        let Self {
            seed, mac, cards, ..
        } = self;
        let mut parts = vec![format!("{REPORT}seed={seed}\n{RANDOM}{SMALL_REPORTS}")];
        if self.renew >= Renew::Network {
            parts.push(format!("mac={mac} cards={cards}\n{ADDRESSES}"));
        }
        if self.renew >= Renew::Identity {
            let (name, id) = (&self.host_name, &self.machine_id);
            parts.push(format!("name={name}\nid={id}\n{IDENTITY}"));
        }
        parts.push(format!("echo {END}\n"));
        parts.concat()
    }
}

/// Last line of the script's output.
const END: &str = "end";

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

impl Renewal {
    /// Returns the result before the guest has answered: nothing is renewed yet.
    #[must_use]
    pub fn pending() -> Self {
        Self {
            pending: true,
            ..Self::default()
        }
    }

    /// Parses the output of the script that renews identities. Returns an error if the script did
    /// not reach its end.
    pub fn read(said: &str) -> Result<Self, String> {
        let told = |prefix: &str| {
            let lines = said.lines().filter_map(|line| line.strip_prefix(prefix));
            lines.map(|line| line.trim().to_owned()).collect()
        };
        if said.lines().last() != Some(END) {
            return Err("the guest did not finish the script".into());
        }
        Ok(Self {
            pending: false,
            done: told("done "),
            left: told("left "),
        })
    }

    /// Returns the result for a guest in which the script could not be run, for the reason `why`:
    /// nothing was renewed.
    #[must_use]
    pub fn failed(why: &str) -> Self {
        Self {
            left: vec![format!("everything: {why}")],
            ..Self::default()
        }
    }
}

/// Returns whether the shell can parse a script.
#[cfg(test)]
fn is_shell(script: &str) -> bool {
    let shell = std::process::Command::new("/bin/sh")
        .args(["-n", "-c", script])
        .status();
    shell.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_units::ByteSize;
    use memfold_vm::Network;

    fn plan(renew: Renew) -> Plan {
        let mut spec = VmSpec::new("web_1.", ByteSize::mib(64));
        spec.network = Network::User;
        Plan::new(renew, false, &spec).unwrap()
    }

    #[test]
    fn each_clone_gets_its_own_unique_identities_and_only_the_requested_kinds() {
        let plans = [Renew::Random, Renew::Network, Renew::Identity].map(plan);
        let scripts = plans.clone().map(|plan| plan.script());
        assert!(scripts.iter().all(|script| is_shell(script)));
        let asks = |word: &str| scripts.clone().map(|script| script.contains(word));
        assert_eq!(asks("--reseed"), [true, true, true]);
        assert_eq!(asks("ip link"), [false, true, true]);
        assert_eq!(asks("/etc/machine-id"), [false, false, true]);
        assert_eq!(plans[0].host_name, "web-1");
        assert_ne!(plans[0].seed, plans[1].seed);
        assert_ne!(plans[0].machine_id, plans[1].machine_id);
        let id = &plans[2].machine_id;
        assert_eq!((id.len(), &id[12..13]), (32, "4"), "a random UUID: {id}");
    }

    #[test]
    fn the_report_of_a_clones_guest_about_its_new_identities_is_parsed() {
        let steps = "report one true; report two sh -c 'echo not here >&2; false'";
        let said = std::process::Command::new("/bin/sh")
            .args(["-c", &format!("{REPORT}{steps}; echo {END}")])
            .output()
            .unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        let renewal = Renewal::read(&said).unwrap();
        assert_eq!(renewal.done, ["one"]);
        assert_eq!(renewal.left, ["two: not here"]);
        assert!(!renewal.pending);
        for cut in 0..said.len() - 1 {
            assert!(Renewal::read(&said[..cut]).is_err(), "{}", &said[..cut]);
        }
    }

    #[test]
    fn the_plan_for_new_identities_of_a_clone_is_stored_until_it_is_executed() {
        let state = tempfile::tempdir().unwrap();
        let directory = VmDirectory::of(state.path(), "a");
        directory.create().unwrap();
        assert_eq!(Plan::read(&directory).unwrap(), None);
        let plan = plan(Renew::Identity);
        plan.write(&directory).unwrap();
        assert_eq!(Plan::read(&directory).unwrap(), Some(plan));
        Plan::remove(&directory).unwrap();
        Plan::remove(&directory).unwrap();
        assert_eq!(Plan::read(&directory).unwrap(), None);
    }
}
