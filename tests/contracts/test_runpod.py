"""RunPod keeps both contracts: through every failure in one process, and with real sshds."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts.clouds import RealSshContract, built, key_pair
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.backends.runpod.mapping import NEWBORN_S
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.cloud import CloudContract
from paceline.testing.fakes.cloud import FakeCloud, FakeTransport
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.parts import fake_parts
from paceline.testing.fakes.runpod import FakeRunpod

__all__ = ["key_pair"]  # a fixture


class TestRunpodAndTrouble(CloudContract):
    """RunPod, when things go wrong."""

    def make_fake(self, clock: FakeClock) -> FakeCloud:
        return FakeRunpod(clock=clock)

    def environ_of(self, key: str) -> dict[str, str]:
        return {"RUNPOD_API_KEY": key}

    def make_adapter(
        self, fake: FakeCloud, *, environ: Mapping[str, str], state_dir: Path
    ) -> BackendAdapter:
        transport = FakeTransport(fake)
        parts = fake_parts(
            clock=fake.clock, state_dir=state_dir, environ=environ, transport=transport
        )
        return built("runpod", parts)


@pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server")
class TestRunpodWithRealSsh(RealSshContract):
    """RunPod, from search to teardown, with a real sshd behind each machine."""

    backend = "runpod"
    newborn_s = NEWBORN_S
