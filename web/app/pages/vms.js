// All VMs: a row each.

import { useMemo, useState } from "../../vendor/preact-hooks.js";
import { useAnswer, useLive } from "../api.js";
import { plural } from "../format.js";
import { html } from "../html.js";
import { Badge, Bytes, Card, Sparkline, Stack, Table, Waiting } from "../ui.js";

export const PLACES = [
  ["Private", "private_bytes", "private"],
  ["Unfolded", "unfolded_bytes", "unfolded"],
  ["Folded", "folded_bytes", "folded"],
  ["Template", "template_bytes", "template"],
  ["Zero", "zero_bytes", "zero"],
  ["Swapped", "swapped_bytes", "swapped"],
  ["Free", "free_bytes", "free"],
];

/** A VM's account with the sum that the charts call template. */
export const withTemplate = (vm) => ({ ...vm, template_bytes: vm.file_resident_bytes + vm.file_untouched_bytes });

/** What is to be known of a swap disk that isn't where it should be. */
const SWAP_PROBLEMS = { degraded: "swap: a copy on lent memory is lost", on_copy: "swap: on this host's disk, it is lent no more", lost: "swap: lost with its lender" };

export function problems(info) {
  if (!info) return [];
  const swap = SWAP_PROBLEMS[info.swap?.place];
  return [...(info.agent ? [] : ["no agent"]), ...(swap ? [swap] : []), ...info.agent_problems, ...info.fold_problems];
}

/** Where a swap disk is, in words. */
export function swapPlace(swap) {
  const lenders = [...new Set(swap.lent.map((part) => part.lender))];
  if (swap.place === "lost") return "lost with its lender";
  return lenders.length ? `lent by ${lenders.join(" and ")}` : "on this host's disk";
}

export function Vms() {
  const live = useLive();
  const [wanted, setWanted] = useState("");
  const { value: past } = useAnswer("/v1/history/vms?seconds=3600&points=40", "", 60000);
  const trend = useMemo(() => new Map((past?.vms ?? []).map((vm) => [vm.name, vm.pss_bytes])), [past]);
  if (!live.sample) return html`<${Waiting} />`;
  const infos = new Map(live.sample.vms.map((info) => [info.name, info]));
  const all = live.sample.ledger.vms;
  const rows = all.filter((vm) => `${vm.name} ${vm.domain ?? ""}`.toLowerCase().includes(wanted.toLowerCase()));
  const figure = (key, name) => ({
    key,
    name,
    number: true,
    value: (vm) => vm[key],
    cell: (vm) => html`<${Bytes} value=${vm[key]} figure=${`vm.${vm.name}.${key}`} />`,
  });
  const trendOf = (vm) => [...(trend.get(vm.name) ?? []), vm.pss_bytes];
  const filter = html`<input type="search" placeholder="Name or domain" aria-label="Show only VMs whose name or domain holds this" value=${wanted} onInput=${(e) => setWanted(e.target.value)} />`;
  return html`<${Card} title=${plural(all.length, "VM")} aside=${filter} wide>
    <${Table} label="VMs" rows=${rows} rowKey=${(vm) => vm.name} first=${{ key: "name", down: false }}
      empty=${all.length ? "No VM has that in its name or domain." : "No VMs run. Start one: memfold vm run --help"}
      columns=${[
        { key: "name", name: "VM", value: (vm) => vm.name, cell: (vm) => html`<a href=${`#/vms/${encodeURIComponent(vm.name)}`}>${vm.name}</a>` },
        { key: "domain", name: "Domain", value: (vm) => vm.domain ?? "", cell: (vm) => vm.domain ?? html`<span class="soft">alone</span>` },
        figure("ram_bytes", "RAM"),
        { key: "strip", name: "Places", class: "strip", cell: (vm) => html`<${Stack} legend=${false} label=${`RAM of ${vm.name}`}
            parts=${PLACES.map(([name, key, color]) => ({ name, color, value: withTemplate(vm)[key] }))} />` },
        figure("backed_bytes", "Backed"),
        figure("folded_bytes", "Folded"),
        figure("private_bytes", "Private"),
        figure("pss_bytes", "PSS"),
        { key: "trend", name: "PSS, 1 h", cell: (vm) => html`<${Sparkline} values=${trendOf(vm)} label=${`PSS of ${vm.name} over the last hour`} color="accent" />` },
        { key: "swap", name: "Swap disk", value: (vm) => infos.get(vm.name)?.swap?.bytes ?? 0, cell: (vm) => {
          const swap = infos.get(vm.name)?.swap;
          return swap ? html`<${Bytes} value=${swap.bytes} figure=${`swap.${vm.name}`} /> <span class="soft">${swapPlace(swap)}</span>` : html`<span class="soft">none</span>`;
        } },
        { key: "state", name: "State", value: (vm) => problems(infos.get(vm.name)).length, cell: (vm) => {
          const list = problems(infos.get(vm.name));
          return list.length ? html`<${Badge} tone="warn" title=${list.join("; ")}>${list[0]}<//>` : html`<${Badge} tone="good">folding<//>`;
        } },
      ]} />
    <dl class="legend names">${PLACES.map(([name, , color]) => html`<div><dt><i style=${{ background: `var(--${color})` }}></i>${name}</dt></div>`)}</dl>
  <//>`;
}
