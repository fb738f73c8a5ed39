"""Containers of a real engine keep the backend contract, by tar and by rsync."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.rental.backends.defaults import default_parts
from paceline.rental.backends.protocol import BackendAdapter, SupportsLogs, SupportsStop
from paceline.rental.backends.registry import load_backend
from paceline.rental.errors import ProvisionError
from paceline.rental.model import InstanceHandle, InstanceState
from paceline.rental.remote.container import container_remote
from paceline.rental.remote.job import Patience
from paceline.rental.remote.local import usable_rsync
from paceline.rental.remote.protocol import ContainerTarget, NetworkRemote
from paceline.rental.remote.shell import ShellParts
from paceline.testing.contracts.backend import BackendContract
from paceline.testing.contracts.machine import CopyContract, MachineContract
from paceline.testing.engine import IMAGE, engine, lacking

if TYPE_CHECKING:
    from paceline.rental.backends.docker.adapter import DockerBackend

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def docker() -> Iterator[tuple[str, ...]]:
    """Yield the command line of an engine."""
    if why := lacking():
        pytest.skip(why)
    with engine() as command:
        yield command


class _Docker(MachineContract):
    rsync: str | None = None
    image = IMAGE

    @pytest.fixture(autouse=True)
    def _engine(self, docker: tuple[str, ...]) -> None:
        self.command = docker
        self.parts = replace(default_parts(), container_remote=self.remote)

    def remote(self, target: ContainerTarget, machine_id: str) -> NetworkRemote:
        patience = Patience(grace_s=0.5)
        parts = ShellParts(clock=self.clock, rsync=self.rsync, patience=patience)
        return container_remote(target, machine_id=machine_id, parts=parts)

    def make(self) -> BackendAdapter:
        load_backend("local-docker")
        from paceline.rental.backends.docker.adapter import DockerBackend
        from paceline.rental.backends.docker.config import DockerConfig

        return DockerBackend(DockerConfig(command=self.command), parts=self.parts)


class TestDocker(_Docker, BackendContract):
    """Files are copied as tar."""

    def test_what_does_not_start_is_removed(self, adapter: BackendAdapter, tmp_path: Path) -> None:
        """A container that the engine created and cannot start is no machine and no leftover."""
        broken = self.with_network("container:no-such-container")
        label = "paceline-contract-broken"
        with pytest.raises(ProvisionError) as caught:
            broken.provision(
                "cpu-1x", disk_gb=1, image=IMAGE, ssh_pubkey_path=tmp_path / "k", label=label
            )
        assert caught.value.leaked is None
        assert broken.list_instances(label_prefix=label) == []

    def test_an_image_that_is_nowhere_creates_nothing(
        self, adapter: BackendAdapter, tmp_path: Path
    ) -> None:
        """A bad image is a ProvisionError that names it."""
        with pytest.raises(ProvisionError, match=r"no-such-image"):
            adapter.provision(
                "cpu-1x",
                disk_gb=1,
                image="127.0.0.1:1/no-such-image:0",
                ssh_pubkey_path=tmp_path / "k",
                label="paceline-contract-image",
            )

    def test_a_label_is_used_once(self, adapter: BackendAdapter, h: InstanceHandle) -> None:
        """A second container under one label is refused by the engine itself."""
        with pytest.raises(ProvisionError, match=h.label):
            adapter.provision(
                "cpu-1x", disk_gb=1, image=IMAGE, ssh_pubkey_path=Path("k"), label=h.label
            )

    def test_a_stopped_machine_starts_again_with_its_files(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """Stopping keeps the files, and can be repeated."""
        assert isinstance(adapter, SupportsStop)
        assert isinstance(adapter, SupportsLogs)
        adapter.run_remote(h, "touch kept", stream=False)
        adapter.stop(h)
        adapter.stop(h)
        assert adapter.status(h).state == InstanceState.STOPPED
        adapter.start(h)
        adapter.start(h)
        adapter.wait_running(h, timeout_s=60)
        assert adapter.run_remote(h, "test -e kept", stream=False).code == 0
        assert adapter.logs(h) == ""

    def with_network(self, network: str) -> "DockerBackend":
        from paceline.rental.backends.docker.adapter import DockerBackend
        from paceline.rental.backends.docker.config import DockerConfig

        config = DockerConfig(command=self.command, network=network)
        return DockerBackend(config, parts=self.parts)


@pytest.mark.skipif(usable_rsync() is None, reason="needs rsync: apt-get install rsync")
class TestDockerWithRsync(_Docker, CopyContract):
    """Files are copied by rsync, which the image has."""

    rsync = usable_rsync()
