"""Which offers to try, in which order, and what to do when one fails. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.rental.errors import NoOffersError, ProvisionError
from paceline.rental.model import Offer, OfferConstraints

NUM_ATTEMPTS_MAX = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendAnswer:
    """What one backend said when it was asked for offers."""

    backend: str
    offers: tuple[Offer, ...] = ()
    refusal: str | None = None
    """Why there are none."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RentPlan:
    """Offers in the order in which they are tried, and what was left out."""

    attempts: tuple[Offer, ...]
    passed_over: tuple[PassedOver, ...]

    def explain(self) -> str:
        """Return one line per thing that was passed over."""
        return "; ".join(
            f"{' '.join(filter(None, (left.backend, left.offer_id)))}: {', '.join(left.reasons)}"
            for left in self.passed_over
        )


class NextStep(StrEnum):
    """What follows a create call that raised."""

    NEXT_OFFER = "next_offer"
    """Nothing was created: try the next."""
    CLEAN_UP = "clean_up"
    """Something was created: destroy it, then try the next."""
    LOOK_AND_STOP = "look_and_stop"
    """Nobody knows: look for the label; do not create again."""


def plan_attempts(
    answers: Sequence[BackendAnswer],
    *,
    constraints: OfferConstraints,
    num_gpus: int,
    failures: Iterable[PastFailure] = (),
    num_max: int = NUM_ATTEMPTS_MAX,
) -> RentPlan:
    """Return what to try, cheapest first.

    Of equal prices the backend that comes first in ``answers`` wins, then the more reliable
    machine, then the backend's own order. What backends return is checked again, because
    not every adapter filters everything. At most ``num_max`` are tried.
    """
    reasons_by_offer = {(past.backend, past.offer_id): past.reason for past in failures}
    fitting: list[tuple[float, int, float, int, Offer]] = []
    passed_over: list[PassedOver] = []
    for rank, answer in enumerate(answers):
        if not answer.offers:
            reason = answer.refusal or "has no offer"
            passed_over.append(PassedOver(backend=answer.backend, offer_id=None, reasons=(reason,)))
        for place, offer in enumerate(answer.offers):
            reasons = _objections(offer, constraints, num_gpus)
            past = reasons_by_offer.get((answer.backend, offer.id))
            if past is not None:
                reasons.append(f"failed before: {past}")
            if reasons:
                passed_over.append(_pass_over(offer, reasons))
            else:
                fitting.append((offer.dph, rank, -offer.reliability, place, offer))
    fitting.sort(key=lambda entry: entry[:4])
    attempts = tuple(entry[4] for entry in fitting)
    surplus = [_pass_over(offer, ["others come first"]) for offer in attempts[num_max:]]
    return RentPlan(attempts=attempts[:num_max], passed_over=(*passed_over, *surplus))


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


def _objections(offer: Offer, c: OfferConstraints, num_gpus: int) -> list[str]:
    """Return which constraints an offer fails, each with by how much."""
    checks = (
        (offer.num_gpus != num_gpus, f"has {offer.num_gpus} GPUs, {num_gpus} are asked for"),
        (
            c.max_dph is not None and not offer.dph <= c.max_dph,
            f"costs {offer.dph:g} $/h, the limit is {c.max_dph} $/h",
        ),
        (
            offer.disk_space_gb < c.min_disk_gb,
            f"has {offer.disk_space_gb:g} GB of disk, {c.min_disk_gb} GB are asked for",
        ),
        (not offer.dph >= 0, f"names a price of {offer.dph} $/h"),
    )
    return [text for is_failed, text in checks if is_failed]


def _pass_over(offer: Offer, reasons: list[str]) -> PassedOver:
    return PassedOver(backend=offer.backend, offer_id=offer.id, reasons=tuple(reasons))
