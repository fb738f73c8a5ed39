"""Which calls a rental makes at Lambda, where each costs a second, and none is missing."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rental.backends.lambda_.adapter import LambdaBackend
from paceline.rental.backends.lambda_.keys import KnownKeys
from paceline.rental.errors import ProvisionError, SshDeniedError
from paceline.rental.failover import rest_s
from paceline.rental.looks import LOOK_S_MAX
from paceline.rental.model import InstanceHandle
from paceline.rental.remote.protocol import SshTarget
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.cloud import FakeTransport
from paceline.testing.fakes.lambda_ import FakeLambda
from paceline.testing.fakes.parts import fake_parts

OFFER = "us-west-1/gpu_1x_h100_pcie"
LAUNCH = "POST /api/v1/instance-operations/launch"
TERMINATE = "POST /api/v1/instance-operations/terminate"
LIST = "GET /api/v1/instances"
KEYS, ADD_KEY = "GET /api/v1/ssh-keys", "POST /api/v1/ssh-keys"


class Shell:
    """A machine's shell that lets everybody in, or nobody."""

    denies = False

    def __init__(self, target: SshTarget, instance_id: str) -> None:
        self.target = target

    def probe(self) -> None:
        if Shell.denies:
            raise SshDeniedError("permission denied")

    def disconnect(self) -> None:
        pass


class World:
    """One operator's computer and one account; every rental is a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeLambda(clock=FakeClock(), boot_s=1.0)
        self.fake.enforces_pace = True
        self.folder = folder
        self.public_key = folder / "key.pub"
        self.num_labels = 0

    def adapter(self, *, key: str = "fake-key") -> LambdaBackend:
        self.fake.key = key
        parts = fake_parts(
            clock=self.fake.clock,
            state_dir=self.folder / "state",
            environ={"LAMBDA_API_KEY": key},
            transport=FakeTransport(self.fake),
            ssh_remote=Shell,  # type: ignore[arg-type]  # the two methods that are used
        )
        return LambdaBackend(parts=parts)

    def rent(
        self, adapter: LambdaBackend, offer: str = OFFER, *, rest_s: float = 12.0
    ) -> InstanceHandle:
        self.num_labels += 1
        self.fake.clock.sleep(rest_s)  # launches are so far apart
        return adapter.provision(
            offer,
            disk_gb=1,
            image="",
            ssh_pubkey_path=self.public_key,
            label=f"paceline-a-{self.num_labels}",
        )

    def calls(self) -> list[str]:
        found = list(self.fake.calls)
        self.fake.calls.clear()
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")]
    subprocess.run(argv, check=True)
    Shell.denies = False
    yield World(tmp_path)
    Shell.denies = False


def test_a_machines_life_costs_four_calls(world: World) -> None:
    """Launch, a listing that says it runs, the order, the proof; the first also asks for keys."""
    for keys in ([KEYS, ADD_KEY], [], []):
        adapter = world.adapter()
        h = world.rent(adapter)
        adapter.wait_running(h, timeout_s=60)
        assert world.calls() == [*keys, LAUNCH, LIST]
        adapter.teardown(h)
        calls = world.calls()
        assert calls[0] == TERMINATE
        assert set(calls[1:]) == {f"GET /api/v1/instances/{h.instance_id}"}
        assert world.fake.billing() == []
    assert world.fake.num_rate_limited == 0


def test_a_launch_right_after_another_process_says_when_it_may_come(world: World) -> None:
    """Processes know nothing of each other's pace: nothing is made, and twelve seconds do it."""
    other = world.rent(world.adapter())
    world.fake.clock.sleep(3.0)
    adapter = world.adapter()
    with pytest.raises(ProvisionError) as caught:
        world.rent(adapter, rest_s=0.0)
    assert rest_s(caught.value, patience_s=60.0) == pytest.approx(12.0)
    assert rest_s(caught.value, patience_s=11.0) is None
    assert [one.label for one in world.fake.billing()] == [other.label]
    world.fake.clock.sleep(12.0)
    world.rent(adapter, rest_s=0.0)
    assert len(world.fake.billing()) == 2


def test_more_launches_than_there_is_time_for_take_no_places(world: World) -> None:
    """Whoever cannot wait for its turn is no one's turn: the next caller is not put behind it."""
    adapter = world.adapter()
    world.rent(adapter)
    launches = adapter._client._api._pacer
    lanes = {"launch": 12.0}
    now_s = world.fake.clock.monotonic()
    waits = [launches.reserve(lanes, now_s=now_s, wait_s_max=30.0) for _ in range(9)]
    assert waits[:2] == pytest.approx([12.0, 24.0], abs=1.0)
    assert waits[2:] == pytest.approx([36.0] * 7, abs=1.0)


def test_the_listing_of_the_wait_is_there_for_whoever_compares_the_record(world: World) -> None:
    """It counts from when it was asked for, not from when it was answered."""
    adapter = world.adapter()
    before_s = world.fake.clock.monotonic()
    assert adapter.listed_since(before_s) is None
    h = world.rent(adapter)
    adapter.wait_running(h, timeout_s=60)
    listed = adapter.listed_since(before_s)
    assert listed is not None
    assert [one.instance_id for one in listed] == [h.instance_id]
    assert adapter.listed_since(world.fake.clock.monotonic()) is None


