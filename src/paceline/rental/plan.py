"""Which offers to try, in which order, and what to do when one fails. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.core.errors import PreflightError, UsageError
from paceline.core.text import told_by
from paceline.rental.errors import (
    AllRefusedError,
    AttemptsFailedError,
    AuthError,
    BalanceError,
    NeverReadyError,
    NobodyAnsweredError,
    NoOffersError,
    ProvisionError,
    RequestError,
    Silence,
    Silent,
)
from paceline.rental.failover import OF_MACHINES, Attempt, Block, is_refused
from paceline.rental.hosts import HostRecord, first_hour_usd
from paceline.rental.model import Offer, OfferConstraints
from paceline.rental.relaxing import (
    Objection,
    Relaxation,
    nearest,
    objections,
    wider_objections,
)

NUM_ATTEMPTS_MAX = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class RentRequest:
    """One machine that a role of a run needs."""

    run_id: str
    role: str
    index: int
    gpu: str
    """Canonical target, ``h100-1x``."""
    backends: tuple[str, ...]
    """Where it may be rented; at equal price the first one wins."""
    min_disk_gb: int
    max_dph: float | None
    image: str
    ssh_pubkey_path: Path
    boot_timeout_s: int = 1200
    is_spot: bool = False
    """It may be taken back at any moment, and is cheap for it."""
    min_reliability: float = 0.97
    min_inet_down_mbps: int = 500
    net_floor_mbps: float | None = 0.0
    """What a machine must download at to be taken; None: by what its offer claims; 0: anything."""
    hard_usd: float | None = None
    """What the whole run may cost; no attempt is begun that could cost more."""
    retry_for_s: float | None = None
    """Where nothing can be had now, ask again for so long; None: once."""
    ports: tuple[int, ...] = ()
    """What the world should reach of it beside ssh, where its backend can do that."""

    @property
    def slot(self) -> str:
        """Which machine of the run it is for."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendAnswer:
    """What one backend said when it was asked for offers."""

    backend: str
    offers: tuple[Offer, ...] = ()
    refusal: str | None = None
    """Why there are none."""
    silence: Silence = Silence.NOTHING_FITS
    """The same as a kind."""
    others: tuple[Offer, ...] = ()
    """What it has beside, and what does not fit; to be told about, never to be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFailure:
    """An offer that was tried and did not become a machine."""

    backend: str
    offer_id: str
    reason: str

    def __str__(self) -> str:
        """Return it as an error tells it."""
        return f"{self.backend} {self.offer_id}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """An offer, or a whole backend, that is not tried, and why."""

    backend: str
    offer_id: str | None
    """None: the backend had nothing at all."""
    reasons: tuple[str, ...]
    dph: float | None = None
    silence: Silence | None = None
    """Why a whole backend had nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RentPlan:
    """Offers in the order in which they are tried, and what was left out."""

    attempts: tuple[Offer, ...]
    passed_over: tuple[PassedOver, ...]
    relaxations: tuple[Relaxation, ...] = ()
    """What giving way a little would bring, one per constraint."""
    is_hopeless: bool = False
    """Nothing is to be had, and waiting does not mend it."""

    @property
    def silent(self) -> tuple[Silent, ...]:
        """Return the backends that offer nothing, each with why."""
        return tuple(
            Silent(
                backend=left.backend,
                silence=left.silence,
                message=told_by(left.backend, ", ".join(left.reasons)),
            )
            for left in self.passed_over
            if left.silence is not None
        )

    def explain(self, *, failures: bool = True) -> str:
        """Return one line per thing that was passed over; or only what backends did answer."""
        return "; ".join(
            told_by(" ".join(filter(None, (left.backend, left.offer_id))), ", ".join(left.reasons))
            for left in self.passed_over
            if failures or left.silence in (None, Silence.NOTHING_FITS)
        )


def nothing_to_try(plan: RentPlan, *, who: str, gpu: str) -> NoOffersError:
    """Return the error of a plan without attempts: what was answered, and who did not answer.

    That nothing fits is only said of backends that were asked and answered.
    """
    failed = [one for one in plan.silent if one.silence is not Silence.NOTHING_FITS]
    why = "; ".join(one.message for one in failed)
    if plan.is_hopeless:
        text = f"{who}: every backend refuses us: {why}; mend that, or allow another backend"
        return AllRefusedError(text, backends=plan.silent)
    if {left.backend for left in plan.passed_over} <= {one.backend for one in failed}:
        return NobodyAnsweredError(
            f"{who}: nobody could say what there is of {gpu}: {why}; allow another backend, or "
            "wait for it with --retry-until-up",
            backends=plan.silent,
        )
    near = "".join(f"; nearest: {one}" for one in plan.relaxations)
    unasked = f". Without an answer: {why}" if failed else ""
    return NoOffersError(
        f"{who}: nothing on offer fits {gpu}: {plan.explain(failures=False)}{near}; relax the "
        f"role, allow another backend, or wait for it with --retry-until-up{unasked}",
        backends=plan.silent,
    )


