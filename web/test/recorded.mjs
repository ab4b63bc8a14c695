// One sample and its trends, for so many VMs: made up, in the shape that the daemon sends, to see how the page bears their number.

const MIB = 1 << 20;

export function recorded(count) {
  const names = Array.from({ length: count }, (_, n) => `vm-${String(n).padStart(3, "0")}`);
  const ledgerVm = (name, n) => {
    const [priv, unfolded, folded, template, zero] = [120 + (n % 40), 4 + (n % 7), 90 + (n % 60), n % 3 ? 0 : 140, n % 9].map((mib) => mib * MIB);
    const ram = 512 * MIB;
    const backed = priv + unfolded + folded + template;
    return {
      name, domain: `team-${n % 5}`, pid: 1000 + n, ram_bytes: ram, private_bytes: priv, unfolded_bytes: unfolded, folded_resident_bytes: folded, folded_untouched_bytes: 0,
      file_resident_bytes: template, file_untouched_bytes: 0, zero_bytes: zero, swapped_bytes: 0, free_bytes: ram - backed - zero, backed_bytes: backed, folded_bytes: folded,
      ksm_merged_bytes: 0, huge_bytes: 0, pss_bytes: priv + unfolded + folded / 4 + 30 * MIB, mappings: 1200 + n, store_mappings: 900,
    };
  };
  const info = (name, n) => ({ name, domain: `team-${n % 5}`, pid: 1000 + n, ram_bytes: 512 * MIB, origin: "started", qemu: "10.0.2", agent: n % 17 ? "Linux 6.12.0" : null,
    agent_problems: [], fold_problems: n % 23 ? [] : ["a migration runs"], refold_problems: [], segments: [] });
  const host = {
    mem_total_bytes: 65536 * MIB, mem_available_bytes: 20480 * MIB, anon_pages_bytes: 30000 * MIB, shmem_bytes: 2000 * MIB, kernel_bytes: 900 * MIB, others_anon_bytes: 1500 * MIB,
    max_map_count: 65530, stores: [], stores_bytes: 3000 * MIB, images_bytes: 0, ksm: null, physical_bytes: 24000 * MIB, saved_by_folding_bytes: 9000 * MIB, saved_by_clones_bytes: 0,
    saved_by_segments_bytes: 0, saved_by_ksm_bytes: 0, saved_by_zero_drop_bytes: 0, saved_net_bytes: 8900 * MIB,
    own: { pss_bytes: 80 * MIB, store_pss_bytes: 0, page_table_bytes: MIB, metadata_bytes: 40 * MIB },
  };
  const fold = { paused: false, engine_cpu_s: 12, library_cpu_s: 8, cpu_share: 0.05, pages_per_second: null, hint_to_fold_p50_s: 1.2, hints_waiting: 0, vms: [], domains: [] };
  const owed = names.map((name, n) => ({ name, folded_bytes: (90 + (n % 60)) * MIB, snapshot_bytes: 0, zero_bytes: (n % 9) * MIB }));
  const debt = {
    level: "braked", sharing_held: true, why: "", debt_bytes: 12000 * MIB, folded_bytes: 11600 * MIB, snapshot_bytes: 0, zero_bytes: 400 * MIB, ksm_bytes: 0, starting_bytes: 0,
    store_bytes: 3000 * MIB, cover_percent: 50, needed_bytes: 6000 * MIB, mem_available_bytes: 9000 * MIB, reserve_bytes: 4096 * MIB, absorbable_bytes: 4904 * MIB, swap_free_bytes: 0,
    given_back_bytes: 0, vms: owed, events: [{ at_unix_s: 1.8e9, level: "braked", mem_available_bytes: 9000 * MIB, debt_bytes: 12000 * MIB, what: "warning -> BRAKED: made up" }],
  };
  return {
    live: { ledger: { taken_unix_s: 1.8e9, host, vms: names.map(ledgerVm), debt, disagreements: [] }, fold, vms: names.map(info), sample_cpu_ms: 20, interval_ms: 5000 },
    trends: { step_s: 90, vms: names.map((name, n) => ({ name, pss_bytes: Array.from({ length: 40 }, (_, i) => Math.round((180 + 20 * Math.sin((i + n) / 5)) * MIB)) })) },
  };
}
