// What changed, and who changed it.

import { useAnswer } from "../api.js";
import { duration, time } from "../format.js";
import { html } from "../html.js";
import { Badge, Card, Failure, Table } from "../ui.js";

const details = (entry) => Object.entries(entry.details).map(([key, value]) => `${key} ${value}`).join(", ");

function Audit() {
  const { value: entries, error } = useAnswer("/v1/audit?count=200", "", 15000);
  return html`<${Card} title="Who did what" wide>
    <${Failure} error=${error} />
    <${Table} label="Audit log" rows=${entries ?? []} rowKey=${(e) => `${e.at_unix_s} ${e.path} ${e.who}`} empty="No changes yet." columns=${[
      { key: "at", name: "Time", value: (e) => e.at_unix_s, cell: (e) => time(e.at_unix_s) },
      { key: "who", name: "Who", value: (e) => e.who },
      { key: "what", name: "What", class: "prose", value: (e) => `${e.method} ${e.path}`, cell: (e) => html`<code>${e.method} ${e.path}</code> <span class="soft">${details(e)}</span>` },
      { key: "outcome", name: "Outcome", class: "prose", value: (e) => e.status, cell: (e) => html`<${Badge} tone=${e.status < 300 ? "good" : "bad"}>${e.status < 300 ? "done" : e.status}<//> ${e.error ?? ""}${e.not_noted ? ` (${e.not_noted} more refusals before it)` : ""}` },
      { key: "took", name: "Took", number: true, value: (e) => e.took_ms, cell: (e) => duration(e.took_ms) },
    ]} />
  <//>`;
}

/** Events, newest first. */
export const EventTable = ({ label, events, empty }) => html`
  <${Table} label=${label} rows=${events} rowKey=${(e) => `${e.at_unix_s} ${e.kind} ${e.vm} ${e.text}`} empty=${empty} columns=${[
    { key: "at", name: "Time", value: (e) => e.at_unix_s, cell: (e) => time(e.at_unix_s) },
    { key: "kind", name: "About", value: (e) => e.kind, cell: (e) => html`<${Badge} tone=${e.warning ? "warn" : ""}>${e.kind}<//>` },
    { key: "vm", name: "VM", value: (e) => e.vm ?? "", cell: (e) => (e.vm ? html`<a href=${`#/vms/${encodeURIComponent(e.vm)}`}>${e.vm}</a>` : "") },
    { key: "text", name: "What", class: "prose", value: (e) => e.text },
  ]} />`;

export function Events({ may }) {
  const { value: events, error } = useAnswer("/v1/events?count=200", "", 15000);
  return html`
    <${Card} title="What changed" wide>
      <${Failure} error=${error} />
      <${EventTable} label="Events" events=${events ?? []} empty="No events yet." />
    <//>
    ${may && html`<${Audit} />`}`;
}
