"""Your own hosts: the list, the lock, and what a teardown leaves alone."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.core.waiting import wait_until
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.ssh import mapping
from paceline.rental.backends.ssh.adapter import SshBackend
from paceline.rental.backends.ssh.config import HostConfig, SshConfig, load_config
from paceline.rental.backends.ssh.mapping import HostFacts, Lock
from paceline.rental.errors import BackendError, NoOffersError, ProvisionError, SshUnreachableError
from paceline.rental.model import InstanceHandle, OfferConstraints
from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair

LOCK = Lock(instance_id="box.0a1b2c3d", label="paceline-x", created_at=1.5, operator="me@here")
ANY = OfferConstraints("cpu-1x", min_disk_gb=0)


@given(
    st.builds(
        Lock,
        instance_id=st.text(max_size=30),
        label=st.text(max_size=60),
        created_at=st.floats(allow_nan=False, allow_infinity=False),
        operator=st.text(max_size=30),
    )
)
def test_a_lock_survives_its_text(lock: Lock) -> None:
    """What was written on the link is what is read from it."""
    assert mapping.parse_lock(mapping.render_lock(lock)) == lock


@given(st.text(max_size=300))
def test_any_answer_of_a_host_has_a_meaning(text: str) -> None:
    """Garbage is a host with nothing, never an exception."""
    facts = mapping.parse_facts(text)
    assert facts.disk_gb >= 0
    assert facts.num_gpus >= 0
    assert mapping.parse_lock(text) is None


def test_a_lock_that_is_not_ours_to_read_is_taken_all_the_same() -> None:
    """A link with text that we do not know makes the host taken."""
    facts = mapping.parse_facts("lock=something else\ndisk_kb=1000000000\nram_kb=1\ngpus=0\n")
    assert (facts.lock, facts.is_locked) == (None, True)
    assert "taken by somebody" in str(mapping.objection(facts, ANY, gpu="cpu-2x", dph=0.0))


@pytest.mark.parametrize(
    ("asked", "gpu", "num_gpus", "fits"),
    [
        ("cpu-1x", "cpu-4x", 0, True),
        ("cpu-5x", "cpu-4x", 0, False),
        ("rtx4090-2x", "rtx4090-2x", 2, True),
        ("rtx4090-1x", "rtx4090-2x", 2, False),
        ("rtx4090-2x", "rtx4090-2x", 1, False),
        ("h100-2x", "rtx4090-2x", 2, False),
    ],
)
def test_a_host_fits_what_it_has(asked: str, gpu: str, num_gpus: int, fits: bool) -> None:
    """A host is taken whole; its GPUs are counted, not believed."""
    facts = HostFacts(lock=None, is_locked=False, disk_gb=100, ram_gb=1, num_gpus=num_gpus)
    c = OfferConstraints(asked, min_disk_gb=10)
    assert (mapping.objection(facts, c, gpu=gpu, dph=1.0) is None) is fits


def test_a_limit_on_disk_and_price_is_kept() -> None:
    """Both are named with what there is."""
    facts = HostFacts(lock=None, is_locked=False, disk_gb=5, ram_gb=1, num_gpus=0)
    small = mapping.objection(facts, replace(ANY, min_disk_gb=10), gpu="cpu-1x", dph=0.0)
    assert small is not None
    assert "10 GB" in small
    dear = mapping.objection(facts, replace(ANY, max_dph=1.0), gpu="cpu-1x", dph=2.0)
    assert dear is not None
    assert "2 $/h" in dear


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[host]\n", "line 1"),
        ('[[host]]\nname = "a"\naddress = "h"\ngpu = "cpu-1x"\ncolour = "red"\n', "colour"),
        ('[[host]]\nname = "A b"\naddress = "h"\ngpu = "cpu-1x"\n', "host 1 name"),
        ('[[host]]\nname = "a"\naddress = "-oProxyCommand=x"\ngpu = "cpu-1x"\n', "address"),
        ('[[host]]\nname = "a"\naddress = "h"\ngpu = "a100-1x"\n', "a100-40gb-1x"),
        ('[[host]]\nname = "a"\ngpu = "cpu-1x"\n', "address"),
        ('host = [{name="a",address="h",gpu="cpu-1x"},{name="a",address="i",gpu="cpu-1x"}]', "two"),
    ],
)
def test_mistakes_in_the_list_are_named(text: str, said: str, tmp_path: Path) -> None:
    """The file, the host and the field are in the message."""
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_without_a_list_the_error_says_where_it_belongs(tmp_path: Path) -> None:
    """Nobody has to guess the file's name."""
    backend = SshBackend(parts=replace(default_parts(), config_dir=tmp_path))
    with pytest.raises(NoOffersError, match=r"hosts\.toml"):
        backend.search_offers(ANY)
    report = backend.check()
    assert not report.is_valid
    assert "hosts.toml" in report.advice
    assert backend.list_instances() == []


