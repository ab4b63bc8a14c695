// Tests of single pages in a real Chromium, with a daemon that only pretends (fake.mjs): what a page does in states that real VMs seldom have.
//
//   node pages.mjs CHROMIUM [WORD [DIRECTORY]]
//
// Prints a line for each test, and fails if one of them does. WORD: only tests whose names contain it. DIRECTORY: for pictures of how each test ends.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";
import { LOST, pretend, Status } from "./fake.mjs";
import { recorded } from "./recorded.mjs";

const [executablePath, word = "", pictures] = process.argv.slice(2);
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const PATIENCE_MS = 20_000;
const tests = [];
const test = (name, run) => tests.push({ name, run });

/** A sample of so many VMs, changed: `change(live)`. */
const sample = (count, change = () => {}) => {
  const { live } = recorded(count);
  live.ledger.taken_unix_s = Date.now() / 1000;
  change(live);
  return live;
};

const row = (page, text) => page.getByRole("row").filter({ hasText: text });
const card = (page, title) => page.getByRole("region", { name: title, exact: true });
const button = (within, name) => within.getByRole("button", { name, exact: true });
const dialog = (page) => page.getByRole("dialog");
const confirm = (page, name) => button(dialog(page), name).click();

test("a VM that does not run is shown with its state, cause and fix, and can be resumed and paused", async ({ page, fake, open }) => {
  fake.send(sample(2, (live) => {
    Object.assign(live.vms[0], { state: "io-error", state_cause: "the disk is full", state_fix: "free space" });
    Object.assign(live.vms[1], { state: "running" });
  }));
  fake.answers["POST /v1/vms/vm-000/resume"] = () => ({ ...fake.live.vms[0], state: "running", state_cause: null, state_fix: null });
  fake.answers["POST /v1/vms/vm-000/pause"] = () => ({ ...fake.live.vms[0], state: "paused", state_cause: "someone paused it", state_fix: "resume it" });
  await open("#/vms");
  assert.match(await row(page, "vm-000").textContent(), /io-error: the disk is full; free space/);
  await row(page, "vm-001").getByText("running", { exact: true }).waitFor();
  await open("#/vms/vm-000");
  await page.getByRole("listitem").filter({ hasText: "io-error: the disk is full; free space" }).waitFor();
  assert.equal(await button(page, "Pause …").count(), 0);
  await button(page, "Resume …").click();
  await confirm(page, "Resume");
  await button(page, "Pause …").click();
  await confirm(page, "Pause");
  await page.getByText("paused: someone paused it; resume it").waitFor();
});

test("a VM that is not measured yet is in the list, and its page shows state, cause and Stop", async ({ page, fake, open }) => {
  fake.send(sample(2, (live) => {
    Object.assign(live.vms[0], { state: "taking-over", state_cause: "QEMU does not answer", agent: null });
    live.ledger.vms.shift();
  }));
  await open("#/vms");
  const cells = await row(page, "vm-000").getByRole("cell").allTextContents();
  assert.ok(cells.includes("–"), cells.join("|"));
  assert.match(cells.join("|"), /taking-over: QEMU does not answer/);
  await page.getByRole("heading", { name: "2 VMs" }).waitFor();
  await open("#/vms/vm-000");
  await page.getByText("not measured yet").waitFor();
  await page.getByText("taking-over: QEMU does not answer").waitFor();
  assert.equal(await button(page, "Fork …").count(), 0);
  await button(page, "Stop …").waitFor();
});

