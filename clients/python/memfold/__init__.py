"""A client of the memfold daemon.

with memfold.Client().clone("warm") as vm:
    print(vm.exec(["uname", "-a"]).stdout)

`memfold.aio` has the same for asyncio, `memfold.models` the types of requests and answers.
"""

from .client import Client, Vm
from .errors import MemfoldError, NoDaemon, Refused, Timeout

__all__ = ["Client", "MemfoldError", "NoDaemon", "Refused", "Timeout", "Vm"]
