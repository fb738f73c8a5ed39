"""Ranks of a trainer as processes of their own, beside a control service.

No agent is above them that would end the others when one is gone.
"""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.core.waiting import wait_until
from paceline.refit.compose.keys import create_run_keys
from paceline.refit.control import auth
from paceline.refit.control.auth import TokenRole
from paceline.system import environ, system_clock
from paceline.testing.fakes.control import TOKENS, LoopbackControl

RUN_ID = "run"
MODEL_NAME = "m"
DATA_TOKEN = TOKENS[TokenRole.READER]
"""Any text will do."""
WAIT_S = 120.0
LOOK_S = 0.01


def run_environment(folder: Path, control: LoopbackControl) -> dict[str, str]:
    """Return what a role process is told of its run, with keys of its own; writes them."""
    keys = create_run_keys(folder / "keys")
    fields = {
        "role": "trainer",
        "control_token": TOKENS[TokenRole.TRAINER],
        "data_token": DATA_TOKEN,
        "signing_key": keys.signing_key,
        "verify_key": keys.verify_key,
    }
    auth.write_private_json(folder / "credentials", fields)
    return {
        **environ(),
        "PACELINE_RUN_ID": RUN_ID,
        "PACELINE_MODEL": MODEL_NAME,
        "PACELINE_CONTROL": control.address,
        "PACELINE_CREDENTIALS": str(folder / "credentials"),
        "PACELINE_ANCHOR_EVERY": "2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def verify_key_of(folder: Path) -> str:
    """Return the public key that ``run_environment`` made."""
    fields: Mapping[str, str] = json.loads((folder / "credentials").read_text())
    return fields["verify_key"]


class Ranks:
    """One start of all ranks."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], *, ranks: int, incarnation: str
    ) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "paceline.testing.rank_victim", str(folder)],
                env={
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": incarnation,
                },
            )
            for rank in range(ranks)
        ]

    def go(self, step: int, *ranks: int) -> None:
        """Let some ranks publish a step."""
        for rank in ranks:
            (self._folder / f"go-{step}-{rank}").touch()

    def ended(self, step: int, *ranks: int) -> dict[int, dict[str, object]]:
        """Wait for some ranks, and return how publishing ended in each."""
        found = {}
        for rank in ranks:
            path = self._folder / f"end-{step}-{rank}"
            wait_until(
                path.exists,
                what=path.name,
                clock=system_clock(),
                timeout_s=WAIT_S,
                interval_s=LOOK_S,
            )
            found[rank] = json.loads(path.read_text())
        return found

    def kill(self, rank: int) -> None:
        """End one as a lost machine does."""
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].wait(WAIT_S)

    def close(self) -> None:
        """End all of them, and forget what they said."""
        for rank in range(len(self.processes)):
            self.kill(rank)
        for path in [*self._folder.glob("go-*"), *self._folder.glob("end-*")]:
            path.unlink()


@contextmanager
def start_ranks(
    folder: Path, environment: Mapping[str, str], *, ranks: int, incarnation: str
) -> Iterator[Ranks]:
    """Start all ranks, and end what is left of them."""
    started = Ranks(folder, environment, ranks=ranks, incarnation=incarnation)
    try:
        yield started
    finally:
        started.close()
