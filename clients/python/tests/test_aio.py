"""The client for asyncio."""

import asyncio
import inspect

import pytest
from fake_daemon import FakeDaemon

from memfold import Client, Refused, Vm
from memfold.aio import AsyncClient, AsyncVm


@pytest.mark.parametrize("sync, wrapper", [(Client, AsyncClient), (Vm, AsyncVm)])
def test_the_client_for_asyncio_has_every_method(sync: type, wrapper: type) -> None:
    names = [name for name, _ in inspect.getmembers(sync) if not name.startswith("_")]
    assert names and [name for name in names if not hasattr(wrapper, name)] == []


def test_clones_run_commands_at_the_same_time(daemon: FakeDaemon) -> None:
    daemon.start_s = 0.1

    async def one(client: AsyncClient) -> tuple[str, int]:
        async with client.clone("warm") as vm:
            assert vm.name in daemon.vms and vm.info.name == vm.name
            done = await vm.exec(["true"])
            return done.stdout, done.code

    async def all() -> list[tuple[str, int]]:
        client = AsyncClient(daemon.address)
        return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(all()) == [("true", 3)] * 8
    assert daemon.vms == {}


def test_a_cancelled_start_leaves_no_vm(daemon: FakeDaemon) -> None:
    daemon.start_s = 0.3

    async def cancelled() -> None:
        async with AsyncClient(daemon.address).clone("warm"):
            raise AssertionError("the block is not reached")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cancelled(), 0.1)

    asyncio.run(main())
    assert len(daemon.of("POST", "/v1/snapshots/warm/restore")) == 1
    assert daemon.vms == {}


def test_a_start_that_the_end_of_the_loop_cancels_leaves_no_vm(daemon: FakeDaemon) -> None:
    daemon.start_s = 0.3

    async def main() -> None:
        starting = AsyncClient(daemon.address).clone("warm")
        task = asyncio.ensure_future(starting)
        await asyncio.sleep(0.1)
        assert not task.done()

    asyncio.run(main())
    assert len(daemon.of("POST", "/v1/snapshots/warm/restore")) == 1
    assert daemon.vms == {}


def test_a_block_cancelled_at_its_end_leaves_no_vm(daemon: FakeDaemon) -> None:
    daemon.stop_s = 0.3
    ending = asyncio.Event()

    async def block() -> None:
        async with AsyncClient(daemon.address).clone("warm"):
            ending.set()

    async def main() -> None:
        task = asyncio.ensure_future(block())
        await ending.wait()
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert daemon.vms == {}

    asyncio.run(main())


def test_an_exception_and_a_refusal_reach_the_caller(daemon: FakeDaemon) -> None:
    async def main() -> None:
        client = AsyncClient(daemon.address)
        with pytest.raises(ZeroDivisionError):
            async with client.clone("warm"):
                raise ZeroDivisionError
        kept = await client.clone("warm", "kept", keep=True)
        with pytest.raises(Refused, match="taken"):
            await client.clone("warm", kept.name)

    asyncio.run(main())
    assert list(daemon.vms) == ["kept"]
