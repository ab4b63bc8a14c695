// Pieces that all pages are made of.

import { useEffect, useRef, useState } from "../vendor/preact-hooks.js";
import { bytes, time } from "./format.js";
import { html } from "./html.js";

/** Names that memfold takes, as a `pattern` (which browsers read with the flag `v`). */
export const NAME = "[A-Za-z0-9][A-Za-z0-9._\\-]*";

/** A field of what starts a VM. */
export const DESPITE_BRAKE = { name: "despite", label: "Also if the brake is on: guests could claim more memory than is available", type: "checkbox" };

/** A figure of the ledger: its text, and its exact value and name for tests and for those who hover. */
export const Bytes = ({ value, figure }) =>
  html`<data value=${value ?? ""} data-figure=${figure} title=${value === null || value === undefined ? "" : `${value.toLocaleString("en")} bytes`}>${bytes(value)}</data>`;

export const Card = ({ title, aside, children, wide, third }) => html`
  <section class=${`card${wide ? " wide" : ""}${third ? " third" : ""}`} aria-label=${title}>
    <header><h2>${title}</h2>${aside && html`<div class="aside">${aside}</div>`}</header>
    ${children}
  </section>`;

export const Stat = ({ label, children, note, tone }) => html`
  <div class=${`stat ${tone ?? ""}`}><span class="label">${label}</span><strong>${children}</strong>${note && html`<span class="note">${note}</span>`}</div>`;

export const Badge = ({ tone, children, title }) => html`<span class=${`badge ${tone ?? ""}`} title=${title}>${children}</span>`;

export function Failure({ error }) {
  if (!error) return null;
  return html`<p class="failure" role="alert"><strong>${error.message}</strong>${error.hint && html`<br /><span>${error.hint}</span>`}</p>`;
}

/** When something was read that is not read all the time. */
export const ReadAt = ({ at }) => at !== null && html`<span class="soft read">read ${time(at)}</span>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
export const Waiting = () => html`<p class="loading" role="status">Loading …</p>`;

/** Parts of a whole as one bar, with a legend that is its table. `parts`: {name, value, color, figure}. */
export function Stack({ parts, label, legend = true }) {
  const whole = parts.reduce((sum, part) => sum + Math.max(0, part.value), 0) || 1;
  const shown = parts.filter((part) => part.value > 0);
  return html`<div class="stack-box">
    <div class="stack" role="img" aria-label=${`${label}: ${shown.map((p) => `${p.name} ${bytes(p.value)}`).join(", ")}`}>
      ${shown.map((p) => html`<span style=${{ flexGrow: p.value / whole, background: `var(--${p.color})` }} title=${`${p.name}: ${bytes(p.value)}`}></span>`)}
    </div>
    ${legend && html`<dl class="legend">${parts.map((p) => html`
      <div><dt><i style=${{ background: `var(--${p.color})` }}></i>${p.name}</dt><dd><${Bytes} value=${p.value} figure=${p.figure} /></dd></div>`)}</dl>`}
  </div>`;
}

/** The values over time as one line; where one is missing, the line goes on to the next. */
export function Sparkline({ values, label, color = "folded" }) {
  const known = values.filter((v) => v !== null);
  if (known.length < 2) return html`<span class="spark" role="img" aria-label=${`${label}: too few samples yet`}></span>`;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const range = high - low || 1;
  const at = (v, i) => `${((i * 96) / (values.length - 1) + 2).toFixed(1)},${(20 - ((v - low) / range) * 16).toFixed(1)}`;
  const points = values.map((v, i) => v !== null && at(v, i)).filter(Boolean);
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${`${label}: from ${bytes(known[0])} to ${bytes(known.at(-1))}`}>
    <polyline points=${points.join(" ")} style=${{ stroke: `var(--${color})` }} /></svg>`;
}

