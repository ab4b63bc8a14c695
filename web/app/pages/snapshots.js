// Snapshots with their layers, the VMs that they are of, and the VMs that run from them.

import { useState } from "../../vendor/preact-hooks.js";
import { del, part, post, useAnswer, useLive } from "../api.js";
import { bytes, plural, time } from "../format.js";
import { html } from "../html.js";
import { freeNames, RENEW, saveSnapshot, start } from "../starts.js";
import { Act, Badge, Card, DESPITE_BRAKE, Empty, Failure, NAME, Stack, Waiting } from "../ui.js";

/** Trees of who came from whom: a layer hangs below its parent, and another snapshot below its VM if that VM runs from a snapshot. */
function trees(snapshots) {
  const isLayer = (s) => snapshots.some((other) => other.name === s.parent);
  const from = new Map(snapshots.flatMap((s) => s.users.map((vm) => [vm, s.name])));
  const layers = (name) => snapshots.filter((s) => s.parent === name);
  const under = (vm) => snapshots.filter((s) => s.vm === vm && !isLayer(s));
  const reached = new Set();
  const reach = (s) => {
    if (reached.has(s.name)) return;
    reached.add(s.name);
    [...layers(s.name), ...s.users.flatMap(under)].forEach(reach);
  };
  const roots = [];
  const add = (s) => {
    if (reached.has(s.name)) return;
    roots.push(s);
    reach(s);
  };
  snapshots.filter((s) => !isLayer(s) && !from.has(s.vm)).forEach(add);
  // A name may be used again: snapshots that hang on each other have no root of their own.
  snapshots.forEach(add);
  return { roots, layers, under };
}

function Actions({ snapshot, isParent, may, changed }) {
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
      try {
        return await start(name, await freeNames(v.prefix, Number(v.number)), v);
      } finally {
        changed();
      }
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
  const complete = {
    title: `Make ${name} complete`,
    text: `${bytes(snapshot.parent_bytes)} that the layer needs of ${snapshot.parent} are copied into it. It needs no other snapshot after that.`,
    action: "Make complete",
    act: async () => {
      await post(`${path}/compact`);
      changed();
      return `${name} needs no other snapshot.`;
    },
  };
  const rekey = {
    title: `Change the key of ${name}`,
    text: `Its key is ${snapshot.key}. The daemon needs both keys. VMs that run from the snapshot go on.`,
    fields: [{ name: "key", label: "New key", required: true, pattern: NAME, hint: "Name of a key of the daemon (serve --snapshot-key)." }],
    action: "Change the key",
    act: async (v) => {
      const { key } = await post(`${path}/rekey`, { key_name: v.key });
      changed();
      return `${name} is encrypted with key ${key}.`;
    },
  };
  const remove = {
    title: `Remove ${name}?`,
    text: `The snapshot takes ${bytes(snapshot.disk_bytes)} on disk. It cannot be recovered after that.`,
    fields: isParent ? [{ name: "merge", label: "Make its layers complete first; without this, it stays as long as it has layers", type: "checkbox" }] : [],
    action: "Remove the snapshot",
    danger: true,
    act: async (v) => {
      await del(v.merge ? `${path}?merge=true` : path);
      changed();
    },
  };
  return html`<div class="buttons">
    <${Act} may=${may} what=${clone} small>Clone …<//><${Act} may=${may} what=${restore} small>Restore …<//>
    <${Act} may=${may} what=${verify} small>Verify …<//>${snapshot.parent && html`<${Act} may=${may} what=${complete} small>Make complete …<//>`}
    ${snapshot.key && html`<${Act} may=${may} what=${rekey} small>Change key …<//>`}<${Act} may=${may} what=${remove} danger small>Remove …<//></div>`;
}

/** What a snapshot holds, and what it has of its parent. */
function Holds({ snapshot }) {
  const { parent, parent_bytes: shared, disk_bytes: own } = snapshot;
  if (!parent) return html`${bytes(snapshot.memory_bytes)} of RAM in ${bytes(own)} on disk`;
  const parts = [
    { name: "its own", value: own, color: "private" },
    { name: `of ${parent}`, value: shared, color: "template" },
  ];
  return html`${bytes(own)} of its own on disk, ${bytes(shared)} of ${parent}<${Stack} parts=${parts} label=${`What ${snapshot.name} holds`} legend=${false} />`;
}

function Node({ snapshot, may, changed, hung, seen }) {
  const unseen = (all) => all.filter((s) => !seen.includes(s.name));
  const below = (all) => unseen(all).map((s) => html`<${Node} key=${s.name} snapshot=${s} may=${may} changed=${changed} hung=${hung} seen=${[...seen, s.name]} />`);
  const layers = hung.layers(snapshot.name);
  return html`<li>
    <div class="node">
      <div><strong>${snapshot.name}</strong> <${Badge}>${snapshot.domain ?? "no domain"}<//> ${snapshot.fork && html`<${Badge} title="memfold removes it when no VM and no snapshot needs it">forks<//>`} ${snapshot.key && html`<${Badge} title="Memory and device state are encrypted">encrypted, key ${snapshot.key}<//>`} ${snapshot.problem && html`<${Badge} tone="bad" title=${snapshot.problem}>unusable<//>`}
        <div class="note">of ${snapshot.vm}, ${time(snapshot.created_s)}; <${Holds} snapshot=${snapshot} />${snapshot.problem ? `; ${snapshot.problem}` : ""}</div></div>
      <${Actions} snapshot=${snapshot} isParent=${layers.length > 0} may=${may} changed=${changed} />
    </div>
    ${snapshot.users.length + unseen(layers).length > 0 && html`<ul>${snapshot.users.map((vm) => html`
      <li><div class="node vm"><a href=${`#/vms/${part(vm)}`}>${vm}</a> <span class="soft">runs from it</span></div>
        ${unseen(hung.under(vm)).length > 0 && html`<ul>${below(hung.under(vm))}</ul>`}
      </li>`)}${below(layers)}</ul>`}
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
  const { roots, ...hung } = trees(snapshots);
  return html`<${Card} title=${plural(snapshots.length, "snapshot")} aside=${save} wide>
    <${Failure} error=${error} />
    ${snapshots.length === 0 && html`<${Empty}>None yet. <code>memfold snapshot save VM NAME</code> saves one.<//>`}
    <ul class="tree">${roots.map((s) => html`<${Node} key=${s.name} snapshot=${s} may=${may} changed=${changed} hung=${hung} seen=${[s.name]} />`)}</ul>
  <//>`;
}
