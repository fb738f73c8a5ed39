"""Vast keeps both contracts: through every failure in one process, and with real sshds."""

from collections.abc import Mapping
from pathlib import Path

from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.backends.registry import load_backend
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.cloud import CloudContract
from paceline.testing.fakes.cloud import FakeCloud, FakeTransport
from paceline.testing.fakes.parts import fake_parts
from paceline.testing.fakes.vast import FakeVast


class TestVastAndTrouble(CloudContract):
    """Vast, when things go wrong."""

    def make_fake(self, clock: FakeClock) -> FakeCloud:
        return FakeVast(clock=clock)

    def environ_of(self, key: str) -> dict[str, str]:
        return {"VAST_API_KEY": key}

    def make_adapter(
        self, fake: FakeCloud, *, environ: Mapping[str, str], state_dir: Path
    ) -> BackendAdapter:
        load_backend("vast")
        from paceline.rental.backends.vast.adapter import VastBackend

        return VastBackend(
            parts=fake_parts(
                clock=fake.clock,
                state_dir=state_dir,
                environ=environ,
                transport=FakeTransport(fake),
            )
        )