/** A table whose columns sort it. Columns: {key, name, value(row), cell(row), number, sort: false}. */
export function Table({ label, columns, rows, rowKey, first, empty = "Nothing here." }) {
  const [order, setOrder] = useState(first ?? { key: null, down: false });
  const by = columns.find((column) => column.key === order.key);
  const sorted = by
    ? [...rows].sort((a, b) => {
        const [x, y] = [by.value(a), by.value(b)];
        const sign = order.down ? -1 : 1;
        return (typeof x === "number" && typeof y === "number" ? x - y : String(x ?? "").localeCompare(String(y ?? ""))) * sign;
      })
    : rows;
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${`${label}, a table`}><table>
    <caption class="hidden">${label}</caption>
    <thead><tr>${columns.map((c) => html`
      <th scope="col" class=${c.number ? "number" : ""} aria-sort=${order.key === c.key ? (order.down ? "descending" : "ascending") : undefined}>
        ${c.value && c.sort !== false
          ? html`<button class="sort" onClick=${() => setOrder({ key: c.key, down: order.key === c.key ? !order.down : Boolean(c.number) })}>
              ${c.name}<span aria-hidden="true">${order.key === c.key ? (order.down ? " ↓" : " ↑") : ""}</span></button>`
          : c.name || html`<span class="hidden">Actions</span>`}
      </th>`)}</tr></thead>
    <tbody>${sorted.map((row) => html`<tr key=${rowKey(row)}>${columns.map((c, i) => {
      const cell = c.cell ? c.cell(row) : c.value(row);
      return i === 0 ? html`<th scope="row">${cell}</th>` : html`<td class=${c.number ? "number" : c.class ?? ""}>${cell}</td>`;
    })}</tr>`)}</tbody>
  </table></div>`;
}

// What is said beside the page until somebody closes it.
let notices = [];
let drawNotices = () => {};

/** Says something beside the page. `tone`: "done" or "failure". */
export function notify(tone, title, text = "") {
  notices = [...notices, { tone, title, text }];
  drawNotices();
}

export function Notices() {
  const [, again] = useState(0);
  drawNotices = () => again((n) => n + 1);
  const close = (notice) => {
    notices = notices.filter((other) => other !== notice);
    drawNotices();
  };
  return html`<div class="notices" role="status">${notices.map((notice) => html`
    <div class=${`notice ${notice.tone}`}><div><strong>${notice.title}</strong>${notice.text && html`<br />${notice.text}`}</div>
      <button class="small" onClick=${() => close(notice)}>Close</button></div>`)}</div>`;
}

/** What a field holds before anybody has touched it: of a choice, what the browser shows as chosen. */
function initial({ type, value, options }) {
  const untouched = { checkbox: () => false, select: () => options[0]?.value ?? options[0] };
  return value ?? untouched[type]?.() ?? "";
}

// One dialog for the whole page: what is to be done, with which values, and how it went.
let openDialog = () => {};

/**
 * Asks before something is done. `fields`: {name, label, type: text|number|select|checkbox|textarea, value, options, hint}.
 * `act(values)` does it; what it returns is shown, what it throws too, and the dialog stays. It may be closed meanwhile: a notice says how it went.
 */
export const ask = (what) => openDialog(what);

export function Dialog() {
  const box = useRef(null);
  const [what, set] = useState(null);
  const [values, setValues] = useState({});
  const [state, setState] = useState({ busy: false, error: null, done: null });
  // What the dialog shows now; not what it showed when an action began.
  const shown = useRef(null);
  openDialog = (asked) => {
    // A new object, so that the effect below runs also if the same is asked twice.
    shown.current = { ...asked };
    set(shown.current);
    setValues(Object.fromEntries((asked.fields ?? []).map((f) => [f.name, initial(f)])));
    setState({ busy: false, error: null, done: null });
  };
  useEffect(() => {
    if (what && !box.current.open) box.current.showModal();
  }, [what]);
  // Not in the dialog's close event: that comes later, when somebody may have asked the next question already, which it would take away.
  const close = () => {
    box.current.close();
    shown.current = null;
    set(null);
  };
  const cancel = (event) => {
    event.preventDefault();
    close();
  };
  const submit = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null, done: null });
    const title = what.title.replace(/\?$/, "");
    try {
      const done = await what.act(values);
      if (shown.current !== what) notify("done", title, typeof done === "string" ? done : "Done.");
      else if (typeof done === "string") setState({ busy: false, error: null, done });
      else close();
    } catch (error) {
      if (shown.current !== what) notify("failure", title, [error.message, error.hint].filter(Boolean).join("\n"));
      else setState({ busy: false, error, done: null });
    }
  };
  const change = (field, event) => {
    const value = field.type === "checkbox" ? event.target.checked : event.target.value;
    setValues((old) => ({ ...old, [field.name]: value }));
  };
  return html`<dialog ref=${box} aria-labelledby="dialog-title" onCancel=${cancel}>
    ${what && html`<form onSubmit=${submit}>
      <h2 id="dialog-title">${what.title}</h2>
      ${what.text && html`<p>${what.text}</p>`}
      ${state.done === null && (what.fields ?? []).map((f) => html`<${Field} field=${f} value=${values[f.name]} onChange=${(e) => change(f, e)} />`)}
      <${Failure} error=${state.error} />
      ${state.done !== null && html`<p class="done" role="status">${state.done}</p>`}
      ${state.busy && html`<p class="note" role="status">If you close this, a notice will say how it went.</p>`}
      <div class="buttons">
        ${state.done !== null
          ? html`<button type="button" class="primary" onClick=${close}>Close</button>`
          : html`<button type="button" onClick=${close}>${state.busy ? "Close" : "Cancel"}</button>
              <button type="submit" class=${what.danger ? "danger" : "primary"} disabled=${state.busy}>${state.busy ? "Working …" : what.action}</button>`}
      </div>
    </form>`}
  </dialog>`;
}

export function Field({ field, value, onChange }) {
  const id = `field-${field.name}`;
  const hint = field.hint && html`<small id=${`${id}-hint`}>${field.hint}</small>`;
  const described = field.hint ? `${id}-hint` : undefined;
  if (field.type === "checkbox") {
    return html`<div class="field check"><input id=${id} type="checkbox" checked=${value} onChange=${onChange} aria-describedby=${described} />
      <label for=${id}>${field.label}</label>${hint}</div>`;
  }
  const control =
    field.type === "select"
      ? html`<select id=${id} value=${value} onChange=${onChange} aria-describedby=${described}>${field.options.map((o) => html`<option value=${o.value ?? o}>${o.label ?? o}</option>`)}</select>`
      : field.type === "textarea"
      ? html`<textarea id=${id} rows="4" onInput=${onChange} required=${field.required} spellcheck="false" aria-describedby=${described}>${value}</textarea>`
      : html`<input id=${id} type=${field.type ?? "text"} value=${value} onInput=${onChange} required=${field.required} min=${field.min} max=${field.max}
          step=${field.step ?? (field.type === "number" ? "any" : undefined)} pattern=${field.pattern} autocomplete="off" spellcheck="false" aria-describedby=${described} />`;
  return html`<div class="field"><label for=${id}>${field.label}</label>${control}${hint}</div>`;
}

/** A button for something that changes something: there only for those who may. */
export const Act = ({ may, what, children, danger, small }) =>
  may
    ? html`<button class=${`${danger ? "danger-quiet" : ""}${small ? " small" : ""}`} onClick=${() => ask(typeof what === "function" ? what() : what)}>${children}</button>`
    : null;
