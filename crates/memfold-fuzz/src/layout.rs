//! Fuzzes the parser of QEMU's answers about the layout of a VM's RAM. memfold may be attached to
//! any version of QEMU, or to another program that answers in its place.

use memfold_units::{PAGE_SIZE, Pfn};
use memfold_vm::ram::{self, RamFacts};
use serde_json::{Value, json};

use crate::subject::parts;

macro_rules! fixture {
    ($file:literal) => {
        include_str!(concat!("../../memfold-vm/src/fixtures/", $file))
    };
}

pub fn layouts() -> Vec<Vec<u8>> {
    let backend = |id: &str| json!({"id": id, "share": false, "size": 4096});
    let dimm = json!([{"type": "dimm", "data": {"memdev": "/objects/mem1"}}]);
    let pmem = json!([{"type": "virtio-pmem", "data": {"memdev": "/objects/seg"}}]);
    let seed = |blocks: &str, backends: Value, devices: &Value, tree: &str| {
        let (backends, devices) = (backends.to_string(), devices.to_string());
        [blocks, &backends, &devices, tree].join("\0").into_bytes()
    };
    vec![
        seed(
            fixture!("qemu10_5g_dimm.ramblock"),
            json!([backend("ram0"), backend("mem1")]),
            &dimm,
            fixture!("qemu10_5g_dimm.mtree"),
        ),
        seed(
            fixture!("qemu10_kvm_vga.ramblock"),
            json!([backend("pc.ram"), backend("seg")]),
            &pmem,
            fixture!("qemu10_kvm_vga.mtree"),
        ),
    ]
}

pub fn layout(data: &[u8]) -> u64 {
    let [blocks, backends, devices, tree] = parts(data);
    let json = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or(Value::Null);
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let facts = ram::parse(&text(blocks), &json(backends), &json(devices), &text(tree));
    let Ok(RamFacts { layout, .. }) = facts else {
        return 0;
    };
    assert!(!layout.slots.is_empty());
    for pair in layout.slots.windows(2) {
        assert!(pair[0].pfn.0 + pair[0].pages <= pair[1].pfn.0, "{pair:?}");
    }
    for slot in &layout.slots {
        let block = &layout.blocks[slot.block];
        assert!(slot.pages > 0 && slot.hva.0 % PAGE_SIZE == 0);
        // A slot outside its block would let memfold write to memory that is no guest's.
        let first = (slot.hva.0 - block.hva.0) / PAGE_SIZE;
        assert!(first + slot.pages <= block.pages, "{slot:?} {block:?}");
        let last = Pfn(slot.pfn.0 + slot.pages - 1);
        assert_eq!(layout.hva_of(slot.pfn).map(|(hva, _)| hva), Some(slot.hva));
        assert!(layout.hva_of(last).is_some());
    }
    1 << 8 | (layout.slots.len() as u64).min(15) << 4 | (layout.blocks.len() as u64).min(15)
}
