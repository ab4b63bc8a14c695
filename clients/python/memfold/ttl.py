"""Extends the time to live of the VMs that a program holds, so that they end with the program."""

import os
import threading
import weakref
from typing import TYPE_CHECKING

from .errors import MemfoldError

if TYPE_CHECKING:
    from .client import Vm

EXTENSIONS = 4
"""Number of extensions within a time to live, so that a few may fail."""

ANSWER_S = 10.0
"""Longest time to wait for the daemon's answer to an extension, in seconds."""


class Extender:
    """Extends VMs on a thread, as long as the program holds their objects."""

    def __init__(self, ttl_s: int) -> None:
        self._pause_s = ttl_s / EXTENSIONS
        self._begin()
        _EXTENDERS.add(self)

    def _begin(self) -> None:
        """Begins without VMs, also in the child of a `fork`: the child has no thread, and its parent
        extends the VMs from before.
        """
        self._vms: weakref.WeakSet[Vm] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._runs = False

    def add(self, vm: "Vm") -> None:
        """Extends a VM from now on."""
        with self._lock:
            self._vms.add(vm)
            if not self._runs:
                threading.Thread(target=self._run, name="memfold-ttl", daemon=True).start()
                self._runs = True

    def remove(self, vm: "Vm") -> None:
        """Extends a VM no more."""
        with self._lock:
            self._vms.discard(vm)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self._pause_s)
            with self._lock:
                vms = list(self._vms)
                self._runs = bool(vms)
            if not vms:
                return
            for vm in vms:
                try:
                    vm._extend(ANSWER_S)
                except MemfoldError:
                    # The VM has ended, or the daemon is away; the next extension may succeed.
                    pass
            # No object is held during the pause.
            vms.clear()
            del vm


_EXTENDERS: weakref.WeakSet[Extender] = weakref.WeakSet()


def _after_fork() -> None:
    for extender in _EXTENDERS:
        extender._begin()


os.register_at_fork(after_in_child=_after_fork)
