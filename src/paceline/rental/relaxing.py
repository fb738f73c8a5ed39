"""Which constraint keeps an offer out, by how much, and what giving way would bring. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline.rental.model import Offer, OfferConstraints


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """One thing that is wrong with an offer."""

    text: str
    constraint: str = ""
    """The name that a job file has for it; empty where nothing can be given way."""
    needed: float = 0.0
    """What the constraint would have to be for this offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The nearest that one constraint would have to give way, and what that brings."""

    constraint: str
    needed: float
    backend: str
    offer_id: str
    dph: float
    saves_dph: float | None
    """Against the first offer that fits; None where none does."""

    def __str__(self) -> str:
        """Return it as a plan tells it."""
        offer = f"{self.backend} {self.offer_id} at {self.dph:.3f} $/h"
        if self.saves_dph is not None:
            offer += f" ({-self.saves_dph:+.3f} $/h)"
        return f"{offer} with {self.constraint} {self.needed:g}"


def wide(c: OfferConstraints) -> OfferConstraints:
    """Return the constraints with which a backend also shows what does not fit."""
    return replace(
        c, min_inet_down_mbps=0, min_reliability=0.0, min_duration_days=0.0, max_dph=None
    )


def objections(offer: Offer, c: OfferConstraints, num_gpus: int) -> list[Objection]:
    """Return what is wrong with an offer that its backend says fits."""
    checks = (
        (
            offer.num_gpus != num_gpus,
            Objection(text=f"has {offer.num_gpus} GPUs, {num_gpus} are asked for"),
        ),
        (
            c.max_dph is not None and not offer.dph <= c.max_dph,
            Objection(
                text=f"costs {offer.dph:g} $/h, the limit is {c.max_dph} $/h",
                constraint="max_dph",
                needed=offer.dph,
            ),
        ),
        (
            offer.disk_space_gb < c.min_disk_gb,
            Objection(
                text=f"has {offer.disk_space_gb:g} GB of disk, {c.min_disk_gb} GB are asked for",
                constraint="disk_gb",
                needed=offer.disk_space_gb,
            ),
        ),
        (not offer.dph >= 0, Objection(text=f"names a price of {offer.dph} $/h")),
    )
    return [objection for is_failed, objection in checks if is_failed]


def wider_objections(offer: Offer, c: OfferConstraints, num_gpus: int) -> list[Objection]:
    """Return what is wrong with an offer that its backend shows only when asked for anything."""
    checks = (
        (
            not offer.reliability >= c.min_reliability,
            Objection(
                text=f"reliability {offer.reliability:g} < {c.min_reliability:g}",
                constraint="min_reliability",
                needed=offer.reliability,
            ),
        ),
        (
            not offer.inet_down_mbps >= c.min_inet_down_mbps,
            Objection(
                text=f"{offer.inet_down_mbps:g} Mbit/s < {c.min_inet_down_mbps:g} Mbit/s",
                constraint="min_inet_mbps",
                needed=offer.inet_down_mbps,
            ),
        ),
    )
    found = objections(offer, c, num_gpus)
    found += [objection for is_failed, objection in checks if is_failed]
    unsaid = f"not offered for what is asked, such as {c.min_duration_days:g} days"
    return found or [Objection(text=unsaid)]


def nearest(
    rejected: Iterable[tuple[Offer, list[Objection]]], *, first_dph: float | None
) -> tuple[Relaxation, ...]:
    """Return per constraint the offer that the least giving way would bring, where that pays.

    Only offers that fail one constraint alone are looked at; a price limit has to rise, the others
    have to fall. While something fits, only what is cheaper is worth a word.
    """
    best: dict[str, Relaxation] = {}
    for offer, found in rejected:
        if len(found) != 1 or not found[0].constraint:
            continue
        if first_dph is not None and offer.dph >= first_dph:
            continue
        [one] = found
        relaxation = Relaxation(
            constraint=one.constraint,
            needed=one.needed,
            backend=offer.backend,
            offer_id=offer.id,
            dph=offer.dph,
            saves_dph=None if first_dph is None else first_dph - offer.dph,
        )
        old = best.get(one.constraint)
        if old is None or _is_nearer(relaxation, old):
            best[one.constraint] = relaxation
    return tuple(best[name] for name in sorted(best))


def _is_nearer(new: Relaxation, old: Relaxation) -> bool:
    if new.constraint == "max_dph":
        return new.needed < old.needed
    return (new.needed, -new.dph) > (old.needed, -old.dph)
