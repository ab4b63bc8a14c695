"""The client for asyncio: the methods of `memfold.Client` and `memfold.Vm`, in threads.

async with AsyncClient().clone("warm") as vm:
    print((await vm.exec(["uname", "-a"])).stdout)

A cancelled call returns at once, but its request continues on its thread. Only a cancelled start or
end of a VM waits for the daemon's answer, so that no VM is left.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from .client import Client, Followed, Vm
from .errors import MemfoldError
from .models import VmInfo
from .process import Piece, Process

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

THREADS = ThreadPoolExecutor(1000, "memfold")
"""Threads of all requests, as many as are under way. asyncio's own pool has six on two CPUs."""


def in_thread(call: Callable[[], T]) -> "asyncio.Future[T]":
    """Calls a function on a thread. The future is no task, so the end of the loop keeps it."""
    return asyncio.get_running_loop().run_in_executor(THREADS, call)


class Wrapper(Generic[S]):
    """An object whose methods run in threads."""

    def __init__(self, sync: S) -> None:
        self._sync = sync


def threaded(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[Wrapper[S], P], Coroutine[Any, Any, T]]:
    """Makes a method of the synchronous object one of its wrapper."""

    @functools.wraps(method)
    async def call(wrapper: Wrapper[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(lambda: method(wrapper._sync, *args, **kwargs))

    return call


def starting(
    method: Callable[Concatenate[Client, P], Vm],
) -> Callable[Concatenate[Wrapper[Client], P], "Starting"]:
    """Makes a method that returns a VM one whose result is awaited, or is a context manager."""

    @functools.wraps(method)
    def call(wrapper: Wrapper[Client], /, *args: P.args, **kwargs: P.kwargs) -> "Starting":
        return Starting(lambda: method(wrapper._sync, *args, **kwargs))

    return call


class AsyncClient(Wrapper[Client]):
    """A client of a memfold daemon for asyncio."""

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        ca: str | None = None,
        timeout: float | None = None,
        ttl_s: int | None = 60,
    ) -> None:
        """Makes a client like `memfold.Client`."""
        super().__init__(Client(address, token=token, ca=ca, timeout=timeout, ttl_s=ttl_s))

    version = threaded(Client.version)
    doctor = threaded(Client.doctor)
    report = threaded(Client.report)
    events = threaded(Client.events)
    vms = threaded(Client.vms)

    async def follow_events(
        self, after: int | None = None, *, count: int = 0, patience_s: float = 60.0
    ) -> AsyncIterator[Followed]:
        """Yields events as they happen, like `memfold.Client.follow_events`.

        After a cancelled wait, the thread ends with the next event.
        """
        events = self._sync.follow_events(after, count=count, patience_s=patience_s)
        while True:
            yield await in_thread(lambda: next(events))

    vm = starting(Client.vm)
    run = starting(Client.run)
    clone = starting(Client.clone)
    restore = starting(Client.restore)
    definitions = threaded(Client.definitions)
    define = threaded(Client.define)
    undefine = threaded(Client.undefine)
    start = starting(Client.start)
    snapshots = threaded(Client.snapshots)
    snapshot = threaded(Client.snapshot)
    remove_snapshot = threaded(Client.remove_snapshot)
    rekey = threaded(Client.rekey)
    push = threaded(Client.push)
    pull = threaded(Client.pull)
    remote_snapshots = threaded(Client.remote_snapshots)
    remove_remote_snapshot = threaded(Client.remove_remote_snapshot)


class AsyncVm(Wrapper[Vm]):
    """A VM. The end of an `async with` block switches the VM off, unless it is kept."""

    refresh = threaded(Vm.refresh)
    wait_agent = threaded(Vm.wait_agent)
    exec = threaded(Vm.exec)
    read_file = threaded(Vm.read_file)
    write_file = threaded(Vm.write_file)
    copy_in = threaded(Vm.copy_in)
    copy_out = threaded(Vm.copy_out)
    pause = threaded(Vm.pause)
    resume = threaded(Vm.resume)
    reboot = threaded(Vm.reboot)
    save = threaded(Vm.save)
    stop = threaded(Vm.stop)
    close = threaded(Vm.close)

    async def popen(
        self,
        command: str | Sequence[str],
        *,
        stdin: bool = False,
        terminal: tuple[int, int] | None = None,
        term: str = "xterm-256color",
    ) -> "AsyncProcess":
        """Starts a command whose input and output are streamed, like `memfold.Vm.popen`."""
        started = in_thread(
            lambda: self._sync.popen(command, stdin=stdin, terminal=terminal, term=term)
        )
        try:
            return AsyncProcess(await asyncio.shield(started))
        except asyncio.CancelledError:
            # The command does not outlive the call.
            started.add_done_callback(_close_started)
            raise

    @property
    def name(self) -> str:
        """Name of the VM, unique on its host."""
        return self._sync.name

    @property
    def info(self) -> VmInfo:
        """The VM as the daemon described it last."""
        return self._sync.info

    async def __aenter__(self) -> "AsyncVm":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        closed = in_thread(lambda: self._sync.__exit__(kind, error, trace))
        try:
            await asyncio.shield(closed)
        except asyncio.CancelledError:
            await closed
            raise


def _close_started(started: "asyncio.Future[Process]") -> None:
    if not started.cancelled() and started.exception() is None:
        THREADS.submit(started.result().close)


class AsyncProcess(Wrapper[Process]):
    """A command that runs in a guest. The end of an `async with` block ends the command."""

    write = threaded(Process.write)
    close_stdin = threaded(Process.close_stdin)
    resize = threaded(Process.resize)
    send_signal = threaded(Process.send_signal)
    read = threaded(Process.read)
    wait = threaded(Process.wait)
    communicate = threaded(Process.communicate)
    close = threaded(Process.close)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self.read()) is not None:
            yield piece

    async def __aenter__(self) -> "AsyncProcess":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.shield(in_thread(self._sync.close))


class Starting:
    """A VM that is started when this is awaited, or at the begin of an `async with` block."""

    def __init__(self, start: Callable[[], Vm]) -> None:
        self._start = start
        self._vm: AsyncVm | None = None

    def __await__(self) -> Generator[Any, None, AsyncVm]:
        return self._begin().__await__()

    async def _begin(self) -> AsyncVm:
        started = in_thread(self._start)
        try:
            return AsyncVm(await asyncio.shield(started))
        except asyncio.CancelledError as cancelled:
            try:
                vm = await started
            except MemfoldError:
                raise cancelled from None
            await AsyncVm(vm).__aexit__(type(cancelled), cancelled, None)
            raise

    async def __aenter__(self) -> AsyncVm:
        self._vm = await self._begin()
        return self._vm

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._vm is not None:
            await self._vm.__aexit__(kind, error, trace)
