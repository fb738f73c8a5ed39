"""Machines of this computer keep the backend contract, with rsync and without."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.backends.registry import load_backend
from paceline.rental.remote.local import LocalRemote, usable_rsync
from paceline.rental.remote.protocol import ProcessRemote
from paceline.testing.contracts.backend import BackendContract


class _Local(BackendContract):
    rsync: str | None = None

    @pytest.fixture(autouse=True)
    def _state_dir(self, tmp_path: Path) -> None:
        self.state_dir = tmp_path / "state"

    def make(self) -> BackendAdapter:
        load_backend("local")
        from paceline.rental.backends.local.adapter import LocalBackend

        return LocalBackend(parts=self.parts())

    def parts(self) -> Parts:
        parts = default_parts()

        def process_remote(root: Path, machine_id: str, env: Mapping[str, str]) -> ProcessRemote:
            return LocalRemote(
                root,
                machine_id=machine_id,
                clock=parts.clock,
                environ=env,
                rsync=self.rsync,
                grace_s=0.5,
            )

        return replace(parts, state_dir=self.state_dir, process_remote=process_remote)


class TestLocalWithoutRsync(_Local):
    """Files are copied in Python."""


@pytest.mark.skipif(usable_rsync() is None, reason="needs rsync: apt-get install rsync")
class TestLocalWithRsync(_Local):
    """Files are copied by rsync."""

    rsync = usable_rsync()