test("figures that no newer ones replace are called old, and the stream is opened again", async ({ page, fake, open }) => {
  await page.clock.install();
  fake.send(sample(2, (live) => (live.interval_ms = 60_000)));
  await open("#/host");
  await page.locator(".live.on").filter({ hasText: / old$/ }).waitFor();
  const first = [...fake.streams][0];
  await page.clock.fastForward(139_000);
  await page.locator(".live.on").waitFor();
  await page.clock.fastForward(3_000);
  await page.locator(".live.off").filter({ hasText: "no new figures since" }).waitFor();
  while (fake.streams.has(first) || !fake.streams.size) await page.waitForTimeout(50);
  // The new stream begins with the old sample.
  await page.waitForTimeout(300);
  await page.locator(".live.off").waitFor();
  fake.send(sample(2, (live) => Object.assign(live.fold, { age_s: 75 })));
  await page.locator(".live.on").waitFor();
  await page.getByText("These figures are 1 min 15 s old").waitFor();
});

test("figures that were read before the page was loaded are shown with their age, also if the browser's clock is wrong", async ({ page, fake, open }) => {
  await page.clock.install({ time: Date.now() + 3_600_000 });
  fake.send(sample(2, (live) => {
    live.interval_ms = 60_000;
    live.ledger.taken_unix_s -= 600;
  }));
  await open("#/host");
  await page.locator(".live.on").filter({ hasText: /, (9 min 5\d s|10 min.*) old$/ }).waitFor();
});

test("the sharing of 520 VMs is drawn for 40 of them, and the 200 largest pairs are listed", async ({ page, fake, open }) => {
  const vms = Array.from({ length: 520 }, (_, n) => ({ vm: `vm-${String(n).padStart(3, "0")}`, domain: n < 500 ? "big" : "small", mapped_bytes: n << 20 }));
  const pairs = [];
  for (const [n, a] of vms.entries()) for (const b of vms.slice(0, n)) if (a.domain === b.domain) pairs.push({ a: b.vm, b: a.vm, folded_bytes: (n + 1) << 20, template_bytes: 0, segment_bytes: 0 });
  // All 124,940 of them, as an older daemon would answer: they were too many for one call of Math.max.
  fake.answers["GET /v1/sharing"] = { vms, pairs };
  await open("#/sharing");
  const matrix = page.getByRole("region", { name: "Sharing matrix" });
  await matrix.waitFor();
  assert.equal(await matrix.locator("tbody tr").count(), 40);
  assert.equal(await page.getByRole("region", { name: "Pairs that share, a table" }).locator("tbody tr").count(), 200);
  await page.getByText("leaves out 480 VMs").waitFor();
  await page.getByText("leaves out 124,740 smaller pairs").waitFor();
  await page.getByLabel("VMs of the matrix").selectOption("trust domain small");
  await matrix.getByText("vm-519").first().waitFor();
  assert.equal(await matrix.locator("tbody tr").count(), 20);
});

test("a pair that the daemon left out is shown as at most so large", async ({ page, fake, open }) => {
  const vms = ["a", "b", "c"].map((vm) => ({ vm, domain: "d", mapped_bytes: 9 << 20 }));
  const pairs = [["a", "b", 8], ["b", "c", 5]].map(([a, b, mib]) => ({ a, b, folded_bytes: mib << 20, template_bytes: 0, segment_bytes: 0 }));
  fake.answers["GET /v1/sharing"] = { vms, pairs, pairs_total: 3 };
  await open("#/sharing");
  const matrix = page.getByRole("region", { name: "Sharing matrix" });
  await matrix.getByText("≤ 5.00 MiB").first().waitFor();
  await page.getByText("leaves out 1 smaller pair.").waitFor();
});

test("a chart draws nothing where nothing was measured", async ({ page, fake, open }) => {
  fake.send(sample(1));
  await open("#/host");
  const found = await page.evaluate(async () => {
    const { stackSums, withGaps } = await import("/app/charts.js");
    const { t, all } = withGaps([0, 600, 3600, 4200], 30, [[1, 2, 3, null], [5, 5, 5, null]]);
    return { t, all, sums: stackSums(t, all), long: withGaps([0, 43200], 21600, [[1, 2]]).t };
  });
  assert.deepEqual(found, {
    t: [0, 600, 2100, 3600, 4200],
    all: [[1, 2, null, 3, null], [5, 5, null, 5, null]],
    sums: [[1, 2, null, 3, null], [6, 7, null, 8, null]],
    long: [0, 43200],
  });
});

