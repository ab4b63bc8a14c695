//! Resolves the disks and other drives on the command line of a QEMU that memfold did not start:
//! `-drive` and its short forms (`-hda`, `-cdrom`, `-fda`, a bare file name, ...). A second QEMU
//! with the same devices will run the VM's snapshots.
//!
//! QEMU derives each drive's interface, bus, unit and name from the drive's own options and from
//! the drives before it (`drive_new` in `blockdev.c`). memfold's copy of the command line names all
//! four explicitly, so that the second QEMU makes the same devices in the same order.

use super::options::Named;
use super::value::{Value, parse};
use crate::qemu_line::escape_text;

/// Keys of `-drive` that affect the device that uses the drive.
const OF_ITS_DEVICE: [&str; 3] = ["media", "rerror", "werror"];

/// A drive of the command line, with all defaults resolved.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Drive {
    /// Name of the drive in `query-block`.
    pub(super) backend: String,
    /// Interface of the drive: `ide`, `virtio`, `none` ...
    pub(super) interface: String,
    bus: u64,
    pub(super) unit: u64,
    options: Value,
}

impl Drive {
    /// Returns the options of `-drive` except the file.
    pub(super) fn option(&self) -> String {
        let place = match self.interface.as_str() {
            // A drive without an interface has neither bus nor unit.
            "none" => String::new(),
            _ => format!(",bus={},unit={}", self.bus, self.unit),
        };
        let of_device = OF_ITS_DEVICE.iter();
        let of_device = of_device
            .filter_map(|key| Some(format!(",{key}={}", escape_text(self.options.get(key)?))));
        let of_device: String = of_device.collect();
        let (interface, backend) = (escape_text(&self.interface), escape_text(&self.backend));
        format!("if={interface},id={backend}{place}{of_device}")
    }

    /// Returns the value of `-drive` without a medium; `None` if this drive cannot be empty.
    pub(super) fn empty_option(&self) -> Option<String> {
        match self.interface.as_str() {
            // A drive without an interface becomes an empty CD-ROM drive, whatever it was.
            "none" => Some(format!(
                "if=none,id={},media=cdrom",
                escape_text(&self.backend)
            )),
            "floppy" => Some(self.option()),
            _ => self.is_cdrom().then(|| self.option()),
        }
    }

    fn is_cdrom(&self) -> bool {
        self.options.get("media") == Some("cdrom")
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.options.is_on("readonly") || self.options.is_on("read-only")
    }
}

/// Returns the `-drive` value that a short form stands for (`system/vl.c`).
fn long_form(name: &str, value: &str) -> Option<Value> {
    let fixed = match name {
        "drive" => return Value::parse("file", value),
        "hda" => "index=0,media=disk",
        "hdb" => "index=1,media=disk",
        "hdc" => "index=2,media=disk",
        "hdd" => "index=3,media=disk",
        "cdrom" => "index=2,media=cdrom",
        "fda" => "if=floppy,index=0",
        "fdb" => "if=floppy,index=1",
        "mtdblock" => "if=mtd",
        "sd" => "if=sd",
        "pflash" => "if=pflash",
        _ => return None,
    };
    let mut options = Value::parse("file", fixed)?;
    options.set("file", value);
    Some(options)
}

/// Returns whether an option is `-drive` or one of its short forms.
pub(super) fn is_drive(name: &str) -> bool {
    long_form(name, "").is_some()
}

/// Returns all drives, in the order of their options.
pub(super) fn drives(options: &[Named], machine: &str) -> Result<Vec<Drive>, String> {
    let mut drives: Vec<Drive> = Vec::new();
    for (name, value) in options.iter().filter(|(name, _)| is_drive(name)) {
        let value = value.as_deref().unwrap_or_default();
        let options = long_form(name, value);
        let options = options.ok_or_else(|| format!("cannot parse '-{name} {value}'"))?;
        drives.push(drive(options, machine, &drives)?);
    }
    Ok(drives)
}

