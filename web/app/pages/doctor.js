// What works on this host, and what would make the rest work.

import { useState } from "../../vendor/preact-hooks.js";
import { useAnswer } from "../api.js";
import { html } from "../html.js";
import { Badge, Card, Failure, ReadAt, Waiting } from "../ui.js";

const TONES = { ok: "good", warn: "warn", fail: "bad" };

export function Doctor() {
  const [again, setAgain] = useState(0);
  const { value: report, error, at } = useAnswer("/v1/doctor", again);
  if (!report) return error ? html`<${Failure} error=${error} />` : html`<${Waiting} />`;
  const verdict = report.can_run ? html`<${Badge} tone="good">VMs can run and be folded here<//>` : html`<${Badge} tone="bad">VMs cannot run and be folded here<//>`;
  return html`<${Card} title="This host" aside=${html`${verdict} <${ReadAt} at=${at} /> <button class="small" onClick=${() => setAgain((n) => n + 1)}>Check again</button>`} wide>
    <${Failure} error=${error} />
    <ul class="checks">${report.checks.map((check) => html`<li>
      <${Badge} tone=${TONES[check.status]}>${check.status}<//>
      <div><strong>${check.name}</strong><p>${check.meaning}</p>${check.fix && html`<p class="fix"><code>${check.fix}</code></p>`}</div>
    </li>`)}</ul>
    <p class="note">Checks are up to a minute old, the debt is current. <code>memfold doctor --self-test</code> proves it, on memory of its own and on two small guests.</p>
  <//>`;
}
