"""The daemon and its VMs, as objects whose methods send one request each."""

import dataclasses
import json
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from . import copies
from .codec import decode, encode
from .errors import MemfoldError, NoDaemon, Refused, Timeout
from .models import (
    Definition,
    DefinitionInfo,
    ErrorBody,
    Event,
    EventGap,
    ExecRequest,
    ExecResult,
    ExecStreamRequest,
    ExecTerminal,
    FullReport,
    GuestCopy,
    KeepChoice,
    PullBody,
    PullReport,
    PushBody,
    PushReport,
    RebootRequest,
    RekeyReport,
    RekeyRequest,
    RemoteSnapshot,
    RemoteStore,
    RemoveReport,
    Renew,
    RestoreRequest,
    SaveRequest,
    SetReport,
    SetRequest,
    SnapshotInfo,
    StopReport,
    StopRequest,
    VersionInfo,
    VmInfo,
)
from .process import Process
from .transport import Transport
from .ttl import Extender

T = TypeVar("T")

LOOK_AGAIN_S = 0.05
"""Interval at which a VM is read again while the client waits for its guest."""

GIVE_UP_S = 10.0
"""Time in which the daemon may still begin to start a VM whose request got no answer."""


RECONNECT_S = 1.0
"""Time after which a client reconnects to the stream of events."""


@dataclasses.dataclass(frozen=True)
class Followed:
    """An event of `Client.follow_events`, with its number."""

    id: int | None
    """Number with which the stream can be resumed; `None` for a gap."""
    event: Event | EventGap
    """The event; `EventGap`: events before the next one were missed."""


