// Snapshots, the VMs that they are of, and the VMs that run from them.

import { useState } from "../../vendor/preact-hooks.js";
import { del, part, post, useAnswer, useLive } from "../api.js";
import { bytes, plural, time } from "../format.js";
import { html } from "../html.js";
import { Act, Badge, Card, DESPITE_BRAKE, Empty, Failure, NAME, Waiting } from "../ui.js";
import { saveSnapshot } from "./vm.js";

/** Trees of who came from whom: a snapshot hangs on its VM, if that VM runs from a snapshot itself. */
function trees(snapshots) {
  const from = new Map(snapshots.flatMap((s) => s.users.map((vm) => [vm, s.name])));
  const under = (vm) => snapshots.filter((s) => s.vm === vm);
  // A name may be used again: one that hangs on itself is a root.
  const roots = snapshots.filter((s) => !from.has(s.vm) || from.get(s.vm) === s.name);
  return { roots, under };
}

const RENEW = [
  { value: "network", label: "random numbers and MAC addresses" },
  { value: "identity", label: "also host name, machine ID and SSH keys" },
  { value: "random", label: "random numbers only: the VM replaces the saved one" },
];

function Actions({ snapshot, may, changed }) {
  const name = snapshot.name;
  const path = `/v1/snapshots/${part(name)}`;
  const clone = {
    title: `Clone ${name}`,
    text: "Starts VMs that share the snapshot's memory.",
    fields: [
      { name: "number", label: "How many", type: "number", min: 1, max: 64, step: 1, value: 1, required: true },
      { name: "prefix", label: "Names begin with", value: name, required: true, pattern: NAME },
      { name: "renew", label: "Each gets its own", type: "select", options: RENEW, value: "network" },
      { name: "prefetch", label: "Fetch the memory that a VM uses first", type: "checkbox" },
      DESPITE_BRAKE,
    ],
    action: "Clone",
    act: async (v) => {
      const began = performance.now();
      const total = Number(v.number);
      for (let n = 1; n <= total; n += 1) {
        try {
          await post(`${path}/restore`, { vm: `${v.prefix}-${n}`, renew: v.renew, prefetch: v.prefetch, despite_brake: v.despite });
        } catch (error) {
          changed();
          error.message = `${v.prefix}-${n} did not start, ${n - 1} run: ${error.message}`;
          throw error;
        }
      }
      changed();
      return `${total} of ${total} started in ${Math.round(performance.now() - began)} ms.`;
    },
  };
  const restore = {
    title: `Restore ${name}`,
    text: "The VM continues from the time of the snapshot. Its writes go to temporary overlays, unless you name a directory of the host.",
    fields: [
      { name: "vm", label: "Name of the VM", value: snapshot.vm, required: true, pattern: NAME },
      { name: "renew", label: "It gets its own", type: "select", options: RENEW, value: "random" },
      { name: "disks", label: "Directory for its disks", hint: "Empty: temporary overlays." },
      DESPITE_BRAKE,
    ],
    action: "Restore",
    act: async (v) => {
      const vm = await post(`${path}/restore`, { vm: v.vm, renew: v.renew, disks: v.disks || null, despite_brake: v.despite });
      changed();
      return `${vm.name} runs.`;
    },
  };
  const verify = {
    title: `Verify ${name}?`,
    text: "All bytes of the snapshot are read and compared with their checksums.",
    action: "Verify",
    act: async () => {
      const { problems } = await post(`${path}/verify`);
      return problems.length ? `Wrong: ${problems.join("; ")}` : "Every byte is unchanged since the save.";
    },
  };
  const remove = {
    title: `Remove ${name}?`,
    text: `The snapshot takes ${bytes(snapshot.disk_bytes)} on disk. It cannot be recovered after that.`,
    action: "Remove the snapshot",
    danger: true,
    act: async () => {
      await del(path);
      changed();
    },
  };
  return html`<div class="buttons">
    <${Act} may=${may} what=${clone} small>Clone …<//><${Act} may=${may} what=${restore} small>Restore …<//>
    <${Act} may=${may} what=${verify} small>Verify …<//><${Act} may=${may} what=${remove} danger small>Remove …<//></div>`;
}

function Node({ snapshot, may, changed, under, seen }) {
  const hung = (vm) => under(vm).filter((s) => !seen.includes(s.name));
  return html`<li>
    <div class="node">
      <div><strong>${snapshot.name}</strong> <${Badge}>${snapshot.domain ?? "no domain"}<//> ${snapshot.problem && html`<${Badge} tone="bad" title=${snapshot.problem}>unusable<//>`}
        <p class="note">of ${snapshot.vm}, ${time(snapshot.created_s)}; ${bytes(snapshot.memory_bytes)} of RAM in ${bytes(snapshot.disk_bytes)} on disk${snapshot.problem ? `; ${snapshot.problem}` : ""}</p></div>
      <${Actions} snapshot=${snapshot} may=${may} changed=${changed} />
    </div>
    ${snapshot.users.length > 0 && html`<ul>${snapshot.users.map((vm) => html`
      <li><div class="node vm"><a href=${`#/vms/${part(vm)}`}>${vm}</a> <span class="soft">runs from it</span></div>
        ${hung(vm).length > 0 && html`<ul>${hung(vm).map((s) => html`<${Node} snapshot=${s} may=${may} changed=${changed} under=${under} seen=${[...seen, s.name]} />`)}</ul>`}
      </li>`)}</ul>`}
  </li>`;
}

export function Snapshots({ may }) {
  const [again, setAgain] = useState(0);
  const { sample } = useLive();
  const { value: snapshots, error } = useAnswer("/v1/snapshots", again, 15000);
  const changed = () => setAgain((n) => n + 1);
  const vms = (sample?.vms ?? []).map((vm) => vm.name);
  const save = vms.length > 0 && html`<${Act} may=${may} what=${() => saveSnapshot(vms, null, changed)}>Save a VM …<//>`;
  if (!snapshots) return error ? html`<${Failure} error=${error} />` : html`<${Waiting} />`;
  const { roots, under } = trees(snapshots);
  return html`<${Card} title=${plural(snapshots.length, "snapshot")} aside=${save} wide>
    <${Failure} error=${error} />
    ${snapshots.length === 0 && html`<${Empty}>None yet. <code>memfold snapshot save VM NAME</code> saves one.<//>`}
    <ul class="tree">${roots.map((s) => html`<${Node} key=${s.name} snapshot=${s} may=${may} changed=${changed} under=${under} seen=${[s.name]} />`)}</ul>
  <//>`;
}
