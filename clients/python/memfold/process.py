"""A command in a guest whose input and output are streamed while it runs.

The connection carries frames: a byte for the kind, the length of the payload as a little-endian
32-bit number, and the payload. docs/api.md describes them.
"""

import dataclasses
import http.client
import queue
import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal

from .errors import MemfoldError

HEADER = struct.Struct("<BI")
MAX_PAYLOAD = 64 << 10
PIECE = 16 << 10
"""Most bytes of input in one frame."""
WAITING = 64
"""Number of pieces of output that wait for the caller, before the command waits."""

Piece = tuple[Literal["stdout", "stderr"], bytes]


@dataclasses.dataclass(frozen=True)
class Completed:
    """Output and exit code of a command that has ended."""

    stdout: bytes
    stderr: bytes
    code: int
    """Exit code; 128 + signal if a signal ended the command."""


class Process:
    """A command that runs in a guest.

    Iterating over a process gives its output, in pieces. As with pipes, the command waits if its
    output is not read; `communicate` reads and writes at once. The end of a `with` block ends the
    command, if it still runs.
    """

    def __init__(self, connection: http.client.HTTPConnection, reader: Any) -> None:
        self._connection = connection
        self._reader = reader
        self._socket = connection.sock
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._room = 0
        self._ended: int | MemfoldError | None = None
        self._closed = False
        self._pieces: queue.Queue[Piece | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._receive, name="memfold-exec", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        end: int | MemfoldError
        try:
            end = self._frames()
        except (OSError, ValueError, struct.error) as error:
            end = MemfoldError(f"the connection to the command was lost ({error!r})")
        with self._changed:
            self._ended = end
            self._changed.notify_all()
        self._put(None)

    def _put(self, piece: Piece | None) -> None:
        while not self._closed:
            try:
                self._pieces.put(piece, timeout=0.2)
                return
            except queue.Full:
                continue

    def _frames(self) -> int | MemfoldError:
        while True:
            header = self._reader.read(HEADER.size)
            if len(header) < HEADER.size:
                return MemfoldError(
                    "the daemon closed the connection, which ended the command; "
                    "see the daemon's log"
                )
            kind, length = HEADER.unpack(header)
            if length > MAX_PAYLOAD:
                return MemfoldError(f"a frame of {length} bytes was received")
            payload = self._reader.read(length)
            if kind == 0:
                self._put(("stdout", payload))
            elif kind == 1:
                self._put(("stderr", payload))
            elif kind == 2:
                with self._changed:
                    self._room += struct.unpack("<I", payload)[0]
                    self._changed.notify_all()
            elif kind == 3:
                return int(struct.unpack("<i", payload)[0])
            elif kind == 4:
                return MemfoldError(payload.decode(errors="replace"))
            else:
                return MemfoldError(f"a frame of the unknown kind {kind} was received")

    def _send(self, kind: int, payload: bytes = b"") -> None:
        try:
            with self._sending:
                self._socket.sendall(HEADER.pack(kind, len(payload)) + payload)
        except OSError as error:
            raise BrokenPipeError("the command has ended") from error

    def write(self, data: bytes) -> None:
        """Sends standard input, and waits until the command has room for it.

        Raises `BrokenPipeError` if the command has ended.
        """
        view = memoryview(data)
        while view:
            with self._changed:
                self._changed.wait_for(lambda: self._room > 0 or self._ended is not None)
                if self._ended is not None:
                    raise BrokenPipeError("the command has ended")
                length = min(self._room, len(view), PIECE)
                self._room -= length
            self._send(0, bytes(view[:length]))
            view = view[length:]

    def close_stdin(self) -> None:
        """Ends the command's standard input."""
        self._send(1)

    def resize(self, rows: int, columns: int) -> None:
        """Changes the size of the command's terminal."""
        self._send(2, struct.pack("<HH", rows, columns))

    def send_signal(self, signal: int) -> None:
        """Sends a signal to the command; the number is Linux's."""
        self._send(3, bytes([signal]))

    def read(self) -> Piece | None:
        """Waits for the next piece of output; `None` at the end of the command."""
        piece = self._pieces.get()
        if piece is None:
            # Another call returns at once, too.
            self._pieces.put(None)
        return piece

    def __iter__(self) -> Iterator[Piece]:
        while (piece := self.read()) is not None:
            yield piece

    def wait(self) -> int:
        """Drops the output that is left, waits for the end of the command, and returns its code.

        Raises `MemfoldError` if the connection was lost; the command is then ended, too.
        """
        for _ in self:
            pass
        self.close()
        if isinstance(self._ended, MemfoldError):
            raise self._ended
        return self._ended if self._ended is not None else -1

    def communicate(self, data: bytes = b"") -> Completed:
        """Sends standard input and its end, and returns the whole output."""

        def send() -> None:
            try:
                self.write(data)
                self.close_stdin()
            except BrokenPipeError:
                pass

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        for stream, piece in self:
            output[stream].append(piece)
        code = self.wait()
        sender.join()
        return Completed(b"".join(output["stdout"]), b"".join(output["stderr"]), code)

    def close(self) -> None:
        """Ends the command, if it still runs: SIGHUP, and SIGKILL two seconds later."""
        with self._changed:
            self._closed = True
            if self._ended is None:
                self._ended = MemfoldError("the command was ended by close()")
            self._changed.notify_all()
        try:
            # This wakes the thread that reads.
            self._socket.shutdown(2)
        except OSError:
            pass
        if threading.current_thread() is not self._thread:
            self._thread.join()
        # A caller that still reads gets the end at once.
        while True:
            try:
                self._pieces.put_nowait(None)
                break
            except queue.Full:
                self._pieces.get_nowait()
        self._connection.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
