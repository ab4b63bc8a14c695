// How much memory each VM needs, what right-sizing does about it, and why.

import { useMemo, useState } from "../../vendor/preact-hooks.js";
import { part, put, useAnswer } from "../api.js";
import { Chart, values } from "../charts.js";
import { bytes, percent, time } from "../format.js";
import { html } from "../html.js";
import { Act, Badge, Card, Failure, Stat, Table, Waiting } from "../ui.js";
import { spanPicker } from "./host.js";

const RUNGS = ["ample", "trim", "balloon", "lent", "brake"];
const TONES = { ample: "good", trim: "good", balloon: "warn", lent: "warn", brake: "bad" };
const MODES = {
  off: "Off: the memory of VMs is left alone",
  watch: "Watch: say what would be done, and do nothing",
  on: "On: trim page caches of guests, move their balloons, and plug memory",
};

const pressure = (share) => (share === null ? "–" : percent(share * 100, 2));
const link = (vm) => html`<a href=${`#/vms/${encodeURIComponent(vm)}`}>${vm}</a>`;

/** Limits that the operator set, in words. */
function limits(sizing) {
  const words = [];
  if (sizing.pinned) words.push("pinned");
  if (sizing.min_bytes !== undefined) words.push(`min ${bytes(sizing.min_bytes)}`);
  if (sizing.max_bytes !== undefined) words.push(`max ${bytes(sizing.max_bytes)}`);
  if (sizing.buffer_percent !== undefined) words.push(`buffer ${sizing.buffer_percent} %`);
  if (sizing.priority !== undefined) words.push(`priority ${sizing.priority}`);
  return words.join(", ");
}

