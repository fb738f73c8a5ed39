"""Vast keeps both contracts: through every failure in one process, and with real sshds."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts.clouds import RealSshContract, built, key_pair
from paceline.rental.backends.protocol import BackendAdapter
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.cloud import CloudContract
from paceline.testing.fakes.cloud import FakeCloud, FakeTransport
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.parts import fake_parts
from paceline.testing.fakes.vast import FakeVast

__all__ = ["key_pair"]  # a fixture


class TestVastAndTrouble(CloudContract):
    """Vast, when things go wrong."""

    def make_fake(self, clock: FakeClock) -> FakeCloud:
        return FakeVast(clock=clock)

    def environ_of(self, key: str) -> dict[str, str]:
        return {"VAST_API_KEY": key}

    def make_adapter(
        self, fake: FakeCloud, *, environ: Mapping[str, str], state_dir: Path
    ) -> BackendAdapter:
        transport = FakeTransport(fake)
        parts = fake_parts(
            clock=fake.clock, state_dir=state_dir, environ=environ, transport=transport
        )
        return built("vast", parts)


@pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server")
class TestVastWithRealSsh(RealSshContract):
    """Vast, from search to teardown, with a real sshd behind each machine."""

    backend = "vast"
