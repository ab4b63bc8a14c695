//! The definition of a VM: its description, and whether and when the daemon starts the VM after a
//! boot of the host.
//!
//! In a TOML file, all fields are in one table, so that a file for `vm run --file` is also a
//! definition:
//!
//! ```toml
//! autostart = true
//! order = 10
//! snapshot = "warm"     # optional
//! name = "web1"
//! memory = "2G"
//! ```

use std::path::Path;

use serde::de::{DeserializeOwned, IntoDeserializer};
use serde::{Deserialize, Serialize};
use toml::de::{DeTable, Deserializer, Error};
use toml::{Table, Value};
use utoipa::ToSchema;

use super::name::check_name;
use super::spec::VmSpec;
use super::spec_error::{SpecError, value};

/// Definition of a VM: its description, and whether the daemon starts the VM after a boot of the
/// host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// Whether the daemon starts the VM after each boot of the host.
    #[serde(default)]
    pub autostart: bool,
    /// Place of the VM among the VMs that are started after a boot: a VM with a smaller number
    /// starts earlier. VMs with the same number start in the order of their names.
    #[serde(default)]
    pub order: u32,
    /// Name of the snapshot from which each start restores the VM; unset: the VM boots. The VM's
    /// hardware and disks are then those of the snapshot, with which the description must agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Description of the VM, as for `POST /v1/vms`.
    #[schema(value_type = Object)]
    pub vm: VmSpec,
}

impl Definition {
    /// Reads a definition from a TOML file. Relative paths of disks and boot files are relative to
    /// the file's directory. The result is not validated yet.
    pub fn from_toml_file(path: &Path) -> Result<Self, SpecError> {
        let text = std::fs::read_to_string(path).map_err(|source| SpecError::Read {
            path: path.into(),
            source,
        })?;
        let parsed = Self::parse(&text).map_err(|mut source| {
            // With the text, the message shows the line.
            source.set_input(Some(&text));
            SpecError::Parse {
                path: path.into(),
                source: Box::new(source),
            }
        })?;
        Ok(Self {
            vm: parsed.vm.of_file(path)?,
            ..parsed
        })
    }

    /// Parses the text of a definition's TOML file. Paths stay as they are, and the result is not
    /// validated yet.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut table = DeTable::parse(text)?;
        Ok(Self {
            autostart: take(table.get_mut(), "autostart")?,
            order: take(table.get_mut(), "order")?,
            snapshot: take(table.get_mut(), "snapshot")?,
            vm: VmSpec::deserialize(Deserializer::from(table))?,
        })
    }

    /// Returns the definition as the text of a TOML file, which
    /// [`from_toml_file`](Self::from_toml_file) reads.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        let vm = toml::to_string(&self.vm)?;
        let (autostart, order) = (self.autostart, self.order);
        let snapshot = self.snapshot.as_ref().map_or_else(String::new, |name| {
            format!("snapshot = {}\n", toml::Value::from(name.as_str()))
        });
        Ok(format!(
            "autostart = {autostart}\norder = {order}\n{snapshot}{vm}"
        ))
    }

    /// Returns the definition with changed fields. Each change is a field's name as in the TOML
    /// file (`boot.cmdline` for a field of a table), and its value: a value of TOML, or just text.
    /// An empty value removes the field, which then has its default. The result is not validated
    /// yet.
    ///
    /// # Errors
    ///
    /// [`SpecError::Value`] if there is no such field, or if it cannot have this value.
    pub fn with<'a>(
        &self,
        changes: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, SpecError> {
        let failed = |error: toml::ser::Error| value("settings", error.to_string());
        let mut now = self.clone();
        for (field, text) in changes {
            let refused = |why: &str| value("settings", format!("{field}={text}: {why}"));
            if field == "name" {
                return Err(refused("a VM keeps its name; define another VM"));
            }
            let before: Table = toml::from_str(&now.to_toml().map_err(failed)?)
                .map_err(|error| refused(error.message()))?;
            let parse = |value: Option<Value>| {
                let mut table = before.clone();
                set(&mut table, field, value)?;
                let text = toml::to_string(&table).map_err(|error| error.to_string())?;
                Self::parse(&text).map_err(|error| error.message().to_owned())
            };
            let typed = toml::from_str::<Table>(&format!("value = {text}")).ok();
            let typed = typed.and_then(|mut table| table.remove("value"));
            let as_text = || Value::String(text.to_owned());
            now = if text.is_empty() {
                parse(None)
            } else if let Some(typed) = typed {
                // A text may look like a number.
                parse(Some(typed)).or_else(|why| parse(Some(as_text())).map_err(|_| why))
            } else {
                parse(Some(as_text()))
            }
            .map_err(|why| refused(why.lines().next().unwrap_or_default()))?;
        }
        Ok(now)
    }

    /// Checks the VM's description as [`VmSpec::validate`] does, and refuses fields that only
    /// snapshots may set.
    pub fn validate(&mut self) -> Result<(), SpecError> {
        self.vm.check_fields_of_users()?;
        if let Some(snapshot) = &self.snapshot {
            check_name("snapshot", snapshot)?;
        }
        self.vm.validate()
    }
}

