"""Lives of machines over the fake providers, by seed: rented, lost, killed half-way, cleaned up.

Everything but the providers is real: orchestrator, adapters, HTTP client. Whatever goes wrong,
what costs money is on record after every step, one request never has two machines, and in calm
weather the next process leaves nothing behind.
"""

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.rental import BackendAdapter, load_backend
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.rental.rpc import Wire
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.cloud import FakeCloud, FakeTransport
from paceline.testing.fakes.parts import fake_parts
from paceline.testing.fakes.registry import FAKES, fake_environ

_KEY_NAME = "key.pub"
_RUN_ID = "r1"
_NUM_STEPS_MAX = 4
_NUM_CLEANINGS_MAX = 4
_CALM_S = 1000.0
_CRASH_CHANCE = 0.5
_CRASH_CALLS_MAX = 40
_FAULT_CHANCE = 0.2
_GPU = "h100-1x"


class Crash(BaseException):
    """The process ends here, as by kill -9: nothing may catch this."""


class Countdown:
    """Ends the process at the n-th call or write from now."""

    def __init__(self) -> None:
        self.left: int | None = None

    def tick(self) -> None:
        """Count one, and crash if it was the last."""
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise Crash


class _CrashingStore(MemoryStore):
    """A store in which the process can end just before or just after a write."""

    def __init__(self, *, clock: FakeClock, countdown: Countdown) -> None:
        super().__init__(clock=clock)
        self._countdown = countdown

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        self._countdown.tick()
        super().commit(expect=expect, writes=writes)
        self._countdown.tick()


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeStory:
    """What one life came to."""

    seed: int
    backend: str
    num_rented: int
    """Machines that ran."""
    num_crashes: int
    num_calls: int
    """Calls that the provider saw."""
    num_created: int
    """Machines that the provider ever made."""
    problems: tuple[str, ...]
    """What must never be; empty when all is well."""


class Life:
    """One seed's story on one provider."""

    def __init__(self, seed: int, *, backend: str, directory: Path) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - a simulation, repeatable
        self._seed = seed
        self._name = backend
        self._clock = FakeClock()
        self._fake: FakeCloud = FAKES[backend]()(clock=self._clock, seed=seed, boot_s=30.0)
        self._countdown = Countdown()
        self._store = _CrashingStore(clock=self._clock, countdown=self._countdown)
        self._fake.before_call = self._fake.after_call = self._countdown.tick
        self._directory = directory
        self._num_nonces = 0
        self._num_rents = 0
        self._num_rented = 0
        self._num_crashes = 0
        self._problems: list[str] = []

    def live(self) -> LifeStory:
        """Take some steps in bad weather, then clean up in calm weather."""
        for _ in range(self._rng.randint(1, _NUM_STEPS_MAX)):
            self._set_weather()
            step = self._rng.choice((self._rent, self._rent, self._destroy, self._reconcile))
            self._take(step)
            self._check(step.__name__.strip("_"))
            self._clock.advance(self._rng.choice((1.0, 25.0, 400.0)))
        self._clean_up()
        return LifeStory(
            seed=self._seed,
            backend=self._name,
            num_rented=self._num_rented,
            num_crashes=self._num_crashes,
            num_calls=len(self._fake.calls),
            num_created=len(self._fake.rentals),
            problems=tuple(self._problems),
        )

    def _set_weather(self) -> None:
        self._fake.faults.calm()
        for name in sorted(self._fake.faults.known):
            if self._rng.random() < _FAULT_CHANCE:
                self._fake.faults.set_chance(name, self._rng.choice((0.02, 0.06, 0.25)))
        is_crashing = self._rng.random() < _CRASH_CHANCE
        self._countdown.left = self._rng.randrange(_CRASH_CALLS_MAX) if is_crashing else None

    def _take(self, step: Callable[[], None]) -> None:
        try:
            step()
        except PacelineError:
            pass  # bad weather; what must hold is looked at afterwards
        except Crash:
            self._num_crashes += 1
        self._countdown.left = None

    def _rent(self) -> None:
        self._num_rents += 1
        self._orchestrator().rent(
            RentRequest(
                run_id=_RUN_ID,
                role="rollout",
                index=self._num_rents,
                gpu=_GPU,
                backends=(self._name,),
                min_disk_gb=50,
                max_dph=None,
                image="ubuntu:24.04",
                ssh_pubkey_path=self._directory / _KEY_NAME,
                boot_timeout_s=200,
            )
        )
        self._num_rented += 1

    def _destroy(self) -> None:
        orchestrator = self._orchestrator()
        machines = orchestrator.machines()
        if machines:
            orchestrator.destroy(self._rng.choice(machines))

    def _reconcile(self) -> None:
        self._orchestrator().reconcile(backends=(self._name,))

    def _check(self, when: str) -> None:
        """Compare the provider's books with our record."""
        on_record = {machine.label for machine in self._orchestrator().machines()}
        labels = [rental.label for rental in self._fake.billing()]
        for label in set(labels) - on_record:
            self._problems.append(f"after {when}: {label} bills and is on no record")
        for index in range(1, self._num_rents + 1):
            having = [label for label in labels if label.split("-")[3] == str(index)]
            if len(having) > 1:
                self._problems.append(f"after {when}: {', '.join(having)} bill for one request")

    def _clean_up(self) -> None:
        """Do what the next process does: look, and end what is there."""
        self._fake.faults.calm()
        for _ in range(_NUM_CLEANINGS_MAX):
            self._clock.advance(_CALM_S)
            orchestrator = self._orchestrator()
            orchestrator.reconcile(backends=(self._name,))
            for machine in orchestrator.machines():
                with contextlib.suppress(PacelineError):
                    orchestrator.destroy(machine)
        left = [rental.label for rental in self._fake.billing()]
        if left:
            self._problems.append(f"in the end {', '.join(left)} bill")

    def _orchestrator(self) -> Orchestrator:
        """Return a process that remembers nothing but the store."""
        adapter = self._adapter()
        return Orchestrator(
            store=self._store,
            backend=lambda _name: adapter,
            clock=self._clock,
            nonce=self._nonce,
            notify=lambda _name, _fields: None,
        )

    def _adapter(self) -> BackendAdapter:
        make: Callable[..., BackendAdapter] = load_backend(self._name)
        parts = fake_parts(
            clock=self._clock,
            state_dir=self._directory / "state",
            environ={"HOME": str(self._directory), **fake_environ(self._fake)},
            transport=FakeTransport(self._fake),
        )
        if self._name == "nebius":
            return make(parts=parts, wire=_nebius_wire(self._fake))
        return make(parts=parts)

    def _nonce(self) -> str:
        self._num_nonces += 1
        return f"{self._num_nonces:04x}"


def prepare(directory: Path) -> None:
    """Put into a directory what all lives in it need."""
    (directory / _KEY_NAME).write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0 simulation\n")


def _nebius_wire(fake: FakeCloud) -> Wire:
    from paceline.testing.fakes.nebius import FakeWire

    return FakeWire(fake)
