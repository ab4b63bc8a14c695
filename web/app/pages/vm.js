// One VM: its memory from end to end, its figures over time, and what can be done with it.

import { useEffect, useMemo, useRef, useState } from "../../vendor/preact-hooks.js";
import { changeSample, del, part, post, useAnswer, useLive } from "../api.js";
import { bytes, duration } from "../format.js";
import { html } from "../html.js";
import { fork, saveSnapshot } from "../starts.js";
import { Act, Badge, Bytes, Card, Failure, ReadAt, Stack, Stat, Table, Waiting } from "../ui.js";
import { Ended, OverTime } from "./ended.js";
import { SizeOverTime } from "./rightsize.js";
import { isAdopted, PLACES, problems, showVm, swapPlace, withTemplate } from "./vms.js";

const COLORS = { private: "private", unfolded: "unfolded", folded: "folded", template: "template", zero: "zero", swapped: "swapped", free: "free" };
const CELL = 8;
const GAP = 1;

/** Cells as small squares, from the first byte of RAM at the top left; each in the color of what most of it is. */
function Cells({ map, theme }) {
  const canvas = useRef(null);
  const [at, setAt] = useState(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const resize = new ResizeObserver(() => canvas.current && setWidth(canvas.current.parentElement.clientWidth));
    resize.observe(canvas.current.parentElement);
    return () => resize.disconnect();
  }, []);
  const columns = Math.max(16, Math.floor(width / (CELL + GAP)));
  useEffect(() => {
    if (!width) return;
    const rows = Math.ceil(map.cells.length / columns);
    const scale = devicePixelRatio || 1;
    const box = canvas.current;
    box.width = columns * (CELL + GAP) * scale;
    box.height = rows * (CELL + GAP) * scale;
    box.style.width = `${columns * (CELL + GAP)}px`;
    box.style.height = `${rows * (CELL + GAP)}px`;
    const style = getComputedStyle(document.documentElement);
    const colors = map.states.map((state) => style.getPropertyValue(`--${COLORS[state]}`).trim());
    const draw = box.getContext("2d");
    draw.scale(scale, scale);
    map.cells.forEach((cell, i) => {
      const [x, y] = [(i % columns) * (CELL + GAP), Math.floor(i / columns) * (CELL + GAP)];
      const pages = cell.reduce((sum, n) => sum + n, 0) || 1;
      // From the bottom up, what is in the cell, in its order; so a mixed cell shows its mixture.
      let top = CELL;
      cell.forEach((n, state) => {
        if (!n) return;
        const high = (n / pages) * CELL;
        top -= high;
        draw.fillStyle = colors[state];
        draw.fillRect(x, y + top, CELL, high + 0.02);
      });
    });
  }, [map, columns, width, theme]);
  const point = (event) => {
    const box = event.target.getBoundingClientRect();
    const i = Math.floor((event.clientY - box.top) / (CELL + GAP)) * columns + Math.floor((event.clientX - box.left) / (CELL + GAP));
    setAt(map.cells[i] ? i : null);
  };
  const words = () => {
    const parts = map.states.map((state, s) => [state, map.cells[at][s] * 4096]).filter(([, n]) => n > 0);
    const place = map.places.findLast((place) => place.cell <= at);
    const where = place.address === null ? "not a guest address" : `at ${bytes(place.address + (at - place.cell) * map.cell_bytes)}`;
    return `${where}: ${parts.map(([state, n]) => `${state} ${bytes(n)}`).join(", ")}`;
  };
  return html`<div class="map">
    <canvas ref=${canvas} role="img" aria-label="Guest RAM by the guest's physical addresses; the table below has the sums" onMouseMove=${point} onMouseLeave=${() => setAt(null)}></canvas>
    <p class="cursor" aria-hidden="true">${at === null ? `each square is ${bytes(map.cell_bytes)}` : words()}</p>
  </div>`;
}

/** The swap disk beneath the map: what lies on it is no part of RAM, and so in no square. */
function Swap({ name, swap, again }) {
  const { value: use, error } = useAnswer(`/v1/vms/${part(name)}/swap`, again);
  const copies = [0, 1].map((copy) => swap.lent.filter((lent) => lent.copy === copy)).filter((lent) => lent.length);
  const strip = (parts) => html`<div class="segment-strip"><span>${swapPlace(swap)}</span>
    <${Stack} legend=${false} label="The swap disk by lender" parts=${parts} /><span><${Bytes} value=${swap.bytes} figure=${`swap.${name}`} /></span></div>`;
  return html`<h3>Swap disk beside RAM</h3>
    ${copies.length
      ? copies.map((lent) => strip(lent.map((l) => ({ name: `lent by ${l.lender}`, color: "lent", value: l.bytes }))))
      : strip([{ name: swapPlace(swap), color: swap.place === "lost" ? "swapped" : "kernel", value: swap.bytes }])}
    <${Failure} error=${error} />
    <p class="note">${swap.durability === "disk" && "A copy of all of it is on this host's disk. "}${use?.used_bytes !== null && use?.used_bytes !== undefined
      ? html`The guest reports that <${Bytes} value=${use.used_bytes} figure=${`swap.${name}.used`} /> of it are in use.`
      : use && `How much of it is in use is unknown: ${use.why_not}.`} What the guest has swapped out is in no square above: these show what its RAM holds now.</p>`;
}

