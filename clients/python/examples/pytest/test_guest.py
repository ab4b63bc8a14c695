"""Tests that change their guest. Each starts from the same state."""

import memfold


def test_a_file_of_the_guest_can_be_removed(vm: memfold.Vm) -> None:
    assert vm.exec("rm /etc/hostname && test ! -e /etc/hostname").code == 0


def test_the_next_guest_has_the_file(vm: memfold.Vm) -> None:
    assert vm.exec(["cat", "/etc/hostname"]).stdout.strip() == vm.name