def test_a_machine_that_is_listed_late_is_asked_about(world: World) -> None:
    """A listing without it proves nothing."""
    world.fake.faults.arm("late-listing")
    adapter = world.adapter()
    h = world.rent(adapter)
    adapter.wait_running(h, timeout_s=15)
    assert f"GET /api/v1/instances/{h.instance_id}" in world.calls()


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_look_that_is_no_longer_fresh_is_taken_again(world: World, *, is_stale: bool) -> None:
    """The order comes first only where a look of just now says that the machine is there."""
    adapter = world.adapter()
    h = world.rent(adapter)
    adapter.wait_running(h, timeout_s=60)
    world.calls()
    world.fake.clock.sleep(LOOK_S_MAX + 1 if is_stale else LOOK_S_MAX - 10)
    adapter.teardown(h)
    place = 1 if is_stale else 0
    assert world.calls()[place] == TERMINATE


def test_what_goes_already_is_ordered_once_and_then_looked_at(world: World) -> None:
    """The answer global/unknown brings no second order, from no layer."""
    adapter = world.adapter()
    h = world.rent(adapter)
    adapter.wait_running(h, timeout_s=60)
    world.fake.clock.sleep(2.0)
    world.adapter()._client.terminate(h.instance_id)
    world.fake.clock.sleep(2.0)
    world.calls()
    adapter.teardown(h)
    assert world.calls().count(TERMINATE) == 1
    assert world.fake.billing() == []


def test_an_order_that_was_not_followed_is_given_again(world: World) -> None:
    """A look in between says so."""
    adapter = world.adapter()
    h = world.rent(adapter)
    adapter.wait_running(h, timeout_s=60)
    world.calls()
    world.fake.faults.arm("ignored-destroy")
    adapter.teardown(h)
    look = f"GET /api/v1/instances/{h.instance_id}"
    assert world.calls()[:4] == [TERMINATE, look, look, TERMINATE]
    assert world.fake.billing() == []


def test_a_key_that_was_deleted_is_registered_and_launched_with_once_more(world: World) -> None:
    """The refusal made nothing, so that is no second order."""
    world.rent(world.adapter())
    world.calls()
    world.fake.ssh_keys.clear()
    adapter = world.adapter()
    world.rent(adapter)
    assert world.calls() == [LAUNCH, KEYS, ADD_KEY, LAUNCH]
    assert len(world.fake.billing()) == 2
    world.rent(adapter)
    assert world.calls() == [LAUNCH]


def test_a_key_is_mended_once_for_all_threads(world: World) -> None:
    """Who was refused with the old name, too, takes what another has found out meanwhile."""
    world.rent(world.adapter())
    world.fake.ssh_keys.clear()
    adapter = world.adapter()
    blob = " ".join(world.public_key.read_text().split()[:2])
    name, num_mended = adapter._key_name(blob)
    assert num_mended is not None
    world.calls()
    names = [adapter._mended(blob, name, num_mended=num_mended) for _ in range(3)]
    assert names == [name] * 3
    assert world.calls() == [KEYS, ADD_KEY]


def test_a_launch_that_is_refused_for_another_reason_is_not_repeated(world: World) -> None:
    """The key is looked for, found, and remembered again; the cause is told."""
    world.rent(world.adapter())
    world.calls()
    adapter = world.adapter()
    with pytest.raises(ProvisionError, match="No such region"):
        world.rent(adapter, "mars-1/gpu_1x_h100_pcie")
    assert world.calls() == [LAUNCH, KEYS]
    world.rent(adapter)
    assert world.calls() == [LAUNCH]


def test_another_account_is_asked_for_its_own_keys(world: World) -> None:
    """What one account is known to have says nothing about another."""
    world.rent(world.adapter())
    world.calls()
    world.fake.ssh_keys.clear()
    world.rent(world.adapter(key="other-key"))
    assert world.calls() == [KEYS, ADD_KEY, LAUNCH]


def test_a_machine_that_refuses_our_key_makes_us_ask_again(world: World) -> None:
    """Another key may have been registered under the name that we remember."""
    adapter = world.adapter()
    h = world.rent(adapter)
    Shell.denies = True
    with pytest.raises(SshDeniedError):
        adapter.wait_running(h, timeout_s=600)
    Shell.denies = False
    world.calls()
    world.rent(adapter)
    assert world.calls() == [KEYS, LAUNCH]


def test_a_memory_that_cannot_be_used_costs_a_call_and_nothing_else(tmp_path: Path) -> None:
    """A full disk, a folder where a file should be, odd content."""
    file = tmp_path / "not-a-folder"
    file.touch()
    full = KnownKeys(file, account=lambda: "account")
    assert full.put("blob", "name") == "name"
    assert full.get("blob") is None
    keys = KnownKeys(tmp_path / "keys", account=lambda: "account")
    keys.put("blob", "name")
    [path] = (tmp_path / "keys").iterdir()
    assert "account" not in path.name
    for content in (b"", b"\xff", b"a\nb", b"x" * 1000):
        path.write_bytes(content)
        assert keys.get("blob") is None
    path.unlink()
    path.mkdir()
    assert keys.get("blob") is None
    keys.forget()
