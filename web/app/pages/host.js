// Where every byte of the host is, what each mechanism saved, and what it cost.

import { useMemo, useState } from "../../vendor/preact-hooks.js";
import { changeSample, post, put, useAnswer, useLive } from "../api.js";
import { Chart, values } from "../charts.js";
import { bytes, duration, percent, plural, time } from "../format.js";
import { html } from "../html.js";
import { Act, Badge, Bytes, Card, Failure, Stack, Stat, Table, Waiting } from "../ui.js";

const SPANS = [["1 h", 3600], ["24 h", 86400], ["7 d", 7 * 86400], ["90 d", 90 * 86400]];

const MECHANISMS = [
  ["Folding", "saved_by_folding_bytes", "folded"],
  ["Clones", "saved_by_clones_bytes", "template"],
  ["Segments", "saved_by_segments_bytes", "segment"],
  ["KSM", "saved_by_ksm_bytes", "ksm"],
  ["Zero pages", "saved_by_zero_drop_bytes", "zero"],
];

const PLACES = [
  ["VMs", "vms_bytes", "private"],
  ["Page stores", "stores_bytes", "folded"],
  ["memfold itself", "memfold_bytes", "memfold"],
  ["Other programs", "others_bytes", "others"],
  ["Kernel", "kernel_bytes", "kernel"],
];

/** What the ledger says, in the parts of the charts. */
export function hostParts(host) {
  const memfold = host.own.pss_bytes - host.own.store_pss_bytes + host.own.page_table_bytes;
  return {
    vms_bytes: host.physical_bytes - host.stores_bytes - memfold,
    stores_bytes: host.stores_bytes,
    memfold_bytes: memfold,
    others_bytes: host.others_anon_bytes,
    kernel_bytes: host.kernel_bytes,
  };
}

/** CPU of totals in milliseconds, in percent of one core; where a total began anew, nothing is known. */
function rate(t, totals) {
  return t.map((at, i) => {
    if (i === 0 || totals[i] === null || totals[i - 1] === null || totals[i] < totals[i - 1]) return null;
    return (totals[i] - totals[i - 1]) / 10 / (at - t[i - 1]);
  });
}

export const spanPicker = (span, set, label) => html`<div class="segmented" role="group" aria-label=${label}>
  ${SPANS.map(([name, seconds]) => html`<button aria-pressed=${span === seconds} onClick=${() => set(seconds)}>${name}</button>`)}</div>`;

