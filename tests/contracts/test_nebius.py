"""Nebius keeps both contracts: through every failure in one process, and with real sshds."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts.clouds import RealSshContract, built, free_port, key_pair
from paceline.rental.backends.protocol import BackendAdapter
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.cloud import CloudContract
from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.nebius import TENANT_ID, FakeNebius, FakeWire
from paceline.testing.fakes.parts import fake_parts

__all__ = ["key_pair"]  # a fixture


class TestNebiusAndTrouble(CloudContract):
    """Nebius, when things go wrong."""

    def make_fake(self, clock: FakeClock) -> FakeCloud:
        return FakeNebius(clock=clock)

    def environ_of(self, key: str) -> dict[str, str]:
        return {"NEBIUS_IAM_TOKEN": key, "NEBIUS_TENANT_ID": TENANT_ID}

    def make_adapter(
        self, fake: FakeCloud, *, environ: Mapping[str, str], state_dir: Path
    ) -> BackendAdapter:
        parts = fake_parts(clock=fake.clock, state_dir=state_dir, environ=environ)
        return built("nebius", parts, wire=FakeWire(fake))


@pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server")
class TestNebiusWithRealSsh(RealSshContract):
    """Nebius, from search to teardown, with a real sshd behind each machine."""

    backend = "nebius"
    ssh_port = free_port()

    def more_environ(self) -> dict[str, str]:
        user = pwd.getpwuid(os.getuid()).pw_name
        return {
            "PACELINE_NEBIUS_SSH_PORT": str(self.ssh_port),
            "PACELINE_NEBIUS_SSH_USER": user,
        }
