"""Names for plain ssh: written whole, gone with the machine, one line in the user's own file."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.rental import InstanceHandle
from paceline.rental.lifecycle import MachineState
from paceline.rental.records import Machine, RentedOffer
from paceline.rental.remote.protocol import ContainerTarget, SshTarget
from paceline.runs.sshconfig import SshConfig

MACHINE = Machine(
    label="paceline-r-task-0-aa",
    run_id="r",
    role="task",
    index=0,
    backend="fake",
    offer=RentedOffer(id="o", gpu_name="cpu", num_gpus=1, dph=0.0),
    state=MachineState.RUNNING,
    intended_at=0.0,
    instance=InstanceHandle("fake", "i", "l", 0.0),
)


@pytest.fixture
def target(tmp_path: Path) -> SshTarget:
    return SshTarget(
        name="machine",
        host="192.0.2.9",
        port=2201,
        user="root",
        known_hosts=tmp_path / "a b%" / "known",
        identity=tmp_path / "key",
        proxy_jump="me@gate:22",
    )


@pytest.fixture
def config(tmp_path: Path) -> SshConfig:
    return SshConfig(tmp_path / "st ate" / "hosts", user_file=tmp_path / "home" / ".ssh" / "config")


def asked(config: SshConfig, name: str) -> dict[str, str]:
    """Return what ssh itself makes of a name."""
    words = ["/usr/bin/ssh", "-G", "-F", str(config.user_file), name]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_ssh_itself_finds_a_machine_by_name(config: SshConfig, target: SshTarget) -> None:
    """Odd paths and a jump host arrive; a later machine has its index in its name."""
    config.install()
    config.add(MACHINE, target)
    config.add(replace(MACHINE, label="paceline-r-task-1-bb", index=1), replace(target, port=7))
    for name in ("paceline-r-task", "paceline-r-task-0"):
        found = asked(config, name)
        assert (found["hostname"], found["port"], found["user"]) == ("192.0.2.9", "2201", "root")
        assert found["proxyjump"] == "me@gate:22"
        assert found["userknownhostsfile"].endswith("/a b%/known")
    assert asked(config, "paceline-r-task-1")["port"] == "7"
    assert config.names() == ["paceline-r-task", "paceline-r-task-0", "paceline-r-task-1"]
    config.drop("paceline-r-task-1-bb")
    config.drop("../../etc/passwd")
    config.keep({"paceline-r-other"})
    assert config.names() == []


def test_a_container_has_no_name(config: SshConfig) -> None:
    """What is behind no sshd cannot be found by ssh."""
    config.add(MACHINE, ContainerTarget(name="c", container="abc"))
    assert config.names() == []


def test_the_users_file_is_given_back_as_it_was(config: SshConfig, tmp_path: Path) -> None:
    """One line, once, at the top; mode, link and the rest stay; removing twice is fine."""
    config.user_file.parent.mkdir(parents=True)
    real = tmp_path / "dotfiles"
    before = b"Host mine\n  User me\xff\n"
    real.write_bytes(before)
    real.chmod(0o644)
    config.user_file.symlink_to(real)
    config.install()
    config.install()
    assert real.read_text(errors="replace").count("Include") == 1
    assert real.read_text(errors="replace").splitlines()[1].startswith("Include")
    config.remove()
    config.remove()
    assert real.read_bytes() == before
    assert (real.stat().st_mode & 0o777, config.user_file.is_symlink()) == (0o644, True)
