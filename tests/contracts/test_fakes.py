"""The fake provider keeps the backend contract, so that what is proven on it means something."""

from pathlib import Path

import pytest

from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.model import InstanceHandle
from paceline.rental.remote.local import LocalRemote
from paceline.system import environ, system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.backend import BackendContract
from paceline.testing.fakes.backend import FakeBackend, ListingFakeBackend


class TestFakeBackend(BackendContract):
    kind: type[FakeBackend] = FakeBackend

    @pytest.fixture(autouse=True)
    def _provider(self, tmp_path: Path) -> None:
        def remote(h: InstanceHandle) -> LocalRemote:
            root = tmp_path / h.instance_id
            (root / "workspace").mkdir(parents=True, exist_ok=True)
            (root / "commands").mkdir(exist_ok=True)
            return LocalRemote(
                root,
                machine_id=str(root),  # tests that run at the same time have equal names
                clock=system_clock(),
                environ=environ(),
                grace_s=0.5,
            )

        self.provider = self.kind(
            clock=FakeClock(), remote=remote, on_gone=lambda h: remote(h).close(force=True)
        )

    def make(self) -> BackendAdapter:
        return self.provider


class TestListingFakeBackend(TestFakeBackend):
    kind = ListingFakeBackend
