"""What the contract tests of the paid providers share: a key pair, and adapters over real sshds."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.backends.registry import load_backend
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.backend import BackendContract
from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.parts import fake_parts
from paceline.testing.fakes.registry import FAKES, serve_fake


@pytest.fixture(scope="session")
def key_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a private key; its public half is beside it."""
    path = tmp_path_factory.mktemp("keys") / "id_ed25519"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)],  # noqa: S607
        check=True,
    )
    return path


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def built(name: str, parts: Parts, **more: object) -> BackendAdapter:
    """Return the adapter ``name`` with these surroundings."""
    make: Callable[..., BackendAdapter] = load_backend(name)
    return make(parts=parts, **more)


class RealSshContract(BackendContract):
    """The backend contract over a fake provider's HTTP server and a real sshd per machine.

    The provider's time is a clock that jumps; only what happens on machines takes real time.
    """

    backend: ClassVar[str]
    gpu_target = "h100-1x"
    disk_gb = 50
    ssh_port: int | None = None

    @pytest.fixture(autouse=True)
    def _provider(self, tmp_path: Path, key_pair: Path) -> Iterator[None]:
        self.key = key_pair
        machines = SshMachines(tmp_path / "machines", port=self.ssh_port)
        fake: FakeCloud = FAKES[self.backend]()(clock=FakeClock(), machines=machines, boot_s=20.0)
        (tmp_path / "state" / "ssh").mkdir(parents=True)
        for suffix in ("", ".pub"):
            private = tmp_path / "state" / "ssh" / f"id_ed25519{suffix}"
            private.symlink_to(key_pair.with_name(f"id_ed25519{suffix}"))
        with serve_fake(fake) as environ:
            self.parts = fake_parts(
                clock=fake.clock,
                state_dir=tmp_path / "state",
                environ={"HOME": str(tmp_path), **environ, **self.more_environ()},
                ssh_remote=default_parts().ssh_remote,
            )
            yield
        fake.close()

    def make(self) -> BackendAdapter:
        return built(self.backend, self.parts)

    def public_key_path(self, tmp_path: Path) -> Path:
        return self.key.with_name("id_ed25519.pub")

    def more_environ(self) -> dict[str, str]:
        """Return what else the adapter has to find, such as the port of the sshds."""
        return {}