function MemoryMap({ name, theme, swap }) {
  const [again, setAgain] = useState(0);
  const { value: map, error, at } = useAnswer(`/v1/vms/${part(name)}/memory-map?cells=4096`, again);
  const sums = useMemo(() => map && map.states.map((state, s) => ({ state, bytes: map.cells.reduce((sum, cell) => sum + cell[s], 0) * 4096 })), [map]);
  const refresh = html`<${ReadAt} at=${at} /><button class="small" onClick=${() => setAgain((n) => n + 1)}>Read again</button>`;
  return html`<${Card} title="Memory map" aside=${refresh} wide>
    <${Failure} error=${error} />
    ${!map && !error && html`<${Waiting} />`}
    ${map && html`<${Cells} map=${map} theme=${theme} />
      <dl class="legend">${sums.map((row) => html`<div><dt><i style=${{ background: `var(--${COLORS[row.state]})` }}></i>${row.state}</dt><dd><${Bytes} value=${row.bytes} figure=${`map.${name}.${row.state}`} /></dd></div>`)}</dl>
      ${map.segments.length > 0 && html`<h3>Segments beside RAM</h3>${map.segments.map((s) => html`
        <div class="segment-strip"><span>${s.segment}</span><${Stack} legend=${false} label=${`Segment ${s.segment}`} parts=${[
          { name: "in its page tables", color: "segment", value: s.resident_bytes },
          { name: "not touched", color: "free", value: s.bytes - s.resident_bytes },
        ]} /><span>${bytes(s.resident_bytes)} of ${bytes(s.bytes)}</span></div>`)}`}`}
    ${swap && html`<${Swap} name=${name} swap=${swap} again=${again} />`}
  <//>`;
}

function Segments({ info, may }) {
  const { value: segments, error } = useAnswer("/v1/segments", "", 15000);
  const names = (segments ?? []).map((s) => `${s.segment.name}@${s.segment.generation}`);
  const attach = {
    title: `Attach a segment to ${info.name}`,
    text: "The guest executes the segment's files from one shared copy. The VM needs a free slot (vm run --segment-slots).",
    fields: [
      { name: "segment", label: "Segment", type: "select", options: names, value: names[0] },
      { name: "no_lay", label: "Only attach the device; do not overlay the guest's files", type: "checkbox" },
    ],
    action: "Attach",
    act: async (v) => void (await post(`/v1/vms/${part(info.name)}/segments`, { segment: v.segment, no_lay: v.no_lay })),
  };
  const detach = (segment) => ({
    title: `Take ${segment} off ${info.name}?`,
    text: "The guest uses its own files again. The device stays until the VM ends.",
    action: "Take it off",
    danger: true,
    act: async () => void (await del(`/v1/vms/${part(info.name)}/segments/${part(segment)}`)),
  });
  const state = (s) => (typeof s === "string" ? s.replace("_", " ") : `failed: ${s.failed}`);
  return html`<${Card} title="Segments" aside=${names.length > 0 && html`<${Act} may=${may && info.origin === "started"} what=${attach} small>Attach …<//>`}>
    <${Failure} error=${error} />
    <${Table} label="Segments of this VM" rows=${info.segments} rowKey=${(s) => s.segment} empty="The VM maps no segment." columns=${[
      { key: "segment", name: "Segment", value: (s) => s.segment },
      { key: "state", name: "State", value: (s) => state(s.state) },
      { key: "act", name: "", cell: (s) => html`<${Act} may=${may} what=${detach(s.segment)} danger small>Take off …<//>` },
    ]} /><//>`;
}

const DURABILITY = [
  { value: "disk", label: "this host's disk keeps a copy: no lender can lose anything" },
  { value: "replica", label: "two lenders hold it" },
  { value: "none", label: "one lender, no copy: what lies there is lost with it" },
];