class Client:
    """A client of a memfold daemon. It opens a connection for each request."""

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        ca: str | None = None,
        timeout: float | None = None,
        ttl_s: int | None = 60,
    ) -> None:
        """Makes a client, without a request to the daemon.

        `address`: path of the daemon's Unix socket, or `https://HOST:PORT`; unset: the variable
        `MEMFOLD_SOCKET`, or /run/memfold/memfold.sock. `token`: for https, a token of the daemon.
        `ca`: file with the certificates that may sign the daemon's; unset: those of the system.
        `timeout`: longest time to wait for an answer, in seconds, in addition to the time that a
        request gives to a guest; unset: no limit. `ttl_s`: VMs that this client starts and does not
        keep are switched off so many seconds after this program has ended, however it ends, or has
        dropped their objects; unset: they continue to run.
        """
        self._transport = Transport(address, token, ca)
        self._timeout = timeout
        self._ttl_s = ttl_s
        self._extender = None if ttl_s is None else Extender(ttl_s)

    def _call(
        self, kind: type[T], method: str, path: str, body: Any = None, guest_s: float = 0.0
    ) -> T:
        """Sends a request. `guest_s`: seconds that the request gives to a guest."""
        limit = None if self._timeout is None else self._timeout + guest_s
        answer = self._transport.request(method, path, encode(body), limit)
        try:
            value: T = decode(kind, answer)
        except (TypeError, AttributeError) as error:
            raise MemfoldError(
                f"cannot read the answer to {method} {path} ({error}); "
                "use a daemon and a client of the same version"
            ) from error
        return value

    def version(self) -> VersionInfo:
        """Returns version, PID and state directory of the daemon."""
        return self._call(VersionInfo, "GET", "/v1/version")

    def doctor(self) -> dict[str, Any]:
        """Returns the checks of the daemon's host."""
        return self._call(dict[str, Any], "GET", "/v1/doctor")

    def report(self) -> FullReport:
        """Returns the ledger and the figures of folding."""
        return self._call(FullReport, "GET", "/v1/report")

    def events(self, count: int = 200) -> list[Event]:
        """Returns the last events, newest first; at most 1,000."""
        return self._call(list[Event], "GET", f"/v1/events?count={count}")

    def follow_events(
        self, after: int | None = None, *, count: int = 0, patience_s: float = 60.0
    ) -> Iterator[Followed]:
        """Yields events as they happen, without an end. Reconnects, also after a restart of the
        daemon, and misses no event that the daemon still has.

        `after`: number of the last event that the caller has (`Followed.id`); unset: begin with the
        last `count` events. `patience_s`: longest time for which the daemon may be away.
        """
        gone: float | None = None
        connected = False
        while True:
            headers = {} if after is None else {"Last-Event-ID": str(after)}
            path = f"/v1/events/stream?count={count}"
            try:
                connection, response = self._transport.open(
                    "GET", path, None, headers, self._timeout
                )
            except NoDaemon:
                now = time.monotonic()
                gone = now if gone is None else gone
                if not connected or now - gone > patience_s:
                    raise
                time.sleep(RECONNECT_S)
                continue
            gone, connected = None, True
            try:
                for number, followed in _sent_events(response):
                    after = number if number is not None else after
                    if followed is not None:
                        yield followed
            except (OSError, ValueError):
                # The daemon ended.
                pass
            finally:
                response.close()
                connection.close()
            time.sleep(RECONNECT_S)

    def vms(self) -> list[VmInfo]:
        """Returns all VMs that the daemon knows."""
        return self._call(list[VmInfo], "GET", "/v1/vms")

    def vm(self, name: str) -> "Vm":
        """Returns a VM that exists. The end of a `with` block does not stop this VM."""
        return Vm(self, self._info(name), keep=True)

    def _info(self, name: str) -> VmInfo:
        for info in self.vms():
            if info.name == name:
                return info
        raise Refused(404, ErrorBody(error=f"no VM '{name}'", hint="Client.vms() lists all VMs"))

    def run(
        self, description: Mapping[str, Any], *, despite_brake: bool = False, keep: bool = False
    ) -> "Vm":
        """Starts a VM. The guest boots meanwhile; `Vm.wait_agent` waits for it.

        `description`: fields of a file for `memfold vm run --file`. `despite_brake`: starts the VM
        although the brake is on. `keep`: neither the end of a `with` block nor the end of this
        program stops the VM.
        """
        query = "?" + urlencode({"despite_brake": "true"}) if despite_brake else ""
        name = str(description.get("name", ""))
        described = dict(description)
        if not keep and self._ttl_s is not None:
            described.setdefault("ttl_s", self._ttl_s)
        return self._start(name, "/v1/vms" + query, described, keep)

    def clone(
        self,
        snapshot: str,
        name: str | None = None,
        *,
        renew: Renew = "identity",
        force: bool = False,
        despite_brake: bool = False,
        prefetch: bool = False,
        keep_clock: bool = False,
        disks: str | None = None,
        forwards: Sequence[str] = (),
        ready_s: float = 60.0,
        keep: bool = False,
    ) -> "Vm":
        """Starts a VM with an identity of its own from a snapshot, and waits for its guest.

        `name`: unset: the snapshot's name with a random suffix. `ready_s`: longest time in seconds
        until the guest has renewed its identity and runs commands; 0: do not wait. `keep`: neither
        the end of a `with` block nor the end of this program stops the VM. The other settings are
        those of `RestoreRequest`.
        """
        # A name has at most 64 characters.
        vm = name or f"{snapshot[:51]}-{secrets.token_hex(6)}"
        request = RestoreRequest(
            vm=vm,
            renew=renew,
            force=force,
            despite_brake=despite_brake,
            prefetch=prefetch,
            keep_clock=keep_clock,
            disks=disks,
            forwards=list(forwards),
            ttl_s=None if keep else self._ttl_s,
        )
        path = f"/v1/snapshots/{quote(snapshot, safe='')}/restore"
        started = self._start(vm, path, request, keep, unique=name is None)
        if ready_s > 0:
            try:
                started._wait(ready_s, _is_renewed)
            except BaseException as error:
                started.__exit__(type(error), error, None)
                raise
        return started

    def restore(
        self,
        snapshot: str,
        name: str,
        *,
        renew: Renew = "random",
        force: bool = False,
        despite_brake: bool = False,
        prefetch: bool = False,
        keep_clock: bool = False,
        disks: str | None = None,
        forwards: Sequence[str] = (),
        ready_s: float = 60.0,
        keep: bool = False,
    ) -> "Vm":
        """Starts a VM from a snapshot that continues as the saved VM; otherwise as `clone`."""
        return self.clone(
            snapshot,
            name,
            renew=renew,
            force=force,
            despite_brake=despite_brake,
            prefetch=prefetch,
            keep_clock=keep_clock,
            disks=disks,
            forwards=forwards,
            ready_s=ready_s,
            keep=keep,
        )

    def definitions(self) -> list[DefinitionInfo]:
        """Returns all defined VMs."""
        return self._call(list[DefinitionInfo], "GET", "/v1/definitions")

    def define(
        self, description: Mapping[str, Any], *, autostart: bool = False, order: int = 0
    ) -> DefinitionInfo:
        """Stores the definition of a VM, and replaces an older one.

        `description`: fields of a file for `memfold vm run --file`. `autostart`: the daemon starts
        the VM after each boot of the host. `order`: VMs with a smaller number start earlier.
        """
        request = Definition(autostart=autostart, order=order, vm=dict(description))
        path = _definition(str(description.get("name", "")))
        return self._call(DefinitionInfo, "PUT", path, request)

    def undefine(self, name: str) -> None:
        """Removes the definition of a VM; if the VM runs, it keeps running."""
        self._call(type(None), "DELETE", _definition(name))

    def start(self, name: str, *, despite_brake: bool = False) -> "Vm":
        """Starts a defined VM. Neither a `with` block nor this program stops this VM at its end."""
        query = "?" + urlencode({"despite_brake": "true"}) if despite_brake else ""
        return self._start(name, f"{_definition(name)}/start{query}", None, keep=True)

    def _start(
        self, name: str, path: str, body: Any, keep: bool, unique: bool = False
    ) -> "Vm":
        """Starts a VM. `unique`: whether no other VM can have this name."""
        try:
            return Vm(self, self._call(VmInfo, "POST", path, body), keep)
        except Refused:
            raise
        except BaseException:
            # The daemon may start the VM nevertheless; its time to live then ends it. A VM with a
            # given name may be somebody else's.
            if unique and not keep:
                self._abandon(name)
            raise

    def _abandon(self, name: str) -> None:
        """Ends a VM whose start got no answer. The daemon may know the VM only a moment later."""
        end = time.monotonic() + GIVE_UP_S
        while time.monotonic() < end:
            try:
                self._stop(name, 0.0)
                return
            except Refused as error:
                if error.status != 404:
                    return
            except MemfoldError:
                return
            time.sleep(LOOK_AGAIN_S)

    def _stop(self, name: str, timeout_s: float) -> StopReport:
        path = f"/v1/vms/{quote(name, safe='')}/stop"
        return self._call(StopReport, "POST", path, StopRequest(timeout_s=timeout_s), timeout_s)

    def snapshots(self) -> list[SnapshotInfo]:
        """Returns all snapshots, with the VMs that run from them."""
        return self._call(list[SnapshotInfo], "GET", "/v1/snapshots")

    def snapshot(self, name: str) -> dict[str, Any]:
        """Returns the manifest of a snapshot."""
        return self._call(dict[str, Any], "GET", f"/v1/snapshots/{quote(name, safe='')}")

    def remove_snapshot(self, name: str) -> None:
        """Removes a snapshot that is not in use."""
        self._call(type(None), "DELETE", f"/v1/snapshots/{quote(name, safe='')}")

    def rekey(self, name: str, key: str) -> RekeyReport:
        """Changes the key of an encrypted snapshot. VMs that run from the snapshot go on.

        `key`: name of the new key among those of the daemon, which needs the old key, too.
        """
        path = f"/v1/snapshots/{quote(name, safe='')}/rekey"
        return self._call(RekeyReport, "POST", path, RekeyRequest(key_name=key))

    def push(
        self, name: str, url: str, *, to: str | None = None, key: str | None = None
    ) -> PushReport:
        """Copies a snapshot to an object store. `PushBody` describes the settings."""
        path = f"/v1/snapshots/{quote(name, safe='')}/push"
        return self._call(PushReport, "POST", path, PushBody(url=url, to=to, key=key))

    def pull(
        self,
        name: str,
        url: str,
        *,
        remote_name: str | None = None,
        domain: str | None = None,
        trust: str | None = None,
        allow_arguments: bool = False,
    ) -> PullReport:
        """Copies a snapshot from an object store. `PullBody` describes the settings."""
        request = PullBody(
            url=url, from_=remote_name, domain=domain, trust=trust, allow_arguments=allow_arguments
        )
        path = f"/v1/snapshots/{quote(name, safe='')}/pull"
        return self._call(PullReport, "POST", path, request)

    def remote_snapshots(self, url: str) -> list[RemoteSnapshot]:
        """Returns the snapshots in an object store."""
        store = RemoteStore(url=url)
        return self._call(list[RemoteSnapshot], "POST", "/v1/remote-snapshots/list", store)

    def remove_remote_snapshot(self, name: str, url: str) -> RemoveReport:
        """Removes a snapshot from an object store."""
        path = f"/v1/remote-snapshots/{quote(name, safe='')}/remove"
        return self._call(RemoveReport, "POST", path, RemoteStore(url=url))


