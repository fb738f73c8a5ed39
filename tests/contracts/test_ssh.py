"""Your own hosts keep the backend contract, over a real sshd, with rsync there and without."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.waiting import wait_until
from paceline.rental.backends.defaults import default_parts
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.backends.registry import load_backend
from paceline.rental.model import InstanceHandle
from paceline.rental.remote.job import Patience
from paceline.rental.remote.local import usable_rsync
from paceline.rental.remote.protocol import NetworkRemote, SshTarget
from paceline.rental.remote.shell import ShellParts
from paceline.rental.remote.ssh import ssh_remote
from paceline.testing.contracts.backend import BackendContract
from paceline.testing.contracts.machine import CopyContract, MachineContract
from paceline.testing.contracts.reach import ReachContract
from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair

pytestmark = pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server")


class _Ssh(MachineContract):
    without: tuple[str, ...] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def sshd(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMachine]:
        root = tmp_path_factory.mktemp("machine")
        public = make_key_pair(root / "key")
        machine = FakeMachine(root / "m", authorized_keys=[public], without=cls.without)
        machine.start()
        yield machine
        machine.stop()

    @pytest.fixture(autouse=True)
    def _host(self, sshd: FakeMachine, tmp_path: Path) -> Iterator[None]:
        self.machine = machine = sshd
        self.state_dir = tmp_path / "state"
        config = tmp_path / "config"
        config.mkdir()
        (config / "hosts.toml").write_text(
            f"""[[host]]
name = "box"
address = "{machine.host}"
port = {machine.port}
user = "{machine.user}"
identity = "{machine.root.parent / "key"}"
gpu = "cpu-1x"
lock = ".lock"
"""
        )
        self.parts = replace(
            default_parts(), state_dir=self.state_dir, config_dir=config, ssh_remote=self.remote
        )
        yield
        # The shells that answered the last questions may be ending still.
        wait_until(
            lambda: machine.num_processes() == 0,
            what="a machine that was torn down being without processes",
            clock=self.clock,
            timeout_s=10,
            interval_s=0.02,
        )
        assert list((machine.home / ".paceline" / "machines").glob("*")) == []

    def remote(self, target: SshTarget, machine_id: str) -> NetworkRemote:
        parts = ShellParts(clock=self.clock, rsync=usable_rsync(), patience=Patience(grace_s=0.5))
        control_dir = self.machine.root / "c"
        return ssh_remote(target, machine_id=machine_id, parts=parts, control_dir=control_dir)

    def make(self) -> BackendAdapter:
        load_backend("ssh")
        from paceline.rental.backends.ssh.adapter import SshBackend

        return SshBackend(parts=self.parts)

    def machine_of(self, h: InstanceHandle) -> FakeMachine:
        return self.machine


@pytest.mark.skipif(usable_rsync() is None, reason="needs rsync: apt-get install rsync")
class TestSsh(_Ssh, BackendContract):
    """Files are copied by rsync."""


class TestSshReach(_Ssh, ReachContract):
    """Connections break, come late, and lead to others."""


class TestSshWithoutRsync(_Ssh, CopyContract):
    """The host has no rsync: files are copied as tar."""

    without = ("rsync",)