function OverTime({ theme }) {
  const [span, setSpan] = useState(3600);
  const { value: series, error } = useAnswer(`/v1/history?seconds=${span}&points=300`, "", 30000);
  const drawn = useMemo(() => {
    if (!series) return null;
    const of = (name) => values(series, name);
    const places = PLACES.map(([name, key, color]) => ({ name, color, values: of(key) }));
    const rest = series.t.map((_, i) => of("mem_total_bytes")[i] - places.reduce((sum, p) => sum + p.values[i], 0));
    places.push({ name: "Cache and free", color: "free", values: rest });
    const saved = MECHANISMS.map(([name, key, color]) => ({ name, color, values: of(key) }));
    saved.push({ name: "Total, less memfold itself", color: "ink", line: true, values: of("saved_net_bytes") });
    const cpu = [["Engine", "engine_cpu_ms", "folded"], ["In QEMUs", "library_cpu_ms", "template"], ["ksmd", "ksmd_cpu_ms", "ksm"]];
    const cost = cpu.map(([name, key, color]) => ({ name, color, values: rate(series.t, of(key)) }));
    const owed = [["Owed when written to", "debt_bytes", "unfolded"], ["Available for it", "debt_absorbable_bytes", "ink"]];
    const lent = [["Lent to other hosts", "lent_bytes", "swapped"], ["Borrowed from other hosts", "borrowed_bytes", "segment"]];
    const lines = (parts) => parts.map(([name, key, color]) => ({ name, color, values: of(key) }));
    const lends = lent.some(([, key]) => of(key).some((value) => value > 0));
    return { places, saved, cost, owed: lines(owed), lent: lends && lines(lent) };
  }, [series, theme]);
  const picker = spanPicker(span, setSpan, "How far back");
  return html`
    <${Card} title="Memory over time" aside=${picker} wide>
      <${Failure} error=${error} />
      ${drawn && html`<${Chart} t=${series.t} step=${series.step_s} series=${drawn.places} stacked label="Where every byte is, over time" />`}
    <//>
    <${Card} title="Saved over time">
      ${drawn && html`<${Chart} t=${series.t} step=${series.step_s} series=${drawn.saved} stacked label="What each mechanism saved, over time" height=${180} />`}
    <//>
    <${Card} title="CPU cost of saving">
      ${drawn && html`<${Chart} t=${series.t} step=${series.step_s} series=${drawn.cost} label="CPU of folding and KSM over time, percent of one core" format=${(v) => percent(v, 2)} height=${180} />`}
    <//>
    <${Card} title="Owed over time">
      ${drawn && html`<${Chart} t=${series.t} step=${series.step_s} series=${drawn.owed} label="Memory that guests could claim over time, and memory available for it" height=${180} />`}
    <//>
    ${drawn?.lent && html`<${Card} title="Lent and borrowed over time">
      <${Chart} t=${series.t} step=${series.step_s} series=${drawn.lent} label="Memory lent to other hosts and borrowed from them, over time" height=${180} />
    <//>`}`;
}

const BRAKES = { ok: ["good", "brake: ok"], warning: ["warn", "brake: warning"], braked: ["bad", "brake: BRAKED"] };

const total = (vm) => vm.folded_bytes + vm.snapshot_bytes + vm.zero_bytes;