class Operator:
    """Somebody with a list of hosts, a state of their own, and the same host."""

    def __init__(self, machine: FakeMachine, state_dir: Path, host: HostConfig) -> None:
        self.machine = machine
        self.parts: Parts = replace(default_parts(), state_dir=state_dir)
        self.backend = SshBackend(SshConfig(host=(host,)), parts=self.parts)

    def take(self, label: str) -> InstanceHandle:
        return self.backend.provision(
            "box", disk_gb=0, image="", ssh_pubkey_path=Path("none"), label=label
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FakeMachine]:
    if not has_sshd():
        pytest.skip("needs sshd: apt-get install openssh-server")
    machine = FakeMachine(tmp_path / "m", authorized_keys=[make_key_pair(tmp_path / "key")])
    machine.start()
    yield machine
    machine.stop()


def host_of(machine: FakeMachine, **fields: object) -> HostConfig:
    return HostConfig.model_validate(
        {
            "name": "box",
            "address": machine.host,
            "port": machine.port,
            "user": machine.user,
            "identity": machine.root.parent / "key",
            "gpu": "cpu-1x",
            "lock": ".lock",
            **fields,
        }
    )


def test_a_host_is_taken_by_one_operator(machine: FakeMachine, tmp_path: Path) -> None:
    """The second is told who has it, gets no offer of it, and may take it afterwards."""
    ann = Operator(machine, tmp_path / "ann", host_of(machine))
    bob = Operator(machine, tmp_path / "bob", host_of(machine, directory=".bob"))
    h = ann.take("paceline-ann")
    with pytest.raises(ProvisionError, match="paceline-ann"):
        bob.take("paceline-bob")
    with pytest.raises(NoOffersError, match="paceline-ann"):
        bob.backend.search_offers(ANY)
    ann.backend.teardown(h)
    mine = bob.take("paceline-bob")
    assert bob.backend.list_instances() == [mine]
    bob.backend.teardown(mine)


