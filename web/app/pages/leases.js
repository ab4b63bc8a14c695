// Who lends memory to whom, and whom a lender's death would hurt.

import { useState } from "../../vendor/preact-hooks.js";
import { del, part, post, useAnswer } from "../api.js";
import { bytes, duration, parseBytes, plural, sizeText } from "../format.js";
import { html } from "../html.js";
import { Act, Badge, Bytes, Card, Empty, Failure, NAME, Stat, Table, Waiting } from "../ui.js";

const ROW = 44;
/** More rows are not legible; then there is only the table. */
const MOST_ROWS = 12;
/** Characters that have room beside the lines. */
const MOST_CHARACTERS = 26;

const short = (name) => (name.length > MOST_CHARACTERS ? `${name.slice(0, MOST_CHARACTERS - 1)}…` : name);

/** The interface's path of what borrows: a VM, or a swap volume `VG/LV` of the host. */
const place = (name) => (name.includes("/") ? `/v1/volumes/${name.split("/").map(part).join("/")}` : `/v1/vms/${part(name)}`);

/** Lenders on the left, borrowing VMs on the right; a line is as thick as what is lent. */
function Graph({ leases }) {
  const lenders = [...new Set(leases.map((l) => l.lender.host))];
  const borrowers = [...new Set(leases.map((l) => `${l.borrower} / ${l.vm}`))];
  const rows = Math.max(lenders.length, borrowers.length);
  if (rows > MOST_ROWS) return html`<p class="note">${plural(lenders.length, "lender")} and ${plural(borrowers.length, "borrower")}: too many for a drawing.</p>`;
  const height = rows * ROW;
  const at = (list, item) => ((list.indexOf(item) + 0.5) * height) / list.length;
  const most = Math.max(...leases.map((l) => l.bytes));
  return html`<svg class="graph" viewBox=${`0 0 640 ${height}`} role="img" aria-label="Leases from lenders to VMs; the table below lists them">
    ${leases.map((l) => {
      const [y1, y2] = [at(lenders, l.lender.host), at(borrowers, `${l.borrower} / ${l.vm}`)];
      return html`<path d=${`M 200 ${y1} C 320 ${y1}, 320 ${y2}, 440 ${y2}`} style=${{ strokeWidth: 1 + (l.bytes / most) * 7 }}><title>${`${l.lender.host} lends ${bytes(l.bytes)} to ${l.vm}`}</title></path>`;
    })}
    ${lenders.map((host) => html`<text x="192" y=${at(lenders, host) + 4} text-anchor="end"><title>${host}</title>${short(host)}</text>`)}
    ${borrowers.map((vm) => html`<text x="448" y=${at(borrowers, vm) + 4}><title>${vm}</title>${short(vm)}</text>`)}
  </svg>`;
}

/** Hosts that may ask this daemon's registry. */
function Hosts({ may }) {
  const [again, setAgain] = useState(0);
  const { value: hosts, error } = useAnswer("/v1/hosts", again);
  const add = {
    title: "Let a host ask",
    text: "With the token shown next, the host may lend and borrow through this daemon's registry. An earlier token of the host becomes invalid.",
    fields: [{ name: "host", label: "Its name", required: true, pattern: NAME, hint: "As it is started: memfold serve --host." }],
    action: "Make a token",
    act: async (v) => {
      const made = await post("/v1/hosts", { host: v.host });
      setAgain((n) => n + 1);
      return `Token of ${made.host}, not shown again:\n${made.token}\nStart that host's daemon with --host ${made.host}, --registry, --registry-token and --registry-ca: see memfold host add --help.`;
    },
  };
  const remove = (host) => ({
    title: `Refuse ${host} from now on?`,
    text: "The host's token becomes invalid. Its loans end with their leases.",
    action: "Take its token away",
    danger: true,
    act: async () => {
      await del(`/v1/hosts/${part(host)}`);
      setAgain((n) => n + 1);
    },
  });
  return html`<${Card} title="Hosts that may ask" aside=${html`<${Act} may=${may} what=${add} small>Add …<//>`}>
    <${Failure} error=${error} />
    <${Table} label="Hosts that may ask" rows=${hosts ?? []} rowKey=${(host) => host} empty="None but this one." columns=${[
      { key: "host", name: "Host", value: (host) => host },
      { key: "act", name: "", cell: (host) => html`<${Act} may=${may} what=${remove(host)} danger small>Remove …<//>` },
    ]} />
  <//>`;
}

