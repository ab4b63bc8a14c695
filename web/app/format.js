// Figures in words, exactly as the command line prints them (ByteSize in memfold-units).

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** With so many digits behind the point; halves go to the even neighbour, as in Rust, where `toFixed` takes the larger one. */
function rounded(value, digits) {
  const scaled = value * 10 ** digits;
  const below = Math.floor(scaled);
  const up = scaled - below > 0.5 || (scaled - below === 0.5 && below % 2 === 1);
  return ((below + (up ? 1 : 0)) / 10 ** digits).toFixed(digits);
}

/** Three significant digits with a binary unit; negative ones with their sign. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const sign = value < 0 ? "-" : "";
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 1000 && unit + 1 < UNITS.length) {
    size /= 1024;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return `${sign}${rounded(size, digits)} ${UNITS[unit]}`;
}

export const percent = (value, digits = 1) => (Number.isFinite(value) ? `${value.toFixed(digits)} %` : "–");

/** "1 VM", "2 VMs". */
export const plural = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** A length of time in the largest units that say enough. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m} min ${Math.floor(s % 60)} s`;
  const h = Math.floor(m / 60);
  return h < 48 ? `${h} h ${m % 60} min` : `${Math.floor(h / 24)} d ${h % 24} h`;
}

const two = (n) => String(n).padStart(2, "0");

/** Local time; with the date if it isn't today's. */
export function time(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  if (at.toDateString() === new Date().toDateString()) return clock;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock}`;
}

/** For an axis: as short as the span of `seconds` lets it be. */
export function tick(unixSeconds, seconds) {
  const at = new Date(unixSeconds * 1000);
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}`;
  if (seconds <= 900) return `${clock}:${two(at.getSeconds())}`;
  return seconds <= 2 * 86400 ? clock : `${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

/** "512M", "2G" as the command line takes them; null: no size. */
export function parseBytes(text) {
  const match = /^\s*(\d+)\s*([KMGT]?)(?:I?B)?\s*$/i.exec(text);
  if (!match) return null;
  return Number(match[1]) * 1024 ** " KMGT".indexOf(match[2].toUpperCase() || " ");
}

/** So many bytes as `parseBytes` reads them, to the byte. */
export function sizeText(value) {
  let [size, unit] = [value, 0];
  while (size > 0 && size % 1024 === 0 && unit < 4) [size, unit] = [size / 1024, unit + 1];
  return `${size}${["", "K", "M", "G", "T"][unit]}`;
}