/** The swap disk of a running VM, to lent RAM. */
const borrow = (name) => ({
  title: `Switch the swap disk of ${name} to lent RAM?`,
  text: "The VM keeps running. Lenders need enough spare RAM.",
  fields: [
    { name: "durability", label: "If a lender dies", type: "select", options: DURABILITY, value: "disk" },
    { name: "stripes", label: "Lenders to spread it over", type: "number", min: 1, max: 8, step: 1, hint: "Empty: as few as have room for it." },
  ],
  action: "Borrow",
  act: async (v) => {
    const done = await post(`/v1/vms/${part(name)}/borrow`, { durability: v.durability, stripes: v.stripes === "" ? null : Number(v.stripes) });
    return `On lent RAM of ${done.lenders.join(", ")} after ${duration(done.took_ms)}.`;
  },
});

const giveBack = (name) => ({
  title: `Return what ${name} has borrowed?`,
  text: "The swap disk moves back to this host's disk while the VM runs.",
  action: "Return it",
  act: async () => `Back on this host's disk after ${duration((await post(`/v1/vms/${part(name)}/return`)).took_ms)}.`,
});

const execute = (name) => ({
  title: `Run a command in ${name}`,
  text: "Runs as root in the guest, by its agent. The audit log says who ran a command and when; it leaves out the command's text, which may contain secrets.",
  fields: [
    { name: "script", label: "Shell text", type: "textarea", required: true },
    { name: "timeout", label: "Seconds that it may take", type: "number", min: 1, max: 600, value: 60, required: true },
  ],
  action: "Run it",
  act: async (v) => {
    const done = await post(`/v1/vms/${part(name)}/exec`, { script: v.script, timeout_s: Number(v.timeout) });
    return [`exit code ${done.code}`, done.stdout.trimEnd(), done.stderr.trimEnd()].filter(Boolean).join("\n");
  },
});

const pause = (name) => ({
  title: `Pause ${name}?`,
  text: "The guest stands still until somebody resumes the VM. Its memory stays where it is.",
  action: "Pause",
  act: async () => showVm(await post(`/v1/vms/${part(name)}/pause`)),
});

const resume = (name) => ({
  title: `Resume ${name}?`,
  text: "The guest goes on. After a disk error, its write is repeated.",
  action: "Resume",
  act: async () => showVm(await post(`/v1/vms/${part(name)}/resume`)),
});

/** Why KSM merges what it has, or doesn't: asked for, as it looks at the VM's memory. */
function KsmCauses({ name }) {
  const [wanted, setWanted] = useState(0);
  const aside = html`<button class="small" onClick=${() => setWanted((n) => n + 1)}>${wanted ? "Look again" : "Look"}</button>`;
  return html`<${Card} title="KSM and this VM" aside=${aside}>
    ${wanted ? html`<${Explained} name=${name} again=${wanted} />` : html`<p class="empty">Why the VM's memory merges, or does not: <code>memfold ksm explain ${name}</code>.</p>`}
  <//>`;
}

function Explained({ name, again }) {
  const { value: why, error, at } = useAnswer(`/v1/ksm/explain/${part(name)}`, again);
  if (!why) return error ? html`<${Failure} error=${error} />` : html`<${Waiting} />`;
  return html`<${Failure} error=${error} />
    <p>${bytes(why.merged_bytes)} are merged, of ${bytes(why.mergeable_bytes)} that are mergeable and ${bytes(why.guest_bytes)} of guest memory, <${ReadAt} at=${at} />.
      ${why.first_merge_s !== null && why.first_merge_s !== undefined && ` The first pages that are equal merge within ${duration(why.first_merge_s * 1000)}.`}</p>
    ${why.causes.length > 0 && html`<ul class="words">${why.causes.map((c) => html`<li><${Badge} tone=${c.blocks ? "bad" : "warn"}>${bytes(c.bytes)}<//> ${c.words}${c.fix && html`<br /><span class="soft">${c.fix}</span>`}</li>`)}</ul>`}`;
}