test("lines of a chart differ by their dashes and stand out from the card", async ({ page, fake, open }) => {
  const now = Math.floor(Date.now() / 1000);
  const t = Array.from({ length: 20 }, (_, i) => now - 600 + i * 30);
  fake.answers["GET /v1/history"] = { t, step_s: 30, names: ["debt_bytes", "debt_absorbable_bytes"], values: [t.map((_, i) => i << 24), t.map((_, i) => (40 - i) << 24)] };
  fake.send(sample(1));
  await open("#/host");
  const lines = card(page, "Owed over time").locator(".key i");
  await lines.nth(1).waitFor();
  assert.deepEqual(await lines.evaluateAll((all) => all.map((e) => getComputedStyle(e).borderTopStyle)), ["solid", "dashed"]);
  // WCAG 2.1 asks for a contrast of 3 for parts of graphics.
  const contrasts = await lines.evaluateAll((all) => {
    const light = (rgb) => {
      const [r, g, b] = rgb.match(/\d+/g).map((n) => (n / 255 <= 0.04045 ? n / 255 / 12.92 : ((n / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    return all.map((e) => {
      const [a, b] = [light(getComputedStyle(e).borderTopColor), light(getComputedStyle(e.closest(".card")).backgroundColor)];
      return Math.max(a, b) / Math.min(a, b);
    });
  });
  assert.ok(contrasts[1] >= 3, String(contrasts));
});

test("a VM that has ended is shown with its history and events, and is started by its definition", async ({ page, fake, open }) => {
  fake.send(sample(1));
  const now = Math.floor(Date.now() / 1000);
  const t = [now - 900, now - 600, now - 300];
  fake.answers["GET /v1/vms/db/history"] = { t, step_s: 30, names: ["private_bytes", "pss_bytes"], values: [t, t] };
  fake.answers["GET /v1/events"] = [{ at_unix_s: now, kind: "vm", vm: "db", warning: true, text: "QEMU has crashed" }, { at_unix_s: now, kind: "vm", vm: "web", warning: false, text: "began" }];
  fake.answers["GET /v1/definitions/db"] = { name: "db", state: "off", problem: null, fix: null, definition: { autostart: true, order: 3, vm: { name: "db", memory: "2G", domain: "d" } } };
  fake.answers["POST /v1/definitions/db/start"] = { ...fake.live.vms[0], name: "db", pid: 77, state: "starting" };
  await open("#/vms/db");
  await page.getByText("No VM of this name runs.").waitFor();
  await page.locator(".chart canvas").waitFor();
  await row(page, "QEMU has crashed").waitFor();
  assert.equal(await row(page, "began").count(), 0);
  await page.getByText("starts, order 3").waitFor();
  await button(page, "Start this VM …").click();
  await confirm(page, "Start it");
  await dialog(page).getByText("db was started, as process 77.").waitFor();
  await button(dialog(page), "Close").click();
  await page.getByText("not measured yet").waitFor();
  await open("#/vms/never");
  await page.getByText("The last 1,000 events have none of this VM.").waitFor();
  assert.equal(await card(page, "Definition").count(), 0);
});

const CODE = `#login=${"a".repeat(64)}`;
const OLD_CODE = new Status(401, { error: "neither a token nor a valid login code", hint: "a code is valid once" });

test("a login by address that fails is told, on the form or beside the older session", async ({ page, fake, open }) => {
  fake.answers["POST /v1/session"] = OLD_CODE;
  fake.answers["GET /v1/session"] = new Status(401, { error: "log in" });
  await open(CODE);
  await page.getByLabel("Token or code").waitFor();
  await page.getByRole("alert").getByText("neither a token nor a valid login code").waitFor();
  delete fake.answers["GET /v1/session"];
  await page.evaluate((to) => (location.hash = to), CODE);
  await page.getByText("with your earlier session. neither a token").waitFor();
  await button(page, "Close").click();
  assert.equal(await page.locator(".notice").count(), 0);
});

test("the login form says that the session has ended, but not after a logout", async ({ page, fake, open }) => {
  await open("#/events");
  await page.getByText("No events yet.").waitFor();
  fake.answers["GET /v1/snapshots"] = new Status(401, { error: "log in" });
  await open("#/snapshots");
  await page.getByRole("alert").getByText("The session has ended: the daemon was restarted").waitFor();
  delete fake.answers["GET /v1/snapshots"];
  await page.reload();
  fake.answers["DELETE /v1/session"] = null;
  await button(page, "Log out").click();
  await page.getByLabel("Token or code").waitFor();
  assert.equal(await page.getByRole("alert").count(), 0);
});

test("an action whose answer is lost may still be running, and the page says so", async ({ page, fake, open }) => {
  fake.send(sample(1, (live) => (live.vms[0].state = "running")));
  fake.answers["POST /v1/vms/vm-000/pause"] = LOST;
  await open("#/vms/vm-000");
  await button(page, "Pause …").click();
  await confirm(page, "Pause");
  await dialog(page).getByRole("alert").getByText("the daemon does not answer, so the answer was lost; the action may still be running or be done").waitFor();
  await dialog(page).getByText("Look at Events before you repeat it.").waitFor();
});

test("a dialog can be closed while it works, and a notice says how it went", async ({ page, fake, open }) => {
  fake.send(sample(1, (live) => (live.vms[0].state = "running")));
  let answer;
  fake.answers["POST /v1/vms/vm-000/pause"] = () => new Promise((done) => (answer = done));
  await open("#/vms/vm-000");
  for (const [said, words] of [[new Status(409, { error: "the VM is being saved", hint: "wait" }), "the VM is being saved"], [{ ...fake.live.vms[0], state: "paused" }, "Done."]]) {
    answer = null;
    await button(page, "Pause …").click();
    await confirm(page, "Pause");
    await button(dialog(page), "Working …").waitFor();
    await button(dialog(page), "Close").click();
    await dialog(page).waitFor({ state: "hidden" });
    while (!answer) await page.waitForTimeout(20);
    answer(said);
    const notice = page.locator(".notice").filter({ hasText: "Pause vm-000" }).filter({ hasText: words });
    await notice.waitFor();
    await button(notice, "Close").click();
  }
  await button(page, "Resume …").waitFor();
});

const SNAPSHOT = { name: "warm", domain: "d", vm: "web", created_s: 1.8e9, memory_bytes: 1 << 30, disk_bytes: 1 << 28, parent: null, parent_bytes: 0, fork: false, key: null, users: [], problem: null };

test("clones and forks get names that neither a VM nor a definition has", async ({ page, fake, open }) => {
  fake.send(sample(1));
  fake.answers["GET /v1/snapshots"] = [SNAPSHOT];
  fake.answers["GET /v1/vms"] = [{ name: "warm-1" }, { name: "vm-000-fork-2" }];
  fake.answers["GET /v1/definitions"] = [{ name: "warm-3", state: "off" }];
  fake.answers["POST /v1/snapshots/warm/restore"] = {};
  fake.answers["POST /v1/vms/vm-000/fork"] = { snapshot: "warm", pause_ms: 1 };
  const started = () => fake.asked.filter(([key]) => key === "POST /v1/snapshots/warm/restore").map(([, body]) => body.vm);
  await open("#/snapshots");
  await button(page, "Clone …").click();
  await dialog(page).getByLabel("How many").fill("2");
  await confirm(page, "Clone");
  await dialog(page).getByText("2 of 2 started").waitFor();
  assert.deepEqual(started(), ["warm-2", "warm-4"]);
  await button(dialog(page), "Close").click();
  await open("#/vms/vm-000");
  await button(page, "Fork …").click();
  await dialog(page).getByLabel("How many").fill("2");
  await confirm(page, "Fork");
  await dialog(page).getByText("2 of 2 started").waitFor();
  assert.deepEqual(started().slice(2), ["vm-000-fork-1", "vm-000-fork-3"]);
});

test("an encrypted snapshot names its key, and a snapshot is saved with one", async ({ page, fake, open }) => {
  fake.send(sample(1));
  fake.answers["GET /v1/snapshots"] = [{ ...SNAPSHOT, key: "office" }];
  // As the daemon does it.
  fake.answers["POST /v1/snapshots"] = (body) => (body.encrypt || !body.key ? {} : new Status(400, { error: "set 'encrypt', too" }));
  await open("#/snapshots");
  await page.getByText("encrypted, key office", { exact: true }).waitFor();
  await button(page, "Save a VM …").click();
  await dialog(page).getByLabel("Name", { exact: true }).fill("cold");
  await dialog(page).getByLabel("Key name").fill("office");
  await confirm(page, "Save");
  await dialog(page).getByRole("alert").getByText("set 'encrypt', too").waitFor();
  await dialog(page).getByLabel("Encrypt memory and device state").setChecked(true);
  await confirm(page, "Save");
  await dialog(page).getByText("Saved as cold.").waitFor();
  const [, body] = fake.asked.findLast(([key]) => key === "POST /v1/snapshots");
  assert.deepEqual([body.encrypt, body.key, body.plain_disks], [true, "office", false]);
});

test("an encrypted snapshot gets another key, and only such a snapshot", async ({ page, fake, open }) => {
  fake.send(sample(1));
  const snapshots = [{ ...SNAPSHOT, key: "office" }, { ...SNAPSHOT, name: "plain", vm: "db" }];
  fake.answers["GET /v1/snapshots"] = snapshots;
  fake.answers["POST /v1/snapshots/warm/rekey"] = ({ key_name: key }) => {
    if (key !== "home") return new Status(400, { error: `the daemon has no key '${key}'` });
    snapshots[0] = { ...snapshots[0], key };
    return { name: "warm", key, old_key: "office" };
  };
  await open("#/snapshots");
  await page.getByText("encrypted, key office", { exact: true }).waitFor();
  assert.equal(await button(page, "Verify …").count(), 2);
  assert.equal(await button(page, "Change key …").count(), 1);
  await button(page, "Change key …").click();
  await dialog(page).getByLabel("New key").fill("typo");
  await confirm(page, "Change the key");
  await dialog(page).getByRole("alert").getByText("the daemon has no key 'typo'").waitFor();
  await dialog(page).getByLabel("New key").fill("home");
  await confirm(page, "Change the key");
  await dialog(page).getByText("warm is encrypted with key home.").waitFor();
  await page.getByText("encrypted, key home", { exact: true }).waitFor();
});

test("leases are drawn for at most 12 rows, with short names", async ({ page, fake, open }) => {
  const lease = (n, host = "lender") => ({ id: `l${n}`, lender: { host }, borrower: "here", vm: `vm-${n}`, bytes: 1 << 30, durability: "disk", state: "active", recall_ms: null, left_ms: 5000 });
  const report = { host: "here", registry: "here", registry_away: null, lending: null, lends_as: null, leases: [], lenders: [], borrowed: [], blast: [], distrusted: [], again: [] };
  const long = "a-host-whose-name-is-longer-than-the-drawing";
  fake.answers["GET /v1/leases"] = { ...report, leases: [lease(1, long), ...Array.from({ length: 11 }, (_, n) => lease(n + 2))] };
  await open("#/leases");
  const texts = page.locator(".graph text");
  await texts.first().waitFor();
  assert.equal(await texts.count(), 14);
  const said = await texts.evaluateAll((all) => all.map((e) => [e.querySelector("title").textContent, [...e.childNodes].findLast((n) => n.nodeType === 3).textContent]));
  assert.deepEqual(said[0], [long, `${long.slice(0, 25)}…`]);
  assert.ok((await page.locator(".graph").boundingBox()).height > 12 * 25, "rows are legible");
  fake.answers["GET /v1/leases"] = { ...report, leases: Array.from({ length: 13 }, (_, n) => lease(n)) };
  await open("#/host");
  await open("#/leases");
  await page.getByText("1 lender and 13 borrowers: too many for a drawing.").waitFor();
  assert.equal(await page.locator(".graph").count(), 0);
});

test("all of the navigation can be reached in a low window", async ({ page, open }) => {
  await page.setViewportSize({ width: 1000, height: 300 });
  await open("#/events");
  const out = button(page, "Log out");
  await out.scrollIntoViewIfNeeded();
  const box = await out.boundingBox();
  assert.ok(box.y + box.height <= 300, JSON.stringify(box));
});

test("cards say when they were read, go on after a failure, and ask again after a failed first request", async ({ page, fake, open }) => {
  await page.clock.install();
  fake.send(sample(1));
  const off = new Status(503, { error: "libvirt does not answer" });
  fake.answers["GET /v1/libvirt"] = off;
  await open("#/vms");
  const domains = card(page, "Domains of libvirt");
  await domains.getByRole("alert").getByText("libvirt does not answer").waitFor();
  fake.answers["GET /v1/libvirt"] = [{ domain: "win", running: true, mark: null, folding: "no" }];
  await page.clock.fastForward(3100);
  await row(page, "win").waitFor();
  await domains.getByText(/^read \d\d:\d\d:\d\d$/).waitFor();
  assert.equal(await domains.getByRole("alert").count(), 0);
  fake.answers["GET /v1/libvirt"] = off;
  await page.clock.fastForward(60_100);
  await domains.getByRole("alert").waitFor();
  await row(page, "win").waitFor();
  fake.answers["GET /v1/doctor"] = { can_run: true, checks: [] };
  await open("#/doctor");
  await page.getByText("VMs can run and be folded here").waitFor();
  fake.answers["GET /v1/doctor"] = { can_run: false, checks: [] };
  await button(page, "Check again").click();
  await page.getByText("VMs cannot run and be folded here").waitFor();
});

let failed = 0;
const chosen = tests.filter((one) => one.name.includes(word));
assert.ok(chosen.length, `no test's name contains '${word}'`);
for (const { name, run } of chosen) {
  const fake = await pretend();
  const context = await browser.newContext({ viewport: { width: 1400, height: 900 } });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const faults = [];
  page.on("pageerror", (error) => faults.push(error.stack));
  // A page and its frame, at an address.
  const open = async (hash) => {
    if (page.url().startsWith(fake.origin)) await page.evaluate((to) => (location.hash = to), hash);
    else await page.goto(`${fake.origin}/${hash}`);
    await page.locator("h1").waitFor();
  };
  try {
    await run({ page, fake, open });
    // What a test leaves on the page can be used by everybody.
    await page.evaluate(AXE);
    const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
    assert.deepEqual(found.violations.filter((v) => ["serious", "critical"].includes(v.impact)).map((v) => [v.id, v.nodes.map((n) => n.html)]), []);
    if (pictures) await page.screenshot({ path: `${pictures}/${name.replaceAll(" ", "-")}.png`, fullPage: true });
    assert.deepEqual(faults, []);
    console.log(`passed: ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED: ${name}\n${error.stack}\n${faults.join("\n")}\n${await page.textContent("body").catch(() => "")}`);
  }
  await context.close();
}
console.log(`${failed} failed`);
await browser.close();
process.exit(failed ? 1 : 0);
