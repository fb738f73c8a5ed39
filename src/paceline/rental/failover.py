"""What a failed attempt means: go on or stop, and what is not to be tried again for how long. Pure.

A failure of the market (taken, sold out) says nothing about the next offer, one of our request
says all about it, one of the account rules out a backend, and one of a machine that was made
speaks against its host. `RULES` is the whole policy.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.rental.errors import (
    AmbiguousError,
    AuthError,
    BackendError,
    BalanceError,
    BootFailedError,
    HostKeyChangedError,
    IllegalMoveError,
    InstanceNotFoundError,
    NoOffersError,
    NotAcceptedError,
    ProvisionError,
    RateLimitError,
    RequestError,
    Silence,
    Silent,
    SshKeyError,
    SshUnreachableError,
)
from paceline.rental.model import Offer

_MINUTE_S: Final = 60.0
_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0
NUM_BAD_HOSTS: Final = 3
"""So many machines of one kind that failed in one place, and the place is passed over too."""
_BAD_PLACE_S: Final = _HOUR_S
BUSY_S_MAX: Final = _MINUTE_S
"""So long is a backend waited for that was called too often, where another could be tried."""
_BAD_IMAGE: Final = re.compile(
    r"manifest unknown|repository does not exist|no such image|pull access denied",
    re.IGNORECASE,
)


class FailureKind(StrEnum):
    """What kept an offer from becoming a machine that can be used."""

    CAPACITY = "capacity"
    """Taken, or sold out."""
    BUSY = "busy"
    """Its backend asks us to call less often."""
    ACCOUNT = "account"
    """Its backend refuses us: key, balance, quota."""
    REQUEST = "request"
    """What we ask for is wrong, wherever it is asked: an image that is none, our own key."""
    UNSURE = "unsure"
    """The create call was not answered; nothing came of it, as was seen since."""
    BOOT_FAILED = "boot_failed"
    """Its backend says that it will never run."""
    BOOT_LATE = "boot_late"
    """It did not run in time."""
    VANISHED = "vanished"
    """It went away while it started."""
    ACCESS = "access"
    """It runs and does not let us in."""
    REJECTED = "rejected"
    """It runs and is not what was offered."""


class Scope(StrEnum):
    """How much is passed over."""

    OFFER = "offer"
    HOST = "host"
    PLACE = "place"
    """A kind of machine in a region."""
    BACKEND = "backend"


class NextMove(StrEnum):
    """What follows a failed attempt."""

    NEXT_OFFER = "next_offer"
    NEXT_BACKEND = "next_backend"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one kind of failure leads to."""

    move: NextMove
    scope: Scope
    block_s: float
    """For how long; zero is for this request alone."""
    unnamed_s: float = 15 * _MINUTE_S
    """For the offer, where the backend does not tell which host is behind it."""
    is_passing: bool = True
    """Waiting may mend it."""


RULES: Final = MappingProxyType(
    {
        FailureKind.CAPACITY: Rule(
            move=NextMove.NEXT_OFFER, scope=Scope.OFFER, block_s=_MINUTE_S / 2
        ),
        FailureKind.BUSY: Rule(move=NextMove.NEXT_BACKEND, scope=Scope.BACKEND, block_s=0.0),
        FailureKind.ACCOUNT: Rule(
            move=NextMove.NEXT_BACKEND, scope=Scope.BACKEND, block_s=0.0, is_passing=False
        ),
        FailureKind.REQUEST: Rule(
            move=NextMove.STOP, scope=Scope.OFFER, block_s=0.0, is_passing=False
        ),
        FailureKind.UNSURE: Rule(
            move=NextMove.NEXT_OFFER, scope=Scope.OFFER, block_s=2 * _MINUTE_S
        ),
        FailureKind.BOOT_FAILED: Rule(move=NextMove.NEXT_OFFER, scope=Scope.HOST, block_s=_DAY_S),
        FailureKind.BOOT_LATE: Rule(
            move=NextMove.NEXT_OFFER, scope=Scope.HOST, block_s=6 * _HOUR_S
        ),
        FailureKind.VANISHED: Rule(
            move=NextMove.NEXT_OFFER, scope=Scope.HOST, block_s=_HOUR_S, unnamed_s=5 * _MINUTE_S
        ),
        FailureKind.ACCESS: Rule(move=NextMove.NEXT_OFFER, scope=Scope.HOST, block_s=_DAY_S),
        FailureKind.REJECTED: Rule(move=NextMove.NEXT_OFFER, scope=Scope.HOST, block_s=7 * _DAY_S),
    }
)

OF_MACHINES: Final = frozenset(
    {
        FailureKind.BOOT_FAILED,
        FailureKind.BOOT_LATE,
        FailureKind.VANISHED,
        FailureKind.ACCESS,
        FailureKind.REJECTED,
    }
)
"""Kinds that come after a machine was made, and cost something."""

