// The page's frame: who one is, which page is shown, and the pages' links.

import { render } from "../vendor/preact.js";
import { useEffect, useState } from "../vendor/preact-hooks.js";
import { beginLive, del, endLive, get, onLoggedOut, post, useLive } from "./api.js";
import { duration, time } from "./format.js";
import { html } from "./html.js";
import { Dialog, Failure, Notices, notify, Waiting } from "./ui.js";
import { Doctor } from "./pages/doctor.js";
import { Estimate } from "./pages/estimate.js";
import { Events } from "./pages/events.js";
import { Host } from "./pages/host.js";
import { Leases } from "./pages/leases.js";
import { Plan } from "./pages/plan.js";
import { Rightsize } from "./pages/rightsize.js";
import { Segments } from "./pages/segments.js";
import { Sharing } from "./pages/sharing.js";
import { Snapshots } from "./pages/snapshots.js";
import { Vm } from "./pages/vm.js";
import { Vms } from "./pages/vms.js";

const PAGES = [
  ["host", "Host", Host],
  ["vms", "VMs", Vms],
  ["rightsize", "Right-sizing", Rightsize],
  ["sharing", "Sharing", Sharing],
  ["snapshots", "Snapshots", Snapshots],
  ["segments", "Segments", Segments],
  ["leases", "Leases", Leases],
  ["estimate", "Estimate", Estimate],
  ["plan", "Plan", Plan],
  ["doctor", "Doctor", Doctor],
  ["events", "Events", Events],
];

// What was typed by hand may not be encoded right.
const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

function place() {
  const [page, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { page: page || "host", name: rest.length ? decoded(rest.join("/")) : null };
}

function ThemeSwitch() {
  const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const [isDark, set] = useState(dark());
  useEffect(() => {
    const changed = () => set(dark());
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", changed);
    return () => system.removeEventListener("change", changed);
  }, []);
  const change = () => {
    const theme = isDark ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("memfold-theme", theme);
    } catch {
      // Then it is so until the page is loaded again.
    }
    set(!isDark);
    dispatchEvent(new Event("memfold-theme"));
  };
  return html`<button class="quiet" onClick=${change} aria-pressed=${isDark}>${isDark ? "Light" : "Dark"} theme</button>`;
}

