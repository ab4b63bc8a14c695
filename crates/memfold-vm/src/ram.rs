//! Reads a VM's RAM layout from QEMU's monitor, and combines four answers:
//!
//! ```text
//!   info ramblock   block "ram0" -> address in QEMU (HVA), length, page size
//!   query-memdev    which blocks are RAM that the user gave the guest (not ROM, video memory, ...)
//!   query-memory-devices   which of these blocks are no system RAM after all (NVDIMM, virtio-pmem)
//!   info mtree -f   address space "memory": guest-physical range -> block + offset, the hole below 4 GiB left out
//! ```
//! The flat view (`info mtree -f`) changes when the firmware maps its shadow areas below 1 MiB and
//! when memory is hot-plugged. So the daemon must read the layout again after the guest's boot and
//! after each hot-plug.

use std::collections::BTreeSet;

use memfold_units::{Hva, PAGE_SIZE, Pfn};
use serde_json::Value;

use super::layout::{RamBlock, RamLayout, RamSlot};
use super::qmp::{Qmp, QmpError};

/// Why a VM's RAM layout could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum RamError {
    #[error("cannot ask QEMU for its RAM layout")]
    Qmp(#[from] QmpError),
    /// QEMU's output has an unknown format. memfold does not guess what it means.
    #[error("cannot interpret QEMU's {what}: {why}")]
    Text { what: &'static str, why: String },
}

fn text(what: &'static str, why: impl Into<String>) -> RamError {
    RamError::Text {
        what,
        why: why.into(),
    }
}

/// A RAM block of QEMU, as one line of `info ramblock` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFacts {
    /// QEMU's name of the RAM block.
    pub name: String,
    /// Page size of the RAM block's memory in bytes; more than 4096 means hugetlbfs.
    pub page_bytes: u64,
    /// Length of the RAM block's part that is in use, in bytes.
    pub used_bytes: u64,
    /// Address of the RAM block in the QEMU process.
    pub hva: Hva,
}

/// A RAM backend of QEMU (`-object memory-backend-...`), as `query-memdev` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// ID of the RAM backend, which is also the name of its RAM block.
    pub id: String,
    /// Whether QEMU maps the RAM backend shared.
    pub share: bool,
    /// Length of the RAM backend in bytes.
    pub size_bytes: u64,
}

/// What QEMU says of its RAM, and the layout that follows from it.
#[derive(Clone, Debug)]
pub struct RamFacts {
    /// All RAM blocks of QEMU.
    pub blocks: Vec<BlockFacts>,
    /// All RAM backends of QEMU.
    pub backends: Vec<Backend>,
    /// Which of the blocks are the guest's RAM, and where.
    pub layout: RamLayout,
}

/// Reads a VM's RAM layout from QEMU.
pub fn read(qmp: &mut Qmp) -> Result<RamLayout, RamError> {
    Ok(read_facts(qmp)?.layout)
}

/// Reads a VM's RAM blocks, RAM backends and RAM layout from QEMU.
pub fn read_facts(qmp: &mut Qmp) -> Result<RamFacts, RamError> {
    let blocks = qmp.human("info ramblock")?;
    let backends = qmp.query("query-memdev")?;
    let devices = qmp.query("query-memory-devices")?;
    let tree = qmp.human("info mtree -f")?;
    parse(&blocks, &backends, &devices, &tree)
}

/// Parses QEMU's answers to `info ramblock`, `query-memdev`, `query-memory-devices` and
/// `info mtree -f`. Every slot of the layout lies inside its block, and slots are sorted and do not
/// overlap; answers that contradict this are errors.
pub fn parse(
    blocks: &str,
    backends: &Value,
    devices: &Value,
    tree: &str,
) -> Result<RamFacts, RamError> {
    let (blocks, backends) = (parse_blocks(blocks)?, parse_backends(backends)?);
    let layout = assemble(&blocks, &system_ram(&backends, devices), tree)?;
    Ok(RamFacts {
        blocks,
        backends,
        layout,
    })
}

/// Reads QEMU's RAM blocks (`info ramblock`).
pub fn read_blocks(qmp: &mut Qmp) -> Result<Vec<BlockFacts>, RamError> {
    parse_blocks(&qmp.human("info ramblock")?)
}

/// Reads QEMU's RAM backends (`query-memdev`).
pub fn read_backends(qmp: &mut Qmp) -> Result<Vec<Backend>, RamError> {
    let answer = qmp.query("query-memdev")?;
    parse_backends(&answer)
}