/** What guests could call in by writing to what they share, and what there is for it. */
function Debt({ debt, may }) {
  const [tone, state] = BRAKES[debt.level];
  const limits = {
    title: "Limits of the brake",
    text: "Until the daemon ends. Permanent limits: memfold serve --reserve, --cover.",
    fields: [
      { name: "reserve", label: "Reserve of this host", hint: `2G, or 5% of its RAM; empty: unchanged (${bytes(debt.reserve_bytes)})` },
      { name: "cover", label: "Percent of the debt that must be available", type: "number", min: 0, max: 100, value: debt.cover_percent, required: true, hint: "0: no brake" },
    ],
    action: "Set the limits",
    act: async (v) => {
      const now = await put("/v1/debt", { reserve: v.reserve.trim() || null, cover_percent: Number(v.cover) });
      changeSample((sample) => ({ ...sample, ledger: { ...sample.ledger, debt: now } }));
    },
  };
  const fact = (label, key) => html`<div><dt>${label}</dt><dd><${Bytes} value=${debt[key]} figure=${`debt.${key}`} /></dd></div>`;
  const spare = Math.max(0, debt.absorbable_bytes - debt.needed_bytes);
  const parts = debt.needed_bytes > debt.absorbable_bytes
    ? [{ name: "Available for it", color: "unfolded", value: debt.absorbable_bytes }, { name: "Missing", color: "swapped", value: debt.needed_bytes - debt.absorbable_bytes }]
    : [{ name: "Needed for what is owed", color: "unfolded", value: debt.needed_bytes }, { name: "Also available for it", color: "free", value: spare }];
  const owing = debt.vms.filter((vm) => total(vm) > 0).sort((a, b) => total(b) - total(a));
  const most = owing.slice(0, 8);
  const what = { ok: "Enough memory is available for guests that write at once.", warning: "Little more can be shared.", braked: "No VM is started." }[debt.level];
  return html`
    <${Card} title="Copy-on-write debt" aside=${html`<span role="status"><${Badge} tone=${tone}>${state}<//></span>`}>
      <p>${what}${debt.sharing_held ? " Folding and KSM share no more memory until the brake is off." : ""}</p>
      ${debt.rung && html`<p><a href="#/rightsize">Right-sizing's rung</a>: ${debt.rung}: ${debt.rung_why}.</p>`}
      <${Stack} parts=${parts} label="Memory needed, of the memory available for it" />
      <dl class="facts">
        ${fact("Shared, and owed when written to", "debt_bytes")}
        ${fact("Folded", "folded_bytes")}
        ${fact("Of snapshots' images", "snapshot_bytes")}
        ${fact("Zero pages given back", "zero_bytes")}
        ${fact("Merged by KSM", "ksm_bytes")}
        ${debt.starting_bytes > 0 && fact("Of VMs that are just starting", "starting_bytes")}
        ${fact(`Needed at once (${debt.cover_percent} %)`, "needed_bytes")}
        ${fact("Available for it", "absorbable_bytes")}
        ${fact("Reserve, not included", "reserve_bytes")}
        ${fact("Free swap, not included either", "swap_free_bytes")}
      </dl>
      <div class="buttons"><${Act} may=${may} what=${limits}>Limits …<//></div>
    <//>
    <${Card} title="Debt by VM">
      <${Table} label="What each VM owes" rows=${most} rowKey=${(vm) => vm.name} first=${{ key: "owed", down: true }} empty="Nobody: nothing is shared." columns=${[
        { key: "name", name: "VM", value: (vm) => vm.name },
        { key: "owed", name: "Owed", number: true, value: total, cell: (vm) => html`<${Bytes} value=${total(vm)} figure=${`debt.${vm.name}.owed`} />` },
        { key: "folded", name: "Folded", number: true, value: (vm) => vm.folded_bytes, cell: (vm) => bytes(vm.folded_bytes) },
        { key: "snapshot", name: "Snapshot", number: true, value: (vm) => vm.snapshot_bytes, cell: (vm) => bytes(vm.snapshot_bytes) },
        { key: "zero", name: "Zero", number: true, value: (vm) => vm.zero_bytes, cell: (vm) => bytes(vm.zero_bytes) },
      ]} />
      ${owing.length > most.length && html`<p class="note">${plural(owing.length - most.length, "VM")} more that owe less: <code>memfold debt</code> lists all.</p>`}
      <h3>Last actions of the brake</h3>
      ${debt.events.length
        ? html`<ul class="words">${debt.events.slice(-5).reverse().map((event) => html`<li><${Badge} tone=${BRAKES[event.level][0]}>${time(event.at_unix_s)}<//> ${event.what}</li>`)}</ul>`
        : html`<p class="empty">No action since the daemon's start.</p>`}
    <//>`;
}

async function setFold(wanted) {
  const fold = await put("/v1/fold", wanted);
  changeSample((sample) => ({ ...sample, fold }));
}

