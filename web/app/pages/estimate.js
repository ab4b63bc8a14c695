// What could be saved, before anything is changed.

import { useState } from "../../vendor/preact-hooks.js";
import { post } from "../api.js";
import { bytes, percent } from "../format.js";
import { html } from "../html.js";
import { Bytes, Card, Failure, Field, Stack, Stat, Table } from "../ui.js";

const bar = (estimate) => (estimate ? html`<${Bytes} value=${estimate.bytes} /> <span class="soft">± ${bytes(estimate.plus_minus_bytes)}</span>` : html`<span class="soft">unknown without a daemon</span>`);

function Result({ report }) {
  const sum = (of) => report.vms.reduce((all, vm) => all + of(vm), 0);
  const parts = [
    { name: "Zeroes", color: "zero", value: sum((vm) => vm.zero.bytes) },
    { name: "Copies within a VM", color: "template", value: sum((vm) => vm.within.bytes) },
    { name: "Copies between VMs", color: "folded", value: sum((vm) => vm.between.bytes) },
    { name: "Already merged", color: "ksm", value: sum((vm) => vm.merged.bytes) },
    { name: "Changed during the reading", color: "unfolded", value: sum((vm) => vm.volatile.bytes) },
    { name: "Of its own", color: "private", value: sum((vm) => vm.rest_bytes) },
  ];
  return html`
    <div class="stats">
      <${Stat} label="Could be saved" tone="main" note=${`± ${bytes(report.saved.plus_minus_bytes)}`}><${Bytes} value=${report.saved.bytes} figure="estimate.saved" /><//>
      <${Stat} label="Private memory read" note=${percent(report.how.read_percent)}><${Bytes} value=${report.how.read_bytes} /><//>
      <${Stat} label="Took" note=${`${report.how.cpu_seconds.toFixed(2)} s of CPU`}>${report.how.seconds.toFixed(1)} s<//>
      <${Stat} label="Between trust domains" note="not allowed and not counted"><${Bytes} value=${report.across_domains.bytes} /><//>
    </div>
    <div class="grid">
      <${Card} title="Private memory of all VMs" wide><${Stack} parts=${parts} label="Private memory by what could be saved" /><//>
      <${Card} title="By mechanism" wide>
        <p class="note">Mechanisms overlap, so there is no sum.</p>
        <${Table} label="By mechanism" rows=${report.mechanisms} rowKey=${(m) => m.way} columns=${[
          { key: "way", name: "Mechanism", value: (m) => m.way.replaceAll("_", " ") },
          { key: "saved", name: "Saves", number: true, value: (m) => m.saved?.bytes ?? -1, cell: (m) => bar(m.saved) },
          { key: "most", name: "At most", number: true, value: (m) => m.at_most_bytes ?? -1, cell: (m) => bytes(m.at_most_bytes) },
          { key: "cpu", name: "CPU until then", number: true, value: (m) => m.cpu_seconds ?? -1, cell: (m) => (m.cpu_seconds === null ? "–" : `${m.cpu_seconds.toFixed(1)} s`) },
          { key: "words", name: "About", class: "prose", cell: (m) => m.words },
        ]} />
      <//>
      <${Card} title="By VM">
        <${Table} label="By VM" rows=${report.vms} rowKey=${(vm) => vm.pid} columns=${[
          { key: "name", name: "VM", value: (vm) => vm.name },
          { key: "private", name: "Private", number: true, value: (vm) => vm.private_bytes, cell: (vm) => bytes(vm.private_bytes) },
          { key: "zero", name: "Zeroes", number: true, value: (vm) => vm.zero.bytes, cell: (vm) => bytes(vm.zero.bytes) },
          { key: "within", name: "Within", number: true, value: (vm) => vm.within.bytes, cell: (vm) => bytes(vm.within.bytes) },
          { key: "between", name: "Between", number: true, value: (vm) => vm.between.bytes, cell: (vm) => bytes(vm.between.bytes) },
        ]} />
      <//>
      <${Card} title="By file">
        <${Table} label="By file" rows=${report.files.slice(0, 50)} rowKey=${(f) => `${f.domain} ${f.path}`} empty="No agent reports cached files." columns=${[
          { key: "path", name: "File", class: "prose", value: (f) => f.path },
          { key: "cached", name: "Cached", number: true, value: (f) => f.cached_bytes, cell: (f) => bytes(f.cached_bytes) },
          { key: "saved", name: "Saves", number: true, value: (f) => f.saved.bytes, cell: (f) => bar(f.saved) },
        ]} />
      <//>
    </div>`;
}

const FIELDS = [
  { name: "cpu", label: "CPU, percent of one core", type: "number", min: 1, max: 50, value: 10, required: true },
  { name: "seconds", label: "Seconds at most", type: "number", min: 1, max: 300, value: 30, required: true },
  { name: "vms", label: "VMs by name (none: all QEMUs)" },
  { name: "one", label: "As if all were of one trust domain", type: "checkbox" },
];

export function Estimate({ may }) {
  const [values, setValues] = useState(Object.fromEntries(FIELDS.map((f) => [f.name, f.value ?? (f.type === "checkbox" ? false : "")])));
  const [state, setState] = useState({ busy: false, error: null, report: null });
  const submit = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null, report: null });
    try {
      const vms = values.vms.split(/\s+/).filter(Boolean);
      const report = await post("/v1/estimate", { vms, cpu_percent: Number(values.cpu), seconds: Number(values.seconds), one_domain: values.one });
      setState({ busy: false, error: null, report });
    } catch (error) {
      setState({ busy: false, error, report: null });
    }
  };
  const change = (field, event) => setValues((old) => ({ ...old, [field.name]: field.type === "checkbox" ? event.target.checked : event.target.value }));
  return html`
    <${Card} title="What could be saved" wide>
      <p class="note">Reads the memory of QEMUs and changes nothing: each private page once, and a sample of them twice.</p>
      ${may
        ? html`<form class="inline" onSubmit=${submit}>
            ${FIELDS.map((f) => html`<${Field} field=${f} value=${values[f.name]} onChange=${(e) => change(f, e)} />`)}
            <div class="buttons"><button class="primary" type="submit" disabled=${state.busy}>${state.busy ? "Looking …" : "Estimate"}</button></div>
          </form>`
        : html`<p class="empty">An estimate takes CPU, so it needs the role to operate.</p>`}
      <${Failure} error=${state.error} />
    <//>
    ${state.report && html`<${Result} report=${state.report} />`}`;
}
