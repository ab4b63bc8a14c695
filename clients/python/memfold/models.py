"""Types of the daemon's HTTP API, made by `clients/python/generate`. Do not change this file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Union

BootSnapshot = Union[
    Literal["pending"],
    Literal["ready"],
    dict[str, Any],
]
"""Status of a VM's boot snapshot: a snapshot that memfold saves right after the guest's boot."""

Durability = Literal["disk", "replica", "none"]
"""Place where the bytes of a swap disk on lent RAM survive if its lender dies."""

GuestCopyKind = Literal["send_archive", "send_file", "receive_archive"]
"""What a guest does to copy files."""

KeepChoice = Literal["auto", "none", "hot", "all"]
"""Which of the guest's caches a snapshot keeps."""

Renew = Literal["random", "network", "identity"]
"""Which identities a restored VM renews."""

SegmentState = Union[
    Literal["attached"],
    Literal["root"],
    Literal["laid"],
    Literal["taken_off"],
    dict[str, Any],
]
"""State, in the guest, of a segment that is attached to the guest's VM."""

SetWhen = Literal["always", "now", "next_start"]
"""When changed settings of a VM take effect."""

SwapPlace = Literal["lent", "degraded", "on_copy", "on_disk", "lost"]
"""Where the data of a VM's swap disk is."""


@dataclass(kw_only=True)
class ChangedSetting:
    """A changed setting of a VM."""

    name: str
    """Name of the setting."""
    next_start: bool
    """Whether the VM has the new value from its next start on."""
    now: bool
    """Whether the running VM has the new value."""
    value: str
    """New value, as in the request."""


@dataclass(kw_only=True)
class ClockStep:
    """Correction of a guest's wall clock after the VM was stopped."""

    behind_ms: float | None = None
    """Milliseconds by which the guest's clock was behind the host's clock before the correction;
    negative if it was ahead."""
    left_ms: float | None = None
    """Milliseconds by which the guest's clock was still behind after the correction, as measured;
    negative if it was ahead."""
    pending: bool
    """Whether the guest's agent has not answered yet; the other fields are then unset."""
    problem: str | None = None
    """Reason why the guest's clock or RTC is not correct; unset if both are."""
    uncertainty_ms: float | None = None
    """Largest error of `left_ms` in both directions, in milliseconds."""


@dataclass(kw_only=True)
class Definition:
    """Definition of a VM: its description, and whether the daemon starts the VM after a boot of the
    host."""

    autostart: bool | None = None
    """Whether the daemon starts the VM after each boot of the host."""
    order: int | None = None
    """Place of the VM among the VMs that are started after a boot: a VM with a smaller number
    starts earlier. VMs with the same number start in the order of their names."""
    snapshot: str | None = None
    """Name of the snapshot from which each start restores the VM; unset: the VM boots. The VM's
    hardware and disks are then those of the snapshot, with which the description must agree."""
    vm: dict[str, Any]
    """Description of the VM, as for `POST /v1/vms`."""


@dataclass(kw_only=True)
class DefinitionInfo:
    """A defined VM."""

    definition: Definition | None = None
    """The definition; null: its file cannot be used."""
    fix: str | None = None
    """Action that would solve the problem, as text; null: there is no problem."""
    name: str
    """Name of the VM."""
    problem: str | None = None
    """Why the file of the definition cannot be used, or why the VM was not started after the host's
    boot; null: there is no problem, or the VM has been started since."""
    state: str
    """`off`, or the state of the VM as in `VmInfo`."""


@dataclass(kw_only=True)
class DomainStats:
    """Statistics of one trust domain's page store."""

    appended_pages: int
    """Number of pages added to the page store since this daemon created or adopted the store."""
    domain: str
    """Name of the trust domain."""
    not_freed: str | None = None
    """Reason why no unneeded page of the page store can be freed, with the VM or process that
    prevents it; null if nothing prevents it."""
    punched_pages: int
    """Number of pages freed (punched out of the page store's file) since this daemon created or
    adopted the store."""
    store_bytes: int
    """Bytes that the page store holds, in memory or swap."""
    store_cap_bytes: int
    """Maximum number of bytes that the page store may hold."""
    store_dev: int
    """Device number of the page store's file."""
    store_full: bool
    """Whether the page store accepts no new pages, because it has reached its cap or because of an
    error."""
    store_ino: int
    """Inode number of the page store's file."""


