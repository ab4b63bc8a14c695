// Who shares with whom.

import { useMemo, useState } from "../../vendor/preact-hooks.js";
import { useAnswer } from "../api.js";
import { bytes, plural } from "../format.js";
import { html } from "../html.js";
import { Bytes, Card, Empty, Failure, ReadAt, Table, Waiting } from "../ui.js";

const KINDS = [
  ["all", "All"],
  ["folded_bytes", "Folded"],
  ["template_bytes", "Template"],
  ["segment_bytes", "Segments"],
];

const of = (pair, kind) => (kind === "all" ? pair.folded_bytes + pair.template_bytes + pair.segment_bytes : pair[kind]);

/** VMs of the matrix: more are neither legible nor quickly drawn. */
const MATRIX_VMS = 40;
/** Rows of the table. */
const LISTED_PAIRS = 200;
/** Pairs that the daemon is asked for. */
const ASKED_PAIRS = 5000;

const MOST_SHARING = "most";
const inDomain = (domain) => `domain ${domain ?? ""}`;

/** The VMs of the matrix: those of one choice, and of them those that share most; those of one trust domain beside each other. */
function chosen(sharing, choice, kind) {
  const shared = new Map(sharing.vms.map((vm) => [vm.vm, 0]));
  for (const pair of sharing.pairs) for (const name of [pair.a, pair.b]) shared.set(name, shared.get(name) + of(pair, kind));
  const candidates = sharing.vms.filter((vm) => choice === MOST_SHARING || inDomain(vm.domain) === choice);
  const most = [...candidates].sort((a, b) => shared.get(b.vm) - shared.get(a.vm)).slice(0, MATRIX_VMS);
  const order = (vm) => `${vm.domain ?? "~"}\n${vm.vm}`;
  return { vms: most.sort((a, b) => order(a).localeCompare(order(b))), leftOut: candidates.length - most.length };
}

export function Sharing() {
  const [again, setAgain] = useState(0);
  const [kind, setKind] = useState("all");
  const [choice, setChoice] = useState(MOST_SHARING);
  const { value: sharing, error, at } = useAnswer(`/v1/sharing?pairs=${ASKED_PAIRS}`, again);
  const { found, largest } = useMemo(() => {
    const pairs = new Map();
    for (const pair of sharing?.pairs ?? []) {
      pairs.set(`${pair.a}\n${pair.b}`, pair);
      pairs.set(`${pair.b}\n${pair.a}`, pair);
    }
    return { found: pairs, largest: [...(sharing?.pairs ?? [])].sort((a, b) => of(b, kind) - of(a, kind)) };
  }, [sharing, kind]);
  const matrix = useMemo(() => sharing && chosen(sharing, choice, kind), [sharing, choice, kind]);
  if (error && !sharing) return html`<${Failure} error=${error} />`;
  if (!sharing) return html`<${Waiting} />`;
  const { vms, leftOut } = matrix;
  const most = Math.max(1, largest.length ? of(largest[0], kind) : 0);
  const total = Math.max(sharing.pairs_total ?? 0, largest.length);
  // The daemon tells the largest pairs: of the others, only how large they are at most is known.
  const isCut = total > largest.length;
  const bound = isCut ? Math.min(...sharing.pairs.map((pair) => of(pair, "all"))) : 0;
  const listed = largest.slice(0, LISTED_PAIRS);
  const domains = [...new Set(sharing.vms.map((vm) => vm.domain))].sort();
  const chooser = sharing.vms.length > MATRIX_VMS && html`<select aria-label="VMs of the matrix" value=${choice} onChange=${(e) => setChoice(e.target.value)}>
    <option value=${MOST_SHARING}>the VMs that share most</option>
    ${domains.map((domain) => html`<option value=${inDomain(domain)}>${domain === null ? "VMs without trust domain" : `trust domain ${domain}`}</option>`)}</select>`;
  const picker = html`<${ReadAt} at=${at} />${chooser}<div class="segmented" role="group" aria-label="Shared by">
    ${KINDS.map(([key, name]) => html`<button aria-pressed=${kind === key} onClick=${() => setKind(key)}>${name}</button>`)}
    <button onClick=${() => setAgain((n) => n + 1)}>Read again</button></div>`;
  const cell = (a, b) => {
    if (a.vm === b.vm) return html`<td class="own" title=${`${a.vm} maps ${bytes(a.mapped_bytes)} of shared files`}><${Bytes} value=${a.mapped_bytes} figure=${`mapped.${a.vm}`} /></td>`;
    const pair = found.get(`${a.vm}\n${b.vm}`);
    if (!pair && isCut) return html`<td class="none" title=${`${a.vm} and ${b.vm}: at most ${bytes(bound)}; only the ${largest.length.toLocaleString("en")} largest pairs are read`}>≤ ${bytes(bound)}</td>`;
    const value = pair ? of(pair, kind) : 0;
    const share = value / most;
    return html`<td class=${value ? "heat" : "none"} style=${{ "--heat": `${Math.round(share * 45)}%` }} title=${`${a.vm} and ${b.vm}: ${bytes(value)}`}>${value ? html`<${Bytes} value=${value} figure=${`pair.${a.vm}.${b.vm}`} />` : "·"}</td>`;
  };
  return html`
    <${Card} title="Pages in common" aside=${picker} wide>
      <${Failure} error=${error} />
      <p class="note">Pages of one page store, image or segment that both VMs map and neither has copied. On the diagonal: all such pages of the VM. Pages merged by KSM are not included, because the kernel does not say which VMs share them.</p>
      ${vms.length === 0 && html`<${Empty}>No VMs run.<//>`}
      ${vms.length > 0 && html`<div class="table-box" tabindex="0" role="region" aria-label="Sharing matrix"><table class="matrix">
        <caption class="hidden">Bytes that each two VMs have in common</caption>
        <thead><tr><td></td>${vms.map((vm) => html`<th scope="col">${vm.vm}</th>`)}</tr></thead>
        <tbody>${vms.map((a) => html`<tr><th scope="row">${a.vm} <span class="soft">${a.domain ?? "alone"}</span></th>${vms.map((b) => cell(a, b))}</tr>`)}</tbody>
      </table></div>`}
      ${leftOut > 0 && html`<p class="note">The matrix leaves out ${plural(leftOut, "VM")} that share less.</p>`}
    <//>
    <${Card} title="Pairs" wide>
      <${Table} label="Pairs that share" rows=${listed} rowKey=${(p) => `${p.a} ${p.b}`} first=${{ key: "folded", down: true }} empty="No two VMs have anything in common."
        columns=${[
          { key: "a", name: "VM", value: (p) => p.a },
          { key: "b", name: "with", value: (p) => p.b },
          { key: "folded", name: "Folded", number: true, value: (p) => p.folded_bytes, cell: (p) => html`<${Bytes} value=${p.folded_bytes} />` },
          { key: "template", name: "Template", number: true, value: (p) => p.template_bytes, cell: (p) => html`<${Bytes} value=${p.template_bytes} />` },
          { key: "segment", name: "Segments", number: true, value: (p) => p.segment_bytes, cell: (p) => html`<${Bytes} value=${p.segment_bytes} />` },
        ]} />
      ${total > listed.length && html`<p class="note">The table leaves out ${plural(total - listed.length, "smaller pair")}. <code>GET /v1/sharing?pairs=N</code> has more.</p>`}
    <//>`;
}
