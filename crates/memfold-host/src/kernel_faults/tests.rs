use super::*;

/// For each fault: releases with the fault, releases without, and releases that do not tell.
type Case = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
    &'static [&'static str],
);

const CASES: [Case; 11] = [
    (
        "CVE-2025-68211",
        &[
            "6.6.120",
            "6.12.58+deb13-amd64",
            "6.17.8-300.fc43.x86_64",
            "6.16.12",
            "2.6.32",
        ],
        &[
            "6.6.121",
            "6.12.59+deb13-amd64",
            "6.17.9-arch1-1",
            "6.18.0",
            "6.18.1-1-pve",
            "2.6.31",
        ],
        &[
            "6.8.0-71-generic",
            "6.8.12-13-pve",
            "6.1.0-37-amd64",
            "6.12.0-55.el10.x86_64",
        ],
    ),
    (
        "CVE-2024-46787",
        &["6.6.50", "6.9.12", "6.10.9", "4.3.0"],
        &[
            "6.6.51",
            "6.10.10",
            "6.11.0",
            "6.11.0-29-generic",
            "6.12.9+bpo-amd64",
            "4.2.8",
        ],
        &[
            "6.8.0-71-generic",
            "6.8.12-13-pve",
            "5.14.0-570.el9.x86_64",
            "6.11.0-rc6",
        ],
    ),
    (
        "CVE-2026-64514",
        &[
            "6.6.144",
            "6.12.95+deb13-amd64",
            "6.18.38",
            "6.19.14",
            "7.1.3-200.fc44.x86_64",
        ],
        &[
            "6.6.145",
            "6.12.96+deb13-amd64",
            "6.18.39",
            "7.1.4",
            "7.2.0",
            "7.2.1-2-pve",
            "4.10.17",
        ],
        &[
            "6.17.0-8-generic",
            "6.17.2-1-pve",
            "7.0.0-14-generic",
            "7.2.0-rc1",
        ],
    ),
    (
        "CVE-2024-27007",
        &["6.8.0", "6.8.7", "6.8.7-arch1-1"],
        &[
            "6.8.8",
            "6.8.12-13-pve",
            "6.9.0",
            "6.7.12+bpo-amd64",
            "6.11.0-29-generic",
        ],
        &[
            "6.8.0-31-generic",
            "6.8.4-2-pve",
            "6.8.0-rc2",
            "5.14.0-570.el9.x86_64",
        ],
    ),
    (
        "CVE-2025-21984",
        &[
            "6.8.12",
            "6.11.11",
            "6.12.19+deb13-amd64",
            "6.12.9+bpo-amd64",
            "6.13.7",
        ],
        &[
            "6.12.20-amd64",
            "6.13.8",
            "6.14.0",
            "6.14.0-29-generic",
            "6.7.12",
            "6.6.87",
        ],
        &[
            "6.8.0-58-generic",
            "6.11.0-29-generic",
            "6.8.12-13-pve",
            "6.12.0-55.el10.x86_64",
        ],
    ),
    (
        "CVE-2025-38242",
        &["6.12.36", "6.14.11", "6.15.4-200.fc42.x86_64"],
        &[
            "6.12.37+deb13-amd64",
            "6.12.38+deb12-amd64",
            "6.15.5",
            "6.16.0",
            "6.17.0-8-generic",
        ],
        &["6.8.0-71-generic", "6.14.0-29-generic", "6.14.11-4-pve"],
    ),
    (
        "CVE-2025-38686",
        &["6.12.42", "6.14.11", "6.15.10", "6.16.1"],
        &[
            "6.12.43+deb13-amd64",
            "6.15.11",
            "6.16.2",
            "6.17.0",
            "6.17.2-1-pve",
            "6.6.100",
        ],
        &["6.8.0-71-generic", "6.14.0-29-generic", "6.17.0-rc1"],
    ),
    (
        "commit 4165b7d1c45c",
        &["6.12.103+deb13-amd64", "6.18.45", "7.0.14", "7.1.7"],
        &["6.18.46", "7.1.8", "7.2.0", "6.7.12"],
        &["6.17.0-8-generic", "7.0.0-14-generic", "7.2.0-rc3"],
    ),
    (
        "commit 9658d698a8a8",
        &["6.12.53+deb13-amd64", "6.13.12", "6.16.12", "6.17.3"],
        &[
            "6.12.54",
            "6.12.57+deb13-amd64",
            "6.17.4",
            "6.18.0",
            "6.11.11",
            "6.8.0-71-generic",
        ],
        &[
            "6.14.0-29-generic",
            "6.17.0-8-generic",
            "6.17.2-1-pve",
            "6.12.0-rc4",
        ],
    ),
    (
        "CVE-2026-31397",
        &["6.16.0", "6.17.13", "6.18.19", "6.19.9-300.fc44.x86_64"],
        &[
            "6.18.20",
            "6.18.44",
            "6.19.10",
            "7.0.0",
            "7.0.0-14-generic",
            "6.15.11",
            "6.14.11-4-pve",
        ],
        &[
            "6.17.0-8-generic",
            "6.17.2-1-pve",
            "6.16.0-rc7",
            "6.12.0-55.el10.x86_64",
        ],
    ),
    (
        "commit f025ca73decd",
        &["6.18.0", "6.18.44", "6.18.50", "6.19.14", "7.1.9", "7.2.4"],
        &[
            "6.18.51",
            "7.2.5",
            "7.3.0",
            "6.17.13",
            "6.12.57+deb13-amd64",
            "6.17.0-8-generic",
        ],
        &[
            "7.0.0-14-generic",
            "6.18.0-rc4",
            "7.3.0-rc1",
            "6.12.0-55.el10.x86_64",
        ],
    ),
];

