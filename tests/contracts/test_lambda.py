"""Lambda keeps both contracts: through every failure in one process, and with real sshds."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts.clouds import RealSshContract, built, free_port, key_pair
from paceline.rental.backends.protocol import BackendAdapter
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.cloud import CloudContract
from paceline.testing.fakes.cloud import FakeCloud, FakeTransport
from paceline.testing.fakes.lambda_ import FakeLambda
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.parts import fake_parts

__all__ = ["key_pair"]  # a fixture


class TestLambdaAndTrouble(CloudContract):
    """Lambda, when things go wrong."""

    def make_fake(self, clock: FakeClock) -> FakeCloud:
        return FakeLambda(clock=clock)

    def environ_of(self, key: str) -> dict[str, str]:
        return {"LAMBDA_API_KEY": key}

    def make_adapter(
        self, fake: FakeCloud, *, environ: Mapping[str, str], state_dir: Path
    ) -> BackendAdapter:
        transport = FakeTransport(fake)
        parts = fake_parts(
            clock=fake.clock, state_dir=state_dir, environ=environ, transport=transport
        )
        return built("lambda", parts)


@pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server")
class TestLambdaWithRealSsh(RealSshContract):
    """Lambda, from search to teardown, with a real sshd behind each machine."""

    backend = "lambda"
    ssh_port = free_port()

    def more_environ(self) -> dict[str, str]:
        user = pwd.getpwuid(os.getuid()).pw_name
        return {
            "PACELINE_LAMBDA_SSH_PORT": str(self.ssh_port),
            "PACELINE_LAMBDA_SSH_USER": user,
        }
