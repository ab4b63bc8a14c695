// Lines and stacks over time, by uPlot; each with the same figures as a table.

import { useEffect, useRef } from "../vendor/preact-hooks.js";
import { bytes, tick, time } from "./format.js";
import { html } from "./html.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const translucent = (hex, alpha) => `color-mix(in srgb, ${hex} ${alpha}%, transparent)`;

/** Canvas knows no color-mix in older browsers: from "#rrggbb". */
function withAlpha(hex, alpha) {
  const match = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(hex);
  if (!match) return translucent(hex, alpha * 100);
  const [r, g, b] = match.slice(1).map((part) => parseInt(part, 16));
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

/** Round steps of an axis: binary for bytes. */
const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** Lines differ by more than their colors: solid, dashed, dotted. */
const DASHES = [[], [9, 5], [2, 3]];
const BORDERS = ["solid", "dashed", "dotted"];

/** Rows of a table of a chart: not more than a person reads. */
const TABLE_ROWS = 24;

/** Points that are further apart than this and three steps have nothing measured between them: a host with many processes has a sample each 10 minutes. */
const LONGEST_STEP_S = 1300;

/** The same points with one more, at which nothing is known, wherever nothing was measured for long. `step`: seconds of a point. */
export function withGaps(t, step, all) {
  const longest = Math.max(3 * step, LONGEST_STEP_S);
  const times = [];
  const from = [];
  t.forEach((at, i) => {
    if (i > 0 && at - t[i - 1] > longest) {
      times.push((at + t[i - 1]) / 2);
      from.push(null);
    }
    times.push(at);
    from.push(i);
  });
  return { t: times, all: all.map((values) => from.map((i) => (i === null ? null : values[i] ?? null))) };
}

/** Each part on the sum of those before it; nothing where no part is known. */
export function stackSums(t, parts) {
  const isKnown = t.map((_, i) => parts.some((values) => values[i] !== null));
  let below = t.map(() => 0);
  return parts.map((values) => {
    below = below.map((sum, i) => sum + Math.max(0, values[i] ?? 0));
    return below.map((sum, i) => (isKnown[i] ? sum : null));
  });
}

/**
 * `t`: seconds; `step`: seconds of a point; `series`: {name, values, color, line: not a part of the stack}; `stacked`: parts lie on each other.
 */
export function Chart({ t, step = 0, series, stacked, format = bytes, label, height = 220 }) {
  const box = useRef(null);
  const known = t.length > 1;
  const theme = document.documentElement.dataset.theme ?? "";
  useEffect(() => {
    if (!known) return undefined;
    const gapped = withGaps(t, step, series.map((s) => s.values));
    const told = series.map((s, i) => ({ ...s, values: gapped.all[i] }));
    const parts = told.filter((s) => stacked && !s.line);
    const lines = told.filter((s) => !stacked || s.line);
    const sums = stackSums(gapped.t, parts.map((part) => part.values));
    // The highest part is drawn first.
    const drawn = [...parts.map((part, i) => ({ ...part, drawn: sums[i], fill: true })).reverse(), ...lines.map((line, i) => ({ ...line, drawn: line.values, dash: DASHES[i % DASHES.length] }))];
    const axis = { stroke: color("ink-soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1 }, font: "11px system-ui, sans-serif" };
    const options = {
      width: box.current.clientWidth,
      height,
      legend: { show: false },
      cursor: { y: false, points: { show: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.05 : 1] } },
      axes: [
        { ...axis, space: 80, values: (_, ticks) => ticks.map((at) => tick(at, t.at(-1) - t[0])) },
        { ...axis, size: 76, ...(format === bytes ? { incrs: BINARY } : {}), values: (_, ticks) => ticks.map((value) => format(value)) },
      ],
      series: [{}, ...drawn.map((s) => ({
        label: s.name,
        stroke: color(s.color),
        width: s.fill ? 1 : 2,
        dash: s.dash,
        fill: s.fill ? withAlpha(color(s.color), 0.85) : undefined,
        points: { show: false },
      }))],
      hooks: {
        setCursor: [(plot) => {
          const at = plot.cursor.idx;
          const shown = at === null || at === undefined ? "" : `${time(gapped.t[at])}   ${told.map((s) => `${s.name} ${format(s.values[at])}`).join("   ")}`;
          box.current.nextElementSibling.textContent = shown;
        }],
      },
    };
    const plot = new window.uPlot(options, [gapped.t, ...drawn.map((s) => s.drawn)], box.current);
    const resize = new ResizeObserver(() => box.current && plot.setSize({ width: box.current.clientWidth, height }));
    resize.observe(box.current);
    return () => {
      resize.disconnect();
      plot.destroy();
    };
  }, [t, step, series, theme, height]);
  if (!known) return html`<p class="empty">Too few samples yet: one is taken every half minute, or at least every 10 minutes on a host with many processes.</p>`;
  const lines = series.filter((s) => !stacked || s.line);
  const key = (s) => (lines.includes(s) ? { borderTop: `3px ${BORDERS[lines.indexOf(s) % BORDERS.length]} var(--${s.color})` } : { background: `var(--${s.color})` });
  const every = Math.max(1, Math.ceil(t.length / TABLE_ROWS));
  const rows = t.map((at, i) => ({ at, i })).filter(({ i }) => (t.length - 1 - i) % every === 0);
  return html`<figure class="chart">
    <div class="plot" ref=${box} role="img" aria-label=${`${label}; the table below has the figures`}></div>
    <p class="cursor" aria-hidden="true"></p>
    <figcaption class="key">${series.map((s) => html`<span><i class=${lines.includes(s) ? "line" : ""} style=${key(s)}></i>${s.name}</span>`)}</figcaption>
    <details><summary>As a table</summary>
      <div class="table-box" tabindex="0" role="region" aria-label=${`${label}, as a table`}><table>
        <caption class="hidden">${label}</caption>
        <thead><tr><th scope="col">Time</th>${series.map((s) => html`<th scope="col" class="number">${s.name}</th>`)}</tr></thead>
        <tbody>${rows.map(({ at, i }) => html`<tr><th scope="row">${time(at)}</th>${series.map((s) => html`<td class="number">${format(s.values[i])}</td>`)}</tr>`)}</tbody>
      </table></div>
    </details>
  </figure>`;
}

/** One figure of a series by name. */
export const values = (series, name) => series.values[series.names.indexOf(name)] ?? [];
