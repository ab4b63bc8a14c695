// All VMs: a row each.

import { useMemo, useState } from "../../vendor/preact-hooks.js";
import { changeSample, part, post, useAnswer, useLive } from "../api.js";
import { plural } from "../format.js";
import { html } from "../html.js";
import { Act, Badge, Bytes, Card, DESPITE_BRAKE, Failure, NAME, ReadAt, Sparkline, Stack, Table, Waiting } from "../ui.js";

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
const SWAP_PROBLEMS = { degraded: "swap: a copy on lent memory is lost", on_copy: "swap: on this host's disk, no longer lent", lost: "swap: lost with its lender" };

/** Why a VM does not run, in one line: state, cause, and what would make it run again; null: it runs. */
function standstill(info) {
  if (!info.state || info.state === "running") return null;
  const why = [info.state_cause, info.state_fix].filter(Boolean).join("; ");
  return why ? `${info.state}: ${why}` : info.state;
}

/** Whether the daemon talks to the VM: not yet while the VM starts, or is taken over by a new daemon. */
export const isAdopted = (info) => info.state !== "starting" && info.state !== "taking-over";

export function problems(info) {
  if (!info) return [];
  const still = standstill(info);
  const swap = SWAP_PROBLEMS[info.swap?.place];
  // Clones are no one's twins only when their guests have done it.
  const renewal = info.renewal;
  const unheard = info.agent || !isAdopted(info) ? [] : ["no agent"];
  const alike = renewal?.pending ? ["identity not renewed yet: the guest has not answered"] : (renewal?.left ?? []).map((what) => `as in the snapshot: ${what}`);
  return [...(still ? [still] : []), ...unheard, ...(swap ? [swap] : []), ...alike, ...info.agent_problems, ...info.fold_problems];
}

/** Where a swap disk is, in words. */
export function swapPlace(swap) {
  const lenders = [...new Set(swap.lent.map((part) => part.lender))];
  if (swap.place === "lost") return "lost with its lender";
  return lenders.length ? `lent by ${lenders.join(" and ")}` : "on this host's disk";
}

/** A VM as an action left it, before the next sample has it. */
export const showVm = (info) => changeSample((sample) => ({ ...sample, vms: [...sample.vms.filter((vm) => vm.name !== info.name), info] }));

/** Puts a VM that was just started into the list; its figures come with the next sample. */
const known = (info) => {
  showVm(info);
  return `${info.name} was started, as process ${info.pid}.`;
};

const start = {
  title: "Start a VM",
  text: "Paths are on the daemon's host. For all other options: memfold vm run --file.",
  fields: [
    { name: "name", label: "Name", required: true, pattern: NAME },
    { name: "memory", label: "RAM", value: "1G", required: true, hint: "512M, 8G" },
    { name: "vcpus", label: "Virtual CPUs", type: "number", min: 1, step: 1, value: 1, required: true },
    { name: "domain", label: "Trust domain", hint: "Empty: the VM shares with no other VM." },
    { name: "disk", label: "Disk image", required: true },
    { name: "snapshot", label: "The image stays as it is: writes go to a temporary overlay", type: "checkbox" },
    { name: "kernel", label: "Kernel", hint: "Empty: the disk's own boot loader." },
    { name: "initrd", label: "Its initial RAM disk" },
    { name: "cmdline", label: "Its command line" },
    { name: "swap", label: "Swap disk", hint: "2G; empty: none. It can be switched to lent RAM." },
    { name: "slots", label: "Slots for segments", type: "number", min: 0, step: 1, value: 0, required: true, hint: "Segments that can be attached while it runs." },
    { name: "boot", label: "A snapshot as soon as its guest is up, to reboot from: its disks have to stay as they are", type: "checkbox" },
    DESPITE_BRAKE,
  ],
  action: "Start it",
  act: async (v) =>
    known(await post(`/v1/vms?despite_brake=${v.despite}`, {
      name: v.name, memory: v.memory, vcpus: Number(v.vcpus), domain: v.domain || null, swap: v.swap || null,
      segment_slots: Number(v.slots), boot_snapshot: v.boot,
      disks: [{ path: v.disk, snapshot: v.snapshot }],
      boot: { kernel: v.kernel || null, initrd: v.initrd || null, cmdline: v.cmdline || null },
    })),
};

const attach = {
  title: "Attach a running VM",
  text: "A QEMU that memfold did not start: its memory is counted, and folded if QEMU runs with memfold's library.",
  fields: [
    { name: "name", label: "Name", required: true, pattern: NAME },
    { name: "qmp", label: "QMP socket", required: true },
    { name: "domain", label: "Trust domain", hint: "Empty: the VM shares with no other VM." },
  ],
  action: "Attach it",
  act: async (v) => known(await post("/v1/attach", { name: v.name, qmp: v.qmp, domain: v.domain || null })),
};

