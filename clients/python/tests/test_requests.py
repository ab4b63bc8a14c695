"""Requests, answers and errors."""

import socket
import ssl
import subprocess
import threading
from pathlib import Path
from http.server import HTTPServer

import pytest
from fake_daemon import FakeDaemon, Handler, vm_info

from memfold import Client, MemfoldError, NoDaemon, Refused, Timeout
from memfold.codec import decode, encode
from memfold.models import PullBody, VmInfo


def test_a_command_of_words_reaches_the_guests_shell_unchanged(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.vms["web"] = vm_info("web")
    done = client.vm("web").exec(["echo", "it's; $HOME"], timeout_s=5)
    assert done.code == 3
    [request] = daemon.of("POST", "/v1/vms/web/exec")
    assert request == {"script": "echo 'it'\"'\"'s; $HOME'", "timeout_s": 5}


def test_a_refusal_has_the_daemons_words_its_fix_and_the_status(
    client: Client, daemon: FakeDaemon
) -> None:
    body = {"error": "'warm' is in use", "hint": "stop VM 'web'", "impossible_here": False}
    daemon.answers["DELETE /v1/snapshots/warm"] = (409, body)
    with pytest.raises(Refused) as caught:
        client.remove_snapshot("warm")
    error = caught.value
    assert (error.status, error.error, error.hint) == (409, "'warm' is in use", "stop VM 'web'")
    assert str(error) == "'warm' is in use; stop VM 'web'"


def test_an_error_of_a_proxy_is_reported_with_its_text(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.answers["GET /v1/report"] = (502, b"<h1>bad gateway</h1>")
    with pytest.raises(Refused, match="502.*bad gateway") as caught:
        client.report()
    assert caught.value.status == 502


def test_a_vm_is_defined_and_started_and_kept(client: Client, daemon: FakeDaemon) -> None:
    vm = {"name": "web", "memory": "2G"}
    definition = {"autostart": True, "order": 3, "vm": vm}
    info = {"name": "web", "state": "off", "definition": definition}
    daemon.answers["PUT /v1/definitions/web"] = (200, info)
    daemon.answers["GET /v1/definitions"] = (200, [info])
    daemon.answers["POST /v1/definitions/web/start?despite_brake=true"] = (200, vm_info("web"))
    daemon.answers["DELETE /v1/definitions/web"] = (200, None)
    defined = client.define(vm, autostart=True, order=3)
    assert client.definitions() == [defined]
    assert defined.definition and defined.definition.order == 3
    assert daemon.of("PUT", "/v1/definitions/web") == [definition]
    with client.start("web", despite_brake=True) as started:
        assert started.name == "web"
    client.undefine("web")
    assert not daemon.of("POST", "/v1/vms/web/stop")


def test_a_snapshot_gets_a_new_key(client: Client, daemon: FakeDaemon) -> None:
    report = {"name": "warm", "key": "new", "old_key": "old"}
    daemon.answers["POST /v1/snapshots/warm/rekey"] = (200, report)
    changed = client.rekey("warm", "new")
    assert (changed.key, changed.old_key) == ("new", "old")
    assert daemon.of("POST", "/v1/snapshots/warm/rekey") == [{"key_name": "new"}]
    # As the daemon says that the snapshot has this key already.
    daemon.answers["POST /v1/snapshots/warm/rekey"] = (200, {**report, "old_key": None})
    assert client.rekey("warm", "new").old_key is None


def test_an_unknown_vm_is_refused_as_not_found(client: Client) -> None:
    with pytest.raises(Refused, match="no VM 'ghost'") as caught:
        client.vm("ghost")
    assert caught.value.status == 404


def test_a_missing_daemon_is_named_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon, match=f"{tmp_path}/none.*memfold serve"):
        Client(f"{tmp_path}/none").vms()


def test_a_daemon_that_dies_during_a_request_is_reported(tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "s"))
    server.listen()
    ending = threading.Thread(target=lambda: server.accept()[0].close())
    ending.start()
    with pytest.raises(MemfoldError, match="closed the connection"):
        Client(str(tmp_path / "s")).vms()
    ending.join()
    server.close()


def test_a_silent_daemon_ends_a_request_after_the_clients_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with pytest.raises(Timeout, match="GET /v1/vms within 0.1 s"):
            Client(str(tmp_path / "s"), timeout=0.1).vms()


def test_an_answer_without_a_required_field_is_refused(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.answers["GET /v1/vms"] = (200, [{"name": "web"}])
    with pytest.raises(MemfoldError, match="same version"):
        client.vms()


def test_fields_of_a_newer_daemon_are_left_out_and_absent_ones_have_defaults() -> None:
    info = decode(VmInfo, vm_info("web", colour="red", segments=None))
    assert isinstance(info, VmInfo) and not hasattr(info, "colour")
    assert info.costs == [] and info.swap is None


def test_a_request_leaves_unset_fields_to_the_daemon() -> None:
    assert encode(PullBody(url="file:///x", from_="warm")) == {"url": "file:///x", "from": "warm"}


def test_names_are_quoted_in_paths(client: Client, daemon: FakeDaemon) -> None:
    with pytest.raises(Refused):
        client.snapshot("../vms?x")
    assert daemon.requests[-1][1] == "/v1/snapshots/..%2Fvms%3Fx"


@pytest.mark.parametrize("address", ["http://host:8420", "https://", "ftp://host"])
def test_a_token_is_sent_over_tls_only(address: str) -> None:
    with pytest.raises(ValueError, match="https://HOST:PORT"):
        Client(address, token="secret")


def test_https_sends_the_token_and_trusts_only_the_given_ca(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make.split(), *names, *files], check=True, capture_output=True)
    seen: list[str | None] = []

    class Listing(Handler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

    class Quiet(HTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that does not trust the certificate ends the handshake."""

    server = Quiet(("localhost", 0), Listing)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"https://localhost:{server.server_port}"
        assert Client(url, token="secret", ca=str(cert)).vms() == []
        assert seen == ["Bearer secret"]
        with pytest.raises(NoDaemon, match="certificate"):
            Client(url, token="secret").vms()
        assert seen == ["Bearer secret"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
