"""Exceptions of the client."""

from .models import ErrorBody


class MemfoldError(Exception):
    """Any failure of a request to the daemon."""


class NoDaemon(MemfoldError):
    """No daemon can be reached at the client's address."""


class Timeout(MemfoldError):
    """The daemon or a guest did not answer in time."""


class Refused(MemfoldError):
    """The daemon answered with an HTTP status of 400 or above."""

    def __init__(self, status: int, body: ErrorBody) -> None:
        super().__init__(f"{body.error}; {body.hint}" if body.hint else body.error)
        self.status = status
        """HTTP status. docs/api.md lists the meanings."""
        self.error = body.error
        """Message that names the failed condition."""
        self.hint = body.hint
        """Action that would fix the failed condition, if the daemon knows one."""
        self.impossible_here = bool(body.impossible_here)
        """Whether the request is impossible on the daemon's host."""