@dataclass(kw_only=True)
class EngineStats:
    """Statistics of the fold engine. The `case_*` fields count pages that were compared before
    folding, by their files' paths and by the result."""

    age_s: float | None = None
    """Age of these statistics in seconds: 0, unless the engine waits for a VM that does not
    answer."""
    braked: str | None = None
    """Reason why the engine may not share more pages now (the brake); null if it may."""
    case_different_path_different_content: int
    """Number of compared pages whose files have the same name and size but different paths, and
    whose bytes differed."""
    case_different_path_same_content: int
    """Number of compared pages whose files have the same name and size but different paths, and
    whose bytes were equal."""
    case_same_path_different_content: int
    """Number of compared pages whose files have the same path, and whose bytes differed."""
    case_same_path_same_content: int
    """Number of compared pages whose files have the same path, and whose bytes were equal."""
    cpu_share: float
    """CPU time that folding may use on average, as a fraction of one core, 0 to 1."""
    domains: list[DomainStats]
    """Statistics of each trust domain."""
    engine_cpu_s: float
    """CPU time of the engine's thread in seconds, without the time that reports took."""
    files_given_up: int
    """Number of times that the engine stopped folding a file for a while, because the file's bytes
    kept differing between VMs."""
    hint_to_fold_p50_s: float | None = None
    """Median time from a page's hint to its folding, in seconds. Pages that were hinted while
    folding was paused are not counted; null if no page was folded yet."""
    hint_to_fold_p95_s: float | None = None
    """95th percentile of the time from a page's hint to its folding, in seconds. Pages that were
    hinted while folding was paused are not counted; null if no page was folded yet."""
    hints_waiting: int
    """Number of hints of all VMs that wait to be processed."""
    huge_kept_pages: int
    """Number of pages that were not folded, because they are in a transparent huge page that is not
    worth splitting: too few of its pages cache files."""
    library_cpu_s: float
    """CPU time that memfold's libraries in all QEMUs used for the engine's orders, in seconds."""
    mapping_budget_runs: int
    """Number of runs that were not folded, because the VM's QEMU has nearly as many mappings as the
    kernel allows (`vm.max_map_count`)."""
    own_bytes: int
    """Memory of the engine's tables, in bytes."""
    pages_per_second: int | None = None
    """Maximum number of pages that the engine processes per second; null without a limit."""
    paused: bool
    """Whether the operator has paused folding."""
    report_cpu_s: float
    """CPU time that reports took in the engine's thread, in seconds."""
    vms: list[VmStats]
    """Statistics of each VM."""


@dataclass(kw_only=True)
class ErrorBody:
    """Body of an HTTP response with a status of 400 or above."""

    error: str
    """Message that names the condition that failed."""
    hint: str | None = None
    """Action that would change the failed condition; null: unknown."""
    impossible_here: bool | None = None
    """Whether the request is impossible on this host. The command line then exits with code 3."""


@dataclass(kw_only=True)
class Event:
    """A change on the host that the daemon saw between two samples of the history."""

    at_unix_s: int
    """Time when the change was noticed, in seconds since 1970."""
    kind: str
    """What the event concerns: `vm`, `agent`, `folding`, `ksm`, `store`, `ledger`, `brake`,
    `snapshot`, `lending` or `daemon`."""
    text: str
    """Text that describes the change."""
    vm: str | None = None
    """Name of the VM that the event concerns; null: the event concerns no single VM."""
    warning: bool
    """Whether the operator should look at the event."""


@dataclass(kw_only=True)
class EventGap:
    """Data of a server-sent event `gap`: events that are no longer kept, or that belong to another
    history."""

    missed: int | None = None
    """Number of missed events; null: unknown, because the daemon has begun a new history."""


@dataclass(kw_only=True)
class ExecRequest:
    """Request body of `POST /v1/vms/{name}/exec`."""

    script: str
    """Text of a shell script, which `/bin/sh -c` runs in the guest."""
    timeout_s: float
    """Time limit of the command in seconds, 0 or more. A command that runs longer is killed."""


@dataclass(kw_only=True)
class ExecResult:
    """Result of a command that ran in a guest. Invalid UTF-8 in the command's output is
    replaced."""

    code: int
    """Exit code of the command; 128 + signal if it was killed."""
    stderr: str
    """Standard error of the command."""
    stdout: str
    """Standard output of the command."""


