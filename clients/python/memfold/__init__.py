"""A client of the memfold daemon.

with memfold.Client().clone("warm") as vm:
    print(vm.exec(["uname", "-a"]).stdout)

`memfold.aio` has the same for asyncio, `memfold.models` the types of requests and answers.
"""

from .client import Client, Followed, Vm
from .errors import MemfoldError, NoDaemon, Refused, Timeout
from .process import Completed, Process

__all__ = [
    "Client",
    "Completed",
    "Followed",
    "MemfoldError",
    "NoDaemon",
    "Process",
    "Refused",
    "Timeout",
    "Vm",
]
