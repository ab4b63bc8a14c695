// Who shares with whom.

import { useMemo, useState } from "../../vendor/preact-hooks.js";
import { useAnswer } from "../api.js";
import { bytes } from "../format.js";
import { html } from "../html.js";
import { Bytes, Card, Empty, Failure, Table, Waiting } from "../ui.js";

const KINDS = [
  ["all", "All"],
  ["folded_bytes", "Folded"],
  ["template_bytes", "Template"],
  ["segment_bytes", "Segments"],
];

const of = (pair, kind) => (kind === "all" ? pair.folded_bytes + pair.template_bytes + pair.segment_bytes : pair[kind]);

export function Sharing() {
  const [again, setAgain] = useState(0);
  const [kind, setKind] = useState("all");
  const { value: sharing, error } = useAnswer("/v1/sharing", again);
  const found = useMemo(() => {
    const pairs = new Map();
    for (const pair of sharing?.pairs ?? []) {
      pairs.set(`${pair.a}\n${pair.b}`, pair);
      pairs.set(`${pair.b}\n${pair.a}`, pair);
    }
    return pairs;
  }, [sharing]);
  if (error && !sharing) return html`<${Failure} error=${error} />`;
  if (!sharing) return html`<${Waiting} />`;
  // VMs of one trust domain beside each other.
  const vms = [...sharing.vms].sort((a, b) => `${a.domain ?? "~"}\n${a.vm}`.localeCompare(`${b.domain ?? "~"}\n${b.vm}`));
  const most = Math.max(1, ...sharing.pairs.map((pair) => of(pair, kind)));
  const picker = html`<div class="segmented" role="group" aria-label="Shared by">
    ${KINDS.map(([key, name]) => html`<button aria-pressed=${kind === key} onClick=${() => setKind(key)}>${name}</button>`)}
    <button onClick=${() => setAgain((n) => n + 1)}>Read again</button></div>`;
  const cell = (a, b) => {
    if (a.vm === b.vm) return html`<td class="own" title=${`${a.vm} maps ${bytes(a.mapped_bytes)} of shared files`}><${Bytes} value=${a.mapped_bytes} figure=${`mapped.${a.vm}`} /></td>`;
    const pair = found.get(`${a.vm}\n${b.vm}`);
    const value = pair ? of(pair, kind) : 0;
    const share = value / most;
    return html`<td class=${value ? "heat" : "none"} style=${{ "--heat": `${Math.round(share * 45)}%` }} title=${`${a.vm} and ${b.vm}: ${bytes(value)}`}>${value ? html`<${Bytes} value=${value} figure=${`pair.${a.vm}.${b.vm}`} />` : "·"}</td>`;
  };
  return html`
    <${Card} title="Pages in common" aside=${picker} wide>
      <p class="note">Pages of one page store, image or segment that both VMs map and neither has copied. On the diagonal: all such pages of the VM. Pages merged by KSM are not included, because the kernel does not say which VMs share them.</p>
      ${vms.length === 0 && html`<${Empty}>No VMs run.<//>`}
      ${vms.length > 0 && html`<div class="table-box" tabindex="0" role="region" aria-label="Sharing matrix"><table class="matrix">
        <caption class="hidden">Bytes that each two VMs have in common</caption>
        <thead><tr><td></td>${vms.map((vm) => html`<th scope="col">${vm.vm}</th>`)}</tr></thead>
        <tbody>${vms.map((a) => html`<tr><th scope="row">${a.vm} <span class="soft">${a.domain ?? "alone"}</span></th>${vms.map((b) => cell(a, b))}</tr>`)}</tbody>
      </table></div>`}
    <//>
    <${Card} title="Pairs" wide>
      <${Table} label="Pairs that share" rows=${sharing.pairs} rowKey=${(p) => `${p.a} ${p.b}`} first=${{ key: "folded", down: true }} empty="No two VMs have anything in common."
        columns=${[
          { key: "a", name: "VM", value: (p) => p.a },
          { key: "b", name: "with", value: (p) => p.b },
          { key: "folded", name: "Folded", number: true, value: (p) => p.folded_bytes, cell: (p) => html`<${Bytes} value=${p.folded_bytes} />` },
          { key: "template", name: "Template", number: true, value: (p) => p.template_bytes, cell: (p) => html`<${Bytes} value=${p.template_bytes} />` },
          { key: "segment", name: "Segments", number: true, value: (p) => p.segment_bytes, cell: (p) => html`<${Bytes} value=${p.segment_bytes} />` },
        ]} />
    <//>`;
}
