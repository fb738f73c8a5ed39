"""What the fake providers share: requests and replies, faults, a bill, machines behind them.

A fake is one object that answers requests. It is put behind a real HTTP server (`serving.py`) or
behind a transport of the same process (`FakeTransport`), and does not know which. Time is the
clock's: machines boot, listings catch up and bills grow as it passes.
"""

import json
import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable
from urllib.parse import parse_qsl

import httpx

from paceline.core.clock import Clock
from paceline.testing.fakes.gpus import FakeGpus

_HTML = "<html><head><title>502 Bad Gateway</title></head><body><h1>Bad Gateway</h1></body></html>"
_SLOW_STEP_S = 20.0

COMMON_FAULTS: Mapping[str, str] = {
    "rate-limit": "429 before anything is done",
    "server-error": "500 before anything is done",
    "lost-request": "the connection breaks before anything is done",
    "lost-answer": "done, and the connection breaks before the answer",
    "error-but-created": "a create answers 500, and the machine is there and bills",
    "html": "done, and a page of a proxy is the answer",
    "half-body": "done, and the answer ends in the middle",
    "slow-body": "done, and the answer drips in slower than any deadline",
    "no-capacity": "a create is refused: sold out",
    "late-listing": "a new machine is not listed for a while",
    "boot-fails": "a new machine says that it will never run",
    "never-boots": "a new machine stays as it is",
    "ignored-destroy": "a destroy is answered as done, and the machine bills on",
    "no-balance": "a create is refused: the account is empty",
    "dead-gpu": "a GPU of a new machine is listed and cannot be used",
    "missing-gpu": "a new machine has one GPU less than was offered",
    "less-memory": "the GPUs of a new machine have half the memory that was offered",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call, as it came in."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""

    @property
    def document(self) -> Mapping[str, object]:
        """The body as a JSON object; an empty one for anything else."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def bearer(self) -> str:
        """The key that came with it."""
        return self.headers.get("authorization", "").removeprefix("Bearer ").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer."""

    status: int = 200
    body: object = None
    """Text and bytes go out as they are, anything else as JSON, None as nothing."""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    is_lost: bool = False
    """It never arrives: the connection breaks."""
    is_half: bool = False
    is_slow: bool = False
    trailer: bytes | None = None
    """What gRPC sends after a refusal."""

    @property
    def content(self) -> bytes:
        """The bytes that go out."""
        if self.body is None:
            return b""
        content = self.body
        if not isinstance(content, bytes):
            text = content if isinstance(content, str) else json.dumps(content)
            content = text.encode()
        return content[: len(content) // 2] if self.is_half else content


class Machines(Protocol):
    """Real machines behind the rented ones."""

    def start(
        self,
        instance_id: str,
        public_keys: Iterable[str],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> tuple[str, int]:
        """Have a machine that lets these keys in, and return where its sshd is; idempotent.

        ``environ`` is what logins find in their environment there.
        """
        ...

    def stop(self, instance_id: str) -> None:
        """End it and all that runs on it; its files stay for the next start. Idempotent."""
        ...

    def remove(self, instance_id: str) -> None:
        """End it and lose its files; idempotent."""
        ...


@dataclass(slots=True, kw_only=True)
class Rental:
    """One machine that somebody rents: what it is called and since when it costs."""

    instance_id: str
    label: str
    dph: float
    created_at: float
    facts: dict[str, object] = field(default_factory=dict)
    """What a provider knows of it beside: type, image, keys."""
    boots: bool = True
    boot_failure: str | None = None
    listed_from_s: float = 0.0
    is_stopped: bool = False
    started_at: float = 0.0
    """When it was last told to run."""
    public_keys: list[str] = field(default_factory=list)
    gpus: FakeGpus | None = None
    """What is really in it, whatever was offered."""
    ended_at: float | None = None
    """When it stopped to bill for good."""


@runtime_checkable
class SupportsGpus(Protocol):
    """Machines that can have a driver with GPUs."""

    def equip(self, instance_id: str, gpus: FakeGpus) -> None:
        """Say what a machine's driver is to show, before its first start."""
        ...


@runtime_checkable
class SupportsPublishing(Protocol):
    """Machines whose ports can be reached from outside under other numbers."""

    def publish(self, instance_id: str, port: int) -> tuple[str, int]:
        """Return where the world reaches a machine's port, while the machine runs; idempotent."""
        ...


class Faults:
    """What goes wrong: so many times on command, or by seeded chance."""

    def __init__(self, rng: random.Random, known: Iterable[str]) -> None:
        self._rng = rng
        self._armed: Counter[str] = Counter()
        self._chances: dict[str, float] = {}
        self.known = frozenset(known)

    def arm(self, name: str, *, times: int = 1) -> None:
        """Let the next ``times`` calls that it is for go wrong so."""
        self._armed[self._check(name)] += times

    def set_chance(self, name: str, chance: float) -> None:
        """Let each call that it is for go wrong so with that probability."""
        self._chances[self._check(name)] = chance

    def calm(self) -> None:
        """Let nothing go wrong any more."""
        self._armed.clear()
        self._chances.clear()

    def strikes(self, name: str) -> bool:
        """Return whether it goes wrong now, using up a command."""
        if self._armed[name] > 0:
            self._armed[name] -= 1
            return True
        chance = self._chances.get(name, 0.0)
        return chance > 0 and self._rng.random() < chance

    def _check(self, name: str) -> str:
        if name not in self.known:
            raise ValueError(f"no fault {name!r}; known: {', '.join(sorted(self.known))}")
        return name


class FakeCloud(ABC):
    """A provider on loopback that keeps a bill; subclasses speak one provider's language."""

    name: ClassVar[str]
    faults_known: ClassVar[Mapping[str, str]] = COMMON_FAULTS

    def __init__(
        self,
        *,
        clock: Clock,
        key: str = "fake-key",
        seed: int = 0,
        machines: Machines | None = None,
        boot_s: float = 30.0,
    ) -> None:
        self.clock = clock
        self._born_s = clock.time() - clock.monotonic()
        self.key = key
        """Change it and the old one is refused from then on."""
        self.boot_s = boot_s
        self.listing_lag_s = 20.0
        """How late a listing is when it is late."""
        self.balance_usd = 100.0
        self.enforces_pace = False
        """Answer 429 to whoever calls faster than the provider allows."""
        self.rng = random.Random(seed)  # noqa: S311 - a simulation, repeatable
        self.faults = Faults(self.rng, self.faults_known)
        self.create_faults: list[str] = []
        """What goes wrong with the create calls to come, one each."""
        self.rentals: dict[str, Rental] = {}
        self.calls: list[str] = []
        """Method and path of every call."""
        self.num_rate_limited = 0
        self.num_creates = 0
        """Create calls that arrived, whatever came of them."""
        self.before_call: Callable[[], None] = _nothing
        """Runs before every call; raising here is a crash of the caller."""
        self.after_call: Callable[[], None] = _nothing
        """Runs when a call is done and its answer has not arrived yet."""
        self.machines = machines
        self._last_call_s: dict[str, float] = {}
        self._lock = threading.RLock()

    @abstractmethod
    def route(self, request: Request) -> Reply:
        """Answer a call that nothing went wrong with on the way."""

    @abstractmethod
    def too_many(self, request: Request) -> Reply:
        """Answer a call that came too soon."""

    @abstractmethod
    def broken(self) -> Reply:
        """Answer as the provider does when it fails on its own side."""

    @abstractmethod
    def plant(self, *, label: str) -> str:
        """Have a machine that was rented some other way, and return its id."""

    def is_create(self, request: Request) -> bool:
        """Return whether a call makes a machine."""
        return False

    def pace_of(self, request: Request) -> tuple[str, float] | None:
        """Return a call's lane and the seconds that must lie between two calls in it."""
        return None

    def now_s(self) -> float:
        """Return the provider's own Unix time, which does not jump when ours does."""
        return self._born_s + self.clock.monotonic()

    def billing(self) -> list[Rental]:
        """Return the machines that cost money now."""
        with self._lock:
            self.advance()
            return [rental for rental in self.rentals.values() if rental.ended_at is None]

    def bill_usd(self) -> float:
        """Return what all machines have cost so far."""
        now_s = self.now_s()
        with self._lock:
            return sum(
                rental.dph * ((rental.ended_at or now_s) - rental.created_at) / 3600
                for rental in self.rentals.values()
            )

    def advance(self) -> None:  # noqa: B027 - most fakes have nothing to do
        """Let happen what time alone brings: ends of contracts, terminations that take a while."""

    def answer(self, request: Request) -> Reply:
        """Answer one call, with whatever goes wrong."""
        self.before_call()
        with self._lock:
            self.calls.append(f"{request.method} {request.path}")
            self.advance()
            reply = self._answer(request)
        self.after_call()
        return reply

    def close(self) -> None:
        """End the machines behind."""
        if self.machines is not None:
            for rental in self.rentals.values():
                self.machines.remove(rental.instance_id)

    def _answer(self, request: Request) -> Reply:
        if self.is_create(request):
            self.num_creates += 1
            if self.create_faults:
                self.faults.arm(self.create_faults.pop(0))
        if self.faults.strikes("lost-request"):
            return Reply(is_lost=True)
        if self.faults.strikes("rate-limit") or self.is_too_soon(request):
            self.num_rate_limited += 1
            return self.too_many(request)
        if self.faults.strikes("server-error"):
            return self.broken()
        reply = self.route(request)
        if self.is_create(request) and self.faults.strikes("error-but-created"):
            return self.broken()
        return self._spoil(reply)

    def _spoil(self, reply: Reply) -> Reply:
        if self.faults.strikes("lost-answer"):
            return Reply(is_lost=True)
        if self.faults.strikes("html"):
            return Reply(body=_HTML, content_type="text/html")
        if self.faults.strikes("half-body"):
            return Reply(status=reply.status, body=reply.body, is_half=True)
        if self.faults.strikes("slow-body"):
            return Reply(status=reply.status, body=reply.body, is_slow=True)
        return reply

    def is_too_soon(self, request: Request) -> bool:
        """Return whether a call comes before the provider allows the next."""
        pace = self.pace_of(request) if self.enforces_pace else None
        if pace is None:
            return False
        lane, interval_s = pace
        now_s = self.clock.monotonic()
        last_s = self._last_call_s.get(lane)
        if last_s is not None and now_s - last_s < interval_s - 1e-6:
            return True
        self._last_call_s[lane] = now_s
        return False

    def open_rental(self, instance_id: str, *, label: str, dph: float) -> Rental:
        """Begin a bill, with what the faults of a new machine have in store for it."""
        now_s = self.now_s()
        is_late = self.faults.strikes("late-listing")
        rental = Rental(
            instance_id=instance_id,
            label=label,
            dph=dph,
            created_at=now_s,
            started_at=now_s,
            boots=not self.faults.strikes("never-boots"),
            listed_from_s=now_s + (self.listing_lag_s if is_late else 0.0),
        )
        self.rentals[instance_id] = rental
        return rental

    def put_gpus(self, rental: Rental, name: str, *, count: int, memory_mb: float) -> None:
        """Put GPUs into a new machine, or what the faults have in store instead."""
        if self.faults.strikes("less-memory"):
            memory_mb /= 2
        rental.gpus = FakeGpus(
            name=name,
            count=count - self.faults.strikes("missing-gpu"),
            memory_mb=round(memory_mb),
            disk_gb=10_000,
            is_dead=self.faults.strikes("dead-gpu"),
        )

    def close_rental(self, rental: Rental) -> None:
        """End a bill for good."""
        if rental.ended_at is None:
            rental.ended_at = self.now_s()
        if self.machines is not None:
            self.machines.remove(rental.instance_id)

    def age_s(self, rental: Rental) -> float:
        """Return how long ago it was last told to run."""
        return self.now_s() - rental.started_at

    def is_up(self, rental: Rental) -> bool:
        """Return whether it has booted and not been stopped since."""
        is_running = rental.boots and rental.boot_failure is None and not rental.is_stopped
        return is_running and self.age_s(rental) >= self.boot_s

    def address_of(self, rental: Rental) -> tuple[str, int]:
        """Return where its sshd is: a real one, or an address that nobody has."""
        if self.machines is None:
            return "127.0.0.1", 22
        if rental.gpus is not None and isinstance(self.machines, SupportsGpus):
            self.machines.equip(rental.instance_id, rental.gpus)
        environ = self.machine_environ(rental)
        return self.machines.start(rental.instance_id, rental.public_keys, environ=environ)

    def published(self, rental: Rental, port: int) -> tuple[str, int]:
        """Return where a machine's port is reached: for real, or where nobody answers."""
        if self.machines is not None and isinstance(self.machines, SupportsPublishing):
            return self.machines.publish(rental.instance_id, port)
        return "127.0.0.1", 40_000 + port % 20_000

    def machine_environ(self, rental: Rental) -> Mapping[str, str]:
        """Return what the provider puts into a machine's environment."""
        return {}

    def halt(self, rental: Rental) -> None:
        """Stop a machine that can be started again."""
        rental.is_stopped = True
        if self.machines is not None:
            self.machines.stop(rental.instance_id)

    def resume(self, rental: Rental) -> None:
        """Start a stopped machine."""
        if rental.is_stopped:
            rental.is_stopped = False
            rental.started_at = self.now_s()


class FakeTransport(httpx.BaseTransport):
    """Carries requests to a fake of the same process, so that a test costs no time."""

    def __init__(self, fake: FakeCloud) -> None:
        self._fake = fake

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer, or break the connection."""
        reply = self._fake.answer(
            Request(
                method=request.method,
                path=request.url.path,
                query=dict(parse_qsl(request.url.query.decode())),
                headers={name.lower(): value for name, value in request.headers.items()},
                body=request.read(),
            )
        )
        if reply.is_lost:
            raise httpx.ReadError("connection reset by peer", request=request)
        headers = {"Content-Type": reply.content_type, **reply.headers}
        if reply.is_slow:
            stream = _SlowStream(reply.content, self._fake.clock)
            return httpx.Response(reply.status, headers=headers, stream=stream)
        return httpx.Response(reply.status, headers=headers, content=reply.content)


class _SlowStream(httpx.SyncByteStream):
    def __init__(self, content: bytes, clock: Clock) -> None:
        self._content = content
        self._clock = clock

    def __iter__(self) -> Iterator[bytes]:
        for place in range(len(self._content)):
            self._clock.sleep(_SLOW_STEP_S)
            yield self._content[place : place + 1]


def _nothing() -> None:
    """Do nothing."""
