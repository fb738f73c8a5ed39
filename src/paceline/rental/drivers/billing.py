"""Asks providers what machines have really cost, and puts it beside our own reckoning."""

from collections.abc import Sequence

from paceline.core.errors import PacelineError
from paceline.rental.backends.protocol import SupportsActualCost
from paceline.rental.costs import Billed
from paceline.rental.drivers.parts import RentalParts
from paceline.rental.records import Machine


def billed(parts: RentalParts, machines: Sequence[Machine]) -> list[Billed]:
    """Return both sums for every machine that was made; a provider that fails is a note."""
    now_s = parts.clock.time()
    return [_billed(parts, machine, now_s) for machine in machines if machine.instance is not None]


def _billed(parts: RentalParts, machine: Machine, now_s: float) -> Billed:
    theirs_usd, note = None, ""
    try:
        backend = parts.backend(machine.backend)
        if isinstance(backend, SupportsActualCost):
            theirs_usd = backend.actual_cost_usd(machine.handle)
            note = "" if theirs_usd is not None else "no entry yet; books may be a day late"
        else:
            note = f"{machine.backend} does not tell"
    except PacelineError as exc:
        note = f"could not be asked: {exc}"
    return Billed(
        label=machine.label,
        backend=machine.backend,
        ours_usd=machine.cost_usd(now_s=now_s),
        theirs_usd=theirs_usd,
        note=note,
    )