class Vm:
    """A VM. The end of a `with` block switches the VM off, unless it is kept.

    A VM with a time to live is extended as long as the program holds this object.
    """

    def __init__(self, client: Client, info: VmInfo, keep: bool) -> None:
        self._client = client
        self._path = f"/v1/vms/{quote(info.name, safe='')}"
        self.info = info
        """The VM as the daemon described it last."""
        self.keep = keep
        """Whether the VM continues to run after a `with` block."""
        self._ends_with_us = not keep and info.ttl_left_s is not None
        """Whether this program started the VM with a time to live."""
        if self._ends_with_us and client._extender is not None:
            client._extender.add(self)

    def __repr__(self) -> str:
        return f"<Vm {self.name!r}: {self.info.state}>"

    @property
    def name(self) -> str:
        """Name of the VM, unique on its host."""
        return self.info.name

    def _extend(self, limit_s: float) -> None:
        path = self._path + "/extend"
        self._client._transport.request("POST", path, None, limit_s)

    def _live_on(self) -> None:
        """Ends the VM's time to live, so that it runs until somebody stops it."""
        if self._client._extender is not None:
            self._client._extender.remove(self)
        request = SetRequest(settings={"ttl_s": ""}, when="now")
        self._client._call(SetReport, "POST", self._path + "/settings", request)

    def refresh(self) -> VmInfo:
        """Reads the VM again."""
        self.info = self._client._info(self.name)
        return self.info

    def wait_agent(self, limit_s: float = 300.0) -> VmInfo:
        """Waits until the guest runs commands, at most `limit_s` seconds."""
        return self._wait(limit_s, lambda info: info.agent is not None and _is_renewed(info))

    def _wait(self, limit_s: float, is_ready: Callable[[VmInfo], bool]) -> VmInfo:
        end = time.monotonic() + limit_s
        while not is_ready(self.refresh()):
            if time.monotonic() > end:
                raise Timeout(f"the agent of VM '{self.name}' did not answer within {limit_s} s")
            time.sleep(LOOK_AGAIN_S)
        return self.info

    def exec(self, command: str | Sequence[str], *, timeout_s: float = 600.0) -> ExecResult:
        """Runs a command in the guest, as root, and returns its output and exit code.

        `command`: a program with its arguments, or the text of a shell script. The command is
        killed after `timeout_s` seconds.
        """
        script = command if isinstance(command, str) else shlex.join(command)
        request = ExecRequest(script=script, timeout_s=timeout_s)
        return self._client._call(ExecResult, "POST", self._path + "/exec", request, timeout_s)

    def popen(
        self,
        command: str | Sequence[str],
        *,
        stdin: bool = False,
        terminal: tuple[int, int] | None = None,
        term: str = "xterm-256color",
    ) -> Process:
        """Starts a command in the guest, as root, whose input and output are streamed.

        `command`: as for `exec`. `stdin`: whether input will be sent; otherwise the input is empty.
        `terminal`: rows and columns of a terminal for the command, of type `term`; unset: the
        command has pipes. The command ends with the connection, so with this process.
        """
        script = command if isinstance(command, str) else shlex.join(command)
        place = None
        if terminal is not None:
            place = ExecTerminal(kind=term, rows=terminal[0], columns=terminal[1])
        return self._stream(ExecStreamRequest(script=script, input=stdin, terminal=place))

    def _stream(self, request: ExecStreamRequest) -> Process:
        headers = {"Connection": "upgrade", "Upgrade": "memfold-exec"}
        connection, response = self._client._transport.open(
            "POST", self._path + "/exec/stream", encode(request), headers, self._client._timeout
        )
        if response.status != 101:
            connection.close()
            raise MemfoldError(f"the daemon answered with HTTP status {response.status}, not 101")
        return Process(connection, response.fp)

    def read_file(self, path: str) -> bytes:
        """Returns the content of a file in the guest."""
        copy = GuestCopy(kind="send_file", path=path)
        with self._stream(ExecStreamRequest(copy=copy)) as process:
            done = process.communicate()
        if done.code != 0:
            raise MemfoldError(_said(self.name, done.stderr, done.code))
        return done.stdout

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Makes a file in the guest, or replaces one: whole or not at all."""
        self._receive(path, lambda out: copies.pack_bytes(out, data, mode), "")

    def copy_in(self, source: str | Path, destination: str) -> None:
        """Copies a file or directory of this host to a path in the guest, whole or not at all.

        An existing directory, or a path that ends with `/`, gets the copy under its old name.
        """
        path = Path(source).resolve(strict=True)
        self._receive(destination, lambda out: copies.pack(out, path), path.name)

    def copy_out(self, source: str, destination: str | Path) -> None:
        """Copies a file or directory of the guest to a path of this host, whole or not at all."""
        destination = Path(destination)
        if destination.is_dir():
            destination /= Path(source).name
        copy = GuestCopy(kind="send_archive", path=source)
        with self._stream(ExecStreamRequest(copy=copy)) as process:
            output = copies.Output(process)
            try:
                copies.unpack(output, destination)  # type: ignore[arg-type]
            except MemfoldError as error:
                while output.read(1 << 16):
                    pass
                code = process.wait()
                if code != 0:
                    raise MemfoldError(_said(self.name, output.errors, code)) from error
                raise

    def _receive(self, destination: str, pack: Callable[[Any], None], name: str) -> None:
        copy = GuestCopy(kind="receive_archive", path=destination, name=name)
        with self._stream(ExecStreamRequest(copy=copy, input=True)) as process:
            try:
                pack(copies.Input(process))
                process.close_stdin()
            except BrokenPipeError:
                # The reason is on the command's standard error.
                pass
            errors = b"".join(piece for stream, piece in process if stream == "stderr")
            code = process.wait()
        if code != 0:
            raise MemfoldError(_said(self.name, errors, code))

    def pause(self) -> VmInfo:
        """Makes the guest stand still until the VM is resumed."""
        self.info = self._client._call(VmInfo, "POST", self._path + "/pause")
        return self.info

    def resume(self) -> VmInfo:
        """Resumes the VM after a pause, or after its full disk has free space again."""
        self.info = self._client._call(VmInfo, "POST", self._path + "/resume")
        return self.info

    def reboot(self, *, from_boot_snapshot: bool = False, timeout_s: float = 300.0) -> VmInfo:
        """Reboots the guest, or restores the VM from its boot snapshot, and waits for the agent."""
        request = RebootRequest(from_boot_snapshot=from_boot_snapshot, timeout_s=timeout_s)
        path = self._path + "/reboot"
        self.info = self._client._call(VmInfo, "POST", path, request, timeout_s)
        return self.info

    def save(
        self,
        snapshot: str,
        *,
        keep: KeepChoice = "auto",
        live: bool = False,
        compress: bool = False,
        encrypt: bool | str = False,
        plain_disks: bool = False,
        drop_s: int | None = None,
        keep_clock: bool = False,
    ) -> dict[str, Any]:
        """Saves the VM, which continues to run, and returns the snapshot's manifest.

        `encrypt` encrypts the memory with the key of this name, or with the daemon's only key if it
        is true. `SaveRequest` describes the other settings.
        """
        request = SaveRequest(
            vm=self.name,
            name=snapshot,
            keep=keep,
            live=live,
            compress=compress,
            encrypt=encrypt is not False,
            key=encrypt if isinstance(encrypt, str) else None,
            plain_disks=plain_disks,
            drop_s=drop_s,
            keep_clock=keep_clock,
        )
        return self._client._call(dict[str, Any], "POST", "/v1/snapshots", request)

    def stop(self, timeout_s: float = 30.0) -> StopReport:
        """Shuts the guest down, and switches the VM off after `timeout_s` seconds; 0: at once."""
        return self._client._stop(self.name, timeout_s)

    def close(self) -> None:
        """Switches the VM off at once. It is no error if the VM has ended already."""
        try:
            self.stop(0.0)
        except Refused as error:
            if error.status != 404:
                raise

    def __enter__(self) -> "Vm":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self.keep:
                self.close()
            elif self._ends_with_us:
                self._live_on()
        except MemfoldError as failed:
            # The error of the block is the one to report.
            if error is None:
                raise
            left = "kept" if self.keep else "stopped, and may still run"
            error.add_note(f"VM '{self.name}' could not be {left}: {failed}")


def _said(vm: str, errors: bytes, code: int) -> str:
    said = errors.decode(errors="replace").strip()
    return f"VM '{vm}': {said or f'the command ended with code {code}'}"


def _sent_events(lines: Any) -> Iterator[tuple[int | None, Followed | None]]:
    """Parses server-sent events: lines `field: value`, and an empty line after each event. Yields
    the number of each message, and its event; a message without data only names its number.
    """
    fields: dict[str, str] = {}
    for raw in lines:
        line = raw.decode(errors="replace").rstrip("\r\n")
        if line:
            field, _, value = line.partition(":")
            fields[field] = value.removeprefix(" ")
            continue
        kind, data = fields.get("event"), fields.get("data")
        number = int(fields["id"]) if "id" in fields else None
        fields = {}
        if kind == "event" and data:
            yield number, Followed(number, decode(Event, json.loads(data)))
        elif kind == "gap" and data:
            yield None, Followed(None, decode(EventGap, json.loads(data)))
        elif number is not None:
            yield number, None


def _definition(name: str) -> str:
    return f"/v1/definitions/{quote(name, safe='')}"


def _is_renewed(info: VmInfo) -> bool:
    return (info.renewal is None or not info.renewal.pending) and (
        info.clock is None or not info.clock.pending
    )
