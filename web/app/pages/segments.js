// Segments, and who maps them.

import { useState } from "../../vendor/preact-hooks.js";
import { del, part, post, useAnswer, useLive } from "../api.js";
import { bytes, plural, time } from "../format.js";
import { html } from "../html.js";
import { Act, Badge, Bytes, Card, Failure, Table, Waiting } from "../ui.js";

export function Segments({ may }) {
  const [again, setAgain] = useState(0);
  const { sample } = useLive();
  const { value: segments, error } = useAnswer("/v1/segments", again, 15000);
  const changed = () => setAgain((n) => n + 1);
  if (!segments) return error ? html`<${Failure} error=${error} />` : html`<${Waiting} />`;
  const reference = (s) => `${s.segment.name}@${s.segment.generation}`;
  const attach = (s) => {
    const vms = (sample?.vms ?? []).filter((vm) => vm.domain === s.segment.domain && !s.users.includes(vm.name)).map((vm) => vm.name);
    return {
      title: `Attach ${reference(s)}`,
      text: vms.length ? "The VM needs a free slot (vm run --segment-slots)." : `No other VM of trust domain ${s.segment.domain} runs.`,
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
    text: "VMs can't map it any more. Build it again to have it back.",
    action: "Remove the segment",
    danger: true,
    act: async () => {
      await del(`/v1/segments/${part(reference(s))}`);
      changed();
    },
  });
  const verify = (s) => ({
    title: `Verify ${reference(s)}?`,
    text: "Its image is read and compared with its checksum.",
    action: "Verify",
    act: async () => (await post(`/v1/segments/${part(reference(s))}/verify`)) ?? "Every byte is as it was built.",
  });
  return html`<${Card} title=${plural(segments.length, "segment")} wide>
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
      { key: "act", name: "", cell: (s) => html`<div class="buttons"><${Act} may=${may} what=${() => attach(s)} small>Attach …<//><${Act} may=${may} what=${verify(s)} small>Verify …<//><${Act} may=${may} what=${remove(s)} danger small>Remove …<//></div>` },
    ]} />
  <//>`;
}
