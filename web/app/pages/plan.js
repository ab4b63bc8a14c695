// How many VMs fit, and which VMs of several hosts belong together.

import { useEffect, useState } from "../../vendor/preact-hooks.js";
import { get, post } from "../api.js";
import { bytes, parseBytes, plural } from "../format.js";
import { html } from "../html.js";
import { Badge, Bytes, Card, Failure, Field, Stack, Stat, Table } from "../ui.js";

const error95 = (value) => (value === null ? "error unknown: measured once" : `± ${bytes(value)}`);

/** The kinds that the text names: what is before each "=". */
const named = (text) => text.split(/\s+/).filter(Boolean).map((kind) => kind.split("=")[0]);

/** What the plan's limits leave, in the parts of a bar. Of the memory that is planned for, in this order. */
function parts(plan) {
  const cover = (plan.predicted_owed_bytes * plan.cover_percent) / 100;
  const now = Math.min(plan.used_bytes, plan.predicted_bytes);
  const left = plan.memory_bytes - plan.predicted_bytes - cover - plan.reserve_bytes;
  return [
    { name: "Used by what runs now", color: "others", value: now },
    { name: "Added by the VMs planned", color: "private", value: plan.predicted_bytes - now },
    { name: "Needed for what is owed", color: "unfolded", value: cover },
    { name: "Reserve", color: "kernel", value: plan.reserve_bytes },
    { name: "Left", color: "free", value: Math.max(0, left) },
  ];
}

/** Which limit it is that they don't fit. */
function limit(plan) {
  const room = plan.memory_bytes - plan.reserve_bytes;
  if (plan.fits) return `${bytes(Math.max(0, room - plan.predicted_bytes))} would be left beside the reserve`;
  return plan.predicted_bytes + (plan.plus_minus_bytes ?? 0) > room ? "too little memory" : "too little for their debt";
}

function Planned({ plan }) {
  const size = (key, name) => ({
    key, name, number: true, value: (kind) => kind[key], cell: (kind) => html`<${Bytes} value=${kind[key]} figure=${`plan.${kind.name}.${key}`} />`,
  });
  const count = (key, name) => ({
    key, name, number: true, value: (kind) => kind[key], cell: (kind) => html`<data value=${kind[key]} data-count=${`plan.${kind.name}.${key}`}>${kind[key].toLocaleString("en")}</data>`,
  });
  return html`
    <div class="stats">
      <${Stat} label=${plan.kinds.map((kind) => `${kind.wanted} of ${kind.name}`).join(", ")} tone=${plan.fits ? "main" : "loss"} note=${limit(plan)}><span data-fits=${plan.fits}>${plan.fits ? "fit" : "do not fit"}</span><//>
      <${Stat} label="Used then" note=${error95(plan.plus_minus_bytes) + (plan.ahead_hours ? `; ${bytes(plan.grown_bytes)} of it grown in ${plan.ahead_hours} h` : "")}><${Bytes} value=${plan.predicted_bytes} figure="plan.predicted_bytes" /><//>
      <${Stat} label="Used now" note=${`of ${bytes(plan.memory_bytes)}`}><${Bytes} value=${plan.used_bytes} figure="plan.used_bytes" /><//>
      <${Stat} label="Owed then" note=${`${plan.cover_percent} % of it must be available`}><${Bytes} value=${plan.predicted_owed_bytes} figure="plan.predicted_owed_bytes" /><//>
    </div>
    <${Card} title="The memory planned for" wide><${Stack} parts=${parts(plan)} label="Memory with the VMs planned" /><//>
    <${Card} title="By kind" wide>
      <${Table} label="By kind" rows=${plan.kinds} rowKey=${(kind) => kind.name} columns=${[
        { key: "name", name: "Kind", value: (kind) => kind.name, cell: (kind) => html`<span title=${kind.vms.join(", ")}>${kind.name}</span>` },
        { key: "measured", name: "Measured", number: true, value: (kind) => kind.vms.length },
        { key: "own_bytes", name: "One more takes", number: true, value: (kind) => kind.own_bytes, cell: (kind) => html`<${Bytes} value=${kind.own_bytes} figure=${`plan.${kind.name}.own_bytes`} /> <span class="soft">± ${kind.plus_minus_bytes === null ? "?" : bytes(kind.plus_minus_bytes)}</span>` },
        size("page_cache_bytes", "Cache of it"),
        size("shared_bytes", "Shares"),
        size("owed_bytes", "Owes"),
        size("most_bytes", "At most"),
        { key: "grows", name: "Grows an hour", number: true, value: (kind) => kind.grows_bytes_per_hour ?? 0, cell: (kind) => (kind.grows_bytes_per_hour === null ? "?" : bytes(kind.grows_bytes_per_hour)) },
        count("more_fit", "More fit"),
        count("more_fit_by_memory", "By memory alone"),
      ]} />
      <p class="note">One more VM is assumed to be like those that run and to share what they share. At most: if that VM used all of its RAM and shared nothing.</p>
    <//>`;
}