function Folding({ fold, may }) {
  const budget = () => ({
    title: "Budget of folding",
    text: "How much CPU folding may use over time, in percent of one core.",
    fields: [
      { name: "cpu", label: "CPU, percent", type: "number", min: 0, max: 100, value: (fold.cpu_share * 100).toFixed(1), required: true },
      { name: "pages", label: "Pages a second (0: no limit)", type: "number", min: 0, step: 1, value: fold.pages_per_second ?? 0 },
    ],
    action: "Set the budget",
    act: (v) => setFold({ cpu_percent: Number(v.cpu), pages_per_second: Number(v.pages) }),
  });
  const pause = {
    title: fold.paused ? "Resume folding?" : "Pause folding?",
    text: fold.paused ? "Hints are processed again, and new memory is folded." : "Folded memory stays folded; no more memory is folded.",
    action: fold.paused ? "Go on" : "Pause",
    act: () => setFold({ paused: !fold.paused }),
  };
  const waiting = fold.hint_to_fold_p50_s;
  return html`<${Card} title="Folding" third aside=${html`<${Badge} tone=${fold.paused ? "warn" : "good"}>${fold.paused ? "paused" : "on"}<//>`}>
    ${fold.age_s > 0 && html`<p class="failure" role="status">These figures are ${duration(fold.age_s * 1000)} old: the folding engine waits for a QEMU that does not answer.</p>`}
    <dl class="facts">
      <div><dt>Budget</dt><dd>${percent(fold.cpu_share * 100)} of a core${fold.pages_per_second ? `, ${fold.pages_per_second} pages/s` : ""}</dd></div>
      <div><dt>CPU used</dt><dd>${fold.engine_cpu_s.toFixed(2)} s engine, ${fold.library_cpu_s.toFixed(2)} s in QEMUs</dd></div>
      <div><dt>Hint to fold, median</dt><dd>${waiting === null ? "–" : `${waiting.toFixed(1)} s`}</dd></div>
      <div><dt>Hints waiting</dt><dd>${fold.hints_waiting.toLocaleString("en")}</dd></div>
      ${fold.domains.map((d) => html`<div><dt>Page store of ${d.domain}</dt><dd><${Bytes} value=${d.store_bytes} figure=${`store.${d.domain}`} /> of ${bytes(d.store_cap_bytes)} ${d.store_full && html`<${Badge} tone="bad">full<//>`}</dd></div>`)}
    </dl>
    <div class="buttons"><${Act} may=${may} what=${pause}>${fold.paused ? "Go on" : "Pause"}<//><${Act} may=${may} what=${budget}>Budget …<//></div>
  <//>`;
}

function Ksm({ may, host }) {
  const [again, setAgain] = useState(0);
  const { value: ksm, error } = useAnswer("/v1/ksm", again, 120000);
  const start = {
    title: "Start KSM for one trust domain?",
    text: "memfold steers ksmd within a CPU budget, and restores KSM's settings at the end.",
    fields: [
      { name: "domain", label: "Trust domain", hint: "Empty: the only one whose VMs have mergeable memory." },
      { name: "cpu", label: "CPU, percent of one core", type: "number", min: 1, max: 95, value: 20, required: true },
      { name: "target", label: "Time for a full scan, seconds", type: "number", min: 1, value: 120, required: true },
    ],
    action: "Start KSM",
    act: async (v) => {
      await post("/v1/ksm/start", { domain: v.domain || null, cpu_percent: Number(v.cpu), target_s: Number(v.target) });
      setAgain((n) => n + 1);
    },
  };
  const stop = {
    title: "Stop steering KSM?",
    text: "KSM's previous settings are restored. Merged pages stay merged unless you choose otherwise.",
    fields: [{ name: "unmerge", label: "Give each merged page its own copy again (takes as much memory as merging saves)", type: "checkbox" }],
    action: "Stop KSM",
    danger: true,
    act: async (v) => {
      await post("/v1/ksm/stop", { unmerge: v.unmerge });
      setAgain((n) => n + 1);
    },
  };
  const runs = host.ksm?.run === 1;
  return html`<${Card} title="KSM" third aside=${host.ksm && html`<${Badge} tone=${runs ? "good" : ""}>${runs ? "running" : "stopped"}<//>`}>
    <${Failure} error=${error} />
    ${ksm && !ksm.available && html`<p class="empty">This kernel has no KSM.</p>`}
    ${ksm?.available && html`<dl class="facts">
      <div><dt>Saved</dt><dd><${Bytes} value=${host.saved_by_ksm_bytes} figure="ksm.saved" /></dd></div>
      <div><dt>Pages sharing</dt><dd>${(host.ksm?.pages_sharing ?? 0).toLocaleString("en")}</dd></div>
      <div><dt>Mergeable</dt><dd>${bytes(ksm.mergeable_bytes)}</dd></div>
      <div><dt>ksmd's CPU since boot</dt><dd>${ksm.ksmd_cpu_s === null ? "–" : `${ksm.ksmd_cpu_s.toFixed(1)} s`}</dd></div>
      <div><dt>Steered</dt><dd>${ksm.steering ? `for ${ksm.steering.domain ?? "VMs without domain"}` : "no"}</dd></div>
    </dl>
    <div class="buttons">${ksm.steering ? html`<${Act} may=${may} what=${stop} danger>Stop …<//>` : html`<${Act} may=${may} what=${start}>Start …<//>`}</div>`}
  <//>`;
}

export function Host({ may, theme }) {
  const { sample } = useLive();
  if (!sample) return html`<${Waiting} />`;
  const { host, debt } = sample.ledger;
  const parts = hostParts(host);
  const bar = PLACES.map(([name, key, color]) => ({ name, color, value: parts[key], figure: `place.${key}` }));
  const rest = host.mem_total_bytes - bar.reduce((sum, part) => sum + part.value, 0);
  bar.push({ name: "Cache and free", color: "free", value: rest });
  const off = sample.ledger.disagreements;
  return html`
    <div class="stats">
      <${Stat} label="Saved, less memfold itself" tone=${host.saved_net_bytes < 0 ? "loss" : "main"}><${Bytes} value=${host.saved_net_bytes} figure="host.saved_net_bytes" /><//>
      <${Stat} label="Available" note=${`of ${bytes(host.mem_total_bytes)}`}><${Bytes} value=${host.mem_available_bytes} figure="host.mem_available_bytes" /><//>
      <${Stat} label="VMs, stores and memfold" note=${plural(sample.vms.length, "VM")}><${Bytes} value=${host.physical_bytes} figure="host.physical_bytes" /><//>
      <${Stat} label="Page stores"><${Bytes} value=${host.stores_bytes} figure="host.stores_bytes" /><//>
      ${debt && html`<${Stat} label="Owed when written to" tone=${debt.level === "ok" ? "" : "loss"} note=${`${BRAKES[debt.level][1]}; ${bytes(debt.absorbable_bytes)} could be had`}><${Bytes} value=${debt.debt_bytes} figure="debt.debt_bytes" /><//>`}
    </div>
    ${off.length > 0 && html`<p class="failure" role="alert"><strong>The ledger does not agree with the kernel.</strong> ${off.map((d) => html`<br />${d.vm ?? "host"}: ${d.what}: ledger ${bytes(d.ledger_bytes)}, kernel ${bytes(d.kernel_bytes)}`)}</p>`}
    <div class="grid">
      <${Card} title="Where every byte is now" wide><${Stack} parts=${bar} label="Memory of the host" /><//>
      <${Card} title="Saved now" third>
        <${Table} label="What each mechanism saved" rowKey=${(row) => row[0]} rows=${MECHANISMS} columns=${[
          { key: "name", name: "By", value: (row) => row[0], cell: ([name, , color]) => html`<i class="dot" style=${{ background: `var(--${color})` }}></i>${name}` },
          { key: "saved", name: "Saved", number: true, value: (row) => host[row[1]], cell: (row) => html`<${Bytes} value=${host[row[1]]} figure=${`host.${row[1]}`} />` },
        ]} />
        <p class="note">memfold itself takes <${Bytes} value=${parts.memfold_bytes} figure="own" />, of it <${Bytes} value=${host.own.metadata_bytes} figure="own.metadata" /> for tables about pages.
          Snapshots laid out in memory: <${Bytes} value=${host.images_bytes} figure="host.images_bytes" />.</p>
      <//>
      <${Folding} fold=${sample.fold} may=${may} />
      <${Ksm} may=${may} host=${host} />
      ${debt && html`<${Debt} debt=${debt} may=${may} />`}
      <${OverTime} theme=${theme} />
    </div>
    <p class="note">This dashboard costs the daemon ${sample.sample_cpu_ms.toFixed(1)} ms of CPU each ${(sample.interval_ms / 1000).toFixed(1)} s.</p>`;
}