export function Rightsize({ may }) {
  const [again, setAgain] = useState(0);
  const { value: report, error } = useAnswer("/v1/rightsize?events=300", again, 4000);
  if (error && !report) return html`<${Failure} error=${error} />`;
  if (!report) return html`<${Waiting} />`;
  const mode = {
    title: "Mode of right-sizing",
    text: "Until the daemon ends. For always: memfold serve --rightsize. While it is not on, VMs get back what it has put into their balloons.",
    fields: [{ name: "mode", label: "Mode", type: "select", options: Object.entries(MODES).map(([value, label]) => ({ value, label })), value: report.mode }],
    action: "Set the mode",
    act: async (v) => {
      await put("/v1/rightsize", { mode: v.mode });
      setAgain((n) => n + 1);
    },
  };
  const rungs = [...report.rungs].reverse();
  return html`
    <div class="stats">
      <${Stat} label="Rung" tone=${report.rung ? { bad: "loss" }[TONES[report.rung]] ?? "" : ""}>${report.rung ?? "–"}<//>
      <${Stat} label="Available" note=${`${bytes(report.reserve_bytes)} in reserve`}>${report.rung ? bytes(report.available_bytes) : "–"}<//>
      <${Stat} label="Orders" note="since the daemon's start">${report.orders.reduce((sum, order) => sum + order.count, 0).toLocaleString("en")}<//>
    </div>
    <${Failure} error=${error} />
    <div class="grid">
      <${Card} title="The ladder" wide aside=${html`<${Badge} tone=${report.mode === "on" ? "good" : ""}>${report.mode}<//>`}>
        <p>${MODES[report.mode]}.${report.mode !== "off" && report.why ? ` Now: ${report.why}.` : ""}</p>
        ${report.mode !== "off" && html`<ol class="rungs" aria-label="Rungs, from the lowest">${RUNGS.map((rung) => html`
          <li aria-current=${rung === report.rung ? "step" : undefined}><${Badge} tone=${rung === report.rung ? TONES[rung] : ""}>${rung}<//></li>`)}</ol>`}
        <div class="buttons"><${Act} may=${may} what=${mode}>Mode …<//></div>
        <${Table} label="Changes of the rung" rows=${rungs} rowKey=${(r) => `${r.at_unix_s} ${r.rung}`} empty="The rung has not changed since the daemon's start." columns=${[
          { key: "at", name: "Time", value: (r) => r.at_unix_s, cell: (r) => time(r.at_unix_s) },
          { key: "rung", name: "Rung", value: (r) => r.rung, cell: (r) => html`<${Badge} tone=${TONES[r.rung]}>${r.rung}<//>` },
          { key: "why", name: "Why", class: "prose", value: (r) => r.why },
        ]} />
      <//>
      <${Card} title="Size and need of VMs" wide>
        <${Table} label="Size and need of each VM" rows=${report.vms} rowKey=${(vm) => vm.vm} empty=${report.mode === "off" ? "Right-sizing is off." : "No VMs run."} columns=${[
          { key: "vm", name: "VM", value: (vm) => vm.vm, cell: (vm) => link(vm.vm) },
          { key: "size", name: "Size", number: true, value: (vm) => vm.size_bytes, cell: (vm) => `${bytes(vm.size_bytes)}${vm.plugged_bytes ? ` (${bytes(vm.plugged_bytes)} plugged)` : ""}` },
          { key: "need", name: "Working set", number: true, value: (vm) => vm.working_set_bytes, cell: (vm) => html`<span title=${vm.basis}>${bytes(vm.working_set_bytes)}</span>` },
          { key: "target", name: "Target", number: true, value: (vm) => vm.target_bytes, cell: (vm) => bytes(vm.target_bytes) },
          { key: "pressure", name: "Pressure", number: true, value: (vm) => vm.pressure ?? -1, cell: (vm) => pressure(vm.pressure) },
          { key: "limits", name: "Limits", value: (vm) => limits(vm.sizing) },
          { key: "reason", name: "Decision", class: "prose", value: (vm) => `${vm.order ? `${vm.order}: ` : ""}${vm.reason}` },
        ]} />
      <//>
      <${Card} title="Last orders" wide>
        <${Table} label="Last orders" rows=${[...report.events].reverse()} rowKey=${(e) => `${e.at_unix_s} ${e.vm}`} empty="No order yet." columns=${[
          { key: "at", name: "Time", value: (e) => e.at_unix_s, cell: (e) => time(e.at_unix_s) },
          { key: "vm", name: "VM", value: (e) => e.vm, cell: (e) => link(e.vm) },
          { key: "order", name: "Order", class: "prose", value: (e) => e.order },
          { key: "reason", name: "Why", class: "prose", value: (e) => e.reason },
          { key: "result", name: "Result", class: "prose", value: (e) => e.result ?? "", cell: (e) => e.result ?? "…" },
        ]} />
      <//>
    </div>`;
}

/** Share of time in which tasks waited, from totals in microseconds; where a total began anew, nothing is known. */
function shares(t, totals) {
  return t.map((at, i) => {
    if (i === 0 || totals[i] === null || totals[i - 1] === null || totals[i] < totals[i - 1]) return null;
    return (totals[i] - totals[i - 1]) / 1e4 / (at - t[i - 1]);
  });
}

/** One VM's size, need and pressure over time. */
export function SizeOverTime({ name, theme }) {
  const [span, setSpan] = useState(3600);
  const { value: series, error } = useAnswer(`/v1/vms/${part(name)}/history?seconds=${span}&points=300`, "", 30000);
  const drawn = useMemo(() => {
    if (!series) return null;
    const lines = [["Size", "size_bytes", "private"], ["Target", "target_bytes", "unfolded"], ["Working set", "working_set_bytes", "folded"]];
    return {
      sizes: lines.map(([label, key, color]) => ({ name: label, color, values: values(series, key) })),
      pressure: [{ name: "Tasks wait for memory", color: "swapped", values: shares(series.t, values(series, "guest_psi_some_us")) }],
    };
  }, [series, theme]);
  return html`
    <${Card} title="Size and need over time" aside=${spanPicker(span, setSpan, "How far back for size and need")}>
      <${Failure} error=${error} />
      ${drawn && html`<${Chart} t=${series.t} step=${series.step_s} series=${drawn.sizes} label=${`Size, target and working set of ${name} over time`} height=${180} />`}
    <//>
    <${Card} title="Memory pressure over time">
      ${drawn && html`<${Chart} t=${series.t} step=${series.step_s} series=${drawn.pressure} label=${`Share of time in which tasks of ${name} waited for memory`} format=${(v) => percent(v, 2)} height=${180} />`}
    <//>`;
}