export function Leases({ may }) {
  const [again, setAgain] = useState(0);
  const { value: report, error } = useAnswer("/v1/leases", again, 10000);
  const changed = () => setAgain((n) => n + 1);
  if (!report) return error ? html`<${Failure} error=${error} />` : html`<${Waiting} />`;
  const lending = report.lending;
  const give = (b) => ({
    title: `Return what ${b.vm} has borrowed?`,
    text: "The swap disk moves back to this host's disk while the VM runs.",
    action: "Return it",
    act: async () => {
      const done = await post(`${place(b.vm)}/return`);
      changed();
      return `Back on this host's disk after ${duration(done.took_ms)}.`;
    },
  });
  const recall = (l) => ({
    title: `Ask ${l.borrower} to return the memory lent to ${l.vm}?`,
    text: `${bytes(l.bytes)}: the borrower has 10 s to return it, and without another copy one more second for each 20 MiB. The guest goes on.`,
    action: "Ask for it",
    act: async () => {
      await post(`/v1/leases/${l.id}/return`);
      changed();
    },
  });
  const lendAs = async (max, how) => {
    const max_bytes = parseBytes(max);
    if (max_bytes === null) throw new Error(`'${max}' is not a size; write 512M or 8G`);
    await post("/v1/lend", { ...how, max_bytes });
    changed();
  };
  const most = { name: "max", label: "At most", value: "1G", required: true, hint: "512M, 8G" };
  const lend = {
    title: "Lend memory",
    text: "Lends RAM that this host can spare to VMs of this host or of other hosts.",
    fields: [
      most,
      { name: "listen", label: "Listen at", hint: "An address of this host that other hosts can reach. Empty: only for daemons on this host." },
      { name: "ports", label: "Ports", pattern: "[0-9]+-[0-9]+", hint: "First and last, 10900-10999; empty: any that is free." },
      { name: "announce", label: "Announced as", hint: "Address for borrowers if a forwarder stands between." },
      { name: "transport", label: "Transport", type: "select", options: [{ value: "nbd", label: "NBD, with TLS" }, { value: "iscsi", label: "iSCSI, not encrypted" }] },
      { name: "cleartext", label: "With iSCSI to other hosts: VMs' swapped memory may be sent in clear text", type: "checkbox" },
    ],
    action: "Lend",
    act: (v) =>
      lendAs(v.max, {
        listen: v.listen || null, announce: v.announce || null, ports: v.ports ? v.ports.split("-").map(Number) : null,
        transport: v.transport, cleartext: v.cleartext,
      }),
  };
  const change = report.lends_as && {
    title: "Change how much is lent",
    text: "RAM lent beyond that is taken back; borrowers move to their disks.",
    fields: [{ ...most, value: sizeText(lending.max_bytes) }],
    action: "Change it",
    act: (v) => lendAs(v.max, report.lends_as),
  };
  const stop = {
    title: "Lend no more?",
    text: "All lent RAM is taken back; borrowers move to their disks.",
    action: "Lend no more",
    danger: true,
    act: async () => {
      await del("/v1/lend");
      changed();
    },
  };
  const volume = {
    title: "Put a swap volume of this host on lent RAM",
    text: "The volume stays in use while LVM moves it. The kernel borrows by iSCSI, which is not encrypted.",
    fields: [
      { name: "volume", label: "Volume", required: true, pattern: "[A-Za-z0-9+_.\\-]+/[A-Za-z0-9+_.\\-]+", hint: "Group and name, as lvs shows them: vg0/swap." },
      { name: "durability", label: "If its lender dies", type: "select", options: [{ value: "disk", label: "it goes on, on this host's disk" }, { value: "none", label: "what lies there is lost" }] },
    ],
    action: "Borrow",
    act: async (v) => {
      const done = await post(`${place(v.volume)}/borrow`, { durability: v.durability });
      changed();
      return `On lent RAM of ${done.lenders.join(", ")} after ${duration(done.took_ms)}.`;
    },
  };
  const trust = (lied) => ({
    title: `Trust ${lied.lender} again?`,
    text: `It served wrong bytes to ${lied.vm}: ${lied.what}. The VM never saw them. The lender is not used for an hour after that.`,
    action: "Trust it",
    act: async () => {
      await del(`/v1/lenders/${part(lied.lender)}/distrust`);
      changed();
    },
  });
  const away = report.registry_away;
  const ours = report.leases.filter((l) => l.lender.host === report.host);
  const lent = report.borrowed.filter((b) => b.place === "lent" || b.place === "degraded");
  return html`
    <${Failure} error=${error} />
    <${Failure} error=${away && new Error(`${away}. Only what this host knows itself is shown.`)} />
    <div class="stats">
      <${Stat} label="This host" note=${`registry: ${report.registry}`}>${report.host}<//>
      <${Stat} label="It lends" note=${lending ? `of ${bytes(lending.max_bytes)} at most; listens: ${lending.listens}` : "nothing is offered"}>${lending ? html`<${Bytes} value=${lending.lent_bytes} figure="lending.lent_bytes" />` : "no"}<//>
      <${Stat} label="Its VMs borrow" note=${plural(lent.length, "VM")}><${Bytes} value=${lent.reduce((sum, b) => sum + b.bytes, 0)} figure="borrowed" /><//>
    </div>
    <div class="grid">
      <${Card} title="Leases" wide aside=${lending ? html`<${Act} may=${may && change} what=${change} small>Change …<//><${Act} may=${may} what=${stop} danger small>Lend no more …<//>` : html`<${Act} may=${may} what=${lend} small>Lend …<//>`}>
        ${report.leases.length > 0 ? html`<${Graph} leases=${report.leases} />` : away ? html`<${Empty}>Not known while the registry does not answer.<//>` : html`<${Empty}>No memory is lent. <code>memfold lend --max 8G</code> offers memory, <code>memfold borrow VM</code> borrows it.<//>`}
        ${report.leases.length > 0 && html`<${Table} label="Leases" rows=${report.leases} rowKey=${(l) => l.id} columns=${[
          { key: "lender", name: "Lender", value: (l) => l.lender.host },
          { key: "vm", name: "VM", value: (l) => `${l.borrower} / ${l.vm}` },
          { key: "bytes", name: "Lent", number: true, value: (l) => l.bytes, cell: (l) => html`<${Bytes} value=${l.bytes} />` },
          { key: "copy", name: "Copy", value: (l) => l.durability },
          { key: "state", name: "State", value: (l) => l.state, cell: (l) => html`${l.state} ${l.recall_ms !== null && html`<${Badge} tone="warn">wanted back in ${duration(l.recall_ms)}<//>`}` },
          { key: "left", name: "Ends unless renewed in", number: true, value: (l) => l.left_ms, cell: (l) => duration(l.left_ms) },
          ...(ours.length > 0 ? [{ key: "act", name: "", cell: (l) => ours.includes(l) && html`<${Act} may=${may && l.recall_ms === null} what=${recall(l)} small>Ask for it …<//>` }] : []),
        ]} />`}
      <//>
      <${Card} title="If a lender dies">
        <${Table} label="Blast radius" rowKey=${(r) => `${r.lender} ${r.vm}`} rows=${report.blast.flatMap((b) => b.vms.map((vm) => ({ lender: b.lender, ...vm })))}
          empty=${away ? "Not known while the registry does not answer." : "No VM is affected: no memory is lent."} columns=${[
          { key: "lender", name: "Lender", value: (r) => r.lender },
          { key: "vm", name: "VM", value: (r) => `${r.host} / ${r.vm}` },
          { key: "bytes", name: "Holds", number: true, value: (r) => r.bytes, cell: (r) => bytes(r.bytes) },
          { key: "effect", name: "Effect", class: "prose", cell: (r) => html`<${Badge} tone=${r.loses_bytes ? "bad" : "good"}>${r.loses_bytes ? "loses bytes" : "loses nothing"}<//> ${r.effect}` },
        ]} />
      <//>
      <${Card} title="VMs that borrow" aside=${html`<${Act} may=${may} what=${volume} small>For a volume …<//>`}>
        <${Table} label="VMs of this host that borrow" rows=${report.borrowed} rowKey=${(b) => b.vm} empty="No VM of this host borrows." columns=${[
          { key: "vm", name: "VM", value: (b) => b.vm },
          { key: "place", name: "Swap disk", value: (b) => b.place.replace("_", " ") },
          { key: "bytes", name: "Size", number: true, value: (b) => b.bytes, cell: (b) => bytes(b.bytes) },
          { key: "lenders", name: "Lenders", cell: (b) => b.lenders.join(", ") },
          { key: "waits", name: "Waits over 1 s", number: true, value: (b) => b.waits?.over_1_s, cell: (b) => b.waits?.over_1_s ?? "" },
          { key: "act", name: "", cell: (b) => html`<${Act} may=${may && b.durability !== null} what=${give(b)} small>Return …<//>` },
        ]} />
        ${report.again?.map((vm) => html`<p class="note"><strong>${vm}</strong> borrows again when a lender has room. <${Act} may=${may} what=${give({ vm })} small>Not any more …<//></p>`)}
      <//>
      <${Card} title="Lenders" wide>
        <${Table} label="Lenders" rows=${report.lenders} rowKey=${(l) => l.lender.host} empty=${away ? "Not known while the registry does not answer." : "The registry has no lender."} columns=${[
          { key: "host", name: "Host", value: (l) => l.lender.host },
          { key: "offered", name: "Offered", number: true, value: (l) => l.offered_bytes, cell: (l) => bytes(l.offered_bytes) },
          { key: "lent", name: "Lent", number: true, value: (l) => l.lent_bytes, cell: (l) => bytes(l.lent_bytes) },
          { key: "believed", name: "Believed", cell: (l) => {
            const lied = report.distrusted.find((d) => d.lender === l.lender.host);
            if (!lied) return "yes";
            return html`<${Badge} tone="bad">served wrong bytes<//> <${Act} may=${may} what=${trust(lied)} small>Trust again …<//>`;
          } },
          { key: "heard", name: "Heard of", number: true, value: (l) => l.silent_ms, cell: (l) => `${duration(l.silent_ms)} ago` },
        ]} />
      <//>
      <${Hosts} may=${may} />
    </div>`;
}