export function Vm({ name, may, theme }) {
  const { sample } = useLive();
  if (!sample) return html`<${Waiting} />`;
  const vm = sample.ledger.vms.find((v) => v.name === name);
  const info = sample.vms.find((v) => v.name === name);
  if (!info) return html`<${Ended} name=${name} may=${may} theme=${theme} />`;
  const fold = sample.fold.vms.find((v) => v.name === name);
  const parts = vm && PLACES.map(([label, key, color]) => ({ name: label, color, value: withTemplate(vm)[key], figure: `vm.${name}.${key}` }));
  const figure = (key) => html`<${Bytes} value=${vm?.[key]} figure=${vm && `vm.${name}.${key}`} />`;
  const mayAct = may && isAdopted(info);
  const runs = !info.state || info.state === "running";
  const list = problems(info);
  const stop = {
    title: `Stop ${name}?`,
    text: "The guest is asked to shut down, and the VM is switched off after the timeout.",
    fields: [{ name: "timeout", label: "Seconds for the guest", type: "number", min: 0, value: 60, required: true }],
    action: "Stop the VM",
    danger: true,
    act: async (v) => {
      await post(`/v1/vms/${part(name)}/stop`, { timeout_s: Number(v.timeout) });
      const others = (vms) => vms.filter((vm) => vm.name !== name);
      changeSample((sample) => ({ ...sample, vms: others(sample.vms), ledger: { ...sample.ledger, vms: others(sample.ledger.vms) } }));
      location.hash = "#/vms";
    },
  };
  const reboot = {
    title: `Reboot ${name}?`,
    fields: [{ name: "boot", label: "Back to right after its boot, disks included", type: "checkbox" }],
    action: "Reboot",
    danger: true,
    act: async (v) => void (await post(`/v1/vms/${part(name)}/reboot`, { from_boot_snapshot: v.boot, timeout_s: 120 })),
  };
  const fact = (label, value) => html`<div><dt>${label}</dt><dd>${value}</dd></div>`;
  return html`
    <div class="stats">
      <${Stat} label="Backed" note=${`of ${bytes(vm?.ram_bytes ?? info.ram_bytes)} RAM`}>${figure("backed_bytes")}<//>
      <${Stat} label="Folded" tone="main">${figure("folded_bytes")}<//>
      <${Stat} label="PSS of QEMU" note="each shared page in parts">${figure("pss_bytes")}<//>
      <${Stat} label="Mappings" note=${`of ${sample.ledger.host.max_map_count.toLocaleString("en")}`}>${vm ? vm.mappings.toLocaleString("en") : "–"}<//>
    </div>
    ${list.length > 0 && html`<ul class="problems">${list.map((text) => html`<li><${Badge} tone="warn">look<//> ${text}</li>`)}</ul>`}
    ${!vm && html`<p class="empty" role="status">This VM's memory is not measured yet: the VM has just begun, or its page tables cannot be read.</p>`}
    <div class="grid">
      ${vm && html`<${Card} title="Where its RAM is" wide><${Stack} parts=${parts} label=${`RAM of ${name}`} /><//>
        <${MemoryMap} name=${name} theme=${theme} swap=${info.swap} />`}
      <${Card} title="Facts">
        <dl class="facts">
          ${fact("Trust domain", info.domain ?? "none: the VM shares with no other VM")}
          ${fact("State", info.state || "–")}
          ${fact("QEMU", `${info.qemu}, process ${info.pid}, ${info.libvirt ? `libvirt's domain ${info.libvirt}` : info.origin}`)}
          ${fact("Guest", info.agent ?? "no agent")}
          ${fact("Folding again", info.refold_problems.length ? `at pauses only: ${info.refold_problems.join("; ")}` : "any time")}
          ${vm && fact("Merged by KSM", bytes(vm.ksm_merged_bytes))}
          ${vm && fact("In huge pages", bytes(vm.huge_bytes))}
          ${fold && fact("Folded so far", bytes(fold.folded_pages * 4096))}
          ${fold && fact("Folded again", bytes(fold.refolded_pages * 4096))}
          ${fold && fact("Longest freeze", `${(fold.freeze_max_ns / 1e6).toFixed(2)} ms`)}
        </dl>
        <div class="buttons">
          <${Act} may=${mayAct} what=${saveSnapshot([name], name)}>Save a snapshot …<//>
          <${Act} may=${mayAct} what=${fork(name)}>Fork …<//>
          ${info.swap && html`<${Act} may=${mayAct} what=${info.swap.place === "on_disk" ? borrow(name) : giveBack(name)}>${info.swap.place === "on_disk" ? "Borrow memory …" : "Return memory …"}<//>`}
          <${Act} may=${mayAct && info.agent} what=${execute(name)}>Run a command …<//>
          <${Act} may=${mayAct && !info.libvirt} what=${runs ? pause(name) : resume(name)}>${runs ? "Pause …" : "Resume …"}<//>
          <${Act} may=${mayAct && info.origin === "started"} what=${reboot}>Reboot …<//>
          <${Act} may=${may && info.origin === "started"} what=${stop} danger>Stop …<//>
        </div>
        ${info.libvirt && html`<p class="note">libvirt starts and stops this VM: <code>virsh shutdown "${info.libvirt}"</code>.</p>`}
      <//>
      ${isAdopted(info) && html`<${Segments} info=${info} may=${may} /><${KsmCauses} name=${name} />`}
      <${OverTime} name=${name} theme=${theme} />
      <${SizeOverTime} name=${name} theme=${theme} />
    </div>`;
}
