//! Formats the result of the self-test as text.

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
    let guests = &test.guests;
    let figures = [
        (
            "accelerator",
            format!("{}, by QEMU's word", test.accelerator),
        ),
        (
            "longest freeze",
            format!(
                "{:.0} us in guests, {:.0} us in this process",
                guests.freeze_max_us, test.library.freeze_max_us
            ),
        ),
        (
            "median freeze",
            format!("below {:.0} us in guests", guests.freeze_median_us),
        ),
        (
            "CPU",
            format!(
                "{:.2} s engine, {:.2} s in QEMUs",
                guests.engine_cpu_s, guests.library_cpu_s
            ),
        ),
        ("took", format!("{:.0} s", test.seconds)),
    ];
    for (name, value) in figures {
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
