//! The agent's option `--segment-list`: lists the guest's segments, with their devices, mount
//! points and overlay layers.

use std::collections::BTreeMap;

use super::device::{devices, open};
use super::error::Result;
use super::json::{Object, array};
use super::layers::Layer;
use super::settle::mounted;
use super::state::Places;

/// The agent's knowledge of one segment: its device, its mount, its layers on disk.
#[derive(Default)]
struct Entry {
    device: Option<String>,
    mounted: Option<String>,
    problem: Option<String>,
}

/// Returns the guest's segments as a JSON array, sorted by name.
pub fn list(places: &Places) -> Result<String> {
    let _lock = places.lock()?;
    let mut entries: BTreeMap<(String, Option<u64>), Entry> = BTreeMap::new();
    let mut broken = Vec::new();
    for device in devices(places) {
        let shown = device.display().to_string();
        match open(&device) {
            Ok((_, manifest)) => {
                let key = (manifest.name, Some(manifest.generation));
                entries.entry(key).or_default().device = Some(shown);
            }
            Err(e) => broken.push(
                Object::new()
                    .text("device", shown)
                    .raw("name", "null")
                    .raw("generation", "null")
                    .raw("mounted", "null")
                    .raw("layers", "[]")
                    .text("problem", e.to_string())
                    .end(),
            ),
        }
    }
    for segment in mounted(places) {
        let key = (segment.manifest.name, Some(segment.manifest.generation));
        let entry = entries.entry(key).or_default();
        entry.mounted = Some(segment.mounted.display().to_string());
        let device = segment.device.display().to_string();
        entry.device.get_or_insert(device);
    }
    for name in places.known()? {
        if entries.keys().any(|(n, _)| *n == name) {
            continue;
        }
        let generation = places.record(&name).map(|r| r.generation);
        entries.entry((name, generation)).or_default().problem = Some(
            "no device holds the segment; what was written to its directories is on disk".into(),
        );
    }
    let mut items = Vec::new();
    for ((name, generation), entry) in entries {
        let ours = entry.mounted.is_some() || entry.device.is_none();
        let directories = places.layer_directories(&name)?;
        let layers = directories.iter().filter(|_| ours).map(|directory| {
            let bytes = Layer::new(places, &name, directory).upper_bytes();
            let layer = Object::new().text("dir", directory);
            layer.number("upper_bytes", bytes).end()
        });
        let layers: Vec<String> = layers.collect();
        let generation = generation.map_or("null".into(), |g| g.to_string());
        items.push(
            Object::new()
                .maybe("device", entry.device)
                .text("name", name)
                .raw("generation", &generation)
                .maybe("mounted", entry.mounted)
                .list("layers", layers)
                .maybe("problem", entry.problem)
                .end(),
        );
    }
    items.extend(broken);
    Ok(array(items))
}