function Fit() {
  const [values, setValues] = useState({ kinds: "", memory: "", ahead: "" });
  const [wanted, setWanted] = useState({});
  const [state, setState] = useState({ busy: true, error: null, plan: null });
  const names = values.kinds.trim() ? named(values.kinds) : (state.plan?.kinds ?? []).map((kind) => kind.name);
  const ask = async () => {
    setState((old) => ({ ...old, busy: true, error: null }));
    const query = new URLSearchParams(values.kinds.split(/\s+/).filter(Boolean).map((kind) => ["kind", kind]));
    for (const name of names) if (wanted[name]) query.append("vms", `${name}=${wanted[name]}`);
    if (values.memory.trim()) query.append("memory", values.memory.trim());
    if (values.ahead.trim()) query.append("ahead_hours", values.ahead.trim());
    try {
      const plan = await get(`/v1/plan?${query}`);
      setState({ busy: false, error: null, plan });
    } catch (error) {
      setState((old) => ({ busy: false, error, plan: old.plan }));
    }
  };
  useEffect(() => void ask(), []);
  const change = (name) => (event) => setValues((old) => ({ ...old, [name]: event.target.value }));
  const count = (name) => {
    const runs = state.plan?.kinds.find((kind) => kind.name === name)?.vms.length;
    return { name: `wanted-${name}`, label: `VMs of ${name} in all`, type: "number", min: 0, max: 4294967295, step: 1, hint: runs === undefined ? undefined : `${plural(runs, "VM")} measured` };
  };
  return html`
    <${Card} title="How many VMs fit" wide>
      <p class="note">Computed from the memory of running VMs. Nothing is started or changed.</p>
      <form class="inline" onSubmit=${(event) => (event.preventDefault(), ask())}>
        ${names.map((name) => html`<${Field} key=${name} field=${count(name)} value=${wanted[name] ?? state.plan?.kinds.find((kind) => kind.name === name)?.wanted ?? ""}
          onChange=${(event) => setWanted((old) => ({ ...old, [name]: event.target.value }))} />`)}
        <${Field} field=${{ name: "kinds", label: "Kinds (none: each trust domain)", hint: "web=web1,web2 db=db1" }} value=${values.kinds} onChange=${change("kinds")} />
        <${Field} field=${{ name: "memory", label: "Memory (none: this host's)", hint: "128G" }} value=${values.memory} onChange=${change("memory")} />
        <${Field} field=${{ name: "ahead", label: "Hours ahead", hint: "VMs grow as they have lately" }} value=${values.ahead} onChange=${change("ahead")} />
        <div class="buttons"><button class="primary" type="submit" disabled=${state.busy}>${state.busy ? "Measuring" : "Plan"}</button></div>
      </form>
      <${Failure} error=${state.error} />
    <//>
    ${state.plan && html`<${Planned} plan=${state.plan} />`}`;
}

