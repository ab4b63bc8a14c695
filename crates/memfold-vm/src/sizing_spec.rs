//! Limits of a VM's size in its description. Right-sizing keeps them.

use std::str::FromStr;

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::size_text;

/// Limits of a VM's size, for right-sizing. A field that is unset has its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizingSpec {
    /// Smallest size. Unset: a quarter of the VM's RAM, but at least 256 MiB and at most `max`.
    #[serde(default, with = "size_text", skip_serializing_if = "Option::is_none")]
    pub min: Option<ByteSize>,
    /// Largest size. Unset: the size that the VM has before right-sizing changes it, which is all
    /// of its RAM unless another program has moved its balloon, and what virtio-mem can plug
    /// (`memory_max`).
    #[serde(default, with = "size_text", skip_serializing_if = "Option::is_none")]
    pub max: Option<ByteSize>,
    /// Memory that the VM has beyond its working set, in percent of the working set, 0 to 1000.
    /// Unset: 20.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer: Option<u16>,
    /// Weight of what the VM loses, 1 to 10,000: of two VMs, the one with half the weight is asked
    /// first. Unset: 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u16>,
    /// Whether the VM's size never changes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pinned: bool,
}

impl SizingSpec {
    /// Sets the field `name` to a value, as text. An empty text sets the default.
    ///
    /// # Errors
    ///
    /// Says why the field cannot have this value.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        fn parsed<T: FromStr>(value: &str, kind: &str) -> Result<Option<T>, String> {
            let value = value.trim().trim_matches(['"', '\'']);
            if value.is_empty() {
                return Ok(None);
            }
            let parsed = value.parse().map(Some);
            parsed.map_err(|_| format!("'{value}' is not {kind}"))
        }
        let size = "a size such as 512M";
        match name {
            "min" => self.min = parsed(value, size)?,
            "max" => self.max = parsed(value, size)?,
            "buffer" => self.buffer = parsed(value, "a whole number of percent")?,
            "priority" => self.priority = parsed(value, "a number from 1 to 10000")?,
            "pinned" => self.pinned = parsed(value, "true or false")?.unwrap_or(false),
            other => {
                return Err(format!(
                    "there is no limit '{other}'; there are min, max, buffer, priority and pinned"
                ));
            }
        }
        Ok(())
    }

    /// Checks the limits of a VM that can have this much memory: its RAM, and what virtio-mem can
    /// plug. The error says which limit is wrong, and why.
    pub fn check(&self, largest: ByteSize) -> Result<(), String> {
        for (name, size) in [("min", self.min), ("max", self.max)] {
            if let Some(size) = size.filter(|size| *size > largest) {
                return Err(format!("{name} is {size}, and the VM can have {largest}"));
            }
        }
        if let (Some(min), Some(max)) = (self.min, self.max) {
            if min > max {
                return Err(format!("min ({min}) is above max ({max})"));
            }
        }
        if self.buffer.is_some_and(|percent| percent > 1000) {
            return Err("buffer is above 1000 percent".into());
        }
        let weights = 1..=10_000;
        if self
            .priority
            .is_some_and(|weight| !weights.contains(&weight))
        {
            return Err("priority is not 1 to 10000".into());
        }
        Ok(())
    }

    /// Returns these limits with those that are set in `changes`.
    #[must_use]
    pub fn with(self, changes: Self) -> Self {
        Self {
            min: changes.min.or(self.min),
            max: changes.max.or(self.max),
            buffer: changes.buffer.or(self.buffer),
            priority: changes.priority.or(self.priority),
            pinned: changes.pinned || self.pinned,
        }
    }
}

impl FromStr for SizingSpec {
    type Err = String;

    /// Parses `min=512M,max=2G,buffer=20,priority=100,pinned`, in any order.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizing = Self::default();
        for part in text.split(',') {
            match part.split_once('=') {
                Some((_, "")) => {
                    return Err(format!("'{part}' has no value"));
                }
                Some((name, value)) => sizing.set(name, value)?,
                None if part == "pinned" => sizing.pinned = true,
                None => return Err(format!("'{part}' is not LIMIT=VALUE")),
            }
        }
        Ok(sizing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_size_are_read_from_a_flag_and_wrong_ones_are_refused_with_the_reason() {
        let sizing: SizingSpec = "min=512M,max=2G,buffer=0,priority=7,pinned"
            .parse()
            .unwrap();
        assert_eq!(
            sizing,
            SizingSpec {
                min: Some(ByteSize::mib(512)),
                max: Some(ByteSize::mib(2048)),
                buffer: Some(0),
                priority: Some(7),
                pinned: true,
            }
        );
        assert!(!"pinned=false".parse::<SizingSpec>().unwrap().pinned);
        for (wrong, words) in [
            ("min=lots", "'lots' is not a size"),
            ("least=1G", "there is no limit 'least'"),
            ("min", "not LIMIT=VALUE"),
            ("min=", "has no value"),
            ("priority=-1", "1 to 10000"),
            ("pinned=perhaps", "true or false"),
            ("", "not LIMIT=VALUE"),
        ] {
            let error = wrong.parse::<SizingSpec>().unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_limit_that_is_set_to_nothing_has_its_default_and_others_stay() {
        let mut sizing: SizingSpec = "min=512M,pinned".parse().unwrap();
        sizing.set("min", "").unwrap();
        assert_eq!((sizing.min, sizing.pinned), (None, true));
        sizing.set("pinned", "").unwrap();
        sizing.set("max", "\"1G\"").unwrap();
        assert_eq!(sizing, "max=1G".parse().unwrap());
        let changed = sizing.with("priority=3".parse().unwrap());
        assert_eq!(changed, "max=1G,priority=3".parse().unwrap());
    }
}
