//! Changes a VM's QEMU options for a trial start, which only tests whether QEMU accepts them. QEMU
//! is started beside the running VM and executes no guest instruction. It must not write files
//! outside its own directory, and must not claim ports or sockets of the host.

use super::foreign::null_chardev;
use super::foreign::value::Value;
use super::network::Network;
use super::spec::VmSpec;

impl VmSpec {
    /// Returns the VM's description for a trial start beside the running VM. Character devices and
    /// networks are not connected, and host ports and sockets are left out. `name`: name of the
    /// trial VM.
    #[must_use]
    pub fn for_trial(mut self, name: String) -> Self {
        (self.name, self.fold, self.boot_snapshot) = (name, false, false);
        self.qemu_args = quiet(&self.qemu_args);
        if self.network.needs_tap() {
            // The trial runs no guest, so the card may be anywhere but in the host's network.
            self.network = Network::User;
        }
        self
    }
}

fn quiet(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut words = arguments.iter().peekable();
    while let Some(word) = words.next() {
        let option = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
        let option = option.unwrap_or_default();
        match option {
            "daemonize" | "s" => continue,
            // The value is a host resource that only one process can hold, or a file that QEMU
            // writes.
            "D" | "d" | "gdb" | "incoming" | "loadvm" | "pidfile" | "qmp" | "qmp-pretty"
            | "serve-gdb" | "spice" | "trace" | "vnc" => {
                words.next();
                continue;
            }
            _ => kept.push(word.clone()),
        }
        let made = |value: &String| match option {
            "chardev" => Some(null_chardev(&Value::parse("backend", value)?)),
            "netdev" => Some(format!(
                "user,id={}",
                Value::parse("type", value)?.text("id")
            )),
            "nic" | "net" => {
                let leads_in =
                    |part: &&str| part.starts_with("hostfwd=") || part.starts_with("guestfwd=");
                let parts = value.split(',').filter(|part| !leads_in(part));
                Some(parts.collect::<Vec<_>>().join(","))
            }
            "debugcon" | "monitor" | "parallel" | "serial" => {
                let leads_nowhere = value.starts_with("chardev:") || value == "none";
                Some(if leads_nowhere {
                    value.clone()
                } else {
                    "null".to_owned()
                })
            }
            _ => None,
        };
        if let Some(value) = words.peek().and_then(|value| made(value)) {
            words.next();
            kept.push(value);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_arguments_that_only_one_vm_can_use_are_removed_from_a_copy() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let before = "-S -netdev user,id=n,hostfwd=tcp::80-:80 -device e1000,netdev=n -chardev socket,id=c,path=/s,server=on,mux=on \
            -serial chardev:c -serial file:/log -monitor unix:/m,server -qmp unix:/q -vnc :1 -s -pidfile /p -cdrom /iso \
            -netdev {\"type\":\"tap\",\"id\":\"t\"} -nic user,hostfwd=tcp::81-:81,model=e1000 -no-reboot";
        let after = "-S -netdev user,id=n -device e1000,netdev=n -chardev null,id=c,mux=on -serial chardev:c -serial null -monitor null \
            -cdrom /iso -netdev user,id=t -nic user,model=e1000 -no-reboot";
        assert_eq!(quiet(&words(before)).join(" "), after);
    }
}