def nothing_left(request: RentRequest, plan: RentPlan, history: Sequence[Attempt]) -> NoOffersError:
    """Return the error that tells of every attempt, one line each, with what it cost."""
    if not plan.attempts and not history:
        return nothing_to_try(plan, who=request.slot, gpu=request.gpu)
    tried = "".join(f"\n  {attempt}" for attempt in history) or " nothing"
    near = "; ".join(map(str, plan.relaxations))
    advice = f"Nearest: {near}. " if near else ""
    text = (
        f"{request.role} {request.index}: no {request.gpu} could be rented. Tried:{tried}\n"
        f"Passed over: {plan.explain() or 'nothing'}. {advice}Allow another backend, a higher "
        "price or less disk, or wait for it with --retry-until-up"
    )
    if any(attempt.kind in OF_MACHINES for attempt in history):
        return NeverReadyError(text)
    if is_refused(history, plan.silent, backends=request.backends):
        return AllRefusedError(
            f"{request.role} {request.index}: every backend refuses us. Tried:{tried}\n"
            "Mend that, or allow another backend",
            backends=plan.silent,
        )
    return AttemptsFailedError(text)


def silence_of(failure: Exception) -> Silence:
    """Return what it means that a backend failed when it was asked for offers."""
    if isinstance(failure, NoOffersError):
        return Silence.NOTHING_FITS
    if isinstance(failure, AuthError | BalanceError | RequestError | PreflightError | UsageError):
        return Silence.REFUSED
    return Silence.UNREACHABLE


class NextStep(StrEnum):
    """What follows a create call that raised."""

    NEXT_OFFER = "next_offer"
    """Nothing was created: try the next."""
    CLEAN_UP = "clean_up"
    """Something was created: destroy it, then try the next."""
    LOOK_AND_STOP = "look_and_stop"
    """Nobody knows: look for the label; do not create again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What is known of offers beside what their backends say."""

    failures: Sequence[PastFailure] = ()
    blocks: Sequence[Block] = ()
    hosts: Mapping[tuple[str, str], HostRecord] = field(default_factory=dict)
    now_s: float = 0.0

    def objections(self, offer: Offer) -> list[Objection]:
        """Return what speaks against an offer that fits."""
        said = [
            f"failed before: {past.reason}"
            for past in self.failures
            if (past.backend, past.offer_id) == (offer.backend, offer.id)
        ]
        said += [
            f"its {block.scope} is passed over for {block.until_s - self.now_s:.0f} s more: "
            f"{block.kind}: {block.reason}"
            for block in self.blocks
            if block.covers(offer, now_s=self.now_s)
        ]
        return [Objection(text=text) for text in said]


def plan_attempts(
    answers: Sequence[BackendAnswer],
    *,
    constraints: OfferConstraints,
    num_gpus: int,
    experience: Experience = Experience(),
    num_max: int = NUM_ATTEMPTS_MAX,
) -> RentPlan:
    """Return what to try, first what is likely to cost least in its first hour.

    Where nothing is known of the hosts that is the cheapest first. Of equal prices the backend
    that comes first in ``answers`` wins, then the more reliable machine, then the backend's own
    order. What backends return is checked again, because not every adapter filters everything.
    At most ``num_max`` are tried.
    """
    fitting: list[tuple[float, int, float, int, Offer]] = []
    rejected: list[tuple[Offer, list[Objection]]] = []
    for rank, answer in enumerate(answers):
        for place, offer in enumerate(answer.offers):
            found = objections(offer, constraints, num_gpus) + experience.objections(offer)
            if found:
                rejected.append((offer, found))
            else:
                usd = first_hour_usd(offer, experience.hosts, experience.now_s)
                fitting.append((usd, rank, -offer.reliability, place, offer))
        rejected += _others(answer, constraints, num_gpus)
    fitting.sort(key=lambda entry: entry[:4])
    attempts = tuple(entry[4] for entry in fitting)
    surplus = [_pass_over(offer, ["others come first"]) for offer in attempts[num_max:]]
    unfit = [_pass_over(offer, [one.text for one in found]) for offer, found in rejected]
    first_dph = attempts[0].dph if attempts else None
    return RentPlan(
        attempts=attempts[:num_max],
        passed_over=(*_silent(answers), *unfit, *surplus),
        relaxations=nearest(rejected, first_dph=first_dph),
        is_hopeless=bool(answers) and all(a.silence is Silence.REFUSED for a in answers),
    )


def _others(
    answer: BackendAnswer, c: OfferConstraints, num_gpus: int
) -> list[tuple[Offer, list[Objection]]]:
    taken = {offer.id for offer in answer.offers}
    return [
        (offer, wider_objections(offer, c, num_gpus))
        for offer in answer.others
        if offer.id not in taken
    ]


def _silent(answers: Iterable[BackendAnswer]) -> list[PassedOver]:
    return [
        PassedOver(
            backend=answer.backend,
            offer_id=None,
            reasons=(answer.refusal or "has no offer",),
            silence=answer.silence,
        )
        for answer in answers
        if not answer.offers
    ]


def after_failure(failure: Exception) -> NextStep:
    """Return what to do about a create call that raised ``failure``.

    Only what the contract calls sure is believed to have created nothing; that includes no
    timeout, no lost connection and no error that nobody thought of.
    """
    if isinstance(failure, ProvisionError):
        return NextStep.NEXT_OFFER if failure.leaked is None else NextStep.CLEAN_UP
    if isinstance(failure, NoOffersError):
        return NextStep.NEXT_OFFER
    return NextStep.LOOK_AND_STOP


def _pass_over(offer: Offer, reasons: list[str]) -> PassedOver:
    return PassedOver(
        backend=offer.backend, offer_id=offer.id, reasons=tuple(reasons), dph=offer.dph
    )
