"""A daemon that knows no guests: it answers the client's requests as a test says."""

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

LISTS: dict[str, list[str]] = {
    "agent_problems": [],
    "fold_problems": [],
    "refold_problems": [],
}


def vm_info(name: str, **fields: Any) -> dict[str, Any]:
    info = {"name": name, "pid": 7, "ram_bytes": 1 << 29, "origin": "started", "qemu": "10.0"}
    return {**info, **LISTS, "state": "running", "agent": "6.12", **fields}


ROOM = 1 << 16
"""Room for input that a streamed command has at first, in bytes."""


class Guest:
    """The guest's end of a streamed command."""

    def __init__(self, rfile: Any, wfile: Any) -> None:
        self.rfile, self.wfile = rfile, wfile
        self.frame(2, struct.pack("<I", ROOM))

    def frame(self, kind: int, payload: bytes) -> None:
        self.wfile.write(struct.pack("<BI", kind, len(payload)) + payload)

    def order(self) -> tuple[int, bytes] | None:
        """The next frame of the client; `None` if the client has closed the connection."""
        header = self.rfile.read(5)
        if len(header) < 5:
            return None
        kind, length = struct.unpack("<BI", header)
        return kind, self.rfile.read(length)

    def input(self) -> Iterator[bytes]:
        """Standard input until its end; the client gets room for what was taken."""
        while (order := self.order()) is not None and order[0] != 1:
            if order[0] == 0:
                yield order[1]
                self.frame(2, struct.pack("<I", len(order[1])))


class FakeDaemon(ThreadingMixIn, UnixStreamServer):
    """Lists VMs, starts and stops them, and notes all requests."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), Handler)
        self.address = str(path)
        self.vms: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        """Status and body for `METHOD /path`, instead of the usual answer."""
        self.start_s = 0.0
        """Time that the start of a VM takes."""
        self.stop_s = 0.0
        self.pending = 0
        """Number of times that a started VM is listed before its guest has answered."""
        self.commands: dict[str, Callable[[Guest], int]] = {}
        """What streamed commands do, by the beginnings of their scripts."""
        self.event_streams: list[bytes] = []
        """Server-sent events of the next streams; a stream ends after them."""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path, body))
        if (told := self.answers.get(f"{method} {path}")) is not None:
            return told
        match method, path.partition("?")[0].strip("/").split("/")[1:]:
            case "GET", ["vms"]:
                return 200, [self.listed(vm) for vm in list(self.vms.values())]
            case "POST", ["vms"]:
                return self.start(body["name"], body.get("ttl_s"))
            case "POST", ["snapshots", _, "restore"]:
                return self.start(body["vm"], body.get("ttl_s"))
            case "POST", ["vms", name, "extend"] if name in self.vms:
                return 200, self.vms[name]
            case "POST", ["vms", name, "settings"] if name in self.vms:
                return 200, {"name": name, "settings": []}
            case "POST", ["vms", name, "stop"] if name in self.vms:
                time.sleep(self.stop_s)
                del self.vms[name]
                return 200, {"name": name, "how": "quit", "overdue": False, "took_s": 0.1}
            case "POST", ["vms", name, "exec"] if name in self.vms:
                return 200, {"stdout": body["script"], "stderr": "", "code": 3}
        return 404, {"error": f"no such path or VM: {path}", "hint": None}

    def start(self, name: str, ttl_s: int | None) -> tuple[int, Any]:
        time.sleep(self.start_s)
        if name in self.vms:
            return 409, {"error": f"the name '{name}' is taken", "hint": "choose another name"}
        renewal = {"pending": self.pending > 0, "done": [], "left": []}
        self.vms[name] = vm_info(name, renewal=renewal, ttl_left_s=ttl_s)
        return 200, self.vms[name]

    def listed(self, vm: dict[str, Any]) -> dict[str, Any]:
        self.pending -= 1
        if self.pending <= 0 and vm.get("renewal"):
            vm["renewal"]["pending"] = False
        return vm

    def of(self, method: str, path: str) -> list[Any]:
        """Bodies of the requests so far for a path."""
        return [body for way, at, body in self.requests if (way, at) == (method, path)]


class Handler(BaseHTTPRequestHandler):
    server: FakeDaemon

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        if self.path.endswith("/exec/stream") and "Upgrade" in self.headers:
            return self.stream(body)
        if self.path.startswith("/v1/events/stream"):
            return self.events()
        status, answer = self.server.answer(self.command, self.path, body)
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, body: Any) -> None:
        self.server.requests.append((self.command, self.path, body))
        copy = body.get("copy")
        script = f"{copy['kind']} {copy['path']}" if copy else body["script"]
        commands = self.server.commands.items()
        [run] = [run for start, run in commands if script.startswith(start)]
        self.protocol_version = "HTTP/1.1"
        self.send_response(101)
        self.send_header("Connection", "upgrade")
        self.send_header("Upgrade", "memfold-exec")
        self.end_headers()
        self.close_connection = True
        guest = Guest(self.rfile, self.wfile)
        code = run(guest)
        guest.frame(3, struct.pack("<i", code))

    def events(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers["Last-Event-ID"]))
        if not self.server.event_streams:
            return self.send_error(503)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(self.server.event_streams.pop(0))

    do_POST = do_PUT = do_DELETE = do_GET


@contextmanager
def fake_daemon(directory: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(directory / "s")
    thread = threading.Thread(target=daemon.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield daemon
    finally:
        daemon.shutdown()
        thread.join()
        daemon.server_close()
