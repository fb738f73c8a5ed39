"""The composition root of what needs no run: the real clock, and backends by name."""

from collections.abc import Sequence
from functools import cache

from paceline.rental.backends.registry import load_backend
from paceline.rental.market import Survey, check_all, survey
from paceline.rental.model import CredentialReport, OfferConstraints
from paceline.system import system_clock


def survey_offers(
    names: Sequence[str], constraints: OfferConstraints, *, timeout_s: float
) -> Survey:
    """Ask the backends named what they have. Raises UsageError for a target that is none."""
    return survey(
        names,
        constraints,
        backend=cache(lambda name: load_backend(name)()),
        clock=system_clock(),
        timeout_s=timeout_s,
    )


def check_credentials(
    names: Sequence[str], *, timeout_s: float
) -> list[tuple[str, CredentialReport]]:
    """Ask the backends named whether they let us in."""
    return check_all(
        names,
        backend=cache(lambda name: load_backend(name)()),
        clock=system_clock(),
        timeout_s=timeout_s,
    )