function LiveState() {
  const live = useLive();
  const [, again] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => again((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  if (!live.sample) return html`<p class=${`live ${live.refused ? "off" : ""}`} role="status"><i></i>${live.refused ? "not live" : "connecting …"}</p>`;
  const at = time(live.sample.ledger.taken_unix_s);
  if (!live.connected) return html`<p class="live off"><i></i>no contact since ${at}</p>`;
  if (live.late) return html`<p class="live off"><i></i>no new figures since ${at}</p>`;
  // Where figures come seldom, one wants to know how old they are.
  const age_s = Math.round((Date.now() - live.taken) / 1000);
  const words = age_s < 60 ? `${age_s} s` : duration(age_s * 1000);
  const age = live.sample.interval_ms > 30_000 ? html`, <span class="together">${words} old</span>` : "";
  return html`<p class="live on"><i></i>as of ${at}${age}</p>`;
}

/** Why nothing on the page is live: the daemon says so. */
function NotLive() {
  const { refused } = useLive();
  return html`<${Failure} error=${refused} />`;
}

const SESSION_ENDED = "The session has ended: the daemon was restarted, or nothing was asked for 1 h, or the login was 12 h ago.";

/** `why`: why nobody is logged in, if that is not the normal case. */
function Login({ onDone, why }) {
  const [secret, set] = useState("");
  const [error, setError] = useState(null);
  const enter = async (event) => {
    event.preventDefault();
    try {
      await post("/v1/session", { secret: secret.trim() });
      onDone();
    } catch (failed) {
      setError(failed);
    }
  };
  return html`<main class="login"><div class="card">
    <h1><img src="/favicon.svg" alt="" width="28" height="28" /> memfold</h1>
    <${Failure} error=${why} />
    <p>Run <code>memfold dashboard</code> on the host and open the address that it prints. Or enter a token.</p>
    <form onSubmit=${enter}>
      <div class="field"><label for="secret">Token or code</label>
        <input id="secret" type="password" value=${secret} onInput=${(e) => set(e.target.value)} required autocomplete="off" /></div>
      <${Failure} error=${error} />
      <div class="buttons"><button class="primary" type="submit">Log in</button></div>
    </form>
  </div></main>`;
}

function App() {
  const [session, setSession] = useState(undefined);
  const [at, setAt] = useState(place());
  const [theme, setTheme] = useState(0);
  const [error, setError] = useState(null);

  const [why, setWhy] = useState(null);

  // `refused`: the failure of a login by the address, if there was one.
  const look = async (refused = null) => {
    setWhy(refused);
    try {
      setSession(await get("/v1/session"));
      setError(null);
      if (refused) notify("failure", `The login code in this address was refused. You are still logged in with your earlier session. ${refused.message}`, refused.hint);
      beginLive();
    } catch (failed) {
      if (failed.status === 401) setSession(null);
      else setError(failed);
    }
  };
  useEffect(() => {
    onLoggedOut(() => {
      endLive();
      setWhy(new Error(SESSION_ENDED));
      setSession(null);
    });
    const begin = async () => {
      let refused = null;
      const code = /^#login=([0-9a-f]{64})$/.exec(location.hash);
      if (code) {
        // Neither in the address bar nor in the history of the browser.
        history.replaceState(null, "", "/");
        await post("/v1/session", { secret: code[1] }).catch((failed) => (refused = failed));
        setAt(place());
      }
      await look(refused);
    };
    begin();
    const moved = () => {
      // An address with a code, in a tab where the page is open already.
      if (/^#login=/.test(location.hash)) return void begin();
      setAt(place());
      scrollTo(0, 0);
      // Whoever reads by ear hears the new page's title.
      document.querySelector("h1")?.focus();
    };
    const painted = () => setTheme((n) => n + 1);
    addEventListener("hashchange", moved);
    addEventListener("memfold-theme", painted);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", painted);
    return () => removeEventListener("hashchange", moved);
  }, []);

  const [, name, Page] = PAGES.find(([key]) => key === at.page) ?? PAGES[0];
  useEffect(() => {
    document.title = `${at.name ?? name} – memfold`;
  }, [at.page, at.name]);
  if (error) return html`<main class="login"><div class="card"><h1>memfold</h1><${Failure} error=${error} /><button onClick=${() => look()}>Try again</button></div></main>`;
  if (session === undefined) return html`<${Waiting} />`;
  if (session === null) return html`<${Login} onDone=${() => look()} why=${why} />`;

  const may = session.role === "operate";
  const leave = async () => {
    await del("/v1/session").catch(() => {});
    endLive();
    setWhy(null);
    setSession(null);
  };
  const body = at.page === "vms" && at.name ? html`<${Vm} key=${at.name} name=${at.name} may=${may} theme=${theme} />` : html`<${Page} may=${may} theme=${theme} />`;
  return html`
    <a class="skip" href="#main" onClick=${(e) => (e.preventDefault(), document.querySelector("h1")?.focus())}>Skip to the content</a>
    <div class="frame">
      <header class="side">
        <a class="brand" href="#/host"><img src="/favicon.svg" alt="" width="24" height="24" />memfold</a>
        <nav aria-label="Pages"><ul>${PAGES.map(([key, label]) => html`
          <li><a href=${`#/${key}`} aria-current=${key === at.page ? "page" : undefined}>${label}</a></li>`)}</ul></nav>
        <div class="foot">
          <${LiveState} />
          <p class="who">${may ? "may operate" : "may read"}</p>
          <${ThemeSwitch} />
          <button class="quiet" onClick=${leave}>Log out</button>
        </div>
      </header>
      <main id="main"><h1 tabindex="-1">${at.page === "vms" && at.name ? html`<a href="#/vms">VMs</a> / ${at.name}` : name}</h1><${NotLive} />${body}</main>
    </div>
    <${Dialog} />
    <${Notices} />`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