const attachLibvirt = {
  title: "Adopt a domain of libvirt now",
  text: "Domains that are enabled (memfold libvirt enable) are adopted by themselves within seconds.",
  fields: [{ name: "domain", label: "Domain", required: true, hint: "Its name in libvirt." }],
  action: "Attach it",
  act: async (v) => known(await post("/v1/libvirt/attach", { domain: v.domain })),
};

/** When a change of a domain's XML counts. */
const when = ({ changed, running, managed_save: saved, not_folded: reasons }) =>
  (reasons?.length ? `The domain will not be folded: ${reasons.join("; ")}. ` : "") +
  (!changed ? "Nothing had to be changed."
  : running ? "The change takes effect when the running domain is shut down and started again; a reboot of the guest is not enough."
  : saved ? "The next start restores the domain's saved memory unchanged, so the change takes effect at the start after that."
  : "The change takes effect at the domain's next start.");

/** Domains of libvirt, where there is a libvirt that the daemon looks at. */
function Domains({ may }) {
  const [again, setAgain] = useState(0);
  const { value: domains, error, at } = useAnswer("/v1/libvirt", again, 60000);
  if (!domains) return error && html`<${Card} title="Domains of libvirt" wide><${Failure} error=${error} /><//>`;
  const change = async (path, body) => {
    const done = await post(`/v1/libvirt/${path}`, body);
    setAgain((n) => n + 1);
    return when(done);
  };
  const enable = (d) => ({
    title: `Have ${d.domain} start with memfold?`,
    text: "The domain's XML gets memfold's emulator, a channel for the agent, and a mark with the trust domain. Nothing else in libvirt changes.",
    fields: [{ name: "trust", label: "Trust domain", value: d.mark?.domain ?? "", hint: "Empty: the VM shares with no other VM." }],
    action: "Enable it",
    act: (v) => change("enable", { domain: d.domain, trust_domain: v.trust || null }),
  });
  const disable = (d) => ({
    title: `Have ${d.domain} start without memfold?`,
    text: "The domain's original XML is restored.",
    action: "Disable it",
    danger: true,
    act: () => change("disable", { domain: d.domain }),
  });
  return html`<${Card} title="Domains of libvirt" aside=${html`<${ReadAt} at=${at} />`} wide>
    <${Failure} error=${error} />
    <${Table} label="Domains of libvirt" rows=${domains} rowKey=${(d) => d.domain} empty="libvirt has none." columns=${[
      { key: "domain", name: "Domain", value: (d) => d.domain },
      { key: "state", name: "State", value: (d) => (d.running ? "running" : "off") },
      { key: "trust", name: "Trust domain", value: (d) => d.mark?.domain ?? "", cell: (d) => d.mark?.domain ? d.mark.domain + (d.mark.by_tag ? " (by tag)" : "") : html`<span class="soft">${d.mark ? "alone" : "not enabled"}</span>` },
      { key: "folding", name: "Folding", class: "prose", value: (d) => d.folding },
      { key: "act", name: "", cell: (d) => d.mark
        ? html`<${Act} may=${may} what=${disable(d)} danger small>Disable …<//>`
        : html`<${Act} may=${may} what=${enable(d)} small>Enable …<//>` },
    ]} />
  <//>`;
}

/** Starts a defined VM; `done` is called after it. */
export const startDefined = (info, done) => ({
  title: `Start ${info.name}?`,
  text: info.definition?.snapshot ? `The VM continues from the snapshot ${info.definition.snapshot}.` : "The VM boots as its definition describes it.",
  fields: [DESPITE_BRAKE],
  action: "Start it",
  act: async (v) => {
    const said = known(await post(`/v1/definitions/${part(info.name)}/start?despite_brake=${v.despite}`, {}));
    done?.();
    return said;
  },
});