fn presence(fault: &Fault, release: &str) -> Presence {
    fault.presence(Release::parse(release).expect(release))
}

#[test]
fn each_known_fault_is_found_in_the_kernels_that_have_it_and_in_no_others() {
    for (fault, (id, present, absent, unknown)) in FAULTS.iter().zip(CASES) {
        assert_eq!(fault.id, id);
        for (releases, expected) in [
            (present, Presence::Present),
            (absent, Presence::Absent),
            (unknown, Presence::Unknown),
        ] {
            for release in releases {
                assert_eq!(presence(fault, release), expected, "{id} in {release}");
            }
        }
    }
}

#[test]
fn each_series_with_a_fix_has_the_fault_up_to_the_release_before() {
    for fault in &FAULTS {
        assert!(fault.fixed.is_sorted(), "{}", fault.id);
        for fix in fault.fixed {
            let fixed = fix.to_string();
            assert_eq!(presence(fault, &fixed), Presence::Absent, "{fixed}");
            let Version(major, minor, patch) = *fix;
            if patch > 0 {
                let before = Version(major, minor, patch - 1);
                let text = before.to_string();
                // A version of two numbers is not a stable release's name.
                let text = if patch == 1 {
                    format!("{text}.0")
                } else {
                    text
                };
                assert_eq!(presence(fault, &text), Presence::Present, "{text}");
                assert_eq!(fault.next_fix(before), Some(*fix));
            }
        }
    }
}

#[test]
fn a_series_without_a_fix_is_told_the_next_series_that_has_one() {
    let found = find("6.14.11").unwrap();
    let fix = |id| found.iter().find(|f| f.id == id).unwrap().fixed_in.clone();
    assert_eq!(fix("CVE-2025-38242").as_deref(), Some("6.15.5"));
    assert_eq!(fix("commit 9658d698a8a8").as_deref(), Some("6.17.4"));
}

#[test]
fn serve_is_refused_only_on_kernels_that_certainly_lose_data() {
    for release in ["6.8.0", "6.8.7", "6.8.7-arch1-1"] {
        let why = refusal(release).expect(release);
        for word in [release, "CVE-2024-27007", "lose data", "Linux 6.8.8"] {
            assert!(why.contains(word), "no '{word}' in: {why}");
        }
    }
    for release in [
        // The distribution may have added the fix.
        "6.8.0-31-generic",
        "6.8.4-2-pve",
        // These kernels have faults, but memfold avoids them, or no data is lost.
        "6.18.19",
        "6.18.44",
        "6.12.1",
        "7.3.0",
        "not a version",
        "",
    ] {
        assert_eq!(refusal(release), None, "{release}");
    }
}

#[test]
fn nothing_is_said_about_a_kernel_whose_release_cannot_be_parsed() {
    for release in ["", "linux", "6", "6.x"] {
        assert_eq!(find(release), None);
    }
    assert_eq!(find("7.3.1"), Some(Vec::new()));
}

/// Returns the rows of the table in docs/operating/kernel-faults.md.
fn table() -> String {
    let rows = FAULTS.iter().map(|fault| {
        let fixed: Vec<_> = fault.fixed.iter().map(ToString::to_string).collect();
        let conduct = match fault.conduct {
            Conduct::Avoids => "avoided",
            Conduct::Meets => "can happen",
            Conduct::Refuses => "`serve` refuses",
        };
        let workaround = fault
            .workaround
            .map_or(String::new(), |w| format!(". Workaround: {w}"));
        format!(
            "| {} | {} | {} | {} | {} | {} | {conduct}: {}{workaround} |\n",
            fault.id,
            fault.what,
            fault.mechanism,
            fault.effect.words(),
            fault.since,
            fixed.join(", "),
            fault.how,
        )
    });
    rows.collect()
}

#[test]
fn the_page_about_kernel_faults_has_the_table_of_the_code() {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/operating/kernel-faults.md"
    );
    let text = std::fs::read_to_string(page).unwrap();
    let table = table();
    assert!(
        text.contains(&table),
        "docs/operating/kernel-faults.md must contain these rows:\n{table}"
    );
}
