//! The list of all fuzz targets.

use memfold_wire::agent::{FromAgent, ToAgent};
use memfold_wire::library::{Order, Reply};

use super::subject::Subject;
use super::{command_lines, frames, guest_kernel, images, layout, libvirt, manifests, monitor};
use super::{nbd, proc_files, registry, snapshot, store, streams, texts};

macro_rules! subjects {
    ($($name:ident: $run:expr, $seeds:expr, [$($parser:literal)*];)*) => {
        /// All fuzz targets.
        pub const SUBJECTS: [Subject; [$(stringify!($name)),*].len()] = [$(Subject {
            name: stringify!($name),
            run: $run,
            seeds: $seeds,
            parser: &[$($parser),*],
        }),*];
    };
}

subjects! {
    from_agent: frames::run::<FromAgent>, frames::from_agent,
        ["memfold-wire/src/agent.rs:FromAgent" "memfold-wire/src/frame.rs"];
    to_agent: frames::run::<ToAgent>, frames::to_agent,
        ["memfold-wire/src/agent.rs:ToAgent" "memfold-wire/src/frame.rs"];
    order: frames::run::<Order>, frames::orders,
        ["memfold-wire/src/library.rs:Order" "memfold-wire/src/frame.rs"];
    reply: frames::run::<Reply>, frames::replies,
        ["memfold-wire/src/library.rs:Reply" "memfold-wire/src/frame.rs"];
    ring: guest_kernel::ring, guest_kernel::rings,
        ["memfold-agent/src/ring.rs" "memfold-agent/src/trace.rs:decode,disk,decode_page"];
    format: guest_kernel::format, guest_kernel::formats, ["memfold-agent/src/format.rs"];
    mountinfo: guest_kernel::mountinfo, guest_kernel::mountinfos,
        ["memfold-agent/src/mounts.rs:parse,hint_device,to_walk,by_device,under,line,number,unescape"];
    memory: guest_kernel::memory, guest_kernel::memory_files, ["memfold-agent/src/memory/parse.rs"];
    glob: guest_kernel::glob, guest_kernel::globs, ["memfold-agent/src/glob.rs:matches,whole,one,in_set"];
    layout: layout::layout, layout::layouts,
        ["memfold-vm/src/ram.rs:parse,parse_backends,backend_id,system_ram,parse_blocks,assemble" "memfold-vm/src/layout.rs"];
    monitor: monitor::answer, monitor::answers, [
        "memfold-vm/src/qmp.rs:once,read_message,unexpected,text_of,is_question,query,execute,human"
        "memfold-vm/src/ram.rs"
        "memfold-vm/src/conditions.rs"
        "memfold-vm/src/endpoints.rs:agent_socket,port_chardev,socket_path"
        "memfold-vm/src/balloon.rs:parse,find,guest_stats,deflates_on_oom,full_size,dimms,actual,unexpected"
        "memfold-vm/src/virtio_mem.rs:parse,unexpected,devices,read,plugged,has_driver"
        "memfold-vm/src/trial.rs:of,devices"
        "memfold-snapshot/src/cpu.rs:of,first,get,words,features"
        "memfold-lend/src/graph.rs:top,swap_device,is_swap_device,generation_of,free_generation,nodes"
        "memfold-lend/src/waits.rs"
    ];
    command_line: command_lines::copy, command_lines::lines, [
        "memfold-vm/src/foreign/config.rs"
        "memfold-vm/src/foreign/describe.rs:copy_line,words,text,media,sizes,disks"
        "memfold-vm/src/foreign/drives.rs"
        "memfold-vm/src/foreign/files.rs:name_whole,take_out,token,put_in"
        "memfold-vm/src/foreign/host_ends.rs:told,of_ram,of_arguments,read,words,null_chardev"
        "memfold-vm/src/foreign/network.rs"
        "memfold-vm/src/foreign/options.rs"
        "memfold-vm/src/foreign/rewrite.rs"
        "memfold-vm/src/foreign/spec.rs"
        "memfold-vm/src/foreign/value.rs"
    ];
    free_pages: snapshot::free_pages, snapshot::free_lists, ["memfold-snapshot/src/free.rs:parse"];
    extents: snapshot::extents, snapshot::extent_lists, ["memfold-snapshot/src/guest_extents.rs:parse"];
    nbd: nbd::both, nbd::streams, ["memfold-lend/src/nbd.rs"];
    disk_client: manifests::disk_client, manifests::disk_clients,
        ["memfold-transfer/src/nbd.rs:client,negotiate,read_array"];
    description: store::description, store::descriptions, ["memfold-transfer/src/description.rs"];
    chunk: store::chunk, store::chunks, ["memfold-transfer/src/chunk.rs:pack,unpack"];
    first_pages: store::first_pages, store::first_parts, ["memfold-transfer/src/first_pages.rs"];
    manifest: manifests::manifest, manifests::manifests, [
        "memfold-snapshot/src/manifest.rs:parse,misplaced,parts,is_mappable,own_bytes,parent_bytes,no_parent,depth,files,memory,tells_twins_apart"
        "memfold-snapshot/src/portable.rs:obstacle,is_member_name,adapt_arriving,set_paths,check_alone,chain,strange,disk,moved"
    ];
    table: manifests::table, manifests::tables, [
        "memfold-snapshot/src/refer.rs:encode,decode,goes_on_with,length,mappings"
        "memfold-snapshot/src/pack.rs:frames"
        "memfold-snapshot/src/working_set.rs:read,bytes,runs"
    ];
    sealed: manifests::sealed, manifests::sealed_parts,
        ["memfold-snapshot/src/encryption.rs:unwrap,expand"];
    segment_manifest: manifests::segment_manifest, manifests::segment_manifests, [
        "memfold-agent/src/segment/manifest.rs"
        "memfold-agent/src/segment/mount_table.rs:parse,at,below,line"
        "memfold-agent/src/segment/mod.rs:parse_reference"
    ];
    guest_report: manifests::guest_report, manifests::guest_reports, [
        "memfold-snapshot/src/clock.rs:of,is_right,is_explained,step,nanoseconds_of,in_words,milliseconds"
        "memfold-snapshot/src/identity.rs:read"
        "memfold-vm/src/swap.rs:parse_used"
        "memfold-vm/src/balloon.rs:parse"
    ];
    qcow2: images::qcow2, images::qcow2_headers,
        ["memfold-vm/src/qcow2.rs:backing,virtual_bytes,beginning,parse"];
    partitions: images::partitions, images::partition_tables, ["memfold-vm/src/block_device.rs:partitions"];
    source: images::source, images::sources, ["memfold-segment/src/source.rs:find"];
    debugfs: images::debugfs, images::debugfs_reports,
        ["memfold-segment/src/ext.rs:facts,mode,modified,attribute,decode,access_list"];
    domain: libvirt::domain, libvirt::domains, [
        "memfold-libvirt/src/xml.rs"
        "memfold-libvirt/src/tag.rs"
        "memfold-libvirt/src/hindrances.rs"
        "memfold-libvirt/src/wrapper.rs:emulator"
        "memfold-libvirt/src/lib.rs:vm_name"
    ];
    configuration: libvirt::configuration, libvirt::configurations, [
        "memfold-pve/src/node.rs:vms,config,process,marked,mark,if_exists,numbers,uuid"
        "memfold-pve/src/mark.rs"
    ];
    vm_description: texts::description, texts::descriptions, [
        "memfold-vm/src/definition.rs:parse,to_toml,validate,take"
        "memfold-vm/src/validate.rs"
        "memfold-vm/src/spec.rs:cards,slots,merges,files_mut"
    ];
    request: texts::request, texts::requests, [];
    name: texts::name, texts::names, [
        "memfold-vm/src/forward.rs:of_rule,parse,rule,is_any,fmt,from_str"
        "memfold-vm/src/network.rs:needs_tap,interface,fmt,from_str"
        "memfold-vm/src/name.rs"
        "memfold-segment/src/name.rs"
        "memfold-host/src/kernel_release.rs"
        "memfold-units/src/amount.rs:from_str"
    ];
    fingerprint: texts::fingerprint, texts::fingerprints, ["memfold-ledger/src/estimate/place.rs"];
    mapping: proc_files::mapping, proc_files::mappings, [
        "memfold-store/src/mapped.rs:parse,identity_text,private_mapping"
        "memfold-ksm/src/ranges.rs:parse,first_line,is_mergeable,has"
        "memfold-vm/src/endpoints.rs:advice_in,mapping,advice_of"
        "memfold-ledger/src/read.rs:maps,smaps,vma,kilobytes,number"
    ];
    figures: proc_files::figures, proc_files::figure_files, [
        "memfold-ledger/src/read.rs:rollup,page_tables,rss_anon,status,meminfo,max_map_count,zones,fields,lines,kilobytes,number"
        "memfold-lend/src/pressure.rs:read,parse,parse_lines"
        "memfold-vm/src/process.rs:start_ticks"
        "memfold-ksm/src/status.rs:merging_pages,stat_field,text"
        "memfold-ksm/src/pressure.rs:some_avg10"
    ];
    call: registry::call, registry::calls,
        ["memfold-lend/src/calls.rs:speaks_for,answer,done" "memfold-lend/src/endpoint.rs:check,check_of_another_host"];
    etcd_response: registry::etcd_response, registry::etcd_responses, [
        "memfold-lend/src/etcd_api.rs:ranges,number,bytes,text,odd,ask,txn,revision"
        "memfold-lend/src/etcd_keys.rs:since,left,read,at,ranges,what,lease,lenders,forget"
    ];
    lvm_report: registry::lvm_report, registry::lvm_reports,
        ["memfold-lend/src/lvm/tools.rs:parse,text,number,is_set,parse_logical,parse_physical,is_mirror"];
    exec_frames: streams::exec_frames, streams::exec_streams, ["memfold-api/src/exec_stream.rs"];
    copy_archive: streams::copy_archive, streams::archives, ["memfold-copy/src/unpack.rs"];
    sent_events: streams::sent_events, streams::event_streams, ["memfold-api/src/event_stream.rs"];
}
