"""The client for asyncio: the methods of `memfold.Client` and `memfold.Vm`, in threads.

async with AsyncClient().clone("warm") as vm:
    print((await vm.exec(["uname", "-a"])).stdout)

A cancelled call returns at once, but its request continues on its thread. Only a cancelled start or
end of a VM waits for the daemon's answer, so that no VM is left.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from .client import Client, Vm
from .errors import MemfoldError
from .models import VmInfo

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
    ) -> None:
        """Makes a client like `memfold.Client`."""
        super().__init__(Client(address, token=token, ca=ca, timeout=timeout))

    version = threaded(Client.version)
    doctor = threaded(Client.doctor)
    report = threaded(Client.report)
    events = threaded(Client.events)
    vms = threaded(Client.vms)
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
    push = threaded(Client.push)
    pull = threaded(Client.pull)
    remote_snapshots = threaded(Client.remote_snapshots)
    remove_remote_snapshot = threaded(Client.remove_remote_snapshot)


class AsyncVm(Wrapper[Vm]):
    """A VM. The end of an `async with` block switches the VM off, unless it is kept."""

    refresh = threaded(Vm.refresh)
    wait_agent = threaded(Vm.wait_agent)
    exec = threaded(Vm.exec)
    pause = threaded(Vm.pause)
    resume = threaded(Vm.resume)
    reboot = threaded(Vm.reboot)
    save = threaded(Vm.save)
    stop = threaded(Vm.stop)
    close = threaded(Vm.close)

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
