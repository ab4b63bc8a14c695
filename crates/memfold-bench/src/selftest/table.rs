//! Formats the result of the self-test (`memfold doctor --self-test`) as text.

use comfy_table::{ContentArrangement, Table, presets};

use super::SelfTest;

/// Returns the result of the self-test as text for people.
pub fn text(test: &SelfTest) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    for claim in &test.claims {
        let mark = if claim.holds { "ok" } else { "FAIL" };
        table.add_row([mark, claim.what, &claim.seen]);
    }
    let (guests, library) = (&test.guests, &test.library);
    let (longest, ours) = (guests.freeze_max_us, library.freeze_max_us);
    let (engine, qemus) = (guests.engine_cpu_s, guests.library_cpu_s);
    let median = guests.freeze_median_us;
    let accelerator = &test.accelerator;
    let freeze = format!("{longest:.0} us in guests, {ours:.0} us in this process");
    for (name, value) in [
        ("accelerator", format!("{accelerator}, by QEMU's word")),
        ("longest freeze", freeze),
        ("median freeze", format!("below {median:.0} us in guests")),
        (
            "CPU",
            format!("{engine:.2} s engine, {qemus:.2} s in QEMUs"),
        ),
        ("took", format!("{:.0} s", test.seconds)),
    ] {
        table.add_row(["", name, &value]);
    }
    let rows: Vec<String> = table.lines().map(|l| l.trim_end().to_owned()).collect();
    let verdict = if test.passed {
        "Self-test passed: memfold folds memory on this host without losing a byte."
    } else {
        "Self-test FAILED: don't fold VMs on this host, and report this."
    };
    format!("{}\n\n{verdict}", rows.join("\n"))
}