@dataclass(kw_only=True)
class ExecStreamRequest:
    """Request body of `POST /v1/vms/{name}/exec/stream`."""

    copy: GuestCopy | None = None
    """Copy of files that the guest makes, instead of running a script; null: it runs the script."""
    input: bool | None = None
    """Whether the client sends standard input; otherwise the command's input is empty."""
    script: str | None = None
    """Text of a shell script, which `/bin/sh -c` runs in the guest; empty with `copy`."""
    terminal: ExecTerminal | None = None
    """Terminal of the command; null: the command has pipes."""


@dataclass(kw_only=True)
class ExecTerminal:
    """Terminal of a command that runs in a guest."""

    columns: int
    """Number of columns, in characters."""
    kind: str
    """Type of the terminal, for the environment variable `TERM`, such as `xterm-256color`."""
    rows: int
    """Number of rows, in characters."""


@dataclass(kw_only=True)
class FullReport:
    """Response of `GET /v1/report`."""

    fold: EngineStats
    """Counters and settings of folding."""
    ledger: dict[str, Any]
    """Memory use of the host and of each VM."""


@dataclass(kw_only=True)
class GuestCopy:
    """Copy of files between a guest and the client, through the standard input or output of a
    streamed command. Archives are tar archives as `memfold vm cp` makes them."""

    kind: GuestCopyKind
    """What the guest does."""
    name: str | None = None
    """Name of the copy in a directory; only with `receive_archive`."""
    path: str
    """Absolute path in the guest. `receive_archive`: path of the copy, or of the directory for
    it."""


@dataclass(kw_only=True)
class LentPart:
    """Part of a VM's swap disk that one lender holds in its RAM."""

    bytes: int
    """Bytes of the swap disk that this lender holds; rounded up if the disk is striped over several
    lenders."""
    copy: int
    """Number of the swap disk's copy to which this part belongs: 0 or 1."""
    lender: str
    """Name of the lending host."""


@dataclass(kw_only=True)
class PullBody:
    """Request body of `POST /v1/snapshots/{name}/pull`."""

    allow_arguments: bool | None = None
    """Whether a pulled snapshot may bring arguments for QEMU although no signature is checked."""
    domain: str | None = None
    """Trust domain of the snapshot on this host; unset: its VMs share no memory with other VMs."""
    from_: str | None = None
    """Name of the snapshot in the object store; unset: the name that the snapshot gets on this
    host."""
    stream: bool | None = None
    """Whether the request ends as soon as VMs can be started from the snapshot. The rest is then
    fetched while they run."""
    trust: str | None = None
    """Ed25519 public key in PEM form. A snapshot that the matching private key has not signed is
    refused. Unset: signatures are not checked."""
    url: str
    """URL of the object store."""


@dataclass(kw_only=True)
class PullReport:
    """Result of a pull, which copied a snapshot from an object store to this host."""

    complete: bool
    """Whether the whole snapshot has arrived. If not, the rest is fetched while VMs run from it."""
    fetched_bytes: int
    """Part of `stored_bytes` that was fetched; the rest was on this host already."""
    name: str
    """Name of the snapshot on this host."""
    received_bytes: int
    """Compressed bytes that the store sent for `fetched_bytes`."""
    stored_bytes: int
    """Bytes of the snapshot's files before compression, without chunks that hold only zeroes."""
    took_s: float
    """Duration of the pull in seconds."""
    trusted: bool
    """Whether the snapshot's signature was checked with a trusted key."""
    url: str
    """URL of the object store."""


@dataclass(kw_only=True)
class PushBody:
    """Request body of `POST /v1/snapshots/{name}/push`."""

    key: str | None = None
    """Ed25519 private key in PEM form, with which the snapshot is signed; unset: the snapshot is
    not signed."""
    to: str | None = None
    """Name that the snapshot gets in the object store; unset: its name on this host."""
    url: str
    """URL of the object store: `file://`, `s3://`, `gs://`, `az://`, `http://` or `https://`."""


@dataclass(kw_only=True)
class PushReport:
    """Result of a push, which copied a snapshot from this host into an object store."""

    name: str
    """Name of the snapshot in the object store."""
    new_bytes: int
    """Part of `stored_bytes` that the store did not have before."""
    sent_bytes: int
    """Compressed bytes that were sent: for `new_bytes`, and for the pages that VMs touch at once,
    which are sent a second time, together."""
    signed: bool
    """Whether the snapshot's description was signed."""
    stored_bytes: int
    """Bytes of the snapshot's files before compression, without chunks that hold only zeroes."""
    took_s: float
    """Duration of the push in seconds."""
    url: str
    """URL of the object store."""