_BY_CAUSE: Final = (
    (AuthError, FailureKind.ACCOUNT),
    (BalanceError, FailureKind.ACCOUNT),
    (RateLimitError, FailureKind.BUSY),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An offer that was tried and did not become a machine, as the history of a failure tells."""

    backend: str
    offer_id: str
    kind: FailureKind
    reason: str
    cost_usd: float = 0.0
    times: int = 1

    def __str__(self) -> str:
        """Return one line of the history."""
        often = f"{self.times} times, " if self.times > 1 else ""
        what = f"{self.backend} {self.offer_id}: {self.kind}"
        return f"{what}, {often}{self.cost_usd:.3f} USD: {self.reason}"


def with_attempt(history: Sequence[Attempt], new: Attempt) -> list[Attempt]:
    """Return the history with one attempt more; the same failure of one offer is one line."""

    def key(attempt: Attempt) -> tuple[str, str, FailureKind]:
        return attempt.backend, attempt.offer_id, attempt.kind

    same = next((old for old in history if key(old) == key(new)), None)
    if same is None:
        return [*history, new]
    both = replace(new, cost_usd=same.cost_usd + new.cost_usd, times=same.times + new.times)
    return [*(old for old in history if old is not same), both]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Something that is not tried until a time has come."""

    scope: Scope
    backend: str
    name: str
    """Offer id, host, place; empty for a whole backend."""
    place: str
    kind: FailureKind
    reason: str
    until_s: float
    """Unix seconds."""

    def covers(self, offer: Offer, *, now_s: float) -> bool:
        """Return whether an offer is not to be tried now."""
        if now_s >= self.until_s or offer.backend != self.backend:
            return False
        return self.name == _name_in(self.scope, offer)


def kind_of(failure: Exception) -> FailureKind | None:
    """Return what a failed attempt shows; None for what nobody thought of, which is not ours.

    Only to be asked where nothing is left of the attempt: whether something was created is for
    ``plan.after_failure`` to say.
    """
    if isinstance(failure, ProvisionError):
        return _of_create(failure)
    if isinstance(failure, BootFailedError) and _BAD_IMAGE.search(str(failure)):
        return FailureKind.REQUEST
    kinds: tuple[tuple[type[Exception], FailureKind], ...] = (
        (NoOffersError, FailureKind.CAPACITY),
        (NotAcceptedError, FailureKind.REJECTED),
        (BootFailedError, FailureKind.BOOT_FAILED),
        (DeadlineExceededError, FailureKind.BOOT_LATE),
        (InstanceNotFoundError, FailureKind.VANISHED),
        (SshKeyError, FailureKind.REQUEST),
        (SshUnreachableError, FailureKind.ACCESS),
        (HostKeyChangedError, FailureKind.ACCESS),
        (AmbiguousError, FailureKind.UNSURE),
        *_BY_CAUSE,
    )
    return next((kind for cls, kind in kinds if isinstance(failure, cls)), None)


def is_refused(
    history: Iterable[Attempt], silent: Iterable[Silent], *, backends: Iterable[str]
) -> bool:
    """Return whether each backend refuses us, when asked what it has or when ordered from."""
    kinds: dict[str, set[FailureKind]] = {}
    for attempt in history:
        kinds.setdefault(attempt.backend, set()).add(attempt.kind)
    refusing = {name for name, found in kinds.items() if found == {FailureKind.ACCOUNT}}
    refusing |= {one.backend for one in silent if one.silence is Silence.REFUSED}
    return refusing >= set(backends)


def rest_s(failure: PacelineError, *, patience_s: float) -> float | None:
    """Return how long to wait before a refused create is made again; None: do something else.

    Only for a provider that was called too often, and only where it is sure that nothing was made:
    another process of the same account may have been a moment earlier.
    """
    cause = failure.__cause__
    if not isinstance(failure, ProvisionError) or failure.leaked is not None:
        return None
    if not isinstance(cause, RateLimitError) or cause.rest_s > patience_s:
        return None
    return cause.rest_s


def may_pass(failure: BackendError) -> bool:
    """Return whether a machine that starts may be waited for although asking about it failed."""
    passing = (None, FailureKind.UNSURE, FailureKind.BUSY)
    return not isinstance(failure, IllegalMoveError) and kind_of(failure) in passing


def _of_create(failure: ProvisionError) -> FailureKind:
    cause = failure.__cause__
    if isinstance(cause, RequestError) and failure.is_backend_wide:
        return FailureKind.REQUEST
    for cls, kind in _BY_CAUSE:
        if isinstance(cause, cls):
            return kind
    return FailureKind.ACCOUNT if failure.is_backend_wide else FailureKind.CAPACITY


def block_for(kind: FailureKind, offer: Offer, *, reason: str, now_s: float) -> Block:
    """Return what a failure speaks against."""
    rule = RULES[kind]
    scope, for_s = rule.scope, rule.block_s
    if scope is Scope.HOST and not offer.host:
        scope, for_s = Scope.OFFER, rule.unnamed_s
    return Block(
        scope=scope,
        backend=offer.backend,
        name=_name_in(scope, offer),
        place=place_of(offer),
        kind=kind,
        reason=reason,
        until_s=now_s + for_s,
    )


def bad_place(blocks: Iterable[Block], new: Block, *, now_s: float) -> Block | None:
    """Return a block of the whole place when too many machines there have failed of late."""
    if new.kind not in OF_MACHINES or not new.place:
        return None
    names = {
        block.name
        for block in (*blocks, new)
        if block.kind in OF_MACHINES
        and (block.backend, block.place) == (new.backend, new.place)
        and now_s < block.until_s
        and block.scope in (Scope.HOST, Scope.OFFER)
    }
    if len(names) < NUM_BAD_HOSTS:
        return None
    return Block(
        scope=Scope.PLACE,
        backend=new.backend,
        name=new.place,
        place=new.place,
        kind=new.kind,
        reason=f"{len(names)} machines there failed, the last: {new.reason}",
        until_s=now_s + _BAD_PLACE_S,
    )


def place_of(offer: Offer) -> str:
    """Return the kind of machine and the region, as one name."""
    return f"{offer.gpu_name}-{offer.num_gpus}x in {offer.geolocation}"


def _name_in(scope: Scope, offer: Offer) -> str:
    match scope:
        case Scope.OFFER:
            return offer.id
        case Scope.HOST:
            return offer.host
        case Scope.PLACE:
            return place_of(offer)
        case Scope.BACKEND:
            return ""