fn parse_backends(answer: &Value) -> Result<Vec<Backend>, RamError> {
    let bad = || text("query-memdev", answer.to_string());
    let backend = |v: &Value| {
        Some(Backend {
            id: v["id"].as_str()?.to_owned(),
            share: v["share"].as_bool()?,
            size_bytes: v["size"].as_u64()?,
        })
    };
    answer
        .as_array()
        .ok_or_else(bad)?
        .iter()
        // A backend without an id is neither main memory nor a DIMM, because QEMU finds both by
        // their ids.
        .filter(|v| v.get("id").is_some())
        .map(|v| backend(v).ok_or_else(bad))
        .collect()
}

/// Returns the ID of the RAM backend from the name of a RAM block or memory region. Older machine
/// types use the object's path as name. The block of a device on a bus has the device's address
/// before the ID (virtio-mem: `0000:00:01.0/vm0`).
#[must_use]
pub fn backend_id(block: &str) -> &str {
    block.rsplit('/').next().unwrap_or(block)
}

/// Returns the ids of the backends that hold system RAM: all except those of NVDIMM and virtio-pmem
/// devices.
fn system_ram(backends: &[Backend], devices: &Value) -> BTreeSet<String> {
    let devices = devices.as_array().into_iter().flatten();
    let others: BTreeSet<&str> = devices
        .filter(|d| !matches!(d["type"].as_str(), Some("dimm" | "virtio-mem")))
        .filter_map(|d| d["data"]["memdev"].as_str())
        .map(backend_id)
        .collect();
    let ids = backends.iter().map(|b| b.id.clone());
    ids.filter(|id| !others.contains(id.as_str())).collect()
}

/// Parses QEMU's output of `info ramblock` into RAM blocks.
pub fn parse_blocks(answer: &str) -> Result<Vec<BlockFacts>, RamError> {
    let mut lines = answer.lines().filter(|l| !l.trim().is_empty());
    let header = lines.next().unwrap_or_default();
    let columns: Vec<&str> = header.split_whitespace().take(7).collect();
    let wrong = |why: String| text("info ramblock", why);
    // Older versions of QEMU have fewer columns. The column HVA is needed.
    if columns != ["Block", "Name", "PSize", "Offset", "Used", "Total", "HVA"] {
        let header = header.trim();
        let why = format!("columns are '{header}'; QEMU 9 or newer has an HVA column");
        return Err(wrong(why));
    }
    let line =
        |line: &str| parse_block(line).ok_or_else(|| wrong(format!("line '{}'", line.trim())));
    lines.map(line).collect()
}

fn parse_block(line: &str) -> Option<BlockFacts> {
    // The fields are taken from the right (RO HVA Total Used Offset, unit, number), because a name
    // may contain spaces.
    let mut fields = line.split_whitespace().rev();
    let _read_only = fields.next()?;
    let hva = hex(fields.next()?)?;
    let _total = hex(fields.next()?)?;
    let used = hex(fields.next()?)?;
    let _offset = hex(fields.next()?)?;
    let unit = match fields.next()? {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    let number: u64 = fields.next()?.parse().ok()?;
    let mut name: Vec<&str> = fields.collect();
    name.reverse();
    Some(BlockFacts {
        name: name.join(" "),
        page_bytes: number.checked_mul(unit)?,
        used_bytes: used,
        hva: Hva(hva),
    })
}

fn hex(field: &str) -> Option<u64> {
    u64::from_str_radix(field.strip_prefix("0x").unwrap_or(field), 16).ok()
}

/// A RAM range of the flat view: first and last byte, block, offset in the block.
#[derive(Debug, PartialEq, Eq)]
struct FlatRange<'a> {
    first: u64,
    last: u64,
    block: &'a str,
    offset: u64,
}

/// Parses the RAM ranges of the address space "memory" in `info mtree -f`.
fn flat_ranges(tree: &str) -> Result<Vec<FlatRange<'_>>, RamError> {
    let is_memory = |line: &str| line.trim_start().starts_with("AS \"memory\",");
    let mut views = tree.split("FlatView #");
    let view = views.find(|view| view.lines().any(is_memory));
    let view = view.ok_or_else(|| text("info mtree -f", "no address space \"memory\""))?;
    let bad = |line: &str| text("info mtree -f", format!("line '{}'", line.trim()));
    let ranges = view.lines().filter(|line| line.contains(", ram): "));
    ranges
        .map(|line| flat_range(line).ok_or_else(|| bad(line)))
        .collect()
}

/// Parses a line such as
/// `  0000000000100000-000000007fffffff (prio 0, ram): ram0 @0000000000100000 KVM`.
fn flat_range(line: &str) -> Option<FlatRange<'_>> {
    let (range, rest) = line.trim().split_once(' ')?;
    let (first, last) = range.split_once('-')?;
    let (_, place) = rest.split_once(", ram): ")?;
    let place = place.strip_suffix(" KVM").unwrap_or(place);
    let (block, offset) = match place.rsplit_once(" @") {
        Some((block, offset)) => (block, hex(offset)?),
        None => (place, 0),
    };
    Some(FlatRange {
        first: hex(first)?,
        last: hex(last)?,
        block,
        offset,
    })
}

