"""What every backend does when a machine behind ssh is out of reach, is another, or comes back."""

import threading
from abc import abstractmethod
from pathlib import Path

import pytest

from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.errors import (
    CommandTimeoutError,
    HostKeyChangedError,
    SshDeniedError,
    SshUnreachableError,
)
from paceline.rental.model import ExitCode, InstanceHandle
from paceline.testing.contracts.machine import MachineContract
from paceline.testing.fakes.machine import FakeMachine

_NUM_LINES = 200


class ReachContract(MachineContract):
    """The claims about connections, for a backend whose machines are FakeMachines."""

    @abstractmethod
    def machine_of(self, h: InstanceHandle) -> FakeMachine:
        """Return the machine that is behind ``h``, running."""

    def test_an_sshd_that_is_not_up_yet_is_unreachable(
        self, adapter: BackendAdapter, h: InstanceHandle, tmp_path: Path
    ) -> None:
        """Inside the boot window commands and copies raise SshUnreachableError and do nothing."""
        machine = self.machine_of(h)
        machine.stop()
        with pytest.raises(SshUnreachableError):
            adapter.run_remote(h, "touch started", stream=False)
        with pytest.raises(SshUnreachableError):
            adapter.sync_to(h, tmp_path, "dst")
        with pytest.raises(SshUnreachableError):
            adapter.sync_from(h, "src", tmp_path / "back")
        machine.start()
        assert adapter.run_remote(h, "test ! -e started", stream=False).code == 0

    def test_running_means_that_ssh_answers(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """wait_running does not return while sshd is away, and its deadline holds."""
        machine = self.machine_of(h)
        machine.stop()
        with pytest.raises((DeadlineExceededError, SshUnreachableError)):
            adapter.wait_running(h, timeout_s=1)
        machine.start()
        adapter.wait_running(h, timeout_s=60)

    def test_a_key_that_is_not_taken_is_told_apart(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """A refused key is SshDeniedError, which names the key or who chose it."""
        machine = self.machine_of(h)
        machine.refuse_all_keys()
        try:
            with pytest.raises(SshDeniedError, match=r"key"):
                adapter.run_remote(h, "true", stream=False)
        finally:
            machine.accept_keys()
        assert adapter.run_remote(h, "true", stream=False).code == 0

    def test_another_host_key_is_an_error_that_names_the_fix(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """Where another machine answers, nothing is sent to it and the error says what to do."""
        machine = self.machine_of(h)
        old = machine.save_host_key()
        machine.change_host_key()
        try:
            with pytest.raises(HostKeyChangedError, match=r"host key .* known_hosts|remove"):
                adapter.run_remote(h, "touch sent", stream=False)
        finally:
            machine.restore_host_key(old)
        assert adapter.run_remote(h, "test ! -e sent", stream=False).code == 0

    def test_a_command_survives_a_cut_connection(
        self, adapter: BackendAdapter, h: InstanceHandle, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Its output arrives once and in order, and its exit status is its own."""
        machine = self.machine_of(h)
        command = (
            f"for i in $(seq {_NUM_LINES}); do echo line-$i; echo err-$i >&2; sleep 0.005; "
            "[ $i -ne 50 ] || touch half; done; touch ended; exit 7"
        )
        ended: list[ExitCode] = []
        runner = threading.Thread(target=lambda: ended.append(adapter.run_remote(h, command)))
        runner.start()
        self._wait_for(adapter, h, "half")
        machine.drop_connections()
        runner.join(timeout=60)
        assert [result.code for result in ended] == [7]
        seen = capfd.readouterr()
        assert seen.out.split() == [f"line-{n + 1}" for n in range(_NUM_LINES)]
        assert seen.err.split() == [f"err-{n + 1}" for n in range(_NUM_LINES)]

    def test_a_timeout_ends_the_command_over_a_new_connection(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """Also when the connection that started it is gone, nothing of it goes on."""
        machine = self.machine_of(h)
        before = machine.num_processes()

        def cut() -> None:
            self._wait_for(adapter, h, "begun")
            machine.drop_connections()

        cutter = threading.Thread(target=cut)
        cutter.start()
        with pytest.raises(CommandTimeoutError):
            adapter.run_remote(
                h, "touch begun; setsid sleep 600 & sleep 601", stream=False, timeout_s=3
            )
        cutter.join()
        wait_until(
            lambda: machine.num_processes() <= before,
            what="the command's processes ending",
            clock=self.clock,
            timeout_s=10,
            interval_s=0.05,
        )

    def _wait_for(self, adapter: BackendAdapter, h: InstanceHandle, name: str) -> None:
        wait_until(
            lambda: adapter.run_remote(h, f"test -e {name}", stream=False).code == 0,
            what=name,
            clock=self.clock,
            timeout_s=30,
            interval_s=0.02,
        )
