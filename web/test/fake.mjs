// The dashboard's files, and a daemon that only pretends: its answers are made up, so that a test sees what a page does with each of them.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { fileURLToPath } from "node:url";
import { recorded } from "./recorded.mjs";

const WEB = fileURLToPath(new URL("..", import.meta.url));
const KINDS = { js: "text/javascript", css: "text/css", svg: "image/svg+xml", html: "text/html" };
/** As crates/memfold-server/src/access/guard.rs has it. */
const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const empty = { t: [], step_s: 30, names: [], values: [] };
/** What a daemon without anything answers. */
const ANSWERS = {
  "GET /v1/session": { role: "operate", who: "a test", via: "session" },
  "GET /v1/history": empty,
  "GET /v1/history/vms": { step_s: 90, vms: [] },
  "GET /v1/definitions": [],
  "GET /v1/libvirt": [],
  "GET /v1/snapshots": [],
  "GET /v1/segments": [],
  "GET /v1/hosts": [],
  "GET /v1/events": [],
  "GET /v1/audit": [],
  "GET /v1/ksm": { available: false },
  "GET /v1/sharing": { vms: [], pairs: [] },
  "GET /v1/vms": [],
};

/** One answer that is no 200. */
export class Status {
  constructor(status, body) {
    Object.assign(this, { status, body });
  }
}

/** Never answers: the connection is cut. */
export const LOST = Symbol("lost");

/**
 * Starts it. `answers`: by "METHOD PATH" without a query, a value or a function of (body, query), which may be async; `asked`: what was asked,
 * other than for files and figures; `send(live)`: a sample for all who listen, and for those who come later; `cut()`: ends their streams.
 */
export async function pretend() {
  const fake = { answers: {}, asked: [], streams: new Set(), live: recorded(3).live };
  const answer = async (request, response, path, query) => {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const text = Buffer.concat(chunks).toString();
    const key = `${request.method} ${path}`;
    const body = text && JSON.parse(text);
    fake.asked.push([key, body]);
    const history = /^GET .*\/history$/.test(key) ? empty : undefined;
    let said = fake.answers[key] ?? ANSWERS[key] ?? history ?? new Status(404, { error: `no ${path}` });
    if (typeof said === "function") said = await said(body, query);
    if (said === LOST) return response.destroy();
    const [status, value] = said instanceof Status ? [said.status, said.body] : [200, said];
    response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(value));
  };
  const stream = (response) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.write(`retry: 3000\n\n`);
    fake.streams.add(response);
    response.on("close", () => fake.streams.delete(response));
    if (fake.live) response.write(`event: sample\ndata: ${JSON.stringify(fake.live)}\n\n`);
  };
  const server = createServer((request, response) => {
    const { pathname, searchParams } = new URL(request.url, "http://fake");
    response.setHeader("content-security-policy", POLICY);
    if (pathname === "/v1/live" && !fake.answers["GET /v1/live"]) return stream(response);
    if (pathname.startsWith("/v1/")) return void answer(request, response, pathname, searchParams);
    const file = pathname === "/" ? "index.html" : pathname.slice(1);
    try {
      response.setHeader("content-type", `${KINDS[file.split(".").at(-1)]}; charset=utf-8`);
      response.end(readFileSync(WEB + file));
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  fake.origin = `http://127.0.0.1:${server.address().port}`;
  fake.send = (live) => {
    fake.live = live;
    for (const response of fake.streams) response.write(`event: sample\ndata: ${JSON.stringify(live)}\n\n`);
  };
  fake.cut = () => fake.streams.forEach((response) => response.destroy());
  return fake;
}
