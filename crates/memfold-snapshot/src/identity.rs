//! Gives a restored VM new identities (random numbers, MAC addresses, host name, ...), so that it
//! differs from other VMs that run from the same snapshot. QEMU and the guest's agent renew them:
//!
//! ```text
//!   QEMU    a new VM generation ID: a kernel with a driver for it reseeds its random numbers before user code runs
//!   agent   reseeds random numbers, too, for kernels without the driver; on request, new MAC addresses, host name,
//!           machine ID, SSH host keys
//! ```
//! The agent renews identities with a shell script, by an order that the daemon sends as soon as
//! the agent answers. If the daemon dies meanwhile, the script may run a second time, with the same
//! result.

use std::fs::File;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use memfold_vm::{MacAddress, VmDirectory, VmSpec, host_name, missing_is_fine};
use memfold_wire::order::{GuestOrder, NewAddresses, NewIdentities, NewNames, RENEWED};

/// File in a VM's directory that contains a [`Plan`] until the plan is executed.
const FILE: &str = "renewal.json";

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

    /// Returns the order that renews the guest's identities. [`Renewal::read`] parses its output.
    #[must_use]
    pub fn order(&self) -> GuestOrder {
        GuestOrder::Renew(NewIdentities {
            seed: self.seed.clone(),
            network: (self.renew >= Renew::Network).then(|| NewAddresses {
                mac: self.mac,
                cards: u32::try_from(self.cards).unwrap_or(u32::MAX),
            }),
            names: (self.renew >= Renew::Identity).then(|| NewNames {
                host_name: self.host_name.clone(),
                machine_id: self.machine_id.clone(),
            }),
        })
    }
}

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
        if said.lines().last() != Some(RENEWED) {
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
        let scripts = plans.clone().map(|plan| plan.order().script());
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
        let said = format!("done one\nleft two: not here\n{RENEWED}\n");
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