fn assemble(
    blocks: &[BlockFacts],
    system: &BTreeSet<String>,
    tree: &str,
) -> Result<RamLayout, RamError> {
    let is_system = |name: &str| system.contains(backend_id(name));
    // The block of a device on a bus has the bus address before the region's name.
    let of_device = |region: &str| {
        let is_its = |place: &str| place.ends_with('/');
        let mut found = blocks
            .iter()
            .filter(|b| b.name.strip_suffix(region).is_some_and(is_its));
        found.next().filter(|_| found.next().is_none())
    };
    let mut layout = RamLayout::default();
    let mut ranges = flat_ranges(tree)?;
    ranges.retain(|r| is_system(r.block));
    ranges.sort_by_key(|r| r.first);
    let mut end = 0;
    for range in &ranges {
        let wrong = |why: String| text("info mtree -f", why);
        let known = blocks.iter().rfind(|b| b.name == range.block);
        let facts = known
            .or_else(|| of_device(range.block))
            .ok_or_else(|| wrong(format!("block '{}' is not in info ramblock", range.block)))?;
        let bytes = range
            .last
            .checked_sub(range.first)
            .and_then(|n| n.checked_add(1));
        let bytes =
            bytes.ok_or_else(|| wrong(format!("range {:#x}-{:#x}", range.first, range.last)))?;
        let mut numbers = [range.first, bytes, range.offset, facts.hva.0].into_iter();
        let aligned = numbers.all(|n| n % PAGE_SIZE == 0);
        let end_in_block = range.offset.checked_add(bytes);
        let inside = end_in_block.is_some_and(|end| end <= facts.used_bytes);
        if !aligned || !inside || range.first < end {
            return Err(wrong(format!(
                "range {:#x}-{:#x} of '{}' at {:#x} is unaligned, overlaps, or leaves its block of {:#x} bytes",
                range.first, range.last, range.block, range.offset, facts.used_bytes
            )));
        }
        end = range.last;
        let block = block_index(&mut layout, facts);
        let slot = RamSlot {
            pfn: Pfn(range.first / PAGE_SIZE),
            pages: bytes / PAGE_SIZE,
            hva: facts.hva.add_pages(range.offset / PAGE_SIZE),
            block,
        };
        match layout.slots.last_mut() {
            // Firmware cuts low memory into pieces by its shadow areas; pieces that belong together
            // are joined again.
            Some(before)
                if before.block == block
                    && before.pfn.add_pages(before.pages) == slot.pfn
                    && before.hva.add_pages(before.pages) == slot.hva =>
            {
                before.pages += slot.pages;
            }
            _ => layout.slots.push(slot),
        }
    }
    if layout.slots.is_empty() {
        return Err(text("info mtree -f", "no system RAM"));
    }
    Ok(layout)
}

