"""Tests of streamed commands, copies and events, with a daemon that only pretends."""

import asyncio
import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import memfold
import pytest
from fake_daemon import FakeDaemon, Guest, vm_info
from memfold import copies
from memfold.aio import AsyncClient
from memfold.models import EventGap
from memfold.process import Piece


def echo(guest: Guest) -> int:
    for data in guest.input():
        guest.frame(0, data)
    guest.frame(1, b"end")
    return 3


@pytest.fixture
def vm(daemon: FakeDaemon) -> memfold.Vm:
    daemon.vms["web"] = vm_info("web")
    daemon.commands["cat"] = echo
    return memfold.Client(daemon.address).vm("web")


def test_a_streamed_command_gets_all_input_within_its_room_and_returns_all_output(
    vm: memfold.Vm, daemon: FakeDaemon
) -> None:
    data = os.urandom(1_000_000)
    done = vm.popen(["cat"], stdin=True, terminal=(24, 80)).communicate(data)
    assert done == memfold.Completed(data, b"end", 3)
    [request] = daemon.of("POST", "/v1/vms/web/exec/stream")
    assert request["terminal"] == {"kind": "xterm-256color", "rows": 24, "columns": 80}
    assert request["input"] is True


def test_the_end_of_a_with_block_ends_the_command_even_if_its_output_is_not_read(
    vm: memfold.Vm, daemon: FakeDaemon
) -> None:
    ended: list[bool] = []

    def flood(guest: Guest) -> int:
        try:
            while True:
                guest.frame(0, bytes(1 << 16))
        except OSError:
            ended.append(True)
            raise

    daemon.commands["flood"] = flood
    with vm.popen("flood") as process:
        assert process.read() == ("stdout", bytes(1 << 16))
    end = time.monotonic() + 10
    while not ended:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_command_that_ends_wakes_a_writer_that_waits_for_room(
    vm: memfold.Vm, daemon: FakeDaemon
) -> None:
    daemon.commands["true"] = lambda guest: 0
    with vm.popen("true", stdin=True) as process:
        with pytest.raises(BrokenPipeError):
            process.write(bytes(1 << 20))
        assert process.wait() == 0


def test_signals_and_sizes_reach_the_command(vm: memfold.Vm, daemon: FakeDaemon) -> None:
    orders: list[tuple[int, bytes] | None] = []

    def listen(guest: Guest) -> int:
        orders.extend([guest.order(), guest.order()])
        return 143

    daemon.commands["listen"] = listen
    process = vm.popen("listen")
    process.resize(50, 300)
    process.send_signal(15)
    assert process.wait() == 143
    assert orders == [(2, b"\x32\0\x2c\x01"), (3, b"\x0f")]


def test_the_daemons_reason_is_raised_if_it_ended_the_command(
    vm: memfold.Vm, daemon: FakeDaemon
) -> None:
    def fail(guest: Guest) -> int:
        guest.frame(4, b"the agent is gone")
        return 0

    daemon.commands["fail"] = fail
    with pytest.raises(memfold.MemfoldError, match="the agent is gone"):
        vm.popen("fail").wait()


def test_asyncio_reads_and_writes_a_streamed_command(vm: memfold.Vm, daemon: FakeDaemon) -> None:
    async def talk() -> list[Piece | None]:
        there = await AsyncClient(daemon.address).vm("web")
        async with await there.popen("cat", stdin=True) as process:
            await process.write(b"one")
            first = await process.read()
            await process.close_stdin()
            return [first, *[piece async for piece in process]]

    assert asyncio.run(talk()) == [("stdout", b"one"), ("stderr", b"end")]


def make_tree(place: Path) -> Path:
    tree = place / "tree"
    (tree / ("n" * 150)).mkdir(parents=True)
    data = tree / ("n" * 150) / "data"
    data.write_bytes(os.urandom(200_000))
    data.chmod(0o751)
    os.utime(data, (1_000_000_000, 1_000_000_000))
    os.link(data, tree / "second-name")
    (tree / "link").symlink_to("../nowhere")
    return tree


