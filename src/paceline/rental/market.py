"""Ask many backends one thing at once; one that fails or hangs costs only its own answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread
from typing import Generic, TypeVar

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.rental.backends.protocol import BackendAdapter, SupportsCredentials
from paceline.rental.catalogue import parse_target
from paceline.rental.errors import Silence
from paceline.rental.model import CredentialReport, Offer, OfferConstraints
from paceline.rental.plan import BackendAnswer, plan_attempts, silence_of

NUM_OFFERS_MAX = 10_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[_T]):
    """What one backend answered, or why it did not."""

    backend: str
    value: _T | None
    failure: Exception | None
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Why a backend is not among the offers."""

    backend: str
    message: str
    silence: Silence

    @property
    def is_failure(self) -> bool:
        """Return whether it did not say what it has."""
        return self.silence is not Silence.NOTHING_FITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What everybody has, cheapest first, and who has nothing to show."""

    offers: tuple[Offer, ...]
    notes: tuple[Note, ...]
    wall_s: Mapping[str, float]


def ask_all(
    names: Sequence[str], ask: Callable[[str], _T], *, clock: Clock, timeout_s: float
) -> list[Answer[_T]]:
    """Return every backend's answer in the order of ``names``, after at most ``timeout_s``.

    Whoever has not answered by then goes on in a thread that ends with the process.
    """
    begun_s = clock.monotonic()
    inbox: Queue[Answer[_T]] = Queue()

    def work(name: str) -> None:
        value: _T | None = None
        failure: Exception | None = None
        try:
            value = ask(name)
        except Exception as exc:  # noqa: BLE001 - adapters of others may raise anything
            failure = exc
        wall_s = clock.monotonic() - begun_s
        inbox.put(Answer(backend=name, value=value, failure=failure, wall_s=wall_s))

    for name in names:
        Thread(target=work, args=(name,), name=f"ask-{name}", daemon=True).start()
    found: dict[str, Answer[_T]] = {}
    try:
        while len(found) < len(names):
            left_s = timeout_s - (clock.monotonic() - begun_s)
            answer = inbox.get(timeout=max(0.0, left_s))
            found[answer.backend] = answer
    except Empty:
        pass  # the rest is late
    late = TimeoutError(f"did not answer within {timeout_s:g} s")
    return [
        found.get(name) or Answer(backend=name, value=None, failure=late, wall_s=timeout_s)
        for name in names
    ]


def survey(
    names: Sequence[str],
    constraints: OfferConstraints,
    *,
    backend: Callable[[str], BackendAdapter],
    clock: Clock,
    timeout_s: float,
) -> Survey:
    """Ask all backends for offers at once. Raises UsageError for a target that is none."""
    target = parse_target(constraints.gpu_target)
    answers = ask_all(
        names,
        lambda name: backend(name).search_offers(constraints),
        clock=clock,
        timeout_s=timeout_s,
    )
    plan = plan_attempts(
        [BackendAnswer(backend=one.backend, offers=tuple(one.value or ())) for one in answers],
        constraints=constraints,
        num_gpus=target.count,
        num_max=NUM_OFFERS_MAX,
    )
    have = {offer.backend for offer in plan.attempts}
    unfit = {left.backend: ", ".join(left.reasons) for left in plan.passed_over}
    notes = [
        _note(one, unfit.get(one.backend, "has no offer"))
        for one in answers
        if one.backend not in have
    ]
    return Survey(
        offers=plan.attempts,
        notes=tuple(notes),
        wall_s={one.backend: one.wall_s for one in answers},
    )


def check_all(
    names: Sequence[str],
    *,
    backend: Callable[[str], BackendAdapter],
    clock: Clock,
    timeout_s: float,
) -> list[tuple[str, CredentialReport]]:
    """Ask all backends at once whether they let us in; one that needs nothing always does."""

    def check(name: str) -> CredentialReport:
        adapter = backend(name)
        if isinstance(adapter, SupportsCredentials):
            return adapter.check()
        return CredentialReport(found_in="nothing is needed", is_valid=True)

    return [
        (
            one.backend,
            one.value or CredentialReport(found_in=None, is_valid=False, advice=_say(one)),
        )
        for one in ask_all(names, check, clock=clock, timeout_s=timeout_s)
    ]


def _note(answer: Answer[list[Offer]], unfit: str) -> Note:
    if answer.failure is None:
        return Note(backend=answer.backend, message=unfit, silence=Silence.NOTHING_FITS)
    silence = silence_of(answer.failure)
    return Note(backend=answer.backend, message=_say(answer), silence=silence)


def _say(answer: Answer[_T]) -> str:
    failure = answer.failure
    if failure is None:
        return ""
    if isinstance(failure, PacelineError | TimeoutError):
        return str(failure).removeprefix(f"{answer.backend}: ")
    return f"{type(failure).__name__}: {failure}; this is a bug in the backend {answer.backend}"