@dataclass(kw_only=True)
class RebootRequest:
    """Request body of `POST /v1/vms/{name}/reboot`."""

    from_boot_snapshot: bool | None = None
    """Whether memfold restores the VM, disks included, to its state right after its boot. `false`:
    the guest reboots."""
    timeout_s: float
    """Longest wait for the guest's agent to answer after the reboot, in seconds, 0 or more."""


@dataclass(kw_only=True)
class RekeyReport:
    """Response of `POST /v1/snapshots/{name}/rekey`."""

    key: str
    """Name of the key with which the snapshot is encrypted now."""
    name: str
    """Name of the snapshot."""
    old_key: str | None = None
    """Name of the key before; unset if the snapshot had this key already."""


@dataclass(kw_only=True)
class RekeyRequest:
    """Request body of `POST /v1/snapshots/{name}/rekey`."""

    key_name: str
    """Name of the new key, among those of the daemon. The daemon needs the old key, too."""


@dataclass(kw_only=True)
class RemoteSnapshot:
    """A snapshot in an object store."""

    created_s: int
    """Time at which the save ended, in seconds since 1970."""
    memory_bytes: int
    """Size of the saved VM's RAM, in bytes."""
    name: str
    """Name of the snapshot in the object store."""
    problem: str | None = None
    """Reason why the snapshot cannot be pulled; unset if it can be."""
    signed: bool
    """Whether the store has a signature of the snapshot's description. The signature itself is not
    checked."""
    stored_bytes: int
    """Bytes of the snapshot's files before compression, without chunks that hold only zeroes. Other
    snapshots may share chunks with this one."""
    vm: str
    """Name of the VM that was saved; empty if the snapshot's description is damaged."""


@dataclass(kw_only=True)
class RemoteStore:
    """Request body of `POST /v1/remote-snapshots/list` and of `POST /v1/remote-
    snapshots/{name}/remove`."""

    url: str
    """URL of the object store."""


@dataclass(kw_only=True)
class RemoveReport:
    """Result of removing a snapshot from an object store."""

    bytes_removed: int
    """Bytes that the removed chunks and indexes took in the store."""
    kept_because: str | None = None
    """Reason why no chunk and no index was removed: the description or index of another snapshot
    cannot be read, so the chunks that it needs are not known. Unset: unneeded chunks were
    removed."""
    name: str
    """Name of the removed snapshot."""
    objects_left: int
    """Number of chunks and indexes that no snapshot names, but that were kept because they are
    younger than a day: a running push may need them. A later removal removes them."""
    objects_removed: int
    """Number of chunks and indexes that were removed because no snapshot names them."""


@dataclass(kw_only=True)
class Renewal:
    """Result of renewing the identities of a restored VM."""

    done: list[str]
    """Identities that the guest has renewed, as text."""
    left: list[str]
    """Identities that are still those of the snapshot, each with the reason."""
    pending: bool
    """Whether the guest has not answered yet; the lists are then empty."""


@dataclass(kw_only=True)
class RestoreRequest:
    """Request body of `POST /v1/snapshots/{name}/restore`."""

    despite_brake: bool | None = None
    """Whether the VM is started although the brake is on, or would be on with this VM."""
    disks: str | None = None
    """Directory for the restored VM's own copies of its writable disks (`VM-diskN.qcow2`), which
    remain when the VM ends. Unset: the VM writes to temporary overlays."""
    force: bool | None = None
    """Whether the VM is started even if another VM runs from the same snapshot and the guest cannot
    renew its identity."""
    forwards: list[str] = field(default_factory=list)
    """Host ports that are forwarded into the guest, instead of those of the saved VM:
    `[tcp:|udp:][ADDRESS:]PORT:GUEST-PORT`; PORT 0: any free port."""
    keep_clock: bool | None = None
    """Whether the guest's clock continues from the moment of the save. `false`: the guest's clock
    is set to the host's when the agent answers."""
    prefetch: bool | None = None
    """Whether memfold prefetches the pages that an earlier VM of the snapshot accessed first.
    `false`: each page is loaded when the guest accesses it."""
    renew: Renew | None = None
    """Which identities of the saved VM are replaced in the restored VM."""
    ttl_s: int | None = None
    """Time to live of the VM in seconds, as in a VM's description. Unset: no limit."""
    vm: str
    """Name of the restored VM."""


