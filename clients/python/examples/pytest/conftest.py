"""Gives each test a warm VM: a clone of the snapshot in MEMFOLD_SNAPSHOT, `warm` by default."""

import os
from collections.abc import Iterator

import pytest

import memfold


@pytest.fixture
def vm() -> Iterator[memfold.Vm]:
    """A VM that no other test has seen. It is switched off after the test."""
    with memfold.Client().clone(os.environ.get("MEMFOLD_SNAPSHOT", "warm")) as clone:
        yield clone
