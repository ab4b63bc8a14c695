from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, fake_daemon

from memfold import Client


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(tmp_path) as running:
        yield running


@pytest.fixture
def client(daemon: FakeDaemon) -> Client:
    return Client(daemon.address)