fn block_index(layout: &mut RamLayout, facts: &BlockFacts) -> usize {
    let known = layout.blocks.iter().position(|b| b.name == facts.name);
    known.unwrap_or_else(|| {
        layout.blocks.push(RamBlock {
            name: facts.name.clone(),
            hva: facts.hva,
            pages: facts.used_bytes / PAGE_SIZE,
        });
        layout.blocks.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const DIMM_BLOCKS: &str = include_str!("fixtures/qemu10_5g_dimm.ramblock");
    const DIMM_TREE: &str = include_str!("fixtures/qemu10_5g_dimm.mtree");
    const KVM_BLOCKS: &str = include_str!("fixtures/qemu10_kvm_vga.ramblock");
    const KVM_TREE: &str = include_str!("fixtures/qemu10_kvm_vga.mtree");

    fn names(list: &[&str]) -> BTreeSet<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_ram_layout_of_a_vm_with_5_gib_and_a_dimm_has_a_hole_below_4_gib() {
        let blocks = parse_blocks(DIMM_BLOCKS).unwrap();
        let layout = assemble(&blocks, &names(&["ram0", "mem1"]), DIMM_TREE).unwrap();
        let (ram0, mem1) = (Hva(0x7fd5_27e0_0000), Hva(0x7fd4_dfe0_0000));
        // 256 KiB below 1 MiB are ROM and BIOS shadow, and so no RAM.
        assert_eq!(layout.pages(), (6 << 18) - 0x40);
        assert_eq!(layout.blocks.len(), 2);
        assert_eq!(
            layout.hva_of(Pfn(0x7ffff)),
            Some((ram0.add_pages(0x7ffff), 1))
        );
        assert_eq!(layout.hva_of(Pfn(0x80000)), None);
        // Memory from 4 GiB on continues the block after its first 2 GiB, which lie below the hole.
        assert_eq!(
            layout.hva_of(Pfn(1 << 20)).unwrap().0,
            ram0.add_pages(1 << 19)
        );
        assert_eq!(layout.hva_of(Pfn(0x1c_0000)).unwrap().0, mem1);
        assert_eq!(layout.hva_of(Pfn(0x20_0000)), None);
        // The BIOS is in a block of its own, which is no RAM.
        assert_eq!(layout.hva_of(Pfn(0xf0)), None);
    }

    #[test]
    fn video_memory_of_a_kvm_guest_does_not_count_as_system_ram() {
        let blocks = parse_blocks(KVM_BLOCKS).unwrap();
        assert_eq!(blocks[1].name, "0000:00:01.0/vga.vram");
        let layout = assemble(&blocks, &names(&["pc.ram"]), KVM_TREE).unwrap();
        assert_eq!(layout.blocks.len(), 1);
        assert_eq!(layout.pages(), (512 << 8) - 0x40);
    }

    #[test]
    fn a_ram_block_of_a_device_on_a_bus_is_found_by_the_id_of_its_memory_backend() {
        let of = |name: &str| DIMM_BLOCKS.replacen("mem1", name, 1);
        for (name, is_there) in [("0000:00:01.0/mem1", true), ("0000:00:01.0/xmem1", false)] {
            let blocks = parse_blocks(&of(name)).unwrap();
            let layout = assemble(&blocks, &names(&["ram0", "mem1"]), DIMM_TREE);
            let found = layout.map(|layout| layout.blocks.iter().any(|block| block.name == name));
            assert_eq!(found.ok(), is_there.then_some(true), "{name}");
        }
        assert_eq!(backend_id("/objects/pc.ram"), "pc.ram");
    }

    #[test]
    fn nvdimm_and_pmem_do_not_count_as_system_ram() {
        let backends = parse_backends(&json!([
            {"id": "ram0", "share": false, "size": 4096},
            {"id": "seg", "share": true, "size": 4096},
            {"id": "mem1", "share": false, "size": 4096}
        ]))
        .unwrap();
        let devices = json!([
            {"type": "virtio-pmem", "data": {"memdev": "/objects/seg"}},
            {"type": "dimm", "data": {"memdev": "/objects/mem1"}}
        ]);
        assert_eq!(system_ram(&backends, &devices), names(&["ram0", "mem1"]));
    }

    #[test]
    fn unexpected_output_of_qemus_monitor_about_ram_is_an_error() {
        let of_blocks = |answer: &str| parse_blocks(answer).unwrap_err().to_string();
        assert!(of_blocks("").contains("columns are ''"));
        let old = of_blocks("Block Name PSize Offset Used Total\n x 4 KiB 0x0 0x0 0x0");
        assert!(old.contains("columns are 'Block Name"), "{old}");
        let short = of_blocks(&format!("{}\n x 4 KiB", DIMM_BLOCKS.trim_end()));
        assert!(short.contains("line 'x 4 KiB'"), "{short}");
        let blocks = parse_blocks(DIMM_BLOCKS).unwrap();
        let (all, none) = (names(&["ram0", "mem1"]), names(&[]));
        let fewer = &blocks[1..];
        let beyond = DIMM_TREE.replace("00000001bfffffff", "00000001bffffffff");
        let unaligned = DIMM_TREE.replace("@0000000080000000", "@0000000080000800");
        for (blocks, system, tree, why) in [
            (&blocks[..], &all, "", "no address space"),
            (&blocks, &none, DIMM_TREE, "no system RAM"),
            (&blocks, &all, &beyond, "-0x1bffffffff of"),
            (&blocks, &all, &unaligned, "at 0x80000800 is unaligned"),
            (fewer, &all, DIMM_TREE, "is not in info ramblock"),
        ] {
            let error = assemble(blocks, system, tree).unwrap_err().to_string();
            assert!(error.contains(why), "{error}, not {why}");
        }
    }

    proptest! {
        #[test]
        fn damaged_output_of_qemus_monitor_about_ram_never_causes_a_panic(at in 0..DIMM_TREE.len(), byte in 32u8..127, cut in 0..DIMM_BLOCKS.len()) {
            let mut tree = DIMM_TREE.as_bytes().to_vec();
            tree[at] = byte;
            let tree = String::from_utf8(tree).unwrap();
            let _ = parse_blocks(&DIMM_BLOCKS[..cut]);
            let blocks = parse_blocks(DIMM_BLOCKS).unwrap();
            if let Ok(layout) = assemble(&blocks, &names(&["ram0", "mem1"]), &tree) {
                prop_assert!(layout.slots.windows(2).all(|w| w[0].pfn.add_pages(w[0].pages) <= w[1].pfn));
            }
        }
    }
}
