// Talking to the daemon.

import { useEffect, useState } from "../vendor/preact-hooks.js";

/** What the daemon said instead of doing it. */
export class Refused extends Error {
  constructor(status, body) {
    super(body.error);
    this.status = status;
    this.hint = body.hint;
  }
}

/** Called when nobody is logged in any more. */
let whenLoggedOut = () => {};
export const onLoggedOut = (call) => (whenLoggedOut = call);

/** The error of a request without a usable answer. A GET or a login can be repeated safely; any other request may have been carried out. */
const lost = (method, path, what) =>
  method === "GET" || path === "/v1/session"
    ? what
    : { error: `${what.error}, so the answer was lost; the action may still be running or be done`, hint: "Look at Events before you repeat it." };

// How far the daemon's clock is ahead of the browser's, in milliseconds, by the last answer.
let ahead_ms = 0;

async function request(method, path, body) {
  let response;
  try {
    response = await fetch(path, {
      method,
      credentials: "same-origin",
      headers: { "x-memfold": "1", ...(method === "GET" ? {} : { "content-type": "application/json" }) },
      // What is JSON already is sent as it is.
      body: method === "GET" ? undefined : typeof body === "string" ? body : JSON.stringify(body ?? {}),
    });
  } catch {
    throw new Refused(0, lost(method, path, { error: "the daemon does not answer", hint: "it may be restarting; VMs go on without it" }));
  }
  const date = Date.parse(response.headers.get("date"));
  if (date) ahead_ms = date - Date.now();
  let answer = null;
  try {
    answer = await response.json();
  } catch {
    throw new Refused(response.status, lost(method, path, { error: `the daemon answered ${response.status} without JSON` }));
  }
  if (response.ok) return answer;
  if (response.status === 401 && path !== "/v1/session") whenLoggedOut();
  throw new Refused(response.status, answer);
}

export const get = (path) => request("GET", path);
export const post = (path, body) => request("POST", path, body);
export const put = (path, body) => request("PUT", path, body);
export const del = (path) => request("DELETE", path);

/** A name as a part of a path. */
export const part = (name) => encodeURIComponent(name);

// The live sample: one stream for the whole page, which ends while nobody sees the page.
const listeners = new Set();
// `arrived`, `taken`: when its figures came and when they were read on the host, by the browser's clock; `late`: the next ones are missing.
const state = { sample: null, connected: false, refused: null, arrived: 0, taken: 0, late: false };
let source = null;
let opened = 0;

function tell() {
  for (const listener of listeners) listener();
}

// Whether samples are wanted: not after a logout.
let live = false;

function open() {
  if (!live || source || document.hidden) return;
  source = new EventSource("/v1/live");
  opened = Date.now();
  let isFirst = true;
  source.onopen = () => (isFirst = true);
  source.addEventListener("sample", (event) => {
    const sample = JSON.parse(event.data);
    // A new stream begins with the last sample, which may be an old one.
    if (sample.ledger.taken_unix_s !== state.sample?.ledger.taken_unix_s) {
      state.arrived = Date.now();
      state.taken = isFirst ? Math.min(sample.ledger.taken_unix_s * 1000 - ahead_ms, state.arrived) : state.arrived;
    }
    isFirst = false;
    state.sample = sample;
    state.late = isLate();
    state.connected = true;
    state.refused = null;
    tell();
  });
  source.onerror = () => {
    state.connected = false;
    tell();
    // The browser tries again by itself after a break, not after a refusal.
    if (source && source.readyState === EventSource.CLOSED) {
      close();
      whyClosed().then((error) => {
        // A daemon that doesn't answer refuses nothing.
        state.refused = error?.status ? error : null;
        tell();
        if (error?.status === 401) whenLoggedOut();
        else setTimeout(open, 3000);
      });
    }
  };
}

/** How long the page waits for a sample, in milliseconds. */
const patience = () => 2 * state.sample.interval_ms + 20_000;
const isLate = () => state.sample !== null && Date.now() - state.arrived > patience();

/** A stream may stand still without an end, for example after the host or this computer slept: another one is opened. */
function watch() {
  if (!live || document.hidden) return;
  const late = isLate();
  if (late && source && Date.now() - opened > patience()) {
    close();
    open();
  }
  if (late === state.late) return;
  state.late = late;
  tell();
}
setInterval(watch, 1000);

/** Why the stream was refused, which an `EventSource` doesn't tell; null: it isn't any more. */
async function whyClosed() {
  const asked = new AbortController();
  try {
    const response = await fetch("/v1/live", { credentials: "same-origin", headers: { "x-memfold": "1" }, signal: asked.signal });
    return response.ok ? null : new Refused(response.status, await response.json());
  } catch (error) {
    return error;
  } finally {
    // One that is let in now is not read here.
    asked.abort();
  }
}

function close() {
  source?.close();
  source = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));

export function beginLive() {
  live = true;
  open();
}

export function endLive() {
  live = false;
  close();
  state.sample = null;
  state.refused = null;
}

/** What an action has changed, shown before the next sample has it. `change(sample)`: the sample as it is now. */
export function changeSample(change) {
  if (!state.sample) return;
  state.sample = change(state.sample);
  tell();
}

/** The newest sample, and whether more come. */
export function useLive() {
  const [, again] = useState(0);
  const seen = state.sample;
  useEffect(() => {
    const listener = () => again((n) => n + 1);
    listeners.add(listener);
    // One that came between the drawing and this moment.
    if (state.sample !== seen) listener();
    return () => listeners.delete(listener);
  }, []);
  return state;
}

/** How long after a failure a first answer is asked for again: this long, then twice as long each time, up to MOST_RETRY_MS. */
const RETRY_MS = 3000;
const MOST_RETRY_MS = 60000;
/** Failures that asking again does not mend: wrong requests, missing rights, missing things, things that this host cannot do. */
const isFinal = (error) => [400, 401, 403, 404, 501].includes(error.status);

/**
 * What a path answers, asked again when `key` changes and every `everyMs`, if given. `at`: when the value was read, in seconds since 1970. After a failure,
 * an older value stays beside the error.
 */
export function useAnswer(path, key = "", everyMs = 0) {
  const [answer, set] = useState({ value: null, error: null, at: null });
  useEffect(() => {
    let over = false;
    let timer = null;
    let wanted = true;
    let retry = RETRY_MS;
    const ask = async () => {
      let again = everyMs;
      try {
        const value = await get(path);
        wanted = false;
        if (!over) set({ value, error: null, at: Date.now() / 1000 });
      } catch (error) {
        if (wanted && !isFinal(error)) {
          again = retry;
          retry = Math.min(2 * retry, MOST_RETRY_MS);
        }
        if (!over) set((old) => ({ ...old, error }));
      }
      if (!over && again) timer = setTimeout(askIfSeen, again);
    };
    const askIfSeen = () => (document.hidden ? (timer = setTimeout(askIfSeen, 1000)) : ask());
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [path, key, everyMs]);
  return answer;
}
