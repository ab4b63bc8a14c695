// A VM that does not run any more, or not yet: what is known of it.

import { useMemo, useState } from "../../vendor/preact-hooks.js";
import { part, useAnswer } from "../api.js";
import { Chart, values } from "../charts.js";
import { html } from "../html.js";
import { Act, Card, Failure } from "../ui.js";
import { EventTable } from "./events.js";
import { spanPicker } from "./host.js";
import { PLACES, startDefined } from "./vms.js";

/** Rows of the table of events. */
const MOST_EVENTS = 50;

export function OverTime({ name, theme, first = 3600 }) {
  const [span, setSpan] = useState(first);
  const { value: series, error } = useAnswer(`/v1/vms/${part(name)}/history?seconds=${span}&points=300`, "", 30000);
  const drawn = useMemo(() => {
    if (!series) return null;
    const places = PLACES.map(([label, key, color]) => ({ name: label, color, values: values(series, key) }));
    return [...places, { name: "PSS", color: "ink", line: true, values: values(series, "pss_bytes") }];
  }, [series, theme]);
  return html`<${Card} title="Over time" aside=${spanPicker(span, setSpan, "How far back")} wide>
    <${Failure} error=${error} />
    ${drawn && html`<${Chart} t=${series.t} step=${series.step_s} series=${drawn} stacked label=${`Where the RAM of ${name} is, over time`} />`}
  <//>`;
}

function Definition({ name, may }) {
  const { value: info, error } = useAnswer(`/v1/definitions/${part(name)}`, "", 10000);
  // Most VMs have no definition.
  if (!info) return error && error.status !== 404 ? html`<${Card} title="Definition"><${Failure} error=${error} /><//>` : null;
  const { definition } = info;
  const problem = [info.problem, info.fix].filter(Boolean).join("; ");
  const fact = (label, value) => html`<div><dt>${label}</dt><dd>${value}</dd></div>`;
  return html`<${Card} title="Definition">
    ${problem && html`<p class="failure" role="alert">${problem}</p>`}
    <dl class="facts">
      ${fact("State", info.state)}
      ${definition && fact("Trust domain", definition.vm.domain ?? "none: the VM shares with no other VM")}
      ${definition && fact("RAM", definition.vm.memory)}
      ${definition?.snapshot && fact("Continues from the snapshot", definition.snapshot)}
      ${definition && fact("After a boot of the host", definition.autostart ? `starts, order ${definition.order}` : "does not start")}
    </dl>
    <div class="buttons"><${Act} may=${may && definition && info.state === "off"} what=${startDefined(info)}>Start this VM …<//></div>
  <//>`;
}

function Events({ name }) {
  const { value: events, error } = useAnswer("/v1/events?count=1000", "", 15000);
  const own = (events ?? []).filter((event) => event.vm === name).slice(0, MOST_EVENTS);
  return html`<${Card} title="Events of this VM" wide>
    <${Failure} error=${error} />
    <${EventTable} label="Events of this VM" events=${own} empty="The last 1,000 events have none of this VM." />
  <//>`;
}

export function Ended({ name, may, theme }) {
  return html`
    <p class="empty" role="status">No VM of this name runs. <a href="#/vms">All VMs</a></p>
    <div class="grid">
      <${Definition} name=${name} may=${may} />
      <${Events} name=${name} />
      <${OverTime} name=${name} theme=${theme} first=${86400} />
    </div>`;
}