fn drive(options: Value, machine: &str, before: &[Drive]) -> Result<Drive, String> {
    let number = |key: &str| match options.text(key) {
        text if text.is_empty() => Ok(None),
        text => match text.parse::<u64>() {
            Ok(number) if number < 1 << 20 => Ok(Some(number)),
            _ => Err(format!("a drive's '{key}={text}' is not a number")),
        },
    };
    let is_small = machine.starts_with("microvm");
    let own = if is_small { "none" } else { "ide" };
    let interface = options.get("if").filter(|name| *name != "default");
    let interface = interface.unwrap_or(own).to_owned();
    let units = match interface.as_str() {
        "ide" if machine.contains("q35") => 1,
        "ide" => 2,
        "scsi" => 7,
        _ => 0,
    };
    let (mut bus, mut unit) = (number("bus")?.unwrap_or(0), number("unit")?);
    if let Some(index) = number("index")? {
        bus = index.checked_div(units).unwrap_or(0);
        unit = Some(index.checked_rem(units).unwrap_or(index));
    }
    let is_taken = |bus: u64, unit: u64| {
        let place = (interface.as_str(), bus, unit);
        let mut before = before.iter();
        before.any(|drive| (drive.interface.as_str(), drive.bus, drive.unit) == place)
    };
    let unit = unit.unwrap_or_else(|| {
        let mut unit = 0;
        while is_taken(bus, unit) {
            unit += 1;
            if units > 0 && unit >= units {
                (bus, unit) = (bus + 1, 0);
            }
        }
        unit
    });
    let medium = match (interface.as_str(), options.get("media")) {
        ("ide" | "scsi", Some("cdrom")) => "-cd",
        ("ide" | "scsi", _) => "-hd",
        _ => "",
    };
    let of_bus = if units > 0 {
        bus.to_string()
    } else {
        String::new()
    };
    let own_name = format!("{interface}{of_bus}{medium}{unit}");
    Ok(Drive {
        backend: options.get("id").map_or(own_name, str::to_owned),
        interface,
        bus,
        unit,
        options,
    })
}

/// Returns the name of the drive or block node that a `-device` value uses; `None` if it uses none.
pub(super) fn of_device(value: &str) -> Result<Option<String>, String> {
    Ok(parse("driver", value)?.get("drive").map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_command_line_gives_drives_the_same_buses_units_and_names_as_qemu() {
        // QEMU 10 names the drives like this (`query-block`); tested drive by drive.
        for (machine, line, wanted) in [
            (
                "pc-q35-10.0",
                "-drive file=a -drive file=b -cdrom c -drive if=ide,index=3,file=d",
                "ide0-hd0@0.0 ide1-hd0@1.0 ide2-cd0@2.0 ide3-hd0@3.0",
            ),
            (
                "pc-i440fx-10.0",
                "-hda a -drive file=b -cdrom c -hdd d",
                "ide0-hd0@0.0 ide0-hd1@0.1 ide1-cd0@1.0 ide1-hd1@1.1",
            ),
            (
                "pc-q35-10.0",
                "-drive if=virtio,index=1,file=b -drive if=virtio,file=a -drive if=virtio,file=c,id=x -drive if=virtio,file=d",
                "virtio1@0.1 virtio0@0.0 x@0.2 virtio3@0.3",
            ),
            (
                "pc-q35-10.0",
                "-drive if=pflash,file=a -drive if=pflash,file=b,id=vars -fda f -fdb g",
                "pflash0@0.0 vars@0.1 floppy0@0.0 floppy1@0.1",
            ),
            (
                "pc-i440fx-10.0",
                "-drive if=scsi,index=8,file=a -drive if=scsi,bus=1,file=b -drive if=none,file=c -sd d -drive if=scsi,media=cdrom,file=e",
                "scsi1-hd1@1.1 scsi1-hd0@1.0 none0@0.0 sd0@0.0 scsi0-cd0@0.0",
            ),
            ("microvm", "-drive file=a", "none0@0.0"),
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            let options: Vec<Named> = words
                .chunks(2)
                .map(|pair| (pair[0][1..].to_owned(), Some(pair[1].to_owned())))
                .collect();
            let found = drives(&options, machine).unwrap();
            let found = found
                .iter()
                .map(|drive| format!("{}@{}.{}", drive.backend, drive.bus, drive.unit));
            assert_eq!(found.collect::<Vec<_>>().join(" "), wanted, "{line}");
        }
    }

    #[test]
    fn a_copied_drive_option_keeps_the_bus_and_the_unit_and_drops_the_file_name() {
        let option = |text: &str| {
            let options = [("drive".to_owned(), Some(text.to_owned()))];
            drives(&options, "pc-q35-10.0").unwrap().remove(0)
        };
        let drive =
            option("file=/x,index=2,media=cdrom,format=raw,cache=none,aio=native,werror=stop");
        let wanted = "if=ide,id=ide2-cd0,bus=2,unit=0,media=cdrom,werror=stop";
        assert_eq!(drive.option(), wanted);
        assert_eq!(drive.empty_option().as_deref(), Some(wanted));
        let drive = option("if=none,id=d7,file=/x");
        assert_eq!(drive.option(), "if=none,id=d7");
        assert_eq!(
            drive.empty_option().as_deref(),
            Some("if=none,id=d7,media=cdrom")
        );
        assert_eq!(option("/x").empty_option(), None);
        let options = [("drive".to_owned(), Some("index=a,file=/x".to_owned()))];
        let why = drives(&options, "q35").unwrap_err();
        assert!(why.contains("index=a"), "{why}");
    }
}