@dataclass(kw_only=True)
class SaveRequest:
    """Request body of `POST /v1/snapshots`."""

    compress: bool | None = None
    """Whether the snapshot's RAM image is compressed. A compressed snapshot has no parent."""
    drop_s: int | None = None
    """Longest time for the guest to drop its caches, in seconds; caches that remain are saved.
    Unset: the time to write the page cache to the disk with the snapshots, 5 s to 120 s."""
    encrypt: bool | None = None
    """Whether the snapshot's memory and device state are encrypted. An encrypted snapshot has no
    parent."""
    keep: KeepChoice | None = None
    """Which of the guest's caches the snapshot keeps."""
    keep_clock: bool | None = None
    """Whether the guest's clock stays behind by the time for which the save stopped the VM.
    `false`: after a stop of 100 ms or longer, the guest's clock is set to the host's."""
    key: str | None = None
    """Name of the key with which the snapshot is encrypted. Unset: the only key that the daemon
    has."""
    live: bool | None = None
    """Whether the VM runs while its RAM is copied. The snapshot is of one instant in either
    case."""
    name: str
    """Name that the snapshot gets."""
    parent: str | None = None
    """Snapshot whose pages the new one refers to instead of saving them again. Unset: the snapshot
    from which the VM runs, if it runs from one."""
    plain_disks: bool | None = None
    """Whether disks and other files in an encrypted snapshot may be unencrypted. `false`: a save
    that would put such files into the snapshot is refused."""
    vm: str
    """Name of the VM to save."""
    whole: bool | None = None
    """Whether all pages are saved, even if the VM runs from a snapshot."""


@dataclass(kw_only=True)
class SetReport:
    """Response of `POST /v1/vms/{name}/settings`."""

    name: str
    """Name of the VM."""
    settings: list[ChangedSetting]
    """The settings, sorted by name."""


@dataclass(kw_only=True)
class SetRequest:
    """Request body of `POST /v1/vms/{name}/settings`."""

    settings: dict[str, str]
    """Values by the names of settings, which are the fields of a definition: a TOML value, or just
    text. An empty text removes the field."""
    when: SetWhen | None = None
    """When the settings take effect."""


@dataclass(kw_only=True)
class SnapshotInfo:
    """Summary of a snapshot."""

    created_s: int
    """Time at which the save ended, in seconds since 1970."""
    disk_bytes: int
    """Bytes that the snapshot's files use on disk now."""
    domain: str | None = None
    """Trust domain of the snapshot; null: its VMs share memory only with each other."""
    fork: bool
    """Whether forks start from the snapshot, so that it is removed when no VM and no other snapshot
    needs it."""
    key: str | None = None
    """Name of the key with which the snapshot's memory is encrypted; unset if it is not
    encrypted."""
    memory_bytes: int
    """Size of the saved VM's RAM, in bytes."""
    name: str
    """Name of the snapshot."""
    parent: str | None = None
    """Snapshot that this one is a layer on; unset if it has all pages."""
    parent_bytes: int
    """Bytes of RAM that the layer lacks, because files of its parent hold them."""
    problem: str | None = None
    """Reason why the snapshot cannot be used; unset if it can be used."""
    users: list[str]
    """Names of the VMs that run from the snapshot."""
    vm: str
    """Name of the VM that was saved."""


@dataclass(kw_only=True)
class StopReport:
    """Result of stopping a VM."""

    how: str
    """How the VM ended: `powered_down`: the guest shut down; `already`: the VM had ended before;
    `quit`: QEMU was told to quit; `killed`: QEMU did not answer and was killed."""
    name: str
    """Name of the VM that was stopped."""
    overdue: bool
    """Whether the guest was asked to shut down and did not do so in time."""
    took_s: float
    """Time from the request to the VM's end, in seconds."""
    why: str | None = None
    """Why QEMU was told to quit or was killed, as text; null: it was not."""


@dataclass(kw_only=True)
class StopRequest:
    """Request body of `POST /v1/vms/{name}/stop`."""

    timeout_s: float
    """Time for the guest to shut down, in seconds, after which QEMU is ended. 0: QEMU is ended
    without asking the guest."""