/// Sets or removes a field of a table, or of a table in it. Removing a field that does not exist is
/// no error.
fn set(table: &mut Table, field: &str, value: Option<Value>) -> Result<(), String> {
    if let Some((outer, inner)) = field.split_once('.') {
        let empty = || Value::Table(Table::new());
        let within = table.entry(outer.to_owned()).or_insert_with(empty);
        let within = within.as_table_mut().ok_or("there is no such field")?;
        return set(within, inner, value);
    }
    match value {
        Some(value) => table.insert(field.to_owned(), value),
        None => table.remove(field),
    };
    Ok(())
}

/// Removes a field from a table. Returns the default value if the table does not have the field.
fn take<T: DeserializeOwned + Default>(
    table: &mut DeTable<'_>,
    field: &'static str,
) -> Result<T, Error> {
    let value = table.remove(field);
    value.map_or_else(
        || Ok(T::default()),
        |value| T::deserialize(value.into_deserializer()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_units::ByteSize;

    fn read(text: &str) -> Result<Definition, SpecError> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("web.toml");
        std::fs::write(&file, text).unwrap();
        Definition::from_toml_file(&file)
    }

    #[test]
    fn a_definition_round_trips_through_its_toml_file() {
        let mut vm = VmSpec::new("web", ByteSize::mib(512));
        vm.disks = vec![crate::DiskSpec::new("/d.qcow2")];
        vm.qemu_args = vec!["-device".into(), "virtio-rng-pci".into()];
        vm.boot.kernel = Some("/k".into());
        for (autostart, order, snapshot) in [(true, 7, Some("warm")), (false, 0, None)] {
            let definition = Definition {
                autostart,
                order,
                snapshot: snapshot.map(str::to_owned),
                vm: vm.clone(),
            };
            assert_eq!(read(&definition.to_toml().unwrap()).unwrap(), definition);
        }
        let plain = read("name = 'web'\nmemory = '512M'\n").unwrap();
        assert_eq!((plain.autostart, plain.order), (false, 0));
    }

    #[test]
    fn fields_of_a_definition_are_changed_by_name_and_wrong_ones_are_named() {
        let plain = read("name = 'web'\nmemory = '512M'\ndomain = 'old'\n").unwrap();
        let changed = plain
            .with([
                ("vcpus", "4"),
                ("memory", "2G"),
                ("domain", "42"),
                ("fold", "false"),
                ("autostart", "true"),
                ("boot.kernel", "/k"),
                ("boot.cmdline", "root=/dev/vda"),
                ("qemu_args", "['-S']"),
            ])
            .unwrap();
        let vm = &changed.vm;
        assert_eq!(
            (vm.vcpus, vm.memory, vm.fold),
            (4, ByteSize(2 << 30), false)
        );
        assert_eq!(vm.domain.as_deref(), Some("42"));
        assert_eq!(vm.boot.cmdline.as_deref(), Some("root=/dev/vda"));
        assert!(changed.autostart && vm.qemu_args == ["-S"]);
        let back = changed.with([("domain", ""), ("swap", "")]).unwrap();
        assert_eq!(back.vm.domain, None);
        for (field, text) in [
            ("vcpsu", "4"),
            ("vcpus", "many"),
            ("name", "db"),
            ("name.x", "1"),
            ("memory", ""),
            ("", "1"),
        ] {
            let error = plain.with([(field, text)]).unwrap_err().to_string();
            assert!(error.contains(&format!("{field}={text}")), "{error}");
        }
    }

    #[test]
    fn a_wrong_field_of_a_definition_is_refused_with_its_line() {
        for (text, line, word) in [
            (
                "autostart = true\nname = 'a'\nmemory = '1G'\nautostrat = 1\n",
                4,
                "autostrat",
            ),
            (
                "name = 'a'\nmemory = '1G'\nautostart = 'yes'\n",
                3,
                "boolean",
            ),
            ("order = -1\nname = 'a'\nmemory = '1G'\n", 1, "-1"),
            ("name = 'a'\nmemory = = '1G'\n", 2, ""),
            ("name = 'a'\norder = 1\nmemory = 'lots'\n", 3, "lots"),
        ] {
            let error = memfold_host::chain(&read(text).unwrap_err());
            let line = format!("line {line},");
            assert!(error.contains(&line) && error.contains(word), "{error}");
        }
        let error = read("name = 'a'\nmemory = '1G'\nfiles = ['/x']\n").unwrap_err();
        assert!(error.to_string().starts_with("files: "), "{error}");
    }
}