/** Defined VMs that do not run. */
function Defined({ may }) {
  const [again, setAgain] = useState(0);
  const { value: definitions, error, at } = useAnswer("/v1/definitions", again, 10000);
  if (!definitions) return error && html`<${Card} title="Defined VMs that are off" wide><${Failure} error=${error} /><//>`;
  const off = definitions.filter((info) => info.state === "off");
  if (!off.length && !error) return null;
  const afterBoot = ({ definition }) => (definition?.autostart ? `starts, order ${definition.order}` : "does not start");
  const problem = (info) => [info.problem, info.fix].filter(Boolean).join("; ");
  return html`<${Card} title="Defined VMs that are off" aside=${html`<${ReadAt} at=${at} />`} wide>
    <${Failure} error=${error} />
    <${Table} label="Defined VMs that are off" rows=${off} rowKey=${(info) => info.name} first=${{ key: "name", down: false }} columns=${[
      { key: "name", name: "VM", value: (info) => info.name, cell: (info) => html`<a href=${`#/vms/${part(info.name)}`}>${info.name}</a>` },
      { key: "domain", name: "Domain", value: (info) => info.definition?.vm.domain ?? "", cell: (info) => info.definition?.vm.domain ?? html`<span class="soft">alone</span>` },
      { key: "memory", name: "RAM", value: (info) => info.definition?.vm.memory ?? "" },
      { key: "boot", name: "After a boot", value: afterBoot },
      { key: "problem", name: "Problem", class: "prose", value: problem },
      { key: "act", name: "", cell: (info) => info.definition && html`<${Act} may=${may} what=${startDefined(info, () => setAgain((n) => n + 1))} small>Start this VM …<//>` },
    ]} />
  <//>`;
}

export function Vms({ may }) {
  const live = useLive();
  const [wanted, setWanted] = useState("");
  const { value: past } = useAnswer("/v1/history/vms?seconds=3600&points=40", "", 60000);
  const trend = useMemo(() => new Map((past?.vms ?? []).map((vm) => [vm.name, vm.pss_bytes])), [past]);
  if (!live.sample) return html`<${Waiting} />`;
  const infos = new Map(live.sample.vms.map((info) => [info.name, info]));
  // The ledger has no figures of a VM that has just begun, or whose page tables cannot be read.
  const measured = new Map(live.sample.ledger.vms.map((vm) => [vm.name, vm]));
  const all = live.sample.vms.map(({ name, domain, ram_bytes }) => ({ name, domain, ram_bytes, ...measured.get(name) }));
  const rows = all.filter((vm) => `${vm.name} ${vm.domain ?? ""}`.toLowerCase().includes(wanted.toLowerCase()));
  const figure = (key, name) => ({
    key,
    name,
    number: true,
    value: (vm) => vm[key] ?? -1,
    cell: (vm) => html`<${Bytes} value=${vm[key]} figure=${measured.has(vm.name) ? `vm.${vm.name}.${key}` : undefined} />`,
  });
  const trendOf = (vm) => [...(trend.get(vm.name) ?? []), vm.pss_bytes ?? null];
  const filter = html`<input type="search" placeholder="Name or domain" aria-label="Show only VMs whose name or domain contains this text" value=${wanted} onInput=${(e) => setWanted(e.target.value)} />`;
  const aside = html`${filter}
    <${Act} may=${may} what=${start} small>Start …<//><${Act} may=${may} what=${attach} small>Attach …<//><${Act} may=${may} what=${attachLibvirt} small>Of libvirt …<//>`;
  return html`<div class="grid"><${Card} title=${plural(all.length, "VM")} aside=${aside} wide>
    <${Table} label="VMs" rows=${rows} rowKey=${(vm) => vm.name} first=${{ key: "name", down: false }}
      empty=${all.length ? "No VM has this text in its name or domain." : "No VMs run. Start one: memfold vm run --help"}
      columns=${[
        { key: "name", name: "VM", value: (vm) => vm.name, cell: (vm) => html`<a href=${`#/vms/${encodeURIComponent(vm.name)}`}>${vm.name}</a>` },
        { key: "domain", name: "Domain", value: (vm) => vm.domain ?? "", cell: (vm) => vm.domain ?? html`<span class="soft">alone</span>` },
        figure("ram_bytes", "RAM"),
        { key: "strip", name: "Places", class: "strip", cell: (vm) => measured.has(vm.name) && html`<${Stack} legend=${false} label=${`RAM of ${vm.name}`}
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
        { key: "state", name: "State", value: (vm) => infos.get(vm.name)?.state ?? "", cell: (vm) => {
          const state = infos.get(vm.name)?.state;
          return state ? html`<${Badge} tone=${state === "running" ? "good" : "warn"}>${state}<//>` : "–";
        } },
        { key: "health", name: "Problems", value: (vm) => problems(infos.get(vm.name)).length, cell: (vm) => {
          const list = problems(infos.get(vm.name));
          if (list.length) return html`<${Badge} tone="warn" title=${list.join("; ")}>${list[0]}<//>`;
          return live.sample.fold.paused ? html`<${Badge} tone="warn">folding is paused<//>` : html`<${Badge} tone="good">none<//>`;
        } },
      ]} />
    <dl class="legend names">${PLACES.map(([name, , color]) => html`<div><dt><i style=${{ background: `var(--${color})` }}></i>${name}</dt></div>`)}</dl>
  <//><${Defined} may=${may} /><${Domains} may=${may} /></div>`;
}