@dataclass(kw_only=True)
class VersionInfo:
    """Response of `GET /v1/version`."""

    pid: int
    """Process ID of the daemon."""
    state: str
    """State directory of the daemon, which holds the files of its VMs."""
    version: str
    """Package version of the daemon."""


@dataclass(kw_only=True)
class VmInfo:
    """A VM as `memfold vm list` shows it."""

    agent: str | None = None
    """Kernel version of the guest, as the guest's agent reports it; unset if no agent is
    connected."""
    agent_problems: list[str]
    """Problems that the guest's agent reports, as text."""
    allowed: list[str] | None = None
    """What the guest's owner lets the host do in the guest, as words of the agent's configuration,
    such as `exec`; unset if no agent is connected, or if it is older and allows everything."""
    boot_snapshot: BootSnapshot | None = None
    """Status of the VM's boot snapshot; unset if the VM's description did not ask for one."""
    clock: ClockStep | None = None
    """Correction of the guest's wall clock after the VM was stopped. Unset: the VM was not stopped,
    or keeps its clock."""
    costs: list[str] = field(default_factory=list)
    """Settings by which the VM burdens the host, as text: for example, CPUs that the guest never
    yields."""
    domain: str | None = None
    """Trust domain of the VM; `null`: the VM shares memory with no other."""
    fold_problems: list[str]
    """Reasons why memfold does not fold the VM's RAM; empty: memfold folds it."""
    forwards: list[str] = field(default_factory=list)
    """Host ports forwarded into the guest: `ADDRESS:PORT:GUEST-PORT`."""
    left_out: list[str] = field(default_factory=list)
    """Host resources that the saved VM had and this restored VM lacks, because only one VM can have
    each of them."""
    libvirt: str | None = None
    """Name of the domain in libvirt, if libvirt started the VM."""
    mac: str | None = None
    """MAC address of the guest's card; unset: that of all cards in user-mode networks."""
    name: str
    """Name of the VM, unique on this host."""
    network: str | None = None
    """Network of the guest's card, if memfold made one: `user`, `bridge=NAME`, `macvtap=NAME`, or
    `disconnected`."""
    origin: str
    """Origin of the VM: `started` if memfold started the VM, or `attached`; `defined` for a VM that
    is off, which only `memfold vm list` lists."""
    pid: int
    """Process ID of the VM's QEMU."""
    qemu: str
    """Version of the VM's QEMU."""
    ram_bytes: int
    """Size of the VM's guest RAM, in bytes, without memory that virtio-mem can plug."""
    refold_problems: list[str]
    """Reasons why pages that the guest rewrote can be folded again only while the VM is paused;
    empty: they can be folded again at any time."""
    renewal: Renewal | None = None
    """Identities that were renewed when the VM was restored; unset if this daemon did not restore
    the VM."""
    segments: list[VmSegment] = field(default_factory=list)
    """Segments that the VM maps, in the order of their device slots in QEMU."""
    state: str | None = None
    """State of the VM: `running`; another run state of QEMU (`paused`, `io-error`, `guest-
    panicked`, ...: QEMU's `docs/interop/qemu-qmp-ref`, `RunState`); `starting`; `taking-over`;
    `silent` if QEMU does not answer; or `off`."""
    state_cause: str | None = None
    """Cause of the VM's `state`, as text, if known."""
    state_fix: str | None = None
    """Action that would make the VM run again, as text."""
    swap: VmSwap | None = None
    """The VM's swap disk, if memfold created one."""
    ttl_left_s: float | None = None
    """Seconds until the VM is switched off because nobody has extended its time to live; unset: it
    has no time to live."""


@dataclass(kw_only=True)
class VmSegment:
    """A segment that is attached to a VM."""

    segment: str
    """Reference to the segment, `NAME@GENERATION`."""
    state: SegmentState
    """State of the segment in the guest, for example whether the guest has mounted it."""


