"""VMs that a program started are gone after its `with` blocks, however these end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, vm_info

from memfold import Client, Refused, Timeout

PACKAGE = Path(__file__).parent.parent


def test_a_clone_is_ready_in_its_block_and_gone_after_it(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.pending = 3
    with client.clone("warm") as vm:
        assert list(daemon.vms) == [vm.name]
        assert vm.info.renewal is not None and not vm.info.renewal.pending
        [request] = daemon.of("POST", "/v1/snapshots/warm/restore")
        assert request["renew"] == "identity" and request["vm"].startswith("warm-")
    assert daemon.vms == {}
    assert daemon.of("POST", f"/v1/vms/{vm.name}/stop") == [{"timeout_s": 0.0}]


def test_an_exception_ends_the_vm_and_is_raised(client: Client, daemon: FakeDaemon) -> None:
    with pytest.raises(ZeroDivisionError), client.run({"name": "web", "memory": "512M"}):
        assert list(daemon.vms) == ["web"]
        raise ZeroDivisionError
    assert daemon.vms == {}


def test_a_failed_stop_does_not_hide_the_exception_of_the_block(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.answers["POST /v1/vms/web/stop"] = (500, {"error": "QEMU does not end"})
    with pytest.raises(ZeroDivisionError) as caught, client.clone("warm", "web"):
        raise ZeroDivisionError
    assert "QEMU does not end" in caught.value.__notes__[0]
    with pytest.raises(Refused, match="QEMU does not end"), client.clone("warm", "other") as vm:
        daemon.answers[f"POST /v1/vms/{vm.name}/stop"] = (500, {"error": "QEMU does not end"})


def test_a_vm_that_ended_in_its_block_is_no_error(client: Client, daemon: FakeDaemon) -> None:
    with client.clone("warm") as vm:
        vm.stop(5.0)
    assert len(daemon.of("POST", f"/v1/vms/{vm.name}/stop")) == 2


def test_kept_vms_and_vms_of_others_run_after_their_block(
    client: Client, daemon: FakeDaemon
) -> None:
    with client.clone("warm", "kept", keep=True):
        pass
    daemon.vms["other"] = vm_info("other")
    with client.vm("other"):
        pass
    assert sorted(daemon.vms) == ["kept", "other"]


def test_a_clone_whose_guest_does_not_answer_is_ended(client: Client, daemon: FakeDaemon) -> None:
    daemon.pending = 1 << 30
    with pytest.raises(Timeout, match="agent of VM 'late'"):
        client.clone("warm", "late", ready_s=0.2)
    assert daemon.vms == {}


def test_a_refused_start_leaves_the_vm_of_that_name_alone(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.vms["web"] = vm_info("web")
    with pytest.raises(Refused, match="taken"):
        client.clone("warm", "web")
    assert list(daemon.vms) == ["web"]


def test_a_clone_that_starts_after_the_clients_timeout_is_ended(daemon: FakeDaemon) -> None:
    daemon.start_s = 0.5
    with pytest.raises(Timeout):
        Client(daemon.address, timeout=0.2).clone("warm")
    [request] = daemon.of("POST", "/v1/snapshots/warm/restore")
    assert len(daemon.of("POST", f"/v1/vms/{request['vm']}/stop")) > 1
    assert daemon.vms == {}


INTERRUPTED = """
import signal, sys, time, memfold
# A shell's background job ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
with memfold.Client(sys.argv[1]).clone("warm"):
    print("in the block", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["start", "block"])
def test_an_interrupt_ends_the_vm(daemon: FakeDaemon, moment: str) -> None:
    daemon.start_s = 1.0 if moment == "start" else 0.0
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    command = [sys.executable, "-c", INTERRUPTED, daemon.address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        if moment == "block":
            assert program.stdout.readline() == "in the block\n"
        else:
            end = time.monotonic() + 30
            while not daemon.of("POST", "/v1/snapshots/warm/restore"):
                assert time.monotonic() < end, "the program does not start a VM"
                time.sleep(0.01)
        program.send_signal(signal.SIGINT)
        said = program.stderr.read()
        assert program.wait() == -signal.SIGINT, said
    assert "KeyboardInterrupt" in said
    assert daemon.vms == {}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_vm_is_extended_as_long_as_the_program_holds_it(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, ttl_s=1)
    vm = client.clone("warm", "web")
    [request] = daemon.of("POST", "/v1/snapshots/warm/restore")
    assert request["ttl_s"] == 1
    wait_for(lambda: len(daemon.of("POST", "/v1/vms/web/extend")) >= 3)
    del vm

    def is_left_alone() -> bool:
        before = len(daemon.of("POST", "/v1/vms/web/extend"))
        # Four extensions would fit in.
        time.sleep(1.0)
        return len(daemon.of("POST", "/v1/vms/web/extend")) == before

    # An extension may be under way.
    wait_for(is_left_alone)


def test_an_extension_that_fails_is_tried_again(daemon: FakeDaemon) -> None:
    daemon.answers["POST /v1/vms/web/extend"] = (500, {"error": "the daemon is ending"})
    with Client(daemon.address, ttl_s=1).run({"name": "web", "memory": "512M"}):
        [request] = daemon.of("POST", "/v1/vms")
        assert request["ttl_s"] == 1
        wait_for(lambda: len(daemon.of("POST", "/v1/vms/web/extend")) >= 3)


def test_a_kept_vm_has_no_time_to_live(client: Client, daemon: FakeDaemon) -> None:
    client.clone("warm", "kept", keep=True)
    [request] = daemon.of("POST", "/v1/snapshots/warm/restore")
    assert request.get("ttl_s") is None
    # A VM may turn out to be wanted.
    with client.clone("warm", "wanted") as vm:
        vm.keep = True
    assert sorted(daemon.vms) == ["kept", "wanted"]
    [request] = daemon.of("POST", "/v1/vms/wanted/settings")
    assert request["settings"] == {"ttl_s": ""}


def test_a_vm_of_another_program_keeps_its_time_to_live(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.start("theirs", 60)
    with client.vm("theirs"):
        pass
    assert daemon.of("POST", "/v1/vms/theirs/settings") == []
    assert sorted(daemon.vms) == ["theirs"]


def test_after_a_fork_the_child_extends_its_own_vms(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, ttl_s=1)
    ours = client.clone("warm", "ours")
    wait_for(lambda: len(daemon.of("POST", "/v1/vms/ours/extend")) >= 1)
    child = os.fork()
    if child == 0:
        try:
            held = client.clone("warm", "theirs")
            time.sleep(60)
            del held
        finally:
            os._exit(0)
    try:
        wait_for(lambda: len(daemon.of("POST", "/v1/vms/theirs/extend")) >= 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    del ours
