"""HTTP requests to the daemon, over its Unix socket or over TLS; a new connection for each."""

import http.client
import json
import os
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from .codec import decode
from .errors import MemfoldError, NoDaemon, Refused, Timeout
from .models import ErrorBody

DEFAULT_SOCKET = "/run/memfold/memfold.sock"


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("memfold", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Transport:
    """Address and rights of a client."""

    def __init__(self, address: str | None, token: str | None, ca: str | None) -> None:
        self.address = address or os.environ.get("MEMFOLD_SOCKET") or DEFAULT_SOCKET
        self.url = urlsplit(self.address) if "://" in self.address else None
        if self.url is None:
            return
        if self.url.scheme != "https" or not self.url.hostname:
            raise ValueError(f"{self.address}: give a path of a Unix socket, or https://HOST:PORT")
        self.tls = ssl.create_default_context(cafile=ca)
        self.token = token

    def connection(self, timeout: float | None) -> http.client.HTTPConnection:
        if self.url is None:
            return UnixConnection(self.address, timeout)
        host, port = self.url.hostname or "", self.url.port
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=self.tls)

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.url is not None and self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return headers

    def connected(self, timeout: float | None) -> http.client.HTTPConnection:
        connection = self.connection(timeout)
        try:
            connection.connect()
        except TimeoutError:
            raise
        except OSError as error:
            raise NoDaemon(
                f"cannot reach a memfold daemon at {self.address}: {error}; "
                "'memfold serve' starts the daemon"
            ) from error
        return connection

    def open(
        self, method: str, path: str, body: Any, headers: dict[str, str], timeout: float | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request whose answer has no known end. `timeout`: for the answer's begin."""
        connection = self.connected(timeout)
        try:
            text = None if method == "GET" else json.dumps(body)
            connection.request(method, path, text, {**self.headers(), **headers})
            response = connection.getresponse()
            if response.status >= 400:
                raise Refused(response.status, error_body(response.status, response.read()))
            if connection.sock is not None:
                connection.sock.settimeout(None)
            return connection, response
        except TimeoutError as error:
            connection.close()
            late = f"the daemon at {self.address} did not answer {method} {path} within {timeout} s"
            raise Timeout(late) from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise MemfoldError(
                f"the daemon at {self.address} closed the connection during {method} {path} "
                f"({error!r}); see the daemon's log"
            ) from error
        except BaseException:
            connection.close()
            raise

    def request(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        """Sends a request, and returns the JSON of the answer.

        `timeout`: longest time in seconds without a byte from the daemon; `None`: no limit.
        """
        headers = {**self.headers(), "Connection": "close"}
        connection = None
        try:
            connection = self.connected(timeout)
            text = None if method in ("GET", "DELETE") else json.dumps(body)
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except TimeoutError as error:
            late = f"the daemon at {self.address} did not answer {method} {path} within {timeout} s"
            raise Timeout(late) from error
        except (OSError, http.client.HTTPException) as error:
            raise MemfoldError(
                f"the daemon at {self.address} closed the connection during {method} {path} "
                f"({error!r}); see the daemon's log"
            ) from error
        finally:
            if connection is not None:
                connection.close()
        if status >= 400:
            raise Refused(status, error_body(status, answer))
        return json.loads(answer) if answer else None


def error_body(status: int, answer: bytes) -> ErrorBody:
    """Returns the daemon's words, or the text of another server between client and daemon."""
    try:
        body: ErrorBody = decode(ErrorBody, json.loads(answer))
        return body
    except (ValueError, TypeError, AttributeError):
        return ErrorBody(error=f"HTTP status {status}: {answer.decode(errors='replace').strip()}")