@dataclass(kw_only=True)
class VmStats:
    """Statistics of folding in one VM. Counters start when the engine adds the VM."""

    agent_cpu_us: int
    """CPU time of the guest's agent since its start in microseconds, as the agent reports it."""
    agent_ready: bool
    """Whether the guest's agent is connected and has reported all pages that were in the guest's
    page cache when it connected."""
    agent_rss_bytes: int
    """Resident set of the guest's agent in bytes, as the agent reports it."""
    bogus_pages: int
    """Number of hinted pages that were ignored, because they are outside the VM's RAM or of a file
    that the agent never introduced: the agent is faulty or lies."""
    busy_pages: int
    """Number of attempts to fold that failed because a page was busy, for example pinned for
    DMA."""
    cached_pages: int
    """Number of guest pages that cache a page of a file now, as the agent reports them."""
    cached_runs: int
    """Number of runs into which the cached pages fall: the pages of a run are consecutive in guest
    memory and in a file. Folding all runs takes about as many mappings."""
    copied_pages: int
    """Number of the VM's pages that map the page store but that the guest has written since, so
    that the VM has private copies of them."""
    differing_pages: int
    """Number of pages that were not folded because their bytes differed from the page store's."""
    domain: str
    """Trust domain of the VM; `vm/NAME` for a VM without one."""
    events_lost: int
    """Number of page cache events that the guest's kernel overwrote before the agent read them."""
    folded_back_pages: int
    """Number of the VM's private copies that equalled the snapshot's image again and were dropped
    (fold-back)."""
    folded_pages: int
    """Number of anonymous pages of the VM that were folded."""
    freeze_histogram: list[int]
    """Histogram of the times for which runs of the VM's pages were frozen: bucket i counts runs
    frozen for 2^i to 2^(i+1) ns."""
    freeze_max_ns: int
    """Longest time for which a run of the VM's pages was frozen, in nanoseconds. A vCPU that
    touches the run waits meanwhile."""
    hint_pages: int
    """Number of pages in all hints that the guest's agent has sent."""
    hint_runs: int
    """Number of hints (runs of pages) that the guest's agent has sent."""
    hints_dropped: int
    """Number of hints that the engine dropped because too many hints of this VM waited. The engine
    finds their pages later by a search of all tables."""
    mapped_pages: int
    """Number of the VM's pages that map the page store, including those that the guest has written
    since."""
    mappings: int
    """Number of mappings of the QEMU process when the engine last read `/proc/PID/maps`."""
    matched_folded_pages: int
    """Number of cached pages that match a page of another VM or of the page store and that are
    shared already: folded and not written since, or mapped from the snapshot's image. As of the
    last sync with the kernel's page tables."""
    matched_pages: int
    """Number of cached pages that can probably be shared: another VM of the trust domain caches the
    same file page, or the page store holds it."""
    name: str
    """Name of the VM."""
    over_limit_pages: int
    """Number of reported pages that were ignored, because the agent reported too many pages per
    second or the engine's tables for this VM were full."""
    pause_max_ms: int
    """Longest time for which memfold stopped the VM to fold pages, in milliseconds."""
    pauses: int
    """Number of times that memfold stopped the VM for a moment to fold pages again or back. This is
    needed if pages cannot be write-protected, for example because a disk uses direct I/O."""
    problem: str | None = None
    """Reason why the VM is not folded; null if the VM may be folded."""
    refolded_pages: int
    """Number of pages that were folded although they mapped the page store or a snapshot's image
    already, usually because the guest had written them."""
    template_copied_pages: int
    """Number of the VM's pages that are mapped from the files of its snapshot but that the guest
    has written, so that the VM has private copies of them."""
    template_pages: int
    """Number of the VM's pages that are privately mapped from the files of its snapshot (the RAM
    image and disks), written by the guest or not."""
    template_shared_pages: int | None = None
    """Number of the VM's pages that still show data of its snapshot's files: the guest has not
    written them, and they are not in a hole of the image."""
    zero_pages: int
    """Number of the VM's pages that memfold discarded because they held only zeroes. The host got
    their memory back."""
    zero_saved_pages: int
    """Number of pages that memfold discarded because they held only zeroes and that the guest has
    not written since, as of the last sync with the kernel's page tables."""


@dataclass(kw_only=True)
class VmSwap:
    """Status of a VM's swap disk. The disk's contents do not count as guest RAM."""

    bytes: int
    """Size of the swap disk, in bytes."""
    durability: Durability | None = None
    """Protection of the swapped data against a lender's death; null: the disk is not on lent
    RAM."""
    lent: list[LentPart]
    """Parts of the swap disk that lenders hold, one for each lender: all parts of the first copy,
    then those of the second."""
    place: SwapPlace
    """Where the data of the swap disk is now."""