def test_teardown_touches_nothing_else(
    machine: FakeMachine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files and processes of the host's owner are there afterwards; the machine's are not."""
    ann = Operator(machine, tmp_path / "ann", host_of(machine))
    (machine.home / "thesis.txt").write_text("mine")
    h = ann.take("paceline-ann")
    started = "sleep 600 & setsid sleep 601 & chmod 500 . ; exit 0"
    ann.backend.run_remote(h, f"({started}) >/dev/null 2>&1", stream=False)
    owners = ann.backend._host_remote(host_of(machine))
    owners.run("(setsid sleep 700 >/dev/null 2>&1 &)", env={}, stream=False, timeout_s=30)
    ann.backend.teardown(h, force=True)
    # Beside the owner's, the shells that answered the last questions may be ending still.
    wait_until(
        lambda: machine.num_processes() == 1,
        what="the owner's process being the only one",
        clock=ann.parts.clock,
        timeout_s=10,
        interval_s=0.02,
    )
    assert sorted(path.name for path in machine.home.iterdir()) == [".paceline", "thesis.txt"]
    with caplog.at_level(logging.WARNING, logger="paceline"):
        ann.backend.teardown(h)
    assert "gone already" in caplog.text


def test_a_machine_leaves_nobody_let_in(machine: FakeMachine, tmp_path: Path) -> None:
    """Whoever kept a line in authorized_keys was killed by force: it goes with the machine.

    What somebody was killed in the middle of goes when the host is taken again.
    """
    ann = Operator(machine, tmp_path / "ann", host_of(machine))
    h = ann.take("paceline-ann")
    door = machine.home / ".paceline" / "machines" / h.instance_id / "workspace" / "run" / "peers"
    line = f'restrict,port-forwarding,command="sh {door}/door.sh t-0" ssh-ed25519 B paceline-run-t'
    keys = machine.home / ".ssh" / "authorized_keys"
    keys.parent.mkdir()
    door.mkdir(parents=True)
    (door / "door.sh").write_text("")
    keys.write_text(f"ssh-ed25519 A me\n{line}-0\n")
    ann.backend.teardown(h, force=True)
    assert keys.read_text() == "ssh-ed25519 A me\n"
    keys.write_text(f"{line}-1\nssh-ed25519 A me\n")
    ann.backend.teardown(ann.take("paceline-ann"))
    assert keys.read_text() == "ssh-ed25519 A me\n"


def test_a_teardown_that_was_killed_half_way_is_done_again(
    machine: FakeMachine, tmp_path: Path
) -> None:
    """While the lock is there the machine is, whatever is left of its files."""
    ann = Operator(machine, tmp_path / "ann", host_of(machine))
    for leave in ("closing", None):
        h = ann.take("paceline-ann")
        files = machine.home / ".paceline" / "machines" / h.instance_id
        (files / "workspace").rename(files / "closing")
        if leave is None:
            (files / "closing").rmdir()
            (files / "jobs").rmdir()
            files.rmdir()
        assert ann.backend.status(h).state == "running"
        ann.backend.teardown(h)
        assert ann.backend.status(h).state == "destroyed"
        assert not (machine.home / ".lock").is_symlink()


def test_a_host_that_does_not_answer(machine: FakeMachine, tmp_path: Path) -> None:
    """Nothing is created, nothing is believed gone, and the check says which host it is."""
    ann = Operator(machine, tmp_path / "ann", host_of(machine))
    h = ann.take("paceline-ann")
    machine.stop()
    with pytest.raises(ProvisionError, match="was not taken"):
        ann.take("paceline-more")
    with pytest.raises(NoOffersError, match="box"):
        ann.backend.search_offers(ANY)
    with pytest.raises(SshUnreachableError):
        ann.backend.list_instances()
    with pytest.raises(SshUnreachableError):
        ann.backend.status(h)
    report = ann.backend.check()
    assert not report.is_valid
    assert "box" in report.advice
    machine.start()
    ann.backend.teardown(h)


def test_a_host_that_left_the_list_is_not_believed_gone(
    machine: FakeMachine, tmp_path: Path
) -> None:
    """Its machine may still be there; the error says how to end it."""
    ann = Operator(machine, tmp_path / "ann", host_of(machine))
    h = ann.take("paceline-ann")
    empty = SshBackend(SshConfig(), parts=ann.parts)
    with pytest.raises(BackendError, match="list it again"):
        empty.status(h)
    ann.backend.teardown(h)


def test_a_lock_that_cannot_be_made_is_an_error_with_its_path(
    machine: FakeMachine, tmp_path: Path
) -> None:
    """Where we may not write nothing is taken, and the message names the place."""
    ann = Operator(machine, tmp_path / "ann", host_of(machine, lock="no/such/place"))
    with pytest.raises(ProvisionError, match="no/such/place"):
        ann.take("paceline-ann")
    few = Operator(machine, tmp_path / "few", host_of(machine))
    with pytest.raises(ProvisionError, match="free disk"):
        few.backend.provision(
            "box", disk_gb=10**7, image="", ssh_pubkey_path=Path("k"), label="paceline-few"
        )
