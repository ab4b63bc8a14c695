// Segments, and who maps them.

import { useState } from "../../vendor/preact-hooks.js";
import { del, part, post, useAnswer, useLive } from "../api.js";
import { bytes, parseBytes, plural, time } from "../format.js";
import { html } from "../html.js";
import { Act, Badge, Bytes, Card, Failure, NAME, Table, Waiting } from "../ui.js";

export function Segments({ may }) {
  const [again, setAgain] = useState(0);
  const { sample } = useLive();
  const { value: segments, error } = useAnswer("/v1/segments", again, 15000);
  const changed = () => setAgain((n) => n + 1);
  if (!segments) return error ? html`<${Failure} error=${error} />` : html`<${Waiting} />`;
  const reference = (s) => `${s.segment.name}@${s.segment.generation}`;
  const fits = (vm, s) => vm.origin === "started" && vm.domain === s.segment.domain && !s.users.includes(vm.name);
  const fitting = (s) => (sample?.vms ?? []).filter((vm) => fits(vm, s)).map((vm) => vm.name);
  const attach = (s) => {
    const vms = fitting(s);
    return {
      title: `Attach ${reference(s)}`,
      text: "The VM needs a free slot (vm run --segment-slots).",
      fields: [
        { name: "vm", label: "VM", type: "select", options: vms, value: vms[0] },
        { name: "content", label: "Compare all bytes with the guest's own files first", type: "checkbox" },
      ],
      action: "Attach",
      act: async (v) => {
        await post(`/v1/vms/${part(v.vm)}/segments`, { segment: reference(s), content: v.content });
        changed();
      },
    };
  };
  const remove = (s) => ({
    title: `Remove ${reference(s)}?`,
    text: "VMs can no longer map the segment. To restore it, build it again.",
    action: "Remove the segment",
    danger: true,
    act: async () => {
      await del(`/v1/segments/${part(reference(s))}`);
      changed();
    },
  });
  const verify = (s) => ({
    title: `Verify ${reference(s)}?`,
    text: "The segment's image is read and compared with its checksum.",
    action: "Verify",
    act: async () => (await post(`/v1/segments/${part(reference(s))}/verify`)) ?? "Every byte is unchanged since the build.",
  });
  const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
  const build = {
    title: "Build a segment",
    text: "An image of files that VMs of one trust domain execute in place. An existing name gets its next generation.",
    fields: [
      { name: "name", label: "Name", required: true, pattern: NAME },
      { name: "domain", label: "Trust domain", required: true },
      { name: "from", label: "From", type: "textarea", required: true, hint: "A directory or disk image of the host, vm:NAME, or packages (package:NAME), a line each." },
      { name: "include", label: "Only paths", type: "textarea", hint: "Globs that begin with a slash, one on each line. Empty: /usr/** and /opt/**." },
      { name: "top", label: "The best files in", hint: "256M; empty: all files." },
      { name: "pinned", label: "Hold the segment in memory", type: "checkbox" },
    ],
    action: "Build it",
    act: async (v) => {
      const top = v.top ? parseBytes(v.top) : null;
      if (v.top && top === null) throw new Error(`'${v.top}' is not a size; write 256M or 2G`);
      const done = await post("/v1/segments", {
        name: v.name, domain: v.domain, from: lines(v.from), include: lines(v.include), top_files_bytes: top, pinned: v.pinned });
      changed();
      const built = `${done.segment.name}@${done.segment.generation}`;
      return done.is_new ? `Built ${built}, ${bytes(done.segment.image_bytes)}.` : `${built} holds the same files already.`;
    },
  };
  return html`<${Card} title=${plural(segments.length, "segment")} aside=${html`<${Act} may=${may} what=${build} small>Build …<//>`} wide>
    <${Failure} error=${error} />
    <${Table} label="Segments" rows=${segments} rowKey=${reference} empty="None yet. Build one: memfold segment build --help" columns=${[
      { key: "name", name: "Segment", value: reference, cell: (s) => html`${reference(s)} ${s.problem && html`<${Badge} tone="bad" title=${s.problem}>unusable<//>`}` },
      { key: "domain", name: "Domain", value: (s) => s.segment.domain },
      { key: "image", name: "Image", number: true, value: (s) => s.segment.image_bytes, cell: (s) => html`<${Bytes} value=${s.segment.image_bytes} />` },
      { key: "resident", name: "In memory", number: true, value: (s) => s.resident_bytes, cell: (s) => html`<${Bytes} value=${s.resident_bytes} />` },
      { key: "cost", name: "Costs each VM", number: true, value: (s) => s.struct_page_bytes, cell: (s) => bytes(s.struct_page_bytes) },
      { key: "users", name: "VMs", cell: (s) => (s.users.length ? s.users.join(", ") : html`<span class="soft">none</span>`) },
      { key: "kept", name: "Kept from changes by", value: (s) => s.protection },
      { key: "made", name: "Built", value: (s) => s.segment.created_s, cell: (s) => time(s.segment.created_s) },
      { key: "act", name: "", cell: (s) => html`<div class="buttons">${fitting(s).length > 0 && html`<${Act} may=${may} what=${() => attach(s)} small>Attach …<//>`}<${Act} may=${may} what=${verify(s)} small>Verify …<//><${Act} may=${may} what=${remove(s)} danger small>Remove …<//></div>` },
    ]} />
  <//>`;
}
