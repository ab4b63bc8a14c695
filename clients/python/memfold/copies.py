"""Files and directories as the archives that `memfold vm cp` uses: tar, with the entries `content`,
`content/...` and `end`. An archive without `end` was cut short.

An archive from a guest is not trusted: nothing is written outside the destination.
"""

import io
import os
import shutil
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from .errors import MemfoldError
from .process import Process

CONTENT = "content"
END = "end"


class Input(io.RawIOBase):
    """Standard input of a command, as a file."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._process.write(bytes(data))
        return len(data)


class Output(io.RawIOBase):
    """Standard output of a command, as a file. Keeps what the command writes as an error."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._left = b""
        self.errors = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = self._process.read()
            if piece is None:
                return 0
            if piece[0] == "stderr":
                self.errors = (self.errors + piece[1])[:4096]
            else:
                self._left = piece[1]
        length = min(len(buffer), len(self._left))
        buffer[:length] = self._left[:length]
        self._left = self._left[length:]
        return length


def archive(out: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 16)


def pack_bytes(out: IO[bytes], data: bytes, mode: int) -> None:
    """Writes the archive of a file with this content."""
    with archive(out) as tar:
        entry = tarfile.TarInfo(CONTENT)
        entry.size, entry.mode = len(data), mode & 0o777
        entry.mtime = int(time.time())
        tar.addfile(entry, io.BytesIO(data))
        tar.addfile(tarfile.TarInfo(END))


def pack(out: IO[bytes], source: Path) -> None:
    """Writes the archive of a file or directory."""
    with archive(out) as tar:

        def change(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            if not (entry.isreg() or entry.isdir() or entry.issym()):
                raise MemfoldError(
                    f"{entry.name} in {source} is neither a file nor a directory nor a symbolic "
                    "link; only these are copied"
                )
            # A second name of a file is copied as a file.
            tar.inodes = {}  # type: ignore[attr-defined]
            entry.mode &= 0o777
            return entry

        tar.add(source.resolve(strict=True), arcname=CONTENT, filter=change)
        tar.addfile(tarfile.TarInfo(END))


def unpack(archive: IO[bytes], destination: Path) -> None:
    """Makes `destination` from an archive: whole or not at all. Nothing is replaced but a file."""
    parent = destination.parent
    temporary = Path(tempfile.mkdtemp(prefix=".memfold-copy-", dir=parent))
    try:
        content = temporary / CONTENT
        _unpack(archive, content)
        if destination.is_dir() and not destination.is_symlink():
            raise MemfoldError(f"{destination} exists and is a directory; remove it")
        if content.is_dir() and (destination.exists() or destination.is_symlink()):
            raise MemfoldError(f"{destination} exists and is not a directory; remove it")
        os.rename(content, destination)
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _place(content: Path, name: str) -> Path:
    first, *rest = name.rstrip("/").split("/")
    if first != CONTENT or any(part in ("", ".", "..") for part in rest):
        raise MemfoldError("the archive has a path that leads elsewhere")
    return content.joinpath(*rest)


def _unpack(archive: IO[bytes], content: Path) -> None:
    directories: list[tuple[Path, tarfile.TarInfo]] = []
    links: list[tuple[Path, str]] = []
    has_ended = False
    try:
        with tarfile.open(fileobj=archive, mode="r|", bufsize=1 << 16) as tar:
            for entry in tar:
                # The module keeps all entries, which a large archive would fill the memory with.
                tar.members = []  # type: ignore[attr-defined]
                if has_ended:
                    raise MemfoldError("an entry follows the archive's last one")
                if entry.name == END:
                    has_ended = True
                    continue
                path = _place(content, entry.name)
                if entry.isdir():
                    path.mkdir(0o700)
                    directories.append((path, entry))
                elif entry.isreg() and not entry.issparse():
                    _write(path, tar.extractfile(entry), entry)
                elif entry.issym() and path != content:
                    # Made last, so that no path leads through a link.
                    links.append((path, entry.linkname))
                else:
                    raise MemfoldError(
                        "the archive has an entry that is neither a file nor a directory nor a "
                        "symbolic link"
                    )
    except (tarfile.TarError, EOFError) as error:
        raise MemfoldError("the copy ended before it was complete") from error
    if not has_ended:
        raise MemfoldError("the copy ended before it was complete")
    for path, text in links:
        path.symlink_to(text)
    for path, entry in reversed(directories):
        os.utime(path, (entry.mtime, entry.mtime))
        path.chmod(entry.mode & 0o777)


def _write(path: Path, source: IO[bytes] | None, entry: tarfile.TarInfo) -> None:
    # `O_EXCL` neither follows a link nor opens what is there already.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(path, flags, 0o600), "wb") as file:
        if source is not None:
            shutil.copyfileobj(source, file, 1 << 16)
        file.flush()
        if file.tell() != entry.size:
            raise MemfoldError("the copy ended before it was complete")
        os.fchmod(file.fileno(), entry.mode & 0o777)
        os.utime(file.fileno(), (entry.mtime, entry.mtime))
        os.fsync(file.fileno())