def test_a_tree_is_the_same_after_it_is_copied_in_and_out(
    vm: memfold.Vm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    tree, kept = make_tree(tmp_path), io.BytesIO()

    def receive(guest: Guest) -> int:
        for data in guest.input():
            kept.write(data)
        return 0

    def send(guest: Guest) -> int:
        data = kept.getvalue()
        for at in range(0, len(data), 50_000):
            guest.frame(0, data[at : at + 50_000])
        return 0

    daemon.commands["receive_archive /srv/"] = receive
    daemon.commands["send_archive /srv/tree"] = send
    vm.copy_in(tree, "/srv/")
    out = tmp_path / "out"
    vm.copy_out("/srv/tree", out)
    data = out / ("n" * 150) / "data"
    assert data.read_bytes() == (out / "second-name").read_bytes()
    assert data.read_bytes() == (tree / "second-name").read_bytes()
    assert (data.stat().st_mode & 0o7777, data.stat().st_mtime) == (0o751, 1_000_000_000)
    assert os.readlink(out / "link") == "../nowhere"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "s") == ["out", "tree"]


def test_a_failed_copy_raises_the_guests_words_and_leaves_nothing(
    vm: memfold.Vm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    def fail(guest: Guest) -> int:
        guest.frame(1, b"memfold-agent: no such file\n")
        return 1

    for kind in ("send_archive", "send_file", "receive_archive"):
        daemon.commands[kind] = fail
    out = tmp_path / "into"
    out.mkdir()
    calls: list[Callable[[], object]] = [
        lambda: vm.copy_out("/x", out / "x"),
        lambda: vm.read_file("/x"),
        lambda: vm.write_file("/x", bytes(1 << 20)),
    ]
    for call in calls:
        with pytest.raises(memfold.MemfoldError, match="VM 'web': memfold-agent: no such file"):
            call()
    assert list(out.iterdir()) == []


REGULAR, LINK = tarfile.REGTYPE, tarfile.SYMTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [("/etc/evil", REGULAR, "")],
        [("../outside", REGULAR, "")],
        [("content/../../outside", REGULAR, "")],
        [("content/a", LINK, ".."), ("content/a/outside", REGULAR, "")],
        [("content/a", tarfile.LNKTYPE, "/etc/passwd")],
        [("content/a", tarfile.FIFOTYPE, "")],
        [("content/a", REGULAR, ""), ("content/a", REGULAR, "")],
        [("content/a", REGULAR, "")],
    ],
)
def test_a_hostile_or_cut_archive_writes_nothing(
    entries: list[tuple[str, bytes, str]], tmp_path: Path
) -> None:
    data = io.BytesIO()
    with copies.archive(data) as tar:
        top = tarfile.TarInfo("content")
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        for name, kind, link in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, link
            tar.addfile(entry)
        # The last archive is only cut short.
        if entries != [("content/a", REGULAR, "")]:
            tar.addfile(tarfile.TarInfo("end"))
    data.seek(0)
    place = tmp_path / "into"
    place.mkdir()
    with pytest.raises((memfold.MemfoldError, OSError)):
        copies.unpack(data, place / "copy")
    assert list(place.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["into"]


def test_followed_events_resume_after_the_last_one_when_the_stream_ends(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfold.client.RECONNECT_S", 0.01)
    text = '{"at_unix_s": 1, "kind": "vm", "warning": false, "vm": "a", "text": "%s"}'

    def sent(number: int, what: str) -> bytes:
        return f"event: event\nretry: 1000\ndata: {text % what}\nid: {number}\n\n".encode()

    daemon.event_streams = [
        # It ends before the first event.
        b"id: 5\n\n",
        b": here\n\n" + sent(6, "runs") + sent(7, "ended") + b"event: event\ndata: cut",
        b'event: gap\ndata: {"missed": 2}\n\n' + sent(10, "runs again"),
    ]
    events = memfold.Client(daemon.address).follow_events(count=2)
    got = [next(events) for _ in range(4)]
    assert [one.id for one in got] == [6, 7, None, 10]
    assert got[2].event == EventGap(missed=2)
    assert [ids for _, path, ids in daemon.requests] == [None, "5", "7"]
    assert daemon.requests[0][1] == "/v1/events/stream?count=2"
