// Saves of VMs, and starts of VMs from snapshots, which several pages offer.

import { get, part, post } from "./api.js";
import { DESPITE_BRAKE, NAME } from "./ui.js";

export const RENEW = [
  { value: "network", label: "random numbers and MAC addresses" },
  { value: "identity", label: "also host name, machine ID and SSH keys" },
  { value: "random", label: "random numbers only: the VM replaces the saved one" },
];

/** Starts VMs from a snapshot, one after the other. `v`: renew, prefetch, despite. */
export async function start(snapshot, names, v) {
  const began = performance.now();
  for (const [n, vm] of names.entries()) {
    try {
      await post(`/v1/snapshots/${part(snapshot)}/restore`, { vm, renew: v.renew, prefetch: v.prefetch, despite_brake: v.despite });
    } catch (error) {
      error.message = `${vm} did not start, ${n} run: ${error.message}`;
      throw error;
    }
  }
  return `${names.length} of ${names.length} started in ${Math.round(performance.now() - began)} ms.`;
}

/** So many names that begin with `prefix` and that neither a VM nor a definition has. */
export async function freeNames(prefix, number) {
  const lists = await Promise.all([get("/v1/vms"), get("/v1/definitions")]);
  const taken = new Set(lists.flat().map((other) => other.name));
  const names = [];
  for (let n = 1; names.length < number; n += 1) {
    if (!taken.has(`${prefix}-${n}`)) names.push(`${prefix}-${n}`);
  }
  return names;
}

/** VMs that continue a running VM. */
export const fork = (vm) => ({
  title: `Fork ${vm}`,
  text: "Starts VMs that continue this VM from now on. This VM goes on.",
  fields: [
    { name: "number", label: "How many", type: "number", min: 1, max: 64, step: 1, value: 1, required: true },
    { name: "prefix", label: "Names begin with", value: `${vm}-fork`, required: true, pattern: NAME },
    { name: "renew", label: "Each gets its own", type: "select", options: RENEW.slice(0, 2), value: "network" },
    DESPITE_BRAKE,
  ],
  action: "Fork",
  act: async (v) => {
    const names = await freeNames(v.prefix, Number(v.number));
    const { snapshot, pause_ms: pause } = await post(`/v1/vms/${part(vm)}/fork`, {});
    return `${await start(snapshot, names, v)} ${vm} stood still for ${Math.round(pause)} ms.`;
  },
});

/** A snapshot of a VM, asked for on its own page and on the snapshots' page. */
export const saveSnapshot = (vms, chosen, done) => ({
  title: "Save a snapshot",
  text: "Memory, devices and disks at one instant.",
  fields: [
    { name: "vm", label: "VM", type: "select", options: vms, value: chosen ?? vms[0] },
    { name: "name", label: "Name", required: true, pattern: NAME },
    { name: "live", label: "The VM goes on while its memory is copied", type: "checkbox", value: true },
    { name: "keep", label: "Page cache", type: "select", options: [
      { value: "auto", label: "what ends soonest" }, { value: "none", label: "dropped: smallest" }, { value: "hot", label: "kept, as references to its disks" }, { value: "all", label: "kept, and free pages too" } ] },
    { name: "compress", label: "Compress the image", type: "checkbox" },
    { name: "encrypt", label: "Encrypt memory and device state", type: "checkbox", hint: "With a key of the daemon (serve --snapshot-key)." },
    { name: "key", label: "Key name", pattern: NAME, hint: "Empty: the only key that the daemon has." },
    { name: "plain_disks", label: "Disks may be unencrypted", type: "checkbox", hint: "Accepts that an encrypted snapshot holds disks and other files unencrypted." },
  ],
  action: "Save",
  act: async (v) => {
    await post("/v1/snapshots", { vm: v.vm, name: v.name, live: v.live, keep: v.keep, compress: v.compress, encrypt: v.encrypt, key: v.key || null, plain_disks: v.plain_disks });
    done?.();
    return `Saved as ${v.name}.`;
  },
});
