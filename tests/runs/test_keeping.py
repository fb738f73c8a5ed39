"""A tunnel that one machine keeps to another, with real ssh: it comes back, and opens no more."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.waiting import wait_until
from paceline.rental.remote.protocol import SshTarget
from paceline.runs import keeping
from paceline.runs.model import Slot
from paceline.system import system_clock
from paceline.testing.fakes.machine import FakeMachine, has_sshd

pytestmark = [
    pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server"),
    pytest.mark.enable_socket,
]
TRAINER, ROLLOUT = Slot(role="trainer", index=0), Slot(role="rollout", index=0)
PLAN = keeping.Keeping(
    run_id="r",
    trainer=TRAINER,
    rollout=ROLLOUT,
    target=SshTarget(name="m", host="h", port=1, user="u", known_hosts=Path("k")),
    trainer_ports=(20_001, 20_002),
    rollout_ports=(20_003,),
)


def sh(folder: Path, command: str) -> int:
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, check=False, timeout=40
    ).returncode


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FakeMachine]:
    """A rollout's machine, which takes authorized_keys at its word."""
    machine = FakeMachine(tmp_path / "rollout", starts_at_home=False)
    machine.start()
    yield machine
    machine.stop()


class Pair:
    """Both machines of one kept tunnel, as folders; the rollout's has a real sshd."""

    def __init__(self, machine: FakeMachine, trainer: Path) -> None:
        self.trainer, self.machine = trainer, machine
        self.folder = trainer / "r" / keeping.PEERS / str(ROLLOUT)
        self.door = machine.home / "r" / keeping.PEERS
        known = f"[{machine.host}]:{machine.port} {machine.host_key}\n"
        target = SshTarget(
            name="m",
            host=machine.host,
            port=machine.port,
            user=machine.user,
            known_hosts=trainer / "k",
            home=str(machine.home),
        )
        self.plan = replace(PLAN, target=target)
        assert sh(trainer, keeping.key_command(f"r/{keeping.PEERS}")) == 0
        self.key = trainer / "r" / keeping.PEERS / keeping.KEY
        (self.door / "admit").mkdir(parents=True)
        (self.door / "door.sh").write_text(keeping.DOOR_SCRIPT)
        (self.door / "admit" / "keep.sh").write_text(keeping.admit_script(every_s=0.2))
        line = keeping.admission(self.plan, self.key.with_name("key.pub").read_text())
        (self.door / "admit" / f"line-{TRAINER}").write_text(line)
        self.folder.mkdir()
        (self.folder / "keep.sh").write_text(keeping.keep_script(self.plan))
        (self.folder / "hosts").write_text(known)

    @property
    def authorized(self) -> Path:
        return self.machine.home / ".ssh" / "authorized_keys"

    def admit(self, *, home: Path) -> None:
        command = keeping.start_command(f"r/{keeping.PEERS}/admit")
        assert sh(home, f"HOME={home}; export HOME; {command}") == 0

    def is_up(self) -> bool:
        up = self.folder / "up"
        return up.exists() and up.stat().st_size > 0

    def close(self) -> None:
        sh(self.trainer, keeping.stop_command(f"r/{keeping.PEERS}/{ROLLOUT}"))
        sh(self.machine.home, keeping.stop_command(f"r/{keeping.PEERS}/admit"))

    def ssh(self, *words: str) -> subprocess.CompletedProcess[str]:
        options = [
            "-F",
            "none",
            "-o",
            "BatchMode=yes",
            "-o",
            f"UserKnownHostsFile={self.folder}/hosts",
        ]
        options += ["-i", str(self.key), "-p", str(self.machine.port), "-l", self.machine.user]
        argv = ["ssh", *options, *words]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)


@pytest.fixture
def pair(machine: FakeMachine, tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "trainer").mkdir()
    pair = Pair(machine, tmp_path / "trainer")
    yield pair
    pair.close()


def wait(ready: object, what: str) -> None:
    assert callable(ready)
    wait_until(ready, what=what, clock=system_clock(), timeout_s=30, interval_s=0.05)


def test_a_kept_tunnel_comes_back_and_its_key_opens_nothing_else(pair: Pair) -> None:
    """After a cut, and after the provider wrote the keys anew, it is up again by itself."""
    pair.authorized.parent.mkdir()
    pair.authorized.write_text("ssh-ed25519 AAAA somebody")  # no newline at its end
    pair.admit(home=pair.machine.home)
    folder = f"r/{keeping.PEERS}/{ROLLOUT}"
    assert sh(pair.trainer, keeping.start_command(folder)) == 0
    assert sh(pair.trainer, keeping.await_command(folder)) == 0

    said = pair.ssh(pair.machine.host, "id")
    assert (said.returncode, said.stdout) == (1, "")
    other = pair.ssh(
        "-N",
        "-o",
        "ExitOnForwardFailure=yes",
        "-R",
        "127.0.0.1:20001:127.0.0.1:1",
        pair.machine.host,
    )
    assert "forwarding failed" in other.stderr

    pair.authorized.write_text("ssh-ed25519 AAAA somebody\n")
    wait(lambda: len(pair.authorized.read_text().splitlines()) == 2, "the line to be put back")
    pair.machine.drop_connections()
    wait(lambda: not pair.is_up(), "the cut")
    wait(pair.is_up, "the tunnel to come back")

    pair.close()
    wait(
        lambda: pair.authorized.read_text() == "ssh-ed25519 AAAA somebody\n",
        "the line to be taken away",
    )


def test_no_tunnel_is_said_in_time_and_leaves_nothing(pair: Pair) -> None:
    """A key that is not let in: no tunnel, and the keeper is ended."""
    folder = f"r/{keeping.PEERS}/{ROLLOUT}"
    assert sh(pair.trainer, keeping.start_command(folder)) == 0
    short = keeping.await_command(folder).replace(str(keeping.UP_TIMEOUT_S * 5), "3")
    assert sh(pair.trainer, short) == 1
    pid = int((pair.folder / "pid").read_text())
    wait(lambda: not Path(f"/proc/{pid}").exists(), "the keeper to end")


def test_an_address_with_colons_is_quoted_where_it_must_be() -> None:
    """Ssh takes such a host bare; forwards name loopback alone."""
    target = replace(PLAN.target, host="2001:db8::7")
    script = keeping.keep_script(replace(PLAN, target=target))
    assert "-- 2001:db8::7 " in script
    assert "127.0.0.1:26003:127.0.0.1:20003" in script
