#!/usr/bin/env python3
"""Prints the memory of each VM from the ledger, as a pandas DataFrame (package python3-pandas)."""

import pandas

import memfold

MIB = 1 << 20


def memory_of_vms(client: memfold.Client) -> pandas.DataFrame:
    """Returns a row for each VM, in MiB: RAM that the guest sees, and the VM's part of host RAM."""
    ledger = client.report().ledger
    vms = pandas.DataFrame(ledger["vms"], columns=["name", "domain", "ram_bytes", "pss_bytes"])
    vms = vms.set_index("name")
    for column in ("ram", "pss"):
        vms[f"{column}_mib"] = vms.pop(f"{column}_bytes") / MIB
    return vms.sort_values("pss_mib", ascending=False)


if __name__ == "__main__":
    table = memory_of_vms(memfold.Client())
    print(table.round(1).to_string())
    ram, pss = table["ram_mib"].sum(), table["pss_mib"].sum()
    print(f"{len(table)} VMs with {ram:.0f} MiB of RAM take {pss:.0f} MiB of the host")