function Proposed({ proposal }) {
  const less = proposal.now_bytes - proposal.then_bytes;
  return html`
    <div class="stats">
      <${Stat} label="All hosts together take less" tone="main" note=${`± ${bytes(proposal.plus_minus_bytes)}, if everything that VMs of a trust domain have in common is shared`}><${Bytes} value=${less} figure="place.less" /><//>
      <${Stat} label="Now"><${Bytes} value=${proposal.now_bytes} figure="place.now_bytes" /><//>
      <${Stat} label="Then"><${Bytes} value=${proposal.then_bytes} figure="place.then_bytes" /><//>
    </div>
    <h3>Moves, in this order</h3>
    ${proposal.moves.length
      ? html`<ol class="moves">${proposal.moves.map((move) => html`<li>${move.vm} from ${move.from} to ${move.to}: saves ${bytes(move.saves_bytes)}</li>`)}</ol>`
      : html`<p class="empty">${proposal.complete ? "No move saves enough: leave all VMs where they are." : "The search stopped after 60 s and found no move that saves enough."}</p>`}
    ${proposal.moves.length > 0 && !proposal.complete && html`<p>The search stopped after 60 s. Carry out these moves, then ask for another proposal.</p>`}
    <${Table} label="Hosts before and then" rows=${proposal.hosts} rowKey=${(host) => host.host} columns=${[
      { key: "host", name: "Host", value: (host) => host.host },
      { key: "limit", name: "May take", number: true, value: (host) => host.limit_bytes, cell: (host) => bytes(host.limit_bytes) },
      { key: "now", name: "Now", number: true, value: (host) => host.now_bytes, cell: (host) => bytes(host.now_bytes) },
      { key: "then", name: "Then", number: true, value: (host) => host.then_bytes, cell: (host) => html`${bytes(host.then_bytes)} ${host.then_bytes > host.limit_bytes && html`<${Badge} tone="bad">too much<//>`}` },
      { key: "vms", name: "VMs then", class: "prose", cell: (host) => host.vms.join(", ") },
    ]} />`;
}

function Place({ may }) {
  const [files, setFiles] = useState([]);
  const [values, setValues] = useState({ least: "64M", leave: 10 });
  const [state, setState] = useState({ busy: false, error: null, proposal: null });
  const submit = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null, proposal: null });
    try {
      const least = parseBytes(values.least);
      if (least === null) throw new Error(`'${values.least}' is not a size; write 64M or 1G`);
      const texts = await Promise.all(files.map((file) => file.text()));
      // As they are: their numbers have more digits than a script's numbers.
      const body = `{"fingerprints":[${texts.join(",")}],"least_bytes":${least},"leave_percent":${Number(values.leave)}}`;
      const proposal = await post("/v1/plan/place", body);
      setState({ busy: false, error: null, proposal });
    } catch (error) {
      setState({ busy: false, error, proposal: null });
    }
  };
  const change = (name) => (event) => setValues((old) => ({ ...old, [name]: event.target.value }));
  return html`<${Card} title="Which VMs to place together" wide>
    <p class="note">From fingerprints of two hosts or more: <code>memfold estimate --fingerprint FILE --key KEY</code> on each, with one key. Nothing is moved.</p>
    ${may
      ? html`<form class="inline" onSubmit=${submit}>
          <div class="field"><label for="fingerprints">Fingerprints</label>
            <input id="fingerprints" type="file" multiple required accept=".json,application/json" onChange=${(event) => setFiles([...event.target.files])} /></div>
          <${Field} field=${{ name: "least", label: "A move has to save (64M, 1G)", required: true }} value=${values.least} onChange=${change("least")} />
          <${Field} field=${{ name: "leave", label: "Leave of each host, percent", type: "number", min: 0, max: 99, required: true }} value=${values.leave} onChange=${change("leave")} />
          <div class="buttons"><button class="primary" type="submit" disabled=${state.busy}>${state.busy ? "Comparing" : "Propose"}</button></div>
        </form>`
      : html`<p class="empty">An estimate takes CPU, so it needs the role to operate.</p>`}
    <${Failure} error=${state.error} />
    ${state.proposal && html`<${Proposed} proposal=${state.proposal} />`}
  <//>`;
}

export const Plan = ({ may }) => html`<${Fit} /><${Place} may=${may} />`;
