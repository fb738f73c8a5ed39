"""A machine that nobody asks after ends itself at its provider, with its own key and no other."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.rental import BackendAdapter, InstanceHandle, OfferConstraints, load_backend
from paceline.rental.backends.defaults import default_parts
from paceline.runs.bootstrap import Guest
from paceline.runs.deadman import Arming, arm, beat_command, recipe_of
from paceline.runs.model import Slot
from paceline.system import system_clock
from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.machine import has_sshd, make_key_pair
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.parts import fake_parts
from paceline.testing.fakes.registry import FAKES, serve_fake

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server"),
]
CLOCK = system_clock()
SLOT = Slot(role="task", index=0)
GUEST = Guest(run_id="job-1", slot=SLOT)


class Rented:
    """One machine of a fake provider, with a real sshd."""

    def __init__(self, fake: FakeCloud, backend: BackendAdapter, key: Path) -> None:
        self.fake = fake
        self.backend = backend
        offer = backend.search_offers(OfferConstraints("h100-1x", min_disk_gb=50))[0]
        self.handle: InstanceHandle = backend.provision(
            offer.id, disk_gb=50, image="", ssh_pubkey_path=key, label="paceline-job-1-task-0-abcd"
        )
        backend.wait_running(self.handle, timeout_s=30)
        self.run("mkdir -p job-1/logs job-1/kit job-1/state")

    def run(self, command: str) -> int:
        return self.backend.run_remote(self.handle, command, stream=False, timeout_s=30).code

    def arm(self, after_s: float) -> None:
        recipe = recipe_of(self.backend, self.handle)
        arming = Arming(after_s=after_s, recipe=recipe, slot=SLOT)
        arm(self.backend, self.handle, guest=GUEST, arming=arming)

    def await_it(self, what: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = CLOCK.monotonic() + timeout_s
        while not what():
            assert CLOCK.monotonic() < deadline
            CLOCK.sleep(0.1)


@pytest.fixture(params=["vast", "runpod"])
def rented(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rented]:
    keys = tmp_path / "state" / "ssh"
    keys.mkdir(parents=True)
    make_key_pair(keys / "id_ed25519")
    machines = SshMachines(tmp_path / "machines")
    fake = FAKES[request.param]()(clock=CLOCK, machines=machines, boot_s=0.0)
    with serve_fake(fake) as environ:
        make: Callable[..., BackendAdapter] = load_backend(request.param)
        parts = fake_parts(
            clock=CLOCK,
            state_dir=tmp_path / "state",
            environ={"HOME": str(tmp_path), **environ},
            ssh_remote=default_parts().ssh_remote,
        )
        yield Rented(fake, make(parts=parts), keys / "id_ed25519.pub")
    fake.close()


def test_a_machine_that_nobody_asks_after_is_gone_at_its_provider(rented: Rented) -> None:
    """Beats over ssh keep it; without them it is destroyed by the provider's own API.

    Nobody has the account's key meanwhile: the machine has its own, which is good for no other
    machine. A switch that is set again replaces the one before.
    """
    other = rented.fake.plant(label="another")
    rented.arm(after_s=600.0)
    rented.arm(after_s=2.0)
    rented.fake.key = "changed: nobody but the machine itself can end it now"
    recipe = recipe_of(rented.backend, rented.handle)
    wrong = recipe.command.replace("$CONTAINER_ID", other).replace("$RUNPOD_POD_ID", other)
    assert rented.run(wrong) != 0
    for word in ("a", "b", "c"):
        CLOCK.sleep(1.0)
        assert rented.run(beat_command(GUEST, word)) == 0
    assert len(rented.fake.billing()) == 2
    rented.await_it(lambda: len(rented.fake.billing()) == 1)
    assert [rental.instance_id for rental in rented.fake.billing()] == [other]
